"""The Triton kernel that makes the divergence of a token's two rows of logits and its gradients; see triton_kernels.py.

The maths is in the package's docstring; what follows from it here, all logarithms being to base 2, as the device has
them:

Of both models' probabilities at an entry let hi be the larger, lo the smaller, d = log(t / s), q = |d|, w the weight of
lo in the mixture m, and a = log(m / hi) = log(1 - w + w exp(-q)).  So log(s / m) is -a for d <= 0 and -a - d above.
Nothing overflows, equal logits give q = a = 0 exactly, and the entry's part of the loss is

    -(1 - w + w exp(-q)) hi a - w lo q

a difference of terms like q whose result is like q^2.  An error of a or q, 1e-7 or so, is harmless there from q = NEAR
on (the device's logarithm, 2^-22 off, is good enough).  Below it is s d^2 times a series in d, which neither loses
digits nor can be below 0.  For the ends likewise, with t d - t + s.

An H100 has time for some fifty instructions per entry while it reads both models' numbers: the loss takes 42 of them,
the gradient 24, for beta 1/2, which needs no choice of w.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LOG2E, LOWEST, expm1, log1p
from onchip.vocab.triton.blocks import VOCAB_TILE, exponential_row

# log-probabilities below this are taken for it: a difference of two is never NaN, and one that passes INFINITE tells
# that one of the two probabilities is 0.
FLOOR = tl.constexpr(-1.0e30)
INFINITE = tl.constexpr(1.0e29)
# KL(t || s), KL(s || t), and what lies between.
FORWARD_KL, REVERSE_KL, MIXTURE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Below this a log2(t / s) is near 0: a term of the loss is a difference of larger ones, which a series is not.
NEAR = tl.constexpr(0.75)
LN2 = tl.constexpr(0.6931471805599453)
GROUP_OF = tl.constexpr(8)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Rows of `stats`, [STATS, T] float32 by position.
STUDENT_MAX, STUDENT_LOG_SUM = tl.constexpr(0), tl.constexpr(1)  # log2 s = (z - max) log2(e) / temperature - log_sum
TEACHER_MAX, TEACHER_LOG_SUM = tl.constexpr(2), tl.constexpr(3)
STUDENT_MEAN, TEACHER_MEAN = tl.constexpr(4), tl.constexpr(5)  # what the gradients are centred by, over log(2)
HARD_LOG_SUM, LABEL_LOG_PROB = tl.constexpr(6), tl.constexpr(7)  # of the student at temperature 1
STUDENT_SHRINK, TEACHER_SHRINK = tl.constexpr(8), tl.constexpr(9)  # a kept gradient is to be multiplied by
STATS = tl.constexpr(10)


@triton.jit
def _log2(x):
    """The instruction, 2^-22 off at most, where the compiler's own takes 25 of them for 2^-23; exactly 0 of 1."""
    if INTERPRETED:
        return tl.log2(x)
    else:  # noqa: RET505 - without it, Triton compiles what follows for the interpreter too
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def _places_of_a_row(i, token, tile_rows, stride, first_tile, LOGITS: tl.constexpr, TILES: tl.constexpr):
    """Where a token's row starts, how far apart its blocks of tiles are, and a block's elements from its start."""
    c = tl.arange(0, VOCAB_TILE)
    j = tl.arange(0, TILES)
    if LOGITS:
        start = token.to(tl.int64) * stride + first_tile * VOCAB_TILE
        return start, TILES * VOCAB_TILE, j[:, None] * VOCAB_TILE + c[None, :]
    else:  # noqa: RET505
        of_tile = tile_rows.to(tl.int64) * VOCAB_TILE
        return i.to(tl.int64) * VOCAB_TILE, of_tile * TILES, j.to(tl.int64)[:, None] * of_tile + c[None, :]


