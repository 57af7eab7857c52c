"""How grouped products in Triton are cut.  No framework."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ProductConfig:
    """How a product is cut.  Tiles of rows are those of the plan."""

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


def product_config(shared: int, element_bytes: int) -> ProductConfig:
    """The config of output and x's gradient, by the device's shared memory per block in bytes."""
    if element_bytes == 4:  # products in float32, without tensor cores
        return ProductConfig(columns=64, depth=16, stages=2, parts=1)
    if shared >= 227 * 1024:
        return ProductConfig()
    return ProductConfig(columns=128, stages=3 if shared >= 160 * 1024 else 2)


def gradient_config(shared: int, element_bytes: int) -> ProductConfig:
    """The config of the weight's gradient: `depth` are rows."""
    return replace(product_config(shared, element_bytes), group=16)
