"""The forward kernel for heads of more than 128 numbers, in Gluon, for Hopper.

The walk is that of `forward`.  Tiles are powers of two, so the 192 columns of q and k come in 128 and in the 64 that
remain, and a score is the sum of two products; 256 columns come in one part.  Values have 128 columns, or 256.  With
two blocks in the rings there is room for one tile of queries, not two: it is freed after its last scores, and the next
one comes while the values of its last block are multiplied.  Results leave by few columns, since all other memory is
taken.
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
    FEW_COLUMNS,
    FEW_REGISTERS,
    HALF,
    LN2,
    LOG2E,
    REGISTERS,
    TILE,
    columns_of,
    factor_layout,
    hides_some,
    matrix,
    new_ring,
    next_block,
    place,
    product_of_wide,
    products_layout,
    query_entry,
    query_range,
    scores,
    seen_blocks,
)
from onchip.attention.triton.forward import begin, rows_of, softmax
from onchip.kernels.triton.gluon import barrier, copy_in, send


@gluon.jit
def _range(table, t, of_mask, entries, keys, KEYS: gl.constexpr):
    if KEYS == TILE:
        return query_entry(table, t, of_mask, entries, keys, 2, KEYS)
    else:  # noqa: RET505 - Triton would compile what follows too
        return query_range(table, t, of_mask, entries, keys, KEYS)


@gluon.jit
def _copy(rings, q, q_rest, k, k_rest, v, mask, sizes, KEYS: gl.constexpr, STAGES: gl.constexpr):
    of_q, qs_rest, of_k, ks_rest, of_v, _, _ = rings
    qs, q_full, q_empty = of_q
    ks, k_full, k_empty = of_k
    vs, v_full, v_empty = of_v
    start, end, stop, table, stops = mask
    queries, keys, heads, group, planes, tiles, entries, own, section = sizes
    WIDE: gl.constexpr = columns_of(q, q_rest)
    FIRST: gl.constexpr = q.block_shape[-1]
    VALUES: gl.constexpr = v.block_shape[-1]
    step = 0
    count = 0
    for n in range(gl.program_id(0), tiles * planes, gl.num_programs(0)):
        i, plane = place(n, tiles, planes, section)
        t, b, h = tiles - 1 - i, plane // heads, plane % heads
        first, last, _first, _last = _range(table, t, b * own, entries, keys, KEYS)
        j, blocks = seen_blocks(stops, b * own, keys, first, last, t * 2 * HALF, KEYS)
        for m in range(blocks):
            s = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_empty.index(s), phase ^ 1)
            mbarrier.expect(k_full.index(s), KEYS * WIDE * 2)
            copy_in(k, [b, h // group, j * KEYS, 0], k_full.index(s), ks.index(s))
            if k_rest is not None:
                copy_in(k_rest, [b, h // group, j * KEYS, FIRST], k_full.index(s), ks_rest.index(s))
            if m == 0:  # whose memory is free later than that of keys
                for w in gl.static_range(2):
                    row = (t * 2 + w) * HALF
                    mbarrier.wait(q_empty.index(w), (count & 1) ^ 1)
                    mbarrier.expect(q_full.index(w), HALF * WIDE * 2)
                    copy_in(q, [b, h, row, 0], q_full.index(w), qs.index(w))
                    if q_rest is not None:
                        copy_in(q_rest, [b, h, row, FIRST], q_full.index(w), qs_rest.index(w))
            mbarrier.wait(v_empty.index(s), phase ^ 1)
            mbarrier.expect(v_full.index(s), KEYS * VALUES * 2)
            copy_in(v, [b, h // group, j * KEYS, 0], v_full.index(s), vs.index(s))
            step += 1
            j = next_block(stops, b * own, keys, j, last, t * 2 * HALF, KEYS)
        count += 1


@gluon.jit
def _tile(n, mask, sizes, rows: gl.constexpr, W: gl.constexpr, KEYS: gl.constexpr):
    """A group's half of tile n: its plane and first query, its range of blocks of keys, that of those which all its
    queries see, and the ranges of these.
    """
    start_p, end_p, stop, table, stops = mask
    queries, keys, heads, group, planes, tiles, entries, own, section = sizes
    i, plane = place(n, tiles, planes, section)
    first_row = ((tiles - 1 - i) * 2 + W) * HALF
    of_mask = plane // heads * own
    first, last, full_first, full_last = _range(table, tiles - 1 - i, of_mask, entries, keys, KEYS)
    row, start, end = rows_of(start_p, end_p, of_mask, first_row, queries, keys, rows)
    return plane, first_row, first, last, full_first, full_last, start, end


@gluon.jit
def _write_lse(most, total, lse, plane, first_row, queries, rows: gl.constexpr):
    row = first_row + gl.arange(0, HALF, rows)
    gl.store(lse + plane.to(gl.int64) * queries + row, (most + gl.log2(total)) * LN2, mask=row < queries)


@gluon.jit
def _write_out(acc, total, out, staged, plane, heads, first_row):
    """Of a group's half of a tile."""
    VALUES: gl.constexpr = acc.shape[1]
    of_out: gl.constexpr = products_layout(VALUES)
    nothing = gl.convert_layout(total == 0, gl.SliceLayout(1, of_out))
    inverse = gl.convert_layout(1 / total, gl.SliceLayout(1, of_out))
    acc = gl.where(nothing[:, None], 0.0, acc * inverse[:, None])
    send(acc, out, staged, (plane // heads, plane % heads, first_row), 0, HALF, VALUES, FEW_COLUMNS)


@gluon.jit
def _attend(
    rings, out, lse, mask, sinks, scale, softcap, sizes, W: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """All tiles of a program are one walk: a tile's first block is multiplied beside the last one of that before."""
    of_q, qs_rest, of_k, ks_rest, of_v, staged, turns = rings
    qs, q_full, q_empty = of_q
    ks, k_full, k_empty = of_k
    vs, v_full, v_empty = of_v
    start_p, end_p, stop, table, stops = mask
    queries, keys, heads, group, planes, tiles, entries, own, section = sizes
    VALUES: gl.constexpr = vs.shape[-1]
    layout: gl.constexpr = products_layout(KEYS)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    zeros = gl.zeros((HALF, KEYS), gl.float32, layout)
    acc = gl.zeros((HALF, VALUES), gl.float32, products_layout(VALUES))
    factor = (scale if softcap is None else softcap) * LOG2E
    begins = gl.program_id(0)
    q = matrix(qs.index(W))
    q_rest = qs_rest.index(W) if qs_rest is not None else None

    plane, first_row, first, last, full_first, full_last, start, end = _tile(begins, mask, sizes, rows, W, KEYS)
    row = first_row + gl.arange(0, HALF, rows)
    of_mask = plane // heads * own
    most, total = begin(sinks, plane % heads, rows)
    mbarrier.wait(q_full.index(W), 0)
    mbarrier.wait(k_full.index(0), 0)
    s = product_of_wide(q, q_rest, ks.index(0), ks_rest.index(0) if ks_rest is not None else None, zeros)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
    mbarrier.arrive(k_empty.index(0), count=1)
    j, _blocks = seen_blocks(stops, of_mask, keys, first, last, first_row - W * HALF, KEYS)
    hidden = hides_some(stops, of_mask, keys, j, full_first, full_last, first_row, KEYS)
    s = scores(s, scale, softcap, j, start, end, stop, row, of_mask, keys, hidden, KEYS)
    p, most, total, _ = softmax(s, factor, most, total)
    factors = gl.convert_layout(p.to(out.dtype), factor_layout(VALUES))

    step = 0
    turn = 0
    count = 0
    for n in range(begins, tiles * planes, gl.num_programs(0)):
        old_plane, old_row = plane, first_row
        plane, first_row, first, last, full_first, full_last, start, end = _tile(n, mask, sizes, rows, W, KEYS)
        row = first_row + gl.arange(0, HALF, rows)
        of_mask = plane // heads * own
        mbarrier.wait(q_full.index(W), count & 1)
        j, blocks = seen_blocks(stops, of_mask, keys, first, last, first_row - W * HALF, KEYS)
        if n == begins:
            j = next_block(stops, of_mask, keys, j, last, first_row - W * HALF, KEYS)
            mbarrier.arrive(q_empty.index(W), count=1, pred=blocks == 1)
        for m in range((n == begins).to(gl.int32), blocks):
            is_first = m == 0
            before = step % STAGES
            phase = (step // STAGES) & 1
            step += 1
            now = step % STAGES
            mbarrier.wait(k_full.index(now), (step // STAGES) & 1)
            mbarrier.wait(turns.index(W), (turn & 1) ^ (W == 0))  # the first group begins
            s = product_of_wide(q, q_rest, ks.index(now), ks_rest.index(now) if ks_rest is not None else None, zeros)
            mbarrier.wait(v_full.index(before), phase)
            sums = warpgroup_mma(factors, matrix(vs.index(before)), acc, is_async=True)
            mbarrier.arrive(turns.index((W + 1) % 2), count=1)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            mbarrier.arrive(k_empty.index(now), count=1)
            mbarrier.arrive(q_empty.index(W), count=1, pred=m == blocks - 1)
            hidden = hides_some(stops, of_mask, keys, j, full_first, full_last, first_row, KEYS)
            s = scores(s, scale, softcap, j, start, end, stop, row, of_mask, keys, hidden, KEYS)
            old_most, old_total = most, total
            if is_first:
                most, total = begin(sinks, plane % heads, rows)
            p, most, total, change = softmax(s, factor, most, total)
            if is_first:
                # Before the wait, so that the compiler can't take it out of both branches and up before the softmax.
                _write_lse(old_most, old_total, lse, old_plane, old_row, queries, rows)
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
                mbarrier.arrive(v_empty.index(before), count=1)
                _write_out(acc, old_total, out, staged.index(W), old_plane, heads, old_row)
                acc = gl.zeros((HALF, VALUES), gl.float32, products_layout(VALUES))
            else:
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
                mbarrier.arrive(v_empty.index(before), count=1)
                acc = acc * gl.convert_layout(change, gl.SliceLayout(1, products_layout(VALUES)))[:, None]
            factors = gl.convert_layout(p.to(out.dtype), factor_layout(VALUES))
            turn += 1
            j = next_block(stops, of_mask, keys, j, last, first_row - W * HALF, KEYS)
        count += 1
    mbarrier.wait(v_full.index(step % STAGES), (step // STAGES) & 1)
    sums = warpgroup_mma(factors, matrix(vs.index(step % STAGES)), acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    _write_lse(most, total, lse, plane, first_row, queries, rows)
    _write_out(acc, total, out, staged.index(W), plane, heads, first_row)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["queries", "keys", "heads", "group", "planes", "tiles", "entries", "own", "section"]
)  # fmt: skip
def attend_wide(
    q, q_rest, k, k_rest, v, out, lse, start, end, stop, table, stops, sinks, scale, softcap,
    queries, keys, heads, group, planes, tiles, entries, own, section,
    KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`q_rest` is q in blocks of the columns that q's blocks leave out, if they do, like `k_rest`."""
    of_q = new_ring(q, 2, 1)
    qs_rest, ks_rest = None, None
    if q_rest is not None:
        qs_rest = gl.allocate_shared_memory(q.dtype, [2] + q_rest.block_shape, q_rest.layout)
        ks_rest = gl.allocate_shared_memory(k.dtype, [STAGES] + k_rest.block_shape, k_rest.layout)
    of_k = new_ring(k, STAGES, 2)
    of_v = new_ring(v, STAGES, 2)
    staged = gl.allocate_shared_memory(out.dtype, [2] + out.block_shape, out.layout)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for w in gl.static_range(2):
        mbarrier.init(turns.index(w), count=1)
    fence_async_shared()
    barrier()
    rings = of_q, qs_rest, of_k, ks_rest, of_v, staged, turns
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    mask = start, end, stop, table, stops
    sizes = queries, keys, heads, group, planes, tiles, entries, own, section
    gl.warp_specialize(
        [
            (_attend, (rings, out, lse, mask, sinks, scale, softcap, sizes, FIRST, KEYS, STAGES)),
            (_attend, (rings, out, lse, mask, sinks, scale, softcap, sizes, SECOND, KEYS, STAGES)),
            (_copy, (rings, q, q_rest, k, k_rest, v, mask, sizes, KEYS, STAGES)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )
