"""Quantising with PyTorch's own operations, bit for bit as reference.py, and the layout of what is quantised.

A chunk of rows at a time is widened to float32, so that no float32 copy of a whole matrix is made.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.fp8.numbers import BLOCK, FP8_MAX, LEAST_SCALE, SCALE_MULTIPLE, blocks, up

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# Elements of a chunk in float32: 16 MiB.
_CHUNK = 1 << 22


class Quantized(NamedTuple):
    """An operand of a product: rows of FP8 numbers along the contraction, and their scales."""

    data: Tensor
    """[R, C rounded up to 128] FP8, contiguous; 0 beyond C."""
    scales: Tensor
    """float32, contiguous.  1x128: [C / 128, R].  128x128: [R / 128, C / 128 rounded up to 4]."""


def operand(data: Tensor | None, scales: Tensor | None) -> Quantized | None:
    """The operand of these two, which are None together."""
    return None if data is None or scales is None else Quantized(data, scales)


def empty_rows(rows: int, columns: int, fmt: str, like: Tensor) -> Quantized:
    """Memory for a matrix [rows, columns] with 1x128 scales."""
    return Quantized(
        like.new_empty((rows, up(columns)), dtype=FP8[fmt]),
        like.new_empty((blocks(columns), rows), dtype=torch.float32),
    )


def empty_blocks(rows: int, columns: int, fmt: str, like: Tensor) -> Quantized:
    """Memory for a matrix [rows, columns] with 128x128 scales."""
    wide = up(blocks(columns), SCALE_MULTIPLE)
    new = like.new_empty if wide == blocks(columns) else like.new_ones  # what pads them is never written
    return Quantized(
        like.new_empty((rows, up(columns)), dtype=FP8[fmt]),
        new((blocks(rows), wide), dtype=torch.float32),
    )


def nothing(like: Tensor) -> Quantized:
    """Of no elements: what stands for None among an operator's results."""
    return Quantized(like.new_empty(0, dtype=FP8["e4m3"]), like.new_empty(0, dtype=torch.float32))


def quantize_activation(
    x: Tensor, fmt: str, scale: str, *, rows: bool, columns: bool
) -> tuple[Quantized | None, Quantized | None]:
    """x [R, C] with 1x128 scales, and x^T with 1x128 scales; None for what isn't asked for."""
    height, width = x.shape
    by_row = empty_rows(height, width, fmt, x) if rows else None
    by_column = empty_rows(width, height, fmt, x) if columns else None
    for start, v in _chunks(x):
        end = min(height, start + len(v))
        if by_row is not None:
            q, s = _quantized(v[: end - start], (1, BLOCK), fmt, scale)
            by_row.data[start:end] = q
            by_row.scales[:, start:end] = s.T
        if by_column is not None:
            q, s = _quantized(v[:, :width], (BLOCK, 1), fmt, scale)
            by_column.data[:, start : start + len(v)] = q.T
            by_column.scales[start // BLOCK : blocks(end)] = s
    return by_row, by_column


def quantize_weight(
    w: Tensor, scale: str, *, rows: bool, transposed: bool
) -> tuple[Quantized | None, Quantized | None]:
    """w [N, K] and w^T in E4M3 with 128x128 scales, the same numbers; None for what isn't asked for."""
    height, width = w.shape
    plain = empty_blocks(height, width, "e4m3", w) if rows else None
    turned = empty_blocks(width, height, "e4m3", w) if transposed else None
    for start, v in _chunks(w):
        end = min(height, start + len(v))
        q, s = _quantized(v, (BLOCK, BLOCK), "e4m3", scale)
        block = slice(start // BLOCK, blocks(end))
        if plain is not None:
            plain.data[start:end] = q[: end - start]
            plain.scales[block, : blocks(width)] = s
        if turned is not None:
            turned.data[:, start : start + len(v)] = q[:, :width].T
            turned.scales[:, block] = s.T
    return plain, turned


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
    # By a tensor on the device: by a number, CUDA's division multiplies with its rounded inverse.
    s = (amax / amax.new_full((), FP8_MAX[fmt])).clamp(min=LEAST_SCALE)
    if scale == "power_of_two":
        bits = (s.view(torch.int32) + 0x7FFFFF) & 0x7F800000
        s = torch.where(s.isfinite(), bits.view(torch.float32), s)
    return torch.where(amax == 0, 1.0, s)


def dequantize(q: Quantized, start: int, end: int, *, by_block: bool) -> Tensor:
    """Rows [start, end) of an operand in float32, with the zeros that pad them."""
    columns = q.data.shape[1]
    if by_block:
        of_blocks = q.scales[start // BLOCK : blocks(end), : columns // BLOCK]
        scales = of_blocks.repeat_interleave(BLOCK, 0)[start % BLOCK :][: end - start]
    else:
        scales = q.scales[:, start:end].T
    made: Tensor = (q.data[start:end].float().unflatten(1, (-1, BLOCK)) * scales[..., None]).flatten(1)
    return made
