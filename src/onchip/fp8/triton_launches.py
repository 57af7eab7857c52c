"""The launches of fp8_linear's Triton kernels, one function for each; what they return is as torch_quantize.py's.

A `Launch` is run, or compiled ahead of time.
"""

from functools import lru_cache
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]

from onchip.core.configs import device_slug
from onchip.fp8 import triton_configs, triton_kernels, triton_words
from onchip.fp8 import triton_tiles as triton_spec
from onchip.fp8.numbers import BLOCK, FP8_MAX, blocks
from onchip.fp8.torch_products import new_result
from onchip.fp8.torch_quantize import Quantized, empty_blocks, empty_rows
from onchip.fp8.triton_tiles import ProductConfig, QuantizeConfig
from onchip.frontend.torch_inputs import dtype_name
from onchip.kernels.triton.launch import Launch, device_of

_QUANTIZE = QuantizeConfig()
_TYPES = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}


def quantize_activation(
    x: Tensor,  # [R, C]
    fmt: str,
    scale: str,
    *,
    rows: bool,
    columns: bool,
    config: QuantizeConfig = _QUANTIZE,
) -> tuple[Quantized | None, Quantized | None]:
    """x and x^T with 1x128 scales, as `torch_quantize.quantize_activation`, in one launch."""
    height, width = x.shape
    by_row = empty_rows(height, width, fmt, x) if rows else None
    by_column = empty_rows(width, height, fmt, x) if columns else None
    if x.numel() > 0 and (rows or columns):
        _run(x, quantize_launch(x, by_row, by_column, fmt, scale, config))
    return by_row, by_column


def quantize_weight(
    w: Tensor,  # [N, K]
    scale: str,
    *,
    rows: bool,
    transposed: bool,
    config: QuantizeConfig = _QUANTIZE,
) -> tuple[Quantized | None, Quantized | None]:
    """w and w^T with 128x128 scales, as `torch_quantize.quantize_weight`, in one launch."""
    height, width = w.shape
    plain = empty_blocks(height, width, w) if rows else None
    turned = empty_blocks(width, height, w) if transposed else None
    _run(w, quantize_launch(w, plain, turned, "e4m3", scale, config, by_block=True))
    return plain, turned


def product(
    a: Quantized,  # [M, C], 1x128 scales
    b: Quantized,  # [N, C]
    by_block: bool,  # b's scales are 128x128, else 1x128
    bias: Tensor | None,  # [N]
    dtype: torch.dtype,
    add_to: Tensor | None,  # [M, N] float32
    config: ProductConfig | None = None,
) -> Tensor:
    """A B^T + bias as [M, N] of `dtype`, or `add_to` after adding A B^T to it."""
    out = new_result(a, b, dtype) if add_to is None else add_to
    capability, processors, shared = _device(out.device.index)
    if config is None:
        sizes = triton_configs.product_sizes(by_block, len(out), out.shape[1], a.data.shape[1])
        device, result = _slug(out.device.index), dtype_name(out.dtype)
        config = triton_configs.stored_product(device, by_block, sizes, result, triton_spec.heuristic_product(shared))
    add = add_to is not None
    _run(out, product_launch(a, b, by_block, bias, out, add, config, processors, tma=capability >= 90))
    return out


