"""The mixture-of-experts layer of JAX, against a loop over its experts in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.jax import MoEParams, init_moe, moe
from shared_jax import assert_same

H, F, E, S, T = 12, 8, 6, 5, 30
PARAMS = init_moe(jax.random.key(0), H, F, E, S)
X = jax.random.normal(jax.random.key(1), (2, T // 2, H))


def looped(params, x, top_k, norm_topk):
    """Every expert for every token, with weights of 0 for those that aren't its own."""
    x = x.reshape(-1, H)
    probs = jax.nn.softmax(x @ params.router.T)
    chosen = probs >= jnp.sort(probs)[:, E - top_k, None]
    weight = jnp.where(chosen, probs, 0)
    weight = weight / weight.sum(1, keepdims=True) if norm_topk else weight

    def swiglu(x, gate_up, down):
        y = x @ gate_up.T
        return (jax.nn.silu(y[:, : y.shape[1] // 2]) * y[:, y.shape[1] // 2 :]) @ down.T

    y = sum(weight[:, e, None] * swiglu(x, params.gate_up[e], params.down[e]) for e in range(E))
    y = y + swiglu(x, params.shared_gate_up, params.shared_down)
    fraction = jax.lax.stop_gradient(chosen.sum(0) / chosen.sum())
    return y.reshape(2, T // 2, H), (chosen.sum(0), fraction, probs.mean(0), E * (fraction * probs.mean(0)).sum())


@pytest.mark.parametrize(("top_k", "norm_topk"), [(2, True), pytest.param(3, False, marks=pytest.mark.slow)])
def test_loop_over_experts(top_k, norm_topk):
    def loss(layer, params, x):
        y, stats = layer(params, x, top_k=top_k, norm_topk=norm_topk)
        return jnp.square(y).mean() + 0.1 * stats[3], (y, tuple(stats))

    def run(layer, params, x):
        return jax.jit(jax.value_and_grad(lambda *a: loss(layer, *a), (0, 1), has_aux=True))(params, x)

    made = run(moe, PARAMS, X)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), "float64"), (PARAMS, X))
        expected = run(looped, *wide)
    assert_same(made, expected)
    assert made[0][1][1][0].sum() == T * top_k


def test_no_tokens_and_no_shared_expert():
    params = init_moe(jax.random.key(0), H, F, E, dtype=jnp.bfloat16)
    assert params.shared_down is None
    assert params.router.dtype == jnp.float32
    y, stats = jax.jit(lambda x: moe(params, x, top_k=1))(jnp.zeros((0, H), jnp.bfloat16))
    assert (y.shape, y.dtype) == ((0, H), jnp.bfloat16)
    assert not any(np.asarray(a).any() for a in stats)


def test_params_are_a_pytree():
    assert isinstance(jax.tree.map(jnp.zeros_like, PARAMS), MoEParams)
