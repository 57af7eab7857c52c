"""The JAX ops: against the oracle, special values, transformations, memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.core.sizes import MIB
from onchip.ops.linear_jsd import memory
from onchip.ops.linear_jsd.checks import CHECK_CASES
from onchip.ops.linear_jsd.jax_op import jsd, linear_jsd
from onchip.ops.linear_jsd.memory import Head, JsdProblem

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


@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=pytest.mark.slow)])
def test_chunks_change_nothing(reduction, monkeypatch):
    h, w, x, v = problem()

    def run():
        jax.clear_caches()
        f = partial(linear_jsd, reduction=reduction, temperature=2.0, teacher_grad=True)
        return jax.value_and_grad(lambda *a: f(*a).sum(), (0, 1, 2, 3))(h, w, x, v)

    whole = run()
    monkeypatch.setattr(memory, "jax_plan", lambda *_: 5)
    assert_same(run(), whole)
    jax.clear_caches()


def test_the_teacher_is_a_constant_unless_asked():
    assert not any(g.any() for g in jax.grad(linear_jsd, (2, 3))(*problem()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_formula_holds(dtype):
    tokens, size, vocab = 512, 64, 8192
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((tokens, size), (vocab, size)) * 2]
    student, teacher = (Head(tokens, size, vocab, dtype, grad_hidden=g, grad_weight=g) for g in (True, False))
    p = JsdProblem(vocab, student, teacher, stash=True)
    budget = memory.JAX_PLANNER.least(p, "") + 16 * MIB
    step = jax.value_and_grad(partial(linear_jsd, scratch_bytes=budget, temperature=2.0), (0, 1))
    with jax.enable_x64(dtype == "float64"):
        used = jax.jit(step).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    assert used <= memory.JAX_PLANNER.scratch_bytes(p, memory.jax_plan(p, "", budget))
