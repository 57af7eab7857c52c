"""Kernels over the numbers of each token or id; each replaces several of the framework's operations.

None as an argument means: not wanted.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LOG2E, log1p, loss_of_lse, loss_of_target, slope_of_lse
from onchip.vocab.rows.triton import divided
from onchip.vocab.triton.blocks import NO_LABEL


@triton.jit(do_not_specialize=["T", "grad_stride", "given", "mean", "mean_of_sum"])
def loss_gradients(
    grad_loss,  # [T], or [] with a stride of 0
    grad_stride,
    number,
    divisor,  # [] float32
    token_weight,  # [T] float32
    class_weight,  # [V] float32
    class_total,  # [] float32: their sum
    vectors,  # Vectors
    lse,  # [T] float32
    upstream,  # OutputGradients out: those by log_prob and, with a z-loss, lse; with class weights `even` and `rest`
    of_sum,  # [] float32 out: the gradient by the sum of the losses
    T,
    V,
    loss_terms,  # LossTerms
    given,  # whether there is a `grad_loss`; else it is 1
    mean,  # whether the losses are divided, and for `of_sum`
    mean_of_sum,
    BLOCK: tl.constexpr,
):
    """The gradients by each token's log-probability and lse, of that by the loss."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(grad_loss + t.to(tl.int64) * grad_stride, mask=(t < T) & (given != 0), other=0.0).to(tl.float32)
    g = tl.where(given != 0, g, 1.0)
    by_mean = divided(g, number, divisor, True)
    if tl.program_id(0) == 0:
        tl.store(of_sum + t, tl.where(mean_of_sum != 0, by_mean, g), mask=t == 0)
    g = tl.where(mean != 0, by_mean, g)
    if token_weight is not None:
        g *= tl.load(token_weight + t, mask=t < T, other=0.0)
    by_log_prob = -g
    if class_weight is not None:
        at = tl.load(vectors.position + t, mask=t < T, other=-1)
        y = tl.load(vectors.label + at, mask=at >= 0, other=-1)
        w = tl.load(class_weight + y, mask=y >= 0, other=0.0)
        smoothing = loss_terms.label_smoothing
        each, total = smoothing / V, tl.load(class_total)
        by_log_prob *= (1 - smoothing) * w + each * total
        if upstream.even is not None:
            tl.store(upstream.even + t, g * each, mask=t < T)
            tl.store(upstream.rest + t, g * each * (total - w), mask=t < T)
    tl.store(upstream.log_prob + t, by_log_prob, mask=t < T)
    if upstream.lse is not None:
        tl.store(upstream.lse + t, g * tl.load(lse + t, mask=t < T, other=0.0) * slope_of_lse(loss_terms), mask=t < T)


