"""The products of the backends 'dequantize' and 'scaled_mm', A B^T of quantised operands, and what each refuses."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.fp8 import cublas
from onchip.fp8.numbers import BLOCK, SCALE_MULTIPLE, blocks, up
from onchip.fp8.torch_quantize import TorchQuantized, dequantize
from onchip.frontend import torch_prepared as stated
from onchip.kernels.triton.launch import constant_to_compiler, device_refusal

# Elements of an operand's chunk, 64 MiB in float32.
_CHUNK = 1 << 24
_DEVICES = ("cpu", "cuda", "meta")
# PyTorch wants the sizes of an FP8 product to be multiples of these.
_CUBLAS_MULTIPLE = 16
_CUBLAS_ALIGNMENT = 16  # bytes


def product_of(backend: str) -> Callable[..., Tensor]:
    """The function that multiplies quantised operands which aren't empty."""
    if backend == "triton":
        from onchip.fp8 import triton_launches

        return triton_launches.product
    return scaled_mm_product if backend == "scaled_mm" else dequantized_product


def row_multiple(backend: str) -> int:
    """The number whose multiples of rows this backend's products take without copies."""
    return cublas.ROWS if backend == "scaled_mm" else 1


def multiply(
    backend: str,
    a: TorchQuantized | None,  # [M, C], 1x128 scales
    b: TorchQuantized | None,  # [N, C]
    *,
    by_block: bool,  # b's scales are 128x128, else 1x128
    dtype: torch.dtype,
    bias: Tensor | None = None,  # [N]
    add_to: Tensor | None = None,  # [M, N] float32
) -> Tensor:
    """A B^T + bias as [M, N] of `dtype`, or `add_to` after adding A B^T to it, by a backend's product."""
    assert a is not None
    assert b is not None
    if 0 in (len(a.data), a.data.shape[1]):  # no rows, or a weight's gradient of none
        return stated.zeros((len(a.data), len(b.data)), dtype, a.data.device) if add_to is None else add_to
    return product_of(backend)(a, b, by_block, bias, dtype, add_to)


def dequantized_product(
    a: TorchQuantized, b: TorchQuantized, by_block: bool, bias: Tensor | None, dtype: torch.dtype, add_to: Tensor | None
) -> Tensor:
    """As `multiply`, on float32 copies of the operands, a chunk of rows of each at a time."""
    stated.refuse("products are of float32 copies, made part by part")
    out = a.data.new_empty((len(a.data), len(b.data)), dtype=dtype) if add_to is None else add_to
    depth = a.data.shape[1]
    step = max(1, _CHUNK // max(1, depth) // BLOCK) * BLOCK
    for n in range(0, len(b.data), step):
        columns = slice(n, min(n + step, len(b.data)))
        right = dequantize(b, columns.start, columns.stop, by_block=by_block)
        for m in range(0, len(a.data), step):
            rows = slice(m, min(m + step, len(a.data)))
            left = dequantize(a, rows.start, rows.stop, by_block=False)
            tile = out[rows, columns]
            if add_to is not None:
                tile.addmm_(left, right.T)
            elif bias is None:
                tile.copy_(left @ right.T)
            else:
                tile.copy_(torch.addmm(bias[columns].float(), left, right.T))
    return out


@constant_to_compiler  # it asks the system
def scaled_mm_refusal(device: torch.device, grad_dtype: str = "e4m3") -> str | None:
    """Why cuBLAS's blockwise products can't serve a call on this device, or None."""
    if grad_dtype != "e4m3":
        return "cuBLAS has no blockwise scales for E5M2; use 'triton' or grad_dtype='e4m3'"
    if not hasattr(F, "scaled_mm"):
        return f"PyTorch {torch.__version__} has no torch.nn.functional.scaled_mm"
    if device.type != "cuda":
        return f"it runs on CUDA tensors, not on {device.type!r}"
    if torch.version.hip is not None:
        return "it is NVIDIA's cuBLAS"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"cuBLAS has blockwise scales for compute capability 9.0 alone; this is {capability[0]}.{capability[1]}"
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return None if version >= (12, 9) else f"it needs CUDA 12.9 or later; this is a build for {torch.version.cuda}"


@constant_to_compiler
def triton_refusal(device: torch.device) -> str | None:
    """Why the Triton kernels can't serve a call on this device, or None."""
    reason = device_refusal(device.type, device.index, torch.float32)
    if reason is not None or device.type != "cuda":  # on the CPU Triton's interpreter runs, which refuses nothing
        return reason
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) >= (8, 9) else f"FP8 needs compute capability 8.9 or later; this is {major}.{minor}"


