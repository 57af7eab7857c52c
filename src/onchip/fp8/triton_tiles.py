"""How products in Triton are cut into tiles, and fp8_linear's configs.  No framework."""

from dataclasses import dataclass
from functools import lru_cache

from onchip.fp8.numbers import BLOCK


@dataclass(frozen=True)
class ProductConfig:
    """How a product A B^T is cut."""

    rows: int = 128
    """Rows of a tile of the result."""
    columns: int = 128
    """Columns of a tile: for a product in FP8 64 or 128, since more would span two scales of a weight."""
    depth: int = BLOCK
    """Length of a step along the sum: in FP8 the numbers that share a scale."""
    stages: int = 4
    """Steps whose operands are in shared memory at once."""
    warps: int = 8
    group: int = 8
    """Rows of tiles that are worked on together, so that L2 serves their operands."""
    per_processor: int = 1
    """Persistent programs for each multiprocessor: with two, one multiplies while the other scales."""
    parts: int = 1
    """The number of pieces in which a tile of the result leaves, each staged in shared memory."""


@lru_cache
def product_config(shared: int, by_block: bool) -> ProductConfig:
    """The config for a device's shared memory per block, in bytes, and for whether B has 128x128 scales, as in the
    products for the output and for x's gradient, or not, as in that for the weight's gradient.
    """
    group = 8 if by_block else 16  # 16 makes a weight's gradient 2 to 7% faster than 8, on an H200
    if shared >= 227 * 1024:
        # On an H100 these reach 670 to 900 TFLOP/s, and 720 to 750 for a weight's gradient; tiles of 128x128 reach 650
        # to 800, and 560.
        return ProductConfig(rows=64, stages=3, warps=4, group=group, per_processor=2, parts=2)
    return ProductConfig(stages=2, group=group, parts=2)
