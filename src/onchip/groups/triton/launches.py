"""The launches of grouped_matmul's Triton kernels, one function for each.

A `Launch` is run, or compiled ahead of time.
"""

from typing import Any

import torch
from torch import Tensor

from onchip.groups.problem import Options, Problem
from onchip.groups.triton import kernels
from onchip.groups.triton.tiles import ROWS, ProductConfig, gradient_config, plan_tiles, product_config
from onchip.kernels.triton.launch import Launch, block_descriptor, describe

# Of what is done row by row.
_COLUMNS = 1024
_INDICES = 1024
# Elements of the table of tiles and groups that a program of the plan has in registers.
_PLAN_ELEMENTS = 16384
# See LAST in kernels.py.
_LAST = 1 << 30


def power_of_two(x: int) -> int:
    """The next one that is no less."""
    return 1 << max(0, x - 1).bit_length()


def plan(p: Problem, which: str, groups: Tensor, into: Tensor) -> Launch:
    """Find the tiles."""
    block = power_of_two(p.groups)
    tiles = max(1, min(128, _PLAN_ELEMENTS // block))
    arguments = {
        "groups": groups.contiguous(),
        "plan": into,
        "T": p.tokens,
        "G": p.groups,
        "OFFSETS": which == "group_offsets",
        "BLOCK_M": ROWS,
        "BLOCK_G": block,
        "BLOCK_TILES": tiles,
    }
    return Launch(kernels.plan_tiles, (-(-max(1, plan_tiles(p)) // tiles),), arguments, warps=8)


def check_indices(indices: Tensor, limit: int, into: Tensor, of_plan: Tensor) -> Launch:
    """Look for indices that are out of range."""
    count = len(indices)
    arguments = {"indices": indices.contiguous(), "plan": of_plan, "checked": into, "T": count, "limit": limit}
    return Launch(kernels.check_indices, (-(-count // _INDICES),), {**arguments, "BLOCK": _INDICES})


def product(
    x: Tensor,  # [T, K], or [M, K] with index
    weight: Tensor,  # [G, N, K], any strides
    out: Tensor,  # [T, C]
    of_plan: Tensor,
    *,
    tokens: int,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    index: Tensor | None = None,
    before: Tensor | None = None,  # [T, N]
    options: Options | None = None,  # with their activation
    config: ProductConfig | None = None,
    tma: bool | None = None,
) -> Launch:
    """out = activation(x @ weight.T + bias) * row_scale of each group, and `before` what the activation is given."""
    _, capability, processors, shared = describe(out.device)
    groups, n, k = weight.shape
    c = config or product_config(shared, x.element_size(), short=tokens <= ROWS * groups)
    tma = capability >= 90 if tma is None else tma
    gated = 0
    if options is not None and options.activation is not None:
        gated = 1 if options.gate_up == "concatenated" else 2
    half = c.columns // 2
    parts = c.parts * max(1, out.element_size() // x.element_size())
    if gated == 2 and parts > 1:  # two results are staged at once
        parts *= 2
    width = half if gated == 1 else c.columns  # of a block of the weight
    out_width = (c.columns // parts, half, half // parts)[gated]
    if x.stride(1) != 1:
        x = x.contiguous()
    turned = weight.stride(2) != 1
    as_it_lies = weight.mT if turned else weight
    block = (1, c.depth, width) if turned else (1, width, c.depth)
    tma_x = tma and index is None and suits(x)
    tma_weight = tma and as_it_lies.stride(2) == 1 and suits(as_it_lies)
    tma_out = tma and suits(out)
    # A block of gate must not reach into up.
    tma_before = tma and before is not None and suits(before) and (gated != 1 or n // 2 % half == 0)
    # What TMA stores and what pointers store is staged apart: that is room for a step less.
    stages = c.stages - 1 if tma_out and before is not None and not tma_before else c.stages
    arguments = {
        "x": ragged(x, c.depth) if tma_x else x,
        "weight": block_descriptor(as_it_lies, as_it_lies.shape, as_it_lies.stride(), block) if tma_weight else weight,
        "bias": None if bias is None else bias.contiguous(),
        "row_scale": None if row_scale is None else row_scale.contiguous(),
        "index": index,
        "out": ragged(out, out_width) if tma_out else out,
        "product": ragged(before, half if gated == 1 else c.columns // parts) if tma_before else before,
        "plan": of_plan,
        "x_stride": x.stride(0),
        "weight_strides": weight.stride(),
        "out_stride": out.stride(0),
        "product_stride": 0 if before is None else before.stride(0),
        "limit": len(x),
        "T": tokens,
        "G": groups,
        "N": n,
        "K": k,
        "GATED": gated,
        "TURNED": turned,
        "BLOCK_M": ROWS,
        "BLOCK_N": c.columns,
        "BLOCK_K": c.depth,
        "GROUP": c.group,
        "PROGRAMS": processors,
        "PARTS": parts,
        "TMA_X": tma_x,
        "TMA_WEIGHT": tma_weight,
        "TMA_OUT": tma_out,
        "TMA_PRODUCT": tma_before,
        "PRECISION": precision(x),
    }
    return Launch(kernels.grouped_product, (processors,), arguments, c.warps, stages)


def weight_gradient(
    a: Tensor,  # [T, A], or with a_index [M, A]
    b: Tensor,  # [T, B]
    out: Tensor,  # [G, A, B]
    of_plan: Tensor,
    *,
    a_index: Tensor | None = None,
    b_index: Tensor | None = None,
    limit: int = 0,
    add: bool = False,
    config: ProductConfig | None = None,
    tma: bool | None = None,
) -> Launch:
    """out = a.T @ b of each group's rows, or added to it."""
    _, capability, _, shared = describe(out.device)
    c = config or gradient_config(shared, a.element_size())
    tma = capability >= 90 if tma is None else tma
    a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
    groups, rows, columns = out.shape
    tma_a = tma and a_index is None and suits(a)
    tma_b = tma and b_index is None and suits(b)
    tma_out = tma and suits(out)
    parts = c.parts * max(1, out.element_size() // a.element_size())
    tiles = groups * -(-rows // ROWS) * -(-columns // c.columns)
    arguments = {
        "a": ragged(a, ROWS, c.depth) if tma_a else a,
        "b": ragged(b, c.columns, c.depth) if tma_b else b,
        "a_index": a_index,
        "b_index": b_index,
        "out": block_descriptor(out, out.shape, out.stride(), (1, ROWS, c.columns // parts)) if tma_out else out,
        "plan": of_plan,
        "a_stride": a.stride(0),
        "b_stride": b.stride(0),
        "limit": limit,
        "G": groups,
        "A": rows,
        "B": columns,
        "ADD": add,
        "BLOCK_M": c.depth,
        "BLOCK_A": ROWS,
        "BLOCK_B": c.columns,
        "GROUP": c.group,
        "PARTS": parts,
        "TMA_A": tma_a,
        "TMA_B": tma_b,
        "TMA_OUT": tma_out,
        "PRECISION": precision(a),
    }
    # Where an index is fetched before its rows are, of two stages one has rows in shared memory.
    stages = c.stages if a_index is None and b_index is None else 2 * c.stages - 1
    return Launch(kernels.grouped_weight_gradient, (tiles,), arguments, c.warps, stages)


def product_gradient(
    grad: Tensor,
    product: Tensor | None,
    row_scale: Tensor | None,
    index: Tensor | None,
    out: Tensor | None,
    grad_scale: Tensor | None,
    of_plan: Tensor,
    tokens: int,
    options: Options,
) -> Launch:
    """From the gradient of the result's rows those of the product and of the scales."""
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    columns = grad.shape[1]
    arguments = {
        "grad": grad,
        "product": product,
        "row_scale": None if row_scale is None else row_scale.contiguous(),
        "index": index,
        "out": out,
        "grad_scale": grad_scale,
        "plan": of_plan,
        "grad_stride": grad.stride(0),
        "limit": len(grad),
        "C": columns,
        "GATED": 0 if options.activation is None else 1 if options.gate_up == "concatenated" else 2,
        "BLOCK": min(_COLUMNS, power_of_two(columns)),
    }
    return Launch(kernels.product_gradient, (tokens,), arguments)


def bias_gradient(grad: Tensor, out: Tensor, of_plan: Tensor) -> Launch:
    """The sums over each group's rows."""
    groups, columns = out.shape
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    arguments = {"grad": grad, "out": out, "plan": of_plan, "grad_stride": grad.stride(0), "N": columns}
    return Launch(kernels.bias_gradient, (groups, -(-columns // 64)), {**arguments, "BLOCK_M": 64, "BLOCK": 64})


def sum_rows(x: Tensor, row_scale: Tensor | None, index: Tensor, out: Tensor, of_plan: Tensor, groups: int) -> Launch:
    """Add each row of x to the row of `out` that `index` names."""
    rows, columns = out.shape
    ascending, order = torch.sort(index, stable=True)
    block = min(_COLUMNS, power_of_two(columns))
    arguments = {
        "x": x,
        "row_scale": None if row_scale is None else row_scale.contiguous(),
        "order": order,
        "starts": torch.searchsorted(ascending, torch.arange(rows + 1, dtype=index.dtype, device=index.device)),
        "out": out,
        "plan": of_plan,
        "G": groups,
        "C": columns,
        "BLOCK": block,
    }
    return Launch(kernels.sum_rows, (rows, -(-columns // block)), arguments)


def suits(x: Tensor) -> bool:
    """Whether a descriptor can have it: its address and strides are multiples of 16 bytes."""
    size = x.element_size()
    return x.data_ptr() % 16 == 0 and all(stride > 0 and stride * size % 16 == 0 for stride in x.stride()[:-1])


def ragged(x: Any, columns: int, rows: int = ROWS) -> Any:
    """A matrix in blocks of [rows, columns] that end where a group does: see kernels.py."""
    stride = x.stride(0)
    shape = 0x7FFF0000, 0x7FFF0000, _LAST, x.shape[1]
    return block_descriptor(x, shape, (2**34 - stride, stride, stride, 1), (1, 1, rows, columns))


def precision(x: Tensor) -> str:
    """Products of float32 are in float32, not in the tensor cores' 19 bits."""
    return "ieee" if x.element_size() == 4 else "tf32"
