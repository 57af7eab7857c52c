"""The Triton kernels of linear_cross_entropy.  Their launchers, and the maths around them, are in triton_walks.py.

Sizes: T tokens, H hidden, V vocab.  Tokens that are not ignored are compacted to the front: `count` of them, known to
the device alone; a *position* is an index among those.  Every kernel works through `count` and skips the rest, so
nothing waits for the host.  VOCAB_TILE columns of logits of one block of positions make a tile; per tile and position
the forward kernel stores the maximum and the sum of exponentials, [tiles, T], and on request the exponentials.

The stash, exponentials relative to the tile's maximum, is kept tile by tile: VOCAB_TILE columns of `stride` positions,
[tiles * stride, VOCAB_TILE].  That is as many elements as VOCAB_TILE rows of the weight's gradient have when stride = H,
so a stash of up to H positions lives in the memory of the gradient that will replace it.

Matrix operands come through TMA descriptors where `TMA` (Hopper, rows of a multiple of 16 bytes), else through pointers.
The persistent loop over tiles with its flattened product is that of Triton's matrix multiplication tutorial.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Where every logit so far is -inf, the maximum is this: finite, so that a difference of two is never NaN.
LOWEST = tl.constexpr(-8.0e37)
VOCAB_TILE = tl.constexpr(256)
# Triton's interpreter has no reduction through a descriptor.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _load(x, stride, row, column, rows, columns, R: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """The block [R, C] at (row, column) of a [rows, columns] matrix, 0 outside of it."""
    if TMA:
        return x.load([row, column])
    else:  # noqa: RET505: without it, Triton compiles what follows for a descriptor too
        r = row + tl.arange(0, R)
        c = column + tl.arange(0, C)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        return tl.load(x + r.to(tl.int64)[:, None] * stride + c[None, :], mask=inside, other=0)


@triton.jit
def _store(x, stride, row, column, rows, columns, value, R: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """Store a block [R, C] at (row, column) of a [rows, columns] matrix, and nothing outside of it."""
    if TMA:
        x.store([row, column], value)
    else:
        r = row + tl.arange(0, R)
        c = column + tl.arange(0, C)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        tl.store(x + r.to(tl.int64)[:, None] * stride + c[None, :], value, mask=inside)


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile: GROUP rows of tiles at a time, column by column, so that L2 serves the operands."""
    per_group = GROUP * tiles_n
    first = (tile // per_group) * GROUP
    height = min(tiles_m - first, GROUP)
    within = tile % per_group
    return first + within % height, within // height


@triton.jit
def _halves(x, M: tl.constexpr, N: tl.constexpr):
    """The left and the right half of x [M, N]."""
    return tl.split(tl.permute(tl.reshape(x, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def _store_columns(
    into, stride, row, column, rows, columns, value,
    R: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    if PARTS == 1:
        _store(into, stride, row, column, rows, columns, value, R, C, TMA)
    else:
        left, right = _halves(value, R, C)
        _store_columns(into, stride, row, column, rows, columns, left, R, C // 2, PARTS // 2, TMA)
        _store_columns(into, stride, row, column + C // 2, rows, columns, right, R, C // 2, PARTS // 2, TMA)


@triton.jit
def _tanh(x):
    # The approximate instruction has 11 bits; this has 22, and its own limits at both ends.
    return 1 - 2 / (tl.exp2(x * (2 * LOG2E)) + 1)


@triton.jit
def _unscaled(product, bias, v, inner_scale, V, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """The logits up to a factor of each token: x with z = x * factor."""
    x = product
    if BIAS:
        x += tl.load(bias + v, mask=v < V, other=0.0)[None, :]
    if SOFTCAP:
        x = _tanh(x * inner_scale)
    return x


@triton.jit
def compact_tokens(target, position, order, count, T, ignore_index, BLOCK: tl.constexpr):
    """Number the tokens that are not ignored, in their order.  One program."""
    total = tl.zeros((), tl.int32)
    for start in range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        kept = (tl.load(target + t, mask=t < T, other=ignore_index) != ignore_index).to(tl.int32)
        at = total + tl.cumsum(kept, 0) - 1
        tl.store(position + t, tl.where(kept != 0, at, -1), mask=t < T)
        tl.store(order + at, t, mask=(t < T) & (kept != 0))
        total += tl.sum(kept, 0)
    tl.store(count, total)


@triton.jit
def gather_tokens(
    hidden,  # [T, H], any strides
    weight,  # [V, H] with rows of stride weight_stride
    bias,  # [V] float32
    target,  # [T] int64
    temperature,  # [T] float32
    order,  # [T] int32
    count,
    rows,  # [T, H] out: hidden of each position, 0 beyond the last up to a whole block
    label,  # [T] int32 out: target of each position, -1 if it is out of range
    factor,  # [T] float32 out: z = x * factor
    target_logit,  # [T] float32 out: z of the target
    first,
    hidden_stride_t,
    hidden_stride_h,
    weight_stride,
    H,
    V,
    T,
    inner_scale,  # of the product before tanh
    outer_scale,  # of what comes after, but for the temperature
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
):
    """Hidden states and labels by position, from position `first` on; and the target's logit."""
    i = tl.program_id(0)
    at = first + i
    n = tl.load(count)
    if at < tl.cdiv(tl.maximum(n, 1), PAD) * PAD:
        there = at < n
        t = tl.load(order + at, mask=there, other=0).to(tl.int64)
        y = tl.load(target + t)
        good = (y >= 0) & (y < V)
        y = tl.where(good, y, 0)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, H, BLOCK):
            c = start + tl.arange(0, BLOCK)
            h = tl.load(hidden + t * hidden_stride_t + c.to(tl.int64) * hidden_stride_h, mask=(c < H) & there, other=0)
            h = h.to(rows.dtype.element_ty)
            tl.store(rows + i.to(tl.int64) * H + c, h, mask=c < H)
            w = tl.load(weight + y * weight_stride + c, mask=c < H, other=0)
            total += h.to(tl.float32) * w.to(tl.float32)
        x = tl.sum(total, 0)
        if BIAS:
            x += tl.load(bias + y)
        if SOFTCAP:
            x = _tanh(x * inner_scale)
        k = outer_scale
        if TEMPERATURE:
            k = k / tl.load(temperature + t)
        tl.store(factor + at, k)
        tl.store(target_logit + at, x * k)
        tl.store(label + at, tl.where(good, y, -1).to(tl.int32))


@triton.jit
def softmax_tiles(
    rows,  # [count, H] of positions from `first` on
    weight,  # [V, H]
    bias,  # [V] float32
    label,
    factor,
    count,
    maximum,  # [tiles, T] float32 out: of z
    others,  # [tiles, T] float32 out: sum of exp(z - maximum) over all but the target
    offset_sum,  # [tiles, T] float32 out: sum of z - maximum
    moment,  # [tiles, T] float32 out: sum of exp(z - maximum) * (z - maximum)
    argmax,  # [tiles, T] int32 out
    stash,  # [whole tiles * stash_stride, VOCAB_TILE] out, for positions below stash_tokens
    overflow,  # [..., VOCAB_TILE] out, for the positions after those, and for the last tile if it is not whole
    first,
    rows_stride,
    weight_stride,
    T,
    H,
    V,
    partial_stride,
    stash_tokens,
    stash_stride,
    overflow_tokens,
    stash_rows,
    overflow_rows,
    inner_scale,
    exponential_scale,  # what exponentials are multiplied by before they are stored
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    STATS: tl.constexpr,
    STASH: tl.constexpr,
    OVERFLOW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
):
    """The softmax of each tile of logits, which live in registers alone."""
    n = tl.minimum(tl.load(count) - first, T)
    tiles_t = tl.cdiv(n, BLOCK_T)
    tiles_v = tl.cdiv(V, VOCAB_TILE)
    steps = tl.cdiv(H, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_t * tiles_v, PROGRAMS, flatten=True):
        i, j = _place(tile, tiles_t, tiles_v, GROUP)
        t0 = i * BLOCK_T
        v0 = j * VOCAB_TILE
        z = tl.zeros((BLOCK_T, VOCAB_TILE), tl.float32)
        for k in range(steps):
            a = _load(rows, rows_stride, t0, k * BLOCK_K, T, H, BLOCK_T, BLOCK_K, TMA)
            b = _load(weight, weight_stride, v0, k * BLOCK_K, V, H, VOCAB_TILE, BLOCK_K, TMA)
            z = tl.dot(a, b.T, z)

        t = t0 + tl.arange(0, BLOCK_T)
        v = v0 + tl.arange(0, VOCAB_TILE)
        inside = t < n
        y = tl.load(label + t, mask=inside, other=-1)
        k_z = tl.load(factor + t, mask=inside, other=0.0)
        x = _unscaled(z, bias, v, inner_scale, V, BIAS, SOFTCAP)
        x = tl.where((v < V)[None, :], x, float("-inf"))
        top = tl.maximum(tl.max(x, 1), LOWEST)
        at = j.to(tl.int64) * partial_stride + t
        tl.store(maximum + at, top * k_z, mask=inside)
        if STATS:
            tl.store(argmax + at, v0 + tl.argmax(x, 1), mask=inside)
        k_2 = k_z * LOG2E
        if SMOOTHING:
            tl.store(offset_sum + at, tl.sum(tl.where((v < V)[None, :], x - top[:, None], 0.0), 1) * k_z, mask=inside)
        e = tl.exp2((x - top[:, None]) * k_2[:, None])
        tl.store(others + at, tl.sum(tl.where(v[None, :] == y[:, None], 0.0, e), 1), mask=inside)
        if STATS:
            # p log p is 0 at p = 0, and 0 * -inf is not.
            tl.store(moment + at, tl.sum(e * tl.maximum((x - top[:, None]) * k_z[:, None], -1e30), 1), mask=inside)
        if STASH:
            kept = (e * exponential_scale).to(rows.dtype if TMA else rows.dtype.element_ty)
            # No branches, which Triton 3.6 can't flatten a loop around: a row past the end is not stored.
            home = (t0 < stash_tokens) & (j < V // VOCAB_TILE)
            row = tl.where(home, j * stash_stride + t0, stash_rows)
            _store_columns(
                stash, VOCAB_TILE, row, 0, stash_rows, VOCAB_TILE, kept, BLOCK_T, VOCAB_TILE, PARTS, TMA
            )
            if OVERFLOW:
                row = _overflow_row(j, t0, V, stash_tokens, overflow_tokens)
                row = tl.where((home == 0) & (t0 < stash_tokens + overflow_tokens), row, overflow_rows)
                _store_columns(
                    overflow, VOCAB_TILE, row, 0, overflow_rows, VOCAB_TILE, kept, BLOCK_T, VOCAB_TILE, PARTS, TMA
                )


@triton.jit
def _overflow_row(j, t, V, stash_tokens, overflow_tokens):
    """Row in `overflow` of position t of tile j: positions beyond the stash, and those of the last, ragged tile."""
    tiles = tl.cdiv(V, VOCAB_TILE)
    return tl.where(t < stash_tokens, tiles * overflow_tokens + t, j * overflow_tokens + t - stash_tokens)


@triton.jit
def merge_tiles(
    position,  # [T] int32
    label,
    target_logit,
    maximum,
    others,
    offset_sum,
    moment,
    argmax,
    token_weight,  # [T] float32
    loss,  # [T] float32 out, and so on; all by token
    lse,
    log_prob,
    entropy,
    correct,
    T,
    V,
    tiles,
    partial_stride,
    first,
    last,
    label_smoothing,
    z_loss,
    TOKEN_WEIGHT: tl.constexpr,
    SMOOTHING: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The softmax over all tiles, and the loss, of the tokens whose positions are in [first, last); 0 for ignored ones."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    at = tl.load(position + t, mask=t < T, other=-2)
    mine = (at >= first) & (at < last)
    y = tl.load(label + at, mask=mine, other=0)
    z = tl.where(y < 0, LOWEST, tl.load(target_logit + at, mask=mine, other=0.0))
    top = tl.full((BLOCK_T,), LOWEST, tl.float32)
    index = tl.zeros((BLOCK_T,), tl.int32)
    for start in range(0, tiles, BLOCK):
        j = start + tl.arange(0, BLOCK)
        where = j.to(tl.int64)[:, None] * partial_stride + (at - first)[None, :]
        m = tl.load(maximum + where, mask=(j < tiles)[:, None] & mine[None, :], other=LOWEST)
        best = tl.max(m, 0)
        if STATS:
            tile = start + tl.argmax(m, 0)
            found = tl.load(argmax + tile.to(tl.int64) * partial_stride + at - first, mask=mine & (tile < tiles), other=0)
            index = tl.where(best > top, found, index)
        top = tl.maximum(top, best)
    top = tl.maximum(top, z)  # computed apart: the last digit may differ
    rest = tl.zeros((BLOCK_T,), tl.float32)
    offsets = tl.zeros((BLOCK_T,), tl.float32)
    moments = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, tiles, BLOCK):
        j = start + tl.arange(0, BLOCK)
        where = j.to(tl.int64)[:, None] * partial_stride + (at - first)[None, :]
        inside = (j < tiles)[:, None] & mine[None, :]
        drop = tl.load(maximum + where, mask=inside, other=LOWEST) - top[None, :]
        decay = tl.exp2(drop * LOG2E)
        s = tl.load(others + where, mask=inside, other=0.0)
        rest += tl.sum(s * decay, 0)
        if SMOOTHING:
            width = tl.minimum(V - j * VOCAB_TILE, VOCAB_TILE).to(tl.float32)
            offset = tl.load(offset_sum + where, mask=inside, other=0.0)
            offsets += tl.sum(tl.where(inside, offset + drop * width[:, None], 0.0), 0)
        if STATS:
            m = tl.load(moment + where, mask=inside, other=0.0)
            # The target belongs to its tile's moment, and to its sum here.
            own = (y >= 0)[None, :] & (y[None, :] // VOCAB_TILE == j[:, None])
            total = s + tl.where(own & inside, tl.exp2((z[None, :] - top[None, :] - drop) * LOG2E), 0.0)
            moments += tl.sum(tl.where(decay > 0, decay * (m + total * drop), 0.0), 0)
    own = tl.exp2((z - top) * LOG2E)
    total = rest + own
    # log1p where the target leads: there the loss is small, and 1 + others would round it away.
    log_total = tl.where(z >= top, _log1p(rest), tl.log(total))
    value_lse = top + log_total
    value_log_prob = (z - top) - log_total
    value_log_prob = tl.where(y < 0, float("nan"), value_log_prob)
    value = -(1 - label_smoothing) * value_log_prob + z_loss * value_lse * value_lse
    if SMOOTHING:
        value += label_smoothing * (log_total - offsets / V)
    if TOKEN_WEIGHT:
        value *= tl.load(token_weight + t, mask=mine, other=0.0)
    value = tl.where(y < 0, float("nan"), value)
    store = (t < T) & (mine | ((first == 0) & (at == -1)))
    tl.store(loss + t, tl.where(mine, value, 0.0), mask=store)
    tl.store(lse + t, tl.where(mine, value_lse, 0.0), mask=store)
    tl.store(log_prob + t, tl.where(mine, value_log_prob, 0.0), mask=store)
    if STATS:
        tl.store(entropy + t, tl.where(mine, log_total - moments / total, 0.0), mask=store)
        tl.store(correct + t, mine & (index == y), mask=store)


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= 0: below 1/2 the series of 2 atanh(x / (2 + x)), since the instruction's error is absolute."""
    s = x / (2 + x)
    q = s * s
    series = 2 * s * (1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11))))))
    return tl.where(x < 0.5, series, tl.log(1 + x))


@triton.jit
def _to_gradient(
    p, v, y, lse, log_prob, row, V, label_smoothing, z_loss, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr
):
    """row * d(loss) / dz from probabilities p [tokens, vocab]; the target's is made from its log-probability.

    p - 1 as expm1(log p): -1 added to a rounded p would lose all digits of a p near 1.
    """
    at_target = _expm1(log_prob)
    factor = row
    if Z_LOSS:
        factor = row * (1 + 2 * z_loss * lse)
        at_target += 2 * z_loss * lse * tl.exp2(log_prob * LOG2E)
    g = p * factor[:, None]
    if SMOOTHING:
        even = label_smoothing / V
        at_target += label_smoothing - even
        g -= (row * even)[:, None]
    return tl.where(v[None, :] == y[:, None], (row * at_target)[:, None], g)


@triton.jit
def _expm1(x):
    """exp(x) - 1 for x <= 0: Taylor's series near 0."""
    series = x * (1 + x * (0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720))))))
    return tl.where(x > -0.3, series, tl.exp2(x * LOG2E) - 1)


