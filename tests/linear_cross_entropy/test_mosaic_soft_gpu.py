"""Soft labels on the 'mosaic_gpu' backend, compiled for a GPU: what the CPU can't show."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from soft_cases import CASES, assert_right

from onchip.jax import TopK, linear_cross_entropy
from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import memory as mosaic_spec
from shared import alternating

pytestmark = pytest.mark.gpu


@alternating(case=CASES, dtype=["bfloat16", "float16"])
def test_values(case, dtype):
    layout = "hv" if case.name in ("ids", "dense, everything, none", "one id, masked") else "vh"
    assert_right(case, dtype, layout, backend="mosaic_gpu")


def test_fewer_tokens_than_a_block_of_labels_has_rows():
    (case,) = (c for c in CASES if c.name == "dense, everything")
    assert_right(replace(case, tokens=3), "bfloat16", backend="mosaic_gpu")


def inputs(tokens, hidden, vocab, ids, labels="float32"):
    keys = jax.random.split(jax.random.key(0), 4)
    h = jax.random.normal(keys[0], (tokens, hidden), jnp.bfloat16)
    w = jax.random.normal(keys[1], (vocab, hidden), jnp.bfloat16) * hidden**-0.5
    if not ids:
        return h, w, jax.nn.softmax(2 * jax.random.normal(keys[2], (tokens, vocab), labels))
    indices, values = jax.random.randint(keys[2], (tokens, ids), 0, vocab), jax.random.uniform(keys[3], (tokens, ids))
    return h, w, TopK(indices, values, "probs", "truncated")


@pytest.mark.parametrize(
    ("ids", "wanted", "budget"),
    [
        (0, (0, 1), None), (64, (0, 1), None), (0, (0, 1), 64 << 20), (1, (0, 1), 64 << 20), (0, (0,), None),
        (8, (0,), None), (0, (), None), (64, (), None),
    ],
)  # fmt: skip
def test_memory_is_what_the_formula_says(ids, wanted, budget):
    """And the same inputs give the same bits."""
    tokens, hidden, vocab = 3999, 1024, 32768
    h, w, labels = inputs(tokens, hidden, vocab, ids)
    arrays, kind = (labels[:2], labels[2:]) if ids else ((labels,), None)

    def op(h, w, *arrays):
        labels = arrays[0] if kind is None else TopK(*arrays, *kind)
        return linear_cross_entropy(h, w, labels, scratch_bytes=budget, backend="mosaic_gpu")

    step = jax.jit(jax.value_and_grad(op, argnums=wanted) if wanted else op).lower(h, w, *arrays).compile()
    kinds = {"ids": ids, "labels": "" if ids else "float32", "grad_hidden": bool(wanted), "grad_weight": 1 in wanted}
    problem = Problem(tokens, hidden, vocab, "bfloat16", device="cuda", compacted=True, **kinds)
    plan = mosaic_spec.plan(problem, "recompute", budget)
    taken, formula = step.memory_analysis().temp_size_in_bytes, mosaic_spec.scratch_bytes(problem, plan)
    assert taken <= formula, (taken, formula)
    first = step(h, w, *arrays)
    for _ in range(25):  # four in a row, of which the later ones never wait for the host
        made = [step(h, w, *arrays) for _ in range(4)]
        assert all(jax.tree.all(jax.tree.map(jnp.array_equal, first, x)) for x in made)


@pytest.mark.parametrize("ids", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_under_vmap_and_in_float32_by_xla(ids):
    """One element after the other, each as plain JAX has it."""
    h, w, labels = inputs(512, 256, 4096, ids)
    h = h.reshape(2, 256, 256)
    arrays, kind = (labels[:2], labels[2:]) if ids else ((labels,), None)
    arrays = [x.reshape(2, 256, -1) for x in arrays]

    def op(backend, h, w, *arrays):
        labels = arrays[0] if kind is None else TopK(*arrays, *kind)
        return linear_cross_entropy(h, w, labels, backend=backend)

    def loss(h, w):
        axes = (0, None, *(0 for _ in arrays))
        return jax.vmap(partial(op, "mosaic_gpu"), axes)(h, w, *arrays).sum()

    found = jax.jit(jax.value_and_grad(loss, (0, 1)))(h, w)
    wide = (x.astype(jnp.float32) for x in (h, w))

    def plain(h, w):
        return sum(op("xla", h[i], w, *(x[i] for x in arrays)) for i in range(2))

    expected = jax.jit(jax.value_and_grad(plain, (0, 1)))(*wide)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(x - y) <= 8e-3 * np.linalg.norm(y)
