"""The walks over the [tokens, vocab] matrix in plain JAX, tile by tile, on any device; and the 'xla' backend.

`statistics` has no gradients.  `gradients` recomputes the logits, chunk by chunk of the vocabulary; `by_rows` makes
numbers of tokens and gradients together, chunk by chunk of tokens.  The tokens that are not ignored are moved to the
front (as a list of row numbers; no tensor is copied for it), and the loops end after them.

A backend of linear_cross_entropy is a module with these functions and flags::

    refusal(problem, platform, weight_layout, strategy)     why it can't serve a call, or None
    plan(problem, strategy, budget)     hashable, with a field `strategy`; raises ValueError
    select(plan, labels)           the rows that tokens are put in
    forward(plan, wanted, needs, call) -> (TokenStats, saved)
    backward(plan, needs, saved, upstream) -> Projection of gradients
    SEQUENTIAL                     whether vmap has to call it one by one

`needs` says which gradients are wanted; where none is, `plan.strategy` is 'forward' and nothing is saved.  Gradients of
ignored tokens are exact zeros.  Both functions run under jit, vmap and scan; T, H and V are at least 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from onchip.frontend.jax_call import vary_alike
from onchip.vocab.chunks import Config
from onchip.vocab.memory import Problem
from onchip.vocab.xla import memory
from onchip.vocab.xla.loss import Call
from onchip.vocab.xla.tiles import (
    Columns,
    Logits,
    Projection,
    Softmax,
    TokenGradient,
    Tokens,
    TokenStats,
    Wanted,
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


def plan(problem: Problem, strategy: str, budget: int | None) -> Config:
    """The strategy and chunks; raises ValueError where the budget is too small."""
    return memory.plan(problem, memory.choose_strategy(problem, strategy, budget), budget)


def select(plan: Config, labels: Array) -> Tokens:
    return select_tokens(labels, plan.token_chunk)


def forward(plan: Config, wanted: Wanted, needs: Projection, call: Call) -> tuple[TokenStats, Any]:
    """With 'stash' the gradients are saved, else what they are made from."""
    if plan.strategy == "stash":
        return stash(plan.token_chunk, wanted, needs, call)
    stats = statistics(plan, wanted, call)
    return stats, None if plan.strategy == "forward" else Saved(call, TokenStats(stats.lse, stats.log_prob))


class Saved(NamedTuple):
    """What gradients are made from."""

    call: Call
    stats: TokenStats


def backward(plan: Config, needs: Projection, saved: Any, upstream: Array) -> Projection:
    """The gradients of hidden, weight and bias; what isn't needed is None."""
    if plan.strategy == "stash":
        return saved.scaled(upstream)  # type: ignore[no-any-return]
    call, stats = saved
    return gradients(plan, needs, call, stats, call.gradient(stats, upstream))


# --------------------------------------------------------------------------------------------------------- the walks


def statistics(plan: Config, wanted: Wanted, call: Call) -> TokenStats:
    """Of every row, for its ids [P, K]; one product."""
    if call.shard is None:
        return _of_rows(plan, wanted, call, lambda softmax, own: softmax.complete(own, call.vocab))  # type: ignore[no-any-return]
    softmax = _of_rows(plan, wanted, call.shard.local(call), lambda softmax, _: softmax)
    return call.shard.joined(softmax).complete(call.ids, call.vocab)  # type: ignore[no-any-return]


def _of_rows(plan: Config, wanted: Wanted, call: Call, finished: Callable[[Softmax, Array], Any]) -> Any:
    """`finished(softmax, ids)` of every row, over the entries of the vocabulary that this device has."""
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
    return over_tokens(call.tokens, plan.token_chunk, step, zeros)


