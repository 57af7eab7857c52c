"""The gradient of queries, in Gluon, for Hopper: a tile of queries walks over its range of keys, as in forward."""

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
    LOG2E,
    REGISTERS,
    TILE,
    are_seen,
    capped,
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
from onchip.kernels.triton.gluon import barrier, copy_in, send


@gluon.jit
def _copy(rings, q, d_out, k, v, mask, sizes, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr):
    of_q, d_outs, of_k, of_v, _ = rings
    qs, q_full, q_empty = of_q
    ks, k_full, k_empty = of_k
    vs, v_full, v_empty = of_v
    start, end, stop, table, stops = mask
    queries, keys, padded, heads, group, planes, tiles, entries, own, section = sizes
    step = 0
    count = 0
    for n in range(gl.program_id(0), tiles * planes, gl.num_programs(0)):
        i, plane = place(n, tiles, planes, section)
        t, b, h = tiles - 1 - i, plane // heads, plane % heads
        first, last, _first, _last = query_entry(table, t, b * own, entries, keys, 2, KEYS)
        for w in gl.static_range(2):
            mbarrier.wait(q_empty.index(w), (count & 1) ^ 1)
            mbarrier.expect(q_full.index(w), 2 * HALF * D * 2)
            copy_in(q, [b, h, t * TILE + HALF * w, 0], q_full.index(w), qs.index(w))
            copy_in(d_out, [b, h, t * TILE + HALF * w, 0], q_full.index(w), d_outs.index(w))
        j, blocks = seen_blocks(stops, b * own, keys, first, last, t * TILE, KEYS)
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
            j = next_block(stops, b * own, keys, j, last, t * TILE, KEYS)
        count += 1


@gluon.jit
def _differentiate(
    rings, grad_q, of_rows, mask, scale, softcap, sizes,
    W: gl.constexpr, D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    of_q, d_outs, of_k, of_v, staged = rings
    qs, q_full, q_empty = of_q
    ks, k_full, k_empty = of_k
    vs, v_full, v_empty = of_v
    start_p, end_p, stop, table, stops = mask
    queries, keys, padded, heads, group, planes, tiles, entries, own, section = sizes
    layout: gl.constexpr = products_layout(KEYS)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    zeros = gl.zeros((HALF, KEYS), gl.float32, layout)
    q, d_out = matrix(qs.index(W)), matrix(d_outs.index(W))
    factor = (scale if softcap is None else softcap) * LOG2E
    step = 0
    count = 0
    for n in range(gl.program_id(0), tiles * planes, gl.num_programs(0)):
        i, plane = place(n, tiles, planes, section)
        t, b, h = tiles - 1 - i, plane // heads, plane % heads
        of_mask = b * own
        first, last, full_first, full_last = query_entry(table, t, of_mask, entries, keys, 2, KEYS)
        row = t * TILE + W * HALF + gl.arange(0, HALF, rows)
        at = of_mask.to(gl.int64) * queries + row
        start = gl.load(start_p + at, mask=row < queries, other=0)
        end = gl.minimum(gl.load(end_p + at, mask=row < queries, other=0), keys)
        at_row = of_rows + plane.to(gl.int64) * (2 * padded) + row
        lse, delta = gl.load(at_row), gl.load(at_row + padded)
        acc = gl.zeros((HALF, D), gl.float32, products_layout(D))
        mbarrier.wait(q_full.index(W), count & 1)
        j, blocks = seen_blocks(stops, of_mask, keys, first, last, t * TILE, KEYS)
        for m in range(blocks):
            s = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_full.index(s), phase)
            x = warpgroup_mma(q, matrix(ks.index(s)).permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(s), phase)
            y = warpgroup_mma(d_out, matrix(vs.index(s)).permute((1, 0)), zeros, use_acc=False, is_async=True)
            x = warpgroup_mma_wait(num_outstanding=1, deps=(x,))
            if softcap is not None:
                x = capped(x, scale, softcap)
            p = gl.exp2(x * factor - lse[:, None])
            if hides_some(stops, of_mask, keys, j, full_first, full_last, t * TILE + W * HALF, KEYS):
                p = gl.where(are_seen(j, start, end, stop, row, of_mask, keys, KEYS), p, 0.0)
            y = warpgroup_mma_wait(num_outstanding=0, deps=(y,))
            mbarrier.arrive(v_empty.index(s), count=1)
            mbarrier.arrive(q_empty.index(W), count=1, pred=m == blocks - 1)
            d_scores = p * (y - delta[:, None])
            if softcap is not None:
                d_scores = d_scores * (1 - x * x)
            factors = gl.convert_layout(d_scores.to(grad_q.dtype), factor_layout(D))
            sums = warpgroup_mma(factors, matrix(ks.index(s)), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
            mbarrier.arrive(k_empty.index(s), count=1)
            step += 1
            j = next_block(stops, of_mask, keys, j, last, t * TILE, KEYS)
        sees = gl.convert_layout(start < end, gl.SliceLayout(1, products_layout(D)))
        gradient = gl.where(sees[:, None], acc * scale, 0.0)
        send(gradient, grad_q, staged.index(W), (b, h, t * TILE + W * HALF), 0, HALF, D, D)
        count += 1
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["queries", "keys", "padded", "heads", "group", "planes", "tiles", "entries", "own", "section"]
)  # fmt: skip
def query_gradient(
    q, d_out, k, v, grad_q, of_rows, start, end, stop, table, stops, scale, softcap,
    queries, keys, padded, heads, group, planes, tiles, entries, own, section,
    D: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`of_rows`: of `gradient_rows`."""
    of_q = new_ring(q, 2, 1)
    d_outs = gl.allocate_shared_memory(d_out.dtype, [2] + d_out.block_shape, d_out.layout)
    of_k = new_ring(k, STAGES, 2)
    of_v = new_ring(v, STAGES, 2)
    staged = gl.allocate_shared_memory(grad_q.dtype, [2] + grad_q.block_shape, grad_q.layout)
    fence_async_shared()
    barrier()
    rings = of_q, d_outs, of_k, of_v, staged
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    mask = start, end, stop, table, stops
    sizes = queries, keys, padded, heads, group, planes, tiles, entries, own, section
    gl.warp_specialize(
        [
            (_differentiate, (rings, grad_q, of_rows, mask, scale, softcap, sizes, FIRST, D, KEYS, STAGES)),
            (_differentiate, (rings, grad_q, of_rows, mask, scale, softcap, sizes, SECOND, D, KEYS, STAGES)),
            (_copy, (rings, q, d_out, k, v, mask, sizes, D, KEYS, STAGES)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )
