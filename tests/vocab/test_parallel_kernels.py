"""The kernels of losses over a vocabulary that is sharded over two processes, under Triton's interpreter."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from parts import (
    EVERYTHING,
    LOSS,
    compare,
    dense,
    divergence,
    exchanges,
    factors,
    ids,
    jsd_of,
    models,
    padded,
    random,
    registered,
    several_ids,
    teachers,
    tensors,
    topk,
    within,
)
from torch.nn.functional import pad

from onchip.ops.linear_jsd import triton_memory
from onchip.ops.linear_jsd.triton_memory import JsdPlan
from onchip.torch import TopK, cross_entropy, jsd, linear_cross_entropy, linear_jsd, linear_log_probs, log_probs
from sharded import leaf, spawn

# A tile of the vocabulary is 256 entries.
TILES, ROWS = 700, (4, 6)
OF_KERNELS = {
    "plain": {"return_stats": True},
    "all": LOSS["all"] | {"return_stats": False},
    "none": {"reduction": "none", "z_loss": 1e-2},
    "smoothing": {"label_smoothing": 0.2},
    "classes": {"class_weight": factors(TILES), "label_smoothing": 0.3, "z_loss": 1e-2},
}
OF_LABELS = {"z_loss": 1e-2, "class_weight": factors(TILES), "return_stats": True, "softcap": 5.0}


def of_kernels(kind="head", **how):
    return tensors(kind=kind, **{"vocab": TILES, "shape": ROWS, "size": 24} | how)


def out_of_range(op, given, bad, rank, **how):
    """NaN for that token alone; and with check_inputs a refusal."""
    name, target = next((n, x) for n, x in given.items() if n in ("target", "ids"))
    own = {n: leaf(x) if n != name else x for n, x in padded(given | {name: bad}, 368, rank).items()}
    shards = {"vocab_group": dist.group.WORLD, "vocab_size": TILES, "backend": "triton"}
    loss = op(**own, **how, **shards)
    loss.sum().backward()
    rows = own["hidden"].grad if "hidden" in own else own["logits"].grad[..., : TILES - 368 * rank]
    assert loss.isnan().nonzero().tolist() == rows.isnan().all(-1).nonzero().tolist() == [[0, 0]]
    with pytest.raises(ValueError, match=rf"{name}(.indices)?\[0, 0.*\] is {TILES}"):
        op(**own, **how, **shards, check_inputs=True)
    assert target is not bad


def bad_ids(target):
    """With the first token's out of range."""
    if isinstance(target, TopK):
        return target._replace(indices=bad_ids(target.indices))
    bad = target.clone()
    bad[0, 0] = TILES
    return bad


def kernels_of_heads(rank, ranks, *, few=False):
    """Options, each in every layout or, if `few`, in one of them and mostly differentiated once; an empty shard; tokens
    that are sharded, rows that are padding, registered operators.
    """
    half, near = of_kernels(dtype=torch.float16, scale=0.25), within(2e-3)
    of = {"near": near, "exact": torch.float32, "backend": "triton"}
    target, of_ids = ids(TILES, ROWS), topk(vocab=TILES, shape=ROWS, k=3)
    of |= {"times": 1} if few else {}
    layouts = ([300, 400], "auto"), ([700, 0], "recompute")
    options = [how for name, how in OF_KERNELS.items() if not few or name in ("all", "none", "classes")]
    for how, (sizes, strategy) in (
        zip(options, itertools.cycle(layouts), strict=False) if few else itertools.product(options, layouts)
    ):
        compare(linear_cross_entropy, half | {"target": target}, how, sizes, rank, strategy=strategy, **of)
    layouts = (
        ([300, 400], {"way": registered, "times": 2}),
        ([700, 0], {"dim": 1, "strategy": "recompute"}),
        ([300, 400], {"size": 368, "way": registered, "dim": 1}),
    )
    labels = (target, {}), (of_ids, OF_LABELS), (of_ids, OF_LABELS | {"label_smoothing": 0.2})
    for (y, how), (sizes, more) in (
        zip(labels, reversed(layouts), strict=True) if few else itertools.product(labels, layouts)
    ):
        compare(linear_cross_entropy, half | {"target": y}, how, sizes, rank, **(of | more))
    for sizes, asked in (([300, 400], several_ids(TILES, ROWS)), ([600, 100], target)):
        compare(linear_log_probs, half | {"ids": asked}, EVERYTHING, sizes, rank, **of)
    given = {name: half[name] for name in ("hidden", "weight")}
    for y in (target, of_ids):
        out_of_range(linear_cross_entropy, given | {"target": y}, bad_ids(y), rank, reduction="none")


