"""The kernels of backward: both gradients, from exponentials that were kept and from logits computed again.

Sizes, positions and the matrix of exponentials are explained in blocks.py.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LOG2E, target_gradient
from onchip.kernels.triton.tiles import add_columns, load_block, place_tile, store_columns
from onchip.vocab.triton.blocks import NO_LABEL, VOCAB_TILE, exponential_row, load_weight, unscaled_logits


@triton.jit
def scale_rows(
    rows,  # [T, H] in and out
    scale,  # [T] float32 in: factor of each row of the gradient; out: of each row of the product for hidden's
    at_target,  # [T] float32 out, unless given: the target's entry of the gradient
    order,
    count,
    label,
    lse,
    log_prob,
    base,
    held,
    H,
    z_loss,
    inverse_exponential_scale,
    GIVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply hidden's rows by what kept exponentials lack: their token's factor times exp(base - lse)."""
    t = tl.program_id(0)
    if t < tl.load(count):
        token = tl.load(order + t)
        lse_t = tl.load(lse + token)
        scale_t = tl.load(scale + t)
        if not GIVEN:
            entry = scale_t * target_gradient(lse_t, tl.load(log_prob + token), z_loss)
            tl.store(at_target + t, tl.where(tl.load(label + t) >= 0, entry, 0.0))
        if t < held:
            r = scale_t * (1 + 2 * z_loss * lse_t) * tl.exp2((tl.load(base + t) - lse_t) * LOG2E)
            r *= inverse_exponential_scale
            for start in range(0, H, BLOCK):
                c = start + tl.arange(0, BLOCK)
                h = tl.load(rows + t.to(tl.int64) * H + c, mask=c < H, other=0).to(tl.float32)
                tl.store(rows + t.to(tl.int64) * H + c, (h * r).to(rows.dtype.element_ty), mask=c < H)
            tl.store(scale + t, r)


