"""The Triton kernels of log_probs, and of cross_entropy with probabilities of K ids.

They make log-probabilities of several ids of each row of logits, and their gradient.

Programs, rows and tiles are as in triton.py.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LEADING, LOG2E, LOWEST, log1p, log_of_total, rounded_by
from onchip.vocab.rows.blocks import (
    clear_row,
    lanes_of,
    part_in_units,
    read_weights,
    row_start,
    squash,
    steps_of,
    walk,
    write_tile,
)
from onchip.vocab.rows.softmax import join, logits_of, meet, nothing_yet


@triton.jit
def _follow(
    raw,  # [R, LANES, UNIT]: the logits from column `first` on
    first,
    V,
    known,
    state,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    UNIT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The running sums with another tile in them."""
    # What x are relative to in their sum, if that is wanted; the others say what else is.
    k2, inner_scale, class_weight, reference, entropy, top1, log_sum_sq_probs = known
    # [LANES] each: sum of x - reference, weighed by class; sum of exp(z - z of top)**2, and that of those that aren't
    # above LEADING.
    softmax, offsets, squares, squares_below = state
    x = logits_of(raw, first, V, inner_scale, SIZE, LANES, UNIT, MASKED)
    if reference is not None:
        offset = x - reference
        if class_weight is not None:
            weights = read_weights(class_weight, first, V, SIZE, LANES, UNIT, MASKED)
            # A class that weighs nothing counts for nothing, where 0 * -inf would not be 0.
            offset = tl.where(weights > 0, offset * weights, 0.0)
        elif MASKED:
            offset = tl.where(steps_of(SIZE, LANES, UNIT) < V - first - lanes_of(LANES, UNIT), offset, 0.0)
        offsets += tl.sum(tl.sum(offset, 2), 0)
    softmax, _, e, drop, decay = join(x, first, k2, softmax, entropy, top1, SIZE, LANES, UNIT)
    if log_sum_sq_probs is not None:
        squares_below = tl.where(drop < 0, squares, squares_below) * (decay * decay)
        squares_below += tl.sum(tl.sum(tl.where(e > LEADING, 0.0, e * e), 2), 0)
        squares = squares * (decay * decay) + tl.sum(tl.sum(e * e, 2), 0)
    return softmax, offsets, squares, squares_below


