"""The Triton backend on a CUDA device: accuracy, memory, bits, sizes."""

import math
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from common_llp import assert_right, small_problem

from onchip.bench.measure import peak_extra_bytes
from onchip.core.sizes import MIB
from onchip.ops.linear_log_probs import triton_op, triton_spec
from onchip.ops.linear_log_probs.cases import CHECK_CASES, Case
from onchip.ops.linear_log_probs.checks import plain_linear_log_probs
from onchip.ops.linear_log_probs.spec import Problem
from onchip.torch import linear_log_probs
from onchip.vocab.triton import memory as head_spec

pytestmark = pytest.mark.gpu
op = partial(linear_log_probs, backend="triton")
HALF = (torch.bfloat16, torch.float16)


@pytest.fixture
def poisoned(monkeypatch):
    """What torch.empty and its kin return is NaN, so a result that depends on what nobody wrote is NaN too."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def make(tokens, hidden, vocab, ids=None, *, dtype=torch.bfloat16, std=1.0, device="cuda", zipf=False):
    """(hidden, weight, ids) with logits of standard deviation `std`."""
    g = torch.Generator(device).manual_seed(0)
    h = torch.randn(tokens, hidden, device=device, generator=g).to(dtype)
    w = (torch.randn(vocab, hidden, device=device, generator=g) * (std / hidden**0.5)).to(dtype)
    shape = (tokens,) if ids is None else (tokens, ids)
    if zipf:  # as words do: one id is that of a tenth of the tokens
        rank = torch.arange(1.0, vocab + 1, device=device)
        y = torch.multinomial(1 / rank, math.prod(shape), replacement=True, generator=g).view(shape)
    else:
        y = torch.randint(vocab, shape, device=device, generator=g)
    return h.requires_grad_(), w.requires_grad_(), y


def run(function, h, w, y, *, entropy=False, seed=1, **options):
    """The outputs, and the gradients of hidden and weight for random upstream gradients."""
    out = function(h, w, y, entropy=entropy, **options)
    out = (out,) if isinstance(out, torch.Tensor) else [x for x in out if x is not None]
    g = torch.Generator(y.device).manual_seed(seed)
    floats = [x for x in out if x.requires_grad]
    upstream = [torch.randn(x.shape, device=x.device, generator=g).to(x.dtype) for x in floats]
    return [*(x.detach() for x in out), *torch.autograd.grad(floats, (h, w), upstream)]


def mixed_plan(tokens):
    """Some tokens' exponentials are kept in the weight's gradient, some in scratch, and some are computed again."""
    config = head_spec.TritonConfig(tokens, 512, 256, stashed=128, overflow=128)
    return mock.patch.object(head_spec, "plan", return_value=config)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("case", CHECK_CASES, ids=str)
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.usefixtures("poisoned")
def test_check_cases(case, dtype, entropy):
    assert_right(case, dtype, "cuda", entropy=entropy, backend="triton")


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case("mixed", 600, 264, 2049),
        Case("mixed", 600, 264, 2049, ids=5, zipf=True, bias=True),
        Case("mixed", 600, 259, 2049, ids=3, ignored=0.2, ignored_ids=0.2),
        Case("mixed", 600, 264, 2049, logit_std=60.0, ids=2),
    ],
    ids=str,
)
def test_mixed_plans(case, dtype, entropy):
    with mixed_plan(600):
        assert_right(case, dtype, "cuda", entropy=entropy, backend="triton")


def exact(h, w, y, entropy):
    """In float64, of the arguments' numbers."""

    def plain(h, w, y, *, entropy):
        out = plain_linear_log_probs(h, w, y)
        return (out.log_prob, out.entropy) if entropy else out.log_prob

    leaves = [x.detach().double().requires_grad_() for x in (h, w)]
    return run(plain, *leaves, y, entropy=entropy)


def float32_logits(h, w, y, *, entropy):
    """The eager expression, with float32 logits of the 16-bit product."""
    log_p = F.linear(h, w).float().log_softmax(-1)
    log_prob = log_p.gather(-1, y.view(len(h), -1)).view(y.shape)
    return (log_prob, -(log_p.exp() * log_p).sum(-1)) if entropy else log_prob


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("ids", "zipf"), [(None, False), (None, True), (5, False), (5, True)])
@pytest.mark.parametrize("std", [1.0, 30.0])
def test_no_less_accurate_than_eager_with_float32_logits(std, ids, zipf, entropy):
    h, w, y = make(2048, 1024, 32000, ids, std=std, zipf=zipf)
    reference = exact(h, w, y, entropy)
    errors = [
        [float((m.double() - r).norm() / r.norm()) for m, r in zip(made, reference, strict=True)]
        for made in (run(op, h, w, y, entropy=entropy), run(float32_logits, h, w, y, entropy=entropy))
    ]
    for name, a, b in zip(("log_prob", *(["entropy"] if entropy else []), "hidden", "weight"), *errors, strict=True):
        assert a <= 1.05 * b, (name, a, b)


