"""The kernels that linear_log_probs has beside those of linear_cross_entropy.

Sizes, positions and the matrix of exponentials are explained in onchip.vocab.triton.blocks.  Beside T
tokens, H hidden and V vocab there are K ids per token.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LOG2E, expm1, tanh
from onchip.vocab.triton.blocks import VOCAB_TILE, exponential_row

# Below this exp is 0 in float32: offsets are cut off here, so that p log p is 0 at p = 0 where 0 * -inf would not be.
VANISHED = tl.constexpr(-128.0)


@triton.jit
def pick_logits(
    hidden,  # [T, H], any strides
    weight,  # [V, H], any strides
    bias,  # [V] float32
    ids,  # [T, K] int64
    temperature,  # [T] float32
    order,  # [T] int32
    count,
    picked,  # [T, K] float32 out, by position: each id's logit
    label,  # [T, K] int32 out, by position: the id, -1 if it is ignored or out of range
    best,  # [T] float32 out, by position: the largest of its ids' logits
    leader,  # [T] int64 out, by token: the id that has it
    hidden_stride_t,
    hidden_stride_h,
    weight_stride_v,
    weight_stride_h,
    H,
    V,
    K,
    ignore_index,
    inner_scale,  # of the product before tanh
    outer_scale,  # of what comes after, but for the temperature
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The logits of a position's ids, and which is the largest; one that is out of range if none is in range."""
    at = tl.program_id(0)
    if at < tl.load(count):
        t = tl.load(order + at).to(tl.int64)
        k_z = outer_scale
        if TEMPERATURE:
            k_z = k_z / tl.load(temperature + t)
        z_best = tl.full((), float("-inf"), tl.float32)
        y_best = tl.full((), -1, tl.int64)
        for k in range(K):
            y = tl.load(ids + t * K + k)
            good = (y != ignore_index) & (y >= 0) & (y < V)
            row = tl.where(good, y, 0)
            total = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, H, BLOCK):
                c = start + tl.arange(0, BLOCK)
                h = tl.load(hidden + t * hidden_stride_t + c.to(tl.int64) * hidden_stride_h, mask=c < H, other=0)
                w = tl.load(weight + row * weight_stride_v + c.to(tl.int64) * weight_stride_h, mask=c < H, other=0)
                total += h.to(weight.dtype.element_ty).to(tl.float32) * w.to(tl.float32)
            x = tl.sum(total, 0)
            if BIAS:
                x += tl.load(bias + row)
            if SOFTCAP:
                x = tanh(x * inner_scale)
            z = x * k_z
            where = at.to(tl.int64) * K + k
            tl.store(picked + where, z)
            tl.store(label + where, tl.where(good, y, -1).to(tl.int32))
            leads = good & ((y_best < 0) | (z > z_best))
            z_best = tl.where(leads, z, z_best)
            y_best = tl.where(leads, y, y_best)
        tl.store(best + at, z_best)
        tl.store(leader + t, y_best)


