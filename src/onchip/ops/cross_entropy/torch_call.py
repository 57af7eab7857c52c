"""The arguments, outputs and memory of the operator, and what can be overwritten."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_autograd import graph_is_kept
from onchip.frontend.torch_inputs import LOSS_DTYPES
from onchip.ops.cross_entropy import OP, CrossEntropyOptions, may_overlap
from onchip.vocab.rows.call import RowsCall
from onchip.vocab.torch import dense, labels, loss
from onchip.vocab.torch.agreement import require_agreement
from onchip.vocab.torch.tiles import Tokens, flatten


@dataclass(frozen=True)
class CrossEntropyCall(RowsCall):
    """The arguments of the operator."""

    options: CrossEntropyOptions
    token_weight: Tensor | None  # [...]
    normalizer: Tensor | None  # []
    class_weight: Tensor | None  # [V] in the dtype of sums, contiguous; None where token_weight has it
    labels: Tensor | None
    """As in the next class in `vocab.torch.labels`; if every entry has a label, this rank has those of its columns."""
    kind: str

    @property
    def dtype(self) -> torch.dtype:
        """The logits' dtype."""
        return self.logits.dtype

    @property
    def dense(self) -> bool:
        """Whether every entry has a label."""
        return self.kind == "dense"

    @property
    def ignored(self) -> bool:
        return self.kind == "ids"

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
    def sent(self) -> int:
        return dense.SENT if self.dense else self.several

    @property
    def of_op(self) -> dict[str, Any]:
        weighed = self.class_weight is not None and (self.kernels or self.options.label_smoothing > 0)
        if self.labels is not None and self.dense:
            gathered = flatten(self.labels) is None
            return {"class_weight": weighed, "labels": LOSS_DTYPES[self.labels.dtype], "gathered": gathered}
        ids = 0 if self.kind == "ids" else self.several
        return {"class_weight": weighed, "stats": self.options.return_stats, "ids": ids}

    def tokens(self, *, check_values: bool) -> Tokens:
        return labels.tokens(OP, self, check_values=check_values, compact=not self.kernels)

    def check_ranks(self) -> None:
        """On the CPU and with check_inputs: raise where ranks' arguments don't belong together."""
        sizes = self.logits.shape[:-1], self.logits.dtype, self.kind
        require_agreement(
            OP, self, sizes, self.ids, None if self.dense else self.labels, self.token_weight, self.normalizer,
            self.class_weight, self.token_temperature, split={"logits": self.logits}, check=self.require_memory,
        )  # fmt: skip


class CrossEntropyOutputs(NamedTuple):
    """The operator's outputs."""

    out: loss.LossOutputs
    divisor: Tensor | None  # [] float32: what the mean divides by, where kernels compute the loss of ids
    gradient: Tensor | None  # [..., V]: the logits' gradient, where forward computes it

    @staticmethod
    def empty(call: CrossEntropyCall) -> "CrossEntropyOutputs":
        """Outputs that are still to be filled."""
        logits, of_kernels = call.logits, call.kernels and call.kind == "ids"
        gradient = stated.empty_like(logits) if call.in_forward else None
        out = loss.LossOutputs.empty(call, logits, kernels=call.kernels)
        return CrossEntropyOutputs(
            out, stated.empty((), torch.float32, logits.device) if of_kernels else None, gradient
        )


class CrossEntropyKept(NamedTuple):
    """What forward keeps for backward."""

    call: CrossEntropyCall
    lse: Tensor
    log_prob: Tensor
    largest: Tensor | None
    mass: Tensor | None
    divisor: Tensor | None
    gradient: Tensor | None

    @staticmethod
    def of(call: CrossEntropyCall, made: CrossEntropyOutputs) -> "CrossEntropyKept":
        out = made.out
        return CrossEntropyKept(call, out.lse, out.log_prob, out.largest, out.mass, made.divisor, made.gradient)

    @property
    def overwrites(self) -> bool:
        """Whether the gradient is written over the logits."""
        return self.call.options.inplace_backward and not graph_is_kept()

    def new_gradient(self) -> Tensor:
        """Memory for the gradient: contiguous whatever the logits' strides, or the logits'."""
        logits = self.call.logits
        # Detached, it still counts as a change of the logits: whatever saved them for its own backward will raise.
        return logits.detach() if self.overwrites else stated.empty_like(logits)


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
