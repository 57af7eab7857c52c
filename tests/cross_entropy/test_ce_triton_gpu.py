"""The Triton backend on a CUDA device: accuracy, bits, sizes, layouts, memory, graphs."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from ce_common import assert_right, assert_same, computed, gradient, small_problem

from linear_cross_entropy.common import capture
from onchip.bench.measure import peak_extra_bytes
from onchip.core.sizes import MIB
from onchip.ops.cross_entropy.cases import CHECK_CASES, Case
from onchip.torch import cross_entropy
from onchip.vocab.rows import memory as row_memory
from tanh import assert_is_tanh, triton_tanh

pytestmark = pytest.mark.gpu
op = partial(cross_entropy, backend="triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF = torch.bfloat16
in_place = pytest.mark.parametrize("inplace", [False, True], ids=["new tensor", "in place"])
# Rows that stay in registers, that are read again from the caches, and that are not aligned.
VOCABS = (1000, 8192, 50257, 128256)


@pytest.fixture
def poisoned(monkeypatch):
    """What torch.empty and its kin return is NaN, so a result that depends on what nobody wrote is NaN too."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def make(tokens, vocab, *, dtype=HALF, std=1.0, device="cuda"):
    g = torch.Generator(device).manual_seed(0)
    x = torch.empty(tokens, vocab, dtype=dtype, device=device)
    for rows in x.split(max(1, (1 << 26) // vocab)):
        rows.copy_(torch.randn(rows.shape, device=device, generator=g) * std)
    return x.requires_grad_(), torch.randint(vocab, (tokens,), device=device, generator=g)


def float64(x, y, rows):
    """lse, loss and the gradient of the sum, of some rows."""
    z, i = x[rows].detach().double(), torch.arange(len(y[rows]), device=y.device)
    lse = torch.logsumexp(z, 1)
    p = (z - lse[:, None]).exp()
    p[i, y[rows]] -= 1
    return lse, lse - z[i, y[rows]], p


def relative(made, expected):
    return float((made.double() - expected).norm() / expected.norm())


def rounding(dtype):
    """Of a gradient that is rounded once, the relative error's norm is below this; of float32, that of its sums."""
    return 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2


@in_place
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CHECK_CASES, ids=str)
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.usefixtures("poisoned")
def test_check_cases(case, dtype, inplace):
    assert_right(case, dtype, "cuda", inplace=inplace, backend="triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(0, 123), (1, 1), (4097, 1), (1, 123), (4097, 123), (300, 31), (127, 2049)], ids=str)
def test_sizes(size, dtype):
    assert_right(Case("size", *size), dtype, "cuda", backend="triton")
    assert_right(Case("size", *size, options={"reduction": "none"}), dtype, "cuda", inplace=True, backend="triton")


@pytest.mark.parametrize("std", [0.02, 1.0, 30.0])
@pytest.mark.parametrize("vocab", [*VOCABS, 65536, 262144])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_row_against_float64(dtype, vocab, std):
    """The fused gradient, the one of an upstream gradient of 3, per token, and in place; more rows than programs."""
    tokens = 601
    x, y = make(tokens, vocab, dtype=dtype, std=std)
    y[::7] = -100
    kept = y != -100
    rows = kept.nonzero()[:, 0]
    lse, loss, grad = float64(x, y, rows)
    bound = 8e-6 * (1 + std)
    limit = max(rounding(dtype), bound)
    made, stats = op(x, y, reduction="sum", return_stats=True)
    assert abs(float(made) / float(loss.sum()) - 1) < bound
    assert relative(stats.lse[rows], lse) < bound
    assert not stats.lse[~kept].any()
    upstream = torch.rand(tokens, device="cuda") + 0.5
    per_token = op(x, y, reduction="none")
    assert relative(per_token[rows], loss) < bound
    given = computed(x)
    over = op(given, y, reduction="none", inplace_backward=True)
    for g, expected in (
        (gradient(made, x), grad),
        (gradient(op(x, y, reduction="sum"), x, torch.tensor(3.0, device="cuda")), 3 * grad),
        (gradient(per_token, x, upstream), grad * upstream[rows, None]),
        (gradient(over, given, upstream), grad * upstream[rows, None]),
    ):
        assert relative(g[rows], expected) < limit
        assert not g[~kept].any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_more_elements_than_32_bits_count(reduction):
    tokens, vocab = 16900, 128256
    assert tokens * vocab > 1 << 31
    x, y = make(tokens, vocab)
    loss = op(x, y, reduction=reduction)
    g = gradient(loss, x, torch.ones_like(loss))
    scale = tokens if reduction == "mean" else 1
    for rows in (slice(0, 32), slice(tokens // 2, tokens // 2 + 32), slice(tokens - 32, tokens)):
        expected = float64(x, y, rows)
        assert relative(g[rows], expected[2] / scale) < rounding(HALF)
        if reduction == "none":
            assert relative(loss[rows], expected[1]) < 1e-5
    del g, loss
    given = computed(x)
    first = float64(x, y, slice(tokens - 32, tokens))[2] / tokens
    g = gradient(op(given, y, inplace_backward=True), given)
    assert g.data_ptr() == given.data_ptr()
    assert relative(g[-32:], first) < rounding(HALF)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@in_place
def test_the_same_bits_every_time(inplace, reduction, vocab):
    """On a side stream as well, and from one retained graph: what races differs."""
    x, y = make(1500, vocab)
    upstream = torch.rand(1500, device="cuda") if reduction == "none" else torch.tensor(1.0, device="cuda")

    def run():
        given = computed(x)
        loss = op(given, y, reduction=reduction, inplace_backward=inplace)
        return [loss.detach(), gradient(loss, given, upstream)]

    first = run()
    for _ in range(5):
        assert all(torch.equal(p, q) for p, q in zip(run(), first, strict=True))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside = run()
    torch.cuda.synchronize()
    assert all(torch.equal(p, q) for p, q in zip(aside, first, strict=True))
    loss = op(computed(x), y, reduction=reduction, inplace_backward=inplace)
    for retain in (True, True, False):
        (made,) = torch.autograd.grad(loss, x, upstream, retain_graph=retain)
        assert torch.equal(made, first[1])
        made.mul_(3)  # what a caller does with its gradients must not reach the graph


@pytest.mark.parametrize("upstream", [1.0, 0.3, 0.0, math.inf])
@pytest.mark.parametrize("vocab", [1000, 128256])
def test_the_upstream_gradient_is_known_to_the_device_alone(vocab, upstream):
    x, y = make(300, vocab, dtype=torch.float32)
    up = torch.tensor(upstream, device="cuda")
    for retain in (True, False):
        loss = op(x, y)
        g = torch.autograd.grad(loss, x, up, retain_graph=retain)[0]
        if upstream == math.inf:
            assert not g.isfinite().any()
        else:
            assert_same(g, gradient(cross_entropy(x, y, backend="torch"), x, up))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@in_place
def test_nothing_synchronises_and_a_cuda_graph_replays(inplace, reduction):
    x, y = make(300, 50257)
    constants = {"token_weight": torch.rand(300, device="cuda"), "temperature": torch.rand(300, device="cuda") + 1}
    for options in ({}, constants):
        upstream = torch.rand(300, device="cuda") if reduction == "none" else torch.tensor(0.5, device="cuda")

        def step(options=options, upstream=upstream):
            given = computed(x)
            loss = op(given, y, reduction=reduction, inplace_backward=inplace, **options)
            return [loss.detach(), gradient(loss, given, upstream)]

        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph, captured = capture(step)
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            y[::3] = -100
            upstream.copy_(torch.ones_like(upstream))
        graph.replay()
        assert all(torch.equal(p, q) for p, q in zip(captured, step(), strict=True))


def test_every_device_whichever_is_current():
    for index in range(torch.cuda.device_count()):
        x, y = make(300, 1000, device=f"cuda:{index}", dtype=torch.float32)
        g = gradient(op(x, y), x)
        assert g.device == x.device
        assert_same(g, gradient(cross_entropy(x, y, backend="torch"), x))


def _cut(kind, x):
    return {
        "sliced": lambda: x[..., :1990],
        "offset": lambda: x[1:, 3:, 7:],
        "every other": lambda: x[:, ::2, ::2],
        "vocabulary first": lambda: x.permute(0, 2, 1),
        "tokens swapped": lambda: x.transpose(0, 1),
        "shifted": lambda: x[:, :-1],
    }[kind]()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("kind", ["sliced", "offset", "every other", "vocabulary first", "tokens swapped", "shifted"])
def test_strides_do_not_matter(kind, dtype):
    base = torch.randn(6, 40, 2000, device="cuda").to(dtype)
    view = _cut(kind, base)
    y = torch.randint(view.shape[-1], view.shape[:-1], device="cuda")
    y[0, 2] = -100
    copy = view.clone(memory_format=torch.contiguous_format).requires_grad_()
    expected = cross_entropy(copy, y, backend="torch")
    expected_grad = gradient(expected, copy)
    limit = 2 * rounding(dtype)
    leaf = base.clone().requires_grad_()
    loss = op(_cut(kind, leaf), y)
    assert_same(loss, expected)
    made = gradient(loss, leaf)
    assert relative(_cut(kind, made), expected_grad.double()) < limit
    source = computed(leaf)
    given = _cut(kind, source)
    grad = gradient(op(given, y, inplace_backward=True), given)
    assert relative(grad, expected_grad.double()) < limit
    assert torch.equal(_cut(kind, source.detach()), grad)
    rest = [x.clone() for x in (source.detach(), base)]  # isn't touched
    for x in rest:
        _cut(kind, x).zero_()
    assert torch.equal(*rest)


@pytest.mark.parametrize("vocab", [1000, 50257, 128256])
@in_place
def test_ignored_tokens_leak_nothing(inplace, vocab):
    x, y = make(400, vocab)
    y[torch.rand(400, device="cuda") < 0.5] = -100
    gone = y == -100
    clean = gradient(op(x, y), x)
    with torch.no_grad():
        x[gone] = math.nan
    given = computed(x)
    loss = op(given, y, inplace_backward=inplace)
    g = gradient(loss, given)
    assert loss.isfinite()
    assert (g[gone] == 0).all()
    assert relative(g, clean.double()) < 2 * rounding(HALF)


@pytest.mark.parametrize("label", [70, -1, 2**40])
def test_a_bad_label_is_nan_and_check_inputs_raises(label):
    x, y = (t.cuda() for t in small_problem(dtype=HALF))
    x = x.detach().requires_grad_()
    good = op(x, y, reduction="none")
    y[1, 7] = label
    others = torch.ones_like(y, dtype=torch.bool)
    others[1, 7] = False
    for reduction in ("none", "mean"):
        loss, stats = op(x, y, reduction=reduction, return_stats=True)
        g = gradient(loss.sum(), x)
        assert g[1, 7].isnan().all()
        assert g[others].isfinite().all()
        assert stats.log_prob[1, 7].isnan()
    assert loss.isnan()
    assert torch.equal(op(x, y, reduction="none")[others], good[others])
    with pytest.raises(ValueError, match=r"target\[1, 7\] is"):
        op(x, y, check_inputs=True)


def test_rows_masked_up_to_the_target():
    x = torch.randn(40, 70000, device="cuda")
    y = torch.linspace(0, 69999, 40, device="cuda").long()
    x[torch.arange(70000, device="cuda") < y[:, None]] = -math.inf
    x.requires_grad_()
    loss, stats = op(x, y, return_stats=True)
    expected, expected_stats = cross_entropy(x, y, return_stats=True, backend="torch")
    assert_same(loss, expected)
    for p, q in zip(stats[:3], expected_stats[:3], strict=True):
        assert_same(p, q)
    assert_same(gradient(loss, x), gradient(expected, x))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_small_losses_keep_their_digits(reduction):
    """p - 1 and log p of a p that float32 can hardly tell from 1."""
    x, y = make(200, 128256, dtype=torch.float32)
    with torch.no_grad():
        x[torch.arange(200, device="cuda"), y] = 12 + torch.linspace(8, 20, 200, device="cuda")
    expected = float64(x, y, slice(None))
    assert expected[1].min() < 1e-8
    loss = op(x, y, reduction="none")
    assert float((loss / expected[1] - 1).abs().max()) < 3e-5
    made = op(x, y, reduction=reduction)
    g = gradient(made, x, torch.ones_like(made)) * (200 if reduction == "mean" else 1)
    i = torch.arange(200, device="cuda")
    assert float((g[i, y] / expected[2][i, y] - 1).abs().max()) < 3e-5


@pytest.mark.parametrize(
    "options", [{}, {"reduction": "none"}, {"inplace_backward": True}, {"return_stats": True}], ids=str
)
@pytest.mark.parametrize("vocab", [8192, 128256])
def test_the_memory_formula_holds(vocab, options):
    tokens = (1 << 27) // vocab
    x, y = make(tokens, vocab)
    given = computed(x)
    upstream = torch.ones(tokens if "reduction" in options else (), device="cuda")

    def step():
        loss = op(given, y, **options)
        loss, stats = loss if "return_stats" in options else (loss, ())
        return [loss, *stats, *torch.autograd.grad(loss, given, upstream)]

    step()
    problem = row_memory.Problem(tokens, vocab, "bfloat16", device="cuda", triton=True)
    formula = row_memory.scratch_bytes(problem, row_memory.plan(problem))
    assert peak_extra_bytes(step, device="cuda") <= formula + MIB


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"normalizer": 7}, {"softcap": 5.0}], ids=str)
def test_compile(options):
    x, y = make(64, 1000, dtype=torch.float32)

    def loss(x, y):
        return op(torch.tanh(x)[1:], y[:-1], **options).sum() * 3

    compiled = torch.compile(loss, fullgraph=True)
    assert_same(compiled(x, y), loss(x, y))
    assert_same(gradient(compiled(x, y), x), gradient(loss(x, y), x))


def test_compile_for_any_token_count():
    loss = torch.compile(op, fullgraph=True, dynamic=True)
    for tokens in (24, 36, 300, 1024):
        x, y = make(tokens, 1000, dtype=torch.float32)
        assert_same(loss(x, y), op(x, y))
        assert_same(gradient(loss(x, y), x), gradient(op(x, y), x))


def test_autocast_changes_nothing_and_a_normalizer_may_be_on_the_cpu():
    x, y = make(64, 1000)
    with torch.autocast("cuda", HALF):
        cast = op(x, y)
        g = gradient(cast, x)
    assert torch.equal(cast, op(x, y))
    assert torch.equal(g, gradient(op(x, y), x))
    here, there = (op(x, y, normalizer=n) for n in (torch.tensor(7), torch.tensor(7).cuda()))
    assert torch.equal(here, there)


def test_float16_keeps_gradients_under_a_loss_scale():
    """A mean over many tokens: 1/T alone would vanish in float16, so the scale must reach the gradient unrounded."""
    x, y = make(1 << 15, 1000, dtype=torch.float16, std=0.01)
    g = gradient(op(x, y) * 65536, x)
    exact = x.detach().double().requires_grad_()
    expected = gradient(F.cross_entropy(exact, y) * 65536, exact)
    assert relative(g, expected) < 1e-3


def test_tanh_at_any_size():
    assert_is_tanh(partial(triton_tanh, device="cuda"))
