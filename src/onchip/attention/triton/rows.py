"""What backward computes query by query, in Triton: before the kernels, lse in base 2 and delta less the gradient of
lse; after the kernel for all gradients, the gradient of queries of its float32 sums.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LOG2E


@triton.jit(
    do_not_specialize=[
        "queries", "padded", "heads", "tiles", "out_batch", "out_head", "out_row",
        "grad_batch", "grad_head", "grad_row", "lse_batch", "lse_head", "lse_row",
    ]
)  # fmt: skip
def gradient_rows(
    out, d_out, lse, d_lse, sinks, of_rows, of_sinks, queries, padded, heads, tiles,
    out_batch, out_head, out_row, grad_batch, grad_head, grad_row, lse_batch, lse_head, lse_row,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of a tile of a plane: `of_rows` [B * Hq, 2, padded], and of the sink's gradient what these queries add,
    `of_sinks` [Hq, B, tiles].

    Strides of `out` and `d_out` are counted in 8 numbers, so that the compiler sees that they are multiples of these.
    Queries that see nothing, and those past the last one, have +inf and 0: all their probabilities are 0.
    """
    out_batch, out_head, out_row = 8 * out_batch, 8 * out_head, 8 * out_row
    grad_batch, grad_head, grad_row = 8 * grad_batch, 8 * grad_head, 8 * grad_row
    t, plane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = plane // heads, plane % heads
    row = t * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = row < queries
    there = inside[:, None] & (column < SIZE)[None, :]
    at_out = b * out_batch + h * out_head + row.to(tl.int64)[:, None] * out_row + column[None, :]
    at_grad = b * grad_batch + h * grad_head + row.to(tl.int64)[:, None] * grad_row + column[None, :]
    o = tl.load(out + at_out, mask=there, other=0).to(tl.float32)
    do = tl.load(d_out + at_grad, mask=there, other=0).to(tl.float32)
    z = tl.load(lse + plane * queries + row, mask=inside, other=float("-inf"))
    delta = tl.sum(o * do, 1)
    if d_lse is not None:
        at_lse = b * lse_batch + h * lse_head + row.to(tl.int64) * lse_row
        delta -= tl.load(d_lse + at_lse, mask=inside, other=0).to(tl.float32)
    sees = z != float("-inf")
    delta = tl.where(sees, delta, 0.0)
    into = of_rows + plane * (2 * padded) + row
    tl.store(into, tl.where(sees, z * LOG2E, float("inf")))
    tl.store(into + padded, delta)
    if of_sinks is not None:
        sink = tl.load(sinks + h).to(tl.float32)
        p = tl.where(sees, tl.exp2((sink - z) * LOG2E), 0.0)
        batch = tl.num_programs(1) // heads
        tl.store(of_sinks + (h * batch + b) * tiles + t, -tl.sum(p * delta, 0))


@triton.jit(do_not_specialize=["queries", "keys", "heads", "own", "blocks", "grad_batch", "grad_head", "grad_row"])
def rounded_sums(
    sums, start, end, grad_q, scale, queries, keys, heads, own, blocks, grad_batch, grad_head, grad_row,
    SIZE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Of a block of 64 queries and 64 of their PARTS * 64 numbers the sums times the scale, and 0 where a query sees
    nothing, whose sums nobody may have written.  `sums` [B * Hq, blocks, PARTS, 64 * 64] lie as a group of warps has
    them as a product's result, [numbers, queries]: four numbers of each thread, then the next four.  Strides are
    counted in 8 numbers, as above.
    """
    t, part, plane = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1).to(tl.int64)
    b, h = plane // heads, plane % heads
    row = t * 64 + tl.arange(0, 64)
    column = part * 64 + tl.arange(0, 64)
    inside = row < queries
    at = b * own * queries + row
    first = tl.maximum(tl.load(start + at, mask=inside, other=0), 0)
    last = tl.minimum(tl.load(end + at, mask=inside, other=0), keys)
    there = inside[:, None] & (column < SIZE)[None, :]
    x = tl.load(sums + ((plane * blocks + t) * PARTS + part) * 4096 + tl.arange(0, 4096))
    # Query 8 c + 2 q + e and number 16 w + 8 n + g: warp w's thread 4 g + q has it in register 4 c + 2 n + e.
    x = x.reshape([8, 4, 8, 4, 2, 2]).permute([0, 3, 5, 1, 4, 2]).reshape([64, 64])
    x = tl.where((first < last)[:, None], x, 0)
    into = b * (8 * grad_batch) + h * (8 * grad_head) + row.to(tl.int64)[:, None] * (8 * grad_row) + column[None, :]
    tl.store(grad_q + into, (x * scale).to(grad_q.dtype.element_ty), mask=there)
