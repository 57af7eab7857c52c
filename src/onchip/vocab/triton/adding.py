"""The weight's gradient of a chunk of tokens, added to that of others, in Gluon, for Hopper.

Two groups of warps share a tile of 256 x 128; each has a half, and the second runs behind the first.  A third group
copies: see `onchip.kernels.triton.staggered`.  What a sum has in memory already comes by way of the ring, as one more
step for each group: loads by the groups themselves took as long as if no product had hidden them.

In a product a thread has pairs of columns, eight columns apart.  Here the columns of hidden's rows have been swapped,
so that a thread has four pairs in a row: 16 bytes to load and to store.
"""

from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-untyped]
    fence_async_shared,
    mbarrier,
)

from onchip.kernels.triton.gluon import (
    barrier,
    copy_in,
    join_floats,
    join_pairs,
    reinterpret,
    split_floats,
    split_pairs,
)
from onchip.kernels.triton.staggered import STEP, begin_copies, begin_product, end_product, new_ring
from onchip.kernels.triton.tiles import halves, place_tile
from onchip.vocab.triton.blocks import VOCAB_TILE, at_the_end, buffer_row
from onchip.vocab.triton.staggered import ROWS, STEP_BYTES

# Columns of a tile that are loaded and stored at a time.
PIECE = gl.constexpr(32)
PIECES = gl.constexpr(4)


@gluon.constexpr_function
def products_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])


@gluon.constexpr_function
def piece_layout():
    """`products_layout` for PIECE columns, with the swapped columns in their places; a thread has eight in a row."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [64, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[128, 32],
    )


@gluon.constexpr_function
def half_layout():
    """`piece_layout` for the first 64 rows; a thread has the same of the other 64."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )


