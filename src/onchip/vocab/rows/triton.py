"""The Triton kernels of cross_entropy: `losses` reads each row of logits once, `gradients` makes its gradient from lse.

A program takes whole rows, one after the other: T tokens are shared out among as many programs as the launch has.  A
row of V logits is walked through in `loops` full tiles and a last one, full or not.  A row of one tile is read once and
stays in registers.  For a longer row, `losses` with `out` goes back over the tiles from the last to the first, while
they are in the caches, and writes the gradient of the reduced loss.

A tile is [R, LANES, UNIT]: UNIT elements side by side, of 16 bytes if rows are aligned to that; LANES of these, one for
each thread; and all that R times.  Running sums are kept lane by lane, [LANES], so that warps meet only at the end of a
row.  They are the softmax of all logits but the target's, which joins last, so that a p near 1 keeps all digits of 1 -
p.

x is a logit, or with a softcap its tanh; z = x * k is the final logit, and k2 = k * log2(e).  None as an argument means
that there is none, or that it is not wanted.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LOG2E, LOWEST, gradient_terms, log1p, loss_of_lse, loss_of_target, rounded_by
from onchip.vocab.rows.blocks import (
    NOTHING,
    clear_row,
    lanes_of,
    part_in_units,
    read_tile,
    read_weights,
    squash,
    steps_of,
    take_ends,
    walk,
    write_tile,
)


@triton.jit
def _absorb(
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
    # The target's column, negative if it has none; what x are relative to in their sum, if that is wanted; and whether
    # the entropy is.
    y, k2, inner_scale, class_weight, reference, entropy = known
    # [LANES] each, of all logits but the target's: the largest x; the sum of exp(z - z of top); the sum of x -
    # reference, weighed by class; the sum of exp(z - z of top) * (z - z of top) * log2(e); the first column of top.
    top, others, offsets, moments, index = state
    steps, lanes = steps_of(SIZE, LANES, UNIT), lanes_of(LANES, UNIT)
    x = squash(raw, inner_scale)
    out = steps == y - first - lanes
    if MASKED:
        outside = steps >= V - first - lanes
        out = out | outside
    if reference is not None:
        offset = x - reference
        if class_weight is not None:
            weights = read_weights(class_weight, first, V, SIZE, LANES, UNIT, MASKED)
            # A class that weighs nothing counts for nothing, where 0 * -inf would not be 0.
            offset = tl.where(weights > 0, offset * weights, 0.0)
        elif MASKED:
            offset = tl.where(outside, 0.0, offset)
        offsets += tl.sum(tl.sum(offset, 2), 0)
    x = tl.where(out, float("-inf"), x)
    largest = tl.max(tl.max(x, 2), 0)
    if entropy is not None:
        at_largest = tl.where(x == largest[None, :, None], steps, SIZE)
        column = first + tl.arange(0, LANES) * UNIT + tl.min(tl.min(at_largest, 2), 0)
        index = tl.where((largest > top) | ((largest == top) & (column < index)), column, index)
    new_top = tl.maximum(top, largest)
    drop = tl.maximum((top - new_top) * k2, NOTHING)
    decay = tl.exp2(drop)
    d = (x - new_top[None, :, None]) * k2
    e = tl.exp2(d)
    if entropy is not None:
        # p log p is 0 at p = 0, and 0 * -inf is not.
        moments = decay * (moments + others * drop) + tl.sum(tl.sum(e * tl.maximum(d, NOTHING), 2), 0)
    others = others * decay + tl.sum(tl.sum(e, 2), 0)
    return new_top, others, offsets, moments, index


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
    """The gradient of a tile's logits."""
    into, head, stride, y, k2, inner_scale, class_weight, lse2, factor, even, at_target = known
    steps, lanes = steps_of(SIZE, LANES, UNIT), lanes_of(LANES, UNIT)
    x = squash(raw, inner_scale)
    g = tl.exp2(x * k2 - lse2) * factor
    if even is not None:
        g -= even if class_weight is None else even * read_weights(class_weight, first, V, SIZE, LANES, UNIT, MASKED)
    g = tl.where(steps == y - first - lanes, at_target, g)
    write_tile(into, stride, g, x, first - head, V - head, inner_scale, SIZE, LANES, UNIT, MASKED)
    return state


@triton.jit
def _store_terms(out, T, k2, lse2, factor, even, at_target):
    """What the gradient of a row's logits is made with, for another kernel; `at_target` is that of the target's own."""
    tl.store(out, k2)
    tl.store(out + T, lse2)
    tl.store(out + 2 * T, factor)
    tl.store(out + 3 * T, even)
    tl.store(out + 4 * T, at_target)


