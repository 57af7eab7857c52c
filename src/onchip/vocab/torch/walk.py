"""The walk over the [tokens, vocab] matrix with PyTorch's own matrix products, tile by tile, on CPU and CUDA.

`statistics` are each token's over the whole vocabulary, and `gradients` those of hidden, weight and bias; both also
work if each rank has a part of the vocabulary.  On one rank's part, `forward` computes the statistics; `stash` computes
the gradients with them, if upstream gradients are known by then; and `recompute` computes the gradients from recomputed
logits.  A walk holds one tile of logits at a time and works on it in place.  Nothing here synchronises a GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onchip.frontend.torch_parallel import Shards
from onchip.kernels.torch_products import product
from onchip.vocab.chunks import ChunkConfig
from onchip.vocab.torch import parallel
from onchip.vocab.torch.call import LinearCall
from onchip.vocab.torch.softmax import Asked, Running, TokenGradient, TokenStats
from onchip.vocab.torch.tiles import Ids, Projection, Tile, apply, spans, temperature_of

Gradients = tuple[Tensor | None, ...]
"""Gradients of hidden, weight and bias; None for those not wanted."""


def statistics(op: str, call: LinearCall, tokens: Ids, asked: Asked) -> TokenStats:
    """The statistics of every token over the whole vocabulary; `asked` has all of its class weights."""
    mine = parallel.local(call)
    config = mine.plan("forward", parallel.of_shard(tokens, call.shards))
    return statistics_of(op, mine.layer, call.options, call.shards, tokens, config, asked)


def statistics_of(
    op: str, source: Any, options: Any, shards: Shards, tokens: Ids, config: ChunkConfig, asked: Asked
) -> TokenStats:
    """The same for anything that has the logits, or this rank's part of them, as `forward` takes it."""
    if not shards.there:
        return forward(source, options, tokens, config, asked)
    here = parallel.of_shard(tokens, shards)
    asked = asked._replace(class_weight=parallel.class_weight_of_shard(asked.class_weight, shards))
    known = softmax(source, options, here, config, asked).stats(here, max(1, shards.rows), asked)
    return parallel.combine(op, shards, known, tokens, asked, check_values=options.check_inputs)


def gradients(
    call: LinearCall,
    tokens: Ids,
    gradient: TokenGradient,
    grad_scale: Tensor | None,
    weight_grad_out: Tensor | None = None,
    **more: Any,
) -> Gradients:
    """As `recompute`, for this rank's tensors, given what the statistics of the whole vocabulary lead to; `more` are
    fields of the problem.
    """
    shards = call.shards
    here, mine = parallel.of_shard(tokens, shards), parallel.local(call)
    config = mine.plan("stash" if call.dense else "recompute", here, **more)
    if not shards.there:
        return recompute(mine, here, config, gradient, grad_scale=grad_scale, weight_grad_out=weight_grad_out)
    hidden, *others = recompute(
        mine, here, config, parallel.gradient_of_shard(gradient, shards), grad_scale=grad_scale,
        weight_grad_out=None if weight_grad_out is None else weight_grad_out[: shards.rows],
        # An empty shard of ranks that run kernels adds zeros to what those add up.
        start_sum=lambda x: parallel.start_sum(shards, x.to(call.hidden.dtype) if call.kernels else x),
    )  # fmt: skip
    return hidden, *(parallel.padded(x, len(call.weight)) for x in others)


def forward(source: Any, options: Any, tokens: Ids, config: ChunkConfig, asked: Asked) -> TokenStats:
    """The statistics of every token, which take one product.

    `source` has the logits: a Projection, or anything with such a `vocab` and `reader`.
    """
    return softmax(source, options, tokens, config, asked).stats(tokens, source.vocab, asked)


def softmax(source: Any, options: Any, tokens: Ids, config: ChunkConfig, asked: Asked) -> Running:
    """The softmax of every token, from the same arguments."""
    n = tokens.number
    running = Running.empty(tokens.ids, tokens.dtype)
    tile = Tile(min(n, config.token_chunk) * config.vocab_chunk, tokens, spare=asked.spare)
    for t0, t1 in spans(n, config.token_chunk):
        read = source.reader(tokens, t0, t1)
        part, ids, tau = running.part(t0, t1), tokens.ids[t0:t1], temperature_of(tokens, t0, t1)
        for v0, v1 in spans(source.vocab, config.vocab_chunk):
            z, _, spare = tile.cut(t1 - t0, v1 - v0)
            read(z, v0)
            apply(options, z, tau)
            part.absorb(z, v0, ids, asked, spare)
    return running


