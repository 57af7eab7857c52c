"""Soft labels in JAX: compared with the oracle, and under vmap."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from losses import CE, LCE
from onchip.jax import TopK, cross_entropy, linear_cross_entropy
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


@by_op
def test_no_tokens(loss):
    for reduction, shape in (("mean", ()), ("none", (0, 2))):
        parameters, labels = in_jax(problem(loss, "dense", (0, 2)))
        assert OPS[loss](**parameters, labels=labels, reduction=reduction).shape == shape
