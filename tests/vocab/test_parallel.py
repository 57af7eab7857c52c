"""Losses over a vocabulary that is sharded over two and three processes, against the same losses in one."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist

from onchip.torch import linear_cross_entropy
from sharded import close, cut, leaf, same_bits, spawn

VOCAB, HIDDEN, SHAPE = 61, 16, (3, 8)
# By the number of ranks: shards as torch.chunk has them, others, and an empty one.
LAYOUTS = {2: ([31, 30], [50, 11], [0, 61]), 3: ([21, 21, 19], [9, 0, 52], [30, 30, 1])}
DENSE = {}


def layer(vocab=VOCAB, bias=True, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(*SHAPE, HIDDEN, generator=g).to(dtype)
    weight, b = torch.randn(vocab, HIDDEN, generator=g).to(dtype), torch.randn(vocab, generator=g).to(dtype)
    return hidden, weight, b if bias else None


def labels(vocab=VOCAB):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, SHAPE, generator=g)
    return ids.masked_fill(torch.rand(SHAPE, generator=g) < 0.2, -100)


def numbers(*shape, seed=2):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) + 0.5


CLASSES = numbers(VOCAB).index_fill(0, torch.tensor([3, 40]), 0.0)
LCE = {
    "plain": {},
    "all": {"softcap": 5.0, "logit_scale": 0.7, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 1e-2},
    "none": {"reduction": "none", "label_smoothing": 0.2, "token_weight": numbers(*SHAPE), "temperature": numbers(*SHAPE)},
    "classes": {"class_weight": CLASSES, "label_smoothing": 0.3, "z_loss": 1e-2},
    "classes alone": {"class_weight": CLASSES, "reduction": "sum"},
    "normalizer": {"normalizer": 7.0, "shift": True},
    "all smoothed": {"label_smoothing": 1.0, "check_inputs": True},
}


def taken(options, sizes, rank):
    """What a rank passes beside the layer."""
    given = {"vocab_group": dist.group.WORLD, "vocab_size": sum(sizes), "vocab_start": sum(sizes[:rank])}
    return options | given


def compare(op, tensors, more, options, sizes, rank, *, times=1):
    """Outputs and gradients, with random upstream gradients, of `op(hidden, weight, *more, bias)`."""
    whole = [leaf(x) for x in tensors]
    hidden, weight, bias = (leaf(x) for x in (tensors[0], *(x if x is None else x[cut(sizes, rank)] for x in tensors[1:])))
    expected = flat(op(whole[0], whole[1], *more, whole[2], **options))
    got = flat(op(hidden, weight, *more, bias, **taken(options, sizes, rank)))
    same_bits(*got)
    loss = [x for x in expected if x.requires_grad]
    mine = [x for x in got if x.requires_grad]
    assert len(loss) == len(mine)
    for a, b in zip(got, expected, strict=True):
        close(a, b, "output")
    for seed in range(times):
        upstream = [numbers(*x.shape, seed=seed).to(x.dtype) for x in loss]
        torch.autograd.backward(loss, upstream, retain_graph=True)
        torch.autograd.backward(mine, upstream, retain_graph=seed + 1 < times)
    close(hidden.grad, whole[0].grad, "hidden")
    close(weight.grad, whole[1].grad[cut(sizes, rank)], "weight")
    if bias is not None:
        close(bias.grad, whole[2].grad[cut(sizes, rank)], "bias")


def flat(x):
    """The tensors of an output."""
    if isinstance(x, torch.Tensor):
        return [x]
    return [y for part in x if part is not None for y in flat(part)]


def every_option(rank, ranks):
    for (name, options), sizes in itertools.product(LCE.items(), LAYOUTS[ranks]):
        for stats in (False, True):
            compare(linear_cross_entropy, layer(), (labels(),), options | {"return_stats": stats}, sizes, rank)


CHECKS = {"linear_cross_entropy: every option": every_option}


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks(tmp_path, ranks):
    spawn(tmp_path, ranks, CHECKS)
