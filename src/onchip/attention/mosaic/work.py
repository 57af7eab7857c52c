"""What the kernels work on: tiles of tokens, each with the blocks of tokens that it meets, the longest first.

A kernel has as many programs as there are multiprocessors.  Each works through tiles of its own, while copies for the
next one are on their way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.attention import ranges
from onchip.attention.masks import Intervals
from onchip.attention.ranges import Tiles
from onchip.attention.xla.arrays import XLA
from onchip.kernels.mosaic.launch import Refs, multiprocessors

Array = jax.Array

TILE = 128
"""Tokens of a tile: of queries in forward and for their gradient, of keys for theirs."""
HALF = TILE // 2
"""Those of one warpgroup of the two that multiply."""


class Item(NamedTuple):
    """A tile of a head, and the blocks of tokens that it meets: from `first` to `last`, and which tokens of these need
    no mask."""

    batch: Any
    tile: Any
    first: Any
    last: Any
    full_first: Any
    full_last: Any
    head: Any


def query_items(mask: Intervals, block: int) -> Array:
    """[B * tiles, 6] int32: tiles of queries with blocks of so many keys, one at least."""
    return _items(ranges.query_tiles(XLA, mask, TILE), block, least=1)


def key_items(mask: Intervals, keys: int, block: int) -> Array:
    """[B * tiles, 6] int32: tiles of keys with blocks of so many queries."""
    return _items(ranges.key_tiles(XLA, mask, keys, TILE), block, least=0)


def _items(tiles: Tiles, block: int, least: int) -> Array:
    batch, count = tiles.first.shape
    first = tiles.first // block
    last = jnp.maximum(-(-tiles.last // block), first + least)
    last = jnp.where((tiles.last > tiles.first) | (least > 0), last, first)
    number = jnp.arange(batch * count, dtype=jnp.int32).reshape(batch, count)
    made = jnp.stack([number // count, number % count, first, last, tiles.full_first, tiles.full_last], -1)
    made = made.reshape(-1, 6)
    return made[jnp.argsort(first.reshape(-1) - last.reshape(-1), stable=True)]


def programs_of(items: int, interpret: Any) -> int:
    return min(items, multiprocessors() if interpret is None else 2)


def each_item(refs: Refs, heads: int, programs: int, do: Callable[[Item, Any, Any], Any], state: Any) -> Any:
    """state = do(item, turn, state) for each item of this program.

    All heads of a tile come one after the other, and programs go from first to last, then from last to first: it evens
    out as items get shorter.
    """
    items = refs["items"].shape[0] * heads
    program = lax.convert_element_type(lax.axis_index("program"), jnp.int32)

    def number(turn: Any) -> Any:
        turned = jnp.where(lax.rem(turn, jnp.int32(2)) == 0, program, programs - 1 - program)
        return turn * programs + turned

    def one(turn: Any, state: Any) -> Any:
        at = number(turn)
        row = lax.div(at, jnp.int32(heads))
        return do(Item(*(refs["items"][row, i] for i in range(6)), at - row * heads), turn, state)

    whole = jnp.int32(items // programs)
    return lax.fori_loop(0, whole + jnp.where(number(whole) < items, 1, 0), one, state)
