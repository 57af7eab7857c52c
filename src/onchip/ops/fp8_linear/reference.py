"""The contract of fp8_linear in NumPy: the one oracle of every test.

Written for reading, not for speed; the maths is in the package's docstring.  Scales and the scaled numbers are float32,
operation by operation, since that decides the bits of what is quantised.  The products are float64, of the dequantised
values.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.fp8.numbers import COLUMN, FP8_MAX, LEAST_SCALE, ROW, SQUARE, up

Array = npt.NDArray[np.float64]
Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

# -------------------------------------------------------------------------------------------------------------- formats


def _numbers(fmt: str, mantissa_bits: int, bias: int) -> Array:
    """The number that each byte stands for."""
    code = np.arange(128)
    exponent, mantissa = code >> mantissa_bits, (code % (1 << mantissa_bits)) / (1 << mantissa_bits)
    value = np.where(exponent > 0, np.ldexp(1 + mantissa, exponent - bias), np.ldexp(mantissa, 1 - bias))
    value[value > FP8_MAX[fmt]] = np.nan
    if fmt == "e5m2":
        value[0x7C] = np.inf
    return np.concatenate([value, -value])


_NUMBERS = {"e4m3": _numbers("e4m3", 3, 7), "e5m2": _numbers("e5m2", 2, 15)}


def encode(x: npt.ArrayLike, fmt: str = "e4m3") -> Bytes:
    """The FP8 number nearest to each of `x`, of two equally near the one with the even mantissa, as bytes.

    What is beyond the largest finite number, infinities too, becomes that; NaN stays NaN (of positive sign).
    """
    v = np.asarray(x, np.float64)
    positive = _NUMBERS[fmt][:128]
    finite = positive[np.isfinite(positive)]  # in ascending order, as their codes are
    ties = (finite[1:] + finite[:-1]) / 2
    code = np.searchsorted(ties, np.abs(v))  # of a tie the lower number's
    code = code + ((np.append(ties, np.nan)[code] == np.abs(v)) & (code % 2 == 1))
    return np.where(np.isnan(v), np.isnan(positive).argmax(), code | np.where(np.signbit(v), 0x80, 0)).astype(np.uint8)


def decode(code: npt.ArrayLike, fmt: str = "e4m3") -> Array:
    """The number that each byte stands for."""
    return _NUMBERS[fmt][np.asarray(code, np.uint8)]


# ----------------------------------------------------------------------------------------------------------- quantising


class Quantized(NamedTuple):
    """FP8 numbers, and the scale of each: value = decode(data) * scale."""

    data: Bytes  # [R, C]
    scale: Float32  # [R, C]: the scale of each element's group
    fmt: str

    @property
    def value(self) -> Array:
        """The dequantised values."""
        with np.errstate(invalid="ignore"):
            return decode(self.data, self.fmt) * self.scale.astype(np.float64)


def to_scale(amax: Float32, fmt: str = "e4m3", scale: str = "float32") -> Float32:
    """The scale of a group whose largest magnitude is `amax`: amax / 448 (57344 for E5M2), and 1 where that is 0.

    For scale="power_of_two" it is the next power of two that is no less.  No scale is below 2**-126, so that its
    inverse is finite.  NaN and infinity stay what they are.
    """
    with np.errstate(invalid="ignore"):
        s = amax.astype(np.float32) / np.float32(FP8_MAX[fmt])
        s = np.where(s < LEAST_SCALE, np.float32(LEAST_SCALE), s).astype(np.float32)
    if scale == "power_of_two":
        f, e = np.frexp(s)  # 2**e is the next power unless s is one itself
        power = np.ldexp(np.float32(1), np.where(np.isfinite(s), e - (f == 0.5), 0)).astype(np.float32)
        s = np.where(np.isfinite(s), power, s)
    return np.where(amax == 0, np.float32(1), s).astype(np.float32)


def quantize(x: npt.ArrayLike, group: tuple[int, int], fmt: str = "e4m3", scale: str = "float32") -> Quantized:
    """Quantise x [R, C] in groups of [rows, columns]: ROW, COLUMN or SQUARE."""
    v = np.asarray(x, np.float32)
    rows, columns = v.shape
    height, width = group
    padded = np.zeros((up(rows, height), up(columns, width)), np.float32)
    padded[:rows, :columns] = np.abs(v)
    grid = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)
    of_group = to_scale(grid.max((1, 3)), fmt, scale)  # NaN wins
    each = np.repeat(np.repeat(of_group, height, 0), width, 1)[:rows, :columns]
    with np.errstate(invalid="ignore", divide="ignore"):
        inverse = np.float32(1) / each
        return Quantized(encode(v * inverse, fmt), each, fmt)


# ------------------------------------------------------------------------------------------------------------ the layer


class Fp8LinearResult(NamedTuple):
    """Output and gradients of sum(grad_out * out)."""

    out: Array  # [..., N]
    grad_x: Array  # [..., K]
    grad_weight: Array  # [N, K]
    grad_bias: Array  # [N]


def fp8_linear(
    x: npt.ArrayLike,  # [..., K]
    weight: npt.ArrayLike,  # [N, K]
    bias: npt.ArrayLike | None = None,  # [N]
    *,
    grad_out: npt.ArrayLike | None = None,  # [..., N]; None: ones
    grad_dtype: str = "e4m3",
    scale: str = "float32",
) -> Fp8LinearResult:
    """The three products in float64, each of its own quantised operands."""
    shape = np.shape(x)[:-1]
    w = np.asarray(weight, np.float32)
    n, k = w.shape
    v = np.asarray(x, np.float32).reshape(-1, k)
    g = np.ones((len(v), n), np.float32) if grad_out is None else np.asarray(grad_out, np.float32).reshape(-1, n)
    wq = quantize(w, SQUARE, "e4m3", scale).value
    with np.errstate(invalid="ignore"):
        out = quantize(v, ROW, "e4m3", scale).value @ wq.T
        grad_x = quantize(g, ROW, grad_dtype, scale).value @ wq
        grad_w = quantize(g, COLUMN, grad_dtype, scale).value.T @ quantize(v, COLUMN, "e4m3", scale).value
    if bias is not None:
        out = out + np.asarray(bias, np.float64)
    return Fp8LinearResult(out.reshape(*shape, n), grad_x.reshape(*shape, k), grad_w, g.astype(np.float64).sum(0))


def snr_db(made: npt.ArrayLike, exact: npt.ArrayLike) -> float:
    """Signal-to-noise ratio of `made` in decibels: 10 log10(sum exact^2 / sum (made - exact)^2)."""
    ref = np.asarray(exact, np.float64)
    noise = np.sum((np.asarray(made, np.float64) - ref) ** 2)
    return float(10 * np.log10(np.sum(ref**2) / noise)) if noise > 0 else np.inf
