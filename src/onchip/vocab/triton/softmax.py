"""The kernels of forward: the tokens that count, the softmax of their logits, and what is kept of those logits.

Sizes, positions and the rows of exponentials are explained in blocks.py.  None as an argument means: not wanted.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import (
    LEADING,
    LOG2E,
    LOWEST,
    log1p,
    log_of_total,
    loss_of_lse,
    loss_of_target,
    soft_loss,
    tanh,
)
from onchip.kernels.triton.tiles import load_block, place_tile, store_columns
from onchip.vocab.triton import tiling
from onchip.vocab.triton.blocks import (
    REACH,
    VOCAB_TILE,
    buffer_row,
    has_row,
    load_weight,
    read_labels,
    row_number,
    unscaled_logits,
)

VECTOR = tl.constexpr(tiling.VECTOR)


@triton.jit(do_not_specialize=["T", "first_size", "size", "chunks"])
def compact_tokens(
    target,
    vectors,
    numbers,  # [chunks, VECTOR] int32, the first of each out: how many of its positions are of tokens
    T,
    ignore_index,
    first_size,  # positions of the first chunk
    size,  # of the others
    chunks,
    BLOCK: tl.constexpr,
):
    """Number the tokens that are not ignored, in their order.  One program."""
    total = tl.zeros((), tl.int32)
    for start in range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        kept = (tl.load(target + t, mask=t < T, other=ignore_index) != ignore_index).to(tl.int32)
        at = total + tl.cumsum(kept, 0) - 1
        tl.store(vectors.position + t, tl.where(kept != 0, at, -1), mask=t < T)
        tl.store(vectors.order + at, t, mask=(t < T) & (kept != 0))
        total += tl.sum(kept, 0)
    tl.store(vectors.number, total)
    for start in range(0, chunks, BLOCK):
        i = start + tl.arange(0, BLOCK)
        before = tl.where(i == 0, 0, first_size + (i - 1) * size)
        most = tl.where(i == 0, first_size, size)
        tl.store(numbers + i * VECTOR, tl.minimum(tl.maximum(total - before, 0), most), mask=i < chunks)


@triton.jit(do_not_specialize=["first"])
def gather_tokens(
    hidden,  # [T, H], any strides
    weight,  # [V, H], any strides
    bias,  # [V] float32
    ids,  # [T, K] int64
    temperature,  # [T] float32
    vectors,  # Vectors: order and number in; label, factor and shift out
    rows,  # [T, H] out: hidden of each position, 0 beyond the last up to a whole block, and in at least one
    picked,  # Picked out
    first,
    hidden_stride_t,
    hidden_stride_h,
    weight_stride_v,
    weight_stride_h,
    H,
    V,
    K,
    ignore_index,
    inner_scale,  # of the product before tanh
    outer_scale,  # of what comes after, but for the temperature
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
):
    """Hidden states, ids and their logits by position, from position `first` on."""
    i = tl.program_id(0)
    at = first + i
    n = tl.load(vectors.number)
    if i < tl.cdiv(tl.maximum(n - first, 1), PAD) * PAD:
        there = at < n
        t = tl.load(vectors.order + at, mask=there, other=0).to(tl.int64)
        k_z = outer_scale
        if temperature is not None:
            k_z = k_z / tl.load(temperature + t)
        best = tl.full((), float("-inf"), tl.float32)
        leader = tl.full((), -1, tl.int64)
        for k in range(K):
            y = tl.load(ids + t * K + k)
            good = (y != ignore_index) & (y >= 0) & (y < V)
            row = tl.where(good, y, 0)
            total = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, H, BLOCK):
                c = start + tl.arange(0, BLOCK)
                h = tl.load(
                    hidden + t * hidden_stride_t + c.to(tl.int64) * hidden_stride_h, mask=(c < H) & there, other=0
                ).to(rows.dtype.element_ty)
                tl.store(rows + i.to(tl.int64) * H + c, h, mask=(c < H) & (k == 0))
                w = tl.load(weight + row * weight_stride_v + c.to(tl.int64) * weight_stride_h, mask=c < H, other=0)
                total += h.to(tl.float32) * w.to(tl.float32)
            x = tl.sum(total, 0)
            if bias is not None:
                x += tl.load(bias + row)
            if inner_scale is not None:
                x = tanh(x * inner_scale)
            z = x * k_z
            leads = good & ((leader < 0) | (z > best))
            best = tl.where(leads | (k == 0), z, best)
            leader = tl.where(leads, y, leader)
            if picked.logit is not None:
                tl.store(picked.logit + at.to(tl.int64) * K + k, z)
                tl.store(picked.label + at.to(tl.int64) * K + k, tl.where(good, y, -1).to(tl.int32))
        tl.store(vectors.factor + at, k_z)
        tl.store(picked.target_logit + at, best)
        # Without a shift every token is one to be rebased.
        tl.store(vectors.shift + at, best + 30.0 if SHIFT else -3.0e38)
        tl.store(vectors.label + at, leader.to(tl.int32))


@triton.jit(do_not_specialize=["first", "T"])
def softmax_tiles(
    rows,  # [count, H] of positions from `first` on
    weight,  # [V, H], in memory [H, V] where TURNED; the other stride is weight_stride
    bias,  # [V] float32
    class_weight,  # [V] float32: of the logits in their offsets' sum
    labels,  # Labels of all tokens, each of which is its own position
    vectors,  # Vectors, of positions from `first` on
    partials,  # Partials out
    exponentials,  # [rows, VOCAB_TILE] out, of the positions that `buffer` has rows for
    buffer,  # BufferRows
    first,
    rows_stride,
    weight_stride,
    T,
    H,
    V,
    inner_scale,
    exponential_scale,  # what exponentials are multiplied by before they are stored
    RAGGED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
    TURNED: tl.constexpr,
    FILLED: tl.constexpr = False,  # the compiler may know that H is not 0, and all takes fewer registers
):
    """The softmax of each tile of logits, which live in registers alone."""
    n = tl.minimum(tl.load(vectors.number) - first, T)
    # At least one block where exponentials are kept: of no token at all, so that no product reads what nobody wrote.
    # Of a later chunk without tokens there is no product.
    least = 0 if exponentials is None else tl.where(first > 0, 0, 1)
    tiles_t = tl.cdiv(tl.maximum(n, least), BLOCK_T)
    tiles_v = tl.cdiv(V, VOCAB_TILE)
    steps = tl.cdiv(H, BLOCK_K)
    if FILLED:
        tl.assume(steps > 0)
    for tile in tl.range(tl.program_id(0), tiles_t * tiles_v, PROGRAMS, flatten=True):
        i, j = place_tile(tile, tiles_t, tiles_v, GROUP)
        t0 = i * BLOCK_T
        v0 = j * VOCAB_TILE
        z = tl.zeros((BLOCK_T, VOCAB_TILE), tl.float32)
        for k in range(steps):
            a = load_block(rows, rows_stride, t0, k * BLOCK_K, T, H, BLOCK_T, BLOCK_K, TMA)
            b = load_weight(weight, weight_stride, v0, k * BLOCK_K, V, H, VOCAB_TILE, BLOCK_K, TURNED, TMA)
            z = tl.dot(a, b.T, z)

        t = t0 + tl.arange(0, BLOCK_T)
        v = v0 + tl.arange(0, VOCAB_TILE)
        inside = t < n
        y = tl.load(vectors.label + t, mask=inside, other=-1)
        k_z = tl.load(vectors.factor + t, mask=inside, other=1.0)
        x = unscaled_logits(z, bias, v, inner_scale, V)
        if RAGGED:
            x = tl.where((v < V)[None, :], x, float("-inf"))
        top = tl.maximum(tl.max(x, 1), LOWEST)
        at = j.to(tl.int64) * partials.stride + t
        tl.store(partials.maximum + at, top * k_z, mask=inside)
        if partials.argmax is not None:
            tl.store(partials.argmax + at, v0 + tl.argmax(x, 1), mask=inside)
        k_2 = k_z * LOG2E
        if partials.offset_sum is not None:
            offset = tl.where((v < V)[None, :], x - top[:, None], 0.0)
            if class_weight is not None:
                w = tl.load(class_weight + v, mask=v < V, other=0.0)[None, :]
                # A class that weighs nothing counts for nothing, where 0 * -inf would not be 0.
                offset = tl.where(w > 0, offset * w, 0.0)
            tl.store(partials.offset_sum + at, tl.sum(offset, 1) * k_z, mask=inside)
        if labels is not None:
            given, q = read_labels(labels, class_weight, first + t, v0, first + n, V, RAGGED, FILLED)
            tl.store(partials.mass + at, tl.sum(q, 1), mask=inside)
            # What has no probability costs nothing, where 0 * -inf would not be 0.
            cost = tl.where(q == 0, 0.0, q * (top[:, None] - x))
            tl.store(partials.cost + at, tl.sum(cost, 1) * k_z, mask=inside)
            if partials.given_mass is not None:
                given = tl.where((v < V)[None, :], given, 0.0)
                tl.store(partials.given_mass + at, tl.sum(given, 1), mask=inside)
                cost = tl.where(given == 0, 0.0, given * (top[:, None] - x))
                tl.store(partials.given_cost + at, tl.sum(cost, 1) * k_z, mask=inside)
                given = tl.where((v < V)[None, :], given, float("-inf"))
                largest = tl.max(given, 1)
                tl.store(partials.largest + at, largest, mask=inside)
                column = tl.min(tl.where(given == largest[:, None], v[None, :], V), 1)
                tl.store(partials.likeliest + at, column, mask=inside)
        e = tl.exp2(x * k_2[:, None] - (top * k_2)[:, None])
        if partials.moment is not None:
            # p log p is 0 at p = 0, and 0 * -inf is not.
            tl.store(
                partials.moment + at, tl.sum(e * tl.maximum((x - top[:, None]) * k_z[:, None], -1e30), 1), mask=inside
            )
        if labels is not None:
            tl.store(partials.below + at, tl.sum(tl.where(e > LEADING, 0.0, e), 1), mask=inside)
        e = tl.where((v - v0)[None, :] == (y - v0)[:, None], 0.0, e)
        tl.store(partials.others + at, tl.sum(e, 1), mask=inside)
        if partials.squares is not None:
            tl.store(partials.squares + at, tl.sum(e * e, 1), mask=inside)
        if exponentials is not None:
            if inner_scale is not None:
                # The derivative of the logits: what is kept is only multiplied, and here it has all digits.
                e = tl.where(e > 0, e * (1 - x * x), 0.0)  # of a column past the last, x is -inf
            # 0 past the last token: with a bias, float16 could overflow there, and inf times rows of 0 is NaN.
            above = top * k_z - tl.load(vectors.shift + t, mask=inside, other=float("inf"))
            f = tl.where(above > REACH, 1.0, tl.exp2(above * LOG2E)) * exponential_scale
            # No branch, around which Triton 3.6 can't flatten a loop: a row past the end is not stored.
            row = tl.where(has_row(t0, buffer), buffer_row(j, t0, buffer, 0), row_number(buffer.rows))
            value = (e * f[:, None]).to(rows.dtype if TMA else rows.dtype.element_ty)
            store_columns(
                exponentials,
                VOCAB_TILE,
                row,
                0,
                row_number(buffer.rows),
                VOCAB_TILE,
                value,
                BLOCK_T,
                VOCAB_TILE,
                PARTS,
                TMA,
            )


@triton.jit
def _first_largest(numbers, columns, stride, start, tiles, t, mine, largest, column, BLOCK: tl.constexpr):
    """The largest number of each token so far and, with `columns`, its column, with the tiles from `start` on."""
    j = start + tl.arange(0, BLOCK)
    there = (j < tiles)[:, None] & mine[None, :]
    m = tl.load(numbers + j.to(tl.int64)[:, None] * stride + t[None, :], mask=there, other=LOWEST)
    best = tl.max(m, 0)
    if columns is not None:
        tile = start + tl.argmax(m, 0)
        found = tl.load(columns + tile.to(tl.int64) * stride + t, mask=mine & (tile < tiles), other=0)
        column = tl.where(best > largest, found, column)
    return tl.maximum(largest, best), column


@triton.jit
def merge_tiles(
    vectors,  # Vectors; base is made
    target_logit,  # [T] float32, by position
    partials,  # Partials
    tile_weight,  # [tiles] float32: the sums of the class weights
    class_total,  # [] float32: their sum
    class_weight,  # [V] float32: of the losses, as the next
    token_weight,  # [T] float32
    out,  # TokenSoftmax out, but for the log-probabilities of all ids
    normalizer,  # [T] float32 out, by position: what makes probabilities of what is kept
    inverse_exponential_scale,
    loss_terms,  # LossTerms
    V,
    tiles,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The softmax over all tiles, and the weighted losses."""
    at = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mine = at < tl.load(vectors.number)
    y = tl.load(vectors.label + at, mask=mine, other=0)
    z = tl.where(y < 0, LOWEST, tl.load(target_logit + at, mask=mine, other=0.0))
    top = tl.full((BLOCK_T,), LOWEST, tl.float32)
    index = tl.zeros((BLOCK_T,), tl.int32)
    for start in range(0, tiles, BLOCK):
        top, index = _first_largest(
            partials.maximum, partials.argmax, partials.stride, start, tiles, at, mine, top, index, BLOCK
        )
    far = top - tl.load(vectors.shift + at, mask=mine, other=0.0) > REACH
    of_tiles = top
    top = tl.maximum(top, z)  # computed apart: the last digit may differ
    rest = tl.zeros((BLOCK_T,), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    offsets = tl.zeros((BLOCK_T,), tl.float32)
    moments = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, tiles, BLOCK):
        j = start + tl.arange(0, BLOCK)
        where = j.to(tl.int64)[:, None] * partials.stride + at[None, :]
        inside = (j < tiles)[:, None] & mine[None, :]
        drop = tl.load(partials.maximum + where, mask=inside, other=LOWEST) - top[None, :]
        decay = tl.exp2(drop * LOG2E)
        s = tl.load(partials.others + where, mask=inside, other=0.0)
        rest += tl.sum(s * decay, 0)
        if partials.squares is not None:
            square = tl.load(partials.squares + where, mask=inside, other=0.0)
            squares += tl.sum(square * decay * decay, 0)
        if partials.offset_sum is not None:
            width = tl.minimum(V - j * VOCAB_TILE, VOCAB_TILE).to(tl.float32)
            if tile_weight is not None:
                width = tl.load(tile_weight + j, mask=j < tiles, other=0.0)
            offset = tl.load(partials.offset_sum + where, mask=inside, other=0.0)
            offsets += tl.sum(tl.where(inside, offset + drop * width[:, None], 0.0), 0)
        if partials.moment is not None:
            m = tl.load(partials.moment + where, mask=inside, other=0.0)
            # The target belongs to its tile's moment, and to its sum here.
            own = (y >= 0)[None, :] & (y[None, :] // VOCAB_TILE == j[:, None])
            total = s + tl.where(own & inside, tl.exp2((z[None, :] - top[None, :] - drop) * LOG2E), 0.0)
            moments += tl.sum(tl.where(decay > 0, decay * (m + total * drop), 0.0), 0)
    own = tl.exp2((z - top) * LOG2E)
    total = rest + own
    # log1p where the target leads: there the loss is small, and 1 + others would round it away.
    log_total = tl.where(z >= top, log1p(rest), tl.log(total))
    # Where nothing else has a probability the target's is 1, whatever that last digit is.
    alone = (rest == 0) & (own > 0)
    log_total = tl.where(alone, 0.0, log_total)
    value_lse = top + log_total
    base = tl.where(far, value_lse, tl.load(vectors.shift + at, mask=mine, other=0.0))
    tl.store(vectors.base + at, base, mask=mine)
    tl.store(normalizer + at, tl.exp2((base - value_lse) * LOG2E) * inverse_exponential_scale, mask=mine)
    log_prob = tl.where(alone, 0.0, (z - top) - log_total)
    log_prob = tl.where(y < 0, float("nan"), log_prob)
    t = tl.load(vectors.order + at, mask=mine, other=0)
    tl.store(out.lse + t, value_lse, mask=mine)
    tl.store(out.leading + t, log_prob, mask=mine)
    if out.mean_logits is not None:
        tl.store(out.mean_logits + t, top + offsets / V, mask=mine)
    if out.uniform_loss is not None:
        if class_total is None:
            offsets = tl.where(alone, offsets - (of_tiles - top) * V, offsets)
            uniform = log_total - offsets / V
        else:
            weight = tl.load(class_total)
            offsets = tl.where(alone, offsets - (of_tiles - top) * weight, offsets)
            uniform = (log_total * weight - offsets) / V
        tl.store(out.uniform_loss + t, uniform, mask=mine)
    if partials.squares is not None:
        log_square = tl.where(z >= top, log1p(squares), tl.log(squares + own * own))
        tl.store(out.log_sum_sq + t, tl.where(alone, 0.0, log_square - 2 * log_total), mask=mine)
    if partials.moment is not None:
        tl.store(out.entropy + t, tl.where(alone, 0.0, log_total - moments / total), mask=mine)
        tl.store(out.top1 + t, index.to(tl.int64), mask=mine)
    if out.top is not None:
        tl.store(out.top + t, of_tiles, mask=mine)
    if out.loss is not None:
        loss = loss_of_target(loss_terms, log_prob)
        if class_weight is not None:
            loss *= tl.load(class_weight + y, mask=mine & (y >= 0), other=0.0)
        loss += loss_of_lse(loss_terms, value_lse)
        if out.uniform_loss is not None:
            loss += loss_terms.label_smoothing * uniform
        if token_weight is not None:
            loss *= tl.load(token_weight + t, mask=mine, other=0.0)
        tl.store(out.loss + t, tl.where(y < 0, float("nan"), loss), mask=mine)
    if out.correct is not None:
        tl.store(out.correct + t, index == y, mask=mine)


@triton.jit(do_not_specialize=["first"])
def merge_labels(
    vectors,  # Vectors
    partials,  # Partials
    loss,  # [T] float32 out, and so on: without a token's weight
    lse,
    less,  # what `soft_gradient` takes
    mass,
    stats,  # SoftStats out
    first,
    loss_terms,  # LossTerms
    tiles,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The loss of the tokens from `first` on over all tiles, each entry of the vocabulary having a label."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    mine = (t < partials.stride) & (first + t < tl.load(vectors.number))
    top = tl.full((BLOCK_T,), LOWEST, tl.float32)
    largest = tl.full((BLOCK_T,), LOWEST, tl.float32)
    argmax = tl.zeros((BLOCK_T,), tl.int32)
    likeliest = tl.zeros((BLOCK_T,), tl.int32)
    for start in range(0, tiles, BLOCK):
        top, argmax = _first_largest(
            partials.maximum, partials.argmax, partials.stride, start, tiles, t, mine, top, argmax, BLOCK
        )
        if stats.entropy is not None:
            largest, likeliest = _first_largest(
                partials.largest, partials.likeliest, partials.stride, start, tiles, t, mine, largest, likeliest, BLOCK
            )
    total = tl.zeros((BLOCK_T,), tl.float32)
    below = tl.zeros((BLOCK_T,), tl.float32)
    m = tl.zeros((BLOCK_T,), tl.float32)
    cost = tl.zeros((BLOCK_T,), tl.float32)
    given_mass = tl.zeros((BLOCK_T,), tl.float32)
    given_cost = tl.zeros((BLOCK_T,), tl.float32)
    moment = tl.zeros((BLOCK_T,), tl.float32)
    for start in range(0, tiles, BLOCK):
        j = start + tl.arange(0, BLOCK)
        where, inside = j.to(tl.int64)[:, None] * partials.stride + t[None, :], (j < tiles)[:, None] & mine[None, :]
        drop = tl.load(partials.maximum + where, mask=inside, other=LOWEST) - top[None, :]
        decay = tl.exp2(drop * LOG2E)
        s = tl.load(partials.others + where, mask=inside, other=0.0)
        low = tl.load(partials.below + where, mask=inside, other=0.0)
        q = tl.load(partials.mass + where, mask=inside, other=0.0)
        c = tl.load(partials.cost + where, mask=inside, other=0.0)
        total += tl.sum(s * decay, 0)
        below += tl.sum(tl.where(drop < 0, s, low) * decay, 0)
        m += tl.sum(q, 0)
        cost += tl.sum(c - q * drop, 0)
        if stats.entropy is not None:
            q = tl.load(partials.given_mass + where, mask=inside, other=0.0)
            c = tl.load(partials.given_cost + where, mask=inside, other=0.0)
            e = tl.load(partials.moment + where, mask=inside, other=0.0)
            given_mass += tl.sum(q, 0)
            given_cost += tl.sum(c - q * drop, 0)
            moment += tl.sum(tl.where(decay > 0, decay * (e + s * drop), 0.0), 0)
    value, value_lse, value_less = soft_loss(loss_terms, top, total, below, m, cost)
    tl.store(loss + first + t, value, mask=mine)
    tl.store(lse + first + t, value_lse, mask=mine)
    tl.store(less + first + t, value_less, mask=mine)
    tl.store(mass + first + t, m, mask=mine)
    if stats.entropy is not None:
        log_total, _ = log_of_total(total, below)
        tl.store(stats.expected + first + t, -(given_mass * log_total + given_cost), mask=mine)
        tl.store(stats.entropy + first + t, log_total - moment / total, mask=mine)
        tl.store(stats.correct + first + t, argmax == likeliest, mask=mine)
        tl.store(stats.argmax + first + t, argmax.to(tl.int64), mask=mine)
        tl.store(stats.target_logit + first + t, given_mass * top - given_cost, mask=mine)


@triton.jit(do_not_specialize=["N"])
def spread_log_probs(
    ids,  # [T, K] int64
    vectors,  # Vectors
    picked,  # Picked
    out,  # TokenSoftmax: log_prob out
    N,  # T * K
    V,
    K,
    ignore_index,
    BLOCK: tl.constexpr,
):
    """Each id's log-probability, from the leader's: that has its digits where it is near 0."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    t = i // K
    y = tl.load(ids + i, mask=i < N, other=ignore_index)
    counted = y != ignore_index
    good = counted & (y >= 0) & (y < V)
    at = tl.load(vectors.position + t, mask=good, other=0).to(tl.int64)
    z = tl.load(picked.logit + at * K + i - t * K, mask=good, other=0.0)
    top = tl.load(picked.target_logit + at, mask=good, other=0.0)
    # The difference of two that are -inf is NaN.
    value = tl.load(out.leading + t, mask=good, other=0.0) + tl.where(z == top, 0.0, z - top)
    tl.store(out.log_prob + i, tl.where(good, value, tl.where(counted, float("nan"), 0.0)), mask=i < N)


@triton.jit
def rebase_exponentials(
    exponentials,
    vectors,  # Vectors
    partials,  # Partials
    tiles,
    buffer,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a partial
    BLOCK_T: tl.constexpr,
):
    """Make the exponentials of a token whose logits are far above its shift relative to its lse instead."""
    first = tl.program_id(0) * TILES
    t0 = tl.program_id(1) * BLOCK_T
    t = t0 + tl.arange(0, BLOCK_T)
    inside = t < tl.load(vectors.number)
    before = tl.load(vectors.shift + t, mask=inside, other=0.0)
    after = tl.load(vectors.base + t, mask=inside, other=0.0)
    moved = before != after
    if tl.max(moved.to(tl.int32), 0) > 0:
        for j in range(first, tl.minimum(first + TILES, tiles)):
            row = buffer_row(j, t0, buffer, 0)
            for part in tl.static_range(VOCAB_TILE // COLUMNS):
                at = tl.cast(j, tl.int64) * (VOCAB_TILE // COLUMNS) + part
                m = tl.load(partials.maximum + at * partials.stride + t, mask=inside, other=0.0)
                used = tl.where(m - before > REACH, m, before)
                where = (tl.cast(row, tl.int64) + tl.arange(0, BLOCK_T))[:, None] * VOCAB_TILE
                where += part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
                e = tl.load(exponentials + where, mask=moved[:, None], other=0.0).to(tl.float32)
                e *= tl.exp2((used - after) * LOG2E)[:, None]
                tl.store(exponentials + where, e.to(exponentials.dtype.element_ty), mask=moved[:, None])
