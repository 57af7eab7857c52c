"""The kernels' work: tiles of tokens, each with the blocks of tokens that it meets, those with most blocks first.

A kernel has as many programs as there are multiprocessors.  Each works through tiles of its own, while copies for the
next one are on their way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.attention.masks import Intervals
from onchip.attention.mosaic.problem import TILE
from onchip.kernels.mosaic.launch import Refs, multiprocessors

Array = jax.Array

HALF = TILE // 2
"""Tokens of a tile's half, which one of the two warpgroups that multiply has."""
ALL_TILES = 3 * TILE
"""A multiple of every tile."""
L2_BYTES = 32 << 20
"""What all programs read at a time should fit into this part of L2; an H100 has 50 MiB."""


class TileWork(NamedTuple):
    """A tile of a head, the blocks of tokens that it meets, [first, last), and the tokens among them that need no mask,
    [full_first, full_last)."""

    batch: Any
    tile: Any
    first: Any
    last: Any
    full_first: Any
    full_last: Any
    head: Any


def query_items(mask: Intervals, keys: int, block: int, tile: int = TILE) -> Array:
    """[B * tiles, 6] int32: tiles of queries, each with one block of `block` keys or more."""
    meet, full = _pairs(mask, keys, tile, block)
    # Past the last key a block must be masked.
    return _in_blocks(meet, full & (jnp.arange(full.shape[-1]) < keys // block)[None, None], block, least=1)


def key_items(mask: Intervals, keys: int, block: int, tile: int = TILE) -> Array:
    """[B * tiles, 6] int32: tiles of keys with their blocks of `block` queries."""
    meet, full = (x.swapaxes(1, 2) for x in _pairs(mask, keys, block, tile))
    return _in_blocks(meet, full, block, least=0)


def key_items_in_order(mask: Intervals, keys: int, block: int) -> tuple[Array, Array]:
    """The same, and a tile's turn at each block, [B, tiles, blocks] int32: twice the number of tiles before it in the
    list that meet the block, and 1 more if it is the last one; -1 if it doesn't meet it."""
    meet, full = (x.swapaxes(1, 2) for x in _pairs(mask, keys, block, TILE))
    items = _in_blocks(meet, full, block, least=0)
    tiles = meet.shape[1]
    place = jnp.argsort(items[:, 0] * tiles + items[:, 1]).reshape(-1, tiles)  # of each tile in the list
    before = (place[:, None] < place[:, :, None]).astype(jnp.bfloat16)
    there = meet.astype(jnp.bfloat16)
    turn = jnp.einsum("btu,buj->btj", before, there, preferred_element_type=jnp.float32).astype(jnp.int32)
    is_last = turn + 1 == meet.sum(1, keepdims=True, dtype=jnp.int32)
    return items, jnp.where(meet, 2 * turn + is_last, -1)


def _pairs(mask: Intervals, keys: int, rows: int, columns: int) -> tuple[Array, Array]:
    """For each block of `rows` queries and `columns` keys, [B, Tq / rows, Tk / columns] bool: whether some query may
    see a key, and whether each query sees all keys.

    Blocks are compared one by one: searching would take a loop of small operations, about 0.8 ms on a GPU.
    """

    def over(x: Array, size: int, fill: int, fold: Any) -> Array:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=fill)
        made: Array = fold(x.reshape(len(x), -1, size), -1)
        return made

    far, first = 2**30, jnp.arange(-(-keys // columns))[None, None] * columns
    last = jnp.minimum(first + columns, keys)
    empty = mask.start >= mask.end
    least_start, most_end = (
        over(jnp.where(empty, fill, x), rows, fill, fold)[:, :, None]
        for x, fill, fold in ((mask.start, far, jnp.min), (mask.end, -far, jnp.max))
    )
    most_start, least_end = (
        over(x, rows, fill, fold)[:, :, None]
        for x, fill, fold in ((mask.start, -far, jnp.max), (mask.end, far, jnp.min))
    )
    meet, full = (least_start < last) & (most_end > first), (most_start <= first) & (least_end >= last)
    if mask.stop is not None:
        at = jnp.arange(meet.shape[1])[None, :, None] * rows
        meet &= at < over(mask.stop, columns, 0, jnp.max)[:, None]
        full &= at + rows <= over(mask.stop, columns, far, jnp.min)[:, None]
    return meet, full


def _in_blocks(meet: Array, full: Array, block: int, least: int) -> Array:
    """The items of tiles, given which blocks they meet, and which of these need no mask, [B, tiles, blocks]; those with
    most blocks first.  Few operations: each is a launch."""
    batch, tiles, blocks = meet.shape
    at = jnp.arange(blocks, dtype=jnp.int32)[None, None]
    ends = full & ~jnp.pad(full[..., 1:], ((0, 0), (0, 0), (0, 1)))
    found = (meet, at), (meet, blocks - 1 - at), (full, at), (ends, at + 1)
    first, after, full_first, full_last = jnp.stack([jnp.where(there, x, blocks) for there, x in found]).min(-1)
    first = jnp.minimum(first, blocks - 1)
    last = jnp.maximum(blocks - after, first + least)
    full_last = jnp.where(full_first == blocks, 0, full_last)
    number = jnp.arange(batch * tiles, dtype=jnp.int32).reshape(batch, tiles)
    items = jnp.stack([number // tiles, number % tiles, first, last, full_first * block, full_last * block], -1)
    return items.reshape(-1, 6)[jnp.argsort((first - last).reshape(-1), stable=True)]


def heads_together(heads: int, bytes_of_head: int, at_most: int) -> int:
    """How many heads are worked on at a time, if a head's blocks take `bytes_of_head`."""
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * bytes_of_head <= at_most))


def programs_of(items: int, interpret: Any) -> int:
    return min(items, multiprocessors() if interpret is None else 2)


def each_item(
    refs: Refs, heads: int, together: int, programs: int, do: Callable[[TileWork, Any, Any], Any], state: Any
) -> Any:
    """state = do(item, turn, state) for each item of this program.

    `together` heads of a tile come one after the other.  Items are dealt to programs from first to last, then from last
    to first: items get shorter, so that evens out.
    """
    rows = refs["items"].shape[0]
    items = rows * heads
    program = lax.convert_element_type(lax.axis_index("program"), jnp.int32)

    def number(turn: Any) -> Any:
        turned = jnp.where(lax.rem(turn, jnp.int32(2)) == 0, program, programs - 1 - program)
        return turn * programs + turned

    def one(turn: Any, state: Any) -> Any:
        at = number(turn)
        section = lax.div(at, jnp.int32(rows * together))
        at = at - section * (rows * together)
        row = lax.div(at, jnp.int32(together))
        head = section * together + at - row * together
        return do(TileWork(*(*(refs["items"][row, i] for i in range(6)), head)), turn, state)

    whole = jnp.int32(items // programs)
    return lax.fori_loop(0, whole + jnp.where(number(whole) < items, 1, 0), one, state)
