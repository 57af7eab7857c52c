"""The plain path of grouped_matmul: one group after the other, in float32, with sizes that the host reads."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.fp8.torch_products import multiply
from onchip.fp8.torch_quantize import quantize
from onchip.frontend.torch_inputs import accumulator, torch_refusal
from onchip.frontend.torch_register import Made, Wanted
from onchip.groups.problem import sizes_of
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


def refusal(device: torch.device, *, named: bool) -> str | None:
    """Why this backend can't serve a call on this device, or None; `named`: the caller chose it."""
    if device.type == "cuda" and not named:
        return "it waits for the sizes on the host; pass backend='plain' to use it all the same"
    return torch_refusal(device)


def slices(which: str, groups: Tensor) -> Iterator[tuple[int, slice]]:
    """Each group that has rows, and the slice of its rows."""
    start = 0
    for g, size in enumerate(sizes_of(which, groups.tolist())):
        if size > 0:
            yield g, slice(start, start + size)
        start += size


def add_rows(total: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add rows to those of `total` that `index` names, in the same order every time."""
    if total.is_cuda:
        total.index_put_((index,), rows, accumulate=True)  # it sorts; index_add_ uses atomics
    else:
        total.index_add_(0, index, rows)


def _forward(call: GroupedCall) -> GroupedOutputs:
    check(call)
    made, total = empty_outputs(call), accumulator(call.cast_x.dtype)
    weight = by_row(call.cast_weight, call.options)
    out = torch.zeros_like(made.out, dtype=total)
    if made.product is not None:
        made.product.zero_()  # also the rows past the last group's end, which nobody reads
    for g, mine in slices(call.which, call.groups):
        x = call.cast_x[mine if call.rows is None else call.rows[mine]]
        y = product_of_rows(x, weight[g], call.options.precision)
        if call.bias is not None:
            y += call.bias[g].to(total)
        if made.product is not None:
            made.product[mine] = y.to(made.product.dtype)
        a = activated(y, call.options.gate_up) if call.options.activation else y
        if call.row_scale is not None:
            a = a * call.row_scale[mine, None].to(total)
        if call.scatter_rows is None:
            out[mine] = a
        else:
            add_rows(out, call.scatter_rows[mine], a)
    return made._replace(out=out.to(made.out.dtype))


def _save(call: GroupedCall, outputs: GroupedOutputs) -> GroupedKept:
    return kept(call, outputs, call.groups, call.rows, call.scatter_rows)


def _gradients(kept: GroupedKept, upstream: Made, wanted: Wanted) -> Made:
    (grad_out,) = upstream
    assert grad_out is not None
    total, options = accumulator(grad_out.dtype), kept.options
    made = [None if x is None else torch.zeros_like(x, dtype=total) for x in empty_gradients(kept, upstream, wanted)]
    grad_x, grad_weight, grad_bias, grad_scale = made
    if wanted[1] and kept.weight_grad_out is not None:
        grad_weight = kept.weight_grad_out
    for g, mine in slices(kept.which, kept.groups):
        d = grad_out[mine if kept.scatter_rows is None else kept.scatter_rows[mine]].to(total)
        y = None if kept.product is None else kept.product[mine].to(total)
        if grad_scale is not None:
            assert y is not None
            grad_scale[mine] = (d * (activated(y, options.gate_up) if options.activation else y)).sum(1)
        if kept.row_scale is not None:
            d = d * kept.row_scale[mine, None].to(total)
        if options.activation:
            assert y is not None
            d = of_activation(y, d, options.gate_up)
        narrow = d.to(grad_out.dtype) if options.precision == "fp8" else d
        if grad_x is not None:
            assert kept.weight is not None
            dx = product_of_rows(narrow, by_row(kept.weight, options)[g].mT, options.precision)
            if kept.rows is None:
                grad_x[mine] = dx
            else:
                add_rows(grad_x, kept.rows[mine], dx)
        if grad_weight is not None:
            assert kept.x is not None
            x = kept.x[mine if kept.rows is None else kept.rows[mine]]
            by_row(grad_weight, options)[g] += summed_over_rows(narrow, x, options.precision)
        if grad_bias is not None:
            grad_bias[g] = d.sum(0)
    if kept.weight_grad_out is not None:
        made[1] = None
    return [None if x is None else x.to(dtype) for x, dtype in zip(made, kept.dtypes, strict=True)]


def product_of_rows(x: Tensor, weight: Tensor, precision: str) -> Tensor:
    """x [T, K] @ weight [N, K].T in the dtype of sums."""
    if precision == "full":
        total = accumulator(weight.dtype)
        return x.to(total) @ weight.to(total).T
    rows, _ = quantize(x, "e4m3", "float32", turned=False)
    columns, _ = quantize(weight, "e4m3", "float32", by_block=True, turned=False)
    return multiply("dequantize", rows, columns, by_block=True, dtype=torch.float32)


def summed_over_rows(d: Tensor, x: Tensor, precision: str) -> Tensor:
    """d [T, N].T @ x [T, K] in the dtype of sums."""
    if precision == "full":
        total = accumulator(x.dtype)
        return d.to(total).T @ x.to(total)
    (_, left), (_, right) = (quantize(a, "e4m3", "float32", rows=False) for a in (d, x))
    return multiply("dequantize", left, right, by_block=False, dtype=torch.float32)


def activated(y: Tensor, gate_up: str) -> Tensor:
    """silu(gate) * up."""
    gate, up = split(y, gate_up)
    return F.silu(gate) * up


def of_activation(y: Tensor, grad: Tensor, gate_up: str) -> Tensor:
    """The gradient of y, given that of silu(gate) * up."""
    gate, up = split(y, gate_up)
    s = torch.sigmoid(gate)
    both = grad * up * s * (1 + gate * (1 - s)), grad * gate * s
    return torch.cat(both, 1) if gate_up == "concatenated" else torch.stack(both, 2).flatten(1)


def split(y: Tensor, gate_up: str) -> tuple[Tensor, Tensor]:
    """Gate and up of y [T, 2 F]."""
    half = y.shape[1] // 2
    return (y[:, :half], y[:, half:]) if gate_up == "concatenated" else (y[:, 0::2], y[:, 1::2])


GROUPED = operator("grouped_matmul_one_by_one", forward=_forward, fake=empty_outputs, save=_save, gradients=_gradients)