@triton.jit(do_not_specialize=["T", "inner", "logits_outer"])
def log_probs(
    logits,  # [T, V] in rows of any place, the columns of stride logits_stride
    ids,  # [T, K] int64
    kept,  # [T] int32: 0 where all ids are ignored
    temperature,  # [T] float32
    class_weight,  # [V] float32: of `uniform`
    class_total,  # [] float32: their sum
    log_prob,  # [T, K] float32 out; 0 for ignored ids, NaN for those out of range
    lse,  # [T] float32 out, and so on; 0 for tokens whose ids are all ignored
    entropy,
    mean,  # of the logits under their softmax, with the entropy
    top1,  # [T] int64 out: the first largest logit; -1 for such tokens, and where all logits are -inf
    top_out,  # [T] float32 out: the largest x
    low_out,  # [T] float32 out: what lse was rounded by
    mean_logits,  # [T] float32 out: their plain mean
    uniform,  # [T] float32 out: the mean of lse - z, weighed by class
    log_sum_sq_probs,  # [T] float32 out: log(sum(p**2))
    T,
    K,
    V_units,  # V / UNIT, or V with a LINE
    loops,  # full tiles before the last one; None with a LINE
    ignore_index,
    inner,  # rows of an outer one: see row_start
    logits_outer,  # strides of rows in units of UNIT elements, or in elements with a LINE
    logits_inner,
    logits_stride,  # of columns, in elements
    inner_scale,  # of the logits before tanh, with a softcap
    outer_scale,  # of what comes after, but for the temperature
    LOOP: tl.constexpr,  # whether loops > 0
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    LINE: tl.constexpr,  # 0: rows begin at multiples of UNIT; see part_in_units
    STAGES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The softmax of each row, read once, and the log-probabilities of its ids."""
    V = V_units if LINE else V_units * UNIT
    several = tl.arange(0, BLOCK_K)
    for row in range(tl.program_id(0), T, tl.num_programs(0)):
        own = tl.cast(row, tl.int64) * K
        if tl.load(kept + row) == 0:
            tl.store(lse + row, 0.0)
            if entropy is not None:
                tl.store(entropy + row, 0.0)
                tl.store(mean + row, 0.0)
            if top1 is not None:
                tl.store(top1 + row, tl.cast(-1, tl.int64))
            if top_out is not None:
                tl.store(top_out + row, 0.0)
            if low_out is not None:
                tl.store(low_out + row, 0.0)
            if mean_logits is not None:
                tl.store(mean_logits + row, 0.0)
            if uniform is not None:
                tl.store(uniform + row, 0.0)
            if log_sum_sq_probs is not None:
                tl.store(log_sum_sq_probs + row, 0.0)
            for start in range(0, K, BLOCK_K):
                tl.store(log_prob + own + start + several, tl.zeros([BLOCK_K], tl.float32), mask=start + several < K)
        else:
            part = part_in_units(logits, row, inner, logits_outer, logits_inner, V, loops, UNIT, TILE, LINE)
            from_row, head, _, _ = part
            k = outer_scale
            if temperature is not None:
                k = k / tl.load(temperature + row)
            k2 = k * LOG2E
            reference = 0.0
            if (mean_logits is not None) or (uniform is not None):
                # Sums relative to a logit of the row keep their digits, if that is a number.
                reference = squash(tl.load(from_row), inner_scale)
                reference = tl.where((reference > LOWEST) & (reference < -LOWEST), reference, 0.0)

            known = (
                k2, inner_scale, class_weight,
                None if (mean_logits is None) and (uniform is None) else reference, entropy, top1, log_sum_sq_probs,
            )  # fmt: skip
            zeros = tl.zeros([LANES], tl.float32)
            state, _ = walk(
                _follow, known, (nothing_yet(LANES), zeros, zeros, zeros), part, logits_stride, V,
                "evict_first", LOOP, STAGES, TILE, LANES, UNIT, LINE,
            )  # fmt: skip
            softmax, offsets, squares, squares_below = state
            softmax, drop = meet(k2, softmax)
            best, total, below, moment, column = softmax
            log_total, leads = log_of_total(total, below)
            row_lse = best * k + log_total
            tl.store(lse + row, row_lse)
            if entropy is not None:
                offset = moment / total
                tl.store(entropy + row, log_total - offset)
                tl.store(mean + row, best * k + offset)
            if top1 is not None:
                tl.store(top1 + row, column.to(tl.int64))
            if top_out is not None:
                tl.store(top_out + row, best)
            if low_out is not None:
                tl.store(low_out + row, rounded_by(row_lse, best, k, log_total))
            if mean_logits is not None:
                tl.store(mean_logits + row, (reference + tl.sum(offsets, 0) / V) * k)
            if uniform is not None:
                share = 1.0 if class_total is None else tl.load(class_total) / V
                offset = tl.sum(offsets, 0) / V + (reference - best) * share
                tl.store(uniform + row, log_total * share - offset * k)
            if log_sum_sq_probs is not None:
                decay = tl.exp2(2 * drop)
                square = tl.sum(squares * decay, 0)
                square_below = tl.sum(tl.where(drop < 0, squares, squares_below) * decay, 0)
                log_square = tl.where(leads, log1p(square_below), tl.log(square))
                tl.store(log_sum_sq_probs + row, log_square - 2 * log_total)

            for start in range(0, K, BLOCK_K):
                there = start + several < K
                label = tl.load(ids + own + start + several, mask=there, other=0)
                good = (label >= 0) & (label < V) & (label != ignore_index)
                at = from_row + (tl.where(good, label, 0) - head) * logits_stride
                x = tl.load(at, mask=there & good, other=0.0)
                value = (squash(x, inner_scale) - best) * k - log_total
                value = tl.where(label == ignore_index, 0.0, tl.where(good, value, float("nan")))
                tl.store(log_prob + own + start + several, value, mask=there)


@triton.jit
def _write(
    raw,  # [R, LANES, UNIT]: the logits from column `first` on
    first,
    V,
    known,
    state,  # none
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    UNIT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The gradient of a tile's logits, but for the ids' own entries."""
    into, head, k, inner_scale, center, width, factor, entropy_row, even, class_weight = known
    x = squash(raw, inner_scale)
    if width is None:
        g = tl.exp2(x * (k * LOG2E) - center * LOG2E) * factor
    else:
        offset = x * k - center
        # exp of -128 is 0 in float32, and 0 * -inf is not.
        g = tl.exp2((offset - width) * LOG2E) * (factor + entropy_row * tl.maximum(offset, -128.0))
    if even is not None:
        g -= even if class_weight is None else even * read_weights(class_weight, first, V, SIZE, LANES, UNIT, MASKED)
    write_tile(into, 1, g, x, first - head, V - head, inner_scale, SIZE, LANES, UNIT, MASKED)
    return state


@triton.jit(do_not_specialize=["T", "inner", "logits_outer"])
def log_prob_gradients(
    logits,  # as in `log_probs`
    kept,
    temperature,
    center,  # [T] float32: the mean logit where the entropy has an upstream gradient, else lse
    width,  # [T] float32: the entropy, if it has one
    factor,  # [T] float32: what p is multiplied by
    entropy_row,  # [T] float32: and p (z - mean), if the entropy has an upstream gradient
    even,  # [T] float32: what each entry lacks, times its class's weight
    class_weight,  # [V] float32
    out,  # [T, V] out, contiguous
    T,
    V_units,
    loops,
    inner,
    logits_outer,
    logits_inner,
    logits_stride,
    inner_scale,
    outer_scale,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    LINE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradient of each row of logits but for its ids' entries; zeros for tokens whose ids are all ignored."""
    V = V_units if LINE else V_units * UNIT
    for row in range(tl.program_id(0), T, tl.num_programs(0)):
        part_out = part_in_units(out, row, 1, V_units, 0, V, loops, UNIT, TILE, LINE)
        if tl.load(kept + row) == 0:
            clear_row(part_out, 1, V, TILE, LANES, UNIT, LINE)
        else:
            part = part_in_units(logits, row, inner, logits_outer, logits_inner, V, loops, UNIT, TILE, LINE)
            _, head, _, _ = part
            into, _, _, _ = part_out
            k = outer_scale
            if temperature is not None:
                k = k / tl.load(temperature + row)
            known = (
                into, head, k, inner_scale, tl.load(center + row), None if width is None else tl.load(width + row),
                tl.load(factor + row), None if width is None else tl.load(entropy_row + row),
                None if even is None else tl.load(even + row), class_weight,
            )  # fmt: skip
            walk(
                _write, known, (), part, logits_stride, V,
                "evict_first", True, STAGES, TILE, LANES, UNIT, LINE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["N"])
def share_ids(
    ids,  # [T, K] int64
    g,  # [T, K] float32
    same,  # [T, K] out: of each id the sum of g over its occurrences
    rest,  # [T, K] out: and over the other ids of its token
    N,  # T * K
    K,
    BLOCK: tl.constexpr,
):
    """Upstream gradients of a token's ids, shared out."""
    i = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there, first = i < N, i // K * K
    label = tl.load(ids + i, mask=there, other=0)
    mine, others = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for k in range(K):
        equal = tl.load(ids + first + k, mask=there, other=0) == label
        each = tl.load(g + first + k, mask=there, other=0.0)
        mine += tl.where(equal, each, 0.0)
        others += tl.where(equal, 0.0, each)
    tl.store(same + i, mine, mask=there)
    tl.store(rest + i, others, mask=there)


@triton.jit(do_not_specialize=["T", "inner", "logits_outer"])
def write_ids(
    logits,  # as in `log_probs`
    ids,
    at_ids,  # [T, K] float32: the ids' entries of the gradient; of an id that occurs twice the same
    out,  # [T, V] out, contiguous
    T,
    K,
    V_units,
    ignore_index,
    inner,
    logits_outer,
    logits_inner,
    logits_stride,
    inner_scale,
    UNIT: tl.constexpr,
    LINE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The ids' own entries, over what `log_prob_gradients` wrote there."""
    V = V_units if LINE else V_units * UNIT
    i = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = i < tl.cast(T, tl.int64) * K
    label, row = tl.load(ids + i, mask=there, other=-1), i // K
    good = there & (label >= 0) & (label < V) & (label != ignore_index)
    g = tl.load(at_ids + i, mask=good, other=0.0)
    if inner_scale is not None:
        start = row_start(row, inner, logits_outer, logits_inner, 1 if LINE else UNIT)
        x = squash(tl.load(logits + start + label * logits_stride, mask=good, other=0.0), inner_scale)
        g *= 1 - x * x
    tl.store(out + row * V + label, g.to(out.dtype.element_ty), mask=good)
