"""Cross-entropy with soft labels in plain JAX: probabilities of K ids of each token, or of every entry.

The maths is that of `onchip.vocab.loss`.  K ids go through the walks of the other losses; where every entry has a
probability, rows of the whole vocabulary are taken, a chunk of tokens at a time.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import IGNORED, OUT_OF_RANGE
from onchip.frontend.jax_types import LossStats
from onchip.vocab.chunks import Config
from onchip.vocab.xla.loss import Call, Outputs, Reduction, TokenLoss
from onchip.vocab.xla.tiles import (
    Columns,
    Logits,
    Projection,
    Softmax,
    TokenGradient,
    TokenStats,
    Transform,
    Wanted,
    cut_rows,
    float16_scale,
    logits_gradient,
    select_tokens,
    shares,
    unscaled,
)
from onchip.vocab.xla.walk import by_rows, gradients, statistics

Array = jax.Array


class SoftLabels(NamedTuple):
    """The arrays of a call that get no gradient, by token."""

    probs: Array  # [T, K] of the logits' dtype, or [T, V] of any
    ids: Array | None  # [T, K] int32 in [0, V) or OUT_OF_RANGE; None: every entry has a probability
    transform: Transform
    loss: TokenLoss
    token_weight: Array | None  # [T]
    normalizer: Array | None  # []
    class_weight: Array | None  # [V]


class Saved(NamedTuple):
    """What backward needs, by row where not said otherwise; of the first two one is None."""

    probs: Array | None  # [P, K]: times the weights of classes
    labels: Array | None  # [T, V], by token
    call: Call  # without its source; with `labels` its ids are where the largest logits are
    stats: TokenStats


class LabelStats(NamedTuple):
    """What return_stats asks for beside lse, [P]."""

    expected: Array  # sum of probability times log-probability, without weights of classes
    entropy: Array
    correct: Array  # bool
    argmax: Array  # int32
    target_logit: Array  # sum of probability times logit

    @staticmethod
    def of(stats: TokenStats, expected: Array, mass: Array, likeliest: Array) -> "LabelStats":
        """Of the sum of a row's probabilities, and of the entry that has most of them."""
        assert stats.entropy is not None
        assert stats.argmax is not None
        logit = jnp.where(mass == 0, 0, expected + mass * stats.lse)
        return LabelStats(expected, stats.entropy, stats.argmax == likeliest, stats.argmax, logit)


def forward(
    source: Any, given: SoftLabels, config: Config, *, reduction: str, return_stats: bool
) -> tuple[Outputs, Saved]:
    """The loss, [] or [T], and its statistics; `source` is a `Projection` or `Logits`."""
    call, wanted = call_of(source, given, config.token_chunk, reduction), wanted_of(given, return_stats)
    if given.ids is None:
        losses, saved, more = _dense_forward(call, given.probs, config.token_chunk, return_stats)
    else:
        losses, saved, more = of_ids(call, given.probs, statistics(config, wanted, call), return_stats)
    made = outputs(call, reduction, losses, saved.stats.lse, more)
    return made, saved._replace(call=saved.call._replace(source=None))


def call_of(source: Any, given: SoftLabels, chunk: int, reduction: str) -> Call:
    """The call by row, in whole chunks of tokens; without ids of its own, all of them are 0."""
    tokens = select_tokens(jnp.zeros(len(given.probs), jnp.int32), chunk)
    label = jnp.zeros(len(tokens.source), jnp.int32)
    mean = reduction == "mean"
    reduced = Reduction.of(tokens, label, given.token_weight, given.normalizer, mean, source.accumulator)
    ids = label[:, None] if given.ids is None else tokens.take(given.ids, IGNORED)
    return Call(source, given.transform.by_row(tokens), tokens, ids, given.loss, reduced, given.class_weight)


def wanted_of(given: SoftLabels, return_stats: bool) -> Wanted:
    return given.loss.wanted(return_stats, given.class_weight is not None)


