"""grouped_matmul in JAX: the oracle's numbers, rows of other groups, wrong numbers, and JAX's transformations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.groups.xla import groups
from onchip.jax import grouped_matmul
from onchip.ops.grouped_matmul import reference
from onchip.ops.grouped_matmul.cases import CHECK_CASES
from onchip.ops.grouped_matmul.checks import CHECKER
from shared import assert_within_bounds
from shared_jax import assert_same

FEW = {
    "many groups": ("bfloat16", "gkn"),
    "one number": ("float16", "gnk"),
    "everything": ("float32", "gkn"),
}
SIZES = jnp.array([10, 0, 3, 20, 2])
T, K, N, M, R = 40, 12, 16, 9, 11


def problem(seed=0, **shapes):
    rng = np.random.default_rng(seed)
    shapes = {"x": (T, K), "weight": (5, N, K), "bias": (5, N), "row_scale": (T,)} | shapes
    return {name: jnp.float32(rng.standard_normal(shape)) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("case", "dtype", "layout"),
    [pytest.param(case, *FEW[case.name], id=case.name) for case in CHECK_CASES if case.name in FEW]
    + [
        pytest.param(case, dtype, layout, id=f"{case}-{layout}", marks=pytest.mark.slow)
        for case in CHECK_CASES
        for dtype, layout in (("float32", "gnk"), ("bfloat16", "gkn"), ("float16", "gnk"))
        if FEW.get(case.name) != (dtype, layout)
    ],
)
def test_cases(case, dtype, layout):
    assert_within_bounds(CHECKER.check_case(case, dtype, "cpu", weight_layout=layout))


def test_float64_interleaved_offsets():
    """Its own precision, of NumPy's arrays, also with 64-bit integers."""
    rng = np.random.default_rng(0)
    x, w, b, s, g = (rng.standard_normal(shape) for shape in ((7, 3), (3, 4, 3), (3, 4), (9,), (5, 2)))
    rows, to = rng.integers(0, 7, 9), rng.integers(0, 5, 9)
    more = {"group_offsets": np.array([2, 2, 8]), "rows": rows, "scatter_rows": to, "num_rows": 5}
    more |= {"activation": "swiglu", "gate_up": "interleaved"}
    with jax.enable_x64(True):
        run = jax.jit(lambda x, w, b, s: grouped_matmul(x, w, bias=b, row_scale=s, **more))
        out, pullback = jax.vjp(run, x, w, b, s)
        made = out, *pullback(g)
    for a, right in zip(made, reference.grouped_matmul(x, w, bias=b, row_scale=s, grad_out=g, **more), strict=True):
        assert a.dtype == jnp.float64
        np.testing.assert_allclose(a, right, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------ rows and their groups


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"activation": "swiglu"}, marks=pytest.mark.slow)], ids=["plain", "swiglu"]
)
def test_rows_without_a_group_stay_out(options):
    """NaN in all of their places; a group's infinities stay its own."""
    p = problem()
    g = jnp.ones((T, N // 2 if options else N)).at[35:].set(jnp.nan)
    p["x"], p["row_scale"] = (p[name].at[35:].set(jnp.nan) for name in ("x", "row_scale"))
    p["x"] = p["x"].at[12, 3].set(jnp.inf)
    if not options:
        del p["bias"], p["row_scale"]

    @jax.jit
    def step(p, g):
        out, pullback = jax.vjp(lambda p: grouped_matmul(group_sizes=SIZES, **p, **options), p)
        return out, *pullback(g)

    out, grads = jax.tree.map(np.asarray, step(p, g))
    for a in (out, grads["x"], grads.get("row_scale", out)):
        assert not a[35:].any()
        assert np.isfinite(a[:10]).all()
        assert np.isfinite(a[13:]).all()
    assert not np.isfinite(out[12]).all()
    for a in (grads["weight"], grads.get("bias", grads["weight"])):
        assert np.isfinite(a[[0, 3, 4]]).all()
        assert not a[1].any()
    assert not np.isfinite(grads["weight"][2]).all()


# What is given, the first group that is wrong and where it begins, and what is said.
WRONG = {
    "too many": ({"group_sizes": [10, 0, 31, 0, 0]}, 2, 10, "the sum of group_sizes up to 2 is 41, more than the T=40"),
    "beyond int32": (
        {"group_sizes": [3, 2**31 - 1, 2**31 - 1, 3, 0]},
        1,
        3,
        "sum of group_sizes up to 1 is 2147483650",
    ),
    "negative": ({"group_sizes": [10, -1, 0, 0, 0]}, 1, 10, "group_sizes[1] is -1; sizes must be 0 or more"),
    "first offset": ({"group_offsets": [-1, 2, 3, 4, 5]}, 0, 0, "group_offsets[0] is -1"),
    "descending": ({"group_offsets": [3, 2, 3, 4, 5]}, 1, 3, "group_offsets[1] is 2; offsets must be 0 or more and"),
    "last offset": ({"group_offsets": [3, 3, 3, 4, 41]}, 4, 4, "the value of group_offsets at 4 is 41"),
    "rows": ({"rows": [0] * 34 + [-1] + [7] * 5}, 0, 0, "rows[34] is -1 but x has 9 rows"),
    "scatter_rows": ({"scatter_rows": [3] * 7 + [R] + [3] * 32}, 0, 0, "scatter_rows[7] is 11 but num_rows is 11"),
}


@partial(jax.jit, static_argnames="num_rows")
def step(p, given, num_rows):
    out, pullback = jax.vjp(lambda p: grouped_matmul(**p, **given, num_rows=num_rows), p)
    return out, *pullback(jnp.ones_like(out))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_numbers(name):
    """They raise where they are known, and make NaN of what they are of where they are traced; in sums, of all."""
    given, first, begin, said = WRONG[name]
    given = {key: np.array(values) for key, values in given.items()}
    p, num_rows = problem(), None
    sums = "group_sizes" not in given
    if sums:
        given = {"group_offsets": np.array([3, 3, 20, 30, T]), "rows": np.zeros(T, int)} | given
        given = {"scatter_rows": np.arange(T) % R} | given
        p, num_rows = problem(x=(M, K)), R
    with pytest.raises(ValueError, match="grouped_matmul: ") as caught:
        grouped_matmul(**p, **given, num_rows=num_rows)
    assert said in str(caught.value)
    out, grads = jax.tree.map(np.asarray, step(p, given, num_rows))
    for a, keeps in (
        (out, 0 if sums else begin),
        (grads["x"], 0 if sums else begin),
        (grads["row_scale"], begin),
        (grads["weight"], first),
        (grads["bias"], first),
    ):
        assert np.isfinite(a[:keeps]).all()
        assert np.isnan(a[keeps:]).all()
    if not sums:
        right = jnp.where(jnp.arange(5) < first, given["group_sizes"], 0)
        np.testing.assert_array_equal(out[:begin], grouped_matmul(**p, group_sizes=right)[:begin])


def test_wrong_indices_past_the_last_group_are_not_read():
    rows = np.append(np.arange(35), [10**9] * 5)
    p = problem()
    run = jax.jit(partial(grouped_matmul, group_sizes=SIZES), static_argnames="num_rows")
    np.testing.assert_array_equal(run(**p, rows=rows, scatter_rows=rows, num_rows=T), run(**p))
    with pytest.raises(ValueError, match=r"rows\[34\] is 99 but x has 40 rows"):
        grouped_matmul(**p, group_sizes=SIZES, rows=np.where(np.arange(T) == 34, 99, rows))


def test_sums_of_many_blocks():
    """Group sums whose groups begin within blocks, and rows that add up one destination's addends in order."""
    rng = np.random.default_rng(0)
    sizes = np.array([0, 5, 300, 0, 128, 1])
    ends = jnp.asarray(np.cumsum(sizes), jnp.int32)
    x = rng.standard_normal((450, 3)).astype(np.float32)
    x[434:] = np.nan
    made = jax.jit(groups.group_sums)(x, ends)
    expected = [part.astype(np.float64).sum(0) for part in np.split(x, np.asarray(ends))[:-1]]
    np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-4)
    index = rng.integers(0, 7, 450).astype(np.int32)
    index[index == 3] = 2
    total = np.zeros((7, 3), np.float32)
    for i in range(434):
        total[index[i]] += x[i]
    np.testing.assert_array_equal(jax.jit(groups.sum_rows, static_argnums=3)(x, index, ends, 7), total)


def test_no_array_of_groups_by_rows():
    t, g, k = 1024, 64, 64
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((t, k), (g, k, k))]
    sizes = jax.ShapeDtypeStruct((g,), "int32")

    def step(x, w, sizes):
        out, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
        return pullback(out)

    memory = jax.jit(step).lower(*shapes, sizes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * 4 * t * k < 4 * g * t * k


# ------------------------------------------------------------------------------------------------------ transformations


def test_scan_and_checkpoint():
    """Layers whose routing differs, sizes being computed inside: one scan of checkpointed layers, or one by one."""
    p = problem(weight=(3, 5, K, K))
    sizes = jnp.stack([SIZES, SIZES[::-1], jnp.array([0, 40, 0, 0, 0])])

    def layer(x, given):
        w, sizes = given
        return x + grouped_matmul(x, w, group_offsets=jnp.cumsum(sizes), row_scale=p["row_scale"])

    def scanned(x, w):
        checkpointed = jax.checkpoint(layer)
        return jnp.square(jax.lax.scan(lambda x, given: (checkpointed(x, given), None), x, (w, sizes))[0]).sum()

    def one_by_one(x, w):
        for i in range(3):
            x = layer(x, (w[i], sizes[i]))
        return jnp.square(x).sum()

    run = [jax.jit(jax.value_and_grad(f, (0, 1))) for f in (scanned, one_by_one)]
    assert_same(run[0](p["x"], p["weight"]), run[1](p["x"], p["weight"]))


def for_each():
    """Three problems with one weight, their sizes, and a loss of one."""
    sizes = jnp.stack([SIZES, SIZES[::-1], SIZES])
    return problem(x=(3, T, K)), sizes, lambda x, w, sizes: jnp.square(grouped_matmul(x, w, sizes)).sum()


@pytest.mark.parametrize("order", ["vmap", "grad of vmap", "vmap of grad", "vmap of the weight"])
def test_vmap_is_refused(order):
    p, sizes, loss = for_each()
    weights = jnp.stack([p["weight"]] * 3)
    calls = {
        "vmap": lambda: jax.vmap(loss, (0, None, 0))(p["x"], p["weight"], sizes),
        "grad of vmap": lambda: jax.grad(lambda w: jax.vmap(loss, (0, None, 0))(p["x"], w, sizes).sum())(p["weight"]),
        "vmap of grad": lambda: jax.jit(jax.vmap(jax.grad(loss), (0, None, 0)))(p["x"], p["weight"], sizes),
        "vmap of the weight": lambda: jax.vmap(loss, (None, 0, None))(p["x"][0], weights, SIZES),
    }
    with pytest.raises(
        NotImplementedError, match=r"grouped_matmul: vmap is not supported: its 3 elements .*jax\.lax\.map"
    ):
        calls[order]()


def test_what_the_error_of_vmap_names_works():
    p, sizes, loss = for_each()
    mapped = jax.lax.map(lambda a: jax.grad(loss, (0, 1))(a[0], p["weight"], a[1]), (p["x"], sizes))
    for i in range(3):
        assert_same([made[i] for made in mapped], jax.grad(loss, (0, 1))(p["x"][i], p["weight"], sizes[i]))


def test_derivatives_of_first_order_by_reverse_mode_only():
    p = problem()
    f = lambda x: grouped_matmul(x, p["weight"], SIZES).sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="grouped_matmul: differentiated twice"):
        jax.grad(lambda x: jnp.square(jax.grad(f)(x)).sum())(p["x"])
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(f, (p["x"],), (p["x"],))


