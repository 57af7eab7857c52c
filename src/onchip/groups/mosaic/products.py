"""Hopper kernels of grouped products in Pallas Mosaic GPU, with their launchers.

Both are the persistent product of `onchip.kernels.mosaic.product`.  TMA reads blocks of operands whose first row is a
multiple of 8, and groups begin anywhere.  So

- `rows_product` cuts all rows into tiles of tile_m and visits a tile once for each group that has rows in it; of the
  result it stores that group's rows.  Rows without a group are one more group, of one step.
- `weight_product` cuts all rows into blocks of tile_k; its steps for a group are the blocks that have rows of it.  The
  first and the last block of each group are read from copies, made by XLA, with zeros in place of the other groups'
  rows, so that whatever these hold stays out of the sums.  An empty group has one step, of zeros.

Visits are counted and looked up on the device, in int32 arrays that XLA makes.  `layer` and `weight_product` are called
as those of `onchip.groups.xla.products`, where `fill` is explained.

Source: megablox, the grouped product of MegaBlocks (arXiv:2211.15841), visits tiles like this.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from onchip.groups.mosaic.sums import sum_rows
from onchip.groups.problem import Options
from onchip.groups.xla import products
from onchip.groups.xla.groups import has_group, starts_of
from onchip.groups.xla.swiglu import activated
from onchip.kernels.mosaic.product import BOX, MosaicConfig, Part, Refs, Step, load_block, persistent_product, send_to
from onchip.kernels.mosaic.registers import Registers

__all__ = ["layer", "sum_rows", "weight_product"]

LOG2E = 1.4426950408889634
_ROWS = 8
"""What is copied by blocks has a multiple of so many rows."""
ROWS_CONFIG = MosaicConfig(tile_m=128, tile_n=256, staging_slots=1)
FEW_ROWS_CONFIG = replace(ROWS_CONFIG, tile_m=64, split="n")
WEIGHT_CONFIG = MosaicConfig(tile_m=128, tile_n=256)


class Visits(NamedTuple):
    """Which rows a tile's visit is for: [bound] int32 each, in the order of the rows."""

    number: Array  # [1]
    tile: Array
    group: Array  # G: rows without a group
    begin: Array  # the group's first row
    end: Array  # past its last one


