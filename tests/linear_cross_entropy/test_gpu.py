"""On a CUDA device: what the CPU can't show."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from common import assert_right, assert_same, capture, gradients, small_problem

from onchip.bench.measure import peak_extra_bytes
from onchip.core.sizes import MIB
from onchip.ops.linear_cross_entropy.cases import CHECK_CASES, Case
from onchip.torch import linear_cross_entropy
from onchip.torch import linear_cross_entropy as op
from onchip.vocab import memory
from onchip.vocab.memory import Problem

pytestmark = pytest.mark.gpu
STRATEGIES = ("stash", "recompute")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF = DTYPES[1:]
both_strategies = pytest.mark.parametrize("strategy", STRATEGIES)
both_backends = pytest.mark.parametrize("backend", ["triton", "torch"])
# Triton has products of 16 bits alone.
backends_and_dtypes = pytest.mark.parametrize(
    ("backend", "dtype"), [*(("triton", t) for t in HALF), *(("torch", t) for t in DTYPES)], ids=str
)


@pytest.fixture
def poisoned(monkeypatch):
    """What torch.empty and its kin return is NaN, so a result that depends on what nobody wrote is NaN too."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@both_strategies
@backends_and_dtypes
@pytest.mark.parametrize("case", CHECK_CASES, ids=str)
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.usefixtures("poisoned")
def test_check_cases(case, dtype, strategy, backend):
    assert_right(case, dtype, "cuda", strategy=strategy, backend=backend)


@both_strategies
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_chunks_of_the_torch_backend(dtype, strategy):
    case = Case("chunks", 333, 40, 2500, bias=True, ignored=0.2, options={"softcap": 5.0, "label_smoothing": 0.1})
    name = str(dtype).removeprefix("torch.")
    problem = Problem(333, 40, 2500, name, device="cuda", grad_bias=True, softcap=True, stats=True)
    least = memory.scratch_at_least(problem, strategy)
    assert_right(case, dtype, "cuda", strategy=strategy, scratch_bytes=least, backend="torch")


def float64_on_device(hidden, weight, target, chunk=512):
    w = weight.detach().double().requires_grad_()
    losses, grads = [], []
    for rows, y in zip(hidden.detach().split(chunk), target.split(chunk), strict=True):
        h = rows.double().requires_grad_()
        loss = F.cross_entropy(F.linear(h, w), y, reduction="none")
        (loss.sum() / len(target)).backward()
        losses.append(loss.detach())
        grads.append(h.grad)
    return torch.cat(losses).mean(), torch.cat(grads), w.grad


@pytest.mark.parametrize("size", [(4097, 2880, 128256), (4097, 520, 50257), (127, 2880, 128256)], ids=str)
@pytest.mark.parametrize("std", [0.02, 1.0, 30.0])
@both_backends
def test_big_sizes_in_bfloat16_beat_the_plain_expression(size, std, backend):
    tokens, hidden, vocab = size
    h = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(vocab, hidden, device="cuda") * std / hidden**0.5).bfloat16().requires_grad_()
    y = torch.randint(vocab, (tokens,), device="cuda")
    reference = float64_on_device(h, w, y)

    def errors(loss):
        made = (loss.detach(), *torch.autograd.grad(loss, (h, w)))
        return [float((m.double() - r).norm() / r.norm()) for m, r in zip(made, reference, strict=True)]

    plain = errors(F.cross_entropy(F.linear(h, w), y))
    for strategy in STRATEGIES:
        ours = errors(linear_cross_entropy(h, w, y, strategy=strategy, backend=backend))
        assert ours[0] <= 1e-5
        assert ours[1] <= 2 * plain[1]
        assert ours[2] <= 2 * plain[2]


@both_strategies
@backends_and_dtypes
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_synchronises(dtype, reduction, strategy, backend):
    h, w, y, b = small_problem(tokens=300, vocab=3000, dtype=dtype, device="cuda", bias=True)
    constants = {
        "token_weight": torch.rand(2, 150, device="cuda"),
        "temperature": torch.rand(2, 150, device="cuda") + 1,
    }
    if reduction == "mean":
        constants["normalizer"] = torch.full((), 7, device="cuda")

    def step():
        loss, _ = linear_cross_entropy(
            h, w, y, b, softcap=5.0, label_smoothing=0.1, z_loss=1e-3, strategy=strategy, reduction=reduction,
            backend=backend, return_stats=True, **constants,
        )  # fmt: skip
        loss.sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@both_strategies
