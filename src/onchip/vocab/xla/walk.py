"""The walks over the [tokens, vocab] matrix in plain JAX, tile by tile, on any device; and the 'xla' backend.

`statistics` makes no gradients.  `gradients` recomputes the logits, chunk by chunk of the vocabulary; `by_rows` makes
numbers of tokens and gradients together, chunk by chunk of tokens.  The tokens that are not ignored are moved to the
front (as a list of row numbers; no tensor is copied for it), and the loops end after them.  `onchip.vocab.jax_ways`
explains a backend's functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import vary_alike
from onchip.vocab.chunks import ChunkConfig
from onchip.vocab.memory import Problem
from onchip.vocab.xla import memory
from onchip.vocab.xla.loss import LabelSums, LossCall
from onchip.vocab.xla.tiles import (
    Columns,
    CountedTokens,
    Softmax,
    Wanted,
    XlaLogits,
    XlaProjection,
    XlaTokenGradient,
    XlaTokenStats,
    cut,
    cut_rows,
    float16_scale,
    logits_gradient,
    over_tokens,
    over_vocab,
    select_tokens,
    unscaled,
    write,
    write_rows,
)

Array = jax.Array
SEQUENTIAL = False


# ------------------------------------------------------------------------------------------------------- the backend


def refusal(problem: Problem, platform: str, weight_layout: str, strategy: str) -> str | None:
    """Why this backend can't serve the call: it always can."""
    return None


def plan(problem: Problem, strategy: str, budget: int | None) -> ChunkConfig:
    """The strategy and chunks; raises ValueError if the budget is too small."""
    if problem.labels:  # by rows of the whole vocabulary
        return memory.plan(problem, "stash", budget)
    if problem.ids:
        return memory.plan(problem, "recompute" if problem.any_grad else "forward", budget)
    return memory.plan(problem, memory.choose_strategy(problem, strategy, budget), budget)


def select(plan: ChunkConfig, labels: Array) -> CountedTokens:
    return select_tokens(labels, plan.token_chunk)


of_logits = XlaLogits.of


def forward(
    plan: ChunkConfig, wanted: Wanted, needs: Any, call: LossCall
) -> tuple[XlaTokenStats, LabelSums | None, Any]:
    """With 'stash' the gradients are saved, otherwise what they are made from; `needs` as in `gradients`."""
    sums = None
    if call.entries is not None:
        stats, sums, call = of_every_entry(plan, wanted, call)
    elif plan.strategy == "stash":
        stats, stashed = stash(plan.token_chunk, wanted, needs, call)
        return stats, None, stashed
    else:
        stats = statistics(plan, wanted, call)
    saved = XlaSaved(call, stats.known)
    return stats, sums, saved if any(jax.tree.leaves(needs)) else None


class XlaSaved(NamedTuple):
    """What gradients are made from."""

    call: LossCall
    stats: XlaTokenStats


Saved = XlaSaved


def backward(plan: ChunkConfig, needs: Any, saved: Any, upstream: Array) -> Any:
    """The gradients of the source; what isn't needed is None."""
    if isinstance(saved, Stashed):
        return saved.scaled(upstream)
    call, stats = saved
    return gradients(plan, needs, saved, call.gradient(stats, call.reduction.row_scale(upstream, call.tokens)))


# --------------------------------------------------------------------------------------------------------- the walks


def statistics(plan: ChunkConfig, wanted: Wanted, call: LossCall) -> XlaTokenStats:
    """The statistics of every row, for its ids [P, K]; they take one product."""
    if call.shard is None:
        return _of_rows(plan, wanted, call, lambda softmax, own: softmax.complete(own, call.vocab))  # type: ignore[no-any-return]
    softmax = _of_rows(plan, wanted, call.shard.local(call), lambda softmax, _: softmax)
    return call.shard.joined(softmax).complete(call.ids, call.vocab)  # type: ignore[no-any-return]


def _of_rows(plan: ChunkConfig, wanted: Wanted, call: LossCall, finished: Callable[[Softmax, Array], Any]) -> Any:
    """`finished(softmax, ids)` for every row, over the entries of the vocabulary that this device has."""
    source, ids = call.source, call.ids
    end = None if call.shard is None else call.shard.end

    def step(start: Any, made: Any) -> Any:
        rows, own = source.rows(call.tokens, start, plan.token_chunk), cut(ids, start, plan.token_chunk)
        transform = call.transform.of_chunk(start, plan.token_chunk)

        def absorb(columns: Columns, softmax: Softmax) -> Softmax:
            z, _ = transform.apply(source.part(columns).logits(rows))
            return softmax.absorb(z, columns, own, call.class_weight)

        empty = Softmax.empty(own, wanted, source.accumulator)
        softmax = over_vocab(source.vocab, plan.vocab_chunk, absorb, empty, own, end)
        return write_rows(made, finished(softmax, own), start)

    made = jax.eval_shape(lambda: finished(Softmax.empty(ids, wanted, source.accumulator), ids))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)
    return over_tokens(call.tokens, plan.token_chunk, step, vary_alike(zeros, (source, ids)))


