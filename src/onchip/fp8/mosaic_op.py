"""The 'mosaic_gpu' backend of fp8_linear in JAX: the product of mosaic_kernels.py, of what XLA has quantised.

All three products are A B^T of matrices with rows along the sum, so backward's are of transposed copies.  Ragged sizes
are padded with zeros to whole groups of a sum and to the kernel's multiples elsewhere; padding of a result is cut off.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from onchip.fp8.jax_quantize import COLUMN, ROW, SQUARE, quantize
from onchip.fp8.numbers import Options

# The first version of JAX whose products may be of one operand in E4M3 and another in E5M2, as far as it was tried.
_MIXED = (0, 11, 2)


def refusal(platform: str, options: Options) -> str | None:
    """Why the kernel can't serve a call, or None."""
    if platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {platform!r}"
    if options.grad_dtype != "e4m3" and jax.__version_info__ < _MIXED:
        return f"grad_dtype={options.grad_dtype!r} needs JAX 0.11.2 or later; this is {jax.__version__}"
    capability = getattr(jax.devices()[0], "compute_capability", "none")
    return None if str(capability) == "9.0" else f"it is for compute capability 9.0 (Hopper); this is {capability}"


def forward(options: Options, layout: str, x: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    """Of x [M, K], the weight and bias [N] the output [M, N], and x as backward needs it."""
    run = partial(_forward, options, layout)
    return jax.custom_batching.sequential_vmap(run)(x, weight, bias)  # type: ignore[no-any-return]


def backward(options: Options, layout: str, kept: Any, weight: Any, g: Any, x_dtype: Any) -> tuple[Any, Any]:
    """The gradients of x, in its dtype, and of the weight."""
    run = partial(_backward, options, layout, x_dtype)
    return jax.custom_batching.sequential_vmap(run)(kept, weight, g)  # type: ignore[no-any-return]


def _forward(options: Options, layout: str, x: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
    n = weight.shape[0 if layout == "nk" else 1]
    wide = None if bias is None else bias.astype(jnp.float32)
    product = partial(_kernels().scaled_product, bias=wide, by_block=True, dtype=x.dtype)
    out = product(_rows(x, "e4m3", options), _squares(weight, options, turned=layout == "kn"))
    return out[: len(x), :n], _columns(x, "e4m3", options)


def _backward(options: Options, layout: str, x_dtype: Any, kept: Any, weight: Any, g: Any) -> tuple[Any, Any]:
    fmt = options.grad_dtype
    product = _kernels().scaled_product
    w = _squares(weight, options, turned=layout == "nk")
    grad_x = product(_rows(g, fmt, options), w, by_block=True, dtype=x_dtype)
    operands = (_columns(g, fmt, options), kept)
    grad_w = product(*(operands if layout == "nk" else operands[::-1]), by_block=False, dtype=weight.dtype)
    k = weight.shape[1 if layout == "nk" else 0]
    return grad_x[: len(g), :k], grad_w[: weight.shape[0], : weight.shape[1]]


def _kernels() -> Any:
    """Pallas takes a second to import: only where it is used."""
    from onchip.fp8 import mosaic_kernels

    return mosaic_kernels


def _rows(x: Any, fmt: str, options: Options) -> Any:
    """x [R, C] with scales of 1x128."""
    # No rows at all are quantised as if there were one.
    q = quantize(_at_least_one_row(x), ROW, fmt, options.scale, (_kernels().ROWS, 1))
    return _kernels().Scaled(q.data, q.scales.T)


def _columns(x: Any, fmt: str, options: Options) -> Any:
    """The transpose of x [R, C] with scales of 1x128."""
    # Transposed before, in its own dtype, there would be another copy.
    q = quantize(_at_least_one_row(x), COLUMN, fmt, options.scale, (1, _kernels().ROWS))
    return _kernels().Scaled(q.data.T, q.scales)


def _at_least_one_row(x: Any) -> Any:
    return x if len(x) else jnp.zeros((1, x.shape[1]), x.dtype)


def _squares(w: Any, options: Options, *, turned: bool) -> Any:
    """w, or its transpose, with scales of 128x128."""
    q = quantize(w, SQUARE, "e4m3", options.scale)
    data, scales = (q.data.T, q.scales) if turned else (q.data, q.scales.T)
    return _kernels().Scaled(data, jnp.repeat(scales, _kernels().BOX, axis=1))
