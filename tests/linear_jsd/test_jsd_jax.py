"""The JAX ops: against the oracle, special values, transformations, memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.core.sizes import MIB
from onchip.ops.linear_jsd import spec
from onchip.ops.linear_jsd.cases import CHECK_CASES
from onchip.ops.linear_jsd.checks import check_case
from onchip.ops.linear_jsd.jax_op import jsd, linear_jsd
from onchip.ops.linear_jsd.spec import Head, Problem, TopK
from shared import assert_within_bounds
from shared_jax import quick_compilation  # noqa: F401

SMALL = [c for c in CHECK_CASES if c.vocab < 10_000]
TOPK = [c for c in SMALL if c.teacher not in ("hidden", "logits") and c not in SMALL[::3]]
BETAS = (0.0, 0.3, 1.0)
betas = pytest.mark.parametrize("beta", BETAS)


def problem(dtype="float32"):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in ((2, 6, 16), (70, 16), (2, 6, 24), (70, 24))]


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-6)


def assert_right(*case, **how):
    assert_within_bounds(check_case(*case, **how))


# Compiling takes nearly all of the time: `onchip check` runs all combinations.
@pytest.mark.parametrize("case", [*SMALL[::6], *TOPK, SMALL[-1]], ids=str)
def test_check_cases(case):
    assert_right(case, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [SMALL[-1]], ids=str)
def test_check_cases_in_16_bits(case, dtype):
    assert_right(case, dtype)


def test_the_other_layout():
    assert_right(CHECK_CASES[-1], "float32", weight_layout="hv")


@pytest.mark.parametrize("beta", [0.25, 0.5, 0.75])
def test_known_values(beta):
    z, u = jnp.log(jnp.array([[0.9, 0.1]])), jnp.log(jnp.array([[0.2, 0.8]]))
    expected = {0.25: 0.082878, 0.5: 0.089845, 0.75: 0.060931}[beta]
    np.testing.assert_allclose(jax.grad(jsd)(z, u, beta=beta), [[expected, -expected]], atol=2e-6)


@betas
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_models_cost_exactly_nothing(dtype, beta):
    h, w, _, _ = problem(dtype)
    op = partial(linear_jsd, beta=beta, temperature=0.7, teacher_grad=True)
    assert all(not x.any() for x in jax.tree.leaves(jax.value_and_grad(op, (0, 1, 2, 3))(h, w, h, w)))


@betas
def test_underflow_and_infinities(beta):
    z = jnp.array([[0.0, -500.0, -600.0, -jnp.inf], [0.0, -1e4, 1e4, -jnp.inf]])
    u = jnp.array([[0.0, -600.0, -500.0, -jnp.inf], [0.0, -1e4, 1e4, -jnp.inf]])
    out = jax.value_and_grad(partial(jsd, beta=beta, teacher_grad=True), (0, 1))(z, u)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(out))
    assert out[0] >= 0


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_leaks_from_ignored_tokens(reduction):
    h, w, x, v = problem()
    y = jnp.zeros((2, 6), jnp.int32).at[0, 3].set(-100)
    weight = jnp.ones((2, 6)).at[0, 3].set(jnp.nan)

    def run(h, x, **more):
        op = partial(linear_jsd, labels=y, reduction=reduction, teacher_grad=True, **more)
        loss, pullback = jax.vjp(op, h, w, x, v)
        upstream = weight if reduction == "none" else jnp.ones(())
        return loss, pullback(upstream)

    made = run(h.at[0, 3].set(jnp.nan), x.at[0, 3].set(jnp.inf), token_weight=weight)
    assert_same(made, run(h, x))
    assert not made[1][0][0, 3].any()


def test_what_is_out_of_range_gives_nan_for_its_token():
    h, w, x, v = problem()
    y = jnp.zeros((2, 6), jnp.int32).at[1, 2].set(70)
    loss = linear_jsd(h, w, x, v, labels=y, reduction="none")
    assert np.argwhere(np.isnan(loss)).tolist() == [[1, 2]]
    topk = TopK(jnp.zeros((2, 6, 1), int).at[0, 4].set(-1), jnp.full((2, 6, 1), -1.0), "log_probs", "tail")
    loss = linear_jsd(h, w, teacher_topk=topk, reduction="none")
    assert np.argwhere(np.isnan(loss)).tolist() == [[0, 4]]


def test_no_tokens_and_all_ignored():
    h, w, x, v = problem()
    for n, y in ((0, None), (6, jnp.full((2, 6), -100))):
        out = jax.value_and_grad(linear_jsd, (0, 1))(h[:, :n], w, x[:, :n], v, labels=y)
        assert all(not g.any() for g in jax.tree.leaves(out))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunks_change_nothing(reduction, monkeypatch):
    h, w, x, v = problem()

    def run():
        jax.clear_caches()
        f = partial(linear_jsd, reduction=reduction, temperature=2.0, teacher_grad=True)
        return jax.value_and_grad(lambda *a: f(*a).sum(), (0, 1, 2, 3))(h, w, x, v)

    whole = run()
    monkeypatch.setattr(spec, "plan", lambda *_: 5)
    assert_same(run(), whole)
    jax.clear_caches()


def test_vmap_scan_checkpoint_and_integer_arguments():
    h, w, x, v = problem()
    y = jnp.zeros((2, 6), jnp.int32)
    each = [jax.value_and_grad(linear_jsd, 1)(h[i], w, x[i], v, labels=y[i]) for i in (0, 1)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *each)
    step = lambda h, x, y: jax.value_and_grad(linear_jsd, 1)(h, w, x, v, labels=y)  # noqa: E731
    assert_same(jax.vmap(step)(h, x, y), stacked)
    assert_same(jax.lax.scan(lambda c, a: (c, step(*a)), 0, (h, x, y))[1], stacked)
    f = lambda w: linear_jsd(h, w, x, v)  # noqa: E731
    assert_same(jax.grad(jax.checkpoint(f))(w), jax.grad(f)(w))
    pullback = jax.vjp(lambda w, y: linear_jsd(h, w, x, v, labels=y), w, y)[1]
    assert pullback(jnp.ones(()))[1].dtype == jax.dtypes.float0


def test_the_teacher_is_a_constant_unless_asked():
    assert not any(g.any() for g in jax.grad(linear_jsd, (2, 3))(*problem()))


def test_differentiated_twice_or_forward_raises():
    h, w, x, v = problem()
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        jax.grad(lambda w: jax.grad(linear_jsd, 1)(h, w, x, v).sum())(w)
    with pytest.raises(TypeError):
        jax.jvp(lambda w: linear_jsd(h, w, x, v), (w,), (w,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_formula_holds(dtype):
    tokens, size, vocab = 512, 64, 8192
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((tokens, size), (vocab, size)) * 2]
    p = Problem(
        tokens, vocab, Head(size, vocab, dtype, dtype, dtype, True, True), Head(size, vocab, dtype, dtype, dtype),
        stash=True,
    )  # fmt: skip
    budget = spec.jax_scratch_bytes(p, spec.SMALLEST) + 16 * MIB
    step = jax.value_and_grad(partial(linear_jsd, scratch_bytes=budget, temperature=2.0), (0, 1))
    used = jax.jit(step).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    assert used <= spec.jax_scratch_bytes(p, spec.plan(p, budget, scratch_bytes=spec.jax_scratch_bytes))
