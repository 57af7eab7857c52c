"""Hidden's gradient, with a warp of its own for copying, in Gluon, for Hopper.

One warp copies blocks of exponentials and of the weight while eight others multiply; programs are persistent.

A unit of work is a pair of products of 128 x 128 that share an operand: *wide* units have 128 positions and 256
columns; if H leaves 128 columns more, *tall* units have these for 256 positions.  Each step of either takes three
blocks of 16 KiB, so all units cost the same, and none computes what is beyond H rounded up to a multiple of 128.  Units
of the last wave are cut into slices of the vocabulary, as in `hidden_gradient`: into as many as leave few programs
idle.
"""

from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-untyped]
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from onchip.kernels.triton.gluon import barrier, copy_in, new_barriers, reinterpret
from onchip.vocab.triton.blocks import VOCAB_TILE, buffer_row

# A block's size along the result and along the sum.
TILE = gl.constexpr(128)
STEP = gl.constexpr(64)
STAGES = gl.constexpr(4)
# Blocks of a step: exponentials, then either the weight's for the other half of a wide unit or more exponentials, then
# the weight's.
BLOCKS = gl.constexpr(3)
STEP_BYTES = gl.constexpr(3 * 128 * 64 * 2)
# Registers of the warp that copies; the others have what it leaves.
FEW_REGISTERS = gl.constexpr(24)


@gluon.jit
def count_units(tiles_t, H):
    tiles_h = gl.cdiv(H, TILE)
    return tiles_t * (tiles_h // 2) + gl.cdiv(tiles_t, 2) * (tiles_h % 2)


@gluon.jit
def choose_cut(units, most, PROGRAMS: gl.constexpr):
    """`tiling.hidden_cut`."""
    best = 1
    least = gl.cdiv(units, PROGRAMS)
    for cut in range(2, most + 1):
        waves = gl.cdiv(units * cut, PROGRAMS)
        better = 103 * waves * best < 100 * least * cut
        best = gl.where(better, cut, best)
        least = gl.where(better, waves, least)
    return best


@gluon.jit
def find_unit(unit, tiles_t, H):
    """Whether it is wide, 1 or 0; its first tile of positions, and its first of columns.

    Two tiles of positions at a time, with all of H: so L2 serves exponentials, and the weight as far as it can.
    """
    tiles_h = gl.cdiv(H, TILE)
    odd = tiles_h % 2
    of_pair = tiles_h // 2 * 2 + odd
    pair = unit // of_pair
    within = unit % of_pair - odd
    height = gl.minimum(tiles_t - 2 * pair, 2)
    wide = gl.where(within >= 0, 1, 0)
    i = 2 * pair + gl.where(within >= 0, within % height, 0)
    j = gl.where(within >= 0, within // height * 2, tiles_h - 1)
    return wide, i, j


@gluon.jit
def place(item, work, H):
    """The unit of an item of work, as in `find_unit`; its slice, the first step of that, and the last one's end."""
    tiles_t, whole, rest, cut, steps = work
    over = gl.maximum(item - whole, 0)
    s = over // gl.maximum(rest, 1)
    unit = gl.where(item < whole, item, whole + over - s * rest)
    wide, i, j = find_unit(unit, tiles_t, H)
    return wide, i, j, s, s * steps // cut, gl.where(item < whole, steps, (s + 1) * steps // cut)


@gluon.jit
def copy(exponentials, weight, blocks, barriers, work, buffer, first, first_tile, H, PROGRAMS: gl.constexpr):
    """Copy the operands of this program's units, where there is room."""
    full, empty = barriers
    of_exponentials, of_weight = blocks
    tiles_t, whole, rest, cut, _ = work
    step = 0
    for item in range(gl.program_id(0), whole + rest * cut, PROGRAMS):
        wide, i, j, _, begin, end = place(item, work, H)
        t = first + i * TILE
        # Past the last tile there may be no memory: the last one stands for it, and nothing is made of the product.
        t_2 = first + gl.minimum(i + 1, tiles_t - 1) * TILE
        for k in range(begin, end):
            s = step % STAGES
            tile = first_tile + k // (VOCAB_TILE // STEP)
            c = k % (VOCAB_TILE // STEP) * STEP
            v = first_tile * VOCAB_TILE + k * STEP
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(s), STEP_BYTES)
            row = buffer_row(tile, t, buffer, first_tile)
            row_2 = buffer_row(tile, t_2, buffer, first_tile)
            copy_in(exponentials, [row, c], full.index(s), of_exponentials.index(BLOCKS * s))
            copy_in(exponentials, [row_2, c], full.index(s), of_exponentials.index(BLOCKS * s + 1), pred=wide == 0)
            copy_in(weight, [v, j * TILE], full.index(s), of_weight.index(BLOCKS * s + 1), pred=wide == 1)
            copy_in(weight, [v, (j + wide) * TILE], full.index(s), of_weight.index(BLOCKS * s + 2))
            step += 1


@gluon.constexpr_function
def products_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 128, 16])


