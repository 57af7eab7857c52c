"""The arguments that the operators of all losses of existing logits share."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import LOSS_DTYPES
from onchip.frontend.torch_parallel import Shards
from onchip.vocab.chunks import ChunkConfig
from onchip.vocab.rows import memory
from onchip.vocab.torch import parallel
from onchip.vocab.torch.tiles import Ids, flatten


@dataclass(frozen=True)
class RowsCall:
    """Logits, and the ids whose probabilities are asked for; an op adds its own arguments.

    If the vocabulary is sharded over ranks, the logits are this rank's columns, and everything else is for the whole
    vocabulary.
    """

    logits: Tensor  # [..., V]
    ids: Tensor  # [...] or [..., K]
    token_temperature: Tensor | None  # [...] or []
    options: Any  # the op's own
    shards: Shards
    """This rank's part of the vocabulary; `WHOLE` if it has all."""
    kernels: bool
    """Whether ranks run Triton's kernels, which take ignored tokens too."""
    grads: tuple[bool, ...]  # of logits

    @property
    def number(self) -> int:
        """T, the number of tokens."""
        return math.prod(self.logits.shape[:-1])  # (numel() of symbols is a number)

    @property
    def several(self) -> int:
        """K, the ids per token; 1 if ids have no dimension for it."""
        return self.ids.shape[-1] if self.ids.ndim == self.logits.ndim else 1

    @property
    def vocab(self) -> int:
        """V over all ranks, the range of ids."""
        return self.shards.vocab if self.shards.there else self.logits.shape[-1]

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
    def ignored(self) -> bool:
        """Whether an id may be the options' ignore_index."""
        return True

    @property
    def of_targets(self) -> bool:
        """Whether each token has one id, whose statistics have kernels of their own."""
        return False

    @property
    def of_op(self) -> dict[str, Any]:
        """The problem's fields that the op knows."""
        raise NotImplementedError

    @property
    def sent(self) -> int:
        """How many numbers of each token ranks exchange, as `parallel.sent_bytes` counts them."""
        return self.several

    def tokens(self, *, check_values: bool) -> Any:
        """Which tokens and ids count; values are always checked on the CPU, unless kernels run."""
        raise NotImplementedError

    def problem(self, tokens: Ids | None = None) -> memory.RowsProblem:
        """The problem that plans are made for; kernels need no `tokens`."""
        mine, of_op = self.mine, dict(self.of_op)
        gathered = of_op.pop("gathered", False) or flatten(mine) is None
        if tokens is not None and tokens.index is not None:
            gathered = gathered or mine.dtype != tokens.dtype
        given: dict[str, Any] = {
            "tokens": self.number,
            "vocab": mine.shape[-1],
            "dtype": LOSS_DTYPES[mine.dtype],
            "device": "cpu" if mine.device.type == "cpu" else "cuda",
            "grad": self.grads[0],
            "softcap": self.options.softcap is not None,
            "gathered": gathered,
            "triton": self.kernels,
            "sent": parallel.sent_bytes(self.number, self.sent, self.shards, mine) if self.shards.there else 0,
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
