"""Losses over a vocabulary that is sharded over two and three processes, against the same losses in one."""

import itertools
from datetime import timedelta
from functools import partial

import agreement
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from onchip.torch import (
    LinearCrossEntropyLoss,
    LMHead,
    cross_entropy,
    jsd,
    linear_cross_entropy,
    linear_jsd,
    linear_log_probs,
    log_probs,
)
from onchip.vocab import parallel
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
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


CLASSES = numbers(VOCAB).index_fill(0, torch.tensor([3, 40]), 0.0)
LCE = {
    "plain": {},
    "all": {"softcap": 5.0, "logit_scale": 0.7, "temperature": 1.3, "label_smoothing": 0.1, "z_loss": 1e-2},
    "none": {
        "reduction": "none",
        "label_smoothing": 0.2,
        "token_weight": numbers(*SHAPE),
        "temperature": numbers(*SHAPE),
    },
    "classes": {"class_weight": CLASSES, "label_smoothing": 0.3, "z_loss": 1e-2},
    "classes alone": {"class_weight": CLASSES, "reduction": "sum"},
    "normalizer": {"normalizer": 7.0, "shift": True},
    "all smoothed": {"label_smoothing": 1.0, "check_inputs": True},
}


EVERYTHING = {"entropy": True, "lse": True, "top1": True, "mean_logits": True, "log_sum_sq_probs": True}
LLP = {
    "plain": {},
    "everything": EVERYTHING
    | {"softcap": 5.0, "logit_scale": 0.7, "temperature": numbers(*SHAPE), "check_inputs": True},
    "top1": {"top1": True, "temperature": 0.7},
}


def several_ids():
    """Of which some are ignored, and some occur twice."""
    ids = torch.stack([labels(), labels().flip(0), labels().flip(1), labels()], -1)
    return ids.index_fill(0, torch.tensor(1), 60)


def taken(options, sizes, rank):
    """What a rank passes beside the layer."""
    given = {"vocab_group": dist.group.WORLD, "vocab_size": sum(sizes), "vocab_start": sum(sizes[:rank])}
    return options | given


def compare(op, tensors, more, options, sizes, rank, *, times=1):
    """Outputs and gradients, with random upstream gradients, of `op(hidden, weight, *more, bias)`."""
    whole = [leaf(x) for x in tensors]
    hidden, weight, bias = (
        leaf(x) for x in (tensors[0], *(x if x is None else x[cut(sizes, rank)] for x in tensors[1:]))
    )
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
        close(bias.grad, whole[2].grad[cut(sizes, rank)], "bias", whole[2].grad)


def flat(x):
    """The tensors of an output."""
    if isinstance(x, torch.Tensor):
        return [x]
    return [y for part in x if part is not None for y in flat(part)]


def every_option(rank, ranks):
    for options, sizes in itertools.product(LCE.values(), LAYOUTS[ranks]):
        for stats in (False, True):
            compare(linear_cross_entropy, layer(), (labels(),), options | {"return_stats": stats}, sizes, rank)


def every_output(rank, ranks):
    for options, sizes in itertools.product(LLP.values(), LAYOUTS[ranks]):
        for ids in (labels(), several_ids()):
            compare(linear_log_probs, layer(), (ids,), options, sizes, rank, times=2)