def quantize_launch(
    x: Tensor,
    rows: Quantized | None,
    columns: Quantized | None,
    fmt: str,
    scale: str,
    config: QuantizeConfig,
    *,
    by_block: bool = False,
) -> Launch:
    if x.stride(0) == 1 != x.stride(1):  # x^T is what lies in rows; its copies are x's, the other way round
        x, rows, columns = x.T, columns, rows
    arguments = {
        "x": x,
        "rows": None if rows is None else rows.data,
        "row_scales": None if rows is None else rows.scales,
        "columns": None if columns is None else columns.data.view(torch.int32),
        "column_scales": None if columns is None else columns.scales,
        "stride_r": x.stride(0),
        "rows_stride": 0 if rows is None else rows.data.stride(0),
        "columns_stride": 0 if columns is None else columns.data.stride(0) // 4,
        "rows_scale_stride": 0 if rows is None else rows.scales.stride(0),
        "columns_scale_stride": 0 if columns is None else columns.scales.stride(0),
        "R_16": x.shape[0] + 16,
        "C_16": x.shape[1] + 16,
        "ROWS": rows is not None,
        "COLUMNS": columns is not None,
        "BY_BLOCK": by_block,
        "FP8": _TYPES[fmt],
        "FP8_MAX": FP8_MAX[fmt],
        "POWER_OF_TWO": scale == "power_of_two",
    }
    grid = (blocks(x.shape[0]), blocks(x.shape[1]))
    registers = config.registers
    if x.stride(1) == 1 and max(x.stride(0), *x.shape) < 2**22:  # offsets of 32 bits within a block, and the grid
        kernel, grid = triton_words.quantize_words, grid[::-1]
        words = BLOCK * x.element_size() // 4
        aligned = words == BLOCK or x.stride(0) % 2 == x.shape[1] % 2 == x.data_ptr() % 4 == 0
        whole = x.shape[0] % BLOCK == 0 == x.shape[1] % BLOCK
        arguments |= {"ALIGNED": aligned, "WHOLE": whole, "EACH": words // config.warps}
        # More programs at once; the compiler alone takes 175 of float32 and 125 of what isn't aligned.
        registers = registers or (128 if words == BLOCK else None if aligned else 80)
    else:
        kernel = triton_kernels.quantize
        arguments |= {"stride_c": x.stride(1)}
    return Launch(kernel, grid, arguments, config.warps, registers=registers)


def product_launch(
    a: Quantized,
    b: Quantized,
    by_block: bool,
    bias: Tensor | None,
    out: Tensor,
    add: bool,
    config: ProductConfig,
    processors: int,
    *,
    tma: bool,
) -> Launch:
    (m, n), depth = out.shape, a.data.shape[1]
    width = min(config.columns, BLOCK)
    # A descriptor's address and strides are multiples of 16 bytes; the caller's main gradient may lie anywhere.
    tma_out = tma and out.stride(0) * out.element_size() % 16 == 0 and out.data_ptr() % 16 == 0
    tiles = -(-m // config.rows) * -(-n // config.columns)
    programs = processors * config.per_processor
    arguments = {
        "a": _operand(a.data, config.rows, BLOCK, tma),
        "b": _operand(b.data, width, BLOCK, tma),
        "a_scales": a.scales,
        "b_scales": b.scales,
        "bias": bias,
        "out": _operand(out, config.rows, width // config.parts, tma_out),
        "a_stride": a.data.stride(0),
        "b_stride": b.data.stride(0),
        "b_scale_stride": b.scales.stride(0),
        "out_stride": out.stride(0),
        "M": m,
        "N": n,
        "depth": depth,
        "BY_BLOCK": by_block,
        "BIAS": bias is not None,
        "ADD": add,
        "BLOCK_M": config.rows,
        "BLOCK_N": config.columns,
        "GROUP": config.group,
        "PROGRAMS": programs,
        "PARTS": config.parts,
        "TMA": tma,
        "TMA_OUT": tma_out,
    }
    return Launch(triton_kernels.scaled_product, (min(tiles, programs),), arguments, config.warps, config.stages)


def _operand(x: Tensor, rows: int, columns: int, tma: bool) -> Any:
    """A matrix as a kernel takes it: a descriptor of blocks [rows, columns], or the tensor for its pointer."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns]) if tma else x


def _run(x: Tensor, launch: Launch) -> None:
    with device_of(x):
        launch.run()


@lru_cache
def _device(index: int | None) -> tuple[int, int, int]:
    """Compute capability, multiprocessors, and bytes of shared memory that a block may use."""
    if triton.knobs.runtime.interpret:
        return 90, 2, 232448
    p = torch.cuda.get_device_properties(index)
    shared: int = p.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return 10 * p.major + p.minor, p.multi_processor_count, shared


@lru_cache
def _slug(index: int | None) -> str:
    """The device as stored configs name it."""
    return (
        "interpreter" if triton.knobs.runtime.interpret else device_slug(torch.cuda.get_device_properties(index).name)
    )
