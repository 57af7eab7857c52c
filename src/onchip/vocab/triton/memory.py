"""How the Triton backend cuts a problem, and the memory that it takes.  No framework.

The weight's gradient is V * H elements that exist anyway: until they are computed, their memory holds the exponentials
of up to H tokens (two H where a float32 gradient meets 16-bit operands).  More tokens can be kept in scratch, and those
that aren't have their logits recomputed: so between three products and four there is a plan for every budget.

With more tokens than H it is better that forward takes them in chunks and computes the gradients right away, up to
factors that backward multiplies by (`in_forward`): each row of hidden's, and the weight's as a sum over the chunks.
Until the first chunk's part of that sum is made, its memory, that of a 16-bit gradient and of more digits, can hold
exponentials of the first chunk: so that may have H and a quarter (float16: a half) more tokens than the others, and
fewer are left to add (`first_chunk`).  Where the head is frozen it takes two products and no sum.

The weight's sum has 20 bits where products are of bfloat16, else 24: the first 16 of a float32 in the memory of the
gradient, and 4 or 8 more.  Each addition rounds it to 12 or 16 binary digits, where the operands have 8 or 11.  What
float32 would take beyond that is left for larger chunks: of scratch, or of a float32 gradient's own memory.
"""

from dataclasses import dataclass

from onchip.core.sizes import DTYPE_BYTES, MIB, up
from onchip.vocab.chunks import in_chunks
from onchip.vocab.memory import Problem, digit_bits
from onchip.vocab.triton.tiling import EXPONENTIALS_ROW, TOKEN_TILE, VOCAB_TILE, chunk_hidden, even_step, takes_turns

# Positions of a longer first chunk whose hidden gradient is summed at a time, at least.
SMALLEST_STEP = 512
# Rows of the weight's sum whose first half shares bytes of digits with the second half: twice tiles.PAIR_ROWS.
PAIRS = 128


@dataclass(frozen=True)
class TritonPlan:
    """One way to cut a problem."""

    token_chunk: int
    """Tokens whose logits are taken at a time in forward: all of them, unless no gradient is wanted or `in_forward`."""
    vocab_chunk: int = 0
    """Columns of the logits' gradient that are recomputed at a time, a multiple of 256."""
    weight_chunk: int = 0
    """Rows of the weight's gradient that are computed at a time, a multiple of 256, no more than `vocab_chunk`."""
    kept_in_gradient: int = 0
    """Tokens, rounded up to 128, whose exponentials wait in the memory of the weight's gradient."""
    kept_in_scratch: int = 0
    """Tokens, in multiples of 128, whose exponentials wait in scratch."""

    halves: bool = False
    """Whether the other tokens' hidden gradient is summed in two halves, so that tiles fill the last wave."""
    in_forward: bool = False
    """Whether forward computes the gradients, up to factors, chunk by chunk of tokens; the fields above are then 0."""
    first_chunk: int = 0
    """With `in_forward`, tokens of the first chunk where it is larger, since the memory of the weight's sum holds some
    of its exponentials; its part of that sum is then computed `weight_chunk` rows at a time."""

    @property
    def kept(self) -> int:
        return self.kept_in_gradient + self.kept_in_scratch

    def token_chunks(self, tokens: int) -> list[int]:
        """How many each has."""
        first = min(self.first_chunk or self.token_chunk, tokens)
        return [first, *in_chunks(tokens - first, self.token_chunk)]


def vector_elements(tokens: int) -> int:
    """int32 numbers that forward leaves: six of each token, and one."""
    return 6 * tokens + 1


def may_hold(p: Problem) -> bool:
    """Whether what is kept is all that the gradients need: exponentials, with softcap times its derivative.

    Label smoothing adds the same to all entries of a row, which both gradients take apart; with softcap or class
    weights it isn't the same.  Where it takes most of the probability, or classes are few, the difference of the two is
    rounded better than each of them.  And the gradient of an entropy reads logits off the exponentials.  Soft labels of
    every entry would be read again for each of the products.
    """
    smoothed = p.smoothing > 0 and (p.smoothing > 0.5 or p.softcap or p.class_weight or p.vocab < VOCAB_TILE)
    return not (smoothed or p.labels or (p.softcap and p.ids and p.stats))


def may_run_in_forward(p: Problem) -> bool:
    """Whether forward can compute the gradients up to factors that backward knows: one per token for hidden's, one for
    all tokens for the weight's.
    """
    entropy = bool(p.ids and p.stats)
    once = not (p.grad_weight and (p.per_token_loss or p.ids))
    # With fewer logits there is little to save, and no model has another H: neither was measured.
    worth_it = p.vocab >= 64 * VOCAB_TILE and p.hidden % 64 == 0
    return p.any_grad and may_hold(p) and once and worth_it and not (p.grad_bias or entropy or p.sharded)


def capacity(p: Problem) -> int:
    """Tokens whose exponentials fit in the memory of the weight's gradient."""
    if not p.grad_weight or p.weight_grad_out or not may_hold(p):
        return 0
    rows = p.hidden * DTYPE_BYTES[p.weight_dtype] // DTYPE_BYTES[p.dtype]
    return rows // TOKEN_TILE * TOKEN_TILE


