"""The plan, and the documented memory formula against measured peaks of the process."""

import pytest
import torch

from onchip.bench.measure import peak_extra_bytes
from onchip.ops.linear_log_probs import spec
from onchip.ops.linear_log_probs.spec import Problem
from onchip.ops.linear_log_probs.torch_op import linear_log_probs

MIB = 1 << 20
# What matrix products and the allocator take beyond the formula.
SLACK = 6 * MIB


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"entropy": True, "softcap": True},
        {"dtype": "bfloat16"},
        {"ids": 16, "compacted": True},
        {"grad_hidden": False, "grad_weight": False, "entropy": True},
    ],
    ids=str,
)
def test_the_formula_holds(changes):
    problem = Problem(1024, 128, 16384, **changes)
    strategy = "recompute" if problem.any_grad else "forward"
    budget = spec.scratch_at_least(problem, strategy) + 24 * MIB
    formula = spec.scratch_bytes(problem, spec.plan(problem, strategy, budget))
    dtype = getattr(torch, problem.dtype)
    h = torch.randn(1024, 128).to(dtype).requires_grad_(problem.grad_hidden)
    w = torch.randn(16384, 128).to(dtype).requires_grad_(problem.grad_weight)
    ids = torch.randint(16384, (1024, problem.ids))
    if problem.compacted:
        ids[::8] = -100
    options = {"softcap": 10.0} if problem.softcap else {}

    def step():
        out = linear_log_probs(h, w, ids, lse=True, entropy=problem.entropy, scratch_bytes=budget, **options)
        if not problem.any_grad:
            return [x for x in out if x is not None]
        return torch.autograd.grad(sum(x.sum() for x in out[:3] if x is not None), (h, w))

    step()
    peak = peak_extra_bytes(step, device="cpu")
    assert formula <= budget
    assert peak <= formula + SLACK
    assert peak >= formula / 2 - SLACK, "the formula promises far more than is used"


@pytest.mark.parametrize("backend", ["torch", "xla"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("strategy", ["forward", "recompute"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_fits_its_budget(backend, device, strategy, dtype):
    for tokens, hidden, vocab in ((1, 16, 70), (333, 40, 2500), (8192, 4096, 128256), (4097, 31, 50257)):
        problem = Problem(tokens, hidden, vocab, 2, dtype, device=device, backend=backend, entropy=True, softcap=True)
        least = spec.scratch_at_least(problem, strategy)
        for budget in (None, least, 2 * least, 10 * least):
            config = spec.plan(problem, strategy, budget)
            assert 1 <= config.token_chunk <= tokens
            assert 1 <= config.vocab_chunk <= vocab
            bound = spec.default_scratch(problem, strategy) if budget is None else budget
            # A last chunk that is padded to a whole one may take a little more with 'xla'.
            assert spec.scratch_bytes(problem, config) <= bound or (backend == "xla" and budget == least)


def test_no_tokens_have_a_plan():
    assert spec.plan(Problem(0, 16, 70), "forward").vocab_chunk == 70
