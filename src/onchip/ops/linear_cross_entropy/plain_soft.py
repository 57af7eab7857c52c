"""linear_cross_entropy for PyTorch with soft labels, on its own matrix products: the operators of backend "torch".

The maths is in `onchip.vocab.torch.soft`.  Labels of K ids go through the walks of the other losses; those of every
entry are taken with the whole vocabulary, a chunk of tokens at a time.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.linear_cross_entropy.soft_call import SoftCall
from onchip.ops.linear_cross_entropy.spec import OP
from onchip.vocab.chunks import Config
from onchip.vocab.torch import soft, walk
from onchip.vocab.torch.call import OF_LAYER
from onchip.vocab.torch.loss import scaled_rows
from onchip.vocab.torch.soft import DenseStats, SoftOutputs
from onchip.vocab.torch.softmax import TokenGradient, TokenStats, float16_scale
from onchip.vocab.torch.tiles import Tile, Tokens, apply, spans, temperature_of


class SoftMade(NamedTuple):
    """What the operators return."""

    out: SoftOutputs


class Kept(NamedTuple):
    """What backward is given."""

    call: SoftCall
    lse: Tensor
    log_prob: Tensor
    largest: Tensor | None
    mass: Tensor | None


def fake(call: SoftCall) -> SoftMade:
    return SoftMade(SoftOutputs.empty(call.options, call.hidden, call.labels, dense=call.dense))


def _save(call: SoftCall, made: SoftMade) -> Kept:
    return Kept(call, *made.out[1:5])


def _rows(kept: Any, tokens: Tokens, upstream: Made) -> tuple[Tensor, Tensor | None]:
    """[T]: the upstream gradient of each token's loss, and what it was multiplied by for float16's sake."""
    call, (grad_loss,) = kept.call, upstream
    assert grad_loss is not None
    each = tokens.upstream(grad_loss, call.options.reduction)
    row, _ = scaled_rows(tokens, call.options, each, torch.float32)
    if call.operand != torch.float16:
        return row, None
    mass = kept.mass if call.dense else call.probs().sum(1)
    grad_scale = float16_scale(row * (1 + mass), call.operand)
    return (row if grad_scale is None else row * grad_scale), grad_scale


# K ids.


def _forward(call: SoftCall) -> SoftMade:
    options, tokens = call.options, call.tokens(check_values=call.options.check_inputs)
    asked = soft.asked_by(options, call.class_weight)
    return made_of(call, tokens, walk.forward(call.layer, options, tokens, call.plan("forward", tokens), asked))


def made_of(call: SoftCall, tokens: Tokens, stats: TokenStats) -> SoftMade:
    """The outputs, given the statistics of the whole vocabulary."""
    options = call.options
    losses = soft.token_losses(options, stats.lse, stats.log_prob, stats.uniform, call.probs())
    loss = soft.reduced(options, losses, tokens, call.labels.shape[:-1])
    known = stats.lse, stats.log_prob, stats.entropy, stats.argmax
    of = soft.id_stats(*known, call.probs(weighed=False), tokens.ids)
    return SoftMade(SoftOutputs(loss, stats.lse, stats.log_prob, None, None, of))


def gradient_of_ids(kept: Any, tokens: Tokens, upstream: Made) -> tuple[TokenGradient, Tensor | None]:
    """That of the tokens' logits, and the factor for float16 that is in it."""
    call, (row, grad_scale) = kept.call, _rows(kept, tokens, upstream)
    known = kept.lse, kept.log_prob, call.probs(), tokens
    return soft.loss_gradient(call.options, row, *known, call.vocab, call.class_weight), grad_scale


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call = replace(kept.call, grads=tuple(wanted))
    tokens = call.tokens(check_values=False)
    gradient, grad_scale = gradient_of_ids(kept, tokens, upstream)
    config = call.plan("recompute", tokens)
    return walk.recompute(call, tokens, config, gradient, grad_scale=grad_scale, weight_grad_out=call.weight_grad_out)


# Every entry.