@pytest.mark.parametrize("label", [70, -1, 2**40])
@pytest.mark.parametrize(
    ("backend", "dtype"), [("torch", torch.float32), ("triton", torch.bfloat16), ("triton", torch.float16)], ids=str
)
def test_a_bad_label_is_nan_and_check_inputs_raises(label, strategy, backend, dtype):
    h, w, y, _ = small_problem(device="cuda", dtype=dtype)
    y[1, 7] = label
    linear_cross_entropy = partial(op, backend=backend)
    loss, stats = linear_cross_entropy(h, w, y, reduction="none", strategy=strategy, return_stats=True)
    others = torch.ones_like(y, dtype=torch.bool)
    others[1, 7] = False
    assert loss[1, 7].isnan()
    assert stats.log_prob[1, 7].isnan()
    assert not stats.correct[1, 7]
    good = small_problem(device="cuda", dtype=dtype)
    assert_same(loss[others], linear_cross_entropy(*good[:3], reduction="none")[others])
    grads = gradients(loss, h, w, grad=torch.ones_like(loss))
    assert grads[0][1, 7].isnan().all()
    assert grads[0][others].isfinite().all()
    assert linear_cross_entropy(h, w, y, strategy=strategy).isnan()
    with pytest.raises(ValueError, match=r"target\[1, 7\] is"):
        linear_cross_entropy(h, w, y, strategy=strategy, check_inputs=True)
    with pytest.raises(ValueError, match="temperature must be finite and above 0"):
        linear_cross_entropy(*good[:3], temperature=torch.zeros(2, 12, device="cuda"), check_inputs=True)
    with pytest.raises(ValueError, match="normalizer must be finite and above 0"):
        linear_cross_entropy(*good[:3], normalizer=torch.zeros((), device="cuda"), check_inputs=True)


@both_strategies
@backends_and_dtypes
def test_nothing_leaks_from_ignored_tokens(dtype, strategy, backend):
    linear_cross_entropy = partial(op, backend=backend)
    h, w, y, b = small_problem(device="cuda", bias=True, dtype=dtype)
    y[0, 3] = y[1, 5] = -100
    with torch.no_grad():
        b.add_(100)  # an ignored token's logits are finite and large
    zeroed = h.detach().masked_fill((y == -100)[..., None], 0).requires_grad_()
    with torch.no_grad():
        h[0, 3], h[1, 5] = math.nan, math.inf
    for reduction in ("mean", "none"):
        upstream = torch.ones_like(y, dtype=torch.float32)
        upstream[0, 3] = math.nan
        upstream = upstream if reduction == "none" else None
        made = gradients(
            linear_cross_entropy(h, w, y, b, reduction=reduction, strategy=strategy), h, w, b, grad=upstream
        )
        clean = gradients(
            linear_cross_entropy(zeroed, w, y, b, reduction=reduction, strategy=strategy), zeroed, w, b, grad=upstream
        )
        assert (made[0][y == -100] == 0).all()
        assert all(torch.equal(p, q) and p.isfinite().all() for p, q in zip(made, clean, strict=True))


@both_backends
@both_strategies
def test_float16_keeps_gradients_that_float16_can_not_hold(strategy, backend):
    """A mean over many tokens under a loss scale: 1/N alone would vanish in float16."""
    h, w, y, _ = small_problem(tokens=4096, vocab=8000, hidden=64, dtype=torch.float16, device="cuda")
    with torch.no_grad():
        w.mul_(0.01)
    grads = gradients(linear_cross_entropy(h, w, y, strategy=strategy, backend=backend) * 65536, h, w)
    exact = [x.detach().double().requires_grad_() for x in (h, w)]
    loss = F.cross_entropy(F.linear(*exact).flatten(0, 1), y.flatten()) * 65536
    for made, ref in zip(grads, gradients(loss, *exact), strict=True):
        assert float((made.double() - ref).norm() / ref.norm()) < 2e-3


@both_backends
@both_strategies
def test_same_bits_and_side_stream(strategy, backend):
    h, w, y, _ = small_problem(tokens=300, vocab=5000, dtype=torch.bfloat16, device="cuda")

    def run():
        loss = linear_cross_entropy(h, w, y, strategy=strategy, backend=backend)
        return [loss, *gradients(loss, h, w)]

    first = run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        second = run()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@both_backends
