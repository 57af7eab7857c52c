"""The products in 16 bits with a warp of its own for copying, in Gluon, for Hopper.

One warp copies blocks of the next tile while eight others end theirs, and a result leaves while the next tile is
multiplied.  Programs are persistent and take the next tile from a counter: groups take different times, and programs
with lists of their own would drift apart, so that tiles of rows which share a weight would read it twice.

For the weight's gradient a group's few rows make short sums, so tiles begin and end all the time.  Triton pipelines no
loop across tiles whose number of steps is read from memory: at each end the tensor cores wait for the next tile's first
blocks.

Of a SwiGLU over gate and up that lie apart, both are one block here, whose halves come from two places.  As two
products of Triton's, ptxas waits for each step of one before the next.

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

from onchip.groups.triton.kernels import CONCATENATED, HEAD, LAST, PLAIN, poison_of_group, tile_of
from onchip.groups.triton.tiles import APART_COLUMNS
from onchip.kernels.triton.gluon import new_barriers, send
from onchip.kernels.triton.tiles import halves, place_tile

# Rows of a step; and of a tile of the result, of which WIDTH columns at a time leave by way of shared memory.
STEP = gl.constexpr(64)
ROWS = gl.constexpr(128)
COLUMNS = gl.constexpr(APART_COLUMNS)
WIDTH = gl.constexpr(128)
STAGES = gl.constexpr(4)
STEP_BYTES = gl.constexpr(64 * (128 + 256) * 2)
# Of the warp that copies; the others have what it leaves.
FEW_REGISTERS = gl.constexpr(24)


@gluon.constexpr_function
def products_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 256, 16])


@gluon.jit
def next_step(
    a_blocks, b_blocks, barriers, step, acc, use_acc: gl.constexpr, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr
):
    """acc + the product of a step's blocks, [ROWS, STEP] and [STEP, COLUMNS] or TURNED, once they have come."""
    full, _ = barriers
    s = step % STAGES
    mbarrier.wait(full.index(s), (step // STAGES) & 1)
    if A_TURNED:
        a = a_blocks.index(s).reshape([STEP, ROWS]).permute((1, 0))
    else:
        a = a_blocks.index(s).reshape([ROWS, STEP])
    if B_TURNED:
        b = b_blocks.index(s).reshape([COLUMNS, STEP]).permute((1, 0))
    else:
        b = b_blocks.index(s).reshape([STEP, COLUMNS])
    return warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def multiply(a_blocks, b_blocks, barriers, first, steps, zeros, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr):
    """The product of so many steps, from number `first` on.

    The first step is apart from the loop, or ptxas would wait for each step before the next.
    """
    _, empty = barriers
    acc = next_step(a_blocks, b_blocks, barriers, first, zeros, False, A_TURNED, B_TURNED)
    for k in range(1, steps):
        step = first + k
        acc = next_step(a_blocks, b_blocks, barriers, step, acc, True, A_TURNED, B_TURNED)
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    value = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((first + steps - 1) % STAGES), count=1)
    return value


# --------------------------------------------------------------------------------------------------- which tile is next


@gluon.jit
def new_speech():
    """Two places for the number of a tile, in turn, and barriers: it was told, it was heard."""
    said = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told, heard = new_barriers(2)
    return said, told, heard


@gluon.jit
def tell_tile(speech, n, tile):
    """Say to the warps that multiply, as number n, which tile is copied next."""
    said, told, heard = speech
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(heard.index(n % 2), ((n // 2) & 1) ^ 1)
    said.index(n % 2).store(gl.full([32], 0, gl.int32, lanes) + tile)
    mbarrier.arrive(told.index(n % 2), count=1)


@gluon.jit
def hear_tile(speech, n):
    """What `tell_tile` says as number n."""
    said, told, heard = speech
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    mbarrier.wait(told.index(n % 2), (n // 2) & 1)
    tile = gl.max(said.index(n % 2).load(lanes), 0)
    mbarrier.arrive(heard.index(n % 2), count=1)
    return tile


# ------------------------------------------------------------------------------------------------- the products of rows


@gluon.jit
def find_rows(plan, G, tile, tiles_m, tiles_n, GROUP: gl.constexpr):
    """A tile's column of tiles, its group, its first row and the group's end."""
    i, j = place_tile(tile, tiles_m, tiles_n, GROUP)
    at = tile_of(plan, G, i)
    return j, gl.load(at), gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def copy_rows(
    x, weight, x_blocks, weight_blocks, barriers, speech, counter, plan, G, N, K,
    GATED: gl.constexpr, TURNED: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Take tiles, tell the others which, and copy their operands where there is room."""
    full, empty = barriers
    tiles_m = gl.load(plan)
    tiles_n = gl.cdiv(N, COLUMNS)
    step = 0
    told = 0
    tile = gl.program_id(0)
    while tile < tiles_m * tiles_n:
        tell_tile(speech, told, tile)
        told += 1
        j, g, first, end = find_rows(plan, G, tile, tiles_m, tiles_n, GROUP)
        for k in range(gl.cdiv(K, STEP)):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(s), STEP_BYTES)
            row = LAST - (end - first)  # `load_rows` says why
            tma.async_copy_global_to_shared(x, [LAST, end, row, k * STEP], full.index(s), x_blocks.index(s))
            block = weight_blocks.index(s)
            if GATED == CONCATENATED:
                column = j * (COLUMNS // 2)
                gate, up = block.slice(0, COLUMNS // 2, 1), block.slice(COLUMNS // 2, COLUMNS // 2, 1)
                tma.async_copy_global_to_shared(weight, [g, column, k * STEP], full.index(s), gate)
                tma.async_copy_global_to_shared(weight, [g, N // 2 + column, k * STEP], full.index(s), up)
            elif TURNED:
                tma.async_copy_global_to_shared(weight, [g, k * STEP, j * COLUMNS], full.index(s), block)
            else:
                tma.async_copy_global_to_shared(weight, [g, j * COLUMNS, k * STEP], full.index(s), block)
            step += 1
        tile = gl.atomic_add(counter, 1, sem="relaxed") + PROGRAMS
    tell_tile(speech, told, tiles_m * tiles_n)


@gluon.jit
def multiply_rows(
    x_blocks, weight_blocks, barriers, speech, staged, bias, row_scale, out, product, plan, T, G, N, K,
    GATED: gl.constexpr, TURNED: gl.constexpr, GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """The products of the tiles that `copy_rows` says, and what follows them."""
    layout: gl.constexpr = products_layout()
    zeros = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    HALF: gl.constexpr = COLUMNS // 2
    tiles_m = gl.load(plan)
    tiles_n = gl.cdiv(N, COLUMNS)
    steps = gl.cdiv(K, STEP)
    done = 0
    heard = 1
    tile = hear_tile(speech, 0)
    while tile < tiles_m * tiles_n:
        j, g, first, end = find_rows(plan, G, tile, tiles_m, tiles_n, GROUP)
        lead = (LAST, end, LAST - (end - first))
        acc = multiply(x_blocks, weight_blocks, barriers, done, steps, zeros, False, not TURNED)
        done += steps
        if bias is not None:
            c = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
            n = j * COLUMNS + c
            if GATED == CONCATENATED:
                n = j * HALF + gl.where(c < HALF, c, N // 2 + c - HALF)
            acc += gl.load(bias + g.to(gl.int64) * N + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
        acc += poison_of_group(plan, g)
        if product is not None:
            if GATED == CONCATENATED:
                left, right = halves(acc, ROWS, COLUMNS)
                send(left, product, staged, lead, j * HALF, ROWS, HALF, WIDTH)
                send(right, product, staged, lead, N // 2 + j * HALF, ROWS, HALF, WIDTH)
            else:
                send(acc, product, staged, lead, j * COLUMNS, ROWS, COLUMNS, WIDTH)
        if GATED == PLAIN:
            result = acc
        else:
            if GATED == CONCATENATED:
                gate, up = halves(acc, ROWS, COLUMNS)
            else:
                gate, up = gl.split(acc.reshape([ROWS, HALF, 2]))
            result = gate / (1 + gl.exp(-gate)) * up
        if row_scale is not None:
            t = first + gl.arange(0, ROWS, gl.SliceLayout(1, result.type.layout))
            result *= gl.load(row_scale + t, mask=t < end, other=0.0).to(gl.float32)[:, None]
        if GATED == PLAIN:
            send(result, out, staged, lead, j * COLUMNS, ROWS, COLUMNS, WIDTH)
        else:
            send(result, out, staged, lead, j * HALF, ROWS, HALF, WIDTH)
        tile = hear_tile(speech, heard)
        heard += 1

    # Rows past the last group.
    total = gl.load(plan + 1)
    tiles_c = gl.cdiv(N if GATED == PLAIN else N // 2, WIDTH)
    left, _ = halves(zeros, ROWS, COLUMNS)
    for tile in range(gl.program_id(0), gl.cdiv(T - total, ROWS) * tiles_c, PROGRAMS):
        first = total + tile // tiles_c * ROWS
        send(left, out, staged, (LAST, T, LAST - (T - first)), tile % tiles_c * WIDTH, ROWS, WIDTH, WIDTH)
    tma.store_wait(0)


@gluon.jit
def product_apart(
    x,  # [T, K] of 16-bit numbers, in blocks of [ROWS, STEP] that end where a group does
    weight,  # [G, N, K], in blocks of [1, COLUMNS, STEP], of CONCATENATED half; TURNED: [G, K, N], [1, STEP, COLUMNS]
    bias,  # [G, N]
    row_scale,  # [T]
    out,  # [T, N] out, with an activation [T, N / 2]; in blocks of [ROWS, WIDTH] that end where a group does
    product,  # [T, N] out, the same: before activation and scale
    plan,
    counter,  # [1] int32: 0
    T,
    G,
    N,
    K,
    GATED: gl.constexpr,
    TURNED: gl.constexpr,
    GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """`grouped_product` without index and FP8."""
    x_blocks = gl.allocate_shared_memory(x.dtype, [STAGES] + x.block_shape, x.layout)
    shape: gl.constexpr = [1, STEP, COLUMNS] if TURNED else [1, COLUMNS, STEP]
    weight_blocks = gl.allocate_shared_memory(weight.dtype, [STAGES] + shape, weight.layout)
    staged = gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout)
    barriers = new_barriers(STAGES)
    speech = new_speech()
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (multiply_rows, (x_blocks, weight_blocks, barriers, speech, staged, bias, row_scale, out, product,
                             plan, T, G, N, K, GATED, TURNED, GROUP, PROGRAMS)),
            (copy_rows, (x, weight, x_blocks, weight_blocks, barriers, speech, counter, plan, G, N, K, GATED,
                         TURNED, GROUP, PROGRAMS)),
        ],
        [1],
        [FEW_REGISTERS],
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ the weight's gradient


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
def copy_tiles(
    a, b, a_blocks, b_blocks, barriers, speech, plan, counter, tiles, tiles_a, tiles_b,
    GROUP: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Take tiles, tell the others which, and copy their operands where there is room."""
    full, empty = barriers
    step = 0
    n = 0
    tile = gl.program_id(0)
    while tile < tiles:
        tell_tile(speech, n, tile)
        n += 1
        _, i, j, start, end = find_tile(plan, tile, tiles_a, tiles_b, GROUP)
        for k in range(count_steps(start, end)):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(s), STEP_BYTES)
            row = LAST - (end - start) + k * STEP
            tma.async_copy_global_to_shared(a, [LAST, end, row, i * ROWS], full.index(s), a_blocks.index(s))
            tma.async_copy_global_to_shared(b, [LAST, end, row, j * COLUMNS], full.index(s), b_blocks.index(s))
            step += 1
        tile = gl.atomic_add(counter, 1, sem="relaxed") + PROGRAMS
    tell_tile(speech, n, tiles)


@gluon.jit
def multiply_tiles(
    a_blocks, b_blocks, barriers, speech, staged, out, plan, tiles, tiles_a, tiles_b, GROUP: gl.constexpr
):
    """The products of the tiles that `copy_tiles` says."""
    zeros = gl.zeros((ROWS, COLUMNS), gl.float32, products_layout())
    done = 0
    n = 1
    tile = hear_tile(speech, 0)
    while tile < tiles:
        g, i, j, start, end = find_tile(plan, tile, tiles_a, tiles_b, GROUP)
        steps = count_steps(start, end)
        value = multiply(a_blocks, b_blocks, barriers, done, steps, zeros, True, False) + poison_of_group(plan, g)
        done += steps
        send(value, out, staged, (g, i * ROWS), j * COLUMNS, ROWS, COLUMNS, WIDTH)
        tile = hear_tile(speech, n)
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
    a_blocks = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_shape, a.layout)
    b_blocks = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_shape, b.layout)
    staged = gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout)
    barriers = new_barriers(STAGES)
    speech = new_speech()
    fence_async_shared()
    gl.thread_barrier()
    tiles_a = gl.cdiv(A, ROWS)
    tiles_b = gl.cdiv(B, COLUMNS)
    tiles = G * tiles_a * tiles_b
    gl.warp_specialize(
        [
            (multiply_tiles, (a_blocks, b_blocks, barriers, speech, staged, out, plan, tiles, tiles_a, tiles_b,
                              GROUP)),
            (copy_tiles, (a, b, a_blocks, b_blocks, barriers, speech, plan, counter, tiles, tiles_a, tiles_b,
                          GROUP, PROGRAMS)),
        ],
        [1],
        [FEW_REGISTERS],
    )  # fmt: skip
