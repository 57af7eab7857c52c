"""The 'mosaic_gpu' backend on the CPU: lowered for CUDA, and interpreted on small sizes.

The first finds illegal operands and too much shared memory, the second wrong results and races; neither notices a
missing commit_smem or wgmma_wait, and the interpreter's products are not WGMMA's.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from onchip.fp8 import jax_products
from onchip.fp8 import mosaic_kernels as kernels
from onchip.fp8.jax_quantize import Scaled, scaled_rows
from onchip.fp8.mosaic_kernels import CONFIG, scaled_product
from onchip.fp8.numbers import Options, up
from onchip.jax import fp8_linear
from onchip.kernels.mosaic.product import SHARED_BYTES
from onchip.ops.fp8_linear import jax_op, reference
from onchip.ops.fp8_linear.cases import Case
from onchip.ops.fp8_linear.checks import check_case
from shared_jax import quick_compilation  # noqa: F401

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# Products of two formats need JAX 0.11.2: below it a call that would make one is refused.
MIXED = jax.__version_info__ >= (0, 11, 2)
FORMATS = [(E4M3, E4M3), *([(E5M2, E4M3), (E4M3, E5M2)] if MIXED else [])]
LAYOUTS = pytest.mark.parametrize("layout", ["nk", "kn"])
BY_BLOCK = pytest.mark.parametrize("by_block", [True, False], ids=["blocks", "rows"])


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(jax_products, "mosaic_refusal", lambda platform, options: None)


# ------------------------------------------------------------------------------------------------ lowered for CUDA


def lower(f, *shapes):
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def scaled(rows, columns, by_block=False, dtype=E4M3):
    groups = up(rows, 128) // 128 if by_block else rows
    shapes = ((rows, columns), dtype), ((columns // 128, groups), jnp.float32)
    return Scaled(*(jax.ShapeDtypeStruct(*s) for s in shapes))


@BY_BLOCK
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, in_flight=1),
        replace(CONFIG, tile_m=128, tile_n=256),
        replace(CONFIG, tile_m=128, tile_n=256, split="n"),
        replace(CONFIG, tile_m=128, tile_n=128, stages=5, staging_slots=2),
    ],
    ids=str,
)
def test_configs_lower(config, by_block):
    f = partial(scaled_product, by_block=by_block, dtype=jnp.bfloat16, config=config)
    lower(f, scaled(8192, 4096), scaled(28672, 4096, by_block))


@pytest.mark.parametrize("formats", FORMATS, ids=lambda pair: "-".join(jnp.dtype(fmt).name for fmt in pair))
def test_formats_lower(formats):
    a, b = (scaled(256, 384, dtype=fmt) for fmt in formats)
    lower(partial(scaled_product, by_block=False, dtype=jnp.float32), a, b)


def test_too_much_shared_memory():
    config = replace(CONFIG, stages=5)
    with pytest.raises(ValueError, match=rf"scaled_product: .* bytes of shared memory, of which .* {SHARED_BYTES}"):
        lower(
            partial(scaled_product, by_block=True, dtype=jnp.float32, config=config),
            scaled(8, 128),
            scaled(8, 128, True),
        )


def layer(layout, **options):
    def step(x, weight, bias, g):
        op = partial(fp8_linear, weight_layout=layout, backend="mosaic_gpu", **options)
        out, pullback = jax.vjp(op, x, weight, bias)
        return out, *pullback(g)

    return step


@LAYOUTS
@pytest.mark.parametrize(("m", "n", "k"), [(8192, 6144, 4096), (130, 131, 521), (0, 4, 3)], ids=str)
@pytest.mark.usefixtures("on_hopper")
def test_the_layer_lowers(m, n, k, layout):
    shapes = (
        ((m, k), "bfloat16"),
        ((n, k) if layout == "nk" else (k, n), "float32"),
        ((n,), "float16"),
        ((m, n), "bfloat16"),
    )
    arguments = [jax.ShapeDtypeStruct(*s) for s in shapes]
    made = jax.eval_shape(layer(layout), *arguments)
    assert [(x.shape, x.dtype) for x in made] == [(x.shape, x.dtype) for x in (arguments[3], *arguments[:3])]
    text = lower(layer(layout), *arguments)
    assert text.count("custom_call @mosaic_gpu") == 3


@pytest.mark.usefixtures("on_hopper")
def test_transformations_lower():
    x, w = jax.ShapeDtypeStruct((3, 64, 256), jnp.float16), jax.ShapeDtypeStruct((128, 256), jnp.float16)
    op = partial(fp8_linear, backend="mosaic_gpu")

    def loss(x, w):
        return jax.checkpoint(op)(x, w).astype(jnp.float32).sum()

    mapped = jax.vmap(jax.grad(loss, argnums=(0, 1)), (0, None))
    lower(mapped, x, w)
    assert [a.shape for a in jax.eval_shape(mapped, x, w)] == [(3, 64, 256), (3, 128, 256)]


# ------------------------------------------------------------------------------------------------------- refusals


def test_refusals(monkeypatch):
    e5m2 = Options(grad_dtype="e5m2")
    assert jax_products.mosaic_refusal("tpu", Options()) == "it runs on NVIDIA GPUs, not on 'tpu'"
    assert ("needs JAX 0.11.2 or later" in jax_products.mosaic_refusal("gpu", e5m2)) == (not MIXED)
    assert "it is for compute capability 9.0 (Hopper); this is none" in jax_products.mosaic_refusal("gpu", Options())
    x = jnp.ones((2, 128))
    monkeypatch.setattr(jax_op, "platform", lambda: "gpu")
    for version in ((0, 10, 2), (0, 11, 1)):
        monkeypatch.setattr(jax, "__version_info__", version)
        words = "backend 'mosaic_gpu' can't run this call: grad_dtype='e5m2' needs JAX 0.11.2 or later; this is"
        with pytest.raises(ValueError, match=words):
            fp8_linear(x, x, grad_dtype="e5m2", backend="mosaic_gpu")


# ---------------------------------------------------------------------------------------------------- interpreted

# Ragged, but in whole blocks of results: the interpreter moves one that would end outside.
M, N, K = 192, 192, 264
SMALL = replace(CONFIG, tile_m=128, tile_n=128, stages=2, group=2)


@pytest.fixture(scope="module")
def interpreter():
    # What TMA does outside of a matrix: read zeros.
    return InterpretGPUParams(detect_races=True, out_of_bounds_reads="uninitialized", uninitialized_memory="zero")


def test_product(interpreter):
    """Scales of rows on both sides, E5M2 by E4M3, waves of 64 columns.  The layer below has the other kind."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((rows, K)) * np.exp2(rng.uniform(-3, 3, (rows, 1))) for rows in (M, N))
    bias = rng.standard_normal(N).astype(np.float32)
    left, right = scaled_rows(a, "e5m2", "float32"), scaled_rows(b, "e4m3", "float32")
    config = replace(SMALL, tile_n=256, split="n", in_flight=1)
    made = scaled_product(left, right, bias, by_block=False, dtype=jnp.float32, config=config, interpret=interpreter)
    expected = reference.quantize(a, ROW, "e5m2").value @ reference.quantize(b, ROW).value.T + bias
    assert np.linalg.norm(made - expected) < 1e-6 * np.linalg.norm(expected)


@pytest.mark.usefixtures("on_hopper")
def test_the_layer(interpreter, monkeypatch):
    """Output and x's gradient are the kernel's.  For the weight's, whose kind is above, another product stands in: each
    interpreted thread is compiled by itself, so that time goes by how many kernels there are."""

    def product(a, b, bias=None, *, by_block, dtype):
        if by_block:
            return scaled_product(a, b, bias, by_block=True, dtype=dtype, config=SMALL, interpret=interpreter)
        left, right = (x.data.astype(jnp.float32) * jnp.repeat(x.scales.T, 128, axis=1) for x in (a, b))
        return jnp.dot(left, right.T).astype(dtype)

    monkeypatch.setattr(kernels, "scaled_product", product)
    case = Case("interpreted", 64, N, 320, bias=True, zeros=0.1, snr_db=None)
    wrong = [c for c in check_case(case, "bfloat16", weight_layout="kn", backend="mosaic_gpu") if not c.ok]
    assert not wrong, wrong
