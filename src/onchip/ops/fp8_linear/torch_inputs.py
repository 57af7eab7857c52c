"""What the public functions check at their door, without reading a value of a tensor."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.nn import Parameter

from onchip.ops._shared.torch_inputs import DTYPES, dtype_name
from onchip.ops.fp8_linear import spec
from onchip.ops.fp8_linear.spec import OP


def check_tensors(op: str, **named: Any) -> None:
    """Raise for what can be seen of the tensors, x among them; a bias may be None."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{op}: torch.func transforms (grad, vmap, jvp, ...) are not supported; use torch.autograd")
    x = named["x"]
    tensors = {name: t for name, t in named.items() if not (name == "bias" and t is None)}
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: {name} must be a torch.Tensor; got {type(t).__name__}")
        if t.dtype not in DTYPES:
            raise TypeError(f"{op}: {name} must be float32, bfloat16 or float16; got {dtype_name(t.dtype)}")
        if t.device != x.device:
            raise ValueError(f"{op}: {name} is on {t.device} but x is on {x.device}; move it there")
    if not torch.compiler.is_compiling() and any(unpack_dual(t).tangent is not None for t in tensors.values()):
        raise RuntimeError(f"{op}: forward-mode differentiation is not supported; use backward()")


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether nothing watches operators go by (a compiler, a dispatch mode, a subclass): plain tensors with storage."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    return all(t is None or (type(t) in (Tensor, Parameter) and t.device.type != "meta") for t in tensors)


def check_quantized(scale: str, x_scale: str, *, columns: bool, wanted: bool) -> None:
    """Raise unless what `quantize_activation` made serves this call."""
    if scale != x_scale:
        raise ValueError(f"{OP}: x was quantised with scale={x_scale!r} but scale is {scale!r}; they must be equal")
    if wanted and not columns:
        raise ValueError(
            f"{OP}: x was quantised without gradients but weight needs one; call quantize_activation where they are on"
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
