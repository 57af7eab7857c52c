"""The Triton backend under Triton's interpreter, on the CPU: what test_triton_interpreter.py starts (interpreter.py).

TRITON_INTERPRET=1 python interpreted.py NAME ...     prints a line of JSON for each check
"""

import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import assert_right, gradients, memory_off_by_256, mixed_plan, small_problem

from interpreter import main
from onchip.ops.linear_cross_entropy.cases import CHECK_CASES, Case, make_inputs
from onchip.ops.linear_cross_entropy.checks import as_arguments, run_oracle
from onchip.oracle.checks import float32_bounds, relative_error
from onchip.torch import linear_cross_entropy
from onchip.vocab.memory import Problem
from onchip.vocab.triton import memory as triton_spec

STRATEGIES = ("stash", "recompute")
# The interpreter takes 18 s for it.
TOO_LARGE = ("gpt-2 vocab",)
CHECKS = {}
op = partial(linear_cross_entropy, backend="triton")
right = partial(assert_right, dtype=torch.float16, device="cpu", backend="triton")


def check(*arguments):
    """Register a function, once for each of `arguments` if there are any."""

    def register(f):
        for x in arguments or ((),):
            parts = x if isinstance(x, tuple) else (x,)
            CHECKS["-".join([f.__name__, *map(str, parts)])] = partial(f, *parts)
        return f

    return register


for _case, _strategy in product((case for case in CHECK_CASES if case.name not in TOO_LARGE), STRATEGIES):
    # Fewer tokens where more are more of the same: the interpreter takes 20 ms for each.
    _tokens = _case.tokens if _case.name in ("aligned", "ragged") else min(_case.tokens, 40)
    CHECKS[f"case-{_case}-{_strategy}"] = partial(right, replace(_case, tokens=_tokens), strategy=_strategy)


def half_problem(tokens, hidden, vocab, **changes):
    return Problem(tokens, hidden, vocab, "float16", device="cuda", **changes)


MIXED = {
    # 136 is a multiple of 8, for descriptors; 131 is none.
    "descriptors": Case("mixed", 300, 136, 600),
    "pointers": Case("mixed", 300, 131, 600),
    "everything held": Case(
        "mixed", 300, 136, 600, bias=True, ignored=0.1, token_weight=True, token_temperature=True,
        options={"z_loss": 1e-3, "logit_scale": 0.5, "normalizer": 100},
    ),
    "per token": Case("mixed", 300, 136, 600, ignored=0.1, zipf=True, options={"reduction": "none"}),
    "large logits": Case("mixed", 300, 136, 600, logit_std=30.0),
    "few tokens left": Case("mixed", 300, 136, 600, ignored=0.8),
}  # fmt: skip


@check(*MIXED)
def mixed(name):
    with mixed_plan(300, halves=name in ("pointers", "everything held")) as planned:
        right(MIXED[name])
    assert planned.called


@check("descriptors", "pointers", "everything held", "softcap")
def a_weight_whose_columns_lie_in_rows(name):
    case = MIXED.get(name, Case("softcap", 140, 136, 600, bias=True, options={"softcap": 5.0}))
    (h, w, y, b), keywords = as_arguments(case, make_inputs(case), torch.float16, "cpu")
    kernel = w.detach().T.contiguous().requires_grad_()
    leaves = [x for x in (h, b) if x is not None]
    with nullcontext() if name == "softcap" else mixed_plan(300):
        expected, loss = (op(h, x, y, b, **keywords) for x in (w, kernel.T))
    assert abs(float(loss - expected)) < 1e-6
    to_weight, *others = gradients(expected, w, *leaves)
    assert_gradients(gradients(loss, kernel, *leaves), [g.double() for g in (to_weight.T, *others)])


@check("softcap", "label_smoothing")
def many_chunks_computed_again(option):
    case = Case("chunks", 200, 40, 1100, bias=True, ignored=0.2, options={option: {"softcap": 5.0}.get(option, 0.1)})
    problem = half_problem(
        200, 40, 1100, grad_bias=True, stats=True, softcap=option == "softcap", smoothing=option != "softcap"
    )
    least = triton_spec.scratch_bytes(problem, triton_spec.TritonConfig(200, 256, 256))
    assert triton_spec.plan(problem, "auto", least).vocab_chunk == 256
    right(case, scratch_bytes=least)


