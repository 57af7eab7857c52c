"""fp8_linear for PyTorch: the public functions and their operators.

Read from the top: a public function checks its inputs, chooses a backend and calls one operator.  `_forward` quantises
x and the weight, unless they come quantised, and leaves the transposed copies of both for backward; `_gradients`
quantises the output's gradient.  Each backend is a quantiser and a product: see `_backend`.  The maths is in the
package's docstring.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.backends import choose_backend
from onchip.fp8 import numbers, torch_quantize
from onchip.fp8.numbers import OP, Options
from onchip.fp8.torch_operands import (
    QuantizedActivation,
    QuantizedWeight,
    WeightCopies,
    check_quantized,
    weight_operands,
)
from onchip.fp8.torch_products import dequantized_product, scaled_mm_product, scaled_mm_refusal, triton_refusal
from onchip.fp8.torch_quantize import Quantized, operand
from onchip.frontend.options import require_bool, require_one_of
from onchip.frontend.torch_inputs import DTYPES, check_kinds, check_weight_grad_out, dtype_name, require_tensors
from onchip.frontend.torch_register import Made, Wanted, needed, register
from onchip.ops.fp8_linear import spec

_DEVICES = ("cpu", "cuda", "meta")
BACKENDS = ("scaled_mm", "triton", "dequantize")


def fp8_linear(
    x: Tensor | QuantizedActivation,  # [..., K]
    weight: Tensor | QuantizedWeight,  # [N, K]
    bias: Tensor | None = None,  # [N]
    *,
    grad_dtype: str = "e4m3",
    scale: str = "float32",
    backend: str = "auto",
    check_inputs: bool = False,
    weight_grad_out: Tensor | None = None,  # [N, K] float32
) -> Tensor:
    r"""Linear layer in blockwise FP8, forward and backward: x @ weight.T + bias.

    With Q for dividing groups of numbers by amax / 448 and rounding them to E4M3, all three products are of FP8
    numbers, summed in float32::

        out         = Q(x) @ Q(weight).T + bias      # x in groups of 1x128 along K, weight of 128x128
        grad_x      = Q(grad_out) @ Q(weight)        # grad_out in groups of 1x128 along N
        grad_weight = Q(grad_out).T @ Q(x)           # both in groups of 128x1 along M
        grad_bias   = grad_out.sum over M

    Args:
        x: [..., K] float32, bfloat16 or float16, any strides, or what `quantize_activation` made of one.  The leading
            dimensions hold M rows.
        weight: [N, K] like `nn.Linear`'s, of any of the three dtypes: float32 master weights can be passed as they are.
            Or what `quantize_weight` made of one.
        bias: [N] of any of the three dtypes, added in float32.
        grad_dtype: FP8 format of the output's gradient: "e4m3", or "e5m2" with more range and one bit less.
        scale: "float32", or "power_of_two": scales rounded up to the next power of two, so that scaling is exact.
        backend: "scaled_mm" (cuBLAS's blockwise products; compute capability 9.0, CUDA 12.9, no "e5m2"), "triton"
            (kernels for NVIDIA GPUs with FP8), "dequantize" (float32 products, any device) or "auto": the first of
            these that can run the call.
        check_inputs: check values on the GPU too, which synchronises.  On the CPU they always are.  They are those of a
            weight that comes quantised: its copies must be what quantising it again makes.
        weight_grad_out: [N, K] float32, contiguous: backward adds the weight's gradient to it, and weight gets none of
            its own.  For a main gradient that is kept in float32 over micro-batches.

    Returns:
        [..., N] of x's dtype, under autocast of autocast's.  Gradients have the dtypes of their inputs, rounded once.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or option, or a backend that can't run the call.
        RuntimeError: differentiated twice, called inside a torch.func transform, or a weight that has changed since it
            was quantised (checked on the CPU, and with check_inputs on the GPU).

    Memory: what is kept for backward is x in FP8, K * up(M, 128) * (1 + 4 / 128) bytes, where the weight needs a
    gradient, and the weight in FP8, K * up(N, 128) bytes and scales, where x needs one; neither of the two themselves.
    `saved_bytes` and `weight_bytes` of `onchip.fp8.numbers` are formulas.

    Numbers: a NaN or an infinity makes its group of 128 NaN.  Groups are scaled however small they are: only below an
    amax of 5e-36 do numbers lose digits.

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
    options = Options(grad_dtype, scale)
    require_bool(OP, "check_inputs", check_inputs)
    shared = x if isinstance(x, QuantizedActivation) else None
    given: Tensor = x if shared is None else shared.x  # type: ignore[assignment]
    quantized = weight if isinstance(weight, QuantizedWeight) else None
    matrix: Tensor = weight if quantized is None else quantized.weight  # type: ignore[assignment]
    check_kinds(OP, require_tensors(OP, {"x": given, "weight": matrix, "bias": bias}, ("bias",)), integers=())
    spec.check_shapes(given.shape, matrix.shape, None if bias is None else bias.shape)
    check_weight_grad_out(OP, weight_grad_out, matrix)
    chosen = _choose(OP, backend, given, grad_dtype)
    grads = needed(given, matrix, bias)
    of_x, of_weight = ActivationCopies(), WeightCopies()
    if shared is not None:
        check_quantized(OP, shared, scale, wanted="weight" if grads[1] else None)
        of_x = ActivationCopies(*shared[1:5])
    if quantized is not None:
        check_quantized(OP, quantized, scale, wanted="x" if grads[0] else None)
        of_weight = WeightCopies(*quantized[1:5])
    dtype = _result_dtype(given)
    call = Call(given, matrix, bias, of_x, of_weight, weight_grad_out, dtype, options, chosen, check_inputs, grads)
    return OPERATOR(call).out


def quantize_activation(x: Tensor, *, scale: str = "float32", backend: str = "auto") -> QuantizedActivation:
    """x in FP8, for several layers that read the same activation: q, k and v, or gate and up.

    Each `fp8_linear` that is given the result skips quantising, and all of them keep one copy for backward.  Gradients
    go to x, where they are summed as those of any tensor that is used several times.

    Args:
        x: [..., K] float32, bfloat16 or float16.
        scale: "float32" or "power_of_two", the same as of the layers that will use it.
        backend: as of `fp8_linear`; how it is quantised, to the same bits by each.

    Returns:
        What `fp8_linear` takes in place of x.  It holds x itself: keep it no longer than needed.

    Raises:
        TypeError, ValueError: as `fp8_linear`.

    Memory: 2 * M * K * (1 + 4 / 128) bytes; half of it without gradients.

    Example:
        >>> import torch
        >>> from onchip.torch import fp8_linear, quantize_activation
        >>> x = torch.randn(16, 256, requires_grad=True)
        >>> gate, up = (torch.randn(512, 256, requires_grad=True) for _ in range(2))
        >>> shared = quantize_activation(x)
        >>> (fp8_linear(shared, gate).sigmoid() * fp8_linear(shared, up)).sum().backward()
        >>> x.grad.shape
        torch.Size([16, 256])
    """
    name = "quantize_activation"
    require_one_of(name, "scale", scale, numbers.SCALES)
    check_kinds(name, require_tensors(name, {"x": x}, ()), integers=())
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"{name}: x must be [..., K] with K >= 1; got shape {list(x.shape)}")
    return QuantizedActivation(x, *_quantized(x, scale, _choose(name, backend, x), by_block=False), scale)


