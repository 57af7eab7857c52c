"""What walks over the [tokens, vocab] matrix in JAX do with one tile: its tokens, its logits, their softmax and their
gradient."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import IGNORED, OUT_OF_RANGE, Needs, Static, Tensors, vary_alike
from onchip.vocab.chunks import Config

Array = jax.Array
# Where every logit so far is -inf, the running maximum is this: finite, so that a difference of two is never NaN.
LOWEST = float(jnp.finfo(jnp.float32).min) / 4
# float16 can't hold a gradient of 1e-8: rows of the softmax gradient are scaled to about this before a product.
FLOAT16_ROW = 256.0


# ------------------------------------------------------------------------------------------------------------ tokens


class Tokens(NamedTuple):
    """The n tokens that count, at the front of P rows (T rounded up to whole chunks); the rows behind weigh 0."""

    kept: Array  # [T] bool: not ignored
    place: Array  # [T] int32: the row of each token
    number: Array  # [] int32: n
    source: Array  # [P] int32: the token of each row, T for the rows behind
    label: Array  # [P] int32 in [0, V)
    bad: Array  # [P] bool: the label was out of range
    weight: Array  # [P] float32: NaN for bad tokens
    temperature: Array | None  # [P] or [] float32
    inverse_count: Array  # [] float32: 1 / what the mean divides by

    def spread(self, rows: Array) -> Array:
        """[P, ...] values as [T, ...], with zeros for ignored tokens."""
        kept = self.kept.reshape(-1, *[1] * (rows.ndim - 1))
        return jnp.where(kept, rows.at[self.place].get(mode="clip"), jnp.zeros((), rows.dtype))


def select_tokens(static: Static, tensors: Tensors, chunk: int, *, by_label: bool = False) -> Tokens:
    """The tokens that count in their own order, or by ascending label with those out of range behind."""
    labels = tensors.labels
    total = labels.shape[0]
    padded = -(-total // chunk) * chunk
    kept = labels != IGNORED
    number = jnp.sum(kept, dtype=jnp.int32)
    # A sort is one kernel, and a running sum of many tokens is dozens.
    # Both marks are negative; of the numbers without a sign they are the largest.
    key = lax.bitcast_convert_type(labels, jnp.uint32) if by_label else ~kept
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    place = jnp.zeros(total, jnp.int32).at[order].set(jnp.arange(total, dtype=jnp.int32), unique_indices=True)
    source = jnp.where(jnp.arange(total) < number, order, total)
    source = jnp.pad(source, (0, padded - total), constant_values=total)

    def take(x: Array, fill: float) -> Array:
        return x.at[source].get(mode="fill", fill_value=fill)

    label = take(labels, 0)
    bad = label == OUT_OF_RANGE
    weight = jnp.ones(padded, jnp.float32) if tensors.token_weight is None else take(tensors.token_weight, 0)
    weight = jnp.where(jnp.arange(padded) < number, weight, 0)
    temperature = tensors.temperature
    if temperature is not None and temperature.ndim:
        temperature = take(temperature, 1)
    divisor = jnp.ones((), jnp.float32)
    if static.reduction == "mean":
        counted = number.astype(jnp.float32) if tensors.normalizer is None else tensors.normalizer
        divisor = jnp.where(number > 0, counted, divisor)
    return Tokens(
        kept,
        place,
        number,
        source,
        jnp.where(bad, 0, label),
        bad,
        jnp.where(bad, jnp.nan, weight),
        temperature,
        1 / divisor,
    )


def sum_kept(rows: Array, tokens: Tokens) -> Array:
    # Where, not a product with the weight's 0: a row behind the kept tokens may hold an infinity.
    return jnp.sum(jnp.where(jnp.arange(rows.shape[0]) < tokens.number, rows, 0))


class Rows(NamedTuple):
    """A chunk of C tokens."""

    start: Array | int
    hidden: Array  # [C, H], zeros behind the kept tokens
    label: Array  # [C] int32
    temperature: Array | None  # [C, 1] or []

    def cut(self, rows: Array) -> Array:
        """The chunk's part of [P] values."""
        return cut(rows, self.start, self.label.shape[0])


def take_rows(tensors: Tensors, tokens: Tokens, start: Array | int, size: int) -> Rows:
    temperature = tokens.temperature
    if temperature is not None and temperature.ndim:
        temperature = cut(temperature, start, size)[:, None]
    # Ignored tokens are never read, so that a NaN there can't leak.
    hidden = tensors.hidden.at[cut(tokens.source, start, size)].get(mode="fill", fill_value=0)
    return Rows(start, hidden, cut(tokens.label, start, size), temperature)


