"""The weight's gradient with warps of their own for copying, in Gluon, for Hopper.

A group's few rows make short sums, so tiles begin and end all the time.  Triton pipelines no loop across tiles whose
number of steps is read from memory: at each end the tensor cores wait for the next tile's first blocks.  Here one warp
copies blocks of the next tile while eight others end theirs, and a result leaves while the next tile is multiplied.

Programs are persistent.  As groups take different times, each takes the next tile from a counter.

On an H100, in TFLOP/s, beside Triton's kernel with three small programs on a multiprocessor: 691 for 528 with 2048 rows
a group (mixtral), 581 for 540 and 615 for 548 with 512 (deepseek-v3, qwen3-30b-a3b), 336 for 282 with 128.
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

from onchip.groups.triton.kernels import HEAD, LAST, poison_of_group
from onchip.kernels.triton.tiles import place_tile

# Rows of a step; and of a tile of the result, of which WIDTH columns at a time leave by way of shared memory.
STEP = gl.constexpr(64)
ROWS = gl.constexpr(128)
COLUMNS = gl.constexpr(256)
WIDTH = gl.constexpr(128)
STAGES = gl.constexpr(4)
STEP_BYTES = gl.constexpr(64 * (128 + 256) * 2)
# Of the warp that copies; the others have what it leaves.
FEW_REGISTERS = gl.constexpr(24)


@gluon.jit
def find_tile(plan, tile, tiles_a, tiles_b, GROUP: gl.constexpr):
    """A tile's group, place, and the group's rows."""
    of_group = tiles_a * tiles_b
    g = tile // of_group
    i, j = place_tile(tile % of_group, tiles_a, tiles_b, GROUP)
    return g, i, j, gl.load(plan + HEAD + g), gl.load(plan + HEAD + g + 1)


@gluon.jit
def count_steps(start, end):
    """Of a group; one for an empty one, of rows past its end, which are read as 0."""
    return gl.maximum(gl.cdiv(end - start, STEP), 1)


@gluon.jit
def copy(
    a, b, blocks, barriers, said, plan, counter, tiles, tiles_a, tiles_b, GROUP: gl.constexpr, PROGRAMS: gl.constexpr
):
    """Take tiles, tell the others which, and copy their operands where there is room."""
    a_blocks, b_blocks = blocks
    full, empty, told, heard = barriers
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    step = 0
    n = 0
    tile = gl.program_id(0)
    while tile < tiles:
        mbarrier.wait(heard.index(n % 2), ((n // 2) & 1) ^ 1)
        said.index(n % 2).store(gl.full([32], 0, gl.int32, lanes) + tile)
        mbarrier.arrive(told.index(n % 2), count=1)
        n += 1
        _, i, j, start, end = find_tile(plan, tile, tiles_a, tiles_b, GROUP)
        for k in range(count_steps(start, end)):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(s), STEP_BYTES)
            row = LAST - (end - start) + k * STEP  # `load_rows` says why
            tma.async_copy_global_to_shared(a, [LAST, end, row, i * ROWS], full.index(s), a_blocks.index(s))
            tma.async_copy_global_to_shared(b, [LAST, end, row, j * COLUMNS], full.index(s), b_blocks.index(s))
            step += 1
        tile = gl.atomic_add(counter, 1, sem="relaxed") + PROGRAMS
    mbarrier.wait(heard.index(n % 2), ((n // 2) & 1) ^ 1)
    said.index(n % 2).store(gl.full([32], 0, gl.int32, lanes) + tiles)
    mbarrier.arrive(told.index(n % 2), count=1)


@gluon.jit
def hear_tile(said, told, heard, n):
    """What `copy` says as number n."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    mbarrier.wait(told.index(n % 2), (n // 2) & 1)
    tile = gl.max(said.index(n % 2).load(lanes), 0)
    mbarrier.arrive(heard.index(n % 2), count=1)
    return tile


@gluon.jit
def add_step(blocks, s, acc, use_acc: gl.constexpr):
    """acc + a.T @ b of the step in stage s."""
    a = blocks[0].index(s).reshape([STEP, ROWS]).permute((1, 0))
    return warpgroup_mma(a, blocks[1].index(s).reshape([STEP, COLUMNS]), acc, use_acc=use_acc, is_async=True)


@gluon.jit
def store_pieces(value, out, staged, g, row, column, C: gl.constexpr):
    """Store columns of a tile; the last piece leaves while what comes next is computed."""
    if C > WIDTH:
        left, right = gl.split(value.reshape([ROWS, 2, C // 2]).permute([0, 2, 1]))
        store_pieces(left, out, staged, g, row, column, C // 2)
        store_pieces(right, out, staged, g, row, column + C // 2, C // 2)
    else:
        tma.store_wait(0)
        gl.thread_barrier()
        staged.reshape([ROWS, C]).store(value.to(out.dtype))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out, [g, row, column], staged)


@gluon.jit
def multiply(blocks, barriers, said, staged, out, plan, tiles, tiles_a, tiles_b, GROUP: gl.constexpr):
    """The products of the tiles that `copy` says."""
    full, empty, told, heard = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 256, 16])
    zeros = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    step = 0
    n = 1
    tile = hear_tile(said, told, heard, 0)
    while tile < tiles:
        g, i, j, start, end = find_tile(plan, tile, tiles_a, tiles_b, GROUP)
        # The first step apart from the loop, or ptxas would wait for each step before the next.
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        acc = add_step(blocks, step % STAGES, zeros, False)
        for _k in range(1, count_steps(start, end)):
            step += 1
            mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
            acc = add_step(blocks, step % STAGES, acc, True)
            acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        value = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index(step % STAGES), count=1)
        step += 1
        store_pieces(value + poison_of_group(plan, g), out, staged, g, i * ROWS, j * COLUMNS, COLUMNS)
        tile = hear_tile(said, told, heard, n)
        n += 1
    tma.store_wait(0)


@gluon.jit
def weight_gradient_apart(
    a,  # [T, A] of 16-bit numbers, in blocks of [STEP, ROWS] that end where a group does
    b,  # [T, B], in such of [STEP, COLUMNS]
    out,  # [G, A, B] out, in blocks of [1, ROWS, WIDTH]
    plan,
    counter,  # [1] int32: 0
    G,
    A,
    B,
    GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """a.T @ b over each group's rows: 0 for a group without any."""
    blocks = (
        gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_shape, a.layout),
        gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_shape, b.layout),
    )
    staged = gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout)
    said = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    for s in gl.static_range(2):
        mbarrier.init(told.index(s), count=1)
        mbarrier.init(heard.index(s), count=1)
    fence_async_shared()
    gl.thread_barrier()
    tiles_a = gl.cdiv(A, ROWS)
    tiles_b = gl.cdiv(B, COLUMNS)
    tiles = G * tiles_a * tiles_b
    barriers = (full, empty, told, heard)
    gl.warp_specialize(
        [
            (multiply, (blocks, barriers, said, staged, out, plan, tiles, tiles_a, tiles_b, GROUP)),
            (copy, (a, b, blocks, barriers, said, plan, counter, tiles, tiles_a, tiles_b, GROUP, PROGRAMS)),
        ],
        [1],
        [FEW_REGISTERS],
    )
