"""linear_cross_entropy with precision='fp8': its operator and autograd.

Forward makes hidden's gradient and keeps the logits' in FP8, both for an upstream gradient of 1.  Backward multiplies
with the upstream gradient and makes the weight's.  The walk is `vocab.fp8.walk`.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.backends import choose_backend
from onchip.fp8.torch_operands import Copies, QuantizedWeight, check_unchanged, copies_of, quantizer
from onchip.fp8.torch_products import multiply, scaled_mm_refusal
from onchip.fp8.torch_quantize import operand
from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_autograd import scale_stash
from onchip.frontend.torch_inputs import DTYPES, torch_refusal
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.frontend.torch_types import LossStats
from onchip.kernels.triton.launch import device_refusal
from onchip.ops.linear_cross_entropy.soft_call import SoftCall
from onchip.ops.linear_cross_entropy.spec import OP, Options
from onchip.ops.linear_cross_entropy.torch_call import Call
from onchip.vocab.fp8 import memory, walk
from onchip.vocab.fp8.torch import Call as LogitsCall
from onchip.vocab.fp8.walk import QUANTIZERS, SCALE, Parts, products_of
from onchip.vocab.rows.launches import flat
from onchip.vocab.torch.loss import Outputs


def check_options(options: Options, *, grad_bias: bool) -> None:
    """Raise for what this precision can't do."""
    if options.strategy == "recompute":
        raise ValueError(
            f"{OP}: precision='fp8' computes logits once and keeps their gradient; pass strategy='auto', or "
            "precision='full' to recompute"
        )
    if options.reduction == "none" and grad_bias:
        raise ValueError(
            f"{OP}: with precision='fp8' and reduction='none' bias gets no gradient, as it is summed over tokens "
            "before their upstream gradients are known; pass bias.detach(), another reduction, or precision='full'"
        )


def refusals(device: torch.device) -> dict[str, str | None]:
    """Why each backend can't serve a call on this device, or None; in the order in which "auto" tries them."""
    triton = scaled_mm_refusal(device) or device_refusal(device.type, device.index, torch.bfloat16)
    return {"triton": triton, "torch": torch_refusal(device)}


class Fp8Call(NamedTuple):
    """The arguments of the operator."""

    call: Call
    copies: Copies  # of the weight
    check_weight: bool  # compare the copies, which the caller made, with it
    backend: str


class SoftFp8Call(NamedTuple):
    """The same of soft labels."""

    call: SoftCall
    copies: Copies
    check_weight: bool
    backend: str


class Fp8Outputs(NamedTuple):
    """What the operator returns."""

    out: Outputs
    parts: Parts


class Kept(NamedTuple):
    """What backward is given: not the weight, of which all that it needs was multiplied in forward."""

    parts: Parts
    hidden: Tensor | None  # where weight needs a gradient
    target: Tensor | None  # to tell ignored tokens by; None of soft labels, which count all
    weight_grad_out: Tensor | None
    dtypes: tuple[torch.dtype, ...]  # of hidden, weight and bias
    backend: str
    ignore_index: int
    reduction: str


def _logits_call(call: Call) -> LogitsCall:
    """What is asked of the logits."""
    ids, labels = call.ids.to(torch.int64).reshape(-1).contiguous(), None
    kept = ids != call.options.ignore_index
    if isinstance(call, SoftCall):
        kept, labels = torch.full((), call.number, dtype=torch.int64, device=ids.device), call.labels
        if not call.dense:
            ids, labels = ids.view(call.number, call.several), call.probs(weighed=False)
    return LogitsCall(
        ids,
        None if call.token_weight is None else flat(call.token_weight),
        None if call.token_temperature is None else flat(call.token_temperature.expand(call.hidden.shape[:-1])),
        labels,
        call.divisor(kept),
        call.class_weight,
        call.options,
    )


