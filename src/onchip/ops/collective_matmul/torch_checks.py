"""Both functions on a whole problem, which every rank of the default process group holds: for checks in PyTorch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onchip.collectives.problem import GATHER
from onchip.collectives.torch_ring import BACKENDS
from onchip.ops.collective_matmul.cases import RANKS
from onchip.ops.collective_matmul.torch_op import Backend, Precision, all_gather_matmul, matmul_reduce_scatter


@contextmanager
def session(device: str) -> Iterator[None]:
    """The default process group: an existing one, `torchrun`'s, or a new one for this process alone."""
    if dist.is_initialized():
        yield
        return
    launched = dist.is_torchelastic_launched()
    if launched and device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    c10d: Any = dist
    alone: dict[str, Any] = {} if launched else {"store": c10d.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(BACKENDS[device], **alone)
    try:
        if (ranks := dist.get_world_size()) not in RANKS:
            raise ValueError(f"the cases of collective_matmul are for {', '.join(map(str, RANKS))} ranks, not {ranks}")
        yield
    finally:
        dist.destroy_process_group()


def whole(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    op: str,
    backend: Backend,
    keep_gathered: bool = False,
    group: Any = None,
    precision: Precision = "full",
) -> Tensor:
    """All ranks' result [T, ..., N] for the whole x [T, ..., K], weight [N, K] and bias [N]."""
    if op == GATHER:
        mine = None if bias is None else part(bias, 0, group)
        out = all_gather_matmul(
            part(x, 0, group),
            part(weight, 0, group),
            group,
            bias=mine,
            keep_gathered=keep_gathered,
            backend=backend,
            precision=precision,
        )
        return joined(out, -1, group)
    mine = part(weight, 1, group)
    out = matmul_reduce_scatter(part(x, -1, group), mine, group, bias=bias, backend=backend, precision=precision)
    return joined(out, 0, group)


def part(x: Tensor, dim: int, group: Any) -> Tensor:
    """This rank's part of x along a dimension; in backward x gets the gradients of all parts."""
    made: Tensor = _Moved.apply(x, dim, group, _cut, _gathered)
    return made


def joined(x: Tensor, dim: int, group: Any) -> Tensor:
    """All ranks' x, concatenated; in backward each x gets the gradient of its part."""
    made: Tensor = _Moved.apply(x, dim, group, _gathered, _cut)
    return made


class _Moved(torch.autograd.Function):
    """One function forward, another one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any, there: Any, back: Any) -> Tensor:
        ctx.of = back, dim, group
        made: Tensor = there(x, dim, group)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back, *how = ctx.of
        return back(grads[0], *how), None, None, None, None


def _cut(x: Tensor, dim: int, group: Any) -> Tensor:
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def _gathered(x: Tensor, dim: int, group: Any) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group)
    return torch.cat(parts, dim)
