"""Losses of logits that exist already, for JAX on the Hopper kernels of mosaic.py: a way of `onchip.vocab.jax_ways`.

Each row is its token's; ignored ones are skipped.  A kernel reads each logit once for the statistics, and once more,
in backward, for the gradient.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from onchip.frontend.jax_call import IGNORED
from onchip.frontend.jax_inputs import hopper_refusal
from onchip.kernels.mosaic.maths import tanh
from onchip.vocab.chunks import ChunkConfig
from onchip.vocab.rows import memory
from onchip.vocab.rows.memory import RowsProblem
from onchip.vocab.xla.loss import LabelSums, LossCall
from onchip.vocab.xla.parallel import Shard
from onchip.vocab.xla.tiles import (
    CountedTokens,
    Softmax,
    Transform,
    Wanted,
    XlaLogits,
    XlaTokenGradient,
    XlaTokenStats,
)
from onchip.vocab.xla.walk import Entries, XlaSaved

Array = jax.Array
SEQUENTIAL = True
Saved = XlaSaved


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


def refusal(problem: RowsProblem, platform: str, shard: Shard | None = None) -> str | None:
    """Why the kernels can't serve the call, or None."""
    if shard is not None:
        return "it doesn't take a split vocabulary; pass backend='xla'"
    return memory.mosaic_refusal(problem, platform) or hopper_refusal()


def select(plan: ChunkConfig, labels: Array) -> CountedTokens:
    return InPlace.of(labels)


def of_logits(logits: Array) -> XlaLogits:
    """The source of a call: the kernels read the logits as they are."""
    return XlaLogits(logits, logits.dtype)


def forward(
    plan: ChunkConfig, wanted: Wanted, needs: Any, call: LossCall
) -> tuple[XlaTokenStats, LabelSums | None, XlaSaved | None]:
    """The statistics of each row, and what backward needs."""
    from onchip.vocab.rows import mosaic  # Pallas takes a second to import

    logits, transform, entries = call.source.bits, call.transform, call.entries
    kept, factor, inner = call.tokens.kept.astype(jnp.int32), _factor(transform), _inner(transform)
    class_weight = call.class_weight if wanted.even or entries is not None else None
    of_kernel = wanted._replace(argmax=wanted.argmax or entries is not None)
    made = mosaic.statistics(logits, kept, factor, inner, class_weight, wanted=of_kernel, labels=entries)
    best = made["best"] * factor
    summed: Any = {x: made.get(x) for x in ("total", "below", "offset_sum", "moment", "squares", "squares_below")}
    softmax = Softmax(
        best,
        picked=best[:, None] if entries is not None else _picked(logits, call.ids, transform, factor, best),
        weight=jnp.broadcast_to(jnp.sum(call.class_weight), best.shape) if wanted.weighed else None,
        # -1 for rows in which all logits are -inf, as in plain JAX, or one is no number.
        argmax=jnp.where(jnp.isnan(best) | (made["argmax"] == mosaic.NO_COLUMN), -1, made["argmax"])
        if wanted.argmax
        else None,
        **summed,
    )
    sums = None
    if entries is None:
        stats = softmax.complete(call.ids, call.vocab)
    else:
        stats, sums, call = _with_labels(call, wanted, softmax, made)
    return stats, sums, XlaSaved(call, stats.known) if any(jax.tree.leaves(needs)) else None


def _with_labels(
    call: LossCall, wanted: Wanted, softmax: Softmax, made: Mapping[str, Array]
) -> tuple[XlaTokenStats, LabelSums, LossCall]:
    """As `onchip.vocab.xla.walk.of_every_entry`."""
    largest = jnp.minimum(made["argmax"], call.vocab - 1)  # any, if all logits are -inf
    label = jnp.take_along_axis(call.entries, largest[:, None], 1)[:, 0].astype(jnp.float32)
    entries = Entries(softmax, largest, -made["cost"], made["mass"], label)
    if wanted.entropy:
        likeliest = jnp.argmax(call.entries, 1).astype(jnp.int32)
        plain = (-made["plain_cost"], made["plain_mass"]) if "plain_cost" in made else None
        entries = entries._replace(likeliest=likeliest, most=jnp.zeros_like(label), plain=plain)
    one: Entries = jax.tree.map(lambda x: x[None], entries)
    return one.merged(call)


def gradients(plan: ChunkConfig, needs: Any, saved: XlaSaved, gradient: XlaTokenGradient) -> Array:
    """The gradient of the logits [T, V] in their dtype, for one with respect to the final logits."""
    from onchip.vocab.rows import mosaic

    call, stats = saved
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
        of_rows, labels=call.entries,
    )  # fmt: skip
    if one:
        return made
    at_ids = gradient.at_ids
    if inner is not None:
        at_ids *= 1 - jnp.square(tanh(_entries(logits, ids) * inner[0]))
    # Ids that are none are dropped; those that occur twice write the same number.
    column = jnp.where(ids < 0, logits.shape[1], ids)
    return made.at[jnp.arange(len(ids))[:, None], column].set(at_ids.astype(made.dtype), mode="drop")


def backward(plan: ChunkConfig, needs: Any, saved: XlaSaved, upstream: Array) -> Array:
    """The gradient of the logits [T, V] in their dtype, for one of the reduced loss, or of each token's."""
    call, stats = saved
    return gradients(plan, needs, saved, call.gradient(stats, call.reduction.row_scale(upstream, call.tokens)))


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


def _picked(logits: Array, ids: Array, transform: Transform, factor: Array, best: Array) -> Array:
    """[T, K]: the ids' final logits."""
    x, inner = _entries(logits, ids), _inner(transform)
    if inner is None:
        return x * factor[:, None]
    # The kernel's tanh may differ in the last digit.  Where the id leads, that would be most of its loss.
    picked, near = tanh(x * inner[0]) * factor[:, None], 1e-6 * factor[:, None]
    return jnp.where(jnp.abs(picked - best[:, None]) < near, best[:, None], picked)
