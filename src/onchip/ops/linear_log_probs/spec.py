"""What both front ends of linear_log_probs and log_probs share: options, results, shapes.  No framework."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from onchip.frontend.options import Shapes, check_head, check_logits, check_options, possessive

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


class WantedOutputs(NamedTuple):
    """The results for each id and token; None for those that weren't asked for."""

    log_prob: Any
    entropy: Any
    lse: Any
    top1: Any
    mean_logits: Any
    log_sum_sq_probs: Any


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
