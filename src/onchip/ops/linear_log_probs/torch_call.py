"""Arguments and outputs of both backends in PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
        return {"op": OP, "ids": self.several, "stats": self.options.entropy}

    def tokens(self, *, check_values: bool) -> Ids:
        """Which tokens and ids count; values are always checked on the CPU."""
        return tiles.select(
            OP,
            "ids",
            self.ids,
            self.number,
            self.weight.shape[0],
            self.token_temperature,
            ignore_index=self.options.ignore_index,
            temperature=self.options.temperature,
            check_values=check_values,
        )

    def empty_outputs(self, *, stats: bool) -> "Outputs":
        """Not yet filled; with `stats` the entropy and top1 too."""
        return Outputs.empty(self.hidden, self.ids, stats=stats)


class Outputs(NamedTuple):
    """The first outputs of each operator."""

    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    top1: Tensor | None

    @staticmethod
    def empty(of: Tensor, ids: Tensor, *, stats: bool) -> "Outputs":
        """Not yet filled, for hidden states or logits [..., N]."""
        shape = of.shape[:-1]

        def make(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
            return of.new_empty(shape, dtype=dtype)

        more = make(shape), make(shape, torch.int64)
        return Outputs(make(ids.shape), more[0] if stats else None, make(shape), more[1] if stats else None)
