"""The Triton kernels of precision='fp8': the targets' logits, and the softmax gradient of a chunk's logits, quantised
as it is made.

The products are cuBLAS's, so a chunk's logits exist, in bfloat16.  `softmax_gradient` reads each block of 128 tokens x
128 entries once and writes it in FP8 twice: by rows for hidden's gradient, and transposed for the weight's.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.ops._shared.triton_maths import LOG2E, gradient_terms, tanh
from onchip.ops._shared.triton_tiles import store_block
from onchip.ops.fp8_linear.triton_kernels import BLOCK, inverse, load_numbers, magnitude_bits, to_scale

FP8_MAX = tl.constexpr(448.0)


@triton.jit
def target_logits(
    hidden,  # [n, H], contiguous
    weight,  # [V, H], any strides
    bias,  # [V]
    target,  # [n] int64
    logits,  # [n] float32 out; 0 where the target is out of range
    weight_stride_v,
    weight_stride_h,
    H,
    V,
    BIAS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The product of a token's hidden state and its target's weight, neither quantised, and the bias."""
    t = tl.program_id(0).to(tl.int64)
    y = tl.load(target + t)
    good = (y >= 0) & (y < V)
    y = tl.where(good, y, 0)
    total = tl.zeros((BLOCK_H,), tl.float32)
    for start in range(0, H, BLOCK_H):
        c = start + tl.arange(0, BLOCK_H)
        inside = (c < H) & good
        h = tl.load(hidden + t * H + c, mask=inside, other=0)
        w = tl.load(weight + y * weight_stride_v + c.to(tl.int64) * weight_stride_h, mask=inside, other=0)
        total += h.to(tl.float32) * w.to(tl.float32)
    z = tl.sum(total, 0)
    if BIAS:
        z += tl.load(bias + y, mask=good, other=0).to(tl.float32)
    tl.store(logits + t, z)


