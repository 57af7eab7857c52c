"""What every backend in PyTorch is told and returns."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import DTYPES
from onchip.ops.linear_cross_entropy.spec import OP, Options
from onchip.vocab.memory import Problem
from onchip.vocab.torch import tiles
from onchip.vocab.torch.tiles import Tokens


class Call(NamedTuple):
    """What an operator is told."""

    hidden: Tensor  # [..., H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    target: Tensor  # [...]
    token_weight: Tensor | None  # [...]
    token_temperature: Tensor | None  # [...] or []
    normalizer: Tensor | None  # []
    weight_grad_out: Tensor | None  # [V, H] float32; used in backward
    dtype: torch.dtype  # of the products
    options: Options
    grads: tuple[bool, ...]  # of hidden, weight, bias
    copied: int
    """Bytes of the copies that are made of inputs whose strides don't suit."""

    @property
    def budget(self) -> int | None:
        return None if self.options.scratch_bytes is None else int(self.options.scratch_bytes)

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """What the gradients of hidden, weight and bias are returned in."""
        return self.hidden.dtype, self.weight.dtype, (self.weight if self.bias is None else self.bias).dtype

    def tokens(self, *, check_values: bool) -> Tokens:
        """Which tokens count; on the CPU values are checked all the same."""
        return tiles.select_tokens(
            OP,
            self.target,
            self.weight.shape[0],
            self.token_weight,
            self.token_temperature,
            self.normalizer,
            ignore_index=int(self.options.ignore_index),
            reduction=self.options.reduction,
            temperature=float(self.options.temperature),
            check_values=check_values,
        )

    def divisor(self, kept: Tensor) -> Tensor:
        """0-d float32: what the loss is divided by, given which tokens are kept, or their number."""
        return tiles.divisor(OP, self.options.reduction, self.normalizer, kept)

    def problem(self, device: str, *, compacted: bool = False) -> Problem:
        """What plans are made for; `device` is 'cpu' or 'cuda'."""
        vocab, hidden = self.weight.shape
        options = self.options
        return Problem(
            tokens=self.hidden.numel() // hidden,
            hidden=hidden,
            vocab=vocab,
            dtype=DTYPES[self.dtype],
            hidden_dtype=DTYPES[self.hidden.dtype],
            weight_dtype=DTYPES[self.weight.dtype],
            device=device,
            grad_hidden=self.grads[0],
            grad_weight=self.grads[1],
            grad_bias=self.grads[2],
            per_token_loss=options.reduction == "none",
            softcap=options.softcap is not None,
            smoothing=options.label_smoothing > 0,
            stats=options.return_stats,
            weight_grad_out=self.weight_grad_out is not None,
            compacted=compacted,
            copied=self.copied,
        )


class Outputs(NamedTuple):
    """What each operator returns first."""

    loss: Tensor
    lse: Tensor
    log_prob: Tensor
    entropy: Tensor | None
    correct: Tensor | None


def empty_outputs(call: Call) -> Outputs:
    """Not yet filled."""
    shape, reduced = call.target.shape, call.options.reduction != "none"

    def make(dtype: torch.dtype = torch.float32) -> Tensor:
        return call.hidden.new_empty(shape, dtype=dtype)

    return Outputs(
        call.hidden.new_empty((), dtype=torch.float32) if reduced else make(),
        make(),
        make(),
        make() if call.options.return_stats else None,
        make(torch.bool) if call.options.return_stats else None,
    )


def empty_gradients(call: Call, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """In their parameters' dtypes; one that is added to memory of the caller's is None."""
    wanted = (wanted[0], wanted[1] and call.weight_grad_out is None, wanted[2])
    return tuple(
        x.new_empty(x.shape) if x is not None and want else None
        for x, want in zip((call.hidden, call.weight, call.bias), wanted, strict=True)
    )
