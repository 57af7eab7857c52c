"""The documented memory formula compared with what XLA says that it allocates."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from onchip.core.sizes import MIB
from onchip.jax import linear_cross_entropy
from onchip.vocab.chunks import DEFAULT_SCRATCH
from onchip.vocab.memory import Problem, logits_bytes
from onchip.vocab.xla import memory as jax_spec
from shared_jax import temporary_bytes


def bytes_of(problem, **options):
    with jax.enable_x64(problem.dtype == "float64"):
        return _bytes_of(problem, **options)


def _bytes_of(problem, **options):
    shapes = ((problem.tokens, problem.hidden), (problem.vocab, problem.hidden))
    h, w = (jax.ShapeDtypeStruct(s, problem.dtype) for s in shapes)
    step = partial(linear_cross_entropy, **options)
    wanted = tuple(i for i, grad in enumerate((problem.grad_hidden, problem.grad_weight)) if grad)
    if wanted:
        # The gradients alone: where nobody reads the loss, XLA may fuse less.
        step = jax.grad(step, wanted, has_aux=problem.stats)
    labels = jax.ShapeDtypeStruct((problem.tokens,), jnp.int32)
    return temporary_bytes(step, h, w, labels)


FORWARD = {"grad_hidden": False, "grad_weight": False}


@pytest.mark.parametrize(
    ("shape", "strategy", "extra", "changes", "options"),
    [
        ((2048, 256, 16384), "forward", 0, FORWARD, {}),
        ((2048, 256, 16384), "stash", 16, {}, {}),
        pytest.param((2048, 256, 16384), "recompute", 16, {}, {}, marks=pytest.mark.slow),
        ((777, 520, 5001), "stash", 0, {"softcap": True}, {"softcap": 5.0}),
        pytest.param((777, 520, 5001), "recompute", 0, {"softcap": True}, {"softcap": 5.0}, marks=pytest.mark.slow),
        pytest.param((777, 520, 5001), "recompute", 16, {"grad_weight": False}, {}, marks=pytest.mark.slow),
        ((4096, 64, 4096), "stash", 0, {"grad_hidden": False}, {}),
        pytest.param((4096, 64, 4096), "stash", 8, {}, {}, marks=pytest.mark.slow),
        ((2048, 64, 8192), "stash", 16, {"grad_weight": False, "smoothing": True}, {"label_smoothing": 0.1}),
        ((2048, 64, 8192), "recompute", 0, {"stats": True}, {"return_stats": True}),
        ((777, 64, 5001), "recompute", 4, {"dtype": "float64", "stats": True}, {"return_stats": True}),
        ((4096, 64, 4096), "recompute", 16, {"smoothing": True}, {"label_smoothing": 0.1, "z_loss": 1e-3}),
    ],
    ids=str,
)
def test_the_formula_holds(shape, strategy, extra, changes, options):
    problem = Problem(*shape, compacted=True, **changes)
    budget = jax_spec.scratch_at_least(problem, strategy) + extra * MIB
    formula = jax_spec.scratch_bytes(problem, jax_spec.plan(problem, strategy, budget))
    asked = {} if strategy == "forward" else {"strategy": strategy}
    measured = bytes_of(problem, scratch_bytes=budget, **asked, **options)
    assert formula <= budget
    assert measured <= formula
    assert measured >= formula / 3 - MIB, "the formula promises far more than is used"


@pytest.mark.parametrize(("dtype", "strategy"), [("bfloat16", "stash"), ("float16", "recompute")])
def test_in_16_bits_the_cpu_widens_what_products_read(dtype, strategy):
    problem = Problem(777, 520, 5001, dtype, compacted=True)
    budget = jax_spec.scratch_at_least(problem, strategy) + 8 * MIB
    assert bytes_of(problem, scratch_bytes=budget, strategy=strategy) <= budget


def test_an_eighth_of_the_logits():
    problem = Problem(4096, 64, 16384)
    assert bytes_of(problem, scratch_bytes=0.125) <= logits_bytes(problem) // 8
    assert bytes_of(problem) <= DEFAULT_SCRATCH
    large = Problem(4096, 4096, 1 << 17, "bfloat16", device="cuda", compacted=True)
    assert jax_spec.default_scratch(large, "recompute") >= DEFAULT_SCRATCH
    assert jax_spec.choose_strategy(large) == "recompute"
