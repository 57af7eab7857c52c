"""The forward kernel for heads of more than 128 numbers, in Gluon, for Hopper.

The walk is that of `forward`, but that each group multiplies all blocks of a tile.  Tiles are powers of two, so the 192
columns of q and k come in 128 and in the 64 that remain, and a score is the sum of two products; 256 columns come in
one part.  Values have 128 columns, or 256.  With two blocks in the rings there is room for one tile of queries, not
two: it is freed after its last scores, and the next one comes while the values of its last block are multiplied.
Results leave by few columns, since all other memory is taken.
"""

from triton.experimental import gluon  # type: ignore[import-untyped]
from triton.experimental.gluon import language as gl  # type: ignore[import-untyped]
from triton.experimental.gluon.language.nvidia.hopper import (  # type: ignore[import-untyped]
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from onchip.attention.triton.common import (
    ENTRIES,
    FEW_COLUMNS,
    FEW_REGISTERS,
    HALF,
    LOG2E,
    REGISTERS,
    TILE,
    anew,
    columns_of,
    factor_layout,
    hides_some,
    matrix,
    new_ring,
    next_block,
    place,
    product_of_wide,
    products_layout,
    seen_blocks,
    tile_range,
)
from onchip.attention.triton.handoff import (
    OF_KEYS,
    OF_VALUES,
    await_last_releases,
    await_release,
    await_turn,
    new_filled,
    next_tile,
    pass_turn,
    release,
    tell,
    told,
)
from onchip.attention.triton.softmax import begin, masked, rows_of, softmax, whole_sum, write_lse, write_out
from onchip.kernels.triton.gluon import barrier, copy_in

# What a group is told of a tile: its plane (-1 after the last one) and the group's first query, the first block, the
# number of blocks and the end of their range, and the range of blocks that all of the group's queries see.
_TOLD = gl.constexpr(7)


@gluon.jit
def _full_range(table, entry, of_mask, entries, KEYS: gl.constexpr):
    """Of a group's queries."""
    at = table + (of_mask * entries + min(entry, entries - 1)) * ENTRIES
    if KEYS == TILE:
        return gl.load(at + 2), gl.load(at + 3)
    else:  # noqa: RET505 - Triton would compile what follows too
        return gl.cdiv(gl.load(at + 6), KEYS), gl.load(at + 7) // KEYS


@gluon.jit
def _copy(rings, q, q_rest, k, k_rest, v, counter, mask, sizes, KEYS: gl.constexpr, STAGES: gl.constexpr):
    of_q, qs_rest, of_k, ks_rest, of_v, _, slots = rings
    qs, q_full, q_empty = of_q
    ks, k_full = of_k
    vs, v_full = of_v
    start, end, stop, table, stops = mask
    queries, keys, heads, group, planes, tiles, entries, own, section = sizes
    WIDE: gl.constexpr = columns_of(q, q_rest)
    FIRST: gl.constexpr = q.block_shape[-1]
    VALUES: gl.constexpr = v.block_shape[-1]
    step = 0
    count = 0
    n = gl.program_id(0)
    while n < tiles * planes:
        i, plane = place(n, tiles, planes, section)
        t, b, h = tiles - 1 - i, plane // heads, plane % heads
        first, last, _first, _last = tile_range(table, t, b * own, entries, keys, KEYS)
        j, blocks = seen_blocks(stops, b * own, keys, first, last, t * 2 * HALF, KEYS)
        for m in range(blocks):
            s = step % STAGES
            await_release(s, step, OF_KEYS, STAGES, 2)
            mbarrier.expect(k_full.index(s), KEYS * WIDE * 2)
            copy_in(k, [b, h // group, j * KEYS, 0], k_full.index(s), ks.index(s))
            if k_rest is not None:
                copy_in(k_rest, [b, h // group, j * KEYS, FIRST], k_full.index(s), ks_rest.index(s))
            if m == 0:  # whose memory is free later than that of keys
                for w in gl.static_range(2):
                    row = (t * 2 + w) * HALF
                    full = _full_range(table, t * 2 + w, b * own, entries, KEYS)
                    mbarrier.wait(q_empty.index(w), (count & 1) ^ 1)
                    tell(slots, w, (plane, row, j, blocks, last) + full, _TOLD)
                    mbarrier.expect(q_full.index(w), HALF * WIDE * 2)
                    copy_in(q, [b, h, row, 0], q_full.index(w), qs.index(w))
                    if q_rest is not None:
                        copy_in(q_rest, [b, h, row, FIRST], q_full.index(w), qs_rest.index(w))
            await_release(s, step, OF_VALUES, STAGES, 2)
            mbarrier.expect(v_full.index(s), KEYS * VALUES * 2)
            copy_in(v, [b, h // group, j * KEYS, 0], v_full.index(s), vs.index(s))
            step += 1
            j = next_block(stops, b * own, keys, j, last, t * 2 * HALF, KEYS)
        count += 1
        n = next_tile(counter)
    for w in gl.static_range(2):
        mbarrier.wait(q_empty.index(w), (count & 1) ^ 1)
        tell(slots, w, (-1, 0, 0, 0, 0, 0, 0), _TOLD)
        mbarrier.arrive(q_full.index(w), count=1)
    await_last_releases(step, STAGES, 2)


@gluon.jit
def _attend(
    rings, out, lse, mask, sinks, scale, softcap, sizes, W: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """All tiles of a program are one walk: a tile's first block is multiplied beside the last one of that before."""
    of_q, qs_rest, of_k, ks_rest, of_v, staged, slots = rings
    qs, q_full, q_empty = of_q
    ks, k_full = of_k
    vs, v_full = of_v
    start_p, end_p, stop, table, stops = mask
    queries, keys, heads, group, planes, tiles, entries, own, section = sizes
    VALUES: gl.constexpr = vs.shape[-1]
    layout: gl.constexpr = products_layout(KEYS)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    zeros = gl.zeros((HALF, KEYS), gl.float32, layout)
    acc = gl.zeros((HALF, VALUES), gl.float32, products_layout(VALUES))
    factor = (scale if softcap is None else softcap) * LOG2E
    q = matrix(qs.index(W))
    q_rest = qs_rest.index(W) if qs_rest is not None else None

    mbarrier.wait(q_full.index(W), 0)
    plane, first_row, j, blocks, last, full_first, full_last = told(slots, W, _TOLD)
    of_mask = plane // heads * own
    row, start, end = rows_of(start_p, end_p, of_mask, first_row, queries, keys, rows)
    most, total = begin(sinks, plane % heads, rows)
    mbarrier.wait(k_full.index(0), 0)
    s = product_of_wide(q, q_rest, ks.index(0), ks_rest.index(0) if ks_rest is not None else None, zeros)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    release(0, OF_KEYS, 2)
    mbarrier.arrive(q_empty.index(W), count=1, pred=blocks == 1)
    hidden = hides_some(stops, of_mask, keys, j, full_first, full_last, first_row, KEYS)
    s = masked(s, scale, softcap, j, start, end, stop, row, of_mask, keys, hidden, KEYS)
    p, most, total, _ = softmax(s, factor, most, total)
    factors = gl.convert_layout(p.to(out.dtype), factor_layout(VALUES))
    j = next_block(stops, of_mask, keys, j, last, first_row - W * HALF, KEYS)

    step = 0
    begins = 1
    count = 0
    # A `while` doesn't carry a variable that is another's initial value too.
    new_plane, new_row = anew(plane), anew(first_row)
    if W == 1:
        pass_turn(W, 2)
    while new_plane >= 0:
        old_plane, old_row = plane, first_row
        plane, first_row = new_plane, new_row
        of_mask = plane // heads * own
        row, start, end = rows_of(start_p, end_p, of_mask, first_row, queries, keys, rows)
        for m in range(begins, blocks):
            is_first = m == 0
            before = step % STAGES
            phase = (step // STAGES) & 1
            step += 1
            now = step % STAGES
            mbarrier.wait(k_full.index(now), (step // STAGES) & 1)
            await_turn(W)
            s = product_of_wide(q, q_rest, ks.index(now), ks_rest.index(now) if ks_rest is not None else None, zeros)
            mbarrier.wait(v_full.index(before), phase)
            sums = warpgroup_mma(factors, matrix(vs.index(before)), acc, is_async=True)
            pass_turn(W, 2)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            release(now, OF_KEYS, 2)
            if m == blocks - 1:
                mbarrier.arrive(q_empty.index(W), count=1)
            hidden = hides_some(stops, of_mask, keys, j, full_first, full_last, first_row, KEYS)
            s = masked(s, scale, softcap, j, start, end, stop, row, of_mask, keys, hidden, KEYS)
            old_most, old_total = most, total
            if is_first:
                most, total = begin(sinks, plane % heads, rows)
            p, most, total, change = softmax(s, factor, most, total)
            if is_first:
                whole = whole_sum(old_total, rows)
                # Before the wait, so that the compiler can't take it out of both branches and up before the softmax.
                write_lse(old_most, whole, lse, old_plane, old_row, queries, rows)
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
                release(before, OF_VALUES, 2)
                write_out(acc, whole, out, staged.index(W), old_plane, heads, old_row, FEW_COLUMNS)
                acc = gl.zeros((HALF, VALUES), gl.float32, products_layout(VALUES))
            else:
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
                release(before, OF_VALUES, 2)
                acc = acc * gl.convert_layout(change, gl.SliceLayout(1, products_layout(VALUES)))[:, None]
            factors = gl.convert_layout(p.to(out.dtype), factor_layout(VALUES))
            j = next_block(stops, of_mask, keys, j, last, first_row - W * HALF, KEYS)
        begins = 0
        count += 1
        mbarrier.wait(q_full.index(W), count & 1)
        new_plane, new_row, j, blocks, last, full_first, full_last = told(slots, W, _TOLD)
    mbarrier.wait(v_full.index(step % STAGES), (step // STAGES) & 1)
    sums = warpgroup_mma(factors, matrix(vs.index(step % STAGES)), acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    release(step % STAGES, OF_VALUES, 2)
    if W == 0:
        await_turn(W)
    whole = whole_sum(total, rows)
    write_lse(most, whole, lse, plane, first_row, queries, rows)
    write_out(acc, whole, out, staged.index(W), plane, heads, first_row, FEW_COLUMNS)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["queries", "keys", "heads", "group", "planes", "tiles", "entries", "own", "section"]
)  # fmt: skip
def attend_wide(
    q, q_rest, k, k_rest, v, out, lse, counter, start, end, stop, table, stops, sinks, scale, softcap,
    queries, keys, heads, group, planes, tiles, entries, own, section,
    KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`q_rest` is q in blocks of the columns that q's blocks leave out, if they do, like `k_rest`; `counter` is 0 at
    first.
    """
    of_q = new_ring(q, 2, 1)
    qs_rest, ks_rest = None, None
    if q_rest is not None:
        qs_rest = gl.allocate_shared_memory(q.dtype, [2] + q_rest.block_shape, q_rest.layout)
        ks_rest = gl.allocate_shared_memory(k.dtype, [STAGES] + k_rest.block_shape, k_rest.layout)
    of_k = new_filled(k, STAGES)
    of_v = new_filled(v, STAGES)
    staged = gl.allocate_shared_memory(out.dtype, [2] + out.block_shape, out.layout)
    slots = gl.allocate_shared_memory(gl.int32, [2 * _TOLD, 1], mbarrier.MBarrierLayout())
    fence_async_shared()
    barrier()
    rings = of_q, qs_rest, of_k, ks_rest, of_v, staged, slots
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    mask = start, end, stop, table, stops
    sizes = queries, keys, heads, group, planes, tiles, entries, own, section
    gl.warp_specialize(
        [
            (_attend, (rings, out, lse, mask, sinks, scale, softcap, sizes, FIRST, KEYS, STAGES)),
            (_attend, (rings, out, lse, mask, sinks, scale, softcap, sizes, SECOND, KEYS, STAGES)),
            (_copy, (rings, q, q_rest, k, k_rest, v, counter, mask, sizes, KEYS, STAGES)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )
