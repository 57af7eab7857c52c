"""linear_cross_entropy for PyTorch with a probability for every entry, on Triton kernels: the operator's functions."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.linear_cross_entropy.soft_call import SoftCall
from onchip.ops.linear_cross_entropy.spec import OP
from onchip.vocab.torch import soft
from onchip.vocab.torch.loss import scaled_rows
from onchip.vocab.torch.soft import SoftStats
from onchip.vocab.triton import setup
from onchip.vocab.triton.memory import TritonPlan
from onchip.vocab.triton.setup import Saved


class Outputs(NamedTuple):
    """What the operator returns; all but the loss and what is saved are `LabelStats`."""

    loss: Tensor  # [...] or []
    lse: Tensor
    less: Tensor
    mass: Tensor
    stats: SoftStats
    saved: Saved


class Kept(NamedTuple):
    """What backward is given."""

    call: SoftCall
    config: TritonPlan
    lse: Tensor
    less: Tensor
    mass: Tensor
    saved: Saved


def _plan(call: SoftCall) -> TritonPlan:
    return setup.plan(call, class_weight=call.class_weight is not None, stats=call.options.return_stats)


def _forward(call: SoftCall) -> Outputs:
    from onchip.vocab.triton import labels

    config, options = _plan(call), call.options
    if options.check_inputs and not call.hidden.is_meta:
        call.tokens(check_values=True)
    saved = setup.make_saved(call, config)
    run = setup.make_run(call, options, saved.vectors, call.weight_grad_out, call.class_weight, weight=saved.weight)
    made = labels.forward(run, call, config, saved, labels.labels_of(call.labels, options.label_smoothing))
    return Outputs(LOSS.stated(call, _reduced, made.loss), *made[1:], saved)


def _reduced(call: SoftCall, losses: Any) -> Tensor:
    return soft.reduced(call.options, losses, call.tokens(check_values=False), call.hidden.shape[:-1])


def _fake(call: SoftCall) -> Outputs:
    def vector() -> Tensor:
        return stated.empty(call.number, torch.float32, call.hidden.device)

    shape = call.hidden.shape[:-1] if call.options.reduction == "none" else ()
    loss, stats = (
        stated.empty(shape, torch.float32, call.hidden.device),
        SoftStats.empty(call.options, call.hidden, call.number),
    )
    return Outputs(loss, vector(), vector(), vector(), stats, setup.make_saved(call, _plan(call), fake=True))


def _save(call: SoftCall, made: Outputs) -> Kept:
    return Kept(call, _plan(call), made.lse, made.less, made.mass, made.saved)


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    """Turn hidden's memory into its gradient."""
    from onchip.vocab.triton import labels

    call, options, (grad_loss,) = kept.call, kept.call.options, upstream
    assert grad_loss is not None
    row = LOSS.stated(call, _rows, grad_loss)
    run = setup.make_run(
        call, options, kept.saved.vectors, call.weight_grad_out, call.class_weight, weight=kept.saved.weight
    )
    known = labels.LabelStats(row, kept.lse, kept.less, kept.mass)
    given = labels.labels_of(call.labels, options.label_smoothing)
    return labels.backward(run, call, kept.config, kept.saved, given, known, row, wanted, add_to=call.weight_grad_out)


def _rows(call: SoftCall, grad_loss: Any) -> Tensor:
    """[T] float32: of each token's loss, times the derivative of the logits by the product."""
    tokens = call.tokens(check_values=False)
    row, _ = scaled_rows(tokens, call.options, tokens.upstream(grad_loss, call.options.reduction), torch.float32)
    return row


LOSS = Operator(
    "linear_cross_entropy_dense_in_place",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    adds_to={"weight": "weight_grad_out"},
    **setup.IN_PLACE,
)
