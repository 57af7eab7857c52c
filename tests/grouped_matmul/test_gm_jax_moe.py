"""The mixture-of-experts layer of JAX, against a loop over its experts in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.jax import MoEParams, init_moe, moe
from shared import assert_refused
from shared_jax import assert_same, quick_compilation  # noqa: F401

H, F, E, S, T = 12, 8, 6, 5, 30
PARAMS = init_moe(jax.random.key(0), H, F, E, S)
X = jax.random.normal(jax.random.key(1), (2, T // 2, H))


def looped(params, x, top_k, norm_topk):
    """Every expert for every token, with weights of 0 for those that aren't its own."""
    x = x.reshape(-1, H)
    probs = jax.nn.softmax(x @ params.router)
    chosen = probs >= jnp.sort(probs)[:, E - top_k, None]
    weight = jnp.where(chosen, probs, 0)
    weight = weight / weight.sum(1, keepdims=True) if norm_topk else weight

    def swiglu(x, gate_up, down):
        y = x @ gate_up
        return (jax.nn.silu(y[:, : y.shape[1] // 2]) * y[:, y.shape[1] // 2 :]) @ down

    y = sum(weight[:, e, None] * swiglu(x, params.gate_up[e], params.down[e]) for e in range(E))
    y = y + swiglu(x, params.shared_gate_up, params.shared_down)
    fraction = jax.lax.stop_gradient(chosen.sum(0) / chosen.sum())
    return y.reshape(2, T // 2, H), (chosen.sum(0), fraction, probs.mean(0), E * (fraction * probs.mean(0)).sum())


@pytest.mark.parametrize(("top_k", "norm_topk"), [(2, True), (3, False)])
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
    y, stats = moe(params, jnp.zeros((0, H), jnp.bfloat16), top_k=1)
    assert (y.shape, y.dtype) == ((0, H), jnp.bfloat16)
    assert not any(np.asarray(a).any() for a in stats)


def changed(**arrays):
    return {"params": PARAMS._replace(**arrays)}


WRONG = {
    "params are a dict": ({"params": PARAMS._asdict()}, TypeError, "params must be MoEParams, as of init_moe; got dict"),
    "down is None": (changed(down=None), TypeError, "down must be a jax.Array or numpy.ndarray; got NoneType"),
    "half a shared expert": (changed(shared_down=None), TypeError, "one of shared_gate_up and shared_down; pass both or neither"),
    "x is a list": ({"x": [[1.0] * H]}, TypeError, "x must be a jax.Array or numpy.ndarray; got list"),
    "x is narrow": ({"x": X[..., 1:]}, ValueError, "x has shape [2, 15, 11] but router has H=12; x must be [..., H]"),
    "top_k is 0": ({"top_k": 0}, ValueError, "top_k must be in [1, E], E=6; got 0"),
    "top_k is 7": ({"top_k": 7}, ValueError, "top_k must be in [1, E], E=6; got 7"),
    "top_k is a float": ({"top_k": 2.0}, TypeError, "top_k must be an int; got float"),
    "norm_topk is 1": ({"norm_topk": 1}, TypeError, "norm_topk must be True or False; got int"),
    "router is 1-d": (changed(router=PARAMS.router[0]), ValueError, "router must be [H, E] and down [E, F, H]; got shapes [6] and [6, 8, 12]"),
    "gate_up is turned": (changed(gate_up=PARAMS.gate_up.swapaxes(1, 2)), ValueError, "gate_up has shape [6, 16, 12]; with these params it must be [6, 12, 16]"),
    "shared_gate_up is narrow": (changed(shared_gate_up=PARAMS.shared_gate_up[:, 1:]), ValueError, "shared_gate_up has shape [12, 9]; with these params it must be [12, 10]"),
    "dtypes differ": ({"x": X.astype("bfloat16")}, TypeError, "x is bfloat16 but gate_up is float32; cast one of them"),
    "backend": ({"backend": "cuda"}, ValueError, "backend must be one of 'auto', 'mosaic_gpu', 'xla'; got 'cuda'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    changes, kind, message = WRONG[name]
    arguments = {"params": PARAMS, "x": X, "top_k": 2} | changes
    op = "grouped_matmul" if name == "backend" else "moe"
    assert_refused(op, lambda: moe(**arguments), kind, message)


@pytest.mark.parametrize(
    ("sizes", "kind", "message"),
    [
        ((0, F, E), ValueError, "hidden must be 1 or more; got 0"),
        ((H, F, 2.0), TypeError, "num_experts must be an int; got float"),
        ((H, F, E, -1), ValueError, "shared_intermediate must be 0 or more; got -1"),
    ],
)
def test_init_errors(sizes, kind, message):
    assert_refused("init_moe", lambda: init_moe(jax.random.key(0), *sizes), kind, message)


def test_params_are_a_pytree():
    assert isinstance(jax.tree.map(jnp.zeros_like, PARAMS), MoEParams)