def quantize_weight(weight: Tensor, *, scale: str = "float32", backend: str = "auto") -> QuantizedWeight:
    """weight in FP8, for several calls between two changes of it: the micro-batches of a step.

    Each `fp8_linear`, or `linear_cross_entropy` with precision="fp8", that is given the result skips quantising.
    Gradients go to weight.  Nothing is remembered: when weight has changed, quantise it again.

    Args:
        weight: [N, K] float32, bfloat16 or float16.
        scale: "float32" or "power_of_two", the same as of the calls that will use it.
        backend: as of `fp8_linear`; how it is quantised, to the same bits by each.

    Returns:
        What `fp8_linear` takes in place of weight.

    Raises:
        TypeError, ValueError: as `fp8_linear`.

    Memory: 2 * N * K bytes and scales, `weight_bytes` of `onchip.fp8.numbers`; half of it without gradients.

    Example:
        >>> import torch
        >>> from onchip.torch import fp8_linear, quantize_weight
        >>> weight = torch.randn(512, 256, requires_grad=True)
        >>> quantized = quantize_weight(weight)
        >>> for micro_batch in torch.randn(4, 16, 256):
        ...     fp8_linear(micro_batch, quantized).sum().backward()
        >>> weight.grad.shape
        torch.Size([512, 256])
    """
    name = "quantize_weight"
    require_one_of(name, "scale", scale, numbers.SCALES)
    check_kinds(name, require_tensors(name, {"weight": weight}, ()), integers=())
    if weight.ndim != 2 or weight.numel() == 0:
        raise ValueError(f"{name}: weight must be [N, K] with N, K >= 1; got shape {list(weight.shape)}")
    return QuantizedWeight(weight, *_quantized(weight, scale, _choose(name, backend, weight), by_block=True), scale)


