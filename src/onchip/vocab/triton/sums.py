"""The kernels of gradients that forward computes up to factors: what it leaves, and what backward makes from that.

None as an argument means: there is none.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import join_float, join_pair, split_float
from onchip.kernels.triton.tiles import PAIR_ROWS, upper_row
from onchip.vocab.triton.blocks import add_entries


@triton.jit(do_not_specialize=["keeps", "scales", "begin", "kept", "slices", "slice_rows", "ids"])
def hidden_rows(
    sums,  # [slices * slice_rows, H] float32, by position from `begin` on
    left,  # [T, H] by token: float32, or the first 16 bits as int16; the memory of out
    digits,  # [T, H] uint8: the next 8 bits; None with float32
    weight,  # [V, H]
    position,
    order,
    count,
    label,  # [T * ids] int32: a position's targets
    at_target,  # [T * ids] float32
    row_scale,  # [T] float32, by position
    even,  # [T] float32, of positions before `kept`: what each logit's gradient lacks
    weight_sum,  # [H] float32, of the rows of weight
    inverse_grad_scale,
    out,  # [T, H] out, by token
    weight_stride_v,
    weight_stride_h,
    H,
    keeps,
    scales,
    begin,  # a position
    kept,
    slices,  # of the sums of positions from `kept` on
    slice_rows,
    ids,  # targets of a position whose terms aren't in the sums yet
    OPERAND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of hidden's gradient.  With `keeps`, of positions: their sums are left for backward, which scales and rounds
    them; else of all tokens, 0 for ignored ones: what was left is scaled, with `scales`, or the sums are rounded.
    """
    i = tl.program_id(0)
    at = begin + i
    if keeps == 0:
        at = tl.load(position + i)
    here = (at >= 0) & (at < tl.load(count))
    token = tl.load(order + at, mask=here & (keeps != 0), other=i).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (c < H) & here
    where = token * H + c
    value = tl.zeros((BLOCK,), tl.float32)
    for k in range(tl.where(scales != 0, 0, tl.where(at >= kept, slices, 1))):
        value += tl.load(sums + (at - begin + k * slice_rows).to(tl.int64) * H + c, mask=inside, other=0.0)
    if left is not None:
        before = tl.load(left + where, mask=inside & (scales != 0), other=0)
        if digits is not None:
            before = join_float(before, tl.load(digits + where, mask=inside & (scales != 0), other=0))
        value += before * tl.load(row_scale + at, mask=here & (scales != 0), other=0.0)
    if keeps != 0:
        if digits is not None:
            first, more = split_float(value)
            tl.store(left + where, first, mask=inside)
            tl.store(digits + where, more, mask=inside)
        elif left is not None:
            tl.store(left + where, value, mask=inside)
    else:
        if even is not None:
            e = tl.load(even + at, mask=here & (at < kept), other=0.0)
            value -= e * tl.load(weight_sum + c, mask=inside & (at < kept), other=0.0)
        if at_target is not None:
            value = add_entries(
                value, weight, label, at_target, at, c, weight_stride_v, weight_stride_h, H, ids, OPERAND
            )
        if inverse_grad_scale is not None:
            value *= tl.load(inverse_grad_scale)
        tl.store(out + where, value, mask=c < H)


@triton.jit(do_not_specialize=["begin", "slices", "slice_rows", "ids"])
def shard_rows(
    sums,  # [slices * slice_rows, H] float32, by position from `begin` on: of this shard's softmax
    share,  # [T] float32, by token: what this shard has of the whole softmax
    weight,  # [V, H]
    order,
    count,
    label,  # [T * ids] int32: a position's targets
    at_target,  # [T * ids] float32
    row_scale,  # [T] float32, by position
    even,  # [T] float32: what each logit's gradient lacks
    weight_sum,  # [H] float32, of the rows of weight
    inverse_grad_scale,
    factor,  # [] float32: what all is multiplied by
    out,  # [T, H] out, by token
    weight_stride_v,
    weight_stride_h,
    H,
    begin,  # a position
    slices,
    slice_rows,
    ids,
    OPERAND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of what hidden's gradient has of a shard, of positions, rounded."""
    i = tl.program_id(0)
    at = begin + i
    if at < tl.load(count):
        token = tl.load(order + at).to(tl.int64)
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.zeros((BLOCK,), tl.float32)
        for k in range(slices):
            value += tl.load(sums + (i + k * slice_rows).to(tl.int64) * H + c, mask=c < H, other=0.0)
        value *= tl.load(row_scale + at) * tl.load(share + token)
        if even is not None:
            value -= tl.load(even + at) * tl.load(weight_sum + c, mask=c < H, other=0.0)
        value = add_entries(value, weight, label, at_target, at, c, weight_stride_v, weight_stride_h, H, ids, OPERAND)
        if inverse_grad_scale is not None:
            value *= tl.load(inverse_grad_scale)
        tl.store(out + token * H + c, value * tl.load(factor), mask=c < H)


@triton.jit(do_not_specialize=["N"])
def scale_rounded(x, factor, N, BLOCK: tl.constexpr):
    """Multiply N numbers by a factor, [] float32, in float32; one of 1 leaves them."""
    scale = tl.load(factor).to(tl.float32)
    for block in range(tl.program_id(0), tl.where(scale == 1, 0, tl.cdiv(N, BLOCK)), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < N, other=0).to(tl.float32) * scale
        tl.store(x + at, value.to(x.dtype.element_ty), mask=at < N)


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
            v = upper_row(tl.cast(row, tl.int32))
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
