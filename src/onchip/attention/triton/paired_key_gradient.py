"""The gradients of keys and values for heads of up to 256 numbers, in Gluon, for Hopper.

The walk is that of `key_gradient`, by tiles of 64 keys.  The sums of 2 x 256 columns are more than the registers of one
group of warps hold.  So of two groups the first makes probabilities and sums the gradients of values; the second makes
the probabilities' gradients and sums the gradients of keys.  The first passes what the second needs of a block,
rounded, by way of shared memory.  Each has two of a block's four products, and no group waits for the other to begin a
block.
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
    capped,
    factor_layout,
    matrix,
    new_ring,
    products_layout,
)
from onchip.attention.triton.key_gradient import block_entry, key_place, queries_see
from onchip.kernels.triton.gluon import barrier, copy_in, copy_out, new_barriers

# Blocks of queries between the groups.
PASSED = gl.constexpr(2)


@gluon.jit
def _place(table, sizes, ROWS: gl.constexpr):
    """A program's tile, sequence and head, and its ranges of blocks, as `block_entry` has them."""
    queries, keys, heads, group, tiles, own = sizes
    t, b, h = key_place(None, heads, group, tiles)
    return (t, b, h) + block_entry(table, t, b * own, tiles, ROWS)


@gluon.jit
def _copy(rings, q, d_out, k, v, of_rows, table, sizes, ROWS: gl.constexpr, STAGES: gl.constexpr):
    of_q, of_d_out, of_lse, of_delta, ks, vs, k_full, v_full, _, _, _ = rings
    qs, q_full, q_empty = of_q
    d_outs, d_out_full, d_out_empty = of_d_out
    queries, keys, heads, group, tiles, own = sizes
    WIDE: gl.constexpr = q.block_shape[-1]
    t, b, h, first, last, _first, _last, _any = _place(table, sizes, ROWS)
    mbarrier.expect(k_full, HALF * WIDE * 2)
    copy_in(k, [b, h, t * HALF, 0], k_full, ks)
    mbarrier.expect(v_full, HALF * WIDE * 2)
    copy_in(v, [b, h, t * HALF, 0], v_full, vs)
    step = 0
    for g in range(group):
        head = h * group + g
        at = 2 * (b * heads + head)
        for j in range(first, last):
            s = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(q_empty.index(s), phase ^ 1)
            mbarrier.expect(q_full.index(s), ROWS * WIDE * 2 + ROWS * 4)
            copy_in(q, [b, head, j * ROWS, 0], q_full.index(s), qs.index(s))
            copy_in(of_rows, [at, j * ROWS], q_full.index(s), of_lse.index(s))
            mbarrier.wait(d_out_empty.index(s), phase ^ 1)
            mbarrier.expect(d_out_full.index(s), ROWS * WIDE * 2 + ROWS * 4)
            copy_in(d_out, [b, head, j * ROWS, 0], d_out_full.index(s), d_outs.index(s))
            copy_in(of_rows, [at + 1, j * ROWS], d_out_full.index(s), of_delta.index(s))
            step += 1


@gluon.jit
def _numbers(vector, s, ROWS: gl.constexpr):
    """Numbers of the queries of a block, one a column."""
    return vector.index(s).reshape([ROWS]).load(gl.SliceLayout(0, products_layout(ROWS)))


