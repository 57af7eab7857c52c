"""Losses over a vocabulary that is sharded over two and three processes, compared with the same losses in one."""

import itertools

import pytest
import torch
import torch.distributed as dist
from parts import (
    EVERYTHING,
    LAYOUTS,
    LOSS,
    SHAPE,
    VOCAB,
    compare,
    dense,
    divergence,
    exchanges,
    factors,
    flat,
    ids,
    jsd_of,
    models,
    padded,
    part,
    random,
    registered,
    several_ids,
    taken,
    teachers,
    tensors,
    topk,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.functional import linear, one_hot
from torch.utils.checkpoint import checkpoint

from onchip.torch import (
    LinearCrossEntropyLoss,
    LMHead,
    TopK,
    cross_entropy,
    jsd,
    linear_cross_entropy,
    linear_jsd,
    linear_log_probs,
    log_probs,
)
from sharded import close, cut, leaf, spawn

LOG_PROBS = {
    "plain": {},
    "everything": EVERYTHING
    | {"softcap": 5.0, "logit_scale": 0.7, "temperature": factors(*SHAPE), "check_inputs": True},
    "top1": {"top1": True, "temperature": 0.7},
}
TARGETS = {"ids": ids(), "K ids": topk(), "K logarithms": topk("log_probs"), "every entry": dense()}
PAIRS = (("head", "head"), ("logits", "logits"), ("head", "logits"))


def losses():
    """Each op with what it is given, and each of its options."""
    head, logits = tensors(), {"logits": random(*SHAPE, VOCAB)}
    for how, target in itertools.product(LOSS.values(), TARGETS.values()):
        yield linear_cross_entropy, head | {"target": target}, how
        if "shift" not in how:
            yield cross_entropy, logits | {"target": target}, how
    for how, of in itertools.product(LOG_PROBS.values(), (ids(), several_ids())):
        yield linear_log_probs, head | {"ids": of}, how
        yield log_probs, {"logits": linear(*head.values()), "ids": of}, how


def some(ranks=2):
    """One call for each way to compute; of two ranks half of the top-k teachers are a head's, half are logits'."""
    head, logits = tensors(), {"logits": random(*SHAPE, VOCAB)}
    for target in (TARGETS["ids"], TARGETS["K ids"], TARGETS["every entry"]):
        how = {"softcap": 5.0, "label_smoothing": 0.1, "return_stats": True}
        yield linear_cross_entropy, head | {"target": target}, how
        yield cross_entropy, logits | {"target": target}, how
    yield LinearCrossEntropyLoss(z_loss=0.1), head | {"target": ids()}, {}
    yield linear_log_probs, head | {"ids": several_ids()}, {"entropy": True, "lse": True}
    yield log_probs, logits | {"ids": several_ids()}, {"entropy": True}
    hard = {"target": ids(), "hard_weight": 0.3}
    for kinds, beta in itertools.product(PAIRS, (0.0, 0.4)):
        made = models(*kinds, dtype=torch.float32)
        yield jsd_of(made), made, hard | {"beta": beta}
    kinds = "head", "logits"
    for kind, teacher in itertools.product(kinds, teachers()) if ranks > 2 else zip(itertools.cycle(kinds), teachers()):
        made = models(kind, dtype=torch.float32)
        yield jsd_of(made), made, hard | {"teacher_topk": teacher}


# Of logits that exist beside float64: a mean logit is a difference, of which two results in float32 may be further from
# each other than from what is right.
def exact_of(op):
    return torch.float64 if op in (cross_entropy, jsd) else None


def every_option(rank, ranks):
    """In one layout after the other."""
    for (op, given, how), sizes in zip(losses(), itertools.cycle(LAYOUTS[ranks]), strict=False):
        compare(op, given, how, sizes, rank, exact=exact_of(op))


def every_option_in_every_layout(rank, ranks):
    for (op, given, how), sizes in itertools.product(losses(), LAYOUTS[ranks]):
        compare(op, given, how, sizes, rank, exact=exact_of(op))
    every_divergence(rank, ranks, few=False)


def every_divergence(rank, ranks, *, few=True):
    """Of a top-k teacher, a third of those of heads and of logits if `few`."""
    layouts = itertools.cycle(LAYOUTS[ranks])
    for kinds, how in itertools.product(PAIRS, divergence().values()):
        given = models(*kinds)
        compare(jsd_of(given), given, how | {"teacher_grad": how.get("beta") != 0.5}, next(layouts), rank)
    known = itertools.product(divergence().values(), teachers(), ("head", "logits"))
    for how, teacher, kind in itertools.islice(known, 0, None, 3 if few else 1):
        if how.get("beta") != 1.0 or not bool(teacher.values.isinf().any()):  # it would be infinite
            given = models(kind)
            compare(jsd_of(given), given, how | {"teacher_topk": teacher}, next(layouts), rank)


def padding_registered_and_one_exchange(rank, ranks):
    """Of each loss one exchange in forward, of divergences some for each chunk; in backward none but hidden's sum."""
    for op, given, how in some(ranks):
        with exchanges() as seen:
            size = -(-VOCAB // ranks) + 2
            compare(op, given, how, [VOCAB, 0, 0][:ranks], rank, size=size, way=registered, exact=exact_of(op))
        assert op in (jsd, linear_jsd) or len(seen) == 1, (op, how)


def tokens_that_are_sharded(rank, ranks):
    """In either dimension; and partial gradients."""
    dim, sizes = 1 if ranks == 2 else 0, LAYOUTS[ranks][1]
    for op, given, how in some(ranks):
        if any(name.endswith("hidden") for name in given):
            compare(op, given, how, sizes, rank, dim=dim)
    for target in (TARGETS["ids"], *([TARGETS["K ids"], TARGETS["every entry"]] if dim == 0 else [])):
        compare(linear_cross_entropy, tensors() | {"target": target}, {"shift": True}, sizes, rank, dim=dim)
    head = tensors()
    h, whole = leaf(head["hidden"]), leaf(head["hidden"])
    more = taken({"reduce_hidden_grad": False}, sizes, rank)
    linear_cross_entropy(h, head["weight"][cut(sizes, rank)], ids(), **more).backward()
    linear_cross_entropy(whole, head["weight"], ids()).backward()
    dist.all_reduce(h.grad)
    close(h.grad, whole.grad)


def checkpointed_and_other_dtypes(rank, ranks):
    """And parts that are frozen, and a main gradient of the caller's."""
    sizes, head = LAYOUTS[ranks][1], tensors()
    own = cut(sizes, rank)
    for op, given, how in some(ranks):
        way = lambda op: lambda **kw: checkpoint(op, use_reentrant=False, **kw)  # noqa: E731
        compare(op, given, how, sizes, rank, times=1, way=way, exact=exact_of(op))
    for target in TARGETS.values():
        given = head | {"target": target}
        compare(linear_cross_entropy, tensors(dtype=torch.float64) | {"target": target}, LOSS["all"], sizes, rank)
        for frozen in (("hidden",), ("weight", "bias"), ("hidden", "weight", "bias")):
            compare(linear_cross_entropy, given, {}, sizes, rank, constants=frozen)
        w, out = leaf(head["weight"]), torch.ones_like(head["weight"][own])
        linear_cross_entropy(head["hidden"], w, target).backward()
        mine, more = part("target", target, own), taken({"weight_grad_out": out}, sizes, rank)
        linear_cross_entropy(head["hidden"], leaf(head["weight"][own]), mine, **more).backward()
        close(out, 1 + w.grad[own])
    narrow = tensors(dtype=torch.bfloat16)
    w = leaf(narrow["weight"][own])
    loss = linear_cross_entropy(narrow["hidden"], w, ids(), **taken({}, sizes, rank))
    loss.backward()
    close(loss, linear_cross_entropy(narrow["hidden"], narrow["weight"], ids()))
    assert w.grad.dtype == torch.bfloat16


def default_layouts(rank, ranks):
    """torch.chunk's, without vocab_start; even shards without vocab_size; rows that are padding."""
    hidden, weight, _ = tensors().values()
    wide = torch.cat([weight, torch.full((35, 16), torch.nan)])
    for size in (VOCAB, VOCAB + 2, 4, 1):
        parts = weight[:size].chunk(ranks) if size <= VOCAB else wide.chunk(ranks)
        w, whole = leaf(parts[rank] if rank < len(parts) else weight[:0]), leaf(weight[: min(size, VOCAB)])
        vocab, h, h2 = len(whole), leaf(hidden), leaf(hidden)
        target = ids(vocab)
        loss = linear_cross_entropy(h, w, target, vocab_group=dist.group.WORLD, vocab_size=vocab, label_smoothing=0.1)
        expected = linear_cross_entropy(h2, whole, target, label_smoothing=0.1)
        loss.backward(), expected.backward()
        close(loss, expected), close(h.grad, h2.grad)
        whole_grad = torch.cat([whole.grad, torch.zeros(96 - vocab, 16)]).split(len(parts[0]))
        close(w.grad, whole_grad[rank][: len(w)])
    even = weight[: 20 * ranks]
    got = linear_cross_entropy(hidden, even.chunk(ranks)[rank], ids(20), vocab_group=dist.group.WORLD)
    close(got, linear_cross_entropy(hidden, even, ids(20)))


def in_place(rank, ranks):
    """Over strided logits whose last columns are padding."""
    logits, size = random(*SHAPE, VOCAB), -(-(VOCAB + 3 * ranks) // ranks)
    whole = leaf(logits)
    cross_entropy(whole, ids(), softcap=5.0).backward()
    mine = leaf(padded({"logits": logits.transpose(0, 1)}, size, rank)["logits"])
    given = {"vocab_group": dist.group.WORLD, "vocab_size": VOCAB, "vocab_start": rank * size}
    cross_entropy(mine.transpose(0, 1) * 1, ids(), softcap=5.0, inplace_backward=True, **given).backward()
    rows, start = min(size, VOCAB - rank * size), rank * size
    close(mine.grad.transpose(0, 1)[..., :rows], whole.grad[..., start : start + rows])
    assert not mine.grad[..., rows:].any()


def dtensors(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))

    def placed(name, x, hidden):
        at = hidden if name.endswith("hidden") else Shard(-1) if name.endswith(("logits", "target")) else Shard(0)
        return distribute_tensor(x, mesh, [at]).requires_grad_(name != "target")

    for (op, given, how), hidden in itertools.product(some(ranks), (Replicate(), Shard(1 if ranks == 2 else 0))):
        if op in (jsd, linear_jsd):
            continue
        sharded = [n for n, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
        leaves = [n for n in sharded if n != "target"]
        whole = {n: leaf(x) if n in leaves else x for n, x in given.items()}
        made = {n: placed(n, x, hidden) if n in sharded else x for n, x in given.items()}
        expected, got = flat(op(**whole, **how))[0], flat(op(**made, **how))[0]
        close(got, expected)
        expected.sum().backward(), got.sum().backward()
        for name in leaves:
            assert made[name].grad.placements == made[name].placements
            close(made[name].grad.full_tensor(), whole[name].grad, f"{op} {name} {hidden}")

    tensors_ = tensors()
    hidden, weight, bias = tensors_.values()
    whole = [leaf(x) for x in (hidden, weight, bias)]
    linear_cross_entropy(whole[0], whole[1], ids(), whole[2]).backward()
    h, w, b = (placed(n, x, Replicate()) for n, x in tensors_.items())
    linear_cross_entropy(h, w, ids(), b, reduce_hidden_grad=False).backward()
    assert h.grad.placements == (Partial(),)
    close(h.grad.full_tensor(), whole[0].grad)
    # A plain hidden is this rank's only where the caller says what the group is.
    with pytest.raises(TypeError, match=r"weight is a DTensor; pass .*vocab_group"):
        linear_cross_entropy(hidden, w, ids(), b)
    plain = leaf(hidden)
    linear_cross_entropy(plain, w, ids(), b, vocab_group=mesh.get_group()).backward()
    close(plain.grad, whole[0].grad)
    # Groups of the same ranks may have other names.
    first, second = (DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("tp",)) for _ in range(2))
    h, w2, b2 = (distribute_tensor(x, on, [at]).requires_grad_() for x, on, at in
                 ((hidden, first, Replicate()), (weight, second, Shard(0)), (bias, first, Shard(0))))  # fmt: skip
    linear_cross_entropy(h, w2, ids(), b2, vocab_group=dist.group.WORLD).backward()
    for x, expected in zip((h, w2, b2), whole, strict=True):
        close(x.grad.full_tensor(), expected.grad, "meshes")
    alone = [dist.new_group([r]) for r in range(ranks)][rank]
    with pytest.raises(
        ValueError, match=rf"hidden is a DTensor on a process group of ranks .*0, 1.* has ranks \[{rank}\]"
    ):
        linear_cross_entropy(h, w2, ids(), b2, vocab_group=alone)
    placements = {"weight": (Replicate(), Shard(1)), "hidden": (Shard(2),)}
    for name, at in ((n, at) for n, several in placements.items() for at in several):
        wrong = {name: distribute_tensor(tensors_[name], mesh, [at])}
        with pytest.raises(ValueError, match=rf"{name} is a DTensor with placement .*must be"):
            linear_cross_entropy(**{"hidden": h, "weight": w, "target": ids(), "bias": b} | wrong)
    z = distribute_tensor(random(*SHAPE, VOCAB), mesh, [Shard(-1)]).requires_grad_()
    with pytest.raises(ValueError, match="would overwrite the memory under a DTensor"):
        cross_entropy(z * 1, ids(), inplace_backward=True)


def digits(rank, ranks):
    """A probability near 1 keeps its digits, and so do small ones of another shard."""
    sizes = LAYOUTS[ranks][0]
    own, given = cut(sizes, rank), taken({}, sizes, rank)
    logits, certain = 0.1 * random(4, VOCAB, dtype=torch.float64), torch.tensor([0, 30, 60, 5])
    logits[torch.arange(4), certain] = torch.tensor([18.0, 19.0, 20.0, 40.0], dtype=torch.float64)
    one = TopK(certain[:, None], torch.ones(4, 1), "probs", "truncated")
    for target in (certain, one, one_hot(certain, VOCAB).float()):
        whole, mine = leaf(logits), leaf(logits[:, own].float())
        expected = cross_entropy(whole, target, reduction="none")
        loss = cross_entropy(mine, part("target", target, own), reduction="none", **given)
        assert ((loss - expected).abs() <= 1e-6 * expected).all()
        loss.sum().backward(), expected.sum().backward()
        error, right = mine.grad - whole.grad[:, own], whole.grad[:, own]
        assert (error.abs() <= 1e-5 * right.abs()).all(), (error / right).abs().max()
    asked = {"entropy": True, "log_sum_sq_probs": True}
    out = linear_log_probs(logits.float(), torch.eye(VOCAB)[own], certain, **asked, **given)
    right = linear_log_probs(logits, torch.eye(VOCAB, dtype=torch.float64), certain, **asked)
    for a, b in ((out.entropy, right.entropy), (out.log_sum_sq_probs, right.log_sum_sq_probs)):
        assert ((a - b).abs() <= 1e-5 * b.abs()).all(), (a, b)
    # Of large logits too, whose log-sum-exps are rounded by more than what their probabilities differ by.
    large = 1e4 + factors(4, VOCAB, seed=3) * 8
    asked |= {"lse": True, "mean_logits": True}
    out, right = log_probs(large[:, own], certain, **asked, **given), log_probs(large.double(), certain, **asked)
    for name in ("log_prob", *asked):
        a, b = getattr(out, name).double(), getattr(right, name)
        assert ((a - b).abs() <= 2e-6 * b.abs()).all(), (name, a, b)
    for beta in (0.0, 0.4, 1.0):  # of equal models
        mine = {name: part(name, x, own) for name, x in models("head").items()}
        same, h = {name.replace("student", "teacher"): x for name, x in mine.items()}, leaf(mine["student_hidden"])
        loss = linear_jsd(**mine | same | {"student_hidden": h}, beta=beta, **given)
        loss.backward()
        assert loss == 0
        assert not h.grad.any()


def infinities(rank, ranks):
    """Whole shards may be out of the vocabulary."""
    sizes = LAYOUTS[ranks][0]
    own, given, head = cut(sizes, rank), taken({}, sizes, rank), tensors()
    # All of the last shards, and some of the first, where labels have no probability.
    here = sizes[0] - 3
    head["bias"][here:] = -torch.inf
    few, target = topk(), (ids() % here).masked_fill(ids() < 0, -100)
    target[1] = -100
    every = dense().masked_fill(head["bias"] == -torch.inf, 0)
    for labels in (target, few._replace(indices=few.indices % here), every):
        at = head | {"target": labels}
        if labels is target:
            at["hidden"] = head["hidden"].clone()
            at["hidden"][1, 1] = torch.nan
        options = {"z_loss": 0.1, "return_stats": True}
        compare(linear_cross_entropy, at, options, sizes, rank, constants=("weight", "bias"))
    z, bias = random(4, VOCAB), head["bias"]
    close(jsd(z[:, own] + bias[own], z[:, own], beta=1.0, **given), jsd(z + bias, z, beta=1.0))
    # Of ids whose shard is all out, as of every entry.
    last = torch.tensor([VOCAB - 1])
    sure = TopK(last[:, None], torch.ones(1, 1), "probs", "truncated")
    for labels in (last, sure, torch.full((1, VOCAB), 1 / VOCAB)):
        mine = part("target", labels, own)
        assert cross_entropy(bias[None, own] + 0.0, mine, reduction="none", **given) == torch.inf
    z, both = (
        torch.zeros(1, VOCAB).index_fill_(1, torch.arange(here, VOCAB), -torch.inf),
        torch.tensor([[0, VOCAB - 1]]),
    )
    for rest, kind in (("tail", "log_probs"), ("truncated", "log_probs"), ("renormalised", "logits")):
        teacher = TopK(both, torch.tensor([[-1.0, -2.0]]), kind, rest)
        compare(jsd, {"student_logits": z}, {"teacher_topk": teacher, "beta": 0.3}, sizes, rank)


OF_NUMBERS = (every_option, every_divergence, default_layouts, tokens_that_are_sharded, digits, infinities)
OTHERS = (padding_registered_and_one_exchange, checkpointed_and_other_dtypes, in_place, dtensors)


def test_two_ranks(tmp_path):
    spawn(tmp_path, 2, {check.__name__: check for check in (*OF_NUMBERS, *OTHERS)})


@pytest.mark.slow
def test_every_layout_of_two_ranks(tmp_path):
    spawn(tmp_path, 2, {"every option": every_option_in_every_layout})


@pytest.mark.slow
@pytest.mark.parametrize("checks", [(*OF_NUMBERS, every_option_in_every_layout), OTHERS], ids=["numbers", "others"])
def test_three_ranks(checks, tmp_path):
    spawn(tmp_path, 3, {check.__name__: check for check in checks})


def compiled(rank, ranks):
    for op, given, how in some(ranks):
        if not isinstance(op, torch.nn.Module):
            torch._dynamo.reset()
            way = lambda op: torch.compile(lambda **kw: op(**kw), fullgraph=True, backend="aot_eager")  # noqa: E731
            compare(op, given, how, LAYOUTS[ranks][1], rank, times=1, way=way, exact=exact_of(op))


@pytest.mark.slow
def test_compiled(tmp_path):
    spawn(tmp_path, 2, {"compiled": compiled}, timeout=300)


# --------------------------------------------------------------------------------------------------- in training code


def fsdp2_and_tensor_parallel(rank, ranks):
    """Two steps of a head whose weight is sharded over two ranks by rows, and each part over two others by FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    alone, head = LMHead(16, VOCAB, bias=False, z_loss=1e-3), LMHead(16, VOCAB, bias=False, z_loss=1e-3)
    hidden, labels = torch.randn(2, 3, 8, 16), torch.randint(VOCAB, (2, 3, 8))
    head.weight = torch.nn.Parameter(distribute_tensor(alone.weight.detach(), mesh["tp"], [Shard(0)]))
    fully_shard(head, mesh=mesh["dp"])
    mine = mesh.get_local_rank("dp")
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1) for x in (alone, head)]
    for way in ("plain", "DTensor"):
        expected = leaf(hidden)
        sum(alone(expected[i], labels[i]) for i in range(2)).div(2).backward()
        h = leaf(hidden[mine])
        if way == "plain":
            loss = head(h, labels[mine], vocab_group=mesh.get_group("tp"))
        else:
            loss = head(DTensor.from_local(h, mesh["tp"], [Replicate()]), labels[mine])
        loss.backward()
        close(h.grad, 2 * expected.grad[mine])
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
        close(head.weight.full_tensor(), alone.weight, way)


@pytest.mark.slow
def test_fsdp2_and_tensor_parallel(tmp_path):
    spawn(tmp_path, 4, {"FSDP2 x TP": fsdp2_and_tensor_parallel})
