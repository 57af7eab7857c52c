"""The products in 16 bits, with groups of warps that multiply and a warp that copies, in Gluon, for Hopper.

One warp copies blocks of the next tile while two groups of four warps end theirs.  Each group has half of a tile, and
the second one stays behind, as in `onchip.kernels.triton.staggered`.  A result leaves while the next tile is
multiplied.  Programs are persistent.  They take the next tile from a counter where tiles take different times, as in
the weight's gradient, and where groups are short: then most tiles share no weight, and programs wait for memory.
Elsewhere each has a list of its own, and they go through memory together: with 128 groups of 512 rows an H100 took 0.32
ms instead of 0.35.

In the weight's gradient a group's few rows make short sums, so tiles begin and end all the time.  Triton doesn't
pipeline a loop across tiles if their number of steps is read from memory: at each end the tensor cores would wait for
the next tile's first blocks.

For SwiGLU with gate and up apart, both are one block here, whose halves come from two places.  If they were two
products in Triton, ptxas would wait for each step of one before the next.
"""

from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma  # type: ignore[import-untyped]

from onchip.groups.triton.kernels import CONCATENATED, HEAD, LAST, PLAIN, poison_of_group, tile_of
from onchip.groups.triton.tiles import APART_COLUMNS
from onchip.kernels.triton.gluon import copy_in, new_barriers, send
from onchip.kernels.triton.staggered import STEP, begin_copies, begin_product, end_product, new_ring, wait_for_room
from onchip.kernels.triton.tiles import halves, place_tile

# Rows of a tile of the result, and of a group's half of it; results leave WIDTH columns at a time, by way of shared
# memory.
ROWS = gl.constexpr(128)
HALF = gl.constexpr(64)
COLUMNS = gl.constexpr(APART_COLUMNS)
WIDTH = gl.constexpr(128)
STAGES = gl.constexpr(4)
STEP_BYTES = gl.constexpr(64 * (128 + 256) * 2)
# Registers of a thread, in both groups that multiply, and in the warp that copies.
REGISTERS = gl.constexpr(240)
FEW_REGISTERS = gl.constexpr(24)


@gluon.constexpr_function
def products_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])


@gluon.jit
def multiply(ring, step, steps, zeros, OWN: gl.constexpr, COMMON: gl.constexpr, W: gl.constexpr):
    """A group's half of the product of so many steps, from number `step` on."""
    acc = begin_product(ring, step, steps, zeros, step == 0, OWN, COMMON, W, STAGES)
    return end_product(ring, step + steps, acc, STAGES)


# --------------------------------------------------------------------------------------------------- which tile is next


