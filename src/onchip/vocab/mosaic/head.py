"""What plans of the 'mosaic_gpu' backend are made of: cuts of the vocabulary, and of each head formulas of memory and
time.  No framework.

The memory of the weight's gradient holds the exponentials of up to H tokens until it is computed, and scratch those of
more, as far as there is room; the other tokens' logits are recomputed in backward.  Or tokens go in chunks, whose
exponentials are in scratch for as long as it takes to make of them hidden's gradient and what they add to the weight's,
a sum of 20 or 24 bits (sums.py); a frozen weight always goes so.  The first such chunk may have up to H tokens more,
whose exponentials are in the memory of the weight's gradient until its part of that is computed, and H / 4 or H / 2
more in the memory of the sum's digits: fewer chunks are left to add.  The formulas are of what XLA allocates for a
jitted step beyond its arguments and results.
"""

from dataclasses import dataclass
from functools import lru_cache

from onchip.core.sizes import MIB, up
from onchip.vocab.chunks import in_chunks, waves
from onchip.vocab.memory import Problem, digit_bits

TOKEN_TILE, VOCAB_TILE = 128, 256
ELEMENT = 2
# What was measured: an H100's multiprocessors and TFLOP/s of the products; us that a launch adds, in an H200's trace.
PROGRAMS, PRODUCT, LAUNCH = 132, 735.0, 7.0
DEPTH = 64  # of a step
_MEMORY = 3.0  # TB/s that are read and written
# Steps that the epilogue of a tile of logits costs; an H200's trace.
_EPILOGUE = 2.5
# The product hides part of reading and writing the weight's sum, of so many tokens half: on an H100, of 512, 1024 and
# 1536 tokens 27, 34 and 47%.
_ADDITION_TOKENS = 1500
# Milliseconds in which every program takes a step.
STEP = 2e-9 * TOKEN_TILE * VOCAB_TILE * DEPTH * PROGRAMS / PRODUCT
# Tiles that fill whole waves.
FILLING = (*(PROGRAMS * n * 2**k for k in range(6) for n in (4, 5, 6, 7)), *(PROGRAMS * n for n in (1, 2, 3)))


@dataclass(frozen=True)
class MosaicPlan:
    """One way to cut a problem."""

    strategy: str
    """'forward' where nothing needs a gradient, 'stash' where exponentials are kept, else 'recompute'."""
    token_chunk: int
    """Tokens whose softmax is taken at a time: all of them, unless no gradient is wanted or it is made `by_tokens`."""
    kept_in_gradient: int = 0
    """Tokens, a multiple of 128, whose exponentials wait in the memory of the weight's gradient."""
    chunk: int = 0
    """Entries of the vocabulary, a multiple of 256, whose weight gradient is computed at a time."""
    kept_in_scratch: int = 0
    """Tokens, a multiple of 128, whose exponentials have room in scratch; with `by_tokens` those of a chunk."""
    halves: bool = False
    """Whether the other tokens' hidden gradient is summed in two halves, so that tiles fill the last wave."""
    recompute_chunks: int = 1
    """Chunks for which the other tokens' logits are recomputed at a time: those have few tiles."""
    by_tokens: bool = False
    """Whether gradients are made in forward, a chunk of tokens after the other."""
    first_chunk: int = 0
    """With `by_tokens`, tokens of the first chunk where it is larger, since some of its exponentials are kept in the
    memory of the weight's gradient; that is then computed for a `chunk` at a time."""
    kept_in_digits: int = 0
    """Of the first chunk's tokens those after `kept_in_gradient`, a multiple of 128, whose exponentials wait in the
    memory of the digits of the weight's sum."""

    @property
    def kept(self) -> int:
        return self.kept_in_gradient + self.kept_in_digits + self.kept_in_scratch

    def token_chunks(self, tokens: int) -> list[int]:
        """With `by_tokens`, how many tokens each has."""
        first = min(self.first_chunk or self.token_chunk, tokens)
        rest, last = divmod(tokens - first, self.token_chunk)
        return [first, *[self.token_chunk] * rest, *[last] * (last > 0)]

    def positions(self, tokens: int) -> int:
        """Of so many tokens, in whole tiles, or with `by_tokens` in whole chunks."""
        more = max(0, tokens - self.first_chunk)
        if not self.by_tokens:
            return up(more, TOKEN_TILE)
        # Each chunk, the last too, works on as many as there are rooms for.
        return max(self.kept, self.first_chunk + up(more, self.token_chunk) + self.kept_in_scratch - self.token_chunk)


