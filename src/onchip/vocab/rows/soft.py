"""Triton kernels of cross_entropy with a probability for every entry: each row of logits and of labels is read once.

A label is q = w ((1 - label_smoothing) times the given probability + label_smoothing / V), where w is the class's
weight; `soft_loss` and `soft_gradient` say what is made from these.  Rows and tiles are those of triton.py; running
sums are kept lane by lane, relative to the lane's largest logit.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LOG2E, LOWEST, log_of_total, slope_of_lse, smoothed, soft_gradient, soft_loss
from onchip.vocab.rows.blocks import (
    lanes_of,
    part_in_units,
    read_tile,
    read_weights,
    squash,
    steps_of,
    walk,
    write_tile,
)
from onchip.vocab.rows.softmax import NO_COLUMN, first_largest, join, logits_of, meet, nothing_yet


@triton.jit
def _smoothed(
    given, class_weight, first, V, vocab, loss_terms,
    SIZE: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A tile of labels, smoothed and weighed; 0 from V on.  vocab: how many entries all labels have."""
    q = smoothed(given, loss_terms.label_smoothing, vocab)
    if class_weight is not None:
        q *= read_weights(class_weight, first, V, SIZE, LANES, UNIT, MASKED)
    elif MASKED:
        q = tl.where(steps_of(SIZE, LANES, UNIT) < V - first - lanes_of(LANES, UNIT), q, 0.0)
    return q


@triton.jit
def _cost(q, d, mass, cost, drop):
    """[LANES]: the sum of q (z of top - z) log2(e), and that of q, with a tile in them."""
    # What has no probability costs nothing, where 0 * -inf would not be 0.
    return cost - mass * drop - tl.sum(tl.sum(tl.where(q == 0, 0.0, q * d), 2), 0), mass + tl.sum(tl.sum(q, 2), 0)


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
    k2, inner_scale, of_row, head, stride, class_weight, vocab, loss_terms, entropy = known
    # For the statistics: the sums of labels as they are given, the largest one and its column.
    softmax, cost, mass, given_cost, given_mass, likeliest, column = state
    given = read_tile(of_row, stride, first - head, V - head, SIZE, LANES, UNIT, MASKED, "evict_first").to(tl.float32)
    q = _smoothed(given, class_weight, first, V, vocab, loss_terms, SIZE, LANES, UNIT, MASKED)
    x = logits_of(raw, first, V, inner_scale, SIZE, LANES, UNIT, MASKED)
    softmax, d, _, drop, _ = join(x, first, k2, softmax, entropy, entropy, SIZE, LANES, UNIT)
    cost, mass = _cost(q, d, mass, cost, drop)
    if entropy is not None:
        given_cost, given_mass = _cost(given, d, given_mass, given_cost, drop)
        # From V on they are -inf, as logits are, and none is the largest.
        given = logits_of(given, first, V, None, SIZE, LANES, UNIT, MASKED)
        likeliest, column = first_largest(given, first, likeliest, column, SIZE, LANES, UNIT)
    return softmax, cost, mass, given_cost, given_mass, likeliest, column


