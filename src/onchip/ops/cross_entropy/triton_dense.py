"""cross_entropy for PyTorch with a probability for every entry, on Triton kernels: what its operator computes.

Forward reads logits and labels once, and so does backward.  The loss is reduced by PyTorch's operations on numbers of
tokens.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.kernels.triton.launch import device_of
from onchip.ops.cross_entropy.soft_call import SoftCall, SoftMade
from onchip.ops.cross_entropy.spec import OP
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.rows.launches import launch_soft
from onchip.vocab.torch.loss import Outputs, reduced, scaled_rows


class Kept(NamedTuple):
    """What backward is given."""

    call: SoftCall
    lse: Tensor
    less: Tensor
    mass: Tensor


def _forward(call: SoftCall) -> SoftMade:
    options = call.options
    if options.check_inputs:
        call.tokens(check_values=True)
    if options.scratch_bytes is not None:
        row_memory.plan(call.problem(triton=True), "", options.scratch_bytes)
    out = Outputs.empty(call, call.logits, kernels=True, reduced=False)
    if call.number > 0:
        launch_soft(
            "soft_losses", call.logits, call.labels, None, call.token_temperature, options, call.class_weight,
            **out.of_labels,
        )  # fmt: skip
    return SoftMade(out._replace(loss=LOSS.stated(call, _reduced, out.loss)))


def _reduced(call: SoftCall, losses: Any) -> Tensor:
    tokens = call.tokens(check_values=False)
    return reduced(call.options, losses * tokens.weight, tokens, call.logits.shape[:-1])


def _fake(call: SoftCall) -> SoftMade:
    return SoftMade(Outputs.empty(call, call.logits, kernels=True))


def _save(call: SoftCall, made: SoftMade) -> Kept:
    assert made.out.mass is not None
    return Kept(call, made.out.lse, made.out.log_prob, made.out.mass)


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call, options, (grad_loss,) = kept.call, kept.call.options, upstream
    assert grad_loss is not None
    (out,) = _fake_gradients(kept, upstream, wanted)
    row = LOSS.stated(call, _rows, grad_loss)
    if call.number > 0:
        with device_of(out):
            launch_soft(
                "soft_gradients", call.logits, call.labels, out, call.token_temperature, options, call.class_weight,
                lse=kept.lse, less=kept.less, mass=kept.mass, row_factor=stated.converted(row, Tensor.contiguous),
            )  # fmt: skip
    return [out]


def _rows(call: SoftCall, grad_loss: Any) -> Tensor:
    """[T] float32: of each token's loss, times the derivative of the logits."""
    tokens = call.tokens(check_values=False)
    row, _ = scaled_rows(tokens, call.options, tokens.upstream(grad_loss, call.options.reduction), torch.float32)
    return row


def _fake_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> list[Tensor]:
    """Contiguous, whatever the logits' strides."""
    return [stated.empty_like(kept.call.logits)]


LOSS = Operator(
    "cross_entropy_dense",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    differentiable=("logits",),
    states=True,
)
