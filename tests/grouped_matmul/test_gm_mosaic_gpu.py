"""The 'mosaic_gpu' backend of grouped_matmul on a Hopper GPU: compiled, against the oracle, and what the CPU can't
show."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.groups.mosaic import products
from onchip.groups.mosaic.products import FEW_ROWS_CONFIG, ROWS_CONFIG, WEIGHT_CONFIG
from onchip.groups.problem import GroupedOptions
from onchip.groups.xla import products as xla_products
from onchip.jax import grouped_matmul, init_moe, moe
from onchip.ops.grouped_matmul.cases import CHECK_CASES, SWIGLU, GroupedCase
from onchip.ops.grouped_matmul.checks import CHECKER
from shared import alternating, assert_within_bounds

pytestmark = pytest.mark.gpu
op = partial(grouped_matmul, backend="mosaic_gpu")
CASES = (
    GroupedCase("ragged", (3, 700, 1, 46, 0, 130), 384, 320, tail=20),
    GroupedCase("many groups", tuple(i % 40 for i in range(70)), 256, 192, tail=3),
    GroupedCase("all groups empty", (0, 0), 128, 128, tail=20),
    GroupedCase("no rows", (0, 0, 0), 128, 128),
    GroupedCase("one row", (0, 1), 128, 192),
    GroupedCase("bias and scales", (200, 0, 440), 320, 256, tail=6, bias=True, row_scale=True),
    GroupedCase("swiglu", (200, 0, 440), 640, 256, tail=6, bias=True, row_scale=True, options=SWIGLU),
    GroupedCase("narrow swiglu", (200, 0, 440), 192, 256, tail=6, row_scale=True, options=SWIGLU),
    GroupedCase("interleaved", (200, 0, 440), 384, 256, bias=True, options={**SWIGLU, "gate_up": "interleaved"}),
    GroupedCase("everything", (500, 0, 1300, 70), 512, 384, tail=9, bias=True, row_scale=True, source_rows=700,
         options={**SWIGLU, "num_rows": 750}),
)  # fmt: skip


@alternating(case=CASES, layout=["gnk", "gkn"], dtype=["bfloat16", "float16"])
def test_cases(case, dtype, layout):
    assert_within_bounds(CHECKER.check_case(case, dtype, "cuda", weight_layout=layout, backend="mosaic_gpu"))


@alternating(case=CHECK_CASES, layout=["gnk", "gkn"], dtype=["float32", "bfloat16"])
def test_xla_cases(case, dtype, layout):
    assert_within_bounds(CHECKER.check_case(case, dtype, "cuda", weight_layout=layout, backend="xla"))


def tensors(rows=5000, groups=6, n=640, k=512):
    """Groups of all sizes, and rows past them that hold NaN."""
    rng = np.random.default_rng(0)
    x, d = (jnp.asarray(rng.standard_normal((rows, size)), jnp.bfloat16).at[4700:].set(jnp.nan) for size in (k, n))
    weight = jnp.asarray(rng.standard_normal((groups, n, k)) * 0.1, jnp.bfloat16)
    ends = jnp.array([7, 7, 1500, 1800, 4692, 4700], jnp.int32)
    return x, d, weight, ends


def assert_near(made, right):
    made, right = np.asarray(made, np.float64), np.asarray(right, np.float64)
    assert np.linalg.norm(made - right) < 2**-8 * np.linalg.norm(right)


ROWS_CONFIGS = (
    ROWS_CONFIG,
    FEW_ROWS_CONFIG,
    replace(ROWS_CONFIG, tile_n=128, stages=5, in_flight=0),
    replace(ROWS_CONFIG, split="n", group=1),
    replace(ROWS_CONFIG, tile_m=256, tile_n=128),
)


@alternating(config=ROWS_CONFIGS, swiglu=[False, True])
def test_configs_of_rows(config, swiglu):
    x, _, weight, ends = tensors()
    options = GroupedOptions(activation="swiglu" if swiglu else None)
    arguments = x, weight, ends, jnp.zeros(6), None, None
    made = jax.jit(lambda: products.layer(*arguments, options, True, config=config))()
    right = jax.jit(lambda: xla_products.layer(*arguments, options, True))()
    assert_near(made[0], right[0])
    assert not made[0][4700:].any()
    assert_near(jnp.concatenate(made[1], 1) if swiglu else made[1], right[1])


@pytest.mark.parametrize(
    "config", [WEIGHT_CONFIG, replace(WEIGHT_CONFIG, tile_n=128, stages=5), replace(WEIGHT_CONFIG, split="n")], ids=str
)
def test_configs_of_the_weights_gradient(config):
    x, d, _, ends = tensors()
    made = jax.jit(lambda: products.weight_product(d, x, ends, jnp.zeros(6), config=config))()
    assert_near(made, jax.jit(lambda: xla_products.weight_product(d, x, ends, jnp.zeros(6)))())
    assert not made[1].any()


def test_wrong_numbers_make_nan():
    x, _, weight, _ = tensors()
    rows = jnp.arange(5000).at[100].set(5000)

    @jax.jit
    def step(sizes, rows):
        out, pullback = jax.vjp(lambda x, w: op(x, w, sizes, rows=rows), x, weight)
        return out, *pullback(jnp.ones_like(out))

    right = jnp.array([7, 0, 93, 300, 2000, 3])
    expected = step(right, jnp.arange(5000))
    assert not any(jnp.isnan(a).any() for a in expected)
    for given in ((right.at[0].set(-1), jnp.arange(5000)), (right, rows)):
        assert all(jnp.isnan(a).all() for a in step(*given))
    for size in (-1, 4901):  # of the third group
        out, grad_x, grad_weight = step(right.at[3].set(size), jnp.arange(5000))
        assert jnp.isnan(grad_x).all()
        for made, of_right, keeps in ((out, expected[0], 100), (grad_weight, expected[2], 3)):
            np.testing.assert_array_equal(np.float32(made[:keeps]), np.float32(of_right[:keeps]))
            assert jnp.isnan(made[keeps:]).all()
    with pytest.raises(ValueError, match=r"rows\[100\] is 5000 but x has 5000 rows"):
        op(x, weight, right, rows=rows, check_inputs=True)


@pytest.mark.parametrize(("groups", "indexed"), [(4, True), (20, False)], ids=["indexed", "short"])
def test_runs_and_transformations_agree(groups, indexed):
    """The same bits from run to run, under checkpoint and in a map, where XLA fuses a kernel with the slices that it
    reads and writes; indexed: of rows that are read and written often; short: rows take tiles from a counter."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 2000, 256)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((3, groups, 384, 256)) * 0.1, jnp.bfloat16)
    rows = jnp.asarray(rng.integers(0, 700, 2000))
    given = {"rows": rows, "scatter_rows": rows, "num_rows": 700} if indexed else {}
    sizes = jnp.array([900, 0, 1000, 80] + [0] * (groups - 4))

    def loss(x, w):
        out = op(x, w, sizes, bias=jnp.ones((groups, 384)), **given)
        return jnp.square(out.astype(jnp.float32)).mean()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    each = [gradients(*a) for a in zip(x, weight, strict=True)]
    again = gradients(x[0], weight[0])
    checkpointed = jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1)))(x[0], weight[0])
    mapped = jax.jit(lambda x, w: jax.lax.map(lambda a: jax.grad(loss, argnums=(0, 1))(*a), (x, w)))(x, weight)
    shared = jax.jit(lambda x, w: jax.lax.map(lambda x: jax.grad(loss, argnums=(0, 1))(x, w), x))(x, weight[0])

    def layers(x, w):
        return jax.lax.scan(lambda total, a: (total + loss(*a), None), 0.0, (x, w))[0]

    scanned = jax.jit(jax.grad(layers, argnums=(0, 1)))(x, weight)
    for i in range(2):
        same = [(again[i], 0), (checkpointed[i], 0), (shared[i][0], 0)]
        same += [(made[i][k], k) for made in (mapped, scanned) for k in range(3)]
        for made, k in same:
            np.testing.assert_array_equal(np.asarray(made, np.float32), np.asarray(each[k][i], np.float32))