def of_every_entry(plan: ChunkConfig, wanted: Wanted, call: LossCall) -> tuple[XlaTokenStats, LabelSums, LossCall]:
    """The statistics and sums of rows with labels of every entry, and the call with what gradients need of these."""
    shard = call.shard
    own = call if shard is None else shard.local(call)
    source, ids, weight = own.source, own.ids, own.class_weight
    columns = Columns(0, source.vocab, end=None if shard is None else shard.end)

    def step(start: Any, z: Array, q: Array) -> tuple[Any, list[None]]:
        z, _ = own.transform.of_chunk(start, plan.token_chunk).apply(z)
        q = q.astype(z.dtype)
        new = columns.new(z)
        if new is not None:
            z, q = jnp.where(new, z, -jnp.inf), jnp.where(new, q, 0)
        largest = jnp.argmax(z, 1).astype(jnp.int32)[:, None]
        softmax = Softmax.empty(largest, wanted, z.dtype).absorb(z, columns, largest, weight)
        # Not the tile that exponentials are made of, or XLA's CPU backend would hold one more at a time.
        below = z - lax.optimization_barrier((softmax.max, softmax.total))[0][:, None]

        def sums(q: Array) -> tuple[Array, Array]:
            # What has no probability costs nothing, where 0 * -inf would not be 0.
            return jnp.sum(jnp.where((q == 0) & (below == -jnp.inf), 0, q * below), 1), jnp.sum(q, 1)

        found = Entries(softmax, largest[:, 0], *sums(q if weight is None else q * weight[None]))
        if wanted.entropy:
            found = found._replace(likeliest=jnp.argmax(q, 1).astype(jnp.int32), most=jnp.max(q, 1))
            found = found if weight is None else found._replace(plain=sums(q))
        return found, [None, None]

    number, index = (jnp.zeros(len(ids), dtype) for dtype in (source.accumulator, jnp.int32))
    empty = Entries(Softmax.empty(ids, wanted, number.dtype), index, number, number)
    if wanted.entropy:
        empty = empty._replace(likeliest=index, most=number, plain=None if weight is None else (number, number))
    labels = XlaLogits.of(own.entries)
    nothing = XlaProjection(False, False, False) if isinstance(source, XlaProjection) else False
    found, _ = by_rows(plan.token_chunk, own.tokens, [source, labels], [nothing, False], empty, step)
    # Not of a chunk's tile, or XLA's CPU backend would hold one more.
    at_largest = labels.bits.at[own.tokens.source, found.largest].get(mode="fill", fill_value=0)
    return found._replace(label=labels.floats(at_largest).astype(number.dtype)).everywhere(call)  # type: ignore[no-any-return]


class Entries(NamedTuple):
    """What a device knows about rows with labels of every entry, [P]; or what all devices know, [n, P]."""

    softmax: Softmax
    largest: Array  # int32: the entry of the largest logit, counted from the first of all
    expected: Array  # sum of labels times z - max, weighted by class
    mass: Array  # sum of labels, weighted by class
    label: Any = None  # that of the largest logit, without its class's weight
    likeliest: Any = None  # int32: the entry of the largest label, and that label: with statistics, as the next
    most: Any = None
    plain: Any = None  # sums without weights of classes, where there are any

    def everywhere(self, call: LossCall) -> tuple[XlaTokenStats, LabelSums, LossCall]:
        """As `of_every_entry` returns them, from what this device knows of its own entries."""
        shard, found = call.shard, self
        if shard is None:
            return jax.tree.map(lambda x: x[None], found).merged(call)  # type: ignore[no-any-return]
        found = found._replace(softmax=shard.of_all(found.softmax), largest=found.largest + shard.start)
        if found.likeliest is not None:
            found = found._replace(likeliest=found.likeliest + shard.start)
        return shard.gathered(found).merged(call)  # type: ignore[no-any-return]

    def merged(self, call: LossCall) -> tuple[XlaTokenStats, LabelSums, LossCall]:
        """The same, from what all devices know."""
        parts, best = self.softmax, jnp.argmax(self.softmax.max, 0)[None]

        def of(x: Array, which: Array) -> Array:
            return jnp.take_along_axis(x, which, 0)[0]

        largest = of(self.largest, best)[:, None]
        softmax = jax.tree.map(lambda x: x[0], parts) if call.shard is None else call.shard.merged(parts)
        # The largest of all, also where that is -inf.
        softmax = softmax._replace(picked=jnp.max(parts.picked, 0))
        stats = softmax.complete(largest, call.vocab)
        of_largest: Any = parts.max, softmax.max, stats.log_prob[:, 0]
        expected, mass = expected_of(self.expected, self.mass, *of_largest)
        sums = LabelSums(expected)
        if self.likeliest is not None:
            plain = (expected, mass) if self.plain is None else expected_of(*self.plain, *of_largest)
            sums = LabelSums(expected, *plain, of(self.likeliest, jnp.argmax(self.most, 0)[None]))
        return stats, sums, call._replace(ids=largest, probs=of(self.label, best)[:, None], mass=mass)


