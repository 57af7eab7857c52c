"""Activations and weights in FP8 that callers pass on, and what is checked of them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.fp8 import numbers
from onchip.fp8.numbers import OP
from onchip.fp8.torch_quantize import FP8
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


def check_quantized(x: Any, scale: str, *, wanted: bool) -> None:
    """Raise unless x, a QuantizedActivation, serves this call; `wanted`: for a weight's gradient, too."""
    _check_how(OP, "x", x.scale, scale, "weight" if wanted and x.columns is None else None)
    k = x.x.shape[-1]
    m = x.x.numel() // k
    _check_made(OP, "x", "rows", x.rows, x.row_scales, m, k, x.x.device)
    if x.columns is not None:
        _check_made(OP, "x", "columns", x.columns, x.column_scales, k, m, x.x.device)


def check_quantized_weight(op: str, w: Any, scale: str, *, wanted: str | None) -> None:
    """Raise unless w, a QuantizedWeight, serves this call; for the gradient of the input named `wanted`, too."""
    _check_how(op, "weight", w.scale, scale, wanted if w.transposed is None else None)
    n, k = w.weight.shape
    _check_made(op, "weight", "rows", w.rows, w.row_scales, n, k, w.weight.device)
    if w.transposed is not None:
        _check_made(op, "weight", "transposed", w.transposed, w.transposed_scales, k, n, w.weight.device)


_MAKERS = {"x": "quantize_activation", "weight": "quantize_weight"}


def _check_how(op: str, name: str, made: str, scale: str, missing: str | None) -> None:
    if made != scale:
        raise ValueError(f"{op}: {name} was quantised with scale={made!r} but scale is {scale!r}; they must be equal")
    if missing:
        raise ValueError(
            f"{op}: {name} was quantised without gradients but {missing} needs one; "
            f"call {_MAKERS[name]} where they are on"
        )


def _check_made(
    op: str, name: str, part: str, data: Tensor, scales: Tensor, rows: int, columns: int, device: torch.device
) -> None:
    """Raise unless these are `torch_quantize.empty_rows`, or `empty_blocks`, of a matrix [rows, columns].

    Kernels rely on it.
    """
    along = numbers.blocks(columns)
    by_block = (numbers.blocks(rows), numbers.up(along, numbers.SCALE_MULTIPLE))
    expected = (
        (data, FP8["e4m3"], (rows, numbers.up(columns))),
        (scales, torch.float32, by_block if name == "weight" else (along, rows)),
    )
    for t, dtype, shape in expected:
        if t.dtype != dtype or t.shape != shape or t.device != device or not t.is_contiguous():
            raise ValueError(
                f"{op}: {name} is not as {_MAKERS[name]} made it: {part} must be {dtype_name(dtype)}, contiguous, of "
                f"shape {list(shape)} on {device}; got {dtype_name(t.dtype)}, {list(t.shape)} on {t.device}.  Pass it "
                "on as it is; with FSDP2's mixed precision, quantise inside of the module that casts its inputs"
            )
