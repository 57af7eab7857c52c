"""linear_cross_entropy with precision='fp8': its operators and autograd.

The three products are those of fp8_linear: hidden states and the logits' gradient with 1x128 scales along what is
summed, the weight with 128x128.  For the weight's gradient it is the hidden states that have 128x128 scales.  Forward
takes chunks of tokens: the logits of a chunk, their softmax, its gradient in FP8, hidden's gradient.  The target's own
logit, on which the loss depends most, is made of numbers that are not quantised.  The transposed FP8 gradient of all
tokens is kept, and backward makes the weight's gradient of it in one product, whose scales carry the upstream gradient:
so it is rounded once.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.backends import choose_backend
from onchip.fp8 import torch_quantize
from onchip.fp8.numbers import blocks
from onchip.fp8.torch_products import dequantized_product, scaled_mm_product, scaled_mm_refusal
from onchip.fp8.torch_quantize import Quantized, empty_rows
from onchip.fp8.torch_weights import WeightCopies, weight_operands
from onchip.frontend.torch_autograd import asked_for
from onchip.frontend.torch_inputs import DTYPES, copied_rows
from onchip.kernels.triton.launch import device_refusal
from onchip.ops.linear_cross_entropy import torch_tiles
from onchip.ops.linear_cross_entropy.spec import OP, Options
from onchip.ops.linear_cross_entropy.torch_tiles import differentiable_once
from onchip.vocab.fp8 import memory as fp8_spec
from onchip.vocab.fp8 import torch as fp8_torch
from onchip.vocab.fp8.torch import Call, Gradient, Softmax
from onchip.vocab.memory import Problem
from onchip.vocab.torch import tiles as shared_tiles

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


# ------------------------------------------------------------------------------------------------ registered operators


class Arguments(NamedTuple):
    """What the forward operator is told."""

    hidden: Tensor  # [..., H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    target: Tensor  # [...]
    token_weight: Tensor | None  # [...]
    token_temperature: Tensor | None  # [...] or []
    normalizer: Tensor | None  # []
    weight_grad_out: Tensor | None  # [V, H] float32; used in backward
    weight_rows: Tensor | None  # of a QuantizedWeight, as the next three
    weight_row_scales: Tensor | None
    transposed: Tensor | None
    transposed_scales: Tensor | None
    backend: str
    ignore_index: int
    reduction: str
    scratch_bytes: int | None
    numbers: list[float]  # label_smoothing, z_loss, softcap or 0, logit_scale, temperature
    flags: list[bool]  # check_inputs, stats
    grads: list[bool]  # of hidden, weight, bias

    @property
    def shapes(self) -> tuple[int, int, int]:
        """T, H and V."""
        vocab, hidden = self.weight.shape
        return self.target.numel(), hidden, vocab


# torch.compile's cache on disk knows an operator by its name alone: a release that changes a schema must rename it.
_SCHEMA = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? token_weight, Tensor? token_temperature, "
    "Tensor? normalizer, Tensor? weight_grad_out, Tensor? weight_rows, Tensor? weight_row_scales, Tensor? transposed, "
    "Tensor? transposed_scales, str backend, int ignore_index, str reduction, int? scratch_bytes, float[] numbers, "
    "bool[] flags, bool[] grads"
)


@torch.library.custom_op(
    "onchip::linear_cross_entropy_fp8_forward", mutates_args=(), schema=f"({_SCHEMA}) -> ({', '.join(['Tensor'] * 10)})"
)
def _forward_op(*args: Any) -> tuple[Tensor, ...]:
    """Return loss, lse, log_prob, entropy, correct, and what backward needs, for an upstream gradient of 1: hidden's
    gradient in float32, the logits' gradient transposed in FP8 with its scales, bias's gradient in float32.  What
    isn't asked for is empty, and so is the last, the link.
    """
    a = Arguments(*args)
    shape, (tokens, _, _) = a.target.shape, a.shapes
    check_inputs, stats = a.flags
    chunk = fp8_spec.plan(_problem(a), a.scratch_bytes)
    with torch.autocast(a.hidden.device.type, enabled=False):
        call = _call(a)
        if check_inputs or not a.hidden.is_cuda:
            _check_values(a)
        softmax = Softmax.empty(tokens, a.hidden, stats=stats)
        kept = _walk(a, call, chunk, softmax)
        loss = softmax.loss.view(shape) if a.reduction == "none" else softmax.loss.sum() / call.divisor
        blank = a.hidden.new_empty(0, dtype=torch.float32)
        return (
            loss,
            softmax.lse.view(shape),
            softmax.log_prob.view(shape),
            blank if softmax.entropy is None else softmax.entropy.view(shape),
            blank.to(torch.bool) if softmax.correct is None else softmax.correct.view(shape),
            *kept,
            loss.new_empty(0),
        )


@_forward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    a = Arguments(*args)
    stats = a.flags[1]
    per_token = [a.target.new_empty(a.target.shape, dtype=torch.float32) for _ in range(4)]
    return (
        per_token[0] if a.reduction == "none" else a.hidden.new_empty((), dtype=torch.float32),
        per_token[1],
        per_token[2],
        per_token[3] if stats else a.hidden.new_empty(0, dtype=torch.float32),
        a.target.new_empty(a.target.shape if stats else 0, dtype=torch.bool),
        *_empty_kept(a),
        a.hidden.new_empty(0, dtype=torch.float32),
    )


def _empty_kept(a: Arguments) -> tuple[Tensor, ...]:
    """Memory for what backward needs."""
    tokens, _, vocab = a.shapes
    grad_hidden, grad_weight, grad_bias = a.grads
    columns = empty_rows(vocab, tokens, "e4m3", a.hidden) if grad_weight else torch_quantize.nothing(a.hidden)
    return (
        a.hidden.new_empty(a.hidden.shape if grad_hidden else 0, dtype=torch.float32),
        *columns,
        a.hidden.new_empty(vocab if grad_bias else 0, dtype=torch.float32),
    )


class _Backend(NamedTuple):
    """How operands are quantised and multiplied, and what is done with a chunk's logits."""

    quantize_activation: Any
    quantize_weight: Any
    product: Callable[..., Tensor]
    target_logits: Callable[..., Tensor]
    softmax_of_chunk: Callable[..., None]


