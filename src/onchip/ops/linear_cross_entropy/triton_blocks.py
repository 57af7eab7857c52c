"""What the Triton kernels of linear_cross_entropy share; the kernels are in triton_softmax.py and triton_gradients.py.

Sizes: T tokens, H hidden, V vocab.  Tokens that are not ignored are compacted to the front: `count` of them, known to
the device alone; a *position* is an index among those.  Every kernel works through `count` and skips the rest, so
nothing waits for the host.  VOCAB_TILE columns of logits of one block of positions make a tile; per tile and position
the forward kernel stores the maximum and the sum of exponentials, [tiles, T], and on request the exponentials.

Exponentials are matrices of VOCAB_TILE columns with a row for each tile and position, in up to three places
(`exponential_row`): the memory of the weight's gradient, scratch, and, computed again in backward, a buffer for one
chunk of the vocabulary.  One descriptor spans all three: rows are counted from the lowest of their addresses.

What is kept is exp(z - shift), with a shift of each token that is known beforehand, its target's logit plus 30.  16-bit
floats with 8 bits of exponent hold that exactly as well as any, unless a logit is more than 90 above the target's;
`settle_exponentials` mends such tokens, and costs nothing where there are none.  So the gradients are plain products of
what is kept: the factor exp(shift - lse) of each token goes into the rows of hidden (for the weight's gradient) and
into the result's rows (for hidden's).

A target's entry, p - 1, is the largest of its row by far, and would carry the roundings of the exponential and of the
scaled row into both gradients.  So where exponentials are kept it is left out of the products, and added to their
results from the weight's and hidden's own rows: in float32, the tokens of each vocabulary entry together.

Matrix operands come through TMA descriptors where `TMA` (Hopper, rows of a multiple of 16 bytes), else by pointers.
The persistent loop over tiles with its flattened product is that of Triton's matrix multiplication tutorial.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.ops._shared.triton_maths import tanh

VOCAB_TILE = tl.constexpr(256)
# Logits up to so much above a token's shift are stored relative to it.
REACH = tl.constexpr(60.0)
# What stands for the target of a position that has none, where targets are sorted.
NO_LABEL = tl.constexpr(2**31 - 1)
# Triton's interpreter has no reduction through a descriptor.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def load_block(x, stride, row, column, rows, columns, R: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """The block [R, C] at (row, column) of a [rows, columns] matrix, 0 outside of it."""
    if TMA:
        return x.load([row, column])
    else:  # noqa: RET505 - without it, Triton compiles what follows for a descriptor too
        r = row + tl.arange(0, R)
        c = column + tl.arange(0, C)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        return tl.load(x + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0)


@triton.jit
def store_block(x, stride, row, column, rows, columns, value, R: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """Store a block [R, C] at (row, column) of a [rows, columns] matrix, and nothing outside of it."""
    if TMA:
        x.store([row, column], value)
    else:
        r = row + tl.arange(0, R)
        c = column + tl.arange(0, C)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        tl.store(x + r.to(tl.int64)[:, None] * stride + c[None, :], value, mask=inside)


@triton.jit
def place_tile(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile: up to GROUP rows of tiles at a time, column by column, so that L2 serves the operands.

    The groups are even: of 17 rows as 16 and 1, the last took as long as reading all of the weight for one row does.
    """
    size = tl.cdiv(tiles_m, tl.cdiv(tiles_m, GROUP))
    per_group = size * tiles_n
    first = (tile // per_group) * size
    height = min(tiles_m - first, size)
    within = tile % per_group
    return first + within % height, within // height


@triton.jit
def exponential_row(
    j, t, stash, stash_stride, stash_tokens, overflow, overflow_tokens, again, again_tokens, first_tile
):
    """Row of tile j's exponentials of the positions from t on, a multiple of the blocks that they are handled in.

    The first `stash_tokens` positions live in the weight gradient's memory, the next `overflow_tokens` in scratch, and
    the rest, for the tiles from `first_tile` on, in the buffer for what is computed again.
    """
    in_stash = stash + j * stash_stride + t
    in_overflow = overflow + j * overflow_tokens + t - stash_tokens
    in_again = again + (j - first_tile) * again_tokens + t - stash_tokens - overflow_tokens
    kept = tl.where(t < stash_tokens, in_stash, in_overflow)
    return tl.where(t < stash_tokens + overflow_tokens, kept, in_again)


@triton.jit
def halves(x, M: tl.constexpr, N: tl.constexpr):
    """The left and the right half of x [M, N]."""
    return tl.split(tl.permute(tl.reshape(x, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def store_columns(
    into, stride, row, column, rows, columns, value,
    R: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    if PARTS == 1:
        store_block(into, stride, row, column, rows, columns, value, R, C, TMA)
    else:
        left, right = halves(value, R, C)
        store_columns(into, stride, row, column, rows, columns, left, R, C // 2, PARTS // 2, TMA)
        store_columns(into, stride, row, column + C // 2, rows, columns, right, R, C // 2, PARTS // 2, TMA)


@triton.jit
def add_columns(
    into,
    stride,
    row,
    column,
    rows,
    columns,
    value,
    R: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Add value [R, C] to what is there, in one atomic addition per element."""
    if PARTS > 1:
        left, right = halves(value, R, C)
        add_columns(into, stride, row, column, rows, columns, left, R, C // 2, PARTS // 2, TMA)
        add_columns(into, stride, row, column + C // 2, rows, columns, right, R, C // 2, PARTS // 2, TMA)
    elif TMA and INTERPRETED:
        into.store([row, column], into.load([row, column]) + value)
    elif TMA:
        into.atomic_add([row, column], value)
    else:
        r = row + tl.arange(0, R)
        c = column + tl.arange(0, C)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        tl.atomic_add(into + r.to(tl.int64)[:, None] * stride + c[None, :], value, mask=inside, sem="relaxed")


@triton.jit
def unscaled_logits(product, bias, v, inner_scale, V, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """The logits up to a factor of each token: x with z = x * factor."""
    x = product
    if BIAS:
        x += tl.load(bias + v, mask=v < V, other=0.0)[None, :]
    if SOFTCAP:
        x = tanh(x * inner_scale)
    return x