def test_a_student_that_agrees_with_its_teacher():
    """Where an id's probability is its upstream gradient, nothing of its entry is left: no rounding either."""
    h, w, _ = make(512, 256, 300, std=3.0)
    with torch.no_grad():
        p, y = F.linear(h.double(), w.double()).softmax(-1).topk(16)
    made = torch.autograd.grad(op(h, w, y), (h, w), p.float())
    leaves = [x.detach().double().requires_grad_() for x in (h, w)]
    expected = torch.autograd.grad(plain_linear_log_probs(*leaves, y).log_prob, leaves, p)
    for g, q in zip(made, expected, strict=True):
        assert float((g.double() - q).norm() / q.norm()) < 5e-3


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ids": 16},
        {"entropy": True},
        {"entropy": True, "softcap": True, "ids": 4},
        {"top1": True},
        {"grad_hidden": False, "grad_weight": False, "entropy": True},
        {"hidden_dtype": "float32", "weight_dtype": "float32", "ids": 4},
        {"grad_weight": False},
        {"copied": 2 * 50257 * 1024},  # of a weight whose columns lie in rows, and begin anywhere
        {"vocab": 50264},  # of one whose columns begin at multiples of 16 bytes there is none
    ],
    ids=str,
)
def test_the_memory_formula_holds(changes):
    tokens, hidden = 4096, 1024
    p = Problem(tokens, hidden, dtype="bfloat16", device="cuda", **{"vocab": 50257} | changes)
    dtypes = [getattr(torch, name) for name in (p.hidden_dtype, p.weight_dtype)]
    h, w, y = make(tokens, hidden, p.vocab, p.ids if p.ids > 1 else None)
    if "copied" in changes or "vocab" in changes:
        w = w.detach().T.contiguous().T
    h, w = (x.detach().to(t) for x, t in zip((h, w), dtypes, strict=True))
    h.requires_grad_(p.grad_hidden)
    w.requires_grad_(p.grad_weight)
    leaves = [x for x in (h, w) if x.requires_grad]
    budget = triton_spec.least_scratch(p) + 64 * MIB
    formula = triton_spec.scratch_bytes(p, triton_spec.plan(p, budget))
    options = {"softcap": 10.0} if p.softcap else {}

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=p.hidden_dtype == "float32"):
            out = op(h, w, y, entropy=p.entropy, top1=p.top1, lse=True, scratch_bytes=budget, **options)
        results = [x for x in out if x is not None]
        floats = [x for x in results if x.requires_grad]
        grads = torch.autograd.grad(sum(x.sum() for x in floats), leaves) if leaves else ()
        return [*results, *grads]

    step()
    peak = peak_extra_bytes(step, device="cuda")
    assert formula <= budget
    assert formula / 2 <= peak <= formula + MIB, (peak / MIB, formula / MIB)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("hidden", "vocab"), [(264, 5000), (259, 5000), (264, 5003)])
def test_a_weight_whose_columns_lie_in_rows(hidden, vocab, entropy):
    h, w, y = make(600, hidden, vocab, 3)
    columns = w.detach().T.contiguous().T.requires_grad_()
    with mixed_plan(600):
        for a, b in zip(run(op, h, columns, y, entropy=entropy), run(op, h, w, y, entropy=entropy), strict=True):
            assert float((a.double() - b.double()).norm() / b.double().norm()) < 1e-3


@pytest.mark.parametrize(("ids", "entropy"), [(None, False), (None, True), (4, False), (4, True)])
def test_the_same_bits_every_time(ids, entropy):
    """On a side stream as well, and from one retained graph."""
    h, w, y = make(1000, 520, 5003, ids, zipf=True)
    step = partial(run, op, h, w, y, entropy=entropy)
    for plan in (nullcontext(), mixed_plan(1000)):
        with plan:
            first = step()
            for _ in range(3):
                assert all(torch.equal(p, q) for p, q in zip(step(), first, strict=True))
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                aside = step()
            torch.cuda.synchronize()
            assert all(torch.equal(p, q) for p, q in zip(aside, first, strict=True))
            out = op(h, w, y, entropy=entropy, lse=True)
            value = out.log_prob.sum() + (out.entropy.sum() if entropy else out.lse.sum())
            expected = None
            for retain in (True, True, False):
                made = torch.autograd.grad(value, (h, w), retain_graph=retain)
                expected = expected or [g.clone() for g in made]
                assert all(torch.equal(p, q) for p, q in zip(made, expected, strict=True))
                for g in made:
                    g.mul_(3)  # what a caller does with its gradients must not reach the graph


@pytest.mark.parametrize(("ids", "entropy"), [(None, False), (4, True), (4, False)])
def test_a_cuda_graph_without_synchronisation(ids, entropy):
    h, w, y = make(1000, 520, 5003, ids)
    upstream = torch.randn(y.shape, device="cuda")

    def step():
        out = op(h, w, y, entropy=entropy, lse=True, top1=True)
        outputs = [out.log_prob, out.lse, *([out.entropy] if entropy else [])]
        grads = [upstream, *(torch.ones_like(x) for x in outputs[1:])]
        return [*(x.detach() for x in outputs), out.top1, *torch.autograd.grad(outputs, (h, w), grads)]

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        h.copy_(torch.randn_like(h))
        y[::3] = -100
    graph.replay()
    assert all(torch.equal(p, q) for p, q in zip(captured, step(), strict=True))


