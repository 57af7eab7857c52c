"""Parts of the walks over the [tokens, vocab] matrix in JAX: the logits of a tile, their softmax, their gradient.

The final logits z are those of a linear layer (`XlaProjection`), or exist already (`XlaLogits`), after a `Transform`.
The ids of a token lead to its `XlaTokenStats`; every gradient by z that the ops need is a `XlaTokenGradient`::

    p (factor + entropy (z - mean)) - even - labels q,   with p the softmax and mean = sum(p z),

in which the entries at the ids are replaced by `at_ids`; if classes have weights, they are factors of `even` and of the
labels q.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import IGNORED, OUT_OF_RANGE, vary_alike
from onchip.frontend.jax_inputs import accumulator, in_product_dtype
from onchip.kernels.jax_products import product
from onchip.vocab.memory import Problem

Array = jax.Array
# Where every logit so far is -inf, the running maximum is this: finite, so that a difference of two is never NaN.
LOWEST = {jnp.dtype(x): float(jnp.finfo(x).min) / 4 for x in (jnp.float32, jnp.float64)}
# exp of this is 0: offsets are cut off here, so that p log p is 0 at p = 0 where 0 * -inf would not be.
VANISHED = {jnp.dtype(jnp.float32): -128.0, jnp.dtype(jnp.float64): -1024.0}
# The largest exponential is above this, and nearly 1: XLA may compute a logit twice, and round it otherwise.
_LEADING = 0.75
# float16 can't hold a gradient of 1e-8: rows of the softmax gradient are scaled to about this before a product.
_FLOAT16_ROW = 256.0


# ------------------------------------------------------------------------------------------------------------ tokens


class CountedTokens(NamedTuple):
    """The n tokens that count, at the front of P rows (T rounded up to whole chunks)."""

    kept: Array  # [T] bool: not ignored
    place: Array  # [T] int32: the row of each token
    number: Array  # [] int32: n
    source: Array  # [P] int32: the token of each row, T for the rows behind

    def take(self, x: Array, fill: float) -> Array:
        """[T, ...] values as [P, ...].  Ignored tokens are never read, so that a NaN there can't leak."""
        return x.at[self.source].get(mode="fill", fill_value=fill)

    def spread(self, rows: Array) -> Array:
        """[P, ...] values as [T, ...], with zeros for ignored tokens."""
        kept = self.kept.reshape(-1, *[1] * (rows.ndim - 1))
        return jnp.where(kept, rows.at[self.place].get(mode="clip"), jnp.zeros((), rows.dtype))

    def there(self) -> Array:
        """[P] bool: whether a token is in the row."""
        return jnp.arange(self.source.shape[0]) < self.number

    def sum(self, rows: Array) -> Array:
        # Where, not a product with a weight of 0: a row behind the kept tokens may hold an infinity.
        return jnp.sum(jnp.where(self.there(), rows, 0))


def select_tokens(labels: Array, chunk: int, *, by_label: bool = False) -> CountedTokens:
    """The tokens whose label isn't IGNORED, in order or by ascending label, with those out of range at the end."""
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
    return CountedTokens(kept, place, number, jnp.pad(source, (0, padded - total), constant_values=total))


def cut(x: Array, start: Array | int, size: int, axis: int = 0) -> Array:
    return x if size == x.shape[axis] else lax.dynamic_slice_in_dim(x, start, size, axis)


def cut_rows(rows: Any, start: Array | int, size: int) -> Any:
    """A chunk of a tree of [P, ...] values."""
    return jax.tree.map(lambda x: cut(x, start, size), rows)


def write(x: Array, part: Array, start: Array | int, axis: int = 0) -> Array:
    return part if part.shape == x.shape else lax.dynamic_update_slice_in_dim(x, part, start, axis)


def write_rows(rows: Any, part: Any, start: Array | int) -> Any:
    """The reverse of `cut_rows`."""
    return jax.tree.map(lambda x, new: write(x, new, start), rows, part)


