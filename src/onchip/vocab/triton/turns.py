"""The softmax of logits that are short sums, with the end of a tile during the next product, in Gluon, for Hopper.

The end of a tile (exponentials, their sums, and what is to be stored) takes as long as a quarter of its product if H is
576.  Triton's kernels do one after the other; here two groups of warps take turns: while one multiplies, the other ends
its tile.  A third group, of a single warp, copies the operands.  This is the ping-pong schedule of CUTLASS.

Two tiles of 128 x 128 in turn read twice as much from L2 as one of 128 x 256.  So the first STILL blocks of hidden's
rows, which all tiles of a program share, stay in shared memory; the others come with the blocks of the weight, through
a ring of SLOTS blocks.  Blocks have 64 numbers along the sum, and 128 along the result.

A program takes *columns*: each is a block of 128 rows of hidden with a range of the weight's tiles.  The ranges are cut
on the device, where the number of tokens is known, so that the last wave of programs is full.

On an H100 it took 22% less with H = 576, 17% with 640, 16% with 768 and 6% with 896.  With a larger H, L2 takes as long
as the ends did.
"""

from typing import Any

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

from onchip.kernels.triton.gluon import aggregate, barrier, copy_in, new_barriers, send
from onchip.kernels.triton.maths import LOG2E, LOWEST
from onchip.vocab.triton.blocks import REACH, VOCAB_TILE, first_row, has_row
from onchip.vocab.triton.tiling import IN_TURNS

# A block's size along the result and along the sum.
TILE = gl.constexpr(IN_TURNS)
STEP = gl.constexpr(64)
BLOCK_BYTES = gl.constexpr(128 * 64 * 2)
# Threads' registers: of both groups that multiply, and of the one that copies.
REGISTERS = gl.constexpr(240)
FEW_REGISTERS = gl.constexpr(24)


@aggregate
class Ring:
    """Shared memory: the blocks that stay, then the ring's; and barriers.

    `full` says that the blocks of a step have come, `empty` that a slot may be written again, `still_full` and
    `still_empty` the same of the blocks that stay, `turn` that a group may multiply, `store_turn` that it may store.
    """

    blocks: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    still_full: gl.shared_memory_descriptor
    still_empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor
    store_turn: gl.shared_memory_descriptor
    STILL: gl.constexpr
    SLOTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, blocks: Any, full: Any, empty: Any, still_full: Any, still_empty: Any, turn: Any, store_turn: Any,
        STILL: Any, SLOTS: Any,
    ) -> None:  # fmt: skip
        self.blocks, self.full, self.empty = blocks, full, empty
        self.still_full, self.still_empty = still_full, still_empty
        self.turn, self.store_turn = turn, store_turn
        self.STILL, self.SLOTS = gl.constexpr(STILL), gl.constexpr(SLOTS)


@aggregate
class TurnWork:
    """What is to be computed: so many columns, each with the other operand's `tiles` of VOCAB_TILE in so many parts."""

    columns: gl.tensor
    tiles: gl.tensor
    parts: gl.tensor
    steps: gl.tensor

    @gluon.constexpr_function
    def __init__(self, columns: Any, tiles: Any, parts: Any, steps: Any) -> None:
        self.columns, self.tiles, self.parts, self.steps = columns, tiles, parts, steps


@gluon.jit
def new_ring(of, STILL: gl.constexpr, SLOTS: gl.constexpr, STORES: gl.constexpr):
    """Shared memory for blocks of an operand, and of one with the same blocks; without STORES nobody takes turns to
    store, see `new_barriers`.
    """
    blocks = gl.allocate_shared_memory(of.dtype, [STILL + SLOTS] + of.block_shape, of.layout)
    full, empty = new_barriers(SLOTS)
    still_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    still_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    store_turn = turn
    if STORES:
        store_turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for w in gl.static_range(2):
        mbarrier.init(turn.index(w), count=1)
        if STORES:
            mbarrier.init(store_turn.index(w), count=1)
    mbarrier.init(still_full, count=1)
    mbarrier.init(still_empty, count=2)
    fence_async_shared()
    barrier()
    return Ring(blocks, full, empty, still_full, still_empty, turn, store_turn, STILL, SLOTS)


@gluon.jit
def cut_work(columns, tiles, steps, PROGRAMS: gl.constexpr):
    """The number of parts that takes least: a column costs as much to begin as a tile or two, unless waves are full."""
    best = 1
    least = gl.cdiv(columns, PROGRAMS) * (tiles * 64 + 100)
    for parts in range(2, 33):
        cost = gl.cdiv(columns * parts, PROGRAMS) * (gl.cdiv(tiles, parts) * 64 + 100)
        best = gl.where(cost < least, parts, best)
        least = gl.minimum(cost, least)
    return TurnWork(columns, tiles, best, steps)


