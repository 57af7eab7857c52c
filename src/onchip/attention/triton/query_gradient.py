"""The gradient of queries, in Gluon, for Hopper: a tile of queries walks over its range of keys, as in forward.

Heads of up to 128 numbers take blocks of 128 keys.  With more, both products of a block and the sum, of 192 columns or
256, would be more than a thread's registers hold: they take 64.  Tiles are powers of two, so 192 columns come in 128
and in the 64 that remain.  With 256, queries, gradients of out and rings fill shared memory: a result leaves by that of
its queries, and the next ones come then.
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
    LOG2E,
    REGISTERS,
    TILE,
    anew,
    are_seen,
    capped,
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
from onchip.kernels.triton.gluon import barrier, copy_in, send


@gluon.constexpr_function
def _is_full(q):
    """Whether shared memory has no room for results."""
    return q.shape[-1] > TILE


@gluon.jit
def _copy_tile(rings, q, q_rest, d_out, b, h, t, count):
    """A tile's queries and gradients of out."""
    of_q, qs_rest, d_outs, _, _, _, _ = rings
    qs, q_full, q_empty = of_q
    BYTES: gl.constexpr = HALF * (columns_of(q, q_rest) + d_out.block_shape[-1]) * 2
    for w in gl.static_range(2):
        row = t * TILE + HALF * w
        mbarrier.wait(q_empty.index(w), (count & 1) ^ 1)
        mbarrier.expect(q_full.index(w), BYTES)
        copy_in(q, [b, h, row, 0], q_full.index(w), qs.index(w))
        if q_rest is not None:
            copy_in(q_rest, [b, h, row, q.block_shape[-1]], q_full.index(w), qs_rest.index(w))
        copy_in(d_out, [b, h, row, 0], q_full.index(w), d_outs.index(w))