def of_ids(call: Call, probs: Array, stats: TokenStats, return_stats: bool) -> tuple[Array, Saved, LabelStats | None]:
    """[P]: the loss of each row, of K ids with these probabilities [T, K]."""
    ids = call.ids
    plain = probs = jnp.where(ids == OUT_OF_RANGE, jnp.nan, call.tokens.take(probs, 0))
    if call.class_weight is not None:
        probs *= call.class_weight.at[ids].get(mode="clip")
    losses = losses_of(call.loss, jnp.sum(_cost(probs, stats.log_prob), 1), stats)
    more = None
    if return_stats:
        likeliest = jnp.take_along_axis(ids, jnp.argmax(plain, 1)[:, None], 1)[:, 0]
        expected = -jnp.sum(_cost(plain, stats.log_prob), 1)
        more = LabelStats.of(stats, expected, jnp.sum(plain, 1), likeliest)
    return losses, Saved(probs, None, call, TokenStats(stats.lse, stats.log_prob)), more


def outputs(call: Call, reduction: str, losses: Array, lse: Array, more: LabelStats | None) -> Outputs:
    """What forward returns, of the losses of rows and their statistics."""
    loss = call.reduction.reduced(losses, call.tokens, per_token=reduction == "none")
    return Outputs(loss, None if more is None else LossStats(*map(call.tokens.spread, (lse, *more))))


def backward(source: Any, needs: Any, saved: Saved, config: Config, upstream: Array) -> Any:
    """The gradient: of a `Projection` its gradients, of `Logits` theirs in their dtype."""
    call = saved.call._replace(source=source)
    row = call.reduction.row_scale(upstream, call.tokens)
    if saved.probs is None or saved.labels is not None:
        return _dense_backward(call, needs, saved, row, config.token_chunk)
    gradient = by_ids(call, saved.probs, saved.stats, row)
    if isinstance(source, Projection):
        return gradients(config, needs, call, saved.stats, gradient)
    gradient = gradient.times(call.transform.factor())
    chunk, columns = config.token_chunk, Columns(0, source.vocab)

    def step(start: Any, z: Array) -> tuple[tuple[()], list[Array]]:
        known, of_chunk, ids = cut_rows((saved.stats, gradient, call.ids), start, chunk)
        z, slope = call.transform.of_chunk(start, chunk).apply(z)
        return (), [logits_gradient(z, slope, known, of_chunk, ids, columns, call.class_weight)]

    _, (bits,) = by_rows(chunk, call.tokens, [source], [True], (), step)
    return source.floats(bits)


def _cost(probs: Array, log_prob: Array) -> Array:
    """-q log p, where what has no probability costs nothing though its logit be -inf."""
    return -jnp.where((probs == 0) & (log_prob == -jnp.inf), 0, probs * log_prob)


def losses_of(loss: TokenLoss, cost: Array, stats: TokenStats) -> Array:
    """[P]: the loss of each row, of its cost without smoothing."""
    # That of one id whose logarithm is the sum over all.
    return loss.value(stats._replace(log_prob=-cost[:, None]))


def factors(loss: TokenLoss, stats: TokenStats) -> tuple[Array | float, Array | float]:
    """The part of the labels that is spread evenly, and 2 z_loss lse."""
    eps: Array | float = 0.0 if loss.label_smoothing is None else loss.label_smoothing
    return eps, 0.0 if loss.z_loss is None else 2 * loss.z_loss * stats.lse


def at_ids(call: Call, stats: TokenStats, total: Array, rest: Array, ids: Array) -> tuple[Array, Array]:
    """The factor of p [n], and the gradient at ids [n, K], `rest` being what other entries than these have of the
    total probability."""
    vocab, class_weight = call.source.vocab, call.class_weight
    eps, more = factors(call.loss, stats)
    share: Array | float = 1.0
    own: Array | float = 1.0
    if class_weight is not None:
        share, own = jnp.mean(class_weight), class_weight.at[ids].get(mode="clip")
    # p - 1 as expm1(log p): -1 added to a rounded p would lose all digits of a p near 1.
    less, p = jnp.expm1(stats.log_prob), jnp.exp(stats.log_prob)
    more = jnp.broadcast_to(jnp.asarray(more, total.dtype), total.shape)
    at = (1 - eps) * (less * total[:, None] + rest) + eps * (less * share + (share - own / vocab))
    return (1 - eps) * total + eps * share + more, at + more[:, None] * p


def by_ids(call: Call, probs: Array, stats: TokenStats, row: Array) -> TokenGradient:
    """By the final logits, of K ids' labels."""
    vocab = call.source.vocab
    _, rest = shares(call.ids, probs)
    factor, at = at_ids(call, stats, jnp.sum(probs, 1), rest, call.ids)
    smoothing = call.loss.label_smoothing
    even = None if smoothing is None else row * (smoothing / vocab)
    return TokenGradient(row * factor, row[:, None] * at, even=even)


