"""The Triton kernel of the product A B^T, and the parts of the quantiser, which is in triton_words.py.

Matrices of FP8 numbers have rows of whole blocks of 128 bytes along the contraction (`TorchQuantized` in
torch_quantize.py), padded with 0, so descriptors always fit them.  The persistent loop over tiles is that of Triton's
matrix multiplication tutorial; scaling each partial sum over 128 elements is from DeepSeek-V3 (arXiv:2412.19437).
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.tiles import INTERPRETED, add_columns, place_tile, store_columns

BLOCK = tl.constexpr(128)
LEAST_SCALE = tl.constexpr(2.0**-126)


def conversion(fmt: str, order: tuple[int, int, int, int]) -> tl.constexpr:
    """Four numbers in FP8 as the bytes of a register, the first in `order` lowest.

    Two numbers at a time, rounded to the nearest, ties to even, saturating; NaN stays NaN.
    """
    a, b, c, d = order
    return tl.constexpr(f"""{{
        .reg .b16 low, high;
        cvt.rn.satfinite.{fmt}x2.f32 low, ${b}, ${a};
        cvt.rn.satfinite.{fmt}x2.f32 high, ${d}, ${c};
        mov.b32 $0, {{low, high}};
    }}""")


E4M3_BYTES = conversion("e4m3", (1, 2, 3, 4))
E5M2_BYTES = conversion("e5m2", (1, 2, 3, 4))


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
def load_operand(x, stride, row, k, rows, R: tl.constexpr, TMA: tl.constexpr):
    """Step k of R rows of an operand, from `row` on.  What rows beyond the last one hold is never stored."""
    if TMA:
        return x.load([row, k * BLOCK])
    else:  # noqa: RET505 - without it, Triton compiles what follows for a descriptor too
        r = tl.minimum(row + tl.arange(0, R), rows - 1)
        c = k * BLOCK + tl.arange(0, BLOCK)
        return tl.load(x + r.to(tl.int64)[:, None] * stride + c[None, :])


@triton.jit(do_not_specialize=["M"])
def scaled_product(
    a,  # [M, depth] FP8
    b,  # [N, depth] FP8
    a_scales,  # [depth / 128, M] float32
    b_scales,  # BY_BLOCK: [N / 128, b_scale_stride] float32, else [depth / 128, N]
    bias,  # [N]
    out,  # [M, N] out, or added to
    b_scale_stride,
    out_stride,
    M,
    N,
    depth,  # a multiple of 128
    BY_BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
    TMA_OUT: tl.constexpr,
):
    """out = A B^T + bias, or out += A B^T: two sums, of 128 products and of these scaled, in float32."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = depth // BLOCK
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        i, j = place_tile(tile, tiles_m, tiles_n, GROUP)
        m0 = i * BLOCK_M
        n0 = j * BLOCK_N
        m = m0 + tl.arange(0, BLOCK_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(steps):
            # Scales are fetched before the product is waited for: after it, each step would wait for them, too.
            a_scale = tl.load(a_scales + tl.cast(k, tl.int64) * M + m, mask=m < M, other=0.0)
            x = load_operand(a, depth, m0, k, M, BLOCK_M, TMA)
            if BY_BLOCK:
                of_block = b_scales + tl.cast(n0 // BLOCK, tl.int64) * b_scale_stride + k
                scale = a_scale * tl.load(of_block, mask=n0 < N, other=0.0)
                y = load_operand(b, depth, n0, k, N, BLOCK_N, TMA)
                acc += tl.dot(x, y.T) * scale[:, None]
            else:
                n = n0 + tl.arange(0, BLOCK_N)  # here: made before the loop, it took up to 35 registers more
                b_scale = tl.load(b_scales + tl.cast(k, tl.int64) * N + n, mask=n < N, other=0.0)
                y = load_operand(b, depth, n0, k, N, BLOCK_N, TMA)
                acc += tl.dot(x, y.T) * a_scale[:, None] * b_scale[None, :]
        if bias is not None:
            n = n0 + tl.arange(0, BLOCK_N)
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if ADD:
            add_columns(out, out_stride, m0, n0, M, N, acc, BLOCK_M, BLOCK_N, PARTS, TMA_OUT)
        else:
            value = acc.to(out.dtype if TMA_OUT else out.dtype.element_ty)
            store_columns(out, out_stride, m0, n0, M, N, value, BLOCK_M, BLOCK_N, PARTS, TMA_OUT)
