"""Ranks that exchange their softmax chunk by chunk, and make the gradients in forward: `vocab/triton/exchange.py`."""

import torch
import torch.distributed as dist

from losses import plan_in_forward
from onchip.torch import linear_cross_entropy
from sharded import leaf, same_bits, spawn

TOKENS, HIDDEN = (2, 75), 64
# Of 4 ranks one has a single entry.
VOCAB = {2: 700, 3: 513}
OPTIONS = {
    "plain": {},
    "everything": {"softcap": 4.0, "z_loss": 1e-2, "temperature": 0.7, "return_stats": True, "logit_scale": 0.8},
    "sum": {"reduction": "sum", "label_smoothing": 0.2, "z_loss": 1e-2},
    "normalizer": {"normalizer": 77.0, "label_smoothing": 0.1, "return_stats": True},
}


def layer(vocab, dtype=torch.float16):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, HIDDEN, generator=g) / 4 for shape in (TOKENS, (vocab,)))
    target = torch.randint(vocab, TOKENS, generator=g)
    target[torch.rand(TOKENS, generator=g) < 0.2] = -100
    return hidden.to(dtype), weight.to(dtype), target


def flat(x):
    return [x] if isinstance(x, torch.Tensor) else [y for part in x if part is not None for y in flat(part)]


def near(got, expected, what, bound=2e-3):
    for a, b in zip(got, expected, strict=True):
        if a.is_floating_point():
            error = (a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)
            assert error <= bound, f"{what}: relative error {float(error)}"
        else:
            assert (a == b).float().mean() > 0.99, what


def every_option(rank, ranks):
    vocab = VOCAB[ranks]
    hidden, weight, target = layer(vocab)
    weights = torch.rand(TOKENS, generator=torch.Generator().manual_seed(5)) + 0.5
    for name, options in OPTIONS.items():
        if name == "everything":
            options = options | {"token_weight": weights}
        whole, mine = [leaf(x.float()) for x in (hidden, weight)], [leaf(hidden), leaf(weight.chunk(ranks)[rank])]
        expected = flat(linear_cross_entropy(*whole, target, **options))
        given = {"vocab_group": dist.group.WORLD, "vocab_size": vocab, "backend": "triton"}
        with plan_in_forward(128):
            got = flat(linear_cross_entropy(*mine, target, **options, **given))
            for upstream in (1.0, 0.3):
                expected[0].backward(torch.tensor(upstream), retain_graph=True)
                got[0].backward(torch.tensor(upstream), retain_graph=upstream == 1)
        same_bits(*got, mine[0].grad)
        near(got, expected, f"{name}")
        near([x.grad for x in mine], [whole[0].grad, whole[1].grad.chunk(ranks)[rank]], f"{name}: gradients")


def test_every_option(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spawn(tmp_path, 2, {"every_option": every_option}, timeout=200)
