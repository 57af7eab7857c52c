"""The 'xla' backend: linear_cross_entropy in plain JAX, tile by tile, on any device.

Three walks over the [tokens, vocab] matrix: without gradients, 'stash' and 'recompute'.  The tokens that are not
ignored are moved to the front (as a list of row numbers; no tensor is copied for it), and the loops end after them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from onchip.frontend.jax_call import Needs, Static, Tensors
from onchip.vocab.chunks import Config
from onchip.vocab.memory import Problem
from onchip.vocab.xla import memory as jax_spec
from onchip.vocab.xla.call import LinearCrossEntropyStats, Outputs
from onchip.vocab.xla.tiles import (
    Columns,
    PerToken,
    Rows,
    Softmax,
    Tokens,
    complete,
    gradient_rows,
    logits,
    logits_gradient,
    over_tokens,
    over_vocab,
    product,
    recompute_walk,
    select_tokens,
    sum_kept,
    take_rows,
    vocab_rows,
    weight_product,
    write,
)

Array = jax.Array


def refusal(static: Static, problem: Problem) -> str | None:
    """Why this backend can't serve the call: it always can."""
    return None


def plan(problem: Problem, strategy: str, budget: int | None) -> Config:
    """The strategy and chunks; raises ValueError where the budget is too small."""
    return jax_spec.plan(problem, jax_spec.choose_strategy(problem, strategy, budget), budget)


class _Stashed(NamedTuple):
    """What 'stash' keeps: gradients in float32 for an upstream gradient of 1, before division by `too_large`."""

    hidden: Array | None  # [P, H], the kept tokens first
    weight: Array | None  # as weight
    bias: Array | None  # [V]
    too_large: Array | None  # [] float32
    kept: Array  # [T] bool
    place: Array  # [T] int32


class _Recomputed(NamedTuple):
    """What 'recompute' keeps."""

    tensors: Tensors
    tokens: Tokens
    lse: Array  # [P] float32
    log_prob: Array  # [P] float32


def forward(static: Static, config: Config, tensors: Tensors, needs: Needs) -> tuple[Outputs, Any]:
    """The loss with its statistics, and what backward needs."""
    tokens = select_tokens(static, tensors, config.token_chunk)
    residuals: Any = None
    if config.strategy == "stash":
        per_token, residuals = _stash(static, config, tensors, tokens, needs)
    else:
        per_token = _forward_only(static, config, tensors, tokens)
        if config.strategy == "recompute":
            residuals = _Recomputed(tensors, tokens, per_token.lse, per_token.log_prob)
    loss = per_token.loss * tokens.weight
    loss = tokens.spread(loss) if static.reduction == "none" else sum_kept(loss, tokens) * tokens.inverse_count
    stats = None
    if per_token.entropy is not None and per_token.correct is not None:
        columns = (per_token.lse, per_token.log_prob, per_token.entropy, per_token.correct)
        stats = LinearCrossEntropyStats(*map(tokens.spread, columns))
    return Outputs(loss, stats), residuals


def backward(
    static: Static, config: Config, residuals: Any, grad_loss: Array, needs: Needs
) -> tuple[Array | None, Array | None, Array | None]:
    """The gradients of hidden, weight and bias in their dtypes; what isn't needed is None."""
    if config.strategy == "stash":
        return _scale_stash(static, residuals, grad_loss)
    return _recompute(static, config, residuals, grad_loss, needs)


# ---------------------------------------------------------------------------------------------------------- the walks


def _softmax(static: Static, config: Config, tensors: Tensors, rows: Rows) -> Softmax:
    vocab = tensors.weight.shape[static.vocab_axis]

    def step(columns: Columns, softmax: Softmax) -> Softmax:
        z, _ = logits(static, tensors, rows, vocab_rows(static, tensors, columns), columns)
        return softmax.absorb(z, columns, rows.label)

    empty = Softmax.empty(rows.label.shape[0], smoothing=tensors.label_smoothing is not None, stats=static.return_stats)
    return over_vocab(vocab, config.vocab_chunk, step, empty, rows.label)  # type: ignore[no-any-return]


def _forward_only(static: Static, config: Config, tensors: Tensors, tokens: Tokens) -> PerToken:
    """The softmax of every token; one product."""
    vocab = tensors.weight.shape[static.vocab_axis]

    def step(start: Any, made: PerToken) -> PerToken:
        rows = take_rows(tensors, tokens, start, config.token_chunk)
        softmax = _softmax(static, config, tensors, rows)
        return made.put(complete(softmax, rows.label, tensors, rows.cut(tokens.bad), vocab), start)

    made = PerToken.empty(tokens.source.shape[0], stats=static.return_stats)
    return over_tokens(tokens, config.token_chunk, step, made)  # type: ignore[no-any-return]