@gluon.jit
def copy(
    ring, exponentials, rows, old_sum, old_digits, buffer, first_tile, tiles_v, tiles_h, steps,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the operands of this program's tiles, where there is room, then what their products are added to."""
    step = 0
    for tile in range(gl.program_id(0), tiles_v * tiles_h, PROGRAMS):
        i, j = place_tile(tile, tiles_v, tiles_h, GROUP)
        i += first_tile
        for k in range(steps):
            line = buffer_row(i, k * STEP, buffer, 0)
            come, first_entries, last_entries, common = begin_copies(ring, step, STEP_BYTES, STAGES)
            copy_in(exponentials, [line, 0], come, first_entries)
            copy_in(exponentials, [line, ROWS], come, last_entries)
            copy_in(rows, [k * STEP, j * ROWS], come, common)
            step += 1
        if old_sum is not None:
            firsts, digits = sum_blocks(ring, old_sum, old_digits, STAGES)
            SUM_BYTES: gl.constexpr = PIECES * PIECE * (2 * ROWS + old_digits.block_shape[0])
            for w in gl.static_range(2):
                s = step % STAGES
                v = i * VOCAB_TILE + w * ROWS
                come, _, _, _ = begin_copies(ring, step, SUM_BYTES, STAGES)
                for p in gl.static_range(PIECES):
                    h = j * ROWS + p * PIECE
                    copy_in(old_sum, [v, h], come, firsts.index(PIECES * s + p))
                    d = v // ROWS * old_digits.block_shape[0]
                    copy_in(old_digits, [d, h], come, digits.index(in_stage(s, digits) + p))
                step += 1


@gluon.jit
def sum_blocks(ring, old_sum, old_digits, STAGES: gl.constexpr):
    """The ring as blocks of sums, of which each stage has PIECES; the digits of two rows may share a byte."""
    own_blocks, common_blocks, _, _, _ = ring
    firsts = reinterpret(own_blocks, old_sum.dtype, [PIECES * STAGES] + old_sum.block_shape, old_sum.layout)
    number: gl.constexpr = PIECES * ROWS // old_digits.block_shape[0]
    digits = reinterpret(common_blocks, old_digits.dtype, [number * STAGES] + old_digits.block_shape, old_digits.layout)
    return firsts, digits


@gluon.jit
def in_stage(s, digits):
    """The first of a stage's blocks of digits."""
    return s * (PIECES * ROWS // digits.shape[1])


@gluon.jit
def sum_at(v, h, V, H, stride, layout: gl.constexpr, N: gl.constexpr):
    """Where N rows of PIECE columns are in the sum, and which of them are inside."""
    r = v + gl.arange(0, N, gl.SliceLayout(1, layout))
    c = h + gl.arange(0, PIECE, gl.SliceLayout(0, layout))
    return r.to(gl.int64)[:, None] * stride + c[None, :], (r < V)[:, None] & (c < H)[None, :]


@gluon.jit
def split_rows(x):
    """The upper and the lower half of a piece."""
    upper, lower = gl.split(x.reshape([2, ROWS // 2, PIECE]).permute((1, 2, 0)))
    layout: gl.constexpr = half_layout()
    return gl.convert_layout(upper, layout, assert_trivial=True), gl.convert_layout(lower, layout, assert_trivial=True)


@gluon.jit
def join_rows(upper, lower):
    x = gl.join(upper, lower).permute((2, 0, 1)).reshape([ROWS, PIECE])
    return gl.convert_layout(x, piece_layout(), assert_trivial=True)


@gluon.jit
def scale_piece(value, factor, even_sum, h, H):
    """A piece of the products' tile as it is added."""
    value = gl.convert_layout(value, piece_layout())
    if even_sum is not None:
        c = h + gl.arange(0, PIECE, gl.SliceLayout(0, piece_layout()))
        value -= gl.load(even_sum + c, mask=c < H, other=0.0)[None, :]
    return value if factor is None else value * factor


@gluon.jit
def add_piece(value, first_bits, digits):
    """A piece and that of the sum, of these blocks in shared memory."""
    first = first_bits.load(piece_layout())
    if digits.shape[0] < ROWS:
        upper, lower = split_rows(first)
        a, b = join_pairs(upper, lower, digits.load(half_layout()))
        return value + join_rows(a, b)
    else:  # noqa: RET505 - Triton would compile what follows too
        return value + join_floats(first, digits.load(piece_layout()))


@gluon.jit
def store_piece(value, factor, half, out, digits, v, h, V, H, stride, PAIRED: gl.constexpr):
    """A piece of the sum times the factor; `half` is that of `maths.split_pair`."""
    at, there = sum_at(v, h, V, H, stride, piece_layout(), ROWS)
    if factor is not None:
        value *= factor
    if PAIRED:
        upper, lower = split_rows(value)
        a, b, more = split_pairs(upper, lower, half)
        gl.store(out + at, join_rows(a, b), mask=there)
        at, there = sum_at(v // 2, h, gl.cdiv(V, ROWS) * (ROWS // 2), H, stride, half_layout(), ROWS // 2)
        gl.store(digits + at, more, mask=there)
    else:
        first, more = split_floats(value)
        gl.store(out + at, first, mask=there)
        gl.store(digits + at, more, mask=there)


@gluon.jit
def take_sums(
    ring, old_sum, old_digits, out, digits, scale, factor, following, even_sum, V, H, stride, first_tile, tiles_v,
    tiles_h, steps,
    W: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    """One group's halves of the tiles: rows of the weight from W * ROWS on."""
    zeros = gl.zeros((ROWS, ROWS), gl.float32, products_layout())
    of_product = None if scale is None else gl.load(scale)
    of_sum = None
    half = None
    if factor is not None:
        of_sum, half = at_the_end(factor, following)
    step = 0
    for tile in range(gl.program_id(0), tiles_v * tiles_h, PROGRAMS):
        i, j = place_tile(tile, tiles_v, tiles_h, GROUP)
        i += first_tile
        v = i * VOCAB_TILE + W * ROWS
        h = j * ROWS
        x = begin_product(ring, step, steps, zeros, step == 0, "km", "kn", W, STAGES)
        step += steps
        x = end_product(ring, step, x, STAGES)
        # Where rows' columns were swapped, eight that a thread has follow each other.
        x = x.reshape([ROWS, ROWS // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, ROWS])
        pieces = quarters(x)
        if old_sum is not None:
            if W == 1:
                pass_sums(ring, step, STAGES)
            added = ()
            firsts, more = sum_blocks(ring, old_sum, old_digits, STAGES)
            _, _, full, empty, _ = ring
            s = (step + W) % STAGES
            mbarrier.wait(full.index(s), ((step + W) // STAGES) & 1)
            for p in gl.static_range(PIECES):
                x = scale_piece(pieces[p], of_product, even_sum, h + p * PIECE, H)
                x = add_piece(x, firsts.index(PIECES * s + p), more.index(in_stage(s, more) + p))
                added = added + (x,)  # type: ignore[assignment]
            # A barrier doesn't wait for loads from shared memory to end, and copies overtake them: bits were lost.
            fence_async_shared()
            barrier()
            mbarrier.arrive(empty.index(s), count=1)
            for p in gl.static_range(PIECES):
                store_piece(added[p], of_sum, half, out, digits, v, h + p * PIECE, V, H, stride, PAIRED)
            if W == 0:
                pass_sums(ring, step + 1, STAGES)
            step += 2
        else:
            for p in gl.static_range(PIECES):
                x = scale_piece(pieces[p], of_product, even_sum, h + p * PIECE, H)
                store_piece(x, of_sum, half, out, digits, v, h + p * PIECE, V, H, stride, PAIRED)


@gluon.jit
def pass_sums(ring, step, STAGES: gl.constexpr):
    """Let go of the other group's sums, once they have come: before that this would count for what was there."""
    _, _, full, empty, _ = ring
    s = step % STAGES
    mbarrier.wait(full.index(s), (step // STAGES) & 1)
    mbarrier.arrive(empty.index(s), count=1)


@gluon.jit
def quarters(x):
    """x [ROWS, ROWS], by columns."""
    left, right = halves(x, ROWS, ROWS)
    a, b = halves(left, ROWS, ROWS // 2)
    c, d = halves(right, ROWS, ROWS // 2)
    return a, b, c, d


@gluon.jit(do_not_specialize=["first_tile", "chunk_tiles", "V"])
def weight_added(
    exponentials,  # [rows, VOCAB_TILE], in blocks of [STEP, ROWS]
    rows,  # [T, H], the same; columns swapped as `scale_rows` does it
    old_sum,  # [V, H] int16, in blocks of [ROWS, PIECE]: `out` as it is; None of the first chunk
    old_digits,  # the same: `digits`
    out,  # [V, H] int16: the first 16 bits of a float32: out, or added to
    digits,  # [V, H] uint8: the next 8 bits; with PAIRED [pairs of rows, H]: the next 4 of both
    number,  # [1] int32
    inverse_grad_scale,  # [] float32: what the product is multiplied by
    factor,  # [] float32: and in the end the sum, whose first 16 bits are then the nearest bfloat16
    following,  # [1] int32: tokens of the next chunk; of none, that is now
    even_sum,  # [H] float32: what each row lacks
    buffer,  # BufferRows
    first_tile,  # of the vocabulary, and how many
    chunk_tiles,
    out_stride,
    H,
    V,
    GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr,
    PAIRED: gl.constexpr,
    REGISTERS: gl.constexpr,  # threads': of both groups that multiply, and of the one that copies
    FEW_REGISTERS: gl.constexpr,
):
    """`weight_gradient` of a chunk of tokens, added to those of others.  A tile is VOCAB_TILE rows by ROWS columns."""
    count = gl.load(number)
    steps = gl.cdiv(gl.maximum(count, 1), STEP)
    if old_sum is not None:  # of no tokens there is nothing to add
        chunk_tiles = gl.where(count > 0, chunk_tiles, 0)
    tiles_h = gl.cdiv(H, ROWS)
    ring = new_ring(exponentials, rows, STAGES)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (take_sums, (ring, old_sum, old_digits, out, digits, inverse_grad_scale, factor, following, even_sum, V, H,
                         out_stride, first_tile, chunk_tiles, tiles_h, steps, FIRST, GROUP, PROGRAMS, STAGES, PAIRED)),
            (take_sums, (ring, old_sum, old_digits, out, digits, inverse_grad_scale, factor, following, even_sum, V, H,
                         out_stride, first_tile, chunk_tiles, tiles_h, steps, SECOND, GROUP, PROGRAMS, STAGES, PAIRED)),
            (copy, (ring, exponentials, rows, old_sum, old_digits, buffer, first_tile, chunk_tiles, tiles_h, steps,
                    GROUP, PROGRAMS, STAGES)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )  # fmt: skip
