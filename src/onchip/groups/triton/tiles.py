"""How grouped products in Triton are cut.  No framework."""

from dataclasses import dataclass, replace

from onchip.groups.problem import ROWS, Problem

PLAN_HEAD = 4
"""Numbers before the groups' first rows: how many tiles, how many rows, NaN's bits if an index is wrong, and the first
group whose size can't be right."""
APART_COLUMNS = 256
"""Of a tile of the kernels in apart.py."""


def plan_tiles(p: Problem) -> int:
    """The most tiles of rows that groups can have."""
    return p.tokens // ROWS + p.groups


def plan_numbers(p: Problem) -> int:
    """Of a plan: its head, the groups' first rows and tiles with the ends, and three numbers for each tile."""
    return PLAN_HEAD + 2 * (p.groups + 1) + 3 * plan_tiles(p)


def padded_rows(p: Problem) -> int:
    """Of what has 128 rows for each tile."""
    return ROWS * plan_tiles(p)


def copying_rows_pays(n: int, activation: bool) -> bool:
    """Whether rows of x that are read by an index are better copied first, for the kernels in apart.py, which read them
    in order.

    A copy takes as long whatever N is; what it gains grows with N.  With it products without SwiGLU took an H100 9%
    less for N = 4096 and 15% for 28672, and with SwiGLU 7% for 1536, 23% and 35%.
    """
    return n >= (1536 if activation else 4096)


@dataclass(frozen=True)
class ProductConfig:
    """How a product is cut."""

    columns: int = 256
    """Of a tile of the result; with an activation they are half gate and half up."""
    depth: int = 64
    """Of a step along the sum."""
    stages: int = 4
    """Steps whose operands are in shared memory at once."""
    warps: int = 8
    group: int = 8
    """Tiles of rows that are worked on together, so that L2 serves their weight."""
    parts: int = 2
    """A tile of the result leaves in so many pieces, each staged in shared memory."""
    rows: int = ROWS
    """Of a tile: of a product of rows, the plan's or a part of it."""
    per_processor: int = 1
    """Persistent programs for each multiprocessor; a weight's gradient has one for each tile."""


FP8_DEPTH = 128
"""A step of a product of FP8 numbers: what shares a scale."""


def product_config(shared: int, element_bytes: int, *, short: bool) -> ProductConfig:
    """The config of output and x's gradient, by the device's shared memory per block in bytes.

    `short`: of `are_short`.
    """
    if element_bytes == 4:  # products in float32, without tensor cores
        return ProductConfig(columns=64, depth=16, stages=2, parts=1)
    # A weight that one tile of rows reads isn't shared: with 256 groups of 128 rows, one at a time was 7% faster.
    group = 1 if short else 8
    if element_bytes == 1:  # as fp8_linear's: no wider than a scale; one program multiplies while the other scales
        c = ProductConfig(columns=128, depth=FP8_DEPTH, stages=3, warps=4, group=group, rows=64, per_processor=2)
        return c if shared >= 227 * 1024 else replace(c, stages=2, per_processor=1)
    if shared >= 227 * 1024:
        return ProductConfig(group=group)
    return ProductConfig(columns=128, stages=3 if shared >= 160 * 1024 else 2, group=group)


def gradient_config(shared: int, element_bytes: int) -> ProductConfig:
    """The config of the weight's gradient: `depth` are rows.

    A group's few rows make short sums, so tiles begin and end all the time: three small programs on a multiprocessor do
    that by turns.  On an H200 tiles of 128 x 256, one on each, took 8 to 35% longer with 128 to 512 rows a group, and
    as long with 2048.
    """
    if element_bytes == 4:
        return ProductConfig(columns=64, depth=16, stages=2, parts=1)
    if element_bytes == 1:
        stages = 3 if shared >= 227 * 1024 else 2
        return ProductConfig(columns=128, depth=FP8_DEPTH, stages=stages, warps=4, group=4, rows=64)
    if shared >= 227 * 1024:
        return ProductConfig(columns=128, depth=32, warps=4, group=4, parts=4)
    return ProductConfig(columns=128, stages=3 if shared >= 160 * 1024 else 2, group=16)


def power_of_two(x: int) -> int:
    """The next one that is no less."""
    return 1 << max(0, x - 1).bit_length()
