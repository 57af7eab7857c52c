"""linear_cross_entropy for PyTorch on its own matrix products: the operators of backend 'plain'.

'recompute' computes the gradients in backward, from logits that it computes again; 'stash' computes them in forward,
for an upstream gradient of 1.  The computation is in `vocab.torch`.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_autograd import is_plain_one, scale_stash
from onchip.frontend.torch_inputs import accumulator
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.linear_cross_entropy import OP
from onchip.ops.linear_cross_entropy.torch_call import LinearCrossEntropyCall
from onchip.vocab.torch import dense, walk
from onchip.vocab.torch.call import OF_LAYER
from onchip.vocab.torch.loss import LossOutputs, asked_by, gradient_of_loss, loss_gradient, scaled_rows
from onchip.vocab.torch.softmax import TokenGradient


class Stash(NamedTuple):
    """The gradients, in the dtype of sums, for an upstream gradient of 1; None if not wanted or not made in forward."""

    grad_hidden: Tensor | None = None
    grad_weight: Tensor | None = None
    grad_bias: Tensor | None = None


class LinearCrossEntropyPlainOutputs(NamedTuple):
    """What both operators return."""

    out: LossOutputs
    stash: Stash


# 'recompute', and 'forward' where nothing needs a gradient.


class LinearCrossEntropyPlainKept(NamedTuple):
    """What 'recompute' keeps for backward."""

    call: LinearCrossEntropyCall
    lse: Tensor
    log_prob: Tensor
    largest: Tensor | None
    mass: Tensor | None


def _forward(call: LinearCrossEntropyCall) -> LinearCrossEntropyPlainOutputs:
    call.check_ranks()
    tokens = call.tokens(check_values=call.options.check_inputs)
    if call.dense:
        return LinearCrossEntropyPlainOutputs(dense.statistics(OP, call, tokens), Stash())
    stats = walk.statistics(OP, call, tokens, asked_by(call.options, call.class_weight))
    return LinearCrossEntropyPlainOutputs(LossOutputs.of(call, stats, tokens), Stash())


def _fake(call: LinearCrossEntropyCall) -> LinearCrossEntropyPlainOutputs:
    return LinearCrossEntropyPlainOutputs(call.empty_outputs(), Stash())


def _save(call: LinearCrossEntropyCall, made: LinearCrossEntropyPlainOutputs) -> LinearCrossEntropyPlainKept:
    return LinearCrossEntropyPlainKept(call, made.out.lse, made.out.log_prob, made.out.largest, made.out.mass)


def _gradients(kept: LinearCrossEntropyPlainKept, upstream: Made, wanted: Wanted) -> Made:
    call, (grad_loss,) = replace(kept.call, grads=tuple(wanted)), upstream
    assert grad_loss is not None
    tokens = call.tokens(check_values=False)
    if call.dense:
        return dense.gradients(call, tokens, kept, grad_loss)
    gradient, grad_scale = gradient_of_loss(call, tokens, grad_loss, kept.lse, kept.log_prob)
    return walk.gradients(call, tokens, gradient, grad_scale, call.weight_grad_out)


RECOMPUTED = Operator(
    "linear_cross_entropy_by_recomputation",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=lambda kept, upstream, wanted: kept.call.empty_gradients(wanted),
    differentiable=("hidden", "weight", "bias"),
    adds_to={"weight": "weight_grad_out"},
    **OF_LAYER,
)


# 'stash'.


class KeptStash(NamedTuple):
    """What 'stash' keeps for backward: neither hidden nor weight, but the target, which tells ignored tokens."""

    stash: Stash
    target: Tensor
    weight_grad_out: Tensor | None
    dtypes: tuple[torch.dtype, ...]  # of hidden, weight and bias
    reduction: str
    ignore_index: int


def _stash(call: LinearCrossEntropyCall) -> LinearCrossEntropyPlainOutputs:
    options, tokens = call.options, call.tokens(check_values=call.options.check_inputs)
    row, grad_scale = scaled_rows(tokens, options, tokens.inverse_count, call.operand)

    def gradient(lse: Tensor, log_prob: Tensor, t0: int, t1: int) -> TokenGradient:
        return loss_gradient(options, row[t0:t1], lse, log_prob, call.vocab, tokens.part(t0, t1))

    config = call.plan("stash", tokens)
    asked = asked_by(options, call.class_weight)
    stats, made = walk.stash(call, tokens, config, gradient, asked, grad_scale=grad_scale)
    return LinearCrossEntropyPlainOutputs(LossOutputs.of(call, stats, tokens), Stash(*made))


def _fake_stash(call: LinearCrossEntropyCall) -> LinearCrossEntropyPlainOutputs:
    pairs, total = zip((call.hidden, call.weight, call.bias), call.grads, strict=True), accumulator(call.dtype)
    made = [x.new_empty(x.shape, dtype=total) if x is not None and wanted else None for x, wanted in pairs]
    return LinearCrossEntropyPlainOutputs(call.empty_outputs(), Stash(*made))


def _save_stash(call: LinearCrossEntropyCall, made: LinearCrossEntropyPlainOutputs) -> KeptStash:
    options = call.options
    return KeptStash(made.stash, call.ids, call.weight_grad_out, call.dtypes, options.reduction, options.ignore_index)


def _scaled_stash(kept: KeptStash, upstream: Made, wanted: Wanted) -> Made:
    """The stashed gradients times the upstream gradient, in their parameters' dtypes."""
    (grad_loss,) = upstream
    assert grad_loss is not None
    factor: Tensor | None = grad_loss
    if kept.reduction == "none":  # then only hidden has a gradient here: choose_strategy sees to it
        factor = grad_loss.masked_fill(kept.target == kept.ignore_index, 0)[..., None]
    elif is_plain_one(grad_loss):
        factor = None
    made: list[Tensor | None] = [None] * 3
    for i, (stashed, dtype) in enumerate(zip(kept.stash, kept.dtypes, strict=True)):
        if not wanted[i] or stashed is None:
            continue
        if i == 1 and kept.weight_grad_out is not None:
            kept.weight_grad_out.addcmul_(stashed, grad_loss)
        else:
            made[i] = scale_stash(stashed, factor, dtype)
    return made


STASHED = Operator(
    "linear_cross_entropy_with_gradients",
    op=OP,
    forward=_stash,
    fake=_fake_stash,
    save=_save_stash,
    gradients=_scaled_stash,
    fake_gradients=None,
    differentiable=("hidden", "weight", "bias"),
    adds_to={"weight": "weight_grad_out"},
    flops=lambda call: call.flops * (1 + call.grads[0] + call.grads[1]),
)
