"""linear_cross_entropy for PyTorch on its own matrix products: the operators of backend 'plain'.

'recompute' computes the gradients in backward, from logits that it computes again; 'stash' computes them in forward,
for an upstream gradient of 1.  The computation is in `vocab.torch`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_autograd import is_plain_one, scale_stash
from onchip.frontend.torch_inputs import accumulator
from onchip.frontend.torch_register import Made, Wanted
from onchip.ops.linear_cross_entropy.torch_call import LOSS, LinearCrossEntropyCall
from onchip.vocab.torch import walk
from onchip.vocab.torch.call import DIFFERENTIABLE
from onchip.vocab.torch.loss import LossOutputs, loss_gradient, scaled_rows
from onchip.vocab.torch.operator import LossMade, products
from onchip.vocab.torch.softmax import TokenGradient


class Stash(NamedTuple):
    """The gradients, in the dtype of sums, for an upstream gradient of 1; None if not wanted or not made in forward."""

    grad_hidden: Tensor | None = None
    grad_weight: Tensor | None = None
    grad_bias: Tensor | None = None


ADDS_TO = {"weight": "weight_grad_out"}
RECOMPUTED = products(LOSS, adds_to=ADDS_TO)


class KeptStash(NamedTuple):
    """What 'stash' keeps for backward: neither hidden nor weight, but the target, which tells ignored tokens."""

    stash: Stash
    target: Tensor
    weight_grad_out: Tensor | None
    dtypes: tuple[torch.dtype, ...]  # of hidden, weight and bias
    reduction: str
    ignore_index: int


def _forward(call: LinearCrossEntropyCall) -> LossMade[LossOutputs, Stash]:
    options, tokens = call.options, call.tokens(check_values=call.options.check_inputs)
    row, grad_scale = scaled_rows(tokens, options, tokens.inverse_count, call.operand)

    def gradient(lse: Tensor, log_prob: Tensor, t0: int, t1: int) -> TokenGradient:
        return loss_gradient(options, row[t0:t1], lse, log_prob, call.vocab, tokens.part(t0, t1))

    config = call.plan("stash", tokens)
    stats, made = walk.stash(call, tokens, config, gradient, LOSS.asked(call), grad_scale=grad_scale)
    return LossMade(LossOutputs.of(call, stats, tokens), Stash(*made))


def _fake(call: LinearCrossEntropyCall) -> LossMade[LossOutputs, Stash]:
    pairs, total = zip((call.hidden, call.weight, call.bias), call.grads, strict=True), accumulator(call.dtype)
    made = [x.new_empty(x.shape, dtype=total) if x is not None and wanted else None for x, wanted in pairs]
    return LossMade(LOSS.empty(call, False), Stash(*made))


def _save(call: LinearCrossEntropyCall, made: LossMade[LossOutputs, Stash]) -> KeptStash:
    options = call.options
    return KeptStash(made.saved, call.ids, call.weight_grad_out, call.dtypes, options.reduction, options.ignore_index)


def _gradients(kept: KeptStash, upstream: Made, wanted: Wanted) -> Made:
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


STASHED = LOSS.operator(
    "stash",
    Stash,
    kept=KeptStash,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=None,
    differentiable=DIFFERENTIABLE,
    adds_to=ADDS_TO,
    flops=lambda call: call.flops * (1 + call.grads[0] + call.grads[1]),
)
