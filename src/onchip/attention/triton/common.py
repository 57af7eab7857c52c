"""What attention's kernels in Gluon share: layouts, scores, and the order of tiles.

Two groups of four warps share a tile, half each; a third group, of a single warp, copies what they multiply to rings in
shared memory.  Programs take tiles in turn, and copies for the next tile begin while one ends.
"""

from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import tanh

# Tokens in a tile, and in a group's half of it.
TILE = gl.constexpr(128)
HALF = gl.constexpr(64)
# Numbers that the table has for a tile.
ENTRIES = gl.constexpr(8)
# Registers of a thread, in both groups that multiply, and in the warp that copies.
REGISTERS = gl.constexpr(240)
FEW_REGISTERS = gl.constexpr(24)
# Columns that leave by way of shared memory together, where it has no room for more.
FEW_COLUMNS = gl.constexpr(64)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1.0e30)


@gluon.constexpr_function
def products_layout(N):
    """Of the result of a group's product, with N columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])


@gluon.constexpr_function
def factor_layout(N):
    """Of the first factor of such a product, in registers."""
    return gl.DotOperandLayout(0, products_layout(N), 2)


@gluon.jit
def matrix(block):
    """A block without the dimensions of 1 in front."""
    return block.reshape([block.shape[-2], block.shape[-1]])


@gluon.constexpr_function
def columns_of(x, rest):
    """Columns of a descriptor's blocks, and of those of the rest, if there is any."""
    return x.block_shape[-1] + (0 if rest is None else rest.block_shape[-1])


@gluon.jit
def anew(i):
    """i, of which the compiler doesn't know that it stays the same: what is made of it takes no registers in a loop."""
    i = gl.to_tensor(i)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def product_of_wide(a, a_rest, b, b_rest, zeros):
    """a b.T, begun but not awaited, of all columns: those of a_rest and b_rest too, if there are any; b and b_rest are
    blocks of a ring.
    """
    made = warpgroup_mma(a, matrix(b).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if a_rest is not None:
        made = warpgroup_mma(matrix(a_rest), matrix(b_rest).permute((1, 0)), made, is_async=True)
    return made


@gluon.jit
def place(n, tiles, planes, section):
    """Tile number n: which of a plane's tiles, from the first, and which plane.

    A plane is a head of a sequence.  All tiles of a section of planes come before those of the next: L2 has what these
    read.
    """
    first = n // (section * tiles) * section
    width = min(section, planes - first)
    within = n - first * tiles
    return within // width, first + within % width


@gluon.jit
def new_ring(like, N: gl.constexpr, READERS: gl.constexpr):
    """N blocks of a descriptor's, and their barriers, all of which the kernel has to use: see `new_barriers`."""
    blocks = gl.allocate_shared_memory(like.dtype, [N] + like.block_shape, like.layout)
    full = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(N):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=READERS)
    return blocks, full, empty


@gluon.jit
def query_entry(table, t, of_mask, entries, keys, GROUPS: gl.constexpr, KEYS: gl.constexpr):
    """The range of blocks of keys that a tile of queries sees, of one block at least, and that of those which all
    queries see.  The table has so many entries of a sequence, one for each group's queries.
    """
    at = table + (of_mask * entries + t * GROUPS) * ENTRIES
    first, last, full_first, full_last = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    for g in gl.static_range(1, GROUPS):
        at = table + (of_mask * entries + min(t * GROUPS + g, entries - 1)) * ENTRIES
        first, last = min(first, gl.load(at)), max(last, gl.load(at + 1))
        full_first, full_last = max(full_first, gl.load(at + 2)), min(full_last, gl.load(at + 3))
    first = min(first, gl.cdiv(keys, KEYS) - 1)
    return first, max(last, first + 1), full_first, full_last


@gluon.jit
def _small_blocks_range(table, t, of_mask, entries, keys, KEYS: gl.constexpr):
    """As `query_entry`, for two groups, of blocks of fewer keys."""
    at = table + (of_mask * entries + t * 2) * ENTRIES
    other = table + (of_mask * entries + min(t * 2 + 1, entries - 1)) * ENTRIES
    least, most = min(gl.load(at + 4), gl.load(other + 4)), max(gl.load(at + 5), gl.load(other + 5))
    full_first = gl.cdiv(max(gl.load(at + 6), gl.load(other + 6)), KEYS)
    full_last = min(gl.load(at + 7), gl.load(other + 7)) // KEYS
    first = min(least // KEYS, gl.cdiv(keys, KEYS) - 1)
    return first, max(gl.cdiv(most, KEYS), first + 1), full_first, full_last


@gluon.jit
def tile_range(table, t, of_mask, entries, keys, KEYS: gl.constexpr):
    """The same, for two groups, of any block."""
    if KEYS == TILE:
        return query_entry(table, t, of_mask, entries, keys, 2, KEYS)
    else:  # noqa: RET505 - Triton would compile what follows too
        return _small_blocks_range(table, t, of_mask, entries, keys, KEYS)


@gluon.jit
def _largest_stop(stops, of_mask, keys, j, KEYS: gl.constexpr):
    block = j if KEYS == TILE else j * KEYS // TILE
    return gl.load(stops + 2 * (of_mask * gl.cdiv(keys, TILE) + block) + 1)


@gluon.jit
def seen_blocks(stops, of_mask, keys, first, last, row, KEYS: gl.constexpr):
    """Of a range of blocks the first that a tile from this row on sees, and how many it sees, one or more."""
    begin, count = first, last - first
    if stops is not None:
        begin, count = last - 1, 0
        for j in range(first, last):
            sees = (_largest_stop(stops, of_mask, keys, j, KEYS) > row).to(gl.int32)
            begin = min(begin, j + (1 - sees) * (last - first))
            count += sees
    return begin, max(count, 1)


@gluon.jit
def next_block(stops, of_mask, keys, j, last, row, KEYS: gl.constexpr):
    """The next one that it sees."""
    j += 1
    if stops is not None:
        while (j < last) & (_largest_stop(stops, of_mask, keys, min(j, last - 1), KEYS) <= row):
            j += 1
    return j


@gluon.jit
def hides_some(stops, of_mask, keys, j, full_first, full_last, row, KEYS: gl.constexpr):
    """Whether a group's queries from this row on don't see all keys of a block."""
    hides = (j < full_first) | (j >= full_last)
    if stops is not None:
        block = j if KEYS == TILE else j * KEYS // TILE
        hides = hides | (gl.load(stops + 2 * (of_mask * gl.cdiv(keys, TILE) + block)) < row + HALF)
    return hides


@gluon.jit
def capped(s, scale, softcap):
    """What the scores are, of their softcap."""
    return tanh(s * (scale / softcap))


@gluon.jit
def are_seen(j, start, end, stop, row, of_mask, keys, KEYS: gl.constexpr):
    """Of each pair of a query and a key of block j."""
    c = j * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, products_layout(KEYS)))
    seen = (c[None, :] >= start[:, None]) & (c[None, :] < end[:, None])
    if stop is not None:
        until = gl.load(stop + of_mask.to(gl.int64) * keys + c, mask=c < keys, other=0)
        seen = seen & (row[:, None] < until[None, :])
    return seen
