"""The ranges of tiles, which Triton kernels find on the device from a lowered mask.

There is an entry for each ROWS queries.  In blocks of keys it has the range that any of them sees, [first, last), and
the range that all see, [full_first, full_last); then, in keys, the least start, the largest end, the largest start and
the least end, from which the other table is made.  A key tile's entry has the same two ranges in blocks of queries.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit(do_not_specialize=["first", "last", "queries", "keys", "entries"])
def query_table(
    start, end, stop, table, stops, counter, first, last, queries, keys, entries, ROWS: tl.constexpr,
    KEYS: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """With a `stop`, of blocks of keys the least and the largest of it too, [B or 1, blocks, 2].  The counter by which
    forward deals out tiles begins at 0.  Of a BAND starts and ends are written, not read: query 0's are `first` and
    `last`, and each query's lie one key after those of the query before.
    """
    t, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if t + b == 0:
        tl.store(counter, 0)
    if t < entries:
        into = table + (b * entries + t) * 8
        _query_entry(start, end, into, t, b, first, last, queries, keys, ROWS, KEYS, BAND)
    if stop is not None:
        j = t * KEYS + tl.arange(0, KEYS)
        if t * KEYS < keys:
            until = tl.load(stop + b * keys + j, mask=j < keys, other=0)
            into = stops + 2 * (b * tl.cdiv(keys, KEYS) + t)
            tl.store(into, tl.min(tl.where(j < keys, until, queries), 0))
            tl.store(into + 1, tl.max(until, 0))


@triton.jit
def _query_entry(
    start, end, into, t, b, first, last, queries, keys, ROWS: tl.constexpr, KEYS: tl.constexpr, BAND: tl.constexpr
):  # fmt: skip
    row = t * ROWS + tl.arange(0, ROWS)
    inside = row < queries
    at = b * queries + row
    if BAND:
        s, e = tl.minimum(tl.maximum(first + row, 0), keys), tl.minimum(tl.maximum(last + row, 0), keys)
        tl.store(start + at, s, mask=inside)
        tl.store(end + at, e, mask=inside)
    else:
        s = tl.maximum(tl.load(start + at, mask=inside, other=0), 0)
        e = tl.minimum(tl.load(end + at, mask=inside, other=0), keys)
    sees = inside & (s < e)
    least, most = tl.min(tl.where(sees, s, keys), 0), tl.max(tl.where(sees, e, 0), 0)
    # A row past the last one bounds nothing.
    full_start, full_end = tl.max(tl.where(inside, s, 0), 0), tl.min(tl.where(inside, e, keys), 0)
    tl.store(into, least // KEYS)
    tl.store(into + 1, tl.cdiv(most, KEYS))
    tl.store(into + 2, tl.cdiv(full_start, KEYS))
    tl.store(into + 3, full_end // KEYS)
    tl.store(into + 4, least)
    tl.store(into + 5, most)
    tl.store(into + 6, full_start)
    tl.store(into + 7, full_end)


@triton.jit(do_not_specialize=["queries", "keys", "tiles", "key_tiles"])
def key_table(
    of_queries, stop, table, queries, keys, tiles, key_tiles,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t, b = tl.program_id(0), tl.program_id(1)
    left, right = t * KEYS, tl.minimum((t + 1) * KEYS, keys)
    of_queries += b.to(tl.int64) * tiles * 8
    first, last, full_first, full_last = tiles, 0, tiles, tiles
    for i in range(0, tiles, BLOCK):
        n = i + tl.arange(0, BLOCK)
        inside = n < tiles
        any_sees = inside & (tl.load(of_queries + 8 * n + 4, mask=inside, other=0) < right)
        any_sees &= tl.load(of_queries + 8 * n + 5, mask=inside, other=0) > left
        all_see = _all_see(of_queries, n, inside, left, right)
        first = tl.minimum(first, tl.min(tl.where(any_sees, n, tiles), 0))
        last = tl.maximum(last, tl.max(tl.where(any_sees, n + 1, 0), 0))
        full_first = tl.minimum(full_first, tl.min(tl.where(all_see, n, tiles), 0))
    for i in range(0, tiles, BLOCK):
        n = i + tl.arange(0, BLOCK)
        inside = n < tiles
        ends = inside & (n >= full_first) & (_all_see(of_queries, n, inside, left, right) == 0)
        full_last = tl.minimum(full_last, tl.min(tl.where(ends, n, tiles), 0))
    if stop is not None:
        j = left + tl.arange(0, KEYS)
        until = tl.load(stop + b.to(tl.int64) * keys + j, mask=j < right, other=0)
        last = tl.minimum(last, tl.cdiv(tl.max(until, 0), ROWS))
        full_last = tl.minimum(full_last, tl.min(tl.where(j < right, until, queries), 0) // ROWS)
    into = table + (b * key_tiles + t).to(tl.int64) * 4
    first = tl.minimum(first, tiles - 1)
    tl.store(into, first)
    tl.store(into + 1, tl.maximum(first, last))
    tl.store(into + 2, full_first)
    tl.store(into + 3, tl.maximum(full_first, full_last))


@triton.jit
def _all_see(of_queries, n, inside, left, right):
    """Whether all queries of these tiles see the keys [left, right)."""
    sees = inside & (tl.load(of_queries + 8 * n + 6, mask=inside, other=0) <= left)
    return sees & (tl.load(of_queries + 8 * n + 7, mask=inside, other=0) >= right)
