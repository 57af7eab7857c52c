"""Planning: every backend's plans fit their budget, are what its kernels rely on, and cost little more than the
best.
"""

import random
import re
from collections import Counter
from dataclasses import replace
from functools import wraps
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.core.sizes import DTYPE_BYTES, MIB, up
from onchip.ops.linear_jsd import memory as jsd_memory
from onchip.ops.linear_jsd import triton_memory as jsd_triton_memory
from onchip.oracle.cases import MODELS
from onchip.vocab import chunks, memory
from onchip.vocab.chunks import even_chunk, largest
from onchip.vocab.fp8 import memory as fp8_memory
from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import memory as mosaic_memory
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.triton import costs as triton_costs
from onchip.vocab.triton import memory as triton_memory
from onchip.vocab.triton import planner as triton_planner
from onchip.vocab.triton import search as triton_search
from onchip.vocab.triton import tiling
from onchip.vocab.xla import memory as xla_memory

ENOUGH = 1 << 50
TABLE = [
    Problem(t, *sizes, "bfloat16", device="cuda")
    for sizes in MODELS.values()
    for t in (1, 100, 1024, 4096, 8192, 32768)
]
FLAGS = ("grad_hidden", "grad_weight", "grad_bias", "softcap", "smoothing", "stats")


def linear(tokens=0, hidden=1, of=1, dtypes=("bfloat16", "float16"), devices=("cuda",), **more):
    """Problems of a linear loss; hidden and vocab are multiples of `of`."""
    return st.builds(
        Problem,
        tokens=st.integers(tokens, 40_000),
        hidden=st.integers(-(-hidden // of), 8192 // of).map(lambda n: n * of),
        vocab=st.integers(-(-hidden // of), 300_000 // of).map(lambda n: n * of),
        dtype=st.sampled_from(dtypes),
        device=st.sampled_from(devices),
        copied=st.sampled_from([0, 12345]),
        **{name: st.booleans() for name in FLAGS} | more,
    )


anywhere = {"dtypes": tuple(DTYPE_BYTES), "devices": ("cpu", "cuda"), "compacted": st.booleans()}
weights = {"weight_dtype": st.sampled_from(["", "float32"])}


def distilled(tokens):
    """Of two models, or of one alone."""
    flags = {name: st.booleans() for name in FLAGS[:3]}
    dtypes = {"dtype": st.sampled_from(["bfloat16", "float16"]), **weights}
    sizes = {"tokens": st.just(tokens), "device": st.just("cuda"), "vocab": st.integers(200_000, 300_000)}
    head = st.builds(Problem, hidden=st.integers(1, 8192), **sizes, **dtypes, **flags)
    logits = st.builds(Problem, hidden=st.just(0), **sizes, grad_hidden=st.just(False), grad_weight=st.just(False))
    vocab = st.integers(1, 200_000)
    return st.builds(jsd_memory.JsdProblem, vocab, student=head, teacher=head | logits, stash=st.booleans())


distillations = st.integers(0, 40_000).flatmap(distilled)
rows = st.builds(
    row_memory.RowsProblem,
    tokens=st.integers(0, 1 << 17),
    vocab=st.integers(1, 262144),
    dtype=st.sampled_from(tuple(DTYPE_BYTES)),
    device=st.sampled_from(["cpu", "cuda"]),
    **{name: st.booleans() for name in ("grad", "softcap", "stats", "gathered", "xla", "triton")},
)

TILES = ("forward", "stash", "recompute")
# The planner, its problems, and its strategies.
PLANNERS = {
    "plain": (memory.PLANNER, linear(**anywhere, **weights, weight_grad_out=st.booleans()), TILES),
    "plain, ids": (memory.PLANNER, linear(**anywhere, ids=st.integers(1, 64)), TILES[::2]),
    "xla": (xla_memory.PLANNER, linear(tokens=1, **anywhere), TILES),
    "xla, ids": (xla_memory.PLANNER, linear(tokens=1, **anywhere, ids=st.integers(1, 64)), TILES[::2]),
    "triton": (triton_planner.PLANNER, linear(**weights, weight_grad_out=st.booleans()), ("auto", *TILES[1:])),
    "triton, ids": (triton_planner.PLANNER, linear(ids=st.integers(1, 64)), ("auto",)),
    "mosaic": (mosaic_memory.PLANNER, linear(tokens=1, hidden=128, of=64), ("auto", *TILES[1:])),
    "fp8": (fp8_memory.PLANNER, linear(devices=("cpu", "cuda")), ("",)),
    "rows": (row_memory.PLANNER, rows, ("",)),
    "jsd": (jsd_memory.PLANNER, distillations, ("",)),
    "jsd, jax": (jsd_memory.JAX_PLANNER, distillations, ("",)),
    "jsd, triton": (jsd_triton_memory.PLANNER, distillations, ("",)),
}


def assert_sound(p, c):
    """What walks and kernels take for granted."""
    if isinstance(c, int):
        assert 0 <= c <= max(128, up(p.tokens, 128))
        return
    assert min(p.tokens, 1) <= c.token_chunk <= max(1, up(p.tokens, 128))
    if isinstance(c, chunks.ChunkConfig):
        assert 1 <= c.vocab_chunk <= p.vocab
        return
    held = c.kept
    if not p.any_grad:
        assert held == 0
        assert c.token_chunk >= p.tokens or c.token_chunk % 128 == 0
        return
    assert held % 128 == 0 <= held <= up(p.tokens, 128)
    if isinstance(c, triton_memory.TritonPlan) and c.in_forward:
        assert triton_memory.may_run_in_forward(p)
        assert c.token_chunk % 128 == held == c.vocab_chunk == 0
        assert sum(c.token_chunks(p.tokens)) == p.tokens
        if c.first_chunk:
            assert triton_memory.capacity(p) > 0
            assert c.first_chunk % 128 == 0 < c.token_chunk < c.first_chunk < p.tokens
        assert c.weight_chunk % 256 == 0
        assert (c.weight_chunk > 0) == (c.first_chunk > 0)
        return
    weight_chunk = c.chunk if isinstance(c, mosaic_memory.MosaicPlan) else c.weight_chunk
    vocab_chunk = c.recompute_chunks * c.chunk if isinstance(c, mosaic_memory.MosaicPlan) else c.vocab_chunk
    assert vocab_chunk % 256 == weight_chunk % 256 == 0 < weight_chunk <= vocab_chunk
    if isinstance(c, triton_memory.TritonPlan):
        assert c.kept_in_gradient % 128 == 0 <= c.kept_in_gradient <= triton_memory.capacity(p)
        assert c.kept_in_scratch >= 0
        assert c.kept == 0 or triton_memory.may_hold(p)
        assert c.kept_in_gradient == 0 or (p.grad_weight and not p.weight_grad_out)
    elif isinstance(c, mosaic_memory.MosaicPlan):
        assert c.kept_in_gradient in (0, mosaic_memory.capacity(p))
        # With none in the gradient's memory all are in scratch, at once or chunk by chunk.
        if not c.by_tokens and c.kept_in_scratch > 0 and c.kept_in_gradient == 0:
            assert c.kept == up(p.tokens, 128)
        if c.by_tokens:
            assert c.kept_in_scratch >= c.token_chunk
            assert c.kept >= c.first_chunk
        assert not c.by_tokens or (c.first_chunk > 0) == (c.kept_in_gradient > 0)
        if c.by_tokens:
            assert c.token_chunk % 128 == c.first_chunk % 128 == 0
            assert sum(c.token_chunks(p.tokens)) == p.tokens <= c.positions(p.tokens)
        if c.first_chunk:
            assert c.by_tokens
            assert max(c.kept_in_gradient, c.token_chunk) < c.first_chunk < p.tokens
            assert 2 * c.chunk <= p.vocab
    else:
        for head in (p.student, p.teacher):
            assert jsd_triton_memory.config_of(head, c).kept_in_gradient <= triton_memory.capacity(head)


@pytest.mark.parametrize("name", PLANNERS)
@settings(deadline=None, max_examples=30)
@given(data=st.data(), budget=st.integers(1, 1 << 34))
def test_a_plan_fits_its_budget_and_the_problem(name, data, budget):
    planner, problems, strategies = PLANNERS[name]
    p, strategy = data.draw(problems), data.draw(st.sampled_from(strategies))
    least = planner.least(p, strategy)
    if budget < least and p.tokens:  # nothing at all may take less than a chunk
        c, said = None, ""
        try:
            c = planner.plan(p, strategy, budget)
        except ValueError as error:
            said = str(error)
        if c is None:
            assert re.match(rf"{p.op}: scratch_bytes={budget} is too small for T=.* {least} bytes; ", said)
        else:  # of a small layer scratch may keep all exponentials in less than a chunk more of the gradient takes
            assert (name, strategy) == ("triton", "stash")
            assert_sound(p, c)
            assert planner.scratch_bytes(p, c) <= budget
    for given_budget in (max(budget, least), least, None):
        c = planner.plan(p, strategy, given_budget)
        bound = planner.default(p, strategy) if given_budget is None else given_budget
        assert_sound(p, c)
        assert planner.scratch_bytes(p, c) <= bound
        assert all(size >= 0 for size in planner.parts(p, c).values())
        assert planner.cost(p, c) >= 0


def test_a_budget_far_too_small_has_no_plan():
    p = Problem(1, 128, 1, "bfloat16", device="cuda", grad_hidden=False)
    with pytest.raises(ValueError, match="scratch_bytes=1 is too small"):
        triton_planner.plan(p, "stash", 1)


@pytest.mark.parametrize("hidden", [64, 576, 1024, 4096])
@pytest.mark.parametrize("grad_weight", [False, True])
def test_small_chunks_of_tokens(hidden, grad_weight):
    """Forward that takes the gradients has tokens in each chunk, however small the budget."""
    p = Problem(4096, hidden, 50257, "bfloat16", device="cuda", grad_weight=grad_weight)
    least = triton_planner.least_scratch(p, "auto")
    for more in (0, 1, 8, 32, 64, 128, 256):
        c = triton_planner.plan(p, "auto", least + more * MIB)
        assert c.token_chunk > 0
        assert triton_planner.scratch_bytes(p, c) <= least + more * MIB


@pytest.mark.parametrize("p", TABLE, ids=lambda p: f"T{p.tokens} H{p.hidden} V{p.vocab}")
def test_more_memory_never_costs_time(p):
    """But for what two plans may differ that pass for equally fast."""
    for planner in (triton_planner.PLANNER, mosaic_memory.PLANNER):
        least = planner.least(p, "auto")
        budgets = sorted((least, 2 * least, least + 64 * MIB, least + 256 * MIB, least + 1024 * MIB, ENOUGH))
        times = [planner.cost(p, planner.plan(p, "auto", budget)) for budget in budgets]
        assert all(large <= planner.slack * 1.0031 * small for small, large in pairwise(times))
    c = triton_planner.plan(p, "auto", ENOUGH)
    if p.tokens >= 1024:  # nothing is computed again: the time of three products rather than four
        assert c.in_forward or c.kept == up(p.tokens, 128)
        recomputed = triton_planner.plan(p, "recompute", ENOUGH)
        assert triton_planner.predict(p, c) < triton_planner.predict(p, recomputed)


def test_strategies_of_the_triton_backend():
    p = Problem(4096, 2560, 262144, "bfloat16", device="cuda")
    plan, least = triton_planner.plan, triton_planner.least_scratch
    assert plan(p, "stash", ENOUGH).kept == 4096
    assert plan(p, "stash", ENOUGH).kept_in_gradient == triton_memory.capacity(p) == 2560
    assert plan(p, "recompute", ENOUGH).kept == 0
    assert least(p, "stash") > least(p, "recompute") == least(p, "auto")
    # A float32 gradient has twice the room for 16-bit exponentials.
    wide = replace(p, weight_dtype="float32")
    assert triton_memory.capacity(wide) == 5120
    assert plan(wide, "stash", ENOUGH).kept_in_scratch == 0


def test_larger_budgets_hold_more_tokens_and_forward_takes_more_at_a_time():
    p = Problem(16384, 4096, 128256, "bfloat16", device="cuda", grad_bias=True)  # no gradients in forward
    low, high = (triton_planner.least_scratch(p, s) for s in ("recompute", "stash"))
    held = [triton_planner.plan(p, "auto", low + i * (high - low) // 8).kept for i in range(9)]
    assert held == sorted(held)
    assert len(set(held)) > 4
    assert triton_planner.plan(p, "auto", 2 * high).kept == 16384
    forward = replace(p, grad_hidden=False, grad_weight=False, grad_bias=False)
    sizes = [triton_planner.plan(forward, "auto", budget * MIB).token_chunk for budget in (16, 64, 256, 4096)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 16384
    assert triton_planner.scratch_bytes(forward, triton_planner.plan(forward)) <= triton_planner.FORWARD_SCRATCH


@pytest.mark.parametrize("name", ["triton", "mosaic"])
def test_a_plan_is_made_again_the_same(name):
    planner = PLANNERS[name][0]
    for p in TABLE[:: 6 if name == "triton" else 15]:
        budget = planner.least(p, "auto") + 100 * MIB
        first = planner.plan(p, "auto", budget)
        planner.plan.cache_clear()
        assert planner.plan(p, "auto", budget) == first


def count_calls(monkeypatch, *where):
    """A counter of calls of the methods, or functions, of these classes and modules."""
    counted = Counter()

    def counting(function):
        @wraps(function)
        def call(*args, **named):
            counted["calls"] += 1
            return function(*args, **named)

        return call

    for owner, names in where:
        for name in names:
            monkeypatch.setattr(owner, name, counting(getattr(owner, name)))
    return counted


def distill(head):
    teacher = replace(head, grad_hidden=False, grad_weight=False, grad_bias=False)
    return jsd_memory.JsdProblem(head.vocab, head, teacher, sent=40 * head.tokens * head.sharded)


# What a search evaluates, a microsecond or a few each.
EVALUATED = {
    "triton": [
        (triton_search.TritonSearch, ("what_fits", "some_bound", "beside", "try_kept", "try_some")),
        (triton_memory.TritonSizes, ("kept", "even_chunk", "first_chunk", "other_chunk")),
        (triton_costs.Costs, ("in_forward", "beside_cuts", "of_cuts", "of_weight")),
    ],
    "jsd, triton": [
        (jsd_triton_memory.JsdSizes, ("beyond", "in_scratch", "forward", "backward")),
        (jsd_triton_memory.JsdCosts, ("forward", "again", "weight")),
        (jsd_triton_memory.JsdSearch, ("some_bound",)),
    ],
}
HEADS = [(4096, 128256), (2048, 128256), (1024, 151936), (640, 262144), (2560, 262144), (576, 49152)]
FEATURES = [
    {}, {"softcap": True}, {"grad_bias": True}, {"smoothing": 0.1}, {"smoothing": 0.1, "softcap": True},
    {"stats": True}, {"class_weight": True}, {"per_token_loss": True}, {"grad_weight": False}, {"grad_hidden": False},
    {"ids": 8}, {"ids": 1, "stats": True}, {"labels": "float32"}, {"weight_dtype": "float32"}, {"dtype": "float16"},
    {"sharded": True}, {"sharded": True, "even": True}, {"copied": 4096},
]  # fmt: skip


@pytest.mark.parametrize(("name", "mean", "most"), [("triton", 230, 600), ("jsd, triton", 200, 500)])
@pytest.mark.parametrize("more", [None, 32 * MIB], ids=["default", "small"])
def test_what_a_plan_for_another_number_of_tokens_evaluates(monkeypatch, name, mean, most, more):
    """No feature makes it grow: on average over numbers of tokens, and at most."""
    planner, rng, counted = PLANNERS[name][0], random.Random(0), count_calls(monkeypatch, *EVALUATED[name])
    for features in FEATURES:
        of_plan = []
        for hidden, vocab in 3 * HEADS:
            tokens = rng.choice((rng.randint(1, 100_000), rng.randint(1000, 9000)))
            p = Problem(tokens, hidden, vocab, **{"dtype": "bfloat16", "device": "cuda", **features})
            if name == "jsd, triton":
                p = distill(p)
            budget = None if more is None else planner.least(p, "auto") + more
            counted.clear()
            planner.plan.__wrapped__(planner, p, "auto", budget)
            of_plan.append(counted["calls"])
        assert sum(of_plan) <= mean * len(of_plan), features
        assert max(of_plan) <= most, features


SEARCHES = {"triton": triton_search.TritonSearch, "jsd, triton": jsd_triton_memory.JsdSearch}


@pytest.mark.parametrize("name", SEARCHES)
def test_numbers_of_tokens_with_as_many_tiles_have_one_plan(monkeypatch, name):
    """It is searched for once; a budget of the caller's is used up for each number by itself."""
    planner, counted = PLANNERS[name][0], count_calls(monkeypatch, (SEARCHES[name], ("plan",)))
    head = Problem(4096, 2048, 128256, "bfloat16", device="cuda")
    problems = [replace(head, tokens=tokens) for tokens in range(4097, 4225, 9)]
    if name == "jsd, triton":
        problems = [distill(p) for p in problems]
    planner.plan.cache_clear()
    assert len({planner.plan(p) for p in problems}) == counted["calls"] == 1
    budget = planner.least(problems[-1], "auto") + 8 * MIB
    assert {planner.scratch_bytes(p, planner.plan(p, "auto", budget)) <= budget for p in problems} == {True}


def test_a_copy_of_the_weight_is_of_one_size_for_all_numbers_of_tokens():
    head = Problem(4096, 2048, 128256, "bfloat16", device="cuda")
    weight, row = 2 * head.vocab * head.hidden, 2 * head.hidden
    for rows in (0, row):
        problems = [replace(head, tokens=tokens, copied=weight + rows * tokens) for tokens in (513, 600, 640)]
        assert {triton_search.in_whole_tiles(p) for p in problems} == {problems[-1]}
        assert len({triton_planner.default_scratch(p) for p in problems}) == 1


@pytest.mark.parametrize("grad_weight", [False, True])
def test_no_tokens_have_a_plan(grad_weight):
    """Also of a head whose gradients forward may make."""
    head = Problem(0, 2048, 128256, "bfloat16", device="cuda", grad_weight=grad_weight)
    assert triton_memory.may_run_in_forward(head)
    for strategy in ("auto", "stash", "recompute"):
        assert triton_planner.plan(head, strategy).token_chunk == 0


def grid(p, budget):
    """Plans of many cuts that fit."""
    rows, columns, fits = up(p.tokens, 128), up(p.vocab, 256), triton_planner.scratch_bytes
    for weight in (256 << n for n in range(9)):
        for number in (1, 2, 3, 4, 8, 16, 32, 64):
            cut = triton_memory.TritonPlan(p.tokens, up(-(-columns // number), weight), weight)
            for in_gradient in {0, min(rows, triton_memory.capacity(p))}:
                made = [replace(cut, kept_in_gradient=in_gradient, halves=halves) for halves in (False, True)]
                most = largest(
                    lambda n, c=made[0]: fits(p, replace(c, kept_in_scratch=n)) <= budget, 0, rows - in_gradient, 128
                )
                yield from (replace(c, kept_in_scratch=n) for c in made for n in {0, most})
    if triton_memory.may_run_in_forward(p):
        for size in range(512, min(rows, 8192), 256):
            yield triton_memory.TritonPlan(size, in_forward=True)
            if triton_memory.capacity(p):
                for others in range(1, (rows - size - 128) // size + 1):
                    first = rows - others * size
                    if first > size:
                        made = triton_memory.TritonPlan(size, weight_chunk=4096, in_forward=True, first_chunk=first)
                        if fits(p, made) <= budget:
                            yield made
                            break


@settings(deadline=None)
@given(
    linear(hidden=64, of=64, **weights),
    st.integers(1, 64).map(lambda n: 256 * n),
    st.integers(20, 36).map(lambda n: 1 << n),
    st.integers(0, 1 << 20),
)
def test_the_longest_first_chunk_is_what_fits(p, weight, room, more):
    sizes = triton_memory.sizes_of(p)
    found = sizes.longest_first(weight, room + more)
    fits = [sizes.first_chunk(tokens, weight) <= room + more for tokens in (found, found + 128) if tokens >= 512]
    assert fits == ([True, False] if found >= 512 else [False] * (found == 384))


@settings(deadline=None)
@given(st.integers(1, 1 << 18), st.integers(1, 8192))
def test_sums_of_hidden_gradient(tokens, hidden):
    assert tiling.hidden_sums(tokens, hidden) == tiling.chunk_hidden(tokens, hidden)[1]


@pytest.mark.parametrize("tokens", [513, 5120, 20_000])
@pytest.mark.parametrize("options", [{}, {"per_token_loss": True}, {"weight_grad_out": True}], ids=str)
def test_no_plan_of_a_grid_is_faster(tokens, options):
    p = Problem(tokens, 2048, 128256, "bfloat16", device="cuda", **options)
    least = triton_planner.least_scratch(p)
    for budget in (triton_planner.default_scratch(p), least + 100 * MIB, least + 1000 * MIB):
        chosen = triton_planner.predict(p, triton_planner.plan(p, "auto", budget))
        fitting = [c for c in grid(p, budget) if triton_planner.scratch_bytes(p, c) <= budget]
        assert chosen <= 1.01 * min(triton_planner.predict(p, c) for c in fitting)


def test_of_equal_models_no_product_of_linear_jsd_is_made_twice_in_half_a_gigabyte():
    hidden, vocab = MODELS["llama3.1-8b"]
    student = Problem(4096, hidden, vocab, "bfloat16", device="cuda")
    p = jsd_memory.JsdProblem(vocab, student, replace(student, grad_hidden=False, grad_weight=False))
    c = jsd_triton_memory.plan(p)
    assert c.kept == 4096
    assert jsd_triton_memory.scratch_bytes(p, c) <= 512 * MIB
    # More memory takes more tokens at a time.
    assert jsd_triton_memory.plan(p, "", 2048 * MIB).token_chunk > c.token_chunk


# ------------------------------------------------------------------------------- the framework's own products


@given(PLANNERS["plain"][1], st.integers(1, 1 << 34))
def test_the_chosen_strategy_can_run_in_the_budget(p, budget):
    strategies = TILES[1:] if p.any_grad else TILES[:1]
    for backend in (memory, xla_memory):
        if min(backend.scratch_at_least(p, s) for s in strategies) > budget:
            need = backend.scratch_at_least(p, strategies[-1])
            with pytest.raises(ValueError, match=f"scratch_bytes={budget} is too small.* {need} bytes for strategy"):
                backend.choose_strategy(p, "auto", budget)
        else:
            assert backend.scratch_at_least(p, backend.choose_strategy(p, "auto", budget)) <= budget


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


def test_more_scratch_means_fewer_chunks():
    p = Problem(16384, 4096, 128256, dtype="bfloat16", device="cuda")
    for strategy in ("stash", "recompute"):
        counts = [memory.plan(p, strategy, budget << 30) for budget in (3, 6, 12, 24)]
        counts = [-(-p.tokens // c.token_chunk) * -(-p.vocab // c.vocab_chunk) for c in counts]
        assert counts == sorted(counts, reverse=True)
        assert counts[-1] == 1


def test_default_is_256_mib_or_an_eighth_of_the_logits():
    for problem in (Problem(4096, 1024, 32768), Problem(128, 16, 1000)):
        assert memory.default_scratch(problem, "stash") == 256 * MIB > memory.logits_bytes(problem) // 8
    assert memory.default_scratch(Problem(16384, 1024, 262144), "stash") == 2048 * MIB
    # ... and at least what one chunk needs
    wide = Problem(128, 8192, 65536, "bfloat16", device="cuda")
    assert memory.default_scratch(wide, "stash") >= memory.scratch_at_least(wide, "stash") > 256 * MIB
    large = row_memory.RowsProblem(8192, 128256, "bfloat16", device="cuda")
    assert row_memory.default_scratch(large) == row_memory.logits_bytes(large) // 8 > 256 * MIB
    assert 4 * row_memory.plan(large, "", 1 << 33) * large.vocab == row_memory.logits_bytes(large)
    # ... and on the CPU no more rows than fit in the cache, whatever the budget.
    assert row_memory.plan(row_memory.RowsProblem(4096, 8192), "", 1 << 33) * 8192 <= row_memory.USEFUL["cpu"]


# ------------------------------------------------------------------------------------------------------- the parts


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([1, 64, 128]), st.integers(1, 600))
def test_the_largest_that_fits(total, bound, unit, smallest):
    found = largest(lambda n: n <= bound, smallest, total, unit)
    fitting = {n for n in range(unit, total, unit) if n <= bound} | ({total} if total <= bound else set())
    assert found == max({smallest, *(n for n in fitting if n >= smallest)})


@given(st.integers(1, 5000), st.integers(64, 5000))
def test_chunks_are_the_fewest_and_even(total, most):
    size = even_chunk(total, most)
    assert size <= min(total, most)
    assert -(-total // size) == -(-total // most)
    assert size - total / -(-total // most) <= 64


@pytest.mark.parametrize("shared", [232448, 166912, 101376])
@pytest.mark.parametrize("hidden", [1, 640, 4096])
def test_heuristic_tiles_are_whole(shared, hidden):
    for kernel, t in tiling.heuristic_tiles(shared, hidden).items():
        rows = 256 if kernel == "weight_gradient" else 128
        assert rows % t["rows"] == 128 % t["depth"] == t["columns"] % t["parts"] == 0, kernel


def test_tiles_are_half_as_wide_where_that_saves_a_tenth():
    columns = [tiling.heuristic_tiles(232448, h)["hidden_gradient"]["columns"] for h in (576, 1024, 1152, 1408)]
    assert columns == [128, 256, 128, 256]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("weight_grad_out", [True, False])
def test_the_parts_of_fp8_are_the_larger_phase_and_what_is_kept(grad, weight_grad_out):
    grads = {"grad_hidden": grad, "grad_weight": grad, "weight_grad_out": weight_grad_out}
    problem = Problem(4096, 1024, 32768, "bfloat16", **grads)
    for chunk in (128, 4096):
        forward, backward = fp8_memory.chunk_parts(problem, chunk), fp8_memory.backward_parts(problem)
        kept = fp8_memory.weight_bytes(problem) + sum(fp8_memory.kept_parts(problem).values()) + 88 * 4096
        assert fp8_memory.scratch_bytes(problem, chunk) == kept + max(sum(forward.values()), sum(backward.values()))
