"""The arguments that the operators of all losses of existing logits share."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import LOSS_DTYPES
from onchip.vocab.chunks import ChunkConfig
from onchip.vocab.rows import memory
from onchip.vocab.torch import parallel
from onchip.vocab.torch.call import VocabCall
from onchip.vocab.torch.dense import SENT
from onchip.vocab.torch.tiles import Ids, flatten


@dataclass(frozen=True, kw_only=True)
class RowsCall(VocabCall):
    """What a loss asks about logits that exist."""

    logits: Tensor  # [..., V]
    grads: tuple[bool, ...]  # of logits

    given = property(lambda self: self.logits)
    leading = property(lambda self: self.logits.shape[:-1])

    @property
    def dtype(self) -> torch.dtype:
        """The logits' dtype."""
        return self.logits.dtype

    @property
    def vocab(self) -> int:
        return self.shards.vocab if self.shards.there else self.logits.shape[-1]

    @property
    def number(self) -> int:
        return math.prod(self.logits.shape[:-1])  # (numel() of symbols is a number)

    @property
    def of_ranks(self) -> dict[str, Any]:
        """What is compared over ranks, as `require_agreement` takes it."""
        return {"split": {"logits": self.logits}}

    @property
    def sizes(self) -> Any:
        """The sizes that all ranks must have in common."""
        return self.leading, self.dtype

    @property
    def mine(self) -> Tensor:
        """[..., rows]: this rank's logits without padding."""
        return self.logits[..., : self.shards.rows] if self.shards.there else self.logits

    @property
    def runs_kernels(self) -> bool:
        """Whether this rank runs them: an empty shard has nothing for kernels, and tells other ranks the same
        without.
        """
        return self.kernels and (self.shards.rows > 0 or not self.shards.there)

    @property
    def operand(self) -> torch.dtype:
        """The dtype in which products would read the gradient; here there are none."""
        return torch.float32

    @property
    def of_targets(self) -> bool:
        """Whether each token has one id, whose statistics have kernels of their own."""
        return False

    def problem(self, tokens: Ids | None = None) -> memory.RowsProblem:
        """The problem that plans are made for; kernels need no `tokens`."""
        mine, of_op = self.mine, dict(self.of_op)
        gathered = of_op.pop("gathered", False) or flatten(mine) is None
        if tokens is not None and tokens.index is not None:
            gathered = gathered or mine.dtype != tokens.dtype
        sent = 0
        if self.shards.there:
            sent = parallel.sent_bytes(self.number, SENT if self.dense else self.several, self.shards, mine)
        given: dict[str, Any] = {
            "tokens": self.number,
            "vocab": mine.shape[-1],
            "dtype": LOSS_DTYPES[mine.dtype],
            "device": "cpu" if mine.device.type == "cpu" else "cuda",
            "grad": self.grads[0],
            "softcap": self.options.softcap is not None,
            "gathered": gathered,
            "triton": self.kernels,
            "sent": sent,
        }
        return memory.RowsProblem(**given, **of_op)

    def require_memory(self) -> None:
        """Raise for labels, and for a scratch_bytes, that no config can be made for."""
        if not self.runs_kernels:
            self.config(self.tokens(check_values=self.options.check_inputs))
        elif self.options.scratch_bytes is not None:
            self.config()

    def config(self, tokens: Ids | None = None) -> ChunkConfig:
        """The rows of a chunk, the same in forward and backward, so that forward refuses a budget that is too small."""
        vocab = self.mine.shape[-1]
        if self.shards.there and vocab == 0:
            return ChunkConfig("forward", 1, 1)
        return ChunkConfig("forward", memory.plan(self.problem(tokens), "", self.options.scratch_bytes), vocab)
