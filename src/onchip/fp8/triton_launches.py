"""The launches of fp8_linear's Triton kernels, one function for each; results have the layout of torch_quantize.py.

A `Launch` is run, or compiled ahead of time.
"""

from typing import Any

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from onchip.fp8.numbers import BLOCK, FP8_MAX, OP, blocks, up
from onchip.fp8.torch_quantize import TorchQuantized, empty
from onchip.fp8.triton_kernels import scaled_product
from onchip.fp8.triton_tiles import ProductConfig, product_config
from onchip.fp8.triton_words import quantize_words
from onchip.frontend import torch_prepared as stated
from onchip.kernels.triton.launch import Launch, describe, descriptor, device_of

# Warps of a quantiser's program.
_WARPS = 8
# The kernel's offsets within a block have 32 bits, and rows of blocks are counted by the grid's second axis.
_LONGEST_ROW, _MOST_BLOCKS = 1 << 24, 65535
_TYPES = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}


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
    """As `torch_quantize.quantize`, in one launch."""
    height, width = x.shape
    plain = empty(up(height, row_multiple), width, fmt, x, by_block=by_block) if rows else None
    other = empty(width, height, fmt, x, by_block=by_block) if turned else None
    if x.numel() > 0:
        _run(x, quantize_launch(x, plain, other, fmt, scale, by_block=by_block))
    return plain, other


def product(
    a: TorchQuantized,
    b: TorchQuantized,
    by_block: bool,
    bias: Tensor | None,
    dtype: torch.dtype,
    add_to: Tensor | None,
) -> Tensor:
    """As `torch_products.multiply`, in one launch."""
    out = stated.empty((len(a.data), len(b.data)), dtype, a.data.device) if add_to is None else add_to
    capability, processors, shared = describe(out.device)
    config = product_config(shared, by_block)
    add = add_to is not None
    _run(out, product_launch(a, b, by_block, bias, out, add, config, processors, tma=capability >= 90))
    return out


def quantize_launch(
    x: Tensor,
    rows: TorchQuantized | None,
    columns: TorchQuantized | None,
    fmt: str,
    scale: str,
    *,
    by_block: bool = False,
    tiles: Tensor | None = None,  # [R / 128, 3] int32, contiguous: a number, and the block's first row of x and its end
) -> Launch:
    """The launch of the quantiser.  A matrix that is contiguous neither in rows nor in columns is copied first.

    With `tiles` each block of 128 rows of the results comes from up to 128 rows of x, wherever they are, and zeros.
    """
    turned = tiles is None and x.stride(0) == 1 != x.stride(1) < _LONGEST_ROW
    if turned:  # x^T is contiguous in rows; its rows and columns are x's columns and rows
        x, rows, columns = x.T, columns, rows
    elif x.stride(1) != 1 or x.stride(0) >= _LONGEST_ROW:
        x = stated.converted(x, Tensor.contiguous)
    if x.shape[1] >= _LONGEST_ROW:
        raise ValueError(f"{OP}: backend 'triton' takes fewer than {_LONGEST_ROW} columns; got {x.shape[1]}")
    height, width = x.shape if tiles is None else (BLOCK * len(tiles), x.shape[1])
    words = BLOCK * x.element_size() // 4
    aligned = words == BLOCK or x.stride(0) % 2 == width % 2 == x.data_ptr() % 4 == 0
    tall = blocks(height) > _MOST_BLOCKS
    grid = (blocks(height), blocks(width)) if tall else (blocks(width), blocks(height))
    whole = tiles is None and width % BLOCK == 0
    # Fewer registers let more programs run at once; the compiler by itself takes 175 for float32, 125 for numbers that
    # aren't aligned, and 80 for last blocks, which are few.
    registers = 128 if words == BLOCK else 80 if not aligned else 64 if whole else None
    arguments = {
        "x": x,
        "rows": None if rows is None else rows.data,
        "row_scales": None if rows is None else rows.scales,
        "columns": None if columns is None else columns.data.view(torch.int32),
        "column_scales": None if columns is None else columns.scales,
        "tiles": tiles,
        "stride_r": x.stride(0),
        "rows_stride": 0 if rows is None else rows.data.stride(0),
        "columns_stride": 0 if columns is None else columns.data.stride(0) // 4,
        "rows_scale_stride": 0 if rows is None else rows.scales.stride(0),
        "columns_scale_stride": 0 if columns is None else columns.scales.stride(0),
        "R_16": height + 16,
        "C_16": width + 16,
        "BY_BLOCK": by_block,
        "FP8": _TYPES[fmt],
        "FP8_MAX": FP8_MAX[fmt],
        "POWER_OF_TWO": scale == "power_of_two",
        "ALIGNED": aligned,
        "WHOLE": whole,
        "EACH": words // _WARPS,
        "TALL": tall,
    }
    return Launch(quantize_words, grid, arguments, _WARPS, registers=registers)


def product_launch(
    a: TorchQuantized,
    b: TorchQuantized,
    by_block: bool,
    bias: Tensor | None,
    out: Tensor,
    add: bool,
    config: ProductConfig,
    processors: int,
    *,
    tma: bool,
) -> Launch:
    assert config.columns <= config.depth == BLOCK
    (m, n), depth = out.shape, a.data.shape[1]
    # A descriptor's address and strides are multiples of 16 bytes; the caller's main gradient may lie anywhere.
    tma_out = tma and out.stride(0) * out.element_size() % 16 == 0 and out.data_ptr() % 16 == 0
    tiles = -(-m // config.rows) * -(-n // config.columns)
    programs = processors * config.per_processor
    arguments = {
        "a": _operand(a.data, config.rows, BLOCK, tma),
        "b": _operand(b.data, config.columns, BLOCK, tma),
        "a_scales": a.scales,
        "b_scales": b.scales,
        "bias": bias,
        "out": _operand(out, config.rows, config.columns // config.parts, tma_out),
        "b_scale_stride": b.scales.stride(0),
        "out_stride": out.stride(0),
        "M": m,
        "N": n,
        "depth": depth,
        "BY_BLOCK": by_block,
        "ADD": add,
        "BLOCK_M": config.rows,
        "BLOCK_N": config.columns,
        "GROUP": config.group,
        "PROGRAMS": programs,
        "PARTS": config.parts,
        "TMA": tma,
        "TMA_OUT": tma_out,
    }
    return Launch(scaled_product, (min(tiles, programs),), arguments, config.warps, config.stages)


def _operand(x: Tensor, rows: int, columns: int, tma: bool) -> Any:
    """A matrix as a kernel takes it: a descriptor of blocks [rows, columns], or the tensor for its pointer."""
    return descriptor(x, x.stride(0), rows, columns) if tma else x


def _run(x: Tensor, launch: Launch) -> None:
    with device_of(x):
        launch.run()
