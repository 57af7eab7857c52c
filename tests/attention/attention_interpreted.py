"""attention's kernels in plain Triton under Triton's interpreter, on the CPU: what test_interpreted.py starts.

TRITON_INTERPRET=1 python attention_interpreted.py NAME ...     prints a line of JSON for each check
"""

import sys
from unittest import mock

import torch

from interpreter import main, registering
from onchip.attention.triton import op
from onchip.masks import Causal, Documents, Intervals
from onchip.ops.attention.cases import KINDS, AttentionCase
from onchip.ops.attention.checks import CHECKER
from onchip.torch import attention
from shared import assert_within_bounds

CHECKS = {}
check = registering(CHECKS)
DTYPES = (torch.float32, torch.float16)
MASKS = [x for x in KINDS if x != "blocked"]
CASES = [
    *(
        AttentionCase(f"{mask}, {size}", mask, batch=2, queries=150, keys=150, heads=2, key_heads=1,
                      size=size, value_size=size, sinks=i % 3 == 0)
        for i, mask in enumerate(MASKS)
        for size in ((64, 128) if i % 4 == 0 else (64,))
    ),
    AttentionCase("more keys than queries", "causal, last sees last", queries=40, keys=290, size=16, value_size=16),
    AttentionCase("more queries than keys", "causal", queries=290, keys=33, size=24, value_size=128, heads=3,
                  key_heads=3),
    AttentionCase("one token of each", "causal", queries=1, keys=1, size=8, value_size=8),
    AttentionCase("groups of five", "window in documents", batch=1, queries=129, keys=129, heads=5, key_heads=1,
                  size=72, value_size=40, sinks=True, options={"scale": 0.2}),
    AttentionCase("a softcap", "tree", batch=1, queries=150, keys=150, size=128, value_size=128, sinks=True, std=2.0,
                  options={"softcap": 5.0}),
    AttentionCase("a softcap of documents", "causal documents", queries=150, keys=150, size=64, value_size=64, std=3.0,
                  options={"softcap": 10.0}),
]  # fmt: skip
NAMED = {case.name: (i, case) for i, case in enumerate(CASES)}
# Of masks that have two sizes of head the second, and a softcap beside another one.
SLOW = {f"case-{case.name}" for case in CASES if case.name.endswith(", 128")} - {"case-full, 128"}
SLOW |= {"case-a softcap of documents"}


@check(*NAMED)
def case(name):
    """In one of both dtypes and layouts, the next case in the others; kernels are offered float32 here alone."""
    i, problem = NAMED[name]
    with mock.patch.object(op.problem, "refusal", return_value=None):
        assert_within_bounds(
            CHECKER.check_case(problem, DTYPES[i % 2], backend="triton", layout=("bthd", "bhtd")[i // 2 % 2])
        )


def drawn(queries, keys, heads=2, size=64):
    shapes = (queries, heads), (keys, 1), (keys, 1)
    return [torch.randn(1, t, h, size).half().requires_grad_() for t, h in shapes]


@check()
def nothing_is_seen():
    q, k, v = drawn(70, 140)
    k.data[:, 130:] = torch.nan  # in a tile that no query sees
    nothing = torch.full((70,), 7)
    out, lse = attention(q, k, v, Intervals(nothing, nothing), return_lse=True, backend="triton")
    gradients = torch.autograd.grad(out.sum() + 0 * lse.nan_to_num(0, 0, 0).sum(), (q, k, v))
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not any(x.any() for x in gradients)


@check()
def a_packed_batch_equals_its_documents():
    lengths = 1, 64, 127, 3
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    q, k, v = drawn(len(ids), len(ids))
    out = attention(q, k, v, Documents(ids) & Causal(), backend="triton")
    first = 0
    for length in lengths:
        part = slice(first, first + length)
        alone = attention(q[:, part], k[:, part], v[:, part], backend="triton")
        torch.testing.assert_close(out[:, part], alone, atol=1e-3, rtol=1e-2)
        first += length


@check()
def strides_and_what_isnt_wanted():
    q, k, v = drawn(90, 90)
    packed = torch.cat([x.detach().flatten(2) for x in (q, k, v)], 2)
    a, b, c = (x.unflatten(2, (-1, 64)) for x in packed.split([128, 64, 64], 2))
    assert torch.equal(attention(a, b, c, backend="triton"), attention(q, k, v, backend="triton"))
    for wanted in ((q,), (k,), (v,), (k, v)):
        every = torch.autograd.grad(attention(q, k, v, backend="triton").float().square().sum(), (q, k, v))
        out = attention(*(x if any(x is y for y in wanted) else x.detach() for x in (q, k, v)), backend="triton")
        found = torch.autograd.grad(out.float().square().sum(), wanted)
        expected = [x for x, y in zip(every, (q, k, v), strict=True) if any(y is w for w in wanted)]
        assert all(map(torch.equal, found, expected))


if __name__ == "__main__":
    main(CHECKS, sys.argv[1:])
