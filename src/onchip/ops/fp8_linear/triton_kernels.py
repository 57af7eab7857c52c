"""The Triton kernels of fp8_linear: quantising to both orientations at once, and the product A B^T.

Matrices of FP8 numbers have rows of whole blocks of 128 bytes along the contraction (`Quantized` of torch_quantize.py),
so descriptors always fit them, and what pads them is 0.  The persistent loop over tiles is that of Triton's matrix
multiplication tutorial; a partial sum over 128 elements that is then scaled is from DeepSeek-V3 (arXiv:2412.19437).
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.ops._shared.triton_tiles import add_columns, place_tile, store_block, store_columns

BLOCK = tl.constexpr(128)
LEAST_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def magnitude_bits(v):
    """|v| as an integer: ordered as the numbers are, with infinity above them and NaN above all, so none is lost."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def to_scale(bits, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scales of groups whose largest magnitudes have these bits; see `to_scale` of reference.py."""
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(amax, tl.full(amax.shape, FP8_MAX, tl.float32))
    finite = bits < 0x7F800000
    scale = tl.where(finite & (scale < LEAST_SCALE), LEAST_SCALE, scale)
    if POWER_OF_TWO:
        up = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = tl.where(finite, up.to(tl.float32, bitcast=True), scale)
    return tl.where(bits == 0, 1.0, scale)


@triton.jit
def inverse(scale):
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def load_numbers(x, stride_r, stride_c, i, j, R, C, TMA: tl.constexpr):
    """Block (i, j) of x [R, C], in float32, 0 outside of x; without TMA of any strides."""
    if TMA:
        return x.load([i * BLOCK, j * BLOCK]).to(tl.float32)
    else:  # noqa: RET505 - without it, Triton compiles what follows for a descriptor too
        r = i * BLOCK + tl.arange(0, BLOCK)
        c = j * BLOCK + tl.arange(0, BLOCK)
        at = r.to(tl.int64)[:, None] * stride_r + c.to(tl.int64)[None, :] * stride_c
        return tl.load(x + at, mask=(r < R)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)


@triton.jit
def quantize_activation(
    x,  # [R, C], any strides
    rows,  # [R, up(C)] FP8 out
    row_scales,  # [C / 128, R] float32 out
    columns,  # [C, up(R)] FP8 out: x^T
    column_scales,  # [R / 128, C] float32 out
    stride_r,
    stride_c,
    rows_stride,
    columns_stride,
    R,
    C,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FP8: tl.constexpr,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    TWICE: tl.constexpr,
    TMA_IN: tl.constexpr,
    TMA: tl.constexpr,
):
    """Read each block of x once; write it scaled by rows, and transposed and scaled by columns."""
    i = tl.program_id(0)
    r = i * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1) * BLOCKS
    for j in tl.range(first, tl.minimum(first + BLOCKS, tl.cdiv(C, BLOCK)), num_stages=STAGES):
        c = j * BLOCK + tl.arange(0, BLOCK)
        v = load_numbers(x, stride_r, stride_c, i, j, R, C, TMA_IN)
        bits = magnitude_bits(v)
        if ROWS:
            scale = to_scale(tl.max(bits, 1), FP8_MAX, POWER_OF_TWO)
            q = (v * inverse(scale)[:, None]).to(FP8)
            store_block(rows, rows_stride, i * BLOCK, j * BLOCK, R, rows_stride, q, BLOCK, BLOCK, TMA)
            tl.store(row_scales + tl.cast(j, tl.int64) * R + r, scale, mask=r < R)
        if COLUMNS:
            if TWICE:
                v = load_numbers(x, stride_r, stride_c, i, j, R, C, TMA_IN)
                bits = magnitude_bits(v)
            scale = to_scale(tl.max(bits, 0), FP8_MAX, POWER_OF_TWO)
            q = (v * inverse(scale)[None, :]).to(FP8).T
            store_block(columns, columns_stride, j * BLOCK, i * BLOCK, C, columns_stride, q, BLOCK, BLOCK, TMA)
            tl.store(column_scales + tl.cast(i, tl.int64) * C + c, scale, mask=c < C)


@triton.jit
def quantize_weight(
    w,  # [R, C], any strides
    rows,  # [R, up(C)] E4M3 out
    row_scales,  # [R / 128, rows_scale_stride] float32 out
    columns,  # [C, up(R)] E4M3 out: w^T
    column_scales,  # [C / 128, columns_scale_stride] float32 out
    stride_r,
    stride_c,
    rows_stride,
    columns_stride,
    rows_scale_stride,
    columns_scale_stride,
    R,
    C,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FP8: tl.constexpr,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    TMA_IN: tl.constexpr,
    TMA: tl.constexpr,
):
    """Read each block of w once; write it, and transposed, with one scale."""
    i = tl.program_id(0)
    first = tl.program_id(1) * BLOCKS
    for j in tl.range(first, tl.minimum(first + BLOCKS, tl.cdiv(C, BLOCK)), num_stages=STAGES):
        v = load_numbers(w, stride_r, stride_c, i, j, R, C, TMA_IN)
        # One number, as a vector of one.
        largest = tl.max(tl.max(magnitude_bits(v), 1, keep_dims=True), 0)
        scale = to_scale(largest, FP8_MAX, POWER_OF_TWO)
        q = (v * inverse(scale)[None, :]).to(FP8)
        one = tl.arange(0, 1)
        if ROWS:
            store_block(rows, rows_stride, i * BLOCK, j * BLOCK, R, rows_stride, q, BLOCK, BLOCK, TMA)
            tl.store(row_scales + tl.cast(i, tl.int64) * rows_scale_stride + j + one, scale)
        if COLUMNS:
            store_block(columns, columns_stride, j * BLOCK, i * BLOCK, C, columns_stride, q.T, BLOCK, BLOCK, TMA)
            tl.store(column_scales + tl.cast(j, tl.int64) * columns_scale_stride + i + one, scale)


