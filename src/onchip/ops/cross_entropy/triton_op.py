"""cross_entropy for PyTorch on the Triton kernels: two registered operators and autograd between them.

`_forward_op` computes the loss; where that is one number and a gradient is wanted, it also makes the gradient of that
number while the logits are in the caches, into a tensor of its own.  `_backward_op` leaves that as it is where the
upstream gradient turns out to be 1, which the device alone knows, and else writes it anew from the logits, so that it
is rounded once.  With reduction="none" or inplace_backward the logits are read in forward and again in backward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onchip.frontend.torch_autograd import differentiable_once, graph_is_kept
from onchip.frontend.torch_inputs import DTYPES, leading_dimensions
from onchip.kernels.triton.launch import device_of, device_refusal
from onchip.ops.cross_entropy.spec import OP
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.rows.arguments import Arguments
from onchip.vocab.rows.launches import _flat, launch_rows
from onchip.vocab.rows.memory import Problem
from onchip.vocab.torch import tiles as torch_tiles


def refusal(logits: Tensor) -> str | None:
    """Why the kernels can't serve a call with these logits, or None."""
    reason = device_refusal(logits.device.type, logits.device.index, logits.dtype)
    if reason is None and logits.numel() > 0 and len(leading_dimensions(logits)) > 2:
        reason = (
            f"its logits' leading dimensions must reduce to two of a constant stride each; got shape "
            f"{list(logits.shape)} with strides {list(logits.stride())}"
        )
    return reason


# ------------------------------------------------------------------------------------------------ registered operators


# torch.compile's cache on disk knows an operator by its name alone: a release that changes a schema must rename it.
# Numbers and flags go in lists, since what torch.library does in Python grows with the square of the arguments.
_SCHEMA = (
    "Tensor logits, Tensor target, Tensor? token_weight, Tensor? token_temperature, Tensor? normalizer, "
    "int ignore_index, str reduction, float[] numbers, int? scratch_bytes, bool[] flags"
)


def pack(a: Arguments) -> tuple[Any, ...]:
    """The arguments as the operators take them."""
    numbers = [a.label_smoothing, a.z_loss, a.softcap or 0.0, a.logit_scale, a.temperature]
    return (*a[:7], numbers, a.scratch_bytes, [a.check_inputs, a.stats, a.inplace, a.grad])


def _unpack(packed: Sequence[Any]) -> Arguments:
    *first, numbers, scratch, (check_inputs, stats, inplace, grad) = packed
    label_smoothing, z_loss, softcap, logit_scale, temperature = numbers
    numbers = (label_smoothing, z_loss, softcap or None, logit_scale, temperature)
    return Arguments._make((*first, *numbers, check_inputs, scratch, stats, inplace, grad))


@torch.library.custom_op(
    "onchip::cross_entropy_triton", mutates_args=(), schema=f"({_SCHEMA}) -> ({', '.join(['Tensor'] * 8)})"
)
def _forward_op(*args: Any) -> tuple[Tensor, ...]:
    """Return loss, lse, log_prob, entropy, correct, the divisor, the gradient and the link; what isn't asked for is
    empty."""
    a = _unpack(args)
    shape, tokens = a.target.shape, a.target.numel()
    if a.scratch_bytes is not None:
        row_memory.plan(
            Problem(tokens, a.logits.shape[-1], DTYPES[a.logits.dtype], "cuda", grad=a.grad, triton=True),
            a.scratch_bytes,
        )
    with device_of(a.logits):
        if a.check_inputs:
            _check_values(a)
        loss, lse, log_prob = (a.logits.new_empty(tokens, dtype=torch.float32) for _ in range(3))
        entropy = a.logits.new_empty(tokens if a.stats else 0, dtype=torch.float32)
        correct = a.logits.new_empty(tokens if a.stats else 0, dtype=torch.bool)
        gradient = torch.empty(a.logits.shape if a.fused else 0, dtype=a.logits.dtype, device=a.logits.device)
        divisor = torch_tiles.divisor(OP, a.reduction, a.normalizer, a.target != a.ignore_index)
        if tokens > 0:
            launch_rows(
                a, "losses", gradient,
                {
                    "divisor": divisor, "loss": loss, "lse": lse, "log_prob": log_prob, "entropy": entropy,
                    "correct": correct, "STATS": a.stats, "GRADIENT": a.fused,
                },
            )  # fmt: skip
        loss = loss.view(shape) if a.reduction == "none" else loss.sum() / divisor
        return (
            loss,
            lse.view(shape),
            log_prob.view(shape),
            entropy.view(shape) if a.stats else entropy,
            correct.view(shape) if a.stats else correct,
            divisor,
            gradient,
            loss.new_empty(0),
        )


