"""How fp8_linear's Triton kernels are cut, and the shared memory that they take.  No framework."""

from dataclasses import dataclass

from onchip.fp8.numbers import BLOCK


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


@dataclass(frozen=True)
class QuantizeConfig:
    """How a program quantises its block of 128x128."""

    warps: int = 8
    registers: int | None = None
    """The most that a thread may have, for more programs at once; None is what was fastest for the matrix."""


def heuristic_product(shared: int) -> ProductConfig:
    """The config of a product where nothing was tuned, by the device's shared memory per block in bytes."""
    if shared >= 227 * 1024:
        # On an H100 670 to 900 TFLOP/s, and 720 to 750 of a weight's gradient; tiles of 128x128 650 to 800, and 560.
        return ProductConfig(rows=64, stages=3, warps=4, per_processor=2, parts=2)
    return ProductConfig(stages=2, parts=2)


def product_shared_bytes(c: ProductConfig, element_bytes: int) -> int:
    """Bytes of shared memory of a product's program: operands of all stages, a piece of the result, barriers."""
    operands = c.stages * (c.rows + c.columns) * BLOCK
    return operands + c.rows * c.columns * element_bytes // c.parts + 2048
