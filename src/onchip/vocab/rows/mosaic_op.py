"""Losses of logits that exist already, for JAX on the Hopper kernels of mosaic.py: a way of `onchip.vocab.jax_ways`.

Each row is its token's; ignored ones are skipped.  A kernel reads each logit once for the statistics, and another once
more, in backward, for the gradient.  If the vocabulary is split over devices, each reads its own logits, and the
statistics are merged.

A mean or sum of losses with one id each is made `at_once` with its gradient for an upstream gradient of 1, by a kernel
that reads each logit once.  Backward returns that, if the upstream gradient is 1; its product with a power of two,
which rounds nothing; otherwise it computes the gradient anew from the logits, so that it is rounded once.  If XLA knows
the upstream gradient, only one of these is left in the program.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import IGNORED, vary_alike
from onchip.frontend.jax_inputs import hopper_refusal
from onchip.kernels.mosaic.maths import tanh
from onchip.vocab.chunks import ChunkConfig
from onchip.vocab.loss import factor_of_lse
from onchip.vocab.rows import memory
from onchip.vocab.rows.memory import RowsProblem
from onchip.vocab.xla.loss import LabelSums, LossCall
from onchip.vocab.xla.tiles import (
    CountedTokens,
    Softmax,
    Transform,
    Wanted,
    XlaLogits,
    XlaTokenGradient,
    XlaTokenStats,
)
from onchip.vocab.xla.walk import Entries

Array = jax.Array
SEQUENTIAL = True


class Saved(NamedTuple):
    """What gradients are made from; or one that is made, for an upstream gradient of 1."""

    call: LossCall
    stats: XlaTokenStats
    gradient: Array | None = None


class InPlace(CountedTokens):
    """Tokens of which each is in a row of its own, whether it counts or not."""

    @staticmethod
    def of(labels: Array) -> "InPlace":
        """Those count whose label [T] isn't IGNORED."""
        kept, place = labels != IGNORED, jnp.arange(len(labels), dtype=jnp.int32)
        return InPlace(kept, place, jnp.sum(kept, dtype=jnp.int32), place)

    def take(self, x: Array, fill: float) -> Array:
        """[T, ...] values, `fill` for ignored tokens."""
        return jnp.where(self.kept.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.asarray(fill, x.dtype))

    def spread(self, rows: Array) -> Array:
        """[T, ...] values, 0 for ignored tokens."""
        return self.take(rows, 0)

    def there(self) -> Array:
        return self.kept


def refusal(problem: RowsProblem, platform: str) -> str | None:
    """Why the kernels can't serve the call, or None."""
    return memory.mosaic_refusal(problem, platform) or hopper_refusal()


def at_once(problem: RowsProblem) -> bool:
    """Whether forward makes the gradient of a mean or sum of losses too."""
    from onchip.vocab.rows import mosaic_once

    p = problem
    more = p.softcap or p.stats or p.smoothing or p.class_weight or p.ids or p.labels
    return p.grad and not more and mosaic_once.serves(p.vocab, p.dtype)


def select(plan: ChunkConfig, labels: Array) -> CountedTokens:
    return InPlace.of(labels)


def of_logits(logits: Array) -> XlaLogits:
    """The source of a call: the kernels read the logits as they are."""
    return XlaLogits(logits, logits.dtype)


