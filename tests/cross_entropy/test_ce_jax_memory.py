"""The memory of the JAX op; its transformations are in tests/test_jax_ops.py."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from onchip.ops.cross_entropy.jax_op import cross_entropy
from onchip.ops.linear_log_probs.jax_op import log_probs
from onchip.vocab.rows import memory as row_memory
from shared_jax import temporary_bytes


@pytest.mark.parametrize(
    ("shape", "changes", "options"),
    [
        ((1024, 8192), {}, {}),
        ((777, 5001), {"stats": True, "grad": False}, {"return_stats": True}),
        (
            (777, 5001),
            {"dtype": "bfloat16", "softcap": True, "smoothing": True},
            {"softcap": 5.0, "label_smoothing": 0.1},
        ),
        pytest.param((777, 5001), {"dtype": "float16", "stats": True}, {"return_stats": True}, marks=pytest.mark.slow),
        pytest.param((777, 5001), {"ids": 2}, {}, marks=pytest.mark.slow),
        ((777, 5001), {"ids": 2, "stats": True, "softcap": True}, {"entropy": True, "softcap": 5.0}),
        ((777, 5001), {"ids": 2, "more_stats": 2}, {"mean_logits": True, "log_sum_sq_probs": True}),
        (
            (777, 5001),
            {"stats": True, "smoothing": True, "class_weight": True},
            {"return_stats": True, "label_smoothing": 0.1},
        ),
    ],
    ids=str,
)
def test_the_formula_holds(shape, changes, options):
    problem = row_memory.RowsProblem(*shape, xla=True, **changes)
    formula = row_memory.scratch_bytes(problem, row_memory.plan(problem))
    class_weight = jnp.ones(shape[1]) if problem.class_weight else None
    step = partial(cross_entropy, class_weight=class_weight, **options)
    if problem.ids:
        step = lambda x, y: sum(z.sum() for z in jax.tree.leaves(log_probs(x, y, **options)))  # noqa: E731
    if problem.grad:
        step = jax.value_and_grad(step, has_aux=problem.stats and not problem.ids)
    ids = shape[:1] + (problem.ids,) * bool(problem.ids)
    arguments = jax.ShapeDtypeStruct(shape, problem.dtype), jax.ShapeDtypeStruct(ids, jnp.int32)
    measured = temporary_bytes(step, *arguments)
    assert measured <= formula
    assert measured >= formula / 2, "the formula promises far more than is used"
