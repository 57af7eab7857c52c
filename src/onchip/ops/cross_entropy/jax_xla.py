"""The 'xla' backend: cross_entropy in plain JAX, a chunk of rows at a time, on any device.

What is done with a chunk is what the other ops do with a tile: the shared types serve here with the logits in hidden's
place.  The tokens that are not ignored are moved to the front (as a list of row numbers; no logits are copied
for it), and the loops end after them.

Rows of 16-bit floats are fetched and stored as integers of the same bits.  XLA's CPU backend would otherwise do both in
float32, and for that keep all of the logits and of the gradient in float32; so it keeps one copy of the logits as
integers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import Static, Tensors
from onchip.vocab.rows.memory import Problem
from onchip.vocab.xla.tiles import (
    Columns,
    PerToken,
    Rows,
    Softmax,
    Tokens,
    complete,
    cut,
    logits_gradient,
    over_tokens,
    select_tokens,
    sum_kept,
    take_rows,
    transform,
)

Array = jax.Array


def refusal(problem: Problem) -> str | None:
    """Why this backend can't serve the call: it always can."""
    return None


class Outputs(NamedTuple):
    """What forward returns."""

    loss: Array  # [] float32, or [T] with reduction "none"
    stats: tuple[Array, Array, Array, Array] | None  # [T] lse, log_prob, entropy and correct, if asked for


class Residuals(NamedTuple):
    """What backward reads."""

    tensors: Tensors
    tokens: Tokens
    lse: Array  # [P] float32
    log_prob: Array  # [P] float32


def forward(static: Static, chunk: int, tensors: Tensors) -> tuple[Outputs, Residuals]:
    """The loss with its statistics, and what backward needs."""
    vocab = tensors.hidden.shape[-1]
    tokens = select_tokens(static, tensors, chunk)
    stats = static.return_stats

    source = tensors._replace(hidden=_as_bits(tensors.hidden))

    def step(start: Any, made: PerToken) -> PerToken:
        rows = take_rows(source, tokens, start, chunk)
        z, _ = _final_logits(rows, tensors)
        empty = Softmax.empty(chunk, smoothing=tensors.label_smoothing is not None, stats=stats)
        softmax = empty.absorb(z, Columns(0, vocab, None), rows.label)
        return made.put(complete(softmax, rows.label, tensors, rows.cut(tokens.bad), vocab), start)

    made = over_tokens(tokens, chunk, step, PerToken.empty(tokens.source.shape[0], stats=stats))
    loss = made.loss * tokens.weight
    loss = tokens.spread(loss) if static.reduction == "none" else sum_kept(loss, tokens) * tokens.inverse_count
    returned = None
    if made.entropy is not None and made.correct is not None:
        spread = tokens.spread
        returned = (spread(made.lse), spread(made.log_prob), spread(made.entropy), spread(made.correct))
    return Outputs(loss, returned), Residuals(tensors, tokens, made.lse, made.log_prob)


def backward(static: Static, chunk: int, residuals: Residuals, grad_loss: Array) -> Array:
    """The gradient of the logits [T, V] in their dtype."""
    tensors, tokens, all_lse, all_log_prob = residuals
    total, vocab = tensors.hidden.shape
    upstream = grad_loss.astype(jnp.float32)
    if static.reduction == "none":
        upstream = upstream.at[tokens.source].get(mode="fill", fill_value=0)
    factors = tokens.weight * tokens.inverse_count * upstream
    if tensors.logit_scale is not None:
        factors *= tensors.logit_scale
    if tokens.temperature is not None:
        factors /= tokens.temperature
    # Rows behind the kept tokens are written nowhere: each has a place of its own beyond the end.
    behind = total + jnp.arange(tokens.source.shape[0], dtype=jnp.int32)
    places = jnp.where(tokens.source < total, tokens.source, behind)

    source = tensors._replace(hidden=_as_bits(tensors.hidden))

    def step(start: Any, grad: Array) -> Array:
        rows = take_rows(source, tokens, start, chunk)
        z, slope = _final_logits(rows, tensors)
        lse, row = rows.cut(all_lse), rows.cut(factors)
        part = PerToken(lse, lse, rows.cut(all_log_prob), None, None)
        one = jnp.ones((), jnp.float32)
        columns = Columns(0, vocab, None)
        g = logits_gradient(z, slope, lse, one, row, part, rows.label, columns, tensors, vocab)
        at = grad.at[cut(places, start, chunk)]
        rounded = _as_bits(g.astype(tensors.hidden.dtype))
        return at.set(rounded, mode="drop", indices_are_sorted=True, unique_indices=True)

    return _as_floats(over_tokens(tokens, chunk, step, jnp.zeros_like(source.hidden)), tensors.hidden.dtype)


def _as_bits(x: Array) -> Array:
    """16-bit floats as integers."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def _as_floats(x: Array, dtype: Any) -> Array:
    """The reverse."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def _final_logits(rows: Rows, tensors: Tensors) -> tuple[Array, Array | None]:
    """The logits after scale, softcap and temperature in float32, and their derivative's softcap."""
    return transform(_as_floats(rows.hidden, tensors.hidden.dtype).astype(jnp.float32), tensors, rows)
