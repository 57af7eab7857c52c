"""Planning for the Triton backend: every plan fits its budget and the kernels' tiles, and none is a bad bargain."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.core.sizes import MIB
from onchip.ops.linear_cross_entropy.cases import MODELS
from onchip.vocab.memory import Problem
from onchip.vocab.triton import memory as triton_spec
from onchip.vocab.triton.memory import TOKEN_TILE, VOCAB_TILE, plan, predict, scratch_bytes, up

STRATEGIES = ("auto", "stash", "recompute")
ENOUGH = 1 << 50
TOKENS = (1, 100, 1024, 4096, 8192, 32768)
TABLE = [Problem(t, *sizes, "bfloat16", device="cuda") for sizes in MODELS.values() for t in TOKENS]

problems = st.builds(
    Problem,
    tokens=st.integers(0, 40_000),
    hidden=st.integers(1, 8192),
    vocab=st.integers(1, 300_000),
    dtype=st.sampled_from(["bfloat16", "float16"]),
    weight_dtype=st.sampled_from(["", "float32"]),
    device=st.just("cuda"),
    grad_hidden=st.booleans(),
    grad_weight=st.booleans(),
    grad_bias=st.booleans(),
    softcap=st.booleans(),
    smoothing=st.booleans(),
    stats=st.booleans(),
    weight_grad_out=st.booleans(),
)


def least(p, strategy):
    """The bytes that the refusal of a budget of 1 names."""
    with pytest.raises(ValueError, match=r"scratch_bytes=1 is too small .* needs \d+ bytes") as caught:
        plan(p, strategy, 1)
    return int(str(caught.value).split(" needs ")[1].split()[0])


def assert_sound(p, c):
    """What the walks and the kernels take for granted."""
    if not p.any_grad:
        assert min(p.tokens, 1) <= c.token_chunk <= p.tokens
        assert c.token_chunk == p.tokens or c.token_chunk % TOKEN_TILE == 0
        assert c.held == 0
        return
    rows = up(p.tokens, TOKEN_TILE)
    assert c.token_chunk == p.tokens
    assert c.vocab_chunk % VOCAB_TILE == c.weight_chunk % VOCAB_TILE == 0
    assert 0 < c.weight_chunk <= c.vocab_chunk
    assert c.stashed % TOKEN_TILE == c.overflow % TOKEN_TILE == 0
    assert 0 <= c.stashed <= triton_spec.capacity(p)
    assert c.overflow >= 0
    assert c.held <= rows
    if p.softcap or p.smoothing:
        assert c.held == 0
    if p.weight_grad_out or not p.grad_weight:
        assert c.stashed == 0


@settings(deadline=None)
@given(problems, st.sampled_from(STRATEGIES), st.integers(1, 1 << 34))
def test_a_plan_fits_its_budget_and_the_problem(p, strategy, budget):
    needed = least(p, strategy)
    if budget < needed:
        with pytest.raises(ValueError, match=f"scratch_bytes={budget} is too small"):
            plan(p, strategy, budget)
        budget = needed
    c = plan(p, strategy, budget)
    assert scratch_bytes(p, c) <= budget
    assert_sound(p, c)
    assert predict(p, c) > 0
    assert all(size >= 0 for size in triton_spec.scratch_parts(p, c).values())


@settings(deadline=None)
@given(problems, st.sampled_from(STRATEGIES))
def test_without_a_budget_there_is_a_plan(p, strategy):
    c = plan(p, strategy)
    assert_sound(p, c)
    assert scratch_bytes(p, c) <= triton_spec.default_scratch(p, strategy)


@pytest.mark.parametrize("p", TABLE, ids=lambda p: f"T{p.tokens} H{p.hidden} V{p.vocab}")
def test_models(p):
    """More memory never costs time, but for what two plans may differ that pass for equally fast."""
    needed = least(p, "auto")
    times = []
    for budget in (needed, 2 * needed, needed + 64 * MIB, needed + 256 * MIB, needed + 1024 * MIB, ENOUGH):
        c = plan(p, "auto", budget)
        assert scratch_bytes(p, c) <= budget
        assert_sound(p, c)
        times.append((budget, predict(p, c)))
    times.sort()
    for (_, small), (_, large) in pairwise(times):
        assert large <= 1.0101 * small


def test_with_enough_memory_nothing_is_computed_again_at_the_models_sizes():
    for p in TABLE:
        c = plan(p, "auto", ENOUGH)
        if p.tokens >= 1024:
            assert c.held == up(p.tokens, TOKEN_TILE)
            # Time of three products rather than four.
            assert predict(p, c) < predict(p, plan(p, "recompute", ENOUGH))


def test_strategies():
    p = Problem(4096, 2560, 262144, "bfloat16", device="cuda")
    assert plan(p, "stash", ENOUGH).held == 4096
    assert plan(p, "stash", ENOUGH).stashed == triton_spec.capacity(p) == 2560
    assert plan(p, "recompute", ENOUGH).held == 0
    assert least(p, "stash") > least(p, "recompute") == least(p, "auto")
    # A float32 gradient has twice the room for 16-bit exponentials.
    assert triton_spec.capacity(replace(p, weight_dtype="float32")) == 5120
    assert plan(replace(p, weight_dtype="float32"), "stash", ENOUGH).overflow == 0


def test_budgets_between_the_strategies_hold_more_tokens_the_larger_they_are():
    p = Problem(16384, 4096, 128256, "bfloat16", device="cuda")
    low, high = least(p, "recompute"), least(p, "stash")
    held = [plan(p, "auto", low + i * (high - low) // 8).held for i in range(9)]
    assert held == sorted(held)
    assert len(set(held)) > 4
    assert plan(p, "auto", 2 * high).held == 16384


def test_forward_only_takes_fewer_tokens_at_a_time_in_less_memory():
    p = Problem(32768, 4096, 128256, "bfloat16", device="cuda", grad_hidden=False, grad_weight=False)
    chunks = [plan(p, "auto", budget * MIB).token_chunk for budget in (16, 64, 256, 4096)]
    assert chunks == sorted(chunks)
    assert chunks[-1] == 32768
    assert scratch_bytes(p, plan(p)) <= triton_spec.FORWARD_SCRATCH


def test_a_plan_is_made_again_the_same():
    for p in TABLE:
        for budget in (None, least(p, "auto") + 100 * MIB):
            plan.cache_clear()
            first = plan(p, "auto", budget)
            plan.cache_clear()
            assert plan(p, "auto", budget) == first


def test_a_plan_is_found_among_few_candidates():
    # Each costs about 20 us of the first call with a shape.
    for p in TABLE:
        budget = least(p, "auto") + 100 * MIB
        assert len(triton_spec._candidates(p, "auto", budget, triton_spec.RATES["h100"])) < 2000


@pytest.mark.parametrize("shared", [232448, 166912, 101376])
def test_heuristic_tiles_are_whole(shared):
    for kernel, t in triton_spec.heuristic_tiles(shared).items():
        assert TOKEN_TILE % t["rows"] == 0, kernel
        assert VOCAB_TILE % t["depth"] == 0, kernel
        assert TOKEN_TILE % t["depth"] == 0, kernel
        assert t["columns"] % t["parts"] == 0, kernel
