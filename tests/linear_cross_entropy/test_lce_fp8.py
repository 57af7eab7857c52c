"""precision='fp8' compared with the oracle, its autograd, and what it quantises, on the CPU and on a GPU.

tests/test_losses_gpu.py has bits, streams and graphs, tests/test_losses_memory.py the memory.
"""

from functools import partial

import pytest
import torch
from lce_fp8_cases import CASES, GRADIENT_DB, LOSS_ERROR, assert_alike, assert_near, results

from loss_checks import every_integer_dtype, layouts, only_what_needs_a_gradient_gets_one
from losses import LCE, Loss
from onchip.fp8 import torch_quantize
from onchip.ops.linear_cross_entropy import fp8_op
from onchip.ops.linear_cross_entropy.bench import TORCH as benchmark
from onchip.torch import LinearCrossEntropyLoss, linear_cross_entropy, quantize_weight
from onchip.vocab.fp8 import memory as fp8_spec
from shared import gradients

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
in_fp8 = partial(linear_cross_entropy, precision="fp8")


def small_problem(**sizes):
    given = LCE.problem(**sizes)
    return [given[name] for name in ("hidden", "weight", "target", "bias")]


@pytest.mark.parametrize(("case", "dtype"), [(c, torch.float32) for c in CASES] + [(CASES[1], torch.bfloat16)], ids=str)
def test_cases(case, dtype):
    assert_near(case, dtype)


def test_class_weights_are_factors_of_tokens():
    h, w, y, b = small_problem()
    each = torch.rand(len(w)) + 0.5
    made = in_fp8(h, w, y, b, class_weight=each)
    assert torch.equal(made, in_fp8(h, w, y, b, token_weight=each[y], normalizer=each[y].sum()))
    even = in_fp8(h, w, y, b, class_weight=torch.ones(len(w)), label_smoothing=0.2, z_loss=1e-3)
    torch.testing.assert_close(even, in_fp8(h, w, y, b, label_smoothing=0.2, z_loss=1e-3), rtol=1e-6, atol=0)


def test_chunks_change_nothing(monkeypatch):
    """But the order in which a bias's gradient is summed: groups of 128 tokens are the same ones."""
    h, w, y, _ = small_problem(shape=(300,), hidden=40, vocab=200)
    whole = in_fp8(h, w, y)
    expected = [whole, *gradients(whole, h, w)]
    monkeypatch.setattr(fp8_spec, "DEFAULT_CHUNK", 128)
    loss = in_fp8(h, w, y)
    for p, q in zip([loss, *gradients(loss, h, w)], expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("check", [every_integer_dtype, layouts, only_what_needs_a_gradient_gets_one])
def test_what_holds_for_every_loss(check):
    check(Loss(LCE.op, LCE.checks, {"precision": "fp8"}))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_upstream_gradient_scales(reduction):
    h, w, y, _ = small_problem()
    made = []
    for scale in (0.3, 1.0):
        loss = in_fp8(h, w, y, reduction=reduction)
        made.append(gradients(loss, h, w, grad=scale * torch.ones_like(loss)))
    for p, q in zip(*made, strict=True):
        torch.testing.assert_close(p, 0.3 * q, rtol=1e-5, atol=1e-8)


def test_a_weight_is_quantised_in_each_call_unless_it_was_before(monkeypatch):
    made = []
    real = torch_quantize.quantize
    monkeypatch.setattr(torch_quantize, "quantize", lambda w, *a, **k: made.append(w.shape) or real(w, *a, **k))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda t: True))  # where the copies aren't checked
    h, w, y, _ = small_problem()
    for given, times in ((w, 3), (quantize_weight(w), 0)):
        made.clear()
        for _ in range(3):
            in_fp8(h, given, y).backward()
        assert made.count(w.shape) == times


def test_weight_grad_out_takes_the_gradient_of_each_micro_batch():
    """And none of a backward that is not for the weight."""
    h, w, y, _ = small_problem()
    total = torch.full(w.shape, 0.5)
    for _ in range(2):
        loss = in_fp8(h, w, y, weight_grad_out=total)
        before = total.clone()
        (to_hidden,) = torch.autograd.grad(loss, h, retain_graph=True)
        assert torch.equal(total, before)
        h.grad = None
        loss.backward()
        assert torch.equal(h.grad, to_hidden)
    assert w.grad is None
    (expected,) = gradients(in_fp8(h, w, y), w)
    torch.testing.assert_close(total - 0.5, 2 * expected, rtol=1e-4, atol=1e-6)


