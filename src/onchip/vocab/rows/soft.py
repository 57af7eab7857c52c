"""Triton kernels of cross_entropy with a probability for every entry: each row of logits and of labels is read once.

A label is q = w ((1 - label_smoothing) times the given probability + label_smoothing / V), w being the class's weight;
`soft_loss` and `soft_gradient` say what is made of these.  Rows and tiles are those of triton.py; running sums are
kept lane by lane, relative to the lane's largest logit.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LEADING, LOG2E, LOWEST, soft_gradient, soft_loss
from onchip.vocab.rows.blocks import NOTHING, lanes_of, read_tile, read_weights, row_start, squash, steps_of


@triton.jit
def _read_labels(
    row, stride, class_weight, first, V, label_smoothing,
    SIZE: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A tile of labels, smoothed and weighed; 0 from V on."""
    steps, lanes = steps_of(SIZE, LANES, UNIT), lanes_of(LANES, UNIT)
    q = read_tile(row, stride, first, V, SIZE, LANES, UNIT, MASKED, "evict_first").to(tl.float32)
    q = (1 - label_smoothing) * q + label_smoothing / V
    if class_weight is not None:
        q *= read_weights(class_weight, first, V, SIZE, LANES, UNIT, MASKED)
    elif MASKED:
        q = tl.where(steps < V - first - lanes, q, 0.0)
    return q