def _backend(name: str, device: torch.device) -> _Backend:
    # Triton's interpreter, on the CPU, has no cuBLAS beside it.
    product = scaled_mm_product if name == "triton" and device.type == "cuda" else dequantized_product
    quantize: Any = torch_quantize
    softmax: Any = fp8_torch
    if name == "triton":
        from onchip.fp8 import triton_launches as quantize
        from onchip.vocab.fp8 import launches as softmax
    return _Backend(
        quantize.quantize_activation,
        quantize.quantize_weight,
        product,
        softmax.target_logits,
        softmax.softmax_of_chunk,
    )


def _walk(a: Arguments, call: Call, chunk: int, softmax: Softmax) -> tuple[Tensor, ...]:
    """Fill `softmax`, chunk by chunk, and return what backward needs."""
    tokens, size, vocab = a.shapes
    backend = _backend(a.backend, a.hidden.device)
    kept = _empty_kept(a)
    grad_hidden, columns, column_scales, grad_bias = kept
    wanted = any(a.grads)
    given = WeightCopies(a.weight_rows, a.weight_row_scales, a.transposed, a.transposed_scales)
    weight, transposed = weight_operands(
        OP, a.weight, given, SCALE, backend.quantize_weight, transposed=a.grads[0], check=a.flags[0]
    )
    bias = None if a.bias is None else a.bias.to(LOGITS).contiguous()  # as kernels take it
    hidden = a.hidden.reshape(-1, size)
    ignored = (call.target == a.ignore_index)[:, None]
    if a.grads[2]:
        grad_bias.zero_()
    for start, stop in shared_tiles.spans(tokens, chunk):
        n = stop - start
        # An ignored token's hidden state may be NaN, and its row of the gradient is 0 times something.
        h = hidden[start:stop].masked_fill(ignored[start:stop], 0).contiguous()
        rows, _ = backend.quantize_activation(h, "e4m3", SCALE, rows=True, columns=False)
        logits = backend.product(rows, weight, True, bias, LOGITS, None)
        of_targets = backend.target_logits(h, a.weight, bias, call.target[start:stop])
        del h, rows
        into = Gradient(
            empty_rows(n, vocab, "e4m3", a.hidden) if a.grads[0] else None,
            Quantized(columns, column_scales) if a.grads[1] else None,
            grad_bias.new_empty(blocks(n), vocab) if a.grads[2] else None,
        )
        backend.softmax_of_chunk(call, logits, of_targets, start, softmax, into if wanted else None)
        del logits
        if a.grads[0]:
            made = backend.product(into.rows, transposed, True, None, torch.float32, None)
            grad_hidden.view(-1, size)[start:stop] = made
            del made
        if into.sums is not None:
            grad_bias += into.sums.sum(0)
        del into  # before the next chunk's is made
    return kept


