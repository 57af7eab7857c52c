"""How a kernel's copying warp and its groups hand blocks, tiles and turns to each other, in Gluon.

What TMA has copied, a barrier in shared memory says.  That a block may be written again, and that it is the next
group's turn to multiply, named barriers say: for them a group's warps needn't meet first.  Tiles are dealt out as
programs ask for them: a program's first is the one of its number, later ones a counter in device memory gives.  The
copying warp asks, and tells each group what it has to know of a tile by way of shared memory.
"""

from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import mbarrier  # type: ignore[import-untyped]

from onchip.kernels.triton.gluon import FIRST_NAMED, named_arrive, named_sync

# Named barriers: one for each group's turn, and one for each block of the rings of keys and of values.
MOST_GROUPS = gl.constexpr(3)
MOST_STAGES = gl.constexpr(3)
_TURNS = gl.constexpr(FIRST_NAMED.value)
OF_KEYS = gl.constexpr(FIRST_NAMED.value + MOST_GROUPS.value)
OF_VALUES = gl.constexpr(FIRST_NAMED.value + MOST_GROUPS.value + MOST_STAGES.value)


@gluon.jit
def new_filled(like, N: gl.constexpr):
    """N blocks of a descriptor's, and a barrier for each that says when it has come."""
    blocks = gl.allocate_shared_memory(like.dtype, [N] + like.block_shape, like.layout)
    full = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(N):
        mbarrier.init(full.index(s), count=1)
    return blocks, full


@gluon.jit
def release(s, RING: gl.constexpr, GROUPS: gl.constexpr):
    """A group has read block s of the ring whose barriers are RING and following ones."""
    named_arrive(RING + s, 32 + 128 * GROUPS)


@gluon.jit
def await_release(s, step, RING: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """The copying warp waits until all groups have read what was in block s, if anything was."""
    if step >= STAGES:
        named_sync(RING + s, 32 + 128 * GROUPS)


@gluon.jit
def await_last_releases(step, STAGES: gl.constexpr, GROUPS: gl.constexpr):
    """The copying warp meets the groups at the barriers of the blocks that they read last."""
    for s in gl.static_range(STAGES):
        if step > s:
            named_sync(OF_KEYS + s, 32 + 128 * GROUPS)
            named_sync(OF_VALUES + s, 32 + 128 * GROUPS)


@gluon.jit
def await_turn(W: gl.constexpr):
    """Group W waits for its turn."""
    named_sync(_TURNS + W, 256)


@gluon.jit
def pass_turn(W: gl.constexpr, GROUPS: gl.constexpr):
    """It is the turn of the group after W; before any other turn the last group gives it to the first."""
    named_arrive(_TURNS + (W + 1) % GROUPS, 256)


@gluon.jit
def next_tile(counter):
    """The number of a program's next tile."""
    return gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def tell(slots, at, numbers, N: gl.constexpr):
    """Write N numbers for a group, by the warp that copies, before it says that what else belongs to them has come."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(N):
        slots.index(at * N + i).store(gl.full([1], 0, gl.int32, one) + numbers[i])


@gluon.jit
def told(slots, at, N: gl.constexpr):
    """The numbers that a group was told."""
    numbers = ()
    for i in gl.static_range(N):
        number = gl.sum(slots.index(at * N + i).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        numbers = numbers + (number,)  # type: ignore[assignment]
    return numbers
