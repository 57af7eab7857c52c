"""A tile whose halves are staggered in time, in Gluon, for Hopper: for products in 16 bits with a long epilogue.

Two groups of four warps share a tile: each has half of its rows, and both multiply by the same blocks of the second
operand.  A third group, of a single warp, copies the blocks to a ring in shared memory.  The second group begins LAG
steps late and stays behind, so that one multiplies while the other ends its half, as far as the ring reaches.
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

from onchip.kernels.triton.gluon import barrier, new_barriers

STEP = gl.constexpr(64)
"""How many numbers a step along the sum has."""
LAG = gl.constexpr(2)
"""How many steps later the second group begins."""


@gluon.constexpr_function
def blocks_shape(stages, block, copies):
    *front, rows, columns = block
    return [stages, *front, copies * rows, columns]


@gluon.jit
def new_ring(own, common, STAGES: gl.constexpr, COPIES: gl.constexpr = 1):
    """Blocks of the operands of these descriptors, the first's for each group, the second's of COPIES one below the
    other; a barrier for each stage that it is full and that it is empty, and one of the lag.
    """
    own_blocks = gl.allocate_shared_memory(own.dtype, [2 * STAGES] + own.block_shape, own.layout)
    shape: gl.constexpr = blocks_shape(STAGES, common.block_shape, COPIES)
    common_blocks = gl.allocate_shared_memory(common.dtype, shape, common.layout)
    full, empty = new_barriers(STAGES, 2)
    behind = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(behind, count=1)
    fence_async_shared()
    barrier()
    return own_blocks, common_blocks, full, empty, behind


@gluon.jit
def wait_for_room(ring, step, STAGES: gl.constexpr):
    """Wait until a step's blocks may be written."""
    _, _, _, empty, _ = ring
    mbarrier.wait(empty.index(step % STAGES), ((step // STAGES) & 1) ^ 1)


@gluon.jit
def begin_copies(ring, step, BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Wait for room for a step, of so many bytes: the barrier to copy with, and the step's blocks."""
    own_blocks, common_blocks, full, _, _ = ring
    s = step % STAGES
    wait_for_room(ring, step, STAGES)
    mbarrier.expect(full.index(s), BYTES)
    return full.index(s), own_blocks.index(2 * s), own_blocks.index(2 * s + 1), common_blocks.index(s)


@gluon.jit
def add_step(
    ring, step, acc, use_acc: gl.constexpr,
    OWN: gl.constexpr, COMMON: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """acc + a step of the product, once its blocks have come."""
    own_blocks, common_blocks, full, _, _ = ring
    s = step % STAGES
    mbarrier.wait(full.index(s), (step // STAGES) & 1)
    a, b = as_matrix(own_blocks.index(2 * s + W)), as_matrix(common_blocks.index(s))
    if OWN == "km":
        a = a.permute((1, 0))
    if COMMON == "nk":
        b = b.permute((1, 0))
    return warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def as_matrix(block):
    """Without the dimensions of 1 in front."""
    if len(block.shape) > 2:
        return block.reshape([block.shape[-2], block.shape[-1]])
    else:  # noqa: RET505 - a value of another type
        return block


@gluon.jit
def begin_product(
    ring, step, steps, zeros, is_first,
    OWN: gl.constexpr, COMMON: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The product of group W's half of a tile, whose first step has this number: all steps but the last are done.

    OWN, COMMON: how blocks lie, "mk" or "km", "kn" or "nk".

    The first step stands apart from the loop, or ptxas would wait for each step before the next.
    """
    _, _, _, empty, behind = ring
    if W == 1:
        if is_first:
            mbarrier.wait(behind, 0)
    acc = add_step(ring, step, zeros, False, OWN, COMMON, W, STAGES)
    for k in range(1, steps):
        acc = add_step(ring, step + k, acc, True, OWN, COMMON, W, STAGES)
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
