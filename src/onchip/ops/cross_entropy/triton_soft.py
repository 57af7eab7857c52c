"""cross_entropy for PyTorch with soft labels of K ids, on Triton kernels: those of K ids' log-probabilities.

Forward reads each row of logits once, and so does backward.  The loss, and the ids' own entries of the gradient, are
made of a few of PyTorch's operations on numbers of tokens and ids.
"""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.kernels.triton.launch import device_of
from onchip.ops.cross_entropy.soft_call import Kept, SoftCall, SoftMade, fake, fake_gradients, save
from onchip.ops.cross_entropy.spec import OP
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.rows.launches import launch_ids, shares_of_ids
from onchip.vocab.torch.loss import Outputs, asked_by, loss_gradient, scaled_rows
from onchip.vocab.torch.softmax import TokenGradient, TokenStats


def _forward(call: SoftCall) -> SoftMade:
    options, ids = call.options, stated.call(_ids, call.ids, call.options.ignore_index)
    if options.check_inputs:
        call.tokens(check_values=True)
    if options.scratch_bytes is not None:
        row_memory.plan(call.problem(triton=True), "", options.scratch_bytes)
    asked = asked_by(options, call.class_weight)

    def empty(wanted: bool = True, *more: int, dtype: torch.dtype = torch.float32) -> Any:
        return stated.empty((call.number, *more), dtype, call.logits.device) if wanted else None

    lse, log_prob, entropy = empty(), empty(True, call.several), empty(asked.entropy)
    argmax, uniform = empty(asked.entropy, dtype=torch.int64), empty(asked.mean_logits)
    if call.number > 0:
        launch_ids(
            "log_probs", call.logits, None, ids, call.token_temperature, options, asked.class_weight,
            lse=lse, log_prob=log_prob, entropy=entropy, mean=empty(asked.entropy), top1=argmax, uniform=uniform,
            mean_logits=None, log_sum_sq_probs=None,
        )  # fmt: skip
    loss, correct, *more = LOSS.stated(call, _results, lse, log_prob, entropy, argmax, uniform)
    shape = call.logits.shape[:-1]
    entropy, argmax = (None if x is None else x.view(shape) for x in (entropy, argmax))
    return SoftMade(Outputs(loss, lse.view(shape), log_prob.view(call.ids.shape), entropy, correct, argmax, *more))


def _results(call: SoftCall, *tensors: Any) -> list[Any]:
    """The outputs that kernels didn't make."""
    lse, log_prob, entropy, argmax, uniform = tensors
    stats = TokenStats(lse, log_prob, argmax, entropy, None, None, uniform, None)
    made = Outputs.of(call, stats, call.tokens(check_values=False))
    return [made.loss, made.correct, made.expected, made.target_logit]


def _ids(ids: Tensor, ignore_index: int) -> Tensor:
    """None is ignored: one that looks like it is out of range."""
    return torch.where(ids == ignore_index, -1, ids.to(torch.int64))


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call, options, (grad_loss,) = kept.call, kept.call.options, upstream
    assert grad_loss is not None
    (out,) = fake_gradients(kept, upstream, wanted)
    if call.number > 0:
        with device_of(out):
            ids = stated.call(_ids, call.ids, options.ignore_index)
            made = LOSS.stated(call, _by_token, grad_loss, kept.lse, kept.log_prob)
            more = dict(zip([field.name for field in fields(TokenGradient)], made, strict=True))
            for kernel in ("log_prob_gradients", "write_ids"):
                launch_ids(kernel, call.logits, out, ids, call.token_temperature, options, **more)
    return [out]


def _by_token(call: SoftCall, *tensors: Any) -> list[Tensor | None]:
    """The fields of a `TokenGradient`."""
    grad_loss, lse, log_prob = tensors
    options, tokens = call.options, call.tokens(check_values=False)
    row, _ = scaled_rows(tokens, options, tokens.upstream(grad_loss, options.reduction), torch.float32)
    known = lse.reshape(-1), log_prob.reshape(tokens.ids.shape), call.logits.shape[-1]
    gradient = loss_gradient(options, row, *known, tokens, shares_of_ids)
    return [None if x is None else x.contiguous() for x in vars(gradient).values()]


LOSS = Operator(
    "cross_entropy_soft_by_triton",
    op=OP,
    forward=_forward,
    fake=fake,
    save=save,
    gradients=_gradients,
    fake_gradients=fake_gradients,
    differentiable=("logits",),
    states=True,
)