def kernels_of_logits(rank, ranks, *, few=False):
    """The same, mostly differentiated once if `few`; and in place."""
    given, near = of_kernels("logits", scale=4.0), within(2e-5)
    target, several, of_ids = ids(TILES, ROWS), several_ids(TILES, ROWS), topk(vocab=TILES, shape=ROWS, k=3)
    once = {"times": 1 if few else 2, "near": near, "backend": "triton"}
    each = {"token_weight": factors(*ROWS), "temperature": factors(*ROWS), "return_stats": True}
    cases = OF_KERNELS | {"none": OF_KERNELS["none"] | each | {"label_smoothing": 0.2}}
    everything = EVERYTHING | {"softcap": 5.0, "temperature": factors(*ROWS)}
    for name, how in cases.items():
        if few and name in ("plain", "smoothing"):
            continue
        sizes = [700, 0] if name == "plain" else [300, 400]
        compare(cross_entropy, given | {"target": target}, how, sizes, rank, **once)
    asked = (everything, [300, 400], several), ({}, [0, 700], target), (everything, [1, 699], target)
    for how, sizes, of in asked[:2] if few else asked:
        compare(log_probs, given | {"ids": of}, how, sizes, rank, **once)
    all_of = OF_LABELS | each | {"reduction": "none", "label_smoothing": 0.2}
    soft = (
        ({}, [300, 400], topk("log_probs", TILES, ROWS, 3)),
        (cases["none"], [700, 0], of_ids),
        (all_of, [300, 400], of_ids),
    )
    for how, sizes, labels in soft[1:] if few else soft:
        with exchanges() as seen:
            compare(cross_entropy, given | {"target": labels}, how, sizes, rank, **once)
        assert len(seen) == 1
    compare(cross_entropy, given | {"target": of_ids}, all_of, [1, 699], rank, way=registered, **(once | {"times": 2}))
    for op, labels in (
        (cross_entropy, {"target": target}),
        (cross_entropy, {"target": of_ids}),
        (log_probs, {"ids": several}),
    )[: 1 if few else 3]:
        compare(op, given | labels, {}, [300, 400], rank, size=368, **once)
    own, whole = leaf(padded(given, 368, rank)["logits"]), leaf(given["logits"])
    shards = {"vocab_group": dist.group.WORLD, "vocab_size": TILES, "backend": "triton"}
    cross_entropy(own * 1, target, softcap=3.0, inplace_backward=True, **shards).backward()
    cross_entropy(whole, target, softcap=3.0).backward()
    near(own.grad, pad(whole.grad, (0, 36)).chunk(2, -1)[rank], "in place")
    for op, labels, how in (
        (cross_entropy, {"target": target}, {"reduction": "none"}),
        (cross_entropy, {"target": of_ids}, {"reduction": "none"}),
        (log_probs, {"ids": target}, {}),
    ):
        out_of_range(op, given | labels, bad_ids(next(iter(labels.values()))), rank, **how)