@gluon.jit
def _sum_values(rings, grad_v, mask, scale, softcap, sizes, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """The gradients of values: what a block adds is multiplied beside the next block's scores."""
    of_q, of_d_out, of_lse, of_delta, ks, vs, k_full, v_full, passed, is_passed, is_taken = rings
    qs, q_full, q_empty = of_q
    d_outs, d_out_full, d_out_empty = of_d_out
    start_p, end_p, stop, table = mask
    queries, keys, heads, group, tiles, own = sizes
    VALUES: gl.constexpr = d_outs.shape[-1]
    layout: gl.constexpr = products_layout(ROWS)
    t, b, h, first, last, full_first, full_last, any_sees = _place(table, sizes, ROWS)
    of_mask = b * own
    key = t * HALF + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    until = None
    if stop is not None:
        until = gl.load(stop + of_mask.to(gl.int64) * keys + key, mask=key < keys, other=0)
    zeros = gl.zeros((HALF, ROWS), gl.float32, layout)
    sums = gl.zeros((HALF, VALUES), gl.float32, products_layout(VALUES))
    factor = (scale if softcap is None else softcap) * LOG2E
    mbarrier.wait(k_full, 0)
    k = matrix(ks)
    factors = gl.zeros((HALF, ROWS), grad_v.dtype, factor_layout(VALUES))
    j = first
    many = group * (last - first)
    for step in range(many):
        hidden = (j < full_first) | (j >= full_last)
        s = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(q_full.index(s), phase)
        x = warpgroup_mma(k, matrix(qs.index(s)).permute((1, 0)), zeros, use_acc=False, is_async=True)
        before = max(step - 1, 0) % STAGES
        mbarrier.wait(d_out_full.index(before), (max(step - 1, 0) // STAGES) & 1)
        sums = warpgroup_mma(factors, matrix(d_outs.index(before)), sums, is_async=True)
        x = warpgroup_mma_wait(num_outstanding=1, deps=(x,))
        if softcap is not None:
            x = capped(x, scale, softcap)
        p = gl.exp2(x * factor - _numbers(of_lse, s, ROWS)[None, :])
        fence_async_shared()  # these numbers may be overwritten
        mbarrier.arrive(q_empty.index(s), count=1)
        if hidden:
            p = gl.where(queries_see(j, start_p, end_p, until, key, of_mask, queries, keys, ROWS), p, 0.0)
        passes = p if softcap is None else p * (1 - x * x)
        at = step % PASSED
        mbarrier.wait(is_taken.index(at), ((step // PASSED) & 1) ^ 1)
        passed.index(at).store(passes.to(grad_v.dtype))
        mbarrier.arrive(is_passed.index(at), count=1)
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        mbarrier.arrive(d_out_empty.index(before), count=1, pred=step > 0)
        factors = gl.convert_layout(p.to(grad_v.dtype), factor_layout(VALUES))
        j += 1
        if j == last:
            j = first
    before = (many - 1) % STAGES
    mbarrier.wait(d_out_full.index(before), ((many - 1) // STAGES) & 1)
    sums = warpgroup_mma(factors, matrix(d_outs.index(before)), sums, is_async=True)
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    # Where none sees a key, what isn't a number is in no sum.
    matrix(ks).store(gl.where(any_sees, sums, 0.0).to(grad_v.dtype))
    fence_async_shared()
    barrier()
    copy_out(grad_v, (b, h, t * HALF, 0), ks)
    tma.store_wait(0)


@gluon.jit
def _sum_keys(rings, grad_k, table, scale, sizes, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """The gradients of keys, in the same way, from what the other group passes."""
    of_q, of_d_out, of_lse, of_delta, ks, vs, k_full, v_full, passed, is_passed, is_taken = rings
    qs, q_full, q_empty = of_q
    d_outs, d_out_full, d_out_empty = of_d_out
    queries, keys, heads, group, tiles, own = sizes
    KEYS: gl.constexpr = qs.shape[-1]
    layout: gl.constexpr = products_layout(ROWS)
    t, b, h, first, last, full_first, full_last, any_sees = _place(table, sizes, ROWS)
    zeros = gl.zeros((HALF, ROWS), gl.float32, layout)
    sums = gl.zeros((HALF, KEYS), gl.float32, products_layout(KEYS))
    mbarrier.wait(v_full, 0)
    v = matrix(vs)
    factors = gl.zeros((HALF, ROWS), grad_k.dtype, factor_layout(KEYS))
    many = group * (last - first)
    for step in range(many):
        s = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(d_out_full.index(s), phase)
        y = warpgroup_mma(v, matrix(d_outs.index(s)).permute((1, 0)), zeros, use_acc=False, is_async=True)
        before = max(step - 1, 0) % STAGES
        mbarrier.wait(q_full.index(before), (max(step - 1, 0) // STAGES) & 1)
        sums = warpgroup_mma(factors, matrix(qs.index(before)), sums, is_async=True)
        y = warpgroup_mma_wait(num_outstanding=1, deps=(y,))
        y = y - _numbers(of_delta, s, ROWS)[None, :]
        fence_async_shared()  # these numbers may be overwritten
        mbarrier.arrive(d_out_empty.index(s), count=1)
        at = step % PASSED
        mbarrier.wait(is_passed.index(at), (step // PASSED) & 1)
        d_scores = passed.index(at).load(layout).to(gl.float32) * y
        mbarrier.arrive(is_taken.index(at), count=1)
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        mbarrier.arrive(q_empty.index(before), count=1, pred=step > 0)
        factors = gl.convert_layout(d_scores.to(grad_k.dtype), factor_layout(KEYS))
    before = (many - 1) % STAGES
    mbarrier.wait(q_full.index(before), ((many - 1) // STAGES) & 1)
    sums = warpgroup_mma(factors, matrix(qs.index(before)), sums, is_async=True)
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    matrix(vs).store(gl.where(any_sees, sums * scale, 0.0).to(grad_k.dtype))
    fence_async_shared()
    barrier()
    copy_out(grad_k, (b, h, t * HALF, 0), vs)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["queries", "keys", "heads", "group", "tiles", "own"])
def paired_key_gradient(
    q, d_out, k, v, grad_k, grad_v, of_rows, start, end, stop, table, scale, softcap,
    queries, keys, heads, group, tiles, own,
    ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`of_rows`: of `gradient_rows`; `table` has tiles of 64 keys.  A program has a tile."""
    of_q = new_ring(q, STAGES, 2)
    of_d_out = new_ring(d_out, STAGES, 2)
    of_lse = gl.allocate_shared_memory(gl.float32, [STAGES] + of_rows.block_shape, of_rows.layout)
    of_delta = gl.allocate_shared_memory(gl.float32, [STAGES] + of_rows.block_shape, of_rows.layout)
    ks = gl.allocate_shared_memory(k.dtype, k.block_shape, k.layout)
    vs = gl.allocate_shared_memory(v.dtype, v.block_shape, v.layout)
    between: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * ROWS, element_bitwidth=16, rank=2)
    passed = gl.allocate_shared_memory(grad_v.dtype, [PASSED, HALF, ROWS], between)
    is_passed, is_taken = new_barriers(PASSED)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    fence_async_shared()
    barrier()
    rings = of_q, of_d_out, of_lse, of_delta, ks, vs, k_full, v_full, passed, is_passed, is_taken
    mask = start, end, stop, table
    sizes = queries, keys, heads, group, tiles, own
    gl.warp_specialize(
        [
            (_sum_values, (rings, grad_v, mask, scale, softcap, sizes, ROWS, STAGES)),
            (_sum_keys, (rings, grad_k, table, scale, sizes, ROWS, STAGES)),
            (_copy, (rings, q, d_out, k, v, of_rows, table, sizes, ROWS, STAGES)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )
