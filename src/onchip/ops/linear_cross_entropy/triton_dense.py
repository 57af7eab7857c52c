"""linear_cross_entropy for PyTorch with a probability for every entry, on Triton kernels: the operator's functions."""

from typing import NamedTuple

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
    tokens, saved = (
        call.tokens(check_values=options.check_inputs and not call.hidden.is_meta),
        setup.make_saved(call, config),
    )
    run = setup.make_run(call, options, saved.vectors, call.weight_grad_out, call.class_weight, weight=saved.weight)
    made = labels.forward(run, call, config, saved, labels.labels_of(call.labels, options.label_smoothing))
    loss = soft.reduced(options, made.loss, tokens, call.hidden.shape[:-1])
    return Outputs(loss, *made[1:], saved)


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
    tokens = call.tokens(check_values=False)
    each = tokens.upstream(grad_loss, options.reduction)
    row, _ = scaled_rows(tokens, options, each, torch.float32)
    run = setup.make_run(
        call, options, kept.saved.vectors, call.weight_grad_out, call.class_weight, weight=kept.saved.weight
    )
    known = labels.LabelStats(row, kept.lse, kept.less, kept.mass)
    given = labels.labels_of(call.labels, options.label_smoothing)
    return labels.backward(run, call, kept.config, kept.saved, given, known, row, wanted, add_to=call.weight_grad_out)


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
