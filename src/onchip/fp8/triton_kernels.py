"""The Triton kernels of fp8_linear: quantising to both orientations at once, and the product A B^T.

Matrices of FP8 numbers have rows of whole blocks of 128 bytes along the contraction (`Quantized` of torch_quantize.py),
so descriptors always fit them, and what pads them is 0.  The persistent loop over tiles is that of Triton's matrix
multiplication tutorial; a partial sum over 128 elements that is then scaled is from DeepSeek-V3 (arXiv:2412.19437).
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.tiles import INTERPRETED, add_columns, place_tile, store_columns

BLOCK = tl.constexpr(128)
LEAST_SCALE = tl.constexpr(2.0**-126)
# Two numbers at a time, rounded to the nearest, ties to even, saturating; NaN stays NaN.
_BYTES = """{
    .reg .b16 low, high;
    cvt.rn.satfinite.%sx2.f32 low, $2, $1;
    cvt.rn.satfinite.%sx2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}"""
E4M3_BYTES = tl.constexpr(_BYTES % ("e4m3", "e4m3"))
E5M2_BYTES = tl.constexpr(_BYTES % ("e5m2", "e5m2"))


@triton.jit
def magnitude_bits(v):
    """|v| as an integer: ordered as the numbers are, with infinity above them and NaN above all, so none is lost."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def divide(a, D: tl.constexpr):
    """a / D rounded to nearest, for a of 2**-64 or more, in three instructions; a division takes thirty."""
    if INTERPRETED:  # it rounds a product before it adds
        return tl.div_rn(a, tl.full(a.shape, D, tl.float32))
    else:  # noqa: RET505 - without it, Triton compiles both
        q = a * (1 / D)
        return tl.fma(tl.fma(-q, D, a), 1 / D, q)


