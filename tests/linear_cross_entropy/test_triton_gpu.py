"""The Triton backend on a CUDA device: memory, accuracy, bits, sizes."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from common import assert_right, capture, gradients, memory_off_by_256, mixed_plan

from onchip.bench.measure import peak_extra_bytes
from onchip.core.sizes import MIB
from onchip.ops.linear_cross_entropy.cases import Case
from onchip.torch import linear_cross_entropy
from onchip.vocab.memory import Problem
from onchip.vocab.triton import memory as triton_spec

pytestmark = pytest.mark.gpu
op = partial(linear_cross_entropy, backend="triton")
WAYS = ("stash", "mixed", "recompute")


def make(tokens, hidden, vocab, *, dtype=torch.bfloat16, std=1.0, needs=(True, True), device="cuda"):
    """(hidden, weight, target) with logits of standard deviation `std`."""
    g = torch.Generator(device).manual_seed(0)
    h = torch.randn(tokens, hidden, device=device, generator=g).to(dtype)
    w = (torch.randn(vocab, hidden, device=device, generator=g) * (std / hidden**0.5)).to(dtype)
    y = torch.randint(vocab, (tokens,), device=device, generator=g)
    return h.requires_grad_(needs[0]), w.requires_grad_(needs[1]), y


def mixed_budget(p):
    """Scratch with which some tokens' exponentials are kept in the weight's gradient, some in scratch, some nowhere."""
    first, last = (triton_spec.scratch_bytes(p, triton_spec.plan(p, s, 1 << 50)) for s in ("recompute", "stash"))
    for i in range(1, 256):
        try:
            budget = max(first, last) * i // 128
            c = triton_spec.plan(p, "auto", budget)
        except ValueError:
            continue
        if c.stashed and c.overflow and c.held < p.tokens:
            return budget
    raise AssertionError(f"no budget gives a mixed plan for {p}")


def small_plan(way, tokens):
    """The mixed plan of a problem so small that the planner never makes one."""
    return mixed_plan(tokens) if way == "mixed" else nullcontext()


def keywords(way, p):
    return {"scratch_bytes": mixed_budget(p)} if way == "mixed" else {"strategy": way}


def problem(tokens, hidden, vocab, dtype="bfloat16", **changes):
    return Problem(tokens, hidden, vocab, dtype, device="cuda", **changes)


@pytest.mark.parametrize("way", WAYS)
def test_memory_at_multiples_of_256_bytes(way):
    how = {} if way == "mixed" else {"strategy": way}
    with memory_off_by_256(), small_plan(way, 300):
        assert_right(Case("off", 300, 136, 600, bias=True), torch.bfloat16, "cuda", backend="triton", **how)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case("mixed", 600, 264, 2049),
        Case("mixed", 600, 264, 2049, zipf=True, options={"reduction": "none"}),
        Case("mixed", 600, 259, 2049, ignored=0.2),
        Case(
            "mixed", 600, 264, 2049, bias=True, ignored=0.2, token_weight=True, token_temperature=True, masked=300,
            options={"z_loss": 1e-3, "logit_scale": 0.5, "normalizer": 100},
        ),
        Case("mixed", 600, 264, 2049, logit_std=60.0),
    ],
    ids=str,
)  # fmt: skip
def test_mixed_plans(case, dtype, way):
    with small_plan(way, 600):
        assert_right(case, dtype, "cuda", backend="triton", strategy="auto" if way == "mixed" else way)


@pytest.mark.parametrize(
    ("way", "changes"),
    [
        ("stash", {}),
        ("mixed", {}),
        ("recompute", {}),
        ("mixed", {"grad_bias": True}),
        ("forward", {"grad_hidden": False, "grad_weight": False}),
        ("stash", {"grad_weight": False}),
        ("recompute", {"grad_weight": False}),
        ("mixed", {"grad_hidden": False}),
        ("recompute", {"weight_grad_out": True}),
        ("stash", {"weight_grad_out": True}),
        ("mixed", {"hidden_dtype": "float32", "weight_dtype": "float32"}),
        ("recompute", {"hidden_dtype": "float32", "weight_dtype": "float32"}),
        ("recompute", {"softcap": True, "smoothing": True}),
        ("mixed", {"stats": True}),
    ],
    ids=str,
)
def test_the_memory_formula_holds(way, changes):
    # More tokens than a 16-bit gradient can hold the exponentials of; than a float32 one, too.
    tokens, hidden, vocab = 4096, 1024, 50257
    p = problem(tokens, hidden, vocab, **changes)
    dtypes = [getattr(torch, name) for name in (p.hidden_dtype, p.weight_dtype)]
    h, w, y = make(tokens, hidden, vocab)
    h, w = (x.detach().to(t) for x, t in zip((h, w), dtypes, strict=True))
    h.requires_grad_(p.grad_hidden)
    w.requires_grad_(p.grad_weight)
    b = torch.zeros(vocab, device="cuda", dtype=dtypes[1], requires_grad=True) if p.grad_bias else None
    out = torch.zeros(vocab, hidden, device="cuda") if p.weight_grad_out else None
    if way == "forward":
        how = {"scratch_bytes": triton_spec.scratch_bytes(p, triton_spec.TritonConfig(1024))}
    elif way == "mixed":
        how = {"scratch_bytes": mixed_budget(p)}
    else:
        # Twice the least, in chunks of a useful size.
        how = {"strategy": way, "scratch_bytes": triton_spec.scratch_bytes(p, triton_spec.plan(p, way)) + 64 * MIB}
    config = triton_spec.plan(p, how.get("strategy", "auto"), how["scratch_bytes"])
    formula = triton_spec.scratch_bytes(p, config)
    options = {"softcap": 10.0} if p.softcap else {}
    options |= {"label_smoothing": 0.1} if p.smoothing else {}
    leaves = [x for x in (h, w, b) if x is not None and x.requires_grad]

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=p.hidden_dtype == "float32"):
            loss = op(h, w, y, b, weight_grad_out=out, return_stats=p.stats, **how, **options)
        stats = ()
        if p.stats:
            loss, stats = loss
        made = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ()
        return [loss, *stats, *(g for g in made if g is not None)]

    step()
    peak = peak_extra_bytes(step, device="cuda")
    assert formula <= how["scratch_bytes"]
    assert formula / 2 <= peak <= formula + MIB, (peak / MIB, formula / MIB, config)


def in_columns(w):
    """The same weight [V, H] whose memory is [H, V]."""
    return w.detach().T.contiguous().T.requires_grad_(w.requires_grad)


@pytest.mark.parametrize("grad", [True, False], ids=["with gradients", "forward"])
@pytest.mark.parametrize("vocab", [50264, 50257])
@pytest.mark.parametrize("tokens", [1024, 4096])
def test_the_memory_of_a_weight_whose_columns_lie_in_rows(tokens, vocab, grad):
    """None, unless they don't begin at multiples of 16 bytes: then a copy."""
    h, w, y = make(tokens, 1024, vocab, needs=(grad, grad))
    w = in_columns(w)
    copied = 2 * vocab * 1024 if vocab % 8 else 0
    p = problem(tokens, 1024, vocab, grad_hidden=grad, grad_weight=grad, copied=copied)

    def step():
        loss = op(h, w, y)
        return [loss, *(gradients(loss, h, w) if grad else ())]

    step()
    formula = triton_spec.scratch_bytes(p, triton_spec.plan(p))
    peak = peak_extra_bytes(step, device="cuda")
    assert formula / 2 <= peak <= formula + MIB, (peak / MIB, formula / MIB)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("size", [(264, 3000), (259, 3000), (264, 2049)], ids=["descriptors", "pointers", "copied"])