@torch.library.custom_op(
    "onchip::linear_cross_entropy_fp8_backward",
    mutates_args=("weight_grad_out",),
    schema=(
        "(Tensor grad_loss, Tensor grad_hidden, Tensor columns, Tensor column_scales, Tensor grad_bias, "
        "Tensor? hidden, Tensor target, Tensor(a!)? weight_grad_out, ScalarType hidden_dtype, ScalarType weight_dtype, "
        "ScalarType bias_dtype, str backend, int ignore_index, str reduction, bool[] grads) -> (Tensor, Tensor, Tensor)"
    ),
)
def _backward_op(
    grad_loss: Tensor,
    grad_hidden: Tensor,
    columns: Tensor,
    column_scales: Tensor,
    grad_bias: Tensor,
    hidden: Tensor | None,  # [..., H], where weight needs a gradient
    target: Tensor,
    weight_grad_out: Tensor | None,
    hidden_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    backend_name: str,
    ignore_index: int,
    reduction: str,
    grads: list[bool],
) -> tuple[Tensor, ...]:
    """Return the gradients of hidden, weight and bias; what isn't asked for is empty."""
    dtypes = (hidden_dtype, weight_dtype, bias_dtype)  # a list of them would come as integers in PyTorch 2.11
    made = [grad_loss.new_empty(0, dtype=dtype) for dtype in dtypes]
    kept = target != ignore_index
    upstream = grad_loss.float()
    if reduction == "none":
        upstream = upstream.masked_fill(~kept, 0)[..., None]
    with torch.autocast(target.device.type, enabled=False):
        if grads[0]:
            made[0] = torch.mul(grad_hidden, upstream, out=torch.empty_like(grad_hidden, dtype=dtypes[0]))
        if grads[1]:
            assert hidden is not None
            backend = _backend(backend_name, hidden.device)
            # Not 0 times it: an ignored token's hidden state may be NaN.
            h = hidden.masked_fill(~kept[..., None], 0)
            if reduction == "none":
                h = h * upstream
            h = h.reshape(-1, h.shape[-1])
            if len(h) == 0:
                grad_weight = grad_loss.new_zeros((len(columns), h.shape[1]), dtype=dtypes[1])
            else:
                _, turned = backend.quantize_weight(h, SCALE, rows=False, transposed=True)
                if reduction != "none":
                    turned.scales.mul_(upstream)
                grad_weight = backend.product(
                    Quantized(columns, column_scales), turned, True, None, dtypes[1], weight_grad_out
                )
            if weight_grad_out is None:
                made[1] = grad_weight
        if grads[2]:
            made[2] = (grad_bias * upstream).to(dtypes[2])
    return tuple(made)


@_backward_op.register_fake
def _(
    grad_loss: Tensor,
    grad_hidden: Tensor,
    columns: Tensor,
    column_scales: Tensor,
    grad_bias: Tensor,
    hidden: Tensor | None,
    target: Tensor,
    weight_grad_out: Tensor | None,
    hidden_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    backend_name: str,
    ignore_index: int,
    reduction: str,
    grads: list[bool],
) -> tuple[Tensor, ...]:
    to_weight = grads[1] and weight_grad_out is None
    width = 0 if hidden is None else hidden.shape[-1]
    return (
        grad_loss.new_empty(grad_hidden.shape, dtype=hidden_dtype),
        grad_loss.new_empty((columns.shape[0], width) if to_weight else 0, dtype=weight_dtype),
        grad_loss.new_empty(grad_bias.shape, dtype=bias_dtype),
    )


