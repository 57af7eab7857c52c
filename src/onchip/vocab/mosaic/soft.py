"""Cross-entropy with soft labels on the Hopper kernels of kernels.py: probabilities of K ids, or of every entry.

The maths is that of `onchip.vocab.loss`.  Every token counts and is its own position; backward makes the logits
again, chunk by chunk of the vocabulary.  Of K ids, XLA computes the logits from rows of the weight, and writes their
entries into a chunk's gradient before it is multiplied.  Labels of every entry are read by the kernels beside the
logits' tile; there the largest logit has the part of the label.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import IGNORED
from onchip.vocab.mosaic import memory, op
from onchip.vocab.mosaic.memory import TOKEN_TILE, VOCAB_TILE, MosaicPlan
from onchip.vocab.mosaic.positions import LOWEST, Labels, Operands, Partials, Positions, Upstream, concatenated
from onchip.vocab.mosaic.rooms import tiles_of
from onchip.vocab.xla import soft
from onchip.vocab.xla.loss import Call, Outputs
from onchip.vocab.xla.soft import LabelStats, SoftLabels
from onchip.vocab.xla.tiles import Projection, TokenStats, Wanted, float16_scale

Array = jax.Array
BOX = 64  # rows and columns of the blocks that gradients of logits are kept in


class Saved(NamedTuple):
    """What backward needs, by row where not said otherwise."""

    call: Call  # without its source; with labels of every entry its ids are where the largest logits are
    stats: TokenStats
    probs: Array | None  # [P, K]: times the weights of classes
    labels: Array | None  # [T, V], by token
    mass: Array | None  # [P]: the sum of those, times the weights of classes


def forward(
    source: Projection, given: SoftLabels, plan: MosaicPlan, *, reduction: str, return_stats: bool
) -> tuple[Outputs, Saved]:
    """The loss, [] or [T], and its statistics."""
    call, wanted = soft.call_of(source, given, TOKEN_TILE, reduction), soft.wanted_of(given, return_stats)
    if given.ids is None:
        losses, saved, more = _of_every_entry(plan, wanted, call, given.probs, return_stats)
    else:
        losses, known, more = soft.of_ids(call, given.probs, _of_ids(plan, wanted, call), return_stats)
        saved = Saved(call, known.stats, known.probs, None, None)
    made = soft.outputs(call, reduction, losses, saved.stats.lse, more)
    return made, saved._replace(call=saved.call._replace(source=None))


def backward(source: Projection, needs: Projection, saved: Saved, plan: MosaicPlan, upstream: Array) -> Projection:
    """The gradients of hidden, weight and bias in their dtypes; what isn't needed is None."""
    call = saved.call._replace(source=source)
    given = op.Saved(call, saved.stats)
    if saved.labels is None:
        return op.gradients(plan, needs, given, *_by_ids(call, saved, upstream))
    return op.gradients(plan, needs, given, *_by_every_entry(call, saved, upstream))


def _launched(plan: MosaicPlan, at: Positions, softmax_tiles: Any) -> Any:
    """The launcher; where there are several parts, it is traced and lowered once."""
    return jax.jit(softmax_tiles) if len(at.parts(plan)) > 1 else softmax_tiles


def _upstream(
    at: Positions,
    stats: TokenStats,
    row: Array,
    factor: Array,
    at_target: Array,
    even: Array | None,
    grad_scale: Array | None,
) -> Upstream:
    """With zeros beyond the last token."""

    def masked(x: Array) -> Array:
        return jnp.where(at.there, x, 0)

    return Upstream(
        masked(row),
        masked(factor),
        masked(at_target),
        None if even is None else masked(even),
        jnp.where(at.there, stats.lse, jnp.inf),
        None if grad_scale is None else (1 / grad_scale).reshape(1),
    )


# -------------------------------------------------------------------------------------------------------------- K ids


def _logits(at: Positions, rows: Array, part: slice) -> Array:
    """[part, K]: of the call's ids, one after the other: all rows of the weight at once would be [part, K, H]."""

    def of_one(ids: Array) -> Array:
        return at.target_logit(rows, part, jnp.maximum(ids, -1))

    made: Array = lax.map(of_one, at.call.ids[part].T)
    return made.T


