"""Lowered masks compared pair by pair with the masks themselves, and the tables that kernels make from them, in the
emulator.
"""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from emulated import emulating
from onchip.attention.masks import bounded
from onchip.attention.problem import AttentionProblem
from onchip.attention.torch import arrays
from onchip.attention.triton import launches
from onchip.attention.triton.problem import TILE, entries_of, key_tile, tiles_of
from onchip.masks import Causal, Chunked, Documents, Full, Intervals, PrefixLM, Tree, Window
from onchip.ops.attention import reference, torch_op
from onchip.ops.attention.cases import KINDS, Drawn

TOKENS, HALF = 300, TILE // 2
# Starts or ends of which fall from one query to the next.
FALLING = ("rows that see nothing",)


def lowered(kind, drawn):
    return KINDS[kind].make(torch.as_tensor, drawn).lower(drawn.batch, drawn.queries, drawn.keys, torch.zeros(1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_normal_form_is_what_is_meant(kind):
    drawn = Drawn(2, 90, 90)
    low, right = lowered(kind, drawn), KINDS[kind].seen(drawn)
    made = reference.dense(low.start, low.end, low.stop, 90, low.blocks, low.tile)
    right = np.broadcast_to(right, (2, 90, 90))
    assert np.array_equal(np.broadcast_to(made, right.shape), right)


def test_masks_that_say_the_same_are_equal():
    ids = torch.arange(8)
    for make in (
        Causal,
        lambda: Window(np.int64(4)),
        lambda: Window(None, 3) & Causal(2),
        lambda: Documents(ids, padding=1) & Causal(),
        lambda: Chunked(4, Documents(ids)),
    ):
        assert make() == make()
        assert hash(make()) == hash(make())
    assert Window(4) == Window(np.int64(4))
    different = [Causal(), Causal(1), Full(), Window(0), Documents(ids), Documents(ids.clone()), Documents(ids, 1)]
    assert len(set(different)) == len(different)
    traced = []
    step = jax.jit(lambda x, mask: traced.append(mask) or x, static_argnums=1)
    for mask in (Causal(), Causal(), Causal(3)):
        step(jnp.zeros(1), mask)
    assert len(traced) == 2


MOST = 2**31 - 1
FAR = 10**30
BOUNDS = (None, -FAR, -(2**63), -9, -3, 0, 2, 7, 2**31, FAR)
BANDS = [Causal(offset) for offset in BOUNDS[1:]] + [
    Window(left, right, offset) & also
    for left, right in product(BOUNDS, BOUNDS)
    if left is None or right is None or left + right >= 0
    for offset in (-FAR, -4, 0, 3, FAR)
    for also in (Full(), Causal(1))
]


@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (1, 1), (5, 9), (9, 4), (6, 0)])
def test_a_band_is_two_numbers(queries, keys):
    for mask in BANDS:
        low, at = mask.lower(1, queries, keys, torch.zeros(1)), torch.arange(queries)
        assert all(abs(n) <= 2**30 for n in bounded(mask.band()))
        for n, right in zip(bounded(mask.band()), (low.start, low.end), strict=True):
            assert torch.equal((n + at).clip(0, keys), right[0].long()), mask


