"""linear_jsd's Triton kernels for a top-k teacher: what the student gives the K entries, the loss, and the gradient.

Of each token's row of logits one kernel reads the K entries' log-probabilities and, for a tail, adds up all others.
A second one makes the loss from these, K numbers per token, and what the gradient is made from: a factor times
exp(z / temperature - center), but at each of the K entries a number of its own.  It computes what `topk_gradient`
of divergence.py does, where the formulas are.  A third one writes the gradient.

A token's ids are in ascending order.  So a program that goes through its row meets them one after another, and compares
each with one block of logits alone.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LOG2E, expm1
from onchip.ops.linear_jsd.triton_kernels import FORWARD_KL, MIXTURE
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
    inverse_scale,
    log2_probs,
    store_gradient,
)
from onchip.vocab.triton.blocks import VOCAB_TILE

# The id after the last one: no index of logits.
NO_ID = tl.constexpr(2**31 - 1)
# What happens to the entries outside the K.
TAIL, TRUNCATED, RENORMALISED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
RESTS = {"tail": TAIL, "truncated": TRUNCATED, "renormalised": RENORMALISED}


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


@triton.jit
def _log1p(x):
    """log(1 + x) for -1 <= x <= 0: from -1/2 on a series, of 2 atanh(x / (2 + x))."""
    s = x / (2 + x)
    q = s * s
    series = 2 * s * (1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13)))))))
    return tl.where(x > -0.5, series, tl.log(1 + x))


@triton.jit
def _terms(ls, lt, beta, MODE: tl.constexpr, REST: tl.constexpr):
    """Of each entry, from the log-probabilities: its part of the loss, the derivative by log s, and s.

    For forward KL the derivative is the one by the logit, s - t, unless the entries are TRUNCATED.
    """
    s, t = tl.exp(ls), tl.exp(lt)
    d = tl.where((ls == float("-inf")) & (lt == float("-inf")), 0.0, lt - ls)
    if MODE != MIXTURE:
        if MODE == FORWARD_KL:
            p, q, far, by_s = t, s, d, s - t
        else:
            p, q, far = s, t, -d
            by_s = tl.where(s == 0, 0.0, s * far)
        if REST == TRUNCATED:
            term = tl.where(p == 0, 0.0, p * far)
            by_s = -t if MODE == FORWARD_KL else by_s + s
        else:
            e = expm1(-tl.abs(far))
            term = tl.where(far < 0, q * (far * (1 + e) - e), p * (e + far))
            term = tl.maximum(tl.where(p == 0, q, term), 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        e = expm1(-tl.abs(d))
        low = _log1p(tl.where(d <= 0, beta, 1 - beta) * e)
        by_s = tl.where(s == 0, 0.0, (beta - 1) * s * (low + tl.maximum(d, 0.0)))
        by_t = tl.where(t == 0, 0.0, -beta * t * (low - tl.minimum(d, 0.0)))
        term = tl.maximum(by_s + by_t, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return term, by_s, s


@triton.jit
def _log_sum(of, K, most, indices, vocab, scale, BLOCK: tl.constexpr, CHECKED: tl.constexpr):
    """The largest of a token's K numbers, and how far their log-sum-exp is above it; with CHECKED, the teacher's."""
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        if CHECKED:
            x = _values(of, indices, k, K, most, vocab, scale)
        else:
            x = tl.load(of + k, mask=k < K, other=float("-inf"))
        new = tl.maximum(top, x)
        at = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - at) + tl.exp(x - at)
        top = new
    largest = tl.max(top, 0)
    at = tl.where(largest == float("-inf"), 0.0, largest)
    return at, tl.log(tl.sum(total * tl.exp(top - at), 0))


@triton.jit
def _values(of, indices, k, K, most, vocab, scale):
    """What the teacher gives some ids: NaN if that can't be a log-probability, or the id is out of range."""
    x = tl.load(of + k, mask=k < K, other=float("-inf"))
    x = tl.where(x > most, float("nan"), x.to(tl.float32) * scale)
    y = tl.load(indices + k, mask=k < K, other=0)
    return tl.where((y >= 0) & (y < vocab), x, float("nan"))


