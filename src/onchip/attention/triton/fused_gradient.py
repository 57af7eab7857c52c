"""The gradients of keys, values and queries in one kernel, in Gluon, for Hopper: heads of up to 64 numbers.

A tile of keys walks over the queries that see it, as in key_gradient.py, with its keys and values in registers; a third
group multiplies what that gives for queries.  What a tile adds to the queries' sums, in float32 in memory, is added in
the order of the tiles, so that the sums have the same bits each time: each head has a counter for each block of
queries, and a tile waits until the counter says that all tiles before it are done.  The first one stores, so that no
sum has to be zero before.

A program takes the number of its tile when it starts, and waits for lower numbers alone, whose programs have started
before.  What has started keeps its place on the GPU: streams take turns between programs, and processes take turns with
all that runs for one of them, which is then stored and goes on later.  So of the numbers that aren't done the lowest
waits for nobody and ends, however few programs run at once.
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

from onchip.attention.triton import common, problem
from onchip.attention.triton.common import (
    FEW_REGISTERS,
    HALF,
    LOG2E,
    TILE,
    anew,
    capped,
    factor_layout,
    matrix,
    new_ring,
    products_layout,
)
from onchip.attention.triton.key_gradient import copy_queries, key_entry, key_place, queries_see, row_numbers
from onchip.kernels.triton.gluon import add_out, barrier, copy_in, copy_out, new_barriers

# Numbers that the table of query tiles has for a block of queries.
ENTRIES = common.ENTRIES
# Registers of a thread that makes probabilities, and of one that multiplies for queries.
REGISTERS = gl.constexpr(208)
SOME_REGISTERS = gl.constexpr(72)
# Numbers before the first counter; the first of them is that of the next tile.
TICKETS = gl.constexpr(problem.TICKETS)
# The sums' memory for a block of queries and 64 of their numbers.
SUM_ROWS, SUM_COLUMNS = gl.constexpr(problem.SUM_ROWS), gl.constexpr(problem.SUM_COLUMNS)
WRITERS = gl.constexpr(3)


@gluon.jit
def _await_turn(counter, turn):
    """Until it is `turn`; what others have added before is in memory then."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        .reg .b32 seen;
        again:
        ld.acquire.gpu.global.b32 seen, [$1];
        setp.ne.s32 p, seen, $2;
        @p bra again;
        fence.proxy.async.global;
        mov.b32 $0, seen;
        }
        """,
        "=r,l,r", [counter.to(gl.int64), turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _pass_turn(counter, turn):
    """Once what this warp has sent is in memory, let the counter be `turn`."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        .reg .b32 lane;
        cp.async.bulk.wait_group 0;
        fence.proxy.async.global;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 p, lane, 0;
        @p st.release.gpu.global.b32 [$1], $2;
        mov.b32 $0, lane;
        }
        """,
        "=r,l,r", [counter.to(gl.int64), turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def as_registers(x):
    """A product's [numbers, queries], [64, 64], in the order of a group's registers, four of each thread and then the
    next four: so it is stored 16 bytes at a time, and no two threads meet in a bank of shared memory.
    """
    # Warps, halves of 16 rows, rows; eights of columns, pairs, columns.
    return x.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([SUM_ROWS, SUM_COLUMNS])


@gluon.jit
def new_memory(
    q, d_out, k, v, of_rows, sums, ROWS: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr
):  # fmt: skip
    """The rings of queries, a tile's keys and values, the scores' gradients of two blocks, and pieces of sums."""
    of_q = new_ring(q, STAGES, 2)
    of_d_out = new_ring(d_out, STAGES, 2)
    vectors = gl.allocate_shared_memory(gl.float32, [2 * STAGES] + of_rows.block_shape, of_rows.layout)
    ks = gl.allocate_shared_memory(k.dtype, [2] + k.block_shape, k.layout)
    vs = gl.allocate_shared_memory(v.dtype, [2] + v.block_shape, v.layout)
    between: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dss = gl.allocate_shared_memory(k.dtype, [4, HALF, ROWS], between)
    dqs = gl.allocate_shared_memory(gl.float32, [PIECES] + sums.block_shape, sums.layout)
    return of_q, of_d_out, vectors, ks, vs, dss, dqs


@gluon.jit
def take_tile(counters, heads, group, tiles):
    """A program's tile, sequence and key head, once all barriers are made."""
    fence_async_shared()
    barrier()
    ticket = gl.atomic_add(counters, 1)
    barrier()  # all have it before its memory is used again
    # A plane's tiles come in order, and under a causal mask the first one is the longest.
    return key_place(ticket, heads, group, tiles)


