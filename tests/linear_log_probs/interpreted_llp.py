"""The Triton backend under Triton's interpreter, on the CPU: what test_llp_triton.py starts (interpreter.py).

TRITON_INTERPRET=1 python interpreted_llp.py NAME ...     prints a line of JSON for each check
"""

import sys
from contextlib import nullcontext
from functools import partial
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from common_llp import assert_right, small_problem

from interpreter import main
from onchip.ops.linear_log_probs import triton_op, triton_spec
from onchip.ops.linear_log_probs.cases import Case, make_inputs
from onchip.ops.linear_log_probs.checks import as_arguments, plain_linear_log_probs
from onchip.ops.linear_log_probs.spec import Problem
from onchip.ops.linear_log_probs.torch_op import linear_log_probs
from onchip.vocab.triton import memory as head_spec

CHECKS = {}
op = partial(linear_log_probs, backend="triton")
right = partial(assert_right, dtype=torch.float16, device="cpu", backend="triton")


def check(*arguments):
    """Register a function, once for each of `arguments` if there are any."""

    def register(f):
        for x in arguments or ((),):
            parts = x if isinstance(x, tuple) else (x,)
            CHECKS["-".join([f.__name__, *map(str, parts)])] = partial(f, *parts)
        return f

    return register


CASES = {
    # Pointers (31 is no multiple of 8) and two tiles of the vocabulary; descriptors with several ids.
    "one id": Case("one id", 24, 31, 300),
    "several": Case("several", 24, 32, 300, ids=5, ignored_ids=0.2, ignored=0.2, bias=True),
    # A log-probability of -1e-3 is that of one of the ids, and not of the first.
    "peaked": Case("peaked", 20, 96, 300, target_prob=0.999, ids=3),
    "masked": Case("masked", 20, 32, 300, masked=200),
    "large": Case("large", 20, 32, 300, logit_std=30.0, ids=2),
    "everything": Case(
        "everything", 24, 24, 300, bias=True, ids=3, ignored=0.3, ignored_ids=0.2, token_temperature=True,
        options={"softcap": 5.0, "logit_scale": 0.5},
    ),
    "one class": Case("one class", 20, 16, 1, ids=2),
    "all ignored": Case("all ignored", 20, 16, 70, ignored=1.0, ids=2),
    "a token": Case("a token", 1, 16, 70, options={"temperature": 0.7}),
    "none": Case("none", 0, 16, 70, ids=2),
}  # fmt: skip
for _name, _entropy in product(CASES, (False, True)):
    CHECKS[f"case-{_name}-{'entropy' if _entropy else 'plain'}"] = partial(right, CASES[_name], entropy=_entropy)


@check()
def mixed():
    """Exponentials in the weight gradient's memory, in scratch, and computed again in two chunks."""
    config = head_spec.TritonConfig(264, 256, 256, stashed=128, overflow=128, halves=True)
    with mock.patch.object(head_spec, "plan", return_value=config) as planned:
        right(Case("mixed", 264, 136, 400, bias=True, ids=2, ignored=0.02), entropy=True)
    assert planned.called


@check("plain", "softcap")
def a_weight_whose_columns_lie_in_rows(option):
    case = Case("turned", 20, 40, 304, bias=True, ids=3, options={"softcap": 5.0} if option == "softcap" else {})
    (h, w, y, b), keywords = as_arguments(case, make_inputs(case), torch.float16, "cpu")
    kernel = w.detach().T.contiguous().requires_grad_()
    results = []
    for weight, leaf in ((w, w), (kernel.T, kernel)):
        out = op(h, weight, y, b, entropy=True, **keywords)
        grads = torch.autograd.grad(out.log_prob.sum() + out.entropy.sum(), (h, b, leaf))
        results.append([out.log_prob, out.entropy, *grads])
    expected, made = results
    assert_close([*made[:4], made[4].T], [x.detach().double() for x in expected])