def stash(
    call: LinearCall,
    tokens: Ids,
    config: ChunkConfig,
    gradient: Callable[[Tensor, Tensor, int, int], TokenGradient],
    asked: Asked,
    *,
    grad_scale: Tensor | None,
) -> tuple[TokenStats, Gradients]:
    """The statistics, and the gradients in their dtype.

    `gradient` makes the gradient of the logits of tokens [t0, t1) from their log-sum-exp and the log-probabilities of
    their ids, `grad_scale` times too large.
    """
    layer, options, n, vocab = call.layer, call.options, tokens.number, call.weight.shape[0]
    running = Running.empty(tokens.ids, tokens.dtype)
    size = min(n, config.token_chunk) * vocab
    tile = Tile(size, tokens, slope=options.softcap is not None, spare=asked.spare, like=layer.hidden)
    into = Accumulated(layer, tokens, config.vocab_chunk, call.grads)
    for t0, t1 in spans(n, config.token_chunk):
        h = tokens.rows(layer.hidden, t0, t1)
        part, ids, tau = running.part(t0, t1), tokens.ids[t0:t1], temperature_of(tokens, t0, t1)
        z, slope, spare = tile.cut(t1 - t0, vocab)
        for v0, v1 in spans(vocab, config.vocab_chunk):
            layer.logits(z[:, v0:v1], h, v0)
            apply(options, z[:, v0:v1], tau, None if slope is None else slope[:, v0:v1])
        e = part.absorb(z, 0, ids, asked, spare)
        made = gradient(part.lse, part.log_prob, t0, t1)
        g = made.of_exponentials(e, made.factor / part.total, ids, 0, slope)
        into.add(g, tile.operand(g), h, t0, t1, 0, into.weight)
    grad_hidden, *others = (_unscaled(x, grad_scale) for x in (into.hidden, into.weight, into.bias))
    grad_hidden = None if grad_hidden is None else grad_hidden.view(call.hidden.shape)
    return running.stats(tokens, vocab, asked), (grad_hidden, *others)


def recompute(
    call: LinearCall,
    tokens: Ids,
    config: ChunkConfig,
    gradient: TokenGradient,
    *,
    grad_scale: Tensor | None,
    weight_grad_out: Tensor | None = None,  # [V, H] in the dtype of sums
    start_sum: Callable[[Tensor], Callable[[], Tensor]] | None = None,
) -> Gradients:
    """The gradients in their parameters' dtypes, chunk by chunk of the vocabulary, from `gradient`, `grad_scale` times
    too large.

    The weight's is added to `weight_grad_out` if that is given.  If other ranks have other parts of the vocabulary,
    `start_sum` begins to sum hidden's, in the dtype of sums, during the last product, and returns a function that
    waits.
    """
    layer, options, grads, dtypes, n = call.layer, call.options, call.grads, call.dtypes, tokens.number
    vocab, hidden = layer.vocab, layer.hidden
    size = min(n, config.token_chunk) * config.vocab_chunk
    spare = gradient.entropy_row is not None
    tile = Tile(size, tokens, slope=options.softcap is not None, spare=spare, like=hidden)
    into = Accumulated(layer, tokens, config.vocab_chunk, (grads[0], False, grads[2]))
    grad_weight = weight_grad_out if grads[1] else None
    if grads[1] and weight_grad_out is None:
        grad_weight = torch.empty(layer.weight.shape, dtype=dtypes[1], device=hidden.device)
    chunk = None
    if grads[1] and (dtypes[1] != tokens.dtype or weight_grad_out is not None):
        chunk = hidden.new_empty((config.vocab_chunk, hidden.shape[1]), dtype=tokens.dtype)
    # If all tokens are one chunk, the rows of hidden are prepared once.
    h = tokens.rows(hidden, 0, n) if config.token_chunk >= n else None
    summed: Callable[[], Tensor] | None = None

    def begin() -> Callable[[], Tensor] | None:
        if start_sum is None or into.hidden is None:
            return None
        return start_sum(into.hidden.view(call.hidden.shape))

    for v0, v1 in spans(vocab, config.vocab_chunk):
        part = None
        if grad_weight is not None:
            part = grad_weight[v0:v1] if chunk is None else chunk[: v1 - v0]
            if n == 0:
                part.zero_()
        for t0, t1 in spans(n, config.token_chunk):
            rows = tokens.rows(hidden, t0, t1) if h is None else h
            z, slope, beside = tile.cut(t1 - t0, v1 - v0)
            layer.logits(z, rows, v0)
            apply(options, z, temperature_of(tokens, t0, t1), slope)
            g = gradient.part(t0, t1).of_logits(z, tokens.ids[t0:t1], v0, slope, beside)
            operand = tile.operand(g)
            into.add_hidden(operand, t0, t1, v0)
            if v1 == vocab and t1 == n:
                summed = begin()
            into.add_weight(g, operand, rows, t0, v0, part)
        if grad_weight is not None and part is not None:
            _unscaled(part, grad_scale)
            if weight_grad_out is not None:
                grad_weight[v0:v1] += part
            elif chunk is not None:
                grad_weight[v0:v1] = part
    summed = summed or begin()  # where there was no product at all
    grad_hidden = into.hidden if into.hidden is None else into.hidden.view(call.hidden.shape)
    grad_hidden, grad_bias = (
        _unscaled(grad_hidden if summed is None else summed(), grad_scale),
        _unscaled(into.bias, grad_scale),
    )
    return (
        None if grad_hidden is None else grad_hidden.to(dtypes[0]),
        None if weight_grad_out is not None else grad_weight,
        None if grad_bias is None else grad_bias.to(dtypes[2]),
    )