def forward(
    plan: ChunkConfig, wanted: Wanted, needs: Any, call: LossCall
) -> tuple[XlaTokenStats, LabelSums | None, Saved | None]:
    """The statistics of each row, and what backward needs; with the strategy 'stash' the gradient."""
    from onchip.vocab.rows import mosaic  # Pallas takes a second to import

    shard = call.shard
    own = call if shard is None else shard.local(call)
    logits, transform, entries = own.source.bits, own.transform, own.entries
    kept, factor, inner = own.tokens.kept.astype(jnp.int32), _factor(transform), _inner(transform)
    class_weight = own.class_weight if wanted.even or entries is not None else None
    of_kernel = wanted._replace(argmax=wanted.argmax or entries is not None)
    gradient = None
    if plan.strategy == "stash":
        made, gradient = _at_once(own, kept, factor)
    else:
        more = {"wanted": of_kernel, "labels": entries, "end": _end(own)}
        made = mosaic.statistics(logits, kept, factor, inner, class_weight, **more)
    best = made["best"] * factor
    summed: Any = {x: made.get(x) for x in ("total", "below", "offset_sum", "moment", "squares", "squares_below")}
    softmax = Softmax(
        best,
        picked=best[:, None] if entries is not None else _picked(own, factor, best),
        weight=jnp.broadcast_to(jnp.sum(own.class_weight), best.shape) if wanted.weighed else None,
        # -1 for rows in which all logits are -inf, as in plain JAX, or one is no number.
        argmax=jnp.where(jnp.isnan(best) | (made["argmax"] == mosaic.NO_COLUMN), -1, made["argmax"])
        if wanted.argmax
        else None,
        **summed,
    )
    sums = None
    if entries is None:
        softmax = softmax if shard is None else shard.joined(softmax)
        stats = softmax.complete(call.ids, call.vocab)
    else:
        stats, sums, call = _entries_of(own, wanted, softmax, made).everywhere(call)
    return stats, sums, Saved(call, stats.known, gradient) if any(jax.tree.leaves(needs)) else None


def _at_once(call: LossCall, kept: Array, factor: Array) -> tuple[dict[str, Array], Array]:
    """The statistics, and the gradient for an upstream gradient of 1."""
    from onchip.vocab.rows import mosaic_once

    scale = call.reduction.row_scale(jnp.ones(()), call.tokens)
    if (of_logits := call.transform.factor()) is not None:
        scale = scale * of_logits
    slope = factor_of_lse(call.terms)
    if slope is not None:
        slope = slope.astype(jnp.float32).reshape(1)
    return mosaic_once.losses(call.source.bits, kept, factor, mosaic_once.RowLoss(call.ids[:, 0], scale, slope))


def _entries_of(own: LossCall, wanted: Wanted, softmax: Softmax, made: Mapping[str, Array]) -> Entries:
    """What is known about labels of every entry of this device."""
    q = own.entries
    largest = jnp.minimum(made["argmax"], q.shape[1] - 1)  # any, if all logits are -inf
    label = jnp.take_along_axis(q, largest[:, None], 1)[:, 0].astype(jnp.float32)
    entries = Entries(softmax, largest, -made["cost"], made["mass"], label)
    if not wanted.entropy:
        return entries
    if (end := _end(own)) is not None:
        q = jnp.where(jnp.arange(q.shape[1])[None] < end[0], q, 0)
    plain = (-made["plain_cost"], made["plain_mass"]) if "plain_cost" in made else None
    most = jnp.max(q, 1).astype(jnp.float32)
    return entries._replace(likeliest=jnp.argmax(q, 1).astype(jnp.int32), most=most, plain=plain)


