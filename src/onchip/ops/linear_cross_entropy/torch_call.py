"""Arguments of every backend in PyTorch."""

from dataclasses import dataclass
from typing import Any

from onchip.frontend.torch_inputs import LOSS_DTYPES, leading_dimensions
from onchip.ops.linear_cross_entropy import OP, LinearCrossEntropyOptions
from onchip.vocab import memory
from onchip.vocab.torch.call import LinearCall
from onchip.vocab.torch.operator import cross_entropy


@dataclass(frozen=True, kw_only=True)
class LinearCrossEntropyCall(LinearCall):
    """The arguments of an operator."""

    options: LinearCrossEntropyOptions

    op = OP

    @property
    def of_op(self) -> dict[str, Any]:
        options = self.options
        known: dict[str, Any] = {"op": OP, "weight_grad_out": self.weight_grad_out is not None}
        if self.labels is not None and self.dense:
            gathered = len(leading_dimensions(self.labels)) > 1
            return known | {"labels": LOSS_DTYPES[self.labels.dtype], "gathered": gathered}
        known |= {"smoothing": options.label_smoothing, "class_weight": self.class_weight is not None}
        known |= {"stats": options.return_stats}
        if self.kind == "ids":
            return known | {"per_token_loss": options.reduction == "none", "even": self.shards.most > 0}
        return known | {"ids": self.several}

    @property
    def of_kernels(self) -> dict[str, Any]:
        # With labels of K ids kernels get another call.
        weighed = {"class_weight": self.class_weight is not None}
        return weighed | {"stats": self.options.return_stats} if self.dense else weighed

    def require_memory(self) -> str:
        """The strategy of PyTorch's own products, before labels are read: 'forward' and 'recompute' are one way.

        Raises ValueError if scratch_bytes is too small.
        """
        # The worst case of targets: all of them count.
        problem = self.problem(compacted=self.device == "cpu" and self.kind == "ids")
        if self.kind == "ids" and not self.shards.there:
            return memory.choose_strategy(problem, self.options.strategy, self.budget)
        strategy = "stash" if self.dense else "recompute" if any(self.grads) else "forward"
        memory.PLANNER.require(problem, strategy, self.budget)
        return "recompute"


LOSS = cross_entropy(OP, LinearCrossEntropyCall)
