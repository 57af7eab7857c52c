"""The Triton kernels of grouped_matmul: the plan of tiles, the products, and work that goes row by row.

Rows are sorted by group.  A *tile* is up to BLOCK_M rows of one group, and begins a multiple of BLOCK_M rows after the
group's first row: so no tile has rows of two groups, and the last tile of a group may be short.  `plan_tiles` finds
them from the sizes, on the device; the host knows only how many there can be.  The idea is that of megablox, the
grouped product of MegaBlocks, except that there tiles lie on a fixed grid, and each group that has rows in a tile
visits it.

A plan is int32: [tiles, rows of all groups, NaN's bits or 0, first wrong group or G], the groups' first rows and the
end of the last, [G + 1], their first tiles in the same way, and for each tile its group, first row and its group's end;
all 0 for tiles beyond those that exist.  The first group whose size is wrong has all rows that are left, and groups
after it have none, so that nothing is out of bounds; NaN is added to all that is stored for these groups (`poison`),
and to all results if an index is out of range.

A block of a group's rows is read and written through a descriptor that ends where the group does (`load_rows`): the
hardware then reads 0 past it, whatever is there, and writes nothing.  Two more dimensions, in front of the matrix's
own, do that: their strides cancel, modulo 2**64, what the third one's index is too large by.  The trick is that of
Triton's `triton.tools.ragged_tma`.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.fp8.triton_kernels import load_operand
from onchip.kernels.triton.tiles import halves, place_tile

HEAD = tl.constexpr(4)  # numbers of a plan before the groups'
TILE_ROWS = tl.constexpr(128)  # of a plan's tile
NAN_BITS = tl.constexpr(0x7FC00000)
# A descriptor counts rows up to here.
LAST = tl.constexpr(1 << 30)
# Where gate and up are in a product's columns: there is no gate; all of gate comes first; or they take turns.
PLAIN, CONCATENATED, INTERLEAVED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


# ------------------------------------------------------------------------------------------------------------- the plan


@triton.jit(do_not_specialize=["T", "TILES"])
def plan_tiles(
    groups,  # [G] sizes, or OFFSETS: where each group ends
    plan,  # int32 out
    T,
    G,
    TILES,  # the most that there can be
    OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Find the tiles.  Each program looks at all groups, and writes BLOCK_TILES of the tiles."""
    g = tl.arange(0, BLOCK_G)
    size = tl.load(groups + g, mask=g < G, other=0).to(tl.int64)
    if OFFSETS:
        before = tl.load(groups + g - 1, mask=(g > 0) & (g < G), other=0).to(tl.int64)
        size = tl.where(g < G, size - before, 0)
    # What can't be right counts as more than there is: the groups up to there are as they are, the others end at T.
    size = tl.where((size < 0) | (size > T), T + 1, size)
    total = tl.cumsum(size, 0)
    start = tl.minimum(total - size, T).to(tl.int32)
    end = tl.minimum(total, T).to(tl.int32)
    tiles = tl.cdiv(end - start, BLOCK_M)
    tiles_end = tl.cumsum(tiles, 0)
    tiles_start = tiles_end - tiles
    if tl.program_id(0) == 0:
        tl.store(plan, tl.sum(tiles, 0))
        tl.store(plan + 1, tl.max(end, 0))
        tl.store(plan + 2, 0)
        tl.store(plan + 3, tl.min(tl.where(total > T, g, G), 0))
        tl.store(plan + HEAD + g, start, mask=g < G)
        tl.store(plan + HEAD + G, tl.max(end, 0))
        tl.store(plan + HEAD + G + 1 + g, tiles_start, mask=g < G)
        tl.store(plan + HEAD + 2 * G + 1, tl.sum(tiles, 0))
    tile = tl.program_id(0) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
    mine = (tiles_start[None, :] <= tile[:, None]) & (tile[:, None] < tiles_end[None, :])
    first = start[None, :] + (tile[:, None] - tiles_start[None, :]) * BLOCK_M
    at = tile_of(plan, G, tile)
    there = tile < TILES
    tl.store(at, tl.sum(tl.where(mine, g[None, :], 0), 1), mask=there)
    tl.store(at + 1, tl.sum(tl.where(mine, first, 0), 1), mask=there)
    tl.store(at + 2, tl.sum(tl.where(mine, end[None, :], 0), 1), mask=there)


