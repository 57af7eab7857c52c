"""What kernels need of masks, against what is seen pair by pair: which queries see a key, and tiles."""

import numpy as np
import pytest
import torch

from onchip.attention import ranges
from onchip.attention.masks import Blocked, arrays_of
from onchip.ops.attention import reference
from onchip.ops.attention.cases import KINDS, Drawn

DRAWN = Drawn(2, 90, 90)
TILE = 16


def lowered(kind):
    mask = KINDS[kind].make(torch.as_tensor, DRAWN)
    return mask.lower(DRAWN.batch, DRAWN.queries, DRAWN.keys, torch.zeros(1))


def seen(kind):
    return np.broadcast_to(KINDS[kind].seen(DRAWN), (DRAWN.batch, DRAWN.queries, DRAWN.keys))


@pytest.mark.parametrize("kind", KINDS)
def test_the_normal_form_is_what_is_meant(kind):
    low = lowered(kind)
    made = reference.dense(low.start, low.end, low.stop, DRAWN.keys, low.blocks, low.tile)
    assert np.array_equal(np.broadcast_to(made, seen(kind).shape), seen(kind))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("blocked",)])
def test_the_queries_of_a_key(kind):
    low, right = lowered(kind), seen(kind)
    first, last = (x.expand(2, -1).numpy() for x in ranges.of_keys(arrays_of(low.start), low, DRAWN.keys))
    i = np.arange(DRAWN.queries)[:, None]
    made = (first[:, None] <= i) & (i < last[:, None])
    assert (made | ~right).all()  # nothing that is seen is left out
    if low.stop is None and (low.end > low.start).all():
        assert np.array_equal(made, right)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", ["queries", "keys"])
def test_tiles(kind, of):
    """All that a tile sees is in its range, all see what is in the full one, and neither is wider than it must be."""
    low, right = lowered(kind), seen(kind)
    arrays = arrays_of(low.start)
    if of == "queries":
        tiles = ranges.query_tiles(arrays, low, TILE)
    else:
        tiles = ranges.key_tiles(arrays, low, DRAWN.keys, TILE)
        right = right.swapaxes(1, 2)
    first, last, full_first, full_last = (x.expand(2, -1).numpy() for x in tiles)
    j = np.arange(90)
    for b in range(2):
        for n in range(-(-90 // TILE)):
            rows = right[b, n * TILE : (n + 1) * TILE]
            there = (first[b, n] <= j) & (j < last[b, n])
            full = (full_first[b, n] <= j) & (j < full_last[b, n])
            assert not rows[:, ~there].any()
            assert rows[:, full].all()
            plain = low.stop is None and low.blocks is None and kind != "rows that see nothing"
            if plain and of == "queries" and rows.any():
                assert np.flatnonzero(rows.any(0))[[0, -1]].tolist() == [first[b, n], last[b, n] - 1]
                assert np.array_equal(full, rows.all(0))


def test_a_block_mask_has_no_full_tiles():
    low = Blocked(torch.ones(6, 6, dtype=torch.bool), TILE).lower(1, 90, 90, torch.zeros(1))
    tiles = ranges.query_tiles(arrays_of(low.start), low, TILE)
    assert torch.equal(tiles.full_first, tiles.full_last)
