"""What every front end of linear_cross_entropy shares: options, memory formulas, the choice of strategy and chunks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onchip.core.sizes import DTYPE_BYTES
from onchip.frontend.options import (
    check_head,
    check_leading,
    check_loss_options,
    check_per_token,
    require_bool,
    require_one_of,
)
from onchip.vocab.chunks import Config
from onchip.vocab.memory import Problem

OP = "linear_cross_entropy"
STRATEGIES = ("auto", "stash", "recompute")
PRECISIONS = ("full", "fp8")


# ---------------------------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class Options:
    """The options that are plain numbers and words, checked when made."""

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    check_inputs: bool = False
    scratch_bytes: int | None = None
    strategy: str = "auto"
    return_stats: bool = False
    precision: str = "full"

    def __post_init__(self) -> None:
        check_loss_options(OP, self)
        require_one_of(OP, "strategy", self.strategy, STRATEGIES)
        require_bool(OP, "check_inputs", self.check_inputs)
        require_bool(OP, "return_stats", self.return_stats)
        require_one_of(OP, "precision", self.precision, PRECISIONS)


def check_shapes(
    hidden: Sequence[int],
    weight: Sequence[int],
    target: Sequence[int],
    bias: Sequence[int] | None,
    per_token: Mapping[str, Sequence[int]],
    *,
    layout: str | None = None,
    target_name: str = "target",
) -> None:
    """Raise ValueError unless the shapes are [..., H], [V, H], [...], [V], and [...] for each entry of `per_token`.

    The JAX front end, whose weight may be [H, V], gives its weight_layout.
    """
    check_head(OP, hidden, weight, bias, layout=layout)
    check_leading(OP, target_name, target, "hidden", hidden)
    for name, shape in per_token.items():
        check_per_token(OP, name, shape, target_name, target)


# ------------------------------------------------------------------------------------------------- memory and plan


def products(p: Problem, strategy: str) -> int:
    """Matrix products of 2 T V H floating-point operations each, over forward and backward."""
    logits = 2 if strategy == "recompute" else 1
    return logits + (int(p.grad_hidden) + int(p.grad_weight) if strategy != "forward" else 0)


def flops(p: Problem, strategy: str) -> int:
    """Floating-point operations of the matrix products over forward and backward."""
    return 2 * p.tokens * p.hidden * p.vocab * products(p, strategy)


def written_per_chunk(p: Problem, c: Config) -> dict[str, int]:
    """Bytes that each chunk writes to device memory in making the gradients: the tile, and what is accumulated."""
    element = 4 if p.device == "cpu" else DTYPE_BYTES[p.dtype]
    columns = p.vocab if c.strategy == "stash" else c.vocab_chunk
    written = {"logits": 4 * c.token_chunk * columns}
    if element != 4:
        written["their gradient"] = element * c.token_chunk * columns
    if p.grad_hidden:
        written["hidden gradient"] = 4 * c.token_chunk * p.hidden
    if p.grad_weight:
        written["weight gradient"] = 4 * columns * p.hidden
    return written
