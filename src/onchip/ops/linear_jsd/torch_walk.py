"""The walk over chunks of tokens with PyTorch's own matrix products, on CPU and CUDA.

A chunk holds both models' logits of the whole vocabulary in float32.  Its losses and gradients are made in blocks of
rows (divergence.py), which overwrite the logits.  Nothing here synchronises a GPU.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onchip.frontend.options import LossOptions
from onchip.ops.linear_jsd import memory
from onchip.ops.linear_jsd.divergence import Arrays, rows
from onchip.ops.linear_jsd.memory import BLOCKS, SLAB
from onchip.ops.linear_jsd.spec import TopK
from onchip.ops.linear_jsd.torch_call import PARAMETERS, Call, Model
from onchip.vocab.rows.torch import Rows
from onchip.vocab.torch.loss import loss_gradient
from onchip.vocab.torch.softmax import Running
from onchip.vocab.torch.tiles import Tokens, product, spans


def walk(
    call: Call,
    tokens: Tokens,
    row: Tensor,  # [n] float32: factor of each token's gradient
    grads: Sequence[bool],  # of `PARAMETERS`
) -> tuple[Tensor, list[Tensor | None]]:
    """The losses of the computed tokens, without weights, and the gradients that are wanted: of logits in their own
    dtype, of all else in float32."""
    n, label = tokens.number, tokens.label.clamp(min=0)  # an ignored one is in no place, and is computed all the same
    chunk = min(n, memory.plan(call.problem(), "", call.options.scratch_bytes))
    whole = call.indices is None
    sides = [_Side(call, who, grads[4 * who : 4 * who + 4], tokens, chunk) for who in ((0, 1) if whole else (0,))]
    losses, block = row.new_empty(n), -(-chunk // BLOCKS)
    want = sides[0].wanted, sides[-1].wanted and whole
    for start, stop in spans(n, chunk):
        filled = [side.fill(start, stop) for side in sides]
        for b0, b1 in spans(stop - start, block):
            t0, t1 = start + b0, start + b1
            teacher = filled[1][b0:b1] if whole else _topk_rows(call, tokens, t0, t1)
            value, *gradients = rows(_ARRAYS, call.options, filled[0][b0:b1], teacher, label[t0:t1], want)
            losses[t0:t1] = value
            for into, g in zip(filled, gradients, strict=False):
                if g is not None:
                    torch.mul(g, row[t0:t1, None], out=into[b0:b1])
                    if tokens.kept is not None:  # an infinite divergence times 0 is NaN
                        into[b0:b1].masked_fill_(~tokens.kept[t0:t1, None], 0)
            del value, gradients
        for side in sides:
            if side.wanted:
                side.add(start, stop)
    made = [x for side in sides for x in side.made]
    return losses, made + [None] * (len(PARAMETERS) - len(made))


class _Side:
    """One model during a walk: the rows of its hidden states, its logits' buffer, its gradients so far."""

    def __init__(self, call: Call, who: int, grads: Sequence[bool], tokens: Tokens, chunk: int) -> None:
        model, self.tokens, self.vocab, self.wanted = call.models[who], tokens, call.size, any(grads)
        layer, logits = call.layer(who), model.logits
        self.layer = None if layer is None else layer.layer
        self.logits = None if logits is None else Rows(logits.reshape(-1, logits.shape[-1])[:, : self.vocab])
        self.buffer = call.first.new_empty((chunk, self.vocab), dtype=torch.float32)
        self.made = Model(*(
            x.new_zeros(x.shape, dtype=x.dtype if x is logits else torch.float32) if x is not None and wanted else None
            for x, wanted in zip(model, grads, strict=True)
        ))  # fmt: skip
        self.rows = self.buffer[:0]

    @property
    def slabs(self) -> Sequence[tuple[int, int]]:
        """The parts of the vocabulary whose weights are widened at a time; all of it where they aren't."""
        assert self.layer is not None
        return [*spans(self.vocab, SLAB if self.rows.dtype != self.layer.weight.dtype else self.vocab)]

    def fill(self, start: int, stop: int) -> Tensor:
        """The logits of the computed tokens [start, stop)."""
        out = self.buffer[: stop - start]
        if self.logits is not None:
            self.logits.read(self.tokens, start, stop, out)
        if self.layer is not None:
            self.rows = _widen(self.tokens.rows(self.layer.hidden, start, stop))
            for v0, v1 in self.slabs:
                product(out[:, v0:v1], self.rows, _widen(self.layer.weight[v0:v1]).t())
            if self.layer.bias is not None:
                out.add_(self.layer.bias[: self.vocab])
        return out

    def add(self, start: int, stop: int) -> None:
        """Add what the gradient of these tokens' logits, in the buffer, gives."""
        tokens, g = self.tokens, self.buffer[: stop - start]
        hidden, weight, bias, logits = self.made
        if logits is not None:
            Rows(logits.view(-1, logits.shape[-1])[:, : self.vocab]).write(tokens, start, stop, g)
        if bias is not None:
            bias[: self.vocab] += g.sum(0)
        g = g.to(self.rows.dtype)
        if hidden is not None and self.layer is not None:
            hidden = hidden.view(-1, hidden.shape[-1])
            part = hidden[start:stop] if tokens.index is None else torch.zeros_like(hidden[: stop - start])
            for v0, v1 in self.slabs:
                product(part, g[:, v0:v1], _widen(self.layer.weight[v0:v1]), accumulate=True)
            if tokens.index is not None:
                hidden.index_copy_(0, tokens.index[start:stop], part)
        if weight is not None:
            product(weight[: self.vocab], g.t(), self.rows, accumulate=True)


def _widen(x: Tensor) -> Tensor:
    """What a product reads: float32 on the CPU, whose 16-bit products round, and for float16, whose range is short."""
    return x.float() if x.device.type == "cpu" or x.dtype == torch.float16 else x


def _topk_rows(call: Call, tokens: Tokens, start: int, stop: int) -> TopK:
    """Those of the computed tokens [start, stop); NaN where an index is out of range: on the CPU that has raised."""
    assert call.indices is not None
    assert call.values is not None
    ids, values = (
        x[start:stop] if tokens.index is None else x.index_select(0, tokens.index[start:stop])
        for x in (x.reshape(call.number, x.shape[-1]) for x in (call.indices, call.values))
    )
    ids = ids.to(torch.int64)
    bad = (ids < 0) | (ids >= call.size)
    values = values.float().masked_fill(bad, math.nan)
    return TopK(ids.masked_fill(bad, 0), values, call.topk_kind, call.topk_rest)


def _cross_entropy(z: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each row, and its gradient."""
    ids = label[:, None]
    softmax = Running.empty(ids)
    e = softmax.absorb(z.clone(), 0, ids, uniform=False, spare=None)
    made = loss_gradient(LossOptions(), torch.ones_like(softmax.max), softmax.lse, softmax.log_prob, z.shape[1])
    return -softmax.log_prob[:, 0], made.of_exponentials(e, made.factor / softmax.total, ids, 0, None)


_ARRAYS = Arrays(
    torch,
    log_softmax=lambda x: torch.log_softmax(x, 1),
    logsumexp=lambda x: x.logsumexp(1, keepdim=True),
    take=lambda x, indices: x.gather(1, indices),
    put=lambda x, indices, values: x.scatter(1, indices, values),
    add=lambda x, indices, values: x.scatter_add_(1, indices, values),
    cross_entropy=_cross_entropy,
)
