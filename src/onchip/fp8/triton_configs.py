"""Which config a product gets: one that `onchip tune` has stored for its sizes or for some near, else the heuristic's.

A layer's three products are stored as what they are, A B^T of so many rows, columns and numbers in each sum.  What
counts the tokens, and so is another number in every run, is rounded up to a power of two first: the rows, of a weight's
gradient the length of its sums.  No framework.
"""

from collections.abc import Mapping
from dataclasses import asdict

from onchip.core.configs import find_config
from onchip.fp8.numbers import OP
from onchip.fp8.triton_tiles import ProductConfig

# By whether B has 128x128 scales: the output's and x's gradient's product, and the weight's gradient's.
KERNELS = {True: "product", False: "wgrad_product"}


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
