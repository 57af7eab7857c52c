"""What every front end of cross_entropy shares: options, and the checks of shapes."""

from collections.abc import Sequence
from dataclasses import dataclass

from onchip.frontend.options import LossOptions, Shapes, check_class_weight, check_logits, check_options, check_tokens
from onchip.frontend.topk import check_label_shapes

OP = "cross_entropy"


@dataclass(frozen=True)
class CrossEntropyOptions(LossOptions):
    """The options that are plain numbers, words and flags; making it checks them."""

    shift: bool = False
    inplace_backward: bool = False

    def __post_init__(self) -> None:
        check_options(OP, self)


def check_labels(shapes: Shapes, *, soft: bool) -> None:
    """Raise ValueError unless all shapes are right, for targets that are ids or `soft` labels."""
    if soft:
        check_logits(OP, shapes)
        check_label_shapes(OP, "target", shapes, "logits", shapes["logits"][-1])
    else:
        check_shapes(shapes, "target")


def check_shapes(shapes: Shapes, target: str) -> None:
    """Raise ValueError unless logits are [..., V], class_weight [V], and `target` and other per-token arrays [...]."""
    check_logits(OP, shapes)
    check_tokens(OP, shapes, target, "logits")
    check_class_weight(OP, shapes, shapes["logits"][-1])


def may_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a tensor may share memory: anything but nested dimensions, dense or with gaps."""
    if 0 in shape:
        return False
    end = 0  # where the elements of the dimensions so far end, relative to the first
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride <= end:
            return True
        end += stride * (size - 1)
    return False