def _stash(static: Static, config: Config, tensors: Tensors, tokens: Tokens, needs: Needs) -> tuple[PerToken, _Stashed]:
    """The softmax, and the gradients in float32 for an upstream gradient of 1, chunk by chunk of tokens."""
    vocab, size = tensors.weight.shape[static.vocab_axis], tensors.hidden.shape[1]
    padded, columns = tokens.source.shape[0], Columns(0, vocab, None)
    factors, too_large = gradient_rows(tokens, tensors, jnp.ones((), jnp.float32))

    def step(start: Any, carry: Any) -> Any:
        made, grad_hidden, grad_weight, grad_bias = carry
        rows = take_rows(tensors, tokens, start, config.token_chunk)
        z, slope = logits(static, tensors, rows, tensors.weight, columns)
        softmax = Softmax.empty(z.shape[0], smoothing=tensors.label_smoothing is not None, stats=static.return_stats)
        softmax = softmax.absorb(z, columns, rows.label)
        part = complete(softmax, rows.label, tensors, rows.cut(tokens.bad), vocab)
        scale, row = 1 / softmax.total, rows.cut(factors)
        g = logits_gradient(z, slope, softmax.max, scale, row, part, rows.label, columns, tensors, vocab)
        if needs.bias:
            grad_bias += jnp.sum(g, 0)
        g = g.astype(tensors.hidden.dtype)
        if needs.hidden:
            grad_hidden = write(grad_hidden, product(g, tensors.weight, (1, static.vocab_axis)), start)
        if needs.weight:
            grad_weight += weight_product(static, g, rows.hidden)
        return made.put(part, start), grad_hidden, grad_weight, grad_bias

    carry = (
        PerToken.empty(padded, stats=static.return_stats),
        jnp.zeros((padded, size), jnp.float32) if needs.hidden else None,
        jnp.zeros(tensors.weight.shape, jnp.float32) if needs.weight else None,
        jnp.zeros(vocab, jnp.float32) if needs.bias else None,
    )
    made, grad_hidden, grad_weight, grad_bias = over_tokens(tokens, config.token_chunk, step, carry)
    return made, _Stashed(grad_hidden, grad_weight, grad_bias, too_large, tokens.kept, tokens.place)


def _scale_stash(
    static: Static, stashed: _Stashed, grad_loss: Array
) -> tuple[Array | None, Array | None, Array | None]:
    dtype = jnp.dtype(static.dtype)
    upstream = grad_loss.astype(jnp.float32)
    grad_hidden = None
    if stashed.too_large is not None:
        upstream /= stashed.too_large
    if stashed.hidden is not None:
        factor = upstream[:, None] if static.reduction == "none" else upstream
        rows = stashed.hidden.at[stashed.place].get(mode="clip")
        grad_hidden = jnp.where(stashed.kept[:, None], rows * factor, 0).astype(dtype)
    # With reduction "none" only hidden has a gradient here: choose_strategy sees to it.
    grad_weight = None if stashed.weight is None else (stashed.weight * upstream).astype(dtype)
    grad_bias = None if stashed.bias is None else (stashed.bias * upstream).astype(dtype)
    return grad_hidden, grad_weight, grad_bias


def _recompute(
    static: Static, config: Config, residuals: _Recomputed, grad_loss: Array, needs: Needs
) -> tuple[Array | None, Array | None, Array | None]:
    """The gradients, chunk by chunk of the vocabulary, each chunk's logits computed again."""
    tensors, tokens = residuals.tensors, residuals.tokens
    vocab = tensors.weight.shape[static.vocab_axis]
    upstream = grad_loss.astype(jnp.float32)
    if static.reduction == "none":
        upstream = upstream.at[tokens.source].get(mode="fill", fill_value=0)
    factors, too_large = gradient_rows(tokens, tensors, upstream)

    def gradient(z: Array, slope: Array | None, rows: Rows, columns: Columns) -> Array:
        lse, row = rows.cut(residuals.lse), rows.cut(factors)
        part = PerToken(lse, lse, rows.cut(residuals.log_prob), None, None)
        one = jnp.ones((), jnp.float32)
        return logits_gradient(z, slope, lse, one, row, part, rows.label, columns, tensors, vocab)

    return recompute_walk(static, config, tensors, tokens, needs, gradient, too_large)