def test_shard_map():
    """With check_vma, its default: the same bits as without a shard_map."""
    x, d, _, _ = tensors()
    x, d = jnp.nan_to_num(x), jnp.nan_to_num(d)
    weight = jnp.asarray(np.random.default_rng(1).standard_normal((20, 640, 512)) * 0.1, jnp.bfloat16)
    sizes = jnp.full(20, 250)

    def step(x, weight, sizes, d):
        out, pullback = jax.vjp(lambda x, w: op(x, w, sizes), x, weight)
        return out, *pullback(d)

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    own = jax.sharding.PartitionSpec("data")
    split = jax.shard_map(step, mesh=mesh, in_specs=(own,) * 4, out_specs=(own,) * 3)
    for made, right in zip(jax.jit(split)(x, weight, sizes, d), jax.jit(step)(x, weight, sizes, d), strict=True):
        np.testing.assert_array_equal(np.asarray(made, np.float32), np.asarray(right, np.float32))


def test_layer_of_experts():
    params = init_moe(jax.random.key(0), 256, 384, 8, 128, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (3, 301, 256), jnp.bfloat16)

    def loss(params, x, backend):
        y, stats = moe(params, x, top_k=2, backend=backend)
        return jnp.square(y.astype(jnp.float32)).mean() + stats.aux_loss, y

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2)
    made, right = run(params, x, "mosaic_gpu"), run(params, x, "xla")
    for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(right), strict=True):
        a, b = (np.asarray(z, np.float64) for z in (a, b))
        assert np.linalg.norm(a - b) <= 2**-6 * np.linalg.norm(b)
