"""Soft labels in JAX: compared with the oracle, under vmap, and every way to pass them wrongly."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from losses import CE, LCE
from onchip.jax import TopK, cross_entropy, linear_cross_entropy
from shared import assert_refused
from shared_jax import assert_same
from soft_labels import everything, oracle, problem, right_stats

OPS = {LCE: linear_cross_entropy, CE: cross_entropy}
by_op = pytest.mark.parametrize("loss", OPS, ids=["linear_cross_entropy", "cross_entropy"])


def as_jax(x):
    return jnp.asarray(x.detach().numpy()) if isinstance(x, torch.Tensor) else x


def in_jax(given):
    """Parameters and labels."""
    target = given["target"]
    labels = TopK(*map(as_jax, target)) if isinstance(target, tuple) else as_jax(target)
    return {name: as_jax(x) for name, x in given.items() if name != "target"}, labels


@pytest.mark.parametrize(
    ("loss", "form", "dtype", "reduction", "all_options"),
    [
        (LCE, "log_probs", torch.float32, "none", True),
        (LCE, "dense", torch.float16, "mean", True),
        (CE, "probs", torch.float16, "mean", False),
        (CE, "dense", torch.float32, "none", True),
    ],
)
def test_values(loss, form, dtype, reduction, all_options):
    """In one chunk of tokens and, of the linear loss, in several of them and of the vocabulary."""
    options = everything(reduction, vocab=700) if all_options else {}
    given = problem(loss, form, (2, 12) if all_options else (40, 3), vocab=700, dtype=dtype)
    parameters, labels = in_jax(given)
    numbers = {name: as_jax(x) for name, x in options.items()}

    @jax.jit
    def run(parameters):
        return OPS[loss](**parameters, labels=labels, reduction=reduction, **numbers)

    made, pullback = jax.vjp(run, parameters)
    upstream = np.linspace(-1, 2, made.size, dtype=np.float32).reshape(made.shape)
    (grads,) = pullback(jnp.asarray(upstream))
    right = oracle(loss, given, torch.from_numpy(upstream), reduction=reduction, **options)
    assert_same(made, right.loss, scale=2)
    for name, g in grads.items():
        expected = getattr(right, f"grad_{name}")
        assert g.dtype == parameters[name].dtype
        bound = 1e-3 if dtype == torch.float16 else 2e-6
        assert np.linalg.norm(np.float64(g) - expected) <= bound * np.linalg.norm(expected), name


@by_op
def test_under_vmap_a_bad_index_is_nan_for_its_token_alone(loss):
    parameters, labels = in_jax(problem(loss, "probs", (3, 2)))
    first = next(iter(parameters))
    labels = labels._replace(indices=labels.indices.at[1, 0, 2].set(-100))
    axes = [{name: 0 if name == first else None for name in parameters}, 0, 0]

    def gradient(parameters, indices, values):
        labels = TopK(indices, values, "probs", "truncated")
        return jax.grad(lambda x: OPS[loss](**parameters | {first: x}, labels=labels))(parameters[first])

    made = jax.jit(jax.vmap(gradient, axes))(parameters, labels.indices, labels.values)
    assert np.isnan(made).all(-1).tolist() == [[False, False], [True, False], [False, False]]
    assert np.isfinite(made[0]).all()


@by_op
@pytest.mark.parametrize("form", ["dense", "log_probs"])
def test_statistics(loss, form):
    """Of the labels as they are given, without smoothing and weights of classes.  They change nothing else."""
    given, options = problem(loss, form), everything("none")
    parameters, labels = in_jax(given)
    numbers = {name: as_jax(x) for name, x in options.items()}
    call = partial(OPS[loss], labels=labels, reduction="none", **numbers)

    def run(parameters):
        made, stats = call(**parameters, return_stats=True)
        return made.sum(), (made, stats)

    (_, (made, stats)), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(parameters)
    expected, expected_grads = jax.jit(jax.value_and_grad(lambda x: call(**x).sum()))(parameters)
    assert_same(made.sum(), expected)
    assert_same(grads, expected_grads, scale=4)
    for name, x in right_stats(loss, given, **options).items():
        found, x = getattr(stats, name), x.detach().numpy()
        assert found.shape == (2, 12)
        assert np.array_equal(found, x) if name in ("correct", "argmax") else np.allclose(found, x, 2e-6, 2e-6), name
    if loss is LCE:
        _, shifted = linear_cross_entropy(**parameters, labels=labels, shift=True, return_stats=True)
        assert shifted.argmax[:, -1].tolist() == [-1, -1]
        assert not shifted.lse[:, -1].any()


@pytest.mark.parametrize(("form", "reduction"), [("dense", "none"), ("probs", "mean")])
def test_shifted_labels(form, reduction):
    """As in PyTorch, with weights that go with the labels and temperatures that go with the positions."""
    given, options = problem(LCE, form), everything(reduction)
    options.pop("normalizer", None)
    parameters, labels = in_jax(given)
    numbers = {name: as_jax(x) for name, x in options.items()}
    call = partial(linear_cross_entropy, labels=labels, shift=True, reduction=reduction, **numbers)
    made, grads = jax.value_and_grad(lambda x: call(**x).sum())(parameters)
    expected = LCE.op(**given, shift=True, reduction=reduction, **options)
    assert_same(made, expected.sum().detach().numpy(), scale=2)
    for name, g in grads.items():
        (e,) = torch.autograd.grad(expected.sum(), given[name], retain_graph=True)
        assert_same(g, e.numpy(), scale=10)
    assert call(**parameters).shape == expected.shape
    if form == "dense":
        none = parameters | {"hidden": parameters["hidden"][:, :0]}
        assert linear_cross_entropy(**none, labels=labels[:, :0], shift=True, reduction=reduction).shape == (2, 0)


K = TopK(jnp.zeros((2, 12, 3), int), jnp.ones((2, 12, 3)), "probs", "truncated")
DENSE = jnp.ones((2, 12, 70))
WRONG = {
    "kind": ({"labels": K._replace(kind="logits")}, ValueError, "labels.kind must be 'probs' or 'log_probs'; got 'logits'"),
    "rest": ({"labels": K._replace(rest="tail")}, ValueError, "labels.rest must be 'truncated'"),
    "indices are float": ({"labels": K._replace(indices=K.values)}, TypeError, "labels.indices must hold integers; got float32"),
    "values are integers": ({"labels": K._replace(values=K.indices)}, TypeError, "labels.values must be float32, bfloat16, float16 or float64"),
    "values is a list": ({"labels": K._replace(values=[0.5])}, TypeError, "labels.values must be a jax.Array or numpy.ndarray; got list"),
    "shapes differ": ({"labels": K._replace(values=K.values[..., :2])}, ValueError, "labels.indices has shape [2, 12, 3] but values has [2, 12, 2]"),
    "flat": ({"labels": K._replace(indices=K.indices[0], values=K.values[0])}, ValueError, "labels.indices has shape [12, 3] but"),
    "too short": ({"labels": DENSE[..., :69]}, ValueError, "labels has shape [2, 12, 69]; probabilities must be [..., V], [2, 12, 70]"),
    "one number a token": ({"labels": DENSE[..., 0]}, TypeError, "labels must hold integers; got float32"),
    "ignore_index": ({"labels": K, "ignore_index": 0}, ValueError, "ignore_index=0 is only for targets that are ids"),
    "class_weight too short": ({"labels": DENSE, "class_weight": jnp.ones(69)}, ValueError, "class_weight has shape [69]; it must be [V], [70]"),
    "class_weight is bfloat16": ({"labels": DENSE, "class_weight": jnp.ones(70, "bfloat16")}, TypeError, "class_weight must be float32; got bfloat16"),
    "token_weight": ({"labels": K, "token_weight": jnp.ones(24)}, ValueError, "token_weight has shape [24]; it must have"),
    "normalizer": ({"labels": K, "normalizer": 0}, ValueError, "normalizer must be above 0"),
    "scratch": ({"labels": DENSE, "scratch_bytes": 100}, ValueError, "scratch_bytes=100 is too small for T=24, "),
}  # fmt: skip
OWN = {
    LCE: {
        "stash": ({"labels": K, "strategy": "stash"}, ValueError, "soft labels are computed by strategy 'recompute'; got 'stash'; pass 'auto'"),
        "nothing to shift along": ({"hidden": jnp.ones(16), "labels": DENSE[0, 0], "shift": True}, ValueError, "shift=True needs hidden of shape [..., S, H], a sequence of S tokens; got no dimension; pass shift=False"),
        "backend": ({"labels": K, "backend": "plain"}, ValueError, "backend must be one of 'auto', 'xla', 'mosaic_gpu', 'triton'; got 'plain'"),
        "dtypes differ": ({"labels": K, "hidden": jnp.ones((2, 12, 16), "float16"), "weight": jnp.ones((70, 16), "bfloat16")}, TypeError, "hidden is float16 but weight is bfloat16"),
    },
    CE: {
        "shift": ({"labels": K, "shift": True}, ValueError, "shift=True is only for targets that are ids; pass logits[..., :-1, :] with labels[..., 1:, :], the next positions' labels"),
    },
}  # fmt: skip


@by_op
def test_wrong_call(loss):
    parameters, _ = in_jax(problem(loss, "probs"))
    for changes, kind, message in (WRONG | OWN[loss]).values():
        assert_refused(loss.op.__name__, partial(OPS[loss], **parameters | changes), kind, message)


@by_op
def test_no_tokens(loss):
    for reduction, shape in (("mean", ()), ("none", (0, 2))):
        parameters, labels = in_jax(problem(loss, "dense", (0, 2)))
        assert OPS[loss](**parameters, labels=labels, reduction=reduction).shape == shape
