"""Losses on this rank's part of a vocabulary and on all of it: their inputs, and how they are compared."""

from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from onchip.torch import TopK, jsd, linear_jsd
from onchip.vocab.torch import parallel
from sharded import close, cut, leaf, same_bits

VOCAB, SHAPE = 61, (3, 8)
# By the number of ranks: shards as torch.chunk has them, others, and an empty one.
LAYOUTS = {2: ([31, 30], [50, 11], [0, 61]), 3: ([21, 21, 19], [9, 0, 52], [30, 30, 1])}


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def factors(*shape, seed=2):
    return random(*shape, seed=seed).abs() + 0.5


def tensors(who="", kind="head", *, vocab=VOCAB, shape=SHAPE, dtype=torch.float32, scale=1.0, size=16):
    """By name: a last layer with hidden states of this size, or logits."""
    shapes = {"hidden": (*shape, size), "weight": (vocab, size), "bias": (vocab,)}
    if kind == "logits":
        shapes = {"logits": (*shape, vocab)}
    first = 9 * (who == "teacher")
    return {who + n: (scale * random(*s, seed=first + i)).to(dtype) for i, (n, s) in enumerate(shapes.items())}


def models(student, teacher=None, **how):
    """Of both kinds of what a divergence is given."""
    how = {"dtype": torch.float64, "scale": 0.5} | how
    made = tensors("student_", student, **how)
    return made | (tensors("teacher_", teacher, size=12, **how) if teacher else {})


def ids(vocab=VOCAB, shape=SHAPE):
    """Of which some are ignored."""
    g = torch.Generator().manual_seed(1)
    return torch.randint(vocab, shape, generator=g).masked_fill(torch.rand(shape, generator=g) < 0.2, -100)


def several_ids(vocab=VOCAB, shape=SHAPE):
    """Of which some are ignored, and some occur twice."""
    one = ids(vocab, shape)
    return torch.stack([one, one.flip(0), one.flip(1), one], -1).index_fill(0, torch.tensor(1), vocab - 1)


def topk(kind="probs", vocab=VOCAB, shape=SHAPE, k=4):
    """Ids of which some occur twice, and some have no probability."""
    found = torch.randint(vocab, (*shape, k), generator=torch.Generator().manual_seed(4))
    found[..., 1] = found[..., 0]
    values = random(*shape, k, seed=5).softmax(-1) * 0.8
    values[0] = 0
    return TopK(found, values.log() if kind == "log_probs" else values, kind, "truncated")


def dense(vocab=VOCAB, shape=SHAPE):
    """Some tokens have none, and some entries."""
    labels = 0.9 * (3 * random(*shape, vocab, seed=6)).softmax(-1)
    labels[0, 0] = 0
    return labels.masked_fill(labels < 1e-4, 0)


def teachers(vocab=VOCAB, shape=SHAPE):
    """Of each kind; of what one knows, some entries have no probability."""
    values, found = (3 * random(*shape, vocab, seed=6)).log_softmax(-1).topk(4)
    for rest in ("tail", "truncated", "renormalised"):
        yield TopK(found, values, "log_probs", rest)
    yield TopK(found, 2 * values, "logits", "renormalised")
    yield TopK(found, values.index_fill(-1, torch.tensor(3), -torch.inf), "log_probs", "tail")


CLASSES = factors(VOCAB).index_fill(0, torch.tensor([3, 40]), 0.0)
LOSS = {
    "plain": {"check_inputs": True},
    "all": {
        "softcap": 5.0, "logit_scale": 0.7, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 1e-2,
        "return_stats": True,
    },
    "none": {
        "reduction": "none", "label_smoothing": 0.2, "token_weight": factors(*SHAPE), "temperature": factors(*SHAPE),
    },
    "classes": {
        "class_weight": CLASSES, "label_smoothing": 0.3, "z_loss": 1e-2, "normalizer": 7.0, "return_stats": True,
    },
    "classes alone": {"class_weight": CLASSES, "reduction": "sum"},
    "shift": {"shift": True, "token_weight": factors(*SHAPE), "return_stats": True},
    "all smoothed": {"label_smoothing": 1.0, "check_inputs": True, "return_stats": True},
}  # fmt: skip
EVERYTHING = {"entropy": True, "lse": True, "top1": True, "mean_logits": True, "log_sum_sq_probs": True}


def divergence(vocab=VOCAB, shape=SHAPE):
    """Options by name."""
    of_target = {"target": ids(vocab, shape)}
    return {
        "middle": of_target | {"beta": 0.3, "temperature": 0.7, "temperature_squared": True},
        "forward": of_target | {"beta": 0.0, "hard_weight": 0.25, "temperature": 2.0},
        "reverse": of_target | {"beta": 1.0, "reduction": "none", "token_weight": factors(*shape)},
        "hard": of_target | {"beta": 0.5, "hard_weight": 0.5, "normalizer": 5.0, "check_inputs": True},
        "no target": {"check_inputs": True},
    }


