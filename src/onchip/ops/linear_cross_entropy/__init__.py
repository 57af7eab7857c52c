r"""Linear layer and cross-entropy in one op; the [tokens, vocab] logits are never stored.

For token t with hidden state h_t, target y_t and temperature tau_t:

    a_tv  = (h_t . w_v + b_v) * logit_scale
    z_tv  = softcap * tanh(a_tv / softcap) / tau_t          (a_tv / tau_t without softcap)
    lse_t = log sum_v exp z_tv
    loss_t = (1 - eps) (lse_t - z_ty) + eps (lse_t - mean_v z_tv) + z_loss lse_t^2

with eps = label_smoothing, and with p = softmax(z), for an upstream gradient g_t of loss_t:

    d loss / d z_tv = g_t (p_tv (1 + 2 z_loss lse_t) - (1 - eps) [v = y_t] - eps / V)
    d z_tv / d a_tv = (1 - tanh(a_tv / softcap)^2) / tau_t

Sources: Liger Kernel (arXiv:2410.10989), for the loss over chunks of tokens; Cut Cross-Entropy (arXiv:2411.09009), for
recomputing from the log-sum-exp and for taking a tile's softmax in the epilogue of its product; Milakov and Gimelshein
(arXiv:1805.02867), for the running softmax; PaLM (arXiv:2204.02311), for z-loss; Gemma 2 (arXiv:2408.00118), for
softcap.

The computation is in `onchip.vocab`; docs/architecture.md shows what lives where.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from onchip.frontend.options import LossOptions, check_options
from onchip.frontend.warm_up import WarmUpCall, head, ids

OP = "linear_cross_entropy"
Strategy = Literal["auto", "stash", "recompute"]
STRATEGIES = get_args(Strategy)
Precision = Literal["full", "fp8"]
PRECISIONS = get_args(Precision)


@dataclass(frozen=True)
class LinearCrossEntropyOptions(LossOptions):
    """The options that are plain numbers, words and flags; making it checks them."""

    shift: bool = False
    strategy: str = "auto"
    precision: str = "full"

    def __post_init__(self) -> None:
        check_options(OP, self, strategy=STRATEGIES, precision=PRECISIONS)


CALLS = {
    "linear_cross_entropy": WarmUpCall(("hidden", "vocab"), lambda s, make: head(s, make) | {"target": ids(s, make)}),
}
