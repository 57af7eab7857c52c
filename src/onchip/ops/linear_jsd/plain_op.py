"""The operator of linear_jsd and jsd for PyTorch with the framework's own products.

`_forward` walks over chunks of tokens (torch_walk.py).  Where hidden states are given and the loss is one number, that
walk computes the gradients too, and backward scales them.  Otherwise backward walks again, in `_gradients`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend.torch_autograd import is_plain_one, scale_stash
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.linear_jsd.torch_call import NO_GRADIENTS, PARAMETERS, JsdCall, JsdModel
from onchip.ops.linear_jsd.torch_walk import losses_and_gradients


class JsdPlainOutputs(NamedTuple):
    """The loss; with `stash` the gradients in the dtype of sums for an upstream gradient of 1."""

    loss: Tensor
    student: JsdModel
    teacher: JsdModel


class JsdPlainKept(NamedTuple):
    """What forward keeps for backward: with `stash` the gradients to scale, and no input; otherwise the call."""

    call: JsdCall
    student: JsdModel
    teacher: JsdModel
    gradient_dtypes: tuple[torch.dtype, ...]  # of the parameters; float32 for those that are None


def _forward(call: JsdCall) -> JsdPlainOutputs:
    call.check_ranks()
    call = call.of_all_tokens()
    tokens, grads = call.tokens(check=True), call.grads if call.stash else NO_GRADIENTS
    losses, made = losses_and_gradients(call, tokens, tokens.weight * tokens.inverse_count, grads)
    return JsdPlainOutputs(call.reduced(tokens, losses), JsdModel(*made[:4]), JsdModel(*made[4:]))


def _fake(call: JsdCall) -> JsdPlainOutputs:
    made = call.empty_gradients(call.grads if call.stash else NO_GRADIENTS, call.dtype)
    return JsdPlainOutputs(call.new_loss(), JsdModel(*made[:4]), JsdModel(*made[4:]))


def _save(call: JsdCall, made: JsdPlainOutputs) -> JsdPlainKept:
    dtypes = tuple(torch.float32 if x is None else x.dtype for x in call.parameters)
    if call.stash:
        nothing: Any = dict.fromkeys(("indices", "values", "target", "token_weight", "normalizer"))
        call = call._replace(student=JsdModel(), teacher=JsdModel(), **nothing)
    return JsdPlainKept(call, made.student, made.teacher, dtypes)


def _gradients(kept: JsdPlainKept, upstream: Made, wanted: Wanted) -> Made:
    (grad_loss,) = upstream
    assert grad_loss is not None
    made: Made = (*kept.student, *kept.teacher)
    if kept.call.stash:
        factor = None if is_plain_one(grad_loss) else grad_loss
    else:
        call, factor = kept.call.of_all_tokens(), None
        tokens = call.tokens(check=False)
        row = tokens.weight * tokens.upstream(grad_loss, call.options.reduction)
        made = losses_and_gradients(call, tokens, row, wanted)[1]
    return [
        scale_stash(x, factor, dtype) if want and x is not None else None
        for x, dtype, want in zip(made, kept.gradient_dtypes, wanted, strict=True)
    ]


OPERATOR = Operator(
    "jsd_by_products",
    op=lambda call: call.options.op,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=lambda kept, upstream, wanted: kept.call.empty_gradients(wanted, None),
    differentiable=PARAMETERS,
    flops=lambda call: call.flops(call.grads if call.stash else NO_GRADIENTS, logits=True),
    gradient_flops=lambda kept, upstream, wanted: kept.call.flops(wanted, logits=False),
    direct=lambda kept: kept.call.stash,
)
