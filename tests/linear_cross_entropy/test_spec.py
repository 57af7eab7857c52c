"""Planning: every plan fits its budget, covers the problem, and wastes little of what it was given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onchip.core.sizes import DTYPE_BYTES, MIB
from onchip.ops.linear_cross_entropy import spec
from onchip.vocab import memory
from onchip.vocab.memory import Problem

problems = st.builds(
    Problem,
    tokens=st.integers(0, 40_000),
    hidden=st.integers(1, 8192),
    vocab=st.integers(1, 300_000),
    dtype=st.sampled_from(list(DTYPE_BYTES)),
    weight_dtype=st.sampled_from(["", "float32"]),
    device=st.sampled_from(["cpu", "cuda"]),
    grad_hidden=st.booleans(),
    grad_weight=st.booleans(),
    softcap=st.booleans(),
    stats=st.booleans(),
    compacted=st.booleans(),
)


@given(problems, st.sampled_from(["forward", "stash", "recompute"]), st.integers(0, 1 << 34))
def test_a_plan_fits_its_budget_and_the_problem(p, strategy, budget):
    config = memory.plan(p, strategy, budget)
    assert min(p.tokens, 1) <= config.token_chunk <= p.tokens
    assert 1 <= config.vocab_chunk <= p.vocab
    if budget >= memory.scratch_at_least(p, strategy):
        assert memory.scratch_bytes(p, config) <= budget


@given(problems, st.sampled_from(["forward", "stash", "recompute"]))
def test_the_default_budget_is_kept(p, strategy):
    assert memory.scratch_bytes(p, memory.plan(p, strategy)) <= memory.default_scratch(p, strategy)


@given(problems, st.integers(1, 1 << 34))
def test_the_chosen_strategy_can_run_in_the_budget(p, budget):
    least = min(memory.scratch_at_least(p, s) for s in (("stash", "recompute") if p.any_grad else ("forward",)))
    if budget < least:
        with pytest.raises(ValueError, match="scratch_bytes"):
            memory.choose_strategy(p, "auto", budget)
    else:
        assert memory.scratch_at_least(p, memory.choose_strategy(p, "auto", budget)) <= budget


def test_more_scratch_means_fewer_chunks():
    p = Problem(16384, 4096, 128256, dtype="bfloat16", device="cuda")
    for strategy in ("stash", "recompute"):
        counts = []
        for budget in (3 << 30, 6 << 30, 12 << 30, 24 << 30):
            config = memory.plan(p, strategy, budget)
            counts.append(-(-p.tokens // config.token_chunk) * -(-p.vocab // config.vocab_chunk))
        assert counts == sorted(counts, reverse=True)
        assert counts[-1] == 1


def test_default_is_256_mib_or_an_eighth_of_the_logits():
    small = Problem(4096, 1024, 32768)
    assert memory.default_scratch(small, "stash") == memory.logits_bytes(small) // 8 == 64 * MIB
    assert memory.default_scratch(Problem(16384, 1024, 262144), "stash") == 256 * MIB
    # ... and at least what one chunk needs
    tiny = Problem(128, 16, 1000)
    least = memory.scratch_at_least(tiny, "stash")
    assert memory.default_scratch(tiny, "stash") == least > memory.logits_bytes(tiny) // 8


@pytest.mark.parametrize(
    ("changes", "requested", "chosen"),
    [
        ({}, "auto", "stash"),
        ({}, "recompute", "recompute"),
        ({"grad_hidden": False, "grad_weight": False}, "stash", "forward"),
        ({"per_token_loss": True}, "auto", "recompute"),
        ({"per_token_loss": True}, "stash", "recompute"),
        ({"per_token_loss": True, "grad_weight": False}, "auto", "stash"),
        # In 16 bits 'stash' keeps float32 gradients of the whole weight.
        ({"dtype": "bfloat16", "device": "cuda"}, "auto", "recompute"),
    ],
)
def test_strategy(changes, requested, chosen):
    problem = Problem(**{"tokens": 4096, "hidden": 1024, "vocab": 32768} | changes)
    assert memory.choose_strategy(problem, requested) == chosen


def test_a_budget_below_the_smallest_chunk_names_what_is_needed():
    p = Problem(4096, 1024, 32768)
    need = memory.scratch_at_least(p, "recompute")
    with pytest.raises(ValueError, match=f"scratch_bytes=1000 is too small.*{need} bytes for strategy 'recompute'"):
        memory.choose_strategy(p, "auto", 1000)


def test_products():
    p = Problem(8, 8, 8)
    assert [spec.products(p, s) for s in ("stash", "recompute")] == [3, 4]
    assert spec.products(Problem(8, 8, 8, grad_weight=False), "stash") == 2
    assert spec.flops(p, "stash") == 3 * 2 * 8**3