@triton.jit
def tile_of(plan, G, i):
    """Where a tile's three numbers are."""
    return plan + HEAD + 2 * (G + 1) + 3 * i


@triton.jit(do_not_specialize=["T", "limit"])
def check_indices(
    indices,  # [T]
    plan,  # where one is out of range, what is added to all results becomes NaN
    checked,  # [T] int32 out: `limit` past the last right group and for what is out of range
    T,
    limit,
    BLOCK: tl.constexpr,
):
    """Indices that are in [0, limit) wherever rows are those of a group that is right."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + i, mask=i < T, other=0).to(tl.int64)
    mine = i < tl.load(plan + HEAD + tl.load(plan + 3))
    outside = (index < 0) | (index >= limit)
    tl.store(checked + i, tl.where(mine, tl.where(outside, limit, index), limit).to(tl.int32), mask=i < T)
    if tl.sum((mine & outside).to(tl.int32), 0) > 0:
        tl.store(plan + 2, NAN_BITS)


@triton.jit
def poison(plan, wrong):
    """What is added to a result: NaN where it is `wrong`, or if an index was out of range; else 0."""
    return tl.where(wrong, NAN_BITS, tl.load(plan + 2)).to(tl.float32, bitcast=True)


@triton.jit
def poison_of_group(plan, g):
    """NaN from the first group on whose size can't be right."""
    return poison(plan, g >= tl.load(plan + 3))


# ------------------------------------------------------------------------------------------------------ blocks of rows


@triton.jit
def rows_of(index, first, end, limit, R: tl.constexpr):
    """Of R rows of a group from `first` on, the rows of the matrix that pointers read, and whether they are there.

    Without `index`, row i is row i, else index[i], where that is below `limit`.
    """
    r = first + tl.arange(0, R)
    inside = r < end
    if index is not None:
        r = tl.load(index + r, mask=inside, other=0)
        inside = inside & (r < limit)
    return r, inside


