"""The Triton backend under Triton's interpreter, on the CPU: what test_ce_triton_interpreter.py starts in processes.

In float32 and float16: the interpreter computes bfloat16 wrongly.  What nobody wrote is NaN, so a result that depends
on it is NaN too.  A row takes it some 40 ms, so there are few of them.

    TRITON_INTERPRET=1 python ce_interpreted.py NAME ...     prints a line of JSON for each check
"""

import math
import sys
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from ce_common import assert_right, assert_same, computed, gradient, small_problem

from interpreter import main
from onchip.ops.cross_entropy import triton_op
from onchip.ops.cross_entropy.cases import CHECK_CASES, Case, make_inputs
from onchip.ops.cross_entropy.checks import as_arguments, run_oracle
from onchip.oracle.checks import relative_error
from onchip.torch import cross_entropy
from onchip.vocab.rows import launches
from onchip.vocab.rows.memory import RowTiles
from tanh import assert_is_tanh, triton_tanh

CHECKS = {}
op = partial(cross_entropy, backend="triton")
right = partial(assert_right, device="cpu", backend="triton")
CASES = {case.name: replace(case, tokens=3) for case in CHECK_CASES}
IN_PLACE = ("one class", "per token", "everything")


def check(*arguments):
    """Register a function, once for each of `arguments` if there are any."""

    def register(f):
        for x in arguments or ((),):
            parts = x if isinstance(x, tuple) else (x,)
            CHECKS["-".join([f.__name__, *map(str, parts)])] = partial(f, *parts)
        return f

    return register


for _name, _case in CASES.items():
    CHECKS[f"case-{_name}"] = partial(right, _case)
for _name in IN_PLACE:
    CHECKS[f"case-{_name}-in place"] = partial(right, CASES[_name], torch.float16, inplace=True)


def small_tiles(stages=1):
    """Tiles of 256 elements, one warp: rows of a few hundred have several."""
    tiles = RowTiles(tile=256, warps=1, programs=1, stages=stages)
    return mock.patch.object(launches, "tiles_of", return_value=tiles)


MANY_TILES = {
    "plain": Case("tiles", 3, 1000),
    "full": Case("tiles", 3, 768, logit_std=30.0),
    "odd": Case("tiles", 3, 523, ignored=0.3, options={"reduction": "sum"}),
    "everything": Case(
        "tiles", 3, 1000, masked=600, sliced=24, ignored=0.3, token_weight=True, token_temperature=True,
        options={"z_loss": 1e-3, "logit_scale": 0.5, "normalizer": 100},
    ),
    "smoothing": Case("tiles", 3, 600, options={"label_smoothing": 0.1, "softcap": 15.0, "reduction": "none"}),
    "offset": Case("tiles", 3, 600, logit_offset=1e4, options={"label_smoothing": 0.1}),
}  # fmt: skip


@check(*MANY_TILES)
def many_tiles(name):
    with small_tiles() as used:
        right(MANY_TILES[name])
        if name in ("odd", "everything"):
            right(MANY_TILES[name], torch.float16, inplace=True)
    assert used.called


@check()
def rows_masked_up_to_the_target():
    """-inf in all of the first tiles, or all of the last ones; targets in each tile, in the first and last column."""
    x = torch.randn(6, 700)
    y = torch.tensor([0, 255, 256, 511, 512, 699])
    for i, label in enumerate(y):
        x[i, :label] = -math.inf
    x[0, 300:] = -math.inf
    x[4] = -math.inf  # all of it but its target
    x[4, 512] = 1.0
    x.requires_grad_()
    with small_tiles():
        loss, stats = op(x, y, return_stats=True)
        expected, expected_stats = cross_entropy(x, y, backend="torch", return_stats=True)
        assert_same(loss, expected)
        for p, q in zip(stats[:3], expected_stats[:3], strict=True):
            assert_same(p, q)
        assert torch.equal(stats.correct, expected_stats.correct)
        assert_same(gradient(loss, x), gradient(expected, x))


