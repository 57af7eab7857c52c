"""What every front end of linear_cross_entropy shares: options, and the checks of shapes."""

from dataclasses import dataclass
from typing import Literal, get_args

from onchip.frontend.options import LossOptions, Shapes, check_class_weight, check_head, check_options, check_tokens
from onchip.frontend.topk import check_label_shapes

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


def check_labels(shapes: Shapes, *, soft: bool) -> tuple[int, ...]:
    """Raise ValueError unless all shapes are right, for ids or `soft` labels; return the tokens' shape."""
    if soft:
        check_label_shapes(OP, "target", shapes, "hidden", check_head(OP, shapes))
    else:
        check_shapes(shapes, "target")
    return shapes["hidden"][:-1]


def check_shapes(shapes: Shapes, target: str, layout: str | None = None) -> None:
    """Raise ValueError unless hidden is [..., H], weight [V, H], bias and class_weight [V], and what is by token [...].

    `target` is the front end's word for targets.  JAX's, whose weight may be [H, V], gives its weight_layout.
    """
    check_class_weight(OP, shapes, check_head(OP, shapes, layout=layout))
    check_tokens(OP, shapes, target, "hidden")
