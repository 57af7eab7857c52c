"""fp8_linear for PyTorch: the public functions and their operators.

A public function checks its inputs, chooses a backend, quantises x and the weight unless they are quantised already,
and calls one operator on the copies.  `_forward` multiplies them and keeps the transposed ones for backward;
`_gradients` quantises the output's gradient.  Each backend is a quantiser and a product: `quantizer` and `multiply` of
`onchip.fp8`.  The package's docstring has the maths.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from onchip.core.backends import choose_backend
from onchip.fp8 import numbers
from onchip.fp8.numbers import OP, Fp8Options, GradDtype, Scale
from onchip.fp8.torch_operands import (
    Copies,
    QuantizedActivation,
    QuantizedWeight,
    check_unchanged,
    copies_of,
    quantizer,
)
from onchip.fp8.torch_products import multiply, refusals, row_multiple
from onchip.fp8.torch_quantize import operand
from onchip.frontend import torch_prepared as stated
from onchip.frontend.options import require_bool, require_one_of
from onchip.frontend.torch_inputs import autocast_dtype, check_kinds, check_weight_grad_out, require_tensors
from onchip.frontend.torch_register import Made, Operator, Wanted, needed
from onchip.frontend.torch_repeat import repeatable
from onchip.ops.fp8_linear import check_shapes

BACKENDS = ("scaled_mm", "triton", "dequantize")
Backend = Literal["auto", "scaled_mm", "triton", "dequantize"]


@repeatable
def fp8_linear(
    x: Tensor | QuantizedActivation,  # [..., K]
    weight: Tensor | QuantizedWeight,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    grad_dtype: GradDtype = "e4m3",
    scale: Scale = "float32",
    backend: Backend = "auto",
    check_inputs: bool = False,
    weight_grad_out: Tensor | None = None,  # [N, K] float32
) -> Tensor:
    r"""Linear layer in blockwise FP8, forward and backward: x @ weight.T + bias.

    Q divides each group of numbers by its scale, amax / 448, and rounds to E4M3.  All three products multiply FP8
    numbers and sum in float32::

        out         = Q(x) @ Q(weight).T + bias      # x in groups of 1x128 along K, weight of 128x128
        grad_x      = Q(grad_out) @ Q(weight)        # grad_out in groups of 1x128 along N
        grad_weight = Q(grad_out).T @ Q(x)           # both in groups of 128x1 along M
        grad_bias   = grad_out.sum over M

    Args:
        x: [..., K] float32, bfloat16 or float16, any strides, or the result of `quantize_activation`.  The leading
            dimensions hold M rows.
        weight: [N, K] like `nn.Linear`'s, of any of the three dtypes: float32 master weights can be passed as they are.
            Or the result of `quantize_weight`.
        bias: [N] of any of the three dtypes, added in float32.
        grad_dtype: FP8 format of the output's gradient: "e4m3", or "e5m2" with more range and one bit less.
        scale: "float32", or "power_of_two": scales rounded up to the next power of two, so that scaling is exact.
        backend: "scaled_mm" (cuBLAS's blockwise products; compute capability 9.0, CUDA 12.9, no "e5m2"), "triton"
            (kernels for NVIDIA GPUs with FP8), "dequantize" (float32 products, any device) or "auto": the first of
            these that can run the call.
        check_inputs: check on the GPU too that a quantised weight hasn't changed since, by quantising it again.  This
            waits for the device.  On the CPU that is always checked.
        weight_grad_out: [N, K] float32, contiguous: backward adds the weight's gradient to it, and leaves weight.grad
            alone.  Use it to accumulate a float32 main gradient over micro-batches.

    Returns:
        [..., N] of x's dtype (under autocast, of its dtype).  Gradients have the dtypes of their inputs and are rounded
        once.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a shape, device or option is wrong, or the backend can't run the call.
        RuntimeError: the result is differentiated twice, the call is inside a torch.func transform, or a weight has
            changed since it was quantised (checked on the CPU, and with check_inputs on the GPU).

    Memory: if the weight needs a gradient, x is kept for backward in FP8, K * up(M, 128) * (1 + 4 / 128) bytes; if x
    needs one, the weight in FP8, K * up(N, 128) bytes and scales.  up(n, m) rounds n up to a multiple of m.  Neither is
    kept in its own dtype.  `saved_bytes` and `weight_bytes` of `onchip.fp8.numbers` are the formulas.

    Numbers: a NaN or an infinity makes its group of 128 NaN.  Groups of small numbers are scaled too; they lose digits
    only if their amax is below 5e-36.

    Example:
        >>> import torch
        >>> from onchip.torch import fp8_linear
        >>> x = torch.randn(4, 8, 256, requires_grad=True)
        >>> weight = torch.randn(384, 256, requires_grad=True)
        >>> out = fp8_linear(x, weight)
        >>> out.sum().backward()
        >>> out.shape, weight.grad.shape
        (torch.Size([4, 8, 384]), torch.Size([384, 256]))

    Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3.
    """
    options = Fp8Options(grad_dtype, scale)
    require_bool(OP, "check_inputs", check_inputs)
    given = x.x if isinstance(x, QuantizedActivation) else x
    matrix = weight.weight if isinstance(weight, QuantizedWeight) else weight
    check_kinds(OP, require_tensors(OP, {"x": given, "weight": matrix, "bias": bias}, ("bias",)), integers=())
    check_shapes(given.shape, matrix.shape, None if bias is None else bias.shape)
    check_weight_grad_out(OP, weight_grad_out, matrix)
    chosen = _choose(OP, backend, given, grad_dtype)
    grads = needed(given, matrix, bias)
    dtype = autocast_dtype(OP, given) or given.dtype
    rows, of_weight_grad = row_multiple(chosen), "weight" if grads[1] else None
    of_x = copies_of(OP, x, scale, chosen, by_block=False, wanted=of_weight_grad, row_multiple=rows)
    of_weight = copies_of(OP, weight, scale, chosen, by_block=True, wanted="x" if grads[0] else None)
    check = weight is not matrix and (check_inputs or not matrix.is_cuda)
    call = Fp8LinearCall(given, matrix, bias, of_x, of_weight, weight_grad_out, dtype, options, chosen, check, grads)
    return OPERATOR(call).out


@repeatable
def quantize_activation(x: Tensor, *, scale: Scale = "float32", backend: Backend = "auto") -> QuantizedActivation:
    """x in FP8, for several layers that read the same activation: q, k and v, or gate and up.

    Each `fp8_linear` that takes the result skips quantising, and all of them share one copy for backward.  Gradients go
    to x and add up there, as for any tensor that is used several times.

    Args:
        x: [..., K] float32, bfloat16 or float16.
        scale: "float32" or "power_of_two", the same as in the layers that will use it.
        backend: as in `fp8_linear`; all of them quantise to the same bits.

    Returns:
        A `QuantizedActivation`, which `fp8_linear` takes in place of x.  It holds x itself: keep it no longer than
        needed.

    Raises:
        TypeError, ValueError: as `fp8_linear`.

    Memory: 2 * M * K * (1 + 4 / 128) bytes; half of that without gradients.

    Example:
        >>> import torch
        >>> from onchip.torch import fp8_linear, quantize_activation
        >>> x = torch.randn(16, 256, requires_grad=True)
        >>> gate, up = (torch.randn(512, 256, requires_grad=True) for _ in range(2))
        >>> shared = quantize_activation(x)
        >>> (fp8_linear(shared, gate).sigmoid() * fp8_linear(shared, up)).sum().backward()
        >>> x.grad.shape
        torch.Size([16, 256])

    Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3.2, for the scales of groups of 128.
    """
    name = "quantize_activation"
    require_one_of(name, "scale", scale, numbers.SCALES)
    check_kinds(name, require_tensors(name, {"x": x}, ()), integers=())
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"{name}: x must be [..., K] with K >= 1; got shape {list(x.shape)}")
    chosen, wanted = _choose(name, backend, x), "weight" if torch.is_grad_enabled() else None
    return QuantizedActivation(x, *copies_of(name, x, scale, chosen, by_block=False, wanted=wanted), scale)


@repeatable
def quantize_weight(weight: Tensor, *, scale: Scale = "float32", backend: Backend = "auto") -> QuantizedWeight:
    """weight in FP8, for the calls between two changes of it, such as the micro-batches of a step.

    Each `fp8_linear`, or `linear_cross_entropy` with precision="fp8", that takes the result skips quantising.
    Gradients go to weight.  After weight has changed, quantise it again.

    Args:
        weight: [N, K] float32, bfloat16 or float16.
        scale: "float32" or "power_of_two", the same as in the calls that will use it.
        backend: as in `fp8_linear`; all of them quantise to the same bits.

    Returns:
        A `QuantizedWeight`, which `fp8_linear` takes in place of weight.

    Raises:
        TypeError, ValueError: as `fp8_linear`.

    Memory: 2 * N * K bytes and scales, by `weight_bytes` of `onchip.fp8.numbers`; half of that without gradients.

    Example:
        >>> import torch
        >>> from onchip.torch import fp8_linear, quantize_weight
        >>> weight = torch.randn(512, 256, requires_grad=True)
        >>> quantized = quantize_weight(weight)
        >>> for micro_batch in torch.randn(4, 16, 256):
        ...     fp8_linear(micro_batch, quantized).sum().backward()
        >>> weight.grad.shape
        torch.Size([512, 256])

    Source: DeepSeek-V3 (arXiv:2412.19437), section 3.3.2, for the scales of 128x128 blocks.
    """
    name = "quantize_weight"
    require_one_of(name, "scale", scale, numbers.SCALES)
    check_kinds(name, require_tensors(name, {"weight": weight}, ()), integers=())
    if weight.ndim != 2 or weight.numel() == 0:
        raise ValueError(f"{name}: weight must be [N, K] with N, K >= 1; got shape {list(weight.shape)}")
    chosen, wanted = _choose(name, backend, weight), "x" if torch.is_grad_enabled() else None
    return QuantizedWeight(weight, *copies_of(name, weight, scale, chosen, by_block=True, wanted=wanted), scale)


def _choose(op: str, backend: str, x: Tensor, grad_dtype: GradDtype = "e4m3") -> str:
    return choose_backend(op, backend, refusals(x.device, grad_dtype))


# ------------------------------------------------------------------------------------------------ registered operator


class Fp8LinearCall(NamedTuple):
    """The operator's arguments."""

    x: Tensor  # [..., K]
    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]
    of_x: Copies
    of_weight: Copies
    weight_grad_out: Tensor | None  # [N, K] float32; used in backward
    dtype: torch.dtype
    options: Fp8Options
    backend: str
    check_weight: bool  # compare its copies, which the caller made, with it
    grads: tuple[bool, ...]  # of x, weight, bias