@check()
def ties_go_to_the_first():
    with small_tiles():
        stats = op(torch.zeros(4, 600), torch.tensor([0, 1, 256, 599]), return_stats=True)[1]
    assert stats.correct.tolist() == [True, False, False, False]


@check(0, 1)
def few_tokens(tokens):
    right(Case("few", tokens, 123))
    right(Case("few", tokens, 123), inplace=True)


def _strided(kind):
    """Logits [2, 3, 50] of a layout, as the view of a tensor."""
    shape = {
        "sliced": (2, 3, 64), "offset": (3, 4, 57), "every other": (2, 6, 100), "vocabulary first": (50, 2, 3),
        "tokens swapped": (3, 2, 50), "shifted": (2, 4, 50), "expanded": (3, 50),
    }[kind]  # fmt: skip
    cut = {
        "sliced": lambda x: x[..., :50],
        "offset": lambda x: x[1:, 1:, 7:],
        "every other": lambda x: x[:, ::2, ::2],
        "vocabulary first": lambda x: x.permute(1, 2, 0),
        "tokens swapped": lambda x: x.transpose(0, 1),
        "shifted": lambda x: x[:, :-1],
        "expanded": lambda x: x.expand(2, 3, 50),
    }[kind]
    return torch.randn(shape), cut


@check("sliced", "offset", "every other", "vocabulary first", "tokens swapped", "shifted", "expanded")
def strides_do_not_matter(kind):
    base, cut = _strided(kind)
    y = torch.randint(50, (3, 2)).t()
    y[0, 2] = -100
    copy = cut(base).clone(memory_format=torch.contiguous_format).requires_grad_()
    expected = op(copy, y)
    expected_grad = gradient(expected, copy)
    # Sums of another width have other roundings.
    assert_same(op(cut(base), y), expected)
    leaf = base.clone().requires_grad_()
    assert_same(gradient(op(cut(leaf), y), leaf), gradient(cut(leaf), leaf, expected_grad))
    if kind == "expanded":
        return
    source = computed(leaf)
    given = cut(source)
    grad = gradient(op(given, y, inplace_backward=True), given)
    assert_same(grad, expected_grad)
    assert torch.equal(cut(source.detach()), grad)
    rest = [x.clone() for x in (source.detach(), base)]  # isn't touched
    for x in rest:
        cut(x).zero_()
    assert torch.equal(*rest)


@check()
def three_strides_of_rows_are_refused():
    x = torch.randn(4, 4, 4, 10)[::2, ::2, ::2]
    with pytest.raises(ValueError, match="backend 'triton' can't run this call: its logits' leading dimensions must"):
        op(x, torch.zeros(2, 2, 2, dtype=torch.int64))
    op(x[0], torch.zeros(2, 2, dtype=torch.int64))


@check("mean", "none")
def nothing_leaks_from_ignored_tokens(reduction):
    """NaN and infinity in an ignored token's logits, weight, temperature and upstream gradient."""
    x, y = small_problem(tokens=8)
    y[0, 3] = y[1, 2] = -100
    clean = x.detach().clone().requires_grad_()
    with torch.no_grad():
        x[0, 3], x[1, 2] = math.nan, math.inf
    weight, temperature, upstream = torch.ones(2, 4), torch.ones(2, 4), torch.ones(2, 4)
    weight[0, 3] = temperature[0, 3] = upstream[0, 3] = math.nan
    temperature[1, 2] = 0
    expected = op(clean, y, reduction=reduction)
    expected_grad = gradient(expected, clean, torch.ones_like(expected))
    for inplace in (False, True):
        given = computed(x)
        loss, stats = op(
            given, y, token_weight=weight, temperature=temperature, reduction=reduction, return_stats=True,
            inplace_backward=inplace,
        )  # fmt: skip
        assert torch.equal(loss, expected)
        assert all((s[y == -100] == 0).all() for s in stats)
        grad = gradient(loss, given, upstream if reduction == "none" else None)
        assert (grad[y == -100] == 0).all()
        assert torch.equal(grad, expected_grad)


