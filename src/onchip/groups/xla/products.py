"""Products over groups of rows in plain JAX: one block of a group's rows after the other, on any device.

A group of n rows is cut into ceil(n / block) blocks, so there are at most T / block + G; only the device knows how
many.  A row of another group, or of none, never enters a result, whatever it holds.

`fill` [G] holds what an empty group's weight gradient gets; its last entry is what rows without a group get.  It is 0,
or NaN where sizes or indices are wrong.  Groups with wrong sizes are empty.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from onchip.frontend.jax_call import vary_alike
from onchip.frontend.jax_inputs import accumulator
from onchip.groups.problem import GroupedOptions
from onchip.groups.xla.groups import number_up_to, running_sums, starts_of, sum_rows
from onchip.groups.xla.swiglu import activated
from onchip.kernels.jax_products import product

__all__ = ["layer", "sum_rows", "weight_product"]


class _Blocks(NamedTuple):
    """Blocks of rows of one group each, group by group."""

    size: int
    number: Array
    group: Array  # [bound] int32
    begin: Array  # [bound] int32: its own first row
    end: Array  # [bound] int32: the row past its last one

    def rows(self, i: Any, rows: int) -> tuple[Array, Array]:
        """For block i: the first row that is read, so that `size` rows fit, and whether each row is its own, [size, 1]
        bool."""
        first = jnp.minimum(self.begin[i], rows - self.size)
        row = first + jnp.arange(self.size, dtype=jnp.int32)[:, None]
        return first, (row >= self.begin[i]) & (row < self.end[i])


def _blocks(ends: Array, rows: int) -> _Blocks:
    groups = len(ends)
    # A block has about as many rows as a group, so that little is wasted; 512 rows keep a GPU busy.
    size = 32
    while size < min(512, rows // groups):
        size *= 2
    size = min(size, rows)
    starts = starts_of(ends)
    last = running_sums(-(-(ends - starts) // size))
    item = jnp.arange(-(-rows // size) + groups, dtype=jnp.int32)
    group = jnp.minimum(number_up_to(last, item), groups - 1)
    begin = starts[group] + (item - starts_of(last)[group]) * size
    return _Blocks(size, last[-1], group, begin, jnp.minimum(begin + size, ends[group]))


def layer(
    x: Array,  # [T, K]
    weight: Array,  # [G, N, K], or [G, K, N]
    ends: Array,  # [G] int32
    fill: Array,  # [G] float32
    bias: Array | None,  # [G, N]
    row_scale: Array | None,  # [T]
    options: GroupedOptions,
    keeps: bool,
) -> tuple[Array, Array | None]:
    """The result of each row, and if `keeps` its products with bias, in x's dtype."""
    rows, total = len(x), accumulator(x.dtype)
    over = 2 if options.weight_layout == "gnk" else 1
    n = weight.shape[3 - over]
    columns = (n if options.activation is None else n // 2, *((n,) if keeps else ()))
    outs = tuple(jnp.full((rows, c), fill[-1], x.dtype) for c in columns)
    if rows > 0:
        blocks = _blocks(ends, rows)

        def block(i: Any, outs: tuple[Array, ...]) -> tuple[Array, ...]:
            first, own = blocks.rows(i, rows)
            of_rows = partial(lax.dynamic_slice_in_dim, start_index=first, slice_size=blocks.size)
            of_group = lax.dynamic_index_in_dim(weight, blocks.group[i], keepdims=False)
            y = product(of_rows(x), of_group, (1, over - 1))
            if bias is not None:
                y = y + bias[blocks.group[i]].astype(total)[None]
            out = activated(options, y)
            if row_scale is not None:
                out = out * of_rows(row_scale)[:, None].astype(total)
            made = [jnp.where(own, new.astype(x.dtype), of_rows(old)) for old, new in zip(outs, (out, y), strict=False)]
            return tuple(lax.dynamic_update_slice_in_dim(o, m, first, 0) for o, m in zip(outs, made, strict=True))

        outs = lax.fori_loop(0, blocks.number, block, vary_alike(outs, (x, weight, bias, row_scale, ends)))
    return outs[0], outs[1] if keeps else None


def weight_product(left: Array, right: Array, ends: Array, fill: Array) -> Array:
    """[G, M, N]: for each group left.T @ right over its rows of left [T, M] and right [T, N], in their dtype."""
    rows, total = len(left), accumulator(left.dtype)
    shape = left.shape[1], right.shape[1]
    out = jnp.broadcast_to(fill[:, None, None], (len(ends), *shape)).astype(left.dtype)
    if rows == 0:
        return out
    blocks = _blocks(ends, rows)

    def block(i: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        out, sums = state
        first, own = blocks.rows(i, rows)
        group = blocks.group[i]
        a, b = (jnp.where(own, lax.dynamic_slice_in_dim(x, first, blocks.size), 0) for x in (left, right))
        begins = (i == 0) | (blocks.group[jnp.maximum(i - 1, 0)] != group)
        sums = jnp.where(begins, 0, sums) + product(a, b, (0, 0))
        # This writes the group's sum so far; the last write stays.
        return lax.dynamic_update_index_in_dim(out, sums.astype(left.dtype), group, 0), sums

    state = vary_alike((out, jnp.zeros(shape, total)), (left, right, ends))
    made: Array = lax.fori_loop(0, blocks.number, block, state)[0]
    return made