@triton.jit
def _absorb(
    raw,  # [R, LANES, UNIT]: the logits from column `first` on, and their labels
    q,
    first,
    V,
    k2,
    inner_scale,
    top,  # [LANES] largest x
    total,  # [LANES] sum of exp(z - z of top)
    below,  # [LANES] the same without those above LEADING
    mass,  # [LANES] sum of q
    cost,  # [LANES] sum of q (z of top - z) log2(e)
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    UNIT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The running sums with another tile in them."""
    x = squash(raw, inner_scale)
    if MASKED:
        x = tl.where(steps_of(SIZE, LANES, UNIT) < V - first - lanes_of(LANES, UNIT), x, float("-inf"))
    new_top = tl.maximum(top, tl.max(tl.max(x, 2), 0))
    drop = tl.maximum((top - new_top) * k2, NOTHING)
    decay = tl.exp2(drop)
    d = (x - new_top[None, :, None]) * k2
    e = tl.exp2(d)
    below = tl.where(drop < 0, total, below) * decay + tl.sum(tl.sum(tl.where(e > LEADING, 0.0, e), 2), 0)
    total = total * decay + tl.sum(tl.sum(e, 2), 0)
    # What has no probability costs nothing, where 0 * -inf would not be 0.
    cost = cost - mass * drop - tl.sum(tl.sum(tl.where(q == 0, 0.0, q * d), 2), 0)
    return new_top, total, below, mass + tl.sum(tl.sum(q, 2), 0), cost


@triton.jit
def soft_losses(
    logits,  # [T, V] in rows of any place, the columns of stride logits_stride
    labels,  # [T, V] alike, with strides of its own
    class_weight,  # [V] float32
    temperature,  # [T] float32
    loss,  # [T] float32 out, and so on
    lse,
    less,  # largest p - 1, where that p is above LEADING
    mass,  # m
    T,
    V_units,  # V / UNIT
    loops,  # full tiles before the last one
    inner,  # rows of an outer one: see row_start
    logits_outer,  # strides of rows in units of UNIT elements
    logits_inner,
    logits_stride,  # of columns, in elements
    labels_rows,  # `inner` of the labels
    labels_outer,
    labels_inner,
    labels_stride,
    inner_scale,  # of the logits before tanh, with a softcap
    outer_scale,  # of what comes after, but for the temperature
    label_smoothing,
    z_loss,
    LOOP: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The loss of each row, without a token's weight, and what its gradient needs."""
    V = V_units * UNIT
    for row in range(tl.program_id(0), T, tl.num_programs(0)):
        from_row = logits + row_start(row, inner, logits_outer, logits_inner, UNIT)
        of_row = labels + row_start(row, labels_rows, labels_outer, labels_inner, UNIT)
        k = outer_scale
        if temperature is not None:
            k = k / tl.load(temperature + row)
        k2 = k * LOG2E
        top = tl.full([LANES], LOWEST, tl.float32)
        total = tl.zeros([LANES], tl.float32)
        below = tl.zeros([LANES], tl.float32)
        m = tl.zeros([LANES], tl.float32)
        cost = tl.zeros([LANES], tl.float32)
        if LOOP:
            for i in tl.range(0, loops, num_stages=STAGES):
                raw = read_tile(from_row, logits_stride, i * TILE, V, TILE, LANES, UNIT, False, "evict_first")
                q = _read_labels(
                    of_row, labels_stride, class_weight, i * TILE, V, label_smoothing, TILE, LANES, UNIT, False
                )
                top, total, below, m, cost = _absorb(
                    raw, q, i * TILE, V, k2, inner_scale, top, total, below, m, cost, TILE, LANES, UNIT, False
                )
        first = loops * TILE
        raw = read_tile(from_row, logits_stride, first, V, TILE, LANES, UNIT, True, "evict_first")
        q = _read_labels(of_row, labels_stride, class_weight, first, V, label_smoothing, TILE, LANES, UNIT, True)
        top, total, below, m, cost = _absorb(
            raw, q, first, V, k2, inner_scale, top, total, below, m, cost, TILE, LANES, UNIT, True
        )

        best = tl.max(top, 0)
        drop = tl.maximum((top - best) * k2, NOTHING)
        below = tl.sum(tl.where(drop < 0, total, below) * tl.exp2(drop), 0)
        total = tl.sum(total * tl.exp2(drop), 0)
        cost = tl.sum(cost - m * drop, 0)
        m = tl.sum(m, 0)
        value, row_lse, low = soft_loss(best * k, total, below, m, cost / LOG2E, z_loss)
        tl.store(loss + row, value)
        tl.store(lse + row, row_lse)
        tl.store(less + row, low)
        tl.store(mass + row, m)


@triton.jit
def _write(
    into,  # the row of the gradient, contiguous
    raw,
    q,
    first,
    V,
    k2,
    inner_scale,
    lse2,
    mass,
    less,
    more,
    factor,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    UNIT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The gradient of a tile's logits."""
    steps, lanes = steps_of(SIZE, LANES, UNIT), lanes_of(LANES, UNIT)
    x = squash(raw, inner_scale)
    g = soft_gradient(tl.exp2(x * k2 - lse2), q, mass, less, more) * factor
    if inner_scale is not None:
        g *= 1 - x * x
    at, g = into + first + lanes + steps, g.to(into.dtype.element_ty)
    if MASKED:
        tl.store(at, g, mask=steps < V - first - lanes, eviction_policy="evict_first")
    else:
        tl.store(at, g, eviction_policy="evict_first")


@triton.jit
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
    label_smoothing,
    z_loss,
    LOOP: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradient of each row of logits."""
    V = V_units * UNIT
    for row in range(tl.program_id(0), T, tl.num_programs(0)):
        from_row = logits + row_start(row, inner, logits_outer, logits_inner, UNIT)
        of_row = labels + row_start(row, labels_rows, labels_outer, labels_inner, UNIT)
        into = out + tl.cast(row, tl.int64) * (out_inner * UNIT)
        k = outer_scale
        if temperature is not None:
            k = k / tl.load(temperature + row)
        k2 = k * LOG2E
        row_lse = tl.load(lse + row)
        lse2, m, low = row_lse * LOG2E, tl.load(mass + row), tl.load(less + row)
        more, factor = 2 * z_loss * row_lse, tl.load(row_factor + row)
        if LOOP:
            for i in tl.range(0, loops, num_stages=STAGES):
                raw = read_tile(from_row, logits_stride, i * TILE, V, TILE, LANES, UNIT, False, "evict_first")
                q = _read_labels(
                    of_row, labels_stride, class_weight, i * TILE, V, label_smoothing, TILE, LANES, UNIT, False
                )
                _write(into, raw, q, i * TILE, V, k2, inner_scale, lse2, m, low, more, factor, TILE, LANES, UNIT, False)
        first = loops * TILE
        raw = read_tile(from_row, logits_stride, first, V, TILE, LANES, UNIT, True, "evict_first")
        q = _read_labels(of_row, labels_stride, class_weight, first, V, label_smoothing, TILE, LANES, UNIT, True)
        _write(into, raw, q, first, V, k2, inner_scale, lse2, m, low, more, factor, TILE, LANES, UNIT, True)