def refusals(device: torch.device, grad_dtype: str = "e4m3") -> dict[str, str | None]:
    """Why each backend, best first, can't serve a call on this device, or None."""
    known = device.type in _DEVICES
    return {
        "scaled_mm": scaled_mm_refusal(device, grad_dtype),
        "triton": triton_refusal(device),
        "dequantize": None if known else f"it runs on {', '.join(_DEVICES)} tensors, not on {device.type!r}",
    }


def scaled_mm_product(
    a: TorchQuantized,
    b: TorchQuantized,
    by_block: bool,
    bias: Tensor | None,
    dtype: torch.dtype,
    add_to: Tensor | None,
    *,
    direct: bool = True,
) -> Tensor:
    """As `multiply`, by cuBLAS, which PyTorch's `F.scaled_mm` calls where it can't be called directly, or isn't to be.

    Ragged sizes are padded with rows of zeros, and their results are cut off.
    """
    if direct and add_to is not None and cublas.multiplied(a, b, by_block, add_to, add=True):
        return add_to
    rows, columns = len(a.data), len(b.data)
    # cuBLAS adds a bias of the result's own 16-bit dtype; any other is added in float32, before the only rounding.
    in_product = bias if bias is not None and bias.dtype == dtype != torch.float32 else None
    after = bias if in_product is None else None
    wide = torch.float32 if add_to is not None or after is not None else dtype
    made = _stored(a, b, by_block, in_product, wide) if direct else None
    if made is None:
        a = _pad(a, up(rows, _CUBLAS_MULTIPLE), by_block=False)
        b = _pad(b, up(columns, _CUBLAS_MULTIPLE), by_block=by_block)
        more = len(b.data) - columns
        if in_product is not None and (more or in_product.data_ptr() % _CUBLAS_ALIGNMENT):  # else nothing to copy
            in_product = stated.call(F.pad, in_product, (0, more))
        made = _stored(a, b, by_block, in_product, wide) if direct else None
    if made is None:
        made = stated.call(
            F.scaled_mm,
            a.data,
            b.data.T,
            a.scales.T,
            F.ScalingType.BlockWise1x128,
            b.scales.T,
            F.ScalingType.BlockWise128x128 if by_block else F.ScalingType.BlockWise1x128,
            bias=in_product,
            output_dtype=wide,
        )
    if made.shape != (rows, columns):
        made = made[:rows, :columns]
    if add_to is not None:
        return stated.call(Tensor.add_, add_to, made)
    if after is not None:
        made = stated.call(Tensor.add_, made, after)
    return stated.converted(made, lambda x: x.to(dtype).contiguous())


def _stored(
    a: TorchQuantized, b: TorchQuantized, by_block: bool, bias: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """A B^T + bias in new memory, by cuBLASLt; None if it can't for these tensors."""
    shape = len(a.data), len(b.data)
    if not cublas.takes(*shape, dtype):
        return None
    out = stated.empty(shape, dtype, a.data.device)
    return out if cublas.multiplied(a, b, by_block, out, bias=bias) else None


def _pad(q: TorchQuantized, rows: int, *, by_block: bool) -> TorchQuantized:
    """The operand with rows of zeros at the end."""
    more = rows - len(q.data)
    if more == 0:
        return q
    data = stated.call(F.pad, q.data.view(torch.uint8), (0, 0, 0, more)).view(q.data.dtype)
    if not by_block:
        return TorchQuantized(data, stated.call(F.pad, q.scales, (0, more)))
    assert q.scales.shape[1] % SCALE_MULTIPLE == 0
    return TorchQuantized(data, stated.call(F.pad, q.scales, (0, 0, 0, blocks(rows) - len(q.scales))))