def _of_ids(plan: MosaicPlan, wanted: Wanted, call: Call) -> TokenStats:
    """The statistics.  The likeliest of a token's ids has the part of its label."""
    from onchip.vocab.mosaic import kernels

    at = Positions.of(call)
    kernel: Any = partial(
        kernels.softmax_tiles, None, vocab_major=at.layer.vocab_axis == 0, wanted=wanted,
        config=tiles_of(call)["softmax_tiles"],
    )  # fmt: skip
    launch = _launched(plan, at, kernel)
    made: list[TokenStats] = []
    for rows, part in at.in_parts(plan, made):
        logits = _logits(at, rows, part)
        best = jnp.argmax(logits, 1)[:, None]
        label = jnp.maximum(jnp.take_along_axis(call.ids[part], best, 1)[:, 0], -1)
        partials = launch(at.operands(rows, part)._replace(label=label))
        made.append(at.stats(partials, jnp.max(logits, 1), part, label, logits))
    return at.joined(made)


def _by_ids(call: Call, saved: Saved, upstream: Array) -> Any:
    from onchip.vocab.mosaic import kernels

    assert saved.probs is not None
    at, stats = Positions.of(call), saved.stats
    gradient = soft.by_ids(call, saved.probs, stats, call.reduction.row_scale(upstream, call.tokens))
    gradient = gradient.times(call.transform.factor())
    grad_scale = float16_scale(gradient.size(), call.source.hidden.dtype)
    gradient = gradient.times(grad_scale)
    entries = gradient.at_ids
    if at.inner is not None:
        x = (stats.log_prob + stats.lse[:, None]) / at.factor[:, None]
        entries = jnp.where(entries == 0, 0, entries * (1 - x * x))
    nothing = jnp.zeros_like(gradient.factor)
    above = _upstream(at, stats, nothing, gradient.factor, nothing, gradient.even, grad_scale)
    major, config = call.source.vocab_axis == 0, tiles_of(call)["gradient_tiles"]

    def by_logits(operands: Operands, begin: Array, size: int) -> Array:
        made: Array = kernels.gradient_tiles(
            operands._replace(label=jnp.full_like(operands.label, IGNORED)), above.lse, above.factor, above.at_target,
            even=above.even, first=begin, size=size, vocab_major=major, config=config,
        )  # fmt: skip
        return _written(made, call.ids - begin[0], entries, major)

    return at, above, by_logits


def _written(gradient: Array, column: Array, entries: Array, major: bool) -> Array:
    """The gradient of a chunk's logits, as `gradient_tiles` lays it out, with these entries [P, K] at columns [P, K] of
    tokens' rows.  Those outside are dropped; a column that occurs twice has the same number twice.
    """
    size = gradient.shape[0 if major else 1]
    token = lax.broadcasted_iota(jnp.int32, column.shape, 0)
    outside = (column < 0) | (column >= size)
    if major:
        row, across = column // BOX * BOX + token % BOX, token // BOX * BOX + column % BOX
        row = jnp.where(outside, size, row)
    else:
        row, across = token, jnp.where(outside, size, column)
    return gradient.at[row, across].set(entries.astype(gradient.dtype), mode="drop")


# -------------------------------------------------------------------------------------------------------- every entry


def _positions(call: Call) -> Positions:
    """With the weights of classes, which labels are multiplied by."""
    at = Positions.of(call)
    if call.class_weight is None:
        return at
    return at._replace(class_weight=jnp.pad(call.class_weight.astype(jnp.float32), (0, -call.vocab % VOCAB_TILE)))


def _config() -> Any:
    from onchip.kernels.mosaic.product import MosaicConfig

    return MosaicConfig.from_numbers(memory.label_tiles())


class _Costs(NamedTuple):
    """Of each row, [P]: sums over the vocabulary."""

    cost: Array  # of labels times lse - z, weighed by class
    mass: Array  # of labels, weighed by class
    plain_cost: Array  # the same two without weights of classes
    plain_mass: Array
    largest: Array  # int32: where the largest logit is