class Fp8LinearOutputs(NamedTuple):
    """The operator's result."""

    out: Tensor  # [..., N]


class Fp8LinearKept(NamedTuple):
    """What backward is given: neither x nor the weight, of which it multiplies the copies."""

    columns: Tensor | None  # [K, M]: x^T, for the weight's gradient
    column_scales: Tensor | None
    transposed: Tensor | None  # [K, N]: the weight's, for x's
    transposed_scales: Tensor | None
    weight_grad_out: Tensor | None
    dtypes: tuple[torch.dtype, ...]  # of x, weight and bias
    options: Fp8Options
    backend: str


def _forward(call: Fp8LinearCall) -> Fp8LinearOutputs:
    if call.check_weight:
        check_unchanged(OP, call.weight, call.of_weight, call.options.scale, call.backend)
    bias = None if call.bias is None else stated.converted(call.bias, Tensor.contiguous)  # as kernels take it
    x, weight = call.of_x.operand, call.of_weight.operand
    out = multiply(call.backend, x, weight, by_block=True, dtype=call.dtype, bias=bias)
    return Fp8LinearOutputs(_rows_of(out, call.x))


def _rows_of(made: Tensor, x: Tensor) -> Tensor:
    """[..., C]: as many rows of `made` [R, C] as x [..., K] has; there may be more."""
    return made[: x.shape[:-1].numel()].view(*x.shape[:-1], made.shape[1])


