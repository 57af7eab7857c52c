"""The 'xla' backend: linear_log_probs in plain JAX, tile by tile, on any device.

Two walks over the [tokens, vocab] matrix, without gradients and for them.  The tokens with an id that counts are moved
to the front (as a list of row numbers; no tensor is copied for it), and the loops end after them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import IGNORED, OUT_OF_RANGE, Needs, Tensors
from onchip.frontend.jax_call import Static as Call
from onchip.vocab.chunks import Config
from onchip.vocab.xla.tiles import (
    FLOAT16_ROW,
    LOWEST,
    Columns,
    Rows,
    Tokens,
    logits,
    over_tokens,
    over_vocab,
    recompute_walk,
    select_tokens,
    take_rows,
    vocab_rows,
    write,
)

Array = jax.Array
# exp of this is 0 in float32: offsets are cut off here, so that p log p is 0 at p = 0 where 0 * -inf would not be.
_VANISHED = -128.0


@dataclass(frozen=True)
class Static:
    """What is known while tracing; a call with another `Static` compiles anew."""

    call: Call
    entropy: bool


class Outputs(NamedTuple):
    """What forward returns, and what upstream gradients come as."""

    log_prob: Any  # [T, K] float32
    entropy: Any  # [T] float32, or None
    lse: Any  # [T] float32
    top1: Any  # [T] int32


class Residuals(NamedTuple):
    """What backward needs: the inputs, and a few numbers per token."""

    tensors: Tensors
    tokens: Tokens
    ids: Array  # [P, K] int32
    per_token: "PerToken"


class PerToken(NamedTuple):
    """What is known of P tokens once their softmax is complete."""

    log_prob: Array  # [P, K]
    lse: Array  # [P] float32
    top1: Array  # [P] int32
    entropy: Array | None  # [P] float32, and the mean of the logits under their softmax
    mean: Array | None


class Softmax(NamedTuple):
    """The running softmax of C tokens over the vocabulary seen so far, [C] float32."""

    max: Array
    others: Array  # sum of exp(z - max) over all but the argmax
    moment: Array | None  # sum of exp(z - max) * (z - max), for the entropy
    argmax: Array  # int32, -1 where all logits so far are -inf
    picked: Array  # [C, K]: the ids' logits

    @staticmethod
    def empty(n: int, ids: int, *, entropy: bool) -> "Softmax":
        zeros = jnp.zeros(n, jnp.float32)
        lowest, none = jnp.full(n, LOWEST, jnp.float32), jnp.full(n, -1, jnp.int32)
        return Softmax(lowest, zeros, zeros if entropy else None, none, jnp.zeros((n, ids), jnp.float32))

    def absorb(self, z: Array, columns: Columns, ids: Array) -> "Softmax":
        """Take in the logits [C, size] of a chunk of the vocabulary."""
        start = columns.start
        if columns.done is not None:
            z = jnp.where(columns.new(z), z, -jnp.inf)
        first = start if columns.done is None else start + columns.done
        inside = (ids >= first) & (ids < start + columns.size)
        picked = jnp.where(inside, jnp.take_along_axis(z, ids - start, 1, mode="clip"), self.picked)
        top, at = jnp.max(z, 1), jnp.argmax(z, 1).astype(jnp.int32)
        leads = ~(top <= self.max)  # True for NaN
        new_max = jnp.maximum(self.max, top)
        drop = self.max - new_max
        decay = jnp.exp(drop)
        led = (self.argmax >= 0).astype(jnp.float32)
        offset = z - new_max[:, None]
        e = jnp.exp(offset)
        moment = self.moment
        if moment is not None:
            new = jnp.sum(e * jnp.maximum(offset, _VANISHED), 1)
            moment = (moment + drop * (self.others + led)) * decay + new
        is_top = (lax.broadcasted_iota(jnp.int32, z.shape, 1) == at[:, None]) & leads[:, None]
        return Softmax(
            max=new_max,
            others=(self.others + led * leads) * decay + jnp.sum(jnp.where(is_top, 0, e), 1),
            moment=moment,
            argmax=jnp.where(leads, at + start, self.argmax),
            picked=picked,
        )

    def complete(self, ids: Array) -> PerToken:
        seen = self.argmax >= 0
        log_total = jnp.where(seen, jnp.log1p(self.others), jnp.log(self.others))
        log_prob = (self.picked - self.max[:, None]) - log_total[:, None]
        log_prob = jnp.where(ids == IGNORED, 0, jnp.where(ids == OUT_OF_RANGE, jnp.nan, log_prob))
        entropy = mean = None
        if self.moment is not None:
            offset = self.moment / (self.others + seen)
            entropy, mean = log_total - offset, self.max + offset
        return PerToken(log_prob, self.max + log_total, self.argmax, entropy, mean)


def forward(static: Static, config: Config, tensors: Tensors, ids: Array) -> tuple[Outputs, Residuals]:
    """Values for the ids [T, K], and what backward needs; `tensors.labels` says which tokens count."""
    tokens = select_tokens(static.call, tensors, config.token_chunk)
    ids = ids.at[tokens.source].get(mode="fill", fill_value=IGNORED)
    padded, k = ids.shape
    vocab = tensors.weight.shape[static.call.vocab_axis]

    def step(start: Any, made: PerToken) -> PerToken:
        rows = take_rows(tensors, tokens, start, config.token_chunk)
        own = rows.cut(ids)

        def absorb(columns: Columns, softmax: Softmax) -> Softmax:
            z, _ = logits(static.call, tensors, rows, vocab_rows(static.call, tensors, columns), columns)
            return softmax.absorb(z, columns, own)

        softmax = over_vocab(
            vocab, config.vocab_chunk, absorb, Softmax.empty(own.shape[0], k, entropy=static.entropy), own
        )
        return jax.tree.map(lambda x, new: write(x, new, start), made, softmax.complete(own))  # type: ignore[no-any-return]

    zeros = jnp.zeros(padded, jnp.float32)
    empty = PerToken(
        jnp.zeros((padded, k), jnp.float32),
        zeros,
        jnp.full(padded, -1, jnp.int32),
        zeros if static.entropy else None,
        zeros if static.entropy else None,
    )
    made: PerToken = over_tokens(tokens, config.token_chunk, step, empty)
    entropy = None if made.entropy is None else tokens.spread(made.entropy)
    top1 = jnp.where(tokens.kept, tokens.spread(made.top1), -1)
    outputs = Outputs(tokens.spread(made.log_prob), entropy, tokens.spread(made.lse), top1)
    return outputs, Residuals(tensors, tokens, ids, made)


# ----------------------------------------------------------------------------------------------------------- backward


class Known(NamedTuple):
    """What backward knows of each token before it sees a logit; [P] float32, upstream gradients times the factor that
    leads from the final logits to the product.

    With p = exp(z - center - width), the gradient of a logit that is no id's is -p (common + entropy (z - center)).
    """

    center: Array  # the mean logit where the entropy has a gradient, else the log-sum-exp
    width: Array | None  # then the entropy
    common: Array
    entropy: Array | None  # the upstream gradient of the entropy
    at_ids: Array  # [P, K]: the gradients of the ids' logits


def _prepare(residuals: Residuals, upstream: Outputs) -> tuple[Known, Array | None]:
    """What is known of each token, and by what the gradients are then too large (None: nothing)."""
    tensors, tokens, ids, known = residuals
    factor: Any = 1.0 if tensors.logit_scale is None else tensors.logit_scale
    if tokens.temperature is not None:
        factor = factor / tokens.temperature

    def rows(grad: Array | None) -> Array | None:
        # Ignored tokens are never read: a NaN that is sent to one doesn't leak.
        return None if grad is None else grad.astype(jnp.float32).at[tokens.source].get(mode="fill", fill_value=0)

    g = rows(upstream.log_prob)
    g = jnp.zeros(ids.shape, jnp.float32) if g is None else g * jnp.reshape(jnp.asarray(factor), (-1, 1))
    g = jnp.where(ids == IGNORED, 0, jnp.where(ids == OUT_OF_RANGE, jnp.nan, g))
    g_entropy, g_lse = (None if x is None else x * factor for x in map(rows, (upstream.entropy, upstream.lse)))

    too_large = None
    if tensors.hidden.dtype == jnp.float16:
        size = jnp.sum(jnp.abs(g), 1) + sum(jnp.abs(x) for x in (g_entropy, g_lse) if x is not None)
        largest = jnp.max(jnp.where(jnp.isfinite(size), size, 0))
        # The smallest normal number: a power of 2 times anything below would overflow.
        enough = largest > jnp.finfo(jnp.float32).tiny * FLOAT16_ROW
        too_large = jnp.where(enough, FLOAT16_ROW / largest, 1)
        g = g * too_large
        g_entropy, g_lse = (None if x is None else x * too_large for x in (g_entropy, g_lse))

    same, rest = _shares(ids, g)
    common = jnp.sum(g, 1)
    if g_lse is not None:
        common, rest = common - g_lse, rest - g_lse[:, None]
    center, width = known.lse, None
    if g_entropy is not None:
        assert known.entropy is not None
        assert known.mean is not None
        center, width = known.mean, known.entropy
        rest = rest + g_entropy[:, None] * jnp.maximum(known.log_prob + width[:, None], _VANISHED)
    # 1 - p as -expm1(log p): 1 minus a rounded p would lose all digits of a p near 1.
    at_ids = -same * jnp.expm1(known.log_prob) - jnp.exp(known.log_prob) * rest
    return Known(center, width, common, g_entropy, at_ids), too_large


def _shares(ids: Array, g: Array) -> tuple[Array, Array]:
    """For each id of a token the sum of `g` over its occurrences, and the sum over the other ids; [P, K] each."""
    if ids.shape[1] == 1:
        return g, jnp.zeros_like(g)

    def of_one(k: Array) -> tuple[Array, Array]:
        equal = ids == lax.dynamic_slice_in_dim(ids, k, 1, 1)
        return jnp.sum(jnp.where(equal, g, 0), 1), jnp.sum(jnp.where(equal, 0, g), 1)

    # One by one: all at once would be [P, K, K].
    same, rest = lax.map(of_one, jnp.arange(ids.shape[1]))
    return same.T, rest.T


def _logits_gradient(z: Array, slope: Array | None, known: Known, ids: Array, columns: Columns, cut_rows: Any) -> Array:
    """The gradient of the logits before softcap and scale; 0 for what was done before."""
    offset = z - cut_rows(known.center)[:, None]
    common = cut_rows(known.common)[:, None]
    if known.entropy is None or known.width is None:
        g = -jnp.exp(offset) * common
    else:
        p = jnp.exp(offset - cut_rows(known.width)[:, None])
        g = -p * (common + cut_rows(known.entropy)[:, None] * jnp.maximum(offset, _VANISHED))
    column, at_ids = ids - columns.start, cut_rows(known.at_ids)
    if ids.shape[1] == 1:
        g = jnp.where(lax.broadcasted_iota(jnp.int32, z.shape, 1) == column, at_ids, g)
    else:
        # Ids that lie elsewhere are dropped; those that occur twice write the same number.
        column = jnp.where(column < 0, columns.size, column)
        g = g.at[jnp.arange(z.shape[0])[:, None], column].set(at_ids, mode="drop")
    if slope is not None:
        g *= slope
    return g if columns.done is None else jnp.where(columns.new(z), g, 0)


def backward(
    static: Static, config: Config, residuals: Residuals, upstream: Outputs, needs: Needs
) -> tuple[Array | None, Array | None, Array | None]:
    """The gradients of hidden, weight and bias, chunk by chunk of the vocabulary; None in `upstream` is zero."""
    tensors, tokens, ids, _ = residuals
    known, too_large = _prepare(residuals, upstream)

    def gradient(z: Array, slope: Array | None, rows: Rows, columns: Columns) -> Array:
        return _logits_gradient(z, slope, known, rows.cut(ids), columns, rows.cut)

    return recompute_walk(static.call, config, tensors, tokens, needs, gradient, too_large)
