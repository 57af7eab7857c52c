"""Flax's attention layers with onchip's attention, compared with themselves without it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from onchip.integrations.flax import attention_fn
from onchip.masks import Causal, Documents

x = jax.device_put(np.float32(np.random.default_rng(0).standard_normal((2, 3, 9, 16))))
IDS = jax.device_put(np.int32(np.arange(9) // 4))
PACKED = jax.device_put(np.float32(np.tril(np.equal.outer(IDS, IDS)))[None])


def near(made, right):
    """The value, and all gradients together: that of the keys' bias is 0 but for rounding."""
    (value, grads), (of_flax, right_grads) = made, right
    np.testing.assert_allclose(value, of_flax, rtol=1e-5)
    grads, right_grads = (np.concatenate([g.ravel() for g in jax.tree.leaves(x)]) for x in (grads, right_grads))
    assert np.linalg.norm(grads - right_grads) < 2e-6 * np.linalg.norm(right_grads)


def of_nnx(x, mask, **options):
    layer = nnx.MultiHeadAttention(num_heads=2, in_features=16, decode=False, rngs=nnx.Rngs(0), **options)
    graph, state = nnx.split(layer)
    return jax.jit(jax.value_and_grad(lambda state, x: (nnx.merge(graph, state)(x, mask=mask) ** 2).sum()))(state, x)


def of_linen(x, mask, **options):
    layer = linen.MultiHeadAttention(num_heads=2, **options)
    state = layer.init(jax.random.key(0), x)
    return jax.jit(jax.value_and_grad(lambda state, x: (layer.apply(state, x, mask=mask) ** 2).sum()))(state, x)


def test_as_flax():
    for layer, given, mask, ours in (
        (of_nnx, x, PACKED, PACKED),
        (of_linen, x[:, 0], PACKED, Documents(IDS) & Causal()),
    ):
        near(layer(given, ours, attention_fn=attention_fn), layer(given, mask))
    matrix = jnp.tri(9, k=2)  # of all sequences
    near(of_nnx(x, matrix, attention_fn=attention_fn), of_nnx(x, matrix))
    right = of_nnx(x, None)
    near(of_nnx(x, None, attention_fn=attention_fn), right)
    bf16 = of_nnx(x, None, attention_fn=attention_fn, dtype=jnp.bfloat16)[0]
    np.testing.assert_allclose(bf16, right[0], rtol=2e-2)


def test_options_and_what_is_wrong():
    capped = of_nnx(x, None, attention_fn=partial(attention_fn, softcap=0.01))[0]
    assert abs(capped - of_nnx(x, None)[0]) > 1e-4
    dropping = {"attention_fn": attention_fn, "dropout_rate": 0.5, "deterministic": False}
    layer = nnx.MultiHeadAttention(num_heads=2, in_features=16, decode=False, rngs=nnx.Rngs(0), **dropping)
    with pytest.raises(ValueError, match=r"there is no dropout here; got 0\.5"):
        layer(x)
    q = x.reshape(2, 3, 9, 2, 8)
    with pytest.raises(ValueError, match="bias must be None"):
        attention_fn(q, q, q, bias=q)
    with pytest.raises(ValueError, match="sow_weights must be False"):
        attention_fn(q, q, q, module=object())
    with pytest.raises(ValueError, match="the same for all heads"):
        attention_fn(q, q, q, mask=jnp.ones((2, 3, 2, 9, 9), bool))
