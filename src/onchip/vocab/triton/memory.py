"""How the Triton backend cuts a problem: memory formulas, a cost model, and the choice of a plan.  No framework.

The weight's gradient is V * H elements that exist anyway: until they are computed, their memory holds the exponentials
of up to H tokens (two H where a float32 gradient meets 16-bit operands).  More tokens can be kept in scratch, and those
that aren't have their logits recomputed: so between three products and four there is a plan for every budget.

With more tokens than H it is better that forward takes them in chunks and computes the gradients right away, up to
factors that backward multiplies by (`in_forward`): each row of hidden's, and the weight's as a sum over the chunks.
Until the first chunk's part of that sum is made, the memory of a 16-bit gradient can hold exponentials of its own: so
the first chunk may have H tokens more than the others, and fewer are left to add (`first_chunk`).  Where the head is
frozen it takes two products and no sum.

The weight's sum has 20 bits where products are of bfloat16, else 24: the first 16 of a float32 in the memory of the
gradient, and 4 or 8 more.  Each addition rounds it to 12 or 16 binary digits, where the operands have 8 or 11.  What
float32 would take beyond that is left for larger chunks: of scratch, or of a float32 gradient's own memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from onchip.core.sizes import DTYPE_BYTES, MIB
from onchip.core.sizes import up as up
from onchip.vocab import chunks
from onchip.vocab.chunks import Planner, even_chunk, largest, waves
from onchip.vocab.memory import Problem, digit_bits, logits_bytes, needs

TOKEN_TILE = 128
VOCAB_TILE = 256
# Bytes of a tile's exponentials of one token.
EXPONENTIALS_ROW = 2 * VOCAB_TILE
# Tiles of the vocabulary in the smallest chunk of the gradients, and in the smallest that costs little.
SMALLEST_CHUNK, USEFUL_CHUNK = 1, 16
FORWARD_SCRATCH = 64 * MIB
# Launches of weight's product: with more the host is kept busy, and the GPU is no faster.
MOST_WEIGHT_CHUNKS = 11
# Tokens of the smallest chunk whose product is added to the weight's sum, and of the smallest after a longer first one:
# seven of 512 after 4608 took an H200 1% less than computing 37% of Llama 3.1 8B's logits again, but where most tokens
# are ignored nothing is computed again, and the last chunk still goes through the sum.
SMALLEST_SUMMED, SMALLEST_AFTER_FIRST = 512, 1024
# Rows of the weight's sum whose first half shares bytes of digits with the second half: twice tiles.PAIR_ROWS.
PAIRS = 128
# Columns of a tile of the kernels that take turns: turns.py.
IN_TURNS = 128


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
    """With `in_forward`, tokens of the first chunk where it is larger, since the memory of the weight's gradient holds
    some of its exponentials; that gradient is then computed `weight_chunk` rows at a time."""

    @property
    def kept(self) -> int:
        return self.kept_in_gradient + self.kept_in_scratch

    def token_chunks(self, tokens: int) -> list[int]:
        """How many each has."""
        first = min(self.first_chunk or self.token_chunk, tokens)
        return [first, *_chunk_sizes(tokens - first, self.token_chunk)]


def vector_elements(tokens: int) -> int:
    """int32 numbers that forward leaves: six of each token, and one."""
    return 6 * tokens + 1


def hidden_columns(hidden: int) -> int:
    """Of a tile of a gradient on Hopper.

    What a tile has beyond H is computed in vain: half as wide ones where they save a tenth.  On an H200, with H from
    576 to 1152, weight's product took 8 to 15% less so, and hidden's 12 to 19% where T > 4096.
    """
    wide, narrow = up(hidden, 256), up(hidden, 128)
    return 128 if 10 * (wide - narrow) >= wide else 256


def takes_turns(hidden: int) -> bool:
    """Whether the softmax of logits is faster by the kernel of turns.py, whose partials are of IN_TURNS columns."""
    return hidden <= 896


def staggers(hidden: int) -> bool:
    """Whether the softmax and the recomputed gradient of logits are faster by the kernels of staggered.py: on an H100
    by 8 and 9% with H = 1024, 8 and 5% with 1152, 4 and 2% with 2048, 6 and 4% with 2560, and by 0 to 3% with 4096.
    """
    return 896 < hidden <= 4096


def hidden_apart(hidden: int) -> bool:
    """Whether hidden's gradient is made by the kernel of apart.py, where that can run: of an H that tiles of 256
    columns don't suit.

    On an H100 it took a third less with H = 576 and 640, 5% less with 1152, as long with 896, and 1 to 2% more with
    1024 to 4096.
    """
    return hidden_columns(hidden) == 128


def heuristic_tiles(shared: int, hidden: int = 256) -> dict[str, dict[str, int]]:
    """The kernels' tiles where nothing was tuned, by the device's shared memory per block in bytes."""
    # Four stages of 48 KiB and a piece of the result: what was fastest on an H100 at all shapes, or within 2%.
    depth, most = (64, 4) if shared >= 227 * 1024 else (64, 3) if shared >= 160 * 1024 else (32, 3)

    def tiles(parts: int, group: int = 8, stages: int = most) -> dict[str, int]:
        return {
            "rows": 128,
            "columns": 256,
            "depth": depth,
            "group": group,
            "warps": 8,
            "stages": stages,
            "parts": parts if depth == 64 else 2 * parts,
        }

    # Of logits, with the whole vocabulary in one launch: forward on an H200 took 1 to 4% longer in groups of 8 with 4
    # stages.  With 64 tiles of the vocabulary, as `onchip tune` times them, there is no difference.
    made = {
        "softmax_tiles": tiles(2, group=16, stages=3),
        "gradient_tiles": tiles(2, group=16, stages=3),
        "weight_gradient": tiles(2),
        "hidden_gradient": tiles(4),
    }
    if most == 4 and hidden_columns(hidden) == 128:
        made["weight_gradient"] |= {"rows": 256, "columns": 128, "group": 4, "stages": 3, "parts": 1}
        made["hidden_gradient"] |= {"columns": 128, "stages": 6}
    return made


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


def lent(p: Problem, c: TritonPlan, *, first: bool) -> int:
    """Bytes that a chunk's softmax and sums may use since nothing else does yet, or any more: those of the digits of
    the weight's sum before there is one, and then those beyond the gradient's end.
    """
    if not c.first_chunk:
        return 0
    return weight_digits(p) if first else bytes_beyond(p, c)


def sums_room(p: Problem, c: TritonPlan, tokens: int, *, first: bool) -> int:
    """Positions that a chunk has sums of hidden's gradient for: the last one as many as the others."""
    if first and c.first_chunk:
        return max(tokens, lent(p, c, first=True) // (4 * p.hidden))
    size = min(c.token_chunk, p.tokens)
    return size * chunk_hidden(size, p.hidden)[1]


def sums_bytes(p: Problem, c: TritonPlan, tokens: int, *, first: bool) -> int:
    """Of the sums of hidden's gradient of a chunk, in float32."""
    slices = chunk_hidden(tokens, p.hidden, sums_room(p, c, tokens, first=first))[1] if p.grad_hidden else 0
    return 4 * tokens * p.hidden * slices


def work_bytes(p: Problem, c: TritonPlan, tokens: int, *, first: bool) -> int:
    """Of what the softmax of a chunk leaves for each tile, and later, in the same memory, of those sums."""
    return max(softmax_bytes(p, tokens), sums_bytes(p, c, tokens, first=first))


def _chunk_parts(p: Problem, c: TritonPlan, tokens: int, *, first: bool) -> dict[str, int]:
    """Bytes of one chunk of tokens where forward computes its gradients."""
    element, rows = DTYPE_BYTES[p.dtype], up(tokens, TOKEN_TILE) - in_gradient(p, c, tokens, first=first)
    work, sums = work_bytes(p, c, tokens, first=first), sums_bytes(p, c, tokens, first=first)
    own = work > lent(p, c, first=first)
    return {
        "hidden rows": element * tokens * p.hidden,
        "exponentials in scratch": element * rows * up(p.vocab, VOCAB_TILE),
        "hidden gradient in float32": sums * own,
        "softmax of each tile": (work - sums) * own,
    }


def hidden_digits(p: Problem) -> int:
    """Bytes of what a 16-bit memory lacks of hidden's gradient until backward scales it: 8 more bits of each number."""
    return p.tokens * p.hidden if p.grad_hidden and p.hidden_dtype != "float32" else 0


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
    """Whether the last chunk of tokens leaves the weight's gradient itself for an upstream gradient of 1, and digits by
    which it can be multiplied by another: of a sum whose first 16 bits are as many as the gradient has.
    """
    return p.grad_weight and not p.weight_grad_out and p.weight_dtype == p.dtype == "bfloat16"


def room_in_gradient(p: Problem) -> int:
    """Tokens of a chunk whose exponentials find room beside the weight's sum, in the memory of a float32 gradient."""
    if not p.grad_weight or p.weight_grad_out or p.weight_dtype != "float32":
        return 0
    each = EXPONENTIALS_ROW * TOKEN_TILE * -(-p.vocab // VOCAB_TILE)
    return (4 * p.vocab * p.hidden - sum_bytes(p)) // each * TOKEN_TILE


def hidden_units(rows: int, hidden: int, apart: bool) -> int:
    """Units of work of hidden's gradient, for so many rows of tiles: what a program takes at a time.

    `apart`: by the kernel of apart.py.
    """
    if not apart:
        return rows * -(-hidden // hidden_columns(hidden))
    wide, odd = divmod(up(hidden, 128) // 128, 2)
    return rows * wide + -(-rows // 2) * odd


def hidden_cut(units: int, most: int, programs: int) -> int:
    """The slices of the vocabulary that `apart.hidden_apart` cuts units of the last wave into, if so many are allowed.

    It takes as long as if all were cut.  More slices are worth it if that saves 3%.
    """
    best, least = 1, -(-units // programs)
    for cut in range(2, most + 1):
        taken = -(-units * cut // programs)
        if 103 * taken * best < 100 * least * cut:
            best, least = cut, taken
    return best


def chunk_hidden(tokens: int, hidden: int, room: int | None = None) -> tuple[bool, int]:
    """How a chunk's hidden gradient is made: whether by the kernel of apart.py, where that can run, which cuts the last
    wave better; and in how many sums over slices of the vocabulary, where units don't fill whole waves.

    `room`: positions that there are sums for; by default as many as it takes.  Two slices need no memory of their own:
    0 + a + b has the same bits in either order.
    """
    rates, rows = RATES["h100"], -(-tokens // TOKEN_TILE)
    whole = max(1, rates.programs // hidden_units(rows, hidden, False))
    most = max(4, rates.programs // hidden_units(rows, hidden, True))
    cut = hidden_cut(hidden_units(rows, hidden, True), most, rates.programs)
    apart = hidden_apart(hidden)
    if not apart:
        # Of an H that tiles of 256 columns suit it takes up to 2% more.
        tritons, others = (hidden_evenness(rows, hidden, x, n, rates) for x, n in ((False, max(2, whole)), (True, cut)))
        apart = 1.03 * others < tritons
    slices = cut if apart else whole
    slices = slices if slices > 2 else 1
    return apart, slices if room is None else max(1, min(slices, room // tokens))


# ---------------------------------------------------------------------------------------------------------- cost model


class Rates(NamedTuple):
    """What the kernels were measured to take on one device; see `docs/internals/linear_cross_entropy.md`."""

    product: float  # TFLOP/s of the products
    softmax: float  # ps per logit: what the epilogue of the forward product adds
    keep: float  # ps per logit: what storing its exponential adds
    again: float  # ps per logit: what the epilogue that makes the gradient adds to the product
    add: float  # ps per element of the hidden gradient that is added to, or scaled and rounded
    accumulate: float  # ps per byte of the weight's sum that a product is added to: fitted to whole steps
    launch: float  # us per kernel: filling and draining the device
    programs: int  # multiprocessors


RATES = {
    "h100": Rates(product=745, softmax=0.2, keep=0.35, again=0.6, add=2.0, accumulate=0.5, launch=15.0, programs=132),
}


def evenness(tiles: int, rates: Rates, *, halves: bool = False) -> float:
    """Time of so many equal tiles, over that of the same work spread evenly."""
    return waves(tiles, rates.programs, halves=halves) * rates.programs / max(1, tiles)


def hidden_evenness(rows: int, hidden: int, apart: bool, most: int, rates: Rates) -> float:
    """Time of hidden's gradient for so many rows of tiles, in up to `most` slices, over that of the same work spread
    evenly, without what tiles have beyond H.
    """
    units = hidden_units(rows, hidden, apart)
    if apart:
        cut, columns = hidden_cut(units, most, rates.programs), 256
        time = evenness(units * cut, rates)
    elif most > 2:
        columns, time = hidden_columns(hidden), evenness(units * most, rates)
    else:
        columns, time = hidden_columns(hidden), evenness(units, rates, halves=most == 2)
    return time * units * columns / (rows * hidden)


def predict(p: Problem, c: TritonPlan, rates: Rates = RATES["h100"]) -> float:
    """Milliseconds of forward, and of backward where gradients are wanted, by the cost model."""
    product = 2e-9 * p.tokens * p.hidden * p.vocab / rates.product
    logits = 1e-9 * p.tokens * p.vocab
    launch = 1e-3 * rates.launch
    time = product + logits * rates.softmax + 4 * launch
    if not p.any_grad:
        return time + 3 * launch * (-(-p.tokens // max(1, c.token_chunk)) - 1)
    if c.in_forward:
        return time + _in_forward(p, c, rates, product, logits)
    share = min(1.0, c.kept / max(1, p.tokens))
    recomputed = 1 - share
    columns = hidden_columns(p.hidden)
    blocks = -(-p.hidden // columns)
    padded = product * blocks * columns / p.hidden
    rows = up(p.tokens, TOKEN_TILE) // TOKEN_TILE
    kept = min(rows, c.kept // TOKEN_TILE)
    time += share * logits * rates.keep + 4 * launch
    cut = _chunk_sizes(_columns(p), c.vocab_chunk)
    if rows > kept:
        time += recomputed * (product * _evenness(cut, (rows - kept) / VOCAB_TILE, rates) + logits * rates.again)
        time += launch * len(cut)
    if p.grad_weight:
        parts = [part for chunk in cut for part in _chunk_sizes(chunk, c.weight_chunk)]
        time += padded * _evenness(parts, blocks * columns / 256 / TOKEN_TILE, rates) + launch * len(parts)
    if p.grad_hidden:
        if kept:
            time += share * product * hidden_evenness(kept, p.hidden, hidden_apart(p.hidden), 2, rates) + launch
        if rows > kept:
            uneven = hidden_evenness(rows - kept, p.hidden, hidden_apart(p.hidden), 2 if c.halves else 1, rates)
            time += recomputed * product * uneven + launch * len(cut)
            time += 1e-9 * rates.add * len(cut) * recomputed * p.tokens * p.hidden
        time += 1e-9 * rates.add * p.tokens * p.hidden + launch
    return time


def _in_forward(p: Problem, c: TritonPlan, rates: Rates, product: float, logits: float) -> float:
    """Milliseconds that the gradients take by the chunk of tokens, beside the logits' product."""
    columns = hidden_columns(p.hidden)
    tiles, blocks = -(-p.vocab // VOCAB_TILE), -(-p.hidden // columns)
    padded = product * blocks * columns / max(1, p.hidden)
    rows = [-(-size // TOKEN_TILE) for size in c.token_chunks(p.tokens)]
    launch = 1e-3 * rates.launch
    time = logits * rates.keep
    for i, n in enumerate(rows):
        share, tokens = n / sum(rows), n * TOKEN_TILE
        time += launch + share * product * (evenness(n * tiles, rates) - 1)
        if p.grad_hidden:
            apart, slices = chunk_hidden(tokens, p.hidden, sums_room(p, c, tokens, first=i == 0))
            slower = 1.02 if apart and not hidden_apart(p.hidden) else 1.0
            time += launch + share * product * slower * hidden_evenness(n, p.hidden, apart, max(2, slices), rates)
            # Each sum is zeroed, and read once more.
            time += 1e-9 * rates.add * share * p.tokens * p.hidden * (2 * slices - 1)
        if p.grad_weight:
            cut = _chunk_sizes(_columns(p), c.weight_chunk if i == 0 and c.first_chunk else _columns(p))
            time += launch * len(cut) + share * padded * _evenness(cut, blocks / TOKEN_TILE, rates)
    if p.grad_weight:
        time += 1e-9 * rates.accumulate * sum_bytes(p) * (len(rows) - 1)
    return time


def _chunk_sizes(columns: int, chunk: int) -> list[int]:
    """`columns` in chunks: all but the last are whole."""
    return [chunk] * (columns // chunk) + ([columns % chunk] if columns % chunk else [])


def _evenness(sizes: list[int], tiles_per_column: float, rates: Rates) -> float:
    """Time of one launch for each chunk, over that of the same work spread evenly.  All but the last are equal."""
    whole, last = (evenness(round(x * tiles_per_column), rates) for x in (sizes[0], sizes[-1]))
    share = sizes[-1] / sum(sizes)
    return (1 - share) * whole + share * last


# ---------------------------------------------------------------------------------------------------------------- plan


def default_scratch(p: Problem, strategy: str = "auto") -> int:
    """256 MiB or an eighth of the float32 logits, whichever is more, and at least what `strategy` needs with one useful
    chunk; without gradients 64 MiB, above the copies that are made of inputs.
    """
    if not p.any_grad:
        copies = scratch_parts(p, TritonPlan(0))["weight in the products' dtype"] + p.copied
        return max(FORWARD_SCRATCH + copies + id_bytes(p), least_scratch(p, strategy))
    useful = least_scratch(p, strategy, USEFUL_CHUNK) - id_bytes(p)
    return chunks.default_scratch(logits_bytes(p), useful) + id_bytes(p)


def least_scratch(p: Problem, strategy: str = "auto", tiles: int = SMALLEST_CHUNK) -> int:
    """Bytes of scratch that `strategy` needs with chunks of so many tiles of the vocabulary; by default, at all."""
    if not p.any_grad:
        return scratch_bytes(p, TritonPlan(min(p.tokens, TOKEN_TILE)))
    size = min(tiles * VOCAB_TILE, _columns(p))
    return scratch_bytes(p, replace(_kept(p, strategy), vocab_chunk=size, weight_chunk=size))


def _columns(p: Problem) -> int:
    return up(p.vocab, VOCAB_TILE)


def _kept(p: Problem, strategy: str) -> TritonPlan:
    """'stash': all tokens are kept; 'recompute' (and the least of 'auto'): none."""
    if strategy != "stash" or not may_hold(p):
        return TritonPlan(p.tokens)
    tokens = up(p.tokens, TOKEN_TILE)
    in_gradient = min(tokens, capacity(p))
    return TritonPlan(p.tokens, kept_in_gradient=in_gradient, kept_in_scratch=tokens - in_gradient)


def plan_for_symbols(p: Problem, strategy: str) -> TritonPlan:
    """A plan that follows from sizes without comparing them, for torch.compile where they change from call to call: the
    exponentials of all tokens kept as far as the weight gradient's memory goes.
    """
    import torch  # sizes are its symbols: it is loaded

    in_gradient = 0
    if strategy != "recompute" and capacity(p) > 0:
        in_gradient = torch.sym_min(up(p.tokens, TOKEN_TILE), capacity(p))
    size = min(USEFUL_CHUNK * VOCAB_TILE, _columns(p))
    return TritonPlan(p.tokens, size, size, in_gradient)


def _candidates(p: Problem, strategy: str, budget: int) -> Iterator[TritonPlan]:
    """Without gradients the fewest even chunks of tokens, else those of the vocabulary."""
    if not p.any_grad:
        smallest = min(p.tokens, TOKEN_TILE)
        fits = largest(lambda n: scratch_bytes(p, TritonPlan(n)) <= budget, smallest, p.tokens, TOKEN_TILE)
        yield TritonPlan(min(p.tokens, even_chunk(p.tokens, fits, TOKEN_TILE)))
    else:
        yield from sorted(_cuts(p, strategy, budget), key=lambda c: (c.vocab_chunk, c.halves))
        if strategy == "auto" and may_run_in_forward(p):
            yield from _token_cuts(p, budget)


def _cuts(p: Problem, strategy: str, budget: int) -> Iterator[TritonPlan]:
    """Chunks of the vocabulary that fill whole waves and some that are even, and as many tokens kept as fit."""
    programs = RATES["h100"].programs
    tiles = -(-p.vocab // VOCAB_TILE)
    per_tile = VOCAB_TILE // TOKEN_TILE * -(-p.hidden // 256)
    for_weight = {n * programs // per_tile for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)}
    for_weight |= {-(-tiles // n) for n in (1, 2, 4, 8, 16, 32, 64)}
    for_weight = {size for size in for_weight if 0 < size <= tiles} | {SMALLEST_CHUNK}
    again = {-(-tiles // n) for n in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)}
    again |= {1, min(2, tiles), min(3, tiles)}
    kept = _kept(p, strategy)
    if strategy != "recompute" and may_hold(p):
        # All in scratch: the weight's gradient in one launch.
        whole = _columns(p)
        yield TritonPlan(p.tokens, whole, whole, kept_in_scratch=up(p.tokens, TOKEN_TILE))
    # With nothing kept, no chunk of the weight's gradient has to be held back: it is as large as that of the logits.
    for size in again | for_weight:
        yield replace(kept, vocab_chunk=size * VOCAB_TILE, weight_chunk=size * VOCAB_TILE)
    for weight in for_weight:
        for size in again | {weight}:
            for halves in (False, True) if p.grad_hidden else (False,):

                def cut(vocab: int, weight: int = weight, halves: bool = halves) -> TritonPlan:
                    whole = min(up(vocab, weight), up(tiles, weight)) * VOCAB_TILE
                    c = replace(kept, vocab_chunk=whole, weight_chunk=weight * VOCAB_TILE, halves=halves)
                    return _keep_what_fits(p, c, budget) if strategy == "auto" and may_hold(p) else c

                c = cut(size)
                yield c
                rows = up(p.tokens, TOKEN_TILE) - c.kept
                if strategy == "auto" and 0 < rows < p.tokens:
                    # Now that it is known how many are left: chunks whose tiles fill whole waves.
                    for n in (1, 2, 4):
                        filling = n * programs * TOKEN_TILE // rows // weight * weight
                        if filling > 0:
                            yield cut(filling)


def _token_cuts(p: Problem, budget: int) -> Iterator[TritonPlan]:
    """Chunks of tokens: even ones, from the fewest that fit on, the largest, and some that fill whole waves."""

    def cut(tokens: int) -> TritonPlan:
        return TritonPlan(tokens, in_forward=True)

    rows = up(p.tokens, TOKEN_TILE)
    fits = largest(lambda n: scratch_bytes(p, cut(n)) <= budget, TOKEN_TILE, rows, TOKEN_TILE)
    fewest = -(-rows // fits)
    sizes = {up(-(-rows // n), TOKEN_TILE) for n in range(fewest, fewest + 8)}
    sizes |= {size for size in _filling(p.hidden) if 0 < size <= fits}
    sizes |= {fits - n * TOKEN_TILE for n in range(8)}
    if p.grad_weight:
        # One chunk needs no sum: its exponentials may as well be kept.  And small ones don't pay for adding.
        sizes = {size for size in sizes if SMALLEST_SUMMED <= size < rows}
    yield from (cut(size) for size in sorted(sizes) if size > 0)
    if p.grad_weight and not p.weight_grad_out and p.weight_dtype == p.dtype:
        yield from _longer_first(p, budget)


def _longer_first(p: Problem, budget: int) -> Iterator[TritonPlan]:
    """Chunks of tokens of which the first has as many more as it takes for the others to be even."""
    rows, per_tile = up(p.tokens, TOKEN_TILE), VOCAB_TILE // TOKEN_TILE * -(-p.hidden // 256)
    # Rows of the weight's gradient whose tiles fill two and four waves.
    for tiles in {max(1, n * RATES["h100"].programs // per_tile) for n in (2, 4)}:
        for size in range(SMALLEST_AFTER_FIRST, rows, up(rows // 128, TOKEN_TILE)):  # of any number of tokens as many

            def cut(first: int, size: int = size, tiles: int = tiles) -> TritonPlan:
                return TritonPlan(size, weight_chunk=tiles * VOCAB_TILE, in_forward=True, first_chunk=first)

            if scratch_bytes(p, cut(size)) > budget:
                break
            most = largest(lambda n: scratch_bytes(p, cut(n)) <= budget, size, rows - size, TOKEN_TILE)
            first = rows - -(-(rows - most) // size) * size
            if size < first < p.tokens:
                yield cut(first)


def _filling(hidden: int) -> set[int]:
    """Tokens whose hidden gradient fills whole waves, or halves of these where its units may be cut in two."""
    programs = RATES["h100"].programs
    if not hidden_apart(hidden):
        return {n * (programs // hidden_units(1, hidden, False)) * TOKEN_TILE for n in (1, 2, 3, 4, 6, 8)}
    sizes = set()
    for halves in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16):
        most = halves * programs // 2
        rows = most // hidden_units(2, hidden, True) * 2  # a unit may have two
        sizes.add((rows + (hidden_units(rows + 1, hidden, True) <= most)) * TOKEN_TILE)
    return sizes


def _keep_what_fits(p: Problem, c: TritonPlan, budget: int) -> TritonPlan:
    tokens = up(p.tokens, TOKEN_TILE)
    in_gradient = min(tokens, capacity(p))
    home = replace(c, kept_in_gradient=in_gradient)
    room = budget - scratch_bytes(p, home)
    if room < 0:
        return c
    each = max(1, scratch_bytes(p, replace(home, kept_in_scratch=TOKEN_TILE)) - budget + room)
    return replace(home, kept_in_scratch=min(tokens - in_gradient, room // each * TOKEN_TILE))


PLANNER: Planner[TritonPlan] = Planner(
    scratch_parts,
    _candidates,
    predict,
    least_scratch,
    default_scratch,
    needs,
    slack=1.007,
    many_launches=lambda p, c: p.grad_weight and c.weight_chunk * MOST_WEIGHT_CHUNKS < p.vocab and not c.in_forward,
)
plan, scratch_bytes = PLANNER.plan, PLANNER.scratch_bytes
