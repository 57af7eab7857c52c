"""The Hopper kernel in Pallas Mosaic GPU that adds up rows, each sum in order, with its launcher.

It is bound by device memory: one warpgroup per program, several programs per multiprocessor, no shared memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from onchip.groups.xla import groups
from onchip.groups.xla.groups import rows_by_index
from onchip.kernels.mosaic.launch import Refs, launch, multiprocessors
from onchip.kernels.mosaic.order import ceil_div
from onchip.kernels.mosaic.strips import THREADS, Strips

_AHEAD = 4  # rows that are being loaded at a time


def sum_rows(x: Array, index: Array, ends: Array, rows: int, *, interpret: Any = None) -> Array:
    """As `sum_rows` of `onchip.groups.xla.groups`, for a multiple of 8 columns; each addend is read once."""
    (length, width), dtype = x.shape, x.dtype
    if length == 0 or rows == 0 or width < THREADS:
        return groups.sum_rows(x, index, ends, rows)
    assert width % 8 == 0
    order, limits = rows_by_index(index, ends, rows)
    strip = max(s for s in (128, 256, 512, 1024) if s <= width)
    count, strips = -(-width // strip), Strips(strip, strip // THREADS, interpret)
    programs = 8 * multiprocessors() if interpret is None else 2

    def body(refs: Refs) -> None:
        program = lax.axis_index("program")

        def item(number: Any, _: None) -> None:
            i = program + number * programs
            row = lax.div(i, jnp.int32(count))
            # The last strip of a row may overlap with the one before; they agree.
            column = lax.min((i - row * count) * strip, jnp.int32(width - strip))
            begin, end = refs["limits"][row], refs["limits"][row + 1]

            def addend(at: Any) -> Any:
                """That row of x, or zeros past the last one."""
                source = refs["order"][lax.max(lax.min(at, end - 1), jnp.int32(0))]
                value = strips.floats(strips.load(refs["x"].at[source, pl.ds(column, strip)]))
                return jnp.where(at < end, value, 0.0)

            def add(turn: Any, total: Any) -> Any:
                for value in [addend(begin + 1 + turn * _AHEAD + a) for a in range(_AHEAD)]:
                    total = total + value
                return total

            turns = ceil_div(lax.max(end - begin - 1, jnp.int32(0)), _AHEAD)
            total = lax.fori_loop(0, turns, add, addend(begin))
            strips.store(refs["out"].at[row, pl.ds(column, strip)], total.astype(dtype))

        lax.fori_loop(0, ceil_div(rows * count - program, programs), item, None)

    inputs = {"x": x, "order": order, "limits": limits}
    outputs = {"out": jax.ShapeDtypeStruct((rows, width), dtype)}
    made = launch(
        body, inputs, outputs, (), grid={"program": programs}, warpgroups=1, name="sum_rows", interpret=interpret
    )
    out: Array = made["out"]
    return out