@check("entropy", "softcap")
def chunks_computed_again(option):
    """Ids in several chunks of the vocabulary, and none in some."""
    case = Case("chunks", 16, 24, 700, ids=2, options={"softcap": 5.0} if option == "softcap" else {})
    problem = Problem(16, 24, 700, 2, "float16", softcap=option == "softcap", entropy=option == "entropy", top1=True)
    least = triton_spec.least_scratch(problem)
    assert triton_spec.plan(problem, least).vocab_chunk == 256
    right(case, entropy=option == "entropy", scratch_bytes=least)
    with pytest.raises(ValueError, match=f"the smallest chunk needs {least} bytes"):
        right(case, entropy=option == "entropy", scratch_bytes=least - 1)


@check()
def forward_in_chunks_of_tokens():
    case = Case("forward", 140, 24, 300, ids=2, ignored=0.05, token_temperature=True)
    arguments, keywords = as_arguments(case, make_inputs(case), torch.float16, "cpu")
    config = head_spec.TritonConfig(128)
    with torch.no_grad(), mock.patch.object(head_spec, "plan", return_value=config):
        out = op(*arguments, **keywords, entropy=True, lse=True, top1=True)
    expected = plain_linear_log_probs(
        *[x.detach().double() if x is not None and x.is_floating_point() else x for x in arguments], **keywords
    )
    for x, y in zip(out, expected, strict=True):
        assert x.shape == y.shape
        assert torch.allclose(x.double(), y.double(), atol=1e-5)


def exact_gradients(h, w, ids, upstream, **options):
    """Of log_prob, lse and entropy, in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (h, w)]
    out = plain_linear_log_probs(*leaves, ids, **options)
    named = {"log_prob": out.log_prob, "lse": out.lse, "entropy": out.entropy}
    pairs = [(named[name], g.double()) for name, g in upstream.items()]
    return torch.autograd.grad([x for x, _ in pairs], leaves, [g for _, g in pairs])


def assert_close(made, expected, bound=2e-3):
    """float16 gradients: one rounding each of the exponentials, of the operand rows and of the result."""
    for g, q in zip(made, expected, strict=True):
        assert float((g.double() - q).norm()) <= bound * float(q.norm()), (g, q)


@check()
def upstream_gradients_of_any_kind():
    """Expanded, strided, zero, for some of the outputs alone; and where one output is asked for alone."""
    ids = 3
    h, w, y, _ = small_problem(ids, tokens=8, dtype=torch.float16)
    y[1, :2, 0] = -100
    for name, g in {
        "log_prob": torch.ones(1, 1, 1).expand(2, 4, ids),
        "log_prob ": torch.randn(ids, 4, 2).transpose(0, 2),
        "log_prob  ": torch.zeros(2, 4, ids),
        "entropy": torch.randn(4, 2).T,
        "lse": torch.randn(2, 8)[:, ::2],
    }.items():
        name = name.strip()
        out = op(h, w, y, entropy=name == "entropy", lse=name == "lse")
        value = out if name == "log_prob" else getattr(out, name)
        assert_close(torch.autograd.grad(value, (h, w), g), exact_gradients(h, w, y, {name: g}))


@check()
def an_id_that_cancels_the_softmax_is_not_rounded_away():
    """A student that agrees with its teacher: of p - t nothing is left but the others' entries."""
    h, w, _, _ = small_problem(tokens=4, dtype=torch.float16)
    y = torch.arange(70).expand(2, 2, 70).contiguous()
    g = torch.softmax(h.detach().double() @ w.detach().double().T, -1)
    made = torch.autograd.grad(op(h, w, y), (h, w), g.float())
    for x, scale in zip(made, (w, h), strict=True):
        assert float(x.double().abs().max()) < 1e-5 * float(scale.detach().abs().max())


