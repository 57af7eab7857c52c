"""Wrong calls of losses whose vocabulary is sharded: all ranks raise, and none waits for another."""

import re
from datetime import timedelta
from functools import partial

import agreement
import pytest
import torch
import torch.distributed as dist
from parts import (
    LAYOUTS,
    SHAPE,
    VOCAB,
    Watching,
    dense,
    factors,
    ids,
    models,
    part,
    random,
    taken,
    teachers,
    tensors,
    topk,
)

from onchip.torch import cross_entropy, linear_cross_entropy, linear_jsd, log_probs, quantize_weight
from sharded import cut, spawn

BAD = ids().masked_fill(ids() == -100, VOCAB)
TEACHER = next(teachers())
# Of every loss.
SHARDS = (
    ({"vocab_start": 0}, ValueError, r"shards of the vocabulary are \[0, .*don't make up \[0, 61\)"),
    ({"vocab_group": None}, ValueError, "pass its vocab_group"),
    ({"scratch_bytes": 8}, ValueError, "scratch_bytes=8 is too small"),
)
OF_GROUPS = (
    ({"vocab_start": -1}, ValueError, "vocab_start must be 0 or more"),
    ({"vocab_start": 1.0}, TypeError, "vocab_start must be an int"),
    ({"vocab_size": None}, ValueError, "vocab_start needs vocab_size"),
    ({"vocab_size": 0}, ValueError, "vocab_size must be positive"),
    ({"vocab_group": "tp"}, TypeError, "vocab_group must be a torch.distributed.ProcessGroup; got str"),
    ({"hidden_layout": "shard"}, ValueError, "hidden_layout must be one of 'replicated', 'sequence'"),
    ({"hidden_layout": "sequence"}, ValueError, "hidden_layout='sequence' with . ranks needs"),
    ({"hidden_layout": "sequence", "reduce_hidden_grad": False}, ValueError, "pass reduce_hidden_grad=True"),
    ({"reduce_hidden_grad": 1}, TypeError, "reduce_hidden_grad must be True or False"),
    ({"bias": torch.zeros(VOCAB)}, ValueError, "bias has 61 of the vocabulary's entries but weight has"),
    ({"weight": [[1.0]]}, TypeError, "weight must be a torch.Tensor"),
    ({"strategy": "stash"}, ValueError, "strategy='stash' makes gradients before"),
    ({"target": BAD}, ValueError, r"target\[.*\] is 61, which is neither"),
    ({"class_weight": torch.ones(9)}, ValueError, r"class_weight has shape \[9\]; it must be \[V\], \[61\]"),
    ({"weight_grad_out": torch.zeros(3, 16)}, ValueError, "weight_grad_out has 3 of the vocabulary's entries"),
)
OUTSIDE = topk()._replace(indices=topk().indices + VOCAB)


def refuse(op, given, sizes, rank, rows, **how):
    own = {name: part(name, x, cut(sizes, rank)) for name, x in given.items()} | taken(how, sizes, rank)
    for wrong, kind, match in rows:
        with pytest.raises(kind, match=f"^{op.__name__}: .*{match}"):
            op(**own | wrong)


def wrong_calls(rank, ranks):
    sizes, head, logits = LAYOUTS[ranks][1], tensors(), {"logits": random(*SHAPE, VOCAB)}
    del head["bias"]
    refuse(linear_cross_entropy, head | {"target": ids()}, sizes, rank, (*SHARDS, *OF_GROUPS))
    there = LAYOUTS[ranks][0]
    refuse(cross_entropy, logits | {"target": ids()}, there, rank, SHARDS)
    no_dimension = {"logits": torch.ones([])}, ValueError, "logits has no dimension that could be sharded"
    refuse(cross_entropy, logits | {"target": ids()}, sizes, rank, [no_dimension])
    of_ids = ({"ids": BAD}, ValueError, r"ids\[.*\] is 61, which is neither")
    refuse(log_probs, logits | {"ids": ids()}, there, rank, (*SHARDS, of_ids))
    own = dist.new_group([0])
    if rank > 0:
        with pytest.raises(TypeError, match="this rank is no member"):
            linear_cross_entropy(**head, target=ids(), vocab_group=own)


