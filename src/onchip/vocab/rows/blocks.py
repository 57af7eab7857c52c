"""What the kernels over rows of logits have in common: where a row begins, its tiles, and the walk over them.

A tile is [R, LANES, UNIT]: UNIT elements side by side, of 16 bytes if rows are aligned to that; LANES of these, one for
each thread; and all that R times.  Running sums are kept lane by lane, [LANES], so that warps meet only at the end of a
row.
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
def walk(
    TAKE: tl.constexpr,  # a function
    known,
    state,
    row,
    stride,
    V,
    loops,
    POLICY: tl.constexpr,
    LOOP: tl.constexpr,
    STAGES: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    UNIT: tl.constexpr,
):
    """What TAKE(tile, first column, V, known, state, SIZE, LANES, UNIT, MASKED) makes of `state`, one tile of a row
    after the other: `loops` full ones and a last one, which is returned too."""
    if LOOP:
        for i in tl.range(0, loops, num_stages=STAGES):
            raw = read_tile(row, stride, i * TILE, V, TILE, LANES, UNIT, False, POLICY)
            state = TAKE(raw, i * TILE, V, known, state, TILE, LANES, UNIT, False)
    last = read_tile(row, stride, loops * TILE, V, TILE, LANES, UNIT, True, POLICY)
    return TAKE(last, loops * TILE, V, known, state, TILE, LANES, UNIT, True), last


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
def clear_row(row, stride, loops, V, TILE: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr):
    """Zeros in a row of the gradient."""
    steps, lanes = steps_of(TILE, LANES, UNIT), lanes_of(LANES, UNIT)
    zeros = tl.zeros([TILE // (LANES * UNIT), LANES, UNIT], row.dtype.element_ty)
    for i in range(loops):
        tl.store(row + (i * TILE + lanes + steps).to(tl.int64) * stride, zeros)
    first = loops * TILE
    tl.store(row + (first + lanes + steps).to(tl.int64) * stride, zeros, mask=steps < V - first - lanes)