@triton.jit
def spread_log_probs(
    ids,  # [T, K] int64
    position,  # [T] int32
    picked,
    best,
    leading,  # [T] float32, by token: the log-probability of the leader
    log_prob,  # [T, K] float32 out, by token
    N,  # T * K
    V,
    K,
    ignore_index,
    BLOCK: tl.constexpr,
):
    """Each id's log-probability, from the leader's: that has its digits where it is near 0."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    t = i // K
    y = tl.load(ids + i, mask=i < N, other=ignore_index)
    counted = y != ignore_index
    good = counted & (y >= 0) & (y < V)
    at = tl.load(position + t, mask=good, other=0).to(tl.int64)
    z = tl.load(picked + at * K + i - t * K, mask=good, other=0.0)
    top = tl.load(best + at, mask=good, other=0.0)
    # The difference of two that are -inf is NaN.
    value = tl.load(leading + t, mask=good, other=0.0) + tl.where(z == top, 0.0, z - top)
    tl.store(log_prob + i, tl.where(good, value, tl.where(counted, float("nan"), 0.0)), mask=i < N)


@triton.jit
def gradient_terms(
    ids,  # [T, K] int64
    order,  # [T] int32
    count,
    factor,  # [T] float32: z = x * factor
    lse,  # [T] float32, by token
    log_prob,  # [T, K] float32, by token
    entropy,  # [T] float32, by token
    grad_log_prob,  # [T, K] float32, by token
    grad_lse,  # [T] float32, by token
    grad_entropy,  # [T] float32, by token
    row,  # [T] float32 out, and what follows; by position
    entropy_row,  # [T]
    mean,  # [T]
    entry,  # [T, K]: the ids' entries of the gradient
    label,  # [T, K] int32: whose, -1 for none: it is ignored, out of range, or the same as one before
    size,  # [T]: of the upstream gradients
    V,
    K,
    ignore_index,
    scale,  # d product = d z * factor * scale
    LOG_PROB: tl.constexpr,
    LSE: tl.constexpr,
    ENTROPY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The gradient of a position's logits: p * (row + entropy_row * (z - mean)), and its ids' entries."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = t < tl.load(count)
    token = tl.load(order + t, mask=inside, other=0).to(tl.int64)
    here = inside[:, None] & (k < K)[None, :]
    y = tl.load(ids + token[:, None] * K + k[None, :], mask=here, other=ignore_index)
    counted = here & (y != ignore_index)
    lp = tl.load(log_prob + token[:, None] * K + k[None, :], mask=counted, other=0.0)
    lse_t = tl.load(lse + token, mask=inside, other=0.0)
    # Of an id's occurrences, and of all other ids.
    same = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    rest = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    repeats = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    large = tl.zeros((BLOCK_T,), tl.float32)
    for j in range(K):
        y_j = tl.load(ids + token * K + j, mask=inside, other=ignore_index)
        counts = y_j != ignore_index
        g = tl.zeros((BLOCK_T,), tl.float32)
        if LOG_PROB:
            g = tl.load(grad_log_prob + token * K + j, mask=counts, other=0.0)
        g = tl.where(counts & ((y_j < 0) | (y_j >= V)), float("nan"), g)
        equal = y == y_j[:, None]
        same += tl.where(equal, g[:, None], 0.0)
        rest += tl.where(equal, 0.0, g[:, None])
        repeats += (equal & (k > j)[None, :]).to(tl.int32)
        total += g
        large += tl.abs(g)
    if LSE:
        g = tl.load(grad_lse + token, mask=inside, other=0.0)
        total -= g
        large += tl.abs(g)
        rest -= g[:, None]
    k_z = tl.load(factor + t, mask=inside, other=1.0)
    f = k_z * scale
    if ENTROPY:
        g = tl.load(grad_entropy + token, mask=inside, other=0.0)
        h = tl.load(entropy + token, mask=inside, other=0.0)
        large += tl.abs(g)
        rest += g[:, None] * tl.maximum(lp + h[:, None], VANISHED)
        tl.store(entropy_row + t, -g * f, mask=inside)
        tl.store(mean + t, lse_t - h, mask=inside)
    tl.store(row + t, -total * f, mask=inside)
    tl.store(size + t, large * f, mask=inside)
    # 1 - p as -expm1(log p): 1 minus a rounded p would lose all digits of a p near 1.
    value = -(same * expm1(lp)) - tl.exp2(lp * LOG2E) * rest
    if SOFTCAP:
        x = tl.minimum(tl.maximum((lp + lse_t[:, None]) / k_z[:, None], -1.0), 1.0)
        value *= 1 - x * x
    good = counted & (y >= 0) & (y < V) & (repeats == 0)
    to = t.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(entry + to, tl.where(good, value * f[:, None], 0.0), mask=here)
    tl.store(label + to, tl.where(good, y, -1).to(tl.int32), mask=here)


@triton.jit
def entropy_gradient(
    exponentials,  # [rows, VOCAB_TILE] in and out
    count,
    lse,  # [T] float32, by token
    order,
    base,  # [T] float32, and what follows; by position
    row,
    entropy_row,
    mean,
    inverse_exponential_scale,
    stash,
    stash_stride,
    stash_tokens,
    overflow,
    overflow_tokens,
    BLOCK_T: tl.constexpr,
):
    """Make kept exponentials the gradient of their logits: p * (row + entropy_row * (z - mean)), and 0 where they are.

    z comes from the logarithm of what was kept: a relative error of that is as large an absolute one of z, and moves
    the gradient about as far as its own rounding does.
    """
    j = tl.program_id(0)
    t0 = tl.program_id(1) * BLOCK_T
    n = tl.load(count)
    if t0 < n:
        t = t0 + tl.arange(0, BLOCK_T)
        inside = t < n
        token = tl.load(order + t, mask=inside, other=0)
        b = tl.load(base + t, mask=inside, other=0.0)
        factor = tl.exp2((b - tl.load(lse + token, mask=inside, other=0.0)) * LOG2E)
        middle = b - tl.load(mean + t, mask=inside, other=0.0)
        r = tl.load(row + t, mask=inside, other=0.0)
        r_entropy = tl.load(entropy_row + t, mask=inside, other=0.0)
        at = exponential_row(j, t0, stash, stash_stride, stash_tokens, overflow, overflow_tokens, 0, 0, 0)
        where = (tl.cast(at, tl.int64) + tl.arange(0, BLOCK_T))[:, None] * VOCAB_TILE
        where += tl.arange(0, VOCAB_TILE)[None, :]
        e = tl.load(exponentials + where).to(tl.float32) * inverse_exponential_scale
        offset = tl.log(e) + middle[:, None]
        g = e * factor[:, None] * (r[:, None] + r_entropy[:, None] * offset)
        tl.store(exponentials + where, tl.where(e > 0, g, 0.0).to(exponentials.dtype.element_ty))


@triton.jit
def write_entries(
    exponentials,  # [rows, VOCAB_TILE] in and out
    label,  # [T, K] int32, by position: -1 for none
    entry,  # [T, K] float32, by position
    count,
    first,  # position
    last,
    first_tile,
    chunk_tiles,
    K,
    stash,
    stash_stride,
    stash_tokens,
    overflow,
    overflow_tokens,
    again,
    again_tokens,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put the ids' entries, without VALUE zeros, in the place of what is there, for positions in [first, last) and a
    chunk of the vocabulary.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    t = (i // K).to(tl.int32)
    inside = (t >= first) & (t < tl.minimum(tl.load(count), last))
    y = tl.load(label + i, mask=inside, other=-1)
    j = y // VOCAB_TILE
    inside &= (y >= 0) & (j >= first_tile) & (j < first_tile + chunk_tiles)
    row = exponential_row(
        j, t, stash, stash_stride, stash_tokens, overflow, overflow_tokens, again, again_tokens, first_tile
    )
    where = row.to(tl.int64) * VOCAB_TILE + y - j * VOCAB_TILE
    value = tl.load(entry + i, mask=inside, other=0.0) if VALUE else tl.zeros((BLOCK,), tl.float32)
    tl.store(exponentials + where, value.to(exponentials.dtype.element_ty), mask=inside)
