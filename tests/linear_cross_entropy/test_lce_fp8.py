"""precision='fp8' on the CPU: against the oracle, its autograd, what it refuses, and its kernel interpreted."""

import lce_fp8_interpreted
import pytest
import torch
from common import gradients, small_problem
from lce_fp8_common import CASES, assert_near

from interpreter import run_all
from onchip.bench.measure import peak_extra_bytes
from onchip.ops.linear_cross_entropy import fp8_op
from onchip.torch import LinearCrossEntropyLoss, linear_cross_entropy, quantize_weight
from onchip.vocab.fp8 import memory as fp8_spec
from onchip.vocab.memory import Problem
from shared import assert_refused


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case):
    assert_near(case, torch.float32)


def test_bfloat16():
    assert_near(CASES[1], torch.bfloat16)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    script = lce_fp8_interpreted
    return run_all(script.__file__, list(script.CHECKS), tmp_path_factory.mktemp("interpreted"))


@pytest.mark.parametrize("name", lce_fp8_interpreted.CHECKS)
def test_interpreted(name, interpreted):
    said, errors = interpreted
    assert name in said, f"the process ended before it: {errors}"
    assert not said[name], said[name]


def in_fp8(h, w, y, b=None, **options):
    return linear_cross_entropy(h, w, y, b, precision="fp8", **options)


def test_chunks_change_nothing(monkeypatch):
    """But the order in which a bias's gradient is summed: groups of 128 tokens are the same ones."""
    h, w, y, _ = small_problem(tokens=300, hidden=40, vocab=200)
    whole = in_fp8(h, w, y)
    expected = [whole, *gradients(whole, h, w)]
    monkeypatch.setattr(fp8_spec, "DEFAULT_CHUNK", 128)
    loss = in_fp8(h, w, y)
    for p, q in zip([loss, *gradients(loss, h, w)], expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)], ids=str)
def test_only_what_needs_a_gradient_gets_one(needs):
    h, w, y, b = small_problem(bias=True)
    loss = in_fp8(h, w, y, b)
    expected = gradients(loss, h, w, b)
    leaves = [x.detach().requires_grad_(bool(need)) for x, need in zip((h, w, b), needs, strict=True)]
    again = in_fp8(leaves[0], leaves[1], y, leaves[2])
    assert torch.equal(again, loss)
    assert again.requires_grad == any(needs)
    if any(needs):
        again.backward()
        for x, g in zip(leaves, expected, strict=True):
            assert torch.equal(x.grad, g) if x.requires_grad else x.grad is None


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_upstream_gradient_and_a_retained_graph(reduction):
    h, w, y, _ = small_problem()
    loss = in_fp8(h, w, y, reduction=reduction)
    ones = gradients(loss, h, w, grad=torch.ones_like(loss))
    loss = in_fp8(h, w, y, reduction=reduction)
    kept = [torch.autograd.grad(loss, (h, w), 0.3 * torch.ones_like(loss), retain_graph=True) for _ in range(2)]
    for p, q, r in zip(*kept, ones, strict=True):
        assert torch.equal(p, q)
        torch.testing.assert_close(p, 0.3 * r, rtol=1e-5, atol=1e-8)
    grads = torch.autograd.grad(loss, (h, w), torch.ones_like(loss), create_graph=True)
    with pytest.raises(RuntimeError, match="a backward of the backward is not supported"):
        sum(g.norm() for g in grads).backward()


def test_nan_of_an_ignored_token_goes_nowhere():
    h, w, y, _ = small_problem()
    y[0, 3] = -100
    loss = in_fp8(h, w, y)
    expected = [loss, *gradients(loss, h, w)]
    with torch.no_grad():
        h[0, 3] = float("nan")
    loss = in_fp8(h, w, y)
    for p, q in zip([loss, *gradients(loss, h, w)], expected, strict=True):
        assert torch.equal(p, q)


def test_no_tokens():
    h, w, y, _ = small_problem()
    loss = in_fp8(h[:, :0], w, y[:, :0])
    assert float(loss.detach()) == 0
    assert all((g == 0).all() for g in gradients(loss, h, w))


def test_a_weight_is_quantised_in_each_call_unless_it_was_before(monkeypatch):
    made = []
    real = fp8_op.torch_quantize.quantize_weight
    monkeypatch.setattr(
        fp8_op.torch_quantize, "quantize_weight", lambda w, *a, **k: made.append(len(w)) or real(w, *a, **k)
    )
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))  # where the copies aren't checked
    h, w, y, _ = small_problem(tokens=24, vocab=70)
    for given, times in ((w, 3), (quantize_weight(w), 0)):
        made.clear()
        for _ in range(3):
            in_fp8(h, given, y).backward()
        assert made.count(70) == times  # and 24 tokens' hidden states, in backward