@triton.jit(do_not_specialize=["stride", "T", "ranks", "rank", "most", "vocab"])
def combine_shards(
    gathered,  # [ranks, stride] float32: of each rank HEADER numbers, of which the first int32 are its shard's first
    # entry and how many it has; from there on its lse of each token, and from the middle of the rest on what its shard
    # gives the target's log-probability
    position,  # [T] int32: -1 for ignored ones
    ids,  # [T] int64, as the whole vocabulary numbers them
    token_weight,  # [T] float32: of the losses
    known,  # TokenSoftmax out: lse, log_prob and the weighted loss, 0 for ignored tokens
    share,  # [T] float32 out: what this rank's shard has of the softmax
    loss_terms,  # LossTerms
    stride,
    T,
    ranks,
    rank,
    most,  # entries of each shard but the last ones
    vocab,
    HEADER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The softmax over all shards; NaN where these aren't what each rank takes them for."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counts = (t < T) & (tl.load(position + t, mask=t < T, other=-1) >= 0)
    y = tl.load(ids + t, mask=counts, other=0)
    half = (stride - HEADER) // 2
    wrong = (y < 0) | (y >= vocab)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    lead = tl.zeros((BLOCK,), tl.int32)
    for r in range(ranks):
        row = gathered + tl.cast(r, tl.int64) * stride
        start = tl.load(row).to(tl.int32, bitcast=True)
        rows = tl.load(row + 1).to(tl.int32, bitcast=True)
        wrong |= (start != r * most) | (rows != tl.minimum(most, vocab - r * most))
        x = tl.load(row + HEADER + t, mask=counts, other=0.0)
        lead = tl.where(x > top, r, lead)
        top = tl.maximum(top, x, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(top == float("-inf"), 0.0, top)
    others = tl.zeros((BLOCK,), tl.float32)
    own = tl.zeros((BLOCK,), tl.float32)
    of_target = tl.zeros((BLOCK,), tl.float32)
    for r in range(ranks):
        at = gathered + tl.cast(r, tl.int64) * stride + HEADER + t
        x = tl.load(at, mask=counts, other=0.0)
        below = x - base
        others += tl.where(lead == r, 0.0, tl.exp2(below * LOG2E))
        own = tl.where(r == rank, below, own)
        log_prob = tl.load(at + half, mask=counts, other=0.0)
        # Where all of a shard is out of the vocabulary, what it says of itself is NaN.
        of_target = tl.where(y // most == r, tl.where(x == float("-inf"), x, log_prob + below), of_target)
    # log1p: where one shard has nearly all, the others' part keeps its digits.
    log_total = log1p(others)
    lse, of_target = top + log_total, of_target - log_total
    loss = loss_of_target(loss_terms, of_target) + loss_of_lse(loss_terms, lse)
    if token_weight is not None:
        loss *= tl.load(token_weight + t, mask=counts, other=0.0)
    nan = float("nan")
    tl.store(known.lse + t, tl.where(counts, tl.where(wrong, nan, lse), 0.0), mask=t < T)
    tl.store(known.log_prob + t, tl.where(counts, tl.where(wrong, nan, of_target), 0.0), mask=t < T)
    tl.store(known.loss + t, tl.where(counts, tl.where(wrong, nan, loss), 0.0), mask=t < T)
    tl.store(share + t, tl.where(wrong, nan, tl.exp2((own - log_total) * LOG2E)), mask=counts)


@triton.jit(do_not_specialize=["N", "start", "rows", "vocab", "ignore_index"])
def number_ids(
    ids,  # [N], as the whole vocabulary numbers them
    out,  # [N] int64 out, as the shard does
    header,  # [2] int32 out: where the shard begins, and how many entries it has; None: not wanted
    start,
    rows,
    vocab,
    ignore_index,
    N,
    ELSEWHERE: tl.constexpr,  # in place of an id that another shard has, one that is ignored, and one out of range
    IGNORED: tl.constexpr,
    BAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Number ids as a shard of the vocabulary does."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(ids + i, mask=i < N, other=0).to(tl.int64)
    here = tl.where((y >= start) & (y < start + rows), y - start, ELSEWHERE)
    here = tl.where((y < 0) | (y >= vocab), BAD, here)
    tl.store(out + i, tl.where(y == ignore_index, IGNORED, here), mask=i < N)
    if header is not None:
        first = tl.program_id(0) == 0
        tl.store(header, start, mask=first)
        tl.store(header + 1, rows, mask=first)


@triton.jit(do_not_specialize=["N", "sorts"])
def sort_labels(
    label,  # [N] int32: of each id of a position; negative ones don't count
    number,
    sorted_label,  # [N] int32 out: ascending, NO_LABEL at the end
    sorted_position,  # [N] int32 out: where each comes from; equal ones in their order
    N,
    sorts,  # 0: the labels are left where they are
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
    for start in range(0, tl.where(sorts != 0, own, 0), OTHERS):
        x = tl.load(label + start + tl.arange(0, OTHERS), mask=start + tl.arange(0, OTHERS) < last, other=-1)
        x = tl.where(x < 0, NO_LABEL, x)
        rank += tl.sum((x[None, :] <= y[:, None]).to(tl.int32), 1)
    j = own + tl.arange(0, OTHERS)
    x = tl.load(label + j, mask=j < last, other=-1)
    x = tl.where(x < 0, NO_LABEL, x)
    before = (x[None, :] < y[:, None]) | ((x[None, :] == y[:, None]) & (j[None, :] < i[:, None]))
    rank += tl.sum(before.to(tl.int32), 1)
    # What is beyond N is NO_LABEL: less than none.
    for start in range(own + OTHERS, tl.where(sorts != 0, N, 0), OTHERS):
        x = tl.load(label + start + tl.arange(0, OTHERS), mask=start + tl.arange(0, OTHERS) < last, other=-1)
        x = tl.where(x < 0, NO_LABEL, x)
        rank += tl.sum((x[None, :] < y[:, None]).to(tl.int32), 1)
    rank = tl.where(sorts != 0, rank, i)
    tl.store(sorted_label + rank, y, mask=i < N)
    tl.store(sorted_position + rank, i, mask=i < N)