def _quantized(
    x: Tensor, scale: str, backend: str, *, by_block: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The copy in rows and its scales, and where gradients are on the transposed one's, else None."""
    both = torch.is_grad_enabled()
    rows, row_scales, turned, turned_scales = _quantize_op(x.detach(), scale, backend, by_block, both)
    return (rows, row_scales, turned, turned_scales) if both else (rows, row_scales, None, None)


def _result_dtype(x: Tensor) -> torch.dtype:
    """x's dtype, or autocast's."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    dtype = torch.get_autocast_dtype(kind)
    if dtype not in DTYPES:
        raise TypeError(f"{OP}: autocast to {dtype_name(dtype)} is not supported")
    return dtype


def refusals(device: torch.device, grad_dtype: str = "e4m3") -> dict[str, str | None]:
    """Why each backend, best first, can't serve a call on this device, or None."""
    known = device.type in _DEVICES
    return {
        "scaled_mm": scaled_mm_refusal(device, grad_dtype),
        "triton": triton_refusal(device),
        "dequantize": None if known else f"it runs on {', '.join(_DEVICES)} tensors, not on {device.type!r}",
    }


def _choose(op: str, backend: str, x: Tensor, grad_dtype: str = "e4m3") -> str:
    return choose_backend(op, backend, refusals(x.device, grad_dtype))


# --------------------------------------------------------------------------------------------------- what a backend is


class _Backend(NamedTuple):
    """How operands are quantised, and how they are multiplied."""

    quantize_activation: Any
    quantize_weight: Any
    product: Any


def _backend(name: str) -> _Backend:
    """Both quantisers make the same bits; Triton's reads a matrix once."""
    if name == "dequantize":
        return _Backend(torch_quantize.quantize_activation, torch_quantize.quantize_weight, dequantized_product)
    from onchip.fp8 import triton_launches as kernels

    product = kernels.product if name == "triton" else scaled_mm_product
    return _Backend(kernels.quantize_activation, kernels.quantize_weight, product)


def _multiply(
    backend: _Backend,
    a: Quantized | None,  # [M, C]
    b: Quantized | None,  # [N, C]
    *,
    by_block: bool,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """A B^T + bias as [M, N] of `dtype`; or added to `add_to`, which is returned."""
    assert a is not None
    assert b is not None
    if 0 in (len(a.data), a.data.shape[1]):  # no rows, or a weight's gradient of none
        return a.data.new_zeros((len(a.data), len(b.data)), dtype=dtype) if add_to is None else add_to
    made: Tensor = backend.product(a, b, by_block, bias, dtype, add_to)
    return made


# ------------------------------------------------------------------------------------------------ registered operators


@torch.library.custom_op(
    "onchip::fp8_quantize",
    mutates_args=(),
    schema="(Tensor x, str scale, str backend, bool by_block, bool both) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _quantize_op(x: Tensor, scale: str, backend: str, by_block: bool, both: bool) -> tuple[Tensor, ...]:
    """The copies of a `QuantizedWeight`, or of a `QuantizedActivation`; without `both` the last two are empty."""
    of, flat = _backend(backend), x.reshape(-1, x.shape[-1])
    if by_block:
        made = of.quantize_weight(flat, scale, rows=True, transposed=both)
    else:
        made = of.quantize_activation(flat, "e4m3", scale, rows=True, columns=both)
    return (*made[0], *(made[1] or torch_quantize.nothing(x)))


@_quantize_op.register_fake
def _(x: Tensor, scale: str, backend: str, by_block: bool, both: bool) -> tuple[Tensor, ...]:
    k = x.shape[-1]
    m = x.numel() // k
    empty = torch_quantize.empty_blocks if by_block else torch_quantize.empty_rows
    return (*empty(m, k, "e4m3", x), *(empty(k, m, "e4m3", x) if both else torch_quantize.nothing(x)))


class ActivationCopies(NamedTuple):
    """The copies of a `QuantizedActivation`; all None where the call makes its own."""

    rows: Tensor | None = None
    row_scales: Tensor | None = None
    columns: Tensor | None = None
    column_scales: Tensor | None = None


class Turned(NamedTuple):
    """The transposed copies for backward; None where its gradient isn't needed."""

    columns: Tensor | None = None  # [K, M] of x, and its scales: for the weight's gradient
    column_scales: Tensor | None = None
    transposed: Tensor | None = None  # [K, N] of the weight, and its scales: for x's
    transposed_scales: Tensor | None = None


class Call(NamedTuple):
    """The operator's arguments."""

    x: Tensor  # [..., K]
    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]
    of_x: ActivationCopies
    of_weight: WeightCopies
    weight_grad_out: Tensor | None  # [N, K] float32; used in backward
    dtype: torch.dtype
    options: Options
    backend: str
    check_inputs: bool
    grads: tuple[bool, ...]  # of x, weight, bias

    @property
    def makes_columns(self) -> bool:
        """Whether x's transposed copy is made here for backward."""
        return self.grads[1] and self.of_x.rows is None

    @property
    def makes_transposed(self) -> bool:
        """Whether the weight's transposed copy is."""
        return self.grads[0] and self.of_weight.weight_rows is None


class Outputs(NamedTuple):
    """The operator's results."""

    out: Tensor  # [..., N]
    made: Turned  # what was not given


class Kept(NamedTuple):
    """What backward is given: neither x nor the weight, of which it multiplies the copies."""

    turned: Turned
    weight_grad_out: Tensor | None
    x_dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype
    options: Options
    backend: str


def _forward(call: Call) -> Outputs:
    backend, scale = _backend(call.backend), call.options.scale
    rows, columns = operand(call.of_x.rows, call.of_x.row_scales), None
    if rows is None:
        flat = call.x.reshape(-1, call.x.shape[-1])
        rows, columns = backend.quantize_activation(flat, "e4m3", scale, rows=True, columns=call.makes_columns)
    weight, transposed = weight_operands(
        OP,
        call.weight,
        call.of_weight,
        scale,
        backend.quantize_weight,
        transposed=call.makes_transposed,
        check=call.check_inputs,
    )
    bias = None if call.bias is None else call.bias.contiguous()  # as kernels take it
    out = _multiply(backend, rows, weight, by_block=True, dtype=call.dtype, bias=bias)
    made = _turned(columns, transposed if call.makes_transposed else None)
    return Outputs(out.view(*call.x.shape[:-1], len(call.weight)), made)


def _fake(call: Call) -> Outputs:
    (n, k), x = call.weight.shape, call.x
    columns = torch_quantize.empty_rows(k, x.numel() // k, "e4m3", x) if call.makes_columns else None
    transposed = torch_quantize.empty_blocks(k, n, "e4m3", x) if call.makes_transposed else None
    return Outputs(x.new_empty((*x.shape[:-1], n), dtype=call.dtype), _turned(columns, transposed))


def _turned(columns: Quantized | None, transposed: Quantized | None) -> Turned:
    return Turned(*(columns or (None, None)), *(transposed or (None, None)))


def _save(call: Call, outputs: Outputs) -> Kept:
    # What wasn't made, and so isn't given on, is empty where it comes from the registered operator.
    of_x = outputs.made if call.makes_columns else call.of_x
    of_weight = outputs.made if call.makes_transposed else call.of_weight
    return Kept(
        _turned(
            operand(of_x.columns, of_x.column_scales) if call.grads[1] else None,
            operand(of_weight.transposed, of_weight.transposed_scales) if call.grads[0] else None,
        ),
        call.weight_grad_out,
        call.x.dtype,
        call.weight.dtype,
        call.dtype if call.bias is None else call.bias.dtype,
        call.options,
        call.backend,
    )


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    (grad_out,) = upstream
    assert grad_out is not None
    by_x, by_weight, by_bias = wanted
    flat, backend = grad_out.reshape(-1, grad_out.shape[-1]), _backend(kept.backend)
    grad_x = grad_weight = grad_bias = None
    if by_bias:
        grad_bias = flat.sum(0, dtype=torch.float32).to(kept.bias_dtype)
    if by_x or by_weight:
        o = kept.options
        rows, columns = backend.quantize_activation(flat, o.grad_dtype, o.scale, rows=by_x, columns=by_weight)
    if by_x:
        weight = operand(kept.turned.transposed, kept.turned.transposed_scales)
        grad_x = _multiply(backend, rows, weight, by_block=True, dtype=kept.x_dtype)
        grad_x = grad_x.view(*grad_out.shape[:-1], grad_x.shape[1])
    if by_weight:
        x, out = operand(kept.turned.columns, kept.turned.column_scales), kept.weight_grad_out
        made = _multiply(backend, columns, x, by_block=False, dtype=kept.weight_dtype, add_to=out)
        grad_weight = made if out is None else None
    return grad_x, grad_weight, grad_bias


def _fake_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    (grad_out,) = upstream
    assert grad_out is not None
    n, (columns, _, transposed, _) = grad_out.shape[-1], kept.turned
    grad_x = grad_weight = None
    if wanted[0] and transposed is not None:
        grad_x = grad_out.new_empty((*grad_out.shape[:-1], len(transposed)), dtype=kept.x_dtype)
    if wanted[1] and columns is not None and kept.weight_grad_out is None:
        grad_weight = grad_out.new_empty((n, len(columns)), dtype=kept.weight_dtype)
    return grad_x, grad_weight, grad_out.new_empty(n, dtype=kept.bias_dtype) if wanted[2] else None


OPERATOR = register(
    "fp8_linear",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    differentiable=("x", "weight", "bias"),
    adds_to={"weight": "weight_grad_out"},
)
