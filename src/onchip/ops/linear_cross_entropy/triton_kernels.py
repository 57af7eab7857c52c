"""The Triton kernels of linear_cross_entropy; their launchers, and in which order they run, are in triton_walks.py.

Sizes: T tokens, H hidden, V vocab.  Tokens that are not ignored are compacted to the front: `count` of them, known to
the device alone; a *position* is an index among those.  Every kernel works through `count` and skips the rest, so
nothing waits for the host.  VOCAB_TILE columns of logits of one block of positions make a tile; per tile and position
the forward kernel stores the maximum and the sum of exponentials, [tiles, T], and on request the exponentials.

Exponentials are matrices of VOCAB_TILE columns with a row for each tile and position, in up to three places
(`_exponential_row`): the memory of the weight's gradient, scratch, and, computed again in backward, a buffer for one
chunk of the vocabulary.  One descriptor spans all three: rows are counted from the lowest of their addresses.

What is kept is exp(z - shift), with a shift of each token that is known beforehand, its target's logit plus 30.  16-bit
floats with 8 bits of exponent hold that exactly as well as any, unless a logit is more than 90 above the target's;
`settle_exponentials` mends such tokens, and costs nothing where there are none.  So the gradients are plain products of
what is kept: the factor exp(shift - lse) of each token goes into the rows of hidden (for the weight's gradient) and
into the result's rows (for hidden's).

A target's entry, p - 1, is the largest of its row by far, and would carry the roundings of the exponential and of the
scaled row into both gradients.  For the first two tokens that have a vocabulary entry as their target it is left out
of the products and added to their results, from the weight's and hidden's own rows; that of further ones takes the
place of their exponential, and hidden's gradient is given back what its rounding took.

Matrix operands come through TMA descriptors where `TMA` (Hopper, rows of a multiple of 16 bytes), else by pointers.
The persistent loop over tiles with its flattened product is that of Triton's matrix multiplication tutorial.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

LOG2E = tl.constexpr(1.4426950408889634)
# Where every logit so far is -inf, the maximum is this: finite, so that a difference of two is never NaN.
LOWEST = tl.constexpr(-8.0e37)
VOCAB_TILE = tl.constexpr(256)
# Logits up to so much above a token's shift are stored relative to it.
REACH = tl.constexpr(60.0)
# An owner that there isn't; see `replace_targets`.
NOBODY = tl.constexpr(2**31 - 1)
# Triton's interpreter has no reduction through a descriptor.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _load(x, stride, row, column, rows, columns, R: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr):
    """The block [R, C] at (row, column) of a [rows, columns] matrix, 0 outside of it."""
    if TMA:
        return x.load([row, column])
    else:  # noqa: RET505 - without it, Triton compiles what follows for a descriptor too
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
def _exponential_row(j, t, home, home_stride, home_tokens, spill, spill_tokens, again, again_tokens, first_tile):
    """Row of tile j's exponentials of the positions from t on, a multiple of the blocks that they are handled in.

    The first `home_tokens` positions live in the weight gradient's memory, the next `spill_tokens` in scratch, and the
    rest, for the tiles from `first_tile` on, in the buffer for what is computed again.
    """
    in_home = home + j * home_stride + t
    in_spill = spill + j * spill_tokens + t - home_tokens
    in_again = again + (j - first_tile) * again_tokens + t - home_tokens - spill_tokens
    kept = tl.where(t < home_tokens, in_home, in_spill)
    return tl.where(t < home_tokens + spill_tokens, kept, in_again)


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
    shift,  # [T] float32 out
    owners,  # [2, V] int32, filled with NOBODY; out: the first position that has an entry as its target
    held,
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
    SHIFT: tl.constexpr,
    KEEP: tl.constexpr,
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
        z = x * k
        tl.store(target_logit + at, z)
        # Without a shift every token is one to be settled.
        tl.store(shift + at, z + 30.0 if SHIFT else -3.0e38)
        tl.store(label + at, tl.where(good, y, -1).to(tl.int32))
        if KEEP:
            tl.atomic_min(owners + y, at, mask=good & (at < tl.minimum(n, held)))


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
    shift,  # [T] float32
    exponentials,  # [rows, VOCAB_TILE] out, of the first home_tokens + spill_tokens positions
    first,
    rows_stride,
    weight_stride,
    T,
    H,
    V,
    partial_stride,
    exponential_rows,
    home,
    home_stride,
    home_tokens,
    spill,
    spill_tokens,
    inner_scale,
    exponential_scale,  # what exponentials are multiplied by before they are stored
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    STATS: tl.constexpr,
    KEEP: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
):
    """The softmax of each tile of logits, which live in registers alone."""
    n = tl.minimum(tl.load(count) - first, T)
    # At least one block where exponentials are kept: of no token at all, so that no product reads what nobody wrote.
    tiles_t = tl.cdiv(tl.maximum(n, 1 if KEEP else 0), BLOCK_T)
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
        k_z = tl.load(factor + t, mask=inside, other=1.0)
        x = _unscaled(z, bias, v, inner_scale, V, BIAS, SOFTCAP)
        if RAGGED:
            x = tl.where((v < V)[None, :], x, float("-inf"))
        top = tl.maximum(tl.max(x, 1), LOWEST)
        at = j.to(tl.int64) * partial_stride + t
        tl.store(maximum + at, top * k_z, mask=inside)
        if STATS:
            tl.store(argmax + at, v0 + tl.argmax(x, 1), mask=inside)
        k_2 = k_z * LOG2E
        if SMOOTHING:
            tl.store(offset_sum + at, tl.sum(tl.where((v < V)[None, :], x - top[:, None], 0.0), 1) * k_z, mask=inside)
        e = tl.exp2(x * k_2[:, None] - (top * k_2)[:, None])
        tl.store(others + at, tl.sum(tl.where(v[None, :] == y[:, None], 0.0, e), 1), mask=inside)
        if STATS:
            # p log p is 0 at p = 0, and 0 * -inf is not.
            tl.store(moment + at, tl.sum(e * tl.maximum((x - top[:, None]) * k_z[:, None], -1e30), 1), mask=inside)
        if KEEP:
            # 0 past the last token: with a bias, float16 could overflow there, and inf times rows of 0 is NaN.
            above = top * k_z - tl.load(shift + t, mask=inside, other=float("inf"))
            f = tl.where(above > REACH, 1.0, tl.exp2(above * LOG2E)) * exponential_scale
            # No branch, around which Triton 3.6 can't flatten a loop: a row past the end is not stored.
            row = _exponential_row(j, t0, home, home_stride, home_tokens, spill, spill_tokens, 0, 0, 0)
            row = tl.where(t0 < home_tokens + spill_tokens, row, exponential_rows)
            value = (e * f[:, None]).to(rows.dtype if TMA else rows.dtype.element_ty)
            _store_columns(
                exponentials, VOCAB_TILE, row, 0, exponential_rows, VOCAB_TILE, value, BLOCK_T, VOCAB_TILE, PARTS, TMA
            )


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
    shift,
    base,  # [T] float32 out, by position: what the exponentials are relative to in the end
    owners,  # [2, V] int32, the first known; out: the second
    held,
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
    KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The softmax over all tiles, and the loss, of tokens with positions in [first, last); 0 for ignored ones."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    at = tl.load(position + t, mask=t < T, other=-2)
    mine = (at >= first) & (at < last)
    y = tl.load(label + at, mask=mine, other=0)
    if KEEP:
        owned = mine & (y >= 0) & (at < held)
        tl.atomic_min(owners + V + y, at, mask=owned & (tl.load(owners + y, mask=owned, other=0) != at))
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
            found = tl.load(
                argmax + tile.to(tl.int64) * partial_stride + at - first, mask=mine & (tile < tiles), other=0
            )
            index = tl.where(best > top, found, index)
        top = tl.maximum(top, best)
    far = top - tl.load(shift + at, mask=mine, other=0.0) > REACH
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
    tl.store(base + at, tl.where(far, value_lse, tl.load(shift + at, mask=mine, other=0.0)), mask=mine)
    store = (t < T) & (mine | ((first == 0) & (at == -1)))
    tl.store(loss + t, tl.where(mine, value, 0.0), mask=store)
    tl.store(lse + t, tl.where(mine, value_lse, 0.0), mask=store)
    tl.store(log_prob + t, tl.where(mine, value_log_prob, 0.0), mask=store)
    if STATS:
        tl.store(entropy + t, tl.where(mine, log_total - moments / total, 0.0), mask=store)
        tl.store(correct + t, mine & (index == y), mask=store)


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= 0: below 1/2 a series, of 2 atanh(x / (2 + x)), since the instruction's error is absolute."""
    s = x / (2 + x)
    q = s * s
    series = 2 * s * (1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11))))))
    return tl.where(x < 0.5, series, tl.log(1 + x))


