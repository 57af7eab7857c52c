"""What both backends' autograd formulas share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onchip.ops.cross_entropy.spec import OP


def differentiable_once(grads: Sequence[Tensor]) -> list[Tensor]:
    """The gradients as they are; with create_graph=True such that differentiating them raises."""
    if not torch.is_grad_enabled():
        return list(grads)
    return [_DifferentiatedTwice.apply(torch.empty(0, requires_grad=True), g) for g in grads]


class _DifferentiatedTwice(torch.autograd.Function):
    """Passes a gradient through and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(f"{OP}: a backward of the backward is not supported")