@check()
def bad_ids():
    h, w, y, _ = small_problem(2, dtype=torch.float16)
    good = op(h, w, y, top1=True, entropy=True)
    y[1, 7, 1], y[0, 0], y[0, 2, 0] = 70, -5, -100
    for entropy in (False, True):
        out = op(h, w, y, entropy=entropy, lse=True, top1=True)
        bad = (y != -100) & ((y < 0) | (y >= 70))
        assert torch.equal(out.log_prob.isnan(), bad)
        assert out.log_prob[0, 2, 0] == 0
        left = ~bad & (y != -100)
        assert torch.allclose(out.log_prob[left], good.log_prob[left], atol=1e-5)
        assert torch.equal(out.top1, good.top1)
        (grad,) = torch.autograd.grad(out.log_prob.sum(), h)
        assert torch.equal(grad.isnan().all(-1), bad.any(-1))
    with pytest.raises(ValueError, match=r"ids\[0, 0, 0\] is -5"):
        op(h, w, y, check_inputs=True)


@check((1, True), (2, False))
def nothing_leaks_from_ignored_tokens(ids, entropy):
    h, w, y, b = small_problem(ids, dtype=torch.float16)
    y[0, 3] = y[1, 5] = -100
    gone = (y == -100).all(-1)
    zeroed = h.detach().masked_fill(gone[..., None], 0).requires_grad_()
    with torch.no_grad():
        h[0, 3], h[1, 5] = np.nan, np.inf
    upstream = torch.ones(2, 12, ids)
    upstream[0, 3] = np.nan
    made = []
    for x in (h, zeroed):
        out = op(x, w, y, b, entropy=entropy, lse=True)
        outputs, grads = [out.log_prob, out.lse], [upstream, upstream[..., 0]]
        if entropy:
            outputs, grads = [*outputs, out.entropy], [*grads, upstream[..., 0]]
        assert all((v[gone] == 0).all() for v in outputs)
        made.append(torch.autograd.grad(outputs, (x, w, b), grads))
    assert (made[0][0][gone] == 0).all()
    assert all(torch.equal(p, q) and p.isfinite().all() for p, q in zip(*made, strict=True))


