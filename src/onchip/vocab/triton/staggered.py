"""The products that end in a tile of exponentials, with the two halves of a tile apart in time, in Gluon, for Hopper.

The end of a tile (exponentials, their sums, and 64 KiB to store) takes as long as an eighth of its product if H is
1024.  Triton's kernels do one after the other.  Here the end runs during the other half's product: see
`onchip.kernels.triton.staggered`.  A tile is 128 x 256, and each group has 64 of its rows.

Two groups that take turns with tiles of their own (turns.py) hide all of an end, but read twice as much from L2, which
pays if H is small.
"""

from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import tma  # type: ignore[import-untyped]

from onchip.kernels.triton.gluon import copy_in, send
from onchip.kernels.triton.maths import LOG2E, LOWEST
from onchip.kernels.triton.staggered import STEP, begin_copies, begin_product, end_product, new_ring
from onchip.kernels.triton.tiles import place_tile
from onchip.vocab.triton.blocks import REACH, VOCAB_TILE, buffer_row, has_row, row_number

# Rows of a tile, and of a group's half of it.
ROWS = gl.constexpr(128)
HALF = gl.constexpr(64)
STEP_BYTES = gl.constexpr((128 + 256) * 64 * 2)
# Threads' registers: of both groups that multiply, and of the one that copies.
REGISTERS = gl.constexpr(240)
FEW_REGISTERS = gl.constexpr(24)


@gluon.constexpr_function
def products_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])


@gluon.jit
def copy(
    ring, rows, weight, first, first_tile, tiles_t, tiles_v, steps,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the operands of this program's tiles, where there is room."""
    step = 0
    for tile in range(gl.program_id(0), tiles_t * tiles_v, PROGRAMS):
        i, j = place_tile(tile, tiles_t, tiles_v, GROUP)
        t = first + i * ROWS
        v = (first_tile + j) * VOCAB_TILE
        for k in range(steps):
            come, first_rows, last_rows, columns = begin_copies(ring, step, STEP_BYTES, STAGES)
            copy_in(rows, [t, k * STEP], come, first_rows)
            copy_in(rows, [t + HALF, k * STEP], come, last_rows)
            copy_in(weight, [v, k * STEP], come, columns)
            step += 1


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
        x = begin_product(ring, step, steps, zeros, step == 0, "mk", "nk", W, STAGES)
        step += steps
        x = end_product(ring, step, x, STAGES)
        y = gl.load(vectors.label + t, mask=inside, other=-1)
        k_z = gl.load(vectors.factor + t, mask=inside, other=1.0)
        if RAGGED:
            x = gl.where((column < V - j * VOCAB_TILE)[None, :], x, float("-inf"))
        top = gl.maximum(gl.max(x, 1), LOWEST)
        at = j.to(gl.int64) * partials.stride + t
        gl.store(partials.maximum + at, top * k_z, mask=inside)
        if partials.offset_sum is not None:
            offset = x - top[:, None]
            if RAGGED:
                offset = gl.where((column < V - j * VOCAB_TILE)[None, :], offset, 0.0)
            gl.store(partials.offset_sum + at, gl.sum(offset, 1) * k_z, mask=inside)
        k_2 = k_z * LOG2E
        e = gl.exp2(x * k_2[:, None] - (top * k_2)[:, None])
        e = gl.where(column[None, :] == (y - j * VOCAB_TILE)[:, None], 0.0, e)
        gl.store(partials.others + at, gl.sum(e, 1), mask=inside)
        if exponentials is not None:
            if has_row(t0, buffer):
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
    """`softmax_tiles` of logits without bias and softcap, and without statistics and class weights."""
    n = gl.minimum(gl.load(vectors.number) - first, T)
    least = 0 if exponentials is None else gl.where(first > 0, 0, 1)  # see `softmax_tiles`
    tiles_t = gl.cdiv(gl.maximum(n, least), ROWS)
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
        x = begin_product(ring, step, steps, zeros, step == 0, "mk", "nk", W, STAGES)
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
        row = row_number(buffer.third_row) + j * buffer.in_third + t0 - first + W * HALF
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