@triton.jit
def load_rows(
    x, stride, r, inside, first, end, column, columns,
    R: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The block [R, C] of x whose rows are those of a group from `first` on, 0 past its end and past the columns.

    Without a descriptor, `r` and `inside` are what `rows_of` gives.
    """
    if TMA:
        return tl.reshape(x.load([LAST, end, LAST - (end - first), column]), (R, C))
    else:  # noqa: RET505 - without it, Triton compiles what follows for a descriptor too
        c = column + tl.arange(0, C)
        at = x + r.to(tl.int64)[:, None] * stride + c[None, :]
        return tl.load(at, mask=inside[:, None] & (c < columns)[None, :], other=0.0)


@triton.jit
def store_rows(
    into, stride, first, end, column, columns, value,
    R: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Store a block [R, C] of float32 in rows of a group from `first` on: nothing past its end or past the columns.

    It leaves in PARTS pieces, so that little shared memory holds one.
    """
    if PARTS > 1:
        left, right = halves(value, R, C)
        store_rows(into, stride, first, end, column, columns, left, R, C // 2, PARTS // 2, TMA)
        store_rows(into, stride, first, end, column + C // 2, columns, right, R, C // 2, PARTS // 2, TMA)
    elif TMA:
        block = tl.reshape(value.to(into.dtype), (1, 1, R, C))
        into.store([LAST, end, LAST - (end - first), column], block)
    else:
        r = first + tl.arange(0, R)
        c = column + tl.arange(0, C)
        at = into + r.to(tl.int64)[:, None] * stride + c[None, :]
        tl.store(at, value.to(into.dtype.element_ty), mask=(r < end)[:, None] & (c < columns)[None, :])


@triton.jit
def load_weight(
    weight, strides, g, n, k, N, K,
    R: tl.constexpr, C: tl.constexpr, TURNED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The block [R, C] at (n, k) of a group's weight [N, K], 0 past K.  TURNED: the descriptor is of [G, K, N]."""
    if TMA:
        if TURNED:
            return tl.reshape(weight.load([g, k, n]), (C, R)).T
        else:  # noqa: RET505
            return tl.reshape(weight.load([g, n, k]), (R, C))
    else:
        i = n + tl.arange(0, R)
        j = k + tl.arange(0, C)
        at = weight + g.to(tl.int64) * strides[0]
        at = at + i.to(tl.int64)[:, None] * strides[1] + j.to(tl.int64)[None, :] * strides[2]
        return tl.load(at, mask=(i < N)[:, None] & (j < K)[None, :], other=0.0)


# --------------------------------------------------------------------------------------------------------- the products


@triton.jit
def add_bias(acc, bias, g, n, N, limit):
    """With the group's bias for the columns n, of which those below `limit` matter."""
    if bias is None:
        return acc
    else:  # noqa: RET505
        b = tl.load(bias + g.to(tl.int64) * N + n, mask=n < limit, other=0.0).to(tl.float32)
        return acc + b[None, :]


@triton.jit
def load_x(
    x, stride, r, inside, first, end, i, k, K, rows,
    R: tl.constexpr, C: tl.constexpr, FP8: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Step k of tile i's rows.  What is quantised has TILE_ROWS rows for each tile of the plan, `rows` in all."""
    if FP8:
        return load_operand(x, stride, i * R, k, rows, R, TMA)
    else:  # noqa: RET505
        return load_rows(x, stride, r, inside, first, end, k * C, K, R, C, TMA)


@triton.jit
def add_product(
    acc, a, b, x_scales, rows, scales, strides, i, g, n, k, N,
    R: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + a @ b.T, of tile i and a block of a group's weight at (n, step k); in FP8 the product is scaled first."""
    if x_scales is None:
        return tl.dot(a, b.T, acc, input_precision=PRECISION)
    else:  # noqa: RET505
        scale = tl.load(x_scales + tl.cast(k, tl.int64) * rows + i * R + tl.arange(0, R))
        of_block = tl.cast(g, tl.int64) * strides[0] + n // C * strides[1] + k * strides[2]
        scale = scale * tl.load(scales + of_block, mask=n < N, other=0.0)
        return acc + tl.dot(a, b.T) * scale[:, None]


@triton.jit
def swiglu(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def store_interleaved(
    out, stride, first, end, column, columns, acc, scale,
    R: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Store silu(gate) * up * scale of acc [R, C], whose columns are gate and up by turns."""
    if PARTS > 1:
        left, right = halves(acc, R, C)
        store_interleaved(out, stride, first, end, column, columns, left, scale, R, C // 2, PARTS // 2, TMA)
        store_interleaved(out, stride, first, end, column + C // 4, columns, right, scale, R, C // 2, PARTS // 2, TMA)
    else:
        gate, up = tl.split(tl.reshape(acc, (R, C // 2, 2)))
        store_rows(out, stride, first, end, column, columns, swiglu(gate, up) * scale, R, C // 2, 1, TMA)


@triton.jit(do_not_specialize=["x_rows", "limit", "T"])
def grouped_product(
    x,  # [T, K], or its rows that `index` names; in FP8 [x_rows, K], TILE_ROWS rows for each tile of the plan
    weight,  # [G, N, K]
    x_scales,  # [K / 128, x_rows] float32, of FP8 numbers; BLOCK_K is 128
    weight_scales,  # [G, N / 128, K / 128] float32
    bias,  # [G, N]
    row_scale,  # [T]
    index,  # [T] int32: below `limit`
    out,  # [T, N] out; with an activation [T, N / 2]
    product,  # [T, N] out: before activation and scale
    plan,
    x_stride,
    x_rows,
    weight_strides,  # of G, N and K
    scale_strides,  # of weight_scales
    out_stride,
    product_stride,
    limit,
    T,
    G,
    N,
    K,
    GATED: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA_X: tl.constexpr,
    TMA_WEIGHT: tl.constexpr,
    TMA_OUT: tl.constexpr,
    TMA_PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x @ weight.T of each tile's group, and what follows it in float32; rows past the last group become 0.

    A tile of the plan may be several of BLOCK_M rows, of which the last ones may be past the group's end.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    FP8: tl.constexpr = x_scales is not None
    half = N // 2
    PARTS_M: tl.constexpr = TILE_ROWS // BLOCK_M
    tiles_m = tl.load(plan) * PARTS_M
    total = tl.load(plan + 1)
    # Of CONCATENATED, a tile has HALF columns of gate and the HALF of up that belong to them.
    tiles_n = tl.cdiv(half, HALF) if GATED == CONCATENATED else tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        i, j = place_tile(tile, tiles_m, tiles_n, GROUP)
        at = tile_of(plan, G, i // PARTS_M)
        g = tl.load(at)
        first = tl.load(at + 1) + i % PARTS_M * BLOCK_M
        end = tl.load(at + 2)
        nan = poison_of_group(plan, g)
        r, inside = rows_of(index, first, end, limit, BLOCK_M)
        if GATED == CONCATENATED:
            column = j * HALF
            gate = tl.zeros((BLOCK_M, HALF), tl.float32)
            up = tl.zeros((BLOCK_M, HALF), tl.float32)
            for k in range(steps):
                a = load_x(x, x_stride, r, inside, first, end, i, k, K, x_rows, BLOCK_M, BLOCK_K, FP8, TMA_X)
                d = k * BLOCK_K
                b = load_weight(weight, weight_strides, g, column, d, N, K, HALF, BLOCK_K, TURNED, TMA_WEIGHT)
                c = load_weight(weight, weight_strides, g, half + column, d, N, K, HALF, BLOCK_K, TURNED, TMA_WEIGHT)
                gate = add_product(
                    gate, a, b, x_scales, x_rows, weight_scales, scale_strides, i, g, column, k, N,
                    BLOCK_M, BLOCK_K, PRECISION,
                )  # fmt: skip
                up = add_product(
                    up, a, c, x_scales, x_rows, weight_scales, scale_strides, i, g, half + column, k, N,
                    BLOCK_M, BLOCK_K, PRECISION,
                )  # fmt: skip
            n = column + tl.arange(0, HALF)
            gate = add_bias(gate, bias, g, n, N, half) + nan
            up = add_bias(up, bias, g, half + n, N, N)
            if product is not None:
                # Of a last tile that is not whole, the columns of gate end before up's begin.
                store_rows(product, product_stride, first, end, column, half, gate, BLOCK_M, HALF, 1, TMA_PRODUCT)
                store_rows(product, product_stride, first, end, half + column, N, up, BLOCK_M, HALF, 1, TMA_PRODUCT)
        else:
            column = j * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in range(steps):
                a = load_x(x, x_stride, r, inside, first, end, i, k, K, x_rows, BLOCK_M, BLOCK_K, FP8, TMA_X)
                d = k * BLOCK_K
                b = load_weight(weight, weight_strides, g, column, d, N, K, BLOCK_N, BLOCK_K, TURNED, TMA_WEIGHT)
                acc = add_product(
                    acc, a, b, x_scales, x_rows, weight_scales, scale_strides, i, g, column, k, N,
                    BLOCK_M, BLOCK_K, PRECISION,
                )  # fmt: skip
            acc = add_bias(acc, bias, g, column + tl.arange(0, BLOCK_N), N, N) + nan
            if product is not None:
                store_rows(product, product_stride, first, end, column, N, acc, BLOCK_M, BLOCK_N, PARTS, TMA_PRODUCT)

        scale = 1.0
        if row_scale is not None:
            t = first + tl.arange(0, BLOCK_M)
            scale = tl.load(row_scale + t, mask=t < end, other=0.0).to(tl.float32)[:, None]
        if GATED == PLAIN:
            store_rows(out, out_stride, first, end, column, N, acc * scale, BLOCK_M, BLOCK_N, PARTS, TMA_OUT)
        elif GATED == CONCATENATED:
            a = swiglu(gate, up) * scale
            store_rows(out, out_stride, first, end, column, half, a, BLOCK_M, HALF, 1, TMA_OUT)
        else:
            to = j * HALF
            store_interleaved(out, out_stride, first, end, to, half, acc, scale, BLOCK_M, BLOCK_N, PARTS, TMA_OUT)

    columns = N if GATED == PLAIN else half
    WIDTH: tl.constexpr = HALF if GATED == CONCATENATED else (BLOCK_N if GATED == PLAIN else HALF) // PARTS
    tiles_c = tl.cdiv(columns, WIDTH)
    zeros = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(T - total, BLOCK_M) * tiles_c, PROGRAMS):
        first = total + tile // tiles_c * BLOCK_M
        store_rows(out, out_stride, first, T, tile % tiles_c * WIDTH, columns, zeros, BLOCK_M, WIDTH, 1, TMA_OUT)


@triton.jit(do_not_specialize=["limit"])
def grouped_weight_gradient(
    a,  # [T, A], or its rows that `a_index` names
    b,  # [T, B]
    a_index,  # [T] int32: below `limit`
    b_index,
    out,  # [G, A, B] out, or added to
    plan,
    a_stride,
    b_stride,
    limit,
    G,
    A,
    B,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a and b in a step
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_B: tl.constexpr,
    TMA_OUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """a.T @ b over each group's rows: 0 for a group without any.  A program for each tile.

    Groups take different times: programs that begin as others end level that out, as a loop over tiles would not.
    """
    tiles_a = tl.cdiv(A, BLOCK_A)
    tiles_b = tl.cdiv(B, BLOCK_B)
    g = tl.program_id(0) // (tiles_a * tiles_b)
    i, j = place_tile(tl.program_id(0) % (tiles_a * tiles_b), tiles_a, tiles_b, GROUP)
    start = tl.load(plan + HEAD + g)
    end = tl.load(plan + HEAD + g + 1)
    acc = tl.zeros((BLOCK_A, BLOCK_B), tl.float32)
    for first in range(start, end, BLOCK_M):
        r, inside = rows_of(a_index, first, end, limit, BLOCK_M)
        u = load_rows(a, a_stride, r, inside, first, end, i * BLOCK_A, A, BLOCK_M, BLOCK_A, TMA_A)
        r, inside = rows_of(b_index, first, end, limit, BLOCK_M)
        v = load_rows(b, b_stride, r, inside, first, end, j * BLOCK_B, B, BLOCK_M, BLOCK_B, TMA_B)
        acc = tl.dot(u.T, v, acc, input_precision=PRECISION)
    acc += poison_of_group(plan, g)
    store_gradient(out, g, i * BLOCK_A, j * BLOCK_B, A, B, acc, BLOCK_A, BLOCK_B, ADD, PARTS, TMA_OUT)


@triton.jit(do_not_specialize=["rows"])
def scaled_weight_gradient(
    a,  # [A, rows] FP8: TILE_ROWS columns for each tile of the plan
    b,  # [B, rows]
    a_scales,  # [rows / 128, A] float32
    b_scales,  # [rows / 128, B]
    out,  # [G, A, B] out, or added to
    plan,
    rows,
    G,
    A,
    B,
    ADD: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
    TMA_OUT: tl.constexpr,
):
    """a @ b.T over the tiles of each group, as `grouped_weight_gradient`; a tile's product is scaled before it is
    added."""
    tiles_a = tl.cdiv(A, BLOCK_A)
    tiles_b = tl.cdiv(B, BLOCK_B)
    g = tl.program_id(0) // (tiles_a * tiles_b)
    i, j = place_tile(tl.program_id(0) % (tiles_a * tiles_b), tiles_a, tiles_b, GROUP)
    of_tiles = plan + HEAD + G + 1 + g
    acc = tl.zeros((BLOCK_A, BLOCK_B), tl.float32)
    for t in range(tl.load(of_tiles), tl.load(of_tiles + 1)):
        r = i * BLOCK_A + tl.arange(0, BLOCK_A)
        c = j * BLOCK_B + tl.arange(0, BLOCK_B)
        a_scale = tl.load(a_scales + tl.cast(t, tl.int64) * A + r, mask=r < A, other=0.0)
        b_scale = tl.load(b_scales + tl.cast(t, tl.int64) * B + c, mask=c < B, other=0.0)
        u = load_operand(a, rows, i * BLOCK_A, t, A, BLOCK_A, TMA)
        v = load_operand(b, rows, j * BLOCK_B, t, B, BLOCK_B, TMA)
        acc += tl.dot(u, v.T) * a_scale[:, None] * b_scale[None, :]
    acc += poison_of_group(plan, g)
    store_gradient(out, g, i * BLOCK_A, j * BLOCK_B, A, B, acc, BLOCK_A, BLOCK_B, ADD, PARTS, TMA_OUT)


@triton.jit
def store_gradient(
    out, g, row, column, A, B, value,
    R: tl.constexpr, C: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Store a block at (row, column) of a group's [A, B], or add it: no other program writes there."""
    if PARTS > 1:
        left, right = halves(value, R, C)
        store_gradient(out, g, row, column, A, B, left, R, C // 2, ADD, PARTS // 2, TMA)
        store_gradient(out, g, row, column + C // 2, A, B, right, R, C // 2, ADD, PARTS // 2, TMA)
    elif TMA:
        if ADD:
            value += tl.reshape(out.load([g, row, column]), (R, C))
        out.store([g, row, column], tl.reshape(value.to(out.dtype), (1, R, C)))
    else:
        r = row + tl.arange(0, R)
        c = column + tl.arange(0, C)
        at = out + (g.to(tl.int64) * A + r.to(tl.int64)[:, None]) * B + c[None, :]
        inside = (r < A)[:, None] & (c < B)[None, :]
        if ADD:
            value += tl.load(at, mask=inside, other=0.0)
        tl.store(at, value.to(out.dtype.element_ty), mask=inside)


# ----------------------------------------------------------------------------------------------------------- row by row


@triton.jit(do_not_specialize=["limit"])
def product_gradient(
    grad,  # [T, C], or the row of [num_rows, C] that `index` names
    product,  # [T, N]; None where there is no need of it
    row_scale,  # [T]
    index,  # [T] int32: below `limit`
    out,  # [T, N] out: the gradient of the product
    grad_scale,  # [T] out: the gradient of row_scale
    plan,
    grad_stride,
    limit,
    C,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From the gradient of a result's row those of its product and its scale.  A program for each row."""
    t = tl.program_id(0)
    row = t.to(tl.int64)
    if t < tl.load(plan + 1):
        nan = poison(plan, t >= tl.load(plan + HEAD + tl.load(plan + 3)))
        at = row
        there = True
        if index is not None:
            at = tl.load(index + t).to(tl.int64)
            there = at < limit
        scale = 1.0
        if row_scale is not None:
            scale = tl.load(row_scale + t).to(tl.float32)
        moment = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, C, BLOCK):
            c = start + tl.arange(0, BLOCK)
            inside = c < C
            d = tl.load(grad + at * grad_stride + c, mask=inside & there, other=0.0).to(tl.float32)
            if GATED == PLAIN:
                if grad_scale is not None:
                    moment += d * tl.load(product + row * C + c, mask=inside, other=0.0).to(tl.float32)
                if out is not None:
                    tl.store(out + row * C + c, (d * scale + nan).to(out.dtype.element_ty), mask=inside)
            else:
                at_gate = row * 2 * C + (c if GATED == CONCATENATED else 2 * c)
                at_up = at_gate + (C if GATED == CONCATENATED else 1)
                gate = tl.load(product + at_gate, mask=inside, other=0.0).to(tl.float32)
                up = tl.load(product + at_up, mask=inside, other=0.0).to(tl.float32)
                s = tl.sigmoid(gate)
                if grad_scale is not None:
                    moment += d * (gate * s * up)
                if out is not None:
                    d = d * scale + nan
                    tl.store(out + at_gate, (d * up * s * (1 + gate * (1 - s))).to(out.dtype.element_ty), mask=inside)
                    tl.store(out + at_up, (d * gate * s).to(out.dtype.element_ty), mask=inside)
        if grad_scale is not None:
            tl.store(grad_scale + t, (tl.sum(moment, 0) + nan).to(grad_scale.dtype.element_ty))
    elif grad_scale is not None:
        tl.store(grad_scale + t, poison(plan, False).to(grad_scale.dtype.element_ty))


@triton.jit
def bias_gradient(
    grad,  # [T, N]: of the product
    out,  # [G, N] out
    plan,
    grad_stride,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sums over each group's rows."""
    g = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(plan + HEAD + g + 1)
    total = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    for first in range(tl.load(plan + HEAD + g), end, BLOCK_M):
        r = first + tl.arange(0, BLOCK_M)
        at = grad + r.to(tl.int64)[:, None] * grad_stride + c[None, :]
        total += tl.load(at, mask=(r < end)[:, None] & (c < N)[None, :], other=0.0).to(tl.float32)
    value = tl.sum(total, 0) + poison_of_group(plan, g)
    tl.store(out + g.to(tl.int64) * N + c, value.to(out.dtype.element_ty), mask=c < N)


@triton.jit
def sum_rows(
    x,  # [T, C]
    row_scale,  # [T]
    order,  # [T] int64: the rows of x by the row of `out` that they are added to
    starts,  # [rows + 1]: where those of each row begin in `order`
    out,  # [rows, C] out
    plan,
    G,
    C,
    BLOCK: tl.constexpr,
):
    """Each row of `out` as the sum of rows of x, in their order, in float32; NaN if a group is wrong, since rows of it
    that there aren't may have been part of any."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32) + poison_of_group(plan, G - 1)
    for j in range(tl.load(starts + row), tl.load(starts + row + 1)):
        t = tl.load(order + j)
        value = tl.load(x + t * C + c, mask=c < C, other=0.0).to(tl.float32)
        if row_scale is not None:
            value = value * tl.load(row_scale + t).to(tl.float32)
        total += value
    tl.store(out + row * C + c, total.to(out.dtype.element_ty), mask=c < C)