@gluon.jit
def new_speech():
    """Two places for the number of a tile, in turn, and barriers: it was told, it was heard."""
    said = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told, heard = new_barriers(2, 2)
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
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(told.index(n % 2), (n // 2) & 1)
    tile = gl.max(said.index(n % 2).load(lanes), 0)
    mbarrier.arrive(heard.index(n % 2), count=1)
    return tile


# ------------------------------------------------------------------------------------------------- the products of rows


@gluon.jit
def find_rows(plan, G, tile, tiles_m, tiles_n, together):
    """A tile's column of tiles, its group, its first row and the group's end."""
    i, j = place_tile(tile, tiles_m, tiles_n, together)
    at = tile_of(plan, G, i)
    return j, gl.load(at), gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def copy_rows(
    ring, speech, x, weight, counter, plan, G, N, K, together, short,
    GATED: gl.constexpr, TURNED: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Take tiles, tell the others which, and copy their operands where there is room."""
    tiles_m = gl.load(plan)
    tiles_n = gl.cdiv(N, COLUMNS)
    step = 0
    told = 0
    tile = gl.program_id(0)
    while tile < tiles_m * tiles_n:
        tell_tile(speech, told, tile)
        told += 1
        j, g, first, end = find_rows(plan, G, tile, tiles_m, tiles_n, together)
        alone = short != 0
        if alone:
            alone = end - gl.load(plan + HEAD + g) <= ROWS
        for k in range(gl.cdiv(K, STEP)):
            # Two steps at a time of a weight that no other tile of rows reads: they are next to each other in memory,
            # and so come 6% faster (256 groups of 128 rows on an H100).
            if alone & (k % 2 == 0):
                wait_for_room(ring, step + 1, STAGES)
            come, first_rows, last_rows, block = begin_copies(ring, step, STEP_BYTES, STAGES)
            row = LAST - (end - first)  # `load_rows` says why
            copy_in(x, [LAST, end, row, k * STEP], come, first_rows)
            copy_in(x, [LAST, end, row + HALF, k * STEP], come, last_rows)
            if GATED == CONCATENATED:
                column = j * (COLUMNS // 2)
                gate, up = block.slice(0, COLUMNS // 2, 1), block.slice(COLUMNS // 2, COLUMNS // 2, 1)
                copy_in(weight, [g, column, k * STEP], come, gate)
                copy_in(weight, [g, N // 2 + column, k * STEP], come, up)
            elif TURNED:
                copy_in(weight, [g, k * STEP, j * COLUMNS], come, block)
            else:
                copy_in(weight, [g, j * COLUMNS, k * STEP], come, block)
            step += 1
        if short != 0:
            tile = gl.atomic_add(counter, 1, sem="relaxed") + PROGRAMS
        else:
            tile += PROGRAMS
    tell_tile(speech, told, tiles_m * tiles_n)


@gluon.jit
def multiply_rows(
    ring, speech, staged, bias, row_scale, out, product, plan, T, G, N, K, together,
    GATED: gl.constexpr, TURNED: gl.constexpr, W: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """One group's halves of the tiles that `copy_rows` says, rows from W * HALF on, and what follows the product."""
    layout: gl.constexpr = products_layout()
    zeros = gl.zeros((HALF, COLUMNS), gl.float32, layout)
    GATES: gl.constexpr = COLUMNS // 2
    COMMON: gl.constexpr = "kn" if TURNED else "nk"
    tiles_m = gl.load(plan)
    tiles_n = gl.cdiv(N, COLUMNS)
    steps = gl.cdiv(K, STEP)
    step = 0
    heard = 1
    tile = hear_tile(speech, 0)
    while tile < tiles_m * tiles_n:
        j, g, first, end = find_rows(plan, G, tile, tiles_m, tiles_n, together)
        first += W * HALF
        lead = (LAST, end, LAST - (end - first))
        acc = multiply(ring, step, steps, zeros, "mk", COMMON, W)
        step += steps
        if bias is not None:
            c = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
            n = j * COLUMNS + c
            if GATED == CONCATENATED:
                n = j * GATES + gl.where(c < GATES, c, N // 2 + c - GATES)
            acc += gl.load(bias + g.to(gl.int64) * N + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
        acc += poison_of_group(plan, g)
        if product is not None:
            if GATED == CONCATENATED:
                left, right = halves(acc, HALF, COLUMNS)
                send(left, product, staged, lead, j * GATES, HALF, GATES, WIDTH)
                send(right, product, staged, lead, N // 2 + j * GATES, HALF, GATES, WIDTH)
            else:
                send(acc, product, staged, lead, j * COLUMNS, HALF, COLUMNS, WIDTH)
        if GATED == PLAIN:
            result = acc
        else:
            if GATED == CONCATENATED:
                gate, up = halves(acc, HALF, COLUMNS)
            else:
                gate, up = gl.split(acc.reshape([HALF, GATES, 2]))
            result = gate / (1 + gl.exp(-gate)) * up
        if row_scale is not None:
            t = first + gl.arange(0, HALF, gl.SliceLayout(1, result.type.layout))
            result *= gl.load(row_scale + t, mask=t < end, other=0.0).to(gl.float32)[:, None]
        if GATED == PLAIN:
            send(result, out, staged, lead, j * COLUMNS, HALF, COLUMNS, WIDTH)
        else:
            send(result, out, staged, lead, j * GATES, HALF, GATES, WIDTH)
        tile = hear_tile(speech, heard)
        heard += 1

    # Rows past the last group.
    total = gl.load(plan + 1)
    tiles_c = gl.cdiv(N if GATED == PLAIN else N // 2, WIDTH)
    left, _ = halves(zeros, HALF, COLUMNS)
    for tile in range(gl.program_id(0), gl.cdiv(T - total, ROWS) * tiles_c, PROGRAMS):
        first = total + tile // tiles_c * ROWS + W * HALF
        send(left, out, staged, (LAST, T, LAST - (T - first)), tile % tiles_c * WIDTH, HALF, WIDTH, WIDTH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "together", "short"])
def product_apart(
    x,  # [T, K] of 16-bit numbers, in blocks of [HALF, STEP] that end where a group does
    weight,  # [G, N, K], in blocks of [1, COLUMNS, STEP], of CONCATENATED half; TURNED: [G, K, N], [1, STEP, COLUMNS]
    bias,  # [G, N]
    row_scale,  # [T]
    out,  # [T, N] out, with an activation [T, N / 2]; in blocks of [HALF, WIDTH] that end where a group does
    product,  # [T, N] out, the same: before activation and scale
    plan,
    counter,  # [1] int32: 0, if they are short
    T,
    G,
    N,
    K,
    together,  # `tiles_together` of problem.py, and `are_short`
    short,
    GATED: gl.constexpr,
    TURNED: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """`grouped_product` without index and FP8."""
    # Of CONCATENATED a copy of the weight is half of a block.
    ring = new_ring(x, weight, STAGES, 2 if GATED == CONCATENATED else 1)
    speech = new_speech()
    staged_0 = gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout)
    staged_1 = gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (multiply_rows, (ring, speech, staged_0, bias, row_scale, out, product, plan, T, G, N, K, together, GATED,
                             TURNED, FIRST, PROGRAMS)),
            (multiply_rows, (ring, speech, staged_1, bias, row_scale, out, product, plan, T, G, N, K, together, GATED,
                             TURNED, SECOND, PROGRAMS)),
            (copy_rows, (ring, speech, x, weight, counter, plan, G, N, K, together, short, GATED, TURNED, PROGRAMS)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
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
def copy_tiles(ring, speech, a, b, plan, counter, tiles, tiles_a, tiles_b, GROUP: gl.constexpr, PROGRAMS: gl.constexpr):
    """Take tiles, tell the others which, and copy their operands where there is room."""
    step = 0
    n = 0
    tile = gl.program_id(0)
    while tile < tiles:
        tell_tile(speech, n, tile)
        n += 1
        _, i, j, start, end = find_tile(plan, tile, tiles_a, tiles_b, GROUP)
        for k in range(count_steps(start, end)):
            come, first_columns, last_columns, common = begin_copies(ring, step, STEP_BYTES, STAGES)
            row = LAST - (end - start) + k * STEP
            copy_in(a, [LAST, end, row, i * ROWS], come, first_columns)
            copy_in(a, [LAST, end, row, i * ROWS + HALF], come, last_columns)
            copy_in(b, [LAST, end, row, j * COLUMNS], come, common)
            step += 1
        tile = gl.atomic_add(counter, 1, sem="relaxed") + PROGRAMS
    tell_tile(speech, n, tiles)


@gluon.jit
def multiply_tiles(ring, speech, staged, out, plan, tiles, tiles_a, tiles_b, W: gl.constexpr, GROUP: gl.constexpr):
    """One group's halves of the tiles that `copy_tiles` says."""
    zeros = gl.zeros((HALF, COLUMNS), gl.float32, products_layout())
    step = 0
    n = 1
    tile = hear_tile(speech, 0)
    while tile < tiles:
        g, i, j, start, end = find_tile(plan, tile, tiles_a, tiles_b, GROUP)
        steps = count_steps(start, end)
        value = multiply(ring, step, steps, zeros, "km", "kn", W) + poison_of_group(plan, g)
        step += steps
        send(value, out, staged, (g, i * ROWS + W * HALF), j * COLUMNS, HALF, COLUMNS, WIDTH)
        tile = hear_tile(speech, n)
        n += 1
    tma.store_wait(0)


@gluon.jit
def weight_gradient_apart(
    a,  # [T, A] of 16-bit numbers, in blocks of [STEP, HALF] that end where a group does
    b,  # [T, B], in such of [STEP, COLUMNS]
    out,  # [G, A, B] out, in blocks of [1, HALF, WIDTH]
    plan,
    counter,  # [1] int32: 0
    G,
    A,
    B,
    GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """a.T @ b over each group's rows: 0 for a group without any."""
    ring = new_ring(a, b, STAGES)
    speech = new_speech()
    staged_0 = gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout)
    staged_1 = gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout)
    tiles_a = gl.cdiv(A, ROWS)
    tiles_b = gl.cdiv(B, COLUMNS)
    tiles = G * tiles_a * tiles_b
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (multiply_tiles, (ring, speech, staged_0, out, plan, tiles, tiles_a, tiles_b, FIRST, GROUP)),
            (multiply_tiles, (ring, speech, staged_1, out, plan, tiles, tiles_a, tiles_b, SECOND, GROUP)),
            (copy_tiles, (ring, speech, a, b, plan, counter, tiles, tiles_a, tiles_b, GROUP, PROGRAMS)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )  # fmt: skip
