"""What the public function checks at its door, without reading a value of a tensor."""

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import check_kinds, require_tensors
from onchip.ops.cross_entropy import spec
from onchip.ops.cross_entropy.spec import OP


def check_tensors(logits: Tensor, target: Tensor, token_weight: Tensor | None, temperature: Tensor | None) -> None:
    """Raise for what can be seen without reading values; `temperature` is None unless it is a tensor."""
    named = {"logits": logits, "target": target, "token_weight": token_weight, "temperature": temperature}
    tensors = require_tensors(OP, named, optional=("token_weight", "temperature"))
    per_token = {
        name: x.shape for name, x in tensors.items() if name == "token_weight" or (name == "temperature" and x.ndim)
    }
    spec.check_shapes(logits.shape, target.shape, per_token)
    check_kinds(OP, tensors, integers=("target",), constants=("token_weight", "temperature"))


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
