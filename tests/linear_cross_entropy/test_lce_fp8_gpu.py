"""precision='fp8' on a CUDA device: accuracy, bits, sizes, memory, streams, graphs."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from common import capture, gradients
from lce_fp8_common import CASES, GRADIENT_DB, LOSS_ERROR, assert_near, results

from onchip.bench.measure import peak_extra_bytes
from onchip.bench.ops.linear_cross_entropy import TORCH as benchmark
from onchip.core.sizes import MIB
from onchip.fp8.triton_tiles import QuantizeConfig
from onchip.ops.linear_cross_entropy.cases import BENCH_CASES
from onchip.torch import linear_cross_entropy, quantize_weight
from onchip.vocab.fp8 import memory as fp8_spec
from onchip.vocab.memory import Problem

pytestmark = pytest.mark.gpu
op = partial(linear_cross_entropy, precision="fp8", backend="triton")
CONFIGS = {"default": QuantizeConfig(), "16 warps": QuantizeConfig(warps=16)}


@pytest.fixture(autouse=True)
def unwritten_memory_shows():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


def make(tokens, hidden, vocab, *, device="cuda", std=1.0, ignored=0):
    g = torch.Generator(device).manual_seed(0)
    h = torch.randn(tokens, hidden, device=device, generator=g).bfloat16()
    w = (torch.randn(vocab, hidden, device=device, generator=g) * (std / hidden**0.5)).bfloat16()
    y = torch.randint(vocab, (tokens,), device=device, generator=g)
    y[:ignored] = -100
    return h.requires_grad_(), w.requires_grad_(), y


def step(h, w, y, **options):
    loss = op(h, w, y, **options)
    return [loss.detach(), *gradients(loss, h, w)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case, dtype):
    assert_near(case, dtype, "cuda", backend="triton")


@pytest.mark.parametrize("chunk", [128, 2048])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("aligned", "ragged", "everything")], ids=str)
def test_every_config_makes_what_pytorchs_operations_make(case, config, chunk, monkeypatch):
    """Both backends store logits in bfloat16: the orders of their float32 sums differ, so some are rounded another
    way, and numbers of E4M3 after them.
    """
    from onchip.vocab.fp8 import launches as fp8_launches

    monkeypatch.setattr(fp8_launches, "CONFIG", CONFIGS[config])
    monkeypatch.setattr(fp8_spec, "DEFAULT_CHUNK", chunk)
    made, _ = results(case, torch.bfloat16, "cuda", backend="triton")
    right, _ = results(case, torch.bfloat16, "cuda", backend="torch")
    for name, value in right.items():
        if name != "correct":
            bound = 5e-3 if name in ("loss", "lse", "log_prob", "entropy") else 1e-2
            assert np.linalg.norm(made[name] - value) <= bound * np.linalg.norm(value), name


@pytest.mark.parametrize("name", ["llama3.1-8b", "qwen3-8b", "gpt-oss-120b", "llama3.1-8b-zipf", "llama3.1-8b-peaked"])
def test_real_heads(name):
    problem = benchmark.make_problem(BENCH_CASES[name], "cuda", "bfloat16")
    reference = benchmark.reference(problem)
    made = step(*problem.arrays)
    errors = {k: error for k, (error, _) in benchmark.check(reference, "forward+backward", made).items()}
    # A loss of 0.001 is the sum of what FP8 leaves of all the others.
    assert errors["loss"] <= (5 if name.endswith("peaked") else 1) * LOSS_ERROR
    assert max(errors["grad_hidden"], errors["grad_weight"]) <= 10 ** (-GRADIENT_DB / 20)


def test_more_logits_than_32_bits_count():
    tokens, vocab = 20000, 128256
    assert tokens * vocab > 1 << 31
    h, w, y = make(tokens, 128, vocab)
    loss, grad_h, _ = step(h, w, y, reduction="sum", scratch_bytes=1 << 40)
    last = h[-200:].detach().requires_grad_()
    expected = op(last, w.detach(), y[-200:], reduction="sum")
    (right,) = gradients(expected, last)
    assert (grad_h[-200:] - right).float().norm() <= 4e-3 * right.float().norm()
    assert math.isfinite(float(loss))


def test_a_label_out_of_range_and_nan_of_an_ignored_token():
    h, w, y = make(600, 256, 1000, ignored=5)
    y[300] = 1000
    with torch.no_grad():
        h[2] = math.nan
    loss = op(h, w, y, reduction="none")
    assert loss[300].isnan()
    assert (loss[:5] == 0).all()
    assert loss.isfinite().sum() == 599
    grad_h, grad_w = gradients(loss.sum(), h, w)
    assert (grad_h[:5] == 0).all()
    assert grad_h[300].isnan().all()
    assert grad_h[301:].isfinite().all()
    assert grad_w.isnan().all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_same_bits_every_time(reduction):
    """On a side stream as well, from a weight that was quantised before or not, and from one retained graph."""
    h, w, y = make(1500, 520, 5000, ignored=100)

    def run(weight=w):
        loss = op(h, weight, y, reduction=reduction)
        return [loss.detach(), *gradients(loss, h, w, grad=torch.full_like(loss, 0.3))]

    first = run()
    for weight in (w, quantize_weight(w), w):
        assert all(torch.equal(p, q) for p, q in zip(run(weight), first, strict=True))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = run()
    torch.cuda.synchronize()
    assert all(torch.equal(p, q) for p, q in zip(aside, first, strict=True))
    loss = op(h, w, y, reduction=reduction)
    for retain in (True, False):
        made = torch.autograd.grad(loss, (h, w), torch.full_like(loss, 0.3), retain_graph=retain)
        assert all(torch.equal(p, q) for p, q in zip(made, first[1:], strict=True))


def test_no_synchronisation():
    h, w, y = make(1000, 512, 4096)
    step(h, w, y)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(h, w, y)
        op(h, quantize_weight(w), y).backward()
        step(h, w, y, normalizer=torch.ones((), device="cuda"), token_weight=h.new_ones(1000))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_cuda_graph_quantises_what_the_weight_has_become():
    h, w, y = make(1000, 512, 4096)
    step(h, w, y)
    graph, captured = capture(lambda: step(h, w, y))
    for _ in range(2):
        with torch.no_grad():
            w.mul_(-1.5)
            h.copy_(torch.randn_like(h))
        graph.replay()
        right = step(h, w, y)
        assert all(torch.equal(p, q) for p, q in zip(captured, right, strict=True))


def test_every_device_whichever_is_current():
    expected = step(*make(300, 264, 1032))
    for index in range(torch.cuda.device_count()):
        made = step(*make(300, 264, 1032, device=f"cuda:{index}"))
        assert all(torch.equal(p.cpu(), q.cpu()) for p, q in zip(made, expected, strict=True))


def test_compile():
    h, w, y = make(1000, 512, 4096)
    expected = step(h, w, y)
    loss = torch.compile(lambda h, w, y: op(h, w, y), fullgraph=True)(h, w, y)
    for p, q in zip([loss.detach(), *gradients(loss, h, w)], expected, strict=True):
        assert torch.equal(p, q)


def test_strides_change_nothing():
    h, w, y = make(300, 264, 1032)
    expected = step(h, w, y)
    for x in (h.detach().T.contiguous().T, torch.cat([h.detach(), h.detach()], 1)[:, :264]):
        turned = w.detach().T.contiguous().T.requires_grad_()
        made = step(x.requires_grad_(), turned, y)
        assert all(torch.equal(p, q) for p, q in zip(made, expected, strict=True))


def test_weight_grad_out():
    h, w, y = make(1000, 512, 4096)
    total = torch.full(w.shape, 1e-3, device="cuda")
    for _ in range(2):
        op(h, w, y, weight_grad_out=total).backward()
    assert w.grad is None
    (right,) = gradients(op(h, w, y), w)
    assert ((total - 1e-3) / 2 - right.float()).norm() <= 4e-3 * right.float().norm()


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("chunk", [512, 2048])
def test_the_formula_bounds_the_peak(chunk, before, accumulates):
    h, w, y = make(4096, 1024, 32768)
    problem = Problem(4096, 1024, 32768, dtype="bfloat16", device="cuda", weight_grad_out=accumulates)
    assert fp8_spec.backward_parts(problem)["weight gradient in float32"] == 0
    total = torch.zeros(w.shape, device="cuda") if accumulates else None
    budget = fp8_spec.scratch_bytes(problem, chunk)
    assert fp8_spec.plan(problem, budget) == chunk

    given = quantize_weight(w) if before else w

    def run():
        loss = op(h, given, y, scratch_bytes=budget, weight_grad_out=total)
        return [loss.detach(), *gradients(loss, *((h,) if accumulates else (h, w)))]

    run()
    peak = peak_extra_bytes(run, device="cuda")
    formula = budget - (fp8_spec.weight_bytes(problem) if before else 0)
    assert peak <= formula + 40 * MIB  # cuBLAS has a workspace of its own
    assert peak >= formula / 2
