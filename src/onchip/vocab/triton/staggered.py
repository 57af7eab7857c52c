"""The products that end in a tile of exponentials, with the two halves of a tile apart in time, in Gluon, for Hopper.

A tile's end - exponentials, their sums, and 64 KiB to store - takes as long as an eighth of its product where H is
1024.  Triton's kernels do one after the other.  Here two groups of four warps have one tile of 128 x 256: each has 64
of its rows, and both multiply by the same blocks of the weight.  A third group, of a single warp, copies the blocks.
The second group begins LAG steps late and stays behind, so that one multiplies while the other ends its half, as far as
the ring of blocks reaches.

Two groups that take turns with tiles of their own (turns.py) hide all of an end, but read twice as much of L2, which
pays where H is small.
"""

from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-untyped]
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from onchip.kernels.triton.gluon import new_barriers, send
from onchip.kernels.triton.maths import LOG2E, LOWEST
from onchip.kernels.triton.tiles import place_tile
from onchip.vocab.triton.blocks import REACH, VOCAB_TILE, buffer_row

# Rows of a tile, and of a group's half of it; of a step along the sum.
ROWS = gl.constexpr(128)
HALF = gl.constexpr(64)
STEP = gl.constexpr(64)
STEP_BYTES = gl.constexpr((128 + 256) * 64 * 2)
# Steps that the second group begins later.
LAG = gl.constexpr(2)
# Threads' registers: of both groups that multiply, and of the one that copies.
REGISTERS = gl.constexpr(240)
FEW_REGISTERS = gl.constexpr(24)


@gluon.constexpr_function
def products_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])


@gluon.jit
def new_ring(rows, weight, STAGES: gl.constexpr):
    """Blocks of both operands, a barrier for each stage that it is full and that it is empty, and one of the lag."""
    row_blocks = gl.allocate_shared_memory(rows.dtype, [2 * STAGES] + rows.block_shape, rows.layout)
    weight_blocks = gl.allocate_shared_memory(weight.dtype, [STAGES] + weight.block_shape, weight.layout)
    full, empty = new_barriers(STAGES, 2)
    behind = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(behind, count=1)
    fence_async_shared()
    gl.thread_barrier()
    return row_blocks, weight_blocks, full, empty, behind


@gluon.jit
def copy(
    ring, rows, weight, first, first_tile, tiles_t, tiles_v, steps,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the operands of this program's tiles, where there is room."""
    row_blocks, weight_blocks, full, empty, _ = ring
    step = 0
    for tile in range(gl.program_id(0), tiles_t * tiles_v, PROGRAMS):
        i, j = place_tile(tile, tiles_t, tiles_v, GROUP)
        t = first + i * ROWS
        v = (first_tile + j) * VOCAB_TILE
        for k in range(steps):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(s), STEP_BYTES)
            tma.async_copy_global_to_shared(rows, [t, k * STEP], full.index(s), row_blocks.index(2 * s))
            tma.async_copy_global_to_shared(rows, [t + HALF, k * STEP], full.index(s), row_blocks.index(2 * s + 1))
            tma.async_copy_global_to_shared(weight, [v, k * STEP], full.index(s), weight_blocks.index(s))
            step += 1