def logits_that_exist(rank, ranks):
    """Of all options but shift, also with columns that are padding, strided, and overwritten."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(*SHAPE, VOCAB, generator=g)
    for options, sizes in itertools.product(LCE.values(), LAYOUTS[ranks]):
        options = {name: x for name, x in options.items() if name != "shift"} | {"return_stats": True}
        whole, mine = leaf(logits), leaf(logits[..., cut(sizes, rank)])
        expected = flat(cross_entropy(whole, labels(), **options))
        got = flat(cross_entropy(mine, labels(), **taken(options, sizes, rank)))
        same_bits(*got)
        for a, b in zip(got, expected, strict=True):
            close(a, b, "output")
        for _ in range(2):
            expected[0].backward(numbers(*got[0].shape), retain_graph=True)
            got[0].backward(numbers(*got[0].shape), retain_graph=True)
        close(mine.grad, whole.grad[..., cut(sizes, rank)])
    whole = leaf(logits)
    cross_entropy(whole, labels(), softcap=5.0).backward()
    padded = torch.nn.functional.pad(logits, (0, 3 * ranks), value=torch.nan).transpose(0, 1)
    size = -(-padded.shape[-1] // ranks)
    mine = leaf(padded[..., rank * size : (rank + 1) * size])
    computed = mine.transpose(0, 1) * 1
    start = min(rank * size, VOCAB)
    given = {"vocab_group": dist.group.WORLD, "vocab_size": VOCAB, "vocab_start": rank * size}
    cross_entropy(computed, labels(), softcap=5.0, inplace_backward=True, **given).backward()
    rows = min(size, VOCAB - start)
    close(mine.grad.transpose(0, 1)[..., :rows], whole.grad[..., start : start + rows])
    assert not mine.grad[..., rows:].any()
    mesh = init_device_mesh("cpu", (ranks,))
    of_tensor = distribute_tensor(logits, mesh, [Shard(-1)]).requires_grad_()
    cross_entropy(of_tensor, labels(), softcap=5.0).backward()
    close(of_tensor.grad.full_tensor(), whole.grad)
    for wrong, match in (
        ({"scratch_bytes": 8}, "scratch_bytes=8 is too small"),
        ({"logits": torch.ones([])}, "logits has no dimension that could be sharded"),
        ({"vocab_start": 1}, "don't make up"),
        ({"logits": of_tensor * 1, "inplace_backward": True}, "would overwrite the memory of a DTensor"),
    ):
        with pytest.raises(ValueError, match=match):
            cross_entropy(**{"logits": computed.detach(), "target": labels()} | given | wrong)


def log_probs_of_logits(rank, ranks):
    """Every output, also of columns that are padding, and of a DTensor."""
    logits = torch.nn.functional.linear(*layer())
    for options, sizes, ids in itertools.product(LLP.values(), LAYOUTS[ranks], (labels(), several_ids())):
        compare_logits(log_probs, logits, ids, options, sizes, rank)
    size = -(-(VOCAB + 3) // ranks)
    whole = leaf(logits)
    mine = leaf(torch.nn.functional.pad(logits, (0, ranks * size - VOCAB), value=torch.nan).split(size, -1)[rank])
    given = {"vocab_group": dist.group.WORLD, "vocab_size": VOCAB, "vocab_start": rank * size}
    log_probs(whole, labels()).sum().backward(), log_probs(mine, labels(), **given).sum().backward()
    start, rows = rank * size, min(size, VOCAB - rank * size)
    close(mine.grad[..., :rows], whole.grad[..., start : start + rows])
    assert not mine.grad[..., rows:].any()
    of_tensor = distribute_tensor(logits, init_device_mesh("cpu", (ranks,)), [Shard(-1)]).requires_grad_()
    log_probs(of_tensor, labels(), entropy=True).entropy.sum().backward()
    whole.grad = None
    log_probs(whole, labels(), entropy=True).entropy.sum().backward()
    close(of_tensor.grad.full_tensor(), whole.grad)
    for wrong, match in (
        ({"vocab_start": 1}, "don't make up"),
        ({"vocab_group": None}, "pass its vocab_group"),
        ({"scratch_bytes": 8}, "scratch_bytes=8 is too small"),
        ({"ids": labels().masked_fill(labels() == -100, VOCAB)}, r"ids\[.*\] is 61, which is neither"),
        ({"temperature": numbers(*SHAPE) * (1 + rank), "check_inputs": True}, "differ in values"),
    ):
        with pytest.raises(ValueError, match="log_probs: .*" + match):
            log_probs(**{"logits": mine.detach(), "ids": labels()} | given | wrong)


def compare_logits(op, logits, ids, options, sizes, rank, compared=close, **more):
    """Outputs and gradients, with random upstream gradients, of `op(logits, ids)`; `more` is of the sharded call."""
    whole, mine = leaf(logits), leaf(logits[..., cut(sizes, rank)])
    expected, got = flat(op(whole, ids, **options)), flat(op(mine, ids, **taken(options, sizes, rank), **more))
    same_bits(*got)
    for a, b in zip(got, expected, strict=True):
        compared(a, b, f"{sizes} {options}")
    for seed in (0, 1):
        for made in (expected, got):
            made = [x for x in made if x.requires_grad]
            torch.autograd.backward(made, [numbers(*x.shape, seed=seed) for x in made], retain_graph=True)
    compared(mine.grad, whole.grad[..., cut(sizes, rank)], f"{sizes} {options}")


def retained_and_accumulated(rank, ranks):
    """A second backward through the graph adds the same again."""
    for sizes in LAYOUTS[ranks]:
        compare(linear_cross_entropy, layer(), (labels(),), {"label_smoothing": 0.1}, sizes, rank, times=2)


def frozen_parts(rank, ranks):
    """Hidden alone, the weight alone, neither; and a main gradient of the caller's."""
    sizes = LAYOUTS[ranks][0]
    hidden, weight, _ = layer()
    mine, given = weight[cut(sizes, rank)], taken({}, sizes, rank)
    h, w = leaf(hidden), leaf(weight)
    linear_cross_entropy(h, w, labels()).backward()
    a, b = leaf(hidden), leaf(mine)
    linear_cross_entropy(a, mine, labels(), **given).backward()
    linear_cross_entropy(hidden, b, labels(), **given).backward()
    close(a.grad, h.grad)
    close(b.grad, w.grad[cut(sizes, rank)])
    close(linear_cross_entropy(hidden, mine, labels(), **given), linear_cross_entropy(hidden, weight, labels()))
    out = torch.ones_like(mine)
    linear_cross_entropy(hidden, leaf(mine), labels(), weight_grad_out=out, **given).backward()
    close(out, 1 + w.grad[cut(sizes, rank)])