@triton.jit
def normalise_stash(
    stash,
    overflow,
    gradient,  # [T, chunk] out
    order,
    count,
    label,
    factor,
    maximum,
    lse,
    log_prob,
    row,
    first_tile,
    gradient_stride,
    V,
    partial_stride,
    stash_tokens,
    stash_stride,
    overflow_tokens,
    T,
    inverse_exponential_scale,
    label_smoothing,
    z_loss,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PAD: tl.constexpr,
):
    """Exponentials become the logits' gradient: one read, one write."""
    n = tl.load(count)
    t0 = tl.program_id(1) * BLOCK_T
    j = first_tile + tl.program_id(0)
    if t0 < tl.cdiv(tl.maximum(n, 1), PAD) * PAD:
        t = t0 + tl.arange(0, BLOCK_T)
        v = tl.arange(0, VOCAB_TILE)
        inside = t < n
        if (t0 < stash_tokens) & (j < V // VOCAB_TILE):
            start = stash + (j * stash_stride + t0).to(tl.int64) * VOCAB_TILE
        else:
            start = overflow + _overflow_row(j, t0, V, stash_tokens, overflow_tokens).to(tl.int64) * VOCAB_TILE
        e = tl.load(start + tl.arange(0, BLOCK_T)[:, None] * VOCAB_TILE + v[None, :]).to(tl.float32)
        token = tl.load(order + t, mask=inside, other=0)
        l = tl.load(lse + token, mask=inside, other=0.0)
        lp = tl.load(log_prob + token, mask=inside, other=0.0)
        r = tl.load(row + t, mask=inside, other=0.0)
        y = tl.load(label + t, mask=inside, other=-1)
        m = tl.load(maximum + j.to(tl.int64) * partial_stride + t, mask=inside, other=0.0)
        p = e * (tl.exp2((m - l) * LOG2E) * inverse_exponential_scale)[:, None]
        vocab = j * VOCAB_TILE + v
        g = _to_gradient(p, vocab, y, l, lp, r, V, label_smoothing, z_loss, SMOOTHING, Z_LOSS)
        if SOFTCAP:
            k = tl.load(factor + t, mask=inside, other=1.0)
            z = m[:, None] + tl.log(tl.maximum(e * inverse_exponential_scale, 1e-38))
            u = tl.maximum(z / k[:, None], -1.0)
            g *= 1 - u * u
        g = tl.where(inside[:, None] & (vocab < V)[None, :], g, 0.0)
        out = gradient + t.to(tl.int64)[:, None] * gradient_stride + (tl.program_id(0) * VOCAB_TILE + v)[None, :]
        tl.store(out, g.to(gradient.dtype.element_ty), mask=(t < T)[:, None])


@triton.jit
def gradient_tiles(
    rows,
    weight,
    bias,
    gradient,  # [T, chunk] out
    order,
    count,
    label,
    factor,
    lse,
    log_prob,
    row,
    first,  # position
    first_tile,
    chunk_tiles,
    rows_stride,
    weight_stride,
    gradient_stride,
    T,
    H,
    V,
    inner_scale,
    label_smoothing,
    z_loss,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Logits computed again, and their gradient, of the positions from `first` on, for a chunk of the vocabulary."""
    n = tl.load(count)
    tiles_t = tl.cdiv(tl.maximum(tl.maximum(n, 1) - first, 0), BLOCK_T)
    steps = tl.cdiv(H, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_t * chunk_tiles, PROGRAMS, flatten=True):
        i, j = _place(tile, tiles_t, chunk_tiles, GROUP)
        t0 = first + i * BLOCK_T
        v0 = (first_tile + j) * VOCAB_TILE
        z = tl.zeros((BLOCK_T, VOCAB_TILE), tl.float32)
        for k in range(steps):
            a = _load(rows, rows_stride, t0, k * BLOCK_K, T, H, BLOCK_T, BLOCK_K, TMA)
            b = _load(weight, weight_stride, v0, k * BLOCK_K, V, H, VOCAB_TILE, BLOCK_K, TMA)
            z = tl.dot(a, b.T, z)

        t = t0 + tl.arange(0, BLOCK_T)
        v = v0 + tl.arange(0, VOCAB_TILE)
        inside = t < n
        token = tl.load(order + t, mask=inside, other=0)
        l = tl.load(lse + token, mask=inside, other=0.0)
        lp = tl.load(log_prob + token, mask=inside, other=0.0)
        r = tl.load(row + t, mask=inside, other=0.0)
        y = tl.load(label + t, mask=inside, other=-1)
        k_z = tl.load(factor + t, mask=inside, other=0.0)
        x = _unscaled(z, bias, v, inner_scale, V, BIAS, SOFTCAP)
        p = tl.exp2(x * (k_z * LOG2E)[:, None] - (l * LOG2E)[:, None])
        g = _to_gradient(p, v, y, l, lp, r, V, label_smoothing, z_loss, SMOOTHING, Z_LOSS)
        if SOFTCAP:
            g *= 1 - x * x
        g = tl.where(inside[:, None] & (v < V)[None, :], g, 0.0)
        _store_columns(
            gradient, gradient_stride, t0, j * VOCAB_TILE, T, chunk_tiles * VOCAB_TILE,
            g.to(rows.dtype if TMA else rows.dtype.element_ty), BLOCK_T, VOCAB_TILE, PARTS, TMA,
        )  # fmt: skip


@triton.jit
def weight_gradient(
    gradient,  # [T, chunk]
    rows,  # [T, H]
    out,  # [V, H] out, or added to
    count,
    shrink,  # [] float32: what the product is multiplied by
    first_row,
    gradient_stride,
    rows_stride,
    out_stride,
    T,
    H,
    V,
    chunk,
    SHRINK: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
):
    """gradient.T @ rows for a chunk of the vocabulary, each element rounded once."""
    steps = tl.cdiv(tl.maximum(tl.load(count), 1), BLOCK_K)
    tiles_v = tl.cdiv(chunk, BLOCK_V)
    tiles_h = tl.cdiv(H, BLOCK_H)
    for tile in tl.range(tl.program_id(0), tiles_v * tiles_h, PROGRAMS, flatten=True):
        i, j = _place(tile, tiles_v, tiles_h, GROUP)
        acc = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
        for k in range(steps):
            a = _load(gradient, gradient_stride, k * BLOCK_K, i * BLOCK_V, T, chunk, BLOCK_K, BLOCK_V, TMA)
            b = _load(rows, rows_stride, k * BLOCK_K, j * BLOCK_H, T, H, BLOCK_K, BLOCK_H, TMA)
            acc = tl.dot(a.T, b, acc)
        if SHRINK:
            acc *= tl.load(shrink)
        row = first_row + i * BLOCK_V
        if ADD:
            _add_columns(out, out_stride, row, j * BLOCK_H, V, H, acc, BLOCK_V, BLOCK_H, PARTS, TMA)
        else:
            value = acc.to(out.dtype if TMA else out.dtype.element_ty)
            _store_columns(out, out_stride, row, j * BLOCK_H, V, H, value, BLOCK_V, BLOCK_H, PARTS, TMA)


@triton.jit
def _add_columns(
    into, stride, row, column, rows, columns, value,
    R: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    if PARTS == 1:
        if TMA and not INTERPRETED:
            into.atomic_add([row, column], value)  # each element once per launch, so the order is that of the launches
        else:
            before = _load(into, stride, row, column, rows, columns, R, C, TMA)
            _store(into, stride, row, column, rows, columns, before + value, R, C, TMA)
    else:
        left, right = _halves(value, R, C)
        _add_columns(into, stride, row, column, rows, columns, left, R, C // 2, PARTS // 2, TMA)
        _add_columns(into, stride, row, column + C // 2, rows, columns, right, R, C // 2, PARTS // 2, TMA)


@triton.jit
def hidden_gradient(
    gradient,  # [T, chunk]
    weight,  # [V, H]
    out,  # [SPLITS * split_rows, H] float32 out, or added to
    count,
    first_row,
    gradient_stride,
    weight_stride,
    out_stride,
    T,
    H,
    V,
    chunk,
    part,
    split_rows,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
):
    """gradient @ weight for a chunk of the vocabulary, by position, summed over chunks in float32.

    The chunk is cut into SPLITS parts, each with sums of its own: more and shorter tiles, which fill the last wave
    better (H2560, T4096 on an H100: 320 tiles on 132 multiprocessors took 0.56 ms where cuBLAS takes 0.47).
    """
    tiles_t = tl.cdiv(tl.load(count), BLOCK_T)
    tiles_h = tl.cdiv(H, BLOCK_H)
    steps = tl.cdiv(part, BLOCK_K)
    per_split = tiles_t * tiles_h
    for tile in tl.range(tl.program_id(0), per_split * SPLITS, PROGRAMS, flatten=True):
        split = tile // per_split
        i, j = _place(tile % per_split, tiles_t, tiles_h, GROUP)
        acc = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
        for k in range(steps):
            v = split * part + k * BLOCK_K
            a = _load(gradient, gradient_stride, i * BLOCK_T, v, T, chunk, BLOCK_T, BLOCK_K, TMA)
            b = _load(weight, weight_stride, first_row + v, j * BLOCK_H, V, H, BLOCK_K, BLOCK_H, TMA)
            acc = tl.dot(a, b, acc)
        row = split * split_rows + i * BLOCK_T
        if ADD:
            _add_columns(
                out, out_stride, row, j * BLOCK_H, split_rows * SPLITS, H, acc, BLOCK_T, BLOCK_H, PARTS, TMA
            )
        else:
            _store_columns(
                out, out_stride, row, j * BLOCK_H, split_rows * SPLITS, H, acc, BLOCK_T, BLOCK_H, PARTS, TMA
            )


@triton.jit
def bias_gradient(
    gradient, out, count, shrink, first_row, gradient_stride, V, SHRINK: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Column sums of a chunk of the logits' gradient."""
    n = tl.load(count)
    c = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    total = tl.zeros((BLOCK_V,), tl.float32)
    for start in range(0, n, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        g = tl.load(gradient + t.to(tl.int64)[:, None] * gradient_stride + c[None, :], mask=(t < n)[:, None], other=0.0)
        total += tl.sum(g.to(tl.float32), 0)
    if SHRINK:
        total *= tl.load(shrink)
    tl.store(out + first_row + c, total, mask=first_row + c < V)


@triton.jit
def finish_hidden(
    sums,  # [SPLITS * split_rows, H] float32, by position
    position,
    shrink,
    out,  # [T, H] out, by token
    H,
    split_rows,
    SPLITS: tl.constexpr,
    SHRINK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round the hidden gradient, and put each row in its token's place; 0 for ignored tokens."""
    t = tl.program_id(0)
    at = tl.load(position + t)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        row = (split * split_rows + at).to(tl.int64)
        value += tl.load(sums + row * H + c, mask=(c < H) & (at >= 0), other=0.0)
    if SHRINK:
        value *= tl.load(shrink)
    tl.store(out + t.to(tl.int64) * H + c, value, mask=c < H)
