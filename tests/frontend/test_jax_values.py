"""How JAX's functions treat wrong values: outside of jit, where they are known, they raise; inside they give NaN."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onchip.jax import (
    TopK,
    cross_entropy,
    jsd,
    linear_cross_entropy,
    linear_jsd,
    linear_log_probs,
    log_probs,
    sharded_linear_cross_entropy,
    sharded_linear_jsd,
    sharded_linear_log_probs,
)

V = 20
H, W = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((2, 3, 8), (V, 8))))
Z = jnp.matmul(H, W.T)
Y = jnp.array([[1, 2, -100], [4, 50, 3]])
MESH = {
    "mesh": jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,)),
    "vocab_axis": "model",
}
# Of labels: by its name, a loss or log-probabilities of each token.
OPS = {
    "linear_cross_entropy": lambda y, **x: linear_cross_entropy(H, W, y, reduction="none", **x),
    "cross_entropy": lambda y, **x: cross_entropy(Z, y, reduction="none", **x),
    "linear_log_probs": lambda y, **x: linear_log_probs(H, W, y, **x),
    "log_probs": lambda y, **x: log_probs(Z, y, **x),
    "linear_jsd": lambda y, **x: linear_jsd(H, W, H[..., ::-1], W, target=y, reduction="none", hard_weight=0.5, **x),
    "jsd": lambda y, **x: jsd(Z, Z[::-1], target=y, reduction="none", hard_weight=0.5, **x),
    "sharded_linear_cross_entropy": lambda y, **x: sharded_linear_cross_entropy(H, W, y, reduction="none", **MESH, **x),
    "sharded_linear_log_probs": lambda y, **x: sharded_linear_log_probs(H, W, y, **MESH, **x),
    "sharded_linear_jsd": lambda y, **x: sharded_linear_jsd(
        H, W, H[..., ::-1], W, target=y, reduction="none", hard_weight=0.5, **MESH, **x
    ),
}
by_op = pytest.mark.parametrize("name", OPS)


@by_op
def test_a_label_out_of_range(name):
    op, argument = OPS[name], "ids" if "log_probs" in name else "target"
    said = rf"^{name.removeprefix('sharded_')}: {argument}\[1, 1\] is 50, which is neither ignore_index \(-100\) nor in"
    for labels in (Y, np.asarray(Y)):
        with pytest.raises(ValueError, match=said):
            op(labels)
    assert np.argwhere(np.isnan(jax.jit(op)(Y))).tolist() == [[1, 1]]
    right = jnp.where(Y == 50, 7, Y)
    np.testing.assert_allclose(op(right, check_inputs=True), jax.jit(op)(right), rtol=1e-5)
    with pytest.raises(
        ValueError, match=r"check_inputs=True reads the values of \w+, which has none while it is traced"
    ):
        jax.jit(partial(op, check_inputs=True))(right)
    with pytest.raises(TypeError, match="check_inputs must be True or False; got int"):
        op(right, check_inputs=1)


def test_labels_by_their_other_name_and_under_grad():
    for op, first in ((linear_cross_entropy, (H, W)), (cross_entropy, (Z,))):
        with pytest.raises(ValueError, match=r"labels\[1, 1\] is 50"):
            jax.grad(lambda x, op=op, first=first: op(x, *first[1:], labels=Y))(first[0])


@pytest.mark.parametrize("name", ["linear_cross_entropy", "cross_entropy", "linear_log_probs"])
def test_the_first_label_of_shifted_ones_is_not_used(name):
    y = jnp.where(Y == 50, 7, Y).at[:, 0].set(99)
    assert np.isfinite(OPS[name](y, shift=True)).all()
    with pytest.raises(ValueError, match=r"\[1, 1\] is 50"):
        OPS[name](Y, shift=True)


@pytest.mark.parametrize("name", [n for n in OPS if "jsd" not in n])
def test_temperatures(name):
    op, right, ones = OPS[name], jnp.where(Y == 50, 7, Y), jnp.ones(Y.shape)
    for bad in (0.0, -1.0, jnp.nan, jnp.inf):
        with pytest.raises(ValueError, match="temperature must be finite and above 0 for every token"):
            op(right, temperature=ones.at[1, 1].set(bad))
    with pytest.raises(ValueError, match=r"temperature must be above 0; got 0.0"):
        op(right, temperature=jnp.zeros(()))
    assert np.isfinite(op(right, temperature=ones.at[0, 2].set(-1))).all()  # of an ignored token


@pytest.mark.parametrize("op", [linear_cross_entropy, partial(sharded_linear_cross_entropy, **MESH)])
def test_numbers_and_weights(op):
    right = jnp.where(Y == 50, 7, Y)
    for name, x, message in (
        ("normalizer", jnp.zeros(()), "normalizer must be finite and above 0; got 0.0"),
        ("class_weight", jnp.ones(V).at[3].set(-2), "class_weight must be finite and 0 or more; got -2.0"),
        ("softcap", jnp.zeros(()), "softcap must be above 0; got 0.0; pass None for no softcap"),
        ("label_smoothing", jnp.float32(1.5), r"label_smoothing must be in \[0, 1\]; got 1.5"),
        ("z_loss", jnp.float32(-1), "z_loss must be 0 or more; got -1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            op(H, W, right, **{name: x})
    assert op(H, W, jnp.full_like(Y, -100), normalizer=jnp.zeros(())) == 0


@pytest.mark.parametrize("op", [partial(linear_cross_entropy, H, W), partial(cross_entropy, Z)])
def test_soft_labels_of_k_entries(op):
    indices, values = jnp.zeros((2, 3, 1), int), jnp.full((2, 3, 1), -1.0)

    def loss(indices, values):
        return op(TopK(indices, values, "log_probs", "truncated"), reduction="none")

    for bad, message in (
        ((indices.at[1, 0].set(V), values), r"target.indices\[1, 0, 0\] is 20, which is not in \[0, 20\)"),
        (
            (indices, values.at[1, 0].set(3)),
            r"target.values\[1, 0, 0\] is 3, but a log-probability is at most 0 \(up to",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            loss(*bad)
        assert np.argwhere(np.isnan(jax.jit(loss)(*bad))).tolist() == [[1, 0]]
    assert np.isfinite(loss(indices, values.at[1, 0].set(1e-3))).all()
    assert np.isfinite(loss(indices, values.at[1, 0].set(0.5).astype(jnp.bfloat16))).all()


def test_a_jitted_function_takes_top_k_labels():
    """Its words are static, its arrays are mapped."""
    topk = TopK(jnp.arange(12).reshape(4, 3), jnp.full((4, 3), 0.2), "probs", "truncated")
    z = jax.random.normal(jax.random.key(0), (4, V))
    loss, step = cross_entropy(z, topk), jax.jit(cross_entropy)
    assert jnp.allclose(step(z, topk), loss)
    assert jax.tree.structure(topk) != jax.tree.structure(topk._replace(kind="log_probs"))
    several = jax.tree.map(lambda x: jnp.stack([x, x]), topk)
    assert jnp.allclose(jax.vmap(step, in_axes=(None, 0))(z, several), loss)
