"""What the public function checks at its door, without reading a value of a tensor."""

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from onchip.ops.linear_cross_entropy.torch_inputs import _INTEGERS, DTYPES, _name
from onchip.ops.linear_log_probs import spec
from onchip.ops.linear_log_probs.spec import OP


def check_tensors(
    hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, temperature: Tensor | None
) -> torch.dtype:
    """Raise for what can be seen without reading values; return the dtype of the matrix products."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{OP}: torch.func transforms (grad, vmap, jvp, ...) are not supported; use torch.autograd")
    named = {"hidden": hidden, "weight": weight, "ids": ids, "bias": bias, "temperature": temperature}
    for name, x in named.items():
        if not isinstance(x, Tensor) and not (x is None and name in ("bias", "temperature")):
            raise TypeError(f"{OP}: {name} must be a torch.Tensor; got {type(x).__name__}")
    tensors = {name: x for name, x in named.items() if x is not None}
    if not torch.compiler.is_compiling() and any(unpack_dual(x).tangent is not None for x in tensors.values()):
        raise RuntimeError(f"{OP}: forward-mode differentiation is not supported; use backward()")
    spec.check_shapes(
        hidden.shape,
        weight.shape,
        ids.shape,
        None if bias is None else bias.shape,
        () if temperature is None else temperature.shape,
    )
    for name, x in tensors.items():
        if x.device != hidden.device:
            raise ValueError(f"{OP}: {name} is on {x.device} but hidden is on {hidden.device}; move it there")
        if name == "ids":
            if x.dtype not in _INTEGERS:
                raise TypeError(f"{OP}: ids must hold integers; got {_name(x.dtype)}")
        elif name == "temperature":
            if x.dtype.is_complex or x.dtype == torch.bool:
                raise TypeError(f"{OP}: temperature must be real; got {_name(x.dtype)}")
            if x.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{OP}: temperature gets no gradient from this op; pass temperature.detach()")
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
