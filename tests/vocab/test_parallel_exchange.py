"""Ranks that exchange their softmax chunk by chunk and make the gradients in forward: `vocab/triton/exchange.py`.

Under Triton's interpreter, and on as many GPUs as there are, over NCCL.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from losses import plan_in_forward
from onchip.torch import TopK, cross_entropy, jsd, linear_cross_entropy, linear_jsd, linear_log_probs, log_probs
from sharded import leaf, same_bits, spawn, spawn_on_gpus
from shared import without_synchronisation

OPTIONS = {
    "plain": {},
    "everything": {"softcap": 4.0, "z_loss": 1e-2, "temperature": 0.7, "return_stats": True, "logit_scale": 0.8},
    "sum": {"reduction": "sum", "label_smoothing": 0.2, "z_loss": 1e-2},
}


def layer(tokens, hidden, vocab, dtype, device="cpu"):
    g = torch.Generator().manual_seed(0)
    h, w = (torch.randn(n, hidden, generator=g) / 4 for n in (tokens, vocab))
    target = torch.randint(vocab, (tokens,), generator=g)
    target[torch.rand(tokens, generator=g) < 0.2] = -100
    weights = torch.rand(tokens, generator=g) + 0.5
    return h.to(device, dtype), w.to(device, dtype), target.to(device), weights.to(device)


def flat(x):
    return [x] if isinstance(x, torch.Tensor) else [y for part in x if part is not None for y in flat(part)]


def near(got, expected, what, bound):
    for a, b in zip(got, expected, strict=True):
        if a.is_floating_point():
            error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)
            assert error <= bound, f"{what}: relative error {float(error)}"
        else:
            assert (a == b).float().mean() > 0.99, what


def assert_near(given, options, rank, ranks, what, bound=2e-3, *, times=1):
    """Outputs and gradients of a sharded call against those of the whole vocabulary, and each time the same bits."""
    hidden, weight, target, weights = given
    layout, more = options.get("hidden_layout"), {"token_weight": weights} if "softcap" in options else {}
    of_whole = {name: x for name, x in options.items() if name not in ("hidden_layout", "scratch_bytes")} | more
    whole = [leaf(x.float()) for x in (hidden, weight)]
    expected = flat(linear_cross_entropy(*whole, target, backend="plain", **of_whole))
    mine = [leaf(hidden.chunk(ranks)[rank] if layout else hidden), leaf(weight.chunk(ranks)[rank])]
    first = None
    for _ in range(times):
        sharded = {"vocab_group": dist.group.WORLD, "vocab_size": len(weight), "backend": "triton"}
        got = flat(linear_cross_entropy(*mine, target, **options, **more, **sharded))
        for x in (*whole, *mine):
            x.grad = None
        for upstream in (1.0, 0.3):  # a second backward through the graph
            for loss in (expected[0], got[0]):
                loss.backward(torch.full_like(loss, upstream), retain_graph=loss is expected[0] or upstream == 1)
        made = [x.detach().clone() for x in (*got, *(x.grad for x in mine))]
        first = first or made
        assert all(torch.equal(a, b) for a, b in zip(made, first, strict=True)), f"{what}: other bits"
    same_bits(*got)
    near(got, expected, what, bound)
    by_hidden = whole[0].grad.chunk(ranks)[rank] if layout else whole[0].grad
    near([x.grad for x in mine], [by_hidden, whole[1].grad.chunk(ranks)[rank]], f"{what}: gradients", bound)
    if not layout:
        assert not mine[0].grad[target == -100].any(), what


# --------------------------------------------------------------------------------------------- under the interpreter


def everything(rank, ranks, name="everything"):
    with plan_in_forward(128):
        assert_near(layer(132, 64, 260, torch.float16), OPTIONS[name], rank, ranks, name)


def a_longer_first_chunk(rank, ranks):
    """Of tokens that are sharded."""
    with plan_in_forward(128, first=256):
        assert_near(layer(260, 64, 260, torch.float16), {"hidden_layout": "sequence"}, rank, ranks, "sequence")


def test_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spawn(tmp_path, 2, {"everything": everything, "a_longer_first_chunk": a_longer_first_chunk}, timeout=200)


@pytest.mark.slow
def test_kernels_of_a_smoothed_sum(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spawn(tmp_path, 2, {"sum": partial(everything, name="sum")}, timeout=200)


def compiled_in_forward(rank, ranks):
    """torch.compile gives the same bits."""
    hidden, weight, target, _ = layer(130, 64, 260, torch.float16)

    def loss(h, w):
        given = {"vocab_group": dist.group.WORLD, "backend": "triton", "scratch_bytes": "1GiB"}
        return linear_cross_entropy(h, w, target, **given)

    made = []
    with plan_in_forward(128):
        for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
            h, w = leaf(hidden), leaf(weight.chunk(ranks)[rank])
            out = call(h, w)
            out.backward()
            made.append((out, h.grad, w.grad))
    for a, b in zip(*made, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_compiled_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spawn(tmp_path, 2, {"compiled_in_forward": compiled_in_forward}, timeout=300)


# ------------------------------------------------------------------------------------------------- on several GPUs


def over_nccl(rank, ranks):
    """By the planner's own plans, of every kind: in forward, kept and computed again; in each dtype and layout."""
    vocab = 16384 * ranks - 3
    for dtype, bound in ((torch.bfloat16, 6e-3), (torch.float16, 4e-3)):
        given = layer(4096, 512, vocab, dtype, "cuda")
        ways = OPTIONS | {
            "sequence": {"hidden_layout": "sequence"},
            "kept": {"scratch_bytes": "2GiB"},
            "computed again": {"strategy": "recompute"},
            "none": {"reduction": "none"},
        }
        for name, options in ways.items():
            options = options if name in ("kept", "computed again") else options | {"scratch_bytes": "48MiB"}
            assert_near(given, options, rank, ranks, f"{name}, {dtype}", bound, times=4)