@check(*product((0, 1), STRATEGIES))
def few_tokens(tokens, strategy):
    right(Case("few", tokens, 31, 123), strategy=strategy)


def float64(h, w, y, b=None, **options):
    """Leaves in float64 with the same numbers, and F.cross_entropy of them."""
    leaves = [x.detach().double().requires_grad_() for x in (h, w, b) if x is not None]
    logits = F.linear(*leaves)
    return leaves, F.cross_entropy(logits.flatten(0, -2), y.flatten(), **options)


def relative(made, expected):
    return float((made.double() - expected).norm() / expected.norm())


def assert_gradients(made, expected, bound=1e-3):
    """float16 gradients: one rounding each of the exponentials, of the operand rows and of the result."""
    for g, q in zip(made, expected, strict=True):
        assert relative(g, q) < bound, (relative(g, q), bound)


@check(*STRATEGIES)
def a_bad_label(strategy):
    h, w, y, _ = small_problem(dtype=torch.float16)
    good = op(h, w, y, reduction="none", return_stats=True)
    y[1, 7] = 70
    loss, stats = op(h, w, y, reduction="none", strategy=strategy, return_stats=True)
    others = torch.ones_like(y, dtype=torch.bool)
    others[1, 7] = False
    assert loss[1, 7].isnan()
    assert stats.log_prob[1, 7].isnan()
    assert not stats.correct[1, 7]
    assert torch.equal(loss[others], good[0][others])
    # Without a target its tile's sum is rounded in another order.
    assert torch.allclose(stats.lse, good[1].lse, rtol=1e-6)
    grads = gradients(loss, h, w, grad=torch.ones_like(loss))
    assert grads[0][1, 7].isnan().all()
    assert grads[0][others].isfinite().all()
    assert op(h, w, y, strategy=strategy).isnan()
    with pytest.raises(ValueError, match=r"target\[1, 7\] is 70"):
        op(h, w, y, strategy=strategy, check_inputs=True)


@check(*product(STRATEGIES, (16, 19)))
def weight_grad_out(strategy, hidden):
    """Each micro-batch adds to it; weight itself gets nothing."""
    total, expected = torch.full((70, hidden), 0.5), torch.full((70, hidden), 0.5, dtype=torch.float64)
    first = True
    for seed in (0, 1):
        h, w, y, b = small_problem(hidden=hidden, dtype=torch.float16, bias=True, seed=seed)
        (op(h, w, y, b, weight_grad_out=total, strategy=strategy) * (1 if first else 3)).backward()
        leaves, loss = float64(h, w, y, b)
        grads = gradients(loss * (1 if first else 3), *leaves)
        assert w.grad is None
        assert_gradients((h.grad, b.grad), (grads[0], grads[2]))
        expected += grads[1]
        first = False
    assert relative(total - 0.5, expected - 0.5) < 1e-3
    # A backward that isn't asked for the weight's leaves it alone.
    before = total.clone()
    to_hidden = torch.autograd.grad(op(h, w, y, b, weight_grad_out=total, strategy=strategy) * 3, h)
    assert torch.equal(to_hidden[0], h.grad)
    assert torch.equal(total, before)