def other_dtypes(rank, ranks):
    sizes = LAYOUTS[ranks][0]
    compare(linear_cross_entropy, layer(dtype=torch.float64), (labels(),), LCE["all"], sizes, rank)
    hidden, weight, _ = layer(dtype=torch.bfloat16)
    w = leaf(weight[cut(sizes, rank)])
    loss = linear_cross_entropy(hidden, w, labels(), **taken({}, sizes, rank))
    loss.backward()
    close(loss, linear_cross_entropy(hidden, weight, labels()))
    assert w.grad.dtype == torch.bfloat16


def default_layouts(rank, ranks):
    """torch.chunk's, without vocab_start; even shards without vocab_size; rows that are padding."""
    hidden, weight, _ = layer()
    for size in (VOCAB, VOCAB + 2, 4, 1):
        parts = (
            weight[:size].chunk(ranks)
            if size <= VOCAB
            else torch.cat([weight, torch.full((35, HIDDEN), torch.nan)]).chunk(ranks)
        )
        w, h, whole = (
            leaf(parts[rank] if rank < len(parts) else weight[:0]),
            leaf(hidden),
            leaf(weight[: min(size, VOCAB)]),
        )
        vocab, h2 = len(whole), leaf(hidden)
        target = labels(vocab)
        loss = linear_cross_entropy(h, w, target, vocab_group=dist.group.WORLD, vocab_size=vocab, label_smoothing=0.1)
        expected = linear_cross_entropy(h2, whole, target, label_smoothing=0.1)
        loss.backward(), expected.backward()
        close(loss, expected), close(h.grad, h2.grad)
        whole_grad = torch.cat([whole.grad, torch.zeros(96 - vocab, HIDDEN)]).split(len(parts[0]))
        close(w.grad, whole_grad[rank][: len(w)])
    even = weight[: 20 * ranks]
    got = linear_cross_entropy(hidden, even.chunk(ranks)[rank], labels(20), vocab_group=dist.group.WORLD)
    close(got, linear_cross_entropy(hidden, even, labels(20)))


