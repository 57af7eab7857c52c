"""Quantising in plain JAX: bit for bit the numbers of reference.py."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.ops.fp8_linear.spec import BLOCK, FP8_MAX, LEAST_SCALE, up

FP8 = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
# Rows and columns that share a scale.
ROW, COLUMN, SQUARE = (1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK)


class Quantized(NamedTuple):
    """FP8 numbers, and the scales of groups of them."""

    data: jax.Array  # [R, C], up to whole groups and 0 there
    scales: jax.Array  # float32 [R / rows of a group, C / columns of a group]


def quantize(
    x: Any, group: tuple[int, int], fmt: str = "e4m3", scale: str = "float32", multiple: tuple[int, int] = (1, 1)
) -> Quantized:
    """x [R, C] in groups of `group`; the result has rows and columns in such multiples besides."""
    rows, columns = (up(up(n, g), m) for n, g, m in zip(x.shape, group, multiple, strict=True))
    padded = jnp.pad(x, ((0, rows - x.shape[0]), (0, columns - x.shape[1])))
    groups = _cut(padded, group).astype(jnp.float32)
    scales = _to_scale(_largest(groups), fmt, scale)
    data = (groups * (1 / scales)).astype(FP8[fmt]).reshape(rows, columns)
    return Quantized(data, scales[:, 0, :, 0])


def dequantize(q: Quantized, group: tuple[int, int]) -> Any:
    """The numbers in float32, [R, C] with the zeros that pad them."""
    return (_cut(q.data, group).astype(jnp.float32) * q.scales[:, None, :, None]).reshape(q.data.shape)


def _cut(x: Any, group: tuple[int, int]) -> Any:
    """x [R, C], of whole groups, as [R / rows, rows, C / columns, columns]."""
    rows, columns = group
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def _largest(groups: Any) -> Any:
    """The largest magnitude of each group; NaN wins, as it does among integers, where XLA's own maximum may lose it."""
    bits = lax.bitcast_convert_type(jnp.abs(groups), jnp.int32).max((1, 3), keepdims=True)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _to_scale(amax: Any, fmt: str, scale: str) -> Any:
    # By an array that XLA can't see to be one number: by a number, it would multiply with the rounded inverse.
    s = amax / jnp.where(amax == amax, jnp.float32(FP8_MAX[fmt]), jnp.float32(1))
    s = jnp.where(s < LEAST_SCALE, jnp.float32(LEAST_SCALE), s)
    if scale == "power_of_two":
        bits = (lax.bitcast_convert_type(s, jnp.int32) + 0x7FFFFF) & 0x7F800000
        s = jnp.where(jnp.isfinite(s), lax.bitcast_convert_type(bits, jnp.float32), s)
    return jnp.where(amax == 0, jnp.float32(1), s)