def cut(x: Array, start: Array | int, size: int, axis: int = 0) -> Array:
    return x if size == x.shape[axis] else lax.dynamic_slice_in_dim(x, start, size, axis)


def write(x: Array, part: Array, start: Array | int, axis: int = 0) -> Array:
    return part if part.shape == x.shape else lax.dynamic_update_slice_in_dim(x, part, start, axis)


def over_tokens(tokens: Tokens, chunk: int, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    """`carry = step(start, carry)` for each chunk that has a token which counts."""
    carry = vary_alike(carry, tokens.number)
    return lax.fori_loop(0, (tokens.number + chunk - 1) // chunk, lambda i, carry: step(i * chunk, carry), carry)


class Columns(NamedTuple):
    """A chunk of the vocabulary.  The last one starts early, so as to be full: its first entries were done before."""

    start: Array | int
    size: int
    done: Array | int | None  # so many entries are not new; None where none ever is

    def new(self, z: Array) -> Array | bool:
        """[C, size] bool: the entries to be counted."""
        return True if self.done is None else lax.broadcasted_iota(jnp.int32, z.shape, 1) >= self.done


def over_vocab(vocab: int, chunk: int, step: Callable[[Columns, Any], Any], carry: Any, like: Array) -> Any:
    """`carry = step(columns, carry)` for each chunk of the vocabulary; what is added varies as `like` does."""
    carry = vary_alike(carry, like)
    chunks = -(-vocab // chunk)
    if chunks == 1:
        return step(Columns(0, vocab, None), carry)

    def body(i: Array, carry: Any) -> Any:
        start = jnp.minimum(i * chunk, vocab - chunk)
        return step(Columns(start, chunk, i * chunk - start if vocab % chunk else None), carry)

    return lax.fori_loop(0, chunks, body, carry)


# ------------------------------------------------------------------------------------------------- one tile at a time


def product(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """The product over dimension contract[0] of `a` and contract[1] of `b`, in float32."""
    # Float32 operands are not to be rounded to tf32 or bfloat16, which is the default on GPU and TPU.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def weight_product(static: Static, g: Array, hidden: Array) -> Array:
    """g.T @ hidden in the weight's layout."""
    return product(g, hidden, (0, 0)) if static.vocab_axis == 0 else product(hidden, g, (0, 0))


def vocab_rows(static: Static, tensors: Tensors, columns: Columns) -> Array:
    return cut(tensors.weight, columns.start, columns.size, static.vocab_axis)


def logits(static: Static, tensors: Tensors, rows: Rows, weight: Array, columns: Columns) -> tuple[Array, Array | None]:
    """The final logits of the tokens over the vocabulary entries in `weight`, and their derivative's softcap."""
    z = product(rows.hidden, weight, (1, 1 - static.vocab_axis))
    if tensors.bias is not None:
        z += cut(tensors.bias, columns.start, columns.size).astype(jnp.float32)
    return transform(z, tensors, rows)


def transform(z: Array, tensors: Tensors, rows: Rows) -> tuple[Array, Array | None]:
    """The logits after scale, softcap and temperature, and their derivative's softcap."""
    slope = None
    if tensors.logit_scale is not None:
        z *= tensors.logit_scale
    if tensors.softcap is not None:
        tanh = jnp.tanh(z / tensors.softcap)
        slope = 1 - tanh * tanh
        z = tensors.softcap * tanh
    if rows.temperature is not None:
        z /= rows.temperature
    return z, slope


class Softmax(NamedTuple):
    """The running softmax of C tokens over the vocabulary seen so far, each [C] float32 (argmax int32)."""

    max: Array
    label: Array  # the label's logit
    others: Array  # sum of exp(z - max) over all but the label
    offset_sum: Array | None  # sum of z - max, for label smoothing
    moment: Array | None  # sum of exp(z - max) * (z - max), for the entropy
    argmax: Array | None

    @staticmethod
    def empty(n: int, *, smoothing: bool, stats: bool) -> "Softmax":
        zeros = jnp.zeros(n, jnp.float32)
        return Softmax(
            max=jnp.full(n, LOWEST, jnp.float32),
            label=zeros,
            others=zeros,
            offset_sum=zeros if smoothing else None,
            moment=zeros if stats else None,
            argmax=jnp.full(n, -1, jnp.int32) if stats else None,
        )

    def absorb(self, z: Array, columns: Columns, label: Array) -> "Softmax":
        """Take in the logits [C, size] of a chunk of the vocabulary."""
        start, new = columns.start, columns.new(z)
        if columns.done is not None:
            z = jnp.where(new, z, -jnp.inf)
        first = start if columns.done is None else start + columns.done
        top = jnp.max(z, 1)
        new_max = jnp.maximum(self.max, top)
        drop = self.max - new_max
        decay = jnp.exp(drop)
        column = label - start
        inside = (label >= first) & (column < columns.size)
        picked = jnp.take_along_axis(z, column[:, None], 1, mode="clip")[:, 0]
        offset = z - new_max[:, None]
        e = jnp.exp(offset)
        offset_sum, moment, argmax = self.offset_sum, self.moment, self.argmax
        if offset_sum is not None:
            offset_sum = offset_sum + drop * jnp.asarray(first, jnp.float32) + jnp.sum(jnp.where(new, offset, 0), 1)
        if moment is not None and argmax is not None:
            argmax = jnp.where(top > self.max, jnp.argmax(z, 1).astype(jnp.int32) + start, argmax)
            total = self.others + jnp.where(label < first, jnp.exp(self.label - self.max), 0)
            # p log p is 0 at p = 0, and 0 * -inf is not.
            moment = (moment + drop * total) * decay + jnp.sum(e * jnp.maximum(offset, -1e30), 1)
        return Softmax(
            max=new_max,
            label=jnp.where(inside, picked, self.label),
            others=self.others * decay + jnp.sum(jnp.where(_is_label(z, column), 0, e), 1),
            offset_sum=offset_sum,
            moment=moment,
            argmax=argmax,
        )

    @property
    def total(self) -> Array:
        return self.others + jnp.exp(self.label - self.max)

    @property
    def log_total(self) -> Array:
        # log1p where the label leads: there the loss is small, and 1 + others would round it away.
        return jnp.where(self.label == self.max, jnp.log1p(self.others), jnp.log(self.total))


def _is_label(z: Array, column: Array) -> Array:
    """[C, size] bool: the label's place in each row."""
    return lax.broadcasted_iota(jnp.int32, z.shape, 1) == column[:, None]


class PerToken(NamedTuple):
    """What is known of tokens once their softmax is complete, [P] each; the loss is not yet weighted."""

    loss: Array
    lse: Array
    log_prob: Array
    entropy: Array | None
    correct: Array | None

    @staticmethod
    def empty(n: int, *, stats: bool) -> "PerToken":
        zeros = jnp.zeros(n, jnp.float32)
        return PerToken(zeros, zeros, zeros, zeros if stats else None, jnp.zeros(n, bool) if stats else None)

    def put(self, part: "PerToken", start: Array | int) -> "PerToken":
        return jax.tree.map(lambda x, new: write(x, new, start), self, part)  # type: ignore[no-any-return]


def complete(softmax: Softmax, label: Array, tensors: Tensors, bad: Array, vocab: int) -> PerToken:
    log_total = softmax.log_total
    lse = softmax.max + log_total
    log_prob = jnp.where(bad, jnp.nan, (softmax.label - softmax.max) - log_total)
    loss = -log_prob
    if tensors.label_smoothing is not None and softmax.offset_sum is not None:
        eps = tensors.label_smoothing
        even = log_total - softmax.offset_sum / vocab
        # At 1 the label's logit doesn't count, at 0 a masked entry's doesn't, and 0 * inf is not 0.
        loss = jnp.where(eps < 1, (1 - eps) * loss, 0) + jnp.where(eps > 0, eps * even, 0)
    if tensors.z_loss is not None:
        loss += tensors.z_loss * jnp.square(lse)
    entropy = correct = None
    if softmax.moment is not None:
        entropy = log_total - softmax.moment / softmax.total
        correct = (softmax.argmax == label) & ~bad
    return PerToken(loss, lse, log_prob, entropy, correct)


def logits_gradient(
    z: Array,
    slope: Array | None,
    shift: Array,
    scale: Array,
    row: Array,
    per_token: PerToken,
    label: Array,
    columns: Columns,
    tensors: Tensors,
    vocab: int,
) -> Array:
    """The gradient of the logits before softcap and scale: row * d(loss) / dz * slope; 0 for what was done before.

    exp(z - shift) * scale are the probabilities, `row` is the upstream gradient with all factors, each [C].
    """
    # p - 1 as expm1(log p): -1 added to a rounded p would lose all digits of a p near 1.
    at_label = jnp.expm1(per_token.log_prob)
    if tensors.z_loss is not None:
        more = 2 * tensors.z_loss * per_token.lse
        scale *= 1 + more
        at_label += more * jnp.exp(per_token.log_prob)
    g = jnp.exp(z - shift[:, None]) * (row * scale)[:, None]
    if tensors.label_smoothing is not None:
        even = tensors.label_smoothing / vocab
        g -= (row * even)[:, None]
        at_label += tensors.label_smoothing - even
    g = jnp.where(_is_label(z, label - columns.start), (row * at_label)[:, None], g)
    if slope is not None:
        g *= slope
    return g if columns.done is None else jnp.where(columns.new(z), g, 0)


def gradient_rows(tokens: Tokens, tensors: Tensors, upstream: Array) -> tuple[Array, Array | None]:
    """The factor of each token's row of the gradient [P], and by what the products are then too large (None: nothing).

    `upstream` is [P] or [].
    """
    row = tokens.weight * tokens.inverse_count * upstream
    if tensors.logit_scale is not None:
        row *= tensors.logit_scale
    if tokens.temperature is not None:
        row /= tokens.temperature
    if tensors.hidden.dtype != jnp.float16:
        return row, None
    largest = jnp.max(jnp.where(jnp.isfinite(row), jnp.abs(row), 0))
    # The smallest normal number: a power of 2 times anything below would overflow.
    too_large = jnp.where(largest > jnp.finfo(jnp.float32).tiny * FLOAT16_ROW, FLOAT16_ROW / largest, 1)
    return row * too_large, too_large


def recompute_walk(
    static: Static,
    config: Config,
    tensors: Tensors,
    tokens: Tokens,
    needs: Needs,
    gradient: Callable[[Array, Array | None, Rows, Columns], Array],
    too_large: Array | None,
) -> tuple[Array | None, Array | None, Array | None]:
    """The gradients of hidden, weight and bias, chunk by chunk of the vocabulary, each chunk's logits computed again.

    `gradient` makes that of the logits before softcap and scale, `too_large` times too large, of final logits and their
    derivative's softcap.
    """
    dtype, size = tensors.hidden.dtype, tensors.hidden.shape[1]
    vocab, padded = tensors.weight.shape[static.vocab_axis], tokens.source.shape[0]

    def shrink(x: Array) -> Array:
        return x if too_large is None else x / too_large

    def put(x: Array, part: Array, columns: Columns, axis: int = 0) -> Array:
        part = shrink(part).astype(dtype)
        if columns.done is not None:
            # What was done before is 0 in `part` and has its value in `x`, the rest is 0 there.
            part += cut(x, columns.start, columns.size, axis)
        return write(x, part, columns.start, axis)

    def tile(start: Any, carry: Any, *, columns: Columns, weight: Array) -> Any:
        """Add what the tokens from `start` on give with a chunk of the vocabulary."""
        grad_hidden, weight_part, bias_part = carry
        rows = take_rows(tensors, tokens, start, config.token_chunk)
        z, slope = logits(static, tensors, rows, weight, columns)
        g = gradient(z, slope, rows, columns)
        if needs.bias:
            bias_part += jnp.sum(g, 0)
        g = g.astype(dtype)
        if needs.hidden:
            made = product(g, weight, (1, static.vocab_axis))
            grad_hidden = write(grad_hidden, rows.cut(grad_hidden) + made, start)
        if needs.weight:
            weight_part += weight_product(static, g, rows.hidden)
        return grad_hidden, weight_part, bias_part

    def step(columns: Columns, carry: Any) -> Any:
        grad_hidden, grad_weight, grad_bias = carry
        weight = vocab_rows(static, tensors, columns)
        parts = (
            grad_hidden,
            jnp.zeros(weight.shape, jnp.float32) if needs.weight else None,
            jnp.zeros(columns.size, jnp.float32) if needs.bias else None,
        )
        add = partial(tile, columns=columns, weight=weight)
        grad_hidden, weight_part, bias_part = over_tokens(tokens, config.token_chunk, add, parts)
        if needs.weight:
            grad_weight = put(grad_weight, weight_part, columns, static.vocab_axis)
        if needs.bias:
            grad_bias = put(grad_bias, bias_part, columns)
        return grad_hidden, grad_weight, grad_bias

    carry = (
        jnp.zeros((padded, size), jnp.float32) if needs.hidden else None,
        jnp.zeros(tensors.weight.shape, dtype) if needs.weight else None,
        jnp.zeros(vocab, dtype) if needs.bias else None,
    )
    grad_hidden, grad_weight, grad_bias = over_vocab(vocab, config.vocab_chunk, step, carry, tokens.number)
    if grad_hidden is not None:
        grad_hidden = tokens.spread(shrink(grad_hidden)).astype(dtype)
    return grad_hidden, grad_weight, grad_bias
