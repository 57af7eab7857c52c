"""What the Triton kernels of a head and a loss share; the kernels are in softmax.py,
gradients.py, sums.py and vectors.py.

Sizes: T tokens, H hidden, V vocab, K ids per token.  Tokens that are not ignored are compacted to the front: there are
`count` of them, a number that the device alone knows, and a *position* is an index among them.  Every kernel works
through `count` positions and skips the rest, so nothing waits for the host.  A tile is VOCAB_TILE columns of logits of
one block of positions; per tile and position the forward kernel stores the maximum and the sum of exponentials,
[tiles, T], and on request the exponentials.

Exponentials, or the gradient of the logits, are rows of VOCAB_TILE columns, one for each tile and position, in up to
three places (`BufferRows`): the memory of the weight's gradient, scratch, and a third one: where backward recomputes
them, a buffer for one chunk of the vocabulary, and where forward adds the weight's gradient up, the memory of the sum's
digits.  One descriptor spans all three: rows are counted from the lowest of their addresses.

What is kept is exp(z - shift), where each token's shift is known beforehand: its target's logit plus 30.  Floats of 16
bits with an 8-bit exponent hold that as exactly as anything, unless a logit is more than 90 above the target's;
`rebase_exponentials` mends such tokens, and costs nothing where there are none.  So the gradients are plain products of
what is kept: each token's factor exp(shift - lse) goes into the rows of hidden (for the weight's gradient) and into the
result's rows (for hidden's).

A target's entry, p - 1, is by far the largest of its row, and would carry the roundings of the exponential and of the
scaled row into both gradients.  So where exponentials are kept it is left out of the products, and added to their
results from the weight's and hidden's own rows: in float32, the tokens of each vocabulary entry together.

Of several ids per token the *leader*, the one with the largest logit, is the target: a log-probability near 0 can only
be the leader's, so the leader is left out of the sum of exponentials, and the other ids' log-probabilities follow from
its own.

Matrix operands come through TMA descriptors where `TMA` (Hopper, rows of a multiple of 16 bytes), else by pointers.
The persistent loop over tiles with its flattened product is that of Triton's matrix multiplication tutorial.
"""

from typing import Any, NamedTuple

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from onchip.kernels.triton.maths import HALF_A_PLACE, smoothed, tanh
from onchip.kernels.triton.tiles import load_block

VOCAB_TILE = tl.constexpr(256)
# Logits up to so much above a token's shift are stored relative to it.
REACH = tl.constexpr(60.0)
# Stands for the target of a position that has none, where targets are sorted.
NO_LABEL = tl.constexpr(2**31 - 1)


class BufferRows(NamedTuple):
    """Which rows of VOCAB_TILE columns hold the logits' exponentials or gradient, by position, as kernels take it.

    What depends on addresses is `odd`, and read by `row_number`.
    """

    rows: Any  # in all
    weight_grad_row: Any  # the first one in the memory of the weight's gradient, and so on
    weight_grad_stride: Any  # from one tile to the next
    in_weight_grad: Any  # positions, the first ones, in multiples of the blocks that they are handled in
    scratch_row: Any
    in_scratch: Any  # positions, the next ones
    third_row: Any
    in_third: Any  # positions, the others: where they are recomputed, for the tiles of one chunk of the vocabulary


def odd(number: int) -> int:
    """A number as it travels in a tuple, of which Triton compiles for each that is 1 or that 16 divides: as neither."""
    return 2 * number + 3


@triton.jit
def row_number(number):
    """What became this odd number."""
    return (number - 3) >> 1


@triton.jit
def buffer_row(j, t, buffer, first_tile):
    """Row of tile j of the positions from t on, a multiple of their blocks; what is recomputed begins at first_tile."""
    in_weight_grad = row_number(buffer.weight_grad_row) + j * buffer.weight_grad_stride + t
    after = t - buffer.in_weight_grad
    in_scratch = row_number(buffer.scratch_row) + j * buffer.in_scratch + after
    in_third = row_number(buffer.third_row) + (j - first_tile) * buffer.in_third + after - buffer.in_scratch
    kept = tl.where(t < buffer.in_weight_grad, in_weight_grad, in_scratch)
    return tl.where(t < buffer.in_weight_grad + buffer.in_scratch, kept, in_third)


