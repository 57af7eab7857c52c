"""Arguments of log_probs' operators in PyTorch, and what backward is given."""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import LOSS_DTYPES
from onchip.ops.linear_log_probs.spec import LOGITS_OP, LogitsOptions
from onchip.vocab.rows.memory import Problem
from onchip.vocab.torch import tiles
from onchip.vocab.torch.tiles import Ids


class RowsCall(NamedTuple):
    """The arguments of the operators."""

    logits: Tensor  # [..., V]
    ids: Tensor  # [...] or [..., K]
    token_temperature: Tensor | None  # [...] or []
    options: LogitsOptions
    grads: tuple[bool, ...]  # of logits

    @property
    def number(self) -> int:
        """T."""
        return self.logits.shape[:-1].numel()

    @property
    def operand(self) -> torch.dtype:
        """No product reads the gradient."""
        return torch.float32

    def tokens(self, *, check_values: bool, compact: bool = True, vocab: int | None = None) -> Ids:
        """Which tokens and ids count; values are always checked on the CPU, unless all tokens are to be there.  Ids are
        of `vocab` entries, by default the logits'."""
        return tiles.select(
            LOGITS_OP,
            "ids",
            self.ids,
            self.number,
            self.logits.shape[-1] if vocab is None else vocab,
            self.token_temperature,
            ignore_index=self.options.ignore_index,
            temperature=self.options.temperature,
            dtype=self.logits.dtype,
            check_values=check_values,
            compact=compact,
        )

    def problem(self, *, kernels: bool = False, gathered: bool = False) -> Problem:
        """What plans are made for."""
        options, logits = self.options, self.logits
        return Problem(
            tokens=self.number,
            vocab=logits.shape[-1],
            dtype=LOSS_DTYPES[logits.dtype],
            device="cpu" if logits.device.type == "cpu" else "cuda",
            grad=self.grads[0],
            softcap=options.softcap is not None,
            stats=options.entropy,
            gathered=gathered,
            triton=kernels,
            op=LOGITS_OP,
            more_stats=options.mean_logits + options.log_sum_sq_probs,
            ids=self.ids.shape[-1] if self.ids.ndim == logits.ndim else 1,
        )


class Kept(NamedTuple):
    """What backward is given."""

    call: RowsCall
    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    mean: Tensor | None