class Accumulated:
    """The gradients in the dtype of sums, to which tiles of the logits' gradient are added."""

    def __init__(self, layer: Projection, tokens: Ids, chunk: int, grads: Sequence[bool]) -> None:
        hidden, total = layer.hidden, tokens.dtype
        self._layer, self._tokens, self._chunk = layer, tokens, chunk
        self.hidden = hidden.new_zeros(hidden.shape, dtype=total) if grads[0] else None
        self.weight = hidden.new_empty(layer.weight.shape, dtype=total) if grads[1] else None
        if self.weight is not None and tokens.number == 0:
            self.weight.zero_()
        self.bias = hidden.new_zeros(layer.vocab, dtype=total) if grads[2] else None

    def add(self, g: Tensor, operand: Tensor, h: Tensor, t0: int, t1: int, v0: int, weight_rows: Tensor | None) -> None:
        """Add the gradients that follow from `g`, that of the logits of tokens [t0, t1) and the vocabulary from v0 on;
        the weight's go to `weight_rows`, which the first tokens overwrite.  `operand` is `g` as products read it, in
        the dtype of `h`.
        """
        self.add_hidden(operand, t0, t1, v0)
        self.add_weight(g, operand, h, t0, v0, weight_rows)

    def add_hidden(self, operand: Tensor, t0: int, t1: int, v0: int) -> None:
        """Add hidden's alone."""
        if self.hidden is not None:
            index = self._tokens.index
            rows = self.hidden[t0:t1] if index is None else self.hidden.new_zeros(t1 - t0, self.hidden.shape[1])
            for c0, c1 in spans(operand.shape[1], self._chunk):
                weight = self._layer.weight[v0 + c0 : v0 + c1].to(operand.dtype)
                product(rows, operand[:, c0:c1], weight, accumulate=True)
            if index is not None:
                self.hidden.index_add_(0, index[t0:t1], rows)

    def add_weight(self, g: Tensor, operand: Tensor, h: Tensor, t0: int, v0: int, weight_rows: Tensor | None) -> None:
        """Add the weight's and the bias's."""
        if self.bias is not None:
            self.bias[v0 : v0 + g.shape[1]].add_(g.sum(0))
        if weight_rows is not None:
            product(weight_rows, operand.t(), h, accumulate=t0 > 0)


def _unscaled(gradient: Tensor | None, grad_scale: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or grad_scale is None else gradient.div_(grad_scale)
