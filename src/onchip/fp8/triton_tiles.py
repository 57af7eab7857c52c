"""How fp8_linear's products in Triton are cut: a config that `onchip tune` stored for such sizes, or the heuristic's.

A layer's three products are stored as what they are, A B^T of so many rows, columns and numbers in each sum.  What
counts the tokens, and so is another number in every run, is rounded up to a power of two first: the rows, of a weight's
gradient the length of its sums.  No framework.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from onchip.core.configs import find_config
from onchip.fp8.numbers import BLOCK, OP

# By whether B has 128x128 scales: the output's and x's gradient's product, and the weight's gradient's.
KERNELS = {True: "product", False: "wgrad_product"}


@dataclass(frozen=True)
class ProductConfig:
    """How a product A B^T is cut.  Steps along the contraction are 128 long: what shares a scale."""

    rows: int = 128
    """Of a tile of the result."""
    columns: int = 128
    """Of a tile: 64 or 128, since more would span two scales of a weight."""
    stages: int = 4
    """Steps whose operands are in shared memory at once."""
    warps: int = 8
    group: int = 8
    """Rows of tiles that are worked on together, so that L2 serves their operands."""
    per_processor: int = 1
    """Persistent programs for each multiprocessor: with two, one multiplies while the other scales."""
    parts: int = 1
    """A tile of the result leaves in so many pieces, each staged in shared memory."""

    def __post_init__(self) -> None:
        if self.columns > BLOCK:
            raise ValueError(f"a stored tile has {self.columns} columns; {BLOCK} is the most")


def heuristic_product(shared: int, by_block: bool) -> ProductConfig:
    """The config of a product where nothing was tuned, by the device's shared memory per block in bytes."""
    group = 8 if by_block else 16  # of a weight's gradient 2 to 7% faster than 8, on an H200
    if shared >= 227 * 1024:
        # On an H100 670 to 900 TFLOP/s, and 720 to 750 of a weight's gradient; tiles of 128x128 650 to 800, and 560.
        return ProductConfig(rows=64, stages=3, warps=4, group=group, per_processor=2, parts=2)
    return ProductConfig(stages=2, group=group, parts=2)


def product_shared_bytes(c: ProductConfig, element_bytes: int) -> int:
    """Bytes of shared memory of a product's program: operands of all stages, a piece of the result, barriers."""
    operands = c.stages * (c.rows + c.columns) * BLOCK
    return operands + c.rows * c.columns * element_bytes // c.parts + 2048


def bucket(tokens: int) -> int:
    """The next power of two."""
    return 1 << max(0, tokens - 1).bit_length()


def product_sizes(by_block: bool, rows: int, columns: int, depth: int) -> dict[str, int]:
    """What a config is stored and found by; n and k are exact."""
    m, n, k = (rows, columns, depth) if by_block else (depth, rows, columns)
    return {"m": bucket(m), "n": n, "k": k}


def stored_product(
    device: str, by_block: bool, sizes: Mapping[str, int], dtype: str, heuristic: ProductConfig
) -> ProductConfig:
    """The config of a product whose result has this dtype, on what `configs.device_slug` names."""
    found = find_config(OP, KERNELS[by_block], device, dtype, sizes, asdict(heuristic))
    return heuristic if found.how == "heuristic" else ProductConfig(**found.config)
