"""Floats in 20 and 24 bits beside float32: how the weight's sum over chunks is kept."""

import numpy as np
import torch
import triton
import triton.language as tl

from onchip.kernels.triton import maths as triton_maths

SPECIAL = [0.0, 1.0, 1 + 2.0**-12, 1 + 3 * 2.0**-12, 3.4e38, 3.4028e38, np.inf, np.nan]


def assert_rounds(function, digits):
    """`function` of a float32 array keeps so many binary digits, NaN and infinity; what is too large is infinite."""
    x = np.concatenate([np.logspace(-37, 38, 2029), np.linspace(1, 4, 2044), SPECIAL]).astype(np.float32)
    x = np.concatenate([x, -x, np.zeros(-2 * len(x) % 1024, np.float32)])
    made = function(x)
    assert (np.isnan(made) == np.isnan(x)).all()
    assert (np.isinf(made) == (np.abs(x) > 3.4025e38)).all()
    finite = np.abs(x) < 3.4025e38
    error = np.abs(made[finite].astype(np.float64) - x[finite])
    assert (error <= 2.0**-digits * np.abs(x[finite])).all()
    assert error.max() > 0


@triton.jit
def through_bits(x, out, PAIRED: tl.constexpr, HALF: tl.constexpr):
    at = tl.program_id(0) * 2 * HALF + tl.arange(0, HALF)
    a, b = tl.load(x + at), tl.load(x + at + HALF)
    if PAIRED:
        first, second, digits = triton_maths.split_pair(a, b)
        a, b = triton_maths.join_pair(first, second, digits)
    else:
        first, digits = triton_maths.split_float(a)
        second, more = triton_maths.split_float(b)
        a, b = triton_maths.join_float(first, digits), triton_maths.join_float(second, more)
    tl.store(out + at, a)
    tl.store(out + at + HALF, b)


def triton_bits(x, device, *, paired):
    """For `assert_rounds`."""
    given = torch.from_numpy(x).to(device)
    out = torch.empty_like(given)
    through_bits[(len(x) // 1024,)](given, out, PAIRED=paired, HALF=512)
    return out.cpu().numpy()
