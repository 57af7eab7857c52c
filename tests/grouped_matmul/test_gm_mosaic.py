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
from onchip.groups.mosaic.products import FEW_ROWS_CONFIG, ROWS_CONFIG, WEIGHT_CONFIG, tile_at, tiles_up_to
from onchip.groups.mosaic.sums import sum_rows
from onchip.groups.problem import GroupedOptions
from onchip.ops.grouped_matmul import reference

INTERPRETER = InterpretGPUParams(detect_races=True, out_of_bounds_reads="uninitialized", uninitialized_memory="zero")
BF16 = jnp.bfloat16


@pytest.mark.parametrize("tile", [64, 128])
def test_each_row_is_in_one_tile(tile):
    rows = 300
    find = jax.jit(partial(tile_at, rows=rows, tile=tile))
    for sizes in (
        (70, 0, 61, 50),
        (0, 0, 0, 0),
        (1, 1, 1, 30),
        (256, 44, 0, 0),
        (0, 300, 0, 0),
        (7, 122, 122, 49),
        (9,),
    ):
        done = np.zeros(rows, int)
        of_row = np.repeat(np.arange(len(sizes) + 1), (*sizes, rows - sum(sizes)))
        ends = jnp.asarray(np.cumsum(sizes), jnp.int32)
        up_to = tiles_up_to(ends, rows, tile)
        assert up_to[-1] >= 1
        for i in range(int(up_to[-1])):
            row, group, begin, end = (int(x) for x in find(i, up_to, ends))
            assert row % 8 == 0
            mine = slice(max(row, begin), min(row + tile, end))
            assert (of_row[mine] == group).all()
            assert mine.start < mine.stop
            done[mine] += 1
        assert (done == 1).all()


# ---------------------------------------------------------------------------------------------------- lowered for CUDA


def lower(f, *shapes):
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


ENDS, FILL = ((4,), jnp.int32), ((4,), jnp.float32)


@pytest.mark.parametrize("config", [ROWS_CONFIG, FEW_ROWS_CONFIG], ids=lambda c: c.split)
@pytest.mark.parametrize(
    ("layout", "swiglu", "dtype"),
    [("gnk", True, BF16), pytest.param("gkn", False, jnp.float32, marks=pytest.mark.slow)],
)
def test_rows_product_lowers(layout, swiglu, dtype, config):
    f = partial(products.rows_product, gnk=layout == "gnk", swiglu=swiglu, keeps=True, dtype=dtype, config=config)
    weight = ((4, 384, 320) if layout == "gnk" else (4, 320, 384), BF16)
    lower(f, ((1003, 320), BF16), weight, ENDS, FILL, ((4, 384), BF16), ((1003,), jnp.float32))


def test_weight_product_lowers():
    lower(products.weight_product, ((1003, 320), BF16), ((1003, 192), BF16), ENDS, FILL)


# --------------------------------------------------------------------------------------------------------- interpreted

SIZES, T, K, N = (70, 0, 50, 7), 140, 128, 256


@pytest.fixture
def problem():
    """Rows past the last group's hold NaN and infinities."""
    rng = np.random.default_rng(0)
    x, d, w, b, s = (rng.standard_normal(shape) for shape in ((T, K), (T, K), (4, N, K), (4, N), T))
    x[sum(SIZES) :], d[sum(SIZES) :], s[sum(SIZES) :] = np.nan, np.inf, np.nan
    x, d, w, b = (jnp.asarray(a, BF16) for a in (x, d, w, b))
    return x, d, w, b, jnp.float32(s), jnp.asarray(np.cumsum(SIZES), jnp.int32)


def assert_near(made, right):
    made = np.asarray(made, np.float64)
    assert not made[sum(SIZES) :].any()
    assert np.linalg.norm(made[: sum(SIZES)] - right[: sum(SIZES)]) < 2**-8 * np.linalg.norm(right[: sum(SIZES)])


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [False, True])
def test_layer(keeps, problem):
    """With all that the kernel may do: gate and up are those of one tile."""
    x, _, w, b, s, ends = problem
    config = replace(FEW_ROWS_CONFIG, stages=2, group=2)
    options = GroupedOptions(activation="swiglu")
    run = partial(products.layer, options=options, keeps=keeps, config=config, interpret=INTERPRETER)
    out, y = jax.jit(run)(x, w, ends, jnp.zeros(len(ends)), b, s)
    given = (np.nan_to_num(np.asarray(a, np.float64)) for a in (x, w, b, s))
    x, w, b, s = given
    right = reference.grouped_matmul(x, w, SIZES, bias=b, row_scale=s, activation="swiglu").out
    assert_near(out, right)
    if keeps:
        assert_near(jnp.concatenate(y, 1), reference.grouped_matmul(x, w, SIZES, bias=b).out)


@pytest.mark.slow
def test_layer_in_the_other_layout(problem):
    x, _, w, _, _, ends = problem
    config = replace(ROWS_CONFIG, tile_n=128, stages=2, group=2)
    options = GroupedOptions(weight_layout="gkn")
    run = partial(products.layer, options=options, keeps=False, config=config, interpret=INTERPRETER)
    out, _ = jax.jit(lambda x, w: run(x, w, ends, jnp.zeros(len(ends)), None, None))(x, w.swapaxes(1, 2))
    x, w = (np.nan_to_num(np.asarray(a, np.float64)) for a in (x, w))
    assert_near(out, reference.grouped_matmul(x, w, SIZES).out)


def test_weight_product(problem):
    x, d, *_, ends = problem
    config = replace(WEIGHT_CONFIG, tile_n=128, stages=2, group=2)
    run = partial(products.weight_product, config=config, interpret=INTERPRETER)
    made = np.array(jax.jit(run)(d, x, ends, jnp.array([0, jnp.nan, 0, 0])), np.float64)
    assert np.isnan(made[1]).all()  # with another number than 0 for the empty one
    made[1] = 0
    d, x = (np.split(np.asarray(a, np.float64), ends)[: len(SIZES)] for a in (d, x))
    right = np.stack([a.T @ b for a, b in zip(d, x, strict=True)])
    assert np.linalg.norm(made - right) < 2**-8 * np.linalg.norm(right)


def test_sum_rows():
    """Rows without addends, with one, with as many as are loaded at a time, and with more."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((50, 192)), BF16).at[40:].set(jnp.nan)
    index = jnp.asarray(rng.permutation([0] * 5 + [1] + [3] * 10 + [4] * 24 + [6]).tolist() + [2] * 9, jnp.int32)
    ends = jnp.array([30, 41], jnp.int32)
    x = x.at[40].set(1)
    made = jax.jit(partial(sum_rows, rows=8, interpret=INTERPRETER))(x, index, ends)
    right = np.zeros((8, 192), np.float32)
    for i in range(41):
        right[index[i]] += np.asarray(x[i], np.float32)
    np.testing.assert_array_equal(np.asarray(made, np.float32), np.asarray(jnp.asarray(right, BF16), np.float32))