def wrong_soft_labels(rank, ranks):
    sizes, head, logits = LAYOUTS[ranks][1], tensors(), {"logits": random(*SHAPE, VOCAB)}
    every, dim = {"target": dense()[..., cut(sizes, rank)]}, 1 if ranks == 2 else 0
    entries = ({"target": dense()}, ValueError, "target has 61 of the vocabulary's entries but weight has")
    rows = [
        entries,
        ({"target": OUTSIDE}, ValueError, r"target.indices\[.*\] is .* not in \[0, 61\)"),
        ({"strategy": "stash"}, ValueError, "soft labels are computed by strategy 'recompute'; got 'stash'"),
        ({"class_weight": torch.ones(9)}, ValueError, r"class_weight has shape \[9\]; it must be \[V\], \[61\]"),
        ({"scratch_bytes": 8} | every, ValueError, "scratch_bytes=8 is too small"),
        ({"vocab_start": 0} | every, ValueError, "don't make up"),
    ]
    if dim == 1:
        last = {"shift": True, "hidden_layout": "sequence", "hidden": head["hidden"].chunk(ranks, dim)[rank]}
        rows.append((last, ValueError, "may lie on another rank"))
    refuse(linear_cross_entropy, head | {"target": topk()}, sizes, rank, (*SHARDS, *rows))
    inplace = ({"inplace_backward": True}, ValueError, "inplace_backward=True takes targets that are ids")
    entries = ({"target": dense()}, ValueError, "target has 61 of the vocabulary's entries but logits has")
    refuse(cross_entropy, logits | {"target": topk()}, LAYOUTS[ranks][0], rank, (*SHARDS, entries, inplace))


