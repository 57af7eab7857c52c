"""How the Triton backend cuts a problem, and the memory that it takes.  Imports no framework.

The weight's gradient is V * H elements that exist anyway.  Until they are computed, their memory holds the exponentials
of up to H tokens (two H if a float32 gradient meets 16-bit operands).  The exponentials of more tokens can be kept in
scratch, and the logits of the others are recomputed.  So there is a plan for every budget, of three to four products.

With more tokens than H it is better if forward takes them in chunks and computes the gradients right away, up to
factors that backward multiplies by (`in_forward`): each row of hidden's gradient, and the weight's as a sum over the
chunks.  Until the first chunk's part of that sum is made, the sum's memory (that of a 16-bit gradient and of more
digits) can hold exponentials of the first chunk.  So the first chunk may have H and a quarter (float16: a half) more
tokens than the others, and fewer are left to add (`first_chunk`).  A frozen head takes two products and no sum.

The weight's sum has 20 bits for bfloat16 products, otherwise 24: the first 16 of a float32, in the memory of the
gradient, and 4 or 8 more.  Each addition rounds it to 12 or 16 binary digits, while the operands have 8 or 11.  The
memory that float32 would take beyond that, scratch or a float32 gradient's own, is left for larger chunks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from onchip.core.sizes import DTYPE_BYTES, MIB, up
from onchip.vocab.chunks import in_chunks
from onchip.vocab.memory import Problem, digit_bits
from onchip.vocab.triton.tiling import (
    ALIGNED,
    EXPONENTIALS_ROW,
    TOKEN_TILE,
    VECTOR,
    VOCAB_TILE,
    even_step,
    hidden_sums,
    takes_turns,
)

# Positions of a longer first chunk whose hidden gradient is summed at a time, at least.
SMALLEST_STEP = 512
# Rows of the weight's sum whose first half shares bytes of digits with the second half: twice tiles.PAIR_ROWS.
PAIRS = 128


@dataclass(frozen=True)
class TritonPlan:
    """One way to cut a problem."""

    token_chunk: int
    """How many tokens' logits forward takes at a time: all of them, unless no gradient is wanted or `in_forward`."""
    vocab_chunk: int = 0
    """For how many vocabulary entries the logits' gradient is recomputed at a time; a multiple of 256."""
    weight_chunk: int = 0
    """How many rows of the weight's gradient are computed at a time; a multiple of 256, at most `vocab_chunk`."""
    kept_in_gradient: int = 0
    """How many tokens' exponentials wait in the memory of the weight's gradient, rounded up to 128."""
    kept_in_scratch: int = 0
    """How many tokens' exponentials wait in scratch; a multiple of 128."""

    halves: bool = False
    """Whether the other tokens' hidden gradient is summed in two halves, so that tiles fill the last wave."""
    in_forward: bool = False
    """Whether forward computes the gradients, up to factors, chunk by chunk of tokens; the fields above are then 0."""
    first_chunk: int = 0
    """With `in_forward`, the tokens of the first chunk if it is larger than the others, since the memory of the
    weight's sum holds some of its exponentials; its part of that sum is then computed `weight_chunk` rows at a time."""

    @property
    def kept(self) -> int:
        return self.kept_in_gradient + self.kept_in_scratch

    def token_chunks(self, tokens: int) -> list[int]:
        """The number of tokens in each chunk."""
        first = min(self.first_chunk or self.token_chunk, tokens)
        return [first, *in_chunks(tokens - first, self.token_chunk)]


def vector_elements(tokens: int) -> int:
    """int32 numbers that forward leaves: six for each token, and one more."""
    return 6 * up(tokens, VECTOR) + 1


def may_hold(p: Problem) -> bool:
    """Whether the gradients need no more than what may be kept: exponentials, with softcap times its derivative.

    Label smoothing adds the same to all entries of a row, which both gradients take apart; with softcap or class
    weights it isn't the same.  If smoothing takes most of the probability, or classes are few, the difference of the
    two is rounded better than each of them.  The gradient of an entropy reads logits off the exponentials.  Soft labels
    of every entry would be read again for each of the products.
    """
    smoothed = p.smoothing > 0 and (p.smoothing > 0.5 or p.softcap or p.class_weight or p.vocab < VOCAB_TILE)
    return not (smoothed or p.labels or (p.softcap and p.ids and p.stats))