def visits_of(ends: Array, rows: int, tile: int) -> Visits:
    """Each nonempty group's visits to the tiles that have rows of it; at most ceil(rows / tile) + G."""
    ends = jnp.concatenate([ends, jnp.full(1, rows, jnp.int32)])
    starts = starts_of(ends)
    first = starts // tile
    last = jnp.cumsum(jnp.where(ends > starts, -(-ends // tile) - first, 0))
    visit = jnp.arange(-(-rows // tile) + len(ends) - 1, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last, visit, side="right"), len(ends) - 1).astype(jnp.int32)
    return Visits(last[-1:], first[group] + visit - starts_of(last)[group], group, starts[group], ends[group])


def layer(
    x: Array,  # [T, K]
    weight: Array,  # [G, N, K], or [G, K, N]
    ends: Array,  # [G] int32
    fill: Array,  # 0-d float32
    bias: Array | None,  # [G, N]
    row_scale: Array | None,  # [T]
    options: Options,
    keeps: bool,
    *,
    config: MosaicConfig | None = None,
    interpret: Any = None,
) -> tuple[Array, Array | None]:
    """The result of each row, and its products with bias if `keeps`: [T, N], or gate and up as [2, T, F].

    The activation is the kernel's where it can bring blocks of gate and up for one tile: for gate first, then up, in
    rows of the weight.  Elsewhere XLA applies it, and row_scale, to products in float32.
    """
    if len(x) == 0:
        return products.layer(x, weight, ends, fill, bias, row_scale, options, keeps)
    swiglu, gnk = options.activation is not None, options.weight_layout == "gnk"
    run = partial(rows_product, x, weight, ends, fill, bias, gnk=gnk, config=config, interpret=interpret)
    out_n = weight.shape[1] // 2
    if not swiglu or (gnk and options.gate_up == "concatenated" and out_n % BOX == 0 and out_n >= 2 * BOX):
        return run(row_scale, swiglu=swiglu, keeps=keeps, dtype=x.dtype)
    y, _ = run(None, swiglu=False, keeps=False, dtype=jnp.float32)
    out = activated(options, y)
    if row_scale is not None:
        out = jnp.where(has_group(ends, len(x))[:, None], out * row_scale[:, None].astype(jnp.float32), fill)
    return out.astype(x.dtype), y.astype(x.dtype) if keeps else None


def rows_product(
    x: Array,  # [T, K]
    weight: Array,  # [G, N, K], or [G, K, N]
    ends: Array,  # [G] int32
    fill: Array,  # 0-d float32
    bias: Array | None,  # [G, N]
    row_scale: Array | None,  # [T]
    *,
    gnk: bool,
    swiglu: bool,
    keeps: bool,
    dtype: Any,
    config: MosaicConfig | None = None,
    interpret: Any = None,
) -> tuple[Array, Array | None]:
    """The kernel of `layer`, with results of `dtype`."""
    (rows, k), groups = x.shape, len(weight)
    n = weight.shape[1 if gnk else 2]
    c = config or (FEW_ROWS_CONFIG if rows < 96 * groups else ROWS_CONFIG)
    visits = visits_of(ends, rows, c.tile_m)
    wide = -(-rows // _ROWS) * _ROWS
    columns = 128 // jnp.dtype(dtype).itemsize
    # Of a tile's columns, those of each warpgroup's part are of the gate, and then of the up projection.
    half = c.part_n // 2 if swiglu else 0
    out_n = n // 2 if swiglu else n
    tiles_n = -(-out_n // (c.tile_n // 2 if swiglu else c.tile_n))
    assert k % c.tile_k == out_n % BOX == 0
    assert gnk or not swiglu
    registers = Registers(interpret)

    def tiles(refs: Refs) -> tuple[Any, Any, Any]:
        return refs["number"][0], tiles_n, k // c.tile_k

    def steps_of(refs: Refs, i: Any, j: Any) -> Any:
        return jnp.where(refs["group"][i] < groups, jnp.int32(k // c.tile_k), jnp.int32(1))

    def copies(refs: Refs, s: Step, a: Any, b: Any, barrier: Any) -> None:
        at_k = s.k * c.tile_k
        load_block(refs["x"], refs["tile"][s.i] * c.tile_m, c.tile_m, at_k, c.tile_k, a, barrier)
        of_group = refs["weight"].at[lax.min(refs["group"][s.i], jnp.int32(groups - 1))]
        if not gnk:
            load_block(of_group, at_k, c.tile_k, s.j * c.tile_n, c.tile_n, b, barrier)
        elif not swiglu:
            load_block(of_group, s.j * c.tile_n, c.tile_n, at_k, c.tile_k, b, barrier)
        else:
            for i in range(c.tile_n // half):
                first = s.j * (c.tile_n // 2) + i // 2 * half + i % 2 * out_n
                load_block(of_group, first, half, at_k, c.tile_k, b.at[pl.ds(i * half, half)], barrier)

    def epilogue(refs: Refs, p: Part, product: Any, store: Callable[..., None]) -> None:
        row = refs["tile"][p.i] * c.tile_m + p.m - p.i * c.tile_m
        group, begin, end = (refs[name][p.i] for name in ("group", "begin", "end"))
        of_none = refs["fill"][0]
        column = lax.div(p.n, jnp.int32(2)) if swiglu else p.n
        scale = None if row_scale is None else registers.load(refs["row_scale"].at[pl.ds(row, c.part_m)], 1)

        # Values are made strip by strip: there are no registers for a second one of the accumulator's size.
        def y(which: int, n: int, width: int) -> Any:
            """Columns of the products, or of their gate (0) or up (1) half, with bias."""
            value = product[:, which * half + n : which * half + n + width]
            if bias is None:
                return value
            of_group = refs["bias"].at[lax.min(group, jnp.int32(groups - 1)), pl.ds(which * out_n + column + n, width)]
            return value + registers.spread(registers.load(of_group, 0), value.shape, 0)

        def finished(value: Any) -> Any:
            return jnp.where(group < groups, value, of_none).astype(dtype)

        def result(n: int, width: int) -> Any:
            value = y(0, n, width)
            if swiglu:
                value = value / (1 + jnp.exp2(value * -LOG2E)) * y(1, n, width)
            return finished(value if scale is None else value * registers.spread(scale, value.shape, 1))

        def kept(which: int) -> Callable[[int, int], Any]:
            return lambda n, width: finished(y(which, n, width))

        results: list[tuple[Any, Callable[[int, int], Any]]] = [(refs["out"], result)]
        if keeps:
            halves = [refs["y"].at[0], refs["y"].at[1]] if swiglu else [refs["y"]]
            results += [(target, kept(which)) for which, target in enumerate(halves)]
        whole = (begin <= row) & (row + c.part_m <= end)
        some = (begin < row + c.part_m) & (row < end)
        width = half if swiglu else c.part_n

        @pl.when(whole)
        def _() -> None:
            for target, strip in results:
                store(strip, send_to(target, row, column, columns), width)

        @pl.when(some & jnp.logical_not(whole))
        def _() -> None:
            staging = refs["staging"].at[p.warpgroup]
            for target, strip in results:
                for n in range(0, width, columns):
                    value = strip(n, columns)
                    for m in range(0, c.part_m, BOX):
                        limits = (lax.max(x - row - m, jnp.int32(0)) for x in (begin, end))
                        first, last = (lax.min(x, jnp.int32(BOX)) for x in limits)
                        # A copy of one row knows no columns' end: what is past it would be in the next row.
                        count = jnp.where(column + n < out_n, last - first, jnp.int32(0))
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        staging[...] = value[m : m + BOX]
                        plgpu.commit_smem()
                        _send_rows(staging, first, count, target, row + m, column + n)

    def vector(x: Array | None, size: int) -> Array | None:
        """In float32, with so many numbers more: tiles may reach beyond."""
        return None if x is None else jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, size)])

    inputs = {"x": _padded(x), "weight": weight, "bias": vector(bias, c.tile_n), "fill": fill.reshape(1)}
    outputs = {"out": jax.ShapeDtypeStruct((wide, out_n), dtype)}
    if keeps:
        outputs["y"] = jax.ShapeDtypeStruct((2, wide, out_n) if swiglu else (wide, n), dtype)
    made = persistent_product(
        c,
        x.dtype,
        "mk",
        "nk" if gnk else "kn",
        tiles,
        copies,
        epilogue,
        inputs={**inputs, "row_scale": vector(row_scale, c.tile_m), **visits._asdict()},
        outputs=outputs,
        stored=dtype,
        right_copies=c.tile_n // half if swiglu else 1,
        steps_of=steps_of,
        # Without the layout of other results: that has rows by eights.
        scratch={"staging": ((2, BOX, columns), dtype)},
        name="grouped_rows_product",
        interpret=interpret,
    )
    return made["out"][:rows], made["y"][..., :rows, :] if keeps else None


def _send_rows(staging: Any, first: Any, count: Any, target: Any, row: Any, column: Any) -> None:
    """Copy so many rows of staging [BOX, columns], from the first on, to those of target from `row` + `first` on.

    The sizes of copies are static: a number of rows is a sum of powers of two.
    """
    size = BOX
    while size > 0:
        some = (count & size) != 0

        @pl.when(some)
        def _(first: Any = first, size: int = size) -> None:
            into = target.at[pl.ds(row + first, size), pl.ds(column, staging.shape[1])]
            plgpu.copy_smem_to_gmem(staging.at[pl.ds(first, size)], into, commit_group=False)

        first = first + (count & size)
        size //= 2
    plgpu.commit_smem_to_gmem_group()


def weight_product(
    left: Array,  # [T, M]
    right: Array,  # [T, N]
    ends: Array,  # [G] int32
    fill: Array,  # [G] float32
    *,
    config: MosaicConfig | None = None,
    interpret: Any = None,
) -> Array:
    """[G, M, N]: for each group left.T @ right over its rows; of their dtype."""
    c = config or WEIGHT_CONFIG
    (rows, m), n, groups, dtype = left.shape, right.shape[1], len(ends), left.dtype
    if rows == 0:
        return products.weight_product(left, right, ends, fill)
    columns = 128 // jnp.dtype(dtype).itemsize
    tiles_m = -(-m // c.tile_m)
    starts = starts_of(ends)
    first = starts // c.tile_k
    blocks = jnp.maximum(-(-ends // c.tile_k) - first, 1)

    def edges(x: Array) -> Array:
        """The first and the last block of each group, with zeros in place of other rows: [G * 2 * tile_k, .]."""
        block = jnp.stack([first, first + blocks - 1], 1)
        row = block[:, :, None] * c.tile_k + jnp.arange(c.tile_k, dtype=jnp.int32)
        own = (row >= starts[:, None, None]) & (row < ends[:, None, None])
        taken = jnp.take(x, row.reshape(-1), axis=0, mode="clip")
        return jnp.where(own.reshape(-1, 1), taken, 0)

    def tiles(refs: Refs) -> tuple[Any, Any, Any]:
        return groups * tiles_m, -(-n // c.tile_n), -(-rows // c.tile_k)

    def group_of(i: Any) -> tuple[Any, Any]:
        """The group, and the row in its result, of a row of tiles."""
        group = lax.div(i, jnp.int32(tiles_m))
        return group, (i - group * tiles_m) * c.tile_m

    def steps_of(refs: Refs, i: Any, j: Any) -> Any:
        return refs["blocks"][group_of(i)[0]]

    def copies(refs: Refs, s: Step, a: Any, b: Any, barrier: Any) -> None:
        group, row = group_of(s.i)
        column = s.j * c.tile_n

        def load(left: Any, right: Any, first: Any) -> None:
            load_block(left, first, c.tile_k, row, c.tile_m, a, barrier)
            load_block(right, first, c.tile_k, column, c.tile_n, b, barrier)

        edge = 2 * group + jnp.where(s.k > 0, jnp.int32(1), jnp.int32(0))
        lax.cond(
            (s.k == 0) | (s.k == refs["blocks"][group] - 1),
            lambda: load(refs["left_edges"], refs["right_edges"], edge * c.tile_k),
            lambda: load(refs["left"], refs["right"], (refs["first"][group] + s.k) * c.tile_k),
        )

    def epilogue(refs: Refs, p: Part, product: Any, store: Callable[..., None]) -> None:
        group, row = group_of(p.i)
        value = (product + refs["fill"][group]).astype(dtype)  # not 0 for empty groups alone
        send = send_to(refs["out"].at[group], row + p.m - p.i * c.tile_m, p.n, columns)
        store(lambda n, width: value[:, n : n + width], send)

    inputs = {"left": _padded(left), "right": _padded(right), "left_edges": edges(left), "right_edges": edges(right)}
    made = persistent_product(
        c,
        left.dtype,
        "km",
        "kn",
        tiles,
        copies,
        epilogue,
        inputs={**inputs, "first": first, "blocks": blocks, "fill": fill},
        outputs={"out": jax.ShapeDtypeStruct((groups, m, n), dtype)},
        stored=dtype,
        steps_of=steps_of,
        name="grouped_weight_product",
        interpret=interpret,
    )
    out: Array = made["out"]
    return out


def _padded(x: Array) -> Array:
    return jnp.pad(x, ((0, -len(x) % _ROWS), (0, 0)))
