"""What the operators of cross_entropy take, whichever backend they belong to."""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import DTYPES
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.rows import torch as torch_rows
from onchip.vocab.rows.memory import Problem
from onchip.vocab.torch import tiles as torch_tiles
from onchip.vocab.torch.loss import Loss


class Arguments(NamedTuple):
    """What the operators of both backends are told, in order."""

    logits: Tensor  # [..., V]
    target: Tensor  # [...]
    token_weight: Tensor | None  # [...]
    token_temperature: Tensor | None  # [...] or []
    normalizer: Tensor | None  # []
    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    temperature: float
    check_inputs: bool
    scratch_bytes: int | None
    stats: bool
    inplace: bool
    grad: bool

    @property
    def fused(self) -> bool:
        """Whether the Triton backend makes the gradient in forward."""
        return self.grad and not self.inplace and self.reduction != "none"

    def prepare(self, *, check_values: bool) -> tuple[torch_tiles.Transform, Loss, torch_tiles.Tokens]:
        """What happens to the logits, what is added up of them, and the tokens."""
        vocab = self.logits.shape[-1]
        tokens = torch_tiles.select_tokens(
            "cross_entropy",
            self.target,
            vocab,
            self.token_weight,
            self.token_temperature,
            self.normalizer,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            temperature=self.temperature,
            check_values=check_values,
        )
        return torch_tiles.Transform(self.logit_scale, self.softcap), Loss(self.label_smoothing, self.z_loss), tokens

    def chunk(self, tokens: torch_tiles.Tokens) -> int:
        """The rows of a chunk, the same in forward and backward: a budget that is too small is refused in forward."""
        flat = torch_rows.flatten(self.logits) is not None
        problem = Problem(
            tokens=self.target.numel(),
            vocab=self.logits.shape[-1],
            dtype=DTYPES[self.logits.dtype],
            device="cpu" if self.logits.device.type == "cpu" else "cuda",
            grad=self.grad,
            softcap=self.softcap is not None,
            stats=self.stats,
            gathered=not flat or (tokens.index is not None and self.logits.dtype != torch.float32),
        )
        return row_memory.plan(problem, self.scratch_bytes)
