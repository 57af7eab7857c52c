"""linear_cross_entropy for PyTorch with soft labels of K ids, on Triton kernels: those of K ids' log-probabilities.

As in triton_op.py, forward leaves what gradients need in the memory that they will take.  The loss is made of a few of
PyTorch's operations on numbers of tokens and ids.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.linear_cross_entropy.soft_call import SoftCall
from onchip.ops.linear_cross_entropy.spec import OP
from onchip.vocab.torch import soft
from onchip.vocab.torch.soft import SoftOutputs
from onchip.vocab.torch.softmax import Asked
from onchip.vocab.triton import setup
from onchip.vocab.triton.memory import TritonPlan
from onchip.vocab.triton.setup import Saved


class TritonOutputs(NamedTuple):
    """What the operator returns."""

    out: SoftOutputs
    saved: Saved


class Kept(NamedTuple):
    """What backward is given."""

    call: SoftCall
    config: TritonPlan
    lse: Tensor
    log_prob: Tensor
    saved: Saved


def as_kernels_take_it(call: Any) -> Any:
    """z-loss and class weights are taken in here, but for what smoothing spreads; and no id is ignored: one that looks
    like it is out of range."""
    ids = stated.call(_ids, call.ids, call.options.ignore_index)
    each = call.class_weight if call.options.label_smoothing > 0 else None
    return replace(call, ids=ids, class_weight=each, options=replace(call.options, z_loss=0.0))


def _ids(ids: Tensor, ignore_index: int) -> Tensor:
    return torch.where(ids == ignore_index, -1, ids.to(torch.int64))


def _forward(call: SoftCall) -> TritonOutputs:
    from onchip.vocab.triton import walks

    config, options = setup.plan(call), call.options
    if options.check_inputs and not call.hidden.is_meta:
        call.tokens(check_values=True)
    saved, given = setup.make_saved(call, config), as_kernels_take_it(call)
    run = setup.make_run(
        given, given.options, saved.vectors, call.weight_grad_out, given.class_weight, weight=saved.weight
    )
    made = walks.forward(run, given, config, saved, asked=Asked(entropy=options.return_stats))
    known = made.lse, made.log_prob, made.entropy, made.top1
    loss, *stats = LOSS.stated(call, _results, given.ids, made.uniform_loss, *known)
    assert loss is not None
    return TritonOutputs(SoftOutputs(loss, made.lse, made.log_prob, None, None, soft.SoftStats(*stats)), saved)


def _results(call: SoftCall, *tensors: Any) -> list[Tensor | None]:
    """The loss, and the fields of its statistics."""
    ids, uniform, lse, log_prob, entropy, top1 = tensors
    losses = soft.token_losses(call.options, lse, log_prob, uniform, call.probs())
    loss = soft.reduced(call.options, losses, call.tokens(check_values=False), call.hidden.shape[:-1])
    known = lse, log_prob, entropy, top1, call.probs(weighed=False), ids.reshape(log_prob.shape)
    return [loss, *soft.id_stats(*known)]


def _fake(call: SoftCall) -> TritonOutputs:
    out = SoftOutputs.empty(call.options, call.hidden, call.labels, dense=False)
    return TritonOutputs(out, setup.make_saved(call, setup.plan(call), fake=True))


def _save(call: SoftCall, made: TritonOutputs) -> Kept:
    return Kept(call, setup.plan(call), made.out.lse, made.out.log_prob, made.saved)


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    """Turn hidden's and weight's memory into their gradients, and use up the scratch memory."""
    from onchip.vocab.triton import records, walks

    call = kept.call
    given = as_kernels_take_it(call)
    run = setup.make_run(
        given,
        given.options,
        kept.saved.vectors,
        call.weight_grad_out,
        given.class_weight,
        weight=setup.weight_in_backward(given, kept.config, kept.saved),
    )
    (grad_loss,) = upstream
    known = records.TokenSoftmax(kept.lse, kept.log_prob)
    by_output = walks.OutputGradients(*LOSS.stated(call, _by_outputs, grad_loss, kept.lse, kept.log_prob))
    return walks.backward(run, given, kept.config, kept.saved, known, by_output, wanted, add_to=call.weight_grad_out)


def _by_outputs(call: SoftCall, *tensors: Any) -> list[Tensor | None]:
    """The fields of the second that `gradient_by_outputs` returns."""
    grad_loss, lse, log_prob = tensors
    return [*gradient_by_outputs(call, (grad_loss,), lse, log_prob)[1]]


def gradient_by_outputs(call: SoftCall, upstream: Made, lse: Tensor, log_prob: Tensor) -> tuple[Any, Any]:
    """What the kernels' backward takes: the softmax, and the loss's gradient by its logarithms."""
    from onchip.vocab.triton import records, walks

    (grad_loss,) = upstream
    assert grad_loss is not None
    tokens = call.tokens(check_values=False)
    row = tokens.weight * tokens.upstream(grad_loss, call.options.reduction)
    by_log_prob, by_lse = soft.by_outputs(call.options, row, lse, call.probs(), call.class_weight)
    even, own = None, None
    if call.options.label_smoothing > 0:
        even = row * (call.options.label_smoothing / call.vocab)
        each = torch.ones_like(by_log_prob) if call.class_weight is None else call.class_weight[tokens.ids]
        own = -even[:, None] * each
    by_output = walks.OutputGradients(by_log_prob.contiguous(), by_lse, even=even, rest=own)
    return records.TokenSoftmax(lse, log_prob), by_output


LOSS = Operator(
    "linear_cross_entropy_soft_in_place",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    adds_to={"weight": "weight_grad_out"},
    **(setup.IN_PLACE | {"consumed": ("hidden_memory", "weight_memory", "scratch_memory")}),
)
