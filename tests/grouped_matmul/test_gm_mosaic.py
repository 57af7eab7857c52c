"""The Mosaic kernels of grouped_matmul on the CPU: lowered for CUDA, and interpreted on small sizes.

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

from onchip.groups.mosaic import products
from onchip.groups.mosaic.products import FEW_ROWS_CONFIG, ROWS_CONFIG, WEIGHT_CONFIG, visits_of
from onchip.jax import grouped_matmul
from onchip.ops.grouped_matmul import jax_op
from shared_jax import quick_compilation  # noqa: F401

INTERPRETER = InterpretGPUParams(detect_races=True, out_of_bounds_reads="uninitialized", uninitialized_memory="zero")
BF16 = jnp.bfloat16


@pytest.mark.parametrize("tile", [64, 128])
def test_each_row_is_visited_once(tile):
    rows = 300
    find = jax.jit(partial(visits_of, rows=rows, tile=tile))
    for sizes in ((70, 0, 61, 50), (0, 0, 0, 0), (1, 1, 1, 30), (256, 44, 0, 0), (0, 300, 0, 0)):
        done = np.zeros(rows, int)
        of_row = np.repeat(np.arange(len(sizes) + 1), (*sizes, rows - sum(sizes)))
        visits = jax.tree.map(np.asarray, find(jnp.asarray(np.cumsum(sizes), jnp.int32)))
        assert 1 <= visits.number[0] <= len(visits.tile) == -(-rows // tile) + len(sizes)
        for i in range(visits.number[0]):
            first = visits.tile[i] * tile
            mine = slice(max(first, visits.begin[i]), min(first + tile, visits.end[i]))
            assert (of_row[mine] == visits.group[i]).all()
            assert mine.start < mine.stop
            done[mine] += 1
        assert (done == 1).all()


# ---------------------------------------------------------------------------------------------------- lowered for CUDA


def lower(f, *shapes):
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


ENDS, FILL = ((4,), jnp.int32), ((), jnp.float32)


@pytest.mark.parametrize("config", [ROWS_CONFIG, FEW_ROWS_CONFIG], ids=str)
@pytest.mark.parametrize(("over", "dtype"), [(2, jnp.float32), (1, BF16)])
def test_rows_product_lowers(over, dtype, config):
    f = partial(products.rows_product, over=over, dtype=dtype, config=config)
    lower(f, ((1003, 320), BF16), ((4, 192, 320) if over == 2 else (4, 320, 192), BF16), ENDS, FILL)


@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_weight_product_lowers(dtype):
    f = partial(products.weight_product, dtype=dtype, config=WEIGHT_CONFIG)
    lower(f, ((1003, 320), BF16), ((1003, 192), BF16), ENDS, FILL)


@pytest.mark.parametrize("layout", ["gkn", pytest.param("gnk", marks=pytest.mark.slow)])
def test_the_op_lowers(layout, monkeypatch):
    """All of it, with a weight that isn't square: three kernels."""
    monkeypatch.setattr(jax_op, "mosaic_refusal", lambda *call: None)

    def step(x, w, b, s, sizes, rows):
        def run(x, w, b, s):
            more = {"rows": rows, "scatter_rows": rows, "num_rows": 300, "activation": "swiglu"}
            op = partial(grouped_matmul, weight_layout=layout, backend="mosaic_gpu")
            return op(x, w, sizes, bias=b, row_scale=s, **more).astype(jnp.float32).sum()

        return jax.grad(run, (0, 1, 2, 3))(x, w, b, s)

    weight = ((4, 256, 192) if layout == "gnk" else (4, 192, 256), BF16)
    shapes = (((300, 192), BF16), weight, ((4, 256), BF16), ((500,), jnp.float32), ENDS, ((500,), jnp.int32))
    assert lower(step, *shapes).count("custom_call @mosaic_gpu") == 3


# --------------------------------------------------------------------------------------------------------- interpreted

SIZES, T, K, N = (70, 0, 61, 50), 200, 128, 128


@pytest.fixture
def problem():
    """Rows past the last group's hold NaN and infinities."""
    rng = np.random.default_rng(0)
    x, d, w = (rng.standard_normal(shape) for shape in ((T, K), (T, N), (4, K, N)))
    x[sum(SIZES) :], d[sum(SIZES) :] = np.nan, np.inf
    ends = jnp.asarray(np.cumsum(SIZES), jnp.int32)
    return *(jnp.asarray(a, BF16) for a in (x, d, w)), ends


def parts(x):
    return np.split(np.asarray(x, np.float64), np.cumsum(SIZES))[: len(SIZES)]


def test_rows_product(problem):
    """[G, K, N]; the other layout differs in a product's operand, which the interpreter makes itself."""
    x, _, w, ends = problem
    config = replace(FEW_ROWS_CONFIG, tile_n=128, stages=2, group=2)
    f = partial(products.rows_product, over=1, dtype=jnp.float32, config=config, interpret=INTERPRETER)
    made = np.asarray(jax.jit(f)(x, w, ends, jnp.float32(0)))
    assert not made[sum(SIZES) :].any()
    right = np.concatenate([a @ np.asarray(b, np.float64) for a, b in zip(parts(x), w, strict=True)])
    assert np.linalg.norm(made[: sum(SIZES)] - right) < 1e-6 * np.linalg.norm(right)


def test_weight_product(problem):
    x, d, _, ends = problem
    config = replace(WEIGHT_CONFIG, tile_n=128, stages=2, group=2)
    f = partial(products.weight_product, dtype=jnp.float32, config=config, interpret=INTERPRETER)
    made = np.asarray(jax.jit(f)(d, x, ends, jnp.float32(0)))
    assert not made[1].any()
    right = np.stack([a.T @ b for a, b in zip(parts(d), parts(x), strict=True)])
    assert np.linalg.norm(made - right) < 1e-6 * np.linalg.norm(right)
