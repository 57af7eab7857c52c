"""The Triton kernels of precision='fp8': the targets' logits, and the softmax gradient of a chunk's logits, quantised
as it is made.

The products are cuBLAS's, so a chunk's logits exist, in bfloat16.  `softmax_gradient` reads each block of 128 tokens x
128 entries once and writes it in FP8 twice: by rows for hidden's gradient, and transposed for the weight's.
"""

from typing import Any, NamedTuple

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.fp8.triton_kernels import BLOCK, four_bytes, inverse, magnitude_bits, to_scale
from onchip.kernels.triton.maths import smoothed, soft_gradient, tanh

FP8_MAX = tl.constexpr(448.0)


@triton.jit
def target_logits(
    hidden,  # [n, H], contiguous
    weight,  # [V, H], any strides
    bias,  # [V]
    target,  # [n, K] int64
    logits,  # [n, K] float32 out; 0 where the target is out of range
    weight_stride_v,
    weight_stride_h,
    K,
    H,
    V,
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
        h = tl.load(hidden + t // K * H + c, mask=inside, other=0)
        w = tl.load(weight + y * weight_stride_v + c.to(tl.int64) * weight_stride_h, mask=inside, other=0)
        total += h.to(tl.float32) * w.to(tl.float32)
    z = tl.sum(total, 0)
    if bias is not None:
        z += tl.load(bias + y, mask=good, other=0).to(tl.float32)
    tl.store(logits + t, z)


class ChunkLogits(NamedTuple):
    """A chunk's logits, and what their gradient is made with."""

    data: Any  # [n, V]: products and bias, before scale, softcap and temperature; of ignored tokens finite or -inf
    stride: Any
    terms: Any  # [6, n] float32: see `_gradient`
    class_weight: Any  # [V] float32: factors of what is even in the gradient, with label smoothing, or of labels
    inner_scale: Any  # of the logits before tanh, with a softcap
    # None but of a single target:
    target: Any  # [n] int64
    # None but of soft labels of K ids:
    ids: Any  # [n, K] int64, ascending
    at_ids: Any  # [n, K] float32: the gradient of the final logits of these; of an id that occurs twice the same
    firsts: Any  # [V / 128 + 1, n] int32: where in `ids` those of each 128 entries begin
    K: Any
    # None but of soft labels of every entry:
    labels: Any  # [n, V]
    labels_stride: Any  # of tokens
    entries_stride: Any
    label_smoothing: Any


@triton.jit
def _gradient(logits, r, j, n, V, SMOOTHING: tl.constexpr, RAGGED: tl.constexpr):
    """The gradient of the logits of tokens r [32] and the jth 128 entries; exactly 0 for ignored tokens.

    A token's terms are k2, lse2 and factor: the gradient is exp2(x k2 - lse2) factor; then what is even in it, to be
    subtracted, and what takes its place at a single target.  Of labels of every entry they are `more`, `mass` and
    `less` of `soft_gradient`.
    """
    c = j * BLOCK + tl.arange(0, BLOCK)
    there = r < n
    if logits.target is not None:
        y = tl.load(logits.target + r, mask=there, other=-1).to(tl.int32)
        at_target = tl.load(logits.terms + 4 * n + r, mask=there, other=0.0)
    k2 = tl.load(logits.terms + r, mask=there, other=0.0)
    lse2 = tl.load(logits.terms + n + r, mask=there, other=float("inf"))
    factor = tl.load(logits.terms + 2 * n + r, mask=there, other=0.0)
    at = r.to(tl.int64)[:, None] * logits.stride + c.to(tl.int64)[None, :]
    x = tl.load(logits.data + at, mask=there[:, None] & (c < V)[None, :], other=0.0).to(tl.float32)
    if logits.inner_scale is not None:
        x = tanh(x * logits.inner_scale)
    p = tl.exp2(x * k2[:, None] - lse2[:, None])
    if logits.labels is not None:
        at = r.to(tl.int64)[:, None] * logits.labels_stride + c.to(tl.int64)[None, :] * logits.entries_stride
        q = tl.load(logits.labels + at, mask=there[:, None] & (c < V)[None, :], other=0.0).to(tl.float32)
        q = smoothed(q, logits.label_smoothing, V)
        if logits.class_weight is not None:
            q *= tl.load(logits.class_weight + c, mask=c < V, other=0.0)[None, :]
        more = tl.load(logits.terms + 3 * n + r, mask=there, other=0.0)[:, None]
        mass = tl.load(logits.terms + 4 * n + r, mask=there, other=0.0)[:, None]
        less = tl.load(logits.terms + 5 * n + r, mask=there, other=0.0)[:, None]
        g = soft_gradient(p, q, mass, less, more) * factor[:, None]
    else:
        g = p * factor[:, None]
    if SMOOTHING:
        even = tl.load(logits.terms + 3 * n + r, mask=there, other=0.0)[:, None]
        if logits.class_weight is not None:
            even = even * tl.load(logits.class_weight + c, mask=c < V, other=0.0)[None, :]
        g -= even
    if logits.ids is not None:
        first = tl.load(logits.firsts + tl.cast(j, tl.int64) * n + r, mask=there, other=0)
        last = tl.load(logits.firsts + tl.cast(j + 1, tl.int64) * n + r, mask=there, other=0)
        for i in range(tl.max(last - first, 0)):
            here, at_id = first + i < last, r.to(tl.int64) * logits.K + first + i
            column = tl.load(logits.ids + at_id, mask=here, other=-1).to(tl.int32)
            value = tl.load(logits.at_ids + at_id, mask=here, other=0.0)
            g = tl.where(c[None, :] == column[:, None], value[:, None], g)
    if logits.inner_scale is not None:
        g *= 1 - x * x
    if logits.target is not None:
        g = tl.where(c[None, :] == y[:, None], at_target[:, None], g)
    if RAGGED:
        g = tl.where((c < V)[None, :], g, 0.0)
    return g


@triton.jit
def softmax_gradient(
    logits,  # ChunkLogits
    rows,  # [n, up(V)] E4M3 out
    row_scales,  # [V / 128, n] float32 out
    columns,  # [V, up(n) / 4] int32 out: the same transposed, four numbers each
    column_scales,  # [n / 128, V] float32 out
    sums,  # [n / 128, V] float32 out: of the gradient over 128 tokens
    rows_stride,
    columns_stride,
    n_16,  # n + 16 and V + 16: see `quantize` of fp8_linear
    V_16,
    SMOOTHING: tl.constexpr,
    RAGGED: tl.constexpr,  # V is no multiple of 128
):
    """The gradient of the loss by the products, in FP8; None: not wanted.

    A thread has four rows below each other, and makes them a second time, of what is in L1 still: see `quantize`.
    """
    n = n_16 - 16
    V = V_16 - 16
    i = tl.program_id(0)
    j = tl.program_id(1)
    c = j * BLOCK + tl.arange(0, BLOCK)
    token = i * BLOCK + 4 * tl.arange(0, BLOCK // 4)
    largest = tl.zeros((BLOCK // 4, BLOCK), tl.int32)
    total = tl.zeros((BLOCK // 4, BLOCK), tl.float32)
    for k in tl.static_range(4):
        r = token + k
        g = _gradient(logits, r, j, n, V, SMOOTHING, RAGGED)
        bits = magnitude_bits(g)
        largest = tl.maximum(largest, bits)
        if sums is not None:
            total += g
        if rows is not None:
            scale = to_scale(tl.max(bits, 1), FP8_MAX, False)
            q = (g * inverse(scale)[:, None]).to(tl.float8e4nv)
            tl.store(rows + r.to(tl.int64)[:, None] * rows_stride + c[None, :], q, mask=(r < n)[:, None])
            tl.store(row_scales + tl.cast(j, tl.int64) * n + r, scale, mask=r < n)
    if columns is not None:
        scale = to_scale(tl.max(largest, 0), FP8_MAX, False)
        f = inverse(scale)[None, :]
        g0 = _gradient(logits, token, j, n, V, SMOOTHING, RAGGED)
        g1 = _gradient(logits, token + 1, j, n, V, SMOOTHING, RAGGED)
        g2 = _gradient(logits, token + 2, j, n, V, SMOOTHING, RAGGED)
        g3 = _gradient(logits, token + 3, j, n, V, SMOOTHING, RAGGED)
        turned = four_bytes(g0 * f, g1 * f, g2 * f, g3 * f, tl.float8e4nv).T
        r = i * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        tl.store(columns + c.to(tl.int64)[:, None] * columns_stride + r[None, :], turned, mask=(c < V)[:, None])
        tl.store(column_scales + tl.cast(i, tl.int64) * V + c, scale, mask=c < V)
    if sums is not None:
        tl.store(sums + tl.cast(i, tl.int64) * V + c, tl.sum(total, 0), mask=c < V)
