"""The walks over the [tokens, vocab] matrix in plain JAX, tile by tile, on any device; and the 'xla' backend.

`statistics` has no gradients.  `gradients` recomputes the logits, chunk by chunk of the vocabulary; `stash` makes
statistics and gradients together, chunk by chunk of tokens.  The tokens that are not ignored are moved to the
front (as a list of row numbers; no tensor is copied for it), and the loops end after them.

A backend of linear_cross_entropy is a module with these functions and flags::

    refusal(static, problem)       why it can't serve a call, or None
    plan(problem, strategy, budget)     hashable, with a field `strategy`; raises ValueError
    select(plan, labels)           the rows that tokens are put in
    forward(plan, wanted, needs, call) -> (TokenStats, saved)
    backward(plan, needs, saved, upstream) -> Projection of gradients
    SEQUENTIAL                     whether vmap has to call it one by one

`needs` says which gradients are wanted; where none is, `plan.strategy` is 'forward' and nothing is saved.  Gradients of
ignored tokens are exact zeros.  Both functions run under jit, vmap and scan; T, H and V are at least 1.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from onchip.frontend.jax_call import Static
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
    Transform,
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


def refusal(static: Static, problem: Problem) -> str | None:
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
    stats = statistics(plan, wanted, call.projection, call.transform, call.tokens, call.ids)
    return stats, None if plan.strategy == "forward" else (call, TokenStats(stats.lse, stats.log_prob))


def backward(plan: Config, needs: Projection, saved: Any, upstream: Array) -> Projection:
    """The gradients of hidden, weight and bias; what isn't needed is None."""
    if plan.strategy == "stash":
        return saved.scaled(upstream.astype(jnp.float32))  # type: ignore[no-any-return]
    call, stats = saved
    gradient = call.gradient(stats, upstream, call.projection.vocab)
    return gradients(plan, needs, call.projection, call.transform, call.tokens, call.ids, stats, gradient)


# --------------------------------------------------------------------------------------------------------- the walks


def statistics(
    plan: Config, wanted: Wanted, source: Projection | Logits, transform: Transform, tokens: Tokens, ids: Array
) -> TokenStats:
    """Of every row, for its ids [P, K]; one product."""

    def step(start: Any, made: TokenStats) -> TokenStats:
        rows, own = source.rows(tokens, start, plan.token_chunk), cut(ids, start, plan.token_chunk)
        of_chunk = transform.of_chunk(start, plan.token_chunk)

        def absorb(columns: Columns, softmax: Softmax) -> Softmax:
            z, _ = of_chunk.apply(source.part(columns).logits(rows))
            return softmax.absorb(z, columns, own)

        softmax = over_vocab(source.vocab, plan.vocab_chunk, absorb, Softmax.empty(own, wanted), own)
        return write_rows(made, softmax.complete(own, source.vocab), start)  # type: ignore[no-any-return]

    return over_tokens(tokens, plan.token_chunk, step, TokenStats.empty(ids, wanted))  # type: ignore[no-any-return]


def gradients(
    plan: Config,
    needs: Projection,
    projection: Projection,
    transform: Transform,
    tokens: Tokens,
    ids: Array,  # [P, K]
    stats: TokenStats,
    gradient: TokenGradient,  # by the final logits
) -> Projection:
    """The gradients of hidden, weight and bias, chunk by chunk of the vocabulary, with logits recomputed."""
    dtype, axis, chunk = projection.hidden.dtype, projection.vocab_axis, plan.token_chunk
    gradient = gradient.times(transform.factor())
    grad_scale = float16_scale(gradient.size(), dtype)
    of_rows = (stats, gradient.times(grad_scale), ids)

    def put(x: Array, part: Array, columns: Columns, axis: int = 0) -> Array:
        part = unscaled(part, grad_scale).astype(dtype)
        if columns.done is not None:
            # What was done before is 0 in `part` and has its value in `x`, the rest is 0 there.
            part += cut(x, columns.start, columns.size, axis)
        return write(x, part, columns.start, axis)

    def step(columns: Columns, carry: Any) -> Any:
        grad_hidden, grad_weight, grad_bias = carry
        part = projection.part(columns)

        def tile(start: Any, carry: Any) -> Any:
            """Add what the tokens from `start` on give."""
            rows = projection.rows(tokens, start, chunk)
            z, slope = transform.of_chunk(start, chunk).apply(part.logits(rows))
            known, upstream, own = cut_rows(of_rows, start, chunk)
            g = logits_gradient(z, slope, known, upstream, own, columns)
            return accumulate(carry, part, g, rows, start, chunk)

        zeros = (grad_hidden, *_zeros(needs, part, 0, jnp.float32)[1:])
        grad_hidden, weight_part, bias_part = over_tokens(tokens, chunk, tile, zeros)
        if needs.weight:
            grad_weight = put(grad_weight, weight_part, columns, axis)
        if needs.bias:
            grad_bias = put(grad_bias, bias_part, columns)
        return grad_hidden, grad_weight, grad_bias

    carry = _zeros(needs, projection, len(ids), dtype)
    grad_hidden, grad_weight, grad_bias = over_vocab(projection.vocab, plan.vocab_chunk, step, carry, tokens.number)
    if grad_hidden is not None:
        grad_hidden = tokens.spread(unscaled(grad_hidden, grad_scale))
    return Projection(grad_hidden, grad_weight, grad_bias, axis)


