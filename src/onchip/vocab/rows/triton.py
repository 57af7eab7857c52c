"""The Triton kernels of cross_entropy: `losses` reads each row of logits once, `gradients` makes its gradient from lse;
and those of log_probs, for several ids of each row.

A program takes whole rows, one after the other: T tokens are shared out among as many programs as the launch has.  A
row of V logits is walked through in `loops` full tiles and a last one, full or not.  A row of one tile is read once and
stays in registers; of a longer one, `losses` with `out` goes back over the tiles from the last to the first, while
they are in the caches, and writes the gradient of the reduced loss.

A tile is [R, LANES, UNIT]: UNIT elements side by side, of 16 bytes if rows are aligned to that; LANES of these, one for
each thread; and that R times.
Running sums are kept lane by lane, [LANES], so warps meet only at the end of a row.  What runs along is the softmax of
all logits but the target's, which joins last: then a p near 1 keeps all digits of 1 - p.

x is a logit, or with a softcap its tanh; z = x * k is the final logit, and k2 = k * log2(e).  None as an argument:
there is none, or it is not wanted.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LOG2E, LOWEST, gradient_terms, log1p, tanh

# The logarithm of what is as good as 0: finite, so that its product with 0 is 0.
_NOTHING = tl.constexpr(-1e30)


@triton.jit
def _row_start(row, inner, outer_stride, inner_stride, UNIT: tl.constexpr):
    """Where a row begins, its number being (i, j) in two leading dimensions of which the last has size `inner`.

    The strides count UNIT elements: so the compiler knows that rows begin at multiples of so many.
    """
    i, j = tl.cast(row // inner, tl.int64), tl.cast(row % inner, tl.int64)
    return (i * outer_stride + j * inner_stride) * UNIT


@triton.jit
def _lanes(LANES: tl.constexpr, UNIT: tl.constexpr):
    """[1, LANES, 1]: where the elements of a lane begin in a tile."""
    return (tl.arange(0, LANES) * UNIT)[None, :, None]


@triton.jit
def _steps(SIZE: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr):
    """[R, 1, UNIT]: how far a lane's elements are from its first one; constants, as far as a thread is concerned."""
    return (tl.arange(0, SIZE // (LANES * UNIT)) * (LANES * UNIT))[:, None, None] + tl.arange(0, UNIT)[None, None, :]


@triton.jit
def _read(
    row, stride, first, V,
    SIZE: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """SIZE logits of a row from column `first` on; 0 from V on."""
    steps, lanes = _steps(SIZE, LANES, UNIT), _lanes(LANES, UNIT)
    at = row + (first + lanes + steps).to(tl.int64) * stride
    if MASKED:
        raw = tl.load(at, mask=steps < V - first - lanes, other=0.0, eviction_policy=POLICY)
    else:
        raw = tl.load(at, eviction_policy=POLICY)
    return raw


@triton.jit
def _read_weights(
    class_weight, first, V, SIZE: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, MASKED: tl.constexpr
):
    """The weights of a tile's classes; 0 from V on."""
    steps, lanes = _steps(SIZE, LANES, UNIT), _lanes(LANES, UNIT)
    at = class_weight + first + lanes + steps
    return tl.load(at, mask=steps < V - first - lanes, other=0.0) if MASKED else tl.load(at)


@triton.jit
def _squash(raw, inner_scale):
    x = raw.to(tl.float32)
    return x if inner_scale is None else tanh(x * inner_scale)


@triton.jit
def _absorb(
    raw,  # [R, LANES, UNIT]: the logits from column `first` on
    first,
    V,
    y,  # the target's column, negative if it has none
    k2,
    inner_scale,
    class_weight,  # [V] float32
    reference,
    top,  # [LANES] largest x but the target's
    others,  # [LANES] sum of exp(z - z of top), but the target's
    offsets,  # [LANES] sum of x - reference, weighed by class
    moments,  # [LANES] sum of exp(z - z of top) * (z - z of top) * log2(e), but the target's
    index,  # [LANES] column of top, the first one
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    UNIT: tl.constexpr,
    MASKED: tl.constexpr,
    SMOOTHING: tl.constexpr,
    STATS: tl.constexpr,
):
    """The running sums with another tile in them."""
    steps, lanes = _steps(SIZE, LANES, UNIT), _lanes(LANES, UNIT)
    x = _squash(raw, inner_scale)
    out = steps == y - first - lanes
    if MASKED:
        outside = steps >= V - first - lanes
        out = out | outside
    if SMOOTHING:
        offset = x - reference
        if class_weight is not None:
            weights = _read_weights(class_weight, first, V, SIZE, LANES, UNIT, MASKED)
            # A class that weighs nothing counts for nothing, where 0 * -inf would not be 0.
            offset = tl.where(weights > 0, offset * weights, 0.0)
        elif MASKED:
            offset = tl.where(outside, 0.0, offset)
        offsets += tl.sum(tl.sum(offset, 2), 0)
    x = tl.where(out, float("-inf"), x)
    largest = tl.max(tl.max(x, 2), 0)
    if STATS:
        at_largest = tl.where(x == largest[None, :, None], steps, SIZE)
        column = first + tl.arange(0, LANES) * UNIT + tl.min(tl.min(at_largest, 2), 0)
        index = tl.where(largest > top, column, index)
    new_top = tl.maximum(top, largest)
    drop = tl.maximum((top - new_top) * k2, _NOTHING)
    decay = tl.exp2(drop)
    d = (x - new_top[None, :, None]) * k2
    e = tl.exp2(d)
    if STATS:
        # p log p is 0 at p = 0, and 0 * -inf is not.
        moments = decay * (moments + others * drop) + tl.sum(tl.sum(e * tl.maximum(d, _NOTHING), 2), 0)
    others = others * decay + tl.sum(tl.sum(e, 2), 0)
    return new_top, others, offsets, moments, index


@triton.jit
def _write(
    row,  # of the gradient
    stride,
    raw,  # [R, LANES, UNIT]: the logits from column `first` on
    first,
    V,
    y,
    k2,
    inner_scale,
    class_weight,  # [V] float32
    terms,  # of `gradient_terms`
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    UNIT: tl.constexpr,
    MASKED: tl.constexpr,
    SMOOTHING: tl.constexpr,
):
    """The gradient of a tile's logits."""
    lse2, factor, even, at_target = terms
    steps, lanes = _steps(SIZE, LANES, UNIT), _lanes(LANES, UNIT)
    x = _squash(raw, inner_scale)
    g = tl.exp2(x * k2 - lse2) * factor
    if SMOOTHING and class_weight is None:
        g -= even
    elif SMOOTHING:
        g -= even * _read_weights(class_weight, first, V, SIZE, LANES, UNIT, MASKED)
    g = tl.where(steps == y - first - lanes, at_target, g)
    if inner_scale is not None:
        g *= 1 - x * x
    at = row + (first + lanes + steps).to(tl.int64) * stride
    g = g.to(row.dtype.element_ty)
    if MASKED:
        tl.store(at, g, mask=steps < V - first - lanes, eviction_policy="evict_first")
    else:
        tl.store(at, g, eviction_policy="evict_first")


@triton.jit
def _clear(row, stride, loops, V, TILE: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr):
    """Zeros in a row of the gradient."""
    steps, lanes = _steps(TILE, LANES, UNIT), _lanes(LANES, UNIT)
    zeros = tl.zeros([TILE // (LANES * UNIT), LANES, UNIT], row.dtype.element_ty)
    for i in range(loops):
        tl.store(row + (i * TILE + lanes + steps).to(tl.int64) * stride, zeros)
    first = loops * TILE
    tl.store(row + (first + lanes + steps).to(tl.int64) * stride, zeros, mask=steps < V - first - lanes)


@triton.jit
def _store_terms(out, T, k2, lse2, factor, even, at_target):
    """What the gradient of a row's logits is made with, for another kernel; `at_target` is that of the target's own."""
    tl.store(out, k2)
    tl.store(out + T, lse2)
    tl.store(out + 2 * T, factor)
    tl.store(out + 3 * T, even)
    tl.store(out + 4 * T, at_target)


@triton.jit
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
    out,  # [T, V] out: gradient of the reduced loss, contiguous
    terms_out,  # [5, T] float32 out: what the gradient is made with; see `_store_terms`
    T,
    V_units,  # V / UNIT
    loops,  # full tiles before the last one
    ignore_index,
    inner,  # rows of an outer one: see _row_start
    logits_outer,  # strides of rows in units of UNIT elements
    logits_inner,
    logits_stride,  # of columns, in elements
    out_inner,
    inner_scale,  # of the logits before tanh, with a softcap
    outer_scale,  # of what comes after, but for the temperature
    logit_scale,
    label_smoothing,
    z_loss,
    SMOOTHING: tl.constexpr,
    LOOP: tl.constexpr,  # whether loops > 0
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The loss and the softmax of each row; with `out` the gradient too, for an upstream gradient of 1."""
    V = V_units * UNIT
    # What is read again is asked to stay, the rest to go.
    AGAIN: tl.constexpr = "evict_last" if out is not None and LOOP else "evict_first"
    step = tl.num_programs(0)
    following = tl.load(target + tl.program_id(0))
    for row in range(tl.program_id(0), T, step):
        label = following
        following = tl.load(target + row + step, mask=row + step < T, other=0)
        from_row = logits + _row_start(row, inner, logits_outer, logits_inner, UNIT)
        if out is not None:
            into = out + tl.cast(row, tl.int64) * (out_inner * UNIT)
        if label == ignore_index:
            tl.store(loss + row, 0.0)
            tl.store(lse + row, 0.0)
            tl.store(log_prob + row, 0.0)
            if entropy is not None:
                tl.store(entropy + row, 0.0)
                tl.store(correct + row, False)
                tl.store(argmax + row, -1)
            if terms_out is not None:
                # exp2(z - inf) is 0, without a mask for each of the logits.
                _store_terms(terms_out + row, T, outer_scale * LOG2E, float("inf"), 0.0, 0.0, 0.0)
            if out is not None:
                _clear(into, 1, loops, V, TILE, LANES, UNIT)
        else:
            good = (label >= 0) & (label < V)
            y = tl.where(good, label, -1).to(tl.int32)
            if target_logit is not None:
                x_y = tl.load(target_logit + row)
            else:
                x_y = tl.load(from_row + tl.maximum(y, 0).to(tl.int64) * logits_stride)
            x_y = _squash(x_y, inner_scale)
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
            if LOOP:
                for i in tl.range(0, loops, num_stages=STAGES):
                    raw = _read(from_row, logits_stride, i * TILE, V, TILE, LANES, UNIT, False, AGAIN)
                    top, others, offsets, moments, index = _absorb(
                        raw, i * TILE, V, y, k2, inner_scale, class_weight, reference, top, others, offsets, moments,
                        index,
                        TILE, LANES, UNIT, False, SMOOTHING, entropy is not None,
                    )  # fmt: skip
            first = loops * TILE
            last = _read(from_row, logits_stride, first, V, TILE, LANES, UNIT, True, AGAIN)
            top, others, offsets, moments, index = _absorb(
                last, first, V, y, k2, inner_scale, class_weight, reference, top, others, offsets, moments,
                        index,
                TILE, LANES, UNIT, True, SMOOTHING, entropy is not None,
            )  # fmt: skip

            best = tl.max(top, 0)
            drop = tl.maximum((top - best) * k2, _NOTHING)
            rest = tl.sum(others * tl.exp2(drop), 0)
            # The target joins.
            lead = tl.maximum(best, tl.where(good, x_y, LOWEST))
            own_log = (x_y - lead) * k2
            own = tl.where(good, tl.exp2(own_log), 0.0)
            rest_log = tl.maximum((best - lead) * k2, _NOTHING)
            decay = tl.exp2(rest_log)
            if entropy is not None:
                moment = tl.sum(tl.exp2(drop) * (moments + others * drop), 0)
                moment = decay * (moment + rest * rest_log) + own * tl.maximum(own_log, _NOTHING)
            rest = rest * decay
            # log1p where the target leads: there the loss is small, and 1 + rest would round it away.
            log_total = tl.where(good & (x_y >= best), log1p(rest), tl.log(rest + own))
            row_lse = lead * k + log_total
            row_log_prob = tl.where(good, (x_y - lead) * k - log_total, float("nan"))
            # All of it smoothed, a target of probability 0 is not to make it 0 * inf.
            value = tl.where(label_smoothing < 1, -(1 - label_smoothing) * row_log_prob, 0.0)
            of_class, of_all = None, None
            if class_weight is not None:
                of_class, of_all = tl.load(class_weight + tl.maximum(y, 0)), tl.load(class_total)
                value *= of_class
            value += z_loss * row_lse * row_lse
            if SMOOTHING:
                offset = tl.sum(offsets, 0)
                if target_logit is not None:
                    stored = tl.load(from_row + tl.maximum(y, 0).to(tl.int64) * logits_stride)
                    offset -= _squash(stored, inner_scale) - reference
                share = 1.0 if of_all is None else of_all / V
                value += label_smoothing * (log_total * share - (offset / V + (reference - lead) * share) * k)
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

            if (out is not None) or (terms_out is not None):
                row_factor = weight / tl.load(divisor) * logit_scale
                if temperature is not None:
                    row_factor = row_factor / tl.load(temperature + row)
                row_factor = tl.where(good, row_factor, float("nan"))
                terms = gradient_terms(
                    row_lse, row_log_prob, row_factor, of_class, of_all, label_smoothing, z_loss, V, SMOOTHING
                )
            if terms_out is not None:
                lse2, factor, even, at_target = terms
                if inner_scale is not None:
                    at_target *= 1 - x_y * x_y
                _store_terms(terms_out + row, T, k2, lse2, factor, even, at_target)
            if out is not None:
                if LOOP:
                    # As the other tiles: the registers are needed for them.
                    last = _read(from_row, logits_stride, first, V, TILE, LANES, UNIT, True, "evict_first")
                _write(
                    into, 1, last, first, V, y, k2, inner_scale, class_weight, terms, TILE, LANES, UNIT, True, SMOOTHING
                )
                if LOOP:
                    for i in range(loops):
                        back = (loops - 1 - i) * TILE
                        raw = _read(from_row, logits_stride, back, V, TILE, LANES, UNIT, False, "evict_first")
                        _write(
                            into,
                            1,
                            raw,
                            back,
                            V,
                            y,
                            k2,
                            inner_scale,
                            class_weight,
                            terms,
                            TILE,
                            LANES,
                            UNIT,
                            False,
                            SMOOTHING,
                        )


@triton.jit
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
    label_smoothing,
    z_loss,
    SMOOTHING: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    UNLESS_ONE: tl.constexpr,  # nothing is to be done where the upstream gradient is 1
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradient of each row of logits, of zeros for ignored tokens."""
    V = V_units * UNIT
    upstream = tl.load(grad_loss)
    rows = T
    if UNLESS_ONE:
        rows = tl.where(upstream == 1, 0, T)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        label = tl.load(target + row)
        from_row = logits + _row_start(row, inner, logits_outer, logits_inner, UNIT)
        into = out + _row_start(row, inner, out_outer, out_inner, UNIT)
        if label == ignore_index:
            _clear(into, out_stride, loops, V, TILE, LANES, UNIT)
        else:
            good = (label >= 0) & (label < V)
            y = tl.where(good, label, -1).to(tl.int32)
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
                of_class, of_all = tl.load(class_weight + tl.maximum(y, 0)), tl.load(class_total)
            terms = gradient_terms(
                tl.load(lse + row), tl.load(log_prob + row), row_factor, of_class, of_all, label_smoothing, z_loss, V,
                SMOOTHING,
            )  # fmt: skip
            k2 = k * LOG2E
            for i in tl.range(0, loops, num_stages=STAGES):
                raw = _read(from_row, logits_stride, i * TILE, V, TILE, LANES, UNIT, False, "evict_first")
                _write(
                    into,
                    out_stride,
                    raw,
                    i * TILE,
                    V,
                    y,
                    k2,
                    inner_scale,
                    class_weight,
                    terms,
                    TILE,
                    LANES,
                    UNIT,
                    False,
                    SMOOTHING,
                )
            first = loops * TILE
            last = _read(from_row, logits_stride, first, V, TILE, LANES, UNIT, True, "evict_first")
            _write(
                into,
                out_stride,
                last,
                first,
                V,
                y,
                k2,
                inner_scale,
                class_weight,
                terms,
                TILE,
                LANES,
                UNIT,
                True,
                SMOOTHING,
            )


@triton.jit
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


@triton.jit
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


# ------------------------------------------------------------------------------------------------------- several ids


# An exponential above this, and below the next, is the largest one alone.
_LEADING = tl.constexpr(0.75)
_NO_COLUMN = tl.constexpr(2**31 - 1)


@triton.jit
def _follow(
    raw,  # [R, LANES, UNIT]: the logits from column `first` on
    first,
    V,
    k2,
    inner_scale,
    reference,
    top,  # [LANES] largest x
    total,  # [LANES] sum of exp(z - z of top)
    below,  # [LANES] the same without those above _LEADING
    moments,  # [LANES] sum of exp(z - z of top) * (z - z of top) * log2(e)
    column,  # [LANES] the first with the largest x
    offsets,  # [LANES] sum of x - reference
    squares,  # [LANES] sum of exp(z - z of top)**2
    squares_below,  # [LANES] the same without those above _LEADING
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    UNIT: tl.constexpr,
    MASKED: tl.constexpr,
    ENTROPY: tl.constexpr,
    TOP1: tl.constexpr,
    MEAN: tl.constexpr,
    SQUARES: tl.constexpr,
):
    """The running sums with another tile in them."""
    steps, lanes = _steps(SIZE, LANES, UNIT), _lanes(LANES, UNIT)
    x = _squash(raw, inner_scale)
    if MEAN:
        offset = x - reference
        if MASKED:
            offset = tl.where(steps >= V - first - lanes, 0.0, offset)
        offsets += tl.sum(tl.sum(offset, 2), 0)
    if MASKED:
        x = tl.where(steps >= V - first - lanes, float("-inf"), x)
    tile_top = tl.max(tl.max(x, 2), 0)
    if TOP1:
        at = tl.where(x == tile_top[None, :, None], first + lanes + steps, _NO_COLUMN)
        column = tl.where(tile_top > top, tl.min(tl.min(at, 2), 0), column)
    new_top = tl.maximum(top, tile_top)
    drop = tl.maximum((top - new_top) * k2, _NOTHING)
    decay = tl.exp2(drop)
    d = (x - new_top[None, :, None]) * k2
    e = tl.exp2(d)
    if ENTROPY:
        # p log p is 0 at p = 0, and 0 * -inf is not.
        moments = decay * (moments + total * drop) + tl.sum(tl.sum(e * tl.maximum(d, _NOTHING), 2), 0)
    # What was largest so far is below the new one.
    below = tl.where(drop < 0, total, below) * decay + tl.sum(tl.sum(tl.where(e > _LEADING, 0.0, e), 2), 0)
    total = total * decay + tl.sum(tl.sum(e, 2), 0)
    if SQUARES:
        squares_below = tl.where(drop < 0, squares, squares_below) * (decay * decay)
        squares_below += tl.sum(tl.sum(tl.where(e > _LEADING, 0.0, e * e), 2), 0)
        squares = squares * (decay * decay) + tl.sum(tl.sum(e * e, 2), 0)
    return new_top, total, below, moments, column, offsets, squares, squares_below


@triton.jit
def log_probs(
    logits,  # [T, V] in rows of any place, the columns of stride logits_stride
    ids,  # [T, K] int64
    kept,  # [T] int32: 0 where all ids are ignored
    temperature,  # [T] float32
    log_prob,  # [T, K] float32 out; 0 for ignored ids, NaN for those out of range
    lse,  # [T] float32 out, and so on; 0 for tokens whose ids are all ignored
    entropy,
    mean,  # of the logits under their softmax, with the entropy
    top1,  # [T] int64 out: the first largest logit; -1 for such tokens, and where all logits are -inf
    mean_logits,  # [T] float32 out: their plain mean
    log_sum_sq_probs,  # [T] float32 out: log(sum(p**2))
    T,
    K,
    V_units,  # V / UNIT
    loops,  # full tiles before the last one
    ignore_index,
    inner,  # rows of an outer one: see _row_start
    logits_outer,  # strides of rows in units of UNIT elements
    logits_inner,
    logits_stride,  # of columns, in elements
    inner_scale,  # of the logits before tanh, with a softcap
    outer_scale,  # of what comes after, but for the temperature
    LOOP: tl.constexpr,  # whether loops > 0
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The softmax of each row, read once, and the log-probabilities of its ids."""
    V = V_units * UNIT
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
            if mean_logits is not None:
                tl.store(mean_logits + row, 0.0)
            if log_sum_sq_probs is not None:
                tl.store(log_sum_sq_probs + row, 0.0)
            for start in range(0, K, BLOCK_K):
                tl.store(log_prob + own + start + several, tl.zeros([BLOCK_K], tl.float32), mask=start + several < K)
        else:
            from_row = logits + _row_start(row, inner, logits_outer, logits_inner, UNIT)
            k = outer_scale
            if temperature is not None:
                k = k / tl.load(temperature + row)
            k2 = k * LOG2E
            reference = 0.0
            if mean_logits is not None:
                # Sums relative to a logit of the row keep their digits, if that is a number.
                reference = _squash(tl.load(from_row), inner_scale)
                reference = tl.where((reference > LOWEST) & (reference < -LOWEST), reference, 0.0)

            top = tl.full([LANES], LOWEST, tl.float32)
            totals = tl.zeros([LANES], tl.float32)
            belows = tl.zeros([LANES], tl.float32)
            moments = tl.zeros([LANES], tl.float32)
            columns = tl.full([LANES], _NO_COLUMN, tl.int32)
            offsets = tl.zeros([LANES], tl.float32)
            squares = tl.zeros([LANES], tl.float32)
            squares_below = tl.zeros([LANES], tl.float32)
            if LOOP:
                for i in tl.range(0, loops, num_stages=STAGES):
                    raw = _read(from_row, logits_stride, i * TILE, V, TILE, LANES, UNIT, False, "evict_first")
                    top, totals, belows, moments, columns, offsets, squares, squares_below = _follow(
                        raw, i * TILE, V, k2, inner_scale, reference, top, totals, belows, moments, columns, offsets,
                        squares, squares_below,
                        TILE, LANES, UNIT, False, entropy is not None, top1 is not None, mean_logits is not None,
                        log_sum_sq_probs is not None,
                    )  # fmt: skip
            first = loops * TILE
            last = _read(from_row, logits_stride, first, V, TILE, LANES, UNIT, True, "evict_first")
            top, totals, belows, moments, columns, offsets, squares, squares_below = _follow(
                last, first, V, k2, inner_scale, reference, top, totals, belows, moments, columns, offsets,
                squares, squares_below,
                TILE, LANES, UNIT, True, entropy is not None, top1 is not None, mean_logits is not None,
                log_sum_sq_probs is not None,
            )  # fmt: skip

            best = tl.max(top, 0)
            drop = tl.maximum((top - best) * k2, _NOTHING)
            decay = tl.exp2(drop)
            total = tl.sum(totals * decay, 0)
            below = tl.sum(tl.where(drop < 0, totals, belows) * decay, 0)
            # log1p where one logit leads: there its own log-probability is small, and 1 + below would round it away.
            leads = (total > 0.5) & (total < 1.5)
            log_total = tl.where(leads, log1p(below), tl.log(total))
            tl.store(lse + row, best * k + log_total)
            if entropy is not None:
                offset = tl.sum(decay * (moments + totals * drop), 0) / (total * LOG2E)
                tl.store(entropy + row, log_total - offset)
                tl.store(mean + row, best * k + offset)
            if top1 is not None:
                column = tl.min(tl.where(top == best, columns, _NO_COLUMN), 0)
                tl.store(top1 + row, tl.where(column == _NO_COLUMN, -1, column).to(tl.int64))
            if mean_logits is not None:
                tl.store(mean_logits + row, (reference + tl.sum(offsets, 0) / V) * k)
            if log_sum_sq_probs is not None:
                square = tl.sum(squares * decay * decay, 0)
                square_below = tl.sum(tl.where(drop < 0, squares, squares_below) * decay * decay, 0)
                log_square = tl.where(leads, log1p(square_below), tl.log(square))
                tl.store(log_sum_sq_probs + row, log_square - 2 * log_total)

            for start in range(0, K, BLOCK_K):
                there = start + several < K
                label = tl.load(ids + own + start + several, mask=there, other=0)
                good = (label >= 0) & (label < V) & (label != ignore_index)
                x = tl.load(from_row + tl.where(good, label, 0) * logits_stride, mask=there & good, other=0.0)
                value = (_squash(x, inner_scale) - best) * k - log_total
                value = tl.where(label == ignore_index, 0.0, tl.where(good, value, float("nan")))
                tl.store(log_prob + own + start + several, value, mask=there)


@triton.jit
def _write_statistics(
    row,  # of the gradient, contiguous
    raw,  # [R, LANES, UNIT]: the logits from column `first` on
    first,
    V,
    k,
    inner_scale,
    center,
    width,  # None: the entropy has no upstream gradient
    factor,
    entropy_row,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    UNIT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The gradient of a tile's logits, but for the ids' own entries."""
    steps, lanes = _steps(SIZE, LANES, UNIT), _lanes(LANES, UNIT)
    x = _squash(raw, inner_scale)
    if width is None:
        g = tl.exp2(x * (k * LOG2E) - center * LOG2E) * factor
    else:
        offset = x * k - center
        # exp of -128 is 0 in float32, and 0 * -inf is not.
        g = tl.exp2((offset - width) * LOG2E) * (factor + entropy_row * tl.maximum(offset, -128.0))
    if inner_scale is not None:
        g *= 1 - x * x
    at = row + (first + lanes + steps)
    g = g.to(row.dtype.element_ty)
    if MASKED:
        tl.store(at, g, mask=steps < V - first - lanes, eviction_policy="evict_first")
    else:
        tl.store(at, g, eviction_policy="evict_first")


@triton.jit
def log_prob_gradients(
    logits,  # as in `log_probs`
    kept,
    temperature,
    center,  # [T] float32: the mean logit where the entropy has an upstream gradient, else lse
    width,  # [T] float32: the entropy, if it has one
    factor,  # [T] float32: what p is multiplied by
    entropy_row,  # [T] float32: and p (z - mean), if the entropy has an upstream gradient
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
    STAGES: tl.constexpr,
):
    """The gradient of each row of logits but for its ids' entries; zeros for tokens whose ids are all ignored."""
    V = V_units * UNIT
    for row in range(tl.program_id(0), T, tl.num_programs(0)):
        into = out + tl.cast(row, tl.int64) * V
        if tl.load(kept + row) == 0:
            _clear(into, 1, loops, V, TILE, LANES, UNIT)
        else:
            from_row = logits + _row_start(row, inner, logits_outer, logits_inner, UNIT)
            k = outer_scale
            if temperature is not None:
                k = k / tl.load(temperature + row)
            row_center, row_factor = tl.load(center + row), tl.load(factor + row)
            row_width, by_entropy = None, None
            if width is not None:
                row_width, by_entropy = tl.load(width + row), tl.load(entropy_row + row)
            for i in tl.range(0, loops, num_stages=STAGES):
                raw = _read(from_row, logits_stride, i * TILE, V, TILE, LANES, UNIT, False, "evict_first")
                _write_statistics(
                    into, raw, i * TILE, V, k, inner_scale, row_center, row_width, row_factor, by_entropy,
                    TILE, LANES, UNIT, False,
                )  # fmt: skip
            first = loops * TILE
            last = _read(from_row, logits_stride, first, V, TILE, LANES, UNIT, True, "evict_first")
            _write_statistics(
                into, last, first, V, k, inner_scale, row_center, row_width, row_factor, by_entropy,
                TILE, LANES, UNIT, True,
            )  # fmt: skip


@triton.jit
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
    BLOCK: tl.constexpr,
):
    """The ids' own entries, over what `log_prob_gradients` wrote there."""
    V = V_units * UNIT
    i = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = i < tl.cast(T, tl.int64) * K
    label, row = tl.load(ids + i, mask=there, other=-1), i // K
    good = there & (label >= 0) & (label < V) & (label != ignore_index)
    g = tl.load(at_ids + i, mask=good, other=0.0)
    if inner_scale is not None:
        start = _row_start(row, inner, logits_outer, logits_inner, UNIT)
        x = _squash(tl.load(logits + start + label * logits_stride, mask=good, other=0.0), inner_scale)
        g *= 1 - x * x
    tl.store(out + row * V + label, g.to(out.dtype.element_ty), mask=good)
