"""The Triton backend under Triton's interpreter, on the CPU: what test_interpreted.py starts in processes of their own.

Triton reads TRITON_INTERPRET when it is imported.  Products are in float16 alone: the interpreter computes bfloat16
wrongly.  Memory that nobody has written is NaN, so a result that depends on it is NaN too.  The interpreter takes a
tenth of a second for each token, hence few of them.

    TRITON_INTERPRET=1 python jsd_interpreted.py NAME ...     prints a line of JSON for each check
"""

import sys
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from interpreter import main, registering
from onchip.kernels.triton.launch import Launch
from onchip.ops.linear_jsd import triton_memory as triton_spec
from onchip.ops.linear_jsd import triton_op
from onchip.ops.linear_jsd.checks import CHECK_CASES, CHECKER, JsdCase
from onchip.ops.linear_jsd.triton_memory import JsdPlan
from onchip.torch import TopK, jsd, linear_jsd

CHECKS = {}
check = registering(CHECKS)
op = partial(linear_jsd, backend="triton")


def planned(*sizes):
    return mock.patch.object(triton_spec, "plan", return_value=JsdPlan(*sizes))


def assert_right(case, dtype=torch.float16):
    made = CHECKER.check_case(case, dtype, "cpu", backend="triton")
    assert made
    assert all(x.ok for x in made), [x for x in made if not x.ok]


# Of `onchip check`'s cases those that take ways of their own through the products' kernels, with few tokens.
NAMES = ("ragged", "equal models", "per token", "masked vocab", "teacher's logits", "everything", "top-k, tail")
CASES = {c.name: replace(c, tokens=4) for c in CHECK_CASES if c.name in NAMES}


@check(*CASES)
def case(name):
    assert_right(CASES[name])


@check()
def tiles_of_fewer_tokens():
    """As where the compiler keeps too little in registers: of 66 tokens, two."""
    with mock.patch.object(Launch, "spills", return_value=True) as asked:
        assert_right(replace(CASES["everything"], tokens=66))
    assert asked.called


# The same maths from logits: one kernel, far quicker here.
ROWS = ("beta 0.1", "large logits, beta 1.0", "offset 1e4", "one class", "masked vocab")
LOGITS = {
    **{c.name: replace(c, tokens=9, vocab=5000) for c in CHECK_CASES if c.name.startswith("logits, beta")},
    **{c.name: replace(c, tokens=9, student="logits", teacher="logits") for c in CHECK_CASES if c.name in ROWS},
    **{
        f"close, beta {b}": JsdCase(
            "close", 9, 40, 500, student="logits", teacher="logits", noise=0.01, options={"beta": b}
        )
        for b in (0.0, 0.5, 1.0)
    },
    "all": JsdCase(
        "all", 9, 31, 700, student="logits", teacher="logits", ignored=0.3, token_weight=True, padding=(8, 24),
        options={"beta": 0.3, "temperature": 1.5, "hard_weight": 0.2, "reduction": "none"},
    ),
    **{
        f"{c.name}, beta {b}": replace(c, tokens=9, student="logits", ignored=0.3, options={"beta": b} | more)
        for c in CHECK_CASES if c.name.startswith("top-k")
        for b, more in ((0.0, {}), (0.4, {"temperature": 2.0, "hard_weight": 0.3, "reduction": "none"}), (1.0, {}))
    },
    "equal": JsdCase("equal", 5, 31, 300, student="logits", teacher="logits", noise=0.0),
}  # fmt: skip


@check(*LOGITS)
def logits(name):
    assert_right(LOGITS[name], torch.float32)


def problem(tokens=6, hidden=16, vocab=300):
    h, x = (torch.randn(tokens, hidden).half().requires_grad_() for _ in range(2))
    w, v = ((torch.randn(vocab, hidden) / 4).half().requires_grad_() for _ in range(2))
    return h, w, x, v


def gradients(loss, leaves):
    return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]


def assert_close(made, expected, bound=2e-3):
    """float16 results of the same numbers."""
    for p, q in zip(made, expected, strict=True):
        assert float((p.float() - q.float()).norm() / q.float().norm().clamp(min=1e-30)) < bound


