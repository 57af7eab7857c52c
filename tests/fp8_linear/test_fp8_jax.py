"""The JAX front end: bits and results of the oracle, JAX's transformations, and the 'mosaic_gpu' backend on the CPU.

The backend is lowered for CUDA, which finds illegal operands and too much shared memory, and interpreted on small
sizes, which finds wrong results and races; neither notices a missing commit_smem or wgmma_wait, and the interpreter's
products are not WGMMA's.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_drawn import GROUPS, awkward
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from onchip.fp8 import mosaic_kernels, numbers
from onchip.fp8.jax_quantize import JaxQuantized, operand, quantize
from onchip.fp8.mosaic_kernels import CONFIG, scaled_product
from onchip.fp8.numbers import ROW, Fp8Options, up
from onchip.jax import fp8_linear
from onchip.kernels.mosaic.product import SHARED_BYTES
from onchip.ops.fp8_linear import jax_op, reference
from onchip.ops.fp8_linear.cases import CHECK_CASES, Fp8LinearCase
from onchip.ops.fp8_linear.checks import CHECKER
from shared import assert_within_bounds

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# Products of two formats need JAX 0.11.2: below it a call that would make one is refused.
MIXED = jax.__version_info__ >= (0, 11, 2)
FORMATS = [(E4M3, E4M3), *([(E5M2, E4M3), (E4M3, E5M2)] if MIXED else [])]
CONFIGS = (
    CONFIG,
    replace(CONFIG, in_flight=1),
    replace(CONFIG, tile_m=128, tile_n=256),
    replace(CONFIG, tile_m=128, tile_n=256, split="n"),
    replace(CONFIG, tile_m=128, tile_n=128, stages=5, staging_slots=2),
)
# One of each kind of number and size; the others change nothing that is JAX's own.
CASES = {"ragged": "bfloat16", "zeros": "float16", "everything": "float32"}


def assert_the_oracles_bits(x, group, fmt, scale):
    made, (rows, columns) = jax.jit(lambda a: quantize(a, group, fmt, scale))(x), x.shape
    expected = reference.quantize(np.asarray(x, np.float32), group, fmt, scale)
    data = np.asarray(made.data)[:rows, :columns].view(np.uint8)
    nan = np.isnan(reference.decode(expected.data, fmt))
    np.testing.assert_array_equal(np.isnan(reference.decode(data, fmt)), nan)
    np.testing.assert_array_equal(data[~nan], expected.data[~nan])
    np.testing.assert_array_equal(made.scales, expected.scale[:: group[0], :: group[1]])


@pytest.mark.parametrize("case", [c for c in CHECK_CASES if c.name in CASES], ids=str)
def test_cases(case):
    assert_within_bounds(CHECKER.check_case(case, CASES[case.name], "cpu"))


@pytest.mark.parametrize(
    ("fmt", "scale"), [("e4m3", "float32"), ("e5m2", "float32"), ("e4m3", "power_of_two")], ids=str
)
@GROUPS
def test_quantised_bits_are_the_oracles(group, fmt, scale):
    """With NaN, infinities, zero groups and tiny ones; but for subnormal float32, which XLA takes for 0."""
    assert_the_oracles_bits(awkward(40, 300, smallest=1e-30), group, fmt, scale)


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


def test_shard_map():
    """A device's own rows, and a weight and a bias that all devices have: JAX sums the gradients of those over them."""
    x, w, b, g = problem()

    def gradients(x, w, b, g):
        return jax.grad(lambda *given: (fp8_linear(*given) * g).sum(), (0, 1, 2))(x, w, b)

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    own, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    split = jax.shard_map(gradients, mesh=mesh, in_specs=(own, whole, whole, own), out_specs=(own, whole, whole))
    for p, q in zip(jax.jit(split)(x, w, b, g), jax.jit(gradients)(x, w, b, g), strict=True):
        np.testing.assert_allclose(p, q, rtol=1e-5, atol=1e-5)


def test_vmap_is_a_loop():
    x, w, b, g = problem()
    xs, gs = x.reshape(2, 10, -1), g.reshape(2, 10, -1)

    def gradients(x, g):
        return jax.vjp(lambda x, w, b: fp8_linear(x, w, b), x, w, b)[1](g)

    made = jax.jit(jax.vmap(gradients))(xs, gs)
    one = jax.jit(gradients)
    for i in range(2):
        for p, q in zip(made, one(xs[i], gs[i]), strict=True):
            np.testing.assert_allclose(p[i], q, rtol=1e-5, atol=1e-5)


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
        ((X, W), {"backend": "triton"}, ValueError, r"must be one of 'auto', 'mosaic_gpu', 'xla'; got 'triton'"),
    ],
)
def test_errors(arguments, options, error, message):
    with pytest.raises(error, match=message):
        fp8_linear(*arguments, **options)


# --------------------------------------------------------------------------------------- 'mosaic_gpu': lowered for CUDA


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(jax_op, "mosaic_refusal", lambda platform, options: None)


