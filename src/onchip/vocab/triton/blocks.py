"""What the Triton kernels of losses over a vocabulary share; the kernels are in softmax.py and gradients.py.

Sizes: T tokens, H hidden, V vocab.  Tokens that are not ignored are compacted to the front: `count` of them, known to
the device alone; a *position* is an index among those.  Every kernel works through `count` and skips the rest, so
nothing waits for the host.  VOCAB_TILE columns of logits of one block of positions make a tile; per tile and position
the forward kernel stores the maximum and the sum of exponentials, [tiles, T], and on request the exponentials.

Exponentials are matrices of VOCAB_TILE columns with a row for each tile and position, in up to three places
(`exponential_row`): the memory of the weight's gradient, scratch, and, computed again in backward, a buffer for one
chunk of the vocabulary.  One descriptor spans all three: rows are counted from the lowest of their addresses.

What is kept is exp(z - shift), with a shift of each token that is known beforehand, its target's logit plus 30.  16-bit
floats with 8 bits of exponent hold that exactly as well as any, unless a logit is more than 90 above the target's;
`settle_exponentials` mends such tokens, and costs nothing where there are none.  So the gradients are plain products of
what is kept: the factor exp(shift - lse) of each token goes into the rows of hidden (for the weight's gradient) and
into the result's rows (for hidden's).

A target's entry, p - 1, is the largest of its row by far, and would carry the roundings of the exponential and of the
scaled row into both gradients.  So where exponentials are kept it is left out of the products, and added to their
results from the weight's and hidden's own rows: in float32, the tokens of each vocabulary entry together.

Matrix operands come through TMA descriptors where `TMA` (Hopper, rows of a multiple of 16 bytes), else by pointers.
The persistent loop over tiles with its flattened product is that of Triton's matrix multiplication tutorial.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import tanh
from onchip.kernels.triton.tiles import load_block

VOCAB_TILE = tl.constexpr(256)
# Logits up to so much above a token's shift are stored relative to it.
REACH = tl.constexpr(60.0)
# What stands for the target of a position that has none, where targets are sorted.
NO_LABEL = tl.constexpr(2**31 - 1)


@triton.jit
def exponential_row(
    j, t, stash, stash_stride, stash_tokens, overflow, overflow_tokens, again, again_tokens, first_tile
):
    """Row of tile j's exponentials of the positions from t on, a multiple of the blocks that they are handled in.

    The first `stash_tokens` positions live in the weight gradient's memory, the next `overflow_tokens` in scratch, and
    the rest, for the tiles from `first_tile` on, in the buffer for what is computed again.
    """
    in_stash = stash + j * stash_stride + t
    in_overflow = overflow + j * overflow_tokens + t - stash_tokens
    in_again = again + (j - first_tile) * again_tokens + t - stash_tokens - overflow_tokens
    kept = tl.where(t < stash_tokens, in_stash, in_overflow)
    return tl.where(t < stash_tokens + overflow_tokens, kept, in_again)


@triton.jit
def load_weight(weight, stride, v, h, V, H, R: tl.constexpr, C: tl.constexpr, TURNED: tl.constexpr, TMA: tl.constexpr):
    """The block [R, C] at (v, h) of the weight [V, H], whose memory is [H, V] where TURNED."""
    if TURNED:
        return load_block(weight, stride, h, v, H, V, C, R, TMA).T
    else:  # noqa: RET505
        return load_block(weight, stride, v, h, V, H, R, C, TMA)


@triton.jit
def unscaled_logits(product, bias, v, inner_scale, V, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """The logits up to a factor of each token: x with z = x * factor."""
    x = product
    if BIAS:
        x += tl.load(bias + v, mask=v < V, other=0.0)[None, :]
    if SOFTCAP:
        x = tanh(x * inner_scale)
    return x
