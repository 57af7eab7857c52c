"""linear_jsd's own Triton kernels: the divergence of each token's two rows of logits.

Sizes, positions and the form in which logits are stored are as in triton_product.py.

The maths is in the package's docstring.  This is what follows from it here, where all logarithms are to base 2, as the
device computes them.

At an entry let hi be the larger of both models' probabilities, lo the smaller, d = log(t / s), q = |d|, w the weight of
lo in the mixture m, and a = log(m / hi) = log(1 - w + w exp(-q)).  So log(s / m) is -a for d <= 0 and -a - d above.
Nothing overflows, equal logits give q = a = 0 exactly, and the entry's part of the loss is

    -(1 - w + w exp(-q)) hi a - w lo q

a difference of terms of order q whose result is of order q^2.  From q = NEAR on an error of about 1e-7 in a or q is
harmless (the device's logarithm, with an error of 2^-22, is good enough).  Below NEAR the part is computed as s d^2
times a series in d, which neither loses digits nor can be below 0.  The ends are treated likewise, with t d - t + s.

An H100 has time for some fifty instructions per entry while it reads both models' numbers: the loss takes 42 of them,
the gradient 24, for beta 1/2, which needs no choice of w.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LOG2E, expm1, log1p
from onchip.ops.linear_jsd import divergence
from onchip.ops.linear_jsd.triton_rows import (
    GROUP_OF,
    HARD_LOG_SUM,
    INVERSE_SCALE,
    LABEL_LOG_PROB,
    LN2,
    LOG_SUM,
    MAXIMUM,
    MEAN,
    STUDENT,
    TEACHER,
    addresses,
    addresses_of_gradient,
    groups,
    inverse_scale,
    log2_probs,
    store_gradient,
    sums,
)
from onchip.vocab.rows.triton import divided
from onchip.vocab.triton.blocks import VOCAB_TILE

# A difference of two log-probabilities above this tells that one of the two probabilities is 0.
INFINITE = tl.constexpr(1.0e29)
# KL(t || s), KL(s || t), and the mixture between them.
FORWARD_KL, REVERSE_KL, MIXTURE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NEAR = tl.constexpr(divergence.NEAR)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _log2(x):
    """The instruction, 2^-22 off at most, where the compiler's own takes 25 of them for 2^-23; exactly 0 of 1."""
    if INTERPRETED:
        return tl.log2(x)
    else:  # noqa: RET505 - without it, Triton compiles what follows for the interpreter too
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _store_model(into, T, maximum, log_sum, mean, inverse_scale):
    tl.store(into + MAXIMUM * T, maximum)
    tl.store(into + LOG_SUM * T, log_sum)
    tl.store(into + MEAN * T, mean)
    tl.store(into + INVERSE_SCALE * T, inverse_scale)


@triton.jit
def _load_model(of, T):
    maximum, log_sum = tl.load(of + MAXIMUM * T), tl.load(of + LOG_SUM * T)
    return maximum, log_sum, tl.load(of + MEAN * T), tl.load(of + INVERSE_SCALE * T)


@triton.jit
def _mixture(d, beta, EVEN: tl.constexpr):
    """Of d = log2(t / s): whether s is the larger, the weight w of the smaller one, m / hi, and its log2."""
    below = d <= 0
    if EVEN:
        w = 0.5
        other = 0.5
    else:
        w = tl.where(below, beta, 1 - beta)
        other = tl.where(below, 1 - beta, beta)
    e = tl.exp2(-tl.abs(d))
    share = w * e + other
    return below, w, e, share, _log2(share)


@triton.jit
def _terms(log_s, log_t, beta, near, MODE: tl.constexpr, EVEN: tl.constexpr):
    """Of each entry, from log2 of both probabilities: its part of the loss, what the gradients' means are made of, both
    probabilities.  All but these over log(2), as logarithms to base 2 give them.
    """
    if MODE == REVERSE_KL:
        term, by_t, by_s, t, s = _terms(log_t, log_s, beta, near, FORWARD_KL, EVEN)
    else:
        d = log_t - log_s
        if MODE == FORWARD_KL:
            s = tl.exp2(log_s)
            t = tl.exp2(log_t)
            by_s = s - t
            by_t = t * d
            far = by_s * LOG2E + by_t
            far = tl.where((d > INFINITE) & (t > 0), float("inf"), far)
            x = -d
            of = t
        else:
            below, w, e, share, log_share = _mixture(d, beta, EVEN)
            hi = tl.exp2(tl.maximum(log_s, log_t))
            lo = hi * e
            s = tl.where(below, hi, lo)
            t = tl.where(below, lo, hi)
            by_s = -s * (log_share + tl.maximum(d, 0.0))
            by_t = -t * (log_share - tl.minimum(d, 0.0))
            far = -(hi * share) * log_share - (w * lo) * tl.abs(d)
            x = d
            of = s
        series = near[0] + x * (near[1] + x * (near[2] + x * (near[3] + x * (near[4] + x * near[5]))))
        far = tl.maximum(far, 0.0, propagate_nan=tl.PropagateNan.ALL)
        term = tl.where(tl.abs(d) < NEAR, of * (d * d) * series, far)
    return term, by_s, by_t, s, t


