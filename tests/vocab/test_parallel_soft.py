"""Soft labels over a vocabulary that is sharded over two and three processes, against the same losses in one."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import pad
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from onchip.torch import TopK, cross_entropy, jsd, linear_cross_entropy, linear_jsd
from onchip.vocab import parallel
from sharded import close, cut, leaf, same_bits, spawn

VOCAB, HIDDEN, SHAPE = 61, 16, (3, 8)
# By the number of ranks: shards as torch.chunk has them, others, and an empty one.
LAYOUTS = {2: ([31, 30], [50, 11], [0, 61]), 3: ([21, 21, 19], [9, 0, 52], [30, 30, 1])}


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def layer(dtype=torch.float32):
    return [
        random(*shape, seed=seed, dtype=dtype)
        for seed, shape in enumerate(((*SHAPE, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)))
    ]


def factors(*shape, seed=2):
    return random(*shape, seed=seed).abs() + 0.5


def topk(kind="probs", k=4):
    """Ids of which some occur twice, and some have no probability."""
    ids = torch.randint(VOCAB, (*SHAPE, k), generator=torch.Generator().manual_seed(4))
    ids[..., 1] = ids[..., 0]
    values = random(*SHAPE, k, seed=5).softmax(-1) * 0.8
    values[0] = 0
    return TopK(ids, values.log() if kind == "log_probs" else values, kind, "truncated")


def dense():
    """Some tokens have none, and some entries."""
    labels = 0.9 * (3 * random(*SHAPE, VOCAB, seed=6)).softmax(-1)
    labels[0, 0] = 0
    return labels.masked_fill(labels < 1e-4, 0)


CLASSES = factors(VOCAB).index_fill(0, torch.tensor([3, 40]), 0.0)
OPTIONS = {
    "plain": {"check_inputs": True},
    "all": {
        "softcap": 5.0, "logit_scale": 0.7, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 1e-2,
        "return_stats": True,
    },
    "none": {
        "reduction": "none", "label_smoothing": 0.2, "token_weight": factors(*SHAPE), "temperature": factors(*SHAPE),
    },
    "classes": {"class_weight": CLASSES, "label_smoothing": 0.3, "normalizer": 7.0, "return_stats": True},
    "classes alone": {"class_weight": CLASSES, "reduction": "sum"},
    "shift": {"shift": True, "token_weight": factors(*SHAPE)},
}  # fmt: skip


def taken(options, sizes, rank):
    """What a rank passes beside its tensors."""
    given = {"vocab_group": dist.group.WORLD, "vocab_size": sum(sizes), "vocab_start": sum(sizes[:rank])}
    return options | given


class Watching(TorchDispatchMode):
    """Makes losses run as registered operators."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def flat(x):
    """The tensors of an output."""
    return [x] if isinstance(x, torch.Tensor) else [y for part in x for y in flat(part)]


def of_shard(target, own):
    return target if isinstance(target, TopK) else target[..., own]


def compare(got, expected, mine, whole, parts, what):
    """Outputs, and after each of two backwards the gradients: those of `parts` of the `whole`."""
    same_bits(*got)
    for a, b in zip(got, expected, strict=True):
        close(a, b, f"{what}: output")
    for seed in (0, 1):
        upstream = factors(*expected[0].shape, seed=seed).to(expected[0].dtype)
        got[0].backward(upstream, retain_graph=True), expected[0].backward(upstream, retain_graph=True)
        for i, (a, b, part) in enumerate(zip(mine, whole, parts, strict=True)):
            close(a.grad, b.grad[part], f"{what}: gradient {i}")


def layers(rank, ranks):
    """Each option with each layout, labels of K ids and of every entry."""
    for (name, options), sizes, target in itertools.product(
        OPTIONS.items(), LAYOUTS[ranks], (topk(), topk("log_probs"), dense())
    ):
        own = cut(sizes, rank)
        whole = [leaf(x) for x in layer()]
        mine = [leaf(x if i == 0 else x[own]) for i, x in enumerate(layer())]
        expected = flat(linear_cross_entropy(whole[0], whole[1], target, whole[2], **options))
        got = linear_cross_entropy(mine[0], mine[1], of_shard(target, own), mine[2], **taken(options, sizes, rank))
        compare(flat(got), expected, mine, whole, (..., own, own), f"{name} {sizes}")


