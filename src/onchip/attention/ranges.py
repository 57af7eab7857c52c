"""Of a lowered mask which queries see a key, and which keys a tile of queries: what kernels find on the device."""

from typing import NamedTuple

from onchip.attention.masks import Array, Intervals, MaskArrays


class AttentionTiles(NamedTuple):
    """The ranges of tiles of so many tokens, [B, tiles] int32 each: what any token of a tile sees is in [first, last),
    and all see what is in [full_first, full_last).
    """

    first: Array
    last: Array
    full_first: Array
    full_last: Array


def of_keys(of: MaskArrays, mask: Intervals, keys: int) -> tuple[Array, Array]:
    """[B, Tk] int32 each: the queries that see each key are in [first, last).

    Exact where starts and ends never fall from one query to the next, as those of all masks but `Intervals` do; else
    some in between may not see it.
    """
    at = of.positions(mask.start, keys)[None] + mask.start[:, :1] * 0
    # Starts and ends that never fall, around those that are given.
    start, end = of.running_min(mask.start), of.running_max(mask.end)
    first, last = of.count_not_above(end, at), of.count_not_above(start, at)
    return first, last if mask.stop is None else of.xp.minimum(last, mask.stop)


def query_tiles(of: MaskArrays, mask: Intervals, rows: int) -> AttentionTiles:
    """Of tiles of `rows` queries: ranges of keys.  What `stop` hides may be anywhere, and then nothing is full."""
    xp = of.xp
    seen = mask.end > mask.start
    nothing = xp.where(seen, mask.start, 2**31 - 1)
    first, last = _by_tile(of, nothing, rows, "min"), _by_tile(of, xp.where(seen, mask.end, 0), rows, "max")
    first = xp.minimum(first, last)
    full_first, full_last = _by_tile(of, mask.start, rows, "max"), _by_tile(of, mask.end, rows, "min")
    if mask.stop is not None or mask.blocks is not None:
        full_first, full_last = first, first
    full_last = xp.maximum(full_first, full_last)
    return AttentionTiles(first, last, full_first, full_last)


def key_tiles(of: MaskArrays, mask: Intervals, keys: int, columns: int) -> AttentionTiles:
    """Of tiles of `columns` keys: ranges of queries."""
    first, last = of_keys(of, mask, keys)
    return query_tiles(of, Intervals(first, last, None, mask.blocks), columns)


def _by_tile(of: MaskArrays, x: Array, rows: int, which: str) -> Array:
    """[B, tiles]: the least or the largest of each tile's numbers [B, T]."""
    batch, tokens = x.shape
    x = of.xp.concatenate([x] + [x[:, -1:]] * (-tokens % rows), 1)  # the last token's again
    x = x.reshape(batch, -1, rows)
    made: Array = of.xp.amin(x, -1) if which == "min" else of.xp.amax(x, -1)
    return made