@triton.jit
def _log2_probs(
    source, within, largest, i, j, v, tiles, V, scale, maximum, log2_sum, LOGITS: tl.constexpr
):  # fmt: skip
    """log2 of a token's probabilities in a block of tiles, at least FLOOR, and z - maximum, [TILES, VOCAB_TILE]."""
    if LOGITS:
        below = tl.load(source + within, mask=v < V, other=float("-inf")).to(tl.float32) - maximum
        x = below * scale - log2_sum
    else:
        mine = j < tiles
        x = tl.load(source + within, mask=mine[:, None], other=0.0).to(tl.float32)
        top = tl.load(largest + i.to(tl.int64) * tiles + j, mask=mine, other=LOWEST) - maximum
        below = x + top[:, None]
        x = x * scale + (top * scale - log2_sum)[:, None]
    return tl.maximum(x, FLOOR, propagate_nan=tl.PropagateNan.ALL), below


@triton.jit
def _groups(x):
    """[TILES, VOCAB_TILE] as groups of neighbours, one sum of which takes fewer registers."""
    return tl.reshape(x, (x.shape[0] * x.shape[1] // GROUP_OF, GROUP_OF))


@triton.jit
def _sums_of_tiles(largest, total, others, i, tiles, inverse_temperature, HARD: tl.constexpr):
    """Of one token: its largest logit, the sum of exponentials at the temperature, and, but for the label, at 1."""
    lane = tl.arange(0, 256)
    row = i.to(tl.int64) * tiles
    top = tl.full((256,), LOWEST, tl.float32)
    for start in range(0, tiles, 256):
        j = start + lane
        top = tl.maximum(top, tl.load(largest + row + j, mask=j < tiles, other=LOWEST))
    maximum = tl.max(top, 0)
    soft = tl.zeros((256,), tl.float32)
    hard = tl.zeros((256,), tl.float32)
    for start in range(0, tiles, 256):
        j = start + lane
        drop = tl.load(largest + row + j, mask=j < tiles, other=LOWEST) - maximum
        decay = tl.exp2(drop * (inverse_temperature * LOG2E))
        soft += tl.load(total + row + j, mask=j < tiles, other=0.0) * decay
        if HARD:
            hard += tl.load(others + row + j, mask=j < tiles, other=0.0) * tl.exp2(drop * LOG2E)
    return maximum, tl.sum(soft, 0), tl.sum(hard, 0)


@triton.jit
def _sums_of_logits(
    source, token, stride, V, y, tiles, inverse_temperature, HARD: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """The same of logits that exist, in one reading: each group has a maximum of its own."""
    c = tl.arange(0, VOCAB_TILE)
    scale = inverse_temperature * LOG2E
    top = tl.full((TILES * VOCAB_TILE // GROUP_OF,), LOWEST, tl.float32)
    soft = tl.zeros((TILES * VOCAB_TILE // GROUP_OF,), tl.float32)
    hard = tl.zeros((TILES * VOCAB_TILE // GROUP_OF,), tl.float32)
    row = source + token.to(tl.int64) * stride
    for start in range(0, tiles, TILES):
        v = (start + tl.arange(0, TILES))[:, None] * VOCAB_TILE + c[None, :]
        z = _groups(tl.load(row + v, mask=v < V, other=float("-inf")).to(tl.float32))
        new = tl.maximum(top, tl.max(z, 1))
        drop = top - new
        z -= new[:, None]
        soft = soft * tl.exp2(drop * scale) + tl.sum(tl.exp2(z * scale), 1)
        if HARD:
            e = tl.where(_groups(v) == y, 0.0, tl.exp2(z * LOG2E))
            hard = hard * tl.exp2(drop * LOG2E) + tl.sum(e, 1)
        top = new
    maximum = tl.max(top, 0)
    drop = top - maximum
    soft *= tl.exp2(drop * scale)
    hard *= tl.exp2(drop * LOG2E)
    return maximum, tl.sum(soft, 0), tl.sum(hard, 0)


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
def _terms(log_s, log_t, beta, near0, near1, near2, near3, near4, near5, MODE: tl.constexpr, EVEN: tl.constexpr):
    """Of each entry, from log2 of both probabilities: its part of the loss, what the gradients' means are made of, both
    probabilities.  All but these over log(2), as logarithms to base 2 give them.
    """
    if MODE == REVERSE_KL:
        term, by_t, by_s, t, s = _terms(
            log_t, log_s, beta, near0, near1, near2, near3, near4, near5, FORWARD_KL, EVEN
        )  # fmt: skip
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
        series = near0 + x * (near1 + x * (near2 + x * (near3 + x * (near4 + x * near5))))
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


@triton.jit
def _places_of_a_gradient(
    at,
    token,
    stride,
    stash,
    stash_stride,
    stash_tokens,
    overflow,
    overflow_tokens,
    again,
    again_tokens,
    first_tile,
    LOGITS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """`_places_of_a_row` of what a token's gradient is written to, [rows, VOCAB_TILE] or [T, V]."""
    row = at
    apart = at
    if not LOGITS:
        row = exponential_row(
            first_tile, at, stash, stash_stride, stash_tokens, overflow, overflow_tokens, again, again_tokens,
            first_tile,
        )  # fmt: skip
        apart = exponential_row(
            first_tile + 1, at, stash, stash_stride, stash_tokens, overflow, overflow_tokens, again, again_tokens,
            first_tile,
        ) - row  # fmt: skip
    return _places_of_a_row(row, token, apart, stride, first_tile, LOGITS, TILES)


@triton.jit
def _store_gradient(out, within, g, j, v, tiles, V, LOGITS: tl.constexpr):
    tl.store(out + within, g.to(out.dtype.element_ty), mask=v < V if LOGITS else (j < tiles)[:, None])


@triton.jit
def _shrink(bound):
    """The inverse of the power of two that takes `bound` to below 2^14: float16's range is short."""
    return tl.exp2(tl.floor(tl.log2(tl.maximum(bound, 1e-30))) - 13)


@triton.jit
def divergence_rows(
    student,  # [tiles * tile_rows, VOCAB_TILE] as `logit_tiles` leaves it, or logits [T, V]
    teacher,  # the same
    student_largest,  # [tile_rows, tiles] float32, and so on
    student_total,
    student_others,
    teacher_largest,
    teacher_total,
    student_gradient,  # [rows, VOCAB_TILE] out, or [T, V] out
    teacher_gradient,
    stats,  # [STATS, T] float32 in or out
    loss,  # [T] float32 out, by token
    position,  # [T] int32, by token: -1 for ignored ones
    order,  # [T] int32: the token of a position
    count,  # [1] int32
    label,  # [T] int32: -1 if it is out of range
    target_logit,  # [T] float32: the label's, of a student given by tiles
    token_weight,  # [T] float32, by token
    row,  # [T] float32, by position: factor of its gradients
    first,  # position
    first_tile,
    tiles,
    tile_rows,
    T,
    V,
    student_stride,
    teacher_stride,
    student_gradient_stride,
    teacher_gradient_stride,
    student_stash,
    student_stash_stride,
    student_stash_tokens,
    student_overflow,
    student_overflow_tokens,
    student_again,
    student_again_tokens,
    teacher_stash,
    teacher_stash_stride,
    teacher_stash_tokens,
    teacher_overflow,
    teacher_overflow_tokens,
    teacher_again,
    teacher_again_tokens,
    inverse_temperature,
    beta,
    near0,  # coefficients of the loss where both probabilities are nearly equal
    near1,
    near2,
    near3,
    near4,
    near5,
    soft_weight,  # of the divergence in the loss
    hard_weight,  # of the cross-entropy
    MODE: tl.constexpr,
    EVEN: tl.constexpr,
    STUDENT_LOGITS: tl.constexpr,
    TEACHER_LOGITS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    HARD: tl.constexpr,
    SUMS: tl.constexpr,
    STUDENT: tl.constexpr,
    TEACHER: tl.constexpr,
    STUDENT_MEAN_WANTED: tl.constexpr,
    TEACHER_MEAN_WANTED: tl.constexpr,
    ROW: tl.constexpr,
    STUDENT_SCALED: tl.constexpr,
    TEACHER_SCALED: tl.constexpr,
    TOKEN_WEIGHT: tl.constexpr,
    TILES: tl.constexpr,
    PAD: tl.constexpr,
):
    """Losses and statistics (with SUMS), and the logits' gradients, of one token per program.

    With ROW gradients are multiplied by their row's factor, else by what suits float16 (SCALED).  Gradients of
    logits are 0 for ignored tokens, those in tiles for the positions up to a whole block: products read them.
    """
    i = tl.program_id(0)
    n = tl.load(count)
    if BY_TOKEN:
        token = i
        at = tl.load(position + token)
        there = at >= 0
        blank = at < 0
    else:
        at = first + i
        there = at < n
        blank = (at >= n) & (at < tl.cdiv(tl.maximum(n, 1), PAD) * PAD)
        token = tl.load(order + at, mask=there, other=0)
    c = tl.arange(0, VOCAB_TILE)
    lane = tl.arange(0, TILES)
    blocks = tl.cdiv(tiles, TILES)
    if STUDENT:
        start, s_into_step, s_into = _places_of_a_gradient(
            at, token, student_gradient_stride, student_stash, student_stash_stride, student_stash_tokens,
            student_overflow, student_overflow_tokens, student_again, student_again_tokens, first_tile,
            STUDENT_LOGITS, TILES,
        )  # fmt: skip
        student_gradient += start
    if TEACHER:
        start, t_into_step, t_into = _places_of_a_gradient(
            at, token, teacher_gradient_stride, teacher_stash, teacher_stash_stride, teacher_stash_tokens,
            teacher_overflow, teacher_overflow_tokens, teacher_again, teacher_again_tokens, first_tile,
            TEACHER_LOGITS, TILES,
        )  # fmt: skip
        teacher_gradient += start
    if there:
        y = tl.load(label + at)
        scale = inverse_temperature * LOG2E
        start, s_step, s_within = _places_of_a_row(
            i, token, tile_rows, student_stride, first_tile, STUDENT_LOGITS, TILES
        )  # fmt: skip
        student_row = student + start
        start, t_step, t_within = _places_of_a_row(
            i, token, tile_rows, teacher_stride, first_tile, TEACHER_LOGITS, TILES
        )  # fmt: skip
        teacher_row = teacher + start
        if SUMS:
            if STUDENT_LOGITS:
                s_max, s_sum, s_others = _sums_of_logits(
                    student, token, student_stride, V, y, tiles, inverse_temperature, HARD, TILES
                )
            else:
                s_max, s_sum, s_others = _sums_of_tiles(
                    student_largest, student_total, student_others, i, tiles, inverse_temperature, HARD
                )
            if TEACHER_LOGITS:
                t_max, t_sum, _others = _sums_of_logits(
                    teacher, token, teacher_stride, V, y, tiles, inverse_temperature, False, TILES
                )
            else:
                t_max, t_sum, _others = _sums_of_tiles(
                    teacher_largest, teacher_total, None, i, tiles, inverse_temperature, False
                )
            s_log = tl.log2(s_sum)
            t_log = tl.log2(t_sum)
            losses = tl.zeros((TILES * VOCAB_TILE // GROUP_OF,), tl.float32)
            by_ss = tl.zeros((TILES * VOCAB_TILE // GROUP_OF,), tl.float32)
            by_ts = tl.zeros((TILES * VOCAB_TILE // GROUP_OF,), tl.float32)
            ss = tl.zeros((TILES * VOCAB_TILE // GROUP_OF,), tl.float32)
            ts = tl.zeros((TILES * VOCAB_TILE // GROUP_OF,), tl.float32)
            s_bounds = tl.zeros((TILES * VOCAB_TILE // GROUP_OF,), tl.float32)
            t_bounds = tl.zeros((TILES * VOCAB_TILE // GROUP_OF,), tl.float32)
            for block in range(blocks):
                j = block * TILES + lane
                v = (first_tile + j)[:, None] * VOCAB_TILE + c[None, :]
                log_s, _z = _log2_probs(
                    student_row, s_within, student_largest, i, j, v, tiles, V, scale, s_max, s_log, STUDENT_LOGITS
                )
                log_t, _u = _log2_probs(
                    teacher_row, t_within, teacher_largest, i, j, v, tiles, V, scale, t_max, t_log, TEACHER_LOGITS
                )
                student_row += s_step
                teacher_row += t_step
                term, by_s, by_t, s, t = _terms(
                    log_s, log_t, beta, near0, near1, near2, near3, near4, near5, MODE, EVEN
                )
                losses += tl.sum(_groups(term), 1)
                if STUDENT_MEAN_WANTED:
                    by_ss += tl.sum(_groups(by_s), 1)
                    ss += tl.sum(_groups(s), 1)
                if TEACHER_MEAN_WANTED:
                    by_ts += tl.sum(_groups(by_t), 1)
                    ts += tl.sum(_groups(t), 1)
                if STUDENT_SCALED:
                    s_bounds = tl.maximum(s_bounds, tl.max(_groups(tl.maximum(tl.abs(by_s), s)), 1))
                if TEACHER_SCALED:
                    t_bounds = tl.maximum(t_bounds, tl.max(_groups(tl.maximum(tl.abs(by_t), t)), 1))
            value = tl.sum(losses, 0) * LN2
            s_mean = value * 0
            t_mean = value * 0
            # Over the sums of the probabilities as they are: where both models are certain, all of a gradient cancels.
            if STUDENT_MEAN_WANTED:
                s_mean = tl.where(value == float("inf"), value, tl.sum(by_ss, 0) / tl.sum(ss, 0))
            if TEACHER_MEAN_WANTED:
                t_mean = tl.where(value == float("inf"), value, tl.sum(by_ts, 0) / tl.sum(ts, 0))
            # A gradient is at most (1 + |mean|) times the largest of |by_s| and s.
            soft = soft_weight * inverse_temperature
            s_shrink = _shrink(tl.max(s_bounds) * (1 + tl.abs(s_mean)) * soft + hard_weight)
            t_shrink = _shrink(tl.max(t_bounds) * (1 + tl.abs(t_mean)) * soft)
            value *= soft_weight
            hard_log = value * 0
            label_log_prob = value * 0
            if HARD:
                if STUDENT_LOGITS:
                    own_at = token.to(tl.int64) * student_stride + tl.maximum(y, 0)
                    z_y = tl.load(student + own_at).to(tl.float32)
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
            if TOKEN_WEIGHT:
                value *= tl.load(token_weight + token)
            tl.store(loss + token, tl.where(y < 0, float("nan"), value))
            into = stats + at
            tl.store(into + STUDENT_MAX * T, s_max)
            tl.store(into + STUDENT_LOG_SUM * T, s_log)
            tl.store(into + TEACHER_MAX * T, t_max)
            tl.store(into + TEACHER_LOG_SUM * T, t_log)
            tl.store(into + STUDENT_MEAN * T, s_mean)
            tl.store(into + TEACHER_MEAN * T, t_mean)
            tl.store(into + HARD_LOG_SUM * T, hard_log)
            tl.store(into + LABEL_LOG_PROB * T, label_log_prob)
            tl.store(into + STUDENT_SHRINK * T, s_shrink)
            tl.store(into + TEACHER_SHRINK * T, t_shrink)
        else:
            of = stats + at
            s_max = tl.load(of + STUDENT_MAX * T)
            s_log = tl.load(of + STUDENT_LOG_SUM * T)
            t_max = tl.load(of + TEACHER_MAX * T)
            t_log = tl.load(of + TEACHER_LOG_SUM * T)
            s_mean = tl.load(of + STUDENT_MEAN * T)
            t_mean = tl.load(of + TEACHER_MEAN * T)
            hard_log = tl.load(of + HARD_LOG_SUM * T)
            label_log_prob = tl.load(of + LABEL_LOG_PROB * T)
            s_shrink = tl.load(of + STUDENT_SHRINK * T)
            t_shrink = tl.load(of + TEACHER_SHRINK * T)
        if STUDENT or TEACHER:
            s_factor = soft_weight * inverse_temperature
            t_factor = soft_weight * inverse_temperature
            if MODE == MIXTURE:
                s_factor *= 1 - beta
                t_factor *= beta
            hard_factor = hard_weight
            if ROW:
                r = tl.load(row + at)
                s_factor *= r
                t_factor *= r
                hard_factor *= r
            if STUDENT_SCALED and not ROW:
                s_factor /= s_shrink
                hard_factor /= s_shrink
            if TEACHER_SCALED and not ROW:
                t_factor /= t_shrink
            at_label = hard_factor * expm1(label_log_prob)
            # What is not a plain difference is over log(2).
            if MODE != FORWARD_KL:
                s_factor *= LN2
            if MODE != REVERSE_KL:
                t_factor *= LN2
            # From the last on: what was read last is still in the cache.
            if not SUMS:
                student_row += blocks * s_step
                teacher_row += blocks * t_step
            if STUDENT:
                student_gradient += blocks * s_into_step
            if TEACHER:
                teacher_gradient += blocks * t_into_step
            for back in range(blocks):
                student_row -= s_step
                teacher_row -= t_step
                j = (blocks - 1 - back) * TILES + lane
                v = (first_tile + j)[:, None] * VOCAB_TILE + c[None, :]
                log_s, z = _log2_probs(
                    student_row, s_within, student_largest, i, j, v, tiles, V, scale, s_max, s_log, STUDENT_LOGITS
                )
                log_t, _u = _log2_probs(
                    teacher_row, t_within, teacher_largest, i, j, v, tiles, V, scale, t_max, t_log, TEACHER_LOGITS
                )
                if STUDENT:
                    g = s_factor * _gradient(
                        log_s, log_t, s_mean, beta, MODE == FORWARD_KL, MODE == REVERSE_KL, EVEN
                    )  # fmt: skip
                    if HARD:
                        p = hard_factor * tl.exp2((z - hard_log) * LOG2E)
                        g += tl.where(v == y, at_label, p)
                    student_gradient -= s_into_step
                    _store_gradient(student_gradient, s_into, g, j, v, tiles, V, STUDENT_LOGITS)
                if TEACHER:
                    g = t_factor * _gradient(
                        log_t, log_s, t_mean, 1 - beta, MODE == REVERSE_KL, MODE == FORWARD_KL, EVEN
                    )  # fmt: skip
                    teacher_gradient -= t_into_step
                    _store_gradient(teacher_gradient, t_into, g, j, v, tiles, V, TEACHER_LOGITS)
    elif blank and (STUDENT or TEACHER):
        zero = tl.zeros((TILES, VOCAB_TILE), tl.float32)
        for block in range(blocks):
            j = block * TILES + lane
            v = (first_tile + j)[:, None] * VOCAB_TILE + c[None, :]
            if STUDENT:
                _store_gradient(student_gradient, s_into, zero, j, v, tiles, V, STUDENT_LOGITS)
                student_gradient += s_into_step
            if TEACHER:
                _store_gradient(teacher_gradient, t_into, zero, j, v, tiles, V, TEACHER_LOGITS)
                teacher_gradient += t_into_step
