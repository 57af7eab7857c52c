"""PyTorch's own matrix products, summed in float32 whatever their operands' dtype."""

from typing import Any

import torch
from torch import Tensor

from onchip.core.sizes import FEW_ELEMENTS
from onchip.frontend.torch_inputs import accumulator


def operand_dtype(x: Tensor) -> torch.dtype:
    """The dtype that products read: on the CPU never 16 bits, since products round their results to 16 bits there."""
    return accumulator(x.dtype) if x.device.type == "cpu" else x.dtype


def widen(x: Tensor) -> Tensor:
    return x.to(operand_dtype(x))


def _rounds_parts(out: Tensor) -> bool:
    """Whether cuBLAS might round parts of this result's sums (results/2026-11-29-h200-products-in-parts.json)."""
    return out.dtype.itemsize == 2 and out.numel() < FEW_ELEMENTS


def _summed(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the dtype of sums."""
    total = accumulator(a.dtype)
    return a @ b if a.dtype == total else torch.mm(a, b, out_dtype=total)


def product(out: Tensor, a: Tensor, b: Tensor, *, accumulate: bool = False) -> None:
    """out = a @ b (+ out) in the dtype of `out`: the operands' dtype, float32 for operands of 16 bits, or less than
    that of `widen`.  Rounded once; where `out` has 16 bits and is small, the sums take scratch in float32.
    """
    if out.dtype.itemsize < a.dtype.itemsize or _rounds_parts(out):
        total = _summed(a, b)
        out.copy_(total.add_(out) if accumulate else total)
        return
    kind: dict[str, Any] = {} if a.dtype == out.dtype else {"out_dtype": out.dtype}
    if accumulate:
        torch.addmm(out, a, b, **kind, out=out)
    else:
        torch.mm(a, b, **kind, out=out)


def linear(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    """out = a @ b + bias, rounded once to the dtype of `out`, which is a's; `b` is widened."""
    if a.dtype != b.dtype or _rounds_parts(out):
        total = _summed(widen(a), b)
        out.copy_(total if bias is None else total.add_(bias))
    elif bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)
