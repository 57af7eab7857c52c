"""What the public function checks at its door, without reading a value of a tensor."""

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import check_kinds, product_dtype, require_tensors
from onchip.ops.linear_log_probs import spec
from onchip.ops.linear_log_probs.spec import OP


def check_tensors(
    hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, temperature: Tensor | None
) -> torch.dtype:
    """Raise for what can be seen without reading values; return the dtype of the matrix products."""
    named = {"hidden": hidden, "weight": weight, "ids": ids, "bias": bias, "temperature": temperature}
    tensors = require_tensors(OP, named, optional=("bias", "temperature"))
    spec.check_shapes(
        hidden.shape,
        weight.shape,
        ids.shape,
        None if bias is None else bias.shape,
        () if temperature is None else temperature.shape,
    )
    check_kinds(OP, tensors, integers=("ids",), constants=("temperature",))
    return product_dtype(OP, tensors)
