"""Hopper kernels of grouped products in Pallas Mosaic GPU, with their launchers.

Both are the persistent product of `onchip.kernels.mosaic.product`.  TMA reads blocks of operands whose first row is a
multiple of 8, but groups begin anywhere.  So a group is cut from the last multiple of 8 before its first row on, and up
to 7 rows of its first tile or step belong to other groups, as do the rows past its end:

- `rows_product` cuts a group into tiles of tile_m rows and stores its own rows of each.  Rows without a group are one
  more group, of one step.
- `weight_product` cuts it into steps of tile_k rows.  In the first and the last one other groups' rows are set to zero
  in shared memory, so that whatever they hold stays out of the sums.  An empty group has no step.  Large groups come
  first, and each program takes its next tile from a counter, so that all programs end together.

XLA computes on the device where groups and their tiles begin.  `layer` and `weight_product` are called like those of
`onchip.groups.xla.products`, which explains `fill`.

Source: megablox, the grouped product of MegaBlocks (arXiv:2211.15841), finds tiles on the device like this.
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
from onchip.groups.problem import ROWS, GroupedOptions, are_short, tiles_together
from onchip.groups.xla import products
from onchip.groups.xla.groups import has_group, largest_first, running_sums, starts_of
from onchip.groups.xla.swiglu import activated
from onchip.kernels.mosaic.launch import Refs
from onchip.kernels.mosaic.maths import LOG2E
from onchip.kernels.mosaic.order import ceil_div
from onchip.kernels.mosaic.product import BOX, LookUp, MosaicConfig, Part, Product, ProductStep, load_block, send_to
from onchip.kernels.mosaic.program import persistent_product
from onchip.kernels.mosaic.ptx import zero_rows
from onchip.kernels.mosaic.registers import Registers

__all__ = ["layer", "sum_rows", "weight_product"]

_ROWS = 8
"""A matrix that is copied in blocks has a multiple of this many rows."""
ROWS_CONFIG = MosaicConfig(tile_m=ROWS, tile_n=256, staging_slots=1)
FEW_ROWS_CONFIG = replace(ROWS_CONFIG, tile_m=64, split="n")
WEIGHT_CONFIG = MosaicConfig(tile_m=128, tile_n=256)


class GroupTile(NamedTuple):
    """Rows of one group that are multiplied together."""

    row: Any
    """The first row that is read."""
    group: Any
    """The group's number; G for rows without a group."""
    begin: Any
    """The group's first row."""
    end: Any
    """The row past its last one."""


def tiles_up_to(ends: Array, rows: int, tile: int) -> Array:
    """The number of tiles of rows of all groups up to and including each, [G + 1] int32; the last entry includes the
    rows without a group."""
    ends = jnp.concatenate([ends, jnp.full(1, rows, jnp.int32)])
    starts = starts_of(ends)
    return running_sums(jnp.where(ends > starts, ceil_div(ends - _aligned(starts), tile), 0))


