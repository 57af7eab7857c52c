"""What the JAX front end checks at its door, from types, shapes and dtypes alone: it works on tracers."""

from typing import Any

from onchip.frontend.jax_inputs import check_kinds, check_layout, check_product_dtype, require_arrays
from onchip.ops.linear_jsd.spec import Options, Shapes, check_topk

_OPTIONAL = (
    "student_bias",
    "teacher_hidden",
    "teacher_weight",
    "teacher_bias",
    "teacher_logits",
    "labels",
    "token_weight",
)


def check_arrays(
    op: str, options: Options, named: dict[str, Any], topk: Any, layout: str
) -> tuple[tuple[int, ...], int]:
    """Raise for what doesn't fit together; return the tokens' shape and the entries that count."""
    check_layout(op, layout)
    if topk is not None:
        check_topk(op, topk)
        named = named | {"teacher_topk.indices": topk.indices, "teacher_topk.values": topk.values}
    arrays = require_arrays(op, named, _OPTIONAL)
    shapes = {
        # In the other layout a weight is checked as if transposed.
        "target" if name == "labels" else name.removeprefix("teacher_topk."): x.shape[::-1]
        if name in ("student_weight", "teacher_weight") and layout == "hv"
        else x.shape
        for name, x in arrays.items()
    }
    leading, size = Shapes(op, "labels", **shapes).check(options)
    check_kinds(op, arrays, integers=("labels", "teacher_topk.indices"), constants=("token_weight",))
    for whose in ("student_", "teacher_"):
        check_product_dtype(op, arrays, whose)
    return leading, size