def logits_that_exist(rank, ranks):
    """The same of logits, beside float64: a mean logit is a difference, of which two results in float32 may be further
    from each other than from what is right.
    """
    logits = random(*SHAPE, VOCAB)
    for (name, options), sizes, target in itertools.product(
        OPTIONS.items(), LAYOUTS[ranks], (topk(), topk("log_probs"), dense())
    ):
        if name == "shift":
            continue
        own = cut(sizes, rank)
        whole, mine = leaf(logits), leaf(logits[..., own])
        exact = flat(cross_entropy(whole.double(), target, **options))
        expected = [x.float() if x.is_floating_point() else x for x in exact]
        got = cross_entropy(mine, of_shard(target, own), **taken(options, sizes, rank))
        compare(flat(got), expected, [mine], [whole], ((..., own),), f"{name} {sizes}")


def padding_and_tokens(rank, ranks):
    """Rows that are padding, tokens that are sharded, a main gradient of the caller's, and DTensors."""
    mesh = init_device_mesh("cpu", (ranks,))
    hidden, weight, _ = layer()
    size = -(-VOCAB // ranks) + 2
    rows = max(0, min(size, VOCAB - rank * size))
    dim = 1 if ranks == 2 else 0
    for target in (topk(), dense()):
        whole = [leaf(hidden), leaf(weight)]
        options = {"softcap": 5.0, "label_smoothing": 0.1, "return_stats": True, "shift": dim == 0}
        expected = flat(linear_cross_entropy(*whole, target, **options))
        padded = pad(weight, (0, 0, 0, size * ranks - VOCAB), value=torch.nan)[rank * size :][:size]
        labels = target
        if isinstance(target, torch.Tensor):
            labels = pad(target, (0, size * ranks - VOCAB), value=torch.nan)[..., rank * size :][..., :size]
        part, out = leaf(hidden.chunk(ranks, dim)[rank]), torch.ones(size, HIDDEN)
        given = options | {"hidden_layout": "sequence", "vocab_group": dist.group.WORLD, "vocab_size": VOCAB}
        got = flat(linear_cross_entropy(part, leaf(padded), labels, weight_grad_out=out, **given))
        same_bits(*got)
        for a, b in zip(got, expected, strict=True):
            close(a, b)
        expected[0].backward(), got[0].backward()
        close(part.grad, whole[0].grad.chunk(ranks, dim)[rank])
        close(out[:rows], 1 + whole[1].grad[rank * size :][:rows])
        assert (out[rows:] == 1).all()

        h = distribute_tensor(hidden, mesh, [Shard(dim)]).requires_grad_()
        w = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
        labels = target if isinstance(target, TopK) else distribute_tensor(target, mesh, [Shard(-1)])
        linear_cross_entropy(h, w, labels, **options)[0].backward()
        close(h.grad.full_tensor(), whole[0].grad), close(w.grad.full_tensor(), whole[1].grad)

        logits, options = random(*SHAPE, VOCAB), {"softcap": 5.0, "label_smoothing": 0.1}
        expected = leaf(logits)
        cross_entropy(expected, target, **options).backward()
        z = distribute_tensor(logits, mesh, [Shard(-1)]).requires_grad_()
        cross_entropy(z, labels, **options).backward()
        close(z.grad.full_tensor(), expected.grad)
        wide = leaf(pad(logits, (0, size * ranks - VOCAB), value=torch.nan)[..., rank * size :][..., :size])
        if isinstance(target, torch.Tensor):
            labels = pad(target, (0, size * ranks - VOCAB), value=torch.nan)[..., rank * size :][..., :size]
        cross_entropy(wide, labels, vocab_group=dist.group.WORLD, vocab_size=VOCAB, **options).backward()
        close(wide.grad[..., :rows], expected.grad[..., rank * size :][..., :rows])
        assert not wide.grad[..., rows:].any()


def digits_and_infinities(rank, ranks):
    """A probability near 1 keeps its digits, and so do small ones of another shard; a shard may be all out."""
    sizes = LAYOUTS[ranks][0]
    own, given = cut(sizes, rank), taken({"reduction": "none"}, sizes, rank)
    logits = 0.1 * random(4, VOCAB, dtype=torch.float64)
    certain = torch.tensor([0, 30, 60, 5])
    logits[torch.arange(4), certain] = torch.tensor([18.0, 19.0, 20.0, 40.0], dtype=torch.float64)
    one = TopK(certain[:, None], torch.ones(4, 1), "probs", "truncated")
    every = torch.nn.functional.one_hot(certain, VOCAB).float()
    for target in (one, every):
        whole, mine = leaf(logits), leaf(logits[:, own].float())
        expected = cross_entropy(whole, target, reduction="none")
        loss = cross_entropy(mine, of_shard(target, own), **given)
        assert ((loss - expected).abs() <= 1e-6 * expected).all()
        loss.sum().backward(), expected.sum().backward()
        error, right = mine.grad - whole.grad[:, own], whole.grad[:, own]
        assert (error.abs() <= 1e-5 * right.abs()).all(), (error / right).abs().max()
    hidden, weight, bias = layer()
    # All of the last shards, and some of the first, where labels have no probability.
    bias[sizes[0] - 3 :] = -torch.inf
    few, many = topk(), dense()
    few, many = few._replace(indices=few.indices % (sizes[0] - 3)), many.masked_fill(bias == -torch.inf, 0)
    for target in (few, many):
        whole, mine = leaf(hidden), leaf(hidden)
        options = {"z_loss": 0.1, "return_stats": True}
        expected, stats = linear_cross_entropy(whole, weight, target, bias, **options)
        mixed = options | taken({}, sizes, rank)
        loss, got = linear_cross_entropy(mine, weight[own], of_shard(target, own), bias[own], **mixed)
        close(loss, expected)
        for a, b in zip(got, stats, strict=True):
            close(a, b)
        loss.backward(), expected.backward()
        close(mine.grad, whole.grad)
    impossible = torch.full((1, VOCAB), 1 / VOCAB)
    loss = cross_entropy(bias[None, own] + 0.0, impossible[:, own], **given)
    assert loss == torch.inf
    # Of ids whose shard is all out, as of every entry.
    last = torch.tensor([VOCAB - 1])
    sure = TopK(last[:, None], torch.ones(1, 1), "probs", "truncated")
    for target in (last, sure):
        assert cross_entropy(bias[None, own] + 0.0, target, **given) == torch.inf


def other_calls(rank, ranks):
    """Parts that are frozen, other dtypes, registered operators, and one exchange for each loss."""
    sizes, (hidden, weight, _) = LAYOUTS[ranks][1], layer()
    own, given = cut(sizes, rank), taken({"label_smoothing": 0.1}, sizes, rank)
    seen, gather = [], parallel.all_gather
    for target in (topk(), dense()):
        mine, whole = of_shard(target, own), [leaf(hidden), leaf(weight)]
        expected = linear_cross_entropy(*whole, target, label_smoothing=0.1)
        expected.backward()
        h, w = leaf(hidden), leaf(weight[own])
        parallel.all_gather = lambda *args, **options: (seen.append(1), gather(*args, **options))[1]
        try:
            linear_cross_entropy(h, weight[own], mine, **given).backward()
            cross_entropy(leaf(hidden @ weight[own].T), mine, return_stats=True, **given)[0].backward()
        finally:
            parallel.all_gather = gather
        linear_cross_entropy(hidden, w, mine, **given).backward()
        close(h.grad, whole[0].grad), close(w.grad, whole[1].grad[own])
        close(linear_cross_entropy(hidden, weight[own], mine, **given), expected.detach())
        for watching in (Watching(), nullcontext()):
            a, b = leaf(hidden), leaf(hidden)
            with watching:
                loss = linear_cross_entropy(a, weight[own], mine, **given)
                logits = cross_entropy(b @ weight[own].T, mine, **given)
            loss.backward(), logits.backward()
            dist.all_reduce(b.grad)
            close(loss, expected.detach()), close(logits, expected.detach())
            close(a.grad, whole[0].grad), close(b.grad, whole[0].grad)
        double = [leaf(x) for x in layer(torch.float64)]
        part = [leaf(x if i == 0 else x[own]) for i, x in enumerate(double)]
        a = linear_cross_entropy(part[0], part[1], mine, part[2], **given)
        b = linear_cross_entropy(double[0], double[1], target, double[2], label_smoothing=0.1)
        compare([a], [b], part, double, (..., own, own), "float64")
    assert len(seen) == 4, seen


def refusals(rank, ranks):
    """What is found by all ranks."""
    sizes, (hidden, weight, _) = LAYOUTS[ranks][1], layer()
    given = {"hidden": hidden, "weight": weight[cut(sizes, rank)], "target": topk()} | taken({}, sizes, rank)
    dim = 1 if ranks == 2 else 0
    last = {"shift": True, "target": topk(), "hidden_layout": "sequence"}
    for wrong, match in (
        ({"target": dense()}, r"target has 61 of the vocabulary's entries but weight has"),
        ({"target": topk()._replace(indices=topk().indices + VOCAB)}, r"target.indices\[.*\] is .* not in \[0, 61\)"),
        ({"strategy": "stash"}, "soft labels are computed by strategy 'recompute'; got 'stash'"),
        ({"scratch_bytes": 8}, "scratch_bytes=8 is too small"),
        ({"scratch_bytes": 8, "target": dense()[..., cut(sizes, rank)]}, "scratch_bytes=8 is too small"),
        ({"backend": "triton", "target": dense()[..., cut(sizes, rank)]}, "every entry take no sharded vocabulary"),
        ({"class_weight": CLASSES[:9]}, r"class_weight has shape \[9\]; it must be \[V\], \[61\]"),
        ({"vocab_start": 0}, "don't make up"),
        ({"vocab_start": 0, "target": dense()[..., cut(sizes, rank)]}, "don't make up"),
        ({"vocab_group": None}, "pass its vocab_group"),
        *([(last | {"hidden": hidden.chunk(ranks, dim)[rank]}, "another rank may have")] if dim == 1 else []),
    ):
        with pytest.raises(ValueError, match="linear_cross_entropy: .*" + match):
            linear_cross_entropy(**given | wrong)
    logits = {"logits": hidden @ given["weight"].T, "target": topk()} | taken({}, sizes, rank)
    for wrong, match in (
        ({"target": dense()}, r"target has 61 of the vocabulary's entries but logits has"),
        ({"backend": "triton", "target": dense()[..., cut(sizes, rank)]}, "every entry take no sharded vocabulary"),
        ({"inplace_backward": True}, "inplace_backward=True takes targets that are ids"),
        ({"vocab_start": 0}, "don't make up"),
    ):
        with pytest.raises(ValueError, match="cross_entropy: .*" + match):
            cross_entropy(**logits | wrong)
    given |= {"check_inputs": True}
    linear_cross_entropy(**given)
    for wrong, match in (
        ({"target": topk()._replace(values=topk().values / 2)}, "differ in values of targets"),
        ({"target": topk("log_probs")}, "differ in sizes or dtypes"),
    ):
        with pytest.raises(ValueError, match=match):
            linear_cross_entropy(**given | (wrong if rank == 0 else {}))


CHECKS = {
    check.__name__: check
    for check in (
        layers,
        logits_that_exist,
        padding_and_tokens,
        digits_and_infinities,
        other_calls,
        refusals,
    )
}


def test_two_ranks(tmp_path):
    spawn(tmp_path, 2, CHECKS)


@pytest.mark.slow
def test_three_ranks(tmp_path):
    spawn(tmp_path, 3, CHECKS)


def kernels(rank, ranks):
    """Labels of K ids on the Triton kernels: an empty shard, padding, tokens that are sharded, an id out of range."""
    hidden, weight, bias = (random(*shape, seed=7).half() / 4 for shape in ((4, 6, 24), (700, 24), (700,)))
    ids = torch.randint(700, (4, 6, 3), generator=torch.Generator().manual_seed(4))
    ids[..., 1] = ids[..., 0]
    target = TopK(ids, random(4, 6, 3, seed=5).softmax(-1) * 0.8, "probs", "truncated")
    of_all = {"z_loss": 1e-2, "class_weight": factors(700), "return_stats": True, "softcap": 5.0}
    ways = ([300, 400], "auto", -1), ([700, 0], "recompute", 1)
    for smoothing, (sizes, strategy, dim) in itertools.product((0.0, 0.2), ways):
        options, own = of_all | {"label_smoothing": smoothing}, cut(sizes, rank)
        whole = [leaf(x.float()) for x in (hidden, weight, bias)]
        expected = flat(linear_cross_entropy(whole[0], whole[1], target, whole[2], **options))
        expected[0].backward()
        mine = [leaf(hidden if dim < 0 else hidden.chunk(2, dim)[rank]), leaf(weight[own]), leaf(bias[own])]
        given = taken(options, sizes, rank) | {"hidden_layout": "replicated" if dim < 0 else "sequence"}
        more = {"backend": "triton", "strategy": strategy}
        with Watching() if dim < 0 else nullcontext():
            got = flat(linear_cross_entropy(mine[0], mine[1], target, mine[2], **given, **more))
        same_bits(*got)
        for a, b in zip(got, expected, strict=True):
            assert_close(a, b, rtol=2e-3, atol=2e-3)
        got[0].backward(retain_graph=True), got[0].backward()
        for what, a, b in zip(("hidden", "weight", "bias"), mine, whole, strict=True):
            b = b.grad[own] if what != "hidden" else b.grad if dim < 0 else b.grad.chunk(2, dim)[rank]
            assert (a.grad - 2 * b).norm() <= 2e-3 * (2 * b).norm(), (what, sizes, smoothing)
    padded = torch.cat([weight, torch.full((36, 24), torch.nan)]).chunk(2)[rank]
    bad = target._replace(indices=target.indices.index_fill(2, torch.tensor(1), 700))
    given = {"vocab_group": dist.group.WORLD, "vocab_size": 700, "backend": "triton", "reduction": "none"}
    for labels in (target, bad):
        mine = leaf(padded)
        loss = linear_cross_entropy(hidden, mine, labels, **given)
        loss.sum().backward()
        assert not mine.grad[700 - 368 * rank :].any()
        assert loss.isnan().all() == (labels is bad)
        assert mine.grad[: 332 if rank else 368].isnan().any() == (labels is bad)

    logits = {"vocab_group": dist.group.WORLD, "backend": "triton"}
    with pytest.raises(ValueError, match="jsd: .*no kernel for teacher_topk; pass backend='plain'"):  # noqa: RUF043
        jsd(hidden, teacher_topk=target._replace(kind="log_probs"), **logits)


def kernels_of_logits(rank, ranks):
    """The same of logits that exist, and one exchange."""
    logits, ids = (
        4 * random(2, 5, 700, seed=7),
        torch.randint(700, (2, 5, 3), generator=torch.Generator().manual_seed(4)),
    )
    ids[..., 1] = ids[..., 0]
    values = random(2, 5, 3, seed=5).softmax(-1) * 0.8
    few = TopK(ids, values, "probs", "truncated")
    each = {"temperature": factors(2, 5), "token_weight": factors(2, 5), "reduction": "none", "label_smoothing": 0.2}
    everything = each | {"z_loss": 1e-2, "class_weight": factors(700), "return_stats": True, "softcap": 5.0}
    seen, gather = [], parallel.all_gather
    for options, sizes, target in (
        ({}, [300, 400], few._replace(values=values.log(), kind="log_probs")),
        (each, [700, 0], few),
        (everything, [300, 400], few),
        (everything, [1, 699], few),
    ):
        own, whole = cut(sizes, rank), leaf(logits)
        mine, given = leaf(logits[..., own]), taken(options, sizes, rank) | {"backend": "triton"}
        expected = flat(cross_entropy(whole, target, **options))
        parallel.all_gather = lambda *args, **more: (seen.append(1), gather(*args, **more))[1]
        with Watching() if sizes[0] == 1 else nullcontext():
            got = flat(cross_entropy(mine, target, **given))
        parallel.all_gather = gather
        same_bits(*got)
        for a, b in zip(got, expected, strict=True):
            assert_close(a, b, rtol=2e-5, atol=2e-5)
        upstream = factors(*got[0].shape)
        got[0].backward(upstream, retain_graph=True), got[0].backward(upstream), expected[0].backward(2 * upstream)
        assert (mine.grad - whole.grad[..., own]).norm() <= 2e-5 * whole.grad[..., own].norm(), (sizes, options)
    # Beside one of each call to find out whether the ranks' arguments belong together.
    assert len(seen) == 4, seen
    padded, whole = torch.cat([logits, torch.full((2, 5, 36), torch.nan)], -1).chunk(2, -1)[rank], leaf(logits)
    cross_entropy(whole, few, reduction="none").sum().backward()
    bad = few._replace(indices=ids.index_fill(1, torch.tensor(1), 700))
    given = {"vocab_group": dist.group.WORLD, "vocab_size": 700, "backend": "triton", "reduction": "none"}
    for target in (few, bad):
        mine, wrong = leaf(padded), torch.arange(5) == (1 if target is bad else 5)
        loss = cross_entropy(mine, target, **given)
        loss.sum().backward()
        assert torch.equal(loss.isnan(), wrong.expand(2, 5))
        assert mine.grad[:, wrong, : 700 - 368 * rank].isnan().all()
        right = pad(whole.grad, (0, 36)).chunk(2, -1)[rank]
        assert_close(mine.grad[:, ~wrong], right[:, ~wrong], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="every entry take no sharded vocabulary; pass backend='plain', or K ids"):
        cross_entropy(padded, padded, **given)


@pytest.mark.slow
def test_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spawn(tmp_path, 2, {"kernels": kernels, "kernels_of_logits": kernels_of_logits})


def compiled(rank, ranks):
    """By torch.compile, and checkpointed, as without."""
    (hidden, weight, _), sizes = layer(), LAYOUTS[ranks][1]
    own = cut(sizes, rank)
    given, weight = taken({}, sizes, rank), weight[own]
    teacher = topk("log_probs")._replace(indices=torch.arange(4).expand(*SHAPE, 4))
    losses = {"linear_jsd": lambda h: linear_jsd(h, weight, teacher_topk=teacher, **given)}
    for name, target in (("K ids", topk()), ("every entry", dense()[..., own])):
        losses[name] = lambda h, y=target: linear_cross_entropy(h, weight, y, label_smoothing=0.1, **given)
        losses[f"logits, {name}"] = lambda h, y=target: cross_entropy(h @ weight.T, y, softcap=4.0, **given)
    ways = {
        "compiled": lambda loss: torch.compile(loss, fullgraph=True, backend="aot_eager"),
        "checkpointed": lambda loss: lambda h: checkpoint(loss, h, use_reentrant=False),
    }
    for (name, loss), (way, changed) in itertools.product(losses.items(), ways.items()):
        a, b = leaf(hidden), leaf(hidden)
        expected, got = loss(a), changed(loss)(b)
        expected.backward(), got.backward()
        close(got, expected, f"{name} {way}"), close(b.grad, a.grad, f"{name} {way}")


@pytest.mark.slow
def test_compiled(tmp_path):
    spawn(tmp_path, 2, {"compiled": compiled}, timeout=300)