def without_waiting(rank, ranks):
    """Nothing synchronises, also where calls are prepared."""
    hidden, weight, target, _ = layer(4096, 512, 16384 * ranks, torch.bfloat16, "cuda")
    h, w = leaf(hidden), leaf(weight.chunk(ranks)[rank])

    def step():
        loss = linear_cross_entropy(h, w, target, vocab_group=dist.group.WORLD, scratch_bytes="48MiB")
        torch.autograd.grad(loss, (h, w))

    for _ in range(4):
        step()
        without_synchronisation(step)


def compiled(rank, ranks):
    """torch.compile of every loss makes what it makes without, but for rounding."""
    hidden, weight, _, _ = layer(512, 256, 1024 * ranks, torch.bfloat16, "cuda")
    w, group = weight.chunk(ranks)[rank].contiguous(), dist.group.WORLD
    target = torch.arange(512, device="cuda") * 7 % (1024 * ranks)
    ids, some = torch.stack([target, target.flip(0)], 1), torch.full((512, 2), 0.5, device="cuda")
    few = TopK(ids, some, "probs", "truncated")
    every = torch.nn.functional.linear(hidden, w).float().softmax(-1) / ranks

    def logits(h):
        return torch.nn.functional.linear(h, w)

    calls = {
        "plain": lambda h: linear_cross_entropy(h, w, target, vocab_group=group),
        "smoothing": lambda h: linear_cross_entropy(h, w, target, vocab_group=group, label_smoothing=0.1, z_loss=1e-3),
        "sequence": lambda h: linear_cross_entropy(
            h.chunk(ranks)[rank], w, target, vocab_group=group, hidden_layout="sequence"
        ),
        "fp8": lambda h: linear_cross_entropy(h, w, target, vocab_group=group, precision="fp8"),
        "dense": lambda h: linear_cross_entropy(h, w, every, vocab_group=group),
        "K ids": lambda h: linear_cross_entropy(h, w, few, vocab_group=group),
        "linear_log_probs": lambda h: linear_log_probs(h, w, ids, vocab_group=group).sum(),
        "linear_jsd": lambda h: linear_jsd(h, w, hidden.flip(0), w.flip(0), vocab_group=group),
        "cross_entropy": lambda h: cross_entropy(logits(h), target, vocab_group=group),
        "log_probs": lambda h: log_probs(logits(h), ids, vocab_group=group).sum(),
        "jsd": lambda h: jsd(logits(h), logits(hidden.flip(0)), vocab_group=group),
    }
    for name, call in calls.items():
        eager, made = leaf(hidden), leaf(hidden)
        expected, got = call(eager), torch.compile(call, fullgraph=True, backend="aot_eager")(made)
        expected.backward(), got.backward()
        # It may have another plan, so each is rounded to bfloat16 by itself.
        near([got, made.grad], [expected, eager.grad], name, 2**-8)


@pytest.mark.gpu
@pytest.mark.ranks
def test_on_gpus(tmp_path):
    spawn_on_gpus(tmp_path, {check.__name__: check for check in (over_nccl, without_waiting, compiled)}, timeout=300)
