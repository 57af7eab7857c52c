"""Fully sharded and tensor-parallel layers over two processes and gloo."""

import pytest
import torch
import torch.distributed as dist
from fp8_common import assert_same
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from onchip.torch import Fp8Linear, convert_linears, fp8_linear, weights_unchanged
from sharded import spawn

RANKS = 2


def make_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128))
    convert_linears(model)
    return model


def batches():
    g = torch.Generator().manual_seed(1)
    return [torch.randn(RANKS, 16, 128, generator=g) for _ in range(4)]


def fully_sharded(rank, ranks):
    """Gathered weights are gone before backward, or stay; copies of them are kept only where they stay."""
    mesh = init_device_mesh("cpu", (RANKS,))
    train_sharded(rank, mesh, reshard=True, inside=[[], [], [], []])
    train_sharded(rank, mesh, reshard=False, inside=[[], ["0", "2"], [], ["0", "2"]])


def train_sharded(rank, mesh, *, reshard, inside):
    """Two steps of two micro-batches, as on one process that sees both halves of each batch.

    Without resharding, weights are gathered by the first of them and stay for the second.
    """
    alone, model = make_model(), make_model()
    for layer in model:
        if isinstance(layer, Fp8Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    names = []
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (alone, model)]
    xs = batches()
    for step in range(2):
        for last, x in enumerate(xs[2 * step : 2 * step + 2]):
            if not reshard:
                model.set_reshard_after_backward(bool(last))
            # Each row's quantisation is its own, but a weight's gradient has groups of 128 rows: take each half apart.
            sum(alone(half).square().mean() / RANKS for half in x).backward()
            with weights_unchanged(model) as kept:
                model(x[rank]).square().mean().backward()
            names.append(kept)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert_same(p.grad.full_tensor(), q.grad, 1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert_same(p.full_tensor(), q, 1e-4)
    assert names == inside, names


def tensor_parallel(rank, ranks):
    """Columns of the first weight and rows of the second on each process: whole blocks of 128, so the same numbers."""
    first, _, second = make_model()
    x = batches()[0][0]
    mine = slice(rank * 128, rank * 128 + 128)
    with torch.no_grad():
        h = fp8_linear(x, first.weight[mine].clone(), first.bias[mine])
        assert torch.equal(h, first(x)[:, mine])
        part = fp8_linear(h, second.weight[:, mine].clone())
        dist.all_reduce(part)
        assert_same(part + second.bias, second(first(x)))


def refused(rank, ranks):
    """Tensor parallelism by DTensors."""
    model = make_model()
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), {"0": ColwiseParallel()})
    with pytest.raises(TypeError, match=r"fp8_linear: x is a DTensor; pass .* x\.to_local\(\)"):
        model(batches()[0][0])


@pytest.mark.slow
def test_two_processes(tmp_path):
    spawn(tmp_path, RANKS, {check.__name__: check for check in (fully_sharded, tensor_parallel, refused)})
