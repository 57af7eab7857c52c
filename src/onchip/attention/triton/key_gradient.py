"""The gradients of keys and values, in Gluon, for Hopper: a tile of keys walks over the queries that see it.

Scores are transposed, [keys, queries], so that probabilities and their gradients are in registers as the next products
read them.  The gradients of the query heads that share a key head are summed in the walk, in the heads' order.

Heads of up to 192 numbers come in 128 columns and in the 64 that remain, and values then have up to 128.  The sums of
320 columns take 160 of a thread's registers, so of probabilities what the sum of values reads is kept, rounded.
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
    capped,
    columns_of,
    factor_layout,
    matrix,
    new_ring,
    product_of_wide,
    products_layout,
)
from onchip.kernels.triton.gluon import barrier, copy_in, copy_out

# Numbers in a key tile's entry.
ENTRIES = gl.constexpr(4)


@gluon.jit
def key_entry(table, t, of_mask, tiles):
    """The range of blocks of queries, of one at least, and of those that all see all keys; whether any sees."""
    at = table + (of_mask * tiles + t) * ENTRIES
    first, last = gl.load(at), gl.load(at + 1)
    return first, max(last, first + 1), gl.load(at + 2), gl.load(at + 3), last > first


@gluon.jit
def key_place(ticket, heads, group, tiles):
    """The tile, sequence and key head of a ticket, or of a program: a tile's heads come together."""
    key_heads = heads // group
    n = gl.program_id(0) if ticket is None else ticket
    return n // key_heads % tiles, n // key_heads // tiles, n % key_heads


@gluon.jit
def copy_queries(
    rings, q, q_rest, d_out, of_rows, b, head, heads, j, step, ROWS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Block j of a head's queries, with their numbers and gradients of out, to the rings' place of this step."""
    of_q, qs_rest, of_d_out, vectors = rings
    qs, q_full, q_empty = of_q
    d_outs, d_out_full, d_out_empty = of_d_out
    s = step % STAGES
    phase = (step // STAGES) & 1
    mbarrier.wait(q_empty.index(s), phase ^ 1)
    mbarrier.expect(q_full.index(s), ROWS * columns_of(q, q_rest) * 2 + 2 * ROWS * 4)
    copy_in(q, [b, head, j * ROWS, 0], q_full.index(s), qs.index(s))
    if q_rest is not None:
        copy_in(q_rest, [b, head, j * ROWS, q.block_shape[-1]], q_full.index(s), qs_rest.index(s))
    for which in gl.static_range(2):
        into = vectors.index(2 * s + which)
        copy_in(of_rows, [2 * (b * heads + head) + which, j * ROWS], q_full.index(s), into)
    mbarrier.wait(d_out_empty.index(s), phase ^ 1)
    mbarrier.expect(d_out_full.index(s), ROWS * d_out.block_shape[-1] * 2)
    copy_in(d_out, [b, head, j * ROWS, 0], d_out_full.index(s), d_outs.index(s))


@gluon.jit
def block_entry(table, t, of_mask, tiles, ROWS: gl.constexpr):
    """`key_entry`, in blocks of ROWS queries."""
    first, last, full_first, full_last, any_sees = key_entry(table, t, of_mask, tiles)
    MANY: gl.constexpr = HALF // ROWS
    return first * MANY, last * MANY, full_first * MANY, full_last * MANY, any_sees


@gluon.jit
def _copy(rings, q, q_rest, d_out, k, k_rest, v, of_rows, mask, sizes, ROWS: gl.constexpr, STAGES: gl.constexpr):
    of_q, qs_rest, of_d_out, vectors, ks, ks_rest, vs, k_full = rings
    start, end, stop, table = mask
    queries, keys, heads, group, tiles, own = sizes
    BYTES: gl.constexpr = TILE * (columns_of(k, k_rest) + v.block_shape[-1]) * 2
    t, b, h = key_place(None, heads, group, tiles)
    first, last, _first, _last, _any = block_entry(table, t, b * own, tiles, ROWS)
    mbarrier.expect(k_full, BYTES)
    for w in gl.static_range(2):
        row = t * TILE + w * HALF
        copy_in(k, [b, h, row, 0], k_full, ks.index(w))
        if k_rest is not None:
            copy_in(k_rest, [b, h, row, k.block_shape[-1]], k_full, ks_rest.index(w))
        copy_in(v, [b, h, row, 0], k_full, vs.index(w))
    step = 0
    for g in range(group):
        head = h * group + g
        for j in range(first, last):
            of_block = of_q, qs_rest, of_d_out, vectors
            copy_queries(of_block, q, q_rest, d_out, of_rows, b, head, heads, j, step, ROWS, STAGES)
            step += 1


@gluon.jit
def row_numbers(vectors, s, which: gl.constexpr, ROWS: gl.constexpr):
    """Numbers of the queries of a stage, one a column."""
    return vectors.index(2 * s + which).reshape([ROWS]).load(gl.SliceLayout(0, products_layout(ROWS)))


@gluon.jit
def queries_see(j, start_p, end_p, until, key, of_mask, queries, keys, ROWS: gl.constexpr):
    """Of each pair of a key and a query of block j; `until`: the keys' stops, if there are any."""
    row = j * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, products_layout(ROWS)))
    at = of_mask.to(gl.int64) * queries + row
    start = gl.load(start_p + at, mask=row < queries, other=0)
    end = gl.minimum(gl.load(end_p + at, mask=row < queries, other=0), keys)
    seen = (key[:, None] >= start[None, :]) & (key[:, None] < end[None, :])
    if until is not None:
        seen = seen & (row[None, :] < until[:, None])
    return seen


