"""The mixture-of-experts layer of JAX, against a loop over its experts in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from test_gm_moe import gradients
from test_gm_moe import looped as looped_in_torch

from onchip.jax import MoEParams, init_moe, moe, update_correction_bias
from onchip.torch import MoE
from shared_jax import assert_same

H, F, E, S, T = 12, 8, 6, 8, 30  # as of the layers in PyTorch
PARAMS = jax.jit(init_moe, static_argnums=(1, 2, 3, 4))(jax.random.key(0), H, F, E, S)  # compiled as one
X = jax.random.normal(jax.random.key(1), (2, T // 2, H))


def looped(params, x, correction_bias=None, **options):
    """What PyTorch's loop over the experts makes of these, in float64."""
    layer = MoE(
        H, F, E, num_shared=1, bias=True, correction_bias=correction_bias is not None, dtype=torch.float64, **options
    )
    mine = {name.removesuffix(".weight").replace(".", "_"): p for name, p in layer.named_parameters()}
    given = {name: torch.tensor(np.asarray(a, np.float64)) for name, a in params._asdict().items() if a is not None}
    with torch.no_grad():
        for name, p in mine.items():
            p.copy_(given.get(name, torch.zeros(())))
        if correction_bias is not None:
            layer.e_score_correction_bias.copy_(torch.tensor(correction_bias))
    made = gradients(layer, torch.tensor(np.asarray(x, np.float64)), lambda x: looped_in_torch(layer, x))
    grads = MoEParams(**{name: mine[name].grad for name in given})
    return [*list(made.values())[:6], grads, made["x"]]


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
    @jax.jit
    def run(params, x):
        def loss(params, x):
            y, stats = moe(params, x, **options)
            value = (
                jnp.square(y * jnp.arange(1.0, 1 + H)[None, None]).mean() + 0.1 * stats.aux_loss + 0.01 * stats.z_loss
            )
            return value, (y.reshape(-1, H), *stats)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)

    params = PARAMS
    if bias:
        params = init_moe(jax.random.key(0), H, F, E, S, bias=True)
        assert not params.down_bias.any()
        drawn = [jax.random.normal(jax.random.key(i), a.shape) for i, a in enumerate(params[5:])]
        params = params._make([*params[:5], *drawn])
    (_, outputs), grads = run(params, X)
    expected = jax.tree.map(lambda a: a.detach().numpy(), looped(params, X, **options))
    assert_same([*outputs, *grads], expected)
    assert outputs[1].sum() == T * options["top_k"]


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
