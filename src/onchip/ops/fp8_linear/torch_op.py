"""fp8_linear for PyTorch: the public functions, torch.library and autograd.

Read from the top: a public function has its inputs checked (torch_inputs.py), chooses a backend and calls one
registered operator.  `_forward_op` quantises x and the weight, unless they come quantised, and leaves the transposed
copies of both for backward; `_backward_op` quantises the output's gradient.  Each backend is a quantiser and a product:
see `_backend`.  The maths is in the package's docstring.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.backends import choose_backend
from onchip.fp8 import numbers, torch_quantize
from onchip.fp8 import triton_refusal as triton_op
from onchip.fp8.numbers import OP, Options
from onchip.fp8.torch_operands import QuantizedActivation, QuantizedWeight, check_quantized, check_quantized_weight
from onchip.fp8.torch_products import dequantized_product, scaled_mm_product, scaled_mm_refusal
from onchip.fp8.torch_quantize import Quantized
from onchip.fp8.torch_weights import WeightCopies, weight_operands
from onchip.frontend.options import require_bool, require_one_of
from onchip.frontend.torch_autograd import asked_for, differentiable_once
from onchip.frontend.torch_inputs import check_weight_grad_out
from onchip.ops.fp8_linear import spec
from onchip.ops.fp8_linear.torch_inputs import check_tensors, is_plain, result_dtype

_DEVICES = ("cpu", "cuda", "meta")
BACKENDS = ("scaled_mm", "triton", "dequantize")
_NO_COPIES = (None,) * 4


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
    check_tensors(OP, x=given, weight=matrix, bias=bias)
    spec.check_shapes(given.shape, matrix.shape, None if bias is None else bias.shape)
    check_weight_grad_out(OP, weight_grad_out, matrix)
    chosen = _choose(OP, backend, given, grad_dtype)
    grads = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (given, matrix, bias)]
    if shared is not None:
        check_quantized(shared, scale, wanted=grads[1])
    if quantized is not None:
        check_quantized_weight(OP, quantized, scale, wanted="x" if grads[0] else None)
    copies = (*(_NO_COPIES if shared is None else shared[1:5]), *(_NO_COPIES if quantized is None else quantized[1:5]))
    words = (options.grad_dtype, options.scale, chosen, check_inputs)
    # A registered operator costs a fifth of a millisecond of Python each way: more than some layers take on a GPU.
    run = _Eager.apply if is_plain(given, matrix, bias) else _forward_op
    out: Tensor = run(given, matrix, bias, *copies, weight_grad_out, result_dtype(given), *words, grads)[0]
    return out


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
    check_tensors(name, x=x)
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"{name}: x must be [..., K] with K >= 1; got shape {list(x.shape)}")
    columns = torch.is_grad_enabled()
    rows, row_scales, by_column, column_scales = _quantize_op(x.detach(), scale, _choose(name, backend, x), columns)
    if columns:
        return QuantizedActivation(x, rows, row_scales, by_column, column_scales, scale)
    return QuantizedActivation(x, rows, row_scales, None, None, scale)


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
    check_tensors(name, weight=weight)
    if weight.ndim != 2 or weight.numel() == 0:
        raise ValueError(f"{name}: weight must be [N, K] with N, K >= 1; got shape {list(weight.shape)}")
    both = torch.is_grad_enabled()
    made = _quantize_weight_op(weight.detach(), scale, _choose(name, backend, weight), both)
    rows, row_scales, transposed, transposed_scales = made if both else (*made[:2], None, None)
    return QuantizedWeight(weight, rows, row_scales, transposed, transposed_scales, scale)


def _choose(op: str, backend: str, x: Tensor, grad_dtype: str = "e4m3") -> str:
    device = x.device.type
    refusals = {
        "scaled_mm": scaled_mm_refusal(x.device, grad_dtype),
        "triton": triton_op.refusal(device, x.device.index),
        "dequantize": None if device in _DEVICES else f"it runs on {', '.join(_DEVICES)} tensors, not on {device!r}",
    }
    return choose_backend(op, backend, {name: refusals[name] for name in BACKENDS})


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
    "onchip::fp8_quantize_activation",
    mutates_args=(),
    schema="(Tensor x, str scale, str backend, bool columns) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _quantize_op(x: Tensor, scale: str, backend: str, columns: bool) -> tuple[Tensor, ...]:
    """Return rows, row_scales, columns and column_scales of `QuantizedActivation`; the last two may be empty."""
    flat = x.reshape(-1, x.shape[-1])
    made = _backend(backend).quantize_activation(flat, "e4m3", scale, rows=True, columns=columns)
    return (*made[0], *(made[1] or torch_quantize.nothing(x)))


@_quantize_op.register_fake
def _(x: Tensor, scale: str, backend: str, columns: bool) -> tuple[Tensor, ...]:
    k = x.shape[-1]
    m = x.numel() // k
    made = torch_quantize.empty_rows(m, k, "e4m3", x)
    return (*made, *(torch_quantize.empty_rows(k, m, "e4m3", x) if columns else torch_quantize.nothing(x)))


@torch.library.custom_op(
    "onchip::fp8_quantize_weight",
    mutates_args=(),
    schema="(Tensor weight, str scale, str backend, bool transposed) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _quantize_weight_op(weight: Tensor, scale: str, backend: str, transposed: bool) -> tuple[Tensor, ...]:
    """Return the copies of `QuantizedWeight`; the last two may be empty."""
    rows, turned = _backend(backend).quantize_weight(weight, scale, rows=True, transposed=transposed)
    return (*rows, *(turned or torch_quantize.nothing(weight)))


@_quantize_weight_op.register_fake
def _(weight: Tensor, scale: str, backend: str, transposed: bool) -> tuple[Tensor, ...]:
    n, k = weight.shape
    turned = torch_quantize.empty_blocks(k, n, weight) if transposed else torch_quantize.nothing(weight)
    return (*torch_quantize.empty_blocks(n, k, weight), *turned)


class _Arguments(NamedTuple):
    """The arguments of `_forward_op`, in order."""

    x: Tensor  # [..., K]
    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]
    rows: Tensor | None  # of a QuantizedActivation, as the next three
    row_scales: Tensor | None
    columns: Tensor | None
    column_scales: Tensor | None
    weight_rows: Tensor | None  # of a QuantizedWeight, as the next three
    weight_row_scales: Tensor | None
    transposed: Tensor | None
    transposed_scales: Tensor | None
    weight_grad_out: Tensor | None  # [N, K] float32; used in backward
    dtype: torch.dtype
    grad_dtype: str
    scale: str
    backend: str
    check_inputs: bool
    grads: list[bool]  # of x, weight, bias

    @property
    def keeps_x(self) -> bool:
        """Whether x's transposed copy is made here for backward."""
        return self.grads[1] and self.rows is None

    @property
    def keeps_weight(self) -> bool:
        """Whether the weight's transposed copy is."""
        return self.grads[0] and self.weight_rows is None