def gradients(plan: ChunkConfig, needs: Any, saved: Saved, gradient: XlaTokenGradient) -> Array:
    """The gradient of the logits [T, V] in their dtype, for one with respect to the final logits."""
    from onchip.vocab.rows import mosaic

    call, stats, _ = saved
    if call.shard is not None:
        call, stats, gradient = vary_alike((call.shard.local(call), stats, gradient))
    logits, transform, ids, one = call.source.bits, call.transform, call.ids, call.ids.shape[1] == 1
    factor, inner = _factor(transform), _inner(transform)
    gradient = gradient.times(transform.factor())
    center: Any
    center, width = (stats.lse, None) if gradient.entropy is None else (stats.mean, stats.entropy)
    of_rows = mosaic.RowGradient(
        gradient.factor,
        center,
        width,
        gradient.entropy,
        gradient.even,
        gradient.labels,
        gradient.at_ids[:, 0] if one else None,
    )
    made = mosaic.gradients(
        logits, call.tokens.kept.astype(jnp.int32), factor, inner, call.class_weight, ids[:, 0] if one else None,
        of_rows, labels=call.entries, end=_end(call),
    )  # fmt: skip
    if one:
        return made
    at_ids = gradient.at_ids
    if inner is not None:
        at_ids *= 1 - jnp.square(tanh(_entries(logits, ids) * inner[0]))
    # Ids that are none are dropped; those that occur twice write the same number.
    column = jnp.where(ids < 0, logits.shape[1], ids)
    return made.at[jnp.arange(len(ids))[:, None], column].set(at_ids.astype(made.dtype), mode="drop")


def backward(plan: ChunkConfig, needs: Any, saved: Saved, upstream: Array) -> Array:
    """The gradient of the logits [T, V] in their dtype, for one of the reduced loss, or of each token's."""
    call, stats, gradient = saved

    def anew() -> Array:
        return gradients(plan, needs, saved, call.gradient(stats, call.reduction.row_scale(upstream, call.tokens)))

    if gradient is None:
        return anew()
    which = jnp.where(upstream == 1, 0, jnp.where(_scales(upstream, gradient.dtype), 1, 2))
    ways = [lambda: gradient, lambda: gradient * upstream.astype(gradient.dtype), anew]
    made: Array = lax.switch(which, ways)
    return made


def _scales(upstream: Array, dtype: Any) -> Array:
    """Whether gradients times this number are as good as made for it: a power of two, or 0.  Of float16 many are too
    small for all digits."""
    if dtype == jnp.float16:
        return jnp.zeros((), bool)
    digits = lax.bitcast_convert_type(upstream.astype(jnp.float32), jnp.uint32) & 0x7FFFFF
    return (digits == 0) & (jnp.abs(upstream) <= 2.0**16)  # what is lost of numbers near 0 stays near 0


def _end(call: LossCall) -> Array | None:
    """[1]: how many of this device's entries count; None for all."""
    end = None if call.shard is None else call.shard.end
    return None if end is None else end.reshape(1)


def _factor(transform: Transform) -> Array:
    """[T] or [1]: what x is multiplied by."""
    factor: Array = jnp.ones((), jnp.float32)
    if transform.softcap is not None:
        factor = transform.softcap
    elif transform.logit_scale is not None:
        factor = transform.logit_scale
    if transform.temperature is not None:
        factor = factor / transform.temperature
    return factor.astype(jnp.float32).reshape(-1)


def _inner(transform: Transform) -> Array | None:
    """[1]: what logits are multiplied by before tanh; None without a softcap."""
    if transform.softcap is None:
        return None
    scale = 1.0 if transform.logit_scale is None else transform.logit_scale
    return (scale / transform.softcap).astype(jnp.float32).reshape(1)


def _entries(logits: Array, ids: Array) -> Array:
    """[T, K] float32: the ids' logits; those of ids that are none may be any."""
    return jnp.take_along_axis(logits, jnp.maximum(ids, 0), 1, mode="clip").astype(jnp.float32)


def _picked(own: LossCall, factor: Array, best: Array) -> Array:
    """[T, K]: the ids' final logits; 0 of those that other devices have."""
    x, inner = _entries(own.source.bits, own.ids), _inner(own.transform)
    if inner is None:
        picked = x * factor[:, None]
    else:
        # The kernel's tanh may differ in the last digit.  Where the id leads, that would be most of its loss.
        picked, near = tanh(x * inner[0]) * factor[:, None], 1e-6 * factor[:, None]
        picked = jnp.where(jnp.abs(picked - best[:, None]) < near, best[:, None], picked)
    return picked if own.shard is None else jnp.where(own.ids < 0, 0, picked)