@triton.jit(do_not_specialize=["T", "inner", "logits_outer"])
def losses(
    logits,  # [T, V] in rows of any place, the columns of stride logits_stride
    target,  # [T] int64
    token_weight,  # [T] float32
    class_weight,  # [V] float32
    class_total,  # [] float32: their sum
    temperature,  # [T] float32
    divisor,  # [] float32: what the reduced loss is divided by
    target_logit,  # [T] float32: what is taken for the target's logit, whatever `logits` holds there
    loss,  # [T] float32 out, and so on; 0 for ignored tokens
    lse,
    log_prob,
    entropy,
    correct,  # [T] bool out
    argmax,  # [T] int64 out; -1 for ignored tokens
    top_out,  # [T] float32 out: the largest x, with the entropy
    low_out,  # [T] float32 out: what lse was rounded by
    uniform,  # [T] float32 out: the mean of lse - z, weighed by class, with SMOOTHING
    out,  # [T, V] out: gradient of the reduced loss, contiguous
    terms_out,  # [5, T] float32 out: what the gradient is made with; see `_store_terms`
    T,
    V_units,  # V / UNIT, or V with a LINE
    loops,  # full tiles before the last one; None with a LINE
    ignore_index,
    inner,  # rows of an outer one: see row_start
    logits_outer,  # strides of rows in units of UNIT elements, or in elements with a LINE
    logits_inner,
    logits_stride,  # of columns, in elements
    out_inner,
    inner_scale,  # of the logits before tanh, with a softcap
    outer_scale,  # of what comes after, but for the temperature
    logit_scale,
    loss_terms,  # LossTerms
    SMOOTHING: tl.constexpr,
    LOOP: tl.constexpr,  # whether loops > 0
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    LINE: tl.constexpr,  # 0: rows begin at multiples of UNIT; see part_in_units
    STAGES: tl.constexpr,
):
    """The loss and the softmax of each row; with `out` the gradient too, for an upstream gradient of 1."""
    V = V_units if LINE else V_units * UNIT
    # What is read again is asked to stay, the rest to go.
    AGAIN: tl.constexpr = "evict_last" if out is not None and LOOP else "evict_first"
    step = tl.num_programs(0)
    following = tl.load(target + tl.program_id(0))
    for row in range(tl.program_id(0), T, step):
        label = following
        following = tl.load(target + row + step, mask=row + step < T, other=0)
        part = part_in_units(logits, row, inner, logits_outer, logits_inner, V, loops, UNIT, TILE, LINE)
        from_row, head, length, full = part
        if out is not None:
            part_out = part_in_units(out, row, 1, out_inner, 0, V, loops, UNIT, TILE, LINE)
            into, _, _, _ = part_out
        if label == ignore_index:
            tl.store(loss + row, 0.0)
            tl.store(lse + row, 0.0)
            tl.store(log_prob + row, 0.0)
            if entropy is not None:
                tl.store(entropy + row, 0.0)
                tl.store(correct + row, False)
                tl.store(argmax + row, -1)
            if top_out is not None:
                tl.store(top_out + row, 0.0)
            if low_out is not None:
                tl.store(low_out + row, 0.0)
            if uniform is not None:
                tl.store(uniform + row, 0.0)
            if terms_out is not None:
                # exp2(z - inf) is 0, without a mask for each of the logits.
                _store_terms(terms_out + row, T, outer_scale * LOG2E, float("inf"), 0.0, 0.0, 0.0)
            if out is not None:
                clear_row(part_out, 1, V, TILE, LANES, UNIT, LINE)
        else:
            good = (label >= 0) & (label < V)
            y = tl.where(good, label, -1).to(tl.int32)
            if target_logit is not None:
                x_y = tl.load(target_logit + row)
            else:
                x_y = tl.load(from_row + (tl.maximum(y, 0) - head).to(tl.int64) * logits_stride)
            x_y = squash(x_y, inner_scale)
            # Sums of x relative to the target's keep their digits, if that is a number.
            reference = tl.where((x_y > LOWEST) & (x_y < -LOWEST), x_y, 0.0)
            k = outer_scale
            if temperature is not None:
                k = k / tl.load(temperature + row)
            k2 = k * LOG2E

            top = tl.full([LANES], LOWEST, tl.float32)
            others = tl.zeros([LANES], tl.float32)
            offsets = tl.zeros([LANES], tl.float32)
            moments = tl.zeros([LANES], tl.float32)
            index = tl.zeros([LANES], tl.int32)
            known = y, k2, inner_scale, class_weight, reference if SMOOTHING else None, entropy
            state, last = walk(
                _absorb, known, (top, others, offsets, moments, index), part, logits_stride, V,
                AGAIN, LOOP, STAGES, TILE, LANES, UNIT, LINE,
            )  # fmt: skip
            top, others, offsets, moments, index = state

            best = tl.max(top, 0)
            drop = tl.maximum((top - best) * k2, NOTHING)
            rest = tl.sum(others * tl.exp2(drop), 0)
            # The target joins.
            lead = tl.maximum(best, tl.where(good, x_y, LOWEST))
            own_log = (x_y - lead) * k2
            own = tl.where(good, tl.exp2(own_log), 0.0)
            rest_log = tl.maximum((best - lead) * k2, NOTHING)
            decay = tl.exp2(rest_log)
            if entropy is not None:
                moment = tl.sum(tl.exp2(drop) * (moments + others * drop), 0)
                moment = decay * (moment + rest * rest_log) + own * tl.maximum(own_log, NOTHING)
            rest = rest * decay
            # log1p where the target leads: there the loss is small, and 1 + rest would round it away.
            log_total = tl.where(good & (x_y >= best), log1p(rest), tl.log(rest + own))
            row_lse = lead * k + log_total
            row_log_prob = tl.where(good, (x_y - lead) * k - log_total, float("nan"))
            value = loss_of_target(loss_terms, row_log_prob)
            of_class, of_all = None, None
            if class_weight is not None:
                of_class, of_all = tl.load(class_weight + tl.maximum(y, 0)), tl.load(class_total)
                value *= of_class
            value += loss_of_lse(loss_terms, row_lse)
            if SMOOTHING:
                offset = tl.sum(offsets, 0)
                if target_logit is not None:
                    stored = tl.load(from_row + (tl.maximum(y, 0) - head).to(tl.int64) * logits_stride)
                    stored = squash(stored, inner_scale)
                    # Two that are -inf, as a bias of that makes them, differ by nothing; another shard's is not here.
                    more = tl.where(good & (stored != x_y), x_y - stored, 0.0)
                    if of_class is not None:
                        more = tl.where(of_class > 0, more * of_class, 0.0)
                    offset += more
                share = 1.0 if of_all is None else of_all / V
                of_uniform = log_total * share - (offset / V + (reference - lead) * share) * k
                value += loss_terms.label_smoothing * of_uniform
                if uniform is not None:
                    tl.store(uniform + row, of_uniform)
            weight = 1.0
            if token_weight is not None:
                weight = tl.load(token_weight + row)
            tl.store(loss + row, tl.where(good, value * weight, float("nan")))
            tl.store(lse + row, row_lse)
            tl.store(log_prob + row, row_log_prob)
            if entropy is not None:
                tl.store(entropy + row, log_total - moment / ((rest + own) * LOG2E))
                other = tl.min(tl.where(top == best, index, 2**31 - 1), 0)
                leads = good & ((x_y > best) | ((x_y == best) & (y < other)))
                tl.store(correct + row, leads & (row_lse == row_lse))
                tl.store(argmax + row, tl.where(leads, y, other).to(tl.int64))
            if top_out is not None:
                tl.store(top_out + row, lead)
            if low_out is not None:
                tl.store(low_out + row, rounded_by(row_lse, lead, k, log_total))

            if (out is not None) or (terms_out is not None):
                row_factor = weight / tl.load(divisor) * logit_scale
                if temperature is not None:
                    row_factor = row_factor / tl.load(temperature + row)
                row_factor = tl.where(good, row_factor, float("nan"))
                terms = gradient_terms(loss_terms, row_lse, row_log_prob, row_factor, of_class, of_all, V, SMOOTHING)
            if terms_out is not None:
                lse2, factor, even, at_target = terms
                if inner_scale is not None:
                    at_target *= 1 - x_y * x_y
                _store_terms(terms_out + row, T, k2, lse2, factor, even, at_target)
            if out is not None:
                lse2, factor, even, at_target = terms
                of_gradient = (
                    into,
                    head,
                    1,
                    y,
                    k2,
                    inner_scale,
                    class_weight,
                    lse2,
                    factor,
                    even if SMOOTHING else None,
                    at_target,
                )
                first, end = full * TILE, head + length
                if LOOP:
                    # As the other tiles: the registers are needed for them.
                    last = read_tile(from_row, logits_stride, first, length, TILE, LANES, UNIT, True, "evict_first")
                _write(last, head + first, end, of_gradient, (), TILE, LANES, UNIT, True)
                if LINE:
                    take_ends(_write, of_gradient, (), part, logits_stride, V, "evict_first", LANES)
                if LOOP:
                    for i in range(full):
                        back = (full - 1 - i) * TILE
                        raw = read_tile(from_row, logits_stride, back, length, TILE, LANES, UNIT, False, "evict_first")
                        _write(raw, head + back, end, of_gradient, (), TILE, LANES, UNIT, False)