def gradients(
    plan: Config,
    needs: Projection,
    call: Call,
    stats: TokenStats,
    gradient: TokenGradient,  # by the final logits
) -> Projection:
    """The gradients of hidden, weight and bias, chunk by chunk of the vocabulary, with logits recomputed."""
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

    def step(columns: Columns, made: Projection) -> Projection:
        part = projection.part(columns)

        def tile(start: Any, sums: Projection) -> Projection:
            """Add what the tokens from `start` on give."""
            rows = projection.rows(tokens, start, chunk)
            z, slope = transform.of_chunk(start, chunk).apply(part.logits(rows))
            known, upstream, own = cut_rows(of_rows, start, chunk)
            g = logits_gradient(z, slope, known, upstream, own, columns, call.class_weight)
            return part.accumulate(sums, g, rows, tokens, start)  # type: ignore[no-any-return]

        zeros = replace(part.zeros(replace(needs, hidden=False), 0), hidden=made.hidden)
        sums: Projection = over_tokens(tokens, chunk, tile, zeros)
        weight = put(made.weight, sums.weight, columns, projection.vocab_axis) if needs.weight else None
        bias = put(made.bias, sums.bias, columns) if needs.bias else None
        return replace(sums, weight=weight, bias=bias)

    zeros = projection.zeros(needs, len(call.ids), dtype)
    made: Projection = over_vocab(projection.vocab, plan.vocab_chunk, step, zeros, tokens.number, end)
    hidden = None if made.hidden is None else tokens.spread(unscaled(made.hidden, grad_scale))
    hidden = hidden if shard is None else shard.summed(hidden)
    return replace(made, hidden=hidden)


def by_rows(
    chunk: int,
    tokens: Tokens,
    sources: Sequence[Projection | Logits],
    needs: Sequence[Any],  # of each source: for a `Projection` which gradients, for `Logits` whether
    empty: Any,
    step: Callable[..., tuple[Any, Sequence[Any]]],
) -> tuple[Any, list[Any]]:
    """Numbers of the rows, and the gradients of the sources, chunk by chunk of tokens.

    step(start, *z) has a chunk's logits of each source, and returns the numbers of its rows and, for each source, its
    logits' gradient.  The numbers are written to a tree like `empty`.  Gradients are those of `accumulate`.
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
    return over_tokens(tokens, chunk, body, (empty, zeros))  # type: ignore[no-any-return]


class Stashed(NamedTuple):
    """Gradients in the dtype of sums for an upstream gradient of 1, times `grad_scale`."""

    gradients: Projection  # hidden's [P, H]
    grad_scale: Array | None
    tokens: Tokens

    def scaled(self, upstream: Array) -> Projection:
        """For an upstream gradient [], or [T] where only hidden has a gradient: choose_strategy sees to it."""
        hidden, weight, bias = self.gradients.hidden, self.gradients.weight, self.gradients.bias
        upstream = upstream.astype(jax.tree.leaves(self.gradients)[0].dtype)
        upstream = unscaled(upstream, self.grad_scale)
        if hidden is not None:
            rows = hidden.at[self.tokens.place].get(mode="clip")
            rows *= upstream[:, None] if upstream.ndim else upstream
            hidden = jnp.where(self.tokens.kept[:, None], rows, 0)
        weight, bias = (None if x is None else x * upstream for x in (weight, bias))
        return replace(self.gradients, hidden=hidden, weight=weight, bias=bias)


def stash(chunk: int, wanted: Wanted, needs: Projection, call: Call) -> tuple[TokenStats, Stashed]:
    """The statistics, and the gradients for an upstream gradient of 1, chunk by chunk of tokens."""
    vocab, total = call.source.vocab, call.source.accumulator
    row_scale, grad_scale = call.scaled_rows(jnp.ones((), total))
    columns = Columns(0, vocab)

    def step(start: Any, z: Array) -> tuple[TokenStats, list[Array]]:
        own, row = cut_rows((call.ids, row_scale), start, chunk)
        z, slope = call.transform.of_chunk(start, chunk).apply(z)
        softmax = Softmax.empty(own, wanted, total).absorb(z, columns, own, call.class_weight)
        stats = softmax.complete(own, vocab)
        gradient = call.loss.gradient(stats, row, vocab, call.classes(own))
        # The exponentials are those of the softmax: no second ones are computed.
        relative = gradient._replace(factor=gradient.factor / softmax.total)
        known = stats._replace(lse=softmax.max)
        return stats, [logits_gradient(z, slope, known, relative, own, columns, call.class_weight)]

    empty = TokenStats.empty(call.ids, wanted, total)
    stats, (sums,) = by_rows(chunk, call.tokens, [call.source], [needs], empty, step)
    return stats, Stashed(sums, grad_scale, call.tokens)
