"""Blocks of matrices in Triton kernels: loading, storing and adding to them, and the order of a product's tiles.

Matrices come through TMA descriptors where `TMA` (Hopper, rows of a multiple of 16 bytes), else by pointers.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import join_float, join_pair, split_float, split_pair

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
def place_tile(tile, tiles_m, tiles_n, group):
    """Row and column of a tile: so many rows of tiles at a time, column by column, so that L2 serves the operands.

    The groups are even: of 17 rows as 16 and 1, the last took as long as reading all of the weight for one row does.
    """
    size = tl.cdiv(tiles_m, tl.cdiv(tiles_m, group))
    per_group = size * tiles_n
    first = (tile // per_group) * size
    height = min(tiles_m - first, size)
    within = tile % per_group
    return first + within % height, within // height


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


# Rows that share the bytes of their digits with as many rows after them.
PAIR_ROWS = tl.constexpr(64)


@triton.jit
def upper_row(pair):
    """Of a pair of rows, by the row of its digits."""
    return pair // PAIR_ROWS * (2 * PAIR_ROWS) + pair % PAIR_ROWS


@triton.jit
def add_digits(
    out, digits, stride, row, column, rows, columns, value, factor, half,
    R: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, ADD: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Add value [R, C] to the 24 bits of floats that are there, or store it: `maths.split_float`.

    PAIRED: to 20 bits, `maths.split_pair`, of rows PAIR_ROWS apart; R and `row` are multiples of twice as many.  With a
    `factor` the sum is multiplied by it, and `half` is that function's.
    """
    if PARTS > 1:
        left, right = halves(value, R, C)
        C_2: tl.constexpr = C // 2
        FEWER: tl.constexpr = PARTS // 2
        add_digits(out, digits, stride, row, column, rows, columns, left, factor, half, R, C_2, FEWER, ADD, PAIRED)
        column += C_2
        add_digits(out, digits, stride, row, column, rows, columns, right, factor, half, R, C_2, FEWER, ADD, PAIRED)
    elif PAIRED:
        tl.static_assert(R // (2 * PAIR_ROWS) * (2 * PAIR_ROWS) == R)
        halved: tl.constexpr = (R // (2 * PAIR_ROWS), 2, PAIR_ROWS, C)
        upper, lower = tl.split(tl.permute(tl.reshape(value, halved), (0, 2, 3, 1)))
        upper, lower = tl.reshape(upper, (R // 2, C)), tl.reshape(lower, (R // 2, C))
        pair = row // 2 + tl.arange(0, R // 2)
        r = upper_row(pair)
        c = column + tl.arange(0, C)
        inside = c < columns
        of_upper, of_lower = (r < rows)[:, None] & inside[None, :], (r + PAIR_ROWS < rows)[:, None] & inside[None, :]
        at = r.to(tl.int64)[:, None] * stride + c[None, :]
        at_digits = pair.to(tl.int64)[:, None] * stride + c[None, :]
        if ADD:
            old_upper = tl.load(out + at, mask=of_upper, other=0)
            old_lower = tl.load(out + at + PAIR_ROWS * stride, mask=of_lower, other=0)
            a, b = join_pair(old_upper, old_lower, tl.load(digits + at_digits, mask=of_upper, other=0), False)
            upper, lower = upper + a, lower + b
        if factor is not None:
            upper, lower = upper * factor, lower * factor
        first_upper, first_lower, more = split_pair(upper, lower, half)
        tl.store(out + at, first_upper, mask=of_upper)
        tl.store(out + at + PAIR_ROWS * stride, first_lower, mask=of_lower)
        tl.store(digits + at_digits, more, mask=of_upper)
    else:
        r = row + tl.arange(0, R)
        c = column + tl.arange(0, C)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        at = r.to(tl.int64)[:, None] * stride + c[None, :]
        if ADD:
            there = tl.load(digits + at, mask=inside, other=0)
            value += join_float(tl.load(out + at, mask=inside, other=0), there)
        first, more = split_float(value)
        tl.store(out + at, first, mask=inside)
        tl.store(digits + at, more, mask=inside)
