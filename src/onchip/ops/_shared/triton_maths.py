"""Functions and numbers that the Triton kernels of softmax losses share."""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

LOG2E = tl.constexpr(1.4426950408889634)
# Where every logit so far is -inf, the maximum is this: finite, so that a difference of two is never NaN.
LOWEST = tl.constexpr(-8.0e37)


@triton.jit
def tanh(x):
    # The approximate instruction has 11 bits; this has 22, and its own limits at both ends.
    return 1 - 2 / (tl.exp2(x * (2 * LOG2E)) + 1)


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0: below 1/2 a series, of 2 atanh(x / (2 + x)), since the instruction's error is absolute."""
    s = x / (2 + x)
    q = s * s
    series = 2 * s * (1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11))))))
    return tl.where(x < 0.5, series, tl.log(1 + x))


@triton.jit
def expm1(x):
    """exp(x) - 1 for x <= 0: Taylor's series near 0."""
    series = x * (1 + x * (0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720))))))
    return tl.where(x > -0.3, series, tl.exp2(x * LOG2E) - 1)


@triton.jit
def target_gradient(lse, log_prob, z_loss):
    """d loss / dz of the target, without label smoothing.

    p - 1 as expm1(log p): -1 added to a rounded p would lose all digits of a p near 1.
    """
    return expm1(log_prob) + 2 * z_loss * lse * tl.exp2(log_prob * LOG2E)