@triton.jit
def first_row(t, buffer):
    """Row of tile 0 of the positions from t on, a multiple of their blocks, and how many from one tile to the next."""
    after = t - buffer.in_weight_grad
    in_scratch = after < buffer.in_scratch
    row = row_number(tl.where(in_scratch, buffer.scratch_row, buffer.third_row))
    row += tl.where(in_scratch, after, after - buffer.in_scratch)
    stride = tl.where(in_scratch, buffer.in_scratch, buffer.in_third)
    in_gradient = after < 0
    row = tl.where(in_gradient, row_number(buffer.weight_grad_row) + t, row)
    return row, tl.where(in_gradient, buffer.weight_grad_stride, stride)


@triton.jit
def has_row(t, buffer):
    """Whether there are rows of the positions from t on, a multiple of their blocks.  Forward recomputes none."""
    return t < buffer.in_weight_grad + buffer.in_scratch + buffer.in_third


@triton.jit
def at_the_end(factor, following):
    """What the weight's sum is multiplied by, and how it is rounded: `maths.split_pair`.  The last chunk that has
    tokens, or the first of all, leaves the gradient itself.
    """
    last = tl.load(following) == 0
    return tl.where(last, tl.load(factor), 1.0), tl.where(last, HALF_A_PLACE, 0)


@triton.jit
def load_weight(weight, stride, v, h, V, H, R: tl.constexpr, C: tl.constexpr, TURNED: tl.constexpr, TMA: tl.constexpr):
    """The block [R, C] at (v, h) of the weight [V, H], whose memory is [H, V] where TURNED."""
    if TURNED:
        return load_block(weight, stride, h, v, H, V, C, R, TMA).T
    else:  # noqa: RET505
        return load_block(weight, stride, v, h, V, H, R, C, TMA)


@triton.jit
def unscaled_logits(product, bias, v, inner_scale, V):
    """The logits up to a factor of each token: x with z = x * factor."""
    x = product
    if bias is not None:
        x += tl.load(bias + v, mask=v < V, other=0.0)[None, :]
    if inner_scale is not None:
        x = tanh(x * inner_scale)
    return x


@triton.jit
def add_entries(
    value, weight, label, at_target, at, c, weight_stride_v, weight_stride_h, H, ids, OPERAND: tl.constexpr
):
    """Add to columns c of a position's hidden gradient what comes of its ids' entries, with the weight as operand."""
    for k in range(ids):
        g = tl.load(at_target + at * ids + k, mask=at >= 0, other=0.0)
        y = tl.maximum(tl.load(label + at * ids + k, mask=at >= 0, other=0), 0).to(tl.int64)
        w = weight + y * weight_stride_v + c.to(tl.int64) * weight_stride_h
        value += g * tl.load(w, mask=(c < H) & (at >= 0), other=0.0).to(OPERAND).to(tl.float32)
    return value


# Columns of a tile of labels that lie side by side, a row of them for each warp, where few addresses are wanted.
LANES = tl.constexpr(16)


@triton.jit
def read_labels(labels, class_weight, t, v0, n, V, RAGGED: tl.constexpr, FEW: tl.constexpr):
    """A tile of labels of tokens, from entry v0 on: as they are, from V on anything; and smoothed and weighed, from V
    on 0.  Of tokens from n on, anything.

    `labels`: Labels; the tokens are in `labels.rows` of an outer row, which is `odd`.  FEW: a thread gets several
    entries of few tokens in place of one entry of many, each of whose addresses takes two registers.
    """
    rows = row_number(labels.rows)
    t = tl.minimum(t, tl.maximum(n, 1) - 1)
    i, j = (t // rows).to(tl.int64), (t % rows).to(tl.int64)
    c = tl.arange(0, VOCAB_TILE)
    # Entries by constants beside one address of each token: so addresses take few registers.
    at = (labels.probs + i * labels.outer + j * labels.inner + tl.cast(v0, tl.int64) * labels.stride)[:, None]
    if FEW:
        lanes = tl.reshape(c, (VOCAB_TILE // LANES, 1, LANES))
        near = tl.load(at[None, :, :] + lanes * labels.stride, mask=lanes < V - v0, other=0)
        given = tl.reshape(tl.permute(near, (1, 0, 2)), (t.shape[0], VOCAB_TILE)).to(tl.float32)
    elif RAGGED:
        given = tl.load(at + tl.minimum(c, V - 1 - v0)[None, :] * labels.stride).to(tl.float32)
    else:
        given = tl.load(at + c[None, :] * labels.stride).to(tl.float32)
    q = smoothed(given, labels.smoothing, V)
    if class_weight is not None:
        q *= tl.load(class_weight + v0 + c, mask=c < V - v0, other=0.0)[None, :]
    elif RAGGED:
        q = tl.where((c < V - v0)[None, :], q, 0.0)
    return given, q
