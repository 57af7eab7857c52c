"""What every front end of linear_cross_entropy shares: options and what shapes go together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onchip.frontend.options import LossOptions, check_head, check_leading, check_options, check_per_token

OP = "linear_cross_entropy"
STRATEGIES = ("auto", "stash", "recompute")
PRECISIONS = ("full", "fp8")


@dataclass(frozen=True)
class Options(LossOptions):
    """The options that are plain numbers and words, checked when made."""

    strategy: str = "auto"
    precision: str = "full"

    def __post_init__(self) -> None:
        check_options(OP, self, strategy=STRATEGIES, precision=PRECISIONS)


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