@triton.jit
def _gradient(log_own, log_other, mean, beta, DIFFERENCE: tl.constexpr, KL: tl.constexpr, EVEN: tl.constexpr):
    """A model's probability p times (log2(p / q) - mean), where q is the mixture or, with KL, the other model's.

    `beta` is the weight of the other model in the mixture.  With DIFFERENCE the two probabilities' difference.
    """
    p = tl.exp2(log_own)
    if DIFFERENCE:
        return p - tl.exp2(log_other)
    else:  # noqa: RET505
        d = log_other - log_own
        if KL:
            ratio = -d
        else:
            _below, _w, _e, _share, log_share = _mixture(d, beta, EVEN)
            ratio = -(log_share + tl.maximum(d, 0.0))
        return p * (ratio - mean)


@triton.jit(do_not_specialize=["first", "first_tile", "tiles", "tile_rows", "T"])
def divergence_rows(
    student,  # Logits
    teacher,  # Logits
    student_gradient,  # Gradient
    teacher_gradient,  # Gradient
    stats,  # [STATS, T] float32 in or out
    loss,  # [T] float32 out, by token; with it `stats` is made, or with KNOWN added to, else used
    order,  # [T] int32: the token of a position
    count,  # [1] int32
    label,  # [T] int32: -1 if it is out of range
    target_logit,  # [T] float32: the label's, of a student given by tiles
    token_weight,  # [T] float32, by token
    row_scale,  # [T] float32, by position: factor of its gradients
    first,  # position
    first_tile,
    tiles,
    tile_rows,
    T,
    V,
    inverse_temperature,
    beta,
    near,  # six coefficients of the loss where both probabilities are nearly equal
    soft_weight,  # of the divergence in the loss
    hard_weight,  # of the cross-entropy
    MODE: tl.constexpr,
    EVEN: tl.constexpr,
    HARD: tl.constexpr,
    STUDENT_MEAN: tl.constexpr,
    TEACHER_MEAN: tl.constexpr,
    STUDENT_SCALED: tl.constexpr,
    TEACHER_SCALED: tl.constexpr,
    TERMS: tl.constexpr,
    KNOWN: tl.constexpr,
    ONE: tl.constexpr,
    TILES: tl.constexpr,
    PAD: tl.constexpr,
):
    """Losses and statistics, and the logits' gradients, of one token per program.

    Where these logits are a shard of the vocabulary, a launch without TERMS makes their own softmax alone, and one with
    KNOWN, given the whole vocabulary's, their part of the loss and their own means.  With ONE there is one model.

    Gradients are multiplied by their row's factor, or without one by what suits float16 (SCALED).  Those in tiles are 0
    for the positions up to a whole block, PAD: products read them.
    """
    i = tl.program_id(0)
    n = tl.load(count)
    at = first + i
    there = at < n
    blank = (at >= n) & (at < tl.cdiv(tl.maximum(n, 1), PAD) * PAD)
    token = tl.load(order + at, mask=there, other=0)
    c = tl.arange(0, VOCAB_TILE)
    lane = tl.arange(0, TILES)
    blocks = tl.cdiv(tiles, TILES)
    if student_gradient.out is not None:
        s_out, s_out_step, s_out_within = addresses_of_gradient(student_gradient, at, token, first_tile, TILES)
    if teacher_gradient.out is not None:
        t_out, t_out_step, t_out_within = addresses_of_gradient(teacher_gradient, at, token, first_tile, TILES)
    if there:
        y = tl.load(label + at)
        scale = inverse_temperature * LOG2E
        student_row, s_step, s_within = addresses(student, i, token, tile_rows, first_tile, TILES)
        teacher_row, t_step, t_within = addresses(teacher, i, token, tile_rows, first_tile, TILES)
        if loss is not None:
            if KNOWN:
                s_max, s_log, _mean, _inverse = _load_model(stats + STUDENT * T + at, T)
                t_max, t_log, _mean, _inverse = _load_model(stats + TEACHER * T + at, T)
                s_others = s_max * 0
            else:
                s_max, s_log, s_others = sums(student, i, token, V, y, tiles, inverse_temperature, HARD, TILES)
                if ONE:
                    t_max, t_log = s_max, s_log
                else:
                    t_max, t_log, _others = sums(teacher, i, token, V, y, tiles, inverse_temperature, False, TILES)
            losses = tl.zeros((TILES * VOCAB_TILE // GROUP_OF,), tl.float32)
            by_ss = losses
            by_ts = losses
            ss = losses
            ts = losses
            s_bounds = losses
            t_bounds = losses
            for block in range(blocks if TERMS else 0):
                j = block * TILES + lane
                v = (first_tile + j)[:, None] * VOCAB_TILE + c[None, :]
                log_s, _z = log2_probs(student_row, s_within, student, i, j, v, tiles, V, scale, s_max, s_log)
                log_t, _u = log2_probs(teacher_row, t_within, teacher, i, j, v, tiles, V, scale, t_max, t_log)
                student_row += s_step
                teacher_row += t_step
                term, by_s, by_t, s, t = _terms(log_s, log_t, beta, near, MODE, EVEN)
                losses += tl.sum(groups(term), 1)
                if STUDENT_MEAN:
                    by_ss += tl.sum(groups(by_s), 1)
                    ss += tl.sum(groups(s), 1)
                if TEACHER_MEAN:
                    by_ts += tl.sum(groups(by_t), 1)
                    ts += tl.sum(groups(t), 1)
                if STUDENT_SCALED:
                    s_bounds = tl.maximum(s_bounds, tl.max(groups(tl.maximum(tl.abs(by_s), s)), 1))
                if TEACHER_SCALED:
                    t_bounds = tl.maximum(t_bounds, tl.max(groups(tl.maximum(tl.abs(by_t), t)), 1))
            value = tl.sum(losses, 0) * LN2
            s_mean = value * 0
            t_mean = value * 0
            # Over the sums of the probabilities as they are: where both models are certain, all of a gradient cancels.
            if STUDENT_MEAN and TERMS:
                s_mean = tl.where(value == float("inf"), value, tl.sum(by_ss, 0) / tl.sum(ss, 0))
            if TEACHER_MEAN and TERMS:
                t_mean = tl.where(value == float("inf"), value, tl.sum(by_ts, 0) / tl.sum(ts, 0))
            # A gradient is at most (1 + |mean|) times the largest of |by_s| and s.
            soft = soft_weight * inverse_temperature
            s_inverse = inverse_scale(tl.max(s_bounds) * (1 + tl.abs(s_mean)) * soft + hard_weight)
            t_inverse = inverse_scale(tl.max(t_bounds) * (1 + tl.abs(t_mean)) * soft)
            value *= soft_weight
            hard_log = value * 0
            label_log_prob = value * 0
            if HARD:
                if student.largest is None:
                    own_at = token.to(tl.int64) * student.stride + tl.maximum(y, 0)
                    z_y = tl.load(student.numbers + own_at).to(tl.float32)
                else:
                    z_y = tl.load(target_logit + at)
                top = tl.maximum(s_max, z_y)  # computed apart: the last digit may differ
                rest = s_others * tl.exp2((s_max - top) * LOG2E)
                own = tl.exp2((z_y - top) * LOG2E)
                # log1p where the label leads: there the loss is small, and 1 + others would round it away.
                log_total = tl.where(z_y >= top, log1p(rest), tl.log(rest + own))
                label_log_prob = (z_y - top) - log_total
                hard_log = log_total + (top - s_max)
                value -= hard_weight * label_log_prob
            if token_weight is not None:
                value *= tl.load(token_weight + token)
            tl.store(loss + token, tl.where(y < 0, float("nan"), value))
            _store_model(stats + STUDENT * T + at, T, s_max, s_log, s_mean, s_inverse)
            _store_model(stats + TEACHER * T + at, T, t_max, t_log, t_mean, t_inverse)
            tl.store(stats + HARD_LOG_SUM * T + at, hard_log)
            tl.store(stats + LABEL_LOG_PROB * T + at, label_log_prob)
        else:
            s_max, s_log, s_mean, s_inverse = _load_model(stats + STUDENT * T + at, T)
            t_max, t_log, t_mean, t_inverse = _load_model(stats + TEACHER * T + at, T)
            hard_log = tl.load(stats + HARD_LOG_SUM * T + at)
            label_log_prob = tl.load(stats + LABEL_LOG_PROB * T + at)
        if student_gradient.out is not None or teacher_gradient.out is not None:
            s_factor = soft_weight * inverse_temperature
            t_factor = soft_weight * inverse_temperature
            if MODE == MIXTURE:
                s_factor *= 1 - beta
                t_factor *= beta
            hard_factor = hard_weight
            if row_scale is not None:
                r = tl.load(row_scale + at)
                s_factor *= r
                t_factor *= r
                hard_factor *= r
            if STUDENT_SCALED and row_scale is None:
                s_factor /= s_inverse
                hard_factor /= s_inverse
            if TEACHER_SCALED and row_scale is None:
                t_factor /= t_inverse
            at_label = hard_factor * expm1(label_log_prob)
            # What is not a plain difference is over log(2).
            if MODE != FORWARD_KL:
                s_factor *= LN2
            if MODE != REVERSE_KL:
                t_factor *= LN2
            # From the last on: what was read last is still in the cache.
            if loss is None:
                student_row += blocks * s_step
                teacher_row += blocks * t_step
            if student_gradient.out is not None:
                s_out += blocks * s_out_step
            if teacher_gradient.out is not None:
                t_out += blocks * t_out_step
            for back in range(blocks):
                student_row -= s_step
                teacher_row -= t_step
                j = (blocks - 1 - back) * TILES + lane
                v = (first_tile + j)[:, None] * VOCAB_TILE + c[None, :]
                log_s, z = log2_probs(student_row, s_within, student, i, j, v, tiles, V, scale, s_max, s_log)
                log_t, _u = log2_probs(teacher_row, t_within, teacher, i, j, v, tiles, V, scale, t_max, t_log)
                if student_gradient.out is not None:
                    g = s_factor * _gradient(log_s, log_t, s_mean, beta, MODE == FORWARD_KL, MODE == REVERSE_KL, EVEN)
                    if HARD:
                        p = hard_factor * tl.exp2((z - hard_log) * LOG2E)
                        g += tl.where(v == y, at_label, p)
                    s_out -= s_out_step
                    store_gradient(student_gradient, s_out + s_out_within, g, j, v, tiles, V)
                if teacher_gradient.out is not None:
                    g = t_factor * _gradient(
                        log_t, log_s, t_mean, 1 - beta, MODE == REVERSE_KL, MODE == FORWARD_KL, EVEN
                    )  # fmt: skip
                    t_out -= t_out_step
                    store_gradient(teacher_gradient, t_out + t_out_within, g, j, v, tiles, V)
    elif blank:
        zero = tl.zeros((TILES, VOCAB_TILE), tl.float32)
        for block in range(blocks):
            j = block * TILES + lane
            v = (first_tile + j)[:, None] * VOCAB_TILE + c[None, :]
            if student_gradient.out is not None:
                store_gradient(student_gradient, s_out + s_out_within, zero, j, v, tiles, V)
                s_out += s_out_step
            if teacher_gradient.out is not None:
                store_gradient(teacher_gradient, t_out + t_out_within, zero, j, v, tiles, V)
                t_out += t_out_step


@triton.jit(do_not_specialize=["T", "grad_stride"])
def row_scales(
    grad_loss,  # [T], or [] with a stride of 0
    grad_stride,
    number,
    divisor,  # [] float32
    token_weight,  # [T] float32
    order,
    label,
    out,  # [T] float32 out, by position
    T,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient by each position's loss; NaN where its label is out of range."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.load(order + at, mask=at < T, other=0).to(tl.int64)
    g = tl.load(grad_loss + t * grad_stride, mask=at < T, other=0.0).to(tl.float32)
    g = divided(g, number, divisor, MEAN)
    if token_weight is not None:
        g *= tl.load(token_weight + t, mask=at < T, other=0.0)
    y = tl.load(label + at, mask=at < T, other=0)
    tl.store(out + at, tl.where(y < 0, float("nan"), g), mask=at < T)
