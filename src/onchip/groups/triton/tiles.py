"""How grouped products in Triton are cut.  No framework."""

from dataclasses import replace

from onchip.fp8.triton_tiles import ProductConfig
from onchip.groups.problem import ROWS, GroupedProblem

PLAN_HEAD = 4
"""Numbers before the groups' first rows: how many tiles, how many rows, NaN's bits if an index is wrong, and the first
group whose size can't be right."""
APART_COLUMNS = 256
"""Of a tile of the kernels in apart.py."""


def plan_tiles(p: GroupedProblem) -> int:
    """The most tiles of rows that groups can have."""
    return p.tokens // ROWS + p.groups


def plan_numbers(p: GroupedProblem) -> int:
    """Of a plan: its head, the groups' first rows and tiles with the ends, and three numbers for each tile."""
    return PLAN_HEAD + 2 * (p.groups + 1) + 3 * plan_tiles(p)


def padded_rows(p: GroupedProblem) -> int:
    """Of what has 128 rows for each tile."""
    return ROWS * plan_tiles(p)


def copying_rows_pays(n: int, activation: bool) -> bool:
    """Whether rows of x that are read by an index are better copied first, for the kernels in apart.py, which read them
    in order.

    A copy takes as long whatever N is; what it gains grows with N.  With it products without SwiGLU took an H100 9%
    less for N = 4096 and 15% for 28672, and with SwiGLU 7% for 1536, 23% and 35%.
    """
    return n >= (1536 if activation else 4096)


# Of 16-bit numbers, of float32, which tensor cores don't multiply, and of FP8.  With an activation a tile's columns are
# half gate and half up.  A weight's gradient has a program for each tile.
_NARROW = ProductConfig(columns=256, depth=64, parts=2)
_WIDE = ProductConfig(columns=64, depth=16, stages=2)
_FP8 = ProductConfig(rows=64, stages=3, warps=4, parts=2)


def product_config(shared: int, element_bytes: int, *, short: bool) -> ProductConfig:
    """The config of output and x's gradient, by the device's shared memory per block in bytes.

    `short`: of `are_short`.
    """
    if element_bytes == 4:
        return _WIDE
    # A weight that one tile of rows reads isn't shared: with 256 groups of 128 rows, one at a time was 7% faster.
    group = 1 if short else 8
    if element_bytes == 1:  # as fp8_linear's: one program multiplies while the other scales
        return replace(_FP8, group=group, **({"per_processor": 2} if shared >= 227 * 1024 else {"stages": 2}))
    if shared >= 227 * 1024:
        return replace(_NARROW, group=group)
    return replace(_NARROW, columns=128, stages=3 if shared >= 160 * 1024 else 2, group=group)


def gradient_config(shared: int, element_bytes: int) -> ProductConfig:
    """The config of the weight's gradient: `depth` are rows.

    A group's few rows make short sums, so tiles begin and end all the time: three small programs on a multiprocessor do
    that by turns.  On an H200 tiles of 128 x 256, one on each, took 8 to 35% longer with 128 to 512 rows a group, and
    as long with 2048.
    """
    if element_bytes == 4:
        return _WIDE
    if element_bytes == 1:
        return replace(_FP8, stages=3 if shared >= 227 * 1024 else 2, group=4)
    if shared >= 227 * 1024:
        return replace(_NARROW, columns=128, depth=32, warps=4, group=4, parts=4)
    return replace(_NARROW, columns=128, stages=3 if shared >= 160 * 1024 else 2, group=16)


def power_of_two(x: int) -> int:
    """The next one that is no less."""
    return 1 << max(0, x - 1).bit_length()
