"""Flax's heads: logits, losses and gradients compared with the layers that they replace and with optax; and wrong
calls.
"""

import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import onchip.integrations.flax
from onchip.integrations.flax import DenseHead, EmbedHead, LinearHead
from shared_jax import assert_same

rng = np.random.default_rng(0)
h = jax.device_put(np.float32(rng.standard_normal((2, 12, 16))))
y = jnp.asarray(rng.integers(70, size=(2, 12)), jnp.int32)


def plain(logits, shift=False):
    """The mean of optax's losses."""
    logits, labels = (logits[:, :-1], y[:, 1:]) if shift else (logits, y)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def random_bias(key, shape, dtype):
    return jax.random.normal(key, shape, dtype)


def linear(kind, **options):
    layer = kind(16, 70, bias_init=random_bias, rngs=nnx.Rngs(0), **options)
    graph, state = nnx.split(layer)
    return state, lambda state, *given, **named: nnx.merge(graph, state)(*given, **named)


def embed(kind, **options):
    graph, state = nnx.split(kind(70, 16, rngs=nnx.Rngs(0), **options))
    return state, lambda state, *given, **named: nnx.merge(graph, state).attend(*given, **named)


def dense(kind, **options):
    layer = kind(70, bias_init=random_bias, **options)
    return layer.init(jax.random.key(0), h), layer.apply


HEADS = {
    "LinearHead": (linear, LinearHead, nnx.Linear),
    "EmbedHead": (embed, EmbedHead, nnx.Embed),
    "DenseHead": (dense, DenseHead, linen.Dense),
}


@pytest.mark.parametrize(("make", "ours", "theirs"), HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("shift", [False, True])
def test_head_is_the_layer_with_its_loss(make, ours, theirs, shift):
    """From the layer's own parameters: the same logits bit by bit, the loss and its gradients."""
    (mine, head), (params, layer) = make(ours), make(theirs)
    assert jax.tree.structure(mine) == jax.tree.structure(params)
    assert (head(params, h) == layer(params, h)).all()
    got = jax.jit(jax.value_and_grad(lambda params, h: head(params, h, y, shift=shift), (0, 1)))(params, h)
    want = jax.jit(jax.value_and_grad(lambda params, h: plain(layer(params, h), shift), (0, 1)))(params, h)
    assert_same(got, want)


@pytest.mark.parametrize(("make", "ours", "theirs"), HEADS.values(), ids=HEADS)
def test_head_computes_in_the_layers_dtype(make, ours, theirs):
    """bfloat16 products of float32 parameters: float32 loss and gradients, nearer to the exact loss than optax."""
    (params, head), (_, layer) = make(ours, dtype=jnp.bfloat16), make(theirs, dtype=jnp.bfloat16)
    assert head(params, h).dtype == jnp.bfloat16
    loss, grads = jax.value_and_grad(head)(params, h, y, shift=False)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), (params, h))
    exact = plain(make(theirs)[1](*rounded))
    assert {x.dtype for x in jax.tree.leaves((loss, grads))} == {jnp.dtype("float32")}
    assert abs(loss - exact) <= 1e-5 < abs(plain(layer(params, h).astype(jnp.float32)) - exact)


class Model(nnx.Module):
    def __init__(self, head):
        self.body = nnx.Linear(16, 16, rngs=nnx.Rngs(1))
        self.head = head(16, 70, rngs=nnx.Rngs(0))


def test_frozen_head():
    """The body trains alone, by the gradient that goes through the head."""
    body = nnx.All(nnx.Param, nnx.PathContains("body"))
    wrt = nnx.DiffState(0, body)
    loss = nnx.value_and_grad(lambda model: model.head(model.body(h), y, shift=False), argnums=wrt)
    got = nnx.jit(loss)(Model(LinearHead))
    want = nnx.jit(nnx.value_and_grad(lambda model: plain(model.head(model.body(h))), argnums=wrt))(Model(nnx.Linear))
    assert set(got[1]) == {"body"}
    assert_same(got, want)


def test_dense_head_is_initialised_with_labels():
    def init(head, *given, **named):
        return head.init(jax.random.key(0), *given, **named)

    assert_same(init(DenseHead(70), h, y, shift=True), init(linen.Dense(70), h))


def own_product(*given, **named):
    return jax.lax.dot_general(*given, **named)


class OwnProduct:
    __call__ = staticmethod(own_product)


def wrong(error, message, *given, heads="", layer=None, **named):
    return heads, layer or {}, given, named, error, message


WRONG = {
    "option without labels": wrong(TypeError, "options of the loss need labels; got shift", shift=True, z_loss=0.1),
    "weight_layout": wrong(TypeError, "the layer itself passes weight_layout", y, weight_layout="vh"),
    "bias": wrong(TypeError, "the layer itself passes bias", y, bias=h),
    "unknown option": wrong(TypeError, "unexpected keyword argument 'smoothing'", y, shift=True, smoothing=0.1),
    "labels without shift": wrong(TypeError, "shift=True if they are as the data has them", y, z_loss=0.1),
    "labels of another shape": wrong(ValueError, r"labels has shape \[1, 12\]", y[:1], shift=True),
    "labels are floats": wrong(TypeError, "labels must hold integers; got float32", h[..., 0], shift=True),
    "labels are a list": wrong(TypeError, r"got list; pass jax.numpy.asarray\(labels\)", y.tolist(), shift=True),
    "out_sharding": wrong(
        ValueError, "out_sharding is for logits", y, heads="Linear Embed", out_sharding=jax.P()
    ),
    "dot_general": wrong(
        ValueError, "compute the loss from the logits", y, heads="Linear Dense", layer={"dot_general": own_product}
    ),
    "dot_general_cls": wrong(
        ValueError, "has a dot_general of its own", y, heads="Dense", layer={"dot_general_cls": OwnProduct}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("heads", "layer", "given", "named", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls(heads, layer, given, named, error, message):
    for name, (make, ours, _) in HEADS.items():
        if any(name.startswith(head) for head in heads.split() or [""]):
            params, head = make(ours, **layer)
            with pytest.raises(error, match=message):
                head(params, h, *given, **named)


def test_without_flax(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs flax, .*; pip install 'onchip\[jax,integrations\]'"):
        runpy.run_path(onchip.integrations.flax.__file__)
