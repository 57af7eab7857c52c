"""Quantising with PyTorch's own operations, with the same bits as reference.py, and the layout of quantised matrices.

A chunk of rows at a time is widened to float32, so that no float32 copy of a whole matrix is made.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.fp8.numbers import BLOCK, COLUMN, FP8_MAX, LEAST_SCALE, ROW, SCALE_MULTIPLE, SQUARE, blocks, up
from onchip.frontend import torch_prepared as stated

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# Elements of a chunk, 16 MiB in float32.
_CHUNK = 1 << 22


class TorchQuantized(NamedTuple):
    """An operand of a product: rows of FP8 numbers along the contraction, and their scales."""

    data: Tensor
    """[R, C rounded up to 128] FP8, contiguous; 0 beyond C."""
    scales: Tensor
    """float32, contiguous.  1x128: [C / 128, R].  128x128: [R / 128, C / 128 rounded up to 4]."""


def operand(data: Tensor | None, scales: Tensor | None) -> TorchQuantized | None:
    """The operand with this data and these scales; both are None together."""
    return None if data is None or scales is None else TorchQuantized(data, scales)


def empty(rows: int, columns: int, fmt: str, like: Tensor, *, by_block: bool = False) -> TorchQuantized:
    """Memory for a matrix [rows, columns] with 1x128 scales, or `by_block` with 128x128 ones."""
    data = stated.empty((rows, up(columns)), FP8[fmt], like.device)
    if not by_block:
        return TorchQuantized(data, stated.empty((blocks(columns), rows), torch.float32, like.device))
    wide = up(blocks(columns), SCALE_MULTIPLE)
    new = stated.empty if wide == blocks(columns) else stated.zeros  # padding is never written
    return TorchQuantized(data, new((blocks(rows), wide), torch.float32, like.device))


def nothing(like: Tensor) -> TorchQuantized:
    """A tensor of no elements, which stands for None among an operator's results."""
    return TorchQuantized(stated.empty(0, FP8["e4m3"], like.device), stated.empty(0, torch.float32, like.device))


def quantize(
    x: Tensor,
    fmt: str,
    scale: str,
    *,
    by_block: bool = False,
    rows: bool = True,
    turned: bool = True,
    row_multiple: int = 1,
) -> tuple[TorchQuantized | None, TorchQuantized | None]:
    """x [R, C] and x^T, each with 1x128 scales or both with the same 128x128 ones; None for what isn't asked for.

    The number of x's rows is rounded up to a multiple of `row_multiple`; rows past x's own hold arbitrary numbers.
    """
    height, width = x.shape
    plain = empty(up(height, row_multiple), width, fmt, x, by_block=by_block) if rows else None
    other = empty(width, height, fmt, x, by_block=by_block) if turned else None
    stated.refuse("it is quantised part by part")
    for start, v in _chunks(x):
        end = min(height, start + len(v))
        block = slice(start // BLOCK, blocks(end))
        squares = _quantized(v, SQUARE, fmt, scale) if by_block else None
        if plain is not None:
            q, s = squares or _quantized(v[: end - start], ROW, fmt, scale)
            plain.data[start:end] = q[: end - start]
            if by_block:
                plain.scales[block, : blocks(width)] = s
            else:
                plain.scales[:, start:end] = s.T
        if other is not None:
            q, s = squares or _quantized(v[:, :width], COLUMN, fmt, scale)
            other.data[:, start : start + len(v)] = q[:, :width].T
            if by_block:
                other.scales[:, block] = s.T
            else:
                other.scales[block] = s
    return plain, other


def _chunks(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Where chunks of rows start, and their numbers in float32, both sizes rounded up to 128 with zeros."""
    height, width = x.shape
    step = max(1, _CHUNK // up(width) // BLOCK) * BLOCK
    for start in range(0, height, step):
        part = x[start : start + step]
        v = torch.zeros((up(len(part)), up(width)), dtype=torch.float32, device=x.device)
        v[: len(part), :width] = part
        yield start, v


def _quantized(v: Tensor, group: tuple[int, int], fmt: str, scale: str) -> tuple[Tensor, Tensor]:
    """v [R, C], of whole groups, in FP8, and the scales [R / rows, C / columns] of groups [rows, columns]."""
    rows, columns = group
    groups = v.view(len(v) // rows, rows, -1, columns)
    within = [dimension for dimension, size in ((1, rows), (3, columns)) if size > 1]
    scales = _to_scale(groups.abs().amax(within, keepdim=True), fmt, scale)
    q = groups * scales.reciprocal()
    return q.view(v.shape).to(FP8[fmt]), scales.view(len(groups), -1)


def _to_scale(amax: Tensor, fmt: str, scale: str) -> Tensor:
    # The divisor is a tensor on the device: to divide by a number, CUDA multiplies with its rounded inverse.
    s = (amax / amax.new_full((), FP8_MAX[fmt])).clamp(min=LEAST_SCALE)
    if scale == "power_of_two":
        bits = (s.view(torch.int32) + 0x7FFFFF) & 0x7F800000
        s = torch.where(s.isfinite(), bits.view(torch.float32), s)
    return torch.where(amax == 0, 1.0, s)


def dequantize(q: TorchQuantized, start: int, end: int, *, by_block: bool) -> Tensor:
    """Rows [start, end) of an operand in float32, with the zeros that pad them."""
    columns = q.data.shape[1]
    if by_block:
        of_blocks = q.scales[start // BLOCK : blocks(end), : columns // BLOCK]
        scales = of_blocks.repeat_interleave(BLOCK, 0)[start % BLOCK :][: end - start]
    else:
        scales = q.scales[:, start:end].T
    made: Tensor = (q.data[start:end].float().unflatten(1, (-1, BLOCK)) * scales[..., None]).flatten(1)
    return made