def wrong_divergences(rank, ranks):
    sizes, head = LAYOUTS[ranks][1], models("head", dtype=torch.float32)
    outside, equal = (TEACHER._replace(indices=x) for x in (TEACHER.indices + VOCAB, TEACHER.indices // VOCAB))
    outside = {"teacher_topk": outside}, r"teacher_topk.indices\[0, 0, 0\] is .*, which is not in \[0, 61\)"
    hidden = {"teacher_topk": None, "teacher_hidden": head["student_hidden"], "teacher_weight": torch.ones(122, 16)}
    rows = (
        outside,
        ({"teacher_topk": equal}, "must be distinct within a token"),
        ({"teacher_grad": True}, "teacher_grad=True needs a teacher with all logits"),
        ({"vocab": 60}, "got vocab=60 with a sharded vocabulary; pass vocab_size"),
        (hidden, "teacher_weight has 122 of the vocabulary's entries but student_weight has"),
    )
    rows = [(wrong, ValueError, match) for wrong, match in rows]
    refuse(linear_jsd, head, sizes, rank, (*SHARDS, *rows), teacher_topk=TEACHER)


def ranks_that_differ(rank, ranks):
    """That is found out on the CPU, whatever check_inputs is, but of labels that are numbers."""
    sizes, last = LAYOUTS[ranks][1], rank == ranks - 1
    head, own = tensors(), cut(LAYOUTS[ranks][1], rank)
    labels, few = {"target": ids()}, {"target": topk(), "check_inputs": True}
    models_ = models("head", dtype=torch.float32) | {"teacher_topk": TEACHER, "check_inputs": True}
    for op, given, wrong, match in (
        (linear_cross_entropy, head | labels, {"softcap": 5.0}, "options"),
        (linear_cross_entropy, head | labels, {"target": ids().masked_fill(ids() == -100, 3)}, "values of targets"),
        (linear_cross_entropy, head | labels, {"hidden": head["hidden"][:2], "target": ids()[:2]}, "sizes or dtypes"),
        (linear_cross_entropy, head | labels, {"token_weight": factors(*SHAPE)}, "shapes of targets"),
        (linear_cross_entropy, head | labels, {"vocab_size": 60}, "vocab_size"),
        (linear_cross_entropy, head | few, {"target": topk()._replace(values=topk().values / 2)}, "values of targets"),
        (linear_cross_entropy, head | few, {"target": topk("log_probs")}, "sizes or dtypes"),
        (linear_jsd, models_, {"teacher_topk": TEACHER._replace(values=TEACHER.values * 1.5)}, "values of targets"),
        (linear_jsd, models_, {"teacher_topk": TEACHER._replace(rest="truncated")}, "sizes or dtypes"),
    ):
        mine = {name: part(name, x, own) for name, x in given.items()} | taken({}, sizes, rank)
        op(**mine)
        with pytest.raises(ValueError, match=f"differ in {match}"):
            op(**mine | (wrong if last else {}))
    more = {"temperature": factors(*SHAPE) * (1 + rank), "check_inputs": True}
    with pytest.raises(ValueError, match="differ in values of targets"):
        log_probs(random(*SHAPE, VOCAB)[..., own], ids(), **taken(more, sizes, rank))


def refused_by(which, rank, run, match):
    """Raise unless the `which` rank raises for its own reason, and the others hear it."""
    with pytest.raises((TypeError, ValueError, RuntimeError)) as raised:
        run()
    said = str(raised.value)
    assert re.search(match, said), said
    assert (f"rank {which} of vocab_group refused the call: " in said) == (rank != which), said


def ranks_beside_an_empty_shard(rank, ranks):
    """It needs no scratch of its own, and hears that the others refuse theirs."""
    hidden, weight, labels = agreement.problem()
    for empty in range(ranks):
        sizes = [0 if r == empty else agreement.VOCAB // (ranks - 1) for r in range(ranks)]
        for op in agreement.of_logits(labels).values():
            with pytest.raises(ValueError, match="scratch_bytes=8 is too small"):
                op(hidden @ weight.T, cut(sizes, rank), **taken({"scratch_bytes": 8}, sizes, rank))


def a_rank_with_a_wrong_argument(rank, ranks):
    """Whatever is wrong, in whatever op and however it runs."""
    hidden, weight, labels = agreement.problem()
    rows, given = agreement.mine(rank, ranks), {"vocab_group": dist.group.WORLD}
    for which in range(ranks):
        wrong = rank == which
        for op in agreement.of_layers(labels).values():
            run = partial(op, hidden, weight[:, :100] if wrong else weight, rows, **given)
            refused_by(which, rank, run, "H=128")
            with Watching():
                refused_by(which, rank, run, "H=128")
            refused_by(which, rank, partial(op, hidden, weight, rows, scratch_bytes=8 if wrong else None, **given), "8")
        for op in agreement.of_logits(labels).values():
            run = partial(op, hidden @ weight.T, rows, backend="gpu" if wrong else "auto", **given)
            refused_by(which, rank, run, "backend must be")
            run = partial(op, hidden @ weight.T, rows, scratch_bytes=8 if wrong else None, **given)
            refused_by(which, rank, run, "scratch_bytes=8")
    linear_cross_entropy(hidden, weight[rows], labels, **given)  # ranks are where they were


def a_rank_that_waits(rank, ranks):
    """Of tokens that ranks have parts of, none is gathered before."""
    hidden, weight, labels = agreement.problem()
    parts = {"hidden_layout": "sequence", "vocab_group": dist.group.WORLD}
    part = hidden.repeat(1, ranks, 1).chunk(ranks, 1)[rank]
    labels = labels.repeat(1, ranks)
    rows = agreement.mine(rank, ranks)
    for op in (
        lambda **x: linear_cross_entropy(part, weight[rows], labels, **parts, **x),
        lambda **x: linear_cross_entropy(part, weight[rows], labels, precision="fp8", **parts, **x),
        lambda **x: linear_jsd(part, weight[rows], part, weight[rows], target=labels, **parts, **x),
    ):
        refused_by(0, rank, partial(op, scratch_bytes=8 if rank == 0 else None), "scratch_bytes=8")
        op()


def a_weight_that_changed(rank, ranks):
    """Of copies in FP8, one rank's are no longer of its weight."""
    hidden, weight, labels = agreement.problem()
    mine = weight[agreement.mine(rank, ranks)].clone()
    copies = quantize_weight(mine)
    mine += rank == 0
    run = partial(linear_cross_entropy, hidden, copies, labels, precision="fp8", vocab_group=dist.group.WORLD)
    refused_by(0, rank, run, "changed")


def a_rank_that_never_calls(rank, ranks):
    """The others raise at the group's time-out."""
    group, sizes = dist.new_group(timeout=timedelta(seconds=1)), LAYOUTS[ranks][0]
    hidden, weight, _ = tensors().values()
    if rank:
        with pytest.raises(RuntimeError, match=r"[Tt]imed"):
            linear_cross_entropy(
                hidden, weight[cut(sizes, rank)], ids(), **taken({}, sizes, rank) | {"vocab_group": group}
            )


REFUSED = (ranks_beside_an_empty_shard, a_rank_with_a_wrong_argument, a_rank_that_waits, a_weight_that_changed)
WRONG = (
    wrong_calls, wrong_soft_labels, wrong_divergences, ranks_that_differ, *agreement.CHECKS, *REFUSED,
    a_rank_that_never_calls,
)  # fmt: skip


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_wrong_calls(ranks, tmp_path):
    spawn(tmp_path, ranks, {check.__name__: check for check in WRONG})
