"""The arguments of grouped_matmul's operators, their results, and what forward keeps for backward."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.groups.problem import OP, GroupedOptions, GroupedProblem, check_values


class GroupedCall(NamedTuple):
    """An operator's arguments."""

    x: Tensor  # [T, K]; with rows [M, K]
    weight: Tensor  # [G, N, K] or [G, K, N]
    cast_x: Tensor  # x and the weight in the products' dtype, which under autocast isn't their own
    cast_weight: Tensor
    groups: Tensor  # [G]: sizes or offsets
    bias: Tensor | None  # [G, N]
    row_scale: Tensor | None  # [T]
    rows: Tensor | None  # [T]
    scatter_rows: Tensor | None  # [T]
    weight_grad_out: Tensor | None  # as the weight, float32; used in backward
    options: GroupedOptions
    problem: GroupedProblem
    which: str  # "group_sizes" or "group_offsets"
    check_inputs: bool
    grads: tuple[bool, ...]  # of x, weight, bias, row_scale


class GroupedOutputs(NamedTuple):
    """Every operator's outputs."""

    out: Tensor  # [T, C] or [num_rows, C]
    product: Tensor | None  # [T, N] in x's dtype, before activation and scale


class GroupedKept(NamedTuple):
    """What forward keeps for backward."""

    x: Tensor | None  # for the weight's gradient, in the products' dtype; quantised columns for 'triton' in FP8
    weight: Tensor | None  # for x's gradient; quantised for 'triton' in FP8
    x_scales: Tensor | None  # of quantised columns alone
    weight_scales: Tensor | None
    groups: Tensor  # the call's; for 'triton' the plan
    rows: Tensor | None  # the call's; for 'triton' checked, like scatter_rows
    scatter_rows: Tensor | None
    row_scale: Tensor | None
    product: Tensor | None
    weight_grad_out: Tensor | None
    options: GroupedOptions
    problem: GroupedProblem
    which: str
    dtypes: tuple[torch.dtype, ...]  # of x, weight, bias and row_scale


def check(call: GroupedCall) -> None:
    """Raise for wrong sizes, offsets and indices, which synchronises a GPU."""
    indices = [None if x is None else x.cpu().numpy() for x in (call.rows, call.scatter_rows)]
    check_values(call.problem, call.which, call.groups.tolist(), *indices)


def by_row(weight: Tensor, options: GroupedOptions) -> Tensor:
    """The weight as [G, N, K], a view."""
    return weight.mT if options.weight_layout == "gkn" else weight


def keeps_product(call: GroupedCall) -> bool:
    """Whether backward needs the product, for the slope of an activation or for the gradient of row_scale."""
    return any(call.grads) if call.options.activation is not None else call.grads[3]


def empty_outputs(call: GroupedCall) -> GroupedOutputs:
    """Memory for the outputs."""
    p, x = call.problem, call.cast_x
    product = stated.empty((p.tokens, p.n), x.dtype, x.device) if keeps_product(call) else None
    return GroupedOutputs(stated.empty((p.out_rows, p.columns), x.dtype, x.device), product)


def kept(
    call: GroupedCall, outputs: GroupedOutputs, groups: Tensor, rows: Tensor | None, scatter_rows: Tensor | None
) -> GroupedKept:
    """What backward gets from a call, with these groups, rows and scatter_rows in place of the call's own."""
    return GroupedKept(
        call.cast_x if call.grads[1] else None,
        call.cast_weight if call.grads[0] else None,
        None,
        None,
        groups,
        None if call.rows is None else rows,
        None if call.scatter_rows is None else scatter_rows,
        call.row_scale,
        outputs.product if keeps_product(call) else None,
        call.weight_grad_out,
        call.options,
        call.problem,
        call.which,
        tuple((call.x if x is None else x).dtype for x in (call.x, call.weight, call.bias, call.row_scale)),
    )


def flops(call: GroupedCall) -> int:
    """Operations of the product of all rows, with those past the last group's end, which only the values tell."""
    p = call.problem
    return 2 * p.tokens * p.n * p.k


def gradient_flops(kept: GroupedKept, upstream: Made, wanted: Wanted) -> int:
    """Operations of the gradients of x and the weight."""
    p = kept.problem
    return 2 * p.tokens * p.n * p.k * (wanted[0] + wanted[1])


def weight_shape(kept: GroupedKept) -> tuple[int, int, int]:
    p = kept.problem
    return (p.groups, p.k, p.n) if kept.options.weight_layout == "gkn" else (p.groups, p.n, p.k)


def empty_gradients(kept: GroupedKept, upstream: Made, wanted: Wanted) -> Made:
    """Memory for the gradients of x, weight, bias and row_scale; None for a weight's gradient that goes elsewhere."""
    (grad_out,) = upstream
    assert grad_out is not None
    p = kept.problem
    shapes = (p.source_rows, p.k), weight_shape(kept), (p.groups, p.n), (p.tokens,)
    made: list[Tensor | None] = [
        stated.empty(shape, dtype, grad_out.device) if want else None
        for shape, dtype, want in zip(shapes, kept.dtypes, wanted, strict=True)
    ]
    if kept.weight_grad_out is not None:
        made[1] = None
    return made


def operator(name: str, *, states: bool = False, **functions: Any) -> Operator[GroupedCall, Any]:
    """The operator that these functions make."""
    return Operator(
        name,
        op=OP,
        fake_gradients=empty_gradients,
        differentiable=("x", "weight", "bias", "row_scale"),
        adds_to={"weight": "weight_grad_out"},
        flops=flops,
        gradient_flops=gradient_flops,
        states=states,
        **functions,
    )