def lower(f, *shapes):
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def scaled(rows, columns, by_block=False, dtype=E4M3):
    shapes = ((rows, columns), dtype), ((columns // 128, up(rows) // 128 if by_block else rows), jnp.float32)
    return JaxQuantized(*(jax.ShapeDtypeStruct(*s) for s in shapes))


@pytest.mark.parametrize(("config", "by_block"), [(x, i % 2 == 0) for i, x in enumerate(CONFIGS)], ids=str)
def test_configs_lower(config, by_block):
    f = partial(scaled_product, by_block=by_block, dtype=jnp.bfloat16, config=config)
    lower(f, scaled(8192, 4096), scaled(28672, 4096, by_block))


@pytest.mark.parametrize("formats", FORMATS, ids=lambda pair: "-".join(jnp.dtype(fmt).name for fmt in pair))
def test_formats_lower(formats):
    a, b = (scaled(256, 384, dtype=fmt) for fmt in formats)
    lower(partial(scaled_product, by_block=False, dtype=jnp.float32), a, b)


def test_too_much_shared_memory():
    f = partial(scaled_product, by_block=True, dtype=jnp.float32, config=replace(CONFIG, stages=5))
    with pytest.raises(ValueError, match=rf"scaled_product: .* bytes of shared memory, of which .* {SHARED_BYTES}"):
        lower(f, scaled(8, 128), scaled(8, 128, True))


@pytest.mark.usefixtures("on_hopper")
def test_transformations_lower():
    x, w = jax.ShapeDtypeStruct((3, 64, 256), jnp.float16), jax.ShapeDtypeStruct((128, 256), jnp.float16)
    op = partial(fp8_linear, backend="mosaic_gpu")

    def loss(x, w):
        return jax.checkpoint(op)(x, w).astype(jnp.float32).sum()

    mapped = jax.vmap(jax.grad(loss, argnums=(0, 1)), (0, None))
    lower(mapped, x, w)
    assert [a.shape for a in jax.eval_shape(mapped, x, w)] == [(3, 64, 256), (3, 128, 256)]


def test_refusals(monkeypatch):
    refusal, e5m2 = jax_op.mosaic_refusal, Fp8Options(grad_dtype="e5m2")
    assert refusal("tpu", Fp8Options()) == "it runs on NVIDIA GPUs, not on 'tpu'"
    assert ("needs JAX 0.11.2 or later" in refusal("gpu", e5m2)) == (not MIXED)
    assert "it is for compute capability 9.0 (Hopper); this is none" in refusal("gpu", Fp8Options())
    x = jnp.ones((2, 128))
    monkeypatch.setattr(jax_op, "platform", lambda: "gpu")
    for version in ((0, 10, 2), (0, 11, 1)):
        monkeypatch.setattr(jax, "__version_info__", version)
        words = "backend 'mosaic_gpu' can't run this call: grad_dtype='e5m2' needs JAX 0.11.2 or later; this is"
        with pytest.raises(ValueError, match=words):
            fp8_linear(x, x, grad_dtype="e5m2", backend="mosaic_gpu")


# ------------------------------------------------------------------------------------------ 'mosaic_gpu': interpreted

# Ragged, but in whole blocks of results: the interpreter moves one that would end outside.
M, N, K = 192, 192, 264
SMALL = replace(CONFIG, tile_m=128, tile_n=128, stages=2, group=2)
# What TMA does outside of a matrix: read zeros.
INTERPRETER = InterpretGPUParams(detect_races=True, out_of_bounds_reads="uninitialized", uninitialized_memory="zero")


def test_product():
    """Scales of rows on both sides, E5M2 by E4M3, waves of 64 columns.  The layer below has the other kind."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((rows, K)) * np.exp2(rng.uniform(-3, 3, (rows, 1))) for rows in (M, N))
    bias = rng.standard_normal(N).astype(np.float32)
    left, right = operand(a, "e5m2", "float32"), operand(b, "e4m3", "float32")
    config = replace(SMALL, tile_n=256, split="n", in_flight=1)
    made = scaled_product(left, right, bias, by_block=False, dtype=jnp.float32, config=config, interpret=INTERPRETER)
    expected = reference.quantize(a, ROW, "e5m2").value @ reference.quantize(b, ROW).value.T + bias
    assert np.linalg.norm(made - expected) < 1e-6 * np.linalg.norm(expected)


@pytest.mark.usefixtures("on_hopper")
def test_the_layer(monkeypatch):
    """The output is the kernel's.  For the gradients, of kinds that are here and above, XLA's product of the kernel's
    operands stands in: each interpreted thread is compiled by itself, so that time goes by how many kernels there are.
    """

    def product(a, b, bias=None, *, by_block, dtype):
        if bias is not None:
            return scaled_product(a, b, bias, by_block=True, dtype=dtype, config=SMALL, interpret=INTERPRETER)
        return jax_op._product("xla", a, b, by_block=by_block, dtype=dtype)

    monkeypatch.setattr(mosaic_kernels, "scaled_product", product)
    case = Fp8LinearCase("interpreted", 64, N, 320, bias=True, zeros=0.1, snr_db=None)
    assert_within_bounds(CHECKER.check_case(case, "bfloat16", "cpu", weight_layout="kn", backend="mosaic_gpu"))