@check("mean", "none")
def a_bad_label(reduction):
    x, y = small_problem(tokens=8)
    good, good_stats = op(x, y, reduction="none", return_stats=True)
    for label in (70, 2**40):
        y[1, 2] = label
        others = torch.ones_like(y, dtype=torch.bool)
        others[1, 2] = False
        loss, stats = op(x, y, reduction=reduction, return_stats=True)
        assert stats.log_prob[1, 2].isnan()
        assert not stats.correct[1, 2]
        assert_same(stats.lse, good_stats.lse)
        grad = gradient(loss.sum(), x)
        assert grad[1, 2].isnan().all()
        assert grad[others].isfinite().all()
        if reduction == "none":
            assert torch.equal(loss[others], good[others])
            loss = loss[1, 2]
        assert loss.isnan()
        with pytest.raises(ValueError, match=rf"^cross_entropy: target\[1, 2\] is {label}"):
            op(x, y, check_inputs=True)


@check(*((upstream, inplace) for upstream in (1.0, 0.3) for inplace in (False, True)))
def a_retained_graph(upstream, inplace):
    x, y = small_problem(tokens=6)
    logits = computed(x)
    loss = op(logits, y, inplace_backward=inplace)
    grad = torch.tensor(upstream)
    first = torch.autograd.grad(loss, x, grad, retain_graph=True)[0]
    kept = first.clone()
    first.mul_(3)  # what a caller does with its gradients must not reach the graph
    assert torch.equal(logits, x)
    second = torch.autograd.grad(loss, x, grad, retain_graph=True)[0]
    third = torch.autograd.grad(loss, x, grad)[0]
    assert torch.equal(kept, second)
    assert torch.equal(kept, third)
    assert_same(kept, gradient(cross_entropy(x, y, backend="torch"), x) * upstream)
    if inplace:
        assert torch.equal(logits.detach(), kept)


@check()
def what_saved_the_logits_raises_once_they_are_overwritten():
    x, y = small_problem(tokens=4)
    logits = computed(x)
    first = op(logits, y, inplace_backward=True)
    other = logits.square().sum()
    first.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@check()
def tanh_at_any_size():
    assert_is_tanh(partial(triton_tanh, device="cpu"))


@check(False, True)
def a_backward_of_the_backward_raises(inplace):
    x, y = small_problem(tokens=4)
    loss = op(computed(x), y, inplace_backward=inplace)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^cross_entropy: a backward of the backward is not supported"):
        (loss + grad.norm()).backward()


@check()
def inputs_are_not_changed():
    x, y = small_problem(tokens=6)
    y[0, 0] = -100
    constants = {"token_weight": torch.rand(2, 3), "temperature": torch.rand(2, 3) + 0.5, "normalizer": torch.tensor(5)}
    tensors = [x, y, *constants.values()]
    before = [(t.detach().clone(), t._version) for t in tensors]
    (op(x, y, **constants) * 2).backward()
    assert all(torch.equal(t, old) and t._version == version for t, (old, version) in zip(tensors, before, strict=True))


@check()
def every_integer_dtype_of_target_and_any_upstream_gradient():
    x, y = small_problem(tokens=4)
    expected = op(x, y, reduction="none")
    for dtype in (torch.int32, torch.uint8, torch.uint16, torch.uint64):
        assert torch.equal(op(x, y.to(dtype), reduction="none"), expected)
    upstream = torch.rand(2, 4)[:, ::2]
    assert torch.equal(gradient(expected, x, upstream), gradient(op(x, y, reduction="none"), x, upstream.contiguous()))
    expanded = gradient(op(x, y, reduction="none"), x, torch.tensor(0.5).expand(2, 2))
    assert_same(expanded, gradient(op(x, y, reduction="sum") * 0.5, x))