@dataclass(frozen=True)
class Group:
    """Neighbouring chunks of the vocabulary, for which logits are recomputed together."""

    first: int
    """The entry that it begins with; where there are several groups, the first one's."""
    chunks: tuple[tuple[int, int], ...]
    """Size and number of equal chunks, in order."""
    times: int = 1
    """How many such groups there are, one after the other."""

    @property
    def size(self) -> int:
        return sum(size * number for size, number in self.chunks)


def groups(vocab: int, c: MosaicPlan, *, recomputed: bool) -> list[Group]:
    """All of the vocabulary, in order; in as few groups as there can be where no logits are recomputed."""
    return cut_groups(vocab, c.chunk, c.recompute_chunks if recomputed else 0, kept=c.kept_in_gradient > 0)


def cut_groups(vocab: int, chunk: int, together: int, *, kept: bool) -> list[Group]:
    """The same of chunks of which so many are together, 0: all; `kept`: exponentials are in the memory of the weight's
    gradient.
    """
    end = split_at(vocab, chunk) if kept else up(vocab, VOCAB_TILE)
    number, rest = divmod(end, chunk)
    together = together or max(number, 1)
    times, more = divmod(number, together)
    made = []
    if start := [(size, n) for size, n in ((rest, 1), (chunk, more)) if size * n]:
        made.append(Group(0, tuple(start)))
    if times:
        made.append(Group(rest + more * chunk, ((chunk, together),), times))
    if kept:
        made.append(Group(end, ((up(vocab, VOCAB_TILE) - end, 1),)))
    return made


def hidden_tile(hidden: int) -> int:
    """Columns of a tile along hidden: 192 where they fill a row, and 256 would leave a tenth and more of it empty."""
    narrow = hidden % 192 == 0 and up(hidden, VOCAB_TILE) > 1.1 * hidden
    return 192 if narrow else VOCAB_TILE


