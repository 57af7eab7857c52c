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


def divergence(op, y, h, **options):
    return op(h, W, H[..., ::-1], W, target=y, reduction="none", hard_weight=0.5, **options)


# Of labels: by its name, a loss or log-probabilities of each token.
OPS = {
    "linear_cross_entropy": lambda y, h=H, **x: linear_cross_entropy(h, W, y, reduction="none", **x),
    "cross_entropy": lambda y, h=H, **x: cross_entropy(jnp.matmul(h, W.T), y, reduction="none", **x),
    "linear_log_probs": lambda y, h=H, **x: linear_log_probs(h, W, y, **x),
    "log_probs": lambda y, h=H, **x: log_probs(jnp.matmul(h, W.T), y, **x),
    "linear_jsd": lambda y, h=H, **x: divergence(linear_jsd, y, h, **x),
    "jsd": lambda y, h=H, **x: jsd(jnp.matmul(h, W.T), Z[::-1], target=y, reduction="none", hard_weight=0.5, **x),
    "sharded_linear_cross_entropy": lambda y, h=H, **x: sharded_linear_cross_entropy(
        h, W, y, reduction="none", **MESH, **x
    ),
    "sharded_linear_log_probs": lambda y, h=H, **x: sharded_linear_log_probs(h, W, y, **MESH, **x),
    "sharded_linear_jsd": lambda y, h=H, **x: divergence(sharded_linear_jsd, y, h, **MESH, **x),
}
# Of those of a mesh one is quick: what they check is what they call.
SHARDED = [pytest.param(x, marks=[pytest.mark.slow] * (x in list(OPS)[-2:])) for x in OPS]
by_op = pytest.mark.parametrize("name", SHARDED)


@by_op
def test_a_label_out_of_range(name):
    op, argument = OPS[name], "ids" if "log_probs" in name else "target"
    said = rf"^{name.removeprefix('sharded_')}: {argument}\[1, 1\] is 50, which is neither ignore_index \("
    for labels in (Y, np.asarray(Y)):
        with pytest.raises(ValueError, match=said):
            op(labels)
    for bad in (50, V, -1):
        made, pullback = jax.vjp(partial(jax.jit(op), jnp.where(Y == 50, bad, Y)), H)
        (grad,) = pullback(jnp.ones_like(made))
        assert np.argwhere(np.isnan(made)).tolist() == [[1, 1]]
        assert np.argwhere(np.isnan(grad).any(-1)).tolist() == [[1, 1]]
    right = jnp.where(Y == 50, 7, Y)
    np.testing.assert_allclose(op(right, check_inputs=True), jax.jit(op)(right), rtol=1e-5)
    with pytest.raises(
        ValueError, match=r"check_inputs=True reads the values of \w+, which has none while it is traced"
    ):
        jax.jit(partial(op, check_inputs=True))(right)
    with pytest.raises(TypeError, match="check_inputs must be True or False; got int"):
        op(right, check_inputs=1)


def test_statistics_and_the_weights_gradient_of_a_label_out_of_range():
    for op, given in ((linear_cross_entropy, (H, W)), (cross_entropy, (Z,))):
        stats = jax.jit(partial(op, return_stats=True))(*given, Y)[1]
        assert np.argwhere(np.isnan(stats.log_prob)).tolist() == [[1, 1]]
        assert not stats.correct[1, 1]
    assert np.isnan(jax.jit(jax.grad(linear_cross_entropy, 1))(H, W, Y)).all()


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


@pytest.mark.parametrize("name", [n for n in OPS if "jsd" not in n and n != "sharded_linear_log_probs"])
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


@pytest.mark.parametrize("op", [linear_cross_entropy, cross_entropy, linear_jsd, jsd])
def test_labels_and_teachers_of_k_entries(op):
    indices, values = jnp.zeros((2, 3, 1), int), jnp.full((2, 3, 1), -1.0)
    first = (H, W) if op in (linear_cross_entropy, linear_jsd) else (Z,)
    name, rest = ("teacher_topk", "tail") if op in (linear_jsd, jsd) else ("target", "truncated")

    def loss(indices, values, **options):
        return op(*first, **{name: TopK(indices, values, "log_probs", rest)}, reduction="none", **options)

    for bad, message in (
        ((indices.at[1, 0].set(V), values), r".indices\[1, 0, 0\] is 20, which is not in \[0, 20\)"),
        ((indices.at[1, 0].set(-1), values), r".indices\[1, 0, 0\] is -1, which is not in \[0, 20\)"),
        ((indices, values.at[1, 0].set(3)), r".values\[1, 0, 0\] is 3, but a log-probability is at most 0 \(up to"),
    ):
        with pytest.raises(ValueError, match=name + message):
            loss(*bad)
        assert np.argwhere(np.isnan(jax.jit(loss)(*bad))).tolist() == [[1, 0]]
        if name == "teacher_topk":
            assert np.isfinite(loss(*bad, labels=jnp.zeros((2, 3), int).at[1, 0].set(-100))).all()  # it is ignored
    if name == "teacher_topk":
        with pytest.raises(ValueError, match=r"teacher_topk.indices must be distinct within a token; 6 are not"):
            loss(indices.repeat(2, -1), values.repeat(2, -1))
        return
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