def test_autocast_quantises_what_is_given_and_the_module_takes_it():
    h, w, y, _ = small_problem()
    expected = in_fp8(h, w, y)
    with torch.autocast("cpu", torch.bfloat16):
        loss = in_fp8(h, w, y)
    assert torch.equal(loss, expected)
    assert gradients(loss, w)[0].dtype == torch.float32
    criterion = LinearCrossEntropyLoss(precision="fp8")
    assert torch.equal(criterion(h, w, y), expected)
    assert "precision='fp8'" in repr(criterion)


# --------------------------------------------------------------------------------------------------------------- a GPU


def make(tokens, hidden, vocab, *, ignored=0):
    h, w = (torch.randn(n, hidden, device="cuda").bfloat16() for n in (tokens, vocab))
    w /= hidden**0.5
    y = torch.randint(vocab, (tokens,), device="cuda")
    y[:ignored] = -100
    return h.requires_grad_(), w.requires_grad_(), y


def step(h, w, y, **options):
    loss = in_fp8(h, w, y, backend="triton", **options)
    return [loss.detach(), *gradients(loss, h, w.weight if hasattr(w, "weight") else w)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases_on_a_gpu(case, dtype):
    assert_near(case, dtype, "cuda", backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [128, 2048])
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("aligned", "ragged", "everything", "classes")], ids=str
)
def test_kernels_make_what_pytorchs_operations_make(case, chunk, monkeypatch):
    """Both backends store logits in bfloat16: the orders of their float32 sums differ, so some are rounded another
    way, and numbers of E4M3 after them.
    """
    monkeypatch.setattr(fp8_spec, "DEFAULT_CHUNK", chunk)
    made, right = (results(case, torch.bfloat16, "cuda", backend=b)[0] for b in ("triton", "plain"))
    for x in (made, right):
        x.pop("correct")
    assert_alike(made, right, 5e-3, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama3.1-8b", "qwen3-8b", "gpt-oss-120b", "llama3.1-8b-zipf", "llama3.1-8b-peaked"])
def test_real_heads(name):
    problem = benchmark.make_problem(benchmark.CASES[name], "cuda", "bfloat16")
    reference = benchmark.reference(problem)
    made = step(*problem.arrays)
    errors = {k: error for k, (error, _) in benchmark.check(reference, "forward+backward", made).items()}
    # A loss of 0.001 is the sum of what FP8 leaves of all the others.
    assert errors["loss"] <= (5 if name.endswith("peaked") else 1) * LOSS_ERROR
    assert max(errors["grad_hidden"], errors["grad_weight"]) <= 10 ** (-GRADIENT_DB / 20)


@pytest.mark.gpu
def test_strides_and_a_quantised_weight_change_no_bits():
    h, w, y = make(300, 264, 1032, ignored=20)
    expected = step(h, w, y)
    turned = w.detach().T.contiguous().T.requires_grad_()
    for x, weight in (
        (h, quantize_weight(w)),
        (h.detach().T.contiguous().T.requires_grad_(), turned),
        (torch.cat([h.detach(), h.detach()], 1)[:, :264].requires_grad_(), turned),
    ):
        assert all(torch.equal(p, q) for p, q in zip(step(x, weight, y), expected, strict=True))


@pytest.mark.gpu
def test_weight_grad_out_on_a_gpu():
    h, w, y = make(1000, 512, 4096)
    total = torch.full(w.shape, 1e-3, device="cuda")
    for _ in range(2):
        in_fp8(h, w, y, weight_grad_out=total, backend="triton").backward()
    assert w.grad is None
    right = step(h, w, y)[2].float()
    assert ((total - 1e-3) / 2 - right).norm() <= 4e-3 * right.norm()


def test_other_devices_are_refused():
    assert {name for name, reason in fp8_op.refusals(torch.device("mps")).items() if reason} == {"triton", "plain"}
    assert fp8_op.refusals(torch.device("cpu"))["plain"] is None
