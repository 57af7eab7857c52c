"""Patched models of transformers on CUDA devices."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny import llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from all_cards import count, spawned, torchrun
from onchip.integrations.transformers import patch
from sharded import close

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]


def test_trainer_with_fsdp2():
    ranks = min(2, count())
    made = torchrun(ranks, str(Path(__file__).with_name("trainer_fsdp2.py")), seconds=300)
    assert made.returncode == 0, made.stdout + made.stderr[-6000:]
    assert made.stdout.count("unpatched") == 4 * ranks


def a_patched_model():
    """Under FSDP2, and with a body under tensor parallelism: the gradients of one process without the patch."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    ids = torch.randint(3, 97, (2 * ranks, 12), generator=torch.Generator().manual_seed(1)).cuda()
    alone = llama().cuda()
    alone(input_ids=ids, labels=ids).loss.backward()

    def assert_right(model, loss):
        assert report.losses == 1
        loss.backward()
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            close(p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad, q.grad, name)

    model = copy.deepcopy(alone)
    model.zero_grad()
    report = patch(model)
    fully_shard(model.lm_head)
    fully_shard(model)
    mine = ids.chunk(ranks)[rank]
    assert_right(model, model(input_ids=mine, labels=mine).loss)

    model = copy.deepcopy(alone)
    model.zero_grad()
    mlp = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer.mlp, init_device_mesh("cuda", (ranks,)), mlp)
    report = patch(model)
    assert_right(model, model(input_ids=ids, labels=ids).loss)


def test_several_gpus(tmp_path):
    if count() < 2:
        pytest.skip("NCCL gives no two ranks one GPU")
    spawned(2, tmp_path / "meeting", [a_patched_model])