def expected_of(sums: Array, masses: Array, maximum: Array, top: Array, log_prob: Array) -> tuple[Array, Array]:
    """[P]: the sums of labels times log-probability, and of labels, over all parts of the vocabulary.  For each part,
    [n, P]: `sums` of labels times z less its maximum, and `masses` of labels.  The largest logit `top` [P] has
    `log_prob`.
    """
    further = jnp.where(masses == 0, 0, masses * (maximum - top[None]))
    mass = jnp.sum(masses, 0)
    # The largest logit's own log-probability is minus the logarithm of the total.
    return jnp.sum(sums + further, 0) + jnp.where(mass == 0, 0, mass * log_prob), mass


def gradients(
    plan: ChunkConfig,
    needs: Any,
    saved: XlaSaved,
    gradient: XlaTokenGradient,  # by the final logits
) -> Any:
    """The gradients of hidden, weight and bias, chunk by chunk of the vocabulary, with logits recomputed.  For logits
    that exist, their gradient; and if labels are of every entry, all gradients, chunk by chunk of tokens.
    """
    call, stats = saved
    if call.entries is not None or isinstance(call.source, XlaLogits):
        return _gradients_by_rows(plan.token_chunk, needs, call, stats, gradient)
    shard, end = call.shard, None
    if shard is not None:
        end = shard.end
        call, stats, gradient = vary_alike((shard.local(call), stats, gradient))
    projection, transform, tokens = call.source, call.transform, call.tokens
    dtype, chunk = projection.hidden.dtype, plan.token_chunk
    gradient = gradient.times(transform.factor())
    grad_scale = float16_scale(gradient.size(), dtype)
    of_rows = (stats, gradient.times(grad_scale), call.ids)

    def put(x: Array, part: Array, columns: Columns, axis: int = 0) -> Array:
        part = unscaled(part, grad_scale).astype(dtype)
        if columns.done is not None:
            # What was done before is 0 in `part` and has its value in `x`, the rest is 0 there.
            part += cut(x, columns.start, columns.size, axis)
        return write(x, part, columns.start, axis)

    def step(columns: Columns, made: XlaProjection) -> XlaProjection:
        part = projection.part(columns)

        def tile(start: Any, sums: XlaProjection) -> XlaProjection:
            """Add what the tokens from `start` on contribute."""
            rows = projection.rows(tokens, start, chunk)
            z, slope = transform.of_chunk(start, chunk).apply(part.logits(rows))
            known, upstream, own = cut_rows(of_rows, start, chunk)
            g = logits_gradient(z, slope, known, upstream, own, columns, call.class_weight)
            return part.accumulate(sums, g, rows, tokens, start)  # type: ignore[no-any-return]

        zeros = replace(part.zeros(replace(needs, hidden=False), 0), hidden=made.hidden)
        sums: XlaProjection = over_tokens(tokens, chunk, tile, vary_alike(zeros, (projection, of_rows)))
        weight = put(made.weight, sums.weight, columns, projection.vocab_axis) if needs.weight else None
        bias = put(made.bias, sums.bias, columns) if needs.bias else None
        return replace(sums, weight=weight, bias=bias)

    zeros = vary_alike(projection.zeros(needs, len(call.ids), dtype), (projection, of_rows))
    made: XlaProjection = over_vocab(projection.vocab, plan.vocab_chunk, step, zeros, tokens.number, end)
    hidden = None if made.hidden is None else tokens.spread(unscaled(made.hidden, grad_scale))
    hidden = hidden if shard is None else shard.summed(hidden)
    return replace(made, hidden=hidden)


