"""What both backends in PyTorch are told and return."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import DTYPES
from onchip.ops.linear_log_probs.spec import OP, Options, Problem
from onchip.vocab.torch import tiles
from onchip.vocab.torch.tiles import Ids


class Call(NamedTuple):
    """What an operator is told."""

    hidden: Tensor  # [..., H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    ids: Tensor  # [...] or [..., K]
    token_temperature: Tensor | None  # [...] or []
    dtype: torch.dtype  # of the products
    options: Options
    grads: tuple[bool, ...]  # of hidden, weight, bias
    copied: int
    """Bytes of the copies that are made of inputs whose strides don't suit."""

    @property
    def budget(self) -> int | None:
        return None if self.options.scratch_bytes is None else int(self.options.scratch_bytes)

    @property
    def number(self) -> int:
        """T."""
        return self.hidden.numel() // self.hidden.shape[-1]

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """What the gradients of hidden, weight and bias are returned in."""
        return self.hidden.dtype, self.weight.dtype, (self.weight if self.bias is None else self.bias).dtype

    def tokens(self, *, check_values: bool) -> Ids:
        """Which tokens and ids count; on the CPU values are checked all the same."""
        return tiles.select(
            OP,
            "ids",
            self.ids,
            self.number,
            self.weight.shape[0],
            self.token_temperature,
            ignore_index=int(self.options.ignore_index),
            temperature=float(self.options.temperature),
            check_values=check_values,
        )

    def problem(self, *, compacted: bool, entropy: bool | None = None) -> Problem:
        """What plans are made for."""
        vocab, size = self.weight.shape
        return Problem(
            tokens=self.number,
            hidden=size,
            vocab=vocab,
            ids=self.ids.shape[-1] if self.ids.ndim == self.hidden.ndim else 1,
            dtype=DTYPES[self.dtype],
            hidden_dtype=DTYPES[self.hidden.dtype],
            weight_dtype=DTYPES[self.weight.dtype],
            device="cpu" if self.hidden.device.type == "cpu" else "cuda",
            grad_hidden=self.grads[0],
            grad_weight=self.grads[1],
            grad_bias=self.grads[2],
            softcap=self.options.softcap is not None,
            entropy=self.options.entropy if entropy is None else entropy,
            compacted=compacted,
            copied=self.copied,
        )


class Outputs(NamedTuple):
    """What each operator returns first."""

    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    top1: Tensor | None


def empty_outputs(call: Call, stats: bool) -> Outputs:
    """Not yet filled; with `stats` the entropy and top1 too."""
    shape = call.hidden.shape[:-1]

    def make(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        return call.hidden.new_empty(shape, dtype=dtype)

    return Outputs(
        make(call.ids.shape), make(shape) if stats else None, make(shape), make(shape, torch.int64) if stats else None
    )


def empty_gradients(call: Call, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """In their parameters' dtypes."""
    return tuple(
        x.new_empty(x.shape) if x is not None and want else None
        for x, want in zip((call.hidden, call.weight, call.bias), wanted, strict=True)
    )
