"""The JAX front end: the same bits and results as the oracle, and how it behaves under JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.fp8 import numbers
from onchip.fp8.jax_quantize import COLUMN, ROW, SQUARE, quantize
from onchip.jax import fp8_linear
from onchip.ops.fp8_linear import reference
from onchip.ops.fp8_linear.cases import CHECK_CASES
from onchip.ops.fp8_linear.checks import check_case


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Spare LLVM its optimizations: nearly all of the tests' time is compilation."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


# One of each kind of number and size; the others change nothing that is JAX's own.
CASES = {"ragged": "bfloat16", "one row": "float32", "zeros": "float16", "everything": "float32"}


@pytest.mark.parametrize("case", [c for c in CHECK_CASES if c.name in CASES], ids=str)
def test_cases(case):
    wrong = [c for c in check_case(case, CASES[case.name]) if not c.ok]
    assert not wrong, wrong


@pytest.mark.parametrize("scale", numbers.SCALES)
@pytest.mark.parametrize("fmt", numbers.FP8_MAX)
@pytest.mark.parametrize("group", [ROW, COLUMN, SQUARE], ids=str)
def test_quantised_bits_are_the_oracles(group, fmt, scale):
    """With NaN, infinities, zero groups and tiny ones; but for subnormal float32, which XLA takes for 0."""
    rng = np.random.default_rng(0)
    size = np.exp2(rng.uniform(-100, 100, (40, 5)))
    x = (rng.standard_normal((40, 300)) * np.repeat(size, 64, 1)[:, :300]).astype(np.float32)
    x[:10, :128] = 0
    x[20] = 1e-30 * rng.standard_normal(300)
    x[0, 5], x[1, 200], x[2, 299] = np.nan, np.inf, -np.inf
    made = jax.jit(lambda a: quantize(a, group, fmt, scale))(x)
    expected = reference.quantize(x, group, fmt, scale)
    data = np.asarray(made.data)[:40, :300].view(np.uint8)
    nan = np.isnan(reference.decode(expected.data, fmt))
    np.testing.assert_array_equal(np.isnan(reference.decode(data, fmt)), nan)
    np.testing.assert_array_equal(data[~nan], expected.data[~nan])
    np.testing.assert_array_equal(made.scales, reference.compact_scales(expected, group))


def problem(m=20, n=136, k=144, dtype="float32"):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in ((m, k), (n, k), (n,), (m, n))]


def test_layouts_and_dimensions():
    x, w, b, _ = problem()
    out = jax.jit(fp8_linear)(x.reshape(2, 10, -1), w, b)
    assert out.shape == (2, 10, 136)
    turned = jax.jit(lambda x, w, b: fp8_linear(x, w, b, weight_layout="kn"))(x[:, None], w.T, b)
    np.testing.assert_array_equal(turned[:, 0], out.reshape(20, -1))
    assert fp8_linear(x[:0], w).shape == (0, 136)


def test_each_argument_keeps_its_dtype_and_x_is_kept_in_fp8():
    x, w, b, g = problem(dtype="bfloat16")
    w = w.astype(jnp.float32)
    out, pullback = jax.vjp(fp8_linear, x, w, b)
    assert out.dtype == jnp.bfloat16
    kept = [a for a in jax.tree.leaves(pullback) if a.shape not in (w.shape, (0, *x.shape), (0,))]
    assert sum(a.size * a.dtype.itemsize for a in kept) == numbers.quantized_bytes(144, 20)
    grads = pullback(g.astype(jnp.bfloat16))
    assert [a.dtype for a in grads] == [jnp.bfloat16, jnp.float32, jnp.bfloat16]


def test_vmap_is_a_loop():
    x, w, b, g = problem()
    xs, gs = x.reshape(2, 10, -1), g.reshape(2, 10, -1)

    def gradients(x, g):
        return jax.vjp(lambda x, w, b: fp8_linear(x, w, b), x, w, b)[1](g)

    made = jax.jit(jax.vmap(gradients))(xs, gs)
    for i in range(2):
        for p, q in zip(made, jax.jit(gradients)(xs[i], gs[i]), strict=True):
            np.testing.assert_allclose(p[i], q, rtol=1e-5, atol=1e-5)


def test_a_second_derivative_raises():
    x, w, *_ = problem()

    def slope(w):
        return jax.grad(lambda x: fp8_linear(x, w).sum())(x).sum()

    with pytest.raises(NotImplementedError, match="fp8_linear: differentiated twice"):
        jax.grad(slope)(w)


X, W = np.ones((2, 3), np.float32), np.ones((4, 3), np.float32)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((2.0, W), {}, TypeError, r"fp8_linear: x must be a jax.Array or numpy.ndarray; got float"),
        ((X, W[:, :2]), {}, ValueError, r"x has K=3 but weight has K=2; weight must be \[N, K\]"),
        ((X, W), {"weight_layout": "kn"}, ValueError, r"x has K=3 but weight has K=4"),
        ((X, X[0]), {"weight_layout": "kn"}, ValueError, r"weight must be \[K, N\] with weight_layout='kn'"),
        ((X, W), {"weight_layout": "hv"}, ValueError, r"weight_layout must be one of 'nk', 'kn'; got 'hv'"),
        ((X, W), {"scale": "int"}, ValueError, r"scale must be one of 'float32', 'power_of_two'; got 'int'"),
        (
            (X, W),
            {"backend": "triton"},
            ValueError,
            r"must be one of 'auto', 'mosaic_gpu', 'xla'; got 'triton'",
        ),
        (
            (X, W),
            {"backend": "mosaic_gpu"},
            ValueError,
            r"backend 'mosaic_gpu' can't run this call: it runs on NVIDIA GPUs, not on 'cpu'",
        ),
    ],
)
def test_errors(arguments, options, error, message):
    with pytest.raises(error, match=message):
        fp8_linear(*arguments, **options)
