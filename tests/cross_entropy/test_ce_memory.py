"""The documented memory formula: plans keep to it, and so do measured peaks of the process."""

import pytest
import torch
from ce_common import computed

from onchip.bench.measure import peak_extra_bytes
from onchip.ops.cross_entropy import spec
from onchip.ops.cross_entropy.torch_op import cross_entropy
from onchip.vocab.chunks import DEFAULT_SCRATCH
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.rows.memory import Problem

MIB = 1 << 20
SLACK = 4 * MIB  # of the allocator


def measured(problem, *, ignored=False, strided=False, inplace=False, **options):
    shape = (2, problem.tokens // 2, problem.vocab)
    x = torch.randn(shape).to(getattr(torch, problem.dtype))
    if strided:  # leading dimensions that can't be flattened
        x = torch.cat([x, x[:, :1]], 1)[:, :-1]
    x.requires_grad_(problem.grad)
    y = torch.randint(problem.vocab, shape[:-1])
    if ignored:
        y[:, ::8] = -100

    def step():
        logits = computed(x) if inplace else x
        out = cross_entropy(logits, y, inplace_backward=inplace, **options)
        loss = out[0] if "return_stats" in options else out
        return [loss, *(torch.autograd.grad(loss, logits) if problem.grad else ())]

    step()
    return peak_extra_bytes(step, device="cpu")


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {}),
        ({}, {"inplace": True}),
        ({"softcap": True}, {"softcap": 10.0}),
        ({"stats": True}, {"return_stats": True}),
        ({"dtype": "bfloat16", "gathered": True}, {"ignored": True}),
        ({"gathered": True}, {"strided": True}),
    ],
    ids=str,
)
def test_the_formula_holds(changes, options, monkeypatch):
    monkeypatch.setitem(row_memory.USEFUL, "cpu", 1 << 22)  # so that it is seen beside the allocator's noise
    problem = Problem(512, 8192, **changes)
    budget = row_memory.default_scratch(problem)
    formula = row_memory.scratch_bytes(problem, row_memory.plan(problem, budget))
    peak = measured(problem, scratch_bytes=budget, **options)
    assert formula <= budget
    assert peak <= formula + SLACK
    assert peak >= formula / 2 - SLACK, "the formula promises far more than is used"


def test_chunks_on_the_cpu_stay_small_whatever_the_budget():
    problem = Problem(4096, 8192)
    assert 4 * row_memory.plan(problem, 1 << 33) * problem.vocab <= 4 * row_memory.USEFUL["cpu"]
    large = Problem(8192, 128256, "bfloat16", device="cuda")
    assert row_memory.default_scratch(large) == DEFAULT_SCRATCH
    assert 4 * row_memory.plan(large, 1 << 33) * large.vocab == row_memory.logits_bytes(large)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("xla", [False, True])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (63, 7), (4097, 50257), (1 << 17, 262144)], ids=str)
def test_plans_fit_their_budget(shape, xla, device):
    problem = Problem(*shape, "bfloat16", device=device, softcap=True, stats=True, gathered=True, xla=xla)
    least = row_memory.scratch_bytes(problem, 1)
    for budget in (least, least + 1, 2 * least, 1 << 40):
        rows = row_memory.plan(problem, budget)
        assert row_memory.scratch_bytes(problem, rows) <= budget
        assert 1 <= rows <= max(1, shape[0])


def test_what_may_overlap():
    for shape, strides in (((2, 3), (3, 1)), ((2, 3), (1, 2)), ((2, 3), (8, 2)), ((1, 3), (0, 1)), ((0, 3), (0, 0))):
        assert not spec.may_overlap(shape, strides)
    for shape, strides in (((2, 3), (0, 1)), ((2, 3), (2, 1)), ((2, 3), (1, 1)), ((3, 2, 2), (2, 2, 1))):
        assert spec.may_overlap(shape, strides)