@triton.jit
def to_scale(bits, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scales of groups whose largest magnitudes have these bits; see `to_scale` of reference.py."""
    amax = bits.to(tl.float32, bitcast=True)
    small = bits < 0x20000000  # 2**-63
    scale = divide(amax * tl.where(small, 2.0**64, 1.0), FP8_MAX) * tl.where(small, 2.0**-64, 1.0)
    scale = tl.where(scale < LEAST_SCALE, LEAST_SCALE, scale)
    if POWER_OF_TWO:
        up = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = up.to(tl.float32, bitcast=True)
    return tl.where(bits == 0, 1.0, tl.where(bits < 0x7F800000, scale, amax))


@triton.jit
def inverse(scale):
    """1 / scale rounded to nearest, for a scale of 2**-126 or more: a step of Newton's, as in CUDA's own reciprocal."""
    if INTERPRETED:
        return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    else:  # noqa: RET505 - without it, Triton compiles both
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], tl.float32, True, 1)
        return tl.where(scale == float("inf"), 0.0, tl.fma(tl.fma(-scale, y, 1.0), y, y))


@triton.jit
def one_byte(x, FP8: tl.constexpr):
    return x.to(FP8).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def four_bytes(a, b, c, d, FP8: tl.constexpr):
    """Four numbers in FP8 as the bytes of one integer, a lowest."""
    if INTERPRETED:
        return one_byte(a, FP8) | (one_byte(b, FP8) << 8) | (one_byte(c, FP8) << 16) | (one_byte(d, FP8) << 24)
    else:  # noqa: RET505 - without it, Triton compiles both
        return tl.inline_asm_elementwise(
            E4M3_BYTES if tl.float8e4nv == FP8 else E5M2_BYTES, "=r,f,f,f,f", [a, b, c, d], tl.int32, True, 1
        )


@triton.jit
def load_numbers(x, stride_r, stride_c, r, c, R, C):
    """x[r, c] in float32, 0 outside of x."""
    at = r.to(tl.int64)[:, None] * stride_r + c.to(tl.int64)[None, :] * stride_c
    return tl.load(x + at, mask=(r < R)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_rows(rows, rows_stride, v, scale, r, c, R, FP8: tl.constexpr):
    """Some rows in FP8."""
    q = (v * inverse(scale)[:, None]).to(FP8)
    tl.store(rows + r.to(tl.int64)[:, None] * rows_stride + c[None, :], q, mask=(r < R)[:, None])


@triton.jit
def quantize(
    x,  # [R, C], any strides
    rows,  # [R, up(C)] FP8 out
    row_scales,  # float32 out: [C / 128, R], or BY_BLOCK [R / 128, rows_scale_stride]
    columns,  # [C, up(R) / 4] int32 out: x^T in FP8, four numbers each
    column_scales,  # float32 out: [R / 128, C], or BY_BLOCK [C / 128, columns_scale_stride]
    stride_r,
    stride_c,
    rows_stride,
    columns_stride,
    rows_scale_stride,
    columns_scale_stride,
    R_16,  # R + 16 and C + 16: of a size of 1 Triton makes a constant, of what is outside then a load that is never
    C_16,  # taken, and ptxas of that numbers other than 0
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Read a block of 128x128 once; write it, and transposed, scaled by rows and by columns or BY_BLOCK by one number.

    For what `quantize_words` of triton_words.py doesn't serve: neither rows nor columns are contiguous, or a size is
    2**22 or more.
    A thread holds four rows below each other, and packs them into one integer before they change places: through shared
    memory go 32 bits at a time, and Triton 3.6 loses every other row of a transposed block of 8-bit numbers.  What is
    read again comes from L1; what isn't kept in registers leaves them to another program.
    """
    R = R_16 - 16
    C = C_16 - 16
    i = tl.program_id(0)
    j = tl.program_id(1)
    c = j * BLOCK + tl.arange(0, BLOCK)
    first = i * BLOCK + 4 * tl.arange(0, BLOCK // 4)
    largest = tl.zeros((BLOCK // 4, BLOCK), tl.int32)
    for k in tl.static_range(4):
        r = first + k
        v = load_numbers(x, stride_r, stride_c, r, c, R, C)
        bits = magnitude_bits(v)
        largest = tl.maximum(largest, bits)
        if ROWS and not BY_BLOCK:
            scale = to_scale(tl.max(bits, 1), FP8_MAX, POWER_OF_TWO)
            store_rows(rows, rows_stride, v, scale, r, c, R, FP8)
            tl.store(row_scales + tl.cast(j, tl.int64) * R + r, scale, mask=r < R)
    if COLUMNS or BY_BLOCK:
        of_column = tl.max(largest, 0)
        scale = to_scale(tl.max(of_column, 0, keep_dims=True) if BY_BLOCK else of_column, FP8_MAX, POWER_OF_TWO)
        v0 = load_numbers(x, stride_r, stride_c, first, c, R, C)
        v1 = load_numbers(x, stride_r, stride_c, first + 1, c, R, C)
        v2 = load_numbers(x, stride_r, stride_c, first + 2, c, R, C)
        v3 = load_numbers(x, stride_r, stride_c, first + 3, c, R, C)
    if ROWS and BY_BLOCK:
        store_rows(rows, rows_stride, v0, scale, first, c, R, FP8)
        store_rows(rows, rows_stride, v1, scale, first + 1, c, R, FP8)
        store_rows(rows, rows_stride, v2, scale, first + 2, c, R, FP8)
        store_rows(rows, rows_stride, v3, scale, first + 3, c, R, FP8)
        tl.store(row_scales + tl.cast(i, tl.int64) * rows_scale_stride + j + tl.arange(0, 1), scale)
    if COLUMNS:
        f = inverse(scale)[None, :]
        turned = four_bytes(v0 * f, v1 * f, v2 * f, v3 * f, FP8).T
        r = i * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        tl.store(columns + c.to(tl.int64)[:, None] * columns_stride + r[None, :], turned, mask=(c < C)[:, None])
        if BY_BLOCK:
            tl.store(column_scales + tl.cast(j, tl.int64) * columns_scale_stride + i + tl.arange(0, 1), scale)
        else:
            tl.store(column_scales + tl.cast(i, tl.int64) * C + c, scale, mask=c < C)


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