@triton.jit(do_not_specialize=["T", "inner", "logits_outer", "out_outer"])
def gradients(
    logits,  # as in `losses`
    target,
    token_weight,
    class_weight,
    class_total,
    temperature,
    divisor,
    lse,  # [T] float32
    log_prob,  # [T] float32
    grad_loss,  # [T] float32 with PER_TOKEN, else []
    start,  # the logits are these columns and those after it, of a vocabulary of `whole`; None: all of it
    whole,
    out,  # [T, V] out, which may be `logits`
    T,
    V_units,
    loops,
    ignore_index,
    inner,
    logits_outer,
    logits_inner,
    logits_stride,
    out_outer,
    out_inner,
    out_stride,
    inner_scale,
    outer_scale,
    logit_scale,
    loss_terms,  # LossTerms
    SMOOTHING: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    UNLESS_ONE: tl.constexpr,  # nothing is to be done where the upstream gradient is 1
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    LINE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradient of each row of logits, of zeros for ignored tokens.

    With `start`, targets and class weights are of the whole vocabulary.
    """
    V = V_units if LINE else V_units * UNIT
    vocab = V
    of_columns = class_weight
    if start is not None:
        vocab = whole
        if class_weight is not None:
            of_columns = class_weight + start
    upstream = tl.load(grad_loss)
    rows = T
    if UNLESS_ONE:
        rows = tl.where(upstream == 1, 0, T)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        label = tl.load(target + row)
        part = part_in_units(logits, row, inner, logits_outer, logits_inner, V, loops, UNIT, TILE, LINE)
        part_out = part_in_units(out, row, inner, out_outer, out_inner, V, loops, UNIT, TILE, LINE)
        if label == ignore_index:
            clear_row(part_out, out_stride, V, TILE, LANES, UNIT, LINE)
        else:
            good = (label >= 0) & (label < vocab)
            column = label
            if start is not None:
                column = label - start
            y = tl.where(good, column, -1).to(tl.int32)
            k = outer_scale
            row_factor = logit_scale / tl.load(divisor)
            if temperature is not None:
                tau = tl.load(temperature + row)
                k = k / tau
                row_factor = row_factor / tau
            if token_weight is not None:
                row_factor *= tl.load(token_weight + row)
            row_factor *= tl.load(grad_loss + row) if PER_TOKEN else upstream
            row_factor = tl.where(good, row_factor, float("nan"))
            of_class, of_all = None, None
            if class_weight is not None:
                of_class, of_all = tl.load(class_weight + tl.where(good, label, 0)), tl.load(class_total)
            terms = gradient_terms(
                loss_terms, tl.load(lse + row), tl.load(log_prob + row), row_factor, of_class, of_all, vocab, SMOOTHING
            )
            lse2, row_factor, even, at_target = terms
            # The column is the same in both; the compiler sees that it is if it comes from one of them.
            _, head, _, _ = part
            into, _, _, _ = part_out
            known = (
                into, head, out_stride, y, k * LOG2E, inner_scale, None if class_weight is None else of_columns, lse2,
                row_factor, even if SMOOTHING else None, at_target,
            )  # fmt: skip
            walk(
                _write, known, (), part, logits_stride, V,
                "evict_first", True, STAGES, TILE, LANES, UNIT, LINE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def count_targets(target, divisor, T, ignore_index, BLOCK: tl.constexpr):
    """How many are not ignored, or 1, in float32.  One program."""
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        total += (tl.load(target + t, mask=t < T, other=ignore_index) != ignore_index).to(tl.int32)
    tl.store(divisor, tl.maximum(tl.sum(total, 0), 1).to(tl.float32))


@triton.jit
def divided(value, number, divisor, MEAN: tl.constexpr):
    """A sum of losses, or their gradient, divided by `divisor`, or else by how many tokens are not ignored."""
    if MEAN:
        by = tl.maximum(tl.load(number), 1).to(tl.float32) if divisor is None else tl.load(divisor)
        value = tl.div_rn(value, by + tl.zeros_like(value))
    return value


@triton.jit(do_not_specialize=["T"])
def reduce_losses(
    loss,  # [T] float32
    number,
    divisor,  # [] float32
    out,  # [] float32
    T,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Their sum or mean.  One program."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        total += tl.load(loss + t, mask=t < T, other=0.0)
    tl.store(out + tl.arange(0, 1), divided(tl.sum(total, 0) + tl.zeros((1,), tl.float32), number, divisor, MEAN))
