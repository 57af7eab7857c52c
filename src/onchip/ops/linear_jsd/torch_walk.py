"""The walk over chunks of tokens with PyTorch's own matrix products, on CPU and CUDA.

A chunk holds both models' logits of the whole vocabulary, in float32 or float64.  Its losses and gradients are made in
blocks of rows (divergence.py), which overwrite the logits.  Nothing here synchronises a GPU.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onchip.frontend.options import LossOptions
from onchip.frontend.topk import TopK
from onchip.frontend.torch_labels import log_probs_or_nan
from onchip.kernels.torch_products import operand_dtype
from onchip.ops.linear_jsd import memory
from onchip.ops.linear_jsd.divergence import Arrays, rows
from onchip.ops.linear_jsd.memory import BLOCKS, SLAB
from onchip.ops.linear_jsd.torch_call import PARAMETERS, Call, Model
from onchip.vocab.rows.torch import Rows
from onchip.vocab.torch.call import Layer
from onchip.vocab.torch.loss import loss_gradient
from onchip.vocab.torch.softmax import Asked, Running
from onchip.vocab.torch.tiles import Tokens, spans
from onchip.vocab.torch.walk import Accumulated


def walk(
    call: Call,
    tokens: Tokens,
    row: Tensor,  # [n]: factor of each token's gradient
    grads: Sequence[bool],  # of `PARAMETERS`
) -> tuple[Tensor, list[Tensor | None]]:
    """The losses of the computed tokens, without weights, and the gradients that are wanted: of logits in their own
    dtype, of all else in that of sums."""
    n, label = tokens.number, tokens.label.clamp(min=0)  # an ignored one is in no place, and is computed all the same
    chunk = min(n, memory.plan(call.problem(), "", call.options.scratch_bytes))
    whole = call.indices is None
    models = [model_of(call, who, grads[4 * who : 4 * who + 4], tokens) for who in ((0, 1) if whole else (0,))]
    buffers = [row.new_empty((chunk, call.size)) for _ in models]
    losses, block = row.new_empty(n), -(-chunk // BLOCKS)
    want = models[0][1] is not None, models[-1][1] is not None
    for start, stop in spans(n, chunk):
        filled = [buffer[: stop - start] for buffer in buffers]
        for z, (source, _, _) in zip(filled, models, strict=True):
            source.read(tokens, start, stop, z)
        for b0, b1 in spans(stop - start, block):
            t0, t1 = start + b0, start + b1
            teacher = filled[1][b0:b1] if whole else topk_rows(call, tokens, t0, t1)
            value, *gradients = rows(ARRAYS, call.options, filled[0][b0:b1], teacher, label[t0:t1], want)
            losses[t0:t1] = value
            for into, g in zip(filled, gradients, strict=False):
                if g is not None:
                    torch.mul(g, row[t0:t1, None], out=into[b0:b1])
                    if tokens.kept is not None:  # an infinite divergence times 0 is NaN
                        into[b0:b1].masked_fill_(~tokens.kept[t0:t1, None], 0)
            del value, gradients
        for g, (_, sink, _) in zip(filled, models, strict=True):
            if sink is not None:
                sink.write(tokens, start, stop, g)
    made = [x for *_, gradients in models for x in gradients]
    return losses, made + [None] * (len(PARAMETERS) - len(made))


def model_of(call: Call, who: int, grads: Sequence[bool], tokens: Tokens) -> tuple[Any, Any, Model]:
    """What its logits are read from, what their gradient is written to if one is wanted, and the gradients made."""
    layer, logits = call.layer(who), call.models[who].logits
    if layer is not None:
        linear = Linear(layer, call.size, grads, tokens)
        return linear, linear if any(grads) else None, linear.made
    assert logits is not None
    made = logits.new_zeros(logits.shape) if grads[3] else None
    source, sink = (
        x if x is None else Rows(x.reshape(call.number, x.shape[-1])[:, : call.size]) for x in (logits, made)
    )
    return source, sink, Model(logits=made)


class Linear:
    """A model's last layer, with `read` and `write` as of `Rows`."""

    def __init__(self, layer: Layer, vocab: int, grads: Sequence[bool], tokens: Tokens) -> None:
        self.layer, self.vocab = layer.layer, vocab
        weight = self.layer.weight
        # float16 is widened too: its range is short for a gradient.
        self.operand = torch.float32 if weight.dtype == torch.float16 else operand_dtype(weight)
        self.slab = vocab if self.operand == weight.dtype else SLAB
        self.sums = Accumulated(self.layer, tokens, self.slab, grads)
        if self.sums.weight is not None:
            self.sums.weight[vocab:] = 0  # of the padding
        hidden = None if self.sums.hidden is None else self.sums.hidden.view(layer.hidden.shape)
        self.made = Model(hidden, self.sums.weight, self.sums.bias)

    def read(self, tokens: Tokens, start: int, stop: int, into: Tensor) -> None:
        self.rows = tokens.rows(self.layer.hidden, start, stop).to(self.operand)
        for v0, v1 in spans(self.vocab, self.slab):
            self.layer.logits(into[:, v0:v1], self.rows, v0)

    def write(self, tokens: Tokens, start: int, stop: int, values: Tensor) -> None:
        operand = self.write_hidden(start, stop, values)
        self.write_weight(start, values, operand)

    def write_hidden(self, start: int, stop: int, values: Tensor) -> Tensor:
        """Hidden's gradient alone; returns the values as products read them."""
        operand = values.to(self.operand)
        self.sums.add_hidden(operand, start, stop, 0)
        return operand

    def write_weight(self, start: int, values: Tensor, operand: Tensor) -> None:
        """The others', of the rows that were read last."""
        weight = None if self.sums.weight is None else self.sums.weight[: self.vocab]
        self.sums.add_weight(values, operand, self.rows, start, 0, weight)


def topk_rows(call: Call, tokens: Tokens, start: int, stop: int) -> TopK[Tensor]:
    """Those of the computed tokens [start, stop); NaN where an index is out of range: on the CPU that has raised."""
    assert call.indices is not None
    assert call.values is not None
    ids, values = (
        x[start:stop] if tokens.index is None else x.index_select(0, tokens.index[start:stop])
        for x in (x.reshape(call.number, x.shape[-1]) for x in (call.indices, call.values))
    )
    ids = ids.to(torch.int64)
    bad = (ids < 0) | (ids >= call.size)
    values = log_probs_or_nan(values) if call.topk_kind == "log_probs" else values
    values = values.to(tokens.dtype).masked_fill(bad, math.nan)
    words: Any = (call.topk_kind, call.topk_rest)
    return TopK(ids.masked_fill(bad, 0), values, *words)


def _cross_entropy(z: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each row, and its gradient."""
    ids = label[:, None]
    softmax = Running.empty(ids, z.dtype)
    e = softmax.absorb(z.clone(), 0, ids, Asked(), None)
    made = loss_gradient(LossOptions(), torch.ones_like(softmax.max), softmax.lse, softmax.log_prob, z.shape[1])
    return -softmax.log_prob[:, 0], made.of_exponentials(e, made.factor / softmax.total, ids, 0, None)


ARRAYS = Arrays(
    torch,
    log_softmax=lambda x: torch.log_softmax(x, 1),
    logsumexp=lambda x: x.logsumexp(1, keepdim=True),
    take=lambda x, indices: x.gather(1, indices),
    put=lambda x, indices, values: x.scatter(1, indices, values),
    cross_entropy=_cross_entropy,
)
