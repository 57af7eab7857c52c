"""The kernels in Gluon, on Hopper: without bias and statistics, which other tests have.

Sizes have few steps and many, blocks that all stay in shared memory or not, and tiles that end inside the vocabulary,
the tokens or H.
"""

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch

from losses import mixed_plan, plan_in_forward
from onchip.torch import linear_cross_entropy
from onchip.vocab.triton import setup, tiling
from shared import pairs_once

pytestmark = pytest.mark.gpu
HALF = (torch.bfloat16, torch.float16)
# Where exponentials go: to two places and made again, to a chunk of tokens, the first of which may have two places, or
# where the planner has them.
PLANS = {
    "mixed": mixed_plan,
    "in forward": plan_in_forward,
    "longer first": partial(plan_in_forward, first=256),
    "planned": nullcontext,
}


def problem(tokens, hidden, vocab, dtype, std=1.0):
    g = torch.Generator("cuda").manual_seed(0)
    h = (torch.randn(tokens, hidden, device="cuda", generator=g) * std).to(dtype).requires_grad_()
    w = (torch.randn(vocab, hidden, device="cuda", generator=g) * hidden**-0.5).to(dtype).requires_grad_()
    return h, w, torch.randint(vocab, (tokens,), device="cuda", generator=g)


def errors(h, w, y, upstream=1.0):
    """Of the loss and both gradients, beside float64."""
    loss = linear_cross_entropy(h, w, y, backend="triton")
    made = [loss, *torch.autograd.grad(upstream * loss, (h, w))]
    a, b = (x.detach().double().requires_grad_() for x in (h, w))
    loss = torch.nn.functional.cross_entropy(a @ b.T, y)
    right = [loss, *torch.autograd.grad(upstream * loss, (a, b))]
    return [float((x.double() - r).norm() / r.norm()) for x, r in zip(made, right, strict=True)]


@pairs_once(
    "hidden, dtype, plan",
    # The weight's gradient holds the exponentials of H tokens, of which the mixed plan keeps 128 there.
    [
        (h, dtype, plan)
        for h, dtype, plan in product((8, 64, 72, 576, 640, 768, 896, 1000, 1024, 1152, 2048), HALF, PLANS)
        if h >= 128 or plan not in ("mixed", "longer first")
    ],
)
def test_right(hidden, dtype, plan):
    h, w, y = problem(300, hidden, 20_001 if hidden in (640, 1024) else 600, dtype)
    y[::7] = -100
    with PLANS[plan]():
        loss, of_hidden, of_weight = errors(h, w, y)
    assert loss < 1e-5
    assert max(of_hidden, of_weight) < (4e-3 if dtype == torch.bfloat16 else 6e-4)


@pytest.mark.parametrize("upstream", [0.25, 0.3])
@pytest.mark.parametrize("hidden", [200, 640])
def test_an_upstream_gradient(hidden, upstream):
    """Forward has rounded the weight's gradient for that of 1."""
    h, w, y = problem(300, hidden, 600, torch.bfloat16)
    with plan_in_forward():
        assert max(errors(h, w, y, upstream)[1:]) < 4e-3


@pytest.mark.parametrize("plan", PLANS)
def test_logits_far_above_the_targets(plan):
    """Some of whose exponentials are moved to another shift, and some of whose halves of a tile aren't."""
    h, w, y = problem(300, 576, 1000, torch.bfloat16, std=60.0)
    with PLANS[plan]():
        loss, of_hidden, of_weight = errors(h, w, y)
    assert loss < 1e-5
    assert max(of_hidden, of_weight) < 4e-3


@pairs_once(
    "plan, hidden, tokens, vocab, dtype",
    product([*PLANS, "in halves"], [128, 576, 640, 1152], [300, 700], [600, 20_001], HALF),
)
def test_hidden_apart(plan, hidden, tokens, vocab, dtype):
    """With an odd number of tiles of positions, and an even one."""
    assert tiling.hidden_apart(hidden)
    h, w, y = problem(tokens, hidden, vocab, dtype)
    y[::7] = -100
    with mixed_plan(halves=True) if plan == "in halves" else PLANS[plan]():
        loss, of_hidden, of_weight = errors(h, w, y)
    assert loss < 1e-5
    assert max(of_hidden, of_weight) < (4e-3 if dtype == torch.bfloat16 else 6e-4)


def test_hidden_apart_as_tritons(monkeypatch):
    """A frozen head, of more units than programs, with whole units and cut ones; the same bits in each call."""
    h, w, y = problem(9000, 1152, 40_000, torch.bfloat16)
    w.requires_grad_(False)

    def run():
        (made,) = torch.autograd.grad(linear_cross_entropy(h, w, y, backend="triton"), (h,))
        return made

    first = run()
    assert torch.equal(run(), first)
    monkeypatch.setattr("onchip.vocab.triton.walks.chunk_hidden", lambda *sizes: (False, 1))
    monkeypatch.setattr("onchip.frontend.torch_prepared.is_prepared", lambda x: False)
    right = run()
    assert float((first.float() - right.float()).norm() / right.float().norm()) < 3e-3


@pytest.mark.parametrize("tokens", [None, 1024], ids=["planned", "in forward"])
@pytest.mark.parametrize("hidden", [640, 1024, 2560])
def test_as_tritons_kernels(monkeypatch, hidden, tokens):
    """Of more tiles than programs; the same bits in each call, and without gradients."""
    h, w, y = problem(5000, hidden, 40_000, torch.bfloat16)
    assert tiling.takes_turns(hidden) or tiling.staggers(hidden)

    def run():
        with nullcontext() if tokens is None else plan_in_forward(tokens):
            loss = linear_cross_entropy(h, w, y, backend="triton")
            return [loss.detach(), *torch.autograd.grad(loss, (h, w))]

    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(h, w, y, backend="triton"), first[0])
    monkeypatch.setattr(setup, "has_gluon", lambda capability: False)
    monkeypatch.setattr("onchip.frontend.torch_prepared.is_prepared", lambda x: False)
    for a, b in zip(run(), first, strict=True):
        assert float((a.float() - b.float()).norm() / b.float().norm()) < 3e-3


@pairs_once("plan, hidden, dtype", product(["in forward", "longer first"], [200, 640, 1024], HALF))
def test_chunks_without_tokens(plan, hidden, dtype):
    """The last ones, since positions are of the tokens that aren't ignored."""
    h, w, y = problem(900, hidden, 600, dtype)
    y[torch.randperm(900, device="cuda")[100:]] = -100
    with PLANS[plan]():
        loss, of_hidden, of_weight = errors(h, w, y, 0.5)
    assert loss < 1e-5
    assert max(of_hidden, of_weight) < (4e-3 if dtype == torch.bfloat16 else 6e-4)


@pairs_once("hidden, dtype, ignored", product([512, 640, 1024, 2048], HALF, [0.0, 0.5]))
def test_exponentials_where_digits_will_be(hidden, dtype, ignored):
    """Of the first chunk: in the gradient's memory, that of its digits and scratch."""
    tokens = hidden + hidden // 4 + 700
    h, w, y = problem(tokens, hidden, 20_001, dtype)
    y[torch.rand(tokens, device="cuda") < ignored] = -100
    with plan_in_forward(256, first=hidden + hidden // 4 + 200):
        # Of a mean over so many tokens float16 couldn't hold hidden's gradient.
        loss, of_hidden, of_weight = errors(h, w, y, tokens if dtype == torch.float16 else 1.0)
    assert loss < 1e-5
    assert max(of_hidden, of_weight) < (4e-3 if dtype == torch.bfloat16 else 6e-4)
