"""The forward kernel, in Gluon, for Hopper: a tile of queries walks over its range of keys, with a running softmax.

A group multiplies for the scores of the next block and for the sum of values of the last one at the same time.  The
groups of warps take turns: while one computes exponentials, another multiplies.
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
    FEW_REGISTERS,
    HALF,
    LN2,
    LOG2E,
    LOWEST,
    factor_layout,
    hides_some,
    matrix,
    new_ring,
    next_block,
    place,
    products_layout,
    query_entry,
    scores,
    seen_blocks,
)
from onchip.kernels.triton.gluon import barrier, copy_in, send


@gluon.jit
def _copy(
    rings, q, k, v, mask, sizes, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr
):  # fmt: skip
    of_q, of_k, of_v, _, _ = rings
    qs, q_full, q_empty = of_q
    ks, k_full, k_empty = of_k
    vs, v_full, v_empty = of_v
    start, end, stop, table, stops = mask
    queries, keys, heads, group, planes, tiles, entries, own, section = sizes
    step = 0
    count = 0
    for n in range(gl.program_id(0), tiles * planes, gl.num_programs(0)):
        i, plane = place(n, tiles, planes, section)
        t, b, h = tiles - 1 - i, plane // heads, plane % heads
        first, last, _first, _last = query_entry(table, t, b * own, entries, keys, GROUPS, KEYS)
        for w in gl.static_range(GROUPS):
            at = GROUPS * (count % 2) + w
            mbarrier.wait(q_empty.index(at), ((count // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(at), HALF * D * 2)
            copy_in(q, [b, h, (t * GROUPS + w) * HALF, 0], q_full.index(at), qs.index(at))
        j, blocks = seen_blocks(stops, b * own, keys, first, last, t * GROUPS * HALF, KEYS)
        for _m in range(blocks):
            s = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_empty.index(s), phase ^ 1)
            mbarrier.expect(k_full.index(s), KEYS * D * 2)
            copy_in(k, [b, h // group, j * KEYS, 0], k_full.index(s), ks.index(s))
            mbarrier.wait(v_empty.index(s), phase ^ 1)
            mbarrier.expect(v_full.index(s), KEYS * D * 2)
            copy_in(v, [b, h // group, j * KEYS, 0], v_full.index(s), vs.index(s))
            step += 1
            j = next_block(stops, b * own, keys, j, last, t * GROUPS * HALF, KEYS)
        count += 1


@gluon.jit
def begin(sinks, h, rows: gl.constexpr):
    """The largest score and the sum of exponentials before the first block."""
    most = gl.full((HALF,), LOWEST, gl.float32, rows)
    total = gl.zeros((HALF,), gl.float32, rows)
    if sinks is not None:
        sink = gl.load(sinks + h).to(gl.float32) * LOG2E
        most = gl.maximum(most, sink)
        total = gl.exp2(sink - most)
    return most, total


@gluon.jit
def softmax(s, factor, most, total):
    """Exponentials of a block less the largest score until now, their sum, and what earlier sums are multiplied by."""
    now = gl.maximum(most, gl.max(s, 1) * factor)
    p = gl.exp2(s * factor - now[:, None])
    change = gl.exp2(most - now)
    return p, now, total * change + gl.sum(p, 1), change


@gluon.jit
def _finish(acc, most, total, out, lse, staged, plane, heads, first_row, queries, rows: gl.constexpr, D: gl.constexpr):
    """Write a group's half of a tile."""
    of_out: gl.constexpr = products_layout(D)
    nothing = gl.convert_layout(total == 0, gl.SliceLayout(1, of_out))
    inverse = gl.convert_layout(1 / total, gl.SliceLayout(1, of_out))
    acc = gl.where(nothing[:, None], 0.0, acc * inverse[:, None])
    row = first_row + gl.arange(0, HALF, rows)
    gl.store(lse + plane.to(gl.int64) * queries + row, (most + gl.log2(total)) * LN2, mask=row < queries)
    send(acc, out, staged, (plane // heads, plane % heads, first_row), 0, HALF, D, D)


@gluon.jit
def _attend(
    rings, out, lse, mask, sinks, scale, softcap, sizes,
    W: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """All tiles of a program are one walk: a tile's first block is multiplied beside the last one of that before."""
    of_q, of_k, of_v, staged, turns = rings
    qs, q_full, q_empty = of_q
    ks, k_full, k_empty = of_k
    vs, v_full, v_empty = of_v
    start_p, end_p, stop, table, stops = mask
    queries, keys, heads, group, planes, tiles, entries, own, section = sizes
    layout: gl.constexpr = products_layout(KEYS)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    zeros = gl.zeros((HALF, KEYS), gl.float32, layout)
    acc = gl.zeros((HALF, D), gl.float32, products_layout(D))
    factor = (scale if softcap is None else softcap) * LOG2E
    begins = gl.program_id(0)

    i, plane = place(begins, tiles, planes, section)
    first_row = ((tiles - 1 - i) * GROUPS + W) * HALF
    of_mask = plane // heads * own
    first, last, full_first, full_last = query_entry(table, tiles - 1 - i, of_mask, entries, keys, GROUPS, KEYS)
    row, start, end = rows_of(start_p, end_p, of_mask, first_row, queries, keys, rows)
    most, total = begin(sinks, plane % heads, rows)
    mbarrier.wait(q_full.index(W), 0)
    mbarrier.wait(k_full.index(0), 0)
    k = matrix(ks.index(0)).permute((1, 0))
    s = warpgroup_mma(matrix(qs.index(W)), k, zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    mbarrier.arrive(k_empty.index(0), count=1)
    j, _blocks = seen_blocks(stops, of_mask, keys, first, last, first_row - W * HALF, KEYS)
    hidden = hides_some(stops, of_mask, keys, j, full_first, full_last, first_row, KEYS)
    s = scores(s, scale, softcap, j, start, end, stop, row, of_mask, keys, hidden, KEYS)
    p, most, total, _ = softmax(s, factor, most, total)
    factors = gl.convert_layout(p.to(out.dtype), factor_layout(D))

    step = 0
    turn = 0
    count = 0
    for n in range(begins, tiles * planes, gl.num_programs(0)):
        old_plane, old_row = plane, first_row
        i, plane = place(n, tiles, planes, section)
        first_row = ((tiles - 1 - i) * GROUPS + W) * HALF
        of_mask = plane // heads * own
        first, last, full_first, full_last = query_entry(table, tiles - 1 - i, of_mask, entries, keys, GROUPS, KEYS)
        row, start, end = rows_of(start_p, end_p, of_mask, first_row, queries, keys, rows)
        at = GROUPS * (count % 2) + W
        q = matrix(qs.index(at))
        mbarrier.wait(q_full.index(at), (count // 2) & 1)
        j, blocks = seen_blocks(stops, of_mask, keys, first, last, first_row - W * HALF, KEYS)
        if n == begins:
            j = next_block(stops, of_mask, keys, j, last, first_row - W * HALF, KEYS)
        for m in range((n == begins).to(gl.int32), blocks):
            is_first = m == 0
            before = step % STAGES
            phase = (step // STAGES) & 1
            step += 1
            now = step % STAGES
            mbarrier.wait(k_full.index(now), (step // STAGES) & 1)
            mbarrier.wait(turns.index(W), (turn & 1) ^ (W == 0))  # the first group begins
            s = warpgroup_mma(q, matrix(ks.index(now)).permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), phase)
            sums = warpgroup_mma(factors, matrix(vs.index(before)), acc, is_async=True)
            mbarrier.arrive(turns.index((W + 1) % GROUPS), count=1)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            mbarrier.arrive(k_empty.index(now), count=1)
            mbarrier.arrive(q_empty.index(GROUPS * ((count + 1) % 2) + W), count=1, pred=is_first)
            hidden = hides_some(stops, of_mask, keys, j, full_first, full_last, first_row, KEYS)
            s = scores(s, scale, softcap, j, start, end, stop, row, of_mask, keys, hidden, KEYS)
            old_most, old_total = most, total
            if is_first:
                most, total = begin(sinks, plane % heads, rows)
            p, most, total, change = softmax(s, factor, most, total)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
            mbarrier.arrive(v_empty.index(before), count=1)
            if is_first:
                _finish(
                    acc, old_most, old_total, out, lse, staged.index(W), old_plane, heads, old_row, queries, rows, D
                )
                acc = gl.zeros((HALF, D), gl.float32, products_layout(D))
            else:
                acc = acc * gl.convert_layout(change, gl.SliceLayout(1, products_layout(D)))[:, None]
            factors = gl.convert_layout(p.to(out.dtype), factor_layout(D))
            turn += 1
            j = next_block(stops, of_mask, keys, j, last, first_row - W * HALF, KEYS)
        count += 1
    mbarrier.wait(v_full.index(step % STAGES), (step // STAGES) & 1)
    sums = warpgroup_mma(factors, matrix(vs.index(step % STAGES)), acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    _finish(acc, most, total, out, lse, staged.index(W), plane, heads, first_row, queries, rows, D)
    tma.store_wait(0)


@gluon.jit
def rows_of(start_p, end_p, of_mask, first_row, queries, keys, rows: gl.constexpr):
    """A group's queries, and their ranges."""
    row = first_row + gl.arange(0, HALF, rows)
    at = of_mask.to(gl.int64) * queries + row
    start = gl.load(start_p + at, mask=row < queries, other=0)
    return row, start, gl.minimum(gl.load(end_p + at, mask=row < queries, other=0), keys)


@gluon.jit(
    do_not_specialize=["queries", "keys", "heads", "group", "planes", "tiles", "entries", "own", "section"]
)  # fmt: skip
def attend(
    q, k, v, out, lse, start, end, stop, table, stops, sinks, scale, softcap,
    queries, keys, heads, group, planes, tiles, entries, own, section,
    D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    of_q = new_ring(q, 2 * GROUPS, 1)
    of_k = new_ring(k, STAGES, GROUPS)
    of_v = new_ring(v, STAGES, GROUPS)
    staged = gl.allocate_shared_memory(out.dtype, [GROUPS] + out.block_shape, out.layout)
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for w in gl.static_range(GROUPS):
        mbarrier.init(turns.index(w), count=1)
    fence_async_shared()
    barrier()
    rings = of_q, of_k, of_v, staged, turns
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
                (_copy, (rings, q, k, v, mask, sizes, D, KEYS, STAGES, GROUPS)),
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
                (_copy, (rings, q, k, v, mask, sizes, D, KEYS, STAGES, GROUPS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, FEW_REGISTERS],
        )