def may_run_in_forward(p: Problem) -> bool:
    """Whether forward can compute the gradients up to factors that backward knows: one per token for hidden's, one for
    all tokens for the weight's.
    """
    entropy = bool(p.ids and p.stats)
    once = not (p.grad_weight and (p.per_token_loss or p.ids))
    # With fewer logits there is little to save, and no model has another H; neither was measured.
    worth_it = p.vocab >= 64 * VOCAB_TILE and p.hidden % 64 == 0
    # Ranks exchange the softmax of each chunk, and add up hidden's gradient in forward: only a factor may come later.
    apart = p.sharded and (not p.even or p.per_token_loss or p.ids > 0 or p.class_weight)
    return p.any_grad and may_hold(p) and once and worth_it and not (p.grad_bias or entropy or apart)


def capacity(p: Problem) -> int:
    """Tokens whose exponentials fit in the memory of the weight's gradient."""
    if not p.grad_weight or p.weight_grad_out or not may_hold(p):
        return 0
    rows = p.hidden * DTYPE_BYTES[p.weight_dtype] // DTYPE_BYTES[p.dtype]
    return rows // TOKEN_TILE * TOKEN_TILE


def id_bytes(p: Problem) -> int:
    """If tokens have several ids: bytes of what exists for each token and each id, in addition to the vectors."""
    return (48 + (80 if p.smoothing else 72) * p.ids) * p.tokens if p.ids else 0