# ------------------------------------------------------------------------------------------------------- their parts


def _problem(a: Arguments) -> Problem:
    tokens, hidden, vocab = a.shapes
    return Problem(
        tokens,
        hidden,
        vocab,
        dtype=DTYPES[a.hidden.dtype],
        device="cuda" if a.backend == "triton" else "cpu",
        grad_hidden=a.grads[0],
        grad_weight=a.grads[1],
        grad_bias=a.grads[2],
        per_token_loss=a.reduction == "none",
        softcap=a.numbers[2] > 0,
        stats=a.flags[1],
        weight_grad_out=a.weight_grad_out is not None,
        copied=copied_rows(a.hidden),
    )


def _call(a: Arguments) -> Call:
    label_smoothing, z_loss, softcap, logit_scale, temperature = a.numbers
    per_token = None if a.token_temperature is None else _flat(a.token_temperature.expand(a.target.shape))
    return Call(
        a.target.reshape(-1).to(torch.int64).contiguous(),
        None if a.token_weight is None else _flat(a.token_weight),
        per_token,
        torch_tiles.divisor(a.reduction, a.normalizer, a.target != a.ignore_index),
        a.ignore_index,
        label_smoothing,
        z_loss,
        softcap or None,
        logit_scale,
        temperature,
        a.flags[1],
    )


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1).to(torch.float32).contiguous()


def _check_values(a: Arguments) -> None:
    torch_tiles.select_tokens(
        a.target,
        a.weight.shape[0],
        a.token_weight,
        a.token_temperature,
        a.normalizer,
        ignore_index=a.ignore_index,
        reduction=a.reduction,
        temperature=a.numbers[4],
        check_values=True,
    )


# ---------------------------------------------------------------------------------------------------------- autograd


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = Arguments(*inputs)
    ctx.mark_non_differentiable(*output[1:-1])
    ctx.set_materialize_grads(False)
    # The weight isn't kept: what backward needs of it was multiplied in forward.
    ctx.save_for_backward(*output[5:-1], a.hidden if a.grads[1] else None, a.target, output[-1])
    # Not saved as a tensor: other micro-batches may add to it before this one does, and that is no mistake.
    ctx.weight_grad_out = a.weight_grad_out
    dtypes = [x.dtype for x in (a.hidden, a.weight, a.weight if a.bias is None else a.bias)]
    ctx.options = (*dtypes, a.backend, a.ignore_index, a.reduction, a.grads)


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing = (None,) * (len(Arguments._fields) - 3)
    if grad_loss is None:
        return (None, None, None, *nothing)
    *options, needed = ctx.options
    wanted = asked_for(ctx, needed)
    *saved, link = ctx.saved_tensors
    made = _backward_op(grad_loss, *saved, ctx.weight_grad_out, *options, wanted)
    returned = [wanted[0], wanted[1] and ctx.weight_grad_out is None, wanted[2]]
    grads = [x if want else None for x, want in zip(made, returned, strict=True)]
    return (*differentiable_once(grads, grad_loss, link), *nothing)


_forward_op.register_autograd(_backward, setup_context=_setup_context)


def forward(
    tensors: tuple[Tensor | None, ...],  # the first eight of `Arguments`
    copies: Sequence[Tensor | None],  # the weight's, the next four
    options: Options,
    backend: str,
    grads: list[bool],  # of hidden, weight, bias
) -> tuple[Tensor, ...]:
    """Loss, lse, log_prob, entropy and correct."""
    hidden = tensors[0]
    assert hidden is not None
    check_options(options, grad_bias=grads[2])
    numbers = (options.label_smoothing, options.z_loss, options.softcap or 0, options.logit_scale, options.temperature)
    made = _forward_op(
        *tensors,
        *copies,
        choose_backend(OP, backend, refusals(hidden.device)),
        int(options.ignore_index),
        options.reduction,
        None if options.scratch_bytes is None else int(options.scratch_bytes),
        [float(x) for x in numbers],
        [options.check_inputs, options.return_stats],
        grads,
    )
    return tuple(made[:5])
