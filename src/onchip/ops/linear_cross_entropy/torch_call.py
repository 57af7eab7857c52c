"""Arguments of every backend in PyTorch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onchip.frontend.torch_inputs import LOSS_DTYPES, leading_dimensions
from onchip.ops.linear_cross_entropy import OP, LinearCrossEntropyOptions
from onchip.vocab import memory
from onchip.vocab.torch import labels as labels_of
from onchip.vocab.torch import tiles
from onchip.vocab.torch.agreement import require_agreement
from onchip.vocab.torch.call import LinearCall
from onchip.vocab.torch.loss import LossOutputs
from onchip.vocab.torch.tiles import Tokens


@dataclass(frozen=True)
class LinearCrossEntropyCall(LinearCall):
    """The arguments of an operator."""

    token_weight: Tensor | None  # [...]
    normalizer: Tensor | None  # []
    class_weight: Tensor | None  # [V] in the dtype of sums, contiguous; None where token_weight has it
    weight_grad_out: Tensor | None  # [V, H] in the dtype of sums; used in backward
    options: LinearCrossEntropyOptions
    labels: Tensor | None
    """As in the next class in `vocab.torch.labels`; if every entry has a label, this rank has those of its rows."""
    kind: str

    @property
    def dense(self) -> bool:
        """Whether every entry has a label."""
        return self.kind == "dense"

    def tokens(self, *, check_values: bool, compact: bool = True) -> Tokens:
        """The tokens that count; values are always checked on the CPU, unless all tokens are to be kept."""
        return labels_of.tokens(OP, self, check_values=check_values, compact=compact and not self.kernels)

    def divisor(self, kept: Tensor) -> Tensor:
        """0-d float32: what the loss is divided by, given which tokens are kept, or their number."""
        return tiles.divisor(OP, self.options.reduction, self.normalizer, kept)

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

    def check_ranks(self, check: Callable[[], Any] | None = None) -> None:
        """On the CPU and with check_inputs: raise where ranks' arguments don't belong together; anywhere what `check`
        raises."""
        if self.shards.there:
            ids = self.ids if self.kind == "ids" else None
            require_agreement(
                OP, self, (self.sizes, self.kind), self.ids, None if self.dense else self.labels, self.token_weight,
                self.normalizer, self.class_weight, self.token_temperature, split={"weight": self.weight},
                hidden={"hidden": self.hidden}, ids=ids, check=check,
            )  # fmt: skip

    def empty_outputs(self, *, kernels: bool = False, reduced: bool = True) -> LossOutputs:
        """Outputs that are still to be filled, as from `LossOutputs.empty`."""
        return LossOutputs.empty(self, self.hidden, kernels=kernels, reduced=reduced)

    def empty_gradients(self, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Gradients that are still to be filled; None for one that is added to the caller's memory."""
        return super().empty_gradients((wanted[0], wanted[1] and self.weight_grad_out is None, wanted[2]))
