"""log_probs for PyTorch on the Triton kernels: what its operator computes, forward and backward.

Forward reads each row of logits once.  Backward reads it once more and writes the gradient; the ids' own entries are
written over it by another kernel.
"""

from dataclasses import fields
from functools import partial

from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_register import Made, Wanted
from onchip.ops.linear_log_probs.rows_call import Kept, RowsCall
from onchip.ops.linear_log_probs.spec import LogitsOptions
from onchip.ops.linear_log_probs.torch_call import Outputs
from onchip.ops.linear_log_probs.torch_op import TorchOutputs, gradient_by_outputs
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.rows.launches import launch_ids, shares_of_ids
from onchip.vocab.torch.softmax import TokenGradient


def forward(call: RowsCall) -> TorchOutputs:
    options = call.options
    if options.scratch_bytes is not None:
        row_memory.plan(call.problem(kernels=True), "", options.scratch_bytes)
    if options.check_inputs:
        call.tokens(check_values=True)  # for its checks alone
    made = fake(call)
    if call.number > 0:
        out = made.out._asdict()
        launch_ids("log_probs", call.logits, None, call.ids, call.token_temperature, options, **out, mean=made.mean)
    return made


def fake(call: RowsCall) -> TorchOutputs:
    """Memory for the outputs."""
    options = call.options
    out = Outputs.empty(options, call.logits, call.ids, entropy=options.entropy, top1=options.top1)
    return TorchOutputs(out, stated.empty_like(out.lse) if options.entropy else None)


def gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    call = kept.call
    out = stated.empty_like(call.logits)
    if call.number > 0:
        tensors = *call[:3], *kept[1:], *upstream
        made = stated.call(partial(_by_token, call.options, call.grads), *tensors)
        more = dict(zip([field.name for field in fields(TokenGradient)], made, strict=True))
        for kernel in ("log_prob_gradients", "write_ids"):
            launch_ids(kernel, call.logits, out, call.ids, call.token_temperature, call.options, **more)
    return [out]


def _by_token(options: LogitsOptions, grads: tuple[bool, ...], *tensors: Tensor | None) -> list[Tensor | None]:
    """The fields of a `TokenGradient`, [T] or [T, K], of a call's tensors, what is kept beside, and the upstream's."""
    call = RowsCall(*tensors[:3], options, grads)  # type: ignore[arg-type, call-arg]
    tokens = call.tokens(check_values=False, compact=False)
    gradient, _ = gradient_by_outputs(Kept(call, *tensors[3:7]), tensors[7:], tokens, shares_of_ids)  # type: ignore[arg-type]
    return [
        None if x is None else tokens.spread(x, (call.number, *x.shape[1:])).contiguous()
        for x in vars(gradient).values()
    ]
