"""Which rows belong to which group, and sums over rows in a fixed order, with arrays of fixed shapes.

T rows are sorted by group; `ends` [G] int32 has where each group ends.  Rows past the last end belong to none.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from onchip.frontend.jax_call import vary_alike
from onchip.frontend.jax_inputs import accumulator


def ends_of_sizes(sizes: Array, rows: int) -> tuple[Array, Array]:
    """Where groups of these sizes end, and which are right, by `ends_where`: none is negative, and they fit into
    `rows`.
    """
    most = rows + 1
    clipped = jnp.where(sizes < 0, most, jnp.minimum(sizes, most)).astype(jnp.uint32)
    ends = running_sums(clipped)
    # Sums that wrap around are above 2**32 in float32, with an error of far less than 2**30.
    right = (ends <= rows) & (running_sums(clipped.astype(jnp.float32)) < 3 * 2.0**30)
    return ends_where(right, ends.astype(jnp.int32)), right


def ends_of_offsets(offsets: Array, rows: int) -> tuple[Array, Array]:
    """The same for offsets: they are 0 or more, never decrease, and fit."""
    wrong = (offsets < starts_of(offsets)) | (offsets > rows)
    right = running_sums(wrong.astype(jnp.int32)) == 0
    return ends_where(right, jnp.clip(offsets, 0, rows).astype(jnp.int32)), right


def ends_where(right: Array, ends: Array) -> Array:
    """Where groups end, [G] int32; a wrong one, and all after it, end where the last one ends that is `right`."""
    return _up_to_each(jnp.where(right, ends, 0)).max(1)


def starts_of(ends: Array) -> Array:
    """Where each group begins."""
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])


def running_sums(x: Array) -> Array:
    """The running sums of x, [G] in its dtype, in one operation of XLA's; `cumsum` takes several."""
    return _up_to_each(x).sum(1, dtype=x.dtype)


def _up_to_each(x: Array) -> Array:
    """[G, G]: row i has x [G] up to entry i, then zeros; XLA never writes it to memory."""
    index = jnp.arange(len(x), dtype=jnp.int32)
    return jnp.where(index[None] <= index[:, None], x[None], 0)


def number_up_to(ascending: Array, x: Array) -> Array:
    """For each of x [N], how many of `ascending` [G] are no larger, int32.

    It is `searchsorted` without its loop, whose turns take a GPU longer than comparing each with each.
    """
    return (ascending[None] <= x[:, None]).sum(1, dtype=jnp.int32)


def largest_first(ends: Array) -> tuple[Array, Array, Array]:
    """The groups, their begins and their ends, [G] int32 each, the largest first; equal ones in their order."""
    starts, index = starts_of(ends), jnp.arange(len(ends), dtype=jnp.int32)
    sizes = ends - starts
    larger, same = sizes[None] > sizes[:, None], sizes[None] == sizes[:, None]
    before = larger | (same & (index[None] < index[:, None]))
    its = before.sum(1, dtype=jnp.int32)[None] == index[:, None]
    group, begin, end = (jnp.where(its, x[None], 0).sum(1, dtype=jnp.int32) for x in (index, starts, ends))
    return group, begin, end


def has_group(ends: Array, rows: int) -> Array:
    """[rows] bool: whether a row is before the last group's end."""
    return jnp.arange(rows, dtype=jnp.int32) < ends[-1]


def group_sums(x: Array, ends: Array, block: int = 128) -> Array:
    """[G, N]: the sum of each group's rows of x [T, N], first within blocks of rows, then over a group's blocks."""
    rows, width = x.shape
    if rows == 0:
        return jnp.zeros((len(ends), width), x.dtype)
    starts = starts_of(ends)
    first_block, blocks = starts // block, -(-ends // block) - starts // block
    block_ends = running_sums(jnp.where(ends > starts, blocks, 0))
    item = jnp.arange(-(-rows // block) + len(ends))
    group = number_up_to(block_ends, item)
    of = jnp.minimum(group, len(ends) - 1)
    number = item - starts_of(block_ends)[of]
    row = ((first_block[of] + number) * block)[:, None] + jnp.arange(block)[None]
    own = (row >= starts[of, None]) & (row < ends[of, None]) & (item < block_ends[-1])[:, None]
    partial = jnp.where(own[..., None], x[jnp.clip(row, 0, rows - 1)], 0).sum(1)
    mine = group[None] == jnp.arange(len(ends))[:, None]
    return jnp.where(mine[..., None], partial[None], 0).sum(1)


def in_range(index: Array, ends: Array, rows: int) -> Array:
    """Whether the indices of all rows that have a group are in [0, rows)."""
    return (((index >= 0) & (index < rows)) | ~has_group(ends, len(index))).all()


def take_rows(x: Array, index: Array) -> Array:
    """x[index]; an index that is out of range may give any row."""
    return jnp.take(x, index, axis=0, mode="clip") if len(x) else jnp.zeros((len(index), *x.shape[1:]), x.dtype)


def rows_by_index(index: Array, ends: Array, rows: int) -> tuple[Array, Array]:
    """The rows that have a group, [T] int32, in the order of their index (equal ones in the order of rows), and where
    those of each index begin and end, [rows + 1] int32."""
    key = jnp.where(has_group(ends, len(index)), index, rows).astype(jnp.int32)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    # Counted, since a search in the sorted keys is a loop of XLA's.
    counts = jnp.zeros(rows + 1, jnp.int32).at[key].add(1)
    return order, starts_of(jnp.cumsum(counts))


def sum_rows(x: Array, index: Array, ends: Array, rows: int) -> Array:
    """[rows, N] of x's dtype: row i of x [T, N] is added to row index[i], if it has a group.

    Rows are added in the order of i, without atomics, in the accumulator's dtype.  It takes as many passes over the
    result as there are addends of the row that has the most: in a mixture of experts, experts per token.
    """
    (length, width), total = x.shape, accumulator(x.dtype)
    zeros = jnp.zeros((rows, width), total)
    if length == 0 or rows == 0:
        return zeros.astype(x.dtype)
    order, limits = rows_by_index(index, ends, rows)
    begins, addends = limits[:-1], limits[1:] - limits[:-1]

    def add(number: Any, sums: Array) -> Array:
        row = order[jnp.minimum(begins + number, length - 1)]
        return sums + jnp.where((number < addends)[:, None], x[row].astype(total), 0)

    sums: Array = lax.fori_loop(0, addends.max(), add, vary_alike(zeros, (x, addends)))
    return sums.astype(x.dtype)
