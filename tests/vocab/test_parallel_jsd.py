"""linear_jsd and jsd over a vocabulary that is sharded over two and three processes, against the same in one."""

import itertools
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from onchip.ops.linear_jsd import triton_memory
from onchip.ops.linear_jsd.triton_memory import JsdPlan
from onchip.torch import TopK, jsd, linear_jsd
from onchip.vocab import parallel
from sharded import close, cut, leaf, same_bits, spawn

VOCAB, SHAPE = 61, (3, 8)
SIZES = {"student": 16, "teacher": 12}  # H
# By the number of ranks: shards as torch.chunk has them, others, and an empty one.
LAYOUTS = {2: ([31, 30], [50, 11], [0, 61]), 3: ([21, 21, 19], [9, 0, 52], [30, 30, 1])}
PAIRS = (("head", "head"), ("logits", "logits"), ("head", "logits"))


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def labels(vocab=VOCAB, shape=SHAPE):
    """Of which some are ignored."""
    g = torch.Generator().manual_seed(1)
    return torch.randint(vocab, shape, generator=g).masked_fill(torch.rand(shape, generator=g) < 0.2, -100)


def options(vocab=VOCAB, shape=SHAPE):
    weights, target = random(*shape, seed=2, dtype=torch.float32).abs() + 0.5, {"target": labels(vocab, shape)}
    return {
        "middle": target | {"beta": 0.3, "temperature": 0.7, "temperature_squared": True},
        "forward": target | {"beta": 0.0, "hard_weight": 0.25, "temperature": 2.0},
        "reverse": target | {"beta": 1.0, "reduction": "none", "token_weight": weights},
        "hard": target | {"beta": 0.5, "hard_weight": 0.5, "normalizer": 5.0, "check_inputs": True},
        "no target": {"check_inputs": True},
    }


def models(*kinds, vocab=VOCAB, shape=SHAPE, dtype=torch.float64, scale=0.5):
    """By name, what a call is given of the student and the teacher, heads or logits."""
    made = {}
    for seed, (who, kind) in enumerate(zip(SIZES, kinds, strict=False)):
        shapes = {"logits": (*shape, vocab)}
        if kind == "head":
            shapes = {"hidden": (*shape, SIZES[who]), "weight": (vocab, SIZES[who]), "bias": (vocab,)}
        made |= {f"{who}_{x}": scale * random(*s, seed=9 * seed + len(s)) for x, s in shapes.items()}
    return {name: x.to(dtype) for name, x in made.items()}


def teachers():
    """Of each kind; of what one knows, some entries have no probability."""
    values, ids = (3 * random(*SHAPE, VOCAB, seed=6)).log_softmax(-1).float().topk(4)
    for rest in ("tail", "truncated", "renormalised"):
        yield TopK(ids, values, "log_probs", rest)
    yield TopK(ids, 2 * values, "logits", "renormalised")
    yield TopK(ids, values.index_fill(-1, torch.tensor(3), -torch.inf), "log_probs", "tail")


def part(name, x, own):
    """Of a tensor that is sharded."""
    return x if name.endswith("hidden") else x[..., own] if name.endswith("logits") else x[own]


def padded(given, size, ranks, rank):
    """This rank's parts, of `size` entries, where the last ones are padding."""
    made = {}
    for name, x in given.items():
        columns = (0, 0) if name.endswith("weight") else ()
        beyond = (*columns, 0, size * ranks - (x.shape[-1] if name.endswith("logits") else len(x)))
        wide = x if name.endswith("hidden") else pad(x, beyond, value=torch.nan)
        made[name] = part(name, wide, slice(rank * size, (rank + 1) * size))
    return made


def taken(given, sizes, rank):
    """What a rank passes beside its tensors."""
    return given | {"vocab_group": dist.group.WORLD, "vocab_size": sum(sizes), "vocab_start": sum(sizes[:rank])}


def op_of(given):
    return jsd if "student_logits" in given else linear_jsd


def compare(given, how, sizes, rank, *, exact=None, bound=0.0, dim=None, constants=(), **more):
    """Loss, and gradients after each of two backwards, of this rank's part of what is `given` beside the whole, in the
    dtype `exact`; `more` is of the sharded call, whose tokens are sharded in dimension `dim`."""
    own, op = cut(sizes, rank), op_of(given)
    whole = {name: leaf(x.to(exact or x.dtype)) for name, x in given.items()}
    mine = {name: leaf(part(name, x, own)) for name, x in given.items()}
    if dim is not None:
        mine |= {n: leaf(x.chunk(len(sizes), dim)[rank]) for n, x in given.items() if n.endswith("hidden")}
        more["hidden_layout"] = "sequence"
    for name in constants:
        whole[name], mine[name] = whole[name].detach(), mine[name].detach()
    expected, got = op(**whole, **how), op(**mine, **taken(how, sizes, rank), **more)
    what = f"{sizes} {[*given]} {how}"

    def near(a, b, name):
        if bound:
            error = (a - b).norm()
            assert error <= bound * b.norm(), (name, float(error), float(b.norm()), what)
        else:
            close(a, b, f"{name} {what}")

    same_bits(got)
    near(got, expected, "loss")
    for seed in range(2):
        upstream = random(*got.shape, seed=seed).abs().to(got.dtype) + 0.5
        expected.backward(upstream, retain_graph=True), got.backward(upstream, retain_graph=seed == 0)
    for name, x in mine.items():
        assert (x.grad is None) == (whole[name].grad is None)
        if x.grad is not None:
            right = part(name, whole[name].grad, own)
            if dim is not None and name.endswith("hidden"):
                right = right.chunk(len(sizes), dim)[rank]
            near(x.grad, right, name)


