"""Planning for linear_jsd's Triton backend: every plan fits its budget and what the kernels take for granted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.core.sizes import MIB
from onchip.ops.linear_jsd import triton_memory as triton_spec
from onchip.ops.linear_jsd.memory import Head, Problem
from onchip.ops.linear_jsd.triton_memory import TOKEN_TILE, VOCAB_TILE, plan, scratch_bytes, up
from onchip.oracle.cases import MODELS

heads = st.builds(
    Head,
    hidden=st.integers(1, 8192),
    vocab=st.integers(200_000, 300_000),
    dtype=st.sampled_from(["bfloat16", "float16"]),
    weight_dtype=st.sampled_from(["", "float32"]),
    grad_hidden=st.booleans(),
    grad_weight=st.booleans(),
    grad_bias=st.booleans(),
)
problems = st.builds(
    Problem,
    tokens=st.integers(0, 40_000),
    vocab=st.integers(1, 200_000),
    student=heads,
    teacher=heads | st.builds(Head, vocab=st.just(300_000)),
    device=st.just("cuda"),
)


def assert_sound(p, c):
    if not p.any_grad:
        assert c.held == 0
        return
    assert c.held % TOKEN_TILE == 0 <= c.held <= up(p.tokens, TOKEN_TILE)
    assert c.token_chunk == max(1, p.tokens) or c.token_chunk % TOKEN_TILE == 0
    assert c.vocab_chunk % VOCAB_TILE == c.weight_chunk % VOCAB_TILE == 0 < c.weight_chunk <= c.vocab_chunk
    for head in (p.student, p.teacher):
        assert triton_spec.stashed(head, c) <= triton_spec.capacity(head)


@settings(deadline=None, max_examples=30)
@given(problems, st.integers(1, 1 << 34))
def test_a_plan_fits_its_budget_and_the_problem(p, budget):
    least = triton_spec.least_scratch(p)
    if budget < least:
        with pytest.raises(ValueError, match=f"scratch_bytes={budget} is too small .* needs {least} bytes"):
            plan(p, budget)
        budget = least
    for given_budget in (budget, None):
        c = plan(p, given_budget)
        assert_sound(p, c)
        assert scratch_bytes(p, c) <= (given_budget or triton_spec.default_scratch(p))
        assert all(size >= 0 for size in triton_spec.scratch_parts(p, c).values())
        assert triton_spec.predict(p, c) >= 0


def test_of_equal_models_no_product_is_made_twice_in_half_a_gigabyte():
    hidden, vocab = MODELS["llama3.1-8b"]
    head = Head(hidden, vocab, "bfloat16", "bfloat16", "bfloat16", True, True)
    p = Problem(4096, vocab, head, Head(hidden, vocab, "bfloat16", "bfloat16", "bfloat16"), device="cuda")
    c = plan(p)
    assert c.held == 4096
    assert scratch_bytes(p, c) <= 512 * MIB
    # More memory takes more tokens at a time.
    assert plan(p, 2048 * MIB).token_chunk > c.token_chunk