@check(0.999, 0.9999999)
def small_losses_keep_their_digits(prob):
    """p - 1 and log p of a p that float32 can hardly tell from 1, row by row."""
    for reduction in ("none", "sum"):
        case = Case("peaked", 6, 500, target_prob=prob, options={"reduction": reduction})
        inputs = make_inputs(case)
        (logits, target), _ = as_arguments(case, inputs, torch.float32, "cpu")
        oracle = run_oracle([logits, target], case.options, inputs)
        loss = op(logits, target, reduction=reduction)
        grad = gradient(loss, logits, torch.from_numpy(np.asarray(inputs.grad_loss)))
        bound = 8 * torch.finfo(torch.float32).eps * float(np.abs(oracle.lse).max())
        assert np.max(np.abs(loss.detach().numpy() / oracle.loss - 1)) < bound
        assert relative_error(grad, oracle.grad_logits) < bound


@check()
def label_smoothing_of_one_and_a_masked_target():
    x, y = small_problem(tokens=4)
    assert_same(op(x, y, label_smoothing=1.0), cross_entropy(x, y, label_smoothing=1.0, backend="torch"))
    with torch.no_grad():
        x[0, 0, y[0, 0]] = -math.inf
    loss, stats = op(x, y, reduction="none", return_stats=True)
    assert loss[0, 0] == math.inf
    assert stats.log_prob[0, 0] == -math.inf
    assert not stats.correct[0, 0]
    assert loss.flatten()[1:].isfinite().all()
    for smoothing in (0.1, 1.0):
        assert op(x, y, reduction="none", label_smoothing=smoothing)[0, 0] == math.inf
    with torch.no_grad():
        x[0, 0, 0] = math.nan
    assert op(x, y).isnan()


@check()
def scratch_bytes_below_the_vectors_are_refused():
    x, y = small_problem(tokens=4)
    with pytest.raises(ValueError, match=r"scratch_bytes=100 is too small .* the kernels need 192 bytes"):
        op(x, y, scratch_bytes=100)
    op(x, y, scratch_bytes=192)


@check(*(("mean", False), ("mean", True), ("none", False), ("none", True)))
def the_schema_is_true(reduction, everything):
    """The operators change what they say they change, and alias nothing."""
    x, y = small_problem(tokens=4)
    y[0, 0] = -100
    per_token = torch.rand(2, 2) + 0.5
    extra = (per_token, per_token, torch.tensor(5.0) if reduction == "mean" else None) if everything else (None,) * 3
    numbers = (0.1, 1e-3, 5.0, 0.5, 1.0) if everything else (0.0, 0.0, None, 1.0, 1.0)
    packed = triton_op.pack(
        triton_op.Arguments(x, y, *extra, -100, reduction, *numbers, False, None, everything, False, True)
    )
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(triton_op._forward_op, packed, test_utils=tests)
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in packed]
    loss, lse, log_prob, _, _, divisor, made, _ = triton_op._forward_op(*detached)
    made = torch.empty_like(x) if reduction == "none" else made
    arguments = (made.detach(), torch.full_like(loss, 2), lse, log_prob, divisor, *detached)
    torch.library.opcheck(triton_op._backward_op, arguments, test_utils=tests)


@check("mean", "stats")
def compile_takes_it_whole(kind):
    x, y = small_problem(tokens=8)
    options = {"return_stats": True} if kind == "stats" else {"reduction": kind}

    def loss(x, y):
        out = op(torch.tanh(x)[:, 1:], y[:, :-1], **options)
        return (out[0] + out[1].lse.mean().detach()) if kind == "stats" else out.sum() * 3

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, y), loss(x, y))
    assert_same(gradient(compiled(x, y), x), gradient(loss(x, y), x))


@check()
def saved_tensor_hooks_and_checkpointing():
    x, y = small_problem(tokens=4)
    expected = gradient(op(2 * x, y) * 3, x)
    with torch.autograd.graph.save_on_cpu():
        loss = op(2 * x, y) * 3
    assert torch.equal(gradient(loss, x), expected)
    for inplace in (False, True):
        x.grad = None
        run = partial(op, target=y, inplace_backward=inplace)
        loss = torch.utils.checkpoint.checkpoint(lambda x, run=run: run(2 * x), x, use_reentrant=False)
        (loss * 3).backward()
        assert_same(x.grad, expected)


if __name__ == "__main__":
    main(CHECKS, sys.argv[1:])