def kernels_of_every_entry(rank, ranks, *, few=False):
    """Labels for every entry, by each option or a `few`, with an empty shard and with padding."""
    shape = (1, 3) if few else ROWS
    labels, all_of = dense(TILES, shape), OF_LABELS | {"label_smoothing": 0.3}
    each = {"token_weight": factors(*shape), "temperature": factors(*shape), "reduction": "none"}
    cases = {name: how for name, how in OF_KERNELS.items() if name != "plain"}
    cases |= {"everything": all_of | each, "plain": {}, "all smoothed": {"label_smoothing": 1.0, "return_stats": True}}
    logits = of_kernels("logits", shape=shape, scale=4.0)
    half = of_kernels(shape=shape, dtype=torch.float16, scale=0.25)
    of = {"backend": "triton", "exact": torch.float64, "near": within(2e-5), "times": 1 if few else 2}
    layouts = itertools.cycle(([300, 400], [700, 0], [1, 699]))
    for name in ("everything", "plain") if few else cases:
        with exchanges() as seen:
            compare(cross_entropy, logits | {"target": labels}, cases[name], next(layouts), rank, **of)
        assert len(seen) == 1
    half_of = of | {"exact": torch.float32, "near": within(2e-3)}
    for name in ("everything",) if few else ("plain", "all smoothed", "everything"):
        compare(linear_cross_entropy, half | {"target": labels}, cases[name], next(layouts), rank, **half_of)
    if few:
        return
    padded_to = {"size": 368, "way": registered}
    compare(cross_entropy, logits | {"target": labels}, all_of, [300, 400], rank, **padded_to, **of)
    compare(linear_cross_entropy, half | {"target": labels}, all_of, [300, 400], rank, dim=1, **padded_to, **half_of)
    huge = {"logits": 1e4 + 3 * random(*shape, TILES)}
    # float32 holds an lse of 1e4 to 5e-4, and a gradient is as far off.
    compare(cross_entropy, huge | {"target": labels}, {}, [300, 400], rank, **of | {"near": within(1e-3)})


few_or_all = pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["few", "all"])