@triton.jit
def _to_gradient(
    p, v, y, lse, log_prob, row, V, label_smoothing, z_loss, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr
):
    """row * d(loss) / dz from probabilities p [tokens, vocab]; the target's is made from its log-probability."""
    at_target = _at_target(lse, log_prob, z_loss)
    factor = row
    if Z_LOSS:
        factor = row * (1 + 2 * z_loss * lse)
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
def settle_exponentials(
    exponentials,
    count,
    maximum,
    shift,
    base,
    partial_stride,
    tiles,
    home,
    home_stride,
    home_tokens,
    spill,
    spill_tokens,
    TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Make the exponentials of tokens whose logits are far above their shift relative to their lse."""
    first = tl.program_id(0) * TILES
    t0 = tl.program_id(1) * BLOCK_T
    t = t0 + tl.arange(0, BLOCK_T)
    inside = t < tl.load(count)
    before = tl.load(shift + t, mask=inside, other=0.0)
    after = tl.load(base + t, mask=inside, other=0.0)
    moved = before != after
    if tl.max(moved.to(tl.int32), 0) > 0:
        for j in range(first, tl.minimum(first + TILES, tiles)):
            m = tl.load(maximum + tl.cast(j, tl.int64) * partial_stride + t, mask=inside, other=0.0)
            used = tl.where(m - before > REACH, m, before)
            row = _exponential_row(j, t0, home, home_stride, home_tokens, spill, spill_tokens, 0, 0, 0)
            where = (tl.cast(row, tl.int64) + tl.arange(0, BLOCK_T))[:, None] * VOCAB_TILE
            where += tl.arange(0, VOCAB_TILE)[None, :]
            e = tl.load(exponentials + where, mask=moved[:, None], other=0.0).to(tl.float32)
            e *= tl.exp2((used - after) * LOG2E)[:, None]
            tl.store(exponentials + where, e.to(exponentials.dtype.element_ty), mask=moved[:, None])


@triton.jit
def replace_targets(
    exponentials,
    order,
    count,
    label,
    base,
    lse,
    log_prob,
    owners,  # [2, V] int32: the first two positions that have an entry as their target, else NOBODY
    home,
    home_stride,
    home_tokens,
    spill,
    spill_tokens,
    V,
    z_loss,
    exponential_scale,
    BLOCK: tl.constexpr,
):
    """Take the targets' exponentials out, or put (d loss / dz) / exp(base - lse) in their place."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(label + t, mask=t < tl.minimum(tl.load(count), home_tokens + spill_tokens), other=-1)
    there = y >= 0
    exact = _is_owner(owners, t, y, V)
    token = tl.load(order + t, mask=there, other=0)
    lse_t = tl.load(lse + token, mask=there, other=0.0)
    lp = tl.load(log_prob + token, mask=there, other=0.0)
    b = tl.load(base + t, mask=there, other=0.0)
    value = _at_target(lse_t, lp, z_loss) / _z_factor(lse_t, z_loss) * tl.exp2((lse_t - b) * LOG2E) * exponential_scale
    value = tl.where(exact, 0.0, value)
    row = tl.cast(
        _exponential_row(y // VOCAB_TILE, t, home, home_stride, home_tokens, spill, spill_tokens, 0, 0, 0), tl.int64
    )
    column = y - y // VOCAB_TILE * VOCAB_TILE
    tl.store(exponentials + row * VOCAB_TILE + column, value.to(exponentials.dtype.element_ty), mask=there)


@triton.jit
def _is_owner(owners, t, y, V):
    """Whether the target's term of position t is added to the products' results."""
    first = tl.load(owners + y, mask=y >= 0, other=NOBODY)
    second = tl.load(owners + V + y, mask=y >= 0, other=NOBODY)
    return (y >= 0) & ((first == t) | (second == t))


@triton.jit
def _at_target(lse, log_prob, z_loss):
    """d loss / dz of the target, without label smoothing.

    p - 1 as expm1(log p): -1 added to a rounded p would lose all digits of a p near 1.
    """
    return _expm1(log_prob) + 2 * z_loss * lse * tl.exp2(log_prob * LOG2E)


@triton.jit
def _z_factor(lse, z_loss):
    """1 + 2 z_loss lse, kept from 0, since a target's entry is divided by it."""
    factor = 1 + 2 * z_loss * lse
    return tl.where(tl.abs(factor) < 1e-6, 1e-6, factor)


@triton.jit
def scale_rows(
    rows,  # [T, H] in and out
    scale,  # [T] float32 in: factor of each row of the gradient; out: of each row of the product for hidden's
    at_target,  # [T] float32 out: what the product lacks of the target's entry of the gradient
    exponentials,
    order,
    count,
    label,
    lse,
    log_prob,
    base,
    home,
    home_stride,
    home_tokens,
    spill,
    spill_tokens,
    H,
    z_loss,
    inverse_exponential_scale,
    BLOCK: tl.constexpr,
):
    """Multiply hidden's rows by what kept exponentials lack: their token's factor times exp(base - lse)."""
    t = tl.program_id(0)
    if t < tl.minimum(tl.load(count), home_tokens + spill_tokens):
        token = tl.load(order + t)
        lse_t = tl.load(lse + token)
        b = tl.load(base + t)
        scale_t = tl.load(scale + t)
        r = scale_t * _z_factor(lse_t, z_loss) * tl.exp2((b - lse_t) * LOG2E) * inverse_exponential_scale
        y = tl.load(label + t)
        tile = tl.maximum(y, 0) // VOCAB_TILE
        row = _exponential_row(tile, t, home, home_stride, home_tokens, spill, spill_tokens, 0, 0, 0)
        # Zero, or the entry as it was rounded: see `replace_targets`.
        kept = tl.load(exponentials + tl.cast(row, tl.int64) * VOCAB_TILE + tl.maximum(y, 0) - tile * VOCAB_TILE)
        entry = scale_t * _at_target(lse_t, tl.load(log_prob + token), z_loss)
        tl.store(at_target + t, tl.where(y >= 0, entry - r * kept.to(tl.float32), 0.0))
        for start in range(0, H, BLOCK):
            c = start + tl.arange(0, BLOCK)
            h = tl.load(rows + t.to(tl.int64) * H + c, mask=c < H, other=0).to(tl.float32)
            tl.store(rows + t.to(tl.int64) * H + c, (h * r).to(rows.dtype.element_ty), mask=c < H)
        tl.store(scale + t, r)


@triton.jit
def gradient_tiles(
    rows,
    weight,
    bias,
    exponentials,  # [rows, VOCAB_TILE] out
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
    exponential_rows,
    again,
    again_tokens,
    rows_stride,
    weight_stride,
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
        lse_t = tl.load(lse + token, mask=inside, other=0.0)
        lp = tl.load(log_prob + token, mask=inside, other=0.0)
        r = tl.load(row + t, mask=inside, other=0.0)
        y = tl.load(label + t, mask=inside, other=-1)
        k_z = tl.load(factor + t, mask=inside, other=0.0)
        x = _unscaled(z, bias, v, inner_scale, V, BIAS, SOFTCAP)
        p = tl.exp2(x * (k_z * LOG2E)[:, None] - (lse_t * LOG2E)[:, None])
        g = _to_gradient(p, v, y, lse_t, lp, r, V, label_smoothing, z_loss, SMOOTHING, Z_LOSS)
        if SOFTCAP:
            g *= 1 - x * x
        g = tl.where(inside[:, None] & (v < V)[None, :], g, 0.0)
        value = g.to(rows.dtype if TMA else rows.dtype.element_ty)
        into = again + j * again_tokens + t0 - first
        _store_columns(
            exponentials, VOCAB_TILE, into, 0, exponential_rows, VOCAB_TILE, value, BLOCK_T, VOCAB_TILE, PARTS, TMA
        )


@triton.jit
def weight_gradient(
    exponentials,  # [rows, VOCAB_TILE]
    rows,  # [T, H]
    out,  # [V, H] out, or added to
    count,
    shrink,  # [] float32: what the product is multiplied by
    again_from,  # the first tile that was computed again
    first_tile,
    chunk_tiles,
    exponential_rows,
    home,
    home_stride,
    home_tokens,
    spill,
    spill_tokens,
    again,
    again_tokens,
    rows_stride,
    out_stride,
    T,
    H,
    V,
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
    """exponentials.T @ rows for a chunk of the vocabulary, each element rounded once."""
    steps = tl.cdiv(tl.maximum(tl.load(count), 1), BLOCK_K)
    tiles_v = chunk_tiles * VOCAB_TILE // BLOCK_V
    tiles_h = tl.cdiv(H, BLOCK_H)
    for tile in tl.range(tl.program_id(0), tiles_v * tiles_h, PROGRAMS, flatten=True):
        i, j = _place(tile, tiles_v, tiles_h, GROUP)
        of_chunk = i * BLOCK_V // VOCAB_TILE
        vocab_tile = first_tile + of_chunk
        column = i * BLOCK_V - of_chunk * VOCAB_TILE
        acc = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
        for k in range(steps):
            t = k * BLOCK_K
            row = _exponential_row(
                vocab_tile, t, home, home_stride, home_tokens, spill, spill_tokens, again, again_tokens, again_from
            )
            a = _load(exponentials, VOCAB_TILE, row, column, exponential_rows, VOCAB_TILE, BLOCK_K, BLOCK_V, TMA)
            b = _load(rows, rows_stride, t, j * BLOCK_H, T, H, BLOCK_K, BLOCK_H, TMA)
            acc = tl.dot(a.T, b, acc)
        if SHRINK:
            acc *= tl.load(shrink)
        v = vocab_tile * VOCAB_TILE + column
        if ADD:
            _add_columns(out, out_stride, v, j * BLOCK_H, V, H, acc, BLOCK_V, BLOCK_H, PARTS, TMA)
        else:
            value = acc.to(out.dtype if TMA else out.dtype.element_ty)
            _store_columns(out, out_stride, v, j * BLOCK_H, V, H, value, BLOCK_V, BLOCK_H, PARTS, TMA)


@triton.jit
def add_targets(
    hidden,  # [T, H], any strides
    out,  # [V, H] in and out
    order,
    count,
    label,
    owners,
    at_target,
    shrink,
    hidden_stride_t,
    hidden_stride_h,
    held,
    H,
    V,
    SHRINK: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add to each row of the weight's gradient the targets' terms of the positions that own it."""
    t = tl.program_id(0)
    if t < tl.minimum(tl.load(count), held):
        y = tl.load(label + t)
        if y >= 0:  # noqa: SIM102 - a scalar `and` would load owners[-1]
            if tl.load(owners + y) == t:
                second = tl.load(owners + V + y)
                both = second != NOBODY
                second = tl.where(both, second, t)
                g = tl.load(at_target + t)
                g2 = tl.where(both, tl.load(at_target + second), 0.0)
                if SHRINK:
                    g *= tl.load(shrink)
                    g2 *= tl.load(shrink)
                h = hidden + tl.load(order + t).to(tl.int64) * hidden_stride_t
                h2 = hidden + tl.load(order + second).to(tl.int64) * hidden_stride_t
                row = out + y.to(tl.int64) * H
                for start in range(0, H, BLOCK):
                    c = start + tl.arange(0, BLOCK)
                    column = c.to(tl.int64) * hidden_stride_h
                    a = tl.load(h + column, mask=c < H, other=0.0).to(OPERAND).to(tl.float32)
                    b = tl.load(h2 + column, mask=(c < H) & both, other=0.0).to(OPERAND).to(tl.float32)
                    value = tl.load(row + c, mask=c < H, other=0.0).to(tl.float32) + g * a + g2 * b
                    tl.store(row + c, value.to(out.dtype.element_ty), mask=c < H)


@triton.jit
def _add_columns(
    into,
    stride,
    row,
    column,
    rows,
    columns,
    value,
    R: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Add value [R, C] to what is there, in one atomic addition per element."""
    if PARTS > 1:
        left, right = _halves(value, R, C)
        _add_columns(into, stride, row, column, rows, columns, left, R, C // 2, PARTS // 2, TMA)
        _add_columns(into, stride, row, column + C // 2, rows, columns, right, R, C // 2, PARTS // 2, TMA)
    elif TMA and INTERPRETED:
        into.store([row, column], into.load([row, column]) + value)
    elif TMA:
        into.atomic_add([row, column], value)
    else:
        r = row + tl.arange(0, R)
        c = column + tl.arange(0, C)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        tl.atomic_add(into + r.to(tl.int64)[:, None] * stride + c[None, :], value, mask=inside, sem="relaxed")


@triton.jit
def hidden_gradient(
    exponentials,  # [rows, VOCAB_TILE]
    weight,  # [V, H]
    out,  # [out_rows, H] float32, added to
    count,
    scale,  # [T] float32: what each row of the product is multiplied by
    first,
    last,
    out_rows,
    half_rows,
    first_tile,
    chunk_tiles,
    exponential_rows,
    home,
    home_stride,
    home_tokens,
    spill,
    spill_tokens,
    again,
    again_tokens,
    weight_stride,
    out_stride,
    H,
    V,
    SHARE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
):
    """exponentials @ weight over a chunk of the vocabulary, for the positions in [first, last), added up in float32.

    With SHARE the tiles of the last wave are cut in two along the vocabulary if that fills the device better: 320 tiles
    on 132 multiprocessors (H2560, T4096 on an H100) took 0.56 ms where cuBLAS takes 0.47.  Then two programs add to a
    tile of zeros, and 0 + a + b has the same bits in either order; or, with `half_rows`, they add that many rows apart.
    (Stream-K, Osama et al., arXiv:2301.03598, would cut all tiles: its programs are in different places of the
    vocabulary at a time, and L2 serves none of them.)
    """
    n = tl.minimum(tl.load(count), last)
    tiles_t = tl.cdiv(tl.maximum(n - first, 0), BLOCK_T)
    tiles_h = tl.cdiv(H, BLOCK_H)
    steps = chunk_tiles * VOCAB_TILE // BLOCK_K
    tiles = tiles_t * tiles_h
    rest = tiles % PROGRAMS
    whole = tiles - rest
    cut = 1
    if SHARE:
        cut = tl.where(2 * rest <= PROGRAMS, 2, 1)
    part = steps // cut
    for item in tl.range(tl.program_id(0), whole + rest * cut, PROGRAMS, flatten=True):
        over = tl.maximum(item - whole, 0)
        tile = tl.minimum(item, whole) + over // cut
        half = over % cut
        begin = half * part
        end = tl.where((item < whole) | (half == cut - 1), steps, part)
        i, j = _place(tile, tiles_t, tiles_h, GROUP)
        t0 = first + i * BLOCK_T
        acc = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
        for k in range(begin, end):
            of_chunk = k * BLOCK_K // VOCAB_TILE
            column = k * BLOCK_K - of_chunk * VOCAB_TILE
            row = _exponential_row(
                first_tile + of_chunk,
                t0,
                home,
                home_stride,
                home_tokens,
                spill,
                spill_tokens,
                again,
                again_tokens,
                first_tile,
            )
            v = first_tile * VOCAB_TILE + k * BLOCK_K
            a = _load(exponentials, VOCAB_TILE, row, column, exponential_rows, VOCAB_TILE, BLOCK_T, BLOCK_K, TMA)
            b = _load(weight, weight_stride, v, j * BLOCK_H, V, H, BLOCK_K, BLOCK_H, TMA)
            acc = tl.dot(a, b, acc)
        if SCALE:
            t = t0 + tl.arange(0, BLOCK_T)
            acc *= tl.load(scale + t, mask=t < n, other=0.0)[:, None]
        _add_columns(
            out, out_stride, t0 - first + half * half_rows, j * BLOCK_H, out_rows, H, acc, BLOCK_T, BLOCK_H, PARTS, TMA
        )


@triton.jit
def bias_gradient(
    exponentials,
    out,  # [V] float32 out
    count,
    scale,
    owners,
    at_target,
    shrink,
    first_tile,
    home,
    home_stride,
    home_tokens,
    spill,
    spill_tokens,
    again,
    again_tokens,
    V,
    HELD: tl.constexpr,
    SHRINK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Column sums of the logits' gradient over a chunk of the vocabulary."""
    n = tl.load(count)
    j = first_tile + tl.program_id(0)
    c = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    v = j * VOCAB_TILE + c
    total = tl.zeros((BLOCK_V,), tl.float32)
    if HELD:
        for k in tl.static_range(2):
            at = tl.load(owners + k * V + v, mask=v < V, other=NOBODY)
            total += tl.load(at_target + at, mask=at != NOBODY, other=0.0)
    for start in range(0, n, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        row = _exponential_row(
            j, start, home, home_stride, home_tokens, spill, spill_tokens, again, again_tokens, first_tile
        ).to(tl.int64)
        where = (row + tl.arange(0, BLOCK_T))[:, None] * VOCAB_TILE + c[None, :]
        g = tl.load(exponentials + where, mask=(t < n)[:, None], other=0.0).to(tl.float32)
        held = t < home_tokens + spill_tokens
        r = tl.where(held, tl.load(scale + t, mask=(t < n) & held, other=0.0), 1.0)
        total += tl.sum(g * r[:, None], 0)
    if SHRINK:
        total *= tl.load(shrink)
    tl.store(out + v, total, mask=v < V)


@triton.jit
def finish_hidden(
    sums,  # [T, H] float32, by position; with again_rows the others' are in two halves, so many rows apart
    weight,  # [V, H]
    position,
    label,
    at_target,
    shrink,
    out,  # [T, H] out, by token
    weight_stride,
    H,
    held,
    again_rows,
    SHRINK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the target's term, round the hidden gradient, and put each row in its token's place; 0 for ignored tokens."""
    t = tl.program_id(0)
    at = tl.load(position + t)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(sums + tl.cast(at, tl.int64) * H + c, mask=(c < H) & (at >= 0), other=0.0)
    if (at >= held) & (again_rows > 0):
        value += tl.load(sums + tl.cast(at + again_rows, tl.int64) * H + c, mask=c < H, other=0.0)
    if (at >= 0) & (at < held):
        g = tl.load(at_target + at)
        y = tl.maximum(tl.load(label + at), 0).to(tl.int64)
        value += g * tl.load(weight + y * weight_stride + c, mask=c < H, other=0.0).to(tl.float32)
    if SHRINK:
        value *= tl.load(shrink)
    tl.store(out + t.to(tl.int64) * H + c, value, mask=c < H)
