"""Which tiles of a persistent product a program has, and in which order."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax


def ceil_div(x: Any, y: Any) -> Any:
    return lax.div(x + (y - 1), jnp.asarray(y, jnp.int32))


def each(count: int, do: Callable[[Any], None]) -> None:
    """Call do(0), do(1), ...: in a loop, so that a kernel has it once."""
    if count == 1:
        do(0)
    else:
        lax.fori_loop(0, count, lambda i, _: do(i), None)


def place_tile(tile: Any, tiles_m: Any, tiles_n: Any, group: int) -> tuple[Any, Any]:
    """Row and column of a tile: up to `group` rows of tiles at a time, column by column, in even groups."""
    size = ceil_div(tiles_m, ceil_div(tiles_m, group))
    per_group = size * tiles_n
    of = lax.div(tile, per_group)
    first = of * size
    height = lax.min(tiles_m - first, size)
    within = tile - of * per_group
    column = lax.div(within, height)
    return first + within - column * height, column


class Item(NamedTuple):
    """Row and column of tiles, the first step and the number of steps, and what was looked up for the tile."""

    i: Any
    j: Any
    first: Any
    steps: Any
    found: Any


class Work:
    """The work of a product: tiles of the result, the last few of them cut into two halves of the steps.

    The cut fills the device better: as many programs as there are work on one item after the other, and a half is a
    program's last item.
    """

    def __init__(self, tiles_m: Any, tiles_n: Any, steps: Any, programs: int, group: int, halves: bool) -> None:
        self.tiles_m, self.tiles_n, self.steps, self.group = tiles_m, tiles_n, steps, group
        tiles = tiles_m * tiles_n
        rest = lax.rem(tiles, jnp.int32(programs))
        cut = jnp.where((2 * rest <= programs) & (steps > 1), rest, 0) if halves else jnp.int32(0)
        self.whole = tiles - cut
        self.items = tiles + cut
        self.programs = programs

    def number(self, turn: Any, program: Any) -> Any:
        """The item that a program takes in a turn.  Programs go from first to last, then from last to first, which
        evens out items that get shorter and shorter.
        """
        turned = jnp.where(lax.rem(turn, jnp.int32(2)) == 0, program, self.programs - 1 - program)
        return turn * self.programs + turned

    def item(self, number: Any) -> Item:
        """The item with this number; past the last one, the last."""
        number = jnp.minimum(number, self.items - 1)
        over = lax.max(number - self.whole, jnp.int32(0))
        second = lax.rem(over, jnp.int32(2))
        middle = lax.div(self.steps, jnp.int32(2))
        half = jnp.where(second == 1, self.steps - middle, middle)
        steps = jnp.where(number < self.whole, self.steps, half)
        tile = number - over + lax.div(over, jnp.int32(2))
        i, j = place_tile(tile, self.tiles_m, self.tiles_n, self.group)
        return Item(i, j, second * middle, steps, ())