def _gradients_by_rows(chunk: int, needs: Any, call: LossCall, stats: XlaTokenStats, gradient: XlaTokenGradient) -> Any:
    shard, end = call.shard, None
    if shard is not None:
        end = shard.end
        call, stats, gradient = vary_alike((shard.local(call), stats, gradient))
    source, grad_scale = call.source, None
    gradient = gradient.times(call.transform.factor())
    if isinstance(source, XlaProjection):
        grad_scale = float16_scale(gradient.size(call.mass), source.hidden.dtype)
    of_rows = (stats, gradient.times(grad_scale), call.ids)
    columns, labels = Columns(0, source.vocab, end=end), [] if call.entries is None else [XlaLogits.of(call.entries)]

    def step(start: Any, z: Array, q: Array | None = None) -> tuple[tuple[()], list[Array | None]]:
        known, of_chunk, ids = cut_rows(of_rows, start, chunk)
        z, slope = call.transform.of_chunk(start, chunk).apply(z)
        g = logits_gradient(z, slope, known, of_chunk, ids, columns, call.class_weight, q)
        return (), [g, *[None for _ in labels]]

    _, (made, *_) = by_rows(chunk, call.tokens, [source, *labels], [needs, *[False for _ in labels]], (), step)
    if isinstance(source, XlaLogits):
        return source.floats(made)
    made = jax.tree.map(lambda x: unscaled(x, grad_scale), made)
    hidden = None if made.hidden is None else call.tokens.spread(made.hidden)
    return replace(made, hidden=hidden if shard is None else shard.summed(hidden))


def by_rows(
    chunk: int,
    tokens: CountedTokens,
    sources: Sequence[XlaProjection | XlaLogits],
    needs: Sequence[Any],  # of each source: for a `XlaProjection` which gradients, for `Logits` whether
    empty: Any,
    step: Callable[..., tuple[Any, Sequence[Any]]],
    but: str | None = None,
) -> tuple[Any, list[Any]]:
    """Numbers for the rows, and the gradients of the sources, chunk by chunk of tokens.

    step(start, *z) gets a chunk's logits from each source; it returns the numbers of its rows and, for each source, the
    gradient of these logits.  The numbers are written to a tree like `empty`, which isn't made to vary over the axis
    `but`.  Gradients are those of `accumulate`.
    """

    def body(start: Any, carry: Any) -> Any:
        made, sums = carry
        rows = [source.rows(tokens, start, chunk) for source in sources]
        numbers, by_logits = step(start, *(x.logits(own) for x, own in zip(sources, rows, strict=True)))
        for k, source in enumerate(sources):
            if jax.tree.leaves(sums[k]):
                sums[k] = source.accumulate(sums[k], by_logits[k], rows[k], tokens, start)
        return write_rows(made, numbers, start), sums

    zeros = [x.zeros(need, len(tokens.source)) for x, need in zip(sources, needs, strict=True)]
    carry = vary_alike(empty, (zeros, sources), but), vary_alike(zeros, (empty, sources))
    return over_tokens(tokens, chunk, body, carry, but)  # type: ignore[no-any-return]


class Stashed(NamedTuple):
    """Gradients in the dtype of sums for an upstream gradient of 1, times `grad_scale`."""

    gradients: XlaProjection  # hidden's [P, H]
    grad_scale: Array | None
    tokens: CountedTokens

    def scaled(self, upstream: Array) -> XlaProjection:
        """The gradients for an upstream gradient [], or [T] if only hidden has a gradient, which choose_strategy
        ensures.
        """
        hidden, weight, bias = self.gradients.hidden, self.gradients.weight, self.gradients.bias
        upstream = upstream.astype(jax.tree.leaves(self.gradients)[0].dtype)
        upstream = unscaled(upstream, self.grad_scale)
        if hidden is not None:
            rows = hidden.at[self.tokens.place].get(mode="clip")
            rows *= upstream[:, None] if upstream.ndim else upstream
            hidden = jnp.where(self.tokens.kept[:, None], rows, 0)
        weight, bias = (None if x is None else x * upstream for x in (weight, bias))
        return replace(self.gradients, hidden=hidden, weight=weight, bias=bias)


def stash(chunk: int, wanted: Wanted, needs: XlaProjection, call: LossCall) -> tuple[XlaTokenStats, Stashed]:
    """The statistics, and the gradients for an upstream gradient of 1, chunk by chunk of tokens."""
    vocab, total = call.source.vocab, call.source.accumulator
    row_scale, grad_scale = call.scaled_rows(jnp.ones((), total))
    columns = Columns(0, vocab)

    def step(start: Any, z: Array) -> tuple[XlaTokenStats, list[Array]]:
        own, row = cut_rows((call.ids, row_scale), start, chunk)
        z, slope = call.transform.of_chunk(start, chunk).apply(z)
        softmax = Softmax.empty(own, wanted, total).absorb(z, columns, own, call.class_weight)
        stats = softmax.complete(own, vocab)
        gradient = call._replace(ids=own).gradient(stats, row)
        # The exponentials are those of the softmax: no second ones are computed.
        relative = gradient._replace(factor=gradient.factor / softmax.total)
        known = stats._replace(lse=softmax.max)
        return stats, [logits_gradient(z, slope, known, relative, own, columns, call.class_weight)]

    empty = XlaTokenStats.empty(call.ids, wanted, total)
    stats, (sums,) = by_rows(chunk, call.tokens, [call.source], [needs], empty, step)
    return stats, Stashed(sums, grad_scale, call.tokens)
