"""The kernels in Gluon, and those around them, in the 16-bit types that they are made for, without a GPU.

tests/ptx emulates their PTX and makes copies and products as late as the hardware may.
"""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from emulated import emulating
from grouped_matmul.grouped_common import GroupedCase, assert_same, oracle, problem, step, turned
from losses import losses, mixed_plan, plan_in_forward
from onchip.groups.triton import launches
from onchip.ops.linear_jsd.checks import CHECK_CASES as JSD_CASES
from onchip.ops.linear_jsd.checks import CHECKER as JSD
from onchip.torch import fp8_linear, linear_cross_entropy
from onchip.vocab.triton import memory, tiling, walks
from ptx import machine
from shared import assert_within_bounds

GROUPED = ("product_apart", "weight_gradient_apart")
GLUON = ("softmax_in_turns", "softmax_staggered", "gradient_staggered", "hidden_apart", "weight_added")


def loss_problem(tokens, hidden, vocab, dtype=torch.bfloat16, weight_dtype=None, std=1.0):
    h = (torch.randn(tokens, hidden) * std).to(dtype).requires_grad_()
    w = (torch.randn(vocab, hidden) * hidden**-0.5).to(weight_dtype or dtype).requires_grad_()
    y = torch.randint(vocab, (tokens,))
    y[::7] = -100
    return h, w, y


def few_slices(tokens, hidden, room=None):
    """Of the vocabulary, as for a GPU of 4 multiprocessors: an H100's would be read in 33 here."""
    apart, slices = CHUNK_HIDDEN(tokens, hidden, room)
    return apart, min(slices, 4)


CHUNK_HIDDEN = tiling.chunk_hidden


@pytest.fixture(autouse=True)
def few_sums(monkeypatch):
    monkeypatch.setattr(memory, "hidden_sums", lambda *sizes: few_slices(*sizes)[1])
    monkeypatch.setattr(walks, "chunk_hidden", few_slices)


def assert_right(made, h, w, y, bound, **options):
    """The loss and both gradients, beside float64."""
    a, b = (x.detach().double().requires_grad_() for x in (h, w))
    if w.dtype != h.dtype:
        b = w.detach().to(h.dtype).double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(a @ b.T, y, **options)
    expected = [loss.detach(), *torch.autograd.grad(loss, (a, b))]
    errors = [float((x.double() - r).norm() / r.norm()) for x, r in zip(made, expected, strict=True)]
    assert errors[0] < 1e-5
    assert max(errors[1:]) < bound, errors


# Which kernels in Gluon each has to run.
LOSSES = {
    "one step of a product": (64, plan_in_forward, {"softmax_in_turns", "weight_added"}, {}),
    "nine steps, of four slots": (576, plan_in_forward, {"softmax_in_turns", "hidden_apart", "weight_added"}, {}),
    "far above the targets": (576, mixed_plan, {"softmax_in_turns", "hidden_apart"}, {"std": 60.0}),
    "smoothing": (1152, plan_in_forward, {"softmax_staggered", "hidden_apart", "weight_added"},
                  {"label_smoothing": 0.1}),
    "float16": (1152, plan_in_forward, {"softmax_staggered", "weight_added"}, {"dtype": torch.float16}),
    "a longer first chunk": (128, partial(plan_in_forward, first=256), {"softmax_in_turns", "weight_added"}, {}),
    "smoothing, longer first chunk": (1024, partial(plan_in_forward, first=256), {"softmax_staggered", "weight_added"},
                                      {"dtype": torch.float16, "label_smoothing": 0.1}),
    "exponentials in digits' memory": (256, partial(plan_in_forward, first=640), {"softmax_in_turns", "weight_added"},
                                       {"dtype": torch.float16, "tokens": 700}),
    "recomputed": (1024, partial(mixed_plan, kept=64, halves=True), {"softmax_staggered", "gradient_staggered"},
                   {"tokens": 170}),
    "columns that can't be swapped": (200, plan_in_forward, set(), {}),
    "a float32 weight": (640, plan_in_forward, {"hidden_apart", "weight_added"}, {"weight_dtype": torch.float32}),
    "a float32 weight, recomputed": (640, mixed_plan, {"hidden_apart"}, {"weight_dtype": torch.float32}),
}  # fmt: skip
FEW_LOSSES = ("recomputed",)


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in FEW_LOSSES else [pytest.mark.slow]) for x in LOSSES])
def test_losses(name):
    hidden, plan, kernels, options = LOSSES[name]
    given = {key: options[key] for key in ("tokens", "dtype", "weight_dtype", "std") if key in options}
    options = {key: x for key, x in options.items() if key not in given}
    h, w, y = loss_problem(given.pop("tokens", 300), hidden, 300, **given)
    with plan(), emulating(GLUON) as done, torch.autocast("cpu", h.dtype, enabled=w.dtype != h.dtype):
        loss = linear_cross_entropy(h, w, y, backend="triton", **options)
        made = [loss.detach(), *torch.autograd.grad(loss, (h, w))]
    assert_right(made, h, w, y, 4e-3 if h.dtype == torch.bfloat16 else 6e-4, **options)
    assert {x.name for x in done} >= kernels
    for x in {x.name: x for x in done}.values():
        assert_same_bytes(x.again(seed=1), x.after)