@check()
def weights_whose_columns_lie_in_rows():
    """Of both models, and with a padded vocabulary, whose other part is read by nobody."""
    h, w, x, v = problem(4, 24, 304)
    options = {"teacher_grad": True, "vocab": 300}
    expected = gradients(op(h, w, x, v, **options), (h, w, x, v))
    kernels = [p.detach().T.contiguous() for p in (w, v)]
    for kernel in kernels:
        kernel[:, 300:] = torch.nan
        kernel.requires_grad_()
    loss = op(h, kernels[0].T, x, kernels[1].T, **options)
    made = gradients(loss, (h, kernels[0], x, kernels[1]))
    assert_close([p.T if p.ndim > 1 and p.shape[1] == 304 else p for p in made], expected)


@check("recomputed", "held in scratch", "all")
def places(name):
    """Gradients kept in the weight's memory, in scratch, and recomputed, in two chunks of tokens and vocabulary."""
    how = {
        "recomputed": ((4, 131, 600), (128, 0, 512, 256)),
        "held in scratch": ((132, 72, 300), (128, 256, 512, 256)),  # 72 columns have no room for a block of tokens
        "all": ((132, 136, 300), (128, 128, 256, 256)),
    }
    (tokens, hidden, vocab), plan = how[name]
    torch.manual_seed(1)
    h, w, x, v = problem(tokens, hidden, vocab)
    y = torch.full((tokens,), -100)
    y[:2], y[-3:] = 5, vocab - 1
    y[:tokens:33] = 7
    options = {"target": y, "temperature": 2.0, "hard_weight": 0.3, "teacher_grad": name == "all"}
    leaves = (h, w, x, v) if options["teacher_grad"] else (h, w)
    with planned(*plan):
        made = gradients(op(h, w, x, v, **options), leaves)
    assert_close(made, gradients(linear_jsd(h, w, x, v, backend="plain", **options), leaves))


@check()
def auto_takes_kernels():
    """For each kind of teacher."""
    h, w, *_ = problem()
    known = TopK(torch.zeros(6, 1, dtype=torch.int64), torch.full((6, 1), -2.0), "log_probs", "tail")
    with mock.patch.object(triton_op, "run", side_effect=NotImplementedError):
        for teacher in ({"teacher_topk": known}, {"teacher_logits": torch.ones(6, 300)}):
            with pytest.raises(NotImplementedError):
                linear_jsd(h, w, **teacher)


@check()
def a_topk_whose_columns_are_contiguous():
    z = torch.randn(3, 300)
    values, ids = torch.randn(3, 300).log_softmax(-1).topk(4)
    turned = TopK(ids.T.contiguous().T, values.T.contiguous().T, "log_probs", "tail")
    losses = [
        jsd(z, teacher_topk=known, reduction="none", backend="triton")
        for known in (turned._replace(indices=ids), turned)
    ]
    assert torch.equal(*losses)


@check()
def what_is_refused_says_why():
    h, w, x, v = problem()
    with pytest.raises(ValueError, match="no kernel for the gradient of teacher_logits"):
        op(h, w, teacher_logits=torch.zeros(6, 300, requires_grad=True), teacher_grad=True)
    with pytest.raises(ValueError, match="not float32"):
        op(*(p.float() for p in (h, w, x, v)))
    with pytest.raises(ValueError, match="on backend 'triton', which needs"):
        op(h, w, x, v, scratch_bytes=1)


TOPK_OF_EACH = {
    "logits-top-k, tail, beta 0.4",
    "logits-top-k, truncated, beta 0.0",
    "logits-top-k, renormalised, beta 1.0",
}
# What differs from another by a number.
SLOW = (
    "tiles_of_fewer_tokens",
    *(f"case-{x}" for x in ("per token", "equal models", "masked vocab", "top-k, tail")),
    *(f"places-{x}" for x in ("recomputed", "held in scratch")),
    *(f"logits-{x}, beta {b}" for x in ("logits", "close") for b in (0.0, 1.0)),
    *(x for x in CHECKS if x.startswith("logits-top-k") and x not in TOPK_OF_EACH),
    *(f"logits-{x}" for x in ("beta 0.1", "large logits, beta 1.0", "offset 1e4")),
)
assert CHECKS.keys() >= set(SLOW)

if __name__ == "__main__":
    main(CHECKS, sys.argv[1:])
