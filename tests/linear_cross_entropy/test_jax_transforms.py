"""The JAX op under JAX's transformations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common_jax import STRATEGIES, assert_same, plain, small_problem

from onchip.frontend.jax_call import IGNORED
from onchip.jax import cross_entropy, linear_cross_entropy
from onchip.vocab.chunks import ChunkConfig
from onchip.vocab.xla.loss import LossCall
from onchip.vocab.xla.tiles import Transform, Wanted, XlaLogits, XlaProjection, select_tokens
from onchip.vocab.xla.walk import statistics

both_strategies = pytest.mark.parametrize("strategy", STRATEGIES)


@pytest.mark.parametrize(("order", "strategy"), [("vmap of grad", "recompute"), ("grad of vmap", "stash")])
def test_vmap_over_weights(order, strategy):
    h, w, y, _ = small_problem()
    y = y.at[0, 2:9].set(-100)  # the examples differ in how many tokens count
    w = jnp.stack([w, 2 * w])

    def run(op):
        if order == "vmap of grad":
            return jax.vmap(jax.grad(op, (0, 1)))(h, w, y)
        return jax.grad(lambda h, w: (jax.vmap(op)(h, w, y) * jnp.array([1.0, 3.0])).sum(), (0, 1))(h, w)

    assert_same(run(partial(linear_cross_entropy, strategy=strategy)), run(plain))


def test_vmap_over_token_temperatures():
    h, w, y, _ = small_problem()
    tau = jnp.linspace(0.5, 2, 24).reshape(2, 12)
    one = jax.jit(jax.grad(lambda h, y, t: linear_cross_entropy(h, w, y, temperature=t)))
    assert_same(jax.vmap(one)(h, y, tau), jnp.stack([one(h[i], y[i], tau[i]) for i in range(2)]))


@both_strategies
def test_statistics_get_no_gradient(strategy):
    h, w, y, _ = small_problem()
    op = partial(linear_cross_entropy, strategy=strategy, return_stats=True)
    assert not jax.grad(lambda h: sum(s.sum() for s in op(h, w, y)[1]))(h).any()
    logits = h @ w.T
    assert not jax.grad(lambda x: sum(s.sum() for s in cross_entropy(x, y, return_stats=True)[1]))(logits).any()


@both_strategies
def test_what_has_no_gradient_costs_no_product(strategy):
    h, w, y, _ = small_problem(tokens=64, hidden=256, vocab=512)

    def products(*arguments):
        step = jax.grad(lambda h, w: linear_cross_entropy(h, w, y, strategy=strategy), arguments)
        return str(jax.make_jaxpr(step)(h, w)).count("dot_general")

    logits = 1 if strategy == "stash" else 2
    assert products(0) == products(1) == logits + 1
    assert products(0, 1) == logits + 2
    assert str(jax.make_jaxpr(lambda h: linear_cross_entropy(h, w, y))(h)).count("dot_general") == 1


def test_half_ignored_is_half_the_chunks():
    """The loop's trip count, seen through what it wrote: rows behind the kept tokens keep their zeros."""
    h, w, y, _ = small_problem(tokens=40)
    ids = jnp.where(jnp.arange(40) % 2 == 0, IGNORED, y.reshape(-1))
    plan, projection = ChunkConfig("recompute", 5, 70), XlaProjection(h.reshape(40, -1), w)
    tokens = select_tokens(ids, plan.token_chunk)
    for source in (projection, XlaLogits.of(projection.hidden @ w.T)):
        call = LossCall(source, Transform(), tokens, tokens.take(ids, IGNORED)[:, None])
        stats = statistics(plan, Wanted(), call)
        assert (np.asarray(stats.lse) != 0).tolist() == [True] * 20 + [False] * 20
