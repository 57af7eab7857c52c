"""Products over groups of rows in plain JAX: one block of a group's rows after the other, on any device.

A group of n rows is cut into ceil(n / block) blocks, so there are at most T / block + G; how many, the device knows.
A row of another group, or of none, never enters a result, whatever it holds.

`fill` is what rows without a group get, and the weights of empty groups: 0, or NaN in a call with wrong sizes, whose
groups are all empty.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from onchip.frontend.jax_call import vary_alike
from onchip.frontend.jax_inputs import accumulator
from onchip.groups.xla.groups import starts_of


class _Blocks(NamedTuple):
    """Blocks of rows of one group each, group by group."""

    size: int
    number: Array
    group: Array  # [bound] int32
    begin: Array  # [bound] int32: its own first row
    end: Array  # [bound] int32: past its last row

    def rows(self, i: Any, rows: int) -> tuple[Array, Array]:
        """Of block i the first row that is read, no more than lets `size` rows fit, and whether each [size, 1] is its
        own."""
        first = jnp.minimum(self.begin[i], rows - self.size)
        row = first + jnp.arange(self.size, dtype=jnp.int32)[:, None]
        return first, (row >= self.begin[i]) & (row < self.end[i])


def _blocks(ends: Array, rows: int) -> _Blocks:
    groups = len(ends)
    # About a group's rows, so that little is wasted; 512 keep a GPU busy.
    size = 32
    while size < min(512, rows // groups):
        size *= 2
    size = min(size, rows)
    starts = starts_of(ends)
    last = jnp.cumsum(-(-(ends - starts) // size))
    item = jnp.arange(-(-rows // size) + groups, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last, item, side="right"), groups - 1).astype(jnp.int32)
    begin = starts[group] + (item - starts_of(last)[group]) * size
    return _Blocks(size, last[-1], group, begin, jnp.minimum(begin + size, ends[group]))


def _dot(a: Array, b: Array, over: tuple[int, int], total: Any) -> Array:
    """Sums over a dimension of each, in `total`; HIGHEST keeps float32 from being rounded on a GPU."""
    precision = lax.Precision.HIGHEST if a.dtype == total else None
    dimensions = ((over[:1], over[1:]), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=total)


def rows_product(x: Array, weight: Array, ends: Array, fill: Array, *, over: int, dtype: Any) -> Array:
    """Row t of x [T, K] times the weight of its group: [T, N], rounded once to `dtype`.

    over: the dimension of weight [G, ., .] that is summed over: 2 for [G, N, K], 1 for [G, K, N].
    """
    rows, total = len(x), accumulator(x.dtype)
    out = jnp.full((rows, weight.shape[3 - over]), fill, dtype)
    if rows == 0:
        return out
    blocks = _blocks(ends, rows)

    def block(i: Any, out: Array) -> Array:
        first, own = blocks.rows(i, rows)
        product = _dot(
            lax.dynamic_slice_in_dim(x, first, blocks.size),
            lax.dynamic_index_in_dim(weight, blocks.group[i], keepdims=False),
            (1, over - 1),
            total,
        ).astype(dtype)
        before = lax.dynamic_slice_in_dim(out, first, blocks.size)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(own, product, before), first, 0)

    made: Array = lax.fori_loop(0, blocks.number, block, vary_alike(out, (x, weight, ends)))
    return made


def weight_product(left: Array, right: Array, ends: Array, fill: Array, dtype: Any) -> Array:
    """[G, M, N]: for each group left.T @ right over its rows of left [T, M] and right [T, N], rounded once."""
    rows, total = len(left), accumulator(left.dtype)
    shape = left.shape[1], right.shape[1]
    out = jnp.full((len(ends), *shape), fill, dtype)
    if rows == 0:
        return out
    blocks = _blocks(ends, rows)

    def block(i: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        out, sums = state
        first, own = blocks.rows(i, rows)
        group = blocks.group[i]
        a, b = (jnp.where(own, lax.dynamic_slice_in_dim(x, first, blocks.size), 0) for x in (left, right))
        begins = (i == 0) | (blocks.group[jnp.maximum(i - 1, 0)] != group)
        sums = jnp.where(begins, 0, sums) + _dot(a, b, (0, 0), total)
        # The group's sum so far: the last one stays.
        return lax.dynamic_update_index_in_dim(out, sums.astype(dtype), group, 0), sums

    state = vary_alike((out, jnp.zeros(shape, total)), (left, right, ends))
    made: Array = lax.fori_loop(0, blocks.number, block, state)[0]
    return made
