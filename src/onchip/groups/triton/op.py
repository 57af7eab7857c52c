"""grouped_matmul's operator on the Triton kernels, forward and backward.  The kernels' modules import Triton."""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.fp8.torch_products import triton_refusal
from onchip.fp8.torch_quantize import TorchQuantized, operand
from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_register import Made, Wanted
from onchip.groups.torch.call import (
    GroupedCall,
    GroupedKept,
    GroupedOutputs,
    by_row,
    check,
    empty_gradients,
    empty_outputs,
    kept,
    operator,
)
from onchip.groups.triton import fp8
from onchip.groups.triton.tiles import plan_numbers
from onchip.kernels.triton.launch import device_refusal

_MOST_GROUPS, _MOST_ROWS = 16384, 1 << 30


def refusal(
    device: torch.device, dtype: torch.dtype, groups: int, rows: int, fp8_sizes: tuple[int, int] | None = None
) -> str | None:
    """Why the kernels can't serve a call, or None.

    `rows` is the largest number of rows of x, the product and the result; `fp8_sizes` is (N, K) for precision='fp8'.
    """
    reason = device_refusal(device.type, device.index, dtype)
    if reason is None and fp8_sizes is not None:
        reason = triton_refusal(device) or fp8.refusal(*fp8_sizes)
    if reason is None and groups > _MOST_GROUPS:
        reason = f"it takes at most {_MOST_GROUPS} groups, not {groups}"
    if reason is None and rows > _MOST_ROWS:
        reason = f"it takes at most {_MOST_ROWS} rows, not {rows}"
    return reason


class GroupedTritonOutputs(NamedTuple):
    """The operator's outputs."""

    of_call: GroupedOutputs
    plan: Tensor  # int32: see kernels.py
    read: Tensor | None  # [T] int32: rows, checked
    write: Tensor | None  # [T] int32: scatter_rows, checked
    # With precision='fp8', if the gradients are wanted: x's columns for the weight's, and the weight for x's.
    columns: Tensor | None
    column_scales: Tensor | None
    weight: Tensor | None
    weight_scales: Tensor | None


def _fake(call: GroupedCall) -> GroupedTritonOutputs:
    p, x, options = call.problem, call.x, call.options
    by_x, by_weight = call.grads[:2]
    in_fp8 = options.precision == "fp8"

    def numbers(count: int) -> Tensor:
        return stated.empty(count, torch.int32, x.device)

    return GroupedTritonOutputs(
        empty_outputs(call),
        numbers(plan_numbers(p)),
        None if call.rows is None else numbers(p.tokens),
        None if call.scatter_rows is None else numbers(p.tokens),
        *(fp8.empty_columns(p, p.k, x) if in_fp8 and by_weight else (None, None)),
        *(fp8.empty_weight(p, options, x, turned=True) if in_fp8 and by_x else (None, None)),
    )


def _forward(call: GroupedCall) -> GroupedTritonOutputs:
    from onchip.groups.triton import launches

    if call.check_inputs or call.x.device.type == "cpu":
        check(call)
    made, p, options = _fake(call), call.problem, call.options
    result, before = made.of_call
    launches.plan(p, call.which, call.groups, made.plan).run()
    if p.tokens == 0:
        stated.call(Tensor.copy_, result, _of_nothing(made.plan, p.groups)[-1])
        return made
    for given, limit, into in ((call.rows, p.source_rows, made.read), (call.scatter_rows, p.out_rows, made.write)):
        if given is not None and into is not None:
            launches.check_indices(given, limit, into, made.plan).run()
    out = result
    if made.write is not None:  # unscaled rows, which are also what is kept if there is no activation
        if before is not None and options.activation is None:
            out, before = before, None
        else:
            out = stated.empty((p.tokens, p.columns), call.cast_x.dtype, call.x.device)
    in_fp8 = options.precision == "fp8"
    x, weight = _quantized(call, made) if in_fp8 else (call.cast_x, by_row(call.cast_weight, options))
    launches.product(
        x,
        weight,
        out,
        made.plan,
        tokens=p.tokens,
        bias=call.bias,
        row_scale=None if made.write is not None else call.row_scale,
        index=None if in_fp8 else made.read,
        before=before,
        options=options,
    ).run()
    if made.write is not None and result.numel() > 0:
        launches.sum_rows(out, call.row_scale, made.write, result, made.plan, p.groups).run()
    return made


def _quantized(call: GroupedCall, made: GroupedTritonOutputs) -> tuple[TorchQuantized, fp8.Weight]:
    """x and the weight in FP8 for the result; what their gradients need goes to `made`."""
    from onchip.groups.triton import launches

    p, options = call.problem, call.options
    x = call.cast_x if made.read is None else launches.gathered(call.cast_x, made.read)
    rows = fp8.empty_rows(p, p.k, x)
    fp8.quantize_rows(p, x, made.plan, rows, operand(made.columns, made.column_scales))
    weight = fp8.empty_weight(p, options, x, turned=False)
    fp8.quantize_weight(call.cast_weight, options, weight, operand(made.weight, made.weight_scales))
    return rows, fp8.by_group(weight, p.groups, p.n, p.k)


