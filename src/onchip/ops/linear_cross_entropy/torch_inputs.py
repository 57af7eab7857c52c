"""What the public function checks at its door, without reading a value of a tensor."""

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from onchip.ops.linear_cross_entropy import spec
from onchip.ops.linear_cross_entropy.spec import OP

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_INTEGERS = frozenset(
    (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
)


def check_tensors(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    token_weight: Tensor | None,
    temperature: Tensor | None,
) -> torch.dtype:
    """Raise for what can be seen without reading values; return the dtype of the matrix products."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{OP}: torch.func transforms (grad, vmap, jvp, ...) are not supported; use torch.autograd")
    named = {"hidden": hidden, "weight": weight, "target": target, "bias": bias}
    named |= {"token_weight": token_weight, "temperature": temperature}
    for name, x in named.items():
        if not isinstance(x, Tensor) and not (x is None and name not in ("hidden", "weight", "target")):
            raise TypeError(f"{OP}: {name} must be a torch.Tensor; got {type(x).__name__}")
    tensors = {name: x for name, x in named.items() if x is not None}
    if not torch.compiler.is_compiling() and any(unpack_dual(x).tangent is not None for x in tensors.values()):
        raise RuntimeError(f"{OP}: forward-mode differentiation is not supported; use backward()")
    per_token = {
        name: x.shape for name, x in tensors.items() if name == "token_weight" or (name == "temperature" and x.ndim)
    }
    spec.check_shapes(hidden.shape, weight.shape, target.shape, None if bias is None else bias.shape, per_token)
    for name, x in tensors.items():
        if x.device != hidden.device:
            raise ValueError(f"{OP}: {name} is on {x.device} but hidden is on {hidden.device}; move it there")
        if name == "target":
            if x.dtype not in _INTEGERS:
                raise TypeError(f"{OP}: target must hold integers; got {_name(x.dtype)}")
        elif name in ("token_weight", "temperature"):
            if x.dtype.is_complex:
                raise TypeError(f"{OP}: {name} must be real; got {_name(x.dtype)}")
            if x.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{OP}: {name} gets no gradient from this op; pass {name}.detach()")
        elif x.dtype not in DTYPES:
            raise TypeError(f"{OP}: {name} must be float32, bfloat16 or float16; got {_name(x.dtype)}")
    device = hidden.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    for name in ("weight", "bias"):
        if name in tensors and tensors[name].dtype != hidden.dtype:
            raise TypeError(
                f"{OP}: hidden is {_name(hidden.dtype)} but {name} is {_name(tensors[name].dtype)}; "
                "cast one of them, or run under torch.autocast"
            )
    return hidden.dtype


def check_normalizer(normalizer: float | Tensor | None, reduction: str, hidden: Tensor) -> Tensor | None:
    """The normalizer as a 0-d float32 tensor, so that a new count does not recompile anything."""
    if normalizer is None:
        return None
    if reduction != "mean":
        raise ValueError(f"{OP}: normalizer is what reduction='mean' divides by; got reduction={reduction!r}")
    if not isinstance(normalizer, Tensor):
        spec.require_positive("normalizer", normalizer)
        return torch.full((), float(normalizer), dtype=torch.float32, device=hidden.device)
    if normalizer.ndim != 0:
        raise ValueError(f"{OP}: normalizer must be a number or a 0-d tensor; got shape {list(normalizer.shape)}")
    if normalizer.dtype.is_complex or normalizer.dtype == torch.bool:
        raise TypeError(f"{OP}: normalizer must be a real number; got {_name(normalizer.dtype)}")
    if normalizer.device not in (hidden.device, torch.device("cpu")):
        raise ValueError(f"{OP}: normalizer is on {normalizer.device} but hidden is on {hidden.device}; move it there")
    if normalizer.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{OP}: normalizer gets no gradient from this op; pass normalizer.detach()")
    return normalizer


def check_weight_grad_out(out: Tensor | None, weight: Tensor) -> None:
    """Raise unless `out` can take the weight's gradient."""
    if out is None:
        return
    if not isinstance(out, Tensor):
        raise TypeError(f"{OP}: weight_grad_out must be a torch.Tensor; got {type(out).__name__}")
    if out.dtype != torch.float32:
        raise TypeError(f"{OP}: weight_grad_out must be float32; got {_name(out.dtype)}")
    if out.shape != weight.shape or not out.is_contiguous():
        raise ValueError(
            f"{OP}: weight_grad_out must be contiguous, of weight's shape, {list(weight.shape)}; "
            f"got shape {list(out.shape)}, strides {list(out.stride())}"
        )
    if out.device != weight.device:
        raise ValueError(f"{OP}: weight_grad_out is on {out.device} but weight is on {weight.device}; move it there")
    if out.requires_grad:
        raise ValueError(f"{OP}: weight_grad_out must not require a gradient; pass weight_grad_out.detach()")
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{OP}: weight_grad_out is not supported inside torch.compile")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