def _zeros(needs: Projection, projection: Projection, rows: int, dtype: Any) -> tuple[Array | None, ...]:
    """Gradients to add to, in float32 of so many rows of hidden, and of weight and bias."""
    return (
        jnp.zeros((rows, projection.hidden.shape[1]), jnp.float32) if needs.hidden else None,
        jnp.zeros(projection.weight.shape, dtype) if needs.weight else None,
        jnp.zeros(projection.vocab, dtype) if needs.bias else None,
    )


def accumulate(sums: Any, projection: Projection, g: Array, rows: Array, start: Any, chunk: int) -> Any:
    """The float32 gradients of hidden [P, H], weight and bias, with what a tile's gradient of logits adds to each."""
    grad_hidden, grad_weight, grad_bias = sums
    if grad_bias is not None:
        grad_bias += jnp.sum(g, 0)
    g = g.astype(rows.dtype)
    if grad_hidden is not None:
        grad_hidden = write(grad_hidden, cut(grad_hidden, start, chunk) + projection.hidden_gradient(g), start)
    if grad_weight is not None:
        grad_weight += projection.weight_gradient(g, rows)
    return grad_hidden, grad_weight, grad_bias


class Stashed(NamedTuple):
    """Gradients in float32 for an upstream gradient of 1, times `grad_scale`."""

    gradients: Projection  # hidden's [P, H]
    grad_scale: Array | None
    tokens: Tokens

    def scaled(self, upstream: Array) -> Projection:
        """For an upstream gradient [], or [T] where only hidden has a gradient: choose_strategy sees to it."""
        hidden, weight, bias = self.gradients.hidden, self.gradients.weight, self.gradients.bias
        upstream = unscaled(upstream, self.grad_scale)
        if hidden is not None:
            rows = hidden.at[self.tokens.place].get(mode="clip")
            rows *= upstream[:, None] if upstream.ndim else upstream
            hidden = jnp.where(self.tokens.kept[:, None], rows, 0)
        weight, bias = (None if x is None else x * upstream for x in (weight, bias))
        return replace(self.gradients, hidden=hidden, weight=weight, bias=bias)


def stash(chunk: int, wanted: Wanted, needs: Projection, call: Call) -> tuple[TokenStats, Stashed]:
    """The statistics, and the gradients for an upstream gradient of 1, chunk by chunk of tokens."""
    projection, tokens, vocab = call.projection, call.tokens, call.projection.vocab
    row_scale, grad_scale = call.scaled_rows(jnp.ones((), jnp.float32))
    columns = Columns(0, vocab)

    def step(start: Any, carry: Any) -> Any:
        made, sums = carry
        rows = projection.rows(tokens, start, chunk)
        own, row = cut_rows((call.ids, row_scale), start, chunk)
        z, slope = call.transform.of_chunk(start, chunk).apply(projection.logits(rows))
        softmax = Softmax.empty(own, wanted).absorb(z, columns, own)
        stats = softmax.complete(own, vocab)
        gradient = call.loss.gradient(stats, row, vocab)
        # The exponentials are those of the softmax: no second ones are computed.
        relative = gradient._replace(factor=gradient.factor / softmax.total)
        g = logits_gradient(z, slope, stats._replace(lse=softmax.max), relative, own, columns)
        return write_rows(made, stats, start), accumulate(sums, projection, g, rows, start, chunk)

    carry = (TokenStats.empty(call.ids, wanted), _zeros(needs, projection, len(call.ids), jnp.float32))
    stats, sums = over_tokens(tokens, chunk, step, carry)
    grad_hidden, grad_weight, grad_bias = sums
    made = Projection(grad_hidden, grad_weight, grad_bias, projection.vocab_axis)
    return stats, Stashed(made, grad_scale, tokens)
