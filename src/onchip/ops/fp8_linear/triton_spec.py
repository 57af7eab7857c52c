"""How fp8_linear's Triton kernels are cut, and the shared memory that they take.  No framework."""

from dataclasses import asdict, dataclass

from onchip.ops.fp8_linear.spec import BLOCK


@dataclass(frozen=True)
class ProductConfig:
    """How a product A B^T is cut.  Steps along the contraction are 128 long: what shares a scale."""

    rows: int = 128
    """Of a tile of the result."""
    columns: int = 128
    """Of a tile: 64 or 128, or 256, which is made as two halves, since it spans two scales of a weight."""
    stages: int = 4
    """Steps whose operands are in shared memory at once."""
    warps: int = 8
    group: int = 8
    """Rows of tiles that are worked on together, so that L2 serves their operands."""
    per_processor: int = 1
    """Persistent programs for each multiprocessor: with two, one multiplies while the other scales."""
    parts: int = 1
    """A tile of the result leaves in so many pieces, each staged in shared memory."""


@dataclass(frozen=True)
class QuantizeConfig:
    """How quantising is cut: each program takes blocks of 128x128, one after another along a row."""

    blocks: int = 1
    """Blocks of a program."""
    stages: int = 1
    """Blocks that are on their way at once."""
    warps: int = 8
    twice: bool = False
    """An activation's block is read again, from L2, for its second copy: with fewer registers, two programs fit."""
    tma: bool = True
    """Blocks are read and both copies written through descriptors, where they fit; else by pointers."""


def heuristic_product(shared: int, *, by_block: bool, element_bytes: int) -> ProductConfig:
    """The config of a product where nothing was tuned, by the device's shared memory per block in bytes."""
    stages = 4 if shared >= 227 * 1024 else 2
    return ProductConfig(stages=stages, parts=2 if element_bytes == 4 and not by_block else 1)


def heuristic_quantize() -> QuantizeConfig:
    """The config of a quantiser where nothing was tuned."""
    return QuantizeConfig()


def product_shared_bytes(c: ProductConfig, element_bytes: int) -> int:
    """Bytes of shared memory of a product's program: operands of all stages, a piece of the result, barriers."""
    operands = c.stages * (c.rows + c.columns) * BLOCK
    return operands + c.rows * min(c.columns, BLOCK) * element_bytes // c.parts + 2048


def format_config(c: ProductConfig | QuantizeConfig) -> str:
    """A config in one line."""
    return ", ".join(f"{name}={value}" for name, value in asdict(c).items())