def layouts_of_hidden(rank, ranks):
    """Tokens sharded in either dimension, and partial gradients."""
    sizes = LAYOUTS[ranks][1]
    hidden, weight, _ = layer()
    for dim in (0, 1):
        whole, w = leaf(hidden[: 2 * (6 // ranks), :6]), leaf(weight)
        target = labels()[: whole.shape[0], :6]
        if whole.shape[dim] % ranks:
            continue
        linear_cross_entropy(whole, w, target, softcap=3.0).backward()
        part, mine = leaf(whole.chunk(ranks, dim)[rank]), leaf(weight[cut(sizes, rank)])
        loss = linear_cross_entropy(part, mine, target, softcap=3.0, hidden_layout="sequence", **taken({}, sizes, rank))
        loss.backward()
        close(part.grad, whole.grad.chunk(ranks, dim)[rank]), close(mine.grad, w.grad[cut(sizes, rank)])
        whole.grad = part.grad = None
        ids = several_ids()[: whole.shape[0], :6]
        linear_log_probs(whole, w, ids).sum().backward()
        more = taken({"hidden_layout": "sequence"}, sizes, rank)
        linear_log_probs(part, mine, ids, **more).sum().backward()
        close(part.grad, whole.grad.chunk(ranks, dim)[rank])
    h, whole = leaf(hidden), leaf(hidden)
    linear_cross_entropy(
        h, weight[cut(sizes, rank)], labels(), reduce_hidden_grad=False, **taken({}, sizes, rank)
    ).backward()
    linear_cross_entropy(whole, weight, labels()).backward()
    dist.all_reduce(h.grad)
    close(h.grad, whole.grad)


def dtensors(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    hidden, weight, bias = layer()
    whole = [leaf(x) for x in (hidden, weight, bias)]
    linear_cross_entropy(whole[0], whole[1], labels(), whole[2]).backward()
    for placement in (Replicate(), Shard(1)) if ranks == 2 else (Replicate(), Shard(0)):
        h = distribute_tensor(hidden, mesh, [placement]).requires_grad_()
        w, b = (distribute_tensor(x, mesh, [Shard(0)]).requires_grad_() for x in (weight, bias))
        loss = linear_cross_entropy(h, w, labels(), b)
        loss.backward()
        for x, expected in zip((h, w, b), whole, strict=True):
            assert x.grad.placements == x.placements
            close(x.grad.full_tensor(), expected.grad, str(placement))
    h = distribute_tensor(hidden, mesh, [Replicate()]).requires_grad_()
    linear_cross_entropy(h, w, labels(), b, reduce_hidden_grad=False).backward()
    assert h.grad.placements == (Partial(),)
    close(h.grad.full_tensor(), whole[0].grad)
    # A plain hidden is this rank's only where the caller says what the group is.
    with pytest.raises(TypeError, match=r"weight is a DTensor; pass .*vocab_group"):
        linear_cross_entropy(hidden, w, labels(), b)
    plain = leaf(hidden)
    linear_cross_entropy(plain, w, labels(), b, vocab_group=mesh.get_group()).backward()
    close(plain.grad, whole[0].grad)
    # Groups of the same ranks may have other names.
    first, second = (DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("tp",)) for _ in range(2))
    h, w2, b2 = (distribute_tensor(x, on, [at]).requires_grad_() for x, on, at in
                 ((hidden, first, Replicate()), (weight, second, Shard(0)), (bias, first, Shard(0))))  # fmt: skip
    linear_cross_entropy(h, w2, labels(), b2, vocab_group=dist.group.WORLD).backward()
    for x, expected in zip((h, w2, b2), whole, strict=True):
        close(x.grad.full_tensor(), expected.grad, "meshes")
    alone = [dist.new_group([r]) for r in range(ranks)][rank]
    with pytest.raises(
        ValueError, match=rf"hidden is a DTensor on a process group of ranks .*0, 1.* has ranks \[{rank}\]"
    ):
        linear_cross_entropy(h, w2, labels(), b2, vocab_group=alone)
    for wrong, match in (
        (
            {"weight": distribute_tensor(weight, mesh, [Replicate()])},
            "weight is a DTensor with placement .*, and must be Shard",
        ),
        ({"weight": distribute_tensor(weight, mesh, [Shard(1)])}, r"must be Shard\(0\)"),
        ({"hidden": distribute_tensor(hidden, mesh, [Shard(2)])}, "hidden is a DTensor .* must be Replicate"),
    ):
        with pytest.raises(ValueError, match=match):
            linear_cross_entropy(**{"hidden": h, "weight": w, "target": labels(), "bias": b} | wrong)


def calls(hidden, sizes, rank, *, whole=False):
    """Every loss of hidden states, of this rank's shard or of the `whole` vocabulary."""
    _, weight, bias = layer()
    own, given = (slice(None), {}) if whole else (cut(sizes, rank), taken({}, sizes, rank))
    weight, bias, teacher = weight[own], bias[own], weight.flip(0)[own].contiguous()
    target, ids, module = labels(), several_ids(), LinearCrossEntropyLoss(label_smoothing=0.1)

    def logits(hidden):
        return torch.nn.functional.linear(hidden, weight)

    return {
        "linear_cross_entropy": lambda h: linear_cross_entropy(h, weight, target, bias, z_loss=0.1, **given),
        "module": lambda h: module(h, weight, target, **given),
        "fp8": lambda h: linear_cross_entropy(h, weight, target, bias, precision="fp8", **given),
        "linear_log_probs": lambda h: sum(
            x.sum() for x in linear_log_probs(h, weight, ids, entropy=True, lse=True, **given)[:3]
        ),
        "cross_entropy": lambda h: cross_entropy(logits(h), target, softcap=4.0, **given),
        "log_probs": lambda h: log_probs(logits(h), ids, **given).sum(),
        "linear_jsd": lambda h: linear_jsd(h, weight, hidden, teacher, target=target, hard_weight=0.2, **given),
        "jsd": lambda h: jsd(logits(h), logits(hidden.flip(0)), beta=0.0, **given),
    }


def assert_same_ways(rank, ranks, **ways):
    """Hidden's gradient by each way to run each loss; of logits that exist, those of this rank."""
    hidden, sizes = layer()[0], LAYOUTS[ranks][1]
    mine, alone = calls(hidden, sizes, rank), calls(hidden, sizes, rank, whole=True)
    for (name, loss), (what, way) in itertools.product(mine.items(), ways.items()):
        h, plain, expected = leaf(hidden), leaf(hidden), leaf(hidden)
        value = way(loss)(h)
        value.backward(), loss(plain).backward()
        right = loss if name == "fp8" else alone[name]  # whose blocks of 128 these shards don't keep
        close(value, right(expected), f"{name}, {what}")
        close(h.grad, plain.grad, f"{name}, {what}")


class Watching(TorchDispatchMode):
    """Makes losses run as registered operators."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def other_ways_to_run_it(rank, ranks):
    def registered(loss):
        def run(h):
            with Watching():
                return loss(h)

        return run

    def checkpointed(loss):
        return lambda h: torch.utils.checkpoint.checkpoint(loss, h, use_reentrant=False)

    assert_same_ways(rank, ranks, registered=registered, checkpointed=checkpointed)


def compiled(rank, ranks):
    assert_same_ways(rank, ranks, compiled=lambda loss: torch.compile(loss, fullgraph=True, backend="aot_eager"))


def one_exchange(rank, ranks):
    """Of each loss in forward, and none but hidden's sum in backward."""
    hidden, sizes, seen = layer()[0], LAYOUTS[ranks][0], []
    gather = parallel.all_gather
    parallel.all_gather = lambda *args, **options: (seen.append(1), gather(*args, **options))[1]
    try:
        for name, loss in calls(hidden, sizes, rank).items():
            seen.clear()
            loss(leaf(hidden)).backward()
            assert len(seen) == (2 if name == "linear_jsd" else 1), (name, seen)
    finally:
        parallel.all_gather = gather


def digits_and_infinities(rank, ranks):
    """A target's probability near 1 keeps its digits; entries, and whole shards, may be out of the vocabulary."""
    sizes = LAYOUTS[ranks][0]
    own, given = cut(sizes, rank), taken({}, sizes, rank)
    logits = torch.zeros(4, VOCAB, dtype=torch.float64)
    target = torch.tensor([0, 30, 60, 5])
    logits[torch.arange(4), target] = torch.tensor([18.0, 19.0, 20.0, 40.0], dtype=torch.float64)
    loss = cross_entropy(logits[:, own].float(), target, reduction="none", **given)
    expected = cross_entropy(logits, target, reduction="none")
    assert ((loss - expected).abs() <= 1e-6 * expected).all()
    asked = {"entropy": True, "log_sum_sq_probs": True}
    out = linear_log_probs(logits.float(), torch.eye(VOCAB)[own], target, **asked, **given)
    right = linear_log_probs(logits, torch.eye(VOCAB, dtype=torch.float64), target, **asked)
    for a, b in ((out.entropy, right.entropy), (out.log_sum_sq_probs, right.log_sum_sq_probs)):
        assert ((a - b).abs() <= 1e-5 * b.abs()).all(), (a, b)
    # Of large logits too, whose log-sum-exps are rounded by more than what their probabilities differ by.
    large = 1e4 + numbers(4, VOCAB, seed=3) * 8
    asked |= {"lse": True, "mean_logits": True}
    out, right = log_probs(large[:, own], target, **asked, **given), log_probs(large.double(), target, **asked)
    for name in ("log_prob", *asked):
        a, b = getattr(out, name).double(), getattr(right, name)
        assert ((a - b).abs() <= 2e-6 * b.abs()).all(), (name, a, b)
    hidden, weight, bias = layer()
    # All of the last shards, and some of the first.
    bias[sizes[0] - 3 :] = -torch.inf
    target = (labels() % (sizes[0] - 3)).masked_fill(labels() < 0, -100)
    target[1] = -100
    hidden[1, 1] = torch.nan
    whole, mine = leaf(hidden), leaf(hidden)
    linear_cross_entropy(whole, weight, target, bias, z_loss=0.1).backward()
    loss, stats = linear_cross_entropy(mine, weight[own], target, bias[own], z_loss=0.1, return_stats=True, **given)
    loss.backward()
    close(mine.grad, whole.grad)
    assert not stats.entropy.isnan().any()
    close(jsd(logits[:, own] + bias[own], logits[:, own], beta=1.0, **given), jsd(logits + bias, logits, beta=1.0))


def a_rank_that_fails(rank, ranks):
    """The others raise at the group's time-out."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    hidden, weight, _ = layer()
    sizes = LAYOUTS[ranks][0]
    given = taken({}, sizes, rank) | {"vocab_group": group}
    with pytest.raises(RuntimeError if rank else ValueError, match=r"[Tt]imed" if rank else "hidden has H="):
        linear_cross_entropy(hidden[..., : HIDDEN - (rank == 0)], weight[cut(sizes, rank)], labels(), **given)


def refusals(rank, ranks):
    """What is found by all ranks, none of which waits for another."""
    hidden, weight, bias = layer()
    sizes = LAYOUTS[ranks][1]
    mine = weight[cut(sizes, rank)]
    given = {"hidden": hidden, "weight": mine, "target": labels()} | taken({}, sizes, rank)
    for wrong, kind, match in (
        ({"vocab_start": 0}, ValueError, r"shards of the vocabulary are \[0, .*don't make up \[0, 61\)"),
        ({"vocab_start": -1}, ValueError, "vocab_start must be 0 or more"),
        ({"vocab_start": 1.0}, TypeError, "vocab_start must be an int"),
        ({"vocab_size": None}, ValueError, "vocab_start needs vocab_size"),
        ({"vocab_size": 0}, ValueError, "vocab_size must be positive"),
        ({"vocab_group": "tp"}, TypeError, "vocab_group must be a torch.distributed.ProcessGroup; got str"),
        ({"vocab_group": None}, ValueError, "pass its vocab_group"),
        ({"hidden_layout": "shard"}, ValueError, "hidden_layout must be one of 'replicated', 'sequence'"),
        ({"hidden_layout": "sequence"}, ValueError, "hidden_layout='sequence' with . ranks needs"),
        ({"hidden_layout": "sequence", "reduce_hidden_grad": False}, ValueError, "pass reduce_hidden_grad=True"),
        ({"reduce_hidden_grad": 1}, TypeError, "reduce_hidden_grad must be True or False"),
        ({"bias": bias}, ValueError, "bias has 61 of the vocabulary's entries but weight has"),
        ({"weight": mine.tolist()}, TypeError, "weight must be a torch.Tensor"),
        ({"strategy": "stash"}, ValueError, "strategy='stash' makes gradients before"),
        (
            {"target": labels().masked_fill(labels() == -100, VOCAB)},
            ValueError,
            r"target\[.*\] is 61, which is neither",
        ),
        ({"class_weight": CLASSES[:9]}, ValueError, r"class_weight has shape \[9\]; it must be \[V\], \[61\]"),
        ({"scratch_bytes": 8}, ValueError, "scratch_bytes=8 is too small"),
        ({"weight_grad_out": torch.zeros(3, HIDDEN)}, ValueError, "weight_grad_out has 3 of the vocabulary's entries"),
    ):
        with pytest.raises(kind, match="linear_cross_entropy: .*" + match):
            linear_cross_entropy(**given | wrong)
    own = dist.new_group([0])
    if rank > 0:
        with pytest.raises(TypeError, match="this rank is no member"):
            linear_cross_entropy(**given | {"vocab_group": own})


def ranks_that_differ(rank, ranks):
    """That is found out on the CPU, whatever check_inputs is."""
    hidden, weight, _ = layer()
    sizes = LAYOUTS[ranks][1]
    given = {"hidden": hidden, "weight": weight[cut(sizes, rank)], "target": labels()}
    given |= taken({}, sizes, rank)
    linear_cross_entropy(**given)
    last = rank == ranks - 1
    for wrong, match in (
        ({"softcap": 5.0}, "differ in options"),
        ({"target": labels().masked_fill(labels() == -100, 3)}, "differ in values of targets"),
        ({"hidden": hidden[:2], "target": labels()[:2]}, "differ in sizes or dtypes"),
        ({"token_weight": numbers(*SHAPE)}, "differ in shapes of targets"),
        ({"vocab_size": 60}, "differ in vocab_size"),
    ):
        with pytest.raises(ValueError, match=match):
            linear_cross_entropy(**given | (wrong if last else {}))


OF_NUMBERS = (
    every_option,
    every_output,
    logits_that_exist,
    log_probs_of_logits,
    retained_and_accumulated,
    default_layouts,
    layouts_of_hidden,
    digits_and_infinities,
)
OTHERS = (
    frozen_parts,
    other_dtypes,
    dtensors,
    other_ways_to_run_it,
    one_exchange,
    refusals,
    ranks_that_differ,
    *agreement.CHECKS,
    a_rank_that_fails,
)
CHECKS = {check.__name__: check for check in (*OF_NUMBERS, *OTHERS)}


def test_two_ranks(tmp_path):
    spawn(tmp_path, 2, CHECKS)


@pytest.mark.slow
def test_three_ranks(tmp_path):
    spawn(tmp_path, 3, {check.__name__: check for check in OF_NUMBERS})


@pytest.mark.slow
def test_more_of_three_ranks(tmp_path):
    spawn(tmp_path, 3, {check.__name__: check for check in OTHERS})


@pytest.mark.slow
def test_compiled(tmp_path):
    spawn(tmp_path, 2, {"compiled": compiled}, timeout=300)


# ------------------------------------------------------------------------------------------------------------- kernels

# A tile of the vocabulary is 256 entries.
OF_KERNELS = {
    "plain": {"return_stats": True},
    "all": LCE["all"],
    "none": {"reduction": "none", "z_loss": 1e-2},
    "smoothing": {"label_smoothing": 0.2},
    "classes": {"class_weight": numbers(700), "label_smoothing": 0.3, "z_loss": 1e-2},
}


def kernels(rank, ranks):
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=g).half() / 4 for shape in ((4, 6, 24), (700, 24), (700,)))
    target = labels(700)[:, :6].repeat(2, 1)[:4]
    for (name, options), (sizes, strategy) in itertools.product(
        OF_KERNELS.items(), (([300, 400], "auto"), ([700, 0], "recompute"))
    ):
        whole = [leaf(x.float()) for x in (hidden, weight, bias)]
        expected = flat(linear_cross_entropy(whole[0], whole[1], target, whole[2], **options))
        own = cut(sizes, rank)
        mine = [leaf(x) for x in (hidden, weight[own], bias[own])]
        given = taken(options, sizes, rank) | {"backend": "triton", "strategy": strategy}
        got = flat(linear_cross_entropy(mine[0], mine[1], target, mine[2], **given))
        same_bits(*got)
        for a, b in zip(got, expected, strict=True):
            assert_close(a, b, rtol=2e-3, atol=2e-3)
        for seed in (0, 1):
            upstream = numbers(*got[0].shape, seed=seed)
            got[0].backward(upstream, retain_graph=seed == 0), expected[0].backward(upstream, retain_graph=True)
        for what, a, b in zip(("hidden", "weight", "bias"), mine, whole, strict=True):
            b = b.grad if what == "hidden" else b.grad[own]
            error = (a.grad - b).norm() / b.norm() if b.numel() else 0
            assert error < 2e-3, (name, sizes, what, error)


def kernels_of_other_calls(rank, ranks):
    """Tokens that are sharded, rows that are padding, a target out of range, and registered operators."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=g).half() / 4 for shape in ((2, 6, 24), (700, 24)))
    target = labels(700)[:2, :6]
    given = {"vocab_group": dist.group.WORLD, "vocab_size": 700, "backend": "triton"}
    padded = torch.cat([weight, torch.full((36, 24), torch.nan)]).chunk(2)[rank]
    whole, w = leaf(hidden.float()), leaf(weight.float())
    linear_cross_entropy(whole, w, target).backward()
    for out in (None, torch.zeros(368, 24)):
        part, mine = leaf(hidden.chunk(2, 1)[rank]), leaf(padded)
        with Watching():
            loss = linear_cross_entropy(part, mine, target, hidden_layout="sequence", weight_grad_out=out, **given)
        loss.backward()
        expected = torch.nn.functional.pad(w.grad, (0, 0, 0, 36)).chunk(2)[rank]
        grad = mine.grad if out is None else out
        assert (grad - expected).norm() < 2e-3 * expected.norm()
        assert not grad[700 - 368 * rank :].any()
        expected = whole.grad.chunk(2, 1)[rank]
        assert (part.grad - expected).norm() < 2e-3 * expected.norm()
    bad = target.clone()
    bad[0, 0] = 700
    h = leaf(hidden)
    loss = linear_cross_entropy(h, padded, bad, reduction="none", **given)
    loss.sum().backward()
    assert loss.isnan().nonzero().tolist() == h.grad.isnan().all(-1).nonzero().tolist() == [[0, 0]]
    with pytest.raises(ValueError, match=r"target\[0, 0\] is 700"):
        linear_cross_entropy(h, padded, bad, check_inputs=True, **given)


def kernels_of_log_probs(rank, ranks):
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=g).half() / 4 for shape in ((18, 24), (700, 24)))
    ids = torch.randint(700, (18, 3), generator=g)
    ids[:, 2] = ids[:, 0]
    ids[::4, 1], ids[3] = -100, -100
    for sizes, several in (([300, 400], ids), ([600, 100], ids[:, 0])):
        whole, own = [leaf(hidden.float()), leaf(weight.float())], cut(sizes, rank)
        expected = flat(linear_log_probs(*whole, several, **EVERYTHING))
        mine = [leaf(hidden), leaf(weight[own])]
        got = flat(linear_log_probs(*mine, several, **taken(EVERYTHING, sizes, rank), backend="triton"))
        same_bits(*got)
        for a, b in zip(got, expected, strict=True):
            assert_close(a, b, rtol=2e-3, atol=2e-3)
        upstream = [numbers(*x.shape) for x in got[:3]]
        torch.autograd.backward(got[:3], upstream), torch.autograd.backward(expected[:3], upstream)
        for a, b in ((mine[0].grad, whole[0].grad), (mine[1].grad, whole[1].grad[own])):
            assert (a - b).norm() < 2e-3 * b.norm(), (sizes, a.shape)


def near(got, expected, what):
    """Of float32 logits, and sums in another order."""
    if got.is_floating_point():
        error = (got - expected).norm() / expected.norm() if expected.numel() else 0
        assert error <= 1e-5, f"{what}: relative error {float(error)}"
    else:
        assert torch.equal(got, expected), what


def kernels_of_logits(rank, ranks):
    """Options; columns that are padding; in place; a target out of range."""
    g = torch.Generator().manual_seed(0)
    logits, target = 4 * torch.randn(4, 6, 700, generator=g), labels(700)[:, :6].repeat(2, 1)[:4]
    ids = torch.randint(700, (4, 6, 3), generator=g)
    ids[..., 2] = ids[..., 0]
    ids[::2, 1, 1], ids[3, 2] = -100, -100
    of_tokens = {"token_weight": numbers(4, 6), "temperature": numbers(4, 6), "return_stats": True}
    cases = OF_KERNELS | {"none": OF_KERNELS["none"] | of_tokens | {"label_smoothing": 0.2}}
    for name, options in cases.items():
        sizes = [700, 0] if name == "plain" else [300, 400]
        compare_logits(cross_entropy, logits, target, options, sizes, rank, near, backend="triton")
    everything = EVERYTHING | {"softcap": 5.0, "temperature": numbers(4, 6)}
    for options, sizes, several in (
        (everything, [300, 400], ids),
        ({}, [0, 700], target),
        (everything, [1, 699], target),
    ):
        compare_logits(log_probs, logits, several, options, sizes, rank, near, backend="triton")
    given = {"vocab_group": dist.group.WORLD, "vocab_size": 700, "backend": "triton"}
    padded = torch.nn.functional.pad(logits, (0, 36), value=torch.nan).chunk(2, -1)[rank]
    whole, bad = leaf(logits), target.clone()
    cross_entropy(whole, target, softcap=3.0).backward()
    for inplace in (False, True):
        mine = leaf(padded)
        cross_entropy(mine * 1, target, softcap=3.0, inplace_backward=inplace, **given).backward()
        near(mine.grad, torch.nn.functional.pad(whole.grad, (0, 36)).chunk(2, -1)[rank], "padding")
    whole, mine = leaf(logits), leaf(padded)
    log_probs(whole, ids).sum().backward(), log_probs(mine, ids, **given).sum().backward()
    near(mine.grad, torch.nn.functional.pad(whole.grad, (0, 36)).chunk(2, -1)[rank], "padding")
    bad[0, 0] = 700
    for name in ("cross_entropy", "log_probs"):
        op, mine = (partial(cross_entropy, reduction="none"), log_probs)[name == "log_probs"], leaf(padded)
        loss = op(mine, bad, **given)
        loss.sum().backward()
        assert loss.isnan().nonzero().tolist() == mine.grad[..., :332].isnan().all(-1).nonzero().tolist() == [[0, 0]]
        with pytest.raises(ValueError, match=r"(target|ids)\[0, 0\] is 700"):
            op(mine, bad, check_inputs=True, **given)


def test_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    checks = (kernels, kernels_of_other_calls, kernels_of_log_probs, kernels_of_logits)
    spawn(tmp_path, 2, {check.__name__: check for check in checks})


# --------------------------------------------------------------------------------------------------- in training code


def fsdp2_and_tensor_parallel(rank, ranks):
    """Two steps of a head whose weight is sharded over two ranks by rows, and each part over two others by FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    alone, head = LMHead(HIDDEN, VOCAB, bias=False, z_loss=1e-3), LMHead(HIDDEN, VOCAB, bias=False, z_loss=1e-3)
    hidden, ids = torch.randn(2, 3, 8, HIDDEN), torch.randint(VOCAB, (2, 3, 8))
    head.weight = torch.nn.Parameter(distribute_tensor(alone.weight.detach(), mesh["tp"], [Shard(0)]))
    fully_shard(head, mesh=mesh["dp"])
    mine = mesh.get_local_rank("dp")
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1) for x in (alone, head)]
    for way in ("plain", "DTensor"):
        expected = leaf(hidden)
        sum(alone(expected[i], ids[i]) for i in range(2)).div(2).backward()
        h = leaf(hidden[mine])
        if way == "plain":
            loss = head(h, ids[mine], vocab_group=mesh.get_group("tp"))
        else:
            loss = head(DTensor.from_local(h, mesh["tp"], [Replicate()]), ids[mine])
        loss.backward()
        close(h.grad, 2 * expected.grad[mine])
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
        close(head.weight.full_tensor(), alone.weight, way)


@pytest.mark.slow
def test_fsdp2_and_tensor_parallel(tmp_path):
    spawn(tmp_path, 4, {"FSDP2 x TP": fsdp2_and_tensor_parallel})
