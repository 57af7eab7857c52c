"""Layouts of values in the registers of a warpgroup, for kernels in Pallas Mosaic GPU."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from onchip.kernels.mosaic.ptx import load_box

# Before jax 0.11 plgpu.load wants an index besides the reference; later versions warn about it, then take none.
_index = inspect.signature(plgpu.load).parameters.get("idx")
_LOAD_INDEX = ((),) if _index is not None and _index.default is inspect.Parameter.empty else ()

WARPGROUP = 128
"""Threads of a warpgroup."""
_REGISTERS = 1 << 16  # of a multiprocessor
_OF_THREAD = range(24, 257, 8)


def fit(of_warpgroups: Sequence[int]) -> bool:
    """Whether warpgroups may set the registers of a thread to these numbers, one for each of a program.

    Together they may have no more than the program has at its start: a warpgroup that asks for more waits for ever.
    """
    threads = WARPGROUP * len(of_warpgroups)
    at_start = threads * (_REGISTERS // threads // 8 * 8)
    return WARPGROUP * sum(of_warpgroups) <= at_start and all(x in _OF_THREAD for x in of_warpgroups)


class Registers:
    """Layouts of values in registers: a WGMMA accumulator, and vectors for its rows and columns.

    The CPU interpreter knows no layouts.
    """

    def __init__(self, interpret: Any) -> None:
        self.interpreted = interpret is not None

    def _cast(self, x: Any, layout: Any) -> Any:
        return x if self.interpreted else plgpu.layout_cast(x, layout)

    def load(self, ref: Any, over: int) -> Any:
        """Load a vector [rows] from device memory, with a value per row (over=1) or per column (over=0)."""
        if self.interpreted:
            return ref[...]
        return plgpu.load(ref, *_LOAD_INDEX, layout=plgpu.Layout.WGMMA.reduce(over), optimized=False)

    def store(self, ref: Any, value: Any) -> None:
        """Store a vector with a value per row to device memory."""
        if self.interpreted:
            ref[...] = value
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA.reduce(1)))
        def store(_: Any, ref: Any, value: Any) -> None:
            value.store_untiled(ref, optimized=False)

        store(ref, value)

    def load_columns(self, ref: Any) -> Any:
        """Load a vector from shared memory, with a value per column."""
        if self.interpreted:
            return ref[...]
        return plgpu.load(ref, *_LOAD_INDEX, layout=plgpu.Layout.WGMMA.reduce(0))

    def load_box(self, ref: Any) -> Any:
        """Load a matrix [64, 64] of 16 bits from shared memory, laid out as in an accumulator."""
        return ref[...] if self.interpreted else load_box(ref)

    def load_rows(self, ref: Any) -> Any:
        """The same, from shared memory whose rows lie one after the other, as they came."""
        if self.interpreted:
            return ref[...]
        return plgpu.load(ref, *_LOAD_INDEX, layout=plgpu.Layout.WGMMA, optimized=False)

    def store_rows(self, ref: Any, value: Any) -> None:
        """Store to shared memory whose rows lie one after the other."""
        if self.interpreted or not hasattr(plgpu, "store"):  # which came with jax 0.12, as an assignment became strict
            ref[...] = value
        else:
            plgpu.store(ref, value, optimized=False)

    def spread(self, x: Any, shape: tuple[int, int], over: int) -> Any:
        """Spread a vector that `load` or a reduction made over a matrix."""
        return self._cast(lax.broadcast_in_dim(x, shape, (1 - over,)), plgpu.Layout.WGMMA)

    def zeros(self, shape: tuple[int, int]) -> Any:
        return self._cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)

    def vector(self, size: int, value: Any) -> Any:
        """A vector of so many rows, all of them `value`."""
        return self._cast(jnp.full((size,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))

    def columns(self, shape: tuple[int, int]) -> Any:
        """Each element's column."""
        number = self._cast(lax.broadcasted_iota(jnp.int32, shape[1:], 0), plgpu.Layout.WGMMA.reduce(0))
        return self.spread(number, shape, 0)

    def rows(self, shape: tuple[int, int]) -> Any:
        """Each element's row."""
        return self._cast(lax.broadcasted_iota(jnp.int32, shape, 0), plgpu.Layout.WGMMA)
