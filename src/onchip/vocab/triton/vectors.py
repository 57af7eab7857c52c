"""Kernels over the numbers of each token or id, each in the place of several of the framework's operations.

None as an argument: it is not wanted.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.vocab.rows.triton import divided
from onchip.vocab.triton import tiling
from onchip.vocab.triton.blocks import NO_LABEL

VECTOR = tl.constexpr(tiling.VECTOR)


@triton.jit(do_not_specialize=["T", "grad_stride"])
def loss_gradients(
    grad_loss,  # [T], or [] with a stride of 0; None: 1
    grad_stride,
    number,
    divisor,  # [] float32
    token_weight,  # [T] float32
    class_weight,  # [V] float32
    class_total,  # [] float32: their sum
    vectors,  # Vectors
    lse,  # [T] float32
    upstream,  # OutputGradients out: those by log_prob and, with a z-loss, lse; with class weights `even` and `rest`
    T,
    V,
    label_smoothing,
    z_loss,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradients by each token's log-probability and lse, of that by the loss."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if grad_loss is None:
        g = tl.full((BLOCK,), 1.0, tl.float32)
    else:
        g = tl.load(grad_loss + t.to(tl.int64) * grad_stride, mask=t < T, other=0.0).to(tl.float32)
    g = divided(g, number, divisor, MEAN)
    if token_weight is not None:
        g *= tl.load(token_weight + t, mask=t < T, other=0.0)
    by_log_prob = -g
    if class_weight is not None:
        at = tl.load(vectors.position + t, mask=t < T, other=-1)
        y = tl.load(vectors.label + at, mask=at >= 0, other=-1)
        w = tl.load(class_weight + y, mask=y >= 0, other=0.0)
        each, total = label_smoothing / V, tl.load(class_total)
        by_log_prob *= (1 - label_smoothing) * w + each * total
        if upstream.even is not None:
            tl.store(upstream.even + t, g * each, mask=t < T)
            tl.store(upstream.rest + t, g * each * (total - w), mask=t < T)
    tl.store(upstream.log_prob + t, by_log_prob, mask=t < T)
    if upstream.lse is not None:
        tl.store(upstream.lse + t, g * tl.load(lse + t, mask=t < T, other=0.0) * (2 * z_loss), mask=t < T)


@triton.jit
def loss_factor(
    grad_loss,  # []; None: 1
    number,
    divisor,  # [] float32
    factor,  # [] float32 out
    MEAN: tl.constexpr,
):
    """The gradient by the sum of the losses, of that by what `reduce_losses` made of them."""
    g = tl.full((), 1.0, tl.float32) if grad_loss is None else tl.load(grad_loss).to(tl.float32)
    tl.store(factor, divided(g, number, divisor, MEAN))


@triton.jit(do_not_specialize=["FIRST", "SIZE", "N"])
def chunk_numbers(
    number,
    numbers,  # [N, VECTOR] int32, the first of each out
    FIRST,
    SIZE,
    N,
    BLOCK: tl.constexpr,
):
    """How many positions of each chunk are of tokens: one of FIRST, and others of SIZE."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.where(i == 0, 0, FIRST + (i - 1) * SIZE)
    size = tl.where(i == 0, FIRST, SIZE)
    tl.store(numbers + i * VECTOR, tl.minimum(tl.maximum(tl.load(number) - before, 0), size), mask=i < N)


@triton.jit(do_not_specialize=["N"])
def sort_keys(
    label,  # [N] int32: of each id of a position; negative ones don't count
    number,
    key,  # [N] int32 out: NO_LABEL for those that don't count
    N,
    IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What labels are sorted by."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(label + i, mask=i < tl.minimum(tl.load(number) * IDS, N), other=-1)
    tl.store(key + i, tl.where(y < 0, NO_LABEL, y), mask=i < N)


@triton.jit(do_not_specialize=["N"])
def sort_labels(
    label,  # [N] int32: of each id of a position; negative ones don't count
    number,
    sorted_label,  # [N] int32 out: ascending, NO_LABEL at the end
    sorted_position,  # [N] int32 out: where each comes from; equal ones in their order
    N,
    IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """Sort by counting what comes before each: N^2 comparisons take less than a sort's launches up to some 10,000.

    Of an equal one it is known by the block whether it comes before, but for the block that has i itself: OTHERS is a
    multiple of BLOCK.  That makes two operations of a comparison instead of six.
    """
    last = tl.minimum(tl.load(number) * IDS, N)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(label + i, mask=i < last, other=-1)
    y = tl.where(y < 0, NO_LABEL, y)
    own = tl.program_id(0) * BLOCK // OTHERS * OTHERS
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, own, OTHERS):
        x = tl.load(label + start + tl.arange(0, OTHERS), mask=start + tl.arange(0, OTHERS) < last, other=-1)
        x = tl.where(x < 0, NO_LABEL, x)
        rank += tl.sum((x[None, :] <= y[:, None]).to(tl.int32), 1)
    j = own + tl.arange(0, OTHERS)
    x = tl.load(label + j, mask=j < last, other=-1)
    x = tl.where(x < 0, NO_LABEL, x)
    before = (x[None, :] < y[:, None]) | ((x[None, :] == y[:, None]) & (j[None, :] < i[:, None]))
    rank += tl.sum(before.to(tl.int32), 1)
    for start in range(own + OTHERS, N, OTHERS):  # what is beyond N is NO_LABEL: less than none
        x = tl.load(label + start + tl.arange(0, OTHERS), mask=start + tl.arange(0, OTHERS) < last, other=-1)
        x = tl.where(x < 0, NO_LABEL, x)
        rank += tl.sum((x[None, :] < y[:, None]).to(tl.int32), 1)
    tl.store(sorted_label + rank, y, mask=i < N)
    tl.store(sorted_position + rank, i, mask=i < N)