@check("stash", "recompute", "mixed")
def a_retained_graph(strategy):
    case = Case("retained", 300 if strategy == "mixed" else 40, 136, 250, bias=True)
    (h, w, y, b), _ = as_arguments(case, make_inputs(case), torch.float16, "cpu")
    with mixed_plan(300) if strategy == "mixed" else nullcontext():
        loss = op(h, w, y, b, strategy="auto" if strategy == "mixed" else strategy)
    first = torch.autograd.grad(loss, (h, w, b), retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.mul_(3)  # what a caller does with its gradients must not reach the graph
    second = torch.autograd.grad(loss, (h, w, b), retain_graph=True)
    third = torch.autograd.grad(loss, (h, w, b))
    assert all(torch.equal(p, q) and torch.equal(p, r) for p, q, r in zip(kept, second, third, strict=True))


@check("stash", "mixed", "retained")
def memory_at_multiples_of_256_bytes(strategy):
    with memory_off_by_256():
        if strategy == "retained":
            a_retained_graph("mixed")
        else:
            with mixed_plan(300) if strategy == "mixed" else nullcontext():
                right(Case("mixed", 300, 136, 600, bias=True, ignored=0.1))


@check("stash")
def a_tile_of_minus_infinity_times_a_scale(strategy):
    h, w, y, _ = small_problem(vocab=300, dtype=torch.float16)
    b = torch.zeros(300, dtype=torch.float16).masked_fill(torch.arange(300) < 256, -torch.inf)
    y = 256 + y % 44
    loss = op(h, w, y, b, logit_scale=4.0, strategy=strategy)
    leaves, expected = float64(h, 4 * w, y, b)
    assert abs(float(loss - expected)) < 1e-4
    made, (to_hidden, to_weight, _) = gradients(loss, h, w), gradients(expected, *leaves)
    assert_gradients(made, (to_hidden, 4 * to_weight), bound=2e-3)


@check(*STRATEGIES, "out")
def repeated_labels(how):
    """The first two tokens of a vocabulary entry have their target's term added apart, further ones don't."""
    case = Case("repeated", 260, 136, 600)
    (h, w, _, _), _ = as_arguments(case, make_inputs(case), torch.float16, "cpu")
    # One, two, three and many tokens, in one block of them and across blocks, and none where the first is ignored.
    y = torch.arange(260)
    y[1] = y[2] = 1
    y[3] = y[130] = y[259] = 259
    y[10:60] = 7
    y[200:250] = 7
    y[70], y[71] = -100, 70
    out = torch.zeros(600, 136) if how == "out" else None
    loss = op(h, w, y, weight_grad_out=out, strategy="auto" if how == "out" else how)
    loss.backward()
    leaves, expected = float64(h, w, y)
    assert abs(float(loss - expected)) < 1e-5
    grads = gradients(expected, *leaves)
    got = w.grad if out is None else out
    assert_gradients((h.grad, got), grads)
    for label in (1, 7, 70, 100, 259):
        assert relative(got[label], grads[1][label]) < 1e-3
        assert relative(h.grad[y == label], grads[0][y == label]) < 1e-3


@check("everything", "plain")
def forward_in_chunks_of_tokens(options):
    everything = options == "everything"
    case = Case(
        "forward", 300, 40, 600, bias=everything, ignored=0.2, token_weight=everything, token_temperature=everything,
        options={"softcap": 5.0, "label_smoothing": 0.1, "z_loss": 1e-3, "reduction": "sum"} if everything else {},
    )  # fmt: skip
    inputs = make_inputs(case)
    arguments, keywords = as_arguments(case, inputs, torch.float16, "cpu")
    problem = half_problem(
        300, 40, 600, grad_hidden=False, grad_weight=False, stats=True, softcap=everything, smoothing=everything
    )
    budget = triton_spec.scratch_bytes(problem, triton_spec.TritonConfig(128))
    assert triton_spec.plan(problem, "auto", budget).token_chunk == 128
    with torch.no_grad():
        loss, stats = op(*arguments, **keywords, return_stats=True, scratch_bytes=budget)
    oracle = run_oracle(arguments, keywords, inputs)
    bounds = float32_bounds(case, oracle)
    made = {"loss": loss} | stats._asdict()
    for name in ("loss", "lse", "log_prob", "entropy"):
        assert relative_error(made[name], getattr(oracle, name)) <= bounds[name]
    assert (stats.correct.numpy() == oracle.correct).all()


@check(*product(STRATEGIES, ("none", "mean")))
def nothing_leaks_from_ignored_tokens(strategy, reduction):
    h, w, y, b = small_problem(dtype=torch.float16, bias=True)
    y[0, 3] = y[1, 5] = -100
    zeroed = h.detach().masked_fill((y == -100)[..., None], 0).requires_grad_()
    with torch.no_grad():
        h[0, 3], h[1, 5] = np.nan, np.inf
    upstream = torch.ones(y.shape if reduction == "none" else ())
    if reduction == "none":
        upstream[0, 3] = np.nan
    made, clean = (
        gradients(op(x, w, y, b, reduction=reduction, strategy=strategy), x, w, b, grad=upstream) for x in (h, zeroed)
    )
    assert (made[0][y == -100] == 0).all()
    assert all(torch.equal(p, q) and p.isfinite().all() for p, q in zip(made, clean, strict=True))


@check(*STRATEGIES)
def any_strides_and_inputs_left_alone(strategy):
    h, w, y, b = small_problem(tokens=60, dtype=torch.float16, bias=True)
    ones = torch.ones(2, 30)
    usual = {"hidden": h, "weight": w, "target": y, "bias": b, "token_weight": ones, "temperature": ones}

    def run(**changes):
        arguments = usual | changes
        leaves = [arguments[name] for name in ("hidden", "weight", "bias")]
        before = [(t.detach().clone(), t._version) for t in arguments.values()]
        loss = op(**arguments, strategy=strategy)
        made = loss, *gradients(loss, *leaves)
        assert all(
            torch.equal(t, old) and t._version == v for t, (old, v) in zip(arguments.values(), before, strict=True)
        )
        return made

    def spread(x):
        """The same numbers, each followed by another."""
        return torch.stack([x.detach(), torch.full_like(x.detach(), 3)], -1)[..., 0]

    expected = run()
    columns = h.detach().permute(2, 1, 0).contiguous().permute(2, 1, 0).requires_grad_()
    wide = torch.cat([w.detach(), torch.full_like(w, np.nan)], 1)[:, :16].requires_grad_()
    transposed = w.detach().T.contiguous().T.requires_grad_()
    for changes in (
        {"hidden": columns, "weight": wide, "target": y.to(torch.uint8), "temperature": torch.ones(())},
        {"hidden": spread(h).requires_grad_(), "weight": transposed, "token_weight": torch.ones(()).expand(2, 30)},
        {
            "bias": spread(b).requires_grad_(),
            "target": spread(y),
            "token_weight": spread(ones),
            "temperature": spread(ones),
        },
    ):
        assert all(torch.equal(p, q) for p, q in zip(run(**changes), expected, strict=True)), changes
    same_rows = torch.randn(1, 16, dtype=torch.float16).expand(70, 16).requires_grad_()
    copied = same_rows.detach().clone().requires_grad_()
    assert all(torch.equal(p, q) for p, q in zip(run(weight=same_rows), run(weight=copied), strict=True))


@check(*product(STRATEGIES, ("mean", "none")))
def only_what_needs_a_gradient_gets_one(strategy, reduction):
    for needs in product((False, True), repeat=3):
        h, w, y, b = small_problem(dtype=torch.float16, bias=True)
        leaves = [x.requires_grad_(need) for x, need in zip((h, w, b), needs, strict=True)]
        loss = op(h, w, y, b, reduction=reduction, strategy=strategy)
        assert loss.requires_grad == any(needs)
        wanted = [x for x in leaves if x.requires_grad]
        if wanted:
            exact, expected = float64(h, w, y, b, reduction="mean" if reduction == "mean" else "sum")
            kept = [x for x, need in zip(exact, needs, strict=True) if need]
            assert_gradients(gradients(loss.sum(), *wanted), gradients(expected, *kept), 2e-3)


@check("recompute", "mixed")
def autocast(strategy):
    """Float32 parameters: their gradients hold twice the tokens' exponentials, and are not rounded."""
    case = Case("autocast", 300, 72, 300, bias=True)
    (h, w, y, b), _ = as_arguments(case, make_inputs(case), torch.float32, "cpu")
    with mixed_plan(300) if strategy == "mixed" else nullcontext(), torch.autocast("cpu", torch.float16):
        loss = op(h, w, y, b, strategy="auto" if strategy == "mixed" else strategy)
    leaves, expected = float64(*(x.half() if x.is_floating_point() else x for x in (h, w, y, b)))
    assert abs(float(loss - expected)) < 1e-5
    made = gradients(loss, h, w, b)
    assert all(g.dtype == torch.float32 for g in made)
    assert_gradients(made, gradients(expected, *leaves))


@check(*STRATEGIES)
def the_schema_is_true(strategy):
    """The operators change what they say they change, and alias nothing."""
    from onchip.ops.linear_cross_entropy import triton_op

    h, w, y, b = small_problem(dtype=torch.float16, bias=True)
    plan = vars(triton_spec.plan(half_problem(24, 16, 70, grad_bias=True, stats=True), strategy)).values()
    numbers = (torch.float16, -100, "mean", 0.0, 1e-3, None, 1.0, 1.0, False)
    arguments = triton_op.Arguments(h, w, b, y, None, None, None, None, *numbers, *plan, True, True, True, True)
    for name in ("test_schema", "test_autograd_registration"):
        torch.library.opcheck(triton_op._forward_op, triton_op.pack(arguments), test_utils=name)


if __name__ == "__main__":
    main(CHECKS, sys.argv[1:])
