"""Activations and weights in FP8 that callers pass on, their checks, and a weight's operands in an operator."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.fp8.numbers import SCALE_MULTIPLE, blocks, up
from onchip.fp8.torch_quantize import FP8, Quantized, operand
from onchip.frontend.torch_inputs import dtype_name


class QuantizedActivation(NamedTuple):
    """An activation in FP8 that several layers share, as `quantize_activation` makes it."""

    x: Tensor
    """[..., K]: what it was made of, for its shape, its dtype and its gradient; no layer keeps it."""
    rows: Tensor
    """[M, K rounded up to 128] E4M3: scaled along K, for the output."""
    row_scales: Tensor
    """[K / 128, M] float32."""
    columns: Tensor | None
    """[K, M rounded up to 128] E4M3: transposed and scaled along M, for the weight's gradient; None without."""
    column_scales: Tensor | None
    """[M / 128, K] float32."""
    scale: str
    """"float32" or "power_of_two"."""


class QuantizedWeight(NamedTuple):
    """A weight in FP8 for several calls between two changes of it, as `quantize_weight` makes it."""

    weight: Tensor
    """[N, K]: what it was made of, for its shape, its dtype and its gradient."""
    rows: Tensor
    """[N, K rounded up to 128] E4M3, for the output."""
    row_scales: Tensor
    """[N / 128, K / 128 rounded up to 4] float32."""
    transposed: Tensor | None
    """[K, N rounded up to 128] E4M3, for x's gradient; None without gradients."""
    transposed_scales: Tensor | None
    """[K / 128, N / 128 rounded up to 4] float32."""
    scale: str
    """"float32" or "power_of_two"."""


def check_quantized(op: str, made: QuantizedActivation | QuantizedWeight, scale: str, *, wanted: str | None) -> None:
    """Raise unless `made` serves a call with this scale; for the gradient of the input named `wanted`, too.

    Kernels rely on the layout, which is that of `torch_quantize.empty_rows` and `empty_blocks`.
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


class WeightCopies(NamedTuple):
    """The copies of a `QuantizedWeight` as an operator takes them; all None where the call makes its own."""

    weight_rows: Tensor | None = None
    weight_row_scales: Tensor | None = None
    transposed: Tensor | None = None
    transposed_scales: Tensor | None = None


def weight_operands(
    op: str,
    weight: Tensor,  # [N, K]
    given: WeightCopies,
    scale: str,
    quantize: Callable[..., tuple[Quantized | None, Quantized | None]],
    *,
    transposed: bool,
    check: bool,
) -> tuple[Quantized | None, Quantized | None]:
    """The weight in FP8, and its transpose: those given, or made by `quantize`, the transpose where it is asked for.

    On the CPU, and with `check` on the GPU, those given must be what `quantize` makes.
    """
    rows = operand(given.weight_rows, given.weight_row_scales)
    turned = operand(given.transposed, given.transposed_scales)
    if rows is None:
        return quantize(weight.detach(), scale, rows=True, transposed=transposed)
    if check or not weight.is_cuda:
        again = quantize(weight.detach(), scale, rows=True, transposed=turned is not None)
        made = [t for q in again if q is not None for t in q]
        there = [t for t in given if t is not None]
        if not all(torch.equal(p.view(torch.uint8), q.view(torch.uint8)) for p, q in zip(made, there, strict=True)):
            raise RuntimeError(f"{op}: weight changed after it was quantised; quantise it again")
    return rows, turned