@check((1, True), (2, False), (2, True))
def a_retained_graph(ids, entropy):
    """Exponentials in the weight gradient's memory, and in the last case in scratch."""
    h, w, y, b = small_problem(ids, dtype=torch.float16)
    scratch = head_spec.TritonConfig(24, 256, 256, overflow=128)
    with mock.patch.object(head_spec, "plan", return_value=scratch) if ids == 2 and entropy else nullcontext():
        out = op(h, w, y, b, entropy=entropy, lse=True)
    value = (out.log_prob * torch.linspace(-1, 2, ids)).sum() + sum(x.sum() for x in out[1:3] if x is not None)
    first = torch.autograd.grad(value, (h, w, b), retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.mul_(3)  # what a caller does with its gradients must not reach the graph
    second = torch.autograd.grad(value, (h, w, b), retain_graph=True)
    third = torch.autograd.grad(value, (h, w, b), create_graph=True)
    assert all(torch.equal(p, q) and torch.equal(p, r) for p, q, r in zip(kept, second, third, strict=True))
    with pytest.raises(RuntimeError, match="linear_log_probs: a backward of the backward is not supported"):
        sum(g.norm() for g in third).backward()


@check()
def any_strides_and_inputs_left_alone():
    h, w, y, _ = small_problem(2, dtype=torch.float16)
    columns = h.detach().permute(2, 1, 0).contiguous().permute(2, 1, 0).requires_grad_()
    wide = torch.cat([w.detach(), torch.full_like(w, np.nan)], 1)[:, :16].requires_grad_()
    spread = torch.stack([y, y + 1], -1)[..., 0].to(torch.int32).transpose(0, 1).contiguous().transpose(0, 1)
    tau = torch.rand(12, 2).T + 0.5
    before = [(x.detach().clone(), x._version) for x in (columns, wide, spread, tau)]
    made = []
    for arguments in ((h, w, y, tau.contiguous()), (columns, wide, spread, tau)):
        out = op(*arguments[:3], temperature=arguments[3])
        made.append((out, *torch.autograd.grad(out.sum(), arguments[:2])))
    assert all(torch.equal(p, q) for p, q in zip(*made, strict=True))
    after = (columns, wide, spread, tau)
    assert all(torch.equal(x, old) and x._version == v for x, (old, v) in zip(after, before, strict=True))


@check(False, True)
def only_what_needs_a_gradient_gets_one(entropy):
    combinations = [(False, True, False), (True, False, True)] if entropy else product((False, True), repeat=3)
    for needs in combinations:
        h, w, y, b = small_problem(2, tokens=8, dtype=torch.float16)
        leaves = [x.requires_grad_(need) for x, need in zip((h, w, b), needs, strict=True)]
        out = op(h, w, y, b, entropy=entropy, top1=True)
        value = out.log_prob.sum() + (out.entropy.sum() if entropy else 0)
        assert value.requires_grad == any(needs)
        wanted = [x for x in leaves if x.requires_grad]
        if wanted:
            exact = [x.detach().double().requires_grad_() for x in (h, w, b)]
            plain = plain_linear_log_probs(exact[0], exact[1], y, exact[2])
            expected = plain.log_prob.sum() + (plain.entropy.sum() if entropy else 0)
            kept = [x for x, need in zip(exact, needs, strict=True) if need]
            assert_close(torch.autograd.grad(value, wanted), torch.autograd.grad(expected, kept))


@check(False, True)
def autocast(entropy):
    """Float32 parameters: their gradients hold twice the tokens' exponentials, and are not rounded."""
    h, w, y, _ = small_problem(2)
    with torch.autocast("cpu", torch.float16):
        out = op(h, w, y, entropy=entropy, lse=True)
    upstream = {name: torch.randn_like(x) for name, x in out._asdict().items() if name != "top1" and x is not None}
    made = torch.autograd.grad([getattr(out, name) for name in upstream], (h, w), list(upstream.values()))
    assert all(g.dtype == torch.float32 for g in made)
    assert_close(made, exact_gradients(h.half(), w.half(), y, upstream))


def objective(h, w, y, b):
    out = op(torch.tanh(h), w, y, b, entropy=True, softcap=20.0)
    return out.log_prob.sum() + 0.3 * (out.entropy**2).sum()


@check()
def torch_compile_takes_it_whole():
    h, w, y, b = small_problem(2, tokens=8, dtype=torch.float16)
    compiled = torch.compile(objective, fullgraph=True, backend="aot_eager")
    values = [f(h, w, y, b) for f in (objective, compiled)]
    assert torch.equal(*values)
    grads = [torch.autograd.grad(value, (h, w, b)) for value in values]
    assert all(torch.equal(p, q) for p, q in zip(*grads, strict=True))


@check()
def torch_compile_with_sizes_that_change():
    def f(h, w, y):
        return op(h, w, y).sum()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (8, 10):
        h, w, y, _ = small_problem(2, tokens=tokens, dtype=torch.float16)
        for p, q in zip(*(torch.autograd.grad(g(h, w, y), (h, w)) for g in (f, compiled)), strict=True):
            assert torch.equal(p, q)


@check((1, True), (2, False))
def the_schema_is_true(ids, entropy):
    """The operators change what they say they change, and alias nothing."""
    h, w, y, b = small_problem(ids, tokens=8, dtype=torch.float16)
    plan = triton_op.plan(Problem(8, 16, 70, ids, "float16", grad_bias=True, entropy=entropy), None)
    numbers = (torch.float16, -100, None, 1.0, 1.0, False)
    arguments = triton_op.pack(triton_op.Arguments(h, w, b, y, None, *numbers, *plan, entropy, True, True, True))
    for name in ("test_schema", "test_autograd_registration", "test_faketensor"):
        torch.library.opcheck(triton_op._forward_op, arguments, test_utils=name)


if __name__ == "__main__":
    main(CHECKS, sys.argv[1:])
