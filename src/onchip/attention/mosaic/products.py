"""Products of blocks in shared memory, scores, and masks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from onchip.attention.mosaic.quads import hide_outside
from onchip.kernels.mosaic.launch import Refs
from onchip.kernels.mosaic.maths import LOG2E, tanh
from onchip.kernels.mosaic.registers import Registers
from onchip.kernels.mosaic.wgmma import begin_product, begin_product_over_rows

LOWEST = -1e30
"""Below any score.  A hidden score is -inf, and -inf minus -inf would not be 0."""


class ProductSums:
    """Sums of products in registers.

    On a GPU a sum is a pair of an accumulator, to which WGMMA adds, and None.  The CPU interpreter has no products of
    transposed blocks: there it is a pair of None and a value.
    """

    def __init__(self, interpret: Any) -> None:
        self.interpreted = interpret is not None

    def begin(self, run: Callable[..., Any], *shapes: tuple[int, int]) -> Any:
        """The result of run(*sums), where each sum begins as zeros."""
        if self.interpreted:
            return run(*((None, jnp.zeros(shape, jnp.float32)) for shape in shapes))
        return pl.run_scoped(
            lambda *into: run(*((x, None) for x in into)), *(plgpu.WGMMAAccumulatorRef(x, jnp.float32) for x in shapes)
        )

    def add(self, total: tuple[Any, Any], a: Any, b: Any) -> tuple[Any, Any]:
        """The sum after a @ b is added, which may still be running; a may be in registers."""
        into, value = total
        if self.interpreted:
            return None, value + jnp.dot(a[...].astype(jnp.float32), b.astype(jnp.float32))
        plgpu.wgmma(into, a, b)
        return into, None

    def start(self, a: Any, b: Any) -> Any:
        """a @ b.T, of blocks of shared memory; on a GPU it still runs, and is `known` later."""
        if self.interpreted:
            return jnp.dot(a[...].astype(jnp.float32), b[...].astype(jnp.float32).T)
        return begin_product(a, b)

    def start_over_rows(self, a: Sequence[Any], b: Sequence[Any]) -> Any:
        """The sum of a.T @ b for pairs of blocks, likewise."""
        if self.interpreted:
            pairs = zip(a, b, strict=True)
            return sum(jnp.dot(x[...].astype(jnp.float32).T, y[...].astype(jnp.float32)) for x, y in pairs)
        return begin_product_over_rows(a, b)

    def known(self, product: Any, running: int = 0) -> Any:
        """What `start` began, once at most `running` products, the last ones, are still running."""
        self.wait(running)
        return product

    def block(self, ref: Any) -> Any:
        """The right operand of `add`."""
        return ref[...] if self.interpreted else ref

    def value(self, total: tuple[Any, Any], running: int = 0) -> Any:
        """The sum's value, once at most `running` products, the last ones, are still running."""
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
    """How products become exponents of probabilities, to the base 2."""

    scale: float
    softcap: float | None

    @property
    def factor(self) -> float:
        """The factor of the scores that `of` returns."""
        return self.scale * LOG2E if self.plain else 1.0

    @property
    def plain(self) -> bool:
        """Whether scores are the products times a factor above 0."""
        return self.softcap is None and self.scale > 0

    def of(self, product: Any) -> tuple[Any, Any]:
        """Scores, which are exponents after multiplication with `factor`, and the cap's derivative, or None."""
        if self.plain:
            return product, None
        if self.softcap is None:
            return product * (self.scale * LOG2E), None
        t = tanh(product * (self.scale / self.softcap))
        return t * (self.softcap * LOG2E), 1 - t * t


@dataclass(frozen=True)
class Seen:
    """Which queries of a block may see which of its keys."""

    registers: Registers
    refs: Refs
    batch: Any

    def by_query(self, shape: tuple[int, int], row: Any, column: Any, limits: Any) -> Any:
        """For queries from `row` on, with their `limits`, and keys from `column` on: [queries, keys]."""
        start, end = (self.registers.spread(x - column, shape, 1) for x in limits)
        at = self.registers.columns(shape)
        seen = (start <= at) & (at < end)
        if "stop" in self.refs:
            stop = self.registers.load(self.refs["stop"].at[self.batch, pl.ds(column, shape[1])], 0)
            seen &= self.registers.rows(shape) < self.registers.spread(stop - row, shape, 0)
        return seen

    def hide(self, edge: Any, x: Any, row: Any, column: Any, limits: Any, hidden: float) -> Any:
        """x [queries, keys], for which see `by_query` and `where_seen`."""
        if "stop" in self.refs or self.registers.interpreted:
            return where_seen(edge, lambda: self.by_query(x.shape, row, column, limits), x, hidden)
        start, end = (limit - column for limit in limits)
        return lax.cond(edge, lambda x: hide_outside(x, start, end, hidden), lambda x: x, x)

    def by_key(self, shape: tuple[int, int], row: Any, column: Any, limits: Any) -> Any:
        """For keys from `row` on, and queries from `column` on, with their `limits`: [keys, queries]."""
        start, end = (self.registers.spread(x - row, shape, 0) for x in limits)
        at = self.registers.rows(shape)
        seen = (start <= at) & (at < end)
        if "stop" in self.refs:
            stop = self.registers.load(self.refs["stop"].at[self.batch, pl.ds(row, shape[0])], 1)
            seen &= self.registers.columns(shape) < self.registers.spread(stop - column, shape, 1)
        return seen


def where_seen(edge: Any, seen: Callable[[], Any], x: Any, hidden: float) -> Any:
    """x; in a block at an `edge` of the mask, with `hidden` for each query and key that don't see each other."""
    return lax.cond(edge, lambda x: jnp.where(seen(), x, hidden), lambda x: x, x)


def rows_of(ref: Any, layout: str, batch: Any, first: Any, count: int, head: Any) -> Any:
    """`count` tokens of a head, from `first` on, in an array [B, T, H, D] or [B, H, T, D]."""
    over = pl.ds(first, count)
    return ref.at[batch, over, head] if layout == "bthd" else ref.at[batch, head, over]


def send(value: Any, staging: Any, into: Any) -> None:
    """Copy a value [rows, columns] to device memory by way of `staging`, which has room for some of the columns."""
    width = staging.shape[1]
    for first in range(0, value.shape[1], width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging[...] = value if width == value.shape[1] else value[:, first : first + width]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, into if width == value.shape[1] else into.at[:, pl.ds(first, width)])
