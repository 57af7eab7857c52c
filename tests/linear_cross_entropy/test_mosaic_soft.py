"""Soft labels on the 'mosaic_gpu' backend without a GPU: with plain stand-ins for its kernels, and lowered for CUDA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from soft_cases import CASES, assert_right, inputs

import plain_kernels
from onchip.jax import TopK, linear_cross_entropy
from onchip.vocab import jax_ways
from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import kernels
from onchip.vocab.mosaic import memory as mosaic_spec
from onchip.vocab.mosaic import op as mosaic_op
from onchip.vocab.mosaic.memory import MosaicPlan

BY_NAME = {case.name: case for case in CASES}
BOTH = pytest.mark.parametrize("name", [pytest.param("dense", marks=pytest.mark.slow), "ids"])
QUICK = ("ids, everything, none",)  # labels of every entry: test_vocab_parallel_jax_mosaic.py


@pytest.mark.parametrize(
    ("number", "case"),
    [pytest.param(*x, marks=[] if x[1].name in QUICK else pytest.mark.slow, id=x[1].name) for x in enumerate(CASES)],
)
def test_values(number, case, on_the_cpu):
    half, layout = ("bfloat16", "float16")[number % 2], ("vh", "hv")[number // 2 % 2]
    assert_right(case, half, layout if case.vocab % 64 == 0 else "vh", backend="mosaic_gpu")


def call_on(case, dtype="bfloat16", **options):
    """The op of parameters alone, and these."""
    given, labels, more = inputs(case, dtype)
    return partial(linear_cross_entropy, labels=labels, backend="mosaic_gpu", **more, **case.options, **options), given


@BOTH
def test_forward_in_chunks_of_tokens(name, on_the_cpu, monkeypatch):
    """Of which the last is smaller."""
    run, given = call_on(BY_NAME[name], return_stats=True)
    expected = run(**given)
    plain_kernels.forget()
    monkeypatch.setattr(mosaic_op, "plan", lambda *_: MosaicPlan("forward", 256))
    for x, y in zip(jax.tree.leaves(run(**given)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)


@BOTH
def test_shifted_and_under_vmap(name, on_the_cpu):
    """As plain JAX has it; each gradient alone is that of both."""
    given, labels, _ = inputs(BY_NAME[name], "bfloat16")
    hidden, weight = given["hidden"].reshape(2, 150, -1), given["weight"]
    labels = jax.tree.map(lambda x: x if isinstance(x, str) else x.reshape(2, 150, -1), labels)
    arrays, kind = (labels[:2], labels[2:]) if isinstance(labels, TopK) else ((labels,), None)

    def loss(backend, hidden, weight, *arrays):
        labels = arrays[0] if kind is None else TopK(*arrays, *kind)
        return linear_cross_entropy(hidden, weight, labels, shift=True, reduction="none", backend=backend).sum()

    def step(backend, wanted=(0, 1)):
        axes = (0, None, *(0 for _ in arrays))
        return jax.vmap(jax.grad(partial(loss, backend), wanted), axes)(hidden, weight, *arrays)

    found, expected = step("mosaic_gpu"), step("xla")
    for x, y in zip(found, expected, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= 4e-3 * np.linalg.norm(y)
    for i, x in enumerate(found):
        assert (step("mosaic_gpu", (i,))[0] == x).all()


def test_a_bad_index_is_nan_for_its_token_alone(on_the_cpu):
    run, given = call_on(BY_NAME["ids"], reduction="none")
    labels = run.keywords["labels"]
    bad = labels._replace(indices=labels.indices.at[3, 1].set(1088).at[5, 0].set(-100))

    @jax.jit
    def step(hidden, indices):
        labels = bad._replace(indices=indices)
        made, pullback = jax.vjp(lambda x: run(x, given["weight"], labels=labels), hidden)
        return made, pullback(jnp.ones_like(made))[0]

    made, grad = step(given["hidden"], bad.indices)
    others = np.delete(np.arange(300), [3, 5])
    assert np.isnan(made[jnp.array([3, 5])]).all()
    assert np.isnan(grad[jnp.array([3, 5])]).all()
    np.testing.assert_allclose(made[others], run(**given)[others], rtol=1e-6)
    assert np.isfinite(np.asarray(grad, np.float32)[others]).all()


def test_shared_memory_fits():
    """Of labels in float32, beside the operands."""
    config = kernels.MosaicConfig.from_numbers(mosaic_spec.label_tiles())
    assert config.shared_bytes(stores=True) + 4 * 4 * 64 * 64 <= 232448


def test_auto_takes_the_kernels(as_on_hopper):
    p = Problem(300, 192, 1088, "bfloat16", device="cuda", labels="float32")
    refusals = jax_ways.refusals(p, "gpu", "vh", "recompute")
    assert refusals["mosaic_gpu"] is None
    assert next(iter(refusals)) == "mosaic_gpu"


def test_refusals():
    p = Problem(8, 256, 1024, "bfloat16", device="cuda", labels="float64")
    assert "pass the target in float32, or backend='xla'" in mosaic_spec.refusal(p, "gpu", "vh")


def test_more_labels_take_more_memory():
    """Numbers of K ids of each token; and sums of labels for each tile."""
    p = Problem(4096, 4096, 128256, "bfloat16", device="cuda")
    plan = mosaic_spec.plan(p, "recompute")
    taken = [
        mosaic_spec.scratch_parts(Problem(4096, 4096, 128256, "bfloat16", device="cuda", **more), plan)
        for more in ({}, {"ids": 64}, {"labels": "float32", "stats": True, "class_weight": True})
    ]
    assert taken[1]["vectors"] - taken[0]["vectors"] == 64 * 64 * 4096
    assert sum(taken[2].values()) > sum(taken[0].values())
