"""The oracle compared with autograd on a plain loop in float64."""

import pytest
import torch
import torch.nn.functional as F
from grouped_common import assert_same, leaves, oracle, problem

from onchip.ops.grouped_matmul.cases import CHECK_CASES


def loop(x, weight, group_sizes, bias=None, row_scale=None, rows=None, scatter_rows=None, num_rows=None, **options):
    """As anyone would write it."""
    total = int(group_sizes.sum())
    t = (x if rows is None else x[rows.long()])[:total]
    groups = torch.arange(len(weight)).repeat_interleave(group_sizes.long())
    y = torch.einsum("tk,tnk->tn", t, weight[groups])
    if bias is not None:
        y = y + bias[groups]
    if "activation" in options:
        half = y.shape[1] // 2
        gate, up = y.split(half, 1) if "gate_up" not in options else y.unflatten(1, (half, 2)).unbind(2)
        y = F.silu(gate) * up
    if row_scale is not None:
        y = y * row_scale[:total, None]
    if scatter_rows is not None:
        return y.new_zeros(num_rows, y.shape[1]).index_add(0, scatter_rows[:total].long(), y)
    tokens = len(x) if rows is None else len(rows)
    return torch.cat([y, y.new_zeros(tokens - total, y.shape[1])])


@pytest.mark.parametrize("case", [c for c in CHECK_CASES if sum(c.sizes) > 0], ids=str)
def test_cases(case):
    arguments, grad = problem(case, torch.float64)
    out = loop(**arguments)
    given = leaves(arguments)
    grads = torch.autograd.grad(out, list(given.values()), grad)
    made = {"out": out} | dict(zip((f"grad_{name}" for name in given), grads, strict=True))
    assert_same(made, oracle(arguments, grad), 1e-13)