def _forward(*args: Any) -> tuple[Tensor, ...]:
    """Return the output; the transposed copies of x and of the weight for backward, where they are made here; and the
    link, of no elements, which ties gradients to what they were made of.
    """
    a = _Arguments(*args)
    backend = _backend(a.backend)
    with torch.autocast(a.x.device.type, enabled=False):
        k = a.x.shape[-1]
        columns = None
        if a.rows is None:
            flat = a.x.reshape(-1, k)
            rows, columns = backend.quantize_activation(flat, "e4m3", a.scale, rows=True, columns=a.keeps_x)
        else:
            assert a.row_scales is not None
            rows = Quantized(a.rows, a.row_scales)
        given = WeightCopies(a.weight_rows, a.weight_row_scales, a.transposed, a.transposed_scales)
        weight, transposed = weight_operands(
            OP, a.weight, given, a.scale, backend.quantize_weight, transposed=a.keeps_weight, check=a.check_inputs
        )
        # Kernels take a bias for contiguous.
        bias = None if a.bias is None else a.bias.contiguous()
        out = _multiply(backend, rows, weight, by_block=True, dtype=a.dtype, bias=bias)
        left = [
            t for made in (columns, transposed if a.keeps_weight else None) for t in made or torch_quantize.nothing(a.x)
        ]
        return (out.view(*a.x.shape[:-1], len(a.weight)), *left, _link(a.x))


def _link(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32)


