"""The layer's products in JAX: of dequantised numbers by XLA, on any device, or of FP8 numbers by the Mosaic kernel.

All three are A B^T of matrices with rows along the sum, so backward's are of transposed copies.  Ragged sizes are
padded with zeros to whole groups of a sum and to the kernel's multiples elsewhere; padding of a result is cut off.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onchip.fp8.jax_quantize import Quantized, dequantize, operand
from onchip.fp8.numbers import Options

# The first version of JAX whose products may be of one operand in E4M3 and another in E5M2, as far as it was tried.
_MIXED = (0, 11, 2)


def mosaic_refusal(platform: str, options: Options) -> str | None:
    """Why the kernel can't serve a call, or None."""
    if platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {platform!r}"
    if options.grad_dtype != "e4m3" and jax.__version_info__ < _MIXED:
        return f"grad_dtype={options.grad_dtype!r} needs JAX 0.11.2 or later; this is {jax.__version__}"
    capability = getattr(jax.devices()[0], "compute_capability", "none")
    return None if str(capability) == "9.0" else f"it is for compute capability 9.0 (Hopper); this is {capability}"


def forward(backend: str, options: Options, layout: str, x: Any, weight: Any, bias: Any) -> tuple[Any, Quantized]:
    """Of x [M, K], the weight and bias [N] the output [M, N], and x as backward needs it."""
    n = weight.shape[0 if layout == "nk" else 1]
    wide = None if bias is None else bias.astype(jnp.float32)
    w = operand(weight, "e4m3", options.scale, turned=layout == "kn", by_block=True)
    out = _product(backend, operand(x, "e4m3", options.scale), w, wide, by_block=True, dtype=x.dtype)
    return out[: len(x), :n], operand(x, "e4m3", options.scale, turned=True)


def backward(
    backend: str, options: Options, layout: str, x_dtype: Any, kept: Quantized, weight: Any, g: Any
) -> tuple[Any, Any]:
    """The gradients of x, in its dtype, and of the weight."""
    fmt, scale = options.grad_dtype, options.scale
    k = weight.shape[1 if layout == "nk" else 0]
    w = operand(weight, "e4m3", scale, turned=layout == "nk", by_block=True)
    grad_x = _product(backend, operand(g, fmt, scale), w, by_block=True, dtype=x_dtype)
    a, b = operand(g, fmt, scale, turned=True), kept
    if layout == "kn":
        a, b = b, a
    grad_w = _product(backend, a, b, by_block=False, dtype=weight.dtype)
    return grad_x[: len(g), :k], grad_w[: weight.shape[0], : weight.shape[1]]


def _product(backend: str, a: Quantized, b: Quantized, bias: Any = None, *, by_block: bool, dtype: Any) -> Any:
    """A B^T + bias with the padding of both, each element rounded once; by_block: b has scales of 128x128."""
    if backend == "mosaic_gpu":
        from onchip.fp8.mosaic_kernels import scaled_product  # Pallas takes a second to import

        return scaled_product(a, b, bias, by_block=by_block, dtype=dtype)
    left, right = dequantize(a, by_block=False), dequantize(b, by_block=by_block)
    out = lax.dot_general(left, right, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    return (out if bias is None else out + jnp.pad(bias, (0, len(right) - len(bias)))).astype(dtype)
