"""cross_entropy for PyTorch on the Triton kernels: what its operator computes, forward and backward.

`forward` computes the loss; where that is one number and a gradient is wanted, it also makes the gradient of that
number while the logits are in the caches, into a tensor of its own.  `gradients` leaves that as it is where the
upstream gradient turns out to be 1, which the device alone knows, and else writes it anew from the logits, so that it
is rounded once.  With reduction="none" or inplace_backward the logits are read in forward and again in backward.
"""

import torch

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_inputs import DTYPES
from onchip.frontend.torch_register import Made, Wanted
from onchip.kernels.triton.launch import device_of
from onchip.ops.cross_entropy import torch_inputs
from onchip.ops.cross_entropy.spec import OP
from onchip.ops.cross_entropy.torch_inputs import Call, Kept, Outputs
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.rows.launches import count_targets, flat, launch_rows, reduce_losses
from onchip.vocab.rows.memory import Problem
from onchip.vocab.torch import tiles as torch_tiles


def fused(call: Call) -> bool:
    """Whether forward makes the gradient."""
    return call.grads[0] and not call.options.inplace_backward and call.options.reduction != "none"


def forward(call: Call) -> Outputs:
    logits, options, tokens = call.logits, call.options, call.target.numel()
    if options.scratch_bytes is not None:
        problem = Problem(
            tokens,
            logits.shape[-1],
            DTYPES[logits.dtype],
            "cuda",
            grad=call.grads[0],
            triton=True,
            class_weight=call.class_weight is not None,
        )
        row_memory.plan(problem, "", options.scratch_bytes)
    if options.check_inputs:
        call.tokens(check_values=True)  # for its checks alone
    mean = options.reduction == "mean"
    if mean and call.normalizer is None:
        divisor = count_targets(call.target, options.ignore_index)
    else:
        divisor = torch_tiles.divisor(
            OP, options.reduction, call.normalizer, stated.call(torch.ne, call.target, options.ignore_index)
        )
    made, losses = fake(call)._replace(divisor=divisor), stated.empty(call.target.shape, torch.float32, logits.device)
    out = made.out._replace(loss=losses)
    if tokens > 0:
        launch_rows(
            "losses", logits, made.gradient, call.target, call.token_weight, call.token_temperature, options,
            class_weight=call.class_weight, **out.of_id, divisor=divisor,
        )  # fmt: skip
    if options.reduction != "none":
        out = out._replace(loss=reduce_losses(losses, None, divisor, mean=mean))
    return made._replace(out=out)


def fake(call: Call) -> Outputs:
    """Memory for the outputs."""
    logits = call.logits
    gradient = stated.empty_like(logits) if fused(call) else None
    return torch_inputs.fake(call)._replace(divisor=stated.empty((), torch.float32, logits.device), gradient=gradient)


def gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    """The gradient of the logits in `kept.gradient`, where forward hasn't made it and the upstream gradient is 1; or in
    memory that is returned."""
    call = kept.call
    out = kept.gradient if fused(call) else kept.new_gradient()
    assert out is not None
    (grad_loss,) = upstream
    assert grad_loss is not None
    if call.target.numel() > 0:
        if kept.overwrites:  # kernels write past autograd
            torch.autograd.graph.increment_version(out)
        with device_of(out):
            launch_rows(
                "gradients", out if kept.overwrites else call.logits, out, call.target, call.token_weight,
                call.token_temperature, call.options, class_weight=call.class_weight, divisor=kept.divisor,
                lse=flat(kept.lse), log_prob=flat(kept.log_prob), grad_loss=flat(grad_loss),
                PER_TOKEN=call.options.reduction == "none", UNLESS_ONE=fused(call),
            )  # fmt: skip
    return [None if fused(call) else out]


def fake_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    return [None] if fused(kept.call) else torch_inputs.fake_gradients(kept, upstream, wanted)


def collect(kept: Kept, made: Made, wanted: Wanted) -> Made:
    return [kept.gradient] if fused(kept.call) else made
