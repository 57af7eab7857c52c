r"""Per-token log-probabilities of given ids from hidden states and a head; the [tokens, vocab] logits are never stored.

For token t with hidden state h_t, ids y_tk and temperature tau_t:

    a_tv  = (h_t . w_v + b_v) * logit_scale
    z_tv  = softcap * tanh(a_tv / softcap) / tau_t          (a_tv / tau_t without softcap)
    lse_t = log sum_v exp z_tv,    p = softmax(z)
    log_prob_tk = z_t,y_tk - lse_t
    entropy_t   = -sum_v p_tv log p_tv = lse_t - mean_t,    mean_t = sum_v p_tv z_tv
    mean_logits_t      = 1/V sum_v z_tv
    log_sum_sq_probs_t = log sum_v p_tv^2 = log sum_v exp(2 z_tv) - 2 lse_t

and for upstream gradients g_tk of log_prob, gH_t of entropy and gL_t of lse:

    d / d z_tv = sum_k g_tk ([v = y_tk] - p_tv) - gH_t p_tv (z_tv - mean_t) + gL_t p_tv
    d z_tv / d a_tv = (1 - tanh(a_tv / softcap)^2) / tau_t

where z_tv - mean_t equals log p_tv + entropy_t, but loses no digits by adding two nearly opposite numbers.

The running softmax keeps the largest logit and the sum of the exponentials of all *others*, so that
log_prob = -log1p(others) keeps its digits if an id is nearly certain, whichever of the ids that is.  In the gradient,
an id's own part is g (1 - p) with 1 - p = -expm1(log p).

Sources: Milakov and Gimelshein (arXiv:1805.02867), for the running softmax; Cut Cross-Entropy (arXiv:2411.09009), for
recomputing from the log-sum-exp; Gemma 2 (arXiv:2408.00118), for softcap.

The computation is in `onchip.vocab`; docs/architecture.md shows what lives where.
"""

from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypedDict

from onchip.frontend.options import A, Flag, Shapes, check_head, check_logits, check_options, possessive
from onchip.frontend.warm_up import WarmUpCall, head, ids

OP = "linear_log_probs"
LOGITS_OP = "log_probs"


@dataclass(frozen=True)
class LogProbsOptions:
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
    shift: bool = False
    check_inputs: bool = False
    scratch_bytes: int | None = None
    # Options that an engine reads from any loss.
    label_smoothing: ClassVar[float] = 0.0
    strategy: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        check_options(OP, self)


@dataclass(frozen=True)
class LogitsOptions(LogProbsOptions):
    """The options of log_probs."""

    def __post_init__(self) -> None:
        check_options(LOGITS_OP, self)


class Results(TypedDict, Generic[Flag], total=False):
    """The keywords that ask for more than log_prob: with False for none, True for some, and bool for who knows."""

    entropy: Flag
    lse: Flag
    top1: Flag
    mean_logits: Flag
    log_sum_sq_probs: Flag


class LogProbs(NamedTuple, Generic[A]):
    """What `linear_log_probs` and `log_probs` return if more than log_prob is asked for.

    Fields that weren't asked for are None, although their types here don't say so.
    """

    log_prob: A
    """[...] or [..., K], float32 like the other floats (float64 for float64 inputs): log-probability of each id; 0 for
    ignored ids."""
    entropy: A
    """[...]: entropy of the softmax, in nats; 0 for tokens whose ids are all ignored.  Differentiable."""
    lse: A
    """[...]: log-sum-exp of the final logits; 0 for tokens whose ids are all ignored.  Differentiable."""
    top1: A
    """[...] int64 (in JAX int32): the vocabulary index of the largest logit (the first one, where logits tie); -1 for
    tokens whose ids are all ignored."""
    mean_logits: A
    """[...]: mean of the final logits over the vocabulary, -inf if one of them is; 0 for tokens whose ids are all
    ignored."""
    log_sum_sq_probs: A
    """[...]: log(sum(p**2)) of the softmax p, at most 0; 0 for tokens whose ids are all ignored."""


def check_shapes(shapes: Shapes, layout: str | None = None) -> None:
    """Raise ValueError unless hidden is [..., H], weight [V, H], ids [...] or [..., K], bias [V], temperature [] or
    [...].

    The JAX front end, whose weight may be [H, V], gives its weight_layout.
    """
    check_head(OP, shapes, layout=layout)
    _check_ids(OP, shapes, "hidden")


def check_logits_shapes(shapes: Shapes) -> None:
    """Raise ValueError unless logits are [..., V], ids [...] or [..., K], temperature [] or [...]."""
    check_logits(LOGITS_OP, shapes)
    _check_ids(LOGITS_OP, shapes, "logits")


def _check_ids(op: str, shapes: Shapes, of: str) -> None:
    ids, temperature = shapes["ids"], shapes.get("temperature", ())
    leading, whose = shapes[of][:-1], possessive(of)
    if ids != leading and ids[:-1] != leading:
        raise ValueError(
            f"{op}: ids has shape {list(ids)} but {of} has shape {list(shapes[of])}; ids must have {whose} leading "
            f"dimensions, {list(leading)}, and may have one more, for several ids per token"
        )
    if len(ids) > len(leading) and ids[-1] < 1:
        raise ValueError(f"{op}: ids has shape {list(ids)}; [..., K] needs K >= 1")
    if temperature not in ((), leading):
        raise ValueError(
            f"{op}: temperature has shape {list(temperature)}; it must be a number or have {whose} leading "
            f"dimensions, {list(leading)}"
        )


CALLS = {
    "linear_log_probs": WarmUpCall(("hidden", "vocab"), lambda s, make: head(s, make) | {"ids": ids(s, make)}),
    "log_probs": WarmUpCall(("vocab",), lambda s, make: {"logits": make(s.tokens, s.vocab), "ids": ids(s, make)}),
}
