"""What linear_jsd's Triton kernels over a token's row of logits share: where a row is, and its softmax.

Sizes, positions and the form in which logits are stored are as in triton_product.py.  Logarithms are to base 2.
"""

from typing import Any, NamedTuple

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LOG2E, LOWEST
from onchip.vocab.triton.blocks import VOCAB_TILE, buffer_row

# Log-probabilities are at least this, so that no difference of two is NaN.
FLOOR = tl.constexpr(-1.0e30)
LN2 = tl.constexpr(0.6931471805599453)
GROUP_OF = tl.constexpr(8)
# Rows of `stats`, [STATS, T] float32 by position: where each model's rows begin, the rows of a model, and the label's.
STUDENT, TEACHER = tl.constexpr(0), tl.constexpr(4)
MAXIMUM, LOG_SUM = tl.constexpr(0), tl.constexpr(1)  # log2 p = (z - maximum) log2(e) / temperature - log_sum
MEAN = tl.constexpr(2)  # the mean that the gradient subtracts, divided by log(2)
INVERSE_SCALE = tl.constexpr(3)  # the factor that undoes a kept gradient's scaling
HARD_LOG_SUM, LABEL_LOG_PROB = tl.constexpr(8), tl.constexpr(9)  # the student's at temperature 1


class JsdLogits(NamedTuple):
    """A model's logits: tiles as `logit_tiles` leaves them, or without `largest` those that the caller gave."""

    numbers: Any  # [tiles * tile_rows, VOCAB_TILE], or [T, V]
    stride: Any  # of rows
    largest: Any  # [tile_rows, tiles] float32, and so on
    total: Any
    others: Any


class JsdGradient(NamedTuple):
    """Where the gradient by a model's logits goes: rows of a buffer, or without one those of a matrix [T, V]."""

    out: Any  # None: it is not wanted
    stride: Any  # of rows
    buffer: Any  # BufferRows


@triton.jit
def _addresses_of_logits(token, stride, first_tile, TILES: tl.constexpr):
    """Where a token's row of logits starts, from one block of tiles to the next, and a block's elements from there."""
    within = tl.arange(0, TILES)[:, None] * VOCAB_TILE + tl.arange(0, VOCAB_TILE)[None, :]
    return token.to(tl.int64) * stride + first_tile * VOCAB_TILE, TILES * VOCAB_TILE, within


@triton.jit
def _addresses_of_tiles(row, tile_rows, TILES: tl.constexpr):
    """The same in tiles: from row `row` on, and from one tile to the next `tile_rows` further."""
    of_tile = tile_rows.to(tl.int64) * VOCAB_TILE
    within = tl.arange(0, TILES).to(tl.int64)[:, None] * of_tile + tl.arange(0, VOCAB_TILE)[None, :]
    return row.to(tl.int64) * VOCAB_TILE, of_tile * TILES, within


@triton.jit
def addresses(model, i, token, tile_rows, first_tile, TILES: tl.constexpr):
    """Pointers to a token's first block of logits, and how far it is to the next."""
    if model.largest is None:
        start, step, within = _addresses_of_logits(token, model.stride, first_tile, TILES)
    else:
        start, step, within = _addresses_of_tiles(i, tile_rows, TILES)
    return model.numbers + start, step, within


@triton.jit
def addresses_of_gradient(gradient, at, token, first_tile, TILES: tl.constexpr):
    if gradient.buffer is None:
        start, step, within = _addresses_of_logits(token, gradient.stride, first_tile, TILES)
    else:
        row = buffer_row(first_tile, at, gradient.buffer, first_tile)
        apart = buffer_row(first_tile + 1, at, gradient.buffer, first_tile) - row
        start, step, within = _addresses_of_tiles(row, apart, TILES)
    return gradient.out + start, step, within


@triton.jit
def log2_probs(source, within, model, i, j, v, tiles, V, scale, maximum, log2_sum):
    """log2 of a token's probabilities in a block of tiles, at least FLOOR, and z - maximum, [TILES, VOCAB_TILE]."""
    if model.largest is None:
        below = tl.load(source + within, mask=v < V, other=float("-inf")).to(tl.float32) - maximum
        x = below * scale - log2_sum
    else:
        mine = j < tiles
        x = tl.load(source + within, mask=mine[:, None], other=0.0).to(tl.float32)
        top = tl.load(model.largest + i.to(tl.int64) * tiles + j, mask=mine, other=LOWEST) - maximum
        below = x + top[:, None]
        x = x * scale + (top * scale - log2_sum)[:, None]
    return tl.maximum(x, FLOOR, propagate_nan=tl.PropagateNan.ALL), below


