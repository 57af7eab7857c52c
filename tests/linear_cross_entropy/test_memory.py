"""The documented memory formula against measured peaks of the process."""

import pytest
import torch

from onchip.bench.measure import peak_extra_bytes
from onchip.core.sizes import MIB
from onchip.torch import linear_cross_entropy
from onchip.vocab import memory
from onchip.vocab.memory import Problem

# What matrix products and the allocator take beyond the formula.
SLACK = 6 * MIB


def measured(problem, *, ignored=False, hidden=None, **options):
    dtype = getattr(torch, problem.dtype)
    h = torch.randn(problem.tokens, problem.hidden).to(dtype) if hidden is None else hidden
    h.requires_grad_(problem.grad_hidden)
    w = torch.randn(problem.vocab, problem.hidden).to(dtype).requires_grad_(problem.grad_weight)
    y = torch.randint(problem.vocab, h.shape[:-1])
    if ignored:
        y[::8] = -100

    def step():
        loss = linear_cross_entropy(h, w, y, **options)
        inputs = [x for x in (h, w) if x.requires_grad]
        return [loss, *(torch.autograd.grad(loss, inputs) if inputs else ())]

    step()
    return peak_extra_bytes(step, device="cpu")


@pytest.mark.parametrize(
    ("strategy", "changes", "options"),
    [
        ("stash", {}, {}),
        ("recompute", {}, {}),
        ("forward", {"grad_hidden": False, "grad_weight": False}, {}),
        ("stash", {"softcap": True}, {"softcap": 10.0}),
        ("stash", {"dtype": "bfloat16"}, {}),
        ("recompute", {"dtype": "bfloat16"}, {}),
        ("stash", {"compacted": True}, {"ignored": True}),
        ("recompute", {"compacted": True}, {"ignored": True}),
    ],
    ids=str,
)
def test_the_formula_holds(strategy, changes, options):
    problem = Problem(1024, 256, 16384, **changes)
    budget = memory.scratch_at_least(problem, strategy) + 24 * MIB
    formula = memory.scratch_bytes(problem, memory.plan(problem, strategy, budget))
    asked = {} if strategy == "forward" else {"strategy": strategy}
    peak = measured(problem, scratch_bytes=budget, **asked, **options)
    assert formula <= budget
    assert peak <= formula + SLACK
    assert peak >= formula / 2 - SLACK, "the formula promises far more than is used"


@pytest.mark.parametrize("strategy", ["stash", "recompute"])
def test_a_copy_of_hidden_states_that_cannot_be_flattened_counts(strategy):
    problem = Problem(8192, 1024, 256, grad_weight=False, copied=4 * 8192 * 1024)
    formula = memory.scratch_bytes(problem, memory.plan(problem, strategy))
    peak = measured(problem, hidden=torch.randn(2, 4097, 1024)[:, :-1], strategy=strategy)
    assert formula - SLACK <= peak <= formula + SLACK


def test_the_default_is_an_eighth_of_the_logits():
    problem = Problem(4096, 128, 16384)
    assert measured(problem) <= memory.logits_bytes(problem) // 8 + SLACK


def test_another_upstream_gradient_adds_no_more_than_the_gradients_again():
    problem = Problem(1024, 512, 16384)
    h = torch.randn(1024, 512, requires_grad=True)
    w = torch.randn(16384, 512, requires_grad=True)
    y = torch.randint(16384, (1024,))

    def step():
        return torch.autograd.grad(linear_cross_entropy(h, w, y, strategy="stash") / 3, (h, w))

    step()
    gradients = 4 * (h.numel() + w.numel())
    formula = memory.scratch_bytes(problem, memory.plan(problem, "stash"))
    assert peak_extra_bytes(step, device="cpu") <= max(formula, gradients) + SLACK
