"""Arguments of every backend in PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onchip.ops.linear_cross_entropy.spec import OP, Options
from onchip.vocab.torch import tiles
from onchip.vocab.torch.call import LinearCall
from onchip.vocab.torch.loss import Outputs
from onchip.vocab.torch.tiles import Tokens


@dataclass(frozen=True)
class Call(LinearCall):
    """The arguments of an operator."""

    token_weight: Tensor | None  # [...]
    normalizer: Tensor | None  # []
    class_weight: Tensor | None  # [V] in the dtype of sums, contiguous; None where token_weight has it
    weight_grad_out: Tensor | None  # [V, H] in the dtype of sums; used in backward
    options: Options

    @property
    def target(self) -> Tensor:
        """The ids, [...]."""
        return self.ids

    def tokens(self, *, check_values: bool, compact: bool = True) -> Tokens:
        """Which tokens count; values are always checked on the CPU, unless all tokens are to be there."""
        first = (1,) if self.options.shift else ()
        compact = compact and not self.kernels
        return tiles.targets(
            OP, self, self.vocab, dtype=self.dtype, check_values=check_values, first=first, compact=compact
        )

    def divisor(self, kept: Tensor) -> Tensor:
        """0-d float32: what the loss is divided by, given which tokens are kept, or their number."""
        return tiles.divisor(OP, self.options.reduction, self.normalizer, kept)

    @property
    def of_op(self) -> dict[str, Any]:
        return {
            "op": OP,
            "per_token_loss": self.options.reduction == "none",
            "smoothing": self.options.label_smoothing,
            "class_weight": self.class_weight is not None,
            "stats": self.options.return_stats,
            "weight_grad_out": self.weight_grad_out is not None,
        }

    def empty_outputs(self) -> Outputs:
        """Not yet filled."""
        return Outputs.empty(self.options, self.hidden, self.target.shape)

    def empty_gradients(self, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """One that is added to memory of the caller's is None."""
        return super().empty_gradients((wanted[0], wanted[1] and self.weight_grad_out is None, wanted[2]))