class TritonSizes:
    """What the memory of a problem's plans consists of, whatever the tokens: bytes, unless noted."""

    def __init__(self, p: Problem) -> None:
        self.problem = p
        element, tiles = DTYPE_BYTES[p.dtype], -(-p.vocab // VOCAB_TILE)
        self.hidden, self.element, self.columns = p.hidden, element, tiles * VOCAB_TILE
        self.row, self.weight_row = element * p.hidden, DTYPE_BYTES[p.weight_dtype] * p.hidden
        self.hidden_row = DTYPE_BYTES[p.hidden_dtype] * p.hidden
        self.exponentials = element * self.columns  # of a token
        self.softmax = _softmax_bytes(p)  # of a token
        self.cast = element * p.vocab * p.hidden if p.weight_dtype != p.dtype else 0
        # Tokens whose exponentials are held: in the gradient's memory, beside a sum in that, and where digits will be.
        self.capacity, self.room = capacity(p), _room_in_gradient(p)
        self.tile_digits = VOCAB_TILE * p.hidden // (1 if digit_bits(p.dtype) == 8 else 2)
        self.in_digits_most = self.tile_digits // EXPONENTIALS_ROW
        self.sum_in_scratch = sum_in_scratch(p)
        self.weight_digits = weight_digits(p)
        self.padded = self.columns - p.vocab  # rows
        self.grad_hidden, self.sharded = p.grad_hidden, p.sharded
        self.bias = 4 * p.vocab if p.grad_bias else 0
        # Of vectors, of a token and of all; of labels those with a bias in float32.
        self.token, self.vectors = 96, MIB // 64
        if p.labels:
            self.token, self.vectors = self.token + 96 + 32 * p.stats, self.vectors + 4 * p.vocab
        if p.class_weight:
            self.token, self.vectors = self.token + 8, self.vectors + 8 * p.vocab

    def of_tokens(self, tokens: int, *, sorted_by_target: bool) -> int:
        """Bytes of the vectors."""
        return (self.token + 64 * sorted_by_target) * tokens + self.vectors

    def of_softmax(self, tokens: int) -> int:
        """Bytes of what the softmax of so many tokens leaves for each tile."""
        return self.softmax * up(tokens, ALIGNED)

    def alone(self, tokens: int) -> int:
        """Bytes of a chunk of tokens without gradients."""
        return self.row * tokens + self.of_softmax(tokens)

    # ------------------------------------------------------------------------------- gradients in forward

    def beyond(self, weight_chunk: int) -> int:
        """Bytes of the weight gradient's memory beyond its end, if it holds exponentials."""
        return self.weight_row * (self.padded + weight_chunk)

    def in_gradient(self, tokens: int, *, longer: bool) -> int:
        """How many of a chunk's tokens have their exponentials in the memory of the weight's gradient."""
        return min(-(-tokens // TOKEN_TILE) * TOKEN_TILE, self.capacity if longer else self.room)

    def in_digits(self, tokens: int) -> int:
        """How many tokens of a longer first chunk have their exponentials where the digits of the weight's sum will
        be.
        """
        rest = -(-tokens // TOKEN_TILE) * TOKEN_TILE - self.capacity
        return max(0, min(rest, self.in_digits_most)) // TOKEN_TILE * TOKEN_TILE

    def digits_beyond(self, first: int, weight_chunk: int) -> int:
        """As `beyond`, for the memory of those digits."""
        if self.in_digits(first) == 0:
            return 0
        return self.tile_digits * ((self.columns + weight_chunk) // VOCAB_TILE) - self.weight_digits

    def work(self, tokens: int, size: int, lent: int, *, longer: bool) -> int:
        """Bytes of what the softmax of a chunk leaves for each tile and later, in the same memory, of the sums of
        hidden's gradient in float32.  `size`: tokens in all chunks but a longer first one; the last chunk has room for
        as many.
        """
        if not self.grad_hidden:
            sums = 0
        elif longer:  # of some positions at a time
            sums = max(lent, 4 * up(min(tokens, SMALLEST_STEP), TOKEN_TILE) * self.hidden)
        else:
            sums = 4 * size * self.hidden * hidden_sums(size, self.hidden)
        return max(self.of_softmax(tokens), sums)

    def chunk(self, tokens: int, size: int, lent: int, *, longer: bool) -> tuple[int, int, int]:
        """Bytes of one chunk of tokens whose gradients forward computes: rows, exponentials, and `work` unless that
        much is `lent` by the weight gradient's memory.
        """
        rows = -(-tokens // TOKEN_TILE) * TOKEN_TILE - self.in_gradient(tokens, longer=longer)
        if longer:
            rows -= self.in_digits(tokens)
        work = self.work(tokens, size, lent, longer=longer)
        return self.row * tokens, self.exponentials * rows, work if work > lent else 0

    @lru_cache(maxsize=1 << 14)  # noqa: B019 - those of a head are kept with it
    def even_chunk(self, size: int) -> tuple[int, int]:
        """Of the largest of chunks of so many tokens, of which none is longer: with `work`, and without."""
        rows, exponentials, work = self.chunk(size, size, 0, longer=False)
        return rows + exponentials + work, rows + exponentials

    def first_chunk(self, tokens: int, weight: int) -> int:
        """Of a longer first chunk of so many tokens, with what is beyond the gradient's memory, and that of digits."""
        beyond = self.beyond(weight) + self.digits_beyond(tokens, weight)
        return beyond + sum(self.chunk(tokens, tokens, self.weight_row * weight, longer=True))

    def longest_first(self, weight: int, room: int) -> int:
        """The most tokens, in whole tiles, whose `first_chunk` takes no more than `room`, if these are many."""
        lent, digits = self.weight_row * weight, self.in_digits_most // TOKEN_TILE * TOKEN_TILE
        sums = max(lent, 4 * SMALLEST_STEP * self.hidden) if self.grad_hidden else 0

        def most(room: int, free: int) -> int:
            """`free`: tokens whose exponentials are not in scratch."""

            def within(room: int, work: int) -> int:
                tokens = room // (self.row + work)
                each = self.row + self.exponentials + work
                return tokens if tokens <= free else (room + self.exponentials * free) // each

            lends = min(within(room, 0), lent // self.softmax) if sums <= lent else 0
            return max(lends, min(within(room, self.softmax), within(room - sums, 0))) // TOKEN_TILE * TOKEN_TILE

        room -= self.beyond(weight)
        beyond = self.tile_digits * ((self.columns + weight) // VOCAB_TILE) - self.weight_digits
        if digits and (found := most(room - beyond, self.capacity + digits)) > self.capacity:
            return found
        found = most(room, self.capacity)
        return min(found, self.capacity) if digits else found

    def other_chunk(self, weight: int) -> Callable[[int], int]:
        """Of a chunk after that, of so many tokens, with what is beyond the gradient's memory."""
        beyond = self.beyond(weight)

        def other_chunk(tokens: int) -> int:
            size, kept = self.even_chunk(tokens)
            return beyond + (size if size - kept > beyond else kept)

        return other_chunk

    # ------------------------------------------------------------------------------- exponentials that are kept

    def kept(self, tokens: int, in_gradient: int, in_scratch: int, *, halves: bool) -> "KeptBytes":
        """Of a plan that keeps exponentials."""
        rows, kept = up(tokens, TOKEN_TILE), in_gradient + in_scratch
        left, sums = max(0, rows - kept), 0
        if self.grad_hidden:
            summed = min(rows, kept) + 2 * left if halves else tokens
            # What ranks add up, while the weight's products still read hidden's rows.
            sums = 4 * summed * self.hidden + self.hidden_row * tokens * self.sharded
        vectors = self.of_tokens(tokens, sorted_by_target=kept > 0)  # with exponentials kept, targets are sorted
        of_row = self.weight_row if in_gradient else 0
        hidden_rows = 0 if self.grad_hidden else self.row * tokens
        padding, exponentials = of_row * self.padded, self.exponentials * in_scratch
        return KeptBytes(
            vectors,
            hidden_rows,
            padding,
            exponentials,
            sums,
            vectors + hidden_rows + padding + exponentials + sums,
            max(0, self.of_softmax(tokens) - sums - self.bias),
            of_row,
            self.element * left,
        )


class KeptBytes(NamedTuple):
    """Of plans that keep exponentials of so many tokens, beside what every plan takes."""

    vectors: int
    hidden_rows: int
    padding: int
    exponentials: int
    sums: int
    fixed: int  # all of these
    softmax: int  # of each tile, beyond the memory of those sums: it is gone before the gradients are begun
    of_row: int  # for each row of a chunk of the weight's gradient
    of_column: int  # for each column of a chunk of logits that are computed again

    def size(self, vocab_chunk: int, weight_chunk: int) -> int:
        """With chunks of such a size."""
        return self.fixed + self.of_row * weight_chunk + max(self.softmax, self.of_column * vocab_chunk)

    def parts(self, vocab_chunk: int, weight_chunk: int) -> dict[str, int]:
        again = self.of_column * vocab_chunk
        return {
            "vectors": self.vectors,
            "hidden rows": self.hidden_rows,
            "one more chunk of the weight's gradient": self.padding + self.of_row * weight_chunk,
            "exponentials in scratch": self.exponentials,
            "logits' gradient, recomputed": again,
            "hidden gradient in float32": self.sums,
            "softmax of each tile": max(0, self.softmax - again),
        }


CHUNK_PARTS = (
    "hidden rows",
    "exponentials in scratch",
    "softmax of each tile, then hidden's gradient in float32",
)


def sizes_of(p: Problem) -> TritonSizes:
    return _sizes(p.head)


@lru_cache(maxsize=1024)
def _sizes(p: Problem) -> TritonSizes:
    return TritonSizes(p)


def scratch_parts(p: Problem, c: TritonPlan) -> dict[str, int]:
    """Peak memory above inputs, loss and returned gradients, in bytes, part by part."""
    s = sizes_of(p)
    parts = {"weight in the products' dtype": s.cast, "copies of strided inputs": p.copied}
    if not p.any_grad:
        parts |= {
            "vectors": s.of_tokens(p.tokens, sorted_by_target=False),
            "hidden rows": s.row * c.token_chunk,
            "softmax of each tile": s.of_softmax(c.token_chunk),
        }
    elif c.in_forward:
        by_chunk = [_chunk_parts(p, c, size, first=i == 0) for i, size in enumerate(c.token_chunks(p.tokens)[:2])]
        parts |= {
            "vectors": s.of_tokens(p.tokens, sorted_by_target=True),
            "one more chunk of the weight's gradient": bytes_beyond(p, c),
            "more digits of hidden's gradient": hidden_digits(p),
            "the weight's sum" if p.weight_grad_out else "more digits of the weight's gradient": s.sum_in_scratch,
            "one more chunk of these digits": digits_beyond(p, c),
            **dict(zip(CHUNK_PARTS, max(by_chunk, key=sum), strict=True)),
        }
    else:
        kept = s.kept(p.tokens, c.kept_in_gradient, c.kept_in_scratch, halves=c.halves)
        parts |= kept.parts(c.vocab_chunk, c.weight_chunk)
    return parts | ({"ids": id_bytes(p)} if p.ids else {})


def _softmax_bytes(p: Problem) -> int:
    """Bytes of what the softmax of a token leaves for all tiles."""
    # maximum and sum; an offset for label smoothing; moment and argmax for statistics
    # three sums for labels, and four numbers more of these
    of_labels = (3 + 4 * int(p.stats)) * int(p.labels != "")
    numbers = 2 + int(p.smoothing > 0) + 2 * int(p.stats) + p.more_stats + of_labels
    of_tile = 2 if numbers == 2 and takes_turns(p.hidden) else 1
    return 4 * of_tile * -(-p.vocab // VOCAB_TILE) * numbers


def rows_beyond(p: Problem, c: TritonPlan) -> int:
    """Rows of the weight gradient's memory beyond its end, if it holds exponentials: each chunk of the gradient
    overwrites the previous chunk's exponentials while it reads its own.
    """
    return up(p.vocab, VOCAB_TILE) + c.weight_chunk - p.vocab if c.kept_in_gradient or c.first_chunk else 0


def bytes_beyond(p: Problem, c: TritonPlan) -> int:
    return sizes_of(p).beyond(c.weight_chunk) if c.kept_in_gradient or c.first_chunk else 0


def in_gradient(p: Problem, c: TritonPlan, tokens: int, *, first: bool) -> int:
    """How many of a chunk's tokens have their exponentials in the memory of the weight's gradient."""
    return sizes_of(p).in_gradient(tokens, longer=first and c.first_chunk > 0)


def in_digits(p: Problem, c: TritonPlan, tokens: int, *, first: bool) -> int:
    """How many tokens of a longer first chunk have their exponentials where the digits of the weight's sum will be."""
    return sizes_of(p).in_digits(tokens) if first and c.first_chunk else 0


def digits_beyond(p: Problem, c: TritonPlan) -> int:
    """As `bytes_beyond`, for the memory of those digits."""
    return sizes_of(p).digits_beyond(c.first_chunk, c.weight_chunk) if c.first_chunk else 0


def lent(p: Problem, c: TritonPlan, *, first: bool) -> int:
    """Bytes of the weight gradient's memory that a chunk's softmax and sums may use: of the first chunk those before
    its exponentials, of the others those beyond the gradient's end.
    """
    if not c.first_chunk:
        return 0
    return DTYPE_BYTES[p.weight_dtype] * c.weight_chunk * p.hidden if first else bytes_beyond(p, c)


def work_bytes(p: Problem, c: TritonPlan, tokens: int, *, first: bool) -> int:
    """`TritonSizes.work` for a chunk."""
    longer, size = first and c.first_chunk > 0, min(c.token_chunk, p.tokens)
    return sizes_of(p).work(tokens, size, lent(p, c, first=first), longer=longer)


def hidden_step(p: Problem, c: TritonPlan, tokens: int, *, first: bool) -> int:
    """For how many positions of a chunk hidden's gradient is made at a time."""
    if not (first and c.first_chunk):
        return tokens
    return even_step(tokens, p.hidden, work_bytes(p, c, tokens, first=True) // (4 * p.hidden))


def _chunk_parts(p: Problem, c: TritonPlan, tokens: int, *, first: bool) -> tuple[int, int, int]:
    longer, size = first and c.first_chunk > 0, min(c.token_chunk, p.tokens)
    return sizes_of(p).chunk(tokens, size, lent(p, c, first=first), longer=longer)


def hidden_digits(p: Problem) -> int:
    """Bytes of what a 16-bit memory lacks of hidden's gradient until backward scales it: 8 more bits for each number,
    in whole rows of exponentials, since the weight's sum follows.  What ranks sum is rounded in forward.
    """
    if not p.grad_hidden or p.hidden_dtype == "float32" or p.sharded:
        return 0
    return up(p.tokens * p.hidden, EXPONENTIALS_ROW)


def weight_digits(p: Problem) -> int:
    """Bytes of the digits of the weight's sum; if they have 4 bits, two rows share bytes."""
    if not p.grad_weight:
        return 0
    return (p.vocab if digit_bits(p.dtype) == 8 else up(p.vocab, PAIRS) // 2) * p.hidden


def sum_bytes(p: Problem) -> int:
    """Bytes of the weight's sum with those digits, in whole rows of exponentials."""
    return up(2 * p.vocab * p.hidden + weight_digits(p), EXPONENTIALS_ROW) if p.grad_weight else 0


def sum_in_scratch(p: Problem) -> int:
    """Bytes of that sum which aren't in the memory of the gradient: none if the gradient is float32, and all if it will
    be added to the caller's.
    """
    if p.weight_grad_out:
        return sum_bytes(p)
    return 0 if p.weight_dtype == "float32" else weight_digits(p)


def rounds_in_forward(p: Problem) -> bool:
    """Whether the last chunk that has tokens leaves the weight's gradient itself for an upstream gradient of 1, and
    digits with which it can be multiplied by another.  This takes a sum whose first 16 bits are as many as the gradient
    has.
    """
    return p.grad_weight and not p.weight_grad_out and p.weight_dtype == p.dtype == "bfloat16"


def _room_in_gradient(p: Problem) -> int:
    """How many of a chunk's tokens have room for their exponentials beside the weight's sum, in the memory of a float32
    gradient.
    """
    if not p.grad_weight or p.weight_grad_out or p.weight_dtype != "float32":
        return 0
    each = EXPONENTIALS_ROW * TOKEN_TILE * -(-p.vocab // VOCAB_TILE)
    return (4 * p.vocab * p.hidden - sum_bytes(p)) // each * TOKEN_TILE
