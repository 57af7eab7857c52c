"""The walk over chunks of tokens with PyTorch's own matrix products, on CPU and CUDA.

A chunk holds both models' logits for the whole vocabulary, or for this rank's shard, in float32 or float64.  Everything
that follows from them is computed in blocks of rows, which the gradients overwrite; ranks exchange a few numbers for
each of their tokens.  Nothing here synchronises a GPU.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onchip.frontend.topk import TopK
from onchip.frontend.torch_labels import log_probs_or_nan
from onchip.frontend.torch_parallel import Shards
from onchip.kernels.torch_products import operand_dtype
from onchip.ops.linear_jsd import memory
from onchip.ops.linear_jsd.divergence import Arrays, rows
from onchip.ops.linear_jsd.memory import BLOCKS, SLAB
from onchip.ops.linear_jsd.torch_call import PARAMETERS, JsdCall, JsdModel
from onchip.vocab.rows.torch import Rows
from onchip.vocab.torch import parallel
from onchip.vocab.torch.call import Layer
from onchip.vocab.torch.parallel import start_sum
from onchip.vocab.torch.softmax import write_at
from onchip.vocab.torch.tiles import NOWHERE, Tokens, spans
from onchip.vocab.torch.walk import Accumulated


def losses_and_gradients(
    call: JsdCall,
    tokens: Tokens,
    row: Tensor,  # [n]: factor of each token's gradient
    grads: Sequence[bool],  # of `PARAMETERS`
) -> tuple[Tensor, list[Tensor | None]]:
    """The losses of the computed tokens, without weights, and the gradients that are wanted, in the dtype of sums, but
    those of logits in the logits' dtype.
    """
    n, of, want = tokens.number, arrays_of(call), (any(grads[:4]), any(grads[4:]))
    label = tokens.label.clamp(min=0)  # an ignored token has no label, but is computed all the same
    losses = torch.empty_like(row)
    chunk = min(n, memory.plan(call.problem(), "", call.options.scratch_bytes))
    models = [_model(call, who, grads[4 * who : 4 * who + 4], tokens) for who in range(1 + (call.indices is None))]
    buffers = [tokens.weight.new_empty((chunk, call.size)) for _ in models]
    for start, stop in spans(n, chunk):
        filled = [buffer[: stop - start] for buffer in buffers]
        for z, model in zip(filled, models, strict=True):
            model.read(start, stop, z)
        for b0, b1 in spans(stop - start, -(-chunk // BLOCKS)):
            part = slice(start + b0, start + b1)
            z, *others = (x[b0:b1] for x in filled)
            teacher = others[0] if others else topk_rows(call, tokens, part)
            losses[part], *made = rows(of, call.options, z, teacher, label[part], want)
            for into, g in zip(filled, made, strict=False):
                if g is not None:
                    torch.mul(g, row[part, None], out=into[b0:b1])
                    if tokens.kept is not None:  # an infinite divergence times 0 is NaN
                        into[b0:b1].masked_fill_(~tokens.kept[part, None], 0)
            del made
        for g, model in zip(filled, models, strict=True):
            if model.wanted and call.size:  # a shard may be empty
                model.write(start, stop, g)
    found = [x for model in models for x in model.gradients()]
    return losses, found + [None] * (len(PARAMETERS) - len(found))


def _model(call: JsdCall, who: int, grads: Sequence[bool], tokens: Tokens) -> "_Linear | _Given":
    layer, logits = call.layer(who), call.models[who].logits
    if layer is not None:
        return _Linear(layer, call.size, grads, tokens, call.shards)
    assert logits is not None
    return _Given(logits, call.size, grads, tokens)


class _Given:
    """A model's given logits, [..., V] with padding."""

    def __init__(self, logits: Tensor, vocab: int, grads: Sequence[bool], tokens: Tokens) -> None:
        self.wanted, self._tokens = grads[3], tokens
        self._made = logits.new_zeros(logits.shape) if grads[3] else None
        self._source, self._sink = (x if x is None else Rows(x[..., :vocab]) for x in (logits, self._made))

    def read(self, start: int, stop: int, into: Tensor) -> None:
        """Put the computed tokens' logits into `into`."""
        assert self._source is not None
        self._source.read(self._tokens, start, stop, into)

    def write(self, start: int, stop: int, values: Tensor) -> None:
        """Take the gradient of these logits."""
        assert self._sink is not None
        self._sink.write(self._tokens, start, stop, values)

    def gradients(self) -> JsdModel:
        """The gradients of the model's parameters."""
        return JsdModel(logits=self._made)


