"""What the public function checks at its door, without reading a value of a tensor."""

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from onchip.ops.cross_entropy import spec
from onchip.ops.cross_entropy.spec import OP
from onchip.ops.linear_cross_entropy.torch_inputs import DTYPES

_INTEGERS = frozenset(
    (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
)


def check_tensors(logits: Tensor, target: Tensor, token_weight: Tensor | None, temperature: Tensor | None) -> None:
    """Raise for what can be seen without reading values; `temperature` is None unless it is a tensor."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{OP}: torch.func transforms (grad, vmap, jvp, ...) are not supported; use torch.autograd")
    named = {"logits": logits, "target": target, "token_weight": token_weight, "temperature": temperature}
    for name, x in named.items():
        if not isinstance(x, Tensor) and not (x is None and name not in ("logits", "target")):
            raise TypeError(f"{OP}: {name} must be a torch.Tensor; got {type(x).__name__}")
    tensors = {name: x for name, x in named.items() if x is not None}
    if not torch.compiler.is_compiling() and any(unpack_dual(x).tangent is not None for x in tensors.values()):
        raise RuntimeError(f"{OP}: forward-mode differentiation is not supported; use backward()")
    per_token = {
        name: x.shape for name, x in tensors.items() if name == "token_weight" or (name == "temperature" and x.ndim)
    }
    spec.check_shapes(logits.shape, target.shape, per_token)
    for name, x in tensors.items():
        if x.device != logits.device:
            raise ValueError(f"{OP}: {name} is on {x.device} but logits is on {logits.device}; move it there")
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


def check_normalizer(normalizer: float | Tensor | None, reduction: str, logits: Tensor) -> Tensor | None:
    """The normalizer as a 0-d float32 tensor, so that a new count does not recompile anything."""
    if normalizer is None:
        return None
    if reduction != "mean":
        raise ValueError(f"{OP}: normalizer is what reduction='mean' divides by; got reduction={reduction!r}")
    if not isinstance(normalizer, Tensor):
        spec.require_positive("normalizer", normalizer)
        return torch.full((), float(normalizer), dtype=torch.float32, device=logits.device)
    if normalizer.ndim != 0:
        raise ValueError(f"{OP}: normalizer must be a number or a 0-d tensor; got shape {list(normalizer.shape)}")
    if normalizer.dtype.is_complex or normalizer.dtype == torch.bool:
        raise TypeError(f"{OP}: normalizer must be a real number; got {_name(normalizer.dtype)}")
    if normalizer.device not in (logits.device, torch.device("cpu")):
        raise ValueError(f"{OP}: normalizer is on {normalizer.device} but logits is on {logits.device}; move it there")
    if normalizer.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{OP}: normalizer gets no gradient from this op; pass normalizer.detach()")
    return normalizer


def check_inplace(logits: Tensor) -> None:
    """Raise unless backward can overwrite `logits`; what needs no gradient isn't overwritten, and may be anything."""
    if not (logits.requires_grad and torch.is_grad_enabled()):
        return
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{OP}: inplace_backward is not supported inside torch.compile, which plans memory itself; leave it out"
        )
    remedy = "pass inplace_backward=False, or logits that a layer computed"
    if logits.is_leaf:
        raise ValueError(
            f"{OP}: inplace_backward=True would overwrite logits that are a leaf (a parameter or an input that "
            f"requires a gradient); {remedy}"
        )
    if logits._base is not None and logits._base.is_leaf:
        raise ValueError(
            f"{OP}: inplace_backward=True would overwrite logits that are a view of a leaf of shape "
            f"{list(logits._base.shape)}; {remedy}"
        )
    if spec.may_overlap(logits.shape, logits.stride()):
        raise ValueError(
            f"{OP}: inplace_backward=True needs logits whose elements each have a place of their own in memory; got "
            f"shape {list(logits.shape)} with strides {list(logits.stride())} (expanded?); {remedy}"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
