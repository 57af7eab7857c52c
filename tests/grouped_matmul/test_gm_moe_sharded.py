"""A mixture-of-experts layer over two processes and gloo, whose gradients are those of one process with both halves."""

import copy
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from onchip.torch import MoE
from sharded import spawn

RANKS = 2


def loss(layer, x):
    y, stats = layer(x, return_stats=True)
    return y.float().square().mean() + 0.1 * stats.aux_loss


def gradients(rank, ranks):
    mesh = init_device_mesh("cpu", (RANKS,))
    for dtype in (torch.float64, torch.bfloat16):
        torch.manual_seed(0)
        alone = MoE(16, 8, 6, 2, num_shared=1, bias=True, dtype=dtype)
        x = torch.randn(RANKS, 10, 16, dtype=dtype)
        (sum(loss(alone, part) for part in x) / RANKS).backward()
        for wrap in (DistributedDataParallel, partial(fsdp2, mesh=mesh)):
            layer = wrap(copy.deepcopy(alone))
            layer.zero_grad()
            loss(layer, x[rank]).backward()
            for p, expected in zip(layer.parameters(), alone.parameters(), strict=True):
                grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                error = (grad - expected.grad).norm() / expected.grad.norm()
                assert error < (1e-12 if dtype == torch.float64 else 1e-2)


def fsdp2(layer, mesh):
    """The router in a group of its own: those of 16-bit experts have another dtype."""
    fully_shard(layer.router, mesh=mesh)
    return fully_shard(layer, mesh=mesh)


@pytest.mark.slow
def test_two_processes(tmp_path):
    spawn(tmp_path, RANKS, {"gradients": gradients})
