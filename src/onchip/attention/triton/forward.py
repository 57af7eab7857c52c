"""The forward kernel, in Gluon, for Hopper: a tile of queries walks over its range of keys, with a running softmax.

A group's scores of the next block are multiplied beside the sum of values of the last one, and while one group of warps
computes exponentials the other one multiplies: they take turns.
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
    REGISTERS,
    TILE,
    factor_layout,
    matrix,
    new_ring,
    place,
    products_layout,
    query_entry,
    scores,
)
from onchip.kernels.triton.gluon import barrier, copy_in, send


@gluon.jit
def _copy(
    rings, q, k, v, table, heads, group, planes, tiles, own, section,
    D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    of_q, of_k, of_v, _, _ = rings
    qs, q_full, q_empty = of_q
    ks, k_full, k_empty = of_k
    vs, v_full, v_empty = of_v
    step = 0
    count = 0
    for n in range(gl.program_id(0), tiles * planes, gl.num_programs(0)):
        i, plane = place(n, tiles, planes, section)
        t, b, h = tiles - 1 - i, plane // heads, plane % heads
        first, last, _first, _last = query_entry(table, t, b * own, tiles)
        for w in gl.static_range(2):
            mbarrier.wait(q_empty.index(w), (count & 1) ^ 1)
            mbarrier.expect(q_full.index(w), HALF * D * 2)
            copy_in(q, [b, h, t * TILE + HALF * w, 0], q_full.index(w), qs.index(w))
        for j in range(first, last):
            s = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_empty.index(s), phase ^ 1)
            mbarrier.expect(k_full.index(s), KEYS * D * 2)
            copy_in(k, [b, h // group, j * KEYS, 0], k_full.index(s), ks.index(s))
            mbarrier.wait(v_empty.index(s), phase ^ 1)
            mbarrier.expect(v_full.index(s), KEYS * D * 2)
            copy_in(v, [b, h // group, j * KEYS, 0], v_full.index(s), vs.index(s))
            step += 1
        count += 1


@gluon.jit
def _softmax(s, factor, most, total):
    """Exponentials of a block, less the largest score until now, their sum until now, and what that is multiplied by."""
    now = gl.maximum(most, gl.max(s, 1) * factor)
    p = gl.exp2(s * factor - now[:, None])
    change = gl.exp2(most - now)
    return p, now, total * change + gl.sum(p, 1), change


@gluon.jit
def _attend(
    rings, out, lse, start_p, end_p, stop, table, sinks, scale, softcap, queries, keys, heads, planes, tiles, own, section,
    W: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    of_q, of_k, of_v, staged, turns = rings
    qs, q_full, q_empty = of_q
    ks, k_full, k_empty = of_k
    vs, v_full, v_empty = of_v
    layout: gl.constexpr = products_layout(KEYS)
    of_out: gl.constexpr = products_layout(D)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    zeros = gl.zeros((HALF, KEYS), gl.float32, layout)
    q = matrix(qs.index(W))
    factor = (scale if softcap is None else softcap) * LOG2E
    step = 0
    turn = 0
    count = 0
    for n in range(gl.program_id(0), tiles * planes, gl.num_programs(0)):
        i, plane = place(n, tiles, planes, section)
        t, b, h = tiles - 1 - i, plane // heads, plane % heads
        of_mask = b * own
        first, last, full_first, full_last = query_entry(table, t, of_mask, tiles)
        row = t * TILE + W * HALF + gl.arange(0, HALF, rows)
        at = of_mask.to(gl.int64) * queries + row
        start = gl.load(start_p + at, mask=row < queries, other=0)
        end = gl.minimum(gl.load(end_p + at, mask=row < queries, other=0), keys)
        most = gl.full((HALF,), LOWEST, gl.float32, rows)
        total = gl.zeros((HALF,), gl.float32, rows)
        if sinks is not None:
            sink = gl.load(sinks + h).to(gl.float32) * LOG2E
            most = gl.maximum(most, sink)
            total = gl.exp2(sink - most)
        acc = gl.zeros((HALF, D), gl.float32, of_out)
        mbarrier.wait(q_full.index(W), count & 1)
        mbarrier.wait(k_full.index(step % STAGES), (step // STAGES) & 1)
        s = warpgroup_mma(q, matrix(ks.index(step % STAGES)).permute((1, 0)), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
        mbarrier.arrive(k_empty.index(step % STAGES), count=1)
        hidden = (first < full_first) | (first >= full_last)
        s = scores(s, scale, softcap, first, start, end, stop, row, of_mask, keys, hidden, KEYS)
        p, most, total, _ = _softmax(s, factor, most, total)
        factors = gl.convert_layout(p.to(out.dtype), factor_layout(D))
        for j in range(first + 1, last):
            before = step % STAGES
            phase = (step // STAGES) & 1
            step += 1
            now = step % STAGES
            mbarrier.wait(k_full.index(now), (step // STAGES) & 1)
            mbarrier.wait(turns.index(W), (turn & 1) ^ (1 - W))  # the first group begins
            s = warpgroup_mma(q, matrix(ks.index(now)).permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(before), phase)
            sums = warpgroup_mma(factors, matrix(vs.index(before)), acc, is_async=True)
            mbarrier.arrive(turns.index(1 - W), count=1)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s,))
            mbarrier.arrive(k_empty.index(now), count=1)
            hidden = (j < full_first) | (j >= full_last)
            s = scores(s, scale, softcap, j, start, end, stop, row, of_mask, keys, hidden, KEYS)
            p, most, total, change = _softmax(s, factor, most, total)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = acc * gl.convert_layout(change, gl.SliceLayout(1, of_out))[:, None]
            factors = gl.convert_layout(p.to(out.dtype), factor_layout(D))
            turn += 1
        mbarrier.arrive(q_empty.index(W), count=1)
        mbarrier.wait(v_full.index(step % STAGES), (step // STAGES) & 1)
        sums = warpgroup_mma(factors, matrix(vs.index(step % STAGES)), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        mbarrier.arrive(v_empty.index(step % STAGES), count=1)
        nothing = gl.convert_layout(total == 0, gl.SliceLayout(1, of_out))
        inverse = gl.convert_layout(1 / total, gl.SliceLayout(1, of_out))
        acc = gl.where(nothing[:, None], 0.0, acc * inverse[:, None])
        gl.store(lse + plane.to(gl.int64) * queries + row, (most + gl.log2(total)) * LN2, mask=row < queries)
        send(acc, out, staged.index(W), (b, h, t * TILE + W * HALF), 0, HALF, D, D)
        step += 1
        count += 1
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "queries", "keys", "heads", "group", "planes", "tiles", "own", "section",
    ]
)  # fmt: skip
def attend(
    q, k, v, out, lse, start, end, stop, table, sinks, scale, softcap,
    queries, keys, heads, group, planes, tiles, own, section,
    D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    of_q = new_ring(q, 2, 1)
    of_k = new_ring(k, STAGES, 2)
    of_v = new_ring(v, STAGES, 2)
    staged = gl.allocate_shared_memory(out.dtype, [2] + out.block_shape, out.layout)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for w in gl.static_range(2):
        mbarrier.init(turns.index(w), count=1)
    fence_async_shared()
    barrier()
    rings = of_q, of_k, of_v, staged, turns
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_attend, (rings, out, lse, start, end, stop, table, sinks, scale, softcap, queries, keys, heads, planes,
                       tiles, own, section, FIRST, D, KEYS, STAGES)),
            (_attend, (rings, out, lse, start, end, stop, table, sinks, scale, softcap, queries, keys, heads, planes,
                       tiles, own, section, SECOND, D, KEYS, STAGES)),
            (_copy, (rings, q, k, v, table, heads, group, planes, tiles, own, section, D, KEYS, STAGES)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )  # fmt: skip
