"""Soft labels on the Hopper kernels: probabilities of K ids, or of every entry.

Every token counts and is its own position; backward makes the logits again, chunk by chunk of the vocabulary.  Of K
ids, XLA computes the logits from rows of the weight, and writes their entries into a chunk's gradient before it is
multiplied.  Labels of every entry are read by the kernels beside the logits' tile; there the largest logit has the part
of the label.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import IGNORED
from onchip.vocab.mosaic import memory
from onchip.vocab.mosaic.head import VOCAB_TILE, MosaicPlan
from onchip.vocab.mosaic.positions import (
    LOWEST,
    MosaicLabels,
    MosaicPartials,
    Operands,
    Positions,
    Upstream,
    concatenated,
)
from onchip.vocab.mosaic.rooms import tiles_of
from onchip.vocab.xla.loss import LabelSums, LossCall
from onchip.vocab.xla.tiles import Wanted, XlaTokenStats
from onchip.vocab.xla.walk import Entries, expected_of

Array = jax.Array
BOX = 64  # rows and columns of the blocks that gradients of logits are kept in
ByLogits = Callable[[Operands, Array, int], Array]
"""The gradient of a chunk's logits, from the operands, the chunk's first entry [1] and its size."""


def several(call: LossCall) -> bool:
    """Whether a token may have more than one label."""
    return call.probs is not None or call.entries is not None or call.ids.shape[1] > 1


def statistics(plan: MosaicPlan, wanted: Wanted, call: LossCall) -> tuple[XlaTokenStats, LabelSums | None, LossCall]:
    """The statistics of each position, the sums for labels of every entry, and the call with what backward needs."""
    if call.entries is None:
        return _of_ids(plan, wanted, call), None, call
    return _of_every_entry(plan, wanted, call)


def by_logits(at: Positions, stats: XlaTokenStats, above: Upstream, at_ids: Array) -> ByLogits | None:
    """Returns the function that makes the gradient of a chunk's logits; None for one id, for which `gradient_tiles`
    does it.
    """
    if above.labels is not None:
        return _with_entries(at.call, above)
    return _with_ids(at, stats, above, at_ids) if several(at.call) else None


def _launched(plan: MosaicPlan, at: Positions, softmax_tiles: Any) -> Any:
    """The launcher; if there are several parts, it is traced and lowered only once."""
    return jax.jit(softmax_tiles) if len(at.parts(plan)) > 1 else softmax_tiles


# -------------------------------------------------------------------------------------------------------------- K ids


def _logits(at: Positions, rows: Array, part: slice) -> Array:
    """[part, K]: the logits of the call's ids, one id after the other: all their rows of the weight at once would be
    [part, K, H].

    Not by a loop of XLA's, though each id takes some 30 ms to compile: on an H200 with jaxlib 0.11.2, in one of six
    processes that shared the GPU, 41 of 2,364 calls had a wrong logit in half of the tokens, as if the loop went on
    before its kernel had ended (results/2026-11-29-h200-ids-in-a-row.json).
    """

    def of_one(_: None, ids: Array) -> tuple[None, Array]:
        return None, at.target_logit(rows, part, jnp.maximum(ids, -1))

    made: Array = lax.scan(of_one, None, at.ids[part].T, unroll=True)[1]
    return made.T


def _of_ids(plan: MosaicPlan, wanted: Wanted, call: LossCall) -> XlaTokenStats:
    """The statistics for K ids.  The likeliest of a token's ids has the part of its label."""
    from onchip.vocab.mosaic import kernels

    at = Positions.of(call)
    kernel: Any = partial(
        kernels.softmax_tiles, None, vocab_major=at.layer.vocab_axis == 0, wanted=wanted,
        config=tiles_of(call)["softmax_tiles"],
    )  # fmt: skip
    launch = _launched(plan, at, kernel)
    made: list[XlaTokenStats] = []
    for rows, part in at.in_parts(plan, made):
        logits = _logits(at, rows, part)
        best = jnp.argmax(logits, 1)[:, None]
        label = jnp.maximum(jnp.take_along_axis(at.ids[part], best, 1)[:, 0], -1)
        partials = launch(at.operands(rows, part)._replace(label=label))
        made.append(at.stats(partials, jnp.max(logits, 1), part, label, logits))
    return at.joined(made)


def _with_ids(at: Positions, stats: XlaTokenStats, above: Upstream, entries: Array) -> ByLogits:
    """With these entries [P, K] at the ids."""
    from onchip.vocab.mosaic import kernels

    ids, major, config = at.ids, at.layer.vocab_axis == 0, tiles_of(at.call)["gradient_tiles"]
    if at.inner is not None:
        x = (stats.log_prob + stats.lse[:, None]) / at.factor[:, None]
        entries = jnp.where(entries == 0, 0, entries * (1 - x * x))

    def by_logits(operands: Operands, begin: Array, size: int) -> Array:
        made: Any = kernels.gradient_tiles(
            operands._replace(label=jnp.full_like(operands.label, IGNORED)), above.lse, above.factor, above.at_target,
            even=above.even, first=begin, size=size, vocab_major=major, config=config, **above.of_entropy(slice(None)),
        )  # fmt: skip
        return _written(made, ids - begin[0], entries, major)

    return by_logits


def _written(gradient: Array, column: Array, entries: Array, major: bool) -> Array:
    """The gradient of a chunk's logits, as `gradient_tiles` lays it out, with these entries [P, K] at columns [P, K] of
    tokens' rows.  Entries outside are dropped; a column that occurs twice has the same number both times.
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


def positions(call: LossCall) -> Positions:
    """The call's positions; labels of every entry are multiplied by the class weights, if there are any."""
    at, weight = Positions.of(call), call.class_weight
    if weight is None or call.entries is None:
        return at
    weight = weight if call.shard is None else call.shard.entries(weight)
    return at._replace(class_weight=jnp.pad(weight.astype(jnp.float32), (0, -len(weight) % VOCAB_TILE)))


def _config() -> Any:
    from onchip.kernels.mosaic.product import MosaicConfig

    return MosaicConfig.from_numbers(memory.label_tiles())


def _of_every_entry(plan: MosaicPlan, wanted: Wanted, call: LossCall) -> tuple[XlaTokenStats, LabelSums, LossCall]:
    from onchip.vocab.mosaic import kernels

    at, entries = positions(call), call.entries
    kernel: Any = partial(
        kernels.softmax_tiles, None, vocab_major=at.layer.vocab_axis == 0, wanted=wanted._replace(argmax=True),
        config=_config(),
    )  # fmt: skip
    launch = _launched(plan, at, lambda operands, labels: kernel(operands, labels=labels))
    likeliest: Any = call.tokens.take(jnp.argmax(entries, 1).astype(jnp.int32), IGNORED) if wanted.entropy else None
    made: list[Any] = []
    for rows, part in at.in_parts(plan, made):
        first = jnp.full(1, part.start, jnp.int32)
        made.append(_merged(at, launch(at.operands(rows, part), MosaicLabels(entries, first)), part))
    stats, sums, mass, largest = concatenated(made)
    sums = sums._replace(likeliest=likeliest)
    at_largest = largest[: len(entries), None]
    label = jnp.take_along_axis(entries, at_largest, 1).astype(jnp.float32)
    if call.shard is not None:
        # `stats` is this device's softmax, and sums are relative to its largest logit.
        label = call.tokens.take(label[:, 0], 0)
        found = Entries(stats._replace(picked=stats.max[:, None]), jnp.maximum(largest, 0), sums.expected, mass, label)
        if wanted.entropy:
            most = call.tokens.take(jnp.max(entries, 1).astype(jnp.float32), 0)
            found = found._replace(likeliest=jnp.maximum(likeliest, 0), most=most, plain=(sums.plain, sums.mass))
        return found.everywhere(call)
    return stats, sums, call._replace(ids=largest[:, None], probs=call.tokens.take(label, 0), mass=mass)


def _merged(at: Positions, partials: MosaicPartials, part: slice) -> tuple[XlaTokenStats, LabelSums, Array, Array]:
    """Merge all parts of the tiles for the positions of `part`: also the labels' sum, weighted by class, and where the
    largest logits are."""
    there, maximum = at.there[part], partials.maximum
    best = jnp.argmax(maximum, 0)[None]
    largest = jnp.where(there, jnp.take_along_axis(partials.argmax, best, 0)[0], IGNORED)
    target = jnp.where(there, jnp.max(maximum, 0), LOWEST)
    # The kernel leaves each part's largest out, and here all but one of them are as any other.
    is_best = jnp.arange(len(maximum))[:, None] == best
    others = jnp.where(is_best, partials.others, partials.others + 1)
    stats = at.stats(partials._replace(others=others), target, part, largest)

    def over_parts(cost: Array, mass: Array) -> tuple[Array, Array]:
        split = at.call.shard is not None
        of_top = -cost, mass, maximum, target, jnp.zeros_like(target) if split else stats.log_prob[:, 0]
        expected, total = expected_of(*of_top)
        return jnp.where(there, expected, 0), jnp.where(there, total, 0)

    expected, mass = over_parts(partials.cost, partials.mass)
    plain = (expected, mass)
    if partials.plain_cost is not None:
        plain = over_parts(partials.plain_cost, partials.plain_mass)
    return stats, LabelSums(expected, *plain), mass, largest


def _with_entries(call: LossCall, above: Upstream) -> ByLogits:
    from onchip.vocab.mosaic import kernels

    labels = MosaicLabels(call.entries, jnp.zeros(1, jnp.int32))

    def by_logits(operands: Operands, begin: Array, size: int) -> Array:
        made: Any = kernels.gradient_tiles(
            operands, above.lse, above.factor, above.at_target, even=above.even, first=begin, size=size,
            labels=labels, by_labels=above.labels, vocab_major=call.source.vocab_axis == 0, config=_config(),
        )  # fmt: skip
        return made  # type: ignore[no-any-return]

    return by_logits