def _fake(call: Fp8LinearCall) -> Fp8LinearOutputs:
    return Fp8LinearOutputs(call.x.new_empty((*call.x.shape[:-1], len(call.weight)), dtype=call.dtype))


def _save(call: Fp8LinearCall, outputs: Fp8LinearOutputs) -> Fp8LinearKept:
    nothing = (None, None)
    return Fp8LinearKept(
        *(call.of_x[2:] if call.grads[1] else nothing),
        *(call.of_weight[2:] if call.grads[0] else nothing),
        call.weight_grad_out,
        (call.x.dtype, call.weight.dtype, call.dtype if call.bias is None else call.bias.dtype),
        call.options,
        call.backend,
    )


def _gradients(kept: Fp8LinearKept, upstream: Made, wanted: Wanted) -> Made:
    (grad_out,) = upstream
    assert grad_out is not None
    by_x, by_weight, by_bias = wanted
    flat = stated.converted(grad_out, lambda x: x.reshape(-1, x.shape[-1]))
    options = kept.options
    grad_x = grad_weight = grad_bias = None
    if by_bias:
        grad_bias = stated.call(torch.sum, flat, 0, dtype=torch.float32)
        grad_bias = stated.converted(grad_bias, lambda x: x.to(kept.dtypes[2]))
    if by_x or by_weight:
        quantize = quantizer(kept.backend)
        how = {"rows": by_x, "turned": by_weight, "row_multiple": row_multiple(kept.backend)}
        rows, columns = quantize(flat, options.grad_dtype, options.scale, **how)
    if by_x:
        weight = operand(kept.transposed, kept.transposed_scales)
        grad_x = multiply(kept.backend, rows, weight, by_block=True, dtype=kept.dtypes[0])
        grad_x = _rows_of(grad_x, grad_out)
    if by_weight:
        x, out = operand(kept.columns, kept.column_scales), kept.weight_grad_out
        made = multiply(kept.backend, columns, x, by_block=False, dtype=kept.dtypes[1], add_to=out)
        grad_weight = made if out is None else None
    return grad_x, grad_weight, grad_bias


