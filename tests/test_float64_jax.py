"""float64 in JAX's 64-bit mode: derivatives by finite differences, and PyTorch's numbers to nearly float64's own
rounding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.test_util import check_grads

import onchip.jax
import onchip.torch
from float64 import as_torch, differentiable, examples
from onchip.core.backends import choose_backend
from onchip.jax import TopK, cross_entropy, linear_cross_entropy, linear_jsd
from onchip.vocab import memory
from onchip.vocab.jax_ways import refusals
from onchip.vocab.memory import Problem
from shared import assert_refused

# Each backend's code once: those of other options are compared with PyTorch in float32.
NAMES = (
    "cross_entropy top-k",
    "cross_entropy dense",
    "linear_cross_entropy {'strategy': 'stash'}",
    "linear_cross_entropy {'reduction': 'none'}",
    "linear_log_probs",
    "linear_jsd beta=0.3",
    "linear_jsd top-k",
    "jsd",
)


@pytest.fixture(autouse=True)
def in_64_bits():
    with jax.enable_x64(True):
        yield


def as_jax(x):
    if isinstance(x, tuple):
        return TopK(*map(as_jax, x))
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def assert_near(made, expected):
    assert made.dtype == jnp.float64
    expected = expected.detach().numpy()
    assert np.linalg.norm(made - expected) <= 1e-12 * max(1, np.linalg.norm(expected))


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] if i % 2 else []) for i, x in enumerate(NAMES)]
)
def test_check_grads(name):
    example, other = examples("labels")[name], examples("target")[name]
    options = {key: as_jax(x) for key, x in example.options.items()}

    def run(*leaves):
        given = dict(zip(example.leaves, leaves, strict=True))
        return differentiable(getattr(onchip.jax, example.op)(**given, **options))

    leaves = [as_jax(x) for x in example.leaves.values()]
    check_grads(run, leaves, order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
    made, pullback = jax.vjp(run, *leaves)
    given = {key: as_torch(x, requires_grad=True) for key, x in other.leaves.items()}
    more = {key: as_torch(x) for key, x in other.options.items()}
    expected = differentiable(getattr(onchip.torch, other.op)(**given, **more))
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        assert_near(x, y)
    ones = jax.tree.map(jnp.ones_like, made)
    upstream = [torch.ones_like(x) for x in jax.tree.leaves(expected)]
    for x, y in zip(
        pullback(ones), torch.autograd.grad(jax.tree.leaves(expected), list(given.values()), upstream), strict=True
    ):
        assert_near(x, y)


def test_statistics_in_several_chunks():
    """Of the vocabulary; NumPy's arrays are float64 here."""
    rng = np.random.default_rng(0)
    hidden, weight, y = rng.standard_normal((70, 4)), rng.standard_normal((1300, 4)), rng.integers(0, 1300, 70)
    budget = memory.scratch_at_least(Problem(70, 4, 1300, "float64", stats=True, compacted=True), "recompute") * 3

    def run(hidden, weight):
        made = linear_cross_entropy(
            hidden, weight, labels=y, return_stats=True, strategy="recompute", scratch_bytes=budget
        )
        return made[0], made

    grads, (loss, stats) = jax.grad(run, (0, 1), has_aux=True)(hidden, weight)
    given = [torch.tensor(x, requires_grad=True) for x in (hidden, weight)]
    right, right_stats = onchip.torch.linear_cross_entropy(*given, torch.tensor(y), return_stats=True)
    assert_near(loss, right)
    for x, g in zip(grads, torch.autograd.grad(right, given), strict=True):
        assert_near(x, g)
    for x, right in zip(stats, right_stats, strict=True):
        if right.is_floating_point():
            assert_near(x, right)
        else:
            assert (np.asarray(x) == right.numpy()).all()


H, W, Y = np.ones((3, 16)), np.ones((70, 16)), np.zeros(3, np.int64)
SINGLE = {"hidden": H.astype(np.float32), "weight": W}
WRONG = {
    "hidden is float32": (linear_cross_entropy, SINGLE, TypeError, "hidden is float32 but weight is float64; cast one"),
    "labels": (
        cross_entropy,
        {"logits": H.astype(np.float32), "labels": H},
        TypeError,
        "logits is float32 but labels is float64; cast one of them",
    ),
    "teacher": (
        linear_jsd,
        {"student_hidden": H, "student_weight": W, "teacher_logits": np.ones((3, 70), np.float32)},
        TypeError,
        "student_hidden is float64 but teacher_logits is float32; cast one of them",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    op, given, kind, message = WRONG[name]
    given = given if "labels" in given or op is linear_jsd else given | {"labels": Y}
    assert_refused(op.__name__, lambda: op(**given), kind, message)


def test_outside_of_64_bit_mode():
    x = jnp.ones((3, 5))
    with jax.enable_x64(False):
        message = "logits is float64 but JAX's 64-bit mode is off; turn jax_enable_x64 on, or cast it"
        assert_refused("cross_entropy", lambda: cross_entropy(x, Y), TypeError, message)


def test_kernels():
    refused = refusals(Problem(128, 128, 256, "float64"), "gpu")
    assert choose_backend("op", "auto", refused) == "xla"
    message = "backend 'mosaic_gpu' can't run this call: it takes no float64; pass backend='xla', or 'auto'"
    assert_refused("op", lambda: choose_backend("op", "mosaic_gpu", refused), ValueError, message)