@gluon.jit
def next_step(blocks, barriers, wide, step, acc, acc_2, use_acc: gl.constexpr):
    """Both accumulators + a step of their products, once its blocks have come."""
    full, _ = barriers
    of_exponentials, of_weight = blocks
    s = step % STAGES
    mbarrier.wait(full.index(s), (step // STAGES) & 1)
    at = BLOCKS * s
    acc = warpgroup_mma(of_exponentials.index(at), of_weight.index(at + 2 - wide), acc, use_acc=use_acc, is_async=True)
    acc_2 = warpgroup_mma(
        of_exponentials.index(at + 1 - wide), of_weight.index(at + 2), acc_2, use_acc=use_acc, is_async=True
    )
    return acc, acc_2


@gluon.jit
def multiply(blocks, barriers, wide, first, steps, zeros):
    """Both products of so many steps, from number `first` on.

    The first step is apart from the loop, or ptxas would wait for each step before the next.
    """
    _, empty = barriers
    acc, acc_2 = next_step(blocks, barriers, wide, first, zeros, zeros, False)
    for k in range(1, steps):
        step = first + k
        acc, acc_2 = next_step(blocks, barriers, wide, step, acc, acc_2, True)
        acc, acc_2 = warpgroup_mma_wait(num_outstanding=2, deps=(acc, acc_2))
        acc, acc_2 = warpgroup_mma_init(acc), warpgroup_mma_init(acc_2)
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    acc, acc_2 = warpgroup_mma_wait(num_outstanding=0, deps=(acc, acc_2))
    mbarrier.arrive(empty.index((first + steps - 1) % STAGES), count=1)
    return acc, acc_2


@gluon.jit
def add(value, out, product_scale, scaled, t, n, row, h, H, stride):
    """Add a product of the positions from t on to what is at (row, h)."""
    layout: gl.constexpr = value.type.layout
    r = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    c = h + gl.arange(0, TILE, gl.SliceLayout(0, layout))
    scale = gl.load(product_scale + t + r, mask=t + r < n, other=0.0)
    value *= gl.where(scaled != 0, scale, 1.0)[:, None]
    at = out + (row + r).to(gl.int64)[:, None] * stride + c[None, :]
    gl.atomic_add(at, value, mask=(t + r < n)[:, None] & (c < H)[None, :], sem="relaxed")


@gluon.jit
def take_units(
    blocks, barriers, work, out, product_scale, scaled, n, first, slice_rows, H, stride, PROGRAMS: gl.constexpr
):
    """The products of this program's units."""
    zeros = gl.zeros((TILE, TILE), gl.float32, products_layout())
    _, whole, rest, cut, _ = work
    done = 0
    for item in range(gl.program_id(0), whole + rest * cut, PROGRAMS):
        wide, i, j, s, begin, end = place(item, work, H)
        acc, acc_2 = multiply(blocks, barriers, wide, done, end - begin, zeros)
        done += end - begin
        row = i * TILE + s * slice_rows
        down, right = (1 - wide) * TILE, wide * TILE
        add(acc, out, product_scale, scaled, first + i * TILE, n, row, j * TILE, H, stride)
        add(acc_2, out, product_scale, scaled, first + i * TILE + down, n, row + down, j * TILE + right, H, stride)


@gluon.jit(do_not_specialize=["scaled", "first", "last", "slice_rows", "slices", "first_tile", "chunk_tiles"])
def hidden_apart(
    exponentials,  # [rows, VOCAB_TILE] in blocks of [TILE, STEP]
    weight,  # [V, H], in such of [STEP, TILE]
    out,  # [.., H] float32, added to
    number,  # [1] int32
    product_scale,  # [T] float32: what each row of the product is multiplied by, if it is `scaled`
    scaled,
    first,
    last,
    slice_rows,
    slices,
    first_tile,
    chunk_tiles,
    buffer,  # BufferRows
    out_stride,
    H,
    PROGRAMS: gl.constexpr,
):
    """`hidden_gradient`; units of the last wave are cut into up to `slices`."""
    n = gl.minimum(gl.load(number), last)
    tiles_t = gl.cdiv(gl.maximum(n - first, 0), TILE)
    units = count_units(tiles_t, H)
    steps = chunk_tiles * (VOCAB_TILE // STEP)
    rest = units % PROGRAMS
    work = (tiles_t, units - rest, rest, choose_cut(units, gl.minimum(steps, slices), PROGRAMS), steps)
    of_exponentials = gl.allocate_shared_memory(
        exponentials.dtype, [BLOCKS * STAGES] + exponentials.block_shape, exponentials.layout
    )
    of_weight = reinterpret(of_exponentials, weight.dtype, [BLOCKS * STAGES] + weight.block_shape, weight.layout)
    blocks = (of_exponentials, of_weight)
    barriers = new_barriers(STAGES)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (take_units, (blocks, barriers, work, out, product_scale, scaled, n, first, slice_rows, H, out_stride,
                          PROGRAMS)),
            (copy, (exponentials, weight, blocks, barriers, work, buffer, first, first_tile, H, PROGRAMS)),
        ],
        [1],
        [FEW_REGISTERS],
    )  # fmt: skip