class _Linear:
    """The same for a model's last layer, of which ranks may have shards."""

    def __init__(self, layer: Layer, vocab: int, grads: Sequence[bool], tokens: Tokens, shards: Shards) -> None:
        self.wanted = any(grads)
        self._layer, self._vocab, self._tokens, self._shards = layer.layer, vocab, tokens, shards
        weight = self._layer.weight
        # float16 is widened too: its range is short for a gradient.
        self._operand = torch.float32 if weight.dtype == torch.float16 else operand_dtype(weight)
        self._slab = vocab if self._operand == weight.dtype else SLAB
        self._sums = Accumulated(self._layer, tokens, self._slab, grads)
        if self._sums.weight is not None:
            self._sums.weight[vocab:] = 0  # padding
        hidden = self._sums.hidden
        self._hidden = None if hidden is None else hidden.view(layer.hidden.shape)
        self._summed: Callable[[], Tensor] | None = None

    def read(self, start: int, stop: int, into: Tensor) -> None:
        self._rows = self._tokens.rows(self._layer.hidden, start, stop).to(self._operand)
        for v0, v1 in spans(self._vocab, self._slab):
            self._layer.logits(into[:, v0:v1], self._rows, v0)

    def write(self, start: int, stop: int, values: Tensor) -> None:
        operand = values.to(self._operand)
        self._sums.add_hidden(operand, start, stop, 0)
        if stop == self._tokens.number and self._hidden is not None:
            self._summed = start_sum(self._shards, self._hidden)
        weight = None if self._sums.weight is None else self._sums.weight[: self._vocab]
        self._sums.add_weight(values, operand, self._rows, start, 0, weight)

    def gradients(self) -> JsdModel:
        hidden = self._hidden
        if hidden is not None:
            hidden = (self._summed or start_sum(self._shards, hidden))()
        return JsdModel(hidden, self._sums.weight, self._sums.bias)


def topk_rows(call: JsdCall, tokens: Tokens, part: slice) -> TopK[Tensor]:
    """The top-k of some computed tokens; NaN if an index is out of range, for which the CPU has raised already."""
    assert call.indices is not None
    assert call.values is not None
    ids, values = (
        x[part] if tokens.index is None else x.index_select(0, tokens.index[part])
        for x in (x.reshape(call.number, x.shape[-1]) for x in (call.indices, call.values))
    )
    ids = ids.to(torch.int64)
    bad = (ids < 0) | (ids >= call.vocab)
    values = log_probs_or_nan(values) if call.topk_kind == "log_probs" else values
    values = values.to(tokens.dtype).masked_fill(bad, math.nan)
    words: Any = (call.topk_kind, call.topk_rest)
    return TopK(ids.masked_fill(bad, 0), values, *words)


ARRAYS = Arrays(
    torch,
    log_softmax=lambda x: torch.log_softmax(x, 1),
    logsumexp=lambda x: x.logsumexp(1, keepdim=True),
    take=lambda x, indices: x.gather(1, indices),
    put=lambda x, indices, values: x.scatter(1, indices, values),
)


def arrays_of(call: JsdCall) -> Arrays:
    """The functions that formulas need; for a sharded vocabulary, with softmaxes and sums of rows over all ranks."""
    shards, options = call.shards, call.options
    if not shards.there:
        return ARRAYS

    def gathered(*mine: Tensor) -> parallel.Gathered:
        return parallel.gather(options.op, shards, mine, check_values=options.check_inputs)

    def summed(*mine: Tensor) -> list[Tensor]:
        found = gathered(*mine)
        return [found.sure(x.sum(0)) for x in found.numbers]

    def own_ids(ids: Tensor) -> Tensor:
        """The ids in this rank's numbering."""
        own = ids - shards.start
        return own.masked_fill((own < 0) | (own >= call.size), NOWHERE)

    def log_softmax(x: Tensor) -> Tensor:
        # Of this rank's entries, and its share: with large logits a difference from the log-sum-exp would be rounded.
        found, rank = gathered(x.logsumexp(1)), parallel.group_of(shards).rank()
        share = found.sure(parallel.log_sum(found.numbers[0])[1][rank])[:, None]
        return torch.where(x == -math.inf, x, torch.log_softmax(x, 1).add_(share))

    def logsumexp(x: Tensor) -> Tensor:
        found = gathered(x.logsumexp(1))
        return found.sure(parallel.log_sum(found.numbers[0])[0])[:, None]

    def take(x: Tensor, ids: Tensor) -> Tensor:
        own, found = own_ids(ids), x.new_zeros(ids.shape)
        if call.size:
            found = x.gather(1, own.clamp(min=0)).masked_fill(own == NOWHERE, 0)
        return torch.stack(summed(*found.unbind(1)), 1)

    def put(x: Tensor, ids: Tensor, values: Any) -> Tensor:
        made = x.clone()
        if call.size:
            write_at(made, own_ids(ids), 0, torch.as_tensor(values, dtype=x.dtype, device=x.device).expand(ids.shape))
        return made

    return ARRAYS._replace(
        log_softmax=log_softmax,
        logsumexp=logsumexp,
        take=take,
        put=put,
        sum=lambda x: summed(x.sum(1))[0],
        of_few=ARRAYS,
    )