def _fake_gradients(kept: Fp8LinearKept, upstream: Made, wanted: Wanted) -> Made:
    (grad_out,) = upstream
    assert grad_out is not None
    n = grad_out.shape[-1]
    grad_x = grad_weight = None
    if wanted[0] and kept.transposed is not None:
        grad_x = grad_out.new_empty((*grad_out.shape[:-1], len(kept.transposed)), dtype=kept.dtypes[0])
    if wanted[1] and kept.columns is not None and kept.weight_grad_out is None:
        grad_weight = grad_out.new_empty((n, len(kept.columns)), dtype=kept.dtypes[1])
    return grad_x, grad_weight, grad_out.new_empty(n, dtype=kept.dtypes[2]) if wanted[2] else None


def _flops(call: Fp8LinearCall) -> int:
    return 2 * call.x.numel() * len(call.weight)


def _gradient_flops(kept: Fp8LinearKept, upstream: Made, wanted: Wanted) -> int:
    (grad_out,) = upstream
    copies = (kept.transposed, kept.columns)  # of x's gradient and of weight's, [K, ...] both
    assert grad_out is not None
    return sum(2 * grad_out.numel() * len(x) for x, want in zip(copies, wanted, strict=False) if want and x is not None)


OPERATOR = Operator(
    "fp8_linear_of_copies",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    differentiable=("x", "weight", "bias"),
    adds_to={"weight": "weight_grad_out"},
    states=True,
    flops=_flops,
    gradient_flops=_gradient_flops,
)