def _forward(arguments: Fp8Call) -> Fp8Outputs:
    call, options, backend = arguments.call, arguments.call.options, arguments.backend
    if arguments.check_weight:
        check_unchanged(OP, call.weight, arguments.copies, SCALE, QUANTIZERS[backend])
    if options.check_inputs or not call.hidden.is_cuda:
        call.tokens(check_values=True)
    # Of the inputs' own dtypes, whatever autocast's.
    device, more = "cuda" if backend == "triton" else "cpu", {"per_token_loss": options.reduction == "none"}
    if isinstance(call, SoftCall):
        more |= {"stats": options.return_stats, "class_weight": call.class_weight is not None}
    problem = replace(call.problem(device, **more), dtype=DTYPES[call.hidden.dtype])
    shape, logits_call = call.hidden.shape[:-1], _logits_call(call)
    source = walk.Source(backend, call.hidden, call.weight, arguments.copies, call.bias, logits_call)
    softmax, parts = walk.forward(source, call.hidden, call.grads, memory.plan(problem, call.budget))
    out = Outputs._make(None if x is None else x.view(shape) for x in softmax)
    if options.reduction != "none":
        out = out._replace(loss=softmax.loss.sum() / logits_call.divisor)
    return Fp8Outputs(out, parts)


def _fake(arguments: Fp8Call) -> Fp8Outputs:
    call = arguments.call
    return Fp8Outputs(
        Outputs.empty(call.options, call.hidden, call.hidden.shape[:-1]),
        Parts.empty(call.hidden, call.weight, call.grads),
    )


def save(arguments: Fp8Call, made: Fp8Outputs) -> Kept:
    """What backward needs."""
    call, options = arguments.call, arguments.call.options
    return Kept(
        made.parts,
        call.hidden if call.grads[1] else None,
        None if isinstance(call, SoftCall) else call.target,
        call.weight_grad_out,
        call.dtypes,
        arguments.backend,
        options.ignore_index,
        options.reduction,
    )


def _gradients(kept: Kept, upstreams: Made, wanted: Wanted) -> Made:
    (grad_loss,) = upstreams
    assert grad_loss is not None
    return gradients_of(kept, upstream_of(kept, grad_loss), wanted)


def upstream_of(kept: Kept, grad_loss: Tensor) -> Tensor:
    """[] or [..., 1] float32: the upstream gradient, 0 for ignored tokens."""
    upstream = grad_loss.float()
    if kept.reduction != "none":
        return upstream
    ignored = _ignored(kept)
    return upstream[..., None] if ignored is None else upstream[..., None].masked_fill(ignored, 0)


def _ignored(kept: Kept) -> Tensor | None:
    """[..., 1] bool."""
    return None if kept.target is None else (kept.target == kept.ignore_index)[..., None]


def gradients_of(kept: Kept, upstream: Tensor, wanted: Wanted) -> Made:
    """Those that are wanted, for this upstream gradient."""
    grad_hidden, grad_bias = (
        scale_stash(x, upstream, kept.dtypes[i]) if wanted[i] and x is not None else None
        for i, x in ((0, kept.parts.grad_hidden), (2, kept.parts.grad_bias))
    )
    if not wanted[1]:
        return grad_hidden, None, grad_bias
    assert kept.hidden is not None
    ignored, per_token = _ignored(kept), kept.reduction == "none"
    # Not 0 times it: an ignored token's hidden state may be NaN.
    h = kept.hidden if ignored is None else kept.hidden.masked_fill(ignored, 0)
    if per_token:
        h = h * upstream
    h, add_to = h.reshape(-1, h.shape[-1]), kept.weight_grad_out
    _, turned = quantizer(QUANTIZERS[kept.backend])(h, "e4m3", SCALE, by_block=True, rows=False)
    if not per_token and turned is not None:
        stated.call(Tensor.mul_, turned.scales, upstream)
    products, columns = products_of(kept.backend, h), operand(kept.parts.columns, kept.parts.column_scales)
    made = multiply(products, columns, turned, by_block=True, dtype=kept.dtypes[1], add_to=add_to)
    return grad_hidden, made if add_to is None else None, grad_bias