@gluon.jit
def leave(x, into, at, block):
    """Store a group's half of a tile by way of this block of shared memory."""
    matrix(block).store(x.to(into.dtype))
    fence_async_shared()
    barrier()
    copy_out(into, at, block)


@gluon.jit
def copy_blocks(
    rings, q, d_out, k, v, of_rows, mask, sizes, n, D: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """The keys and values of a tile, and all blocks of queries that it walks over, from the last."""
    of_q, of_d_out, vectors, ks, vs, k_full = rings
    start, end, table, of_queries = mask
    queries, keys, heads, group, tiles, blocks, own = sizes
    t, b, h = n
    first, last, _first, _last, _any = key_entry(table, t, b * own, tiles)
    mbarrier.expect(k_full, 2 * TILE * D * 2)
    for w in gl.static_range(2):
        copy_in(k, [b, h, t * TILE + w * HALF, 0], k_full, ks.index(w))
        copy_in(v, [b, h, t * TILE + w * HALF, 0], k_full, vs.index(w))
    j = last - 1
    g = 0
    for step in range(group * (last - first)):
        head = h * group + g
        copy_queries((of_q, None, of_d_out, vectors), q, None, d_out, of_rows, b, head, heads, j, step, ROWS, STAGES)
        g += 1
        if g == group:
            g = 0
            j -= 1


@gluon.jit
def write_sums(
    of_dq, sums, counters, mask, sizes, n,
    W: gl.constexpr, WRITERS: gl.constexpr, PIECES: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Add each WRITERS-th piece to the queries' sums, in its turn.  A block of queries has PARTS pieces, each of 64 of
    their numbers; WRITERS is a multiple of PARTS.
    """
    STEPS: gl.constexpr = WRITERS // PARTS
    dqs, dq_full, dq_empty = of_dq
    start, end, table, of_queries = mask
    queries, keys, heads, group, tiles, blocks, own = sizes
    t, b, h = n
    first, last, _first, _last, _any = key_entry(table, t, b * own, tiles)
    of_queries += b * own * blocks * ENTRIES
    g, j = W // PARTS % group, last - 1 - W // PARTS // group
    # Of the tiles that a block sees, the first has turn 0.  Of the next block they are read ahead.
    at = of_queries + max(j, 0) * ENTRIES
    low, high = gl.load(at), gl.load(at + 1)
    for m in range((PARTS * group * (last - first) - W + WRITERS - 1) // WRITERS):
        i = m * WRITERS + W
        place = ((b * heads + h * group + g) * blocks + j) * PARTS + W % PARTS
        counter = counters + place
        turn = t - low
        sees = (low <= t) & (t < high)
        g += STEPS % group
        j -= STEPS // group
        if g >= group:
            g -= group
            j -= 1
        at = of_queries + max(j, 0) * ENTRIES
        low, high = gl.load(at), gl.load(at + 1)
        if sees:
            _await_turn(counter, turn)
        mbarrier.wait(dq_full.index(i % PIECES), (i // PIECES) & 1)
        if sees:
            if turn == 0:
                copy_out(sums, [place * SUM_ROWS, 0], dqs.index(i % PIECES))
            else:
                add_out(sums, [place * SUM_ROWS, 0], dqs.index(i % PIECES))
        tma.store_wait(0)
        mbarrier.arrive(dq_empty.index(i % PIECES), count=1)
        if sees:
            _pass_turn(counter, turn + 1)


@gluon.jit
def _multiply_for_queries(
    of_ds, of_dq, ks, k_full, k_free, mask, sizes, n, D: gl.constexpr, ROWS: gl.constexpr, PIECES: gl.constexpr
):
    dss, ds_full, ds_free = of_ds
    dqs, dq_full, dq_empty = of_dq
    start, end, table, of_queries = mask
    queries, keys, heads, group, tiles, blocks, own = sizes
    t, b, h = n
    first, last, _first, _last, _any = key_entry(table, t, b * own, tiles)
    zeros = gl.zeros((D, ROWS), gl.float32, products_layout(ROWS))
    mbarrier.wait(k_full, 0)
    for i in range(group * (last - first)):
        buffer = i % 2
        mbarrier.wait(ds_full.index(buffer), (i // 2) & 1)
        dq = zeros
        for w in gl.static_range(2):
            k = matrix(ks.index(w)).permute((1, 0))
            dq = warpgroup_mma(k, dss.index(2 * buffer + w), dq, use_acc=w > 0, is_async=True)
        dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq,))
        mbarrier.arrive(ds_free.index(buffer), count=1)
        mbarrier.wait(dq_empty.index(i % PIECES), ((i // PIECES) & 1) ^ 1)
        dqs.index(i % PIECES).store(as_registers(dq))
        fence_async_shared()
        barrier()
        mbarrier.arrive(dq_full.index(i % PIECES), count=1)
    mbarrier.arrive(k_free, count=1)


@gluon.jit
def probabilities(x, vectors, s, j, mask, key, scale, softcap, of_mask, queries, keys, hidden, ROWS: gl.constexpr):
    """Of a block of queries, [keys, queries]; with a softcap what the scores are of it, too."""
    start_p, end_p, table, of_queries = mask
    if softcap is not None:
        x = capped(x, scale, softcap)
    factor = (scale if softcap is None else softcap) * LOG2E
    p = gl.exp2(x * factor - row_numbers(vectors, s, 0, ROWS)[None, :])
    if hidden:
        p = gl.where(queries_see(anew(j), start_p, end_p, None, key, of_mask, queries, keys, ROWS), p, 0.0)
    return x, p


@gluon.jit
def _differentiate(
    rings, of_ds, k_free, grad_k, grad_v, mask, scale, softcap, sizes, n,
    W: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    of_q, of_d_out, vectors, ks, vs, k_full = rings
    qs, q_full, q_empty = of_q
    d_outs, d_out_full, d_out_empty = of_d_out
    dss, ds_full, ds_free = of_ds
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
    k = matrix(ks.index(W)).load(factor_layout(ROWS))
    v = matrix(vs.index(W)).load(factor_layout(ROWS))
    j = last - 1
    g = 0
    for step in range(group * (last - first)):
        hidden = (j < full_first) | (j >= full_last)
        s = step % STAGES
        phase = (step // STAGES) & 1
        buffer = step % 2
        mbarrier.wait(q_full.index(s), phase)
        x = warpgroup_mma(k, matrix(qs.index(s)).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(d_out_full.index(s), phase)
        y = warpgroup_mma(v, matrix(d_outs.index(s)).permute((1, 0)), zeros, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(num_outstanding=1, deps=(x,))
        x, p = probabilities(x, vectors, s, j, mask, key, scale, softcap, of_mask, queries, keys, hidden, ROWS)
        factors = gl.convert_layout(p.to(grad_v.dtype), factor_layout(D))
        sum_v = warpgroup_mma(factors, matrix(d_outs.index(s)), sum_v, is_async=True)
        y = warpgroup_mma_wait(num_outstanding=1, deps=(y,))
        d_scores = p * (y - row_numbers(vectors, s, 1, ROWS)[None, :])
        if softcap is not None:
            d_scores = d_scores * (1 - x * x)
        d_scores = d_scores.to(grad_k.dtype)
        mbarrier.wait(ds_free.index(buffer), ((step // 2) & 1) ^ 1)
        dss.index(2 * buffer + W).store(d_scores)
        fence_async_shared()  # the numbers of these queries may be overwritten, too
        factors = gl.convert_layout(d_scores, factor_layout(D))
        sum_k = warpgroup_mma(factors, matrix(qs.index(s)), sum_k, is_async=True)
        barrier()
        mbarrier.arrive(ds_full.index(buffer), count=1)
        sum_v = warpgroup_mma_wait(num_outstanding=1, deps=(sum_v,))
        mbarrier.arrive(d_out_empty.index(s), count=1)
        sum_k = warpgroup_mma_wait(num_outstanding=0, deps=(sum_k,))
        mbarrier.arrive(q_empty.index(s), count=1)
        g += 1
        if g == group:
            g = 0
            j -= 1
    # Where none sees a key, what isn't a number is in no sum.
    sum_v, sum_k = gl.where(any_sees, sum_v, 0.0), gl.where(any_sees, sum_k * scale, 0.0)
    leave(sum_v, grad_v, (b, h, t * TILE + W * HALF, 0), vs.index(W))
    mbarrier.wait(k_free, 0)
    leave(sum_k, grad_k, (b, h, t * TILE + W * HALF, 0), ks.index(W))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["queries", "keys", "heads", "group", "tiles", "blocks", "own"])
def fused_gradient(
    q, d_out, k, v, sums, grad_k, grad_v, of_rows, start, end, table, of_queries, counters, scale, softcap,
    queries, keys, heads, group, tiles, blocks, own,
    D: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """`of_rows`: of `gradient_rows`; `table` is that of key tiles, `of_queries` that of query tiles, which are the
    blocks of ROWS queries.  `sums` [B * Hq * blocks * SUM_ROWS, 256] float32 begins as anything, `counters` [TICKETS +
    B * Hq * blocks] as 0.  A program has a tile.
    """
    of_q, of_d_out, vectors, ks, vs, dss, dqs = new_memory(q, d_out, k, v, of_rows, sums, ROWS, STAGES, PIECES)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_free.index(i), count=1)
    dq_full, dq_empty = new_barriers(PIECES)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=1)
    mbarrier.init(k_free, count=1)
    n = take_tile(counters, heads, group, tiles)
    counters += TICKETS
    rings = of_q, of_d_out, vectors, ks, vs, k_full
    of_ds = dss, ds_full, ds_free
    of_dq = dqs, dq_full, dq_empty
    mask = start, end, table, of_queries
    sizes = queries, keys, heads, group, tiles, blocks, own
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    THIRD: gl.constexpr = 2
    WHOLE: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                _differentiate,
                (rings, of_ds, k_free, grad_k, grad_v, mask, scale, softcap, sizes, n, FIRST, D, ROWS, STAGES),
            ),
            (
                _differentiate,
                (rings, of_ds, k_free, grad_k, grad_v, mask, scale, softcap, sizes, n, SECOND, D, ROWS, STAGES),
            ),
            (_multiply_for_queries, (of_ds, of_dq, ks, k_full, k_free, mask, sizes, n, D, ROWS, PIECES)),
            (copy_blocks, (rings, q, d_out, k, v, of_rows, mask, sizes, n, D, ROWS, STAGES)),
            (write_sums, (of_dq, sums, counters, mask, sizes, n, FIRST, WRITERS, PIECES, WHOLE)),
            (write_sums, (of_dq, sums, counters, mask, sizes, n, SECOND, WRITERS, PIECES, WHOLE)),
            (write_sums, (of_dq, sums, counters, mask, sizes, n, THIRD, WRITERS, PIECES, WHOLE)),
        ],
        [4, 4, 1, 1, 1, 1],
        [REGISTERS, SOME_REGISTERS, FEW_REGISTERS, FEW_REGISTERS, FEW_REGISTERS, FEW_REGISTERS],
    )