@triton.jit
def _block(
    logits, logits_stride, i, j, n, V,
    y,  # [128] the target's column, negative if it has none
    k2,  # log2(e) times what makes x a final logit: [] or [128, 1]
    inner_scale,
    lse2,  # [128], and so on: see gradient_terms
    factor,
    even,
    at_target,
    SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    POSITIVE: tl.constexpr,
    RAGGED: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """The gradient of block (i, j) of the logits."""
    c = j * BLOCK + tl.arange(0, BLOCK)
    x = load_numbers(logits, logits_stride, 1, i, j, n, V, TMA)
    if SOFTCAP:
        x = tanh(x * inner_scale)
    g = tl.exp2(x * k2 - lse2[:, None])
    if not POSITIVE:
        g *= factor[:, None]
    if SMOOTHING:
        g -= even[:, None]
    if SOFTCAP:
        g *= 1 - x * x
    g = tl.where(c[None, :] == y[:, None], at_target[:, None], g)
    if RAGGED:
        g = tl.where((c < V)[None, :], g, 0.0)
    return g


@triton.jit
def softmax_gradient(
    logits,  # [n, V]: products and bias, before scale, softcap and temperature; of ignored tokens finite or -inf
    target,  # [n] int64
    of_targets,  # [n] float32: what stands for the target's logit
    token_weight,  # [n] float32
    temperature,  # [n] float32
    divisor,  # [] float32: what the reduced loss is divided by
    lse,  # [n] float32
    log_prob,  # [n] float32
    rows,  # [n, up(V)] E4M3 out
    row_scales,  # [V / 128, n] float32 out
    columns,  # [V, up(T)] E4M3 out: of tokens from `first` on
    column_scales,  # [T / 128, V] float32 out
    sums,  # [n / 128, V] float32 out: of the gradient over 128 tokens
    logits_stride,
    rows_stride,
    columns_stride,
    first,  # a multiple of 128
    n,
    V,
    ignore_index,
    inner_scale,  # of the logits before tanh
    outer_scale,  # of what comes after, but for the temperature
    logit_scale,
    label_smoothing,
    z_loss,
    TOKEN_WEIGHT: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    POSITIVE: tl.constexpr,  # the gradient of each logit but the target's is above 0
    RAGGED: tl.constexpr,  # V is no multiple of 128
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    TWICE: tl.constexpr,  # the block is read again, from L2, for its second copy: fewer registers
    TMA: tl.constexpr,
):
    """The gradient of the loss by the products, for an upstream gradient of 1; exactly 0 for ignored tokens."""
    i = tl.program_id(0)
    t = i * BLOCK + tl.arange(0, BLOCK)
    there = t < n
    label = tl.load(target + t, mask=there, other=ignore_index)
    kept = label != ignore_index
    good = (label >= 0) & (label < V)
    y = tl.where(good, label, -1).to(tl.int32)
    k2 = outer_scale * LOG2E
    row_factor = tl.full((BLOCK,), 1.0, tl.float32) * (logit_scale / tl.load(divisor))
    if TEMPERATURE:
        tau = tl.load(temperature + t, mask=kept, other=1.0)
        k2 = (k2 / tau)[:, None]
        row_factor = row_factor / tau
    if TOKEN_WEIGHT:
        row_factor *= tl.load(token_weight + t, mask=kept, other=0.0)
    row_factor = tl.where(kept, tl.where(good, row_factor, float("nan")), 0.0)
    row_lse = tl.load(lse + t, mask=there, other=0.0)
    row_log_prob = tl.load(log_prob + t, mask=there, other=0.0)
    lse2, factor, even, at_target = gradient_terms(
        row_lse, row_log_prob, row_factor, label_smoothing, z_loss, V, SMOOTHING
    )
    if SOFTCAP:
        x = tanh(tl.load(of_targets + t, mask=kept, other=0.0) * inner_scale)
        at_target *= 1 - x * x
    # exp2(z - inf) is 0 for ignored tokens, without a mask for each of their logits.
    lse2 = tl.where(kept, lse2, float("inf"))
    if POSITIVE:  # one multiplication of each logit less, and registers for it
        lse2 -= tl.log2(factor)
    start = tl.program_id(1) * BLOCKS
    for j in tl.range(start, tl.minimum(start + BLOCKS, tl.cdiv(V, BLOCK)), num_stages=STAGES):
        c = j * BLOCK + tl.arange(0, BLOCK)
        g = _block(
            logits, logits_stride, i, j, n, V, y, k2, inner_scale, lse2, factor, even, at_target,
            SMOOTHING, SOFTCAP, POSITIVE, RAGGED, TMA,
        )  # fmt: skip
        bits = magnitude_bits(g)
        if ROWS:
            scale = to_scale(tl.max(bits, 1), FP8_MAX, False)
            q = (g * inverse(scale)[:, None]).to(tl.float8e4nv)
            store_block(rows, rows_stride, i * BLOCK, j * BLOCK, n, rows_stride, q, BLOCK, BLOCK, TMA)
            tl.store(row_scales + tl.cast(j, tl.int64) * n + t, scale, mask=there)
        if COLUMNS:
            if TWICE:
                g = _block(
                    logits, logits_stride, i, j, n, V, y, k2, inner_scale, lse2, factor, even, at_target,
                    SMOOTHING, SOFTCAP, POSITIVE, RAGGED, TMA,
                )  # fmt: skip
                bits = magnitude_bits(g)
            scale = to_scale(tl.max(bits, 0), FP8_MAX, False)
            q = (g * inverse(scale)[None, :]).to(tl.float8e4nv).T
            store_block(columns, columns_stride, j * BLOCK, first + i * BLOCK, V, columns_stride, q, BLOCK, BLOCK, TMA)
            tl.store(column_scales + tl.cast(first // BLOCK + i, tl.int64) * V + c, scale, mask=c < V)
        if SUMS:
            tl.store(sums + tl.cast(i, tl.int64) * V + c, tl.sum(g, 0), mask=c < V)
