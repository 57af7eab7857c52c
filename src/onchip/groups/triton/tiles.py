"""How grouped products in Triton are cut into tiles.  No framework."""

from dataclasses import replace
from functools import lru_cache

from onchip.fp8.triton_tiles import ProductConfig
from onchip.groups.problem import ROWS, GroupedProblem

PLAN_HEAD = 4
"""Numbers before the groups' first rows: how many tiles, how many rows, NaN's bits if an index is wrong, and the first
group whose size is wrong."""
APART_COLUMNS = 256
"""Columns of a tile in the kernels of apart.py."""


def plan_tiles(p: GroupedProblem) -> int:
    """The most tiles of rows that groups can have."""
    return p.tokens // ROWS + p.groups


def plan_numbers(p: GroupedProblem) -> int:
    """Numbers of a plan: its head, the groups' first rows and tiles with the ends, and three for each tile."""
    return PLAN_HEAD + 2 * (p.groups + 1) + 3 * plan_tiles(p)


def padded_rows(p: GroupedProblem) -> int:
    """Rows of a matrix that has 128 for each tile."""
    return ROWS * plan_tiles(p)


def copying_rows_pays(n: int, activation: bool) -> bool:
    """Whether copying the rows of x that an index names pays: the kernels in apart.py then read them in order.

    The time of a copy doesn't depend on N, and its gain grows with N.  With a copy, products without SwiGLU took an
    H100 9% less for N = 4096 and 15% for 28672; with SwiGLU 7% less for 1536, 23% for 4096 and 35% for 28672.
    """
    return n >= (1536 if activation else 4096)


# For 16-bit numbers, for float32, which tensor cores don't multiply, and for FP8.  With an activation half of a tile's
# columns are gate and half are up.  A weight's gradient has a program for each tile.
_NARROW = ProductConfig(columns=256, depth=64, parts=2)
_WIDE = ProductConfig(columns=64, depth=16, stages=2)
_FP8 = ProductConfig(rows=64, stages=3, warps=4, parts=2)


@lru_cache
def product_config(shared: int, element_bytes: int, *, short: bool) -> ProductConfig:
    """The config for the output and x's gradient, by the device's shared memory per block in bytes.

    `short`: the result of `are_short`.
    """
    if element_bytes == 4:
        return _WIDE
    # If one tile of rows reads a weight, tiles don't share it: with 256 groups of 128 rows, walking one row of tiles at
    # a time was 7% faster.
    group = 1 if short else 8
    if element_bytes == 1:  # as in fp8_linear, one program multiplies while the other scales
        return replace(_FP8, group=group, **({"per_processor": 2} if shared >= 227 * 1024 else {"stages": 2}))
    if shared >= 227 * 1024:
        return replace(_NARROW, group=group)
    return replace(_NARROW, columns=128, stages=3 if shared >= 160 * 1024 else 2, group=group)


@lru_cache
def gradient_config(shared: int, element_bytes: int) -> ProductConfig:
    """The config for the weight's gradient, whose `depth` counts rows.

    A group's few rows make short sums, so tiles begin and end all the time: three small programs on a multiprocessor
    take turns at that.  On an H200 tiles of 128 x 256, one on each multiprocessor, took 8 to 35% longer with 128 to 512
    rows a group, and as long with 2048.
    """
    if element_bytes == 4:
        return _WIDE
    if element_bytes == 1:
        return replace(_FP8, stages=3 if shared >= 227 * 1024 else 2, group=4)
    if shared >= 227 * 1024:
        return replace(_NARROW, columns=128, depth=32, warps=4, group=4, parts=4)
    return replace(_NARROW, columns=128, stages=3 if shared >= 160 * 1024 else 2, group=16)


def power_of_two(x: int) -> int:
    """The least power of two that isn't below x."""
    return 1 << max(0, x - 1).bit_length()
