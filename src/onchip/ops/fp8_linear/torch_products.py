"""The products of the backends 'dequantize' and 'scaled_mm': A B^T of quantised operands."""

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.ops.fp8_linear.spec import BLOCK, SCALE_MULTIPLE, blocks, up
from onchip.ops.fp8_linear.torch_quantize import Quantized, dequantize
from onchip.ops.linear_cross_entropy.triton_op import constant_to_compiler

# Elements of a chunk of an operand in float32: 64 MiB.
_CHUNK = 1 << 24
# What cuBLAS wants the sizes of an FP8 product to be multiples of.
_CUBLAS_MULTIPLE = 16


def dequantized_product(
    a: Quantized,  # [M, C], 1x128 scales
    b: Quantized,  # [N, C]
    by_block: bool,  # b's scales are 128x128, else 1x128
    bias: Tensor | None,  # [N]
    out: Tensor,  # [M, N]; float32 where it is added to
    add: bool,
) -> None:
    """out = A B^T + bias, or out += A B^T, of float32 copies of the operands, a chunk of rows of each at a time."""
    depth = a.data.shape[1]
    step = max(1, _CHUNK // max(1, depth) // BLOCK) * BLOCK
    for n in range(0, len(b.data), step):
        columns = slice(n, min(n + step, len(b.data)))
        right = dequantize(b, columns.start, columns.stop, by_block=by_block)
        for m in range(0, len(a.data), step):
            rows = slice(m, min(m + step, len(a.data)))
            left = dequantize(a, rows.start, rows.stop, by_block=False)
            tile = out[rows, columns]
            if add:
                tile.addmm_(left, right.T)
            elif bias is None:
                tile.copy_(left @ right.T)
            else:
                tile.copy_(torch.addmm(bias[columns].float(), left, right.T))


@constant_to_compiler  # it asks the system
def scaled_mm_refusal(device: torch.device) -> str | None:
    """Why cuBLAS's blockwise products can't serve a call on this device, or None."""
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


def scaled_mm_product(
    a: Quantized,  # [M, C], 1x128 scales
    b: Quantized,  # [N, C]
    by_block: bool,
    bias: Tensor | None,  # [N]
    out: Tensor,  # [M, N]
    add: bool,
) -> None:
    """The same by cuBLAS.  Ragged sizes are padded with rows of zeros, and what they make is cut off."""
    rows, columns = out.shape
    a = _pad(a, up(rows, _CUBLAS_MULTIPLE), by_block=False)
    b = _pad(b, up(columns, _CUBLAS_MULTIPLE), by_block=by_block)
    # cuBLAS adds a bias of the result's own 16-bit dtype; any other is added in float32, before the only rounding.
    in_product = bias is not None and bias.dtype == out.dtype != torch.float32
    later = add or (bias is not None and not in_product)
    product = F.scaled_mm(
        a.data,
        b.data.T,
        a.scales.T,
        F.ScalingType.BlockWise1x128,
        b.scales.T,
        F.ScalingType.BlockWise128x128 if by_block else F.ScalingType.BlockWise1x128,
        bias=F.pad(bias, (0, len(b.data) - columns)) if in_product and bias is not None else None,
        output_dtype=torch.float32 if later else out.dtype,
    )[:rows, :columns]
    if add:
        out.add_(product)
    elif later and bias is not None:
        out.copy_(product.add_(bias))
    else:
        out.copy_(product)


def _pad(q: Quantized, rows: int, *, by_block: bool) -> Quantized:
    """The operand with rows of zeros at the end."""
    more = rows - len(q.data)
    if more == 0:
        return q
    data = F.pad(q.data.view(torch.uint8), (0, 0, 0, more)).view(q.data.dtype)
    if not by_block:
        return Quantized(data, F.pad(q.scales, (0, more)))
    assert q.scales.shape[1] % SCALE_MULTIPLE == 0
    return Quantized(data, F.pad(q.scales, (0, 0, 0, blocks(rows) - len(q.scales))))
