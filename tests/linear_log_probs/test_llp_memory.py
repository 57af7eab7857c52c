"""The plan, and the documented memory formula against measured peaks of the process."""

import pytest
import torch

from onchip.bench.measure import peak_extra_bytes
from onchip.ops.linear_log_probs.torch_op import linear_log_probs
from onchip.vocab import memory
from onchip.vocab.memory import Problem

MIB = 1 << 20
# What matrix products and the allocator take beyond the formula.
SLACK = 6 * MIB


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stats": True, "softcap": True},
        {"dtype": "bfloat16"},
        {"ids": 16, "compacted": True},
        {"grad_hidden": False, "grad_weight": False, "stats": True},
    ],
    ids=str,
)
def test_the_formula_holds(changes):
    problem = Problem(1024, 128, 16384, **{"ids": 1} | changes)
    strategy = "recompute" if problem.any_grad else "forward"
    budget = memory.scratch_at_least(problem, strategy) + 24 * MIB
    formula = memory.scratch_bytes(problem, memory.plan(problem, strategy, budget))
    dtype = getattr(torch, problem.dtype)
    h = torch.randn(1024, 128).to(dtype).requires_grad_(problem.grad_hidden)
    w = torch.randn(16384, 128).to(dtype).requires_grad_(problem.grad_weight)
    ids = torch.randint(16384, (1024, problem.ids))
    if problem.compacted:
        ids[::8] = -100
    options = {"softcap": 10.0} if problem.softcap else {}

    def step():
        out = linear_log_probs(h, w, ids, lse=True, entropy=problem.stats, scratch_bytes=budget, **options)
        if not problem.any_grad:
            return [x for x in out if x is not None]
        return torch.autograd.grad(sum(x.sum() for x in out[:3] if x is not None), (h, w))

    step()
    peak = peak_extra_bytes(step, device="cpu")
    assert formula <= budget
    assert peak <= formula + SLACK
    assert peak >= formula / 2 - SLACK, "the formula promises far more than is used"
