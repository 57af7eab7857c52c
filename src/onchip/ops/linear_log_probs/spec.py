"""What both front ends of linear_log_probs share: options, results and what shapes go together.  No framework."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from onchip.frontend.options import Shapes, check_head, check_options

OP = "linear_log_probs"


@dataclass(frozen=True)
class Options:
    """The options that are plain numbers, checked when made."""

    ignore_index: int = -100
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    entropy: bool = False
    lse: bool = False
    top1: bool = False
    mean_logits: bool = False
    log_sum_sq_probs: bool = False
    check_inputs: bool = False
    scratch_bytes: int | None = None
    # What an engine asks of the options of any loss.
    label_smoothing: ClassVar[float] = 0.0
    z_loss: ClassVar[float] = 0.0
    strategy: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        check_options(OP, self)


class LogProbs(NamedTuple):
    """What `linear_log_probs` returns if more than log_prob was asked for; None is what wasn't."""

    log_prob: Any
    """[...] or [..., K] float32: log-probability of each id; 0 for ignored ones."""
    entropy: Any
    """[...] float32: entropy of the softmax, in nats; 0 for tokens whose ids are all ignored.  Differentiable."""
    lse: Any
    """[...] float32: log-sum-exp of the final logits; 0 for such tokens.  Differentiable."""
    top1: Any
    """[...] int64, in JAX int32: the vocabulary index of the largest logit (the first one, where they tie); -1 for such
    tokens."""
    mean_logits: Any
    """[...] float32: mean of the final logits over the vocabulary, -inf where one of them is; 0 for such tokens."""
    log_sum_sq_probs: Any
    """[...] float32: log(sum(p**2)) of the softmax p, at most 0; 0 for such tokens."""


def check_shapes(shapes: Shapes, layout: str | None = None) -> None:
    """Raise ValueError unless hidden is [..., H], weight [V, H], ids [...] or [..., K], bias [V], temperature [] or
    [...].

    The JAX front end, whose weight may be [H, V], gives its weight_layout.
    """
    check_head(OP, shapes, layout=layout)
    hidden, ids, temperature = shapes["hidden"], shapes["ids"], shapes.get("temperature", ())
    leading = hidden[:-1]
    if ids != leading and ids[:-1] != leading:
        raise ValueError(
            f"{OP}: ids has shape {list(ids)} but hidden has shape {list(hidden)}; ids must have hidden's leading "
            f"dimensions, {list(leading)}, or those and one more for several ids per token"
        )
    if len(ids) > len(leading) and ids[-1] < 1:
        raise ValueError(f"{OP}: ids has shape {list(ids)}; [..., K] needs K >= 1")
    if temperature not in ((), leading):
        raise ValueError(
            f"{OP}: temperature has shape {list(temperature)}; it must be a number or have hidden's leading "
            f"dimensions, {list(leading)}"
        )