@pytest.mark.slow
def test_a_retained_graph_of_a_float32_weight():
    """Whose gradient takes the place of its sum."""
    h, w, y = loss_problem(300, 640, 300, weight_dtype=torch.float32)
    with plan_in_forward(), emulating(GLUON), torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(h, w, y, backend="triton")
        first = torch.autograd.grad(loss, (h, w), retain_graph=True)
        second = torch.autograd.grad(loss, (h, w))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert_right([loss.detach(), *first], h, w, y, 4e-3)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 256])
def test_chunks_without_tokens(first):
    """Which add nothing; the one before them rounds."""
    h, w, y = loss_problem(500, 64, 300)
    y[20:] = -100
    with plan_in_forward(first=first), emulating(GLUON) as done:
        loss = linear_cross_entropy(h, w, y, backend="triton")
        made = [loss.detach(), *torch.autograd.grad(loss, (h, w))]
    assert "weight_added" in {x.name for x in done}
    assert_right(made, h, w, y, 4e-3)


@pytest.mark.slow
def test_a_sum_is_added_to_the_callers():
    h, w, y = loss_problem(300, 576, 300)
    total = torch.randn(w.shape)
    before = total.clone()
    with plan_in_forward(), emulating(GLUON) as done:
        loss = linear_cross_entropy(h, w, y, backend="triton", weight_grad_out=total)
        loss.backward()
    assert "weight_added" in {x.name for x in done}
    assert w.grad is None
    assert_right([loss.detach(), h.grad, total - before], h, w, y, 4e-3)


def assert_same_bytes(made, expected):
    assert all(np.array_equal(a, b) for a, b in zip(made, expected, strict=True))


