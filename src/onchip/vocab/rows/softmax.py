"""The running softmax of a row of logits, which its tiles join one after the other; the kernels for several ids and for
soft labels share it.

Sums are kept lane by lane, [LANES], relative to the lane's largest logit; x, z, k and k2 are those of triton.py.  A
state is (top, total, below, moments, column): the largest x; the sum of exp(z - z of top); the same without those above
LEADING; the sum of exp(z - z of top) * (z - z of top) * log2(e), for the entropy; and the first column of top.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LEADING, LOG2E, LOWEST
from onchip.vocab.rows.blocks import NOTHING, lanes_of, squash, steps_of

NO_COLUMN = tl.constexpr(2**31 - 1)


@triton.jit
def nothing_yet(LANES: tl.constexpr):
    """A state before the first tile."""
    zeros = tl.zeros([LANES], tl.float32)
    return tl.full([LANES], LOWEST, tl.float32), zeros, zeros, zeros, tl.full([LANES], NO_COLUMN, tl.int32)


@triton.jit
def logits_of(
    raw, first, V, inner_scale, SIZE: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr
):
    """x of a tile; -inf from V on."""
    x = squash(raw, inner_scale)
    if MASKED:
        x = tl.where(steps_of(SIZE, LANES, UNIT) < V - first - lanes_of(LANES, UNIT), x, float("-inf"))
    return x


@triton.jit
def first_largest(x, first, top, column, SIZE: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr):
    """[LANES]: the largest number so far and its first column, with a tile from column `first` on."""
    largest = tl.max(tl.max(x, 2), 0)
    columns = first + lanes_of(LANES, UNIT) + steps_of(SIZE, LANES, UNIT)
    at = tl.where(x == largest[None, :, None], columns, NO_COLUMN)
    here = tl.min(tl.min(at, 2), 0)
    sooner = (largest > top) | ((largest == top) & (here < column))
    return tl.maximum(top, largest), tl.where(sooner, here, column)


@triton.jit
def join(
    x, first, k2, state, entropy, top1,
    SIZE: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The state with a tile of x in it; (z - z of top) * log2(e) of the tile, and its exponentials; and how far top
    fell behind, and what that made of older sums.  entropy, top1: None where they aren't wanted."""
    top, total, below, moments, column = state
    if top1 is not None:
        new_top, column = first_largest(x, first, top, column, SIZE, LANES, UNIT)
    else:
        new_top = tl.maximum(top, tl.max(tl.max(x, 2), 0))
    drop = tl.maximum((top - new_top) * k2, NOTHING)
    decay = tl.exp2(drop)
    d = (x - new_top[None, :, None]) * k2
    e = tl.exp2(d)
    if entropy is not None:
        # p log p is 0 at p = 0, and 0 * -inf is not.
        moments = decay * (moments + total * drop) + tl.sum(tl.sum(e * tl.maximum(d, NOTHING), 2), 0)
    # What was largest so far is below the new one.
    below = tl.where(drop < 0, total, below) * decay + tl.sum(tl.sum(tl.where(e > LEADING, 0.0, e), 2), 0)
    total = total * decay + tl.sum(tl.sum(e, 2), 0)
    return (new_top, total, below, moments, column), d, e, drop, decay


@triton.jit
def meet(k2, state):
    """The lanes' sums together: a state of one number each, the moment divided by log2(e), and how far each lane's top
    is behind."""
    top, total, below, moments, column = state
    best = tl.max(top, 0)
    drop = tl.maximum((top - best) * k2, NOTHING)
    decay = tl.exp2(drop)
    moment = tl.sum(decay * (moments + total * drop), 0) / LOG2E
    first = tl.min(tl.where(top == best, column, NO_COLUMN), 0)
    below = tl.sum(tl.where(drop < 0, total, below) * decay, 0)
    return (best, tl.sum(total * decay, 0), below, moment, tl.where(first == NO_COLUMN, -1, first)), drop
