"""Levanter's fused cross-entropy: the entry in its table compared with the formula, and the table itself.

A module with the same names replaces Levanter's.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.integrations import levanter as integration
from onchip.integrations.levanter import fused_cross_entropy, register, unregister
from shared_jax import assert_same

rng = np.random.default_rng(0)
x, w = (jax.device_put(np.float32(rng.standard_normal(shape))) for shape in ((24, 16), (16, 70)))
y = jnp.asarray(rng.integers(70, size=24), jnp.int32)
per_token = jax.device_put(np.float32(rng.random(24)))


def plain(x, labels, w, logit_soft_cap=None, **other):
    """(loss, lse, argmax)."""
    logits = jnp.dot(x, w, precision="highest")
    if logit_soft_cap is not None:
        logits = logit_soft_cap * jnp.tanh(logits / logit_soft_cap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    return lse - logits[jnp.arange(len(x)), labels], lse, jnp.argmax(logits, axis=-1).astype(jnp.int32)


@pytest.mark.parametrize(("softcap", "lse_weight", "argmax"), [(None, 0.0, False), (3.0, 0.1, False), (3.0, 0.1, True)])
def test_loss_lse_argmax_and_gradients(softcap, lse_weight, argmax):
    """As Levanter combines them: loss + lse_weight * lse**2, weighted token by token."""

    def call(implementation):
        def loss(x, w):
            named = {"block_sizes": None, "dtype": jnp.float32, "logit_soft_cap": softcap, "precision": None}
            out = implementation(x, y, w, **named, **({"return_argmax": True} if argmax else {}))
            total = out[0] + lse_weight * out[1] ** 2 if lse_weight else out[0]
            return (total * per_token).sum(), out[: 2 + argmax]

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(x, w)

    assert_same(call(fused_cross_entropy), call(plain))


@pytest.mark.parametrize("dtype", [None, "float32", jnp.bfloat16])
def test_dtype_is_of_the_results(dtype):
    x16, w16 = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    out = fused_cross_entropy(x16, y, w16, dtype=dtype)
    exact = plain(x16.astype(jnp.float32), y, w16.astype(jnp.float32))[:2]
    assert {a.dtype for a in out} == {jnp.dtype(dtype or "float32")}
    assert_same(out, [a.astype(dtype or "float32") for a in exact])


@pytest.mark.parametrize(("label", "finite"), [(0, True), (-100, False), (70, False)])
def test_labels_out_of_range_are_nan(label, finite):
    """-100 too: Levanter ignores no label."""
    loss, lse = jax.jit(fused_cross_entropy)(x, y.at[3].set(label), w)
    assert jnp.isfinite(loss[3]) == finite
    assert jnp.isfinite(loss.at[3].set(0)).all()
    assert jnp.isfinite(lse).all()
    if not finite:  # outside of jit the value is known
        with pytest.raises(ValueError, match=rf"labels\[3\] is {label}, which is neither"):
            fused_cross_entropy(x, y.at[3].set(label), w)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtype": jnp.int32}, ValueError, "dtype must be None or one of float32, bfloat16, float16; got int32"),
        ({"dtype": jnp.float64}, ValueError, "got float64"),
        ({"logit_soft_cap": 0.0}, ValueError, "softcap must be above 0; got 0.0; pass None for no softcap"),
        ({"w": w.T}, ValueError, "weight must be .H, V. with weight_layout='hv'"),
        ({"w": w.astype(jnp.bfloat16)}, TypeError, "x is float32 but w is bfloat16; cast one of them"),
        ({"labels": y[:5]}, ValueError, "labels has shape .5."),
        ({"labels": per_token}, TypeError, "labels must hold integers; got float32"),
    ],
)
def test_wrong_calls(changes, error, message):
    with pytest.raises(error, match=message):
        fused_cross_entropy(**{"x": x, "labels": y, "w": w} | changes)


@pytest.fixture
def api(stand_in):
    """A module with the names of Levanter's that are used."""
    yield stand_in(integration.API, {"IMPLEMENTATIONS": {"xla": plain}, "_default_implementations": lambda: ("xla",)})
    integration._default.clear()


def test_register_and_unregister(api):
    theirs = dict(api.IMPLEMENTATIONS), api._default_implementations
    for _ in range(2):
        register()
        assert {"xla": plain, "onchip": fused_cross_entropy} == api.IMPLEMENTATIONS
        assert api._default_implementations() == ("xla",)
    for _ in range(2):
        register(default=True)
        assert api._default_implementations() == ("onchip",)
    register()
    assert api._default_implementations() == ("onchip",)
    for _ in range(2):
        unregister()
        assert (api.IMPLEMENTATIONS, api._default_implementations) == theirs


def test_register_refuses_what_it_does_not_know(api, monkeypatch):
    with pytest.raises(TypeError, match="default must be True or False; got str"):
        register(default="onchip")
    api.IMPLEMENTATIONS["onchip"] = plain
    with pytest.raises(RuntimeError, match="another implementation named 'onchip'; remove that first"):
        register()
    unregister()
    assert api.IMPLEMENTATIONS.pop("onchip") is plain
    for name in ("_default_implementations", "IMPLEMENTATIONS"):
        delattr(api, name)
        with pytest.raises(RuntimeError, match=f"has no {name}; pip install a newer marin-levanter"):
            register()
    for name in [name for name in sys.modules if name.startswith("levanter.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys.modules["levanter"], "__path__", [], raising=False)
    with pytest.raises(RuntimeError, match=r"this Levanter has no levanter.kernels; pip install a newer"):
        register()
    monkeypatch.delitem(sys.modules, "levanter")
    with pytest.raises(ModuleNotFoundError, match="Levanter isn't installed; pip install marin-levanter"):
        register()