@gluon.jit
def _differentiate(
    rings, grad_k, grad_k_rest, grad_v, mask, scale, softcap, sizes,
    W: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    of_q, qs_rest, of_d_out, vectors, ks, ks_rest, vs, k_full = rings
    qs, q_full, q_empty = of_q
    d_outs, d_out_full, d_out_empty = of_d_out
    start_p, end_p, stop, table = mask
    queries, keys, heads, group, tiles, own = sizes
    layout: gl.constexpr = products_layout(ROWS)
    FIRST: gl.constexpr = ks.shape[-1]
    t, b, h = key_place(None, heads, group, tiles)
    of_mask = b * own
    first, last, full_first, full_last, any_sees = block_entry(table, t, of_mask, tiles, ROWS)
    key = t * TILE + W * HALF + gl.arange(0, HALF, gl.SliceLayout(1, layout))
    until = None
    if stop is not None:
        until = gl.load(stop + of_mask.to(gl.int64) * keys + key, mask=key < keys, other=0)
    zeros = gl.zeros((HALF, ROWS), gl.float32, layout)
    # Values have as many columns as the first of keys.
    sum_k = gl.zeros((HALF, FIRST), gl.float32, products_layout(FIRST))
    if ks_rest is not None:
        REST: gl.constexpr = ks_rest.shape[-1]
        sum_k_rest = gl.zeros((HALF, REST), gl.float32, products_layout(REST))
    sum_v = gl.zeros((HALF, FIRST), gl.float32, products_layout(FIRST))
    k, v = matrix(ks.index(W)), matrix(vs.index(W))
    k_rest = ks_rest.index(W) if ks_rest is not None else None
    # What the last block adds to the gradients of keys is multiplied beside this block's scores; at first, nothing.
    of_k = gl.zeros((HALF, ROWS), grad_k.dtype, factor_layout(FIRST))
    mbarrier.wait(k_full, 0)
    j = first
    many = group * (last - first)
    for step in range(many):
        hidden = (j < full_first) | (j >= full_last)
        s = step % STAGES
        phase = (step // STAGES) & 1
        before = max(step - 1, 0) % STAGES
        mbarrier.wait(q_full.index(s), phase)
        x = product_of_wide(k, k_rest, qs.index(s), qs_rest.index(s) if qs_rest is not None else None, zeros)
        sum_k = warpgroup_mma(of_k, matrix(qs.index(before)), sum_k, is_async=True)
        if k_rest is not None:
            rest = gl.convert_layout(of_k, factor_layout(REST))
            sum_k_rest = warpgroup_mma(rest, matrix(qs_rest.index(before)), sum_k_rest, is_async=True)
            x = warpgroup_mma_wait(num_outstanding=2, deps=(x,))
        else:
            x = warpgroup_mma_wait(num_outstanding=1, deps=(x,))
        if softcap is not None:
            x = capped(x, scale, softcap)
        factor = (scale if softcap is None else softcap) * LOG2E
        p = gl.exp2(x * factor - row_numbers(vectors, s, 0, ROWS)[None, :])
        if k_rest is not None:
            sum_k, sum_k_rest = warpgroup_mma_wait(num_outstanding=0, deps=(sum_k, sum_k_rest))
            mbarrier.arrive(q_empty.index(before), count=1, pred=step > 0)
        if hidden:
            p = gl.where(queries_see(j, start_p, end_p, until, key, of_mask, queries, keys, ROWS), p, 0.0)
        if k_rest is not None:
            p = p.to(grad_v.dtype)
        else:
            sum_k = warpgroup_mma_wait(num_outstanding=0, deps=(sum_k,))
            mbarrier.arrive(q_empty.index(before), count=1, pred=step > 0)
        factors = gl.convert_layout(p.to(grad_v.dtype), factor_layout(FIRST))
        mbarrier.wait(d_out_full.index(s), phase)
        y = warpgroup_mma(v, matrix(d_outs.index(s)).permute((1, 0)), zeros, use_acc=False, is_async=True)
        sum_v = warpgroup_mma(factors, matrix(d_outs.index(s)), sum_v, is_async=True)
        y = warpgroup_mma_wait(num_outstanding=1, deps=(y,))
        d_scores = p.to(gl.float32) * (y - row_numbers(vectors, s, 1, ROWS)[None, :])
        if softcap is not None:
            d_scores = d_scores * (1 - x * x)
        fence_async_shared()  # the numbers of these queries may be overwritten
        of_k = gl.convert_layout(d_scores.to(grad_k.dtype), factor_layout(FIRST))
        sum_v = warpgroup_mma_wait(num_outstanding=0, deps=(sum_v,))
        mbarrier.arrive(d_out_empty.index(s), count=1)
        j += 1
        if j == last:
            j = first
    before = (many - 1) % STAGES
    sum_k = warpgroup_mma(of_k, matrix(qs.index(before)), sum_k, is_async=True)
    if k_rest is not None:
        rest = gl.convert_layout(of_k, factor_layout(REST))
        sum_k_rest = warpgroup_mma(rest, matrix(qs_rest.index(before)), sum_k_rest, is_async=True)
        sum_k, sum_k_rest = warpgroup_mma_wait(num_outstanding=0, deps=(sum_k, sum_k_rest))
    else:
        sum_k = warpgroup_mma_wait(num_outstanding=0, deps=(sum_k,))
    # Where none sees a key, what isn't a number is in no sum.
    k.store(gl.where(any_sees, sum_k * scale, 0.0).to(grad_k.dtype))
    if k_rest is not None:
        matrix(k_rest).store(gl.where(any_sees, sum_k_rest * scale, 0.0).to(grad_k.dtype))
    v.store(gl.where(any_sees, sum_v, 0.0).to(grad_v.dtype))
    fence_async_shared()
    barrier()
    row = t * TILE + W * HALF
    copy_out(grad_k, (b, h, row, 0), ks.index(W))
    if k_rest is not None:
        copy_out(grad_k_rest, (b, h, row, FIRST), ks_rest.index(W))
    copy_out(grad_v, (b, h, row, 0), vs.index(W))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["queries", "keys", "heads", "group", "tiles", "own"])
def key_gradient(
    q, q_rest, d_out, k, k_rest, v, grad_k, grad_k_rest, grad_v, of_rows, start, end, stop, table, scale, softcap,
    queries, keys, heads, group, tiles, own,
    ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`of_rows`: of `gradient_rows`; `q_rest` is q in blocks of the columns that q's blocks leave out, if they do, like
    the others of that name.  A program has a tile.
    """
    of_q = new_ring(q, STAGES, 2)
    qs_rest, ks_rest = None, None
    if q_rest is not None:
        qs_rest = gl.allocate_shared_memory(q.dtype, [STAGES] + q_rest.block_shape, q_rest.layout)
    of_d_out = new_ring(d_out, STAGES, 2)
    vectors = gl.allocate_shared_memory(gl.float32, [2 * STAGES] + of_rows.block_shape, of_rows.layout)
    ks = gl.allocate_shared_memory(k.dtype, [2] + k.block_shape, k.layout)
    if k_rest is not None:
        ks_rest = gl.allocate_shared_memory(k.dtype, [2] + k_rest.block_shape, k_rest.layout)
    vs = gl.allocate_shared_memory(v.dtype, [2] + v.block_shape, v.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=1)
    fence_async_shared()
    barrier()
    rings = of_q, qs_rest, of_d_out, vectors, ks, ks_rest, vs, k_full
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    mask = start, end, stop, table
    sizes = queries, keys, heads, group, tiles, own
    gl.warp_specialize(
        [
            (_differentiate, (rings, grad_k, grad_k_rest, grad_v, mask, scale, softcap, sizes, FIRST, ROWS, STAGES)),
            (_differentiate, (rings, grad_k, grad_k_rest, grad_v, mask, scale, softcap, sizes, SECOND, ROWS, STAGES)),
            (_copy, (rings, q, q_rest, d_out, k, k_rest, v, of_rows, mask, sizes, ROWS, STAGES)),
        ],
        [4, 1],
        [REGISTERS, FEW_REGISTERS],
    )