@triton.jit
def _to_gradient(
    p,
    v,
    y,
    lse,
    log_prob,
    row,
    V,
    label_smoothing,
    z_loss,
    TARGETS: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
):
    """row * d(loss) / dz from probabilities p [tokens, vocab]; the target's is 0, or made from its log-probability."""
    at_target = target_gradient(lse, log_prob, z_loss) if TARGETS else tl.zeros_like(lse)
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
    TARGETS: tl.constexpr,
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
    at_target=None,  # [T] float32: the target's entry of the gradient
    entropy_row=None,  # [T] float32: minus the entropy's upstream gradient
    mean=None,  # [T] float32: of z under the softmax
    GIVEN: tl.constexpr = False,
    ENTROPY: tl.constexpr = False,
    TURNED: tl.constexpr = False,
):
    """Logits computed again, and their gradient, of the positions from `first` on, for a chunk of the vocabulary.

    Without TARGETS the targets' entries are 0.  With GIVEN, `row` is the coefficient of p, and the targets' entries are
    those of `at_target`; with ENTROPY the coefficient is row + entropy_row * (z - mean).
    """
    n = tl.load(count)
    tiles_t = tl.cdiv(tl.maximum(tl.maximum(n, 1) - first, 0), BLOCK_T)
    steps = tl.cdiv(H, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_t * chunk_tiles, PROGRAMS, flatten=True):
        i, j = place_tile(tile, tiles_t, chunk_tiles, GROUP)
        t0 = first + i * BLOCK_T
        v0 = (first_tile + j) * VOCAB_TILE
        z = tl.zeros((BLOCK_T, VOCAB_TILE), tl.float32)
        for k in range(steps):
            a = load_block(rows, rows_stride, t0, k * BLOCK_K, T, H, BLOCK_T, BLOCK_K, TMA)
            b = load_weight(weight, weight_stride, v0, k * BLOCK_K, V, H, VOCAB_TILE, BLOCK_K, TURNED, TMA)
            z = tl.dot(a, b.T, z)

        t = t0 + tl.arange(0, BLOCK_T)
        v = v0 + tl.arange(0, VOCAB_TILE)
        inside = t < n
        token = tl.load(order + t, mask=inside, other=0)
        lse_t = tl.load(lse + token, mask=inside, other=0.0)
        if not GIVEN:
            lp = tl.load(log_prob + token, mask=inside, other=0.0)
        r = tl.load(row + t, mask=inside, other=0.0)
        y = tl.load(label + t, mask=inside, other=-1)
        k_z = tl.load(factor + t, mask=inside, other=0.0)
        x = unscaled_logits(z, bias, v, inner_scale, V, BIAS, SOFTCAP)
        p = tl.exp2(x * (k_z * LOG2E)[:, None] - (lse_t * LOG2E)[:, None])
        if GIVEN:
            g = p * r[:, None]
            if ENTROPY:
                r_entropy = tl.load(entropy_row + t, mask=inside, other=0.0)
                offset = x * k_z[:, None] - tl.load(mean + t, mask=inside, other=0.0)[:, None]
                # p log p is 0 at p = 0, and 0 * -inf is not.
                g = p * (r[:, None] + r_entropy[:, None] * tl.maximum(offset, -1e30))
        else:
            g = _to_gradient(p, v, y, lse_t, lp, r, V, label_smoothing, z_loss, TARGETS, SMOOTHING, Z_LOSS)
        if SOFTCAP:
            g *= 1 - x * x
        if GIVEN:
            entry = tl.load(at_target + t, mask=inside, other=0.0) if TARGETS else tl.zeros_like(r)
            g = tl.where(v[None, :] == y[:, None], entry[:, None], g)
        g = tl.where(inside[:, None] & (v < V)[None, :], g, 0.0)
        value = g.to(rows.dtype if TMA else rows.dtype.element_ty)
        into = again + j * again_tokens + t0 - first
        store_columns(
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
    stash,
    stash_stride,
    stash_tokens,
    overflow,
    overflow_tokens,
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
        i, j = place_tile(tile, tiles_v, tiles_h, GROUP)
        of_chunk = i * BLOCK_V // VOCAB_TILE
        vocab_tile = first_tile + of_chunk
        column = i * BLOCK_V - of_chunk * VOCAB_TILE
        acc = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
        for k in range(steps):
            t = k * BLOCK_K
            row = exponential_row(
                vocab_tile,
                t,
                stash,
                stash_stride,
                stash_tokens,
                overflow,
                overflow_tokens,
                again,
                again_tokens,
                again_from,
            )
            a = load_block(exponentials, VOCAB_TILE, row, column, exponential_rows, VOCAB_TILE, BLOCK_K, BLOCK_V, TMA)
            b = load_block(rows, rows_stride, t, j * BLOCK_H, T, H, BLOCK_K, BLOCK_H, TMA)
            acc = tl.dot(a.T, b, acc)
        if SHRINK:
            acc *= tl.load(shrink)
        v = vocab_tile * VOCAB_TILE + column
        if ADD:
            add_columns(out, out_stride, v, j * BLOCK_H, V, H, acc, BLOCK_V, BLOCK_H, PARTS, TMA)
        else:
            value = acc.to(out.dtype if TMA else out.dtype.element_ty)
            store_columns(out, out_stride, v, j * BLOCK_H, V, H, value, BLOCK_V, BLOCK_H, PARTS, TMA)


@triton.jit
def add_targets(
    hidden,  # [T, H], any strides
    grad_weight,  # [V, H] in and out
    grad_bias,  # [V] float32 in and out
    order,
    sorted_label,  # [N] int32: the targets in ascending order, NO_LABEL at the end
    sorted_position,  # [N] int64: whose they are, IDS of each position
    at_target,  # [N] float32
    shrink,
    hidden_stride_t,
    hidden_stride_h,
    N,
    H,
    IDS: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    SHRINK: tl.constexpr,
    OPERAND: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the targets' terms to the weight's gradient, and the bias's: for each entry those of its tokens, in order."""
    i = tl.program_id(0)
    y = tl.load(sorted_label + i)
    before = tl.load(sorted_label + tl.maximum(i - 1, 0))
    if (y != NO_LABEL) & ((i == 0) | (before != y)):
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        sum_g = tl.zeros((), tl.float32)
        more = True
        while more:
            j = i + tl.arange(0, TOKENS)
            mine = (j < N) & (tl.load(sorted_label + j, mask=j < N, other=NO_LABEL) == y)
            t = tl.load(sorted_position + j, mask=mine, other=0)
            g = tl.load(at_target + t, mask=mine, other=0.0)
            sum_g += tl.sum(g, 0)
            if WEIGHT:
                token = tl.load(order + t // IDS, mask=mine, other=0).to(tl.int64)
                at = token[:, None] * hidden_stride_t + c.to(tl.int64)[None, :] * hidden_stride_h
                h = tl.load(hidden + at, mask=mine[:, None] & (c < H)[None, :], other=0.0).to(OPERAND).to(tl.float32)
                total += tl.sum(h * g[:, None], 0)
            more = tl.sum(mine.to(tl.int32), 0) == TOKENS
            i += TOKENS
        if SHRINK:
            total *= tl.load(shrink)
            sum_g *= tl.load(shrink)
        if WEIGHT:
            row = grad_weight + y.to(tl.int64) * H + c
            value = tl.load(row, mask=c < H, other=0.0).to(tl.float32) + total
            tl.store(row, value.to(grad_weight.dtype.element_ty), mask=c < H)
        if BIAS:
            once = tl.program_id(1) == 0
            tl.store(grad_bias + y, tl.load(grad_bias + y) + sum_g, mask=once)


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
    stash,
    stash_stride,
    stash_tokens,
    overflow,
    overflow_tokens,
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
    TURNED: tl.constexpr = False,
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
        i, j = place_tile(tile, tiles_t, tiles_h, GROUP)
        t0 = first + i * BLOCK_T
        acc = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
        for k in range(begin, end):
            of_chunk = k * BLOCK_K // VOCAB_TILE
            column = k * BLOCK_K - of_chunk * VOCAB_TILE
            row = exponential_row(
                first_tile + of_chunk,
                t0,
                stash,
                stash_stride,
                stash_tokens,
                overflow,
                overflow_tokens,
                again,
                again_tokens,
                first_tile,
            )
            v = first_tile * VOCAB_TILE + k * BLOCK_K
            a = load_block(exponentials, VOCAB_TILE, row, column, exponential_rows, VOCAB_TILE, BLOCK_T, BLOCK_K, TMA)
            b = load_weight(weight, weight_stride, v, j * BLOCK_H, V, H, BLOCK_K, BLOCK_H, TURNED, TMA)
            acc = tl.dot(a, b, acc)
        if SCALE:
            t = t0 + tl.arange(0, BLOCK_T)
            acc *= tl.load(scale + t, mask=t < n, other=0.0)[:, None]
        add_columns(
            out, out_stride, t0 - first + half * half_rows, j * BLOCK_H, out_rows, H, acc, BLOCK_T, BLOCK_H, PARTS, TMA
        )


@triton.jit
def bias_gradient(
    exponentials,
    out,  # [V] float32 out
    count,
    scale,
    shrink,
    first_tile,
    stash,
    stash_stride,
    stash_tokens,
    overflow,
    overflow_tokens,
    again,
    again_tokens,
    V,
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
    for start in range(0, n, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        row = exponential_row(
            j, start, stash, stash_stride, stash_tokens, overflow, overflow_tokens, again, again_tokens, first_tile
        ).to(tl.int64)
        where = (row + tl.arange(0, BLOCK_T))[:, None] * VOCAB_TILE + c[None, :]
        g = tl.load(exponentials + where, mask=(t < n)[:, None], other=0.0).to(tl.float32)
        held = t < stash_tokens + overflow_tokens
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
    label,  # [T * IDS] int32: a position's targets
    at_target,  # [T * IDS] float32
    shrink,
    out,  # [T, H] out, by token
    weight_stride_v,
    weight_stride_h,
    H,
    held,
    again_rows,
    IDS: tl.constexpr,
    TARGETS: tl.constexpr,
    SHRINK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round the hidden gradient, and put each row in its token's place; 0 for ignored tokens.

    Without TARGETS, the targets' terms aren't in the sums yet.
    """
    t = tl.program_id(0)
    at = tl.load(position + t)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(sums + tl.cast(at, tl.int64) * H + c, mask=(c < H) & (at >= 0), other=0.0)
    if (at >= held) & (again_rows > 0):
        value += tl.load(sums + tl.cast(at + again_rows, tl.int64) * H + c, mask=c < H, other=0.0)
    if not TARGETS:
        for k in range(IDS):
            g = tl.load(at_target + at * IDS + k, mask=at >= 0, other=0.0)
            y = tl.maximum(tl.load(label + at * IDS + k, mask=at >= 0, other=0), 0).to(tl.int64)
            w = weight + y * weight_stride_v + c.to(tl.int64) * weight_stride_h
            value += g * tl.load(w, mask=(c < H) & (at >= 0), other=0.0).to(tl.float32)
    if SHRINK:
        value *= tl.load(shrink)
    tl.store(out + t.to(tl.int64) * H + c, value, mask=c < H)
