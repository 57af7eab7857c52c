"""What the backward functions of all ops share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onchip.frontend.torch_inputs import has_values


def refuse_batches(op: str, upstream: Sequence[Tensor]) -> None:
    """Raise for upstream gradients that a vmap over backward has batched."""
    functorch = torch._C._functorch
    for g in upstream:
        if functorch.is_legacy_batchedtensor(g) or functorch.is_batchedtensor(g):
            raise RuntimeError(
                f"{op}: several upstream gradients at once are not supported (is_grads_batched=True, "
                "jacobian(vectorize=True), torch.func.vmap over backward); pass vectorize=False, or call "
                "torch.autograd.grad once for each"
            )


def graph_is_kept() -> bool:
    """Whether the backward that is running will leave its graph for another."""
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept


def asked_for(ctx: Any, grads: Sequence[bool], places: Sequence[int]) -> list[bool]:
    """Which gradients, of the tensors behind the node's edges at `places`, the running backward will use.

    `autograd.grad(out, x)` and `backward(inputs=...)` use only some, and don't tell the Function which.
    """
    if torch.compiler.is_compiling():  # compiled autograd, which traces them all
        return list(grads)
    functions = ctx.next_functions  # which is made anew each time
    return [wanted and _will_run(functions[i][0]) for i, wanted in zip(places, grads, strict=True)]


def _will_run(node: Any) -> bool:
    try:
        will_run: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that autograd.grad was asked for
        return True
    return will_run


def differentiable_once(op: str, grads: Sequence[Tensor | None], *sources: Tensor | None) -> list[Tensor | None]:
    """The gradients as they are; with create_graph=True such that differentiating them raises.

    It raises for every tensor that `sources` depend on.  `autograd.grad` visits only the tensors that it is asked for,
    and without a path to them from each gradient it would omit a term.  So `sources` are the upstream gradients and an
    output of the op, from which paths lead to all of its inputs: one that is kept for backward, or else a `link` of no
    elements, since the caller may change others in place (`loss /= 2`).
    """
    if not torch.is_grad_enabled():
        return list(grads)
    anchor = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
    given = [g for g in grads if g is not None]
    present = iter(_DifferentiatedTwice.apply(op, len(given), *given, anchor, *sources))
    return [None if g is None else next(present) for g in grads]


class _DifferentiatedTwice(torch.autograd.Function):
    """Passes gradients through and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, op: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.op = op
        return tuple(g.view_as(g) for g in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(f"{ctx.op}: a backward of the backward is not supported")


def scale_stash(stashed: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A gradient for an upstream gradient of 1, times the actual one (`factor`; None: 1), in `dtype`."""
    if factor is None:
        return stashed.to(dtype)
    # Rounded as it is written: `(stashed * factor).to(dtype)` would hold another float32 weight gradient.
    return torch.mul(stashed, factor.detach(), out=torch.empty_like(stashed, dtype=dtype))


def is_plain_one(grad_loss: Tensor) -> bool:
    """Whether the upstream gradient is known at no cost to be the 1 of loss.backward(), and no graph is kept.

    Then the stash itself is the gradient.
    """
    on_cpu = type(grad_loss) is Tensor and grad_loss.device.type == "cpu"
    return on_cpu and has_values(grad_loss) and float(grad_loss.detach()) == 1 and not graph_is_kept()