@gluon.jit
def place(work, u):
    """Column u's block of what stays, and its range of tiles.  At once programs read the same tiles."""
    i = u % work.columns
    part = u // work.columns
    return i, part * work.tiles // work.parts, (part + 1) * work.tiles // work.parts


@gluon.jit
def copy(ring, work, still, moving, PROGRAMS: gl.constexpr):
    """Copy both operands, where there is room."""
    STILL: gl.constexpr = ring.STILL
    SLOTS: gl.constexpr = ring.SLOTS
    at = 0  # slots so far
    step = 0
    n = 0
    for u in range(gl.program_id(0), work.columns * work.parts, PROGRAMS):
        i, first, last = place(work, u)
        mbarrier.wait(ring.still_empty, (n & 1) ^ 1)
        mbarrier.expect(ring.still_full, STILL * BLOCK_BYTES)
        for b in gl.static_range(STILL):
            copy_in(still, [i * TILE, b * STEP], ring.still_full, ring.blocks.index(b))
        n += 1
        for half in range(2 * first, 2 * last):
            for k in range(work.steps):
                slot = at % SLOTS
                full = ring.full.index(step % SLOTS)
                mbarrier.wait(ring.empty.index(slot), ((at // SLOTS) & 1) ^ 1)
                if k >= STILL:
                    mbarrier.expect(full, 2 * BLOCK_BYTES)
                    copy_in(still, [i * TILE, k * STEP], full, ring.blocks.index(STILL + slot))
                    at += 1
                    slot = at % SLOTS
                    mbarrier.wait(ring.empty.index(slot), ((at // SLOTS) & 1) ^ 1)
                else:
                    mbarrier.expect(full, BLOCK_BYTES)
                copy_in(moving, [half * TILE, k * STEP], full, ring.blocks.index(STILL + slot))
                at += 1
                step += 1


@gluon.jit
def wait_for_turn(turn, mine, W: gl.constexpr):
    """Until the other group has let this one; group 0 begins.  `mine`: how many turns it has had."""
    if W == 0:
        mbarrier.wait(turn.index(0), (mine & 1) ^ 1)
    else:
        mbarrier.wait(turn.index(1), mine & 1)


@gluon.jit
def add_step(blocks, a, b, acc, use_acc):
    """acc + a step of the product, whose blocks are number a, of what stays, and b."""
    return warpgroup_mma(blocks.index(a), blocks.index(b).permute((1, 0)), acc, use_acc=use_acc, is_async=True)


@gluon.jit
def multiply(ring, work, zeros, mine, W: gl.constexpr):
    """The product of the group's tile number `mine`.

    The tile before, whose operands lie before this one's in the ring, is the other group's.  When that has its last
    ones, each barrier is at most one use behind, so that its parity says which use it is.  The first step stands apart
    from the loop, or ptxas would wait for each step before the next.
    """
    STILL: gl.constexpr = ring.STILL
    SLOTS: gl.constexpr = ring.SLOTS
    steps = work.steps
    begin = (2 * mine + W) * (steps + gl.maximum(steps - STILL, 0))  # of its slots
    step = (2 * mine + W) * steps
    wait_for_turn(ring.turn, mine, W)
    mbarrier.wait(ring.full.index(step % SLOTS), (step // SLOTS) & 1)
    acc = add_step(ring.blocks, 0, STILL + begin % SLOTS, zeros, False)
    for k in range(1, steps):
        moves = k >= STILL  # then it has two slots
        at = begin + k + gl.maximum(k - STILL + 1, 0)  # its last one
        mbarrier.wait(ring.full.index((step + k) % SLOTS), ((step + k) // SLOTS) & 1)
        a = gl.where(moves, STILL + (at + SLOTS - 1) % SLOTS, k)
        acc = add_step(ring.blocks, a, STILL + at % SLOTS, acc, True)
        acc = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(acc,)))
        before = at - gl.where(moves, 2, 1)  # the last slot of the step before, which is done
        mbarrier.arrive(ring.empty.index((before + SLOTS) % SLOTS), count=1)
        mbarrier.arrive(ring.empty.index((before + SLOTS - 1) % SLOTS), count=1, pred=k > STILL)
    mbarrier.arrive(ring.turn.index(1 - W), count=1)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    end = begin + steps - 1 + gl.maximum(steps - STILL, 0)
    mbarrier.arrive(ring.empty.index(end % SLOTS), count=1)
    mbarrier.arrive(ring.empty.index((end + SLOTS - 1) % SLOTS), count=1, pred=steps > STILL)
    return acc


@gluon.constexpr_function
def products_layout():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])


# ---------------------------------------------------------------------------------------------------------- the softmax


@gluon.jit
def take_softmax(
    ring, work, staged, per_token, partials, exponentials, buffer, n, V, scale,
    W: gl.constexpr, PROGRAMS: gl.constexpr, RAGGED: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """One group's tiles: the halves W of VOCAB_TILE columns."""
    label, factor, shift = per_token
    maximum, others, stride = partials
    layout: gl.constexpr = products_layout()
    row: gl.constexpr = gl.SliceLayout(1, layout)
    column = gl.arange(0, TILE, gl.SliceLayout(0, layout))
    zeros = gl.zeros((TILE, TILE), gl.float32, layout)
    mine = 0
    n_columns = 0
    for u in range(gl.program_id(0), work.columns * work.parts, PROGRAMS):
        i, first, last = place(work, u)
        t = i * TILE + gl.arange(0, TILE, row)
        inside = t < n
        y = gl.load(label + t, mask=inside, other=-1)
        k_z = gl.load(factor + t, mask=inside, other=1.0)
        k_2 = k_z * LOG2E
        if exponentials is not None:
            kept = has_row(i * TILE, buffer)
            line, lines = first_row(i * TILE, buffer)
        mbarrier.wait(ring.still_full, n_columns & 1)
        n_columns += 1
        for j in range(first, last):
            x = multiply(ring, work, zeros, mine, W)
            if j == last - 1:
                mbarrier.arrive(ring.still_empty, count=1)
            half = 2 * j + W
            v = half * TILE + column
            if RAGGED:
                x = gl.where((v < V)[None, :], x, float("-inf"))
            top = gl.maximum(gl.max(x, 1), LOWEST)
            at = half.to(gl.int64) * stride + t
            gl.store(maximum + at, top * k_z, mask=inside)
            e = gl.exp2(x * k_2[:, None] - (top * k_2)[:, None])
            e = gl.where(column[None, :] == (y - half * TILE)[:, None], 0.0, e)
            gl.store(others + at, gl.sum(e, 1), mask=inside)
            if exponentials is not None:
                # 0 past the last token, as in `softmax_tiles`.
                above = top * k_z - gl.load(shift + t, mask=inside, other=float("inf"))
                f = gl.where(above > REACH, 1.0, gl.exp2(above * LOG2E)) * scale
                value = (e * f[:, None]).to(exponentials.dtype)
                wait_for_turn(ring.store_turn, mine, W)
                if kept:
                    send(value, exponentials, staged, (line + j * lines,), W * TILE, TILE, TILE, WIDTH)
                    tma.store_wait(0)  # the other group writes there next
                mbarrier.arrive(ring.store_turn.index(1 - W), count=1)
            mine += 1


# A 1 would be a constant to the compiler, which has no place in `Work`.
@gluon.jit(do_not_specialize=["first", "stride", "T", "V"])
def softmax_in_turns(
    rows,  # [count, H] of positions from `first` on, in blocks of [TILE, STEP]
    weight,  # [V, H], the same
    label,  # [T] int32, of positions from `first` on, as the next two
    factor,  # [T] float32
    shift,  # [T] float32
    number,  # [1] int32
    maximum,  # [tiles of TILE columns, T] float32 out: see `Partials`
    others,
    exponentials,  # [rows, VOCAB_TILE] out, in blocks of [TILE, WIDTH]; None: not kept
    buffer,  # BufferRows
    first,
    stride,  # of maximum and others
    T,
    H,
    V,
    exponential_scale,
    STILL: gl.constexpr,
    SLOTS: gl.constexpr,
    PROGRAMS: gl.constexpr,
    RAGGED: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """`softmax_tiles` of logits without bias and softcap, and without statistics; a partial has TILE columns."""
    n = gl.minimum(gl.load(number) - first, T)
    least = 0 if exponentials is None else gl.where(first > 0, 0, 1)  # see `softmax_tiles`
    columns = gl.cdiv(gl.maximum(n, least), TILE)
    work = cut_work(columns, gl.cdiv(V, VOCAB_TILE), gl.cdiv(H, STEP), PROGRAMS)
    ring = new_ring(rows, STILL, SLOTS, exponentials is not None)
    staged = ring.blocks.index(0)  # unused
    if exponentials is not None:
        staged = gl.allocate_shared_memory(exponentials.dtype, [TILE, WIDTH], exponentials.layout)
    per_token = (label, factor, shift)
    partials = (maximum, others, stride)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (take_softmax, (ring, work, staged, per_token, partials, exponentials, buffer, n, V, exponential_scale,
                            FIRST, PROGRAMS, RAGGED, WIDTH)),
            (take_softmax, (ring, work, staged, per_token, partials, exponentials, buffer, n, V, exponential_scale,
                            SECOND, PROGRAMS, RAGGED, WIDTH)),
            (copy, (ring, work, rows, weight, PROGRAMS)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )  # fmt: skip
