"""What the public functions check at their door, without reading a value of a tensor."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from onchip.ops._shared.torch_inputs import DTYPES, dtype_name, require_tensors
from onchip.ops.fp8_linear import spec
from onchip.ops.fp8_linear.spec import OP
from onchip.ops.fp8_linear.torch_quantize import FP8


def check_tensors(op: str, **named: Any) -> None:
    """Raise for what can be seen of the tensors; a bias may be None.  All are where the first one is."""
    first = next(iter(named))
    device = None
    for name, t in require_tensors(op, named, optional=("bias",)).items():
        if t.dtype not in DTYPES:
            raise TypeError(f"{op}: {name} must be float32, bfloat16 or float16; got {dtype_name(t.dtype)}")
        device = device or t.device
        if t.device != device:
            raise ValueError(f"{op}: {name} is on {t.device} but {first} is on {device}; move it there")


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether nothing watches operators go by (a compiler, a dispatch mode, a subclass): plain tensors with storage."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(t is None or (type(t) in (Tensor, Parameter) and t.device.type != "meta") for t in tensors)


def check_quantized(x: Any, scale: str, *, wanted: bool) -> None:
    """Raise unless x, a QuantizedActivation, serves this call; `wanted`: for a weight's gradient, too."""
    _check_how(OP, "x", x.scale, scale, "weight" if wanted and x.columns is None else None)
    k = x.x.shape[-1]
    m = x.x.numel() // k
    _check_made(OP, "x", "rows", x.rows, x.row_scales, m, k, x.x.device)
    if x.columns is not None:
        _check_made(OP, "x", "columns", x.columns, x.column_scales, k, m, x.x.device)


def check_quantized_weight(op: str, w: Any, scale: str, *, wanted: str | None) -> None:
    """Raise unless w, a QuantizedWeight, serves this call; for the gradient of the input named `wanted`, too."""
    _check_how(op, "weight", w.scale, scale, wanted if w.transposed is None else None)
    n, k = w.weight.shape
    _check_made(op, "weight", "rows", w.rows, w.row_scales, n, k, w.weight.device)
    if w.transposed is not None:
        _check_made(op, "weight", "transposed", w.transposed, w.transposed_scales, k, n, w.weight.device)


_MAKERS = {"x": "quantize_activation", "weight": "quantize_weight"}


def _check_how(op: str, name: str, made: str, scale: str, missing: str | None) -> None:
    if made != scale:
        raise ValueError(f"{op}: {name} was quantised with scale={made!r} but scale is {scale!r}; they must be equal")
    if missing:
        raise ValueError(
            f"{op}: {name} was quantised without gradients but {missing} needs one; "
            f"call {_MAKERS[name]} where they are on"
        )


def _check_made(
    op: str, name: str, part: str, data: Tensor, scales: Tensor, rows: int, columns: int, device: torch.device
) -> None:
    """Raise unless these are `torch_quantize.empty_rows`, or `empty_blocks`, of a matrix [rows, columns].

    Kernels rely on it.
    """
    along = spec.blocks(columns)
    by_block = (spec.blocks(rows), spec.up(along, spec.SCALE_MULTIPLE))
    expected = (
        (data, FP8["e4m3"], (rows, spec.up(columns))),
        (scales, torch.float32, by_block if name == "weight" else (along, rows)),
    )
    for t, dtype, shape in expected:
        if t.dtype != dtype or t.shape != shape or t.device != device or not t.is_contiguous():
            raise ValueError(
                f"{op}: {name} is not as {_MAKERS[name]} made it: {part} must be {dtype_name(dtype)}, contiguous, of "
                f"shape {list(shape)} on {device}; got {dtype_name(t.dtype)}, {list(t.shape)} on {t.device}.  Pass it "
                "on as it is; with FSDP2's mixed precision, quantise inside of the module that casts its inputs"
            )


def result_dtype(x: Tensor) -> torch.dtype:
    """x's dtype, or autocast's."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        if dtype not in DTYPES:
            raise TypeError(f"{spec.OP}: autocast to {dtype_name(dtype)} is not supported")
        return dtype
    return x.dtype