def _dense_forward(call: SoftCall) -> SoftMade:
    options, tokens = call.options, call.tokens(check_values=call.options.check_inputs)
    config = dense_plan(call, tokens)
    made = soft.dense_stats(call.layer, options, tokens, config, call.labels, call.class_weight)
    return made_of_dense(call, tokens, made)


def made_of_dense(call: SoftCall, tokens: Tokens, made: DenseStats) -> SoftMade:
    """The outputs."""
    loss = soft.reduced(call.options, made.loss, tokens, call.labels.shape[:-1])
    return SoftMade(SoftOutputs(loss, *made[1:]))


def dense_plan(call: SoftCall, tokens: Tokens) -> Config:
    """The same in forward and backward."""
    return call.plan("stash", tokens)


def _dense_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call = kept.call
    return dense_gradients(kept, call, soft.Whole.of(call.vocab, call.class_weight), upstream, wanted)


def dense_gradients(
    kept: Any,
    mine: SoftCall,
    whole: soft.Whole,
    upstream: Made,
    wanted: Wanted,
    start_sum: Callable[[Tensor], Callable[[], Tensor]] | None = None,
) -> Made:
    """Those of `mine`, which is `kept.call` or, where other ranks have other parts of the vocabulary, this rank's part
    of that; `start_sum` as of `walk.recompute`."""
    assert kept.largest is not None
    assert kept.mass is not None
    tokens, layer, options = kept.call.tokens(check_values=False), mine.layer, mine.options
    row, grad_scale = _rows(kept, tokens, upstream)
    config, vocab = dense_plan(mine, tokens), layer.vocab
    n = tokens.number if vocab > 0 else 0
    tile = Tile(min(n, config.token_chunk) * vocab, tokens, slope=options.softcap is not None, like=layer.hidden)
    into = walk.Accumulated(layer, tokens, config.vocab_chunk, wanted)
    summed: Callable[[], Tensor] | None = None
    for t0, t1 in spans(n, config.token_chunk):
        z, slope, _ = tile.cut(t1 - t0, vocab)
        soft.read_logits(layer, tokens, t0, t1, z, config.vocab_chunk)
        apply(options, z, temperature_of(tokens, t0, t1), slope)
        known = (x[t0:t1] for x in (row, kept.lse, kept.log_prob, kept.largest, kept.mass))
        q = soft.rows_of(mine.labels, t0, t1)
        g = soft.dense_gradient(options, z, slope, q, mine.class_weight, whole, *known)
        operand = tile.operand(g)
        into.add_hidden(operand, t0, t1, 0)
        if into.hidden is not None and start_sum is not None and t1 == n:
            summed = start_sum(into.hidden.view(mine.hidden.shape))
        into.add_weight(g, operand, tokens.rows(layer.hidden, t0, t1), t0, 0, into.weight)
    hidden = None if into.hidden is None else into.hidden.view(mine.hidden.shape)
    if hidden is not None and start_sum is not None:
        hidden = (summed or start_sum(hidden))()  # where there was no product at all
    made: list[Tensor | None] = []
    for x, dtype in zip((hidden, into.weight, into.bias), mine.dtypes, strict=True):
        x = x if x is None or grad_scale is None else x.div_(grad_scale)
        made.append(x)
        if x is not None and (len(made) != 2 or mine.weight_grad_out is None):
            made[-1] = x.to(dtype)
    if made[1] is not None and mine.weight_grad_out is not None:
        mine.weight_grad_out.add_(made[1])
        made[1] = None
    return made


def _operator(name: str, forward: Any, gradients: Any) -> Operator[SoftCall, SoftMade]:
    return Operator(
        name,
        op=OP,
        forward=forward,
        fake=fake,
        save=_save,
        gradients=gradients,
        fake_gradients=lambda kept, upstream, wanted: kept.call.empty_gradients(wanted),
        differentiable=("hidden", "weight", "bias"),
        adds_to={"weight": "weight_grad_out"},
        **OF_LAYER,
    )


OPERATORS = {
    False: _operator("linear_cross_entropy_soft", _forward, _gradients),
    True: _operator("linear_cross_entropy_dense", _dense_forward, _dense_gradients),
}
