"""The walk over chunks of tokens with PyTorch's own matrix products, on CPU and CUDA.

A chunk holds both models' logits of the whole vocabulary in float32.  Its losses and gradients are made in blocks of
rows, in place.  Nothing here synchronises a GPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.ops.linear_jsd import torch_rows
from onchip.ops.linear_jsd.memory import BLOCKS, SLAB
from onchip.vocab.torch.tiles import Tokens, product, spans


@dataclass(frozen=True)
class Model:
    """A model's last layer in the products' dtype, or its logits; and which gradients are wanted."""

    hidden: Tensor | None  # [T, H]
    weight: Tensor | None  # [V', H]
    bias: Tensor | None  # [V'] float32
    logits: Tensor | None  # [T, V']
    grads: tuple[bool, bool, bool, bool]  # of each of these

    @property
    def any_grad(self) -> bool:
        return any(self.grads)


def _widen(x: Tensor) -> Tensor:
    """What a product reads: float32 on the CPU, whose 16-bit products round, and for float16, whose range is short."""
    return x.float() if x.device.type == "cpu" or x.dtype == torch.float16 else x


def _rows(x: Tensor, tokens: Tokens, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of the computed tokens, zeros for those that are ignored."""
    if tokens.index is not None:
        return x.index_select(0, tokens.index[start:stop])
    if tokens.kept is not None:
        # 0 * NaN is NaN: a zero gradient row alone would let an ignored token's NaN into the weight's gradient.
        return x[start:stop].masked_fill(~tokens.kept[start:stop, None], 0)
    return x[start:stop]


class _Side:
    """One model during a walk: the rows of its hidden states, its logits' buffer, its gradients so far."""

    def __init__(self, model: Model, tokens: Tokens, chunk: int, vocab: int) -> None:
        self.model, self.tokens, self.vocab = model, tokens, vocab
        some = model.logits if model.hidden is None else model.hidden
        assert some is not None
        self.buffer = some.new_empty((chunk, vocab), dtype=torch.float32)
        h, w, b, logits = (model.hidden, model.weight, model.bias, model.logits)
        self.made: list[Tensor | None] = [
            x.new_zeros(x.shape, dtype=x.dtype if x is logits else torch.float32) if x is not None and wanted else None
            for x, wanted in zip((h, w, b, logits), model.grads, strict=True)
        ]
        self.rows: Tensor | None = None

    def fill(self, start: int, stop: int) -> Tensor:
        """The logits of the computed tokens [start, stop)."""
        out = self.buffer[: stop - start]
        m = self.model
        if m.hidden is None:
            assert m.logits is not None
            return out.copy_(_rows(m.logits[:, : self.vocab], self.tokens, start, stop))
        assert m.weight is not None
        self.rows = _widen(_rows(m.hidden, self.tokens, start, stop))
        step = SLAB if self.rows.dtype != m.weight.dtype else self.vocab
        for v0, v1 in spans(self.vocab, step):
            product(out[:, v0:v1], self.rows, _widen(m.weight[v0:v1]).t())
        if m.bias is not None:
            out.add_(m.bias[: self.vocab])
        return out

    def add(self, start: int, stop: int) -> None:
        """Add what the gradient of these tokens' logits, in the buffer, gives."""
        m, tokens, vocab = self.model, self.tokens, self.vocab
        g = self.buffer[: stop - start]
        grad_hidden, grad_weight, grad_bias, grad_logits = self.made
        if grad_logits is not None:
            if tokens.index is None:
                grad_logits[start:stop, :vocab] = g
            else:
                grad_logits[:, :vocab].index_copy_(0, tokens.index[start:stop], g.to(grad_logits.dtype))
        if grad_bias is not None:
            grad_bias[:vocab] += g.sum(0)
        if grad_hidden is None and grad_weight is None:
            return
        assert m.weight is not None
        assert self.rows is not None
        g = g.to(self.rows.dtype)
        step = SLAB if self.rows.dtype != m.weight.dtype else vocab
        if grad_hidden is not None:
            part = grad_hidden[start:stop] if tokens.index is None else torch.zeros_like(grad_hidden[: stop - start])
            for v0, v1 in spans(vocab, step):
                product(part, g[:, v0:v1], _widen(m.weight[v0:v1]), accumulate=True)
            if tokens.index is not None:
                grad_hidden.index_copy_(0, tokens.index[start:stop], part)
        if grad_weight is not None:
            product(grad_weight[:vocab], g.t(), self.rows, accumulate=True)


def walk(
    loss: torch_rows.Loss,
    student: Model,
    teacher: Model | None,
    topk: tuple[Tensor, Tensor] | None,  # [T, K] indices and values
    tokens: Tokens,
    *,
    row: Tensor,  # [n] float32: factor of each token's gradient
    vocab: int,
    chunk: int,
) -> tuple[Tensor, list[Tensor | None], list[Tensor | None]]:
    """The losses of the computed tokens, without weights, and the wanted gradients: of logits in their own dtype, of
    all else in float32."""
    n = tokens.label.numel()
    chunk = min(n, chunk)
    sides = [_Side(m, tokens, chunk, vocab) for m in (student, teacher) if m is not None]
    losses = row.new_empty(n)
    want = [side.model.any_grad for side in sides]
    block = -(-chunk // BLOCKS)
    for start, stop in spans(n, chunk):
        filled = [side.fill(start, stop) for side in sides]
        for b0, b1 in spans(stop - start, block):
            given: Sequence[Tensor] = (
                [x[b0:b1] for x in filled[1:]]
                if topk is None
                else [_rows(x, tokens, start + b0, start + b1) for x in topk]
            )
            if topk is not None:
                ids = given[0].to(torch.int64)
                bad = (ids < 0) | (ids >= vocab)  # on the CPU that has raised
                given = (ids.masked_fill(bad, 0), given[1].float().masked_fill(bad, math.nan))
            value, *gradients = torch_rows.rows(
                loss,
                filled[0][b0:b1],
                tuple(given),
                tokens.label[start + b0 : start + b1],
                want_student=want[0],
                want_teacher=len(want) > 1 and want[1],
            )
            losses[start + b0 : start + b1] = value
            for into, g in zip(filled, gradients, strict=False):
                if g is not None:
                    torch.mul(g, row[start + b0 : start + b1, None], out=into[b0:b1])
                    if tokens.kept is not None:  # an infinite divergence times 0 is NaN
                        into[b0:b1].masked_fill_(~tokens.kept[start + b0 : start + b1, None], 0)
            del value, gradients
        for side in sides:
            if side.model.any_grad:
                side.add(start, stop)
    made = [side.made for side in sides]
    return losses, made[0], made[1] if len(made) > 1 else [None] * 4
