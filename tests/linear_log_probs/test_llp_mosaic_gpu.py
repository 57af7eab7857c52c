"""linear_log_probs on the 'mosaic_gpu' backend, compiled for a GPU: what the CPU can't show."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from onchip.jax import linear_log_probs
from onchip.ops.linear_log_probs.checks import CHECKER, LogProbsCase
from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import memory
from shared import alternating, assert_within_bounds

pytestmark = pytest.mark.gpu
CASE = LogProbsCase("kernels", 700, 512, 4104, zipf=True, ignored=0.3)


@alternating(
    call=[
        ("bfloat16", "vh", {}),
        ("float16", "hv", {"vocab": 4160, "options": {"softcap": 5.0}, "logit_std": 3.0}),
        ("bfloat16", "hv", {"vocab": 4160, "ids": 4, "ignored_ids": 0.2, "token_temperature": True}),
        ("float16", "vh", {"bias": True, "target_prob": 0.999}),
        ("bfloat16", "vh", {"target_prob": 0.999}),
        ("bfloat16", "vh", {"logit_std": 30.0}),
        ("bfloat16", "vh", {"ignored": 1.0}),
    ],
    entropy=[False, True],
)
def test_values(call, entropy):
    dtype, layout, changes = call
    case = replace(CASE, **changes)
    of = {"backend": "mosaic_gpu", "weight_layout": layout, "entropy": entropy}
    assert_within_bounds(CHECKER.check_case(case, dtype, "cuda", **of))


@pytest.mark.parametrize(("ids", "entropy"), [(1, False), (4, True)])
def test_memory_is_what_the_formula_says(ids, entropy):
    """And the same inputs give the same bits."""
    tokens, hidden, vocab = 3999, 1024, 32768
    keys = jax.random.split(jax.random.key(0), 3)
    h = jax.random.normal(keys[0], (tokens, hidden), jnp.bfloat16)
    w = jax.random.normal(keys[1], (vocab, hidden), jnp.bfloat16) * hidden**-0.5
    y = jax.random.randint(keys[2], (tokens, ids), 0, vocab)

    def total(h, w):
        made = linear_log_probs(h, w, y, entropy=entropy, backend="mosaic_gpu")
        return sum(x.sum() for x in jax.tree.leaves(made))

    step = jax.jit(jax.grad(total, (0, 1))).lower(h, w).compile()
    p = Problem(tokens, hidden, vocab, "bfloat16", device="cuda", ids=ids, stats=entropy, per_token_loss=True)
    assert step.memory_analysis().temp_size_in_bytes <= memory.scratch_bytes(p, memory.plan(p, "auto"))
    first = step(h, w)
    assert all((x == y).all() for _ in range(9) for x, y in zip(first, step(h, w), strict=True))