def split_at(vocab: int, chunk: int) -> int:
    """The vocabulary entry from which on exponentials are kept in scratch: what is kept in the gradient's memory is
    a chunk further on than its own gradient.
    """
    return max(0, vocab // VOCAB_TILE * VOCAB_TILE - chunk)


@lru_cache(maxsize=1 << 12)
def hidden_slices(tokens: int, hidden: int) -> int:
    """Of the vocabulary, for the hidden gradient of so many tokens: so many that its tiles fill the device, if that
    saves 3%.  It takes as long as if all tiles were cut in so many.
    """
    tiles = -(-tokens // TOKEN_TILE) * -(-hidden // hidden_tile(hidden))
    best, least = 1, waves(tiles, PROGRAMS)
    for slices in range(2, 9):
        taken = waves(tiles * slices, PROGRAMS) / slices
        if 1.03 * taken < least:
            best, least = slices, taken
    return best


def hidden_step(hidden: int) -> int:
    """Tokens whose hidden gradient is made at a time where exponentials are in the memory of the weight's: as many as
    have tiles that fill the device once.
    """
    return max(1, PROGRAMS // -(-hidden // hidden_tile(hidden))) * TOKEN_TILE


def _digit_words(p: Problem) -> int:
    """Words of 16 bits that the digits of each row of the weight's sum take, in whole tiles."""
    return VOCAB_TILE * digit_bits(p.dtype) // 16 * -(-p.hidden // hidden_tile(p.hidden))


def digits_bytes(p: Problem) -> int:
    """Of what 16 bits lack of the weight's sum."""
    return 2 * _digit_words(p) * up(p.vocab, VOCAB_TILE)


def digits_capacity(p: Problem) -> int:
    """Tokens whose exponentials can be kept in that memory: none under an [H, V] weight, whose digits aren't cut like
    exponentials.
    """
    return _digit_words(p) // TOKEN_TILE * TOKEN_TILE if p.weight_layout == "vh" else 0


def capacity(p: Problem) -> int:
    """Tokens whose exponentials can be kept in the memory of the weight's gradient."""
    if not (p.grad_weight and keeps(p)) or p.vocab < 2 * VOCAB_TILE:
        return 0
    return min(up(p.tokens, TOKEN_TILE), p.hidden // TOKEN_TILE * TOKEN_TILE)


def keeps(p: Problem) -> bool:
    """Whether gradients can be made of exponentials that are kept."""
    # The bias's gradient would be another pass over all of them.  What label smoothing adds is the same for all
    # entries, unless softcap's derivative or class weights multiply it.
    if p.grad_bias or (p.smoothing and (p.softcap or p.class_weight)):
        return False
    # Of several ids, or labels of every entry, too many would be added apart.  The gradient of an entropy reads logits
    # off the exponentials, as far as float16's exponents don't reach.
    return not (p.ids > 1 or p.labels or (of_entropy(p) and (p.softcap or p.dtype == "float16")))


def of_entropy(p: Problem) -> bool:
    """Whether the entropy may have an upstream gradient."""
    return p.ids > 0 and p.stats


class MosaicHead:
    """What plans of a problem are made of, whatever its tokens: bytes, and steps that each program takes."""

    def __init__(self, p: Problem) -> None:
        self.problem = p
        self.vocab, self.tiles = up(p.vocab, VOCAB_TILE), -(-p.vocab // VOCAB_TILE)
        self.softmax = _softmax_bytes(p)  # of a token
        self.digits, self.in_digits, self.hidden_step = digits_bytes(p), digits_capacity(p), hidden_step(p.hidden)
        # Of so many tokens or vocabulary entries the tiles along hidden, and of a tile of logits the steps.
        tile = hidden_tile(p.hidden)
        self.columns, self.steps = -(-p.hidden // tile), -(-p.hidden // DEPTH) + _EPILOGUE
        # Of a product that makes such tiles the steps, by the work of the largest.
        self.depth = DEPTH * VOCAB_TILE / tile
        # Chunks whose tiles of the weight's gradient leave no wave half empty, and some small ones.
        sizes = [tiles // self.columns * TOKEN_TILE for tiles in FILLING] + [VOCAB_TILE * 2**k for k in range(5)]
        self.chunk_sizes = {min(x // VOCAB_TILE * VOCAB_TILE, self.vocab) for x in sizes if x >= VOCAB_TILE}

    def fixed(self, tokens: int, positions: int) -> dict[str, int]:
        """Bytes of what every plan takes."""
        p = self.problem
        # Of each id its logit and gradient, and places in a chunk.
        vectors = 64 * p.ids * up(tokens, TOKEN_TILE) + 256 * positions
        parts = {"vectors": vectors + 4 * self.vocab * (1 + int(p.class_weight)) + MIB}
        if p.split and p.grad_hidden:
            parts["hidden gradient before it is summed"] = 4 * tokens * p.hidden
        return parts

    # ------------------------------------------------------------------------------- chunks of tokens

    @lru_cache(maxsize=1 << 14)  # noqa: B019 - those of a head are kept with it
    def of_chunk_bytes(self, in_scratch: int, in_memory: int = 0, chunk: int = 0) -> dict[str, int]:
        """Of a chunk of tokens that gradients are made of in forward, with exponentials of so many in scratch and in
        the memory of the weight's sum, which is then computed for a `chunk` at a time.
        """
        p, rows = self.problem, in_memory + in_scratch
        softmax = {"hidden rows": ELEMENT * rows * p.hidden, "softmax of each tile": self.softmax * rows}
        # One, or one of each slice, and as XLA scatters them.
        sums = 2 * min(rows, self.hidden_step) if in_memory else (1 + hidden_slices(rows, p.hidden)) * rows
        hidden = {"hidden gradient in float32": 4 * sums * p.hidden if p.grad_hidden else 0}
        weight = {"hidden rows": ELEMENT * rows * p.hidden if p.grad_weight else 0}
        exponentials = self.exponentials(in_memory, in_scratch, chunk)
        largest = max((softmax, hidden, weight), key=lambda phase: sum(phase.values()))
        return {"exponentials in scratch": exponentials} | largest

    def exponentials(self, in_memory: int, in_scratch: int, chunk: int) -> int:
        """Bytes of the exponentials of so many tokens in scratch, and of those for which other memory has no room."""
        return ELEMENT * (in_memory * (self.vocab - split_at(self.problem.vocab, chunk)) + in_scratch * self.vocab)

    def by_tokens(self, tokens: int, c: MosaicPlan) -> dict[str, int]:
        """Bytes of a plan that goes by chunks of tokens."""
        p = self.problem
        return self.fixed(tokens, c.positions(tokens)) | {
            # The first 16 bits of both sums are where the gradients will be.
            "more digits of the weight's gradient": self.digits if p.grad_weight else 0,
            "more digits of hidden's gradient": tokens * p.hidden if p.grad_hidden else 0,
            **self.of_chunk_bytes(c.kept_in_scratch, c.kept_in_gradient + c.kept_in_digits, c.chunk),
        }

    @lru_cache(maxsize=1 << 14)  # noqa: B019
    def of_chunk(self, rows: int, size: int) -> float:
        """Steps of a chunk of so many tokens; `size`: of the largest."""
        p, tiles = self.problem, -(-rows // TOKEN_TILE)
        work = waves(tiles * self.tiles, PROGRAMS) * self.steps
        if p.grad_hidden:
            slices = hidden_slices(size, p.hidden)
            work += waves(tiles * slices * self.columns, PROGRAMS) / slices * p.vocab / self.depth
        if p.grad_weight:
            work += waves(-(-p.vocab // TOKEN_TILE) * self.columns, PROGRAMS) * tiles * TOKEN_TILE / self.depth
        return work

    @lru_cache(maxsize=1 << 14)  # noqa: B019
    def of_first(self, rows: int, chunk: int) -> tuple[float, int]:
        """As `of_chunk`, of a larger first chunk, and launches beside its ten."""
        p, tiles = self.problem, -(-rows // TOKEN_TILE)
        work, launches = waves(tiles * self.tiles, PROGRAMS) * self.steps, 0
        if p.grad_hidden:
            for n in in_chunks(tiles, self.hidden_step // TOKEN_TILE):
                work += waves(n * self.columns, PROGRAMS, halves=True) * p.vocab / self.depth
        if p.grad_weight:
            cut = [x for group in cut_groups(p.vocab, chunk, 0, kept=True) for x in group.chunks]
            of_weight = sum(n * waves(-(-size // TOKEN_TILE) * self.columns, PROGRAMS) for size, n in cut)
            work += of_weight * tiles * TOKEN_TILE / self.depth
            launches = sum(n for _, n in cut) - 1
        return work, launches

    def by_tokens_ms(self, tokens: int, c: MosaicPlan) -> float:
        """Milliseconds of a plan that goes by chunks of tokens."""
        size, first = c.token_chunk, min(c.first_chunk, tokens)
        number, last = divmod(tokens - first, size)
        work, launches = number * self.of_chunk(size, size), 10 * number
        if last:
            work, number, launches = work + self.of_chunk(last, size), number + 1, launches + 10
        if first:
            of_first, more = self.of_first(first, c.chunk)
            work, number, launches = work + of_first, number + 1, launches + 10 + more
        return work * STEP + 1e-3 * LAUNCH * launches + self.moved_ms(number, size)

    def moved_ms(self, number: int, token_chunk: int) -> float:
        """Milliseconds that reading and writing the weight's sum takes, of so many chunks of tokens."""
        p = self.problem
        if not p.grad_weight:
            return 0.0
        of_gradient = ELEMENT * p.vocab * p.hidden
        of_sum = of_gradient + self.digits
        # It is added to, and in float16 read and rounded at the end.
        additions = 2 * (number - 1) / (1 + token_chunk / _ADDITION_TOKENS)
        at_the_end = of_sum + of_gradient if p.dtype == "float16" else 0
        return 1e-9 * (of_sum * additions + at_the_end) / _MEMORY

    # ------------------------------------------------------------------------------- exponentials that wait

    def keeping(self, tokens: int, c: MosaicPlan) -> dict[str, int]:
        """Bytes of a plan whose exponentials wait for backward."""
        p, rows, kept = self.problem, up(tokens, TOKEN_TILE), c.kept
        slices = 1 if c.kept_in_gradient else hidden_slices(kept, p.hidden)
        of_sum = 4 * p.hidden if p.grad_hidden else 0
        # What is left for the last chunk may be a tile more than the others.
        columns = min(self.vocab, max(c.recompute_chunks * c.chunk, c.chunk + VOCAB_TILE))
        hidden_rows = {"hidden rows": ELEMENT * rows * p.hidden}
        # One after the other: forward, hidden's gradient of the tokens that are kept, and the rest of backward.
        of_others = of_sum * (1 + int(c.halves)) * (rows - kept)
        again = {"recomputed logits' gradient": ELEMENT * (rows - kept) * columns}
        phases = (
            hidden_rows | {"softmax of each tile": self.softmax * rows},
            {"hidden gradient in float32": of_sum * slices * kept},
            hidden_rows | again | {"hidden gradient in float32": of_others},
        )
        exponentials = self.exponentials(c.kept_in_gradient, c.kept_in_scratch, c.chunk)
        largest = max(phases, key=lambda phase: sum(phase.values()))
        return self.fixed(tokens, rows) | {"exponentials in scratch": exponentials} | largest

    def of_hidden(self, rows: int, in_gradient: int, in_scratch: int, *, halves: bool) -> float:
        """Steps of hidden's gradient."""
        if not self.problem.grad_hidden:
            return 0.0
        kept = in_gradient + in_scratch
        slices = 1 if in_gradient else hidden_slices(kept, self.problem.hidden)
        of_kept = waves(kept // TOKEN_TILE * self.columns * slices, PROGRAMS, halves=slices == 1) / slices
        others = waves((rows - kept) // TOKEN_TILE * self.columns, PROGRAMS, halves=halves)
        return (of_kept + others) * self.problem.vocab / self.depth

    @lru_cache(maxsize=1 << 14)  # noqa: B019
    def of_weight(self, chunk: int) -> tuple[float, int]:
        """Steps of the weight's gradient in such chunks, for each token, and launches."""
        chunks = -(-self.problem.vocab // chunk)
        if not self.problem.grad_weight:
            return 0.0, chunks
        return chunks * waves(chunk // TOKEN_TILE * self.columns, PROGRAMS) / self.depth, chunks

    def keeping_ms(self, tokens: int, c: MosaicPlan) -> float:
        """Milliseconds of such a plan."""
        rows = up(tokens, TOKEN_TILE)
        recomputed = (rows - c.kept) // TOKEN_TILE
        of_weight, launches = self.of_weight(c.chunk)
        again = waves(rows // TOKEN_TILE * self.tiles, PROGRAMS)
        if recomputed:
            for group in groups(self.problem.vocab, c, recomputed=True):
                again += group.times * waves(recomputed * (group.size // VOCAB_TILE), PROGRAMS)
                launches += 2 * group.times
        of_hidden = self.of_hidden(rows, c.kept_in_gradient, c.kept_in_scratch, halves=c.halves)
        return (again * self.steps + of_hidden + of_weight * rows) * STEP + 1e-3 * LAUNCH * launches


def _softmax_bytes(p: Problem) -> int:
    """Of what the softmax of a token leaves for all tiles."""
    # maximum and sum; for label smoothing an offset, and what XLA makes of it; moment and argmax for statistics; with
    # labels of every entry always argmax, and two sums of those, with and without weights of classes
    partials = 2 + 2 * int(p.smoothing > 0) + 2 * int(p.stats) + p.more_stats
    if p.labels:
        partials += 2 + (2 * int(p.class_weight) if p.stats else 1)
    return 4 * -(-p.vocab // VOCAB_TILE) * partials


def head_of(p: Problem) -> MosaicHead:
    return _head(p.head)


@lru_cache(maxsize=1024)
def _head(p: Problem) -> MosaicHead:
    return MosaicHead(p)
