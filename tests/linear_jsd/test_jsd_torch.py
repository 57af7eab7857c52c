"""The PyTorch ops: compared with the oracle, properties, autograd, torch.compile, memory."""

import math
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from every_loss import check_operators
from onchip.bench.torch_steps import peak_extra_bytes
from onchip.core.sizes import MIB
from onchip.frontend.topk import TopK
from onchip.frontend.torch_parallel import WHOLE
from onchip.ops.linear_jsd import JsdOptions, memory, triton_launches
from onchip.ops.linear_jsd.checks import CHECK_CASES, CHECKER, JsdCase
from onchip.ops.linear_jsd.memory import Head, JsdProblem
from onchip.ops.linear_jsd.torch_call import PARAMETERS, JsdCall, JsdModel
from onchip.ops.linear_jsd.torch_op import jsd, linear_jsd
from onchip.ops.linear_jsd.torch_walk import losses_and_gradients
from onchip.vocab.torch.tiles import NOWHERE, Tokens
from shared import assert_within_bounds

SMALL = [c for c in CHECK_CASES if c.vocab < 10_000]
BETAS = (0.0, 0.3, 1.0)
betas = pytest.mark.parametrize("beta", BETAS)


def problem(dtype=torch.float32, seed=0):
    """(student_hidden, student_weight, teacher_hidden, teacher_weight), leaves that need gradients."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((2, 12, 16), (70, 16), (2, 12, 24), (70, 24))
    return [torch.randn(*s, generator=g).to(dtype).requires_grad_() for s in shapes]


def gradients(loss, leaves, grad=None):
    return [loss, *torch.autograd.grad(loss, leaves, grad)]


def assert_same(a, b, scale=1.0):
    for x, y in zip(a, b, strict=True):
        x, y = x.detach().double(), y.detach().double()
        assert x.shape == y.shape
        assert float((x - y).norm()) <= 64 * scale * torch.finfo(torch.float32).eps * max(1e-2, float(y.norm())), (x, y)


def assert_right(*case, **how):
    assert_within_bounds(CHECKER.check_case(*case, **how))


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_check_cases(case):
    assert_right(case, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*SMALL[::6], SMALL[-1]], ids=str)
def test_check_cases_in_16_bits(case, dtype):
    assert_right(case, dtype, "cpu")


@pytest.mark.parametrize(
    "size", [(0, 31, 123), (1, 520, 2049), (400, 31, 123), (7, 2880, 123), (5, 31, 50257), (3, 16, 128256)], ids=str
)
def test_sizes(size):
    assert_right(JsdCase("size", *size), torch.float32, "cpu")


@pytest.mark.parametrize("beta", [0.0, 1e-6, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equal_models_cost_exactly_nothing(dtype, beta):
    h, w, _, _ = problem(dtype)
    x, v = h.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    out = gradients(linear_jsd(h, w, x, v, beta=beta, temperature=0.7, teacher_grad=True), (h, w, x, v))
    assert all(not g.any() for g in out)
    z = torch.randn(5, 40).to(dtype).requires_grad_()
    assert all(not g.any() for g in gradients(jsd(z, z.detach(), beta=beta, temperature=3.0), (z,)))


@settings(max_examples=10, deadline=None)
@given(st.floats(0, 1), st.floats(1e-4, 300), st.floats(0, 2), st.integers(1, 40), st.integers(0, 9))
def test_never_negative_and_finite_between_the_ends(beta, std, noise, vocab, seed):
    g = torch.Generator().manual_seed(seed)
    z = (std * torch.randn(6, vocab, generator=g)).requires_grad_()
    u = (z + noise * torch.randn(6, vocab, generator=g)).detach()
    loss, grad = gradients(jsd(z, u, beta=beta), (z,))
    assert loss >= 0
    assert loss.isfinite()
    assert grad.isfinite().all()
    assert beta in (0, 1) or loss <= math.log(2) + 1e-6


@betas
def test_underflow_and_infinities(beta):
    """Entries where both probabilities underflow, and -inf on both sides."""
    z = torch.tensor([[0.0, -500.0, -600.0, -math.inf], [0.0, -1e4, 1e4, -math.inf]], requires_grad=True)
    u = torch.tensor([[0.0, -600.0, -500.0, -math.inf], [0.0, -1e4, 1e4, -math.inf]], requires_grad=True)
    out = gradients(jsd(z, u, beta=beta, teacher_grad=True), (z, u))
    assert all(x.isfinite().all() for x in out)


def test_infinity_on_one_side():
    z, u = torch.zeros(1, 3, requires_grad=True), torch.tensor([[0.0, 0.0, -math.inf]])
    assert jsd(z, u, beta=1.0) == math.inf
    assert jsd(u, z.detach(), beta=0.0) == math.inf
    assert jsd(z, u, beta=0.0).item() == pytest.approx(math.log(1.5))
    assert all(x.isfinite().all() for x in gradients(jsd(z, u, beta=0.3), (z,)))
    assert jsd(torch.full((1, 3), math.nan), u, beta=0.3).isnan()


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 24), st.sampled_from(BETAS), st.sampled_from(["mean", "none"]), st.booleans())
def test_chunk_sizes_change_nothing(chunk, beta, reduction, ignore):
    h, w, x, v = problem()
    target = torch.randint(70, (2, 12))
    if ignore:
        target[1, ::3] = -100
    options = {"beta": beta, "reduction": reduction, "target": target, "hard_weight": 0.2, "teacher_grad": True}

    def run():
        return gradients(linear_jsd(h, w, x, v, **options).sum(), (h, w, x, v))

    whole = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "plan", lambda *_: chunk)
        assert_same(run(), whole)


def test_padding_gets_no_gradient_and_changes_nothing():
    h, w, x, v = problem()
    wide_w = torch.cat([w, torch.full((10, 16), math.nan)]).detach().requires_grad_()
    wide_v = torch.cat([v, torch.full((3, 24), math.nan)]).detach()
    made = gradients(linear_jsd(h, wide_w, x, wide_v, vocab=70), (h, wide_w))
    assert not made[2][70:].any()
    assert_same([made[0], made[1], made[2][:70]], gradients(linear_jsd(h, w, x, v), (h, w)))


def test_hard_weight_of_one_is_cross_entropy():
    h, w, x, v = problem()
    y = torch.randint(70, (2, 12))
    loss = linear_jsd(h, w, x, v, target=y, hard_weight=1.0, temperature=3.0)
    plain = torch.nn.functional.cross_entropy((h @ w.T).flatten(0, 1), y.flatten())
    assert_same(gradients(loss, (h, w)), gradients(plain, (h, w)))


@pytest.mark.parametrize("given", ["logits", "top-k"])
def test_ignored_tokens_may_be_computed_all_the_same(given):
    """As on a GPU, where leaving them out would synchronise: the walk that masks them makes what the other does."""
    z, u = torch.randn(2, 6, 9).unbind()
    topk = TopK(*reversed(u.log_softmax(1).topk(3)), "log_probs", "tail")
    label, weight = torch.tensor([3, NOWHERE, 0, 8, NOWHERE, 1])[:, None], torch.rand(6)
    kept = label[:, 0] != NOWHERE
    index, one = kept.nonzero()[:, 0], torch.ones(())
    made = []
    for tokens in (
        Tokens(index, None, label[index], None, 1.0, 6, torch.float32, weight[index], one),
        Tokens(
            None,
            kept,
            label,
            torch.zeros(6, 1, dtype=torch.bool),
            1.0,
            6,
            torch.float32,
            weight.masked_fill(~kept, 0),
            one,
        ),
    ):
        models = [JsdModel(logits=x.masked_fill(~kept[:, None], math.nan)) for x in (z, u)]
        if given == "top-k":
            models[1] = JsdModel()
        call = JsdCall(
            *models, *(topk[:2] if given == "top-k" else (None, None)), None, None, None, (torch.float32,) * 2, (6,), 9,
            *topk[2:], JsdOptions(hard_weight=0.3), False, (False,) * 8, WHOLE,
        )  # fmt: skip
        with mock.patch.object(memory, "plan", return_value=4):
            wanted = [part.endswith("logits") for part in PARAMETERS]
            losses, grads = losses_and_gradients(call, tokens, tokens.weight, wanted)
        made.append([tokens.spread(losses, (6,)), *(g for g in grads if g is not None)])
    assert len(made[0]) == (2 if given == "top-k" else 3)
    assert_same(*made)


@pytest.mark.parametrize("kind", ["log_probs", "logits"])
@betas
def test_top_k_renormalised_is_the_divergence_over_those_entries(beta, kind):
    h, w, x, v = problem()
    u = (x @ v.T).detach()
    values, indices = ((u / 2).log_softmax(-1) if kind == "log_probs" else u).topk(5)
    topk = TopK(indices.int(), values, kind, "renormalised")
    loss = linear_jsd(h, w, teacher_topk=topk, beta=beta, temperature=2.0)
    expected = jsd((h @ w.T).gather(-1, indices), u.gather(-1, indices), beta=beta, temperature=2.0)
    assert_same(gradients(loss, (h, w)), gradients(expected, (h, w)))


def test_a_tail_is_a_lower_bound():
    h, w, x, v = problem()
    u = (x @ v.T).log_softmax(-1).detach()
    losses = []
    for k in (1, 5, 20, 70):
        values, indices = u.topk(k)
        losses.append(linear_jsd(h, w, teacher_topk=TopK(indices, values, "log_probs", "tail")))
    assert all(a <= b for a, b in pairwise(losses))
    assert_same([losses[-1]], [linear_jsd(h, w, x, v)])
    one = h.reshape(-1, h.shape[-1])[0]  # no leading dimension
    topk = TopK(*(part.reshape(-1, 70)[0] for part in (indices, values)), "log_probs", "tail")
    assert_same([linear_jsd(one, w, teacher_topk=topk)], [linear_jsd(one, w, x.reshape(-1, x.shape[-1])[0], v)])


# ------------------------------------------------------------------------------------------------------- autograd


def test_the_teacher_is_a_constant_unless_asked():
    h, w, x, v = problem()
    linear_jsd(h, w, x, v).backward()
    assert h.grad is not None
    assert x.grad is None
    assert v.grad is None
    assert not linear_jsd(h.detach(), w.detach(), x, v).requires_grad


def test_strides_do_not_matter():
    h, w, x, v = problem()
    strided = linear_jsd(h.transpose(0, 1).contiguous().transpose(0, 1), w.t().contiguous().t(), x, v)
    assert_same(gradients(strided, (h, w)), gradients(linear_jsd(h, w, x, v), (h, w)))
    z = torch.randn(12, 80, requires_grad=True)
    u = torch.randn(80, 12).t()
    assert_same(gradients(jsd(z[::2, 10:], u[::2, 10:]), (z,)), gradients(jsd(z[::2, 10:].clone(), u[::2, 10:]), (z,)))


def test_autocast():
    h, w, x, v = problem()
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_jsd(h, w, x, v)
    made = gradients(loss, (h, w))
    rounded = [p.detach().bfloat16().float().requires_grad_() for p in (h, w, x, v)]
    assert_same(made, gradients(linear_jsd(*rounded), rounded[:2]))
    h, x = (p.detach().bfloat16().requires_grad_() for p in (h, x))  # and without, where one of two has 16 bits
    made = gradients(linear_jsd(h, w, x, v), (h, w))
    assert [g.dtype for g in made[-2:]] == [torch.bfloat16, torch.float32]
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_jsd(h, w, x, v)
    assert_same(made, gradients(loss, (h, w)))


def test_compile_of_logits_and_top_k():
    torch._dynamo.reset()
    z, (values, indices) = torch.randn(6, 40, requires_grad=True), torch.randn(6, 40).log_softmax(-1).topk(4)

    def f(z, values, indices):
        return jsd(z * 2, teacher_topk=TopK(indices, values, "log_probs", "tail"))

    check_operators(lambda: gradients(f(z, values, indices), (z,)))
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    assert_same(gradients(compiled(z, values, indices), (z,)), gradients(f(z, values, indices), (z,)))


# --------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("beta", "hard", "dtype"),
    [
        pytest.param(*x, dtype, marks=[pytest.mark.slow] * (dtype == slow))
        for *x, slow in ((0.5, False, "float64"), (0.0, True, "float32"))
        for dtype in ("float32", "bfloat16", "float64")
    ],
)
def test_the_formula_holds(dtype, beta, hard):
    tokens, size, vocab = 512, 64, 8192
    kind = getattr(torch, dtype)
    h, w, x, v = (torch.randn(*s).to(kind) for s in ((tokens, size), (vocab, size)) * 2)
    h.requires_grad_()
    w.requires_grad_()
    student, teacher = (Head(tokens, size, vocab, dtype, grad_hidden=g, grad_weight=g) for g in (True, False))
    p = JsdProblem(vocab, student, teacher, stash=True, hard=hard)
    budget = memory.PLANNER.least(p, "") + 8 * MIB
    formula = memory.scratch_bytes(p, memory.plan(p, budget=budget))
    y = torch.randint(vocab, (tokens,))
    y[::8] = -100
    options = {"target": y, "hard_weight": 0.3} if hard else {}

    def step():
        loss = linear_jsd(h, w, x, v, beta=beta, temperature=2.0, scratch_bytes=budget, **options)
        return [loss, *torch.autograd.grad(loss, (h, w))]

    step()
    peak = peak_extra_bytes(step, device="cpu")
    assert formula <= budget
    assert peak <= formula + 4 * MIB
    assert peak >= formula / 2 - 4 * MIB, "the formula promises far more than is used"


@pytest.mark.parametrize("beta", [0.0, 1e-6, 0.1, 0.5, 0.9, 1.0])
def test_the_series_where_probabilities_are_nearly_equal(beta):
    """It holds a term's digits to where the differences take over; float64's own are enough for these down to 0.01."""
    x = np.concatenate([side * np.geomspace(0.01, triton_launches.kernels.NEAR.value, 100) for side in (-1, 1)])
    d = x * np.log(2)
    log_p = -np.log1p(beta * np.expm1(d))
    exact = np.expm1(d) - d if beta in (0, 1) else (1 - beta) * log_p + beta * np.exp(d) * (log_p + d)
    made = np.log(2) * x**2 * np.polyval(triton_launches.nearly_equal(beta)[::-1], x)
    np.testing.assert_allclose(made, exact, rtol=1e-6)