@both_strategies
def test_cuda_graph(strategy, backend):
    h, w, y, _ = small_problem(tokens=64, vocab=1000, dtype=torch.bfloat16, device="cuda")

    def step():
        loss = linear_cross_entropy(h, w, y, strategy=strategy, backend=backend)
        return [loss.detach(), *gradients(loss, h, w)]

    graph, captured = capture(step)
    with torch.no_grad():
        h.copy_(torch.randn_like(h))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@both_strategies
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@both_backends
def test_autocast_gives_float32_parameters_unrounded_gradients(dtype, strategy, backend):
    h, w, y, b = small_problem(device="cuda", bias=True)
    with torch.autocast("cuda", dtype):
        loss = linear_cross_entropy(h, w, y, b, strategy=strategy, backend=backend)
    rounded = [x.detach().to(dtype).double().requires_grad_() for x in (h, w, b)]
    expected = F.cross_entropy(F.linear(*rounded[:2], rounded[2]).flatten(0, 1), y.flatten())
    assert float((loss - expected).abs()) < 1e-5
    for g, q in zip(gradients(loss, h, w, b), gradients(expected, *rounded), strict=True):
        assert g.dtype == torch.float32
        assert float((g - q).norm() / q.norm()) < 4e-3  # the products read the logits' gradient in 16 bits


@both_strategies
@both_backends
def test_compile(strategy, backend):
    h, w, y, _ = small_problem(tokens=64, vocab=1000, dtype=torch.bfloat16, device="cuda")
    how = {"strategy": strategy, "backend": backend}
    compiled = torch.compile(lambda h, w, y: linear_cross_entropy(h * 2, w, y, **how), fullgraph=True)
    eager = linear_cross_entropy(h * 2, w, y, **how)
    assert_same(compiled(h, w, y), eager)
    for p, q in zip(gradients(compiled(h, w, y), h, w), gradients(eager, h, w), strict=True):
        assert float((p - q).norm() / q.norm()) < 1e-2


def test_compile_for_any_token_count():
    loss = torch.compile(partial(linear_cross_entropy, backend="triton"), fullgraph=True, dynamic=True)
    for tokens in (24, 36, 300, 1024):
        h, w, y, _ = small_problem(tokens=tokens, hidden=128, dtype=torch.bfloat16, device="cuda")
        assert_same(loss(h, w, y), linear_cross_entropy(h, w, y, backend="triton"))
        for p, q in zip(gradients(loss(h, w, y), h, w), gradients(linear_cross_entropy(h, w, y), h, w), strict=True):
            assert float((p.float() - q.float()).norm() / q.float().norm()) < 1e-2


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("stash", {"dtype": "bfloat16"}),
        ("recompute", {"dtype": "bfloat16"}),
        ("stash", {"dtype": "float32"}),
        ("recompute", {"dtype": "float32"}),
        ("stash", {"dtype": "bfloat16", "weight_dtype": "float32", "hidden_dtype": "float32"}),
        ("recompute", {"dtype": "bfloat16", "weight_dtype": "float32", "hidden_dtype": "float32"}),
        ("recompute", {"dtype": "bfloat16", "softcap": True}),
        ("forward", {"dtype": "bfloat16", "grad_hidden": False, "grad_weight": False}),
    ],
    ids=str,
)
def test_the_memory_formula_holds(strategy, changes):
    p = Problem(4096, 1024, 32768, device="cuda", **changes)
    h = torch.randn(4096, 1024, device="cuda", dtype=getattr(torch, p.hidden_dtype), requires_grad=p.grad_hidden)
    w = torch.randn(32768, 1024, device="cuda", dtype=getattr(torch, p.weight_dtype), requires_grad=p.grad_weight)
    y = torch.randint(32768, (4096,), device="cuda")
    budget = memory.scratch_at_least(p, strategy) + 64 * MIB
    options = {"softcap": 10.0} if p.softcap else {}

    def step():
        with torch.autocast("cuda", getattr(torch, p.dtype), enabled=p.dtype != p.hidden_dtype):
            asked = "auto" if strategy == "forward" else strategy
            loss = linear_cross_entropy(h, w, y, scratch_bytes=budget, strategy=asked, backend="torch", **options)
        return [loss, *(torch.autograd.grad(loss, (h, w)) if p.any_grad else ())]

    step()
    formula = memory.scratch_bytes(p, memory.plan(p, strategy, budget))
    peak = peak_extra_bytes(step, device="cuda")
    assert formula <= budget
    assert formula / 2 <= peak <= formula + MIB, (peak / MIB, formula / MIB)


@both_backends
@both_strategies
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_tokens_and_one(tokens, strategy, backend):
    assert_right(Case("few", tokens, 31, 123), torch.bfloat16, "cuda", strategy=strategy, backend=backend)


@both_strategies
@both_backends
def test_a_normalizer_on_the_cpu(strategy, backend):
    h, w, y, _ = small_problem(device="cuda", dtype=torch.bfloat16)
    here, there = (
        linear_cross_entropy(h, w, y, normalizer=n, strategy=strategy, backend=backend)
        for n in (torch.tensor(7), torch.tensor(7).cuda())
    )
    assert torch.equal(here, there)
    assert all(torch.equal(a, b) for a, b in zip(gradients(here, h, w), gradients(there, h, w), strict=True))
