"""linear_cross_entropy with precision='fp8': its operators and autograd.

The three products are those of fp8_linear: hidden states and the logits' gradient with 1x128 scales along what is
summed, the weight with 128x128.  For the weight's gradient it is the hidden states that have 128x128 scales.  Forward
takes chunks of tokens: the logits of a chunk, their softmax, its gradient in FP8, hidden's gradient.  The target's own
logit, on which the loss depends most, is made of numbers that are not quantised.  The transposed FP8 gradient of all
tokens is kept, and backward makes the weight's gradient of it in one product, whose scales carry the upstream gradient:
so it is rounded once.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.backends import choose_backend
from onchip.fp8 import torch_quantize
from onchip.fp8.numbers import blocks
from onchip.fp8.torch_operands import QuantizedWeight, WeightCopies, weight_operands
from onchip.fp8.torch_products import dequantized_product, scaled_mm_product, scaled_mm_refusal
from onchip.fp8.torch_quantize import Quantized, empty_rows
from onchip.frontend.torch_inputs import DTYPES
from onchip.frontend.torch_register import Made, Wanted, register
from onchip.kernels.triton.launch import device_refusal
from onchip.ops.linear_cross_entropy.spec import OP, Options
from onchip.ops.linear_cross_entropy.torch_call import Call
from onchip.vocab.fp8 import memory as fp8_spec
from onchip.vocab.fp8 import torch as fp8_torch
from onchip.vocab.fp8.torch import Gradient, Softmax
from onchip.vocab.rows.launches import flat
from onchip.vocab.torch.loss import Outputs
from onchip.vocab.torch.tiles import spans

# What "auto" tries first.
BACKENDS = ("triton", "torch")
SCALE = "float32"
# What the logits of a chunk are stored in.
LOGITS = torch.bfloat16


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
    reasons = {"triton": _triton_refusal(device)}
    return {name: reasons.get(name) for name in BACKENDS}


def _triton_refusal(device: torch.device) -> str | None:
    return scaled_mm_refusal(device) or device_refusal(device.type, device.index, torch.bfloat16)


# ------------------------------------------------------------------------------------------------ registered operator


class Fp8Call(NamedTuple):
    """The arguments of the operator."""

    call: Call
    copies: WeightCopies
    backend: str


class Parts(NamedTuple):
    """Of what the gradients are made, for an upstream gradient of 1; what isn't asked for is empty."""

    grad_hidden: Tensor  # float32
    columns: Tensor  # the logits' gradient, transposed in FP8
    column_scales: Tensor
    grad_bias: Tensor  # float32


class Fp8Outputs(NamedTuple):
    """What the operator returns."""

    out: Outputs
    parts: Parts


class Kept(NamedTuple):
    """What backward is given: not the weight, of which all that it needs was multiplied in forward."""

    parts: Parts
    hidden: Tensor | None  # where weight needs a gradient
    target: Tensor
    weight_grad_out: Tensor | None
    hidden_dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype
    backend: str
    ignore_index: int
    reduction: str


def _forward(arguments: Fp8Call) -> Fp8Outputs:
    call, options = arguments.call, arguments.call.options
    shape = call.target.shape
    # Of the inputs' own dtypes, whatever autocast's.
    problem = replace(call.problem("cuda" if arguments.backend == "triton" else "cpu"), dtype=DTYPES[call.hidden.dtype])
    if options.check_inputs or not call.hidden.is_cuda:
        call.tokens(check_values=True)
    softmax = Softmax.empty(call.target.numel(), call.hidden, stats=options.return_stats)
    logits_call = fp8_torch.Call(
        call.target.reshape(-1).to(torch.int64).contiguous(),
        None if call.token_weight is None else flat(call.token_weight),
        None if call.token_temperature is None else flat(call.token_temperature.expand(shape)),
        call.divisor(call.target != options.ignore_index),
        options,
    )
    kept = _walk(arguments, logits_call, fp8_spec.plan(problem, call.budget), softmax)
    out = Outputs(
        softmax.loss.view(shape) if options.reduction == "none" else softmax.loss.sum() / logits_call.divisor,
        softmax.lse.view(shape),
        softmax.log_prob.view(shape),
        None if softmax.entropy is None else softmax.entropy.view(shape),
        None if softmax.correct is None else softmax.correct.view(shape),
    )
    return Fp8Outputs(out, kept)


def _fake(arguments: Fp8Call) -> Fp8Outputs:
    return Fp8Outputs(arguments.call.empty_outputs(), _empty_parts(arguments.call))


def _empty_parts(call: Call) -> Parts:
    """Memory for what backward needs."""
    vocab, hidden = call.weight.shape[0], call.hidden
    grad_hidden, grad_weight, grad_bias = call.grads
    columns = empty_rows(vocab, call.target.numel(), "e4m3", hidden) if grad_weight else torch_quantize.nothing(hidden)
    return Parts(
        hidden.new_empty(hidden.shape if grad_hidden else 0, dtype=torch.float32),
        *columns,
        hidden.new_empty(vocab if grad_bias else 0, dtype=torch.float32),
    )


def _backend(name: str, device: torch.device) -> tuple[Any, Any, Callable[..., Tensor]]:
    """What quantises, what takes the softmax of a chunk's logits, and the product of quantised operands."""
    # Triton's interpreter, on the CPU, has no cuBLAS beside it.
    product = scaled_mm_product if name == "triton" and device.type == "cuda" else dequantized_product
    if name == "torch":
        return torch_quantize, fp8_torch, product
    from onchip.fp8 import triton_launches
    from onchip.vocab.fp8 import launches

    return triton_launches, launches, product


