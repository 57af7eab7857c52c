"""linear_jsd's Triton kernels for a top-k teacher: what the student gives the K entries, and the logits' gradient.

Of each token's row of logits one kernel reads the K entries' log-probabilities and, for a tail, adds up all others.
PyTorch's operations on K numbers per token make the loss from these (`torch_halves`).  They also make what the gradient
is made from: a factor times exp(z / temperature - center), but at each of the K entries a number of its own.

A token's ids are in ascending order.  So a program that goes through its row meets them one after another, and compares
each with one block of logits alone.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LOG2E, expm1
from onchip.ops.linear_jsd.triton_rows import (
    GROUP_OF,
    HARD_LOG_SUM,
    INVERSE_SCALE,
    LABEL_LOG_PROB,
    LN2,
    LOG_SUM,
    MAXIMUM,
    addresses,
    addresses_of_gradient,
    groups,
    log2_probs,
    store_gradient,
)
from onchip.vocab.triton.blocks import VOCAB_TILE

# The id after the last one: no index of logits.
NO_ID = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["first", "tiles", "tile_rows", "T", "K"])
def topk_log_probs(
    student,  # JsdLogits
    stats,  # [STATS, T] float32, by position
    found,  # [T, K + 1] float32 out, by position: the ids' log-probabilities, 0 where no logit is theirs; all others'
    ids,  # [T, K] int32, by token: ascending
    order,  # [T] int32: the token of a position
    count,  # [1] int32
    first,  # position
    tiles,
    tile_rows,
    T,
    V,
    K,
    inverse_temperature,
    TAIL: tl.constexpr,  # whether the last number is wanted
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What one token's logits, of one program, give its ids."""
    i = tl.program_id(0)
    at = first + i
    if at < tl.load(count):
        token = tl.load(order + at)
        maximum, log_sum = tl.load(stats + MAXIMUM * T + at), tl.load(stats + LOG_SUM * T + at)
        scale = inverse_temperature * LOG2E
        own = ids + token.to(tl.int64) * K
        into = found + at.to(tl.int64) * (K + 1)
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)
            y = tl.load(own + k, mask=k < K, other=-1)
            there = (y >= 0) & (y < V)
            if student.largest is None:
                at_id = student.numbers + token.to(tl.int64) * student.stride + y
                below = tl.load(at_id, mask=there, other=0.0).to(tl.float32) - maximum
            else:
                j = y // VOCAB_TILE
                row = j.to(tl.int64) * tile_rows + i
                below = tl.load(student.numbers + row * VOCAB_TILE + y % VOCAB_TILE, mask=there, other=0.0)
                top = tl.load(student.largest + i.to(tl.int64) * tiles + j, mask=there, other=0.0)
                below = below.to(tl.float32) + (top - maximum)
            tl.store(into + k, tl.where(there, (below * scale - log_sum) * LN2, 0.0), mask=k < K)
        if TAIL:
            lane = tl.arange(0, TILES)
            c = tl.arange(0, VOCAB_TILE)
            source, step, within = addresses(student, i, token, tile_rows, 0, TILES)
            others = tl.zeros((TILES * VOCAB_TILE // GROUP_OF,), tl.float32)
            k = 0
            y = tl.load(own)
            for block in range(tl.cdiv(tiles, TILES)):
                j = block * TILES + lane
                v = j[:, None] * VOCAB_TILE + c[None, :]
                x, _z = log2_probs(source, within, student, i, j, v, tiles, V, scale, maximum, log_sum)
                source += step
                p = tl.exp2(x)
                while y < (block + 1) * TILES * VOCAB_TILE:
                    p = tl.where(v == y, 0.0, p)
                    k += 1
                    y = tl.load(own + k, mask=k < K, other=NO_ID)
                others += tl.sum(groups(p), 1)
            tl.store(into + K, tl.log2(tl.sum(others, 0)) * LN2)


@triton.jit(do_not_specialize=["first", "first_tile", "tiles", "tile_rows", "T", "K"])
def topk_gradients(
    student,  # JsdLogits
    gradient,  # JsdGradient out
    stats,  # [STATS, T] float32, by position, and so on
    numbers,  # [T, K + 2] float32: center (above the largest logit over temperature), factor, and one for each id
    ids,  # [T, K] int32, by token: ascending
    order,
    count,
    label,  # [T] int32: -1 if it is out of range
    row_scale,  # [T] float32: factor of its gradients
    first,  # position
    first_tile,
    tiles,
    tile_rows,
    T,
    V,
    K,
    inverse_temperature,
    soft_weight,  # of the divergence in the loss
    hard_weight,  # of the cross-entropy
    HARD: tl.constexpr,
    SCALED: tl.constexpr,
    TILES: tl.constexpr,
    PAD: tl.constexpr,
):
    """The gradient of one token's logits, of one program; row_scale, SCALED and PAD are as in `divergence_rows`."""
    i = tl.program_id(0)
    n = tl.load(count)
    at = first + i
    there = at < n
    token = tl.load(order + at, mask=there, other=0)
    c = tl.arange(0, VOCAB_TILE)
    lane = tl.arange(0, TILES)
    out, out_step, out_within = addresses_of_gradient(gradient, at, token, first_tile, TILES)
    if there:
        of_token = numbers + at.to(tl.int64) * (K + 2)
        own = ids + token.to(tl.int64) * K
        label_id = tl.load(label + at)
        maximum, center = tl.load(stats + MAXIMUM * T + at), tl.load(of_token) * LOG2E
        soft, hard = soft_weight * inverse_temperature, hard_weight
        if row_scale is not None:
            r = tl.load(row_scale + at)
            soft *= r
            hard *= r
        elif SCALED:
            inverse = tl.load(stats + INVERSE_SCALE * T + at)
            soft /= inverse
            hard /= inverse
        factor = soft * tl.load(of_token + 1)
        hard_log = tl.load(stats + HARD_LOG_SUM * T + at)
        at_label = hard * expm1(tl.load(stats + LABEL_LOG_PROB * T + at))
        scale = inverse_temperature * LOG2E
        source, step, within = addresses(student, i, token, tile_rows, first_tile, TILES)
        k = 0
        y = tl.load(own)
        for block in range(tl.cdiv(tiles, TILES)):
            j = block * TILES + lane
            v = (first_tile + j)[:, None] * VOCAB_TILE + c[None, :]
            x, z = log2_probs(source, within, student, i, j, v, tiles, V, scale, maximum, center)
            source += step
            g = factor * tl.exp2(x)
            while y < tl.minimum((first_tile + (block + 1) * TILES) * VOCAB_TILE, V):
                g = tl.where(v == y, soft * tl.load(of_token + 2 + k), g)
                k += 1
                y = tl.load(own + k, mask=k < K, other=NO_ID)
            if HARD:
                g += tl.where(v == label_id, at_label, hard * tl.exp2((z - hard_log) * LOG2E))
            store_gradient(gradient, out + out_within, g, j, v, tiles, V)
            out += out_step
    elif at < tl.cdiv(tl.maximum(n, 1), PAD) * PAD:
        zero = tl.zeros((TILES, VOCAB_TILE), tl.float32)
        for block in range(tl.cdiv(tiles, TILES)):
            j = block * TILES + lane
            v = (first_tile + j)[:, None] * VOCAB_TILE + c[None, :]
            store_gradient(gradient, out + out_within, zero, j, v, tiles, V)
            out += out_step