# torch.compile's cache on disk knows an operator by its name alone: a release that changes a schema must rename it.
_forward_op = torch.library.custom_op(
    "onchip::fp8_linear_forward",
    _forward,
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor weight, Tensor? bias, Tensor? rows, Tensor? row_scales, Tensor? columns, "
        "Tensor? column_scales, Tensor? weight_rows, Tensor? weight_row_scales, Tensor? transposed, "
        "Tensor? transposed_scales, Tensor? weight_grad_out, ScalarType dtype, str grad_dtype, str scale, "
        "str backend, bool check_inputs, bool[] grads) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)


@_forward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    a = _Arguments(*args)
    (n, k), x = a.weight.shape, a.x
    columns = torch_quantize.empty_rows(k, x.numel() // k, "e4m3", x) if a.keeps_x else torch_quantize.nothing(x)
    transposed = torch_quantize.empty_blocks(k, n, x) if a.keeps_weight else torch_quantize.nothing(x)
    return (x.new_empty((*x.shape[:-1], n), dtype=a.dtype), *columns, *transposed, _link(x))


def _gradients(
    grad_out: Tensor,  # [..., N]
    columns: Tensor | None,  # [K, M]
    column_scales: Tensor | None,
    transposed: Tensor | None,  # [K, N]
    transposed_scales: Tensor | None,
    weight_grad_out: Tensor | None,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    grad_dtype: str,
    scale: str,
    backend_name: str,
    grads: list[bool],
) -> tuple[Tensor, ...]:
    """Return the gradients of x, weight and bias; what isn't asked for is empty."""
    backend = _backend(backend_name)
    made = [grad_out.new_empty(0, dtype=dtype) for dtype in (x_dtype, weight_dtype, bias_dtype)]
    with torch.autocast(grad_out.device.type, enabled=False):
        flat = grad_out.reshape(-1, grad_out.shape[-1])
        if grads[2]:
            made[2] = flat.sum(0, dtype=torch.float32).to(bias_dtype)
        if not (grads[0] or grads[1]):
            return tuple(made)
        rows, turned = backend.quantize_activation(flat, grad_dtype, scale, rows=grads[0], columns=grads[1])
        if grads[0]:
            assert transposed is not None
            assert transposed_scales is not None
            weight = Quantized(transposed, transposed_scales)
            grad_x = _multiply(backend, rows, weight, by_block=True, dtype=x_dtype)
            made[0] = grad_x.view(*grad_out.shape[:-1], len(transposed))
        if grads[1]:
            assert columns is not None
            assert column_scales is not None
            kept = Quantized(columns, column_scales)
            grad_weight = _multiply(backend, turned, kept, by_block=False, dtype=weight_dtype, add_to=weight_grad_out)
            if weight_grad_out is None:
                made[1] = grad_weight
    return tuple(made)


_backward_op = torch.library.custom_op(
    "onchip::fp8_linear_gradients",
    _gradients,
    mutates_args=("weight_grad_out",),
    schema=(
        "(Tensor grad_out, Tensor? columns, Tensor? column_scales, Tensor? transposed, Tensor? transposed_scales, "
        "Tensor(a!)? weight_grad_out, ScalarType x_dtype, ScalarType weight_dtype, ScalarType bias_dtype, "
        "str grad_dtype, str scale, str backend, bool[] grads) -> (Tensor, Tensor, Tensor)"
    ),
)


@_backward_op.register_fake
def _(
    grad_out: Tensor,
    columns: Tensor | None,
    column_scales: Tensor | None,
    transposed: Tensor | None,
    transposed_scales: Tensor | None,
    weight_grad_out: Tensor | None,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    grad_dtype: str,
    scale: str,
    backend_name: str,
    grads: list[bool],
) -> tuple[Tensor, ...]:
    n = grad_out.shape[-1]
    shapes: list[Any] = [0, 0, n if grads[2] else 0]
    if grads[0]:
        assert transposed is not None
        shapes[0] = (*grad_out.shape[:-1], transposed.shape[0])
    if grads[1] and weight_grad_out is None:
        assert columns is not None
        shapes[1] = (n, columns.shape[0])
    dtypes = (x_dtype, weight_dtype, bias_dtype)
    return tuple(grad_out.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = _Arguments(*inputs)
    link = output[-1]
    ctx.mark_non_differentiable(*output[1:-1])
    ctx.set_materialize_grads(False)
    # Neither x nor the weight: backward multiplies their copies.
    columns = output[1:3] if a.keeps_x else (a.columns, a.column_scales)
    transposed = output[3:5] if a.keeps_weight else (a.transposed, a.transposed_scales)
    nothing = (None, None)
    ctx.save_for_backward(*(columns if a.grads[1] else nothing), *(transposed if a.grads[0] else nothing), link)
    # Not saved as a tensor: other micro-batches may add to it before this one does, and that is no mistake.
    ctx.weight_grad_out = a.weight_grad_out
    ctx.options = (
        a.x.dtype, a.weight.dtype, a.dtype if a.bias is None else a.bias.dtype,
        a.grad_dtype, a.scale, a.backend, a.grads,
    )  # fmt: skip


def _backward(ctx: Any, grad_out: Tensor | None, *_: Any, gradients: Any = _backward_op) -> tuple[Any, ...]:
    nothing = (None,) * (len(_Arguments._fields) - 3)
    if grad_out is None:
        return (None, None, None, *nothing)
    *copies, link = ctx.saved_tensors
    *options, needed = ctx.options
    wanted = asked_for(ctx, needed)
    made = gradients(grad_out, *copies, ctx.weight_grad_out, *options, wanted)
    returned = [wanted[0], wanted[1] and ctx.weight_grad_out is None, wanted[2]]
    grads = [g if want else None for g, want in zip(made, returned, strict=True)]
    return (*differentiable_once(OP, grads, grad_out, link), *nothing)


_forward_op.register_autograd(_backward, setup_context=_setup_context)


class _Eager(torch.autograd.Function):
    """The same without registered operators, for plain tensors.

    A `setup_context` of its own would cost an inspection of forward's signature each time.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        output = _forward(*args)
        _setup_context(ctx, args, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Any, ...]:
        grads = _backward(ctx, grad_out, gradients=_gradients)
        if ctx.weight_grad_out is not None:  # kernels write past autograd
            torch.autograd.graph.increment_version(ctx.weight_grad_out)
        return grads
