"""The losses' documented memory formulas in JAX, compared with what XLA says that it allocates."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from onchip.core.sizes import MIB
from onchip.jax import cross_entropy, linear_cross_entropy, linear_log_probs, log_probs
from onchip.vocab.chunks import DEFAULT_SCRATCH
from onchip.vocab.memory import Problem, logits_bytes
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.xla import memory
from shared_jax import temporary_bytes

slow = partial(pytest.param, marks=pytest.mark.slow)


def measured(p, **options):
    """Of a call of this problem, with its gradients."""
    rows, shape = isinstance(p, row_memory.RowsProblem), jax.ShapeDtypeStruct
    sizes = [(p.tokens, p.vocab)] if rows else [(p.tokens, p.hidden), (p.vocab, p.hidden)]
    given = [shape(x, p.dtype) for x in sizes]
    labels = shape((p.tokens, p.vocab), p.labels) if p.labels else shape((p.tokens, p.ids)[: 1 + bool(p.ids)], "int32")
    if p.class_weight:
        options["class_weight"] = jnp.ones(p.vocab)
    op = (log_probs if p.ids else cross_entropy) if rows else linear_log_probs if p.ids else linear_cross_entropy
    step, more = partial(op, **options), p.stats
    if p.ids:
        # Statistics behind the first three have no gradient.
        step, more = lambda *x: _sums(op(*x, lse=True, **options)), True
    wanted = [0] * p.grad if rows else [i for i, x in enumerate((p.grad_hidden, p.grad_weight)) if x]
    if wanted:
        # Of products the gradients alone: where nobody reads the loss, XLA may fuse less.
        step = (jax.value_and_grad if rows else jax.grad)(step, tuple(wanted), has_aux=more)
    with jax.enable_x64(p.dtype == "float64"):
        return temporary_bytes(step, *given, labels)


def _sums(made):
    return sum(x.sum() for x in made[:3] if x is not None), made[3:]


ENTROPY = {"entropy": True, "softcap": 5.0}
FORWARD = {"grad_hidden": False, "grad_weight": False}
STATS = {"return_stats": True}
MORE = {"mean_logits": True, "log_sum_sq_probs": True}


@pytest.mark.parametrize(
    ("shape", "strategy", "extra", "changes", "options"),
    [
        ((2048, 256, 16384), "forward", 0, FORWARD, {}),
        ((2048, 256, 16384), "stash", 16, {}, {}),
        slow((2048, 256, 16384), "recompute", 16, {}, {}),
        ((777, 520, 5001), "stash", 0, {"softcap": True}, {"softcap": 5.0}),
        slow((777, 520, 5001), "recompute", 0, {"softcap": True}, {"softcap": 5.0}),
        slow((777, 520, 5001), "recompute", 16, {"grad_weight": False}, {}),
        slow((4096, 64, 4096), "stash", 0, {"grad_hidden": False}, {}),
        slow((4096, 64, 4096), "stash", 8, {}, {}),
        ((2048, 64, 8192), "stash", 16, {"grad_weight": False, "smoothing": True}, {"label_smoothing": 0.1}),
        slow((2048, 64, 8192), "recompute", 0, {"stats": True}, STATS),
        ((777, 64, 5001), "recompute", 4, {"dtype": "float64", "stats": True}, STATS),
        slow((4096, 64, 4096), "recompute", 16, {"smoothing": True}, {"label_smoothing": 0.1, "z_loss": 1e-3}),
        slow((512, 64, 8192), "recompute", 4, {"ids": 1}, {}),
        ((512, 64, 8192), "recompute", 4, {"ids": 1, "stats": True, "softcap": True}, ENTROPY),
        slow((512, 64, 8192), "recompute", 4, {"ids": 1, "more_stats": 2}, MORE),
        ((512, 64, 8192), "stash", 4, {"labels": "float32"}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_linear_losses(shape, strategy, extra, changes, options):
    problem = Problem(*shape, compacted=True, **changes)
    budget = memory.scratch_at_least(problem, strategy) + extra * MIB
    formula = memory.scratch_bytes(problem, memory.plan(problem, strategy, budget))
    asked = {} if strategy == "forward" or problem.ids or problem.labels else {"strategy": strategy}
    taken = measured(problem, scratch_bytes=budget, **asked, **options)
    assert formula <= budget
    assert taken <= formula
    assert taken >= formula / 3 - MIB, "the formula promises far more than is used"


@pytest.mark.parametrize(("dtype", "strategy"), [("bfloat16", "stash"), slow("float16", "recompute")])
def test_in_16_bits_the_cpu_widens_what_products_read(dtype, strategy):
    problem = Problem(777, 520, 5001, dtype, compacted=True)
    budget = memory.scratch_at_least(problem, strategy) + 8 * MIB
    assert measured(problem, scratch_bytes=budget, strategy=strategy) <= budget


def test_an_eighth_of_the_logits():
    problem = Problem(4096, 64, 16384)
    assert measured(problem, scratch_bytes=0.125) <= logits_bytes(problem) // 8
    assert measured(problem) <= DEFAULT_SCRATCH
    large = Problem(4096, 4096, 1 << 17, "bfloat16", device="cuda", compacted=True)
    assert memory.default_scratch(large, "recompute") >= DEFAULT_SCRATCH
    assert memory.choose_strategy(large) == "recompute"


@pytest.mark.parametrize(
    ("shape", "changes", "options"),
    [
        ((1024, 8192), {}, {}),
        slow((777, 5001), {"stats": True, "grad": False}, STATS),
        slow(
            (777, 5001), {"dtype": "bfloat16", "softcap": True, "smoothing": True},
            {"softcap": 5.0, "label_smoothing": 0.1},
        ),
        slow((777, 5001), {"dtype": "float16", "stats": True}, STATS),
        slow((777, 5001), {"ids": 2}, {}),
        ((777, 5001), {"ids": 2, "stats": True, "softcap": True}, ENTROPY),
        slow((777, 5001), {"ids": 2, "more_stats": 2}, MORE),
        ((777, 5001), {"stats": True, "smoothing": True, "class_weight": True}, STATS | {"label_smoothing": 0.1}),
        slow((777, 5001), {"dtype": "bfloat16", "labels": "bfloat16", "softcap": True}, {"softcap": 5.0}),
        slow((777, 5001), {"labels": "float32", "stats": True}, STATS),
    ],
    ids=str,
)  # fmt: skip
def test_rows(shape, changes, options):
    problem = row_memory.RowsProblem(*shape, xla=True, **changes)
    formula = row_memory.scratch_bytes(problem, row_memory.plan(problem))
    taken = measured(problem, **options)
    assert taken <= formula
    assert taken >= formula / 2, "the formula promises far more than is used"