def two_models(rank, ranks):
    layouts = itertools.cycle(LAYOUTS[ranks])
    for kinds, how in itertools.product(PAIRS, options().values()):
        compare(models(*kinds), how | {"teacher_grad": how.get("beta") != 0.5}, next(layouts), rank)


def topk_teachers(rank, ranks):
    layouts = itertools.cycle(LAYOUTS[ranks])
    for how, teacher, kind in itertools.product(options().values(), teachers(), ("head", "logits")):
        if how.get("beta") != 1.0 or not bool(teacher.values.isinf().any()):  # it would be infinite
            compare(models(kind), how | {"teacher_topk": teacher}, next(layouts), rank)


class Watching(TorchDispatchMode):
    """Makes losses run as registered operators."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def other_calls(rank, ranks):
    """Columns that are padding, tokens that are sharded, registered operators, one or two exchanges; equal models."""
    dim, size, seen, gather = 1 if ranks == 2 else 0, -(-VOCAB // ranks) + 2, [], parallel.all_gather
    rows = max(0, min(size, VOCAB - rank * size))
    sizes = [max(0, min(size, VOCAB - r * size)) for r in range(ranks)]

    def counted(*args, **kwargs):
        seen.append(1)
        return gather(*args, **kwargs)

    hard = {"target": labels(), "hard_weight": 0.3}
    given = {"vocab_group": dist.group.WORLD, "vocab_size": VOCAB}
    cases = [(kinds, {"beta": beta}) for kinds in PAIRS for beta in (0.0, 0.4)]
    cases += [((kind,), {"teacher_topk": x}) for kind in ("head", "logits") for x in teachers()]
    for kinds, how in cases:
        tensors = models(*kinds, dtype=torch.float32)
        own = {name: leaf(x) for name, x in padded(tensors, size, ranks, rank).items()}
        whole = {name: leaf(x) for name, x in tensors.items()}
        expected = op_of(whole)(**whole, **how, **hard)
        with mock.patch.object(parallel, "all_gather", counted), Watching():
            got = op_of(own)(**own, **how, **hard, **given)
        close(got, expected), same_bits(got)
        expected.backward(), got.backward()
        for name, x in own.items():
            if x.grad is not None and not name.endswith("hidden"):
                over = (..., slice(rows, None)) if name.endswith("logits") else slice(rows, None)
                assert not x.grad[over].any()
                cols = (..., slice(rows)) if name.endswith("logits") else slice(rows)
                close(x.grad[cols], part(name, whole[name].grad, cut(sizes, rank)))
    assert len(seen) == 3 * (1 + 2) + 2 * 5
    for kinds, how in (("head", "head"), {"beta": 0.4}), (("head",), {"teacher_topk": next(teachers())}):
        cropped = {name: x[:, :6] if name.endswith("hidden") else x for name, x in models(*kinds).items()}
        if "teacher_topk" in how:
            topk = how["teacher_topk"]
            how = {"teacher_topk": topk._replace(indices=topk.indices[:, :6], values=topk.values[:, :6])}
        compare(cropped, how | {"target": labels()[:, :6]}, LAYOUTS[ranks][1], rank, dim=dim)
    own = {name: part(name, x, cut(sizes, rank)) for name, x in models("head").items()}
    same = {name.replace("student", "teacher"): x for name, x in own.items()}
    for beta in (0.0, 0.4, 1.0):
        h = leaf(own["student_hidden"])
        loss = linear_jsd(**own | same | {"student_hidden": h}, **taken({"beta": beta}, sizes, rank))
        loss.backward()
        assert loss == 0
        assert not h.grad.any()
    # Ids whose shard is all out.
    z, ids = torch.zeros(1, VOCAB).index_fill_(1, torch.arange(size, VOCAB), -torch.inf), torch.tensor([[0, VOCAB - 1]])
    for rest, kind in (("tail", "log_probs"), ("truncated", "log_probs"), ("renormalised", "logits")):
        topk = TopK(ids, torch.tensor([[-1.0, -2.0]]), kind, rest)
        compare({"student_logits": z}, {"teacher_topk": topk, "beta": 0.3}, sizes, rank)


def what_is_refused(rank, ranks):
    sizes, teacher = LAYOUTS[ranks][1], next(teachers())
    own = {name: part(name, x, cut(sizes, rank)).float() for name, x in models("head").items()}
    for given, wrong, match in (
        ({}, {"teacher_topk": teacher._replace(indices=teacher.indices + VOCAB)},
         r"teacher_topk.indices\[0, 0, 0\] is .*, which is not in \[0, 61\)"),
        ({}, {"teacher_topk": teacher._replace(indices=teacher.indices // VOCAB)}, "must be distinct within a token"),
        ({}, {"teacher_grad": True}, "teacher_grad=True needs a teacher with all logits"),
        ({}, {"vocab": 60}, "vocab=60 with a sharded vocabulary is called vocab_size"),
        ({}, {"vocab_start": 0}, "don't make up"),
        ({}, {"scratch_bytes": 8}, "scratch_bytes=8 is too small"),
        ({"check_inputs": True}, {"teacher_topk": teacher._replace(values=teacher.values * 1.5)} if rank == 0 else {},
         "differ in values of targets"),
        ({"check_inputs": True}, {"teacher_topk": teacher._replace(rest="truncated")} if rank == 0 else {},
         "differ in sizes or dtypes"),
        ({"teacher_topk": None, "teacher_hidden": own["student_hidden"]},
         {"teacher_weight": torch.ones(2 * VOCAB, 16)},
         "teacher_weight has 122 of the vocabulary's entries but student_weight has"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="linear_jsd: .*" + match):
            linear_jsd(**own | taken({"teacher_topk": teacher}, sizes, rank) | given | wrong)


CHECKS = {check.__name__: check for check in (two_models, topk_teachers, other_calls, what_is_refused)}


def test_two_ranks(tmp_path):
    spawn(tmp_path, 2, CHECKS)


@pytest.mark.slow
def test_three_ranks(tmp_path):
    spawn(tmp_path, 3, CHECKS)


# --------------------------------------------------------------------------------------------------------- on kernels


def kernels(rank, ranks, kinds, shape, dtype, bound, *, few=False):
    """Every option with a layout, or `few`; equal models, a label out of range, and padding."""
    vocab, everything = 400, options(400, shape)
    everything |= {"sharded tokens": everything["middle"] | {"hard_weight": 0.4}}
    given, layouts = models(*kinds, vocab=vocab, shape=shape, dtype=dtype), ([100, 300], [1, 399], [400, 0], [256, 144])
    for (name, how), sizes in zip(everything.items(), itertools.cycle(layouts), strict=False):
        if few and name not in ("forward", "sharded tokens"):
            continue
        of_heads, chunks = name == "sharded tokens" and kinds[0] == "head", lambda *_: JsdPlan(4, 0, 256, 256)
        teacher_grad = name != "hard" and kinds != ("head", "logits")
        constants = () if teacher_grad else [x for x in given if x.startswith("teacher")]
        how = how | {"teacher_grad": teacher_grad}
        with mock.patch.object(triton_memory, "plan", chunks if of_heads else triton_memory.plan):
            more = {"constants": constants, "exact": torch.float32 if dtype == torch.float16 else torch.float64}
            compare(given, how, sizes, rank, bound=bound, dim=1 if of_heads else None, backend="triton", **more)
    shards = {"vocab_group": dist.group.WORLD, "vocab_size": vocab, "backend": "triton"}
    own = padded(given, 218, ranks, rank)
    student = {name: x for name, x in own.items() if name.startswith("student")}
    same = {name.replace("student", "teacher"): x for name, x in student.items()}
    for beta in (0.5,) if few else (0.0, 0.5, 1.0):
        leaves = {name: leaf(x) for name, x in student.items()}
        loss = op_of(own)(**leaves, **same, beta=beta, **shards)
        loss.backward()
        assert loss == 0
        assert not any(x.grad.any() for x in leaves.values())
    bad = labels(vocab, shape)
    bad[0, 0] = vocab
    leaves = {name: leaf(x) if name.startswith("student") else x for name, x in own.items()}
    loss = op_of(own)(**leaves, target=bad, hard_weight=0.5, reduction="none", **shards)
    loss.sum().backward()
    rows = next(iter(leaves.values())).grad
    rows = rows if kinds[0] == "head" else rows[..., : vocab - 218 * rank]
    assert loss.isnan().nonzero().tolist() == rows.isnan().all(-1).nonzero().tolist() == [[0, 0]]
    if kinds[0] == "head":
        with pytest.raises(ValueError, match="on backend 'triton', which needs"):
            linear_jsd(**own, scratch_bytes=1, **shards)


def kernels_of_logits(rank, ranks):
    kernels(rank, ranks, ("logits", "logits"), (2, 4), torch.float32, 1e-5)


def kernels_of_heads(rank, ranks, *, few=False):
    kernels(rank, ranks, ("head", "head"), (2, 2), torch.float16, 2e-3, few=few)


def kernels_of_a_head(rank, ranks):
    kernels(rank, ranks, ("head", "logits"), (2, 2), torch.float16, 2e-3)


def test_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    checks = {"kernels of logits": kernels_of_logits, "kernels of heads": partial(kernels_of_heads, few=True)}
    spawn(tmp_path, 2, checks, timeout=120)


@pytest.mark.slow
def test_more_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spawn(tmp_path, 2, {check.__name__: check for check in (kernels_of_heads, kernels_of_a_head)}, timeout=200)
