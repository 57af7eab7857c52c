"""The units of work in apart.py, whose kernel no CPU can run: functions of numbers, and a product made by them."""

from types import FunctionType, SimpleNamespace

import numpy as np
import pytest

from onchip.vocab.triton import apart, blocks, tiling

TILE, STEP, VOCAB_TILE = 128, 64, 256
NUMBERS = SimpleNamespace(cdiv=lambda a, b: -(-a // b), minimum=min, maximum=max, where=lambda c, a, b: a if c else b)


def of_numbers(kernel):
    """A function of a kernel's, to be called with numbers."""
    constants = {name: x.value for name, x in kernel.fn.__globals__.items() if hasattr(x, "value")}
    others = {
        name: of_numbers(kernel.fn.__globals__[name])
        for name in ("find_unit", "row_number")
        if name in kernel.fn.__globals__ and name != kernel.fn.__name__
    }
    return FunctionType(kernel.fn.__code__, {**constants, **others, "gl": NUMBERS, "tl": NUMBERS})


count_units, choose_cut, place = (of_numbers(x) for x in (apart.count_units, apart.choose_cut, apart.place))
buffer_row = of_numbers(blocks.buffer_row)


def cut_work(rows, hidden, steps, slices, programs):
    """As `apart.hidden_apart` does it."""
    units = count_units(rows, hidden)
    rest = units % programs
    return rows, units - rest, rest, choose_cut(units, min(steps, slices), programs), steps


def items(work):
    return range(work[1] + work[2] * work[3])


@pytest.mark.parametrize("hidden", [8, 128, 136, 256, 576, 640, 1024, 1152, 4096])
def test_each_block_has_each_step_once(hidden):
    columns = -(-hidden // TILE)
    for rows in (0, 1, 2, 3, 6, 7, 64):
        for slices, steps, programs in ((1, 4, 132), (2, 8, 132), (2, 4, 5), (4, 96, 132), (26, 12, 132), (3, 40, 7)):
            work = cut_work(rows, hidden, steps, slices, programs)
            assert work[3] <= min(slices, steps)
            taken = np.zeros((rows + 1, columns, steps), int)
            for item in items(work):
                wide, i, j, s, begin, end = place(item, work, hidden)
                assert begin < end
                assert 0 <= s < work[3]
                assert s == 0 or item >= work[1]
                taken[i, j, begin:end] += 1
                taken[i + 1 - wide, j + wide, begin:end] += 1
            assert (taken[:rows] == 1).all()  # what is past the last row is not stored


@pytest.mark.parametrize("hidden", [128, 576, 640, 1152])
def test_the_planner_counts_the_same_units_and_slices(hidden):
    for rows in (1, 2, 5, 8, 23, 64, 200):
        units = tiling.hidden_units(rows, hidden, True)
        assert count_units(rows, hidden) == units
        for most in (1, 2, 4, 9):
            cut = tiling.hidden_cut(units, most, 132)
            assert choose_cut(units, most, 132) == cut
            work = cut_work(rows, hidden, 1000, most, 132)
            waves = work[1] // 132 + -(-work[2] * cut // 132) / cut
            evenness = tiling.hidden_evenness(rows, hidden, True, most)
            padded = units * TILE * 256 / (rows * TILE * hidden)
            assert evenness == pytest.approx(padded * waves * 132 / units)


@pytest.mark.parametrize("hidden", [128, 136, 576])
@pytest.mark.parametrize(("tokens", "slices", "apart_by"), [(300, 1, 0), (300, 2, 0), (300, 4, 300), (520, 2, 640)])
def test_the_product(hidden, tokens, slices, apart_by):
    """Of positions in three places, with rows between them that nobody may read."""
    rng = np.random.default_rng(0)
    vocab, first_tile, tiles = 700, 1, 2
    padded = -(-tokens // TILE) * TILE
    in_gradient, in_scratch = 128, 128
    in_third = padded - in_gradient - in_scratch
    scratch_row = 7 + 3 * 200 + 50
    third_row = scratch_row + 3 * in_scratch + 30
    rows = third_row + tiles * in_third
    of_addresses = [blocks.odd(x) for x in (rows, 7, scratch_row, third_row)]
    rows_, weight_grad_row, scratch_row_, third_row_ = of_addresses
    buffer = blocks.BufferRows(rows_, weight_grad_row, 200, in_gradient, scratch_row_, in_scratch, third_row_, in_third)
    matrix = np.full((rows, VOCAB_TILE), np.nan)
    values = rng.standard_normal((padded, tiles * VOCAB_TILE))
    values[:, vocab - first_tile * VOCAB_TILE :] = 0
    for tile in range(tiles):
        for t in range(0, padded, TILE):
            row = buffer_row(first_tile + tile, t, buffer, first_tile)
            matrix[row : row + TILE] = values[t : t + TILE, tile * VOCAB_TILE : (tile + 1) * VOCAB_TILE]
    weight = np.zeros((3 * VOCAB_TILE, hidden + 2 * TILE))  # with what TMA reads as 0
    weight[:vocab, :hidden] = rng.standard_normal((vocab, hidden))

    work = cut_work(-(-tokens // TILE), hidden, tiles * VOCAB_TILE // STEP, slices, 7)
    out = np.zeros((tokens + (slices - 1) * apart_by, hidden))
    for item in items(work):
        wide, i, j, s, begin, end = place(item, work, hidden)
        acc = np.zeros((2, TILE, TILE))
        for k in range(begin, end):
            tile, c = first_tile + k // 4, k % 4 * STEP
            v = first_tile * VOCAB_TILE + k * STEP
            row, row_2 = (buffer_row(tile, x * TILE, buffer, first_tile) for x in (i, min(i + 1, work[0] - 1)))
            right = weight[v : v + STEP, (j + wide) * TILE :][:, :TILE]
            middle = weight[v : v + STEP, j * TILE :][:, :TILE] if wide else matrix[row_2 : row_2 + TILE, c : c + STEP]
            block = matrix[row : row + TILE, c : c + STEP], middle, right
            acc += block[0] @ block[2 - wide], block[1 - wide] @ block[2]
        for part, t, h in ((0, i * TILE, j * TILE), (1, (i + 1 - wide) * TILE, (j + wide) * TILE)):
            height, width = max(0, min(TILE, tokens - t)), max(0, min(TILE, hidden - h))
            out[t + s * apart_by :][:height, h : h + width] += acc[part, :height, :width]
    total = sum(out[s * apart_by :][:tokens] for s in range(slices if apart_by else 1))
    np.testing.assert_allclose(total, values[:tokens] @ weight[first_tile * VOCAB_TILE :, :hidden], atol=1e-9)
