"""What the public functions check at their door; values only where reading them is free or was asked for."""

from typing import Any

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import check_kinds, product_dtype, refuse_gradient, require_tensors
from onchip.ops.linear_jsd.spec import Options, Shapes, check_topk

_OPTIONAL = (
    "student_bias",
    "teacher_hidden",
    "teacher_weight",
    "teacher_bias",
    "teacher_logits",
    "target",
    "token_weight",
)


def check_tensors(
    op: str, options: Options, named: dict[str, Any], topk: Any
) -> tuple[torch.Size, int, list[torch.dtype]]:
    """Raise for what can be seen without reading values.

    Return the tokens' shape, the entries that count, and the dtype of both models' products (of none: float32).
    """
    if topk is not None:
        check_topk(op, topk)
        named = named | {"teacher_topk.indices": topk.indices, "teacher_topk.values": topk.values}
    tensors = require_tensors(op, named, _OPTIONAL)
    shapes: dict[str, Any] = {name.removeprefix("teacher_topk."): tuple(x.shape) for name, x in tensors.items()}
    leading, size = Shapes(op, **shapes).check(options)
    check_kinds(op, tensors, integers=("target", "teacher_topk.indices"), constants=("token_weight",))
    if topk is not None:
        refuse_gradient(op, "teacher_topk.values", topk.values)
    dtypes = [
        product_dtype(op, tensors, whose) if f"{whose}hidden" in tensors else torch.float32
        for whose in ("student_", "teacher_")
    ]
    return torch.Size(leading), size, dtypes


def check_indices(op: str, indices: Tensor, kept: Tensor | None, vocab: int) -> None:
    """Raise for indices [..., K] of tokens that are `kept` [...] if they are out of range or repeated; reads them."""
    ids = indices.to(torch.int64)
    wrong = (ids < 0) | (ids >= vocab)
    if kept is not None:
        wrong &= kept[..., None]
    if bool(wrong.any()):
        where = [int(i) for i in wrong.nonzero()[0]]
        raise ValueError(
            f"{op}: teacher_topk.indices[{', '.join(map(str, where))}] is {int(ids[tuple(where)])}, "
            f"which is not in [0, {vocab})"
        )
    ordered = ids.sort(-1).values
    same = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if kept is not None:
        same &= kept
    if bool(same.any()):
        raise ValueError(f"{op}: teacher_topk.indices must be distinct within a token; {int(same.sum())} are not")
