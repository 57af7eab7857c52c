"""Arguments and outputs of both backends in PyTorch."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_inputs import accumulator
from onchip.ops.linear_log_probs.spec import OP, Options
from onchip.vocab.torch import tiles
from onchip.vocab.torch.call import LinearCall
from onchip.vocab.torch.tiles import Ids


@dataclass(frozen=True)
class Call(LinearCall):
    """The arguments of an operator."""

    options: Options

    @property
    def of_op(self) -> dict[str, Any]:
        more = self.options.mean_logits + self.options.log_sum_sq_probs
        return {"op": OP, "ids": self.several, "stats": self.options.entropy, "more_stats": more}

    def tokens(self, *, check_values: bool, compact: bool = True) -> Ids:
        """Which tokens and ids count; values are always checked on the CPU, unless all tokens are to be there."""
        return tiles.select(
            OP,
            "ids",
            self.ids,
            self.number,
            self.vocab,
            self.token_temperature,
            ignore_index=self.options.ignore_index,
            temperature=self.options.temperature,
            dtype=self.dtype,
            check_values=check_values,
            compact=compact and not self.kernels,
            first=(1, *[0] * (self.ids.ndim + 1 - self.hidden.ndim)) if self.options.shift else (),
        )

    def empty_outputs(self, *, entropy: bool, top1: bool) -> "Outputs":
        """Not yet filled."""
        return Outputs.empty(self.options, self.hidden, self.ids, entropy=entropy, top1=top1)


class Outputs(NamedTuple):
    """The first outputs of each operator."""

    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    top1: Tensor | None
    mean_logits: Tensor | None
    log_sum_sq_probs: Tensor | None

    @staticmethod
    def empty(options: Options, of: Tensor, ids: Tensor, *, entropy: bool, top1: bool) -> "Outputs":
        """Not yet filled, for hidden states or logits [..., N]."""
        shape, total = of.shape[:-1], accumulator(of.dtype)

        def make(wanted: bool, dtype: torch.dtype = total) -> Any:
            return stated.empty(shape, dtype, of.device) if wanted else None

        return Outputs(
            stated.empty(ids.shape, total, of.device),
            make(entropy),
            make(True),
            make(top1, torch.int64),
            make(options.mean_logits),
            make(options.log_sum_sq_probs),
        )