@triton.jit
def load_operand(x, stride, row, k, rows, R: tl.constexpr, TMA: tl.constexpr):
    """Step k of R rows of an operand, from `row` on.  What rows beyond the last one hold is never stored."""
    if TMA:
        return x.load([row, k * BLOCK])
    else:  # noqa: RET505 - without it, Triton compiles what follows for a descriptor too
        r = tl.minimum(row + tl.arange(0, R), rows - 1)
        c = k * BLOCK + tl.arange(0, BLOCK)
        return tl.load(x + r.to(tl.int64)[:, None] * stride + c[None, :])


@triton.jit
def partial_sum(
    x,  # [BLOCK_M, 128] of A
    b,  # [N, depth] FP8
    b_scales,
    b_stride,
    b_scale_stride,
    a_scale,  # [BLOCK_M]
    acc,  # [BLOCK_M, WIDTH] float32
    n0,
    k,
    N,
    BY_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    TMA: tl.constexpr,
):
    """acc plus step k's product with WIDTH rows of B, scaled after 128 elements were summed.

    Scales are fetched before the product is waited for: after it, each step would wait for them, too.
    """
    if BY_BLOCK:
        b_scale = tl.load(b_scales + tl.cast(n0 // BLOCK, tl.int64) * b_scale_stride + k, mask=n0 < N, other=0.0)
        scale = a_scale * b_scale
        y = load_operand(b, b_stride, n0, k, N, WIDTH, TMA)
        acc += tl.dot(x, y.T) * scale[:, None]
    else:
        n = n0 + tl.arange(0, WIDTH)
        b_scale = tl.load(b_scales + tl.cast(k, tl.int64) * b_scale_stride + n, mask=n < N, other=0.0)
        y = load_operand(b, b_stride, n0, k, N, WIDTH, TMA)
        acc += tl.dot(x, y.T) * a_scale[:, None] * b_scale[None, :]
    return acc


@triton.jit
def store_result(
    out,
    out_stride,
    bias,
    m0,
    n0,
    M,
    N,
    acc,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
):
    if BIAS:
        n = n0 + tl.arange(0, WIDTH)
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ADD:
        add_columns(out, out_stride, m0, n0, M, N, acc, BLOCK_M, WIDTH, PARTS, TMA)
    else:
        value = acc.to(out.dtype if TMA else out.dtype.element_ty)
        store_columns(out, out_stride, m0, n0, M, N, value, BLOCK_M, WIDTH, PARTS, TMA)


@triton.jit
def scaled_product(
    a,  # [M, depth] FP8
    b,  # [N, depth] FP8
    a_scales,  # [depth / 128, M] float32
    b_scales,  # BY_BLOCK: [N / 128, b_scale_stride] float32, else [depth / 128, N]
    bias,  # [N]
    out,  # [M, N] out, or added to
    a_stride,
    b_stride,
    b_scale_stride,
    out_stride,
    M,
    N,
    depth,  # a multiple of 128
    BY_BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
    TMA_OUT: tl.constexpr,
):
    """out = A B^T + bias, or out += A B^T: two sums, of 128 products and of these scaled, in float32.

    A tile of 256 columns is two of 128, since it spans two scales of a weight.
    """
    WIDTH: tl.constexpr = BLOCK_N if BLOCK_N < 128 else 128
    TWO: tl.constexpr = BLOCK_N > 128
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = depth // BLOCK
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        i, j = place_tile(tile, tiles_m, tiles_n, GROUP)
        m0 = i * BLOCK_M
        n0 = j * BLOCK_N
        m = m0 + tl.arange(0, BLOCK_M)
        left = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        right = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        for k in range(steps):
            s = tl.load(a_scales + tl.cast(k, tl.int64) * M + m, mask=m < M, other=0.0)
            x = load_operand(a, a_stride, m0, k, M, BLOCK_M, TMA)
            left = partial_sum(x, b, b_scales, b_stride, b_scale_stride, s, left, n0, k, N, BY_BLOCK, WIDTH, TMA)
            if TWO:
                right = partial_sum(
                    x, b, b_scales, b_stride, b_scale_stride, s, right, n0 + WIDTH, k, N, BY_BLOCK, WIDTH, TMA
                )
        store_result(out, out_stride, bias, m0, n0, M, N, left, BIAS, ADD, BLOCK_M, WIDTH, PARTS, TMA_OUT)
        if TWO:
            store_result(out, out_stride, bias, m0, n0 + WIDTH, M, N, right, BIAS, ADD, BLOCK_M, WIDTH, PARTS, TMA_OUT)