@pytest.mark.parametrize("ids", [None, 3])
@pytest.mark.parametrize("ignored", [0.5, 1.0])
def test_ignored_tokens_leak_nothing(ignored, ids):
    h, w, y = make(1000, 520, 5003, ids)
    gone = torch.rand(1000, device="cuda") < ignored
    y[gone] = -100
    with torch.no_grad():
        h[gone] = math.nan
    for entropy in (False, True):
        out = op(h, w, y, entropy=entropy, lse=True, top1=True)
        floats = [x for x in out[:3] if x is not None]
        upstream = [torch.ones_like(x) for x in floats]
        for g in upstream:
            g[gone] = math.nan
        grads = torch.autograd.grad(floats, (h, w), upstream)
        assert all((x[gone] == 0).all() and x.isfinite().all() for x in floats)
        assert (out.top1[gone] == -1).all()
        assert all(g.isfinite().all() for g in grads)
        assert (grads[0][gone] == 0).all()
        assert bool(grads[1].any()) == (ignored < 1)


def test_more_elements_of_logits_than_32_bits_count():
    tokens, hidden, vocab = 32768, 64, 131072
    assert tokens * vocab > 1 << 31
    h, w, y = make(tokens, hidden, vocab, 2)
    y[-3:] = torch.arange(vocab - 6, vocab, device="cuda").view(3, 2)
    for entropy in (False, True):
        out = op(h, w, y, entropy=entropy, lse=True)
        value = out.log_prob.sum() + (out.entropy.sum() if entropy else 0)
        (grad_hidden, grad_weight) = torch.autograd.grad(value, (h, w))
        for some in (slice(0, 64), slice(tokens - 64, tokens)):
            part = h[some].detach().double().requires_grad_()
            expected = plain_linear_log_probs(part, w.detach().double(), y[some])
            assert torch.allclose(out.log_prob[some].double(), expected.log_prob, atol=1e-4)
            total = expected.log_prob.sum() + (expected.entropy.sum() if entropy else 0)
            (q,) = torch.autograd.grad(total, part)
            assert float((grad_hidden[some].double() - q).norm() / q.norm()) < 5e-3
        lse = out.lse.detach().double()
        for rows in (slice(0, 64), slice(vocab - 64, vocab)):
            log_p = F.linear(h.detach().double(), w[rows].detach().double()) - lse[:, None]
            g = -2 * log_p.exp()
            if entropy:
                g -= log_p.exp() * (log_p + out.entropy.detach().double()[:, None])
            for k in range(2):
                inside = ((y[:, k] >= rows.start) & (y[:, k] < rows.stop)).nonzero()[:, 0]
                g[inside, y[inside, k] - rows.start] += 1
            q = g.T @ h.detach().double()
            assert float((grad_weight[rows].double() - q).norm() / q.norm()) < 5e-3


def test_every_device_whichever_is_current():
    for index in range(torch.cuda.device_count()):
        h, w, y = make(300, 128, 1000, 2, device=f"cuda:{index}")
        made, expected = run(op, h, w, y, entropy=True), exact(h, w, y, True)
        for g, q in zip(made, expected, strict=True):
            assert g.device == h.device
            assert float((g.double() - q).norm() / q.norm()) < 5e-3


@pytest.mark.parametrize("ids", [None, 3])
def test_compile_and_opcheck(ids):
    h, w, y, b = (x.detach().cuda() for x in small_problem(ids, vocab=1000, dtype=torch.bfloat16))
    leaves = [x.requires_grad_() for x in (h, w, b)]

    def loss(h, w, y, b):
        out = op(h * 2, w, y, b, entropy=True, softcap=20.0)
        return out.log_prob.sum() + out.entropy.sum()

    compiled = torch.compile(loss, fullgraph=True)
    for p, q in zip(*(torch.autograd.grad(f(h, w, y, b), leaves) for f in (compiled, loss)), strict=True):
        assert float((p - q).norm() / q.norm()) < 1e-2
    numbers = (torch.bfloat16, -100, None, 1.0, 1.0, False)
    plan = triton_op.plan(Problem(24, 16, 1000, ids or 1, "bfloat16", device="cuda", grad_bias=True), None)
    arguments = triton_op.pack(triton_op.Arguments(h, w, b, y, None, *numbers, *plan, True, True, True, True))
    # What it leaves for backward is not filled in everywhere, so two runs differ there.
    torch.library.opcheck(triton_op._forward_op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_bad_ids_are_nan_without_synchronisation():
    h, w, y = make(300, 128, 1000, 2)
    y[7, 1] = 1000
    y[9] = -5
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = op(h, w, y, top1=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    bad = (y < 0) | (y >= 1000)
    assert torch.equal(out.log_prob.isnan(), bad)
    (grad,) = torch.autograd.grad(out.log_prob.sum(), h)
    assert torch.equal(grad.isnan().all(-1), bad.any(-1))
    with pytest.raises(ValueError, match=r"ids\[7, 1\] is 1000"):
        op(h, w, y, check_inputs=True)