def _fake_gradients(kept: Kept, upstreams: Made, wanted: Wanted) -> Made:
    grad_hidden, grad_bias = (
        stated.empty_like(x, kept.dtypes[i]) if wanted[i] and x is not None else None
        for i, x in ((0, kept.parts.grad_hidden), (2, kept.parts.grad_bias))
    )
    grad_weight, columns = None, kept.parts.columns
    if wanted[1] and columns is not None and kept.hidden is not None and kept.weight_grad_out is None:
        grad_weight = stated.empty((len(columns), kept.hidden.shape[-1]), kept.dtypes[1], kept.hidden.device)
    return grad_hidden, grad_weight, grad_bias


def flops(arguments: Any) -> int:
    """Of the logits, and of hidden's gradient, which forward makes."""
    made: int = arguments.call.flops * (1 + arguments.call.grads[0])
    return made


def weight_flops(kept: Kept, upstreams: Made, wanted: Wanted) -> int:
    """Of weight's gradient."""
    if not wanted[1] or kept.hidden is None or kept.parts.columns is None:
        return 0
    size = kept.hidden.shape[-1]
    tokens = kept.hidden.numel() // size if kept.target is None else kept.target.numel()  # of all ranks
    return 2 * len(kept.parts.columns) * tokens * size


DECLARED: dict[str, Any] = {
    "op": OP,
    "fake": _fake,
    "save": save,
    "gradients": _gradients,
    "fake_gradients": _fake_gradients,
    "differentiable": ("hidden", "weight", "bias"),
    "adds_to": {"weight": "weight_grad_out"},
    "flops": flops,
    "gradient_flops": weight_flops,
}


def _soft_forward(arguments: SoftFp8Call) -> Fp8Outputs:
    return _forward(Fp8Call(*arguments))


LOSS: Operator[Any, Fp8Outputs] = Operator("linear_cross_entropy_in_fp8", forward=_forward, **DECLARED)
SOFT: Operator[Any, Fp8Outputs] = Operator("linear_cross_entropy_soft_in_fp8", forward=_soft_forward, **DECLARED)


def soft_stats(out: Outputs, call: SoftCall) -> LossStats:
    """What the caller gets with return_stats, of soft labels."""
    mass = call.labels.sum(-1, dtype=torch.float32) if call.dense else call.probs(weighed=False).sum(1)
    mass, stats = mass.view(call.hidden.shape[:-1]), out.stats()
    return stats._replace(target_logit=torch.where(mass == 0, 0, stats.log_prob + mass * stats.lse))


def check_dtypes(weight: Tensor | QuantizedWeight, precision: str, dtype: torch.dtype) -> None:
    """Raise for a weight, or products of a dtype, that a precision doesn't take."""
    if isinstance(weight, QuantizedWeight) and precision != "fp8":
        raise TypeError(f"{OP}: weight is a QuantizedWeight, which precision='fp8' alone takes; pass the weight itself")
    if precision == "fp8" and dtype == torch.float64:
        raise TypeError(f"{OP}: precision='fp8' takes no float64; pass precision='full', or cast hidden and weight")


def arguments_of(call: Call, weight: Tensor | QuantizedWeight, backend: str) -> Fp8Call | SoftFp8Call:
    """The arguments of the operator, of a call."""
    check_options(call.options, grad_bias=call.grads[2])
    chosen = choose_backend(OP, backend, refusals(call.hidden.device))
    wanted = "hidden" if call.grads[0] else None
    copies = copies_of(OP, weight, SCALE, QUANTIZERS[chosen], by_block=True, wanted=wanted)
    check = weight is not call.weight and (call.options.check_inputs or not call.weight.is_cuda)
    if isinstance(call, SoftCall):
        return SoftFp8Call(call, copies, check, chosen)
    return Fp8Call(call, copies, check, chosen)
