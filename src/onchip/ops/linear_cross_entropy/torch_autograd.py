"""What both backends' autograd formulas share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onchip.ops.linear_cross_entropy.spec import OP


def graph_is_kept() -> bool:
    """Whether the backward that is running will leave its graph for another."""
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept


def differentiable_once(grads: Sequence[Tensor | None], op: str = OP) -> list[Tensor | None]:
    """The gradients as they are; with create_graph=True such that differentiating them raises, in the name of `op`."""
    if not torch.is_grad_enabled():
        return list(grads)
    anchor = torch.empty(0, requires_grad=True)
    present = iter(_DifferentiatedTwice.apply(op, anchor, *[g for g in grads if g is not None]))
    return [None if g is None else next(present) for g in grads]


class _DifferentiatedTwice(torch.autograd.Function):
    """Passes gradients through and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, op: str, anchor: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        ctx.op = op
        return tuple(g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(f"{ctx.op}: a backward of the backward is not supported")
