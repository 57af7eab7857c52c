"""Activations and weights in FP8: the classes that callers pass, their checks, and how operators take them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.fp8 import torch_quantize
from onchip.fp8.numbers import SCALE_MULTIPLE, Scale, blocks, up
from onchip.fp8.torch_quantize import FP8, TorchQuantized, empty
from onchip.frontend import torch_library
from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_inputs import dtype_name
from onchip.frontend.torch_register import are_plain, inside_operator


class QuantizedActivation(NamedTuple):
    """An activation in FP8 that several layers share, as returned by `quantize_activation`."""

    x: Tensor
    """[..., K]: the original, for its shape, its dtype and its gradient; no layer keeps it."""
    rows: Tensor
    """[M, K rounded up to 128] E4M3: scaled along K, for the output."""
    row_scales: Tensor
    """[K / 128, M] float32."""
    columns: Tensor | None
    """[K, M rounded up to 128] E4M3: transposed and scaled along M, for weights' gradients; None without gradients."""
    column_scales: Tensor | None
    """[M / 128, K] float32."""
    scale: Scale
    """"float32" or "power_of_two"."""


class QuantizedWeight(NamedTuple):
    """A weight in FP8 for the calls between two changes of it, as returned by `quantize_weight`."""

    weight: Tensor
    """[N, K]: the original, for its shape, its dtype and its gradient."""
    rows: Tensor
    """[N, K rounded up to 128] E4M3, for the output."""
    row_scales: Tensor
    """[N / 128, K / 128 rounded up to 4] float32."""
    transposed: Tensor | None
    """[K, N rounded up to 128] E4M3, for x's gradient; None without gradients."""
    transposed_scales: Tensor | None
    """[K / 128, N / 128 rounded up to 4] float32."""
    scale: Scale
    """"float32" or "power_of_two"."""


def check_quantized(op: str, made: QuantizedActivation | QuantizedWeight, scale: str, *, wanted: str | None) -> None:
    """Raise unless `made` serves a call with this scale, and the gradient of the input named `wanted`, if there is one.

    Kernels rely on the layout, which is that of `torch_quantize.empty`.
    """
    of_weight = isinstance(made, QuantizedWeight)
    name, maker = ("weight", "quantize_weight") if of_weight else ("x", "quantize_activation")
    source, rows, row_scales, turned, turned_scales, made_with = made
    if made_with != scale:
        raise ValueError(
            f"{op}: {name} was quantised with scale={made_with!r} but scale is {scale!r}; they must be equal"
        )
    if wanted and turned is None:
        raise ValueError(
            f"{op}: {name} was quantised without gradients but {wanted} needs one; call {maker} where they are on"
        )
    width, device = source.shape[-1], source.device
    height = source.numel() // width

    def check(part: str, data: Any, scales: Any, rows: int, columns: int) -> None:
        along = blocks(columns)
        of_scales = (blocks(rows), up(along, SCALE_MULTIPLE)) if of_weight else (along, rows)
        for t, dtype, shape in ((data, FP8["e4m3"], (rows, up(columns))), (scales, torch.float32, of_scales)):
            if t.dtype != dtype or t.shape != shape or t.device != device or not t.is_contiguous():
                raise ValueError(
                    f"{op}: {name} is not as {maker} made it: {part} must be {dtype_name(dtype)}, contiguous, of shape "
                    f"{list(shape)} on {device}; got {dtype_name(t.dtype)}, {list(t.shape)} on {t.device}.  Pass it on "
                    "as it is; with FSDP2's mixed precision, quantise inside of the module that casts its inputs"
                )

    check("rows", rows, row_scales, height, width)
    if turned is not None:
        check("transposed" if of_weight else "columns", turned, turned_scales, width, height)


class Copies(NamedTuple):
    """A matrix in FP8, and its transpose where a gradient needs that, as operators take them."""

    rows: Tensor
    row_scales: Tensor
    turned: Tensor | None
    turned_scales: Tensor | None

    @property
    def operand(self) -> TorchQuantized:
        """The matrix."""
        return TorchQuantized(self.rows, self.row_scales)


def quantizer(backend: str) -> Callable[..., tuple[TorchQuantized | None, TorchQuantized | None]]:
    """`torch_quantize.quantize` or the kernel's function: both give the same bits; the kernel reads a matrix once."""
    if backend == "dequantize":
        return torch_quantize.quantize
    from onchip.fp8 import triton_launches

    return triton_launches.quantize


def copies_of(
    op: str,
    given: Tensor | QuantizedActivation | QuantizedWeight,
    scale: str,
    backend: str,
    *,
    by_block: bool,
    wanted: str | None,
    row_multiple: int = 1,
) -> Copies:
    """A tensor [..., C] in E4M3, with a weight's or an activation's scales; of a quantised one, the copies that it has.

    The transpose is for the gradient of the input named `wanted`; with None it isn't made.  The number of
    rows of a matrix that is quantised here may be rounded up to a multiple of `row_multiple`.
    """
    if not isinstance(given, Tensor):
        check_quantized(op, given, scale, wanted=wanted)
        return Copies(*given[1:5])
    x, turned = given.detach(), wanted is not None
    how = scale, backend, by_block, turned
    if are_plain(x):
        with inside_operator(x):
            made: Any = _quantize(x, *how, row_multiple=row_multiple)
    else:
        made = _quantize_op(x, *how)
    return Copies(*made[:2], *(made[2:] if turned else (None, None)))


def check_unchanged(op: str, weight: Tensor, copies: Copies, scale: str, backend: str) -> None:
    """Raise unless quantising the weight gives these copies."""
    stated.refuse("values are compared in each call")
    again = _quantize(weight.detach(), scale, backend, True, copies.turned is not None)
    for p, q in zip(again, copies, strict=True):
        if q is not None and not torch.equal(p.view(torch.uint8), q.view(torch.uint8)):
            raise RuntimeError(f"{op}: weight changed after it was quantised; quantise it again")


def _quantize(
    x: Tensor, scale: str, backend: str, by_block: bool, turned: bool, *, row_multiple: int = 1
) -> tuple[Tensor, ...]:
    """The fields of `Copies`; without `turned` the last two are empty."""
    flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    rows, other = quantizer(backend)(flat, "e4m3", scale, by_block=by_block, turned=turned, row_multiple=row_multiple)
    assert rows is not None
    return (*rows, *(other or torch_quantize.nothing(x)))


_KINDS = stated.Kinds()


def _quantize_prepared(x: Tensor, scale: str, backend: str, by_block: bool, turned: bool) -> tuple[Tensor, ...]:
    """`_quantize` where torch.compile calls it."""
    how = scale, backend, by_block, turned
    with inside_operator(x):
        made: Any = _KINDS.run(lambda: _quantize(x, *how), (x,), how)
    return tuple(made)


def _fake_quantize(x: Tensor, scale: str, backend: str, by_block: bool, turned: bool) -> tuple[Tensor, ...]:
    k = x.shape[-1]
    m = x.numel() // k
    other = empty(k, m, "e4m3", x, by_block=by_block) if turned else torch_quantize.nothing(x)
    return (*empty(m, k, "e4m3", x, by_block=by_block), *other)


_quantize_op = torch_library.operator(
    "fp8_quantize(Tensor x, str scale, str backend, bool by_block, bool turned) -> (Tensor, Tensor, Tensor, Tensor)",
    _quantize_prepared,
    _fake_quantize,
)
