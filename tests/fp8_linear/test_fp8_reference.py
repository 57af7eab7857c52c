"""The oracle itself: its rounding against PyTorch's casts, and what quantising must and must not change."""

import numpy as np
import pytest
import torch
from fp8_drawn import FORMATS, GROUPS, SCALES
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.fp8.numbers import COLUMN, FP8_MAX, ROW, SQUARE
from onchip.ops.fp8_linear import reference

TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@FORMATS
def test_decode_is_pytorchs_and_the_inverse_of_encode(fmt):
    code = np.arange(256, dtype=np.uint8)
    each = reference.decode(code, fmt)
    np.testing.assert_array_equal(each, torch.from_numpy(code).view(TORCH[fmt]).double().numpy())
    finite = np.isfinite(each)
    np.testing.assert_array_equal(reference.encode(each[finite], fmt), code[finite])


@FORMATS
def test_encode_is_pytorchs_on_every_number_and_every_tie(fmt):
    each = np.sort(reference.decode(np.arange(256), fmt))
    each = each[np.isfinite(each)]
    ties = (each[1:] + each[:-1]) / 2
    near = np.concatenate([each, ties, np.nextafter(np.float32(ties), np.inf), np.nextafter(np.float32(ties), -1e9)])
    random = np.random.default_rng(0).standard_normal(20000) * np.exp2(np.random.default_rng(1).uniform(-20, 8, 20000))
    v = np.concatenate([near, np.clip(random, -FP8_MAX[fmt], FP8_MAX[fmt]), [0.0, -0.0, np.nan]]).astype(np.float32)
    made = reference.encode(v, fmt)
    expected = torch.from_numpy(v).to(TORCH[fmt]).view(torch.uint8).numpy()
    nan = np.isnan(v)
    np.testing.assert_array_equal(made[~nan], expected[~nan])
    assert np.isnan(reference.decode(made[nan], fmt)).all()


@FORMATS
def test_encode_saturates(fmt):
    largest = FP8_MAX[fmt]
    v = np.array([largest * 1.01, largest * 2, 1e30, np.inf])
    for sign in (1, -1):
        np.testing.assert_array_equal(reference.decode(reference.encode(sign * v, fmt), fmt), sign * largest)


def matrix(seed, rows=150, columns=200, spread=8.0):
    """Normal numbers in groups whose sizes differ by powers of two."""
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.uniform(-spread, spread, (rows, columns // 50)))
    return (rng.standard_normal((rows, columns)) * np.repeat(size, 50, 1)).astype(np.float32)


@SCALES
@GROUPS
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), exponent=st.integers(-60, 60))
def test_a_power_of_two_only_moves_the_scales(group, scale, seed, exponent):
    x = matrix(seed)
    a, b = (reference.quantize(v, group, scale=scale) for v in (x, np.ldexp(x, exponent)))
    np.testing.assert_array_equal(a.data, b.data)
    np.testing.assert_array_equal(np.ldexp(a.scale, exponent), b.scale)


@SCALES
@FORMATS
@GROUPS
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_each_element_is_within_half_a_last_place(group, fmt, scale, seed):
    x = matrix(seed)
    q = reference.quantize(x, group, fmt, scale)
    mantissa, smallest = (3, 2.0**-6) if fmt == "e4m3" else (2, 2.0**-14)
    half = np.maximum(np.abs(x) * 2.0 ** -(mantissa + 1), q.scale * smallest * 2.0 ** -(mantissa + 1))
    assert (np.abs(q.value - x) <= half * (1 + 2**-20)).all()
    assert (np.abs(reference.decode(q.data, fmt)) <= FP8_MAX[fmt]).all()
    # The largest of a group comes out within float32's roundings, or with powers of two within one of FP8.
    if scale == "float32" and group == (1, 128):
        assert np.allclose(np.abs(q.value).max(1)[0], np.abs(x).max(1)[0], rtol=2**-4)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_transposing_commutes_with_quantising(seed):
    x = matrix(seed)
    for first, second in ((SQUARE, SQUARE), (ROW, COLUMN)):
        a, b = reference.quantize(x, first), reference.quantize(x.T, second)
        np.testing.assert_array_equal(a.data, b.data.T)
        np.testing.assert_array_equal(a.scale, b.scale.T)


@SCALES
def test_zero_blocks_have_scale_1(scale):
    x = np.zeros((2, 256), np.float32)
    x[0, 130] = 3.0
    q = reference.quantize(x, ROW, scale=scale)
    np.testing.assert_array_equal(q.scale[:, 0], 1)
    assert q.scale[1, 130] == 1
    assert not q.data[1].any()


@SCALES
@FORMATS
@pytest.mark.parametrize("size", [1e-30, 1e-34, 1e30])
def test_tiny_and_huge_gradients_are_kept(size, fmt, scale):
    x = matrix(0, spread=0) * np.float32(size)
    snr = reference.snr_db(reference.quantize(x, ROW, fmt, scale).value, x)
    assert snr > (31 if fmt == "e4m3" else 25)


def test_below_the_smallest_scale_nothing_overflows():
    x = np.array([[1e-37, -3e-38, 1e-45] + [0.0] * 125], np.float32)
    q = reference.quantize(x, ROW)
    assert q.scale[0, 0] == 2.0**-126
    assert np.isfinite(q.value).all()
    assert abs(q.value[0, 0] - 1e-37) < 1e-38


@SCALES
@FORMATS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_show(bad, fmt, scale):
    x = matrix(0, 3, 300)
    x[1, 5] = bad
    q = reference.quantize(x, ROW, fmt, scale)
    assert np.isnan(q.value[1, :128]).all()
    assert np.isfinite(np.delete(q.value, 1, 0)).all()
    assert np.isfinite(q.value[1, 128:]).all()
    result = reference.fp8_linear(x, matrix(1, 130, 300), grad_out=np.ones((3, 130)))
    assert np.isnan(result.out[1]).all()
    assert np.isfinite(result.out[[0, 2]]).all()
    assert np.isnan(result.grad_weight[:, 5]).all()


def test_the_oracle_is_near_the_exact_layer():
    rng = np.random.default_rng(0)
    x, w, g = (rng.standard_normal(s).astype(np.float32) for s in ((256, 512), (384, 512), (256, 384)))
    bias = rng.standard_normal(384)
    made = reference.fp8_linear(x, w, bias, grad_out=g)
    exact = (x.astype(float) @ w.T + bias, g.astype(float) @ w, g.T.astype(float) @ x, g.astype(float).sum(0))
    for a, b in zip(made[:3], exact[:3], strict=True):
        assert reference.snr_db(a, b) >= 28
    np.testing.assert_allclose(made.grad_bias, exact[3])