def test_weight_grad_out_takes_the_gradient_of_each_micro_batch():
    h, w, y, _ = small_problem()
    total = torch.full(w.shape, 0.5)
    for _ in range(2):
        in_fp8(h, w, y, weight_grad_out=total).backward()
    assert w.grad is None
    (expected,) = gradients(in_fp8(h, w, y), w)
    torch.testing.assert_close(total - 0.5, 2 * expected, rtol=1e-4, atol=1e-6)


def test_weight_grad_out_is_left_alone_by_a_backward_that_is_not_for_the_weight():
    h, w, y, _ = small_problem()
    total = torch.zeros_like(w)
    loss = in_fp8(h, w, y, weight_grad_out=total)
    (grad,) = torch.autograd.grad(loss, h, retain_graph=True)
    assert not total.any()
    loss.backward()
    assert torch.equal(h.grad, grad)
    assert total.any()


def test_autocast_quantises_what_is_given():
    h, w, y, _ = small_problem()
    expected = in_fp8(h, w, y)
    with torch.autocast("cpu", torch.bfloat16):
        loss = in_fp8(h, w, y)
    assert torch.equal(loss, expected)
    assert gradients(loss, w)[0].dtype == torch.float32


def test_the_module_takes_it():
    h, w, y, _ = small_problem()
    criterion = LinearCrossEntropyLoss(precision="fp8")
    assert torch.equal(criterion(h, w, y), in_fp8(h, w, y))
    assert "precision='fp8'" in repr(criterion)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp16"}, "precision must be one of 'full', 'fp8'; got 'fp16'"),
        ({"strategy": "recompute"}, "precision='fp8' computes logits once and keeps their gradient; pass strategy="),
        ({"reduction": "none"}, "with precision='fp8' and reduction='none' bias gets no gradient"),
        ({"backend": "triton"}, "backend 'triton' can't run this call"),
        ({"scratch_bytes": 1000}, "scratch_bytes=1000 is too small for T=24, H=16, V=70 with precision='fp8'"),
    ],
    ids=str,
)
def test_refused(options, message):
    h, w, y, b = small_problem(bias=True)
    call = {"precision": "fp8", **options}
    assert_refused("linear_cross_entropy", lambda: linear_cross_entropy(h, w, y, b, **call), ValueError, message)


def test_a_label_out_of_range_is_named():
    h, w, y, _ = small_problem()
    y[1, 2] = 70
    with pytest.raises(ValueError, match=r"target\[1, 2\] is 70"):
        in_fp8(h, w, y)


def test_compile():
    torch._dynamo.reset()
    h, w, y, _ = small_problem()

    def step(h, w, y):
        return in_fp8(h * 2, w, y, softcap=20.0)

    expected = step(h, w, y)
    loss = torch.compile(step, fullgraph=True, backend="aot_eager")(h, w, y)
    torch.testing.assert_close(loss, expected)
    for p, q in zip(gradients(loss, h, w), gradients(expected, h, w), strict=True):
        torch.testing.assert_close(p, q)


def test_the_plan_fits_its_budget():
    problem = Problem(4096, 4096, 128256, dtype="bfloat16", device="cuda")
    least = fp8_spec.scratch_bytes(problem, 128)
    for more in (0, 100 << 20, 1 << 30, 1 << 40):
        chunk = fp8_spec.plan(problem, least + more)
        assert chunk % 128 == 0
        assert fp8_spec.scratch_bytes(problem, chunk) <= least + more
    assert chunk == 4096
    assert fp8_spec.plan(problem, None) == fp8_spec.DEFAULT_CHUNK


@pytest.mark.parametrize(("hidden", "vocab", "after"), [(64, 1032, False), (64, 1033, True), (66, 1032, True)])
def test_the_formula_has_a_product_that_is_added_after_it_was_made(hidden, vocab, after):
    parts = fp8_spec.backward_parts(Problem(128, hidden, vocab, weight_grad_out=True))
    assert parts["weight gradient in float32"] == (4 * vocab * hidden if after else 0)


def test_the_formula_bounds_the_peak():
    problem = Problem(512, 64, 8192)
    h = torch.randn(512, 64, requires_grad=True)
    w = torch.randn(8192, 64, requires_grad=True)
    y = torch.randint(8192, (512,))
    budget = fp8_spec.scratch_bytes(problem, 256)

    def step():
        return gradients(in_fp8(h, w, y, scratch_bytes=budget), h, w)

    step()
    assert peak_extra_bytes(step, device="cpu") <= budget