@gluon.jit
def _copy(
    rings, q, q_rest, d_out, k, k_rest, v, mask, sizes,
    KEYS: gl.constexpr, STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
):  # fmt: skip
    _, _, _, of_k, ks_rest, of_v, _ = rings
    ks, k_full, k_empty = of_k
    vs, v_full, v_empty = of_v
    start, end, stop, table, stops = mask
    queries, keys, padded, heads, group, planes, tiles, entries, own, section = sizes
    K_BYTES: gl.constexpr = KEYS * columns_of(k, k_rest) * 2
    V_BYTES: gl.constexpr = KEYS * v.block_shape[-1] * 2
    WIDE: gl.constexpr = KEYS < TILE
    step = 0
    count = 0
    for n in range(gl.program_id(0), tiles * planes, gl.num_programs(0)):
        i, plane = place(n, tiles, planes, section)
        t, b, h = tiles - 1 - i, plane // heads, plane % heads
        first, last, _first, _last = tile_range(table, t, b * own, entries, keys, KEYS)
        if not WIDE:
            _copy_tile(rings, q, q_rest, d_out, b, h, t, count)
        j, blocks = seen_blocks(stops, b * own, keys, first, last, t * TILE, KEYS)
        for m in range(blocks):
            s = step % STAGES
            mbarrier.wait(k_empty.index(s), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(k_full.index(s), K_BYTES)
            copy_in(k, [b, h // group, j * KEYS, 0], k_full.index(s), ks.index(s))
            if k_rest is not None:
                copy_in(k_rest, [b, h // group, j * KEYS, k.block_shape[-1]], k_full.index(s), ks_rest.index(s))
            if WIDE:
                if m == 0:  # whose memory is free later than that of keys
                    _copy_tile(rings, q, q_rest, d_out, b, h, t, count)
            s = step % VALUE_STAGES
            mbarrier.wait(v_empty.index(s), ((step // VALUE_STAGES) & 1) ^ 1)
            mbarrier.expect(v_full.index(s), V_BYTES)
            copy_in(v, [b, h // group, j * KEYS, 0], v_full.index(s), vs.index(s))
            step += 1
            j = next_block(stops, b * own, keys, j, last, t * TILE, KEYS)
        count += 1


@gluon.jit
def _differentiate(
    rings, grad_q, of_rows, mask, scale, softcap, sizes,
    W: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
):  # fmt: skip
    of_q, qs_rest, d_outs, of_k, ks_rest, of_v, staged = rings
    qs, q_full, q_empty = of_q
    ks, k_full, k_empty = of_k
    vs, v_full, v_empty = of_v
    start_p, end_p, stop, table, stops = mask
    queries, keys, padded, heads, group, planes, tiles, entries, own, section = sizes
    FIRST: gl.constexpr = qs.shape[-1]
    WIDE: gl.constexpr = KEYS < TILE
    layout: gl.constexpr = products_layout(KEYS)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    zeros = gl.zeros((HALF, KEYS), gl.float32, layout)
    q, d_out = matrix(qs.index(W)), matrix(d_outs.index(W))
    q_rest = qs_rest.index(W) if qs_rest is not None else None
    factor = (scale if softcap is None else softcap) * LOG2E
    step = 0
    count = 0
    for n in range(gl.program_id(0), tiles * planes, gl.num_programs(0)):
        i, plane = place(n, tiles, planes, section)
        t, b, h = tiles - 1 - i, plane // heads, plane % heads
        of_mask = b * own
        first, last, full_first, full_last = tile_range(table, t, of_mask, entries, keys, KEYS)
        row = t * TILE + W * HALF + gl.arange(0, HALF, rows)
        at = of_mask.to(gl.int64) * queries + row
        if WIDE:  # ptxas keeps the order, in which either was timed
            at_row = of_rows + plane.to(gl.int64) * (2 * padded) + row
        start = gl.load(start_p + at, mask=row < queries, other=0)
        end = gl.minimum(gl.load(end_p + at, mask=row < queries, other=0), keys)
        if not WIDE:
            at_row = of_rows + plane.to(gl.int64) * (2 * padded) + row
        lse, delta = gl.load(at_row), gl.load(at_row + padded)
        acc = gl.zeros((HALF, FIRST), gl.float32, products_layout(FIRST))
        if q_rest is not None:
            REST: gl.constexpr = q_rest.shape[-1]
            acc_rest = gl.zeros((HALF, REST), gl.float32, products_layout(REST))
        mbarrier.wait(q_full.index(W), count & 1)
        j, blocks = seen_blocks(stops, of_mask, keys, first, last, t * TILE, KEYS)
        for m in range(blocks):
            s, of_value = step % STAGES, step % VALUE_STAGES
            if _is_full(qs):
                q, d_out = matrix(qs.index(anew(W))), matrix(d_outs.index(anew(W)))
            mbarrier.wait(k_full.index(s), (step // STAGES) & 1)
            x = product_of_wide(q, q_rest, ks.index(s), ks_rest.index(s) if ks_rest is not None else None, zeros)
            mbarrier.wait(v_full.index(of_value), (step // VALUE_STAGES) & 1)
            y = warpgroup_mma(d_out, matrix(vs.index(of_value)).permute((1, 0)), zeros, use_acc=False, is_async=True)
            x = warpgroup_mma_wait(num_outstanding=1, deps=(x,))
            if softcap is not None:
                x = capped(x, scale, softcap)
            p = gl.exp2(x * factor - lse[:, None])
            if hides_some(stops, of_mask, keys, j, full_first, full_last, t * TILE + W * HALF, KEYS):
                p = gl.where(are_seen(j, start, end, stop, row, of_mask, keys, KEYS), p, 0.0)
            y = warpgroup_mma_wait(num_outstanding=0, deps=(y,))
            mbarrier.arrive(v_empty.index(of_value), count=1)
            if not _is_full(qs):
                mbarrier.arrive(q_empty.index(W), count=1, pred=m == blocks - 1)
            d_scores = p * (y - delta[:, None])
            if softcap is not None:
                d_scores = d_scores * (1 - x * x)
            d_scores = d_scores.to(grad_q.dtype)
            factors = gl.convert_layout(d_scores, factor_layout(FIRST))
            acc = warpgroup_mma(factors, matrix(ks.index(s)), acc, is_async=True)
            if q_rest is not None:
                factors = gl.convert_layout(d_scores, factor_layout(REST))
                acc_rest = warpgroup_mma(factors, matrix(ks_rest.index(s)), acc_rest, is_async=True)
                acc, acc_rest = warpgroup_mma_wait(num_outstanding=0, deps=(acc, acc_rest))
            else:
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(k_empty.index(s), count=1)
            step += 1
            j = next_block(stops, of_mask, keys, j, last, t * TILE, KEYS)
        sees = gl.convert_layout(start < end, gl.SliceLayout(1, products_layout(FIRST)))
        gradient = gl.where(sees[:, None], acc * scale, 0.0)
        lead = b, h, t * TILE + W * HALF
        send(gradient, grad_q, staged.index(W), lead, 0, HALF, FIRST, grad_q.block_shape[-1])
        if _is_full(qs):
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(W), count=1)
        if q_rest is not None:
            sees = gl.convert_layout(start < end, gl.SliceLayout(1, products_layout(REST)))
            gradient = gl.where(sees[:, None], acc_rest * scale, 0.0)
            send(gradient, grad_q, staged.index(W), lead, FIRST, HALF, REST, grad_q.block_shape[-1])
        count += 1
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["queries", "keys", "padded", "heads", "group", "planes", "tiles", "entries", "own", "section"]
)  # fmt: skip
def query_gradient(
    q, q_rest, d_out, k, k_rest, v, grad_q, of_rows, start, end, stop, table, stops, scale, softcap,
    queries, keys, padded, heads, group, planes, tiles, entries, own, section,
    KEYS: gl.constexpr, STAGES: gl.constexpr, VALUE_STAGES: gl.constexpr,
):  # fmt: skip
    """`of_rows`: of `gradient_rows`; `q_rest` is q in blocks of the columns that q's blocks leave out, if they do, like
    `k_rest`; those of `grad_q` are all columns, or few.
    """
    of_q = new_ring(q, 2, 1)
    qs_rest, ks_rest = None, None
    if q_rest is not None:
        qs_rest = gl.allocate_shared_memory(q.dtype, [2] + q_rest.block_shape, q_rest.layout)
        ks_rest = gl.allocate_shared_memory(k.dtype, [STAGES] + k_rest.block_shape, k_rest.layout)
    d_outs = gl.allocate_shared_memory(d_out.dtype, [2] + d_out.block_shape, d_out.layout)
    of_k = new_ring(k, STAGES, 2)
    of_v = new_ring(v, VALUE_STAGES, 2)
    staged, _, _ = of_q
    if not _is_full(staged):
        staged = gl.allocate_shared_memory(grad_q.dtype, [2] + grad_q.block_shape, grad_q.layout)
    fence_async_shared()
    barrier()
    rings = of_q, qs_rest, d_outs, of_k, ks_rest, of_v, staged
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    mask = start, end, stop, table, stops
    sizes = queries, keys, padded, heads, group, planes, tiles, entries, own, section
    gl.warp_specialize(
        [
            (_differentiate, (rings, grad_q, of_rows, mask, scale, softcap, sizes, FIRST, KEYS, STAGES, VALUE_STAGES)),
            (_differentiate, (rings, grad_q, of_rows, mask, scale, softcap, sizes, SECOND, KEYS, STAGES, VALUE_STAGES)),
            (_copy, (rings, q, q_rest, d_out, k, k_rest, v, mask, sizes, KEYS, STAGES, VALUE_STAGES)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )
