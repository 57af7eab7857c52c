"""What `onchip tune` needs of grouped_matmul: its kernels of products, the tiles to try, and a problem for each.

A case is a layer of `MODELS`: T rows in G even groups by weights [n, k] for its output, and by [k, n] for x's gradient.
Triton is imported where something is launched, so that stored configs can be listed without it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.groups import problem as of_call
from onchip.groups.problem import Options
from onchip.groups.torch.loop import activated, product_of_rows, summed_over_rows
from onchip.groups.triton import fp8
from onchip.groups.triton.tiles import (
    FP8_KERNELS,
    KERNELS,  # noqa: F401 - an op has them
    ProductConfig,
    gradient_config,
    plan_numbers,
    product_config,
    shared_bytes_of,
    sizes_of_product,
)
from onchip.ops.grouped_matmul.cases import MODELS, even
from onchip.tune.harness import worst_error

# The shared memory per block of the devices that the kernels are written for, in bytes.
HOPPER_SHARED = 232448
DTYPES = ("bfloat16", "float16")


def _both_ways(layers: Iterable[tuple[int, int, int, int]]) -> dict[str, dict[str, int]]:
    """The sizes of each product by its name; m is a power of two."""
    both = [sizes_of_product(t, g, *nk) for t, g, n, k in layers for nk in ((n, k), (k, n))]
    return {"-".join(f"{name}{size}" for name, size in sizes.items()): sizes for sizes in both}


CASES = _both_ways((m.tokens, m.groups, m.n, m.k) for m in MODELS)
DEFAULT_CASES = tuple(CASES)


def candidates(kernel: str) -> list[dict[str, int]]:
    """The configs to try, Hopper's heuristic one first."""
    in_fp8, of_weight = kernel in FP8_KERNELS, kernel.endswith("weight_gradient")
    size = 1 if in_fp8 else 2
    first = gradient_config(HOPPER_SHARED, size) if of_weight else product_config(HOPPER_SHARED, size, short=False)
    # columns, depth, stages, warps, parts, rows, per_processor
    if in_fp8:
        cuts = [(128, 128, stages, 4, parts, 64, each) for stages, parts, each in
                ((2, 1, 2), (3, 1, 2), (3, 2, 2), (2, 2, 3), (3, 2, 1))]  # fmt: skip
        cuts += [(128, 128, stages, 8, 2, 128, 1) for stages in (3, 4, 5)]
        cuts += [(64, 128, 3, 4, 1, 128, 1)]
    elif of_weight:
        cuts = [(128, depth, stages, 4, 4, 128, 1) for depth, stages in ((32, 3), (32, 4), (64, 2), (64, 3))]
        cuts += [(128, 64, 3, 8, 2, 128, 1), (256, 64, 3, 8, 4, 128, 1), (256, 64, 4, 8, 4, 128, 1)]
        cuts += [(128, 32, 3, 4, 2, 128, 1)]
    else:
        cuts = [(256, 64, stages, 8, parts, 128, 1) for stages, parts in ((4, 2), (3, 1), (3, 2), (4, 4))]
        cuts += [(128, 64, stages, 8, 1, 128, 1) for stages in (3, 4, 5)]
        cuts += [(128, 64, 3, 4, 2, 64, 2), (128, 32, 3, 4, 2, 128, 1)]
    tried = [ProductConfig(*cut[:4], group, *cut[4:]) for cut in cuts for group in (1, 4, 8, 16)]
    if of_weight:  # which has a program for each tile
        tried = [replace(config, per_processor=1) for config in tried]
    return [asdict(config) for config in dict.fromkeys([first, *tried])]


def shared_bytes(kernel: str, config: Mapping[str, int], dtype: str) -> int:
    """Shared memory of a program in bytes, estimated."""
    return shared_bytes_of(kernel, ProductConfig(**config))


class Problem(NamedTuple):
    """A kernel's inputs and outputs."""

    sizes: of_call.Problem
    plan: Tensor
    x: Tensor  # [T, K]; of a weight's gradient one of [T, N] and this
    other: Tensor  # [G, N, K], or [T, N]
    given: Any  # what the launch takes: these, or in FP8 their copies
    outputs: tuple[Tensor, ...]
    options: Options


def make_problem(kernel: str, device: str, dtype: str, *, m: int, g: int, n: int, k: int) -> Problem:
    """Seeded inputs on the device, in groups of even sizes."""
    from onchip.groups.triton import launches

    kind: torch.dtype = getattr(torch, dtype)
    generator = torch.Generator(device).manual_seed(0)
    of_weight, in_fp8 = kernel.endswith("weight_gradient"), kernel in FP8_KERNELS
    options = Options(activation="swiglu" if kernel.endswith("swiglu") else None)
    columns = n // 2 if options.activation else n
    p = of_call.Problem(m, m, g, n, k, columns, m)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * std).to(kind)

    x = normal(m, k)
    other = normal(m, n) if of_weight else normal(g * n, k, std=k**-0.5).view(g, n, k)
    plan = torch.empty(plan_numbers(p), dtype=torch.int32, device=device)
    launches.plan(p, "group_sizes", torch.tensor(even(m, g), dtype=torch.int32, device=device), plan).run()
    given: Any = (other, x) if of_weight else (x, other)
    if in_fp8:
        given = _in_fp8(p, plan, x, other, options, of_weight=of_weight)
    if of_weight:
        outputs: tuple[Tensor, ...] = (torch.empty((g, n, k), dtype=kind, device=device),)
    else:
        outputs = (torch.empty((m, columns), dtype=kind, device=device),)
        if options.activation:
            outputs = (*outputs, torch.empty((m, n), dtype=kind, device=device))
    return Problem(p, plan, x, other, given, outputs, options)


def _in_fp8(p: of_call.Problem, plan: Tensor, x: Tensor, other: Tensor, options: Options, *, of_weight: bool) -> Any:
    if of_weight:
        made = [fp8.empty_columns(p, columns, x) for columns in (p.n, p.k)]
        for source, columns in zip((other, x), made, strict=True):
            fp8.quantize_rows(p, source, plan, None, columns)
        return tuple(made)
    rows, weight = fp8.empty_rows(p, p.k, x), fp8.empty_weight(p, options, x, turned=False)
    fp8.quantize_rows(p, x, plan, rows, None)
    fp8.quantize_weight(other, options, weight, None)
    return rows, fp8.by_group(weight, p.groups, p.n, p.k)


def step(kernel: str, problem: Problem, config: Mapping[str, int]) -> Callable[[], tuple[Tensor, ...]]:
    """A launch of the kernel with this config.  Its outputs are NaN until it first runs."""
    from onchip.groups.triton import launches

    p, c, (first, second) = problem, ProductConfig(**config), problem.given
    if kernel == "weight_gradient":
        launch = launches.weight_gradient(first, second, p.outputs[0], p.plan, config=c)
    elif kernel == "fp8_weight_gradient":
        launch = launches.scaled_weight_gradient(first, second, p.outputs[0], p.plan, config=c)
    else:
        before = p.outputs[1] if p.options.activation else None
        x, weight, scales = first, second, {}
        if kernel in FP8_KERNELS:
            x, weight = first.data, second.data
            scales = {"x_scales": first.scales, "weight_scales": second.scales}
        launch = launches.product(
            x, weight, p.outputs[0], p.plan, tokens=p.sizes.tokens, before=before, options=p.options, config=c, **scales
        )
    for out in p.outputs:
        out.fill_(math.nan)

    def launched() -> tuple[Tensor, ...]:
        launch.run()
        return p.outputs

    return launched


def reference(kernel: str, problem: Problem) -> tuple[Tensor, ...]:
    """The kernel's outputs by float32 products, of FP8 numbers those of the plain path."""
    p, precision = problem, "fp8" if kernel in FP8_KERNELS else "full"
    starts = torch.tensor([0, *even(p.sizes.tokens, p.sizes.groups)]).cumsum(0).tolist()
    groups = [slice(a, b) for a, b in pairwise(starts)]
    if kernel.endswith("weight_gradient"):
        return (torch.stack([summed_over_rows(p.other[mine], p.x[mine], precision) for mine in groups]),)
    y = torch.cat([product_of_rows(p.x[mine], p.other[g], precision) for g, mine in enumerate(groups)])
    return (y,) if p.options.activation is None else (activated(y, p.options.gate_up), y)


def check(kernel: str, reference: Sequence[Tensor], returned: Sequence[Tensor]) -> tuple[float, float]:
    """The error of the output that comes nearest its bound or passes it furthest, and that bound."""
    return worst_error(returned, reference)