@gluon.jit
def add_step(ring, step, acc, use_acc: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr):
    """acc + a step of the product, once its blocks have come; blocks of STEP rows are those of operands to be summed
    over these.
    """
    own_blocks, common_blocks, full, _, _ = ring
    s = step % STAGES
    mbarrier.wait(full.index(s), (step // STAGES) & 1)
    a, b = own_blocks.index(2 * s + W), common_blocks.index(s)
    if b.shape[0] == STEP:
        return warpgroup_mma(a.permute((1, 0)), b, acc, use_acc=use_acc, is_async=True)
    else:  # noqa: RET505
        return warpgroup_mma(a, b.permute((1, 0)), acc, use_acc=use_acc, is_async=True)


@gluon.jit
def begin_product(ring, step, steps, zeros, is_first, W: gl.constexpr, STAGES: gl.constexpr):
    """The product of a group's half of a tile, whose first step has this number: all steps but the last are done.

    The first step stands apart from the loop, or ptxas would wait for each step before the next.
    """
    _, _, _, empty, behind = ring
    if W == 1:
        if is_first:
            mbarrier.wait(behind, 0)
    acc = add_step(ring, step, zeros, False, W, STAGES)
    for k in range(1, steps):
        acc = add_step(ring, step + k, acc, True, W, STAGES)
        if W == 0:
            mbarrier.arrive(behind, count=1, pred=is_first & (k == LAG))
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        mbarrier.arrive(empty.index((step + k - 1) % STAGES), count=1)
    if W == 0:
        mbarrier.arrive(behind, count=1, pred=is_first & (steps <= LAG))
    return acc


@gluon.jit
def end_product(ring, end, acc, STAGES: gl.constexpr):
    """Wait for the last step, the one before number `end`."""
    _, _, _, empty, _ = ring
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((end - 1) % STAGES), count=1)
    return acc


# ---------------------------------------------------------------------------------------------------------- the softmax


@gluon.jit
def take_softmax(
    ring, staged, vectors, partials, exponentials, buffer, n, V, tiles_t, tiles_v, steps, scale,
    W: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, RAGGED: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """One group's halves of the tiles: rows from W * HALF on."""
    layout: gl.constexpr = products_layout()
    column = gl.arange(0, VOCAB_TILE, gl.SliceLayout(0, layout))
    zeros = gl.zeros((HALF, VOCAB_TILE), gl.float32, layout)
    step = 0
    for tile in range(gl.program_id(0), tiles_t * tiles_v, PROGRAMS):
        i, j = place_tile(tile, tiles_t, tiles_v, GROUP)
        t0 = i * ROWS
        t = t0 + W * HALF + gl.arange(0, HALF, gl.SliceLayout(1, layout))
        inside = t < n
        x = begin_product(ring, step, steps, zeros, step == 0, W, STAGES)
        step += steps
        x = end_product(ring, step, x, STAGES)
        y = gl.load(vectors.label + t, mask=inside, other=-1)
        k_z = gl.load(vectors.factor + t, mask=inside, other=1.0)
        if RAGGED:
            x = gl.where((column < V - j * VOCAB_TILE)[None, :], x, float("-inf"))
        top = gl.maximum(gl.max(x, 1), LOWEST)
        at = j.to(gl.int64) * partials.stride + t
        gl.store(partials.maximum + at, top * k_z, mask=inside)
        k_2 = k_z * LOG2E
        e = gl.exp2(x * k_2[:, None] - (top * k_2)[:, None])
        e = gl.where(column[None, :] == (y - j * VOCAB_TILE)[:, None], 0.0, e)
        gl.store(partials.others + at, gl.sum(e, 1), mask=inside)
        if exponentials is not None:
            if t0 < buffer.in_weight_grad + buffer.in_scratch:
                # 0 past the last token, as in `softmax_tiles`.
                above = top * k_z - gl.load(vectors.shift + t, mask=inside, other=float("inf"))
                f = gl.where(above > REACH, 1.0, gl.exp2(above * LOG2E)) * scale
                row = buffer_row(j, t0, buffer, 0) + W * HALF
                value = (e * f[:, None]).to(exponentials.dtype)
                send(value, exponentials, staged, (row,), 0, HALF, VOCAB_TILE, WIDTH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["first", "T", "V"])
def softmax_staggered(
    rows,  # [count, H] of positions from `first` on, in blocks of [HALF, STEP]
    weight,  # [V, H], in blocks of [VOCAB_TILE, STEP]
    vectors,  # Vectors, of positions from `first` on
    partials,  # Partials out
    exponentials,  # [rows, VOCAB_TILE] out, in blocks of [HALF, WIDTH]; None: not kept
    buffer,  # BufferRows
    first,
    T,
    H,
    V,
    exponential_scale,
    GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr,
    RAGGED: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """`softmax_tiles` of logits without bias and softcap, and without statistics."""
    n = gl.minimum(gl.load(vectors.number) - first, T)
    # At least one block where exponentials are kept: see `softmax_tiles`.
    tiles_t = gl.cdiv(gl.maximum(n, 0 if exponentials is None else 1), ROWS)
    tiles_v = gl.cdiv(V, VOCAB_TILE)
    steps = gl.cdiv(H, STEP)
    ring = new_ring(rows, weight, STAGES)
    staged_0 = ring[0].index(0)  # unused
    staged_1 = ring[0].index(0)
    if exponentials is not None:
        staged_0 = gl.allocate_shared_memory(exponentials.dtype, [HALF, WIDTH], exponentials.layout)
        staged_1 = gl.allocate_shared_memory(exponentials.dtype, [HALF, WIDTH], exponentials.layout)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (take_softmax, (ring, staged_0, vectors, partials, exponentials, buffer, n, V, tiles_t, tiles_v, steps,
                            exponential_scale, FIRST, GROUP, PROGRAMS, STAGES, RAGGED, WIDTH)),
            (take_softmax, (ring, staged_1, vectors, partials, exponentials, buffer, n, V, tiles_t, tiles_v, steps,
                            exponential_scale, SECOND, GROUP, PROGRAMS, STAGES, RAGGED, WIDTH)),
            (copy, (ring, rows, weight, 0, 0, tiles_t, tiles_v, steps, GROUP, PROGRAMS, STAGES)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ the logits' gradient


@gluon.jit
def take_gradient(
    ring, staged, vectors, terms, at_target, exponentials, buffer, n, first, first_tile, V, tiles_t, tiles_v, steps,
    W: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr, RAGGED: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """One group's halves of the tiles, as in `take_softmax`."""
    layout: gl.constexpr = products_layout()
    column = gl.arange(0, VOCAB_TILE, gl.SliceLayout(0, layout))
    zeros = gl.zeros((HALF, VOCAB_TILE), gl.float32, layout)
    step = 0
    for tile in range(gl.program_id(0), tiles_t * tiles_v, PROGRAMS):
        i, j = place_tile(tile, tiles_t, tiles_v, GROUP)
        t0 = first + i * ROWS
        v0 = (first_tile + j) * VOCAB_TILE
        t = t0 + W * HALF + gl.arange(0, HALF, gl.SliceLayout(1, layout))
        inside = t < n
        x = begin_product(ring, step, steps, zeros, step == 0, W, STAGES)
        step += steps
        x = end_product(ring, step, x, STAGES)
        lse_t = gl.load(terms.lse + t, mask=inside, other=0.0)
        r = gl.load(terms.row_scale + t, mask=inside, other=0.0)
        y = gl.load(vectors.label + t, mask=inside, other=-1)
        k_z = gl.load(vectors.factor + t, mask=inside, other=0.0)
        g = gl.exp2(x * (k_z * LOG2E)[:, None] - (lse_t * LOG2E)[:, None]) * r[:, None]
        entry = gl.zeros_like(r) if at_target is None else gl.load(at_target + t, mask=inside, other=0.0)
        g = gl.where(column[None, :] == (y - v0)[:, None], entry[:, None], g)
        if RAGGED:
            # Without the branch, the compiler selects among 16-bit numbers, in twice as many instructions.
            if v0 + VOCAB_TILE > V:
                g = gl.where((column < V - v0)[None, :], g, 0.0)
        # Past the last token rows are 0, and so is r.
        row = buffer.recomputed_row + j * buffer.recomputed + t0 - first + W * HALF
        send(g.to(exponentials.dtype), exponentials, staged, (row,), 0, HALF, VOCAB_TILE, WIDTH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["first", "first_tile", "chunk_tiles", "T", "V"])
def gradient_staggered(
    rows,  # [T, H], in blocks of [HALF, STEP]
    weight,  # [V, H], in blocks of [VOCAB_TILE, STEP]
    exponentials,  # [rows, VOCAB_TILE] out, in blocks of [HALF, WIDTH]
    vectors,  # Vectors
    terms,  # Terms
    at_target,
    buffer,  # BufferRows
    first,  # position
    first_tile,
    chunk_tiles,
    H,
    V,
    GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr,
    RAGGED: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """`gradient_tiles` of logits without bias and softcap, and of a loss without smoothing, labels of every entry and
    entropy.
    """
    n = gl.load(vectors.number)
    tiles_t = gl.cdiv(gl.maximum(gl.maximum(n, 1) - first, 0), ROWS)
    steps = gl.cdiv(H, STEP)
    ring = new_ring(rows, weight, STAGES)
    staged_0 = gl.allocate_shared_memory(exponentials.dtype, [HALF, WIDTH], exponentials.layout)
    staged_1 = gl.allocate_shared_memory(exponentials.dtype, [HALF, WIDTH], exponentials.layout)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (take_gradient, (ring, staged_0, vectors, terms, at_target, exponentials, buffer, n, first, first_tile, V,
                             tiles_t, chunk_tiles, steps, FIRST, GROUP, PROGRAMS, STAGES, RAGGED, WIDTH)),
            (take_gradient, (ring, staged_1, vectors, terms, at_target, exponentials, buffer, n, first, first_tile, V,
                             tiles_t, chunk_tiles, steps, SECOND, GROUP, PROGRAMS, STAGES, RAGGED, WIDTH)),
            (copy, (ring, rows, weight, first, first_tile, tiles_t, chunk_tiles, steps, GROUP, PROGRAMS, STAGES)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )  # fmt: skip
