"""Heads of models over processes and gloo, or GPUs: they take the same steps as one process with all parts of the
batch.
"""

import copy
import os
import warnings
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from all_cards import count, spawned
from onchip.torch import LMHead, lm_jsd, lm_log_probs, lm_loss
from processes import start

VOCAB, HIDDEN = 61, 16


def device():
    """Where this process group's tensors are."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def fsdp1(model, **how):
    here = torch.device("cpu") if device() == "cpu" else torch.device("cuda", torch.cuda.current_device())
    return FullyShardedDataParallel(model, device_id=here, **how)


class Model(nn.Module):
    """Gives its loss, or with `outside` the hidden states."""

    def __init__(self, head=LMHead, outside=False):
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.LayerNorm(HIDDEN)
        self.lm_head, self.outside = head(HIDDEN, VOCAB, bias=False), outside
        self.to(device())

    def forward(self, ids, **options):
        hidden = self.norm(self.embedding(ids))
        return hidden if self.outside else lm_loss(self.lm_head, hidden, ids, **options)


def fsdp1_head(model, **how):
    model.lm_head = fsdp1(model.lm_head, **how)
    return fsdp1(model, **how)


def fsdp2(model, *parts, **how):
    modules = [getattr(model, part) for part in parts]
    if modules:
        fully_shard(modules if len(modules) > 1 else modules[0], mesh=MESH[0], **how)
    return fully_shard(model, mesh=MESH[0])


MESH = []
ALONE = {
    "FSDP1, the head too": fsdp1_head,
    "FSDP1, the head too, its own parameters": partial(fsdp1_head, use_orig_params=True),
    "FSDP2, the head too": lambda model: fsdp2(model, "lm_head", reshard_after_forward=True),
    "FSDP2, the head too, kept": lambda model: fsdp2(model, "lm_head", reshard_after_forward=False),
    "FSDP2, a group": lambda model: fsdp2(model, "norm", "lm_head", reshard_after_forward=True),
    "FSDP2, a group, kept": lambda model: fsdp2(model, "norm", "lm_head", reshard_after_forward=False),
}
IN_THE_ROOT = {
    "DDP": DistributedDataParallel,
    "FSDP1": fsdp1,
    "FSDP1, its own parameters": partial(fsdp1, use_orig_params=True),
    "FSDP2": fsdp2,
}


def batches():
    """Steps of micro-batches of ranks of sequences, some of whose labels are ignored."""
    ids = torch.randint(VOCAB, (2, 2, dist.get_world_size(), 3, 8), generator=torch.Generator().manual_seed(0))
    ignored = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < torch.tensor([0.1, 0.6]).view(
        2, 1, 1, 1
    )
    return ids.to(device()), ids.masked_fill(ignored, -100).to(device())


def parameters(model):
    """The model's own names, whatever wraps its parts, and whole tensors."""
    gathered = nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        gathered = FullyShardedDataParallel.summon_full_params(model)
    with gathered:
        named = [(name, p.full_tensor() if isinstance(p, DTensor) else p) for name, p in model.named_parameters()]
        return {name.replace("_fsdp_wrapped_module.", "").removeprefix("module."): p.clone() for name, p in named}


def assert_same_steps(rank, model, inner):
    """Two steps of one micro-batch each, outside of forward or in it."""
    alone, (ids, _), ranks = Model(), batches(), dist.get_world_size()
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (alone, model)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (sum(alone(ids[step, 0, r], softcap=3.0) for r in range(ranks)) / ranks).backward()
        if inner.outside:
            loss = lm_loss(inner.lm_head, model(ids[step, 0, rank]), ids[step, 0, rank], softcap=3.0)
        else:
            loss, stats = model(ids[step, 0, rank], softcap=3.0, return_stats=True)
            assert stats.lse.shape == (3, 8)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(parameters(model), parameters(alone))


def every_way_to_wrap_it(rank):
    for outside in (False, True):
        for wrap in (ALONE | IN_THE_ROOT).values():
            inner = Model(outside=outside)
            if not (outside and wrap is IN_THE_ROOT["FSDP1, its own parameters"]):
                assert_same_steps(rank, wrap(inner), inner)
    for wrap in IN_THE_ROOT.values():
        inner = Model(nn.Linear)
        assert_same_steps(rank, wrap(inner), inner)


