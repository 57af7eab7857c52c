"""The launches of grouped_matmul's Triton kernels, one function for each.

A `Launch` is run, or compiled ahead of time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onchip.fp8.torch_quantize import TorchQuantized
from onchip.frontend import torch_prepared as stated
from onchip.groups.problem import ROWS, GroupedOptions, GroupedProblem, are_short, tiles_together
from onchip.groups.triton import kernels
from onchip.groups.triton.fp8 import Weight
from onchip.groups.triton.tiles import (
    APART_COLUMNS,
    copying_rows_pays,
    gradient_config,
    plan_tiles,
    power_of_two,
    product_config,
)
from onchip.kernels.triton.launch import (
    ALL_REGISTERS,
    Device,
    Launch,
    block_descriptor,
    describe,
    descriptor,
    has_gluon,
    shared_descriptor,
)

# What a program of the kernels that go row by row takes at a time.
_COLUMNS = 1024
_INDICES = 1024
# Elements of the table of tiles and groups that a program of the plan has in registers.
_PLAN_ELEMENTS = 16384
# TMA can read copies in 16 bits whose columns are a multiple of this.
_ALIGNED = 8
# See LAST in kernels.py.
_LAST = 1 << 30


def plan(p: GroupedProblem, which: str, groups: Tensor, into: Tensor) -> Launch:
    """Find the tiles."""
    block = power_of_two(p.groups)
    tiles = max(1, min(128, _PLAN_ELEMENTS // block))
    arguments = {
        "groups": contiguous(groups),
        "plan": into,
        "T": p.tokens,
        "G": p.groups,
        "TILES": plan_tiles(p),
        "OFFSETS": which == "group_offsets",
        "BLOCK_M": ROWS,
        "BLOCK_G": block,
        "BLOCK_TILES": tiles,
    }
    return Launch(kernels.plan_tiles, (-(-max(1, plan_tiles(p)) // tiles),), arguments, warps=8)


def check_indices(indices: Tensor, limit: int, into: Tensor, of_plan: Tensor) -> Launch:
    """Look for indices that are out of range."""
    count = len(indices)
    arguments = {"indices": contiguous(indices), "plan": of_plan, "checked": into, "T": count, "limit": limit}
    return Launch(kernels.check_indices, (-(-count // _INDICES),), {**arguments, "BLOCK": _INDICES})


def product(
    x: Tensor | TorchQuantized,  # [T, K], or [M, K] with index; in FP8 as `quantize_rows` makes it
    weight: Tensor | Weight,  # [G, N, K], any strides
    out: Tensor,  # [T, C]
    of_plan: Tensor,
    *,
    tokens: int,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    index: Tensor | None = None,
    before: Tensor | None = None,  # [T, N]
    options: GroupedOptions | None = None,  # with their activation
) -> Launch:
    """out = activation(x @ weight.T + bias) * row_scale for each group; `before` gets the activation's input."""
    x, x_scales = (x, None) if isinstance(x, Tensor) else x
    weight, weight_scales = (weight, None) if isinstance(weight, Tensor) else weight
    device = describe(out.device)
    tma = device.capability >= 90
    gated, x = gates(options), in_rows(x)
    groups, n, k = weight.shape
    strides = weight.stride()
    turned = strides[2] != 1
    four = x, weight, out, out if before is None else before
    # A block of gate must not reach into up, and both are copied as rows.
    whole = gated != 1 or (not turned and n // 2 % (APART_COLUMNS // 2) == 0)
    apart = whole and tma and _run_apart(device, four)
    if apart and index is not None and k % _ALIGNED == 0 and copying_rows_pays(n, gated > 0):
        x, index = gathered(x, index), None
    common = {
        "bias": contiguous(bias),
        "row_scale": contiguous(row_scale),
        "plan": of_plan,
        "T": tokens,
        "G": groups,
        "N": n,
        "K": k,
        "GATED": gated,
        "TURNED": turned,
    }
    if apart and index is None:
        return _product_apart(x, weight, out, before, device, common)
    of_x, of_out = x.element_size(), out.element_size()
    tma_x, tma_weight, tma_out, tma_product = (tma and fits(a) for a in four)
    tma_x = tma_x and index is None
    c = product_config(device.product_bytes, of_x, short=are_short(tokens, groups))
    half = c.columns // 2
    parts = c.parts * max(1, of_out // max(2, of_x))
    if gated == 2 and parts > 1:  # two results are staged at once
        parts *= 2
    # A block of gate must not reach into up.
    tma_product = before is not None and tma_product and (gated != 1 or n // 2 % half == 0)
    # If TMA stores one result and pointers the other, they are staged apart, which leaves room for one step less.
    stages = c.stages - 1 if before is not None and tma_out and not tma_product else c.stages
    of_weight = half if gated == 1 else c.columns
    width = (c.columns // parts, half, half // parts)[gated]
    of_x_rows: Any = x
    if tma_x:
        of_x_rows = ragged(x, c.depth, c.rows) if x_scales is None else descriptor(x, x.stride(0), c.rows, c.depth)
    arguments = {
        **common,
        "x": of_x_rows,
        "x_rows": x.shape[0],
        "weight": weight_blocks(weight, of_weight, c.depth) if tma_weight else weight,
        "x_scales": x_scales,
        "weight_scales": weight_scales,
        "index": index,
        "out": ragged(out, width, c.rows) if tma_out else out,
        "product": ragged(before, half if gated == 1 else c.columns // parts, c.rows) if tma_product else before,
        "limit": len(x),
        "x_stride": x.stride(0),
        "weight_strides": strides,
        "scale_strides": (0, 0, 0) if weight_scales is None else weight_scales.stride(),
        "out_stride": out.stride(0),
        "product_stride": four[3].stride(0),
        "BLOCK_M": c.rows,
        "BLOCK_N": c.columns,
        "BLOCK_K": c.depth,
        "GROUP": c.group,
        "PROGRAMS": device.programs * c.per_processor,
        "PARTS": parts,
        "TMA_X": tma_x,
        "TMA_WEIGHT": tma_weight,
        "TMA_OUT": tma_out,
        "TMA_PRODUCT": tma_product,
        "PRECISION": precision(of_x),
    }
    return Launch(kernels.grouped_product, (device.programs * c.per_processor,), arguments, c.warps, stages)


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x by an index; entries past x's rows belong to nobody and may give any row."""
    if len(x) == 0:
        return stated.zeros((len(index), x.shape[1]), x.dtype, x.device)
    return stated.call(_rows_at, x, index)


def _rows_at(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index.clamp(max=len(x) - 1))


def _run_apart(device: Device, matrices: Sequence[Tensor]) -> bool:
    """Whether the kernels of apart.py can read and write these: 16-bit numbers, all by TMA."""
    return all(x.element_size() == 2 and fits(x) for x in matrices) and has_gluon(device.capability)


def _product_apart(
    x: Tensor, weight: Tensor, out: Tensor, before: Tensor | None, device: Device, common: dict[str, Any]
) -> Launch:
    from onchip.groups.triton import apart
    from onchip.kernels.triton.staggered import STEP

    step, rows, columns, width = (size.value for size in (STEP, apart.HALF, apart.COLUMNS, apart.WIDTH))
    tokens, groups = common["T"], common["G"]
    short = are_short(tokens, groups)
    of_weight = columns // 2 if common["GATED"] == 1 else columns
    arguments = {
        **common,
        "x": ragged(x, step, rows, shared_descriptor),
        "weight": weight_blocks(weight, of_weight, step, shared_descriptor),
        "out": ragged(out, width, rows, shared_descriptor),
        "product": None if before is None else ragged(before, width, rows, shared_descriptor),
        "counter": stated.zeros(1, torch.int32, out.device) if short else common["plan"],
        "together": tiles_together(tokens, groups),
        "short": int(short),
        "PROGRAMS": device.programs,
    }
    return Launch(apart.product_apart, (device.programs,), arguments, registers=ALL_REGISTERS)


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
) -> Launch:
    """out = a.T @ b for each group's rows; with `add` it is added to `out`."""
    device = describe(out.device)
    tma = device.capability >= 90
    a, b = in_rows(a), in_rows(b)
    groups, rows, columns = out.shape
    whole = all(index is None or x.shape[1] % _ALIGNED == 0 for x, index in ((a, a_index), (b, b_index)))
    if whole and not add and tma and _run_apart(device, (a, b, out)):
        # Copying first is faster: a step of mixtral's gate and up took an H100 15.0 ms with copies, and 19.8 ms with
        # rows that are read by an index here and in forward.
        a, b = (x if index is None else gathered(x, index) for x, index in ((a, a_index), (b, b_index)))
        return _weight_gradient_apart(a, b, out, of_plan, device)
    tma_a, tma_b, tma_out = (tma and fits(x) for x in (a, b, out))
    tma_a, tma_b = tma_a and a_index is None, tma_b and b_index is None
    c = gradient_config(device.product_bytes, a.element_size())
    parts = c.parts * max(1, out.element_size() // a.element_size())
    # Where an index is fetched before its rows, only every other stage has rows in shared memory.
    stages = c.stages if a_index is None and b_index is None else 2 * c.stages - 1
    block = (1, c.rows, c.columns // parts)
    arguments = {
        "a": ragged(a, c.rows, c.depth) if tma_a else a,
        "b": ragged(b, c.columns, c.depth) if tma_b else b,
        "a_index": a_index,
        "b_index": b_index,
        "out": block_descriptor(out, out.shape, out.stride(), block) if tma_out else out,
        "plan": of_plan,
        "limit": limit,
        "a_stride": a.stride(0),
        "b_stride": b.stride(0),
        "G": groups,
        "A": rows,
        "B": columns,
        "ADD": add,
        "BLOCK_M": c.depth,
        "BLOCK_A": c.rows,
        "BLOCK_B": c.columns,
        "GROUP": c.group,
        "PARTS": parts,
        "TMA_A": tma_a,
        "TMA_B": tma_b,
        "TMA_OUT": tma_out,
        "PRECISION": precision(a.element_size()),
    }
    tiles = groups * -(-rows // c.rows) * -(-columns // c.columns)
    return Launch(kernels.grouped_weight_gradient, (tiles,), arguments, c.warps, stages)


def _weight_gradient_apart(a: Tensor, b: Tensor, out: Tensor, of_plan: Tensor, device: Device) -> Launch:
    from onchip.groups.triton import apart
    from onchip.kernels.triton.staggered import STEP

    step, half, width = STEP.value, apart.HALF.value, apart.COLUMNS.value
    groups, rows, columns = out.shape
    tiles = groups * -(-rows // apart.ROWS.value) * -(-columns // width)
    programs = min(device.programs, tiles)
    arguments = {
        "a": ragged(a, half, step, shared_descriptor),
        "b": ragged(b, width, step, shared_descriptor),
        "out": shared_descriptor(out, out.shape, out.stride(), (1, half, apart.WIDTH.value)),
        "plan": of_plan,
        "counter": stated.zeros(1, torch.int32, out.device),
        "G": groups,
        "A": rows,
        "B": columns,
        "GROUP": 8,
        "PROGRAMS": programs,
    }
    return Launch(apart.weight_gradient_apart, (programs,), arguments, registers=ALL_REGISTERS)


def scaled_weight_gradient(
    a: TorchQuantized,  # [A, rows]: ROWS columns for each tile
    b: TorchQuantized,  # [B, rows]
    out: Tensor,  # [G, A, B]
    of_plan: Tensor,
    *,
    add: bool = False,
) -> Launch:
    """out = a @ b.T over each group's tiles; with `add` it is added to `out`."""
    device = describe(out.device)
    tma = device.capability >= 90
    groups, rows, columns = out.shape
    tma_out = tma and fits(out)
    c = gradient_config(device.product_bytes, 1)
    parts = c.parts * out.element_size() // 2
    arguments = {
        "a": descriptor(a.data, a.data.stride(0), c.rows, c.depth) if tma else a.data,
        "b": descriptor(b.data, b.data.stride(0), c.columns, c.depth) if tma else b.data,
        "a_scales": a.scales,
        "b_scales": b.scales,
        "out": block_descriptor(out, out.shape, out.stride(), (1, c.rows, c.columns // parts)) if tma_out else out,
        "plan": of_plan,
        "rows": a.data.shape[1],
        "G": groups,
        "A": rows,
        "B": columns,
        "ADD": add,
        "BLOCK_A": c.rows,
        "BLOCK_B": c.columns,
        "GROUP": c.group,
        "PARTS": parts,
        "TMA": tma,
        "TMA_OUT": tma_out,
    }
    tiles = groups * -(-rows // c.rows) * -(-columns // c.columns)
    return Launch(kernels.scaled_weight_gradient, (tiles,), arguments, c.warps, c.stages)


def product_gradient(
    grad: Tensor,
    product: Tensor | None,
    row_scale: Tensor | None,
    index: Tensor | None,
    out: Tensor | None,
    grad_scale: Tensor | None,
    of_plan: Tensor,
    tokens: int,
    options: GroupedOptions,
) -> Launch:
    """The gradients of the product and of row_scale, from that of the result's rows."""
    grad = in_rows(grad)
    columns = grad.shape[1]
    arguments = {
        "grad": grad,
        "product": product,
        "row_scale": contiguous(row_scale),
        "index": index,
        "out": out,
        "grad_scale": grad_scale,
        "plan": of_plan,
        "grad_stride": grad.stride(0),
        "limit": len(grad),
        "C": columns,
        "GATED": gates(options),
        "BLOCK": min(_COLUMNS, power_of_two(columns)),
    }
    return Launch(kernels.product_gradient, (tokens,), arguments)


def bias_gradient(grad: Tensor, out: Tensor, of_plan: Tensor) -> Launch:
    """The sums over each group's rows."""
    groups, columns = out.shape
    grad = in_rows(grad)
    arguments = {"grad": grad, "out": out, "plan": of_plan, "grad_stride": grad.stride(0), "N": columns}
    return Launch(kernels.bias_gradient, (groups, -(-columns // 64)), {**arguments, "BLOCK_M": 64, "BLOCK": 64})


def sum_rows(x: Tensor, row_scale: Tensor | None, index: Tensor, out: Tensor, of_plan: Tensor, groups: int) -> Launch:
    """Add each row of x to the row of `out` that `index` names."""
    rows, columns = out.shape
    order, starts = stated.call(_by_row, index, rows)
    block = min(_COLUMNS, power_of_two(columns))
    arguments = {
        "x": x,
        "row_scale": contiguous(row_scale),
        "order": order,
        "starts": starts,
        "out": out,
        "plan": of_plan,
        "G": groups,
        "C": columns,
        "BLOCK": block,
    }
    return Launch(kernels.sum_rows, (rows, -(-columns // block)), arguments)


def _by_row(index: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The places in `index`, sorted by the row that they name, and where each row's places begin."""
    ascending, order = torch.sort(index, stable=True)
    return order, torch.searchsorted(ascending, torch.arange(rows + 1, dtype=index.dtype, device=index.device))


def weight_blocks(weight: Tensor, rows: int, depth: int, made: Callable[..., Any] = block_descriptor) -> Any:
    """A descriptor of a weight [G, N, K] in blocks of `rows` rows and `depth` columns, in the order of its memory."""
    (groups, n, k), (step, row, column) = weight.shape, weight.stride()
    if column == 1:
        return made(weight, weight.shape, weight.stride(), (1, rows, depth))
    return made(weight, (groups, k, n), (step, column, row), (1, depth, rows))


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else stated.converted(x, Tensor.contiguous)


def in_rows(x: Tensor) -> Tensor:
    """x, or a copy, with the numbers of a row next to each other."""
    return x if x.stride(1) == 1 else stated.converted(x, Tensor.contiguous)


def gates(options: GroupedOptions | None) -> int:
    """Where gate and up are in a product's columns: PLAIN, CONCATENATED or INTERLEAVED of kernels.py."""
    if options is None or options.activation is None:
        return 0
    return 1 if options.gate_up == "concatenated" else 2


def fits(x: Tensor) -> bool:
    """Whether a descriptor can have a tensor: it begins at 16 bytes, and so do its lines in all but one of the last two
    dimensions."""
    strides, size = x.stride(), x.element_size()
    if x.data_ptr() % 16 or 1 not in strides[-2:]:
        return False
    unit = len(strides) - 1 if strides[-1] == 1 else len(strides) - 2
    return all(s > 0 and s * size % 16 == 0 for i, s in enumerate(strides) if i != unit)


def ragged(x: Any, columns: int, rows: int, made: Callable[..., Any] = block_descriptor) -> Any:
    """A matrix in blocks of [rows, columns] that end where a group does: see kernels.py."""
    stride = x.stride(0)
    shape = 0x7FFF0000, 0x7FFF0000, _LAST, x.shape[1]
    return made(x, shape, (2**34 - stride, stride, stride, 1), (1, 1, rows, columns))


def precision(element_bytes: int) -> str:
    """Products of float32 operands are computed in float32, not in the tensor cores' 19 bits."""
    return "ieee" if element_bytes == 4 else "tf32"