def _of_every_entry(
    plan: MosaicPlan, wanted: Wanted, call: Call, labels: Array, return_stats: bool
) -> tuple[Array, Saved, LabelStats | None]:
    """[P]: the loss of each row."""
    from onchip.vocab.mosaic import kernels

    at = _positions(call)
    kernel: Any = partial(
        kernels.softmax_tiles, None, vocab_major=at.layer.vocab_axis == 0, wanted=wanted._replace(argmax=True),
        config=_config(),
    )  # fmt: skip
    launch = _launched(plan, at, lambda operands, labels: kernel(operands, labels=labels))
    made: list[tuple[TokenStats, _Costs]] = []
    for rows, part in at.in_parts(plan, made):
        first = jnp.full(1, part.start, jnp.int32)
        made.append(_merged(at, launch(at.operands(rows, part), Labels(labels, first)), part))
    stats, costs = concatenated(made)
    losses, more = soft.losses_of(call.loss, costs.cost, stats), None
    if return_stats:
        likeliest = call.tokens.take(jnp.argmax(labels, 1).astype(jnp.int32), IGNORED)
        more = LabelStats.of(stats, -costs.plain_cost, costs.plain_mass, likeliest)
    call = call._replace(ids=costs.largest[:, None])
    return losses, Saved(call, TokenStats(stats.lse, stats.log_prob), None, labels, costs.mass), more


def _merged(at: Positions, partials: Partials, part: slice) -> tuple[TokenStats, _Costs]:
    """The sums over all parts of the tiles, of the positions of `part`."""
    there, maximum = at.there[part], partials.maximum
    best = jnp.argmax(maximum, 0)[None]
    largest = jnp.where(there, jnp.take_along_axis(partials.argmax, best, 0)[0], IGNORED)
    target = jnp.where(there, jnp.max(maximum, 0), LOWEST)
    # The kernel leaves each part's largest out, and here all but one of them are as any other.
    is_best = jnp.arange(len(maximum))[:, None] == best
    others = jnp.where(is_best, partials.others, partials.others + 1)
    stats = at.stats(partials._replace(others=others), target, part, largest)

    def over_parts(cost: Array, mass: Array) -> tuple[Array, Array]:
        further = jnp.where(mass == 0, 0, mass * (target[None] - maximum))
        total = jnp.sum(mass, 0)
        # The largest logit's own log-probability is minus the logarithm of the total.
        cost = jnp.sum(cost + further, 0) - jnp.where(total == 0, 0, total * stats.log_prob[:, 0])
        return jnp.where(there, cost, 0), jnp.where(there, total, 0)

    weighed = over_parts(partials.cost, partials.mass)
    plain = weighed if partials.plain_cost is None else over_parts(partials.plain_cost, partials.plain_mass)
    return stats, _Costs(*weighed, *plain, largest)


def _by_every_entry(call: Call, saved: Saved, upstream: Array) -> Any:
    from onchip.vocab.mosaic import kernels

    labels, mass, stats, largest = saved.labels, saved.mass, saved.stats, call.ids
    assert labels is not None
    assert mass is not None
    at, factor, row = _positions(call), call.transform.factor(), call.reduction.row_scale(upstream, call.tokens)
    row = row if factor is None else row * factor
    grad_scale = float16_scale(jnp.abs(row) * (1 + mass), call.source.hidden.dtype)
    row = row if grad_scale is None else row * grad_scale
    own = call.tokens.take(jnp.take_along_axis(labels, largest[: len(labels)], 1).astype(jnp.float32), 0)
    if call.class_weight is not None:
        own *= call.class_weight.at[largest].get(mode="clip")
    of_p, at_largest = soft.at_ids(call, stats, mass, mass[:, None] - own, largest)
    eps, _ = soft.factors(call.loss, stats)
    even = None if call.loss.label_smoothing is None else row * (eps / call.vocab)
    above = _upstream(at, stats, row, row * of_p, row * at_largest[:, 0], even, grad_scale)
    by_labels, first = (1 - eps) * above.row_scale, jnp.zeros(1, jnp.int32)

    def by_logits(operands: Operands, begin: Array, size: int) -> Array:
        made: Array = kernels.gradient_tiles(
            operands, above.lse, above.factor, above.at_target, even=above.even, first=begin, size=size,
            labels=Labels(labels, first), by_labels=by_labels, vocab_major=call.source.vocab_axis == 0,
            config=_config(),
        )  # fmt: skip
        return made

    return at, above, by_logits
