"""Functions and numbers that the Triton kernels of softmax losses share."""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

LOG2E = tl.constexpr(1.4426950408889634)
# The maximum while every logit so far is -inf: finite, even times a scale, so that no difference is NaN.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def tanh(x):
    """To a relative error of 2.4e-7 in float32: 1.8e-7 by a minimax polynomial below 0.4, else by an exponential.

    That keeps its own limits at both ends, but its error is absolute.  (The approximate instruction has 11 bits.)
    """
    q = x * x
    series = x + x * q * (-0.33331882 + q * (0.13277629 + q * -0.047794219))
    return tl.where(q < 0.16, series, 1 - 2 / (tl.exp2(x * (2 * LOG2E)) + 1))


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0: below 1/2 a series, of 2 atanh(x / (2 + x)), since the instruction's error is absolute."""
    s = x / (2 + x)
    q = s * s
    series = 2 * s * (1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11))))))
    return tl.where(x < 0.5, series, tl.log(1 + x))


@triton.jit
def rounded_by(total, x, k, b):
    """What `total`, which is x * k + b, is rounded by (Knuth's two-sum, and the product's); 0 where it isn't finite."""
    a = x * k
    of_b = total - a
    low = (a - (total - of_b)) + (b - of_b) + tl.fma(x, k, -a)
    return tl.where(low - low == 0, low, 0.0)


@triton.jit
def expm1(x):
    """exp(x) - 1 for x <= 0: Taylor's series near 0."""
    series = x * (1 + x * (0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720))))))
    return tl.where(x > -0.3, series, tl.exp2(x * LOG2E) - 1)


@triton.jit
def split_float(x):
    """A float32 rounded to its first 24 bits: the first 16 of them, as int16, and the next 8, as uint8."""
    # To the nearest; a NaN of all ones, which is what GPUs make, would become a zero.
    bits = tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFFFF7F) + 0x80
    return (bits >> 16).to(tl.int16), ((bits >> 8) & 0xFF).to(tl.uint8)


@triton.jit
def join_float(first, digits):
    """The float32 of what `split_float` made."""
    return ((first.to(tl.int32) << 16) | (digits.to(tl.int32) << 8)).to(tl.float32, bitcast=True)


# Half of the last place of a float32's first 16 bits.
HALF_A_PLACE = tl.constexpr(0x8000)


@triton.jit
def split_pair(a, b, half):
    """Two float32 rounded to their first 20 bits: the first 16 of each, as int16, and the next 4 of both, as uint8.

    `half`: HALF_A_PLACE makes the first 16 bits those of the nearest bfloat16, half of the last place rounded up; 0 or
    None leaves them.
    """
    a = tl.minimum(a.to(tl.int32, bitcast=True), 0x7FFFF7FF) + 0x800
    b = tl.minimum(b.to(tl.int32, bitcast=True), 0x7FFFF7FF) + 0x800
    digits = ((a >> 12) & 0xF) | ((b >> 8) & 0xF0)
    if half is not None:
        a, b = tl.minimum(a, 0x7FFF7FFF) + half, tl.minimum(b, 0x7FFF7FFF) + half
    return (a >> 16).to(tl.int16), (b >> 16).to(tl.int16), digits.to(tl.uint8)


@triton.jit
def join_pair(first_a, first_b, digits, ROUNDED: tl.constexpr):
    """The two of what `split_pair` made."""
    of_a, of_b = digits.to(tl.int32) & 0xF, digits.to(tl.int32) >> 4
    a = (first_a.to(tl.int32) << 16) | (of_a << 12)
    b = (first_b.to(tl.int32) << 16) | (of_b << 12)
    if ROUNDED:  # 1 of the first bits' last place, where the first of the digits is set
        a, b = a - ((of_a & 8) << 13), b - ((of_b & 8) << 13)
    return a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True)


# Above this a probability is the largest of its row, and no other is.
LEADING = tl.constexpr(0.75)


@triton.jit
def log_of_total(total, below):
    """log(total), total being a sum of exp(z - largest z), and `below` the same without what is above LEADING; and
    whether one logit leads: its own log-probability is small, and 1 + below would round away what log1p(below) keeps.
    """
    leads = (total > 0.5) & (total < 1.5)
    return tl.where(leads, log1p(below), tl.log(total)), leads


@triton.jit
def loss_of_lse(loss_terms, lse):
    """The z-loss of a token; `loss_terms`: LossTerms."""
    return loss_terms.z_loss * lse * lse


@triton.jit
def slope_of_lse(loss_terms):
    """The derivative of that, divided by lse."""
    return 2 * loss_terms.z_loss


@triton.jit
def loss_of_target(loss_terms, log_prob):
    """What a token's only target has of its loss, before it is weighed by class."""
    smoothing = loss_terms.label_smoothing
    # All of it smoothed, a target of probability 0 is not to make it 0 * inf.
    return tl.where(smoothing < 1, -(1 - smoothing) * log_prob, 0.0)


@triton.jit
def smoothed(q, label_smoothing, V):
    """Labels of V entries."""
    return (1 - label_smoothing) * q + label_smoothing / V


@triton.jit
def soft_loss(loss_terms, top, total, below, mass, cost):
    """The loss of a token whose entries all have a label: mass log(total) + cost, and its z-loss.  With it lse, and the
    largest p - 1 where that p is above LEADING.

    `top`: the largest logit.  `total` and `below`: as in `log_of_total`.  `mass`: the sum of the labels q.  `cost`:
    sum(q (top - z)).
    """
    log_total, leads = log_of_total(total, below)
    lse = top + log_total
    value = mass * log_total + cost + loss_of_lse(loss_terms, lse)
    return value, lse, tl.where(leads, -below / total, 0.0)


@triton.jit
def soft_gradient(p, q, mass, less, more):
    """The gradient of that loss by a logit of probability p and label q; `less` as in `soft_loss`, `more` is the
    derivative of its z-loss by lse.  -1 added to a rounded p would lose all digits of a p near 1."""
    return tl.where(p > LEADING, mass * less + (mass - q) + more * p, p * (mass + more) - q)


@triton.jit
def gradient_terms(loss_terms, lse, log_prob, row_factor, weight, class_total, V, SMOOTHING: tl.constexpr):
    """What the gradient of a token's V logits is made of: factor * exp2(z * log2(e) - lse2) - even, or at_target.

    `row_factor` is what all of it is multiplied with.  Where classes have weights, `weight` is the target's,
    `class_total` their sum, and each logit's is a factor of `even`; else None.  Returns lse2, factor, even, at_target.
    """
    smoothing = loss_terms.label_smoothing
    each = smoothing / V
    of_p = 1.0 if class_total is None else (1 - smoothing) * weight + each * class_total
    # p - 1 as expm1(log p): -1 added to a rounded p would lose all digits of a p near 1.
    at_target = row_factor * (of_p * expm1(log_prob) + slope_of_lse(loss_terms) * lse * tl.exp2(log_prob * LOG2E))
    if SMOOTHING:
        # In this order it is exactly 0 for one class, where a fused multiplication and subtraction would leave a rest.
        rest = smoothing - each if class_total is None else each * (class_total - weight)
        at_target = at_target + row_factor * rest
    return lse * LOG2E, row_factor * (of_p + slope_of_lse(loss_terms) * lse), row_factor * each, at_target
