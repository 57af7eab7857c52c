"""Products of blocks in shared memory, and the maths of their scores."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from onchip.kernels.mosaic.launch import Refs
from onchip.kernels.mosaic.maths import LOG2E, tanh
from onchip.kernels.mosaic.registers import Registers

LOWEST = -1e30
"""Below any score: what is hidden is -inf, and -inf less -inf would not be 0."""


class ProductSums:
    """Sums of products in registers.

    On a GPU a sum is an accumulator that WGMMA adds to, and the value that goes with it is None.  The CPU interpreter
    has no products of transposed blocks: there it is a value, and no accumulator.
    """

    def __init__(self, interpret: Any) -> None:
        self.interpreted = interpret is not None

    def begin(self, run: Callable[..., Any], *shapes: tuple[int, int]) -> Any:
        """run(*sums), zeros each; its result."""
        if self.interpreted:
            return run(*((None, jnp.zeros(shape, jnp.float32)) for shape in shapes))
        return pl.run_scoped(
            lambda *into: run(*((x, None) for x in into)), *(plgpu.WGMMAAccumulatorRef(x, jnp.float32) for x in shapes)
        )

    def add(self, total: tuple[Any, Any], a: Any, b: Any) -> tuple[Any, Any]:
        """The sum with a @ b, which may still be running; a may be in registers."""
        into, value = total
        if self.interpreted:
            return None, value + jnp.dot(a[...].astype(jnp.float32), b.astype(jnp.float32))
        plgpu.wgmma(into, a, b)
        return into, None

    def block(self, ref: Any) -> Any:
        """The right operand of `add`."""
        return ref[...] if self.interpreted else ref

    def value(self, total: tuple[Any, Any], running: int = 0) -> Any:
        """Of the sum, when no more than so many products are running; the last ones."""
        into, value = total
        return value if self.interpreted else plgpu.wgmma_accumulator_load(into, wait_n=running)

    def put(self, total: tuple[Any, Any], value: Any) -> tuple[Any, Any]:
        if self.interpreted:
            return None, value
        total[0][...] = value
        return total[0], None

    def wait(self, running: int) -> None:
        if not self.interpreted:
            plgpu.wgmma_wait(running)


@dataclass(frozen=True)
class Scores:
    """How products become the exponents, to the base 2, of probabilities."""

    scale: float
    softcap: float | None

    @property
    def factor(self) -> float:
        """Of the scores that `of` returns."""
        return self.scale * LOG2E if self.plain else 1.0

    @property
    def plain(self) -> bool:
        """Whether products are scores up to a factor above 0."""
        return self.softcap is None and self.scale > 0

    def of(self, product: Any) -> tuple[Any, Any]:
        """Scores that times `factor` are exponents, and the derivative of the cap, or None."""
        if self.plain:
            return product, None
        if self.softcap is None:
            return product * (self.scale * LOG2E), None
        t = tanh(product * (self.scale / self.softcap))
        return t * (self.softcap * LOG2E), 1 - t * t


@dataclass(frozen=True)
class Seen:
    """Which pairs of a block a mask lets see each other."""

    registers: Registers
    refs: Refs
    batch: Any

    def by_query(self, shape: tuple[int, int], row: Any, column: Any, limits: Any) -> Any:
        """Of queries from `row` on, whose `limits` these are, and keys from `column` on."""
        start, end = (self.registers.spread(x - column, shape, 1) for x in limits)
        at = self.registers.columns(shape)
        seen = (start <= at) & (at < end)
        if "stop" in self.refs:
            stop = self.registers.load(self.refs["stop"].at[self.batch, pl.ds(column, shape[1])], 0)
            seen &= self.registers.rows(shape) < self.registers.spread(stop - row, shape, 0)
        return seen

    def by_key(self, shape: tuple[int, int], row: Any, column: Any, limits: Any) -> Any:
        """Of keys from `row` on, and queries from `column` on, whose `limits` these are."""
        start, end = (self.registers.spread(x - row, shape, 0) for x in limits)
        at = self.registers.rows(shape)
        seen = (start <= at) & (at < end)
        if "stop" in self.refs:
            stop = self.registers.load(self.refs["stop"].at[self.batch, pl.ds(row, shape[0])], 1)
            seen &= self.registers.columns(shape) < self.registers.spread(stop - column, shape, 1)
        return seen


def where_seen(edge: Any, seen: Callable[[], Any], x: Any, hidden: float) -> Any:
    """x, and where the block is at an edge of the mask, `hidden` for pairs that don't see each other."""
    return lax.cond(edge, lambda x: jnp.where(seen(), x, hidden), lambda x: x, x)


def rows_of(ref: Any, layout: str, batch: Any, first: Any, count: int, head: Any) -> Any:
    """So many tokens of a head, of an array [B, T, H, D] or [B, H, T, D]."""
    over = pl.ds(first, count)
    return ref.at[batch, over, head] if layout == "bthd" else ref.at[batch, head, over]
