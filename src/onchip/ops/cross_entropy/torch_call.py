"""The operator's arguments and maths, and what can be overwritten."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import LOSS_DTYPES
from onchip.ops.cross_entropy import OP, CrossEntropyOptions, may_overlap
from onchip.vocab.rows.call import RowsCall
from onchip.vocab.torch.operator import cross_entropy
from onchip.vocab.torch.tiles import flatten


@dataclass(frozen=True, kw_only=True)
class CrossEntropyCall(RowsCall):
    """The arguments of the operator."""

    options: CrossEntropyOptions

    op = OP

    @property
    def of_targets(self) -> bool:
        return self.kind == "ids"

    @property
    def fused(self) -> bool:
        """Whether kernels compute everything: one id per token, and the whole vocabulary."""
        return self.kernels and self.kind == "ids" and not self.shards.there

    @property
    def in_forward(self) -> bool:
        """Whether forward makes the gradient."""
        options = self.options
        return self.fused and self.grads[0] and not options.inplace_backward and options.reduction != "none"

    @property
    def of_op(self) -> dict[str, Any]:
        weighed = self.class_weight is not None and (self.kernels or self.options.label_smoothing > 0)
        if self.labels is not None and self.dense:
            gathered = flatten(self.labels) is None
            return {"class_weight": weighed, "labels": LOSS_DTYPES[self.labels.dtype], "gathered": gathered}
        ids = 0 if self.kind == "ids" else self.several
        return {"class_weight": weighed, "stats": self.options.return_stats, "ids": ids}


LOSS = cross_entropy(OP, CrossEntropyCall)


def check_inplace(logits: Tensor) -> None:
    """Raise unless backward can overwrite `logits`.  Logits that need no gradient are never overwritten, and pass."""
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
    if may_overlap(logits.shape, logits.stride()):
        raise ValueError(
            f"{OP}: inplace_backward=True needs logits whose elements each have a place of their own in memory; got "
            f"shape {list(logits.shape)} with strides {list(logits.stride())} (expanded?); {remedy}"
        )