def _save(call: GroupedCall, outputs: GroupedTritonOutputs) -> GroupedKept:
    made = kept(call, outputs.of_call, outputs.plan, outputs.read, outputs.write)
    if call.options.precision == "full":
        return made
    return made._replace(
        x=outputs.columns,
        x_scales=outputs.column_scales,
        weight=outputs.weight,
        weight_scales=outputs.weight_scales,
    )


def _gradients(kept: GroupedKept, upstream: Made, wanted: Wanted) -> Made:
    from onchip.groups.triton import launches

    (grad_out,) = upstream
    assert grad_out is not None
    plan, p, options = kept.groups, kept.problem, kept.options
    made = empty_gradients(kept, upstream, wanted)
    if p.tokens == 0:
        nothing = _of_nothing(plan, p.groups)
        if wanted[1] and kept.weight_grad_out is not None:
            stated.call(Tensor.add_, kept.weight_grad_out, nothing[:, None, None])
        by_group = nothing[-1], nothing[:, None, None], nothing[:, None], nothing[-1]
        pairs = zip(made, by_group, strict=True)
        return [None if x is None else stated.call(Tensor.copy_, x, value) for x, value in pairs]
    grad_x, grad_weight, grad_bias, grad_scale = made
    d: Tensor | None = grad_out if grad_out.stride(1) == 1 else stated.converted(grad_out, Tensor.contiguous)
    if options.activation is not None or kept.row_scale is not None or kept.scatter_rows is not None:
        d = stated.empty((p.tokens, p.n), grad_out.dtype, grad_out.device) if any(wanted[:3]) else None
        launches.product_gradient(
            grad_out, kept.product, kept.row_scale, kept.scatter_rows, d, grad_scale, plan, p.tokens, options
        ).run()
    if d is None:
        return made
    d_rows = d_columns = None
    if options.precision == "fp8":
        d_rows = fp8.empty_rows(p, p.n, d) if grad_x is not None else None
        d_columns = fp8.empty_columns(p, p.n, d) if wanted[1] else None
        if d_rows is not None or d_columns is not None:
            fp8.quantize_rows(p, d, plan, d_rows, d_columns)
    if grad_x is not None:
        assert kept.weight is not None
        into = grad_x if kept.rows is None else stated.empty((p.tokens, p.k), grad_x.dtype, grad_x.device)
        of_d: Tensor | TorchQuantized = d
        weight: Tensor | fp8.Weight = by_row(kept.weight, options).mT
        if d_rows is not None and kept.weight_scales is not None:
            of_d = d_rows
            weight = fp8.by_group(TorchQuantized(kept.weight, kept.weight_scales), p.groups, p.k, p.n)
        launches.product(of_d, weight, into, plan, tokens=p.tokens).run()
        if kept.rows is not None and grad_x.numel() > 0:
            launches.sum_rows(into, None, kept.rows, grad_x, plan, p.groups).run()
        del into  # before a copy of x's rows
    if wanted[1]:
        assert kept.x is not None
        gradient = kept.weight_grad_out if grad_weight is None else grad_weight
        assert gradient is not None
        add, limit = grad_weight is None, p.source_rows
        if d_columns is not None and kept.x_scales is not None:
            pair = d_columns, TorchQuantized(kept.x, kept.x_scales)
            pair = pair if options.weight_layout == "gnk" else pair[::-1]
            launch = launches.scaled_weight_gradient(*pair, gradient, plan, add=add)
        elif options.weight_layout == "gnk":
            launch = launches.weight_gradient(d, kept.x, gradient, plan, b_index=kept.rows, limit=limit, add=add)
        else:
            launch = launches.weight_gradient(kept.x, d, gradient, plan, a_index=kept.rows, limit=limit, add=add)
        launch.run()
    if grad_bias is not None:
        launches.bias_gradient(d, grad_bias, plan).run()
    return made


def _of_nothing(plan: Tensor, groups: int) -> Tensor:
    return stated.call(of_nothing, plan, groups)


def of_nothing(plan: Tensor, groups: int) -> Tensor:
    """Each group's sum over no rows, [G]: 0, and NaN from the first group on whose size isn't 0."""
    group = torch.arange(groups, dtype=torch.int64, device=plan.device)
    return torch.zeros_like(group, dtype=torch.float32).where(group < plan[3], torch.nan)


GROUPED = operator("grouped_matmul", forward=_forward, fake=_fake, save=_save, gradients=_gradients, states=True)
