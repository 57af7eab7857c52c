"""The arguments of grouped_matmul's operator, its results, and what backward is given."""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_register import Made, Wanted
from onchip.groups.problem import Options, Problem, check_values
from onchip.groups.triton.tiles import plan_numbers


class Call(NamedTuple):
    """The operator's arguments."""

    x: Tensor  # [T, K]; with rows [M, K]
    weight: Tensor  # [G, N, K] or [G, K, N]
    cast_x: Tensor  # both in the products' dtype: under autocast another than their own
    cast_weight: Tensor
    groups: Tensor  # [G]: sizes or offsets
    bias: Tensor | None  # [G, N]
    row_scale: Tensor | None  # [T]
    rows: Tensor | None  # [T]
    scatter_rows: Tensor | None  # [T]
    weight_grad_out: Tensor | None  # as the weight, float32; used in backward
    options: Options
    problem: Problem
    which: str  # "group_sizes" or "group_offsets"
    backend: str
    check_inputs: bool
    grads: tuple[bool, ...]  # of x, weight, bias, row_scale


class Outputs(NamedTuple):
    """The operator's results."""

    out: Tensor  # [T, C] or [num_rows, C]
    product: Tensor | None  # [T, N] of x's dtype: before activation and scale
    plan: Tensor | None  # int32, backend 'triton' alone: which rows are whose
    read: Tensor | None  # [T] int32, 'triton' alone: rows, checked
    write: Tensor | None  # [T] int32, 'triton' alone: scatter_rows, checked


class Kept(NamedTuple):
    """What backward is given."""

    x: Tensor | None  # for the weight's gradient, in the products' dtype
    weight: Tensor | None  # for x's
    groups: Tensor | None  # of the call; for 'triton' the plan
    rows: Tensor | None  # of the call; for 'triton' checked, as the next
    scatter_rows: Tensor | None
    row_scale: Tensor | None
    product: Tensor | None
    weight_grad_out: Tensor | None
    options: Options
    problem: Problem
    which: str
    backend: str
    dtypes: tuple[torch.dtype, ...]  # of x, weight, bias and row_scale


def check(call: Call) -> None:
    """Raise for wrong sizes, offsets and indices; on a GPU only where the caller asked, since it synchronises."""
    if call.check_inputs or not call.x.is_cuda:
        indices = [None if x is None else x.cpu().numpy() for x in (call.rows, call.scatter_rows)]
        check_values(call.problem, call.which, call.groups.tolist(), *indices)


def by_row(weight: Tensor, options: Options) -> Tensor:
    """The weight as [G, N, K], a view."""
    return weight.mT if options.weight_layout == "gkn" else weight


def keeps_product(call: Call) -> bool:
    """Whether backward needs the product: the slope of an activation, or what a row's scale is multiplied by."""
    return any(call.grads) if call.options.activation is not None else call.grads[3]


def fake(call: Call) -> Outputs:
    """Memory for the results."""
    p, x = call.problem, call.cast_x
    triton = call.backend == "triton"

    def indices(given: Tensor | None) -> Tensor | None:
        return x.new_empty(p.tokens, dtype=torch.int32) if triton and given is not None else None

    return Outputs(
        x.new_empty((p.out_rows, p.columns)),
        x.new_empty((p.tokens, p.n)) if keeps_product(call) else None,
        x.new_empty(plan_numbers(p), dtype=torch.int32) if triton else None,
        indices(call.rows),
        indices(call.scatter_rows),
    )


def save(call: Call, outputs: Outputs) -> Kept:
    given, made = (call.groups, call.rows, call.scatter_rows), (outputs.plan, outputs.read, outputs.write)
    groups, rows, scatter_rows = made if call.backend == "triton" else given
    return Kept(
        call.cast_x if call.grads[1] else None,
        call.cast_weight if call.grads[0] else None,
        groups,
        None if call.rows is None else rows,
        None if call.scatter_rows is None else scatter_rows,
        call.row_scale,
        outputs.product if keeps_product(call) else None,
        call.weight_grad_out,
        call.options,
        call.problem,
        call.which,
        call.backend,
        tuple((call.x if x is None else x).dtype for x in (call.x, call.weight, call.bias, call.row_scale)),
    )


def weight_shape(kept: Kept) -> tuple[int, int, int]:
    p = kept.problem
    return (p.groups, p.k, p.n) if kept.options.weight_layout == "gkn" else (p.groups, p.n, p.k)


def fake_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    """Memory for the gradients of x, weight, bias and row_scale; None for a weight's that is added elsewhere."""
    (grad_out,) = upstream
    assert grad_out is not None
    p = kept.problem
    shapes = (p.source_rows, p.k), weight_shape(kept), (p.groups, p.n), (p.tokens,)
    made: list[Tensor | None] = [
        grad_out.new_empty(shape, dtype=dtype) if want else None
        for shape, dtype, want in zip(shapes, kept.dtypes, wanted, strict=True)
    ]
    if kept.weight_grad_out is not None:
        made[1] = None
    return made
