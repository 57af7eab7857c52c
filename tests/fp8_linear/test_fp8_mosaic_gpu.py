"""The 'mosaic_gpu' backend on a Hopper GPU: compiled, against the oracle, and what the CPU can't show."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_common import assert_right
from test_fp8_jax import CONFIGS, assert_the_oracles_bits

from onchip.fp8 import numbers
from onchip.fp8.jax_quantize import operand
from onchip.fp8.mosaic_kernels import scaled_product
from onchip.fp8.numbers import COLUMN, ROW, SQUARE
from onchip.jax import fp8_linear
from onchip.ops.fp8_linear import reference
from onchip.ops.fp8_linear.cases import CHECK_CASES, Fp8LinearCase
from shared import alternating, pairs_once

pytestmark = pytest.mark.gpu
op = partial(fp8_linear, backend="mosaic_gpu")


@alternating(
    case=[*CHECK_CASES, Fp8LinearCase("longer", 1024, 1536, 2048, bias=True)],
    dtype=["float32", "bfloat16", "float16"],
    layout=["nk", "kn"],
)
def test_cases(case, dtype, layout):
    assert_right(case, dtype, "gpu", weight_layout=layout, backend="mosaic_gpu")


@pairs_once(
    "group, dtype, fmt, scale",
    product([ROW, COLUMN, SQUARE], ["float32", "bfloat16", "float16"], numbers.FP8_MAX, numbers.SCALES),
)
def test_quantised_bits_are_the_oracles(group, dtype, fmt, scale):
    rng = np.random.default_rng(0)
    range_ = 4 if dtype == "float16" else 60
    x = rng.standard_normal((400, 1000)) * np.exp2(rng.uniform(-range_, range_, (400, 1)))
    x[:130, 128:300] = 0
    x[200, 5], x[201, 600] = np.nan, np.inf
    assert_the_oracles_bits(jnp.asarray(x, dtype), group, fmt, scale)


@alternating(config=CONFIGS, by_block=[True, False])
def test_configs(config, by_block):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((rows, 1032)).astype(np.float32) for rows in (520, 648))
    left, right = operand(a, "e4m3", "float32"), operand(b, "e4m3", "float32", by_block=by_block)
    run = partial(scaled_product, by_block=by_block, dtype=jnp.float32, config=config)
    made = jax.jit(run)(left, right)[:520, :648]
    expected = reference.quantize(a, ROW).value @ reference.quantize(b, SQUARE if by_block else ROW).value.T
    # WGMMA's own sums of FP8 products are that far off.
    assert np.linalg.norm(made - expected) < 5e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_show(value):
    rng = np.random.default_rng(0)
    x, w, g = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((300, 384), (256, 384), (300, 256)))
    out, pullback = jax.vjp(op, x.at[7, 200].set(value), w)
    rest = np.arange(300) != 7
    assert np.isnan(np.asarray(out, np.float32)[7]).all()
    assert np.isfinite(np.asarray(out, np.float32)[rest]).all()
    grad_x, grad_w = (np.asarray(a, np.float32) for a in pullback(g.at[9, 3].set(value)))
    assert np.isnan(grad_x[9]).all()
    assert np.isfinite(grad_x[np.arange(300) != 9]).all()
    assert np.isnan(grad_w[:, 200]).all()
    assert np.isnan(grad_w[3]).all()
    others = np.ix_(np.arange(256) != 3, np.arange(384) != 200)
    assert np.isfinite(grad_w[others]).all()


def test_runs_and_transformations_agree():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((3, 200, 264), (136, 264)))

    def loss(x, w):
        return jnp.square(op(x, w).astype(jnp.float32)).mean()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    each = [gradients(x[i], w) for i in range(3)]
    again = gradients(x[0], w)
    checkpointed = jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1)))(x[0], w)
    mapped = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1)), (0, None)))(x, w)
    for i in range(2):
        np.testing.assert_array_equal(*(np.asarray(a[i], np.float32) for a in (again, each[0])))
        np.testing.assert_array_equal(*(np.asarray(a[i], np.float32) for a in (checkpointed, each[0])))
        np.testing.assert_array_equal(
            np.asarray(mapped[i], np.float32), np.stack([np.asarray(a[i], np.float32) for a in each])
        )