@pytest.mark.parametrize(
    "case", ["interleaved", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gnk", "swiglu", "gkn", "rows"))]
)
def test_grouped_products(case, monkeypatch):
    """With groups of more than a tile and less, none, and rows past the last one."""
    options = {"activation": "swiglu", "gate_up": "interleaved" if case == "interleaved" else "concatenated"}
    sizes = GroupedCase("", (130, 0, 17, 3), 128, 136, tail=5, bias=True, options=options if "l" in case else {})
    if case == "rows":  # copied
        monkeypatch.setattr(launches, "copying_rows_pays", lambda n, activation: True)
        sizes = replace(sizes, source_rows=90)
    arguments, grad = problem(sizes, torch.bfloat16)
    if case in ("gkn", "rows"):
        arguments = turned(arguments)
    with emulating(GROUPED) as done:
        made = step(arguments, grad, backend="triton")
    assert {x.name for x in done} == set(GROUPED)
    assert_same(made, oracle(arguments, grad), 6e-3)


WAYS = {str(loss): loss for loss in losses("triton", few=True)}
QUICK = ("cross_entropy-inplace-none",)


@pytest.mark.parametrize("way", [pytest.param(x, marks=[] if x in QUICK else [pytest.mark.slow]) for x in WAYS])
def test_bfloat16(way):
    """Triton's kernels, which its interpreter can't run in this type."""
    case = next(x for x in WAYS[way].own_cases() if x.name.startswith("everything"))
    with emulating():
        WAYS[way].assert_case(replace(case, tokens=20, vocab=700), torch.bfloat16)


def test_fp8_linear():
    """As the path for any device, whose numbers are quantised alike."""
    x, w, _ = loss_problem(128, 256, 128)
    grad = torch.randn(128, 128).bfloat16()

    def step(backend):
        out = fp8_linear(x, w, backend=backend)
        grads = torch.autograd.grad(out, (x, w), grad)
        return {"out": out.detach(), "grad_x": grads[0], "grad_weight": grads[1]}

    with emulating():
        made = step("triton")
    assert_same(made, step("dequantize"), 2e-4)


@pytest.mark.slow
def test_jsd_in_bfloat16():
    case = next(x for x in JSD_CASES if x.name == "everything")
    with emulating():
        assert_within_bounds(JSD.check_case(replace(case, tokens=20, vocab=300), torch.bfloat16, backend="triton"))


WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 complete, \[%r\d+\], %r\d+;"
ARRIVE = r"@%p\d+ mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];"
# A kernel's PTX: what is replaced, which of them (of those that count: some only keep two groups apart), and by what.
MISTAKES = {
    "a fence is missing": ("softmax_staggered", r"fence\.proxy\.async\.shared::cta;", 1, ""),
    "sums are overtaken": ("weight_added", r"fence\.proxy\.async\.shared::cta;", -1, ""),
    "a staged block isn't waited for": ("softmax_in_turns", r"cp\.async\.bulk\.wait_group\.read\s+0;", 1, ""),
    "the last product isn't waited for": ("weight_added", r"(wgmma\.wait_group\.sync\.aligned) 0;", 0, r"\1 1;"),
    "no product is waited for": ("weight_added", r"(wgmma\.wait_group\.sync\.aligned) 1;", 0, r"\1 2;"),
    "operands aren't waited for": ("weight_added", WAIT, 0, "mov.pred complete, -1;"),
    "room isn't waited for": ("weight_added", WAIT, -1, "mov.pred complete, -1;"),
    "room isn't told of": ("hidden_apart", ARRIVE, 0, ""),
    "a turn isn't told of": ("softmax_in_turns", ARRIVE, 0, ""),
    "digits change places": ("weight_added", r"(prmt\.b32.*), 0x7632;", 0, r"\1, 0x3276;"),
}  # fmt: skip


@pytest.fixture(scope="module")
def launches_of_two_losses():
    """By the kernels' names; of those that add, one that does."""
    found = {}
    for tokens, hidden, chunk in ((300, 1024, 256), (700, 576, 384)):
        h, w, y = loss_problem(tokens, hidden, 300)
        with plan_in_forward(chunk), emulating(GLUON) as done:
            loss = linear_cross_entropy(h, w, y, backend="triton")
            assert_right([loss.detach(), *torch.autograd.grad(loss, (h, w))], h, w, y, 4e-3)
        found |= {x.name: x for x in reversed(done) if x.launch.arguments.get("old_sum", x) is not None}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_emulator_sees_mistakes(mistake, launches_of_two_losses):
    kernel, pattern, which, instead = MISTAKES[mistake]
    launch = launches_of_two_losses[kernel]

    def change(ptx):
        place = list(re.finditer(pattern, ptx))[which]
        return ptx[: place.start()] + place.expand(instead) + ptx[place.end() :]

    def is_seen(seed):
        try:
            assert_same_bytes(launch.again(change, seed), launch.after)
        except (machine.Fault, AssertionError):
            return True
        return False

    assert any(is_seen(seed) for seed in range(4))