def test_a_weight_whose_columns_lie_in_rows(size, options, way):
    h, w, y = make(600, *size)
    with nullcontext() if options else small_plan(way, 600):
        how = {"strategy": "auto" if way == "mixed" else way} | options
        results = [(loss, *gradients(loss, h, x)) for x in (w, in_columns(w)) for loss in [op(h, x, y, **how)]]
    for a, b in zip(*results, strict=True):
        assert float((a.double() - b.double()).norm() / b.double().norm()) < 1e-3


def float32_reference(h, w, y):
    """Loss and gradients in float64; and of the eager expression with float32 logits of the 16-bit product."""
    exact = [x.detach().double().requires_grad_() for x in (h, w)]
    loss = F.cross_entropy(F.linear(*exact), y)
    reference = (loss.detach(), *gradients(loss, *exact))
    eager = F.cross_entropy(F.linear(h, w).float(), y)
    return reference, (eager.detach(), *gradients(eager, h, w))


def errors(made, reference):
    return [float((m.double() - r).norm() / r.norm()) for m, r in zip(made, reference, strict=True)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("zipf", [False, True], ids=["uniform", "zipf"])
@pytest.mark.parametrize("std", [1.0, 30.0])
def test_no_less_accurate_than_eager_with_float32_logits(std, zipf, way):
    h, w, y = make(2048, 1024, 32000, std=std)
    if zipf:  # as words do: one label is that of a tenth of the tokens
        y = torch.multinomial(1 / torch.arange(1.0, 32001, device="cuda"), 2048, replacement=True)
    reference, eager = float32_reference(h, w, y)
    loss = op(h, w, y, **keywords(way, problem(2048, 1024, 32000)))
    ours = errors((loss.detach(), *gradients(loss, h, w)), reference)
    for name, a, b in zip(("loss", "hidden", "weight"), ours, errors(eager, reference), strict=True):
        assert a <= b, (name, a, b)


@pytest.mark.parametrize("way", WAYS)
def test_logits_far_above_the_targets(way):
    """More than 90 above: exponentials relative to the target's would overflow what they are kept in."""
    h, w, y = make(600, 256, 3001, std=60.0)
    with torch.no_grad():
        z = F.linear(h.float(), w.float())
        far = z.amax(1) - z.gather(1, y[:, None])[:, 0]
    assert (far > 100).any()
    assert (far < 80).any()
    reference, eager = float32_reference(h, w, y)
    with small_plan(way, 600):
        loss = op(h, w, y, strategy="auto" if way == "mixed" else way)
    made = (loss.detach(), *gradients(loss, h, w))
    assert all(x.isfinite().all() for x in made)
    ours = errors(made, reference)
    assert ours[0] <= 1e-5
    for a, b in zip(ours, errors(eager, reference), strict=True):
        assert a <= 2 * b


@pytest.mark.parametrize("size", [(4097, 31, 50257), (4097, 520, 2049), (127, 2880, 50257)], ids=str)
@pytest.mark.parametrize("strategy", ["stash", "recompute"])
def test_ragged_sizes(size, strategy):
    h, w, y = make(*size)
    reference, eager = float32_reference(h, w, y)
    loss = op(h, w, y, strategy=strategy)
    ours = errors((loss.detach(), *gradients(loss, h, w)), reference)
    assert ours[0] <= 1e-5
    for a, b in zip(ours[1:], errors(eager, reference)[1:], strict=True):
        assert a <= 1.2 * b


def test_more_elements_of_logits_than_32_bits_count():
    tokens, hidden, vocab = 32768, 64, 131072
    assert tokens * vocab > 1 << 31
    h, w, y = make(tokens, hidden, vocab)
    row = torch.arange(vocab - 3, vocab, device="cuda")
    with torch.no_grad():
        y[-3:] = row
    for strategy in ("stash", "recompute"):
        loss, stats = op(h, w, y, strategy=strategy, return_stats=True, reduction="sum")
        grads = gradients(loss, h, w)
        for some in (slice(0, 64), slice(tokens // 2, tokens // 2 + 64), slice(tokens - 64, tokens)):
            z = F.linear(h[some].detach().float(), w.detach().float())
            lse = torch.logsumexp(z, 1)
            assert torch.allclose(stats.lse[some], lse, rtol=1e-5)
            p = torch.exp(z - lse[:, None])
            p[torch.arange(64, device="cuda"), y[some]] -= 1
            expected = p @ w.detach().float()
            assert float((grads[0][some].float() - expected).norm() / expected.norm()) < 5e-3
        # Some rows of the weight's gradient, in chunks of tokens.
        for rows in (slice(0, 64), slice(vocab - 64, vocab)):
            z = F.linear(h.detach().float(), w[rows].detach().float())
            p = torch.exp(z - stats.lse[:, None])
            at = y - rows.start
            inside = ((at >= 0) & (at < 64)).nonzero()[:, 0]
            p[inside, at[inside]] -= 1
            expected = p.T @ h.detach().float()
            assert float((grads[1][rows].float() - expected).norm() / expected.norm()) < 5e-3


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_every_time(way):
    """On a side stream as well, and from one retained graph."""
    h, w, y = make(1000, 520, 5003)
    how = keywords(way, problem(1000, 520, 5003))

    def run():
        loss = op(h, w, y, **how)
        return [loss, *gradients(loss, h, w)]

    first = run()
    for _ in range(3):
        assert all(torch.equal(p, q) for p, q in zip(run(), first, strict=True))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = run()
    torch.cuda.synchronize()
    assert all(torch.equal(p, q) for p, q in zip(aside, first, strict=True))
    loss = op(h, w, y, **how)
    for retain in (True, True, False):
        made = torch.autograd.grad(loss, (h, w), retain_graph=retain)
        assert all(torch.equal(p, q) for p, q in zip(made, first[1:], strict=True))
        for g in made:
            g.mul_(3)  # what a caller does with its gradients must not reach the graph


@pytest.mark.parametrize("way", WAYS)
def test_a_mixed_cuda_graph_without_synchronisation(way):
    h, w, y = make(1000, 520, 5003)
    how = keywords(way, problem(1000, 520, 5003))

    def step():
        loss = op(h, w, y, **how)
        return [loss.detach(), *gradients(loss, h, w)]

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, captured = capture(step)
    with torch.no_grad():
        h.copy_(torch.randn_like(h))
        y[::3] = -100
    graph.replay()
    assert all(torch.equal(p, q) for p, q in zip(captured, step(), strict=True))


def test_every_device_whichever_is_current():
    for index in range(torch.cuda.device_count()):
        h, w, y = make(300, 128, 1000, device=f"cuda:{index}")
        loss = op(h, w, y)
        exact = [x.detach().double().requires_grad_() for x in (h, w)]
        expected = F.cross_entropy(F.linear(*exact), y)
        assert abs(float(loss - expected)) < 1e-5
        for g, q in zip(gradients(loss, h, w), gradients(expected, *exact), strict=True):
            assert g.device == h.device
            assert float((g.double() - q).norm() / q.norm()) < 5e-3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ignored", [0.5, 1.0])
def test_ignored_tokens_cost_nothing_and_leak_nothing(ignored, way):
    h, w, y = make(1000, 520, 5003)
    how = keywords(way, problem(1000, 520, 5003))
    y[torch.rand(1000, device="cuda") < ignored] = -100
    gone = y == -100
    with torch.no_grad():
        h[gone] = math.nan
    loss = op(h, w, y, **how)
    grads = gradients(loss, h, w)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][gone] == 0).all()
    if ignored == 1:
        assert float(loss) == 0
        assert not grads[1].any()
        return
    few = h[~gone].detach().requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (few, w)]
    expected = gradients(F.cross_entropy(F.linear(*exact), y[~gone]), *exact)
    assert float((grads[0][~gone].double() - expected[0]).norm() / expected[0].norm()) < 5e-3
    assert float((grads[1].double() - expected[1]).norm() / expected[1].norm()) < 5e-3


@pytest.mark.parametrize("strategy", ["stash", "recompute"])
@pytest.mark.parametrize("hidden", [520, 515])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_weight_grad_out_accumulates(hidden, strategy, reduction):
    total = torch.full((5003, hidden), 1e-3, device="cuda")
    expected = total.double()
    w = make(1, hidden, 5003)[1]
    for seed in (1, 2):
        h, _, y = make(700 * seed, hidden, 5003)
        loss = op(h, w, y, weight_grad_out=total, strategy=strategy, reduction=reduction)
        upstream = torch.rand_like(loss)
        loss.backward(upstream)
        exact = [x.detach().double().requires_grad_() for x in (h, w)]
        grads = gradients(F.cross_entropy(F.linear(*exact), y, reduction=reduction), *exact, grad=upstream.double())
        expected += grads[1]
        assert w.grad is None
        assert float((h.grad.double() - grads[0]).norm() / grads[0].norm()) < 5e-3
    assert float((total.double() - expected).norm() / (expected - 1e-3).norm()) < 5e-3