def over_tokens(
    tokens: CountedTokens, chunk: int, step: Callable[[Any, Any], Any], carry: Any, but: str | None = None
) -> Any:
    """`carry = step(start, carry)` for each chunk that has a token which counts; `but` as in `vary_alike`.  `carry`
    varies as what the step adds, which the number of tokens may not."""
    carry = vary_alike(carry, tokens.number, but)
    return lax.fori_loop(0, (tokens.number + chunk - 1) // chunk, lambda i, carry: step(i * chunk, carry), carry)


# -------------------------------------------------------------------------------------------------------- vocabulary


class Columns(NamedTuple):
    """A chunk of the vocabulary.  The last one starts early, so that it is full; its first entries were done before."""

    start: Array | int
    size: int
    done: Array | int | None = None  # so many entries are not new; None where none ever is
    end: Array | None = None  # those from this one on are padding; None where none is

    def new(self, z: Array) -> Array | None:
        """[C, size] bool: the entries to be counted; None if all are."""
        if self.done is None and self.end is None:
            return None
        column = lax.broadcasted_iota(jnp.int32, z.shape, 1)
        new = column >= (0 if self.done is None else self.done)
        return new if self.end is None else new & (column < self.end)

    @property
    def before(self) -> Array | int:
        """How many entries of this chunk were counted before."""
        first = self.start if self.done is None else self.start + self.done
        return first if self.end is None else jnp.minimum(first, self.start + self.end)


def over_vocab(
    vocab: int, chunk: int, step: Callable[[Columns, Any], Any], carry: Any, like: Array, end: Array | None = None
) -> Any:
    """`carry = step(columns, carry)` for each chunk of the vocabulary, whose entries from `end` on are padding; what is
    added varies over mesh axes as `like` does."""
    carry = vary_alike(carry, like)
    chunks = -(-vocab // chunk)
    if chunks == 1:
        return step(Columns(0, vocab, end=end), carry)

    def body(i: Array, carry: Any) -> Any:
        start = jnp.minimum(i * chunk, vocab - chunk)
        done, last = i * chunk - start if vocab % chunk else None, None if end is None else end - start
        return step(Columns(start, chunk, done, last), carry)

    return lax.fori_loop(0, chunks, body, carry)


# ------------------------------------------------------------------------------------------------------------ logits


@partial(jax.tree_util.register_dataclass, data_fields=["hidden", "weight", "bias"], meta_fields=["vocab_axis"])
@dataclass(frozen=True)
class XlaProjection:
    """A linear layer: hidden [T, H] and weight [V, H] or [H, V] in one dtype, and bias [V] in that or float32.

    Gradients of these, and whether each is needed, have the same form.
    """

    hidden: Any
    weight: Any
    bias: Any = None
    vocab_axis: int = 0

    @staticmethod
    def of(hidden: Any, weight: Any, bias: Any, layout: str) -> "XlaProjection":
        """From a public function's arguments, with hidden [..., H] as it is; `layout` is "vh" or "hv"."""
        bias = None if bias is None else jnp.asarray(bias)
        return XlaProjection(*in_product_dtype(hidden, weight), bias, layout.index("v"))

    def flat(self) -> "XlaProjection":
        """The same with hidden [T, H]."""
        return replace(self, hidden=self.hidden.reshape(math.prod(self.hidden.shape[:-1]), self.hidden.shape[-1]))

    @property
    def layout(self) -> Any:
        return ("vh", "hv")[self.vocab_axis]

    @property
    def vocab(self) -> int:
        return self.weight.shape[self.vocab_axis]  # type: ignore[no-any-return]

    @property
    def accumulator(self) -> Any:
        """The dtype of logits, statistics and sums."""
        return accumulator(self.hidden.dtype)

    def problem(self, needs: "XlaProjection", platform: str, **options: Any) -> Problem:
        """What the memory of a call depends on."""
        tokens, size = self.hidden.shape
        return Problem(
            tokens=tokens,
            hidden=size,
            vocab=self.vocab,
            dtype=self.hidden.dtype.name,
            device="cpu" if platform == "cpu" else "cuda",
            grad_hidden=needs.hidden,
            grad_weight=needs.weight,
            grad_bias=bool(needs.bias),
            compacted=True,
            weight_layout=self.layout,
            **options,
        )

    def rows(self, tokens: CountedTokens, start: Array | int, size: int) -> Array:
        """Hidden states of a chunk [C, H] in the weight's dtype, zeros behind the kept tokens."""
        rows: Array = self.hidden.at[cut(tokens.source, start, size)].get(mode="fill", fill_value=0)
        return rows.astype(self.weight.dtype)

    def part(self, columns: Columns) -> "XlaProjection":
        """The layer for a chunk of the vocabulary."""
        weight = cut(self.weight, columns.start, columns.size, self.vocab_axis)
        return replace(self, weight=weight, bias=None if self.bias is None else cut(self.bias, *columns[:2]))

    def logits(self, rows: Array) -> Array:
        """[C, V], not transformed."""
        z = product(rows, self.weight, (1, 1 - self.vocab_axis))
        return z if self.bias is None else z + self.bias.astype(z.dtype)[None]

    def zeros(self, needs: "XlaProjection", rows: int, dtype: Any = None) -> "XlaProjection":
        """Zeros to add to: hidden's in the dtype of sums, those of weight and bias in `dtype`, by default the same."""
        dtype = self.accumulator if dtype is None else dtype
        return XlaProjection(
            jnp.zeros((rows, self.hidden.shape[1]), self.accumulator) if needs.hidden else None,
            jnp.zeros(self.weight.shape, dtype) if needs.weight else None,
            jnp.zeros(self.vocab, dtype) if needs.bias else None,
            self.vocab_axis,
        )

    def accumulate(
        self, sums: "XlaProjection", g: Array, rows: Array, tokens: CountedTokens, start: Any
    ) -> "XlaProjection":
        """The gradients of hidden [P, H], weight and bias, plus what a tile's gradient of logits adds to each.

        g: [C, V], for these rows, the chunk that begins at `start`.
        """
        hidden, weight, bias = sums.hidden, sums.weight, sums.bias
        if bias is not None:
            bias += jnp.sum(g, 0, dtype=bias.dtype)
        g = g.astype(rows.dtype)
        if hidden is not None:
            part = product(g, self.weight, (1, self.vocab_axis))
            hidden = write(hidden, cut(hidden, start, len(rows)) + part, start)
        if weight is not None:
            weight += product(g, rows, (0, 0)) if self.vocab_axis == 0 else product(rows, g, (0, 0))
        return replace(sums, hidden=hidden, weight=weight, bias=bias)


@partial(jax.tree_util.register_dataclass, data_fields=["bits"], meta_fields=["dtype"])
@dataclass(frozen=True)
class XlaLogits:
    """Logits [T, V] that exist already; a chunk has the whole vocabulary.

    Rows of 16-bit floats are fetched and stored as integers with the same bits.  Otherwise XLA's CPU backend would do
    both in float32, and keep all of the logits and of the gradient in float32 for that; so it keeps one copy as
    integers.
    """

    bits: Array
    dtype: Any

    @staticmethod
    def of(logits: Array) -> "XlaLogits":
        return XlaLogits(_as_bits(logits), logits.dtype)

    @property
    def vocab(self) -> int:
        return self.bits.shape[1]

    @property
    def accumulator(self) -> Any:
        """The dtype of statistics and sums."""
        return accumulator(self.dtype)

    def rows(self, tokens: CountedTokens, start: Array | int, size: int) -> Array:
        return self.bits.at[cut(tokens.source, start, size)].get(mode="fill", fill_value=0)

    def part(self, columns: Columns) -> "XlaLogits":
        return self

    def logits(self, rows: Array) -> Array:
        return self.floats(rows).astype(self.accumulator)

    def floats(self, rows: Array) -> Array:
        return lax.bitcast_convert_type(rows, self.dtype) if rows.dtype != self.dtype else rows

    def zeros(self, needs: Any, rows: int) -> Array | None:
        """The bits of a gradient of zeros."""
        return jnp.zeros_like(self.bits) if needs else None

    def accumulate(self, made: Array, g: Array, rows: Array, tokens: CountedTokens, start: Any) -> Array:
        """The bits of the gradient [T, V], with those of a chunk's tokens written, from g [C, V]."""
        total, token = len(self.bits), cut(tokens.source, start, len(rows))
        # Rows behind the kept tokens are written nowhere: each has a place of its own beyond the end.
        place = jnp.where(token < total, token, total + start + jnp.arange(len(rows), dtype=jnp.int32))
        at = made.at[place]
        return at.set(_as_bits(g.astype(self.dtype)), mode="drop", indices_are_sorted=True, unique_indices=True)


def _as_bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


class Transform(NamedTuple):
    """z = softcap * tanh(logits * logit_scale / softcap) / temperature.  None stands for what isn't used."""

    logit_scale: Array | None = None  # [] of the logits' dtype, as the next
    softcap: Array | None = None
    temperature: Array | None = None  # [], or one for each token [T], for each row [P]

    def by_row(self, tokens: CountedTokens) -> "Transform":
        if self.temperature is None or self.temperature.ndim == 0:
            return self
        return self._replace(temperature=tokens.take(self.temperature, 1))

    def of_chunk(self, start: Array | int, size: int) -> "Transform":
        if self.temperature is None or self.temperature.ndim == 0:
            return self
        return self._replace(temperature=cut(self.temperature, start, size)[:, None])

    def apply(self, z: Array) -> tuple[Array, Array | None]:
        """The final logits, and the derivative of the softcap."""
        slope = None
        if self.logit_scale is not None:
            z *= self.logit_scale
        if self.softcap is not None:
            tanh = jnp.tanh(z / self.softcap)
            slope = 1 - tanh * tanh
            z = self.softcap * tanh
        if self.temperature is not None:
            z /= self.temperature
        return z, slope

    def factor(self) -> Array | None:
        """The derivative of the final logits without the softcap's: [] or [P]; None for 1."""
        if self.temperature is None:
            return self.logit_scale
        return (1.0 if self.logit_scale is None else self.logit_scale) / self.temperature


# ----------------------------------------------------------------------------------------------------------- softmax


class Wanted(NamedTuple):
    """Which statistics are wanted, in addition to lse and log_prob."""

    entropy: bool = False
    argmax: bool = False
    even: bool = False
    sum_sq: bool = False
    weighed: bool = False  # `even` by class


class XlaTokenStats(NamedTuple):
    """What is known about tokens once their softmax is complete, [P] float32 or float64; None: not wanted."""

    lse: Array
    log_prob: Array  # [P, K]: of the ids; 0 for IGNORED ones, NaN for those OUT_OF_RANGE
    entropy: Array | None = None
    mean: Array | None = None  # of the logits under their softmax, with the entropy
    even_loss: Array | None = None  # the mean of lse - z over the vocabulary, weighted by class
    mean_logits: Array | None = None  # the mean of z over the vocabulary, with even_loss
    log_sum_sq: Array | None = None  # log(sum(p**2))
    argmax: Array | None = None  # int32, -1 where all logits are -inf

    @staticmethod
    def empty(ids: Array, wanted: Wanted, dtype: Any) -> "XlaTokenStats":
        """Zeros."""
        made = jax.eval_shape(lambda: Softmax.empty(ids, wanted, dtype).complete(ids, 1))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)  # type: ignore[no-any-return]

    @property
    def known(self) -> "XlaTokenStats":
        """The part that gradients need."""
        return XlaTokenStats(self.lse, self.log_prob, self.entropy, self.mean)

    def by_token(self, tokens: CountedTokens) -> "XlaTokenStats":
        return jax.tree.map(tokens.spread, self)  # type: ignore[no-any-return]

    def by_row(self, tokens: CountedTokens) -> "XlaTokenStats":
        """The reverse of `by_token`: by row.  Rows behind the tokens are of logits that all vanish."""
        made: XlaTokenStats = jax.tree.map(lambda x: tokens.take(x, 0), self)
        far = jnp.where(tokens.there(), 0, 1e30).astype(self.lse.dtype)
        return made._replace(lse=made.lse + far, entropy=None if made.entropy is None else made.entropy + far)


class Softmax(NamedTuple):
    """The running softmax of C tokens over the vocabulary seen so far, [C] float32 or float64."""

    max: Array
    total: Array  # sum of exp(z - max): 0 where all are -inf
    below: Array  # the same without those above _LEADING
    picked: Array  # [C, K]: the ids' logits
    offset_sum: Array | None  # sum of z - max, for label smoothing
    moment: Array | None  # sum of exp(z - max) * (z - max), for the entropy
    argmax: Array | None  # int32, the first
    squares: Array | None = None  # sum of exp(z - max)**2
    squares_below: Array | None = None  # the same without those above _LEADING
    weight: Array | None = None  # sum of the class weights, where z - max is weighted by class

    @staticmethod
    def empty(ids: Array, wanted: Wanted, dtype: Any) -> "Softmax":
        n = ids.shape[0]
        zeros = jnp.zeros(n, dtype)
        return Softmax(
            max=jnp.full(n, LOWEST[dtype], dtype),
            total=zeros,
            below=zeros,
            picked=jnp.zeros(ids.shape, dtype),
            offset_sum=zeros if wanted.even else None,
            moment=zeros if wanted.entropy else None,
            argmax=jnp.full(n, -1, jnp.int32) if wanted.argmax else None,
            squares=zeros if wanted.sum_sq else None,
            squares_below=zeros if wanted.sum_sq else None,
            weight=zeros if wanted.weighed else None,
        )

    def absorb(self, z: Array, columns: Columns, ids: Array, class_weight: Array | None = None) -> "Softmax":
        """Take in the logits [C, size] of a chunk of the vocabulary, for tokens with these ids [C, K].

        class_weight: [V], which `even` is weighted by.
        """
        start, new = columns.start, columns.new(z)
        if new is not None:
            z = jnp.where(new, z, -jnp.inf)
        first, counted = columns.before, True if new is None else new
        top = jnp.max(z, 1)
        new_max = jnp.maximum(self.max, top)
        drop = self.max - new_max
        decay = jnp.exp(drop)
        inside = (ids >= first) & (ids < start + columns.size)
        e = jnp.exp(z - new_max[:, None])
        total, below = jnp.sum(e, 1), jnp.sum(jnp.where(e > _LEADING, 0, e), 1)
        # Not the same tile as that of e, or XLA's CPU backend would hold one more at a time.
        offset = z - lax.optimization_barrier((new_max, total, below))[0][:, None]
        offset_sum, moment, argmax = self.offset_sum, self.moment, self.argmax
        squares, squares_below = self.squares, self.squares_below
        weight = self.weight
        if offset_sum is not None and weight is not None and class_weight is not None:
            own = cut(class_weight, columns.start, columns.size)[None]
            # A class that weighs nothing counts for nothing, where 0 * -inf would not be 0.
            weighed = jnp.where(counted & (own > 0), offset * own, 0)
            offset_sum = offset_sum + drop * weight + jnp.sum(weighed, 1)
            weight = weight + jnp.sum(jnp.where(counted, jnp.broadcast_to(own, z.shape), 0), 1)
        elif offset_sum is not None:
            offset_sum = offset_sum + drop * jnp.asarray(first, drop.dtype) + jnp.sum(jnp.where(counted, offset, 0), 1)
        if moment is not None:
            added = jnp.sum(e * jnp.maximum(offset, VANISHED[offset.dtype]), 1)
            moment = (moment + drop * self.total) * decay + added
        if squares is not None and squares_below is not None:
            shrunk = decay * decay
            squares_below = jnp.where(drop < 0, squares, squares_below) * shrunk
            squares_below += jnp.sum(jnp.where(e > _LEADING, 0, e * e), 1)
            squares = squares * shrunk + jnp.sum(e * e, 1)
        if argmax is not None:
            # True for NaN.
            argmax = jnp.where(top <= self.max, argmax, jnp.argmax(z, 1).astype(jnp.int32) + start)
        return Softmax(
            max=new_max,
            total=self.total * decay + total,
            below=jnp.where(drop < 0, self.total, self.below) * decay + below,
            picked=jnp.where(inside, jnp.take_along_axis(z, ids - start, 1, mode="clip"), self.picked),
            offset_sum=offset_sum,
            moment=moment,
            argmax=argmax,
            squares=squares,
            squares_below=squares_below,
            weight=weight,
        )

    def complete(self, ids: Array, vocab: int, log_total: Array | None = None) -> XlaTokenStats:
        """The statistics; `log_total` is the logarithm of the total, if the caller has a better one."""
        # Where one logit leads, the loss of its id is small, and 1 + others would round it away.  A second exponential
        # above _LEADING would have made the total larger.
        leads = (self.total > 0.5) & (self.total < 1.5)
        if log_total is None:
            log_total = jnp.where(leads, jnp.log1p(self.below), jnp.log(self.total))
        log_prob = (self.picked - self.max[:, None]) - log_total[:, None]
        log_prob = jnp.where(ids == IGNORED, 0, jnp.where(ids == OUT_OF_RANGE, jnp.nan, log_prob))
        entropy = mean = None
        if self.moment is not None:
            offset = self.moment / self.total
            entropy, mean = log_total - offset, self.max + offset
        even_loss = mean_logits = log_sum_sq = None
        if self.offset_sum is not None:
            offset = self.offset_sum / vocab
            share = 1 if self.weight is None else self.weight / vocab
            even_loss, mean_logits = log_total * share - offset, self.max + offset
        if self.squares is not None and self.squares_below is not None:
            log_square = jnp.where(leads, jnp.log1p(self.squares_below), jnp.log(self.squares))
            log_sum_sq = log_square - 2 * log_total
        return XlaTokenStats(
            lse=self.max + log_total,
            log_prob=log_prob,
            entropy=entropy,
            mean=mean,
            even_loss=even_loss,
            mean_logits=mean_logits,
            log_sum_sq=log_sum_sq,
            argmax=self.argmax,
        )


# ---------------------------------------------------------------------------------------------------------- gradient


class XlaTokenGradient(NamedTuple):
    """What backward knows of each token before it sees a logit, [P] float32 or float64; see the module's docstring."""

    factor: Array
    at_ids: Array  # [P, K]
    entropy: Array | None = None
    even: Array | None = None
    labels: Array | None = None

    def times(self, x: Array | None) -> "XlaTokenGradient":
        """The gradient times x, [P] or []; None for 1."""
        if x is None:
            return self
        each = x[:, None] if x.ndim else x
        factor, at_ids, *others = self.factor * x, self.at_ids * each, *self[2:]
        return XlaTokenGradient(factor, at_ids, *(None if y is None else y * x for y in others))

    def size(self, mass: Array | None = None) -> Array:
        """[P]: a size that no entry much exceeds, if labels of every entry sum to `mass`."""
        size = jnp.abs(self.factor) + jnp.sum(jnp.abs(self.at_ids), 1)
        if self.labels is not None and mass is not None:
            size += jnp.abs(self.labels * mass)
        return size if self.entropy is None else size + jnp.abs(self.entropy)


def float16_scale(size: Array, dtype: Any) -> Array | None:
    """The factor for gradients with rows of about these sizes [P] before products in this dtype; None for 1."""
    if dtype != jnp.float16:
        return None
    largest = jnp.max(jnp.where(jnp.isfinite(size), size, 0))
    # The smallest normal number: a power of 2 times anything below would overflow.
    return jnp.where(largest > jnp.finfo(jnp.float32).tiny * _FLOAT16_ROW, _FLOAT16_ROW / largest, 1)


def unscaled(x: Array, grad_scale: Array | None) -> Array:
    return x if grad_scale is None else x / grad_scale


def logits_gradient(
    z: Array,
    slope: Array | None,
    stats: XlaTokenStats,
    gradient: XlaTokenGradient,
    ids: Array,
    columns: Columns,
    class_weight: Array | None = None,  # [V]: factors of gradient.even and of labels
    labels: Array | None = None,  # [C, size], with gradient.labels
) -> Array:
    """The gradient of the logits before scale and softcap, [C, size]; 0 for what was done before."""
    if gradient.entropy is None:
        g = jnp.exp(z - stats.lse[:, None]) * gradient.factor[:, None]
    else:
        assert stats.mean is not None
        assert stats.entropy is not None
        # Not from lse: z - mean has more digits where logits are small.
        offset = z - stats.mean[:, None]
        p = jnp.exp(offset - stats.entropy[:, None])
        g = p * (gradient.factor[:, None] + gradient.entropy[:, None] * jnp.maximum(offset, VANISHED[offset.dtype]))
    if gradient.even is not None:
        even = gradient.even[:, None]
        g -= even if class_weight is None else even * cut(class_weight, columns.start, columns.size)[None]
    if labels is not None and gradient.labels is not None:
        q = labels.astype(z.dtype)
        q = q if class_weight is None else q * cut(class_weight, columns.start, columns.size)[None]
        g -= gradient.labels[:, None] * q
    column = ids - columns.start
    if ids.shape[1] == 1:
        g = jnp.where(lax.broadcasted_iota(jnp.int32, z.shape, 1) == column, gradient.at_ids, g)
    else:
        # Ids that lie elsewhere are dropped; those that occur twice write the same number.
        column = jnp.where(column < 0, columns.size, column)
        g = g.at[jnp.arange(z.shape[0])[:, None], column].set(gradient.at_ids, mode="drop")
    if slope is not None:
        g *= slope
    new = columns.new(z)
    return g if new is None else jnp.where(new, g, 0)


def shares(ids: Array, g: Array) -> tuple[Array, Array]:
    """For each id of a token, the sum of `g` over its occurrences, and the sum over the other ids; [P, K] each."""
    if ids.shape[1] == 1:
        return g, jnp.zeros_like(g)

    def of_one(k: Array) -> tuple[Array, Array]:
        equal = ids == lax.dynamic_slice_in_dim(ids, k, 1, 1)
        return jnp.sum(jnp.where(equal, g, 0), 1), jnp.sum(jnp.where(equal, 0, g), 1)

    # One by one: all at once would be [P, K, K].
    same, rest = lax.map(of_one, jnp.arange(ids.shape[1]))
    return same.T, rest.T