def jsd_of(given):
    return jsd if "student_logits" in given else linear_jsd


def is_shared(name, x):
    """Whether all ranks are given the same."""
    return name.endswith("hidden") or not isinstance(x, torch.Tensor) or not x.is_floating_point()


def part(name, x, own):
    """A rank's part of what is given: rows of a layer, or columns."""
    if is_shared(name, x):
        return x
    return x[..., own] if name.endswith(("logits", "target")) else x[own]


def padded(given, size, rank):
    """This rank's parts, of `size` entries, where the last ones are padding."""
    made = {}
    for name, x in given.items():
        if not is_shared(name, x):
            more = size * dist.get_world_size() - x.shape[-1 if name.endswith(("logits", "target")) else 0]
            x = pad(x, (0, 0, 0, more) if name.endswith("weight") else (0, more), value=torch.nan)
        made[name] = part(name, x, slice(rank * size, (rank + 1) * size))
    return made


def taken(how, sizes, rank):
    """What a rank passes beside its tensors."""
    given = {"vocab_group": dist.group.WORLD, "vocab_size": sum(sizes), "vocab_start": sum(sizes[:rank])}
    return how | given


def flat(x):
    """The tensors of an output."""
    return [x] if isinstance(x, torch.Tensor) else [y for z in x if z is not None for y in flat(z)]


def within(bound):
    """As `close`, of kernels, whose numbers are of fewer digits."""

    def near(got, expected, what, *_):
        if not got.is_floating_point():
            assert torch.equal(got, expected), what
        elif expected.numel():
            error = float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
            assert error <= bound, f"{what}: relative error {error}"

    return near


class Watching(TorchDispatchMode):
    """Makes losses run as registered operators."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def registered(op):
    def run(**given):
        with Watching():
            return op(**given)

    return run


@contextmanager
def exchanges():
    """The list that this gives has an entry for each all-gather."""
    seen, gather = [], parallel.all_gather
    with mock.patch.object(parallel, "all_gather", lambda *a, **k: (seen.append(1), gather(*a, **k))[1]):
        yield seen


def compare(
    op, given, how, sizes, rank, *, near=close, exact=None, dim=None, size=None, constants=(), times=2,
    way=lambda op: op, of_whole=None, **more,
):  # fmt: skip
    """Outputs, and gradients after each of some backwards, of this rank's part of what is `given` beside all of it.

    exact: the dtype of the whole; dim: the dimension in which tokens are sharded; size: of parts with padding; way: how
    the sharded call is run, which `more` is for, as `of_whole` is for the other.
    """
    ranks, what = dist.get_world_size(), f"{getattr(op, '__name__', op)} {sizes} {[*given]} {how}"
    grads = [n for n, x in given.items() if n.endswith("hidden") or not is_shared(n, x)]
    grads = [n for n in grads if n not in ("target", *constants)]
    more |= taken(how, sizes, rank)
    mine = {name: part(name, x, cut(sizes, rank)) for name, x in given.items()}
    if size is not None:
        sizes = [max(0, min(size, sum(sizes) - r * size)) for r in range(ranks)]
        mine, more["vocab_start"] = padded(given, size, rank), None
    if dim is not None:
        mine |= {n: x.chunk(ranks, dim)[rank] for n, x in mine.items() if n.endswith("hidden")}
        more["hidden_layout"] = "sequence"
    own, mine = cut(sizes, rank), {name: leaf(x) if name in grads else x for name, x in mine.items()}
    whole = {name: leaf(x if exact is None else x.to(exact)) if name in grads else x for name, x in given.items()}
    whole |= {name: given[name].to(exact) for name in constants if exact is not None}
    expected, got = flat(op(**whole, **how, **(of_whole or {}))), flat(way(op)(**mine, **more))
    same_bits(*got)
    for a, b in zip(got, expected, strict=True):
        near(a, b.to(a.dtype), f"output: {what}")
    pairs = [(a, b) for a, b in zip(got, expected, strict=True) if b.requires_grad]
    assert all(a.requires_grad for a, _ in pairs)
    for seed in range(times if pairs else 0):
        for made, last in ((0, seed + 1 == times), (1, False)):
            values = [pair[made] for pair in pairs]
            upstream = [factors(*x.shape, seed=seed).to(x) for x in values]
            torch.autograd.backward(values, upstream, retain_graph=not last)
    for name in grads if pairs else ():
        a, b = mine[name].grad, whole[name].grad
        assert (a is None) == (b is None), f"{name}: {what}"
        if a is None:
            continue
        right = part(name, b, own)
        if dim is not None and name.endswith("hidden"):
            right = right.chunk(ranks, dim)[rank]
        if size is not None:
            beyond = part(name, a, slice(sizes[rank], None))
            assert name.endswith("hidden") or not beyond.any(), f"padding of {name}: {what}"
            a = part(name, a, slice(sizes[rank]))
        near(a, right.to(a.dtype), f"{name}: {what}", b if name.endswith("bias") else right)
