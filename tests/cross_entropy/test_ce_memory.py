"""The documented memory formula: plans keep to it, and so do measured peaks of the process."""

import pytest
import torch
from ce_common import computed

from onchip.bench.measure import peak_extra_bytes
from onchip.ops.cross_entropy import spec
from onchip.ops.cross_entropy.torch_op import cross_entropy
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


def test_what_may_overlap():
    for shape, strides in (((2, 3), (3, 1)), ((2, 3), (1, 2)), ((2, 3), (8, 2)), ((1, 3), (0, 1)), ((0, 3), (0, 0))):
        assert not spec.may_overlap(shape, strides)
    for shape, strides in (((2, 3), (0, 1)), ((2, 3), (2, 1)), ((2, 3), (1, 1)), ((3, 2, 2), (2, 2, 1))):
        assert spec.may_overlap(shape, strides)
