"""The gradients of keys, values and queries in one kernel, in Gluon, for Hopper: heads of 65 to 128 numbers.

As fused_gradient.py, but their sums for keys and values leave no registers for a third group: the two groups that have
a tile's halves meet at each block of queries, and each multiplies all the tile's keys for half of the queries' numbers.
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
    REGISTERS,
    TILE,
    anew,
    factor_layout,
    matrix,
    products_layout,
)
from onchip.attention.triton.fused_gradient import (
    TICKETS,
    as_registers,
    copy_blocks,
    leave,
    new_memory,
    probabilities,
    take_tile,
    write_sums,
)
from onchip.attention.triton.key_gradient import key_entry, row_numbers
from onchip.kernels.triton.gluon import barrier, named_sync, new_barriers

# The hardware barrier of both groups, after those of all groups that `warp_specialize` makes.
_BOTH = gl.constexpr(8)


@gluon.jit
def _meet():
    named_sync(_BOTH, 256)


@gluon.jit
def _differentiate(
    rings, dss, of_dq, grad_k, grad_v, mask, scale, softcap, sizes, n,
    W: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    of_q, of_d_out, vectors, ks, vs, k_full = rings
    qs, q_full, q_empty = of_q
    d_outs, d_out_full, d_out_empty = of_d_out
    dqs, dq_full, dq_empty = of_dq
    start, end, table, of_queries = mask
    queries, keys, heads, group, tiles, blocks, own = sizes
    layout: gl.constexpr = products_layout(ROWS)
    of_sums: gl.constexpr = products_layout(D)
    t, b, h = n
    of_mask = b * own
    first, last, full_first, full_last, any_sees = key_entry(table, t, of_mask, tiles)
    key = t * TILE + W * HALF + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    zeros = gl.zeros((HALF, ROWS), gl.float32, layout)
    sum_k = gl.zeros((HALF, D), gl.float32, of_sums)
    sum_v = gl.zeros((HALF, D), gl.float32, of_sums)
    mbarrier.wait(k_full, 0)
    j = last - 1
    g = 0
    for step in range(group * (last - first)):
        hidden = (j < full_first) | (j >= full_last)
        s = step % STAGES
        phase = (step // STAGES) & 1
        buffer = step % 2
        mbarrier.wait(q_full.index(s), phase)
        k, v = matrix(ks.index(anew(W))), matrix(vs.index(anew(W)))
        x = warpgroup_mma(k, matrix(qs.index(s)).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(d_out_full.index(s), phase)
        y = warpgroup_mma(v, matrix(d_outs.index(s)).permute((1, 0)), zeros, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(num_outstanding=1, deps=(x,))
        x, p = probabilities(x, vectors, s, j, mask, key, scale, softcap, of_mask, queries, keys, hidden, ROWS)
        y = warpgroup_mma_wait(num_outstanding=0, deps=(y,))
        d_scores = p * (y - row_numbers(vectors, s, 1, ROWS)[None, :])
        if softcap is not None:
            d_scores = d_scores * (1 - x * x)
        d_scores = d_scores.to(grad_k.dtype)
        # The other group has read this buffer's last numbers: since then it was at the meeting for the other buffer.
        dss.index(2 * buffer + W).store(d_scores)
        factors = gl.convert_layout(p.to(grad_v.dtype), factor_layout(D))
        sum_v = warpgroup_mma(factors, matrix(d_outs.index(s)), sum_v, is_async=True)
        fence_async_shared()  # the numbers of these queries may be overwritten, too
        _meet()
        dq = zeros
        for w in gl.static_range(2):
            k = matrix(ks.index(w)).slice(W * HALF, HALF, 1).permute((1, 0))
            dq = warpgroup_mma(k, dss.index(2 * buffer + w), dq, use_acc=w > 0, is_async=True)
        sum_v = warpgroup_mma_wait(num_outstanding=2, deps=(sum_v,))
        mbarrier.arrive(d_out_empty.index(s), count=1)
        factors = gl.convert_layout(d_scores, factor_layout(D))
        sum_k = warpgroup_mma(factors, matrix(qs.index(s)), sum_k, is_async=True)
        dq = warpgroup_mma_wait(num_outstanding=1, deps=(dq,))
        mbarrier.wait(dq_empty.index(W), (step & 1) ^ 1)
        dqs.index(W).store(as_registers(dq))
        fence_async_shared()
        barrier()
        mbarrier.arrive(dq_full.index(W), count=1)
        sum_k = warpgroup_mma_wait(num_outstanding=0, deps=(sum_k,))
        mbarrier.arrive(q_empty.index(s), count=1)
        g += 1
        if g == group:
            g = 0
            j -= 1
    # Where none sees a key, what isn't a number is in no sum.
    sum_v, sum_k = gl.where(any_sees, sum_v, 0.0), gl.where(any_sees, sum_k * scale, 0.0)
    leave(sum_v, grad_v, (b, h, t * TILE + W * HALF, 0), vs.index(W))
    _meet()  # both have read all keys
    leave(sum_k, grad_k, (b, h, t * TILE + W * HALF, 0), ks.index(W))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["queries", "keys", "heads", "group", "tiles", "blocks", "own"])
def paired_fused_gradient(
    q, d_out, k, v, sums, grad_k, grad_v, of_rows, start, end, table, of_queries, counters, scale, softcap,
    queries, keys, heads, group, tiles, blocks, own,
    D: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `fused_gradient`, with D 128, `sums` [B * Hq * blocks * 2 * SUM_ROWS, 256] and `counters` [TICKETS + B * Hq *
    blocks * 2]: a block of queries has two halves of their numbers.
    """
    BOTH: gl.constexpr = 2
    of_q, of_d_out, vectors, ks, vs, dss, dqs = new_memory(q, d_out, k, v, of_rows, sums, ROWS, STAGES, BOTH)
    dq_full, dq_empty = new_barriers(2)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=1)
    n = take_tile(counters, heads, group, tiles)
    counters += TICKETS
    rings = of_q, of_d_out, vectors, ks, vs, k_full
    of_dq = dqs, dq_full, dq_empty
    mask = start, end, table, of_queries
    sizes = queries, keys, heads, group, tiles, blocks, own
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                _differentiate,
                (rings, dss, of_dq, grad_k, grad_v, mask, scale, softcap, sizes, n, FIRST, D, ROWS, STAGES),
            ),
            (
                _differentiate,
                (rings, dss, of_dq, grad_k, grad_v, mask, scale, softcap, sizes, n, SECOND, D, ROWS, STAGES),
            ),
            (copy_blocks, (rings, q, d_out, k, v, of_rows, mask, sizes, n, D, ROWS, STAGES)),
            (write_sums, (of_dq, sums, counters, mask, sizes, n, FIRST, BOTH, BOTH, BOTH)),
            (write_sums, (of_dq, sums, counters, mask, sizes, n, SECOND, BOTH, BOTH, BOTH)),
        ],
        [4, 1, 1, 1],
        [REGISTERS, FEW_REGISTERS, FEW_REGISTERS, FEW_REGISTERS],
    )
