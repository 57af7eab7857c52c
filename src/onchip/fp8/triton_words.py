"""The Triton kernel that quantises to both orientations at once, in words of 32 bits: a float32, or a pair of 16-bit
numbers.

A block of 128x128 numbers of 16 bits is 8192 pairs of neighbours in a row, each an int32, the left one low.  There are
few cycles for a block at the speed of memory, and the kernel is shaped to take few: each of 8 warps runs 696
instructions for both orientations of whole blocks with 1x128 scales, and 755 for float32 (compiled for compute
capability 9.0).  Without words it was 1410 and 1266.

- A block is read once and stays in registers.  Of 16-bit numbers each thread holds 32 registers, and has 64 in all, so
  four programs run at once; of float32 it holds 64, and has at most 128 in all, so two programs run at once.
- Rows of 16-bit numbers may begin in the middle of a word, as those of odd matrices do.  A pair is then put together
  from two words, in 1089 instructions and 80 registers: three programs.
- Maxima are taken word by word: one instruction takes the magnitudes of two pairs and their maxima.
- A thread computes the scale of one row and of one column.  `tl.gather` brings the maxima there and the factors back:
  it goes through shared memory, and its index alone says how the result is laid out.  With a conversion in its place,
  Triton computes a row's scale again in each thread that holds a part of the row.
- A thread holds EACH rows below each other, of 4 words.  Four of them make an int32 of the transpose within the thread,
  and two such int32 are exchanged through shared memory at once, with no two threads in one bank.  Triton gives a
  thread rows that lie apart, so element t of a tensor of rows is row t % (128 / EACH) * EACH + t // (128 / EACH).
- In whole blocks nothing is masked, and offsets within a block have 32 bits.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.fp8.triton_kernels import BLOCK, conversion, four_bytes, inverse, magnitude_bits, one_byte, to_scale
from onchip.kernels.triton.tiles import INTERPRETED

# The larger magnitude of each half, with an arbitrary sign; NaN if one is NaN.
LARGER_BF16 = tl.constexpr("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;")
LARGER_FP16 = tl.constexpr("max.NaN.xorsign.abs.f16x2 $0, $1, $2;")
# Two pairs, given as both left and both right numbers.
PAIRS_TO_E4M3 = conversion("e4m3", (1, 3, 2, 4))
PAIRS_TO_E5M2 = conversion("e5m2", (1, 3, 2, 4))


@triton.jit
def left(p, DTYPE: tl.constexpr):
    """The numbers of words in float32, of pairs the left ones."""
    if tl.float32 == DTYPE:
        return p.to(tl.float32, bitcast=True)
    elif tl.bfloat16 == DTYPE:  # noqa: RET505 - without it, Triton compiles all
        return (p << 16).to(tl.float32, bitcast=True)
    else:
        return p.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def right(p, DTYPE: tl.constexpr):
    if tl.bfloat16 == DTYPE:
        return (p & -0x10000).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 - without it, Triton compiles both
        return (p >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_pairs(x, r, c, stride_r, of_rows, C, WHOLE: tl.constexpr):
    """Pairs [128, 64] of rows that may begin in the middle of a word: then one half of it, and one of the next.

    Only words that a number of the matrix lies in are read: memory is allocated in whole ones.
    """
    address = x.to(tl.int64)
    x = (address & -4).to(tl.pointer_type(tl.int32))
    begin = ((address & 2) // 2).to(tl.int32) + r * stride_r
    late = (begin & 1 == 1)[:, None]
    at = (begin >> 1)[:, None] + c[None, :]
    two = (2 * c + 1 < C)[None, :]
    p = tl.load(x + at, mask=None if WHOLE else of_rows & (2 * c < C)[None, :], other=None if WHOLE else 0)
    after = tl.load(x + at + 1, mask=late if WHOLE else of_rows & late & two, other=0)
    # Which bytes of `after` and p: 7 to 4 and 3 to 0.  Beside a row's last number stands a zero.
    chosen = tl.where(late, 0x5432, 0x3210) if WHOLE else tl.where(late, 0x5432, tl.where(two, 0x3210, 0x4410))
    if INTERPRETED:
        return tl.where(late, ((p >> 16) & 0xFFFF) | (after << 16), tl.where(chosen == 0x3210, p, p & 0xFFFF))
    else:  # noqa: RET505 - without it, Triton compiles both
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [p, after, chosen], tl.int32, True, 1)


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
    """Words of the largest magnitudes along an axis, of pairs those of the left and of the right numbers."""
    if tl.float32 == DTYPE:
        return tl.max(p & 0x7FFFFFFF, AXIS)
    elif INTERPRETED:  # noqa: RET505 - without it, Triton compiles all
        return tl.max(p & 0x7FFF, AXIS) | tl.max(p & 0x7FFF0000, AXIS)
    else:
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
    r = tl.arange(0, BLOCK)
    if tl.float32 == DTYPE:
        return tl.gather(largest(p, 1, DTYPE), r % EACH * (BLOCK // EACH) + r // EACH, 0)
    else:  # noqa: RET505 - without it, Triton compiles both
        # First a thread's four neighbouring pairs; then two rows at a time, which halves the shuffles.
        few = largest(tl.reshape(p, (BLOCK, p.shape[1] // 4, 4)), 2, DTYPE)
        both = largest(one_of_each(few, DTYPE), 1, DTYPE)
        both = tl.gather(both, r % (EACH // 2) * (BLOCK // EACH) + r // EACH, 0)
        return magnitude_bits(tl.where(r % EACH < EACH // 2, left(both, DTYPE), right(both, DTYPE)))


@triton.jit
def largest_of_columns(p, DTYPE: tl.constexpr, EACH: tl.constexpr):
    """Bits of the largest magnitudes [128] of the columns, in their order, one in each thread.

    What each warp found changes places once; in Triton's reduction among warps 16 threads store to one bank.
    """
    WORDS: tl.constexpr = p.shape[1]
    WARPS: tl.constexpr = WORDS // EACH
    of_warps = largest(largest(tl.reshape(p, (EACH, WARPS, BLOCK // WORDS, WORDS)), 0, DTYPE), 1, DTYPE).T
    of_warps = tl.gather(of_warps, tl.broadcast_to(tl.arange(0, WARPS)[None, :], (WORDS, WARPS)), 1)
    c = tl.arange(0, BLOCK)
    if tl.float32 == DTYPE:
        return tl.gather(largest(of_warps, 1, DTYPE), c, 0)
    else:  # noqa: RET505 - without it, Triton compiles both
        both = tl.gather(largest(of_warps, 1, DTYPE), c // 2, 0)
        return magnitude_bits(tl.where(c % 2 == 0, left(both, DTYPE), right(both, DTYPE)))


@triton.jit
def largest_of_block(p, DTYPE: tl.constexpr):
    """Bits of the largest magnitude, [1]."""
    both = tl.max(largest(tl.reshape(p, (1, BLOCK * p.shape[1])), 1, DTYPE), 0, keep_dims=True)
    if tl.float32 == DTYPE:
        return both
    else:  # noqa: RET505 - without it, Triton compiles both
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
    """[128 / EACH, C, EACH / 4] int32: four numbers below each other, of v [128, C] as the kernel orders rows."""
    v = tl.permute(tl.reshape(v, (EACH // 4, 2, 2, BLOCK // EACH, v.shape[1])), (3, 4, 0, 1, 2))
    even, odd = tl.split(v)
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    return four_bytes(v0, v1, v2, v3, FP8)


@triton.jit
def _quantize_block(
    x, rows, row_scales, columns, column_scales, tiles, stride_r, rows_stride, columns_stride, rows_scale_stride,
    columns_scale_stride, R, C, i, j,
    BY_BLOCK: tl.constexpr, FP8: tl.constexpr, FP8_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    ALIGNED: tl.constexpr, WHOLE: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Block (i, j) of 128x128; WHOLE: all of it is inside."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    PAIRS: tl.constexpr = tl.float32 != DTYPE
    NUMBERS: tl.constexpr = 2 if PAIRS else 1  # of a word
    WORDS: tl.constexpr = BLOCK // NUMBERS  # of a row
    t = tl.arange(0, BLOCK)
    m = i * BLOCK + t
    n = j * BLOCK + t
    r = t % (BLOCK // EACH) * EACH + t // (BLOCK // EACH)
    c = tl.arange(0, WORDS)
    if tiles is None:
        of_rows = None if WHOLE else (i * BLOCK + r < R)[:, None]
        x += tl.cast(i, tl.int64) * BLOCK * stride_r + j * BLOCK
    else:
        first = tl.load(tiles + 3 * i + 1)
        of_rows = (first + r < tl.load(tiles + 3 * i + 2))[:, None]
        x += tl.cast(first, tl.int64) * stride_r + j * BLOCK
    if ALIGNED:
        at = r[:, None] * (stride_r // NUMBERS) + c[None, :]
        inside = None if WHOLE else of_rows & (j * WORDS + c < C // NUMBERS)[None, :]
        p = tl.load(x.to(tl.pointer_type(tl.int32)) + at, mask=inside, other=None if WHOLE else 0)
    else:
        p = load_pairs(x, r, c, stride_r, of_rows, C - j * BLOCK, WHOLE)
    if BY_BLOCK:
        scale = to_scale(largest_of_block(p, DTYPE), FP8_MAX, POWER_OF_TWO)
        row_factor = inverse(scale)[:, None]
        column_factor = row_factor
        even_factor = row_factor
        odd_factor = row_factor
        one = tl.arange(0, 1)
        if rows is not None:
            tl.store(row_scales + tl.cast(i, tl.int64) * rows_scale_stride + j + one, scale)
        if columns is not None:
            tl.store(column_scales + tl.cast(j, tl.int64) * columns_scale_stride + i + one, scale)
    else:
        if rows is not None:
            scale = to_scale(largest_of_rows(p, DTYPE, EACH), FP8_MAX, POWER_OF_TWO)
            tl.store(row_scales + tl.cast(j, tl.int64) * rows_scale_stride + m, scale, mask=None if WHOLE else m < R)
            row_factor = tl.gather(inverse(scale), r, 0)[:, None]
        if columns is not None:
            scale = to_scale(largest_of_columns(p, DTYPE, EACH), FP8_MAX, POWER_OF_TWO)
            at = column_scales + tl.cast(i, tl.int64) * columns_scale_stride + n
            tl.store(at, scale, mask=None if WHOLE else n < C)
            column_factor = tl.gather(inverse(scale), t, 0)
            if PAIRS:
                even_factor, odd_factor = tl.split(tl.reshape(column_factor, (1, WORDS, 2)))
            else:
                column_factor = column_factor[None, :]
    a = left(p, DTYPE)
    if PAIRS:
        b = right(p, DTYPE)
    if rows is not None:
        rows += tl.cast(i, tl.int64) * BLOCK * rows_stride + j * BLOCK
        # As wide as what a thread loaded: else Triton makes it 16 bytes, through shared memory.
        at = tl.max_contiguous(r[:, None] * (rows_stride // NUMBERS) + c[None, :], [1, 4])
        if PAIRS:
            q = two_bytes(a * row_factor, b * row_factor, FP8)
            tl.store(rows.to(tl.pointer_type(tl.int16)) + at, q, mask=None if WHOLE else (i * BLOCK + r < R)[:, None])
        else:
            tl.store(rows + at, (a * row_factor).to(FP8), mask=None if WHOLE else (i * BLOCK + r < R)[:, None])
    if columns is not None:
        if PAIRS:
            even = four_rows(a * even_factor, FP8, EACH)
            odd = four_rows(b * odd_factor, FP8, EACH)
            turned = tl.reshape(tl.permute(tl.join(even, odd), (1, 3, 0, 2)), (BLOCK, BLOCK // 4))
        else:
            fours = four_rows(a * column_factor, FP8, EACH)
            turned = tl.reshape(tl.permute(fours, (1, 0, 2)), (BLOCK, BLOCK // 4))
        columns += tl.cast(j, tl.int64) * BLOCK * columns_stride + i * (BLOCK // 4)
        at = t[:, None] * columns_stride + tl.arange(0, BLOCK // 4)[None, :]
        tl.store(columns + at, turned, mask=None if WHOLE else (n < C)[:, None])


@triton.jit(do_not_specialize=["R_16", "rows_scale_stride", "columns_scale_stride"])
def quantize_words(
    x,  # [R, C] of 32 or 16 bits, rows contiguous
    rows,  # [R, up(C)] FP8 out; None: not wanted, and so of columns
    row_scales,  # float32 out: [C / 128, rows_scale_stride], or BY_BLOCK [R / 128, rows_scale_stride]
    columns,  # [C, up(R) / 4] int32 out: x^T in FP8, four numbers each
    column_scales,  # float32 out: [R / 128, columns_scale_stride], or BY_BLOCK [C / 128, columns_scale_stride]
    tiles,  # [R / 128, 3] int32: of each block a number, its first row of x, and the end; past that it is 0
    stride_r,
    rows_stride,
    columns_stride,
    rows_scale_stride,
    columns_scale_stride,
    R_16,  # R + 16 and C + 16: of a size of 1 Triton makes a constant, of what is outside then a load that is never
    C_16,  # taken, and ptxas of that numbers other than 0
    BY_BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ALIGNED: tl.constexpr,  # x's rows begin and end at addresses divisible by 4
    WHOLE: tl.constexpr,  # C is a multiple of 128, and blocks begin at multiples of 128 rows
    EACH: tl.constexpr,  # neighbouring rows of a thread: WORDS / warps
    TALL: tl.constexpr,  # more blocks below each other than the grid's second axis may have
):
    """Write a block of 128x128, and transposed, scaled by rows and by columns or BY_BLOCK by one number."""
    R = R_16 - 16
    C = C_16 - 16
    # Blocks beside each other at the same time: 2% faster than below each other.
    i = tl.program_id(0 if TALL else 1)
    j = tl.program_id(1 if TALL else 0)
    if WHOLE:
        # All that is masked is the last rows.
        if (i + 1) * BLOCK <= R:
            _quantize_block(
                x, rows, row_scales, columns, column_scales, tiles, stride_r, rows_stride, columns_stride,
                rows_scale_stride, columns_scale_stride, R, C, i, j, BY_BLOCK, FP8, FP8_MAX, POWER_OF_TWO, ALIGNED,
                True, EACH,
            )  # fmt: skip
        else:
            _quantize_block(
                x, rows, row_scales, columns, column_scales, tiles, stride_r, rows_stride, columns_stride,
                rows_scale_stride, columns_scale_stride, R, C, i, j, BY_BLOCK, FP8, FP8_MAX, POWER_OF_TWO, ALIGNED,
                False, EACH,
            )  # fmt: skip
    else:
        _quantize_block(
            x, rows, row_scales, columns, column_scales, tiles, stride_r, rows_stride, columns_stride,
            rows_scale_stride, columns_scale_stride, R, C, i, j, BY_BLOCK, FP8, FP8_MAX, POWER_OF_TWO, ALIGNED,
            False, EACH,
        )  # fmt: skip