@triton.jit
def groups(x):
    """[TILES, VOCAB_TILE] as groups of neighbours, one sum of which takes fewer registers."""
    return tl.reshape(x, (x.shape[0] * x.shape[1] // GROUP_OF, GROUP_OF))


@triton.jit
def _sums_of_tiles(model, i, tiles, inverse_temperature, HARD: tl.constexpr):
    """Of one token: its largest logit, the sum of exponentials at the temperature, and, but for the label, at 1."""
    lane = tl.arange(0, 256)
    row = i.to(tl.int64) * tiles
    top = tl.full((256,), LOWEST, tl.float32)
    for start in range(0, tiles, 256):
        j = start + lane
        top = tl.maximum(top, tl.load(model.largest + row + j, mask=j < tiles, other=LOWEST))
    maximum = tl.max(top, 0)
    soft = tl.zeros((256,), tl.float32)
    hard = tl.zeros((256,), tl.float32)
    for start in range(0, tiles, 256):
        j = start + lane
        drop = tl.load(model.largest + row + j, mask=j < tiles, other=LOWEST) - maximum
        decay = tl.exp2(drop * (inverse_temperature * LOG2E))
        soft += tl.load(model.total + row + j, mask=j < tiles, other=0.0) * decay
        if HARD:
            hard += tl.load(model.others + row + j, mask=j < tiles, other=0.0) * tl.exp2(drop * LOG2E)
    return maximum, tl.sum(soft, 0), tl.sum(hard, 0)


@triton.jit
def _sums_of_logits(model, token, V, y, tiles, inverse_temperature, HARD: tl.constexpr, TILES: tl.constexpr):
    """The same of logits that exist, in one reading: each group has a maximum of its own."""
    c = tl.arange(0, VOCAB_TILE)
    scale = inverse_temperature * LOG2E
    top = tl.full((TILES * VOCAB_TILE // GROUP_OF,), LOWEST, tl.float32)
    soft = tl.zeros((TILES * VOCAB_TILE // GROUP_OF,), tl.float32)
    hard = tl.zeros((TILES * VOCAB_TILE // GROUP_OF,), tl.float32)
    row = model.numbers + token.to(tl.int64) * model.stride
    for start in range(0, tiles, TILES):
        v = (start + tl.arange(0, TILES))[:, None] * VOCAB_TILE + c[None, :]
        z = groups(tl.load(row + v, mask=v < V, other=float("-inf")).to(tl.float32))
        new = tl.maximum(top, tl.max(z, 1))
        drop = top - new
        z -= new[:, None]
        soft = soft * tl.exp2(drop * scale) + tl.sum(tl.exp2(z * scale), 1)
        if HARD:
            e = tl.where(groups(v) == y, 0.0, tl.exp2(z * LOG2E))
            hard = hard * tl.exp2(drop * LOG2E) + tl.sum(e, 1)
        top = new
    maximum = tl.max(top, 0)
    drop = top - maximum
    soft *= tl.exp2(drop * scale)
    hard *= tl.exp2(drop * LOG2E)
    return maximum, tl.sum(soft, 0), tl.sum(hard, 0)


@triton.jit
def sums(model, i, token, V, y, tiles, inverse_temperature, HARD: tl.constexpr, TILES: tl.constexpr):
    if model.largest is None:
        maximum, soft, hard = _sums_of_logits(model, token, V, y, tiles, inverse_temperature, HARD, TILES)
    else:
        maximum, soft, hard = _sums_of_tiles(model, i, tiles, inverse_temperature, HARD)
    return maximum, tl.log2(soft), hard


@triton.jit
def inverse_scale(bound):
    """The inverse of the power of two that takes `bound` to below 2^14: float16's range is short."""
    return tl.exp2(tl.floor(tl.log2(tl.maximum(bound, 1e-30))) - 13)


@triton.jit
def store_gradient(gradient, into, g, j, v, tiles, V):
    tl.store(into, g.to(gradient.out.dtype.element_ty), mask=v < V if gradient.buffer is None else (j < tiles)[:, None])
