"""The mixture-of-experts layer of JAX, against a loop over its experts in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.jax import MoEParams, init_moe, moe, update_correction_bias
from shared_jax import assert_same

H, F, E, S, T = 12, 8, 6, 5, 30
PARAMS = init_moe(jax.random.key(0), H, F, E, S)
X = jax.random.normal(jax.random.key(1), (2, T // 2, H))


def chosen_by(scores, top_k, bias, n_group, topk_group):
    """[T, E] bool, token by token in NumPy."""
    chosen = np.zeros(scores.shape, bool)
    for s, mine in zip(np.asarray(scores, np.float64) + bias, chosen, strict=True):
        groups = sorted(np.split(np.arange(E), n_group), key=lambda g: -np.sort(s[g])[-2:].sum())
        allowed = np.concatenate(groups[:topk_group])
        mine[allowed[np.argsort(-s[allowed])[:top_k]]] = True
    return chosen


def looped(params, x, top_k, norm_topk=True, scoring="softmax", scaling_factor=1.0, correction_bias=0.0, n_group=1,
           topk_group=1):  # fmt: skip
    """Every expert for every token, with weights of 0 for those that aren't its own."""
    x = x.reshape(-1, H)
    biases = (jnp.zeros(E), jnp.zeros((E, 2 * F)), jnp.zeros((E, H))) if params.router_bias is None else params[5:]
    logits = x @ params.router.T + biases[0][None]
    scores = jax.nn.softmax(logits) if scoring == "softmax" else jax.nn.sigmoid(logits)
    choose = partial(chosen_by, top_k=top_k, bias=correction_bias, n_group=n_group, topk_group=topk_group)
    shape = jax.ShapeDtypeStruct(scores.shape, bool)
    chosen = jax.pure_callback(choose, shape, jax.lax.stop_gradient(scores))
    weight = jnp.where(chosen, scores, 0)
    weight = scaling_factor * (weight / weight.sum(1, keepdims=True) if norm_topk else weight)
    probs = scores / scores.sum(1, keepdims=True)

    def swiglu(x, gate_up, down, bias=0, down_bias=0):
        y = x @ gate_up.T + bias
        return (jax.nn.silu(y[:, : y.shape[1] // 2]) * y[:, y.shape[1] // 2 :]) @ down.T + down_bias

    of = zip(params.gate_up, params.down, *(b[:, None] for b in biases[1:]), strict=True)
    y = sum(weight[:, e, None] * swiglu(x, *expert) for e, expert in enumerate(of))
    y = y + swiglu(x, params.shared_gate_up, params.shared_down)
    fraction = jax.lax.stop_gradient(chosen.sum(0) / chosen.sum())
    aux_loss, z_loss = E * (fraction * probs.mean(0)).sum(), jnp.square(jnp.log(jnp.exp(logits).sum(1))).mean()
    return y.reshape(2, T // 2, H), (chosen.sum(0), fraction, probs.mean(0), aux_loss, z_loss)


CORRECTION = np.linspace(-0.2, 0.2, E, dtype=np.float32)
SIGMOID = {"scoring": "sigmoid", "scaling_factor": 2.5}


@pytest.mark.parametrize(
    ("bias", "options"),
    [
        (False, {"top_k": 2}),
        (True, {"top_k": 2, **SIGMOID}),
        (False, {"top_k": 3, "n_group": 3, "topk_group": 2, "correction_bias": CORRECTION, **SIGMOID}),
        pytest.param(False, {"top_k": 3, "norm_topk": False}, marks=pytest.mark.slow),
        pytest.param(True, {"top_k": 3, "norm_topk": False, **SIGMOID}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_loop_over_experts(bias, options):
    def loss(layer, params, x):
        y, stats = layer(params, x, **options)
        return jnp.square(y).mean() + 0.1 * stats[3] + 0.01 * stats[4], (y, tuple(stats))

    def run(layer, params, x):
        return jax.jit(jax.value_and_grad(lambda *a: loss(layer, *a), (0, 1), has_aux=True))(params, x)

    params = PARAMS
    if bias:
        params = init_moe(jax.random.key(0), H, F, E, S, bias=True)
        assert not params.down_bias.any()
        drawn = [jax.random.normal(jax.random.key(i), a.shape) for i, a in enumerate(params[5:])]
        params = params._make([*params[:5], *drawn])
    made = run(moe, params, X)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), "float64"), (params, X))
        expected = run(looped, *wide)
    assert_same(made, expected)
    assert made[0][1][1][0].sum() == T * options["top_k"]


def test_no_tokens_and_no_shared_expert():
    params = init_moe(jax.random.key(0), H, F, E, dtype=jnp.bfloat16)
    assert params.shared_down is None
    assert params.router.dtype == jnp.float32
    y, stats = jax.jit(lambda x: moe(params, x, top_k=1, n_group=3))(jnp.zeros((0, H), jnp.bfloat16))
    assert (y.shape, y.dtype) == ((0, H), jnp.bfloat16)
    assert not any(np.asarray(a).any() for a in stats)


def test_params_are_a_pytree():
    assert isinstance(jax.tree.map(jnp.zeros_like, PARAMS), MoEParams)


def test_a_correction_bias_balances_the_experts():
    """Under jit, from a router that sends all tokens to the same experts; it gets no gradient."""
    params = init_moe(jax.random.key(0), H, F, E, bias=True)
    params = params._replace(router=0.1 * params.router, router_bias=jnp.linspace(-1, 1, E))

    @jax.jit
    def step(bias):
        counts = moe(params, X, top_k=2, scoring="sigmoid", correction_bias=bias)[1].counts
        return update_correction_bias(bias, counts, 0.01), counts

    bias, counts = jnp.zeros(E), []
    for _ in range(200):
        bias, now = step(bias)
        counts.append(now)
    assert counts[0][0] == 0
    assert np.abs(np.stack(counts[-60:]).mean(0) - 2 * T / E).max() < T / E
    value = lambda bias: moe(params, X, top_k=2, scoring="sigmoid", correction_bias=bias)[0].sum()  # noqa: E731
    assert not jax.grad(value)(bias).any()