def _walk(arguments: Fp8Call, logits_call: fp8_torch.Call, chunk: int, softmax: Softmax) -> Parts:
    """Fill `softmax`, chunk by chunk, and return what backward needs."""
    a = arguments.call
    tokens, (vocab, size) = a.target.numel(), a.weight.shape
    quantize, softmaxes, product = _backend(arguments.backend, a.hidden.device)
    kept = _empty_parts(a)
    grad_hidden, columns, column_scales, grad_bias = kept
    wanted = any(a.grads)
    weight, transposed = weight_operands(
        OP,
        a.weight,
        arguments.copies,
        SCALE,
        quantize.quantize_weight,
        transposed=a.grads[0],
        check=a.options.check_inputs,
    )
    bias = None if a.bias is None else a.bias.to(LOGITS).contiguous()  # as kernels take it
    hidden = a.hidden.reshape(-1, size)
    ignored = (logits_call.target == a.options.ignore_index)[:, None]
    if a.grads[2]:
        grad_bias.zero_()
    for start, stop in spans(tokens, chunk):
        n = stop - start
        # An ignored token's hidden state may be NaN, and its row of the gradient is 0 times something.
        h = hidden[start:stop].masked_fill(ignored[start:stop], 0).contiguous()
        rows, _ = quantize.quantize_activation(h, "e4m3", SCALE, rows=True, columns=False)
        logits = product(rows, weight, True, bias, LOGITS, None)
        of_targets = softmaxes.target_logits(h, a.weight, bias, logits_call.target[start:stop])
        del h, rows
        into = Gradient(
            empty_rows(n, vocab, "e4m3", a.hidden) if a.grads[0] else None,
            Quantized(columns, column_scales) if a.grads[1] else None,
            grad_bias.new_empty(blocks(n), vocab) if a.grads[2] else None,
        )
        softmaxes.softmax_of_chunk(logits_call, logits, of_targets, start, softmax, into if wanted else None)
        del logits
        if a.grads[0]:
            made = product(into.rows, transposed, True, None, torch.float32, None)
            grad_hidden.view(-1, size)[start:stop] = made
            del made
        if into.sums is not None:
            grad_bias += into.sums.sum(0)
        del into  # before the next chunk's is made
    return kept


def _save(arguments: Fp8Call, made: Fp8Outputs) -> Kept:
    call, options = arguments.call, arguments.call.options
    return Kept(
        made.parts,
        call.hidden if call.grads[1] else None,
        call.target,
        call.weight_grad_out,
        *call.dtypes,
        arguments.backend,
        options.ignore_index,
        options.reduction,
    )


def _gradients(kept: Kept, upstreams: Made, wanted: Wanted) -> Made:
    grad_loss = upstreams[0]
    assert grad_loss is not None
    grad_hidden = grad_weight = grad_bias = None
    counted = kept.target != kept.ignore_index
    upstream = grad_loss.float()
    if kept.reduction == "none":
        upstream = upstream.masked_fill(~counted, 0)[..., None]
    if wanted[0]:
        out = torch.empty_like(kept.parts.grad_hidden, dtype=kept.hidden_dtype)
        grad_hidden = torch.mul(kept.parts.grad_hidden, upstream, out=out)
    if wanted[1]:
        assert kept.hidden is not None
        quantize, _, product = _backend(kept.backend, kept.hidden.device)
        # Not 0 times it: an ignored token's hidden state may be NaN.
        h = kept.hidden.masked_fill(~counted[..., None], 0)
        if kept.reduction == "none":
            h = h * upstream
        h = h.reshape(-1, h.shape[-1])
        if len(h) == 0:
            grad_weight = grad_loss.new_zeros((len(kept.parts.columns), h.shape[1]), dtype=kept.weight_dtype)
        else:
            _, turned = quantize.quantize_weight(h, SCALE, rows=False, transposed=True)
            if kept.reduction != "none":
                turned.scales.mul_(upstream)
            columns = Quantized(kept.parts.columns, kept.parts.column_scales)
            grad_weight = product(columns, turned, True, None, kept.weight_dtype, kept.weight_grad_out)
        if kept.weight_grad_out is not None:
            grad_weight = None
    if wanted[2]:
        grad_bias = (kept.parts.grad_bias * upstream).to(kept.bias_dtype)
    return grad_hidden, grad_weight, grad_bias


def _fake_gradients(kept: Kept, upstreams: Made, wanted: Wanted) -> Made:
    like = kept.target
    grad_weight = None
    if wanted[1] and kept.weight_grad_out is None and kept.hidden is not None:
        grad_weight = like.new_empty((kept.parts.columns.shape[0], kept.hidden.shape[-1]), dtype=kept.weight_dtype)
    return (
        like.new_empty(kept.parts.grad_hidden.shape, dtype=kept.hidden_dtype) if wanted[0] else None,
        grad_weight,
        like.new_empty(kept.parts.grad_bias.shape, dtype=kept.bias_dtype) if wanted[2] else None,
    )


LOSS = register(
    "linear_cross_entropy_in_fp8",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    differentiable=("hidden", "weight", "bias"),
    adds_to={"weight": "weight_grad_out"},
)


def arguments_of(call: Call, quantized: QuantizedWeight | None, backend: str) -> Fp8Call:
    """The arguments of the operator, of a call."""
    check_options(call.options, grad_bias=call.grads[2])
    copies = WeightCopies(None, None, None, None) if quantized is None else WeightCopies(*quantized[1:5])
    return Fp8Call(call, copies, choose_backend(OP, backend, refusals(call.hidden.device)))