def tile_at(i: Any, up_to: Any, ends: Any, rows: int, tile: int) -> GroupTile:
    """Tile i, found from references to the result of `tiles_up_to` and to the ends of groups, [G].

    The copying warpgroup has time to search: a table of all tiles was one more launch, of about 3 us on an H100.
    """
    groups = ends.shape[0]

    def halve(_: Any, between: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = between
        middle = lax.div(low + high, jnp.int32(2))
        passed = up_to[middle] <= i
        return jnp.where(passed, middle + 1, low), jnp.where(passed, high, middle)

    group, _ = lax.fori_loop(0, groups.bit_length(), halve, (jnp.int32(0), jnp.int32(groups)))
    before = lax.max(group - 1, jnp.int32(0))
    begin, number = (jnp.where(group > 0, x[before], 0) for x in (ends, up_to))
    end = jnp.where(group < groups, ends[lax.min(group, jnp.int32(groups - 1))], rows)
    return GroupTile(_aligned(begin) + (i - number) * tile, group, begin, end)


def _aligned(row: Any) -> Any:
    return lax.div(row, jnp.int32(_ROWS)) * _ROWS


def layer(
    x: Array,  # [T, K]
    weight: Array,  # [G, N, K], or [G, K, N]
    ends: Array,  # [G] int32
    fill: Array,  # [G] float32
    bias: Array | None,  # [G, N]
    row_scale: Array | None,  # [T]
    options: GroupedOptions,
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
        out = jnp.where(has_group(ends, len(x))[:, None], out * row_scale[:, None].astype(jnp.float32), fill[-1])
    return out.astype(x.dtype), y.astype(x.dtype) if keeps else None


def _rows_config(rows: int, groups: int) -> MosaicConfig:
    """The config for a group's mean number of rows: fewer rows take smaller tiles."""
    if rows < 96 * groups:
        return FEW_ROWS_CONFIG
    return replace(ROWS_CONFIG, group=tiles_together(rows, groups))


def rows_product(
    x: Array,  # [T, K]
    weight: Array,  # [G, N, K], or [G, K, N]
    ends: Array,  # [G] int32
    fill: Array,  # [G] float32
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
    c = config or _rows_config(rows, groups)
    wide = -(-rows // _ROWS) * _ROWS
    columns = 128 // jnp.dtype(dtype).itemsize
    # The columns of a warpgroup's part of a tile belong to the gate first, and then to the up projection.
    half = c.part_n // 2 if swiglu else 0
    out_n = n // 2 if swiglu else n
    tiles_n = -(-out_n // (c.tile_n // 2 if swiglu else c.tile_n))
    assert k % c.tile_k == out_n % BOX == 0
    assert gnk or not swiglu
    registers = Registers(interpret)

    def tiles(refs: Refs) -> tuple[Any, Any, Any]:
        return refs["tiles_up_to"][groups], tiles_n, k // c.tile_k

    def look_up(refs: Refs, i: Any, j: Any) -> tuple[Any, GroupTile]:
        tile = tile_at(i, refs["tiles_up_to"], refs["ends"], rows, c.tile_m)
        return jnp.where(tile.group < groups, jnp.int32(k // c.tile_k), jnp.int32(1)), tile

    def copies(refs: Refs, s: ProductStep, a: Any, b: Any, barrier: Any) -> None:
        at_k = s.k * c.tile_k
        load_block(refs["x"], s.found.row, c.tile_m, at_k, c.tile_k, a, barrier)
        of_group = refs["weight"].at[lax.min(s.found.group, jnp.int32(groups - 1))]
        if not gnk:
            load_block(of_group, at_k, c.tile_k, s.j * c.tile_n, c.tile_n, b, barrier)
        elif not swiglu:
            load_block(of_group, s.j * c.tile_n, c.tile_n, at_k, c.tile_k, b, barrier)
        else:
            for i in range(c.tile_n // half):
                first = s.j * (c.tile_n // 2) + i // 2 * half + i % 2 * out_n
                load_block(of_group, first, half, at_k, c.tile_k, b.at[pl.ds(i * half, half)], barrier)

    def epilogue(refs: Refs, p: Part, product: Any, store: Callable[..., None]) -> None:
        first, group, begin, end = p.found
        row = first + p.m - p.i * c.tile_m
        of_none = refs["fill"][groups - 1]
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
                        registers.store_rows(staging, value[m : m + BOX])
                        plgpu.commit_smem()
                        _send_rows(staging, first, count, target, row + m, column + n)

    def vector(x: Array | None, size: int) -> Array | None:
        """The vector in float32, with this many more numbers, since tiles may reach past its end."""
        return None if x is None else jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, size)])

    inputs = {"x": _padded(x), "weight": weight, "bias": vector(bias, c.tile_n), "fill": fill}
    inputs |= {"ends": ends, "tiles_up_to": tiles_up_to(ends, rows, c.tile_m)}
    outputs = {"out": jax.ShapeDtypeStruct((wide, out_n), dtype)}
    if keeps:
        outputs["y"] = jax.ShapeDtypeStruct((2, wide, out_n) if swiglu else (wide, n), dtype)
    p = Product(
        c,
        x.dtype,
        "mk",
        "nk" if gnk else "kn",
        tiles,
        copies,
        epilogue,
        stored=dtype,
        right_copies=c.tile_n // half if swiglu else 1,
        look_up=LookUp(GroupTile, look_up),
        # Where tiles share no weight, programs wait for memory, and a counter lets any that is ready go on: 3.06 ms
        # instead of 3.25 with 256 groups of 128 rows.  Where they share one, lists keep programs together: 0.31 ms
        # instead of 0.34 with 128 groups of 512 rows.
        counter=are_short(rows, groups),
        # A weight that no other tile reads is copied two blocks at a time, which are next to each other in memory.
        in_pairs=lambda tile: tile.end - tile.begin <= c.tile_m,
        # Other results' layout would not do: it takes rows by eights.
        scratch={"staging": ((2, BOX, columns), dtype)},
    )
    made = persistent_product(
        p,
        inputs={**inputs, "row_scale": vector(row_scale, c.tile_m)},
        outputs=outputs,
        name="grouped_rows_product",
        interpret=interpret,
    )
    return made["out"][:rows], made["y"][..., :rows, :] if keeps else None


def _send_rows(staging: Any, first: Any, count: Any, target: Any, row: Any, column: Any) -> None:
    """Copy `count` rows of staging [BOX, columns], from `first` on, to target's rows from `row` + `first` on.

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
    """[G, M, N]: for each group left.T @ right over its rows, in their dtype."""
    (rows, m), n, groups, dtype = left.shape, right.shape[1], len(ends), left.dtype
    # The rows of tiles of a group that has few are walked together, which takes up to 3% less time on an H100.
    c = config or replace(WEIGHT_CONFIG, group=min(WEIGHT_CONFIG.group, -(-m // WEIGHT_CONFIG.tile_m)))
    if rows == 0:
        return products.weight_product(left, right, ends, fill)
    columns = 128 // jnp.dtype(dtype).itemsize
    tiles_m = -(-m // c.tile_m)
    all_groups = dict(zip(("group", "begin", "end"), largest_first(ends), strict=True))

    def tiles(refs: Refs) -> tuple[Any, Any, Any]:
        return groups * tiles_m, -(-n // c.tile_n), -(-rows // c.tile_k)

    def look_up(refs: Refs, i: Any, j: Any) -> tuple[Any, GroupTile]:
        group, begin, end = (refs[name][lax.div(i, jnp.int32(tiles_m))] for name in all_groups)
        tile = GroupTile(_aligned(begin), group, begin, end)
        return jnp.where(tile.begin < tile.end, ceil_div(tile.end - tile.row, c.tile_k), 0), tile

    def column(i: Any) -> Any:
        """The first column of `left` for a row of tiles."""
        return lax.rem(i, jnp.int32(tiles_m)) * c.tile_m

    def copies(refs: Refs, s: ProductStep, a: Any, b: Any, barrier: Any) -> None:
        row = s.found.row + s.k * c.tile_k
        load_block(refs["left"], row, c.tile_k, column(s.i), c.tile_m, a, barrier)
        load_block(refs["right"], row, c.tile_k, s.j * c.tile_n, c.tile_n, b, barrier)

    def unclean(refs: Refs, s: ProductStep) -> Any:
        row = s.found.row + s.k * c.tile_k
        return (row < s.found.begin) | (s.found.end < row + c.tile_k)

    def clean(refs: Refs, s: ProductStep, a: Any, b: Any, warpgroup: Any) -> None:
        first = s.found.row + s.k * c.tile_k
        for ref in (a, b):
            zero_rows(ref, warpgroup, s.found.begin - first, s.found.end - first, interpret)

    def epilogue(refs: Refs, p: Part, product: Any, store: Callable[..., None]) -> None:
        group = p.found.group
        value = (product + refs["fill"][group]).astype(dtype)  # not 0 for empty groups alone
        send = send_to(refs["out"].at[group], p.m - p.i * c.tile_m + column(p.i), p.n, columns)
        store(lambda n, width: value[:, n : n + width], send)

    p = Product(
        c,
        left.dtype,
        "km",
        "kn",
        tiles,
        copies,
        epilogue,
        stored=dtype,
        look_up=LookUp(GroupTile, look_up),
        counter=True,
        clean=(unclean, clean),
    )
    made = persistent_product(
        p,
        inputs={"left": _padded(left), "right": _padded(right), "fill": fill, **all_groups},
        outputs={"out": jax.ShapeDtypeStruct((groups, m, n), dtype)},
        name="grouped_weight_product",
        interpret=interpret,
    )
    out: Array = made["out"]
    return out


def _padded(x: Array) -> Array:
    return jnp.pad(x, ((0, -len(x) % _ROWS), (0, 0)))