@triton.jit(do_not_specialize=["first", "T", "K"])
def topk_numbers(
    stats,  # [STATS, T] float32, by position
    found,  # [T, K + 1] float32, by position: as `topk_log_probs` leaves it
    indices,  # [T, K] int64, by token
    values,  # [T, K], by token: the teacher's log-probabilities, or its logits
    numbers,  # [T, K + 2] float32 out, by position: center, factor, and one for each id
    loss,  # [T] float32 out, by token
    order,  # [T] int32: the token of a position
    count,  # [1] int32
    label,  # [T] int32: -1 if it is out of range
    token_weight,  # [T] float32, by token
    first,  # position
    T,
    K,
    vocab,
    most,  # the largest number that passes as one of the values
    scale,  # of the values
    beta,
    inverse_temperature,
    soft_weight,
    hard_weight,
    REST: tl.constexpr,
    MODE: tl.constexpr,
    HARD: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token's loss, and from what its logits' gradient is made."""
    at = first + tl.program_id(0)
    if at < tl.load(count):
        token = tl.load(order + at).to(tl.int64)
        of_student = found + at.to(tl.int64) * (K + 1)
        of_teacher, ids = values + token * K, indices + token * K
        out = numbers + at.to(tl.int64) * (K + 2)
        lse = tl.load(stats + LOG_SUM * T + at) * LN2
        entries = K
        s_top, s_sum, t_top, t_sum = 0.0, 0.0, 0.0, 0.0  # what log-probabilities are relative to
        rest = 0.0  # the logarithm of what the teacher gives all others
        if REST != TRUNCATED:
            t_top, t_sum = _log_sum(of_teacher, K, most, ids, vocab, scale, BLOCK, True)
        if REST == RENORMALISED:
            s_top, s_sum = _log_sum(of_student, K, most, ids, vocab, 1.0, BLOCK, False)
        if REST == TAIL:
            # What the caller gives may add up to more than 1 by a rounding.
            rest = tl.log(0.0 - expm1(tl.minimum(t_top + t_sum, 0.0, propagate_nan=tl.PropagateNan.ALL)))
            t_top, t_sum = 0.0, 0.0
            entries = K + 1
        value = tl.zeros((BLOCK,), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, entries, BLOCK):
            k = start + tl.arange(0, BLOCK)
            ls = tl.load(of_student + k, mask=k < entries, other=float("-inf")) - s_top - s_sum
            lt = tl.where(k == K, rest, _values(of_teacher, ids, k, K, most, vocab, scale) - t_top - t_sum)
            lt = tl.where(k < entries, lt, float("-inf"))
            term, by_s, _s = _terms(ls, lt, beta, MODE, REST)
            value += term
            total += by_s
        mean = tl.sum(total, 0)
        if MODE == FORWARD_KL and REST != TRUNCATED:
            mean = 0.0
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, entries, BLOCK):
            k = start + tl.arange(0, BLOCK)
            ls = tl.load(of_student + k, mask=k < entries, other=float("-inf")) - s_top - s_sum
            lt = tl.where(k == K, rest, _values(of_teacher, ids, k, K, most, vocab, scale) - t_top - t_sum)
            lt = tl.where(k < entries, lt, float("-inf"))
            _term, by_s, s = _terms(ls, lt, beta, MODE, REST)
            g = by_s - s * mean
            largest = tl.maximum(largest, tl.abs(g))
            # Behind center and factor; a tail's own is the factor.
            tl.store(out + tl.where(k < K, 2 + k, 1), g, mask=k < entries)
        center, bound = lse, tl.max(largest, 0)
        if REST == TAIL:
            others = tl.load(of_student + K)
            center += tl.where(others == float("-inf"), 0.0, others)
        elif REST == TRUNCATED:
            tl.store(out + 1, -mean)
            bound = tl.maximum(bound, tl.abs(mean))
        else:
            tl.store(out + 1, 0.0)
        tl.store(out, center)
        if SCALED:
            bound = bound * (soft_weight * inverse_temperature) + hard_weight
            tl.store(stats + INVERSE_SCALE * T + at, inverse_scale(bound))
        losses = tl.sum(value, 0) * soft_weight
        if HARD:
            losses -= hard_weight * tl.load(stats + LABEL_LOG_PROB * T + at)
        if token_weight is not None:
            losses *= tl.load(token_weight + token)
        tl.store(loss + token, tl.where(tl.load(label + at) < 0, float("nan"), losses))


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
