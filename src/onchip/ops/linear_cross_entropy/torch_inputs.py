"""What the public function checks at its door, without reading a value of a tensor."""

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import check_kinds, product_dtype, require_tensors
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
