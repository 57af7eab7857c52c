"""The 'xla' backend of fp8_linear in JAX: products of dequantised numbers in float32, on any device."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from onchip.fp8.jax_quantize import COLUMN, ROW, SQUARE, Quantized, dequantize, quantize
from onchip.fp8.numbers import Options


def refusal(platform: str, options: Options) -> None:
    """Nothing is refused."""


def forward(options: Options, layout: str, x: Any, weight: Any, bias: Any) -> tuple[Any, Quantized]:
    """Of x [M, K], the weight and bias [N] the output [M, N], and x as backward needs it."""
    w = weight if layout == "nk" else weight.T
    wide = _dequantized(w, SQUARE, "e4m3", options)
    out = _product(_dequantized(x, ROW, "e4m3", options), wide[: len(w)], (1, 1))
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype), quantize(x, COLUMN, "e4m3", options.scale)


def backward(options: Options, layout: str, kept: Quantized, weight: Any, g: Any, x_dtype: Any) -> tuple[Any, Any]:
    """The gradients of x, in its dtype, and of the weight."""
    w = weight if layout == "nk" else weight.T
    wide = _dequantized(w, SQUARE, "e4m3", options)
    grad_x = _product(_dequantized(g, ROW, options.grad_dtype, options), wide[:, : w.shape[1]], (1, 0))
    grad_w = _product(_dequantized(g, COLUMN, options.grad_dtype, options), dequantize(kept, COLUMN), (0, 0))
    grad_w = grad_w.astype(weight.dtype)
    return grad_x.astype(x_dtype), grad_w if layout == "nk" else grad_w.T


def _dequantized(x: Any, group: tuple[int, int], fmt: str, options: Options) -> Any:
    return dequantize(quantize(x, group, fmt, options.scale), group)


def _product(a: Any, b: Any, over: tuple[int, int]) -> Any:
    """The sum of products over these dimensions, in float32."""
    return lax.dot_general(a, b, (((over[0],), (over[1],)), ((), ())), precision=lax.Precision.HIGHEST)