def log_probs_and_divergences(rank):
    """Of a head that is gathered when it is called, and of a teacher's; the batch is the same on each rank."""
    ids = batches()[0][0, 0, 0]
    for wrap in (*ALONE.values(), DistributedDataParallel):
        alone, teacher = Model(outside=True), Model(outside=True)
        with torch.no_grad():
            teacher.lm_head.weight.normal_()
        model, wrapped_teacher = wrap(inner := Model(outside=True)), wrap(copied := copy.deepcopy(teacher))
        optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (alone, model)]
        for step in range(2):
            made = []
            for m, head, t, teacher_head in (
                (alone, alone.lm_head, teacher, teacher.lm_head),
                (model, inner.lm_head, wrapped_teacher, copied.lm_head),
            ):
                hidden = m(ids)
                if step:
                    loss = lm_log_probs(head, hidden, ids, entropy=True).entropy.mean()
                else:
                    loss = lm_jsd(head, hidden, teacher_head, t(ids).detach(), labels=ids, reduction="none").mean()
                loss.backward()
                made.append(loss.detach())
            assert torch.equal(*made)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(parameters(model), parameters(alone))


def a_plain_layer_that_must_be_called_is_refused(rank):
    ids = batches()[0][0, 0, rank]
    for name, wrap in ALONE.items():
        kind, said = (
            (TypeError, "got FullyShardedDataParallel, whose logits") if "1" in name else (RuntimeError, "hooks")
        )
        with pytest.raises(kind, match=f"lm_loss: .*{said}.*LMHead"):
            wrap(Model(nn.Linear))(ids)


def weights_that_are_sharded_are_refused(rank):
    ids, hidden = batches()[0][0, 0, rank], torch.randn(3, 8, HIDDEN, device=device())
    for head in (nn.Linear, LMHead):
        for wrap in (fsdp1, IN_THE_ROOT["FSDP1, its own parameters"], fsdp2):
            model = wrap(inner := Model(head))
            model(ids).backward()  # which frees what it gathered
            with pytest.raises(RuntimeError, match="the head's weight is sharded, as weights under FSDP"):
                lm_loss(inner.lm_head, hidden, ids)
            with pytest.raises(RuntimeError, match="lm_log_probs: the head's weight is sharded"):
                lm_log_probs(inner.lm_head, hidden, ids)


def gradient_accumulation(rank):
    """Of a step whose micro-batches have different counts.  Gradients are averaged over ranks, sums are wanted."""
    for wrap in (DistributedDataParallel, lambda model: fsdp2(model, "lm_head")):
        alone, (ids, labels) = Model(), batches()
        hidden = alone.norm(alone.embedding(ids[0].flatten(0, 2)))
        alone.lm_head(hidden, labels[0].flatten(0, 2)).backward()

        model = wrap(inner := Model(outside=True))
        count = (labels[0, :, rank, :, 1:] != -100).sum()
        dist.all_reduce(count)
        for micro_batch, mine in zip(ids[0, :, rank], labels[0, :, rank], strict=True):
            (dist.get_world_size() * inner.lm_head(model(micro_batch), mine, normalizer=count)).backward()
        grads = {
            name: p.grad.full_tensor() if isinstance(p, DTensor) else p.grad for name, p in inner.named_parameters()
        }
        torch.testing.assert_close(grads, {name: p.grad for name, p in alone.named_parameters()})


def a_count_that_mixed_precision_would_round(rank):
    """FSDP2 casts the floats among a module's arguments, not its integers."""
    head = fully_shard(
        LMHead(HIDDEN, VOCAB).to(device()), mesh=MESH[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    )
    hidden, ids = torch.randn(3, 8, HIDDEN, device=device()), batches()[0][0, 0, rank]
    with pytest.raises(TypeError, match="LMHead: normalizer is bfloat16, which can't hold a large count"):
        head(hidden, ids, normalizer=torch.tensor(2049.0))
    assert torch.equal(head(hidden, ids, normalizer=torch.tensor(2049)), head(hidden, ids, normalizer=2049))


CHECKS = (
    every_way_to_wrap_it,
    log_probs_and_divergences,
    a_plain_layer_that_must_be_called_is_refused,
    weights_that_are_sharded_are_refused,
    gradient_accumulation,
    a_count_that_mixed_precision_would_round,
)


def check_of_ranks(check):
    warnings.simplefilter("ignore")
    if not MESH:
        MESH.append(init_device_mesh(device(), (dist.get_world_size(),)))
    check(dist.get_rank())


def run(rank, meeting):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", timedelta(seconds=120), world_size=2, rank=rank)
    for check in CHECKS:
        check_of_ranks(check)
    dist.barrier()
    os._exit(0)  # where interpreter and process group end in an orderly way, gloo's threads abort now and then


def test_two_processes(tmp_path):
    start(run, 2, str(tmp_path / "meeting"))


@pytest.mark.gpu
@pytest.mark.ranks
def test_gpus(tmp_path):
    if count() < 2:
        pytest.skip("NCCL gives no two ranks one GPU")
    spawned(count(), tmp_path / "meeting", [partial(check_of_ranks, check) for check in CHECKS])