# -------------------------------------------------------------------------------------------------------- every entry


def _dense_forward(call: Call, labels: Array, chunk: int, return_stats: bool) -> tuple[Array, Saved, LabelStats | None]:
    """[P]: the loss of each row."""
    vocab, wanted = call.source.vocab, call.loss.wanted(return_stats, call.class_weight is not None)

    def step(start: Any, z: Array, q: Array) -> tuple[Any, list[None]]:
        z, _ = call.transform.of_chunk(start, chunk).apply(z)
        largest = jnp.argmax(z, 1).astype(jnp.int32)[:, None]
        softmax = Softmax.empty(largest, wanted, z.dtype).absorb(z, Columns(0, vocab), largest, call.class_weight)
        stats = softmax.complete(largest, vocab)
        # The largest logit's own log-probability is minus the logarithm of the total.
        log_p = (z - softmax.max[:, None]) + stats.log_prob
        losses = losses_of(call.loss, jnp.sum(_cost(_weighed(call, q, z.dtype), log_p), 1), stats)
        more = None
        if return_stats:
            plain = q.astype(z.dtype)
            expected = -jnp.sum(_cost(plain, log_p), 1)
            more = LabelStats.of(stats, expected, jnp.sum(plain, 1), jnp.argmax(q, 1).astype(jnp.int32))
        return (losses, TokenStats(stats.lse, stats.log_prob), largest, more), [None, None]

    zeros = jnp.zeros(len(call.ids), call.source.accumulator)
    more = LabelStats(zeros, zeros, zeros > 0, call.ids[:, 0], zeros) if return_stats else None
    empty = zeros, TokenStats(zeros, zeros[:, None]), call.ids, more
    nothing = Projection(False, False, False) if isinstance(call.source, Projection) else False
    sources = [call.source, Logits.of(labels)]
    (losses, stats, largest, more), _ = by_rows(chunk, call.tokens, sources, [nothing, False], empty, step)
    return losses, Saved(None, labels, call._replace(ids=largest), stats), more


def _weighed(call: Call, q: Array, dtype: Any) -> Array:
    """Probabilities [C, V] times the weights of classes, of `dtype`."""
    q = q.astype(dtype)
    return q if call.class_weight is None else q * call.class_weight[None]


def _dense_backward(call: Call, needs: Any, saved: Saved, row: Array, chunk: int) -> Any:
    source, vocab, labels = call.source, call.source.vocab, saved.labels
    assert labels is not None
    factor, smoothing = call.transform.factor(), call.loss.label_smoothing
    row = row if factor is None else row * factor
    grad_scale = None
    if isinstance(source, Projection):
        sums = call.tokens.take(jnp.sum(labels, 1, dtype=jnp.float32), 0)
        sums = sums if call.class_weight is None else sums * jnp.max(call.class_weight)
        grad_scale = float16_scale(jnp.abs(row) * (1 + sums), source.hidden.dtype)
    row = row if grad_scale is None else row * grad_scale

    def step(start: Any, z: Array, q: Array) -> tuple[tuple[()], list[Array | None]]:
        stats, scale, largest = cut_rows((saved.stats, row, call.ids), start, chunk)
        z, slope = call.transform.of_chunk(start, chunk).apply(z)
        q = _weighed(call, q, z.dtype)
        total = jnp.sum(q, 1)
        rest = total[:, None] - jnp.take_along_axis(q, largest, 1)
        factor, at = at_ids(call, stats, total, rest, largest)
        even = None if smoothing is None else scale * (smoothing / vocab)
        made = TokenGradient(scale * factor, scale[:, None] * at, even=even)
        g = logits_gradient(z, None, stats, made, largest, Columns(0, vocab), call.class_weight)
        eps, _ = factors(call.loss, stats)
        there = lax.broadcasted_iota(jnp.int32, z.shape, 1) == largest
        g = jnp.where(there, g, g - (1 - eps) * scale[:, None] * q)
        return (), [g if slope is None else g * slope, None]

    _, (made, _) = by_rows(chunk, call.tokens, [source, Logits.of(labels)], [needs, False], (), step)
    if isinstance(source, Logits):
        return source.floats(made)
    made = jax.tree.map(lambda x: unscaled(x, grad_scale), made)
    return replace(made, hidden=None if made.hidden is None else call.tokens.spread(made.hidden))