@few_or_all
def test_kernels_of_every_entry(few, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spawn(tmp_path, 2, {"every entry": partial(kernels_of_every_entry, few=few)}, timeout=120)


@few_or_all
def test_kernels(few, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    checks = {"heads": partial(kernels_of_heads, few=few), "logits": partial(kernels_of_logits, few=few)}
    spawn(tmp_path, 2, checks, timeout=120)


def kernels_of_models(rank, ranks, kinds, shape, dtype, bound, *, few=False):
    """Every option with a layout, or `few`; equal models, a label out of range, and padding."""
    vocab, everything = 400, divergence(400, shape)
    everything |= {"sharded tokens": everything["middle"] | {"hard_weight": 0.4}}
    given, layouts = models(*kinds, vocab=vocab, shape=shape, dtype=dtype), ([100, 300], [1, 399], [400, 0], [256, 144])
    for (name, how), sizes in zip(everything.items(), itertools.cycle(layouts), strict=False):
        if few and name not in ("forward", "sharded tokens"):
            continue
        of_heads, chunks = name == "sharded tokens" and kinds[0] == "head", lambda *_: JsdPlan(4, 0, 256, 256)
        teacher_grad = name != "hard" and kinds != ("head", "logits")
        constants = () if teacher_grad else [x for x in given if x.startswith("teacher")]
        more = {"constants": constants, "exact": torch.float32 if dtype == torch.float16 else torch.float64}
        with pytest.MonkeyPatch.context() as patch:
            if of_heads:
                patch.setattr(triton_memory, "plan", chunks)
            how, more["dim"] = how | {"teacher_grad": teacher_grad}, 1 if of_heads else None
            compare(jsd_of(given), given, how, sizes, rank, near=within(bound), backend="triton", **more)
    shards = {"vocab_group": dist.group.WORLD, "vocab_size": vocab, "backend": "triton"}
    own = padded(given, 218, rank)
    student = {name: x for name, x in own.items() if name.startswith("student")}
    same = {name.replace("student", "teacher"): x for name, x in student.items()}
    for beta in (0.5,) if few else (0.0, 0.5, 1.0):
        leaves = {name: leaf(x) for name, x in student.items()}
        loss = jsd_of(own)(**leaves, **same, beta=beta, **shards)
        loss.backward()
        assert loss == 0
        assert not any(x.grad.any() for x in leaves.values())
    bad = ids(vocab, shape)
    bad[0, 0] = vocab
    leaves = {name: leaf(x) if name.startswith("student") else x for name, x in own.items()}
    loss = jsd_of(own)(**leaves, target=bad, hard_weight=0.5, reduction="none", **shards)
    loss.sum().backward()
    rows = next(iter(leaves.values())).grad
    rows = rows if kinds[0] == "head" else rows[..., : vocab - 218 * rank]
    assert loss.isnan().nonzero().tolist() == rows.isnan().all(-1).nonzero().tolist() == [[0, 0]]
    if kinds[0] == "head":
        with pytest.raises(ValueError, match="on backend 'triton', which needs"):
            linear_jsd(**own, scratch_bytes=1, **shards)


def kernels_of_topk(rank, ranks, *, few=False):
    """Of a top-k teacher each option of logits, or one for each teacher; of a head, whose tokens are sharded, with all
    of them.
    """
    vocab, shape, layouts = 400, (2, 1 if few else 4), itertools.cycle(([100, 300], [400, 0], [1, 399]))
    logits, head = models("logits", vocab=vocab, shape=shape), models("head", vocab=vocab, shape=shape)
    single, half = (
        {n: x.to(dtype) for n, x in g.items()} for g, dtype in ((logits, torch.float32), (head, torch.half))
    )
    options, known = divergence(vocab, shape).values(), list(teachers(vocab, shape))
    for how, teacher in zip(options, known, strict=True) if few else itertools.product(options, known):
        if how.get("beta") != 1.0 or not bool(teacher.values.isinf().any()):  # it would be infinite
            how, of = how | {"teacher_topk": teacher}, {"backend": "triton", "near": within(1e-5)}
            compare(jsd, single, how, next(layouts), rank, exact=torch.float64, times=1 if few else 2, **of)
    if few:
        return
    hard = {"beta": 0.4, "hard_weight": 0.3, "temperature": 1.5, "target": ids(vocab, shape)}
    of = {"backend": "triton", "near": within(2e-3), "exact": torch.float32}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_memory, "plan", lambda *_: JsdPlan(4, 0, 256, 256))
        for teacher, dim in zip(known, (1, None, 1), strict=False):
            compare(linear_jsd, half, hard | {"teacher_topk": teacher}, next(layouts), rank, dim=dim, **of)
        compare(linear_jsd, half, hard | {"teacher_topk": teacher}, [200, 200], rank, size=218, way=registered, **of)


@few_or_all
def test_kernels_of_a_topk(few, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spawn(tmp_path, 2, {"topk": partial(kernels_of_topk, few=few)}, timeout=100)


HEADS = {"kinds": ("head", "head"), "shape": (2, 2), "dtype": torch.float16, "bound": 2e-3}
LOGITS = {"kinds": ("logits", "logits"), "shape": (2, 4), "dtype": torch.float32, "bound": 1e-5}


@pytest.mark.parametrize(
    ("given", "few"),
    [
        (LOGITS, True),
        pytest.param(LOGITS, False, marks=pytest.mark.slow),
        pytest.param(HEADS, True, marks=pytest.mark.slow),
        pytest.param(HEADS, False, marks=pytest.mark.slow),
        pytest.param(HEADS | {"kinds": ("head", "logits")}, False, marks=pytest.mark.slow),
    ],
    ids=["few of logits", "logits", "few of heads", "heads", "a head"],
)
def test_kernels_of_models(given, few, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spawn(tmp_path, 2, {"kernels": partial(kernels_of_models, **given, few=few)}, timeout=200)
