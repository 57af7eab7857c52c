"""The Triton kernel that quantises 16-bit matrices, two numbers at a time; other matrices: `quantize` of
triton_kernels.py.

A block of 128x128 is 8192 pairs of neighbours in a row, each an int32, the left one low.  There are few cycles for a
block at the speed of memory, and the kernel is shaped to take few: 695 instructions of each of 8 warps for both
orientations of whole blocks with 1x128 scales, where `quantize` takes 1410 (compiled for compute capability 9.0).

- A block is read once and stays in registers, 32 of each thread's; with 64 in all, four programs run at once.
- Maxima are those of pairs, in one instruction each, which takes the magnitudes too.
- A thread computes the scale of one row and of one column.  `tl.gather` brings the maxima there and the factors back:
  it goes through shared memory, and its index alone says how the result is laid out.  With a conversion in its place,
  Triton computes a row's scale again in each thread that holds a part of the row.
- A thread holds EACH rows below each other, of 8 columns.  Four of them make an int32 of the transpose without another
  thread, and two such change places through shared memory at once, no two threads in one bank.  Triton gives a thread
  rows that lie apart, so element t of a tensor of rows is row t % (128 / EACH) * EACH + t // (128 / EACH).
- Of whole blocks nothing is masked, and offsets within a block have 32 bits.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.ops._shared.triton_tiles import INTERPRETED
from onchip.ops.fp8_linear.triton_kernels import BLOCK, four_bytes, inverse, magnitude_bits, one_byte, to_scale

PAIRS = tl.constexpr(64)
# The larger magnitude of each half, its sign being whatever; NaN if one is NaN.
LARGER_BF16 = tl.constexpr("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;")
LARGER_FP16 = tl.constexpr("max.NaN.xorsign.abs.f16x2 $0, $1, $2;")
# Two pairs, given as both left and both right numbers: another order than that of `four_bytes`.
_CONVERT = """{
    .reg .b16 low, high;
    cvt.rn.satfinite.%sx2.f32 low, $3, $1;
    cvt.rn.satfinite.%sx2.f32 high, $4, $2;
    mov.b32 $0, {low, high};
}"""
PAIRS_TO_E4M3 = tl.constexpr(_CONVERT % ("e4m3", "e4m3"))
PAIRS_TO_E5M2 = tl.constexpr(_CONVERT % ("e5m2", "e5m2"))


@triton.jit
def left(p, DTYPE: tl.constexpr):
    """The left numbers of pairs in float32."""
    if tl.bfloat16 == DTYPE:
        return (p << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 - without it, Triton compiles both
        return p.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def right(p, DTYPE: tl.constexpr):
    if tl.bfloat16 == DTYPE:
        return (p & -0x10000).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 - without it, Triton compiles both
        return (p >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def larger_bf16(a, b):
    return tl.inline_asm_elementwise(LARGER_BF16, "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def larger_fp16(a, b):
    return tl.inline_asm_elementwise(LARGER_FP16, "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def larger(a, b, DTYPE: tl.constexpr):
    """Pairs of the larger magnitudes, of the left and of the right numbers; of their signs nothing is known."""
    if INTERPRETED:
        return tl.maximum(a & 0x7FFF, b & 0x7FFF) | tl.maximum(a & 0x7FFF0000, b & 0x7FFF0000)
    elif tl.bfloat16 == DTYPE:  # noqa: RET505 - without it, Triton compiles all
        return larger_bf16(a, b)
    else:
        return larger_fp16(a, b)


@triton.jit
def largest(p, AXIS: tl.constexpr, DTYPE: tl.constexpr):
    """Pairs of the largest magnitudes along an axis."""
    if INTERPRETED:
        return tl.max(p & 0x7FFF, AXIS) | tl.max(p & 0x7FFF0000, AXIS)
    else:  # noqa: RET505 - without it, Triton compiles both
        return tl.reduce(p, AXIS, larger_bf16 if tl.bfloat16 == DTYPE else larger_fp16)


@triton.jit
def one_of_each(p, DTYPE: tl.constexpr):
    """Pairs of the larger magnitudes of two rows each: of row t on the left, of row t + half of them on the right."""
    R: tl.constexpr = p.shape[0] // 2
    a, b = tl.split(tl.permute(tl.reshape(p, (2, R, p.shape[1])), (1, 2, 0)))
    return larger((a & 0xFFFF) | (b << 16), ((a >> 16) & 0xFFFF) | (b & -0x10000), DTYPE)


@triton.jit
def largest_of_rows(p, DTYPE: tl.constexpr, EACH: tl.constexpr):
    """Bits of the largest magnitudes [128] of the rows, in their order, one in each thread."""
    # First a thread's four neighbouring pairs; then two rows at a time, which halves the shuffles.
    few = largest(tl.reshape(p, (BLOCK, PAIRS // 4, 4)), 2, DTYPE)
    both = largest(one_of_each(few, DTYPE), 1, DTYPE)
    r = tl.arange(0, BLOCK)
    both = tl.gather(both, r % (EACH // 2) * (BLOCK // EACH) + r // EACH, 0)
    return magnitude_bits(tl.where(r % EACH < EACH // 2, left(both, DTYPE), right(both, DTYPE)))


@triton.jit
def largest_of_columns(p, DTYPE: tl.constexpr, EACH: tl.constexpr):
    """Bits of the largest magnitudes [128] of the columns, in their order, one in each thread.

    What each warp found changes places once; in Triton's reduction among warps 16 threads store to one bank.
    """
    WARPS: tl.constexpr = BLOCK // EACH // 2
    of_warps = largest(largest(tl.reshape(p, (EACH, WARPS, 2, PAIRS)), 0, DTYPE), 1, DTYPE).T
    of_warps = tl.gather(of_warps, tl.broadcast_to(tl.arange(0, WARPS)[None, :], (PAIRS, WARPS)), 1)
    c = tl.arange(0, BLOCK)
    both = tl.gather(largest(of_warps, 1, DTYPE), c // 2, 0)
    return magnitude_bits(tl.where(c % 2 == 0, left(both, DTYPE), right(both, DTYPE)))


@triton.jit
def largest_of_block(p, DTYPE: tl.constexpr):
    """Bits of the largest magnitude, [1]."""
    both = tl.max(largest(tl.reshape(p, (1, BLOCK * PAIRS)), 1, DTYPE), 0, keep_dims=True)
    return tl.maximum(magnitude_bits(left(both, DTYPE)), magnitude_bits(right(both, DTYPE)))


@triton.jit
def two_bytes(a, b, FP8: tl.constexpr):
    """Pairs in FP8, a in the lower byte."""
    if INTERPRETED:
        return (one_byte(a, FP8) | (one_byte(b, FP8) << 8)).to(tl.int16)
    else:  # noqa: RET505 - without it, Triton compiles both
        return tl.inline_asm_elementwise(
            PAIRS_TO_E4M3 if tl.float8e4nv == FP8 else PAIRS_TO_E5M2, "=r,f,f,f,f", [a, b], tl.int16, True, 2
        )


@triton.jit
def four_rows(v, FP8: tl.constexpr, EACH: tl.constexpr):
    """[128 / EACH, 64, EACH / 4] int32: four numbers below each other, of v [128, 64] as the kernel orders rows."""
    v = tl.permute(tl.reshape(v, (EACH // 4, 2, 2, BLOCK // EACH, PAIRS)), (3, 4, 0, 1, 2))
    even, odd = tl.split(v)
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    return four_bytes(v0, v1, v2, v3, FP8)


@triton.jit
def quantize_pairs(
    x,  # [R, C] bfloat16 or float16, C and stride_r even, rows contiguous and at addresses divisible by 4
    rows,  # what is written: see `quantize`
    row_scales,
    columns,
    column_scales,
    stride_r,
    rows_stride,
    columns_stride,
    rows_scale_stride,
    columns_scale_stride,
    R_16,  # R + 16 and C + 16: see `quantize`
    C_16,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    WHOLE: tl.constexpr,  # R and C are multiples of 128
    EACH: tl.constexpr,  # neighbouring rows of a thread: 64 / warps
):
    """Write a block of 128x128, and transposed, scaled by rows and by columns or BY_BLOCK by one number."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    R = R_16 - 16
    C = C_16 - 16
    # Blocks beside each other at the same time: 2% faster than below each other.
    i = tl.program_id(1)
    j = tl.program_id(0)
    t = tl.arange(0, BLOCK)
    m = i * BLOCK + t
    n = j * BLOCK + t
    r = t % (BLOCK // EACH) * EACH + t // (BLOCK // EACH)
    c = tl.arange(0, PAIRS)
    of_rows = None if WHOLE else (i * BLOCK + r < R)[:, None]
    inside = None if WHOLE else of_rows & (j * PAIRS + c < C // 2)[None, :]
    x = (x + tl.cast(i, tl.int64) * BLOCK * stride_r + j * BLOCK).to(tl.pointer_type(tl.int32))
    at = r[:, None] * (stride_r // 2) + c[None, :]
    p = tl.load(x + at, mask=inside, other=None if WHOLE else 0)
    if BY_BLOCK:
        scale = to_scale(largest_of_block(p, DTYPE), FP8_MAX, POWER_OF_TWO)
        row_factor = inverse(scale)[:, None]
        even_factor = row_factor
        odd_factor = row_factor
        one = tl.arange(0, 1)
        if ROWS:
            tl.store(row_scales + tl.cast(i, tl.int64) * rows_scale_stride + j + one, scale)
        if COLUMNS:
            tl.store(column_scales + tl.cast(j, tl.int64) * columns_scale_stride + i + one, scale)
    else:
        if ROWS:
            scale = to_scale(largest_of_rows(p, DTYPE, EACH), FP8_MAX, POWER_OF_TWO)
            tl.store(row_scales + tl.cast(j, tl.int64) * R + m, scale, mask=None if WHOLE else m < R)
            row_factor = tl.gather(inverse(scale), r, 0)[:, None]
        if COLUMNS:
            scale = to_scale(largest_of_columns(p, DTYPE, EACH), FP8_MAX, POWER_OF_TWO)
            tl.store(column_scales + tl.cast(i, tl.int64) * C + n, scale, mask=None if WHOLE else n < C)
            even_factor, odd_factor = tl.split(tl.reshape(tl.gather(inverse(scale), t, 0), (1, PAIRS, 2)))
    a = left(p, DTYPE)
    b = right(p, DTYPE)
    if ROWS:
        rows = (rows + tl.cast(i, tl.int64) * BLOCK * rows_stride + j * BLOCK).to(tl.pointer_type(tl.int16))
        # As wide as what a thread loaded: else Triton makes it 16 bytes, through shared memory.
        at = tl.max_contiguous(r[:, None] * (rows_stride // 2) + c[None, :], [1, 4])
        tl.store(rows + at, two_bytes(a * row_factor, b * row_factor, FP8), mask=of_rows)
    if COLUMNS:
        fours = tl.join(four_rows(a * even_factor, FP8, EACH), four_rows(b * odd_factor, FP8, EACH))
        turned = tl.reshape(tl.permute(fours, (1, 3, 0, 2)), (BLOCK, BLOCK // 4))
        columns += tl.cast(j, tl.int64) * BLOCK * columns_stride + i * (BLOCK // 4)
        at = t[:, None] * columns_stride + tl.arange(0, BLOCK // 4)[None, :]
        tl.store(columns + at, turned, mask=None if WHOLE else (n < C)[:, None])
