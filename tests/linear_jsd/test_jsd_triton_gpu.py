"""The Triton backend on a CUDA device: accuracy, exact zeros, bits, memory, sizes, what must not synchronise."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from onchip.bench.torch_steps import peak_extra_bytes
from onchip.core.sizes import MIB
from onchip.ops.linear_jsd import triton_memory as triton_spec
from onchip.ops.linear_jsd.checks import CHECK_CASES, CHECKER, plain_divergence
from onchip.ops.linear_jsd.memory import Head, JsdProblem
from onchip.ops.linear_jsd.triton_memory import JsdPlan
from onchip.torch import TopK, jsd, linear_jsd
from shared import alternating, aside, capture, without_synchronisation

pytestmark = pytest.mark.gpu
op = partial(linear_jsd, backend="triton")
HALF = (torch.bfloat16, torch.float16)
BETAS = (0.0, 0.25, 0.5, 1.0)
OF_TOPK = [replace(c, student="logits") for c in CHECK_CASES if c.name.startswith("top-k")]
# Everything kept, some of it in scratch and some computed again, nothing kept.
WAYS = {
    "held": lambda t: JsdPlan(t, triton_spec.up(t, 128), 1 << 20, 1024),
    "mixed": lambda t: JsdPlan(256, 384, 1536, 512),
    "again": lambda t: JsdPlan(256, 0, 1536, 512),
}


@pytest.fixture(params=WAYS)
def planned(monkeypatch, request):
    """The op cuts its problems in each of the ways."""
    way = WAYS[request.param]
    monkeypatch.setattr(triton_spec, "plan", lambda p, *_: way(p.tokens))


def make(tokens, hidden, vocab, *, dtype=torch.bfloat16, std=1.0, noise=None, teacher=None):
    """Both models' hidden states and weights; `noise`: the teacher is the student but for so much."""
    g = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=g)

    other = teacher or hidden
    h, w = normal(tokens, hidden), normal(vocab, hidden) * std / hidden**0.5
    x, v = (normal(tokens, other), normal(vocab, other) * std / other**0.5) if noise is None else (h, w)
    x = x + normal(*x.shape) * (noise or 0)
    return [p.to(dtype).requires_grad_() for p in (h, w, x, v)]


def gradients(loss, leaves, grad=None):
    return [loss.detach(), *torch.autograd.grad(loss, leaves, grad)]


def errors(made, reference):
    return [float((m.double() - r.double()).norm() / r.double().norm()) for m, r in zip(made, reference, strict=True)]


def plain(h, w, x, v, beta, *, dtype=None):
    """The mean divergence of the framework's own operations, from logits that are rounded to the operands' dtype."""
    z, u = (F.linear(a, b).to(dtype or a.dtype) for a, b in ((h, w), (x, v)))
    return plain_divergence(z.log_softmax(-1), u.log_softmax(-1), beta).mean()


