"""FP8 formats, blocks and sizes: what quantisers and products agree on.  No framework."""

from dataclasses import dataclass
from typing import Literal, get_args

from onchip.frontend.options import require_one_of

OP = "fp8_linear"
BLOCK = 128
"""Elements that share a scale along the contraction; in a weight, along both of its dimensions."""
# Rows and columns that share a scale: 1x128, 128x1 and 128x128.
ROW, COLUMN, SQUARE = (1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK)
FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
"""The largest finite number of each format."""
LEAST_SCALE = 2.0**-126
"""The smallest normal float32: what is scaled by less has an inverse scale that overflows."""
SCALE_MULTIPLE = 4
"""Rows of a weight's scales are padded to a multiple of this, as cuBLAS reads them."""
GradDtype = Literal["e4m3", "e5m2"]
Scale = Literal["float32", "power_of_two"]
SCALES = get_args(Scale)


@dataclass(frozen=True)
class Fp8Options:
    """The options that are plain words, checked when made."""

    grad_dtype: GradDtype = "e4m3"
    scale: Scale = "float32"

    def __post_init__(self) -> None:
        require_one_of(OP, "grad_dtype", self.grad_dtype, tuple(FP8_MAX))
        require_one_of(OP, "scale", self.scale, SCALES)


def up(size: int, multiple: int = BLOCK) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple


def blocks(size: int) -> int:
    """How many scales this many elements have."""
    return -(-size // BLOCK)


@dataclass(frozen=True)
class Fp8Problem:
    """One layer: rows M of [M, K] by [N, K].  Sizes in elements, the inputs' dtype by name."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"


def quantized_bytes(rows: int, columns: int) -> int:
    """Bytes of a matrix in FP8 with 1x128 scales, its rows padded to whole blocks."""
    return rows * up(columns) + 4 * rows * blocks(columns)


def block_quantized_bytes(rows: int, columns: int) -> int:
    """The same with 128x128 scales."""
    return rows * up(columns) + 4 * blocks(rows) * up(blocks(columns), SCALE_MULTIPLE)


def saved_bytes(p: Fp8Problem) -> int:
    """Bytes that a layer keeps from forward to backward, transposed and in FP8: x for the weight's gradient, and the
    weight for x's.
    """
    return quantized_bytes(p.k, p.m) + block_quantized_bytes(p.k, p.n)


def weight_bytes(p: Fp8Problem) -> int:
    """Bytes of both copies of a weight: for the output, and transposed for x's gradient."""
    return block_quantized_bytes(p.n, p.k) + block_quantized_bytes(p.k, p.n)


def gradient_bytes(p: Fp8Problem) -> int:
    """Bytes of the output's gradient in FP8, for both of backward's products."""
    return quantized_bytes(p.m, p.n) + quantized_bytes(p.n, p.m)
