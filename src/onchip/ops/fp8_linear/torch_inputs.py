"""What the public functions check at their door, without reading a value of a tensor."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.nn import Parameter

from onchip.fp8 import numbers
from onchip.fp8.numbers import OP
from onchip.fp8.torch_quantize import FP8
from onchip.frontend.torch_inputs import DTYPES, dtype_name


def check_tensors(op: str, **named: Any) -> None:
    """Raise for what can be seen of the tensors, x among them; a bias may be None."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{op}: torch.func transforms (grad, vmap, jvp, ...) are not supported; use torch.autograd")
    x = named["x"]
    tensors = {name: t for name, t in named.items() if not (name == "bias" and t is None)}
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a torch.Tensor; got {type(t).__name__}")
        if _is_dtensor(t):
            raise TypeError(f"{op}: {name} is a DTensor; pass local tensors, as of {name}.to_local()")
        if t.dtype not in DTYPES:
            raise TypeError(f"{op}: {name} must be float32, bfloat16 or float16; got {dtype_name(t.dtype)}")
        if t.device != x.device:
            raise ValueError(f"{op}: {name} is on {t.device} but x is on {x.device}; move it there")
    if not torch.compiler.is_compiling() and any(unpack_dual(t).tangent is not None for t in tensors.values()):
        raise RuntimeError(f"{op}: forward-mode differentiation is not supported; use backward()")


def _is_dtensor(t: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # to import it takes long, and without it there is none
    return type(t) not in (Tensor, Parameter) and module is not None and isinstance(t, module.DTensor)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether nothing watches operators go by (a compiler, a dispatch mode, a subclass): plain tensors with storage."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(t is None or (type(t) in (Tensor, Parameter) and t.device.type != "meta") for t in tensors)


def check_quantized(x: Any, scale: str, *, wanted: bool) -> None:
    """Raise unless x, a QuantizedActivation, serves this call; `wanted`: for a weight's gradient, too."""
    if scale != x.scale:
        raise ValueError(f"{OP}: x was quantised with scale={x.scale!r} but scale is {scale!r}; they must be equal")
    if wanted and x.columns is None:
        raise ValueError(
            f"{OP}: x was quantised without gradients but weight needs one; call quantize_activation where they are on"
        )
    k = x.x.shape[-1]
    m = x.x.numel() // k
    _check_made("rows", x.rows, x.row_scales, m, k, x.x.device)
    if x.columns is not None:
        _check_made("columns", x.columns, x.column_scales, k, m, x.x.device)


def _check_made(name: str, data: Tensor, scales: Tensor, rows: int, columns: int, device: torch.device) -> None:
    """Raise unless these are `torch_quantize.empty_rows` of a matrix [rows, columns]: kernels rely on it."""
    expected = (
        (data, FP8["e4m3"], (rows, numbers.up(columns))),
        (scales, torch.float32, (numbers.blocks(columns), rows)),
    )
    for t, dtype, shape in expected:
        if t.dtype != dtype or t.shape != shape or t.device != device or not t.is_contiguous():
            raise ValueError(
                f"{OP}: x is not as quantize_activation made it: {name} must be {dtype_name(dtype)}, contiguous, of "
                f"shape {list(shape)} on {device}; got {dtype_name(t.dtype)}, {list(t.shape)} on {t.device}.  Pass it "
                "on as it is; with FSDP2's mixed precision, quantise inside of the module that casts its inputs"
            )


def result_dtype(x: Tensor) -> torch.dtype:
    """x's dtype, or autocast's."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        if dtype not in DTYPES:
            raise TypeError(f"{numbers.OP}: autocast to {dtype_name(dtype)} is not supported")
        return dtype
    return x.dtype