@pytest.mark.parametrize(  # products are of 16 bits
    ("case", "dtype"),
    [
        pytest.param(c, d, marks=[pytest.mark.slow] * (d == HALF[i % 2]))
        for i, c in enumerate((*CHECK_CASES, *OF_TOPK))
        for d in (*HALF, torch.float32)
        if d != torch.float32 or c.student != "hidden"
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.usefixtures("unwritten_memory_shows")
def test_check_cases(case, dtype):
    wrong = [x for x in CHECKER.check_case(case, dtype, "cuda", backend="triton") if not x.ok]
    assert not wrong, wrong


@pytest.mark.parametrize("sizes", [(600, 264, 2049, None), (600, 259, 2049, 328), (131, 520, 50257, 72)], ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.usefixtures("unwritten_memory_shows", "planned")
def test_ways_agree_with_the_framework(sizes, dtype):
    tokens, hidden, vocab, teacher = sizes
    leaves = make(tokens, hidden, vocab, dtype=dtype, teacher=teacher)
    y = torch.randint(vocab, (tokens,), device="cuda")
    y[::5] = -100
    with torch.no_grad():  # of ignored tokens nothing leaks
        leaves[0][::5], leaves[2][::5] = math.nan, math.inf
    weight = torch.rand(tokens, device="cuda")
    options = {"target": y, "token_weight": weight, "hard_weight": 0.2, "temperature": 2.0, "teacher_grad": True}
    options |= {"reduction": "sum"}
    grad = torch.tensor(1000.0, device="cuda")  # takes a gradient of 1 / V to where float16 is normal
    made = gradients(op(*leaves, **options), leaves, grad)
    exact = [p.detach().float().requires_grad_() for p in leaves]
    reference = gradients(linear_jsd(*exact, backend="plain", **options), exact, grad)
    # Three roundings, of a logit's gradient, of the row that it meets and of the result: each at most 2^-11 in float16
    # and 0.4 of that in the mean, so 0.7 * 2^-11 together, and 8 times as much in bfloat16.
    bound = 6e-3 if dtype == torch.bfloat16 else 1e-3
    assert errors(made, reference)[0] < 1e-4
    assert max(errors(made, reference)[1:]) < bound
    assert not made[1][::5].any()
    assert not made[3][::5].any()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(("std", "noise"), [(1.0, None), (30.0, None), (1.0, 0.02), (1.0, 0.2), (0.02, None)])
def test_no_less_accurate_than_eager_with_float32_logits(beta, std, noise):
    leaves = make(1024, 512, 32000, std=std, noise=noise)
    exact = [p.detach().double().requires_grad_() for p in leaves]
    reference = gradients(plain(*exact, beta), exact[:2])
    eager = errors(gradients(plain(*leaves, beta, dtype=torch.float32), leaves[:2]), reference)
    ours = errors(gradients(op(*leaves, beta=beta), leaves[:2]), reference)
    for name, a, b in zip(("loss", "hidden", "weight"), ours, eager, strict=True):
        assert a <= max(b, 1e-5), (name, a, b)


@alternating(beta=BETAS, dtype=HALF)
@pytest.mark.usefixtures("planned")
def test_equal_models_are_exactly_zero(beta, dtype):
    h, w, _, _ = make(600, 520, 5003, dtype=dtype, std=10.0)
    loss = op(h, w, h, w, beta=beta, reduction="none", temperature=1.7)
    assert not loss.any()
    assert all(not g.any() for g in torch.autograd.grad(loss.sum(), (h, w)))


@pytest.mark.parametrize("beta", BETAS)
def test_never_below_zero_and_finite_where_both_underflow(beta):
    for std, noise in ((100.0, 0.01), (1.0, 1e-3), (300.0, None)):
        h, w, x, v = make(500, 256, 3001, std=std, noise=noise)
        loss = op(h, w, x, v, beta=beta, reduction="none")
        assert (loss >= 0).all()
        assert loss.isfinite().all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(loss.sum(), (h, w)))


@pytest.mark.usefixtures("planned")
def test_the_same_bits_every_time():
    """On a side stream as well, and from one retained graph."""
    leaves = make(1000, 520, 5003)

    def run():
        return gradients(op(*leaves, teacher_grad=True), leaves)

    first = run()
    for _ in range(3):
        assert all(torch.equal(p, q) for p, q in zip(run(), first, strict=True))
    made = aside(run)
    torch.cuda.synchronize()
    assert all(torch.equal(p, q) for p, q in zip(made, first, strict=True))
    loss = op(*leaves, teacher_grad=True)
    for retain in (True, True, False):
        made = torch.autograd.grad(loss, leaves, retain_graph=retain)
        assert all(torch.equal(p, q) for p, q in zip(made, first[1:], strict=True))
        for g in made:
            g.mul_(3)  # what a caller does with its gradients must not reach the graph


@pytest.mark.usefixtures("planned")
def test_a_cuda_graph_without_synchronisation():
    leaves = make(1000, 520, 5003)
    y = torch.randint(5003, (1000,), device="cuda")

    def step():
        return gradients(op(*leaves, target=y, hard_weight=0.1), leaves[:2])

    without_synchronisation(step)
    graph, captured = capture(step)
    with torch.no_grad():
        leaves[0].copy_(torch.randn_like(leaves[0]))
        y[::3] = -100
    graph.replay()
    assert all(torch.equal(p, q) for p, q in zip(captured, step(), strict=True))


def test_a_bad_label_is_nan_and_check_inputs_raises():
    h, w, x, v = make(300, 128, 1000)
    y = torch.randint(1000, (300,), device="cuda")
    y[7] = 1000
    loss = op(h, w, x, v, target=y, reduction="none")
    assert loss.isnan().nonzero().tolist() == [[7]]
    with pytest.raises(ValueError, match=r"target\[7\] is 1000"):
        op(h, w, x, v, target=y, check_inputs=True)


def test_more_elements_of_logits_than_32_bits_count():
    tokens, hidden, vocab = 32768, 64, 131072
    leaves = make(tokens, hidden, vocab)
    loss = op(*leaves, reduction="none")
    grad = torch.autograd.grad(loss.sum(), leaves[0])[0]
    for some in (slice(0, 64), slice(tokens - 64, tokens)):
        h, x = (leaves[i][some].detach().float().requires_grad_() for i in (0, 2))
        expected = linear_jsd(
            h, leaves[1].detach().float(), x, leaves[3].detach().float(), reduction="none", backend="plain"
        )
        assert errors([loss[some].detach()], [expected.detach()])[0] < 1e-4
        assert errors([grad[some]], torch.autograd.grad(expected.sum(), h))[0] < 1e-2
    z = torch.randn(17000, vocab, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    u = torch.randn_like(z)
    loss = jsd(z, u, reduction="none", backend="triton")
    grad = torch.autograd.grad(loss.sum(), z)[0]
    last = z[-8:].detach().requires_grad_()
    expected = jsd(last, u[-8:], reduction="none", backend="plain")
    assert errors([loss[-8:].detach()], [expected.detach()])[0] < 1e-5
    assert errors([grad[-8:]], torch.autograd.grad(expected.sum(), last))[0] < 5e-3


@pytest.mark.parametrize("vocab", [1, 123, 50257, 262144])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_logits_of_any_width(vocab, dtype):
    z, u = (torch.randn(37, vocab, device="cuda").to(dtype).requires_grad_() for _ in range(2))
    how = {"beta": 0.3, "temperature": 1.5, "teacher_grad": True, "reduction": "sum"}
    grad = torch.tensor(float(vocab), device="cuda")  # the gradients are about 1 then: normal in float16
    made = gradients(jsd(z, u, backend="triton", **how), (z, u), grad)
    expected = gradients(jsd(z, u, backend="plain", **how), (z, u), grad)
    for a, b in zip(made, expected, strict=True):
        # log(s / m) - KL may cancel: what is left has the error of a float32 log-probability near 10, 1e-6.
        assert torch.allclose(a, b, rtol=2e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


@pytest.mark.parametrize(("hidden", "vocab"), [(264, 3000), (259, 3000), (264, 3001)])
@pytest.mark.usefixtures("planned")
def test_weights_whose_columns_lie_in_rows(hidden, vocab):
    h, w, x, v = leaves = make(600, hidden, vocab)
    columns = [p.detach().T.contiguous().T.requires_grad_() for p in (w, v)]
    expected = gradients(op(*leaves, teacher_grad=True), leaves)
    turned = (h, columns[0], x, columns[1])
    assert max(errors(gradients(op(*turned, teacher_grad=True), turned), expected)) < 1e-3


def topk_of(leaves, rest):
    """What 24 entries know of the teacher."""
    h, w, x, v = leaves
    values, ids = F.linear(x, v).detach().float().log_softmax(-1).topk(24)
    return (h, w), {"teacher_topk": TopK(ids, values, "log_probs", rest)}


@pytest.mark.parametrize("rest", ["tail", "truncated", "renormalised"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.usefixtures("planned")
def test_a_topk(dtype, rest):
    """Of a head, in each of the ways; the same bits every time, and from a graph that waits for nothing."""
    leaves, known = topk_of(make(1000, 520, 5003, dtype=dtype), rest)
    y = torch.randint(5003, (1000,), device="cuda")
    y[::7] = -100
    known |= {"target": y, "hard_weight": 0.2, "beta": 0.4, "temperature": 1.5, "reduction": "sum"}
    wide = [p.detach().float().requires_grad_() for p in leaves]
    expected = gradients(linear_jsd(*wide, backend="plain", **known), wide)

    def step():
        return gradients(op(*leaves, **known), leaves)

    made = step()
    bounds = (1e-4, *[6e-3 if dtype == torch.bfloat16 else 2e-3] * 2)
    assert all(x <= bound for x, bound in zip(errors(made, expected), bounds, strict=True)), errors(made, expected)
    without_synchronisation(step)
    graph, captured = capture(step)
    graph.replay()
    for again in (step(), captured):
        assert all(torch.equal(p, q) for p, q in zip(again, made, strict=True))


@pytest.mark.parametrize("rest", ["tail", "renormalised"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_memory_of_a_topk(dtype, rest):
    tokens, hidden, vocab = 4096, 2048, 50264
    leaves, known = topk_of(make(tokens, hidden, vocab, dtype=dtype), rest)
    name = str(dtype).removeprefix("torch.")
    student = Head(tokens, hidden, vocab, name, device="cuda")
    nobody = Head(tokens, 0, 0, name, device="cuda", grad_hidden=False, grad_weight=False)
    p = JsdProblem(vocab, student, nobody, topk=24)

    def step():
        return gradients(op(*leaves, **known), leaves)

    step()
    formula = triton_spec.scratch_bytes(p, triton_spec.plan(p))
    peak = peak_extra_bytes(step, device="cuda")
    assert formula / 2 <= peak <= formula + MIB, (peak / MIB, formula / MIB)


@pytest.mark.parametrize("teacher", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("size", [(4096, 2048, 50257), (4096, 512, 50264)], ids=str)
def test_the_memory_formula_holds(size, columns, dtype, teacher):
    """Of weights whose rows or whose columns lie in rows of memory; a copy where these begin anywhere."""
    tokens, hidden, vocab = size
    leaves = make(tokens, hidden, vocab, dtype=dtype)
    if columns:
        leaves = [p.detach().T.contiguous().T.requires_grad_() if len(p) == vocab else p for p in leaves]
    name = str(dtype).removeprefix("torch.")
    known = {"device": "cuda", "copied": 2 * vocab * hidden if columns and vocab % 8 else 0}
    wants = ({"grad_hidden": g, "grad_weight": g} for g in (True, teacher))
    p = JsdProblem(vocab, *(Head(tokens, hidden, vocab, name, **known, **grads) for grads in wants))
    wanted = leaves if teacher else leaves[:2]

    def step():
        return gradients(op(*leaves, teacher_grad=teacher), wanted)

    step()
    formula = triton_spec.scratch_bytes(p, triton_spec.plan(p))
    peak = peak_extra_bytes(step, device="cuda")
    assert formula <= triton_spec.default_scratch(p)
    assert formula / 2 <= peak <= formula + MIB, (peak / MIB, formula / MIB)


def test_autocast_and_compile():
    h, w, x, v = (p.detach().float().requires_grad_() for p in make(300, 256, 3000))

    def f(h, w, x, v):
        with torch.autocast("cuda", torch.bfloat16):
            return op(torch.tanh(h), w, x, v, temperature=2.0) * 3

    made = gradients(torch.compile(f, fullgraph=True)(h, w, x, v), (h, w))
    expected = gradients(f(h, w, x, v), (h, w))
    assert all(g.dtype == torch.float32 for g in made)
    assert max(errors(made, expected)) < 1e-2