@triton.jit(do_not_specialize=["T", "inner", "logits_outer", "labels_rows", "labels_outer"])
def soft_losses(
    logits,  # [T, V] in rows of any place, the columns of stride logits_stride
    labels,  # [T, V] alike, with strides of its own
    class_weight,  # [V] float32
    temperature,  # [T] float32
    loss,  # [T] float32 out, and so on
    lse,
    less,  # largest p - 1, where that p is above LEADING
    mass,  # m
    expected,  # sum of labels as they are given times log-probabilities; and what follows, with return_stats
    entropy,
    correct,  # [T] bool out: whether the largest logit is where the largest label is
    argmax,  # [T] int64 out
    target_logit,  # sum of labels times logits
    T,
    V_units,  # V / UNIT, or V with a LINE
    loops,  # full tiles before the last one; None with a LINE
    inner,  # rows of an outer one: see row_start
    logits_outer,  # strides of rows in units of UNIT elements, or in elements with a LINE
    logits_inner,
    logits_stride,  # of columns, in elements
    labels_rows,  # `inner` of the labels
    labels_outer,
    labels_inner,
    labels_stride,
    inner_scale,  # of the logits before tanh, with a softcap
    outer_scale,  # of what comes after, but for the temperature
    loss_terms,  # LossTerms
    LOOP: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    LINE: tl.constexpr,  # 0: rows begin at multiples of UNIT; see part_in_units
    STAGES: tl.constexpr,
):
    """The loss of each row, without a token's weight, and what its gradient needs."""
    V = V_units if LINE else V_units * UNIT
    for row in range(tl.program_id(0), T, tl.num_programs(0)):
        part = part_in_units(logits, row, inner, logits_outer, logits_inner, V, loops, UNIT, TILE, LINE)
        of_row, _, _, _ = part_in_units(
            labels, row, labels_rows, labels_outer, labels_inner, V, loops, UNIT, TILE, LINE
        )  # fmt: skip
        _, head, _, _ = part
        k = outer_scale
        if temperature is not None:
            k = k / tl.load(temperature + row)
        k2 = k * LOG2E
        zeros = tl.zeros([LANES], tl.float32)
        state, _ = walk(
            _absorb, (k2, inner_scale, of_row, head, labels_stride, class_weight, V, loss_terms, entropy),
            (nothing_yet(LANES), zeros, zeros, zeros, zeros, zeros + LOWEST, tl.full([LANES], NO_COLUMN, tl.int32)),
            part, logits_stride, V, "evict_first", LOOP, STAGES, TILE, LANES, UNIT, LINE,
        )  # fmt: skip
        softmax, cost, m, given_cost, given_mass, likeliest, column = state
        softmax, drop = meet(k2, softmax)
        best, total, below, moment, top_column = softmax
        cost = tl.sum(cost - m * drop, 0) / LOG2E
        m = tl.sum(m, 0)
        value, row_lse, low = soft_loss(loss_terms, best * k, total, below, m, cost)
        tl.store(loss + row, value)
        tl.store(lse + row, row_lse)
        tl.store(less + row, low)
        tl.store(mass + row, m)
        if entropy is not None:
            log_total, _ = log_of_total(total, below)
            given_cost = tl.sum(given_cost - given_mass * drop, 0) / LOG2E
            m = tl.sum(given_mass, 0)
            at = tl.min(tl.where(likeliest == tl.max(likeliest, 0), column, NO_COLUMN), 0)
            tl.store(expected + row, -(m * log_total + given_cost))
            tl.store(entropy + row, log_total - moment / total)
            tl.store(correct + row, top_column == at)
            tl.store(argmax + row, top_column.to(tl.int64))
            tl.store(target_logit + row, m * (best * k) - given_cost)


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
    into, head, k2, inner_scale, of_row, stride, class_weight, vocab, loss_terms, lse2, mass, less, more, factor = known
    given = read_tile(of_row, stride, first - head, V - head, SIZE, LANES, UNIT, MASKED, "evict_first").to(tl.float32)
    q = _smoothed(given, class_weight, first, V, vocab, loss_terms, SIZE, LANES, UNIT, MASKED)
    x = squash(raw, inner_scale)
    g = soft_gradient(tl.exp2(x * k2 - lse2), q, mass, less, more) * factor
    write_tile(into, 1, g, x, first - head, V - head, inner_scale, SIZE, LANES, UNIT, MASKED)
    return state


@triton.jit(do_not_specialize=["T", "inner", "logits_outer", "labels_rows", "labels_outer"])
def soft_gradients(
    logits,  # as in `soft_losses`
    labels,
    class_weight,
    temperature,
    lse,  # [T] float32, as made by it
    less,
    mass,
    row_factor,  # [T] float32: the upstream gradient of each row's loss, times the scale of its logits
    out,  # [T, V] out, contiguous
    T,
    V_units,
    loops,
    inner,
    logits_outer,
    logits_inner,
    logits_stride,
    labels_rows,
    labels_outer,
    labels_inner,
    labels_stride,
    out_inner,
    inner_scale,
    outer_scale,
    loss_terms,  # LossTerms
    LOOP: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    LINE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradient of each row of logits."""
    V = V_units if LINE else V_units * UNIT
    for row in range(tl.program_id(0), T, tl.num_programs(0)):
        part = part_in_units(logits, row, inner, logits_outer, logits_inner, V, loops, UNIT, TILE, LINE)
        of_row, _, _, _ = part_in_units(
            labels, row, labels_rows, labels_outer, labels_inner, V, loops, UNIT, TILE, LINE
        )  # fmt: skip
        _, head, _, _ = part
        into, _, _, _ = part_in_units(out, row, 1, out_inner, 0, V, loops, UNIT, TILE, LINE)
        k = outer_scale
        if temperature is not None:
            k = k / tl.load(temperature + row)
        row_lse = tl.load(lse + row)
        known = (
            into, head, k * LOG2E, inner_scale, of_row, labels_stride, class_weight, V, loss_terms, row_lse * LOG2E,
            tl.load(mass + row), tl.load(less + row), slope_of_lse(loss_terms) * row_lse, tl.load(row_factor + row),
        )  # fmt: skip
        walk(_write, known, (), part, logits_stride, V, "evict_first", LOOP, STAGES, TILE, LANES, UNIT, LINE)
