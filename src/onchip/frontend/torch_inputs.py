"""What PyTorch's public functions check at their door, without reading a value of a tensor."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from onchip.frontend.options import require_positive

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
INTEGERS = frozenset(
    (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
)


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def require_tensors(op: str, named: Mapping[str, Any], optional: Collection[str]) -> dict[str, Tensor]:
    """Raise unless all are tensors (or None where `optional`) outside of torch.func and forward mode; return those."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{op}: torch.func transforms (grad, vmap, jvp, ...) are not supported; use torch.autograd")
    for name, x in named.items():
        if not isinstance(x, Tensor) and not (x is None and name in optional):
            raise TypeError(f"{op}: {name} must be a torch.Tensor; got {type(x).__name__}")
    tensors = {name: x for name, x in named.items() if x is not None}
    if not torch.compiler.is_compiling() and any(unpack_dual(x).tangent is not None for x in tensors.values()):
        raise RuntimeError(f"{op}: forward-mode differentiation is not supported; use backward()")
    return tensors


def check_kinds(
    op: str, tensors: Mapping[str, Tensor], *, integers: Collection[str], constants: Collection[str] = ()
) -> None:
    """Raise unless all lie on the first one's device, `integers` hold integers, `constants` real numbers that need no
    gradient, and all others one of the float dtypes."""
    first, device = next((name, x.device) for name, x in tensors.items())
    for name, x in tensors.items():
        if x.device != device:
            raise ValueError(f"{op}: {name} is on {x.device} but {first} is on {device}; move it there")
        if name in integers:
            if x.dtype not in INTEGERS:
                raise TypeError(f"{op}: {name} must hold integers; got {dtype_name(x.dtype)}")
        elif name in constants:
            if x.dtype.is_complex or (name == "temperature" and x.dtype == torch.bool):
                raise TypeError(f"{op}: {name} must be real; got {dtype_name(x.dtype)}")
            refuse_gradient(op, name, x)
        elif x.dtype not in DTYPES:
            raise TypeError(f"{op}: {name} must be float32, bfloat16 or float16; got {dtype_name(x.dtype)}")


def refuse_gradient(op: str, name: str, x: Tensor) -> None:
    """Raise if `x` would silently get no gradient."""
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: {name} gets no gradient from this op; pass {name}.detach()")


def product_dtype(op: str, tensors: Mapping[str, Tensor], whose: str = "") -> torch.dtype:
    """The dtype of hidden @ weight.T + bias: that of all three, or autocast's.

    `whose` comes before the tensors' names: "student_" for student_hidden.
    """
    hidden = tensors[f"{whose}hidden"]
    device = hidden.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    for name in (f"{whose}weight", f"{whose}bias"):
        if name in tensors and tensors[name].dtype != hidden.dtype:
            raise TypeError(
                f"{op}: {whose}hidden is {dtype_name(hidden.dtype)} but {name} is {dtype_name(tensors[name].dtype)}; "
                "cast one of them, or run under torch.autocast"
            )
    return hidden.dtype


def check_normalizer(
    op: str, normalizer: float | Tensor | None, reduction: str, of: str, device: torch.device
) -> Tensor | None:
    """The normalizer as a 0-d float32 tensor, so that a new count does not recompile anything.

    `of` names the tensor that lies on `device`.
    """
    if normalizer is None:
        return None
    if reduction != "mean":
        raise ValueError(f"{op}: normalizer is what reduction='mean' divides by; got reduction={reduction!r}")
    if not isinstance(normalizer, Tensor):
        require_positive(op, "normalizer", normalizer)
        return torch.full((), float(normalizer), dtype=torch.float32, device=device)
    if normalizer.ndim != 0:
        raise ValueError(f"{op}: normalizer must be a number or a 0-d tensor; got shape {list(normalizer.shape)}")
    if normalizer.dtype.is_complex or normalizer.dtype == torch.bool:
        raise TypeError(f"{op}: normalizer must be a real number; got {dtype_name(normalizer.dtype)}")
    if normalizer.device not in (device, torch.device("cpu")):
        raise ValueError(f"{op}: normalizer is on {normalizer.device} but {of} is on {device}; move it there")
    refuse_gradient(op, "normalizer", normalizer)
    return normalizer


def check_weight_grad_out(op: str, out: Any, weight: Tensor) -> None:
    """Raise unless `out` can take the weight's gradient."""
    if out is None:
        return
    if not isinstance(out, Tensor):
        raise TypeError(f"{op}: weight_grad_out must be a torch.Tensor; got {type(out).__name__}")
    if out.dtype != torch.float32:
        raise TypeError(f"{op}: weight_grad_out must be float32; got {dtype_name(out.dtype)}")
    if out.shape != weight.shape or not out.is_contiguous():
        raise ValueError(
            f"{op}: weight_grad_out must be contiguous, of weight's shape, {list(weight.shape)}; "
            f"got shape {list(out.shape)}, strides {list(out.stride())}"
        )
    if out.device != weight.device:
        raise ValueError(f"{op}: weight_grad_out is on {out.device} but weight is on {weight.device}; move it there")
    if out.requires_grad:
        raise ValueError(f"{op}: weight_grad_out must not require a gradient; pass weight_grad_out.detach()")
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{op}: weight_grad_out is not supported inside torch.compile")