def id_bytes(p: Problem) -> int:
    """Where tokens have several ids: bytes of what there is of each token and each id beside the vectors."""
    return (48 + (80 if p.smoothing else 72) * p.ids) * p.tokens if p.ids else 0


def scratch_parts(p: Problem, c: TritonPlan) -> dict[str, int]:
    """Peak memory above inputs, loss and returned gradients, in bytes, part by part."""
    element = DTYPE_BYTES[p.dtype]
    tiles = -(-p.vocab // VOCAB_TILE)
    cast = element * p.vocab * p.hidden if p.weight_dtype != p.dtype else 0
    softmax = softmax_bytes(p, c.token_chunk)
    # With exponentials kept, targets are sorted.
    vectors = (160 if c.kept or c.in_forward else 96) * p.tokens + MIB // 64
    if p.labels:
        vectors += (96 + 32 * int(p.stats)) * p.tokens + 4 * p.vocab  # a bias in float32
    if p.class_weight:
        vectors += 8 * (p.tokens + p.vocab)
    parts = {"weight in the products' dtype": cast, "copies of strided inputs": p.copied, "vectors": vectors}
    ids = {"ids": id_bytes(p)} if p.ids else {}
    if not p.any_grad:
        return parts | {"hidden rows": element * c.token_chunk * p.hidden, "softmax of each tile": softmax} | ids
    if c.in_forward:
        by_chunk = [_chunk_parts(p, c, size, first=i == 0) for i, size in enumerate(c.token_chunks(p.tokens)[:2])]
        largest_chunk = max(by_chunk, key=lambda x: sum(x.values()))
        return parts | {
            "one more chunk of the weight's gradient": bytes_beyond(p, c),
            "more digits of hidden's gradient": hidden_digits(p),
            "the weight's sum" if p.weight_grad_out else "more digits of the weight's gradient": sum_in_scratch(p),
            "one more chunk of these digits": digits_beyond(p, c),
            **largest_chunk,
            **ids,
        }
    rows = up(p.tokens, TOKEN_TILE)
    again = element * max(0, rows - c.kept) * c.vocab_chunk
    summed = min(rows, c.kept) + 2 * max(0, rows - c.kept) if c.halves else p.tokens
    # Ranks add up their sums in order of tokens, beside those in order of positions.
    hidden_sums = 4 * (summed + p.tokens * p.sharded) * p.hidden if p.grad_hidden else 0
    # The softmax of each tile is gone before the gradients are begun.
    later = again + hidden_sums + (4 * p.vocab if p.grad_bias else 0)
    return parts | {
        "hidden rows": 0 if p.grad_hidden else element * p.tokens * p.hidden,
        "one more chunk of the weight's gradient": bytes_beyond(p, c),
        "exponentials in scratch": element * VOCAB_TILE * tiles * c.kept_in_scratch,
        "logits' gradient, recomputed": again,
        "hidden gradient in float32": hidden_sums,
        "softmax of each tile": max(0, softmax - later),
        **ids,
    }


def softmax_bytes(p: Problem, tokens: int) -> int:
    """Of what the softmax of so many tokens leaves for each tile."""
    # maximum and sum; an offset for label smoothing; moment and argmax for statistics
    # three sums for labels, and four numbers more of these
    of_labels = (3 + 4 * int(p.stats)) * int(p.labels != "")
    numbers = 2 + int(p.smoothing > 0) + 2 * int(p.stats) + p.more_stats + of_labels
    of_tile = 2 if numbers == 2 and takes_turns(p.hidden) else 1
    return 4 * of_tile * -(-p.vocab // VOCAB_TILE) * up(tokens, 4) * numbers


def rows_beyond(p: Problem, c: TritonPlan) -> int:
    """Of the memory of the weight's gradient, where that holds exponentials: each chunk of the gradient overwrites the
    previous chunk's exponentials while reading its own.
    """
    return up(p.vocab, VOCAB_TILE) + c.weight_chunk - p.vocab if c.kept_in_gradient or c.first_chunk else 0


def bytes_beyond(p: Problem, c: TritonPlan) -> int:
    return DTYPE_BYTES[p.weight_dtype] * rows_beyond(p, c) * p.hidden


def in_gradient(p: Problem, c: TritonPlan, tokens: int, *, first: bool) -> int:
    """Tokens of a chunk whose exponentials are in the memory of the weight's gradient."""
    return min(up(tokens, TOKEN_TILE), capacity(p) if first and c.first_chunk else room_in_gradient(p))


def in_digits(p: Problem, c: TritonPlan, tokens: int, *, first: bool) -> int:
    """Tokens of a chunk whose exponentials are where the digits of the weight's sum will be: of a longer first one."""
    if not (first and c.first_chunk):
        return 0
    rest = up(tokens, TOKEN_TILE) - in_gradient(p, c, tokens, first=True)
    return min(rest, _tile_digits(p) // EXPONENTIALS_ROW) // TOKEN_TILE * TOKEN_TILE


def digits_beyond(p: Problem, c: TritonPlan) -> int:
    """As `bytes_beyond`, of the memory of those digits."""
    if in_digits(p, c, c.first_chunk, first=True) == 0:
        return 0
    return _tile_digits(p) * ((up(p.vocab, VOCAB_TILE) + c.weight_chunk) // VOCAB_TILE) - weight_digits(p)


def lent(p: Problem, c: TritonPlan, *, first: bool) -> int:
    """Bytes of the weight gradient's memory that a chunk's softmax and sums may use: of the first chunk those before
    its exponentials, of the others those beyond the gradient's end.
    """
    if not c.first_chunk:
        return 0
    return DTYPE_BYTES[p.weight_dtype] * c.weight_chunk * p.hidden if first else bytes_beyond(p, c)


def work_bytes(p: Problem, c: TritonPlan, tokens: int, *, first: bool) -> int:
    """Of what the softmax of a chunk leaves for each tile, and later, in the same memory, of the sums of hidden's
    gradient in float32.
    """
    if not p.grad_hidden:
        sums = 0
    elif first and c.first_chunk:  # of some positions at a time
        sums = max(lent(p, c, first=True), 4 * up(min(tokens, SMALLEST_STEP), TOKEN_TILE) * p.hidden)
    else:  # the last chunk has as many as the others
        size = min(c.token_chunk, p.tokens)
        sums = 4 * size * p.hidden * chunk_hidden(size, p.hidden)[1]
    return max(softmax_bytes(p, tokens), sums)


def sums_room(p: Problem, c: TritonPlan, tokens: int, *, first: bool) -> int:
    """Positions that a chunk has sums for."""
    return work_bytes(p, c, tokens, first=first) // (4 * p.hidden)


def hidden_step(p: Problem, c: TritonPlan, tokens: int, *, first: bool) -> int:
    """Positions of a chunk whose hidden gradient is made at a time."""
    if not (first and c.first_chunk):
        return tokens
    return even_step(tokens, p.hidden, sums_room(p, c, tokens, first=True))


def _chunk_parts(p: Problem, c: TritonPlan, tokens: int, *, first: bool) -> dict[str, int]:
    """Bytes of one chunk of tokens where forward computes its gradients."""
    element, rows = DTYPE_BYTES[p.dtype], up(tokens, TOKEN_TILE)
    rows -= in_gradient(p, c, tokens, first=first) + in_digits(p, c, tokens, first=first)
    work = work_bytes(p, c, tokens, first=first)
    own = work if work > lent(p, c, first=first) else 0
    return {
        "hidden rows": element * tokens * p.hidden,
        "exponentials in scratch": element * rows * up(p.vocab, VOCAB_TILE),
        "softmax of each tile, then hidden's gradient in float32": own,
    }


def hidden_digits(p: Problem) -> int:
    """Bytes of what a 16-bit memory lacks of hidden's gradient until backward scales it: 8 more bits of each number; in
    whole rows of exponentials, since the weight's sum follows.
    """
    return up(p.tokens * p.hidden, EXPONENTIALS_ROW) if p.grad_hidden and p.hidden_dtype != "float32" else 0


def _tile_digits(p: Problem) -> int:
    """Bytes of the digits of the weight's sum for one tile of the vocabulary."""
    return VOCAB_TILE * p.hidden // (1 if digit_bits(p.dtype) == 8 else 2)


def weight_digits(p: Problem) -> int:
    """The same of the weight's sum; where they are 4 bits, two rows share bytes."""
    if not p.grad_weight:
        return 0
    return (p.vocab if digit_bits(p.dtype) == 8 else up(p.vocab, PAIRS) // 2) * p.hidden


def sum_bytes(p: Problem) -> int:
    """Of the weight's sum, with those digits, in whole rows of exponentials."""
    return up(2 * p.vocab * p.hidden + weight_digits(p), EXPONENTIALS_ROW) if p.grad_weight else 0


def sum_in_scratch(p: Problem) -> int:
    """Bytes of that sum which aren't in the memory of the gradient: none where that is float32, and all where the
    gradient will be added to the caller's.
    """
    if p.weight_grad_out:
        return sum_bytes(p)
    return 0 if p.weight_dtype == "float32" else weight_digits(p)


def rounds_in_forward(p: Problem) -> bool:
    """Whether the last chunk that has tokens leaves the weight's gradient itself for an upstream gradient of 1, and
    digits by which it can be multiplied by another: of a sum whose first 16 bits are as many as the gradient has.
    """
    return p.grad_weight and not p.weight_grad_out and p.weight_dtype == p.dtype == "bfloat16"


def room_in_gradient(p: Problem) -> int:
    """Tokens of a chunk whose exponentials find room beside the weight's sum, in the memory of a float32 gradient."""
    if not p.grad_weight or p.weight_grad_out or p.weight_dtype != "float32":
        return 0
    each = EXPONENTIALS_ROW * TOKEN_TILE * -(-p.vocab // VOCAB_TILE)
    return (4 * p.vocab * p.hidden - sum_bytes(p)) // each * TOKEN_TILE