@_forward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    a = _unpack(args)
    shape = a.target.shape
    per_token = [a.logits.new_empty(shape, dtype=torch.float32) for _ in range(4)]
    return (
        per_token[0] if a.reduction == "none" else a.logits.new_empty((), dtype=torch.float32),
        per_token[1],
        per_token[2],
        per_token[3] if a.stats else a.logits.new_empty(0, dtype=torch.float32),
        a.logits.new_empty(shape if a.stats else 0, dtype=torch.bool),
        a.logits.new_empty((), dtype=torch.float32),
        torch.empty(a.logits.shape if a.fused else 0, dtype=a.logits.dtype, device=a.logits.device),
        a.logits.new_empty(0, dtype=torch.float32),
    )


@torch.library.custom_op(
    "onchip::cross_entropy_triton_backward",
    mutates_args=("gradient",),
    schema=f"(Tensor(a!) gradient, Tensor grad_loss, Tensor lse, Tensor log_prob, Tensor divisor, {_SCHEMA}) -> ()",
)
def _backward_op(
    gradient: Tensor, grad_loss: Tensor, lse: Tensor, log_prob: Tensor, divisor: Tensor, *args: Any
) -> None:
    """Write the gradient of the logits to `gradient`, where forward hasn't done it and the upstream gradient is 1."""
    _write_gradient(_unpack(args), gradient, grad_loss, lse, log_prob, divisor)


@_backward_op.register_fake
def _(*_: Any) -> None:
    return None


# ------------------------------------------------------------------------------------------------------- their parts


def _check_values(a: Arguments) -> None:
    torch_tiles.select_tokens(
        OP,
        a.target,
        a.logits.shape[-1],
        a.token_weight,
        a.token_temperature,
        a.normalizer,
        ignore_index=a.ignore_index,
        reduction=a.reduction,
        temperature=a.temperature,
        check_values=True,
    )


def _write_gradient(
    a: Arguments, gradient: Tensor, grad_loss: Tensor, lse: Tensor, log_prob: Tensor, divisor: Tensor
) -> None:
    if a.target.numel() == 0:
        return
    with device_of(a.logits):
        launch_rows(
            a, "gradients", gradient,
            {
                "divisor": divisor, "lse": lse.reshape(-1), "log_prob": log_prob.reshape(-1),
                "grad_loss": _flat(grad_loss), "PER_TOKEN": a.reduction == "none", "UNLESS_ONE": a.fused,
            },
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, lse, log_prob, _, _, divisor, gradient, link = output
    ctx.mark_non_differentiable(*output[1:-1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(link, gradient, lse, log_prob, divisor, *inputs[:5])
    ctx.options = inputs[5:]


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing = (None,) * (4 + len(ctx.options))
    if grad_loss is None:
        return (None, *nothing)
    link, gradient, lse, log_prob, divisor, *tensors = ctx.saved_tensors
    packed = (*tensors, *ctx.options)
    a = _unpack(packed)
    if a.inplace and not graph_is_kept():
        # Detached, it still counts as a change of the logits: whatever saved them for its own backward will raise.
        gradient = a.logits.detach()
        with torch.no_grad():
            _write_gradient(a._replace(logits=gradient), gradient, grad_loss, lse, log_prob, divisor)
            torch.autograd.graph.increment_version(gradient)
    else:
        if not a.fused:
            gradient = torch.empty(a.logits.shape, dtype=a.logits.dtype, device=a.logits.device)
        elif graph_is_kept():
            gradient = gradient.clone()
        _backward_op(gradient, grad_loss, lse, log_prob, divisor, *packed)
    return (*differentiable_once(OP, [gradient], grad_loss, link), *nothing)


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def forward(*args: Any) -> tuple[Tensor, ...]:
    """Loss, lse, log_prob, entropy and correct, for the arguments that `Arguments` lists."""
    return tuple(_forward_op(*pack(Arguments(*args)))[:5])
