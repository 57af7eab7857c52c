"""Quantising in plain JAX, with the same bits as reference.py, and the operands of products."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.fp8.numbers import BLOCK, COLUMN, FP8_MAX, LEAST_SCALE, ROW, SQUARE, up

FP8 = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
ROWS = 8
"""The number of rows of a product's operand is a multiple of this."""


class JaxQuantized(NamedTuple):
    """FP8 numbers, and the scale of each group of them.  In an operand of a product, rows run along the sum."""

    data: jax.Array  # [R, C], padded to whole groups with 0; for an operand R is a multiple of ROWS, and C of 128
    scales: jax.Array  # float32 [R / rows of a group, C / columns of a group]; for an operand transposed


def quantize(
    x: Any, group: tuple[int, int], fmt: str = "e4m3", scale: str = "float32", multiple: tuple[int, int] = (1, 1)
) -> JaxQuantized:
    """x [R, C] in groups of `group`; the result's rows and columns are also multiples of `multiple`."""
    rows, columns = (up(up(n, g), m) for n, g, m in zip(x.shape, group, multiple, strict=True))
    padded = jnp.pad(x, ((0, rows - x.shape[0]), (0, columns - x.shape[1])))
    groups = _cut(padded, group).astype(jnp.float32)
    scales = _to_scale(_largest(padded, group), fmt, scale)
    data = (groups * _inverse(scales)).astype(FP8[fmt]).reshape(rows, columns)
    return JaxQuantized(data, scales[:, 0, :, 0])


def operand(x: Any, fmt: str, scale: str, *, turned: bool = False, by_block: bool = False) -> JaxQuantized:
    """x [R, C], or its transpose, for a product along the rows, with 1x128 scales, or `by_block` with 128x128 ones."""
    if len(x) == 0:
        x = jnp.zeros((1, x.shape[1]), x.dtype)
    # Transposing x before, in its own dtype, would make another copy.
    group, multiple = (COLUMN, (1, ROWS)) if turned else (ROW, (ROWS, 1))
    q = quantize(x, SQUARE if by_block else group, fmt, scale, multiple)
    return JaxQuantized(q.data.T, q.scales) if turned else JaxQuantized(q.data, q.scales.T)


def dequantize(q: JaxQuantized, *, by_block: bool) -> Any:
    """The numbers in float32, with the zeros that pad them."""
    # Without a barrier XLA leaves out both conversions on a GPU (xla_allow_excess_precision), and nothing is in FP8.
    data = lax.optimization_barrier(q.data).astype(jnp.float32)
    scales = jnp.repeat(q.scales.T, BLOCK, axis=0) if by_block else q.scales.T
    return (data.reshape(len(data), -1, BLOCK) * scales[:, :, None]).reshape(data.shape)


def _cut(x: Any, group: tuple[int, int]) -> Any:
    """x [R, C], of whole groups, as [R / rows, rows, C / columns, columns]."""
    rows, columns = group
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def _largest(x: Any, group: tuple[int, int]) -> Any:
    """The bits of the largest magnitude of each group of x [R, C], with dimensions of 1 as in `_cut`.

    NaN wins, since its bits are the largest integer; XLA's own maximum may lose it.  The dimensions are reduced one
    after the other: for a maximum over dimensions 1 and 3 of `_cut` XLA first wrote x transposed in float32, 448 MiB
    for [8192, 14336]; this way it needs 4 MiB (compiled for an H200).
    """
    rows, columns = group
    bits = _bits(jnp.abs(x.astype(jnp.float32)))
    if columns > 1:
        bits = bits.reshape(x.shape[0], x.shape[1] // columns, columns).max(2)
    if rows > 1:
        bits = bits.reshape(x.shape[0] // rows, rows, bits.shape[1]).max(1)
    return bits[:, None, :, None]


def _to_scale(amax: Any, fmt: str, scale: str) -> Any:
    """The scales of groups whose largest magnitudes have these bits."""
    s = jnp.where(amax < _INFINITE, _seventh(amax, FP8_MAX[fmt]), amax)
    if scale == "power_of_two":
        s = jnp.where(s < _INFINITE, (s + 0x7FFFFF) & _INFINITE, s)
    return jnp.where(amax == 0, jnp.float32(1), _number(s))


# On a GPU XLA's quotient may be off by two units in the last place, but quantising must give the same bits everywhere.
# So both divisions are done in integers, exactly; there is one of each for 128 numbers.
_INFINITE = 0x7F800000  # the bits of infinity, below those of NaN
_ONE = 0x800000  # the first bit of a mantissa, and of the smallest normal number


def _bits(x: Any) -> Any:
    return lax.bitcast_convert_type(x, jnp.int32)


def _number(bits: Any) -> Any:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _seventh(amax: Any, fp8_max: float) -> Any:
    """The bits of amax / fp8_max, which is 7 * 2**n, rounded to nearest; at least the smallest normal number's."""
    n = math.log2(fp8_max / 7)
    assert n == int(n)
    assert LEAST_SCALE == 2.0**-126
    mantissa = (amax & (_ONE - 1)) | _ONE
    # The shift that gives the quotient 24 bits.
    shift = jnp.where(mantissa < 7 << 21, 3, 2)
    wide = mantissa << shift
    quotient = wide // 7
    quotient += jnp.where(wide - 7 * quotient >= 4, 1, 0)
    exponent = (amax >> 23) - shift - int(n)
    return jnp.where(exponent > 0, (exponent << 23) | (quotient & (_ONE - 1)), _ONE)


def _inverse(scale: Any) -> Any:
    """1 / scale rounded to nearest, for a scale that isn't below the smallest normal number."""
    rough, bits = 1 / scale, _bits(scale)
    mantissa, exponent = (bits & (_ONE - 1)) | _ONE, 253 - (bits >> 23)
    # The inverse's mantissa is 2**47 / mantissa: near that of `rough`, whose exponent may be the next one.
    near = (_bits(rough) & (_ONE - 1)) | _ONE
    power = (_bits(rough) >> 23) - exponent
    near = jnp.where(power > 0, near << 1, jnp.where(power < 0, near >> 1, near))
    rest = -near * mantissa  # 2**47 less that product: small, so that it is right modulo 2**32
    for _ in range(4):
        change = jnp.where(2 * rest > mantissa, 1, 0) - jnp.where(2 * rest < -mantissa, 1, 0)
        near, rest = near + change, rest - change * mantissa
    exact = _number(jnp.where(mantissa == _ONE, (exponent + 1) << 23, (exponent << 23) | (near & (_ONE - 1))))
    return jnp.where(bits < _INFINITE, exact, rough)
