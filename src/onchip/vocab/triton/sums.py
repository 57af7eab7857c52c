"""The kernels of gradients that forward computes up to factors: what it leaves, and what backward makes of it.

None as an argument: there is none.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import join_float, join_pair, split_float
from onchip.kernels.triton.tiles import PAIR_ROWS, upper_row
from onchip.vocab.triton.blocks import add_entries


@triton.jit(do_not_specialize=["begin", "slice_rows", "slices"])
def keep_hidden(
    sums,  # [slices * slice_rows, H] float32, by position
    order,
    count,
    into,  # [T, H] out, by token: float32, or the first 16 bits as int16
    digits,  # [T, H] uint8 out: the next 8 bits; None with float32
    begin,  # the position of the first sum
    slice_rows,
    slices,
    H,
    BLOCK: tl.constexpr,
):
    """Leave rows of hidden's gradient for backward, which scales and rounds them."""
    t = tl.program_id(0)
    if begin + t < tl.load(count):
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.zeros((BLOCK,), tl.float32)
        for i in range(slices):
            value += tl.load(sums + (t + i * slice_rows).to(tl.int64) * H + c, mask=c < H, other=0.0)
        at = tl.load(order + begin + t).to(tl.int64) * H + c
        if digits is None:
            tl.store(into + at, value, mask=c < H)
        else:
            first, more = split_float(value)
            tl.store(into + at, first, mask=c < H)
            tl.store(digits + at, more, mask=c < H)


@triton.jit
def scale_hidden(
    left,  # [T, H] what keep_hidden left, by token; the memory of out
    digits,
    weight,  # [V, H]
    position,
    label,  # [T * IDS] int32: a position's targets
    at_target,  # [T * IDS] float32
    row_scale,  # [T] float32, by position
    even,  # [T] float32, by position: what each logit's gradient lacks
    weight_sum,  # [H] float32, of the rows of weight
    inverse_grad_scale,
    out,  # [T, H] out, by token
    weight_stride_v,
    weight_stride_h,
    H,
    IDS: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make hidden's gradient of what forward left of it; 0 for ignored tokens."""
    t = tl.program_id(0)
    at = tl.load(position + t)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    where = t.to(tl.int64) * H + c
    inside = (c < H) & (at >= 0)
    value = tl.load(left + where, mask=inside, other=0)
    if digits is not None:
        value = join_float(value, tl.load(digits + where, mask=inside, other=0))
    value *= tl.load(row_scale + at, mask=at >= 0, other=0.0)
    if even is not None:
        value -= tl.load(even + at, mask=at >= 0, other=0.0) * tl.load(weight_sum + c, mask=c < H, other=0.0)
    value = add_entries(value, weight, label, at_target, at, c, weight_stride_v, weight_stride_h, H, IDS, OPERAND)
    if inverse_grad_scale is not None:
        value *= tl.load(inverse_grad_scale)
    tl.store(out + where, value, mask=c < H)


@triton.jit
def _store_scaled(at, value, there, ADD: tl.constexpr):
    if ADD:
        value += tl.load(at, mask=there, other=0.0)
    tl.store(at, value.to(at.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["first", "last"])
def scale_weight(
    left,  # [V, H] int16: the first 16 bits of a float32
    digits,  # [V, H] uint8: the next 8 bits; with PAIRED [pairs of rows, H]: the next 4 of both
    out,  # [V, H] out, or added to
    factor,  # [] float32
    first,  # rows of digits: the first, and the last and one
    last,
    V,
    H,
    PAIRED: tl.constexpr,
    ROUNDED: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make the weight's gradient of what forward left of it.  ROUNDED: with a factor of 1 that is the gradient."""
    scale = tl.load(factor)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if ROUNDED:
        last = tl.where(scale == 1, first, last)
    for row in range(first + tl.program_id(0), last, tl.num_programs(0)):
        more = tl.load(digits + tl.cast(row, tl.int64) * H + c, mask=c < H, other=0)
        if PAIRED:
            v = upper_row(row)
            at, there = v.to(tl.int64) * H + c, (c < H) & (v < V)
            also = there & (v + PAIR_ROWS < V)
            upper = tl.load(left + at, mask=there, other=0)
            lower = tl.load(left + at + PAIR_ROWS * H, mask=also, other=0)
            upper, lower = join_pair(upper, lower, more, ROUNDED)
            _store_scaled(out + at, upper * scale, there, ADD)
            _store_scaled(out + at + PAIR_ROWS * H, lower * scale, also, ADD)
        else:
            at = tl.cast(row, tl.int64) * H + c
            value = join_float(tl.load(left + at, mask=c < H, other=0), more)
            _store_scaled(out + at, value * scale, c < H, ADD)
