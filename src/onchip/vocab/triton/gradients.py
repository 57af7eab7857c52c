"""The kernels of backward: both gradients, from exponentials that were kept and from logits that are recomputed.

Sizes, positions and the rows of exponentials are explained in blocks.py.  None as an argument means: there is none.

The gradient of a position's logits is p * (row_scale + entropy_scale * (z - mean)) - even, except at its ids' entries,
which are given: `position_terms` makes all of these.  Class weights, if there are any, are factors of `even`.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LOG2E, expm1, soft_gradient
from onchip.kernels.triton.tiles import add_columns, add_digits, load_block, place_tile, store_columns
from onchip.vocab.triton.blocks import (
    NO_LABEL,
    VOCAB_TILE,
    at_the_end,
    buffer_row,
    load_weight,
    read_labels,
    row_number,
    unscaled_logits,
)

# Below this exp is 0 in float32: offsets are cut off here, so that p log p is 0 at p = 0 where 0 * -inf would not be.
VANISHED = tl.constexpr(-128.0)


@triton.jit(do_not_specialize=["kept"])
def position_terms(
    ids,  # [T, K] int64
    vectors,  # Vectors
    known,  # TokenSoftmax
    upstream,  # OutputGradients
    terms,  # Terms out
    size,  # of the upstream gradients
    V,
    K,
    ignore_index,
    elsewhere,  # an id that counts and has no entry here; ignore_index where there is none
    classes,  # that smoothing spreads over
    inner_scale,
    slope_scale,  # d product = d z * factor * slope_scale
    inverse_exponential_scale,
    label_smoothing,
    kept,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """What the gradient of a position's logits is made of.

    With `terms.even` all entries get something: those of the ids too, for the positions before `kept` apart from what
    is given here.  `upstream.even` is that, times the class weights, and `upstream.rest` what the ids' own get beside.
    Without these there is one id, and it is a share `label_smoothing` of the log-probability's upstream gradient.
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = t < tl.load(vectors.number)
    token = tl.load(vectors.order + t, mask=inside, other=0).to(tl.int64)
    here = inside[:, None] & (k < K)[None, :]
    y = tl.load(ids + token[:, None] * K + k[None, :], mask=here, other=ignore_index)
    counted = here & (y != ignore_index)
    lp = tl.load(known.log_prob + token[:, None] * K + k[None, :], mask=counted, other=0.0)
    lse_t = tl.load(known.lse + token, mask=inside, other=0.0)
    # Of an id's occurrences, and of all other ids.
    same = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    rest = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    repeats = tl.zeros((BLOCK_T, BLOCK_K), tl.int32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    large = tl.zeros((BLOCK_T,), tl.float32)
    for j in range(K):
        y_j = tl.load(ids + token * K + j, mask=inside, other=ignore_index)
        counts = y_j != ignore_index
        g = tl.zeros((BLOCK_T,), tl.float32)
        if upstream.log_prob is not None:
            g = tl.load(upstream.log_prob + token * K + j, mask=counts, other=0.0)
        g = tl.where(counts & (y_j != elsewhere) & ((y_j < 0) | (y_j >= V)), float("nan"), g)
        equal = y == y_j[:, None]
        same += tl.where(equal, g[:, None], 0.0)
        rest += tl.where(equal, 0.0, g[:, None])
        repeats += (equal & (k > j)[None, :]).to(tl.int32)
        total += g
        large += tl.abs(g)
    of_log_probs = total
    if upstream.lse is not None:
        g = tl.load(upstream.lse + token, mask=inside, other=0.0)
        total -= g
        large += tl.abs(g)
        rest -= g[:, None]
    k_z = tl.load(vectors.factor + t, mask=inside, other=1.0)
    f = k_z * slope_scale
    if upstream.entropy is not None:
        g = tl.load(upstream.entropy + token, mask=inside, other=0.0)
        h = tl.load(known.entropy + token, mask=inside, other=0.0)
        large += tl.abs(g)
        rest += g[:, None] * tl.maximum(lp + h[:, None], VANISHED)
        tl.store(terms.entropy_scale + t, -g * f, mask=inside)
        tl.store(terms.mean + t, lse_t - h, mask=inside)
    tl.store(terms.row_scale + t, -total * f, mask=inside)
    above = tl.load(vectors.base + t, mask=inside, other=0.0) - lse_t
    tl.store(terms.product_scale + t, -total * f * tl.exp2(above * LOG2E) * inverse_exponential_scale, mask=inside)
    tl.store(terms.lse + t, lse_t, mask=inside)
    tl.store(size + t, large * f, mask=inside)
    # 1 - p as -expm1(log p): 1 minus a rounded p would lose all digits of a p near 1.
    value = -(same * expm1(lp)) - tl.exp2(lp * LOG2E) * rest
    if upstream.even is not None:
        tl.store(terms.even + t, tl.load(upstream.even + token, mask=inside, other=0.0) * f, mask=inside)
        own = tl.load(upstream.rest + token[:, None] * K + k[None, :], mask=counted, other=0.0)
        value += tl.where((t < kept)[:, None], 0.0, own)
    elif terms.even is not None:
        tl.store(terms.even + t, -of_log_probs * (label_smoothing / classes) * f, mask=inside)
        # In this order it is exactly 0 for one class, where a fused multiplication and subtraction would leave a rest.
        share = tl.where(t < kept, 0.0, label_smoothing / classes)
        value += (of_log_probs * (share - label_smoothing))[:, None]
    if inner_scale is not None:
        x = tl.minimum(tl.maximum((lp + lse_t[:, None]) / k_z[:, None], -1.0), 1.0)
        value *= 1 - x * x
    good = counted & (y >= 0) & (y < V) & (repeats == 0)
    to = t.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(terms.entry + to, tl.where(good, value * f[:, None], 0.0), mask=here)
    tl.store(terms.entry_label + to, tl.where(good, y, -1).to(tl.int32), mask=here)


@triton.jit(do_not_specialize=["kept", "swap"])
def scale_rows(
    rows,  # [T, H] in and out
    product_scale,  # [T] float32
    count,
    kept,
    swap,
    H,
    BLOCK: tl.constexpr,
):
    """Multiply hidden's rows of the positions before `kept` by what their kept exponentials, or gradients, lack.

    With `swap` their columns then lie as `adding.weight_added` takes them: of each 32, pair j of eight i is where
    pair i of eight j was.
    """
    t = tl.program_id(0)
    if (t < tl.load(count)) & (t < kept):
        r = tl.load(product_scale + t)
        for start in range(0, H, BLOCK):
            c = start + tl.arange(0, BLOCK)
            row = rows + t.to(tl.int64) * H
            value = (tl.load(row + c, mask=c < H, other=0).to(tl.float32) * r).to(rows.dtype.element_ty)
            if swap:
                tl.debug_barrier()  # all has been read
                tl.store(row + c // 32 * 32 + c // 2 % 4 * 8 + c // 8 % 4 * 2 + c % 2, value, mask=c < H)
            else:
                tl.store(row + c, value, mask=c < H)


@triton.jit(do_not_specialize=["first", "first_tile", "chunk_tiles", "T"])
def gradient_tiles(
    rows,
    weight,
    bias,
    class_weight,  # [V] float32: of `terms.even`, or of the labels
    labels,  # Labels of all tokens, each of which is its own position
    exponentials,  # [rows, VOCAB_TILE] out
    vectors,  # Vectors
    terms,  # Terms
    at_target,
    buffer,
    first,  # position
    first_tile,
    chunk_tiles,
    rows_stride,
    weight_stride,
    T,
    H,
    V,
    inner_scale,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
    TURNED: tl.constexpr,
    FILLED: tl.constexpr = False,  # the compiler may know that H is not 0, and all takes fewer registers
):
    """Recomputed logits' gradient, of the positions from `first` on, for a chunk of the vocabulary.

    `at_target` is the label's entry; without it, that is 0.
    """
    n = tl.load(vectors.number)
    tiles_t = tl.cdiv(tl.maximum(tl.maximum(n, 1) - first, 0), BLOCK_T)
    steps = tl.cdiv(H, BLOCK_K)
    if FILLED:
        tl.assume(steps > 0)
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
        lse_t = tl.load(terms.lse + t, mask=inside, other=0.0)
        r = tl.load(terms.row_scale + t, mask=inside, other=0.0)
        y = tl.load(vectors.label + t, mask=inside, other=-1)
        k_z = tl.load(vectors.factor + t, mask=inside, other=0.0)
        x = unscaled_logits(z, bias, v, inner_scale, V)
        p = tl.exp2(x * (k_z * LOG2E)[:, None] - (lse_t * LOG2E)[:, None])
        if labels is not None:
            _, q = read_labels(labels, class_weight, t, v0, n, V, True, FILLED)
            m = tl.load(terms.mass + t, mask=inside, other=0.0)[:, None]
            low = tl.load(terms.less + t, mask=inside, other=0.0)[:, None]
            more = tl.load(terms.more + t, mask=inside, other=0.0)[:, None]
            g = soft_gradient(p, q, m, low, more) * r[:, None]
        elif terms.entropy_scale is None:
            g = p * r[:, None]
        else:
            r_entropy = tl.load(terms.entropy_scale + t, mask=inside, other=0.0)
            offset = x * k_z[:, None] - tl.load(terms.mean + t, mask=inside, other=0.0)[:, None]
            # p log p is 0 at p = 0, and 0 * -inf is not.
            g = p * (r[:, None] + r_entropy[:, None] * tl.maximum(offset, -1e30))
        if terms.even is not None:
            even = tl.load(terms.even + t, mask=inside, other=0.0)[:, None]
            if class_weight is not None:
                even = even * tl.load(class_weight + v, mask=v < V, other=0.0)[None, :]
            g -= even
        entry = tl.zeros_like(r) if at_target is None else tl.load(at_target + t, mask=inside, other=0.0)
        if inner_scale is not None:
            g *= 1 - x * x  # before the entry: after it, registers are spilled
        g = tl.where(v[None, :] == y[:, None], entry[:, None], g)
        g = tl.where(inside[:, None] & (v < V)[None, :], g, 0.0)
        value = g.to(rows.dtype if TMA else rows.dtype.element_ty)
        into = row_number(buffer.third_row) + j * buffer.in_third + t0 - first
        store_columns(
            exponentials,
            VOCAB_TILE,
            into,
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
def entropy_gradient(
    exponentials,  # [rows, VOCAB_TILE] in and out
    vectors,  # Vectors
    terms,  # Terms
    inverse_exponential_scale,
    buffer,
    BLOCK_T: tl.constexpr,
):
    """Make kept exponentials the gradient of their logits, which is 0 where they are.

    z comes from the logarithm of what was kept: a relative error of that is as large an absolute one of z, and moves
    the gradient about as far as its own rounding does.
    """
    j = tl.program_id(0)
    t0 = tl.program_id(1) * BLOCK_T
    n = tl.load(vectors.number)
    if t0 < n:
        t = t0 + tl.arange(0, BLOCK_T)
        inside = t < n
        b = tl.load(vectors.base + t, mask=inside, other=0.0)
        factor = tl.exp2((b - tl.load(terms.lse + t, mask=inside, other=0.0)) * LOG2E)
        middle = b - tl.load(terms.mean + t, mask=inside, other=0.0)
        r = tl.load(terms.row_scale + t, mask=inside, other=0.0)
        r_entropy = tl.load(terms.entropy_scale + t, mask=inside, other=0.0)
        at = buffer_row(j, t0, buffer, 0)
        where = (tl.cast(at, tl.int64) + tl.arange(0, BLOCK_T))[:, None] * VOCAB_TILE
        where += tl.arange(0, VOCAB_TILE)[None, :]
        e = tl.load(exponentials + where).to(tl.float32) * inverse_exponential_scale
        offset = tl.log(e) + middle[:, None]
        g = e * factor[:, None] * (r[:, None] + r_entropy[:, None] * offset)
        tl.store(exponentials + where, tl.where(e > 0, g, 0.0).to(exponentials.dtype.element_ty))


@triton.jit(do_not_specialize=["first", "last", "first_tile", "chunk_tiles"])
def write_entries(
    exponentials,  # [rows, VOCAB_TILE] in and out
    label,  # [T, K] int32, by position: -1 for none
    entry,  # [T, K] float32, by position; None: zeros
    count,
    first,  # position
    last,
    first_tile,
    chunk_tiles,
    K,
    buffer,
    BLOCK: tl.constexpr,
):
    """Put the ids' entries in place of what is there, for positions in [first, last) and a chunk of tiles."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    t = (i // K).to(tl.int32)
    inside = (t >= first) & (t < tl.minimum(tl.load(count), last))
    y = tl.load(label + i, mask=inside, other=-1)
    j = y // VOCAB_TILE
    inside &= (y >= 0) & (j >= first_tile) & (j < first_tile + chunk_tiles)
    row = buffer_row(j, t, buffer, first_tile)
    where = row.to(tl.int64) * VOCAB_TILE + y - j * VOCAB_TILE
    value = tl.zeros((BLOCK,), tl.float32) if entry is None else tl.load(entry + i, mask=inside, other=0.0)
    tl.store(exponentials + where, value.to(exponentials.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["recomputed_from", "first_tile", "chunk_tiles", "T"])
def weight_gradient(
    exponentials,  # [rows, VOCAB_TILE]
    rows,  # [T, H]
    out,  # [V, H], or added to; with digits the first 16 bits of a float32 as int16
    digits,  # [V, H] uint8: the next 8; with PAIRED [pairs of rows, H]: the next 4 of both; None: there are no more
    count,
    inverse_grad_scale,  # [] float32: what the product is multiplied by
    factor,  # [] float32: what the sum with digits is multiplied by, in the end
    following,  # [1] int32: tokens of the next chunk; of none, that is now
    even_sum,  # [H] float32: what each row lacks
    recomputed_from,  # the first tile of the chunk that was recomputed
    first_tile,
    chunk_tiles,
    buffer,
    rows_stride,
    out_stride,
    T,
    H,
    V,
    ADD: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
):
    """exponentials.T @ rows for a chunk of the vocabulary, each element rounded once."""
    number = tl.load(count)
    steps = tl.cdiv(tl.maximum(number, 1), BLOCK_K)
    if ADD and digits is not None:
        chunk_tiles = tl.where(number > 0, chunk_tiles, 0)  # of no tokens there is nothing to add
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
            row = buffer_row(vocab_tile, t, buffer, recomputed_from)
            a = load_block(
                exponentials, VOCAB_TILE, row, column, row_number(buffer.rows), VOCAB_TILE, BLOCK_K, BLOCK_V, TMA
            )
            b = load_block(rows, rows_stride, t, j * BLOCK_H, T, H, BLOCK_K, BLOCK_H, TMA)
            acc = tl.dot(a.T, b, acc)
        if even_sum is not None:
            columns = j * BLOCK_H + tl.arange(0, BLOCK_H)
            acc -= tl.load(even_sum + columns, mask=columns < H, other=0.0)[None, :]
        if inverse_grad_scale is not None:
            acc *= tl.load(inverse_grad_scale)
        v = vocab_tile * VOCAB_TILE + column
        if digits is not None:
            of_sum, half = None, None
            if factor is not None:
                of_sum, half = at_the_end(factor, following)
            add_digits(
                out, digits, out_stride, v, j * BLOCK_H, V, H, acc, of_sum, half, BLOCK_V, BLOCK_H, 8, ADD, PAIRED
            )
        elif ADD:
            add_columns(out, out_stride, v, j * BLOCK_H, V, H, acc, BLOCK_V, BLOCK_H, PARTS, TMA)
        else:
            value = acc.to(out.dtype if TMA else out.dtype.element_ty)
            store_columns(out, out_stride, v, j * BLOCK_H, V, H, value, BLOCK_V, BLOCK_H, PARTS, TMA)


@triton.jit(do_not_specialize=["N", "of_positions"])
def column_sums(
    x,  # [N, H], any strides
    factor,  # [N] float32
    count,
    out,  # [PARTS, H] float32 out
    x_stride_n,
    x_stride_h,
    N,
    of_positions,  # whether the rows are: each counts times its factor then, and those before `count` alone
    H,
    PARTS: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums of the rows, as operands, in parts."""
    n = tl.where(of_positions != 0, tl.minimum(tl.load(count), N), N)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # One sum over a program's rows at the end: warps would wait for each other at each.
    total = tl.zeros((BLOCK_T, BLOCK), tl.float32)
    for start in range(tl.program_id(0) * BLOCK_T, n, PARTS * BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        at = t.to(tl.int64)[:, None] * x_stride_n + c.to(tl.int64)[None, :] * x_stride_h
        row = tl.load(x + at, mask=(t < n)[:, None] & (c < H)[None, :], other=0).to(OPERAND).to(tl.float32)
        total += row * tl.load(factor + t, mask=(t < n) & (of_positions != 0), other=1.0)[:, None]
    tl.store(out + tl.program_id(0) * H + c, tl.sum(total, 0), mask=c < H)


@triton.jit(do_not_specialize=["N"])
def add_targets(
    hidden,  # [T, H], any strides
    grad_weight,  # [V, H] in and out
    grad_bias,  # [V] float32 in and out
    order,
    sorted_label,  # [N] int32: the targets in ascending order, NO_LABEL at the end
    sorted_position,  # [N] int32: whose they are, IDS of each position
    at_target,  # [N] float32
    inverse_grad_scale,
    hidden_stride_t,
    hidden_stride_h,
    N,
    H,
    IDS: tl.constexpr,
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
            if grad_weight is not None:
                token = tl.load(order + t // IDS, mask=mine, other=0).to(tl.int64)
                at = token[:, None] * hidden_stride_t + c.to(tl.int64)[None, :] * hidden_stride_h
                h = tl.load(hidden + at, mask=mine[:, None] & (c < H)[None, :], other=0.0).to(OPERAND).to(tl.float32)
                total += tl.sum(h * g[:, None], 0)
            more = tl.sum(mine.to(tl.int32), 0) == TOKENS
            i += TOKENS
        if inverse_grad_scale is not None:
            total *= tl.load(inverse_grad_scale)
            sum_g *= tl.load(inverse_grad_scale)
        if grad_weight is not None:
            row = grad_weight + y.to(tl.int64) * H + c
            value = tl.load(row, mask=c < H, other=0.0).to(tl.float32) + total
            tl.store(row, value.to(grad_weight.dtype.element_ty), mask=c < H)
        if grad_bias is not None:
            once = tl.program_id(1) == 0
            tl.store(grad_bias + y, tl.load(grad_bias + y) + sum_g, mask=once)


@triton.jit(
    do_not_specialize=["first", "last", "out_rows", "slice_rows", "first_tile", "chunk_tiles", "slices", "scaled"]
)
def hidden_gradient(
    exponentials,  # [rows, VOCAB_TILE]
    weight,  # [V, H]
    out,  # [out_rows, H] float32, added to
    count,
    product_scale,  # [T] float32: what each row of the product is multiplied by, if it is `scaled`
    scaled,
    first,
    last,
    out_rows,
    slice_rows,
    slices,
    first_tile,
    chunk_tiles,
    buffer,
    weight_stride,
    out_stride,
    H,
    V,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
    TURNED: tl.constexpr,
):
    """exponentials @ weight over a chunk of the vocabulary, for the positions in [first, last), added up in float32.

    The tiles of the last wave are cut into up to `slices` along the vocabulary if that fills the device better: 320
    tiles on 132 multiprocessors (H2560, T4096 on an H100) took 0.56 ms where cuBLAS takes 0.47.  Then two programs add
    to a tile of zeros, and 0 + a + b has the same bits in either order; or, with `slice_rows`, they add so many rows
    apart.  (Stream-K, Osama et al., arXiv:2301.03598, would cut all tiles: its programs are in different places of the
    vocabulary at a time, and L2 serves none of them.)
    """
    n = tl.minimum(tl.load(count), last)
    tiles_t = tl.cdiv(tl.maximum(n - first, 0), BLOCK_T)
    tiles_h = tl.cdiv(H, BLOCK_H)
    steps = chunk_tiles * VOCAB_TILE // BLOCK_K
    tiles = tiles_t * tiles_h
    rest = tiles % PROGRAMS
    whole = tiles - rest
    cut = tl.minimum(tl.maximum(PROGRAMS // tl.maximum(rest, 1), 1), slices)
    part = steps // cut
    for item in tl.range(tl.program_id(0), whole + rest * cut, PROGRAMS, flatten=True):
        over = tl.maximum(item - whole, 0)
        tile = tl.minimum(item, whole) + over // cut
        of_tile = over % cut
        begin = of_tile * part
        end = tl.where((item < whole) | (of_tile == cut - 1), steps, begin + part)
        i, j = place_tile(tile, tiles_t, tiles_h, GROUP)
        t0 = first + i * BLOCK_T
        acc = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
        for k in range(begin, end):
            of_chunk = k * BLOCK_K // VOCAB_TILE
            column = k * BLOCK_K - of_chunk * VOCAB_TILE
            row = buffer_row(first_tile + of_chunk, t0, buffer, first_tile)
            v = first_tile * VOCAB_TILE + k * BLOCK_K
            a = load_block(
                exponentials, VOCAB_TILE, row, column, row_number(buffer.rows), VOCAB_TILE, BLOCK_T, BLOCK_K, TMA
            )
            b = load_weight(weight, weight_stride, v, j * BLOCK_H, V, H, BLOCK_K, BLOCK_H, TURNED, TMA)
            acc = tl.dot(a, b, acc)
        t = t0 + tl.arange(0, BLOCK_T)
        r = tl.load(product_scale + t, mask=t < n, other=0.0)
        acc *= tl.where(scaled != 0, r, 1.0)[:, None]
        add_columns(
            out,
            out_stride,
            t0 - first + of_tile * slice_rows,
            j * BLOCK_H,
            out_rows,
            H,
            acc,
            BLOCK_T,
            BLOCK_H,
            PARTS,
            TMA,
        )


@triton.jit(do_not_specialize=["first_tile"])
def bias_gradient(
    exponentials,
    out,  # [V] float32 out
    count,
    product_scale,
    even,  # [T] float32, of what is kept: what each entry lacks
    inverse_grad_scale,
    first_tile,
    buffer,
    V,
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
        row = buffer_row(j, start, buffer, first_tile).to(tl.int64)
        where = (row + tl.arange(0, BLOCK_T))[:, None] * VOCAB_TILE + c[None, :]
        g = tl.load(exponentials + where, mask=(t < n)[:, None], other=0.0).to(tl.float32)
        kept = t < buffer.in_weight_grad + buffer.in_scratch
        r = tl.where(kept, tl.load(product_scale + t, mask=(t < n) & kept, other=0.0), 1.0)
        total += tl.sum(g * r[:, None], 0)
        if even is not None:
            total -= tl.sum(tl.load(even + t, mask=(t < n) & kept, other=0.0), 0)
    if inverse_grad_scale is not None:
        total *= tl.load(inverse_grad_scale)
    tl.store(out + v, total, mask=v < V)