def test_only_what_is_needed_is_made():
    """A frozen weight's gradient is never computed, and what needs y alone keeps it."""
    p = problem()
    text = jax.jit(jax.grad(lambda x: grouped_matmul(x, p["weight"], SIZES).sum())).lower(p["x"]).as_text()
    assert f"tensor<5x{N}x{K}xf32>, tensor<{N}x{K}xf32>" not in text
    kept = jax.vjp(lambda x, w: grouped_matmul(x, w, SIZES), p["x"], p["weight"])[1]
    assert {a.shape for a in jax.tree.leaves(kept)} <= {(T, K), (5, N, K), (5,), ()}


def test_ends_of_sizes_whose_sum_wraps_around():
    rows = 2**31 - 2
    for sizes in (
        [2**30, 2**30, 2**30, 2**30, 3],
        [7, -1, 2**31 - 1, 2**31 - 1, 4],
        [rows, 0, 1, 2**31 - 1, 2**31 - 1],
    ):
        ends, right = groups.ends_of_sizes(jnp.array(sizes, jnp.int32), rows)
        fits = np.cumsum(np.where(np.array(sizes) < 0, 2**31, sizes), dtype=np.int64) <= rows
        expected = np.logical_and.accumulate(fits)
        np.testing.assert_array_equal(right, expected)
        np.testing.assert_array_equal(ends, np.cumsum(np.where(expected, sizes, 0)))
