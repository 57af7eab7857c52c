"""What `onchip tune` needs of fp8_linear: its two kinds of products, the tiles to try, and a problem for each.

A case is a product of a layer of `MODEL_CASES`: (m, n, k) for its output, (m, k, n) for x's gradient.  'wgrad_product'
makes the weight's gradient [n, k] of the first.  Triton is imported where something is launched, so that stored configs
can be listed without it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.sizes import DTYPE_BYTES
from onchip.fp8 import torch_quantize, triton_tiles
from onchip.fp8.torch_products import dequantized_product
from onchip.fp8.torch_quantize import Quantized
from onchip.fp8.triton_tiles import ProductConfig
from onchip.ops.fp8_linear.cases import MODEL_CASES, MODELS
from onchip.tune.harness import worst_error

# The shared memory per block of the devices that the kernels are written for, in bytes.
HOPPER_SHARED = 232448
KERNELS = tuple(triton_tiles.KERNELS.values())
# Of the results; a float32 one is a main gradient, or of float32 inputs.
DTYPES = ("bfloat16", "float16", "float32")


def _both_ways(cases: Iterable[tuple[int, int, int]]) -> dict[str, dict[str, int]]:
    """The sizes of each product by its name, those of equal sizes once; m is a power of two already."""
    both = [(triton_tiles.bucket(m), *nk) for m, n, k in cases for nk in ((n, k), (k, n))]
    return {f"m{m}-n{n}-k{k}": {"m": m, "n": n, "k": k} for m, n, k in both}


CASES = _both_ways((c.m, c.n, c.k) for c in MODEL_CASES)
# A small model's and a large one's, and m in the middle: what is stored serves sizes up to 4 times larger and smaller.
DEFAULT_CASES = tuple(_both_ways((8192, *nk) for model in ("llama3.1-8b", "llama2-70b") for nk in MODELS[model][1]))

# ||out - reference|| / ||reference||: four times the rounding of bfloat16.  The op's own noise isn't in it, since the
# operands are the same; one scale for two blocks of a weight would be an error of 0.08.
_BOUND = 1e-2
# Rows of a result that are checked, half of them the last ones.
_CHECKED_ROWS = 128


def candidates(kernel: str) -> list[dict[str, int]]:
    """The configs to try, Hopper's heuristic one first."""
    first = triton_tiles.heuristic_product(HOPPER_SHARED, kernel == "product")
    groups = (4, 8, 16)
    # Two programs to a multiprocessor: one multiplies while the other scales.
    tried = [
        ProductConfig(rows, columns, stages, 4, group, per_processor=2, parts=parts)
        for rows, columns in ((64, 128), (128, 64))
        for stages, parts in ((2, 1), (3, 1), (3, 2), (4, 2))
        for group in groups
    ]
    tried += [
        ProductConfig(128, 128, stages, 8, group, parts=parts)
        for stages, parts in ((4, 1), (5, 2), (6, 2))
        for group in groups
    ]
    tried += [ProductConfig(256, 64, stages, 8, parts=parts) for stages, parts in ((3, 1), (4, 2))]
    tried += [ProductConfig(64, 64, 3, 4)]  # for devices with less shared memory
    return [asdict(config) for config in dict.fromkeys([first, *tried])]


def shared_bytes(kernel: str, config: Mapping[str, int], dtype: str) -> int:
    """Shared memory in bytes of the programs that a multiprocessor runs at once."""
    c = ProductConfig(**config)
    return c.per_processor * triton_tiles.product_shared_bytes(c, DTYPE_BYTES[dtype])


class Problem(NamedTuple):
    """The operands of a product, and which rows of it are checked."""

    a: Quantized
    b: Quantized
    by_block: bool
    dtype: torch.dtype
    checked: Tensor


def make_problem(kernel: str, device: str, dtype: str, *, m: int, n: int, k: int) -> Problem:
    """Seeded operands on the device."""
    rng = torch.Generator(device).manual_seed(0)
    by_block = kernel == triton_tiles.KERNELS[True]
    rows, columns, depth = (m, n, k) if by_block else (n, k, m)

    def normal(height: int) -> Tensor:
        return torch.randn(height, depth, generator=rng, device=device, dtype=torch.bfloat16)

    a, _ = torch_quantize.quantize(normal(rows), "e4m3", "float32", turned=False)
    b, _ = torch_quantize.quantize(normal(columns), "e4m3", "float32", by_block=by_block, turned=False)
    assert a is not None
    assert b is not None
    half = _CHECKED_ROWS // 2
    drawn = torch.randint(rows, (half,), generator=rng, device=device)
    checked = torch.cat([drawn, torch.arange(max(0, rows - half), rows, device=device)])
    return Problem(a, b, by_block, getattr(torch, dtype), checked)


def reference(kernel: str, problem: Problem) -> tuple[Tensor, Tensor]:
    """Rows of the product by float32 products of what the operands stand for, and which rows."""
    p = problem
    a = Quantized(p.a.data.view(torch.uint8)[p.checked].view(p.a.data.dtype), p.a.scales[:, p.checked])
    return dequantized_product(a, p.b, p.by_block, None, torch.float32, None), p.checked


def step(kernel: str, problem: Problem, config: Mapping[str, int]) -> Callable[[], tuple[Tensor, ...]]:
    """A launch of the product with this config, into memory of its own."""
    from onchip.fp8 import triton_launches

    p, c = problem, ProductConfig(**config)
    return lambda: (triton_launches.product(p.a, p.b, p.by_block, None, p.dtype, None, config=c),)


def check(kernel: str, reference: Sequence[Tensor], returned: Sequence[Tensor]) -> tuple[float, float]:
    """The relative error of the checked rows, infinite if a number elsewhere is NaN or infinite; and the bound."""
    (out,), (values, rows) = returned, reference
    error, _ = worst_error([out[rows]], [values])
    return error if out.sum(dtype=torch.float32).isfinite() else math.inf, _BOUND