@pytest.mark.parametrize("array", [torch.as_tensor, jnp.asarray])
def test_large_numbers_and_small_dtypes(array):
    """Nothing is too large for 32 bits, and what a dtype can't hold isn't clipped to."""
    tokens, like = 300, array(np.zeros(1, np.float32))
    at, starts = np.arange(tokens), np.arange(tokens) // 200 * 200
    ends = np.minimum(starts + 200, tokens)
    documents = Documents(array(at // 200))
    for mask, start, end in (
        (Chunked(MOST, documents), starts, ends),
        (Chunked(2**40), at * 0, at * 0 + tokens),
        (Chunked(3, offset=FAR), at * 0 + tokens, at * 0 + tokens),
        (Chunked(3, offset=2), (at + 2) // 3 * 3, ((at + 2) // 3 * 3 + 3).clip(0, tokens)),
        (PrefixLM(array(np.full((1, tokens), MOST, np.int32)), documents), starts, ends),
    ):
        low = mask.lower(1, tokens, tokens, like)
        assert np.array_equal(low.start[0], start.clip(0, tokens)), mask
        assert np.array_equal(low.end[0], end), mask
    low = Documents(array(np.array([True, True, False, True])), padding=0).lower(1, 4, 4, like)
    assert low.end.tolist() == [[2, 2, 2, 4]]
    for dtype in (np.int8, np.uint8):
        hundred = array(np.full(tokens, 100, dtype))
        low = Intervals(hundred * 0, hundred, hundred).lower(1, tokens, tokens, like)
        assert all(bool((x == 100).all()) for x in (low.end, low.stop))
        low = Tree(hundred).lower(1, tokens, tokens, like)
        assert bool((low.stop == 100).all())
        for padding in (256, -1, 2**40, 2**32):  # none of the ids
            ids = array(np.array([0, 0, 127, 127], dtype))
            low = Documents(ids, padding).lower(1, 4, 4, like)
            assert bool((low.end > low.start).all()), padding
    if array is jnp.asarray:  # PyTorch has hardly any operations for these
        far = array(np.full(tokens, 2**32 - 1, np.uint32))
        low = (Intervals(far * 0, far, far) & Causal()).lower(1, tokens, tokens, like)
        assert np.array_equal(low.end[0], at + 1)
        assert np.array_equal(low.stop[0], at * 0 + tokens)
    short = torch_op._as_kernels_read(Intervals(*torch.full((2, 1, tokens), 100, dtype=torch.int8)))
    assert all(x.dtype == torch.int32 and bool((x == 100).all()) for x in short[:2])


@pytest.mark.parametrize("mask", [Full(), Causal(-3), Window(70, 2, 9), Window(FAR, -FAR, FAR), Window(-FAR, FAR)])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (130, 300)])
def test_a_band_is_written_as_it_is_lowered(mask, queries, keys):
    p, low = AttentionProblem(1, queries, keys, 1, 1, 64, 64), mask.lower(1, queries, keys, torch.zeros(1))
    made = []
    for start, end, band in ((low.start, low.end, ()), (None, None, bounded(mask.band()))):
        start, end = (torch.full((1, queries), -7, dtype=torch.int32) if x is None else x for x in (start, end))
        table, counter = (torch.full(n, -7, dtype=torch.int32) for n in ((1, entries_of(queries), 8), (1,)))
        with emulating():
            launches.query_table(p, launches.Masked(start, end, None, table, None), counter, band).run()
        made.append((start, end, table, counter))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def tables(kind):
    """What is seen with and without a stop, the table of queries with the stops of each tile, and those of keys."""
    low = lowered(kind, Drawn(2, TOKENS, TOKENS))
    start, end = (x.expand(2, -1).contiguous() for x in (low.start, low.end))
    stop = None if low.stop is None else low.stop.expand(2, -1).contiguous()

    def numbers(*shape):
        return torch.full(shape, -7, dtype=torch.int32)

    stops = None if stop is None else numbers(2, tiles_of(TOKENS), 2)
    mask = launches.Masked(start, end, stop, numbers(2, entries_of(TOKENS), 8), stops)
    problems = [AttentionProblem(2, TOKENS, TOKENS, 1, 1, size, size) for size in (64, 256)]
    of_keys = {key_tile(p): numbers(2, tiles_of(TOKENS, key_tile(p)), 4) for p in problems}
    counter = numbers(1)
    with emulating():
        launches.query_table(problems[0], mask, counter).run()
        for p in problems:
            launches.key_table(p, mask, of_keys[key_tile(p)]).run()
    assert counter.item() == 0
    seen = [reference.dense(start, end, x, TOKENS) for x in (stop, None)]
    return *seen, mask, of_keys


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "blocked"])
def test_tables(kind):
    """All that a tile sees is in its range, and all see what is in the full one."""
    seen, without_stop, mask, of_keys = tables(kind)
    at = np.arange(TOKENS)
    for b in range(2):
        for n, (first, last, full_first, full_last, *_) in enumerate(mask.table[b].tolist()):
            rows = without_stop[b, n * HALF : (n + 1) * HALF]
            there = (first * TILE <= at) & (at < last * TILE)
            full = (full_first * TILE <= at) & (at < full_last * TILE)
            assert not rows[:, ~there].any()
            assert rows[:, full].all()
            if rows.any():
                assert np.flatnonzero(rows.any(0))[[0, -1]].tolist() == [
                    mask.table[b, n, 4], mask.table[b, n, 5] - 1
                ]  # fmt: skip
        tiles = [(size, n, x) for size, table in of_keys.items() for n, x in enumerate(table[b].tolist())]
        for size, n, (first, last, full_first, full_last) in tiles:
            columns = seen[b, :, n * size : (n + 1) * size]
            there = (first * HALF <= at) & (at < last * HALF)
            full = (full_first * HALF <= at) & (at < full_last * HALF)
            assert not columns[~there].any()
            assert columns[full].all()
            sees = np.add.reduceat(columns.any(1), np.arange(0, TOKENS, HALF)) > 0
            if mask.stop is None and kind not in FALLING and sees.any():
                assert [first, last - 1] == np.flatnonzero(sees)[[0, -1]].tolist()
        if mask.stops is not None:
            parts = [mask.stop[b, n * TILE : (n + 1) * TILE] for n in range(tiles_of(TOKENS))]
            assert mask.stops[b].tolist() == [[int(x.min()), int(x.max())] for x in parts]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2, 257])
def test_runs(rows, tokens):
    """Of one token, of all, and any others, in rows that end and begin with the same id or not."""
    ids = torch.randint(2, (rows, tokens)).cumsum(-1)
    for x in (ids, ids * 0, torch.arange(tokens).expand(rows, -1), ids.flip(-1) << 33):
        start, end = arrays.KNOWN["torch"].runs(x)
        assert start.dtype == end.dtype == torch.int32
        for b, row in enumerate(x.tolist()):
            for i, (s, e) in enumerate(zip(start[b].tolist(), end[b].tolist(), strict=True)):
                assert s <= i < e
                assert set(row[s:e]) == {row[i]}
                assert s == 0 or row[s - 1] != row[i]
                assert e == tokens or row[e] != row[i]
