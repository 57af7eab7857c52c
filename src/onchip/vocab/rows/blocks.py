"""What the kernels over rows of logits have in common: where a row begins, its tiles, and the walk over them.

A tile is [R, LANES, UNIT]: UNIT elements side by side, of 16 bytes if rows allow it (see `part_in_units`); LANES of
these, one for each thread; and all that R times.  Running sums are kept lane by lane, [LANES], so that warps meet only
at the end of a row.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import tanh

# The logarithm of what is as good as 0: finite, so that its product with 0 is 0.
NOTHING = tl.constexpr(-1e30)


@triton.jit
def row_start(row, inner, outer_stride, inner_stride, UNIT: tl.constexpr):
    """Where a row begins, its number being (i, j) in two leading dimensions of which the last has size `inner`.

    The strides count UNIT elements: so the compiler knows that rows begin at multiples of so many.
    """
    i, j = tl.cast(row // inner, tl.int64), tl.cast(row % inner, tl.int64)
    return (i * outer_stride + j * inner_stride) * UNIT


@triton.jit
def part_in_units(
    base, row, inner, outer_stride, inner_stride, V, loops, UNIT: tl.constexpr, TILE: tl.constexpr, LINE: tl.constexpr
):
    """The part of a row that is read and written in whole units: where it begins, at which column of the row that is,
    its length, and its full tiles before the last one.

    Where LINE is 0 that is the whole row, from a multiple of UNIT on.  Else rows may begin anywhere, strides count
    elements, and the part begins at a multiple of LINE; before it are fewer than LINE columns, behind it fewer than
    UNIT.
    """
    if LINE:
        start = row_start(row, inner, outer_stride, inner_stride, 1)
        lines = (start + (LINE - 1)) // LINE
        head = (lines * LINE - start).to(tl.int32)
        length = (V - head) // UNIT * UNIT
        part = base + lines * LINE, head, length, (length - 1) // TILE
    else:
        part = base + row_start(row, inner, outer_stride, inner_stride, UNIT), 0, V, loops
    return part


@triton.jit
def lanes_of(LANES: tl.constexpr, UNIT: tl.constexpr):
    """[1, LANES, 1]: where the elements of a lane begin in a tile."""
    return (tl.arange(0, LANES) * UNIT)[None, :, None]


@triton.jit
def steps_of(SIZE: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr):
    """[R, 1, UNIT]: how far a lane's elements are from its first one; constants, as far as a thread is concerned."""
    return (tl.arange(0, SIZE // (LANES * UNIT)) * (LANES * UNIT))[:, None, None] + tl.arange(0, UNIT)[None, None, :]


@triton.jit
def read_tile(
    row, stride, first, V,
    SIZE: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """SIZE logits of a row from column `first` on; 0 from V on."""
    steps, lanes = steps_of(SIZE, LANES, UNIT), lanes_of(LANES, UNIT)
    at = row + (first + lanes + steps).to(tl.int64) * stride
    if MASKED:
        raw = tl.load(at, mask=steps < V - first - lanes, other=0.0, eviction_policy=POLICY)
    else:
        raw = tl.load(at, eviction_policy=POLICY)
    return raw


@triton.jit
def read_weights(
    class_weight, first, V, SIZE: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr
):
    """The weights of a tile's classes; 0 from V on."""
    steps, lanes = steps_of(SIZE, LANES, UNIT), lanes_of(LANES, UNIT)
    at = class_weight + first + lanes + steps
    return tl.load(at, mask=steps < V - first - lanes, other=0.0) if MASKED else tl.load(at)


@triton.jit
def take_ends(
    TAKE: tl.constexpr, known, state, part, stride, V, POLICY: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """As `walk`, of the columns before a row's part in units and behind it, one in a lane."""
    at, head, length, _ = part
    before = read_tile(at, stride, -head, 0, LANES, LANES, 1, True, POLICY)
    behind = read_tile(at, stride, length, V - head, LANES, LANES, 1, True, POLICY)
    state = TAKE(before, 0, head, known, state, LANES, LANES, 1, True)
    return TAKE(behind, head + length, V, known, state, LANES, LANES, 1, True)


@triton.jit
def walk(
    TAKE: tl.constexpr,  # a function
    known,
    state,
    part,  # of a row: see `part_in_units`
    stride,
    V,
    POLICY: tl.constexpr,
    LOOP: tl.constexpr,
    STAGES: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    UNIT: tl.constexpr,
    LINE: tl.constexpr,
):
    """What TAKE(tile, first column, V, known, state, SIZE, LANES, UNIT, MASKED) makes of `state`, one tile of a row
    after the other: full ones and a last one, which is returned too, and what is on either side of its part in units.
    V is the column where the tile ends, or sooner."""
    at, head, length, loops = part
    if LOOP:
        for i in tl.range(0, loops, num_stages=STAGES):
            raw = read_tile(at, stride, i * TILE, length, TILE, LANES, UNIT, False, POLICY)
            state = TAKE(raw, head + i * TILE, head + length, known, state, TILE, LANES, UNIT, False)
    last = read_tile(at, stride, loops * TILE, length, TILE, LANES, UNIT, True, POLICY)
    state = TAKE(last, head + loops * TILE, head + length, known, state, TILE, LANES, UNIT, True)
    if LINE:
        state = take_ends(TAKE, known, state, part, stride, V, POLICY, LANES)
    return state, last


@triton.jit
def squash(raw, inner_scale):
    x = raw.to(tl.float32)
    return x if inner_scale is None else tanh(x * inner_scale)


@triton.jit
def write_tile(
    row, stride, g, x, first, V, inner_scale,
    SIZE: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The gradient of a row's logits from column `first` on, of that by the final ones; x is what `squash` made."""
    steps, lanes = steps_of(SIZE, LANES, UNIT), lanes_of(LANES, UNIT)
    if inner_scale is not None:
        g *= 1 - x * x
    at = row + (first + lanes + steps).to(tl.int64) * stride
    g = g.to(row.dtype.element_ty)
    if MASKED:
        tl.store(at, g, mask=steps < V - first - lanes, eviction_policy="evict_first")
    else:
        tl.store(at, g, eviction_policy="evict_first")


@triton.jit
def clear_row(
    part, stride, V, TILE: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, LINE: tl.constexpr
):  # fmt: skip
    """Zeros in a row of the gradient, given its `part_in_units`."""
    at, head, length, loops = part
    steps, lanes = steps_of(TILE, LANES, UNIT), lanes_of(LANES, UNIT)
    zeros = tl.zeros([TILE // (LANES * UNIT), LANES, UNIT], at.dtype.element_ty)
    for i in range(loops):
        tl.store(at + (i * TILE + lanes + steps).to(tl.int64) * stride, zeros)
    first = loops * TILE
    tl.store(at + (first + lanes + steps).to(tl.int64) * stride, zeros, mask=steps < length - first - lanes)
    if LINE:
        lane = tl.arange(0, LANES)
        zero = tl.zeros([LANES], at.dtype.element_ty)
        tl.store(at + (lane - head) * stride, zero, mask=lane < head)
        tl.store(at + (length + lane) * stride, zero, mask=lane < V - head - length)
