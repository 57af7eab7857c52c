"""linear_log_probs for PyTorch on its own matrix products: the operator of backend 'plain'.

Forward keeps a few numbers per token, and backward walks over the logits again (`vocab.torch.walk`).
"""

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.linear_log_probs import OP
from onchip.ops.linear_log_probs.torch_call import LogProbsCall, LogProbsPlainOutputs, asked_by, gradient_by_outputs
from onchip.vocab.torch import walk
from onchip.vocab.torch.call import OF_LAYER


class LogProbsPlainKept(NamedTuple):
    """What forward keeps for backward."""

    call: LogProbsCall
    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    mean: Tensor | None


def _forward(call: LogProbsCall) -> LogProbsPlainOutputs:
    call.check_ranks()
    tokens = call.tokens(check_values=call.options.check_inputs)
    stats = walk.statistics(OP, call, tokens, asked_by(call.options))
    return LogProbsPlainOutputs.of(call.options, stats, tokens, call.leading, call.ids)


def _fake(call: LogProbsCall) -> LogProbsPlainOutputs:
    return LogProbsPlainOutputs.empty(call.options, call.hidden, call.leading, call.ids)


def _save(call: LogProbsCall, made: LogProbsPlainOutputs) -> LogProbsPlainKept:
    return LogProbsPlainKept(call, made.out.log_prob, made.out.entropy, made.out.lse, made.mean)


def _gradients(kept: LogProbsPlainKept, upstream: Made, wanted: Wanted) -> Made:
    call = replace(kept.call, grads=tuple(wanted))
    tokens = call.tokens(check_values=False)
    gradient, grad_scale = gradient_by_outputs(kept, upstream, tokens)
    return walk.gradients(call, tokens, gradient, grad_scale, stats=gradient.entropy_row is not None)


LOG_PROBS = Operator(
    "linear_log_probs_by_recomputation",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=lambda kept, upstream, wanted: kept.call.empty_gradients(wanted),
    differentiable=("hidden", "weight", "bias"),
    differentiable_outputs=3,
    **OF_LAYER,
)
