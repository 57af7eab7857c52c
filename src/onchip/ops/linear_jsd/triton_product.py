"""linear_jsd's own Triton kernel for a model's product: tiles of its logits.

Sizes: T tokens, H hidden, V vocab, C the tokens of a chunk.  Tokens that are not ignored are compacted to the front: a
*position* is an index among those, `count` of them, known to the device alone.

Logits are never stored as such.  Of each tile of VOCAB_TILE columns `logit_tiles` stores each position's largest logit,
in float32, the distances of all logits below it, taken from the float32 accumulator, and a sum of exponentials.  Of
bfloat16 operands the distances are float16: exact where the probability is, and elsewhere off by 2^-12 of themselves at
most, which is less than the rounding of the hidden states moves a logit by.  Exponentials in 16 bits would do for s and
t but not for log(s / t) of what is unlikely.  Of float16 operands, themselves finer, the distances are float32.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import LOG2E, LOWEST
from onchip.kernels.triton.tiles import load_block, place_tile, store_columns
from onchip.vocab.triton.blocks import VOCAB_TILE, load_weight


@triton.jit(do_not_specialize=["first", "first_tile", "chunk_tiles", "tile_rows", "below_rows", "C"])
def logit_tiles(
    rows,  # [C, H]: hidden of the positions from `first` on
    weight,  # [V, H], in memory [H, V] where TURNED; the other stride is weight_stride
    bias,  # [V] float32
    label,  # [C] int32
    count,  # [1] int32
    below,  # [chunk_tiles * tile_rows, VOCAB_TILE] float16 or float32 out: z - largest
    largest,  # [C, chunk_tiles] float32 out: the largest z of a tile
    total,  # [C, chunk_tiles] float32 out: sum of exp((z - largest) / temperature)
    others,  # [C, chunk_tiles] float32 out: sum of exp(z - largest) over all but the label
    first,  # position
    first_tile,
    chunk_tiles,
    tile_rows,  # C rounded up to blocks
    below_rows,
    rows_stride,
    weight_stride,
    C,
    H,
    V,
    inverse_temperature,
    RAGGED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PARTS: tl.constexpr,
    TMA: tl.constexpr,
    TURNED: tl.constexpr,
):
    """A chunk of one model's logits: C positions from `first` on, some tiles of the vocabulary from `first_tile` on."""
    n = tl.minimum(tl.load(count) - first, C)
    tiles_t = tl.cdiv(tl.maximum(n, 0), BLOCK_T)
    steps = tl.cdiv(H, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_t * chunk_tiles, PROGRAMS, flatten=True):
        i, j = place_tile(tile, tiles_t, chunk_tiles, GROUP)
        t0 = i * BLOCK_T
        v0 = (first_tile + j) * VOCAB_TILE
        z = tl.zeros((BLOCK_T, VOCAB_TILE), tl.float32)
        for k in range(steps):
            a = load_block(rows, rows_stride, t0, k * BLOCK_K, C, H, BLOCK_T, BLOCK_K, TMA)
            b = load_weight(weight, weight_stride, v0, k * BLOCK_K, V, H, VOCAB_TILE, BLOCK_K, TURNED, TMA)
            z = tl.dot(a, b.T, z)

        t = t0 + tl.arange(0, BLOCK_T)
        v = v0 + tl.arange(0, VOCAB_TILE)
        inside = t < n
        if bias is not None:
            z += tl.load(bias + v, mask=v < V, other=0.0)[None, :]
        if RAGGED:
            z = tl.where((v < V)[None, :], z, float("-inf"))
        top = tl.maximum(tl.max(z, 1), LOWEST)
        z -= top[:, None]
        at = t.to(tl.int64) * chunk_tiles + j
        tl.store(largest + at, top, mask=inside)
        if others is not None:
            y = tl.load(label + t, mask=inside, other=-1)
            e = tl.exp2(z * LOG2E)
            e = tl.where((v - v0)[None, :] == (y - v0)[:, None], 0.0, e)
            tl.store(others + at, tl.sum(e, 1), mask=inside)
        value = z.to(below.dtype if TMA else below.dtype.element_ty)
        if total is not None:
            # Of what is stored: a gradient is a difference of terms that cancel if the probabilities sum to 1.
            e = tl.exp2(value.to(tl.float32) * (inverse_temperature * LOG2E))
            tl.store(total + at, tl.sum(e, 1), mask=inside)
        into = j * tile_rows + t0
        store_columns(below, VOCAB_TILE, into, 0, below_rows, VOCAB_TILE, value, BLOCK_T, VOCAB_TILE, PARTS, TMA)
