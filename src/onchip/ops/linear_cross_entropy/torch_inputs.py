"""What the public function checks at its door, without reading a value of a tensor."""

import torch
from torch import Tensor

from onchip.ops._shared.torch_inputs import check_kinds, dtype_name, product_dtype, require_tensors
from onchip.ops.linear_cross_entropy import spec
from onchip.ops.linear_cross_entropy.spec import OP


def check_tensors(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    token_weight: Tensor | None,
    temperature: Tensor | None,
) -> torch.dtype:
    """Raise for what can be seen without reading values; return the dtype of the matrix products."""
    named = {"hidden": hidden, "weight": weight, "target": target, "bias": bias}
    named |= {"token_weight": token_weight, "temperature": temperature}
    tensors = require_tensors(OP, named, optional=("bias", "token_weight", "temperature"))
    per_token = {
        name: x.shape for name, x in tensors.items() if name == "token_weight" or (name == "temperature" and x.ndim)
    }
    spec.check_shapes(hidden.shape, weight.shape, target.shape, None if bias is None else bias.shape, per_token)
    check_kinds(OP, tensors, integers=("target",), constants=("token_weight", "temperature"))
    return product_dtype(OP, tensors)


def check_weight_grad_out(out: Tensor | None, weight: Tensor) -> None:
    """Raise unless `out` can take the weight's gradient."""
    if out is None:
        return
    if not isinstance(out, Tensor):
        raise TypeError(f"{OP}: weight_grad_out must be a torch.Tensor; got {type(out).__name__}")
    if out.dtype != torch.float32:
        raise TypeError(f"{OP}: weight_grad_out must be float32; got {dtype_name(out.dtype)}")
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
