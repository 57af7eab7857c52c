"""The forward kernel, in Gluon, for Hopper: a tile of queries walks over its range of keys, with a running softmax.

A group multiplies for the scores of the next block and for the sum of values of the last one at the same time.  The
groups of warps take turns: while one computes exponentials, another multiplies.  A tile's range is what any of its
groups sees; a group lets pass the blocks of it that none of its own queries sees.
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
    FEW_REGISTERS,
    HALF,
    LOG2E,
    anew,
    factor_layout,
    hides_some,
    matrix,
    new_ring,
    next_block,
    place,
    products_layout,
    query_entry,
    seen_blocks,
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
# number of blocks and the end of their range, then of the group's own queries the range of blocks that all see, and
# that of blocks that any sees.
_TOLD = gl.constexpr(9)


@gluon.jit
def _own_ranges(table, entry, of_mask, entries):
    """Of a group's queries."""
    at = table + (of_mask * entries + min(entry, entries - 1)) * ENTRIES
    return gl.load(at + 2), gl.load(at + 3), gl.load(at), gl.load(at + 1)


@gluon.jit
def _copy(
    rings, q, k, v, counter, mask, sizes,
    D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    of_q, of_k, of_v, _, slots = rings
    qs, q_full, q_empty = of_q
    ks, k_full = of_k
    vs, v_full = of_v
    start, end, stop, table, stops = mask
    queries, keys, heads, group, planes, tiles, entries, own, section = sizes
    step = 0
    count = 0
    n = gl.program_id(0)
    while n < tiles * planes:
        i, plane = place(n, tiles, planes, section)
        t, b, h = tiles - 1 - i, plane // heads, plane % heads
        first, last, _first, _last = query_entry(table, t, b * own, entries, keys, GROUPS, KEYS)
        j, blocks = seen_blocks(stops, b * own, keys, first, last, t * GROUPS * HALF, KEYS)
        for w in gl.static_range(GROUPS):
            at = GROUPS * (count % 2) + w
            ranges = _own_ranges(table, t * GROUPS + w, b * own, entries)
            mbarrier.wait(q_empty.index(at), ((count // 2) & 1) ^ 1)
            tell(slots, at, (plane, (t * GROUPS + w) * HALF, j, blocks, last) + ranges, _TOLD)
            mbarrier.expect(q_full.index(at), HALF * D * 2)
            copy_in(q, [b, h, (t * GROUPS + w) * HALF, 0], q_full.index(at), qs.index(at))
        for _m in range(blocks):
            s = step % STAGES
            await_release(s, step, OF_KEYS, STAGES, GROUPS)
            mbarrier.expect(k_full.index(s), KEYS * D * 2)
            copy_in(k, [b, h // group, j * KEYS, 0], k_full.index(s), ks.index(s))
            await_release(s, step, OF_VALUES, STAGES, GROUPS)
            mbarrier.expect(v_full.index(s), KEYS * D * 2)
            copy_in(v, [b, h // group, j * KEYS, 0], v_full.index(s), vs.index(s))
            step += 1
            j = next_block(stops, b * own, keys, j, last, t * GROUPS * HALF, KEYS)
        count += 1
        n = next_tile(counter)
    for w in gl.static_range(GROUPS):
        at = GROUPS * (count % 2) + w
        mbarrier.wait(q_empty.index(at), ((count // 2) & 1) ^ 1)
        tell(slots, at, (-1, 0, 0, 0, 0, 0, 0, 0, 0), _TOLD)
        mbarrier.arrive(q_full.index(at), count=1)
    await_last_releases(step, STAGES, GROUPS)


@gluon.jit
def _skip(
    rings, stops, of_mask, keys, m, limit, j, step, skipped, tile_row, last, own_first, own_last,
    W: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Let blocks pass which a group doesn't see, and which it may: one of values that it still needs takes a place in
    the ring, and the blocks after it can only come into the others.
    """
    _, of_k, of_v, _, _ = rings
    _, k_full = of_k
    _, v_full = of_v
    while (m < limit) & (skipped < STAGES - 1) & ((j < own_first) | (j >= own_last)):
        step += 1
        s = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(k_full.index(s), phase)
        await_turn(W)
        pass_turn(W, GROUPS)
        release(s, OF_KEYS, GROUPS)
        mbarrier.wait(v_full.index(s), phase)
        release(s, OF_VALUES, GROUPS)
        m += 1
        skipped += 1
        j = next_block(stops, of_mask, keys, j, last, tile_row, KEYS)
    return m, j, step, skipped


@gluon.jit
def _attend(
    rings, out, lse, mask, sinks, scale, softcap, sizes,
    W: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """All tiles of a program are one walk: a tile's first block is multiplied beside the last one of that before."""
    of_q, of_k, of_v, staged, slots = rings
    qs, q_full, q_empty = of_q
    ks, k_full = of_k
    vs, v_full = of_v
    start_p, end_p, stop, table, stops = mask
    queries, keys, heads, group, planes, tiles, entries, own, section = sizes
    layout: gl.constexpr = products_layout(KEYS)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    zeros = gl.zeros((HALF, KEYS), gl.float32, layout)
    acc = gl.zeros((HALF, D), gl.float32, products_layout(D))
    factor = (scale if softcap is None else softcap) * LOG2E

    mbarrier.wait(q_full.index(W), 0)
    plane, first_row, j, blocks, last, full_first, full_last, own_first, own_last = told(slots, W, _TOLD)
    of_mask = plane // heads * own
    row, start, end = rows_of(start_p, end_p, of_mask, first_row, queries, keys, rows)
    most, total = begin(sinks, plane % heads, rows)
    mbarrier.wait(k_full.index(0), 0)
    k = matrix(ks.index(0)).permute((1, 0))
    s = warpgroup_mma(matrix(qs.index(W)), k, zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    release(0, OF_KEYS, GROUPS)
    hidden = hides_some(stops, of_mask, keys, j, full_first, full_last, first_row, KEYS)
    s = masked(s, scale, softcap, j, start, end, stop, row, of_mask, keys, hidden, KEYS)
    p, most, total, _ = softmax(s, factor, most, total)
    factors = gl.convert_layout(p.to(out.dtype), factor_layout(D))
    j = next_block(stops, of_mask, keys, j, last, first_row - W * HALF, KEYS)

    step = 0
    held = 0  # the last block that the group didn't let pass
    skipped = 0  # those since then
    m = 1
    count = 0
    # A `while` doesn't carry a variable that is another's initial value too.
    new_plane, new_row = anew(plane), anew(first_row)
    if W == GROUPS - 1:
        pass_turn(W, GROUPS)
    while new_plane >= 0:
        old_plane, old_row = plane, first_row
        plane, first_row = new_plane, new_row
        of_mask = plane // heads * own
        row, start, end = rows_of(start_p, end_p, of_mask, first_row, queries, keys, rows)
        q = matrix(qs.index(GROUPS * (count % 2) + W))
        is_first = m == 0
        # Of a tile one block at least is multiplied: beside it the one before ends.
        before_last = blocks - is_first.to(gl.int32)  # type: ignore[attr-defined]
        m, j, step, skipped = _skip(
            rings, stops, of_mask, keys, m, before_last, j, step, skipped, first_row - W * HALF,
            last, own_first, own_last, W, KEYS, STAGES, GROUPS,
        )  # fmt: skip
        while m < blocks:
            before = held % STAGES
            phase = (held // STAGES) & 1
            step += 1
            held = step
            now = step % STAGES
            mbarrier.wait(k_full.index(now), (step // STAGES) & 1)
            await_turn(W)
            s = warpgroup_mma(q, matrix(ks.index(now)).permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), phase)
            sums = warpgroup_mma(factors, matrix(vs.index(before)), acc, is_async=True)
            pass_turn(W, GROUPS)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            release(now, OF_KEYS, GROUPS)
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
                mbarrier.arrive(q_empty.index(GROUPS * ((count + 1) % 2) + W), count=1)
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
                release(before, OF_VALUES, GROUPS)
                write_out(acc, whole, out, staged.index(W), old_plane, heads, old_row, D)
                acc = gl.zeros((HALF, D), gl.float32, products_layout(D))
            else:
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
                release(before, OF_VALUES, GROUPS)
                acc = acc * gl.convert_layout(change, gl.SliceLayout(1, products_layout(D)))[:, None]
            factors = gl.convert_layout(p.to(out.dtype), factor_layout(D))
            is_first = m < 0
            m += 1
            j = next_block(stops, of_mask, keys, j, last, first_row - W * HALF, KEYS)
            m, j, step, skipped = _skip(
                rings, stops, of_mask, keys, m, blocks, j, step, skipped * 0, first_row - W * HALF,
                last, own_first, own_last, W, KEYS, STAGES, GROUPS,
            )  # fmt: skip
        m = 0
        count += 1
        at = GROUPS * (count % 2) + W
        mbarrier.wait(q_full.index(at), (count // 2) & 1)
        new_plane, new_row, j, blocks, last, full_first, full_last, own_first, own_last = told(slots, at, _TOLD)
    mbarrier.wait(v_full.index(held % STAGES), (held // STAGES) & 1)
    sums = warpgroup_mma(factors, matrix(vs.index(held % STAGES)), acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    release(held % STAGES, OF_VALUES, GROUPS)
    if W == 0:
        await_turn(W)
    whole = whole_sum(total, rows)
    write_lse(most, whole, lse, plane, first_row, queries, rows)
    write_out(acc, whole, out, staged.index(W), plane, heads, first_row, D)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["queries", "keys", "heads", "group", "planes", "tiles", "entries", "own", "section"]
)  # fmt: skip
def attend(
    q, k, v, out, lse, counter, start, end, stop, table, stops, sinks, scale, softcap,
    queries, keys, heads, group, planes, tiles, entries, own, section,
    D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """`counter` is 0 when it starts: see `handoff`."""
    of_q = new_ring(q, 2 * GROUPS, 1)
    of_k = new_filled(k, STAGES)
    of_v = new_filled(v, STAGES)
    staged = gl.allocate_shared_memory(out.dtype, [GROUPS] + out.block_shape, out.layout)
    slots = gl.allocate_shared_memory(gl.int32, [2 * GROUPS * _TOLD, 1], mbarrier.MBarrierLayout())
    fence_async_shared()
    barrier()
    rings = of_q, of_k, of_v, staged, slots
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    THIRD: gl.constexpr = 2
    mask = start, end, stop, table, stops
    sizes = queries, keys, heads, group, planes, tiles, entries, own, section
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (rings, out, lse, mask, sinks, scale, softcap, sizes, FIRST, D, KEYS, STAGES, GROUPS)),
                (_attend, (rings, out, lse, mask, sinks, scale, softcap, sizes, SECOND, D, KEYS, STAGES, GROUPS)),
                (_copy, (rings, q, k, v, counter, mask, sizes, D, KEYS, STAGES, GROUPS)),
            ],
            [4, 1],
            [REGISTERS, FEW_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (rings, out, lse, mask, sinks, scale, softcap, sizes, FIRST, D, KEYS, STAGES, GROUPS)),
                (_attend, (rings, out, lse, mask, sinks, scale, softcap, sizes, SECOND, D, KEYS, STAGES, GROUPS)),
                (_attend, (rings, out, lse, mask, sinks, scale, softcap, sizes, THIRD, D, KEYS, STAGES, GROUPS)),
                (_copy, (rings, q, k, v, counter, mask, sizes, D, KEYS, STAGES, GROUPS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, FEW_REGISTERS],
        )
