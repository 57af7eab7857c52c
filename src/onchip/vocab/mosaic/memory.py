"""How the 'mosaic_gpu' backend cuts a problem: memory formulas and the choice of a plan.  Imports no framework.

Either the memory of the weight's gradient holds the exponentials of up to H tokens until that gradient is computed, and
scratch those of more, as far as there is room; the other tokens' logits are recomputed in backward.  Or tokens go in
chunks, whose exponentials are in scratch until hidden's gradient and the chunk's part of the weight's are made from
them; the weight's is a sum of 20 or 24 bits (sums.py).  A frozen weight always goes this way.  The first chunk may have
up to H tokens more, with exponentials in the memory of the weight's gradient until the chunk's part of it is computed,
and H / 4 or H / 2 more in the memory of the sum's digits, so that fewer chunks are left to add.
The formulas give what XLA allocates for a jitted step beyond its arguments and results.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from onchip.core.sizes import MIB
from onchip.core.sizes import up as up
from onchip.vocab import chunks
from onchip.vocab.chunks import Fastest, Planner, even_chunk, in_chunks, largest, waves
from onchip.vocab.memory import Problem, digit_bits, logits_bytes, needs

TOKEN_TILE, VOCAB_TILE = 128, 256
FORWARD_SCRATCH = 64 * MIB
# Tokens whose softmax is taken at a time without gradients, at least, unless a smaller budget is given: each such chunk
# reads all of the weight.
_FORWARD_TOKENS = 1024
_ELEMENT = 2
# What was measured: an H100's multiprocessors and TFLOP/s of the products; us that a launch adds, in an H200's trace.
_PROGRAMS, PRODUCT, _LAUNCH = 132, 735.0, 7.0
_DEPTH = 64  # of a step
_MEMORY = 3.0  # TB/s that are read and written
# Steps that the epilogue of a tile of logits costs; an H200's trace.
_EPILOGUE = 2.5
# The product hides part of reading and writing the weight's sum, of so many tokens half: on an H100, of 512, 1024 and
# 1536 tokens 27, 34 and 47%.
_ADDITION_TOKENS = 1500
# Tokens of a weight's product up to which a fourth stage serves better than leaving whole tiles at once: on an H100 it
# is 6% faster for 512 tokens and 5% where 512 to 1536 are added to a sum, alike for 2048, and 2% slower for 4096.
_SHORT = 2048
# Milliseconds in which every program takes a step.
_STEP = 2e-9 * TOKEN_TILE * VOCAB_TILE * _DEPTH * _PROGRAMS / PRODUCT


@dataclass(frozen=True)
class MosaicPlan:
    """One way to cut a problem."""

    strategy: str
    """'forward' if nothing needs a gradient, 'stash' if exponentials are kept, otherwise 'recompute'."""
    token_chunk: int
    """Tokens whose softmax is taken at a time: all of them, unless no gradient is wanted or it is made `by_tokens`."""
    kept_in_gradient: int = 0
    """How many tokens' exponentials wait in the memory of the weight's gradient; a multiple of 128."""
    chunk: int = 0
    """For how many vocabulary entries the weight's gradient is computed at a time; a multiple of 256."""
    kept_in_scratch: int = 0
    """How many tokens' exponentials wait in scratch, a multiple of 128; with `by_tokens`, a chunk of them at a time."""
    halves: bool = False
    """Whether the other tokens' hidden gradient is summed in two halves, so that tiles fill the last wave."""
    recompute_chunks: int = 1
    """For how many chunks the other tokens' logits are recomputed at a time, since one chunk has few tiles."""
    by_tokens: bool = False
    """Whether gradients are made in forward, one chunk of tokens after the other."""
    first_chunk: int = 0
    """With `by_tokens`, the tokens of the first chunk if it is larger than the others, since some of its exponentials
    are kept in the memory of the weight's gradient; that is then computed for a `chunk` at a time."""
    kept_in_digits: int = 0
    """How many of the first chunk's tokens, those after `kept_in_gradient`, have their exponentials wait in the memory
    of the digits of the weight's sum; a multiple of 128."""

    @property
    def kept(self) -> int:
        return self.kept_in_gradient + self.kept_in_digits + self.kept_in_scratch

    def token_chunks(self, tokens: int) -> list[int]:
        """With `by_tokens`, the number of tokens in each chunk."""
        first = min(self.first_chunk or self.token_chunk, tokens)
        rest, last = divmod(tokens - first, self.token_chunk)
        return [first, *[self.token_chunk] * rest, *[last] * (last > 0)]

    def positions(self, tokens: int) -> int:
        """The positions for so many tokens, in whole tiles or, with `by_tokens`, in whole chunks."""
        more = max(0, tokens - self.first_chunk)
        return self.first_chunk + up(more, self.token_chunk if self.by_tokens else TOKEN_TILE)


@dataclass(frozen=True)
class Group:
    """Neighbouring chunks of the vocabulary, for which logits are recomputed together."""

    first: int
    """The entry that it begins with; if there are several groups, the first one's."""
    chunks: tuple[tuple[int, int], ...]
    """Size and number of equal chunks, in order."""
    times: int = 1
    """How many such groups there are, one after the other."""
    in_spare: bool = False
    """Whether exponentials of its one chunk are kept in scratch."""

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
        made.append(Group(end, ((up(vocab, VOCAB_TILE) - end, 1),), in_spare=True))
    return made


def hidden_tile(hidden: int) -> int:
    """Columns of a tile along hidden: 192 if they fill a row and 256 would leave at least a tenth of it empty."""
    narrow = hidden % 192 == 0 and up(hidden, VOCAB_TILE) > 1.1 * hidden
    return 192 if narrow else VOCAB_TILE


def heuristic_tiles(
    hidden: int = VOCAB_TILE, weight_layout: str = "vh", tokens: int = 2 * _SHORT
) -> dict[str, dict[str, int]]:
    """The kernels' tiles, as `MosaicConfig.from_numbers` takes them; `tokens` are those of the
    weight's product.

    Among those that were tried they are the fastest, or within 3% of it, on an H100 and, for stages and slots, an H200.
    Tiles of 192 columns are a fifth faster in hidden's product and 6% in weight's for H=576, in chunks of 2048 tokens.
    """
    along_hidden = {"tile_n": hidden_tile(hidden)}
    plain = {"tile_m": 128, "tile_n": 256, "tile_k": 64, "group": 8, "split_n": 0, "in_flight": 1}
    deep = plain | {"stages": 4, "staging_slots": 2}
    # A whole tile leaves at once: on an H200 1 to 2% faster, where there are many tiles and a product is long.
    whole = plain | {"stages": 3, "staging_slots": 4, "group": 16}
    of_weight = deep if tokens <= _SHORT else whole
    return {
        "mosaic_softmax_tiles": whole,
        "mosaic_gradient_tiles": deep | {"split_n": 1},
        "mosaic_weight_product": of_weight | (along_hidden if weight_layout == "vh" else {}),
        "mosaic_hidden_product": deep | along_hidden,
    }


def label_tiles() -> dict[str, int]:
    """How tiles of logits are cut beside soft labels for every entry, which take shared memory too."""
    return heuristic_tiles()["mosaic_softmax_tiles"] | {"staging_slots": 1}


def refusal(p: Problem, platform: str, weight_layout: str) -> str | None:
    """Why the kernels can't serve the call, whatever the GPU, or None.  `platform` is "cpu", "gpu" or "tpu"."""
    if p.dtype == "float64":
        return "it takes no float64; pass backend='xla', or 'auto'"
    if platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {platform!r}"
    if p.dtype == "float32":
        return "its products take bfloat16 or float16; float32 operands would be rounded to tf32"
    if p.labels == "float64":
        return "it reads labels of 16 or 32 bits; pass the target in float32, or backend='xla'"
    # Mosaic cuts matrices in device memory into tiles of 8 rows and 128 bytes.  Where one has a single column of tiles,
    # what is copied to columns beyond lands in that one.
    vocab = 8 if weight_layout == "vh" else 64
    if p.hidden % 64 or p.vocab % vocab or p.hidden < 128 or p.vocab < 2 * vocab:
        needs = "H to be a multiple of 64 from 128 on, and V of 8 from 16 on (with weight_layout='hv', of 64 from 128)"
        return f"it needs {needs}; got H={p.hidden} and V={p.vocab}"
    return None


def split_at(vocab: int, chunk: int) -> int:
    """The vocabulary entry from which exponentials are kept in scratch: in the gradient's memory they lie a chunk
    further on than their own gradient.
    """
    return max(0, vocab // VOCAB_TILE * VOCAB_TILE - chunk)


@lru_cache(maxsize=1 << 12)
def hidden_slices(tokens: int, hidden: int) -> int:
    """In how many slices of the vocabulary the hidden gradient of so many tokens is made: enough for its tiles to fill
    the device, if that saves 3%.  It takes as long as if all tiles were cut into that many.
    """
    tiles = -(-tokens // TOKEN_TILE) * -(-hidden // hidden_tile(hidden))
    best, least = 1, waves(tiles, _PROGRAMS)
    for slices in range(2, 9):
        taken = waves(tiles * slices, _PROGRAMS) / slices
        if 1.03 * taken < least:
            best, least = slices, taken
    return best


def hidden_step(hidden: int) -> int:
    """How many tokens' hidden gradient is made at a time if exponentials are in the memory of the weight's gradient: as
    many as have tiles that fill the device once.
    """
    return max(1, _PROGRAMS // -(-hidden // hidden_tile(hidden))) * TOKEN_TILE


def _digit_words(p: Problem) -> int:
    """Words of 16 bits that the digits of each row of the weight's sum take, in whole tiles."""
    return VOCAB_TILE * digit_bits(p.dtype) // 16 * -(-p.hidden // hidden_tile(p.hidden))


def digits_bytes(p: Problem) -> int:
    """Bytes of the digits: what 16 bits lack of the weight's sum."""
    return 2 * _digit_words(p) * up(p.vocab, VOCAB_TILE)


def digits_capacity(p: Problem) -> int:
    """How many tokens' exponentials fit in that memory: none under an [H, V] weight, whose digits aren't cut as
    exponentials are.
    """
    return _digit_words(p) // TOKEN_TILE * TOKEN_TILE if p.weight_layout == "vh" else 0


def capacity(p: Problem) -> int:
    """How many tokens' exponentials fit in the memory of the weight's gradient."""
    if not (p.grad_weight and _keeps(p)) or p.vocab < 2 * VOCAB_TILE:
        return 0
    return min(up(p.tokens, TOKEN_TILE), p.hidden // TOKEN_TILE * TOKEN_TILE)


def _keeps(p: Problem) -> bool:
    """Whether gradients can be made from exponentials that are kept."""
    # The bias's gradient would be another pass over all of them.  What label smoothing adds is the same for all
    # entries, unless softcap's derivative or class weights multiply it.
    if p.grad_bias or (p.smoothing and (p.softcap or p.class_weight)):
        return False
    # With several ids, or labels of every entry, too many would be added apart.  An entropy's gradient reads logits
    # off the exponentials, as far as float16's exponents don't reach.
    return not (p.ids > 1 or p.labels or (_of_entropy(p) and (p.softcap or p.dtype == "float16")))


def _of_entropy(p: Problem) -> bool:
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
        self.columns, self.steps = -(-p.hidden // tile), -(-p.hidden // _DEPTH) + _EPILOGUE
        # Of a product that makes such tiles the steps, by the work of the largest.
        self.depth = _DEPTH * VOCAB_TILE / tile
        # Chunks whose tiles of the weight's gradient leave no wave half empty, and some small ones.
        sizes = [tiles // self.columns * TOKEN_TILE for tiles in _FILLING] + [VOCAB_TILE * 2**k for k in range(5)]
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
    def chunk(self, rows: int, in_gradient: int = 0, in_digits: int = 0, chunk: int = 0) -> dict[str, int]:
        """Bytes of one chunk of tokens that gradients are made of in forward; of the larger one, exponentials that are
        in the memory of the weight's gradient and of digits, and of what chunks that is computed.
        """
        p, in_memory = self.problem, in_gradient + in_digits
        at_a_time = max(in_gradient, in_digits, rows - in_memory)
        softmax = {"hidden rows": _ELEMENT * at_a_time * p.hidden, "softmax of each tile": self.softmax * rows}
        # One, or one of each slice, and as XLA scatters them.
        sums = 2 * min(rows, self.hidden_step) if in_memory else (1 + hidden_slices(rows, p.hidden)) * rows
        hidden = {"hidden gradient in float32": 4 * sums * p.hidden if p.grad_hidden else 0}
        weight = {"hidden rows": _ELEMENT * rows * p.hidden if p.grad_weight else 0}
        exponentials = self.exponentials(in_memory, rows - in_memory, chunk)
        largest = max((softmax, hidden, weight), key=lambda phase: sum(phase.values()))
        return {"exponentials in scratch": exponentials} | largest

    def exponentials(self, in_memory: int, in_scratch: int, chunk: int) -> int:
        """Bytes of the exponentials of so many tokens in scratch, and of those for which other memory has no room."""
        return _ELEMENT * (in_memory * (self.vocab - split_at(self.problem.vocab, chunk)) + in_scratch * self.vocab)

    def by_tokens(
        self, tokens: int, rows: int, first: int = 0, in_gradient: int = 0, in_digits: int = 0, chunk: int = 0
    ) -> dict[str, int]:
        """Bytes of a plan that goes by chunks of tokens."""
        p, made, gaps = self.problem, self.chunk(rows), 0
        if first:
            longer = self.chunk(first, in_gradient, in_digits, chunk)
            smaller = min(first, self.hidden_step)
            if sum(longer.values()) >= sum(made.values()):
                made, smaller = longer, rows
            # XLA lays buffers of two sizes out with gaps: on an H200 13 MB more than the larger chunk's were needed
            # where a sum of the other one's is 21, and 0.4 where it is 6.
            gaps = 4 * smaller * p.hidden
        return self.fixed(tokens, first + up(max(0, tokens - first), rows)) | {
            # The first 16 bits of both sums are where the gradients will be.
            "more digits of the weight's gradient": self.digits if p.grad_weight else 0,
            "more digits of hidden's gradient": tokens * p.hidden if p.grad_hidden else 0,
            "gaps": gaps,
            **made,
        }

    @lru_cache(maxsize=1 << 14)  # noqa: B019
    def of_chunk(self, rows: int, size: int) -> float:
        """Steps of a chunk of so many tokens; `size`: of the largest."""
        p, tiles = self.problem, -(-rows // TOKEN_TILE)
        work = waves(tiles * self.tiles, _PROGRAMS) * self.steps
        if p.grad_hidden:
            slices = hidden_slices(size, p.hidden)
            work += waves(tiles * slices * self.columns, _PROGRAMS) / slices * p.vocab / self.depth
        if p.grad_weight:
            work += waves(-(-p.vocab // TOKEN_TILE) * self.columns, _PROGRAMS) * tiles * TOKEN_TILE / self.depth
        return work

    @lru_cache(maxsize=1 << 14)  # noqa: B019
    def of_first(self, rows: int, chunk: int) -> tuple[float, int]:
        """As `of_chunk`, of a larger first chunk, and launches beside its ten."""
        p, tiles = self.problem, -(-rows // TOKEN_TILE)
        work, launches = waves(tiles * self.tiles, _PROGRAMS) * self.steps, 0
        if p.grad_hidden:
            for n in in_chunks(tiles, self.hidden_step // TOKEN_TILE):
                work += waves(n * self.columns, _PROGRAMS, halves=True) * p.vocab / self.depth
        if p.grad_weight:
            cut = [x for group in cut_groups(p.vocab, chunk, 0, kept=True) for x in group.chunks]
            of_weight = sum(n * waves(-(-size // TOKEN_TILE) * self.columns, _PROGRAMS) for size, n in cut)
            work += of_weight * tiles * TOKEN_TILE / self.depth
            launches = sum(n for _, n in cut) - 1
        return work, launches

    def by_tokens_ms(self, tokens: int, size: int, first: int = 0, chunk: int = 0) -> float:
        """Milliseconds of a plan that goes by chunks of tokens."""
        number, last = divmod(tokens - min(first, tokens), size)
        work, launches = number * self.of_chunk(size, size), 10 * number
        if last:
            work, number, launches = work + self.of_chunk(last, size), number + 1, launches + 10
        if first:
            of_first, more = self.of_first(min(first, tokens), chunk)
            work, number, launches = work + of_first, number + 1, launches + 10 + more
        return work * _STEP + 1e-3 * _LAUNCH * launches + self.moved_ms(number, size)

    def moved_ms(self, number: int, token_chunk: int) -> float:
        """Milliseconds that reading and writing the weight's sum takes, of so many chunks of tokens."""
        p = self.problem
        if not p.grad_weight:
            return 0.0
        of_gradient = _ELEMENT * p.vocab * p.hidden
        of_sum = of_gradient + self.digits
        # It is added to, and in float16 read and rounded at the end.
        additions = 2 * (number - 1) / (1 + token_chunk / _ADDITION_TOKENS)
        at_the_end = of_sum + of_gradient if p.dtype == "float16" else 0
        return 1e-9 * (of_sum * additions + at_the_end) / _MEMORY

    # ------------------------------------------------------------------------------- exponentials that wait

    def keeping(self, tokens: int, in_gradient: int, in_scratch: int, *, halves: bool) -> "Keeping":
        """Of plans whose exponentials wait for backward."""
        p, rows, kept = self.problem, up(tokens, TOKEN_TILE), in_gradient + in_scratch
        slices = 1 if in_gradient else hidden_slices(kept, p.hidden)
        of_sum = 4 * p.hidden if p.grad_hidden else 0
        return Keeping(
            self,
            sum(self.fixed(tokens, rows).values()),
            in_gradient,
            in_scratch,
            _ELEMENT * rows * p.hidden,
            self.softmax * rows,
            of_sum * slices * kept,
            of_sum * (1 + int(halves)) * (rows - kept),
            _ELEMENT * (rows - kept),
        )

    def of_hidden(self, rows: int, in_gradient: int, in_scratch: int, *, halves: bool) -> float:
        """Steps of hidden's gradient."""
        if not self.problem.grad_hidden:
            return 0.0
        kept = in_gradient + in_scratch
        slices = 1 if in_gradient else hidden_slices(kept, self.problem.hidden)
        of_kept = waves(kept // TOKEN_TILE * self.columns * slices, _PROGRAMS, halves=slices == 1) / slices
        others = waves((rows - kept) // TOKEN_TILE * self.columns, _PROGRAMS, halves=halves)
        return (of_kept + others) * self.problem.vocab / self.depth

    @lru_cache(maxsize=1 << 14)  # noqa: B019
    def of_weight(self, chunk: int) -> tuple[float, int]:
        """Steps of the weight's gradient in such chunks, for each token, and launches."""
        chunks = -(-self.problem.vocab // chunk)
        if not self.problem.grad_weight:
            return 0.0, chunks
        return chunks * waves(chunk // TOKEN_TILE * self.columns, _PROGRAMS) / self.depth, chunks

    def keeping_ms(
        self, tokens: int, in_gradient: int, in_scratch: int, chunk: int, together: int, *, halves: bool
    ) -> float:
        """Milliseconds of such a plan."""
        rows = up(tokens, TOKEN_TILE)
        recomputed = (rows - in_gradient - in_scratch) // TOKEN_TILE
        of_weight, launches = self.of_weight(chunk)
        again = waves(rows // TOKEN_TILE * self.tiles, _PROGRAMS)
        if recomputed:
            for group in cut_groups(self.problem.vocab, chunk, together, kept=in_gradient > 0):
                again += group.times * waves(recomputed * (group.size // VOCAB_TILE), _PROGRAMS)
                launches += 2 * group.times
        work = again * self.steps + self.of_hidden(rows, in_gradient, in_scratch, halves=halves) + of_weight * rows
        return work * _STEP + 1e-3 * _LAUNCH * launches


class Keeping(NamedTuple):
    """Bytes of plans whose exponentials wait for backward, of so many tokens."""

    head: MosaicHead
    fixed: int
    in_gradient: int
    in_scratch: int
    hidden_rows: int
    softmax: int
    of_kept: int  # sums of hidden's gradient, of what is kept and of the other tokens
    of_others: int
    of_column: int  # of each entry of the vocabulary whose logits are computed again at a time

    def again(self, chunk: int, together: int) -> int:
        """Of logits that are computed again."""
        # What is left for the last chunk may be a tile more than the others.
        return self.of_column * min(self.head.vocab, max(together * chunk, chunk + VOCAB_TILE))

    def size(self, chunk: int, together: int) -> int:
        again = self.hidden_rows + self.of_others + self.again(chunk, together)
        exponentials = self.head.exponentials(self.in_gradient, self.in_scratch, chunk)
        return self.fixed + exponentials + max(self.hidden_rows + self.softmax, self.of_kept, again)

    def parts(self, chunk: int, together: int) -> dict[str, int]:
        hidden_rows = {"hidden rows": self.hidden_rows}
        again = {"recomputed logits' gradient": self.again(chunk, together)}
        of_kept, of_others = ({"hidden gradient in float32": size} for size in (self.of_kept, self.of_others))
        # One after the other: forward, hidden's gradient of the tokens that are kept, and the rest of backward.
        forward, rest = hidden_rows | {"softmax of each tile": self.softmax}, hidden_rows | again | of_others
        exponentials = self.head.exponentials(self.in_gradient, self.in_scratch, chunk)
        largest = max((forward, of_kept, rest), key=lambda phase: sum(phase.values()))
        return {"exponentials in scratch": exponentials} | largest

    def largest(self, budget: int) -> int:
        """Chunk that may fit."""
        if self.size(self.head.vocab, 1) <= budget:
            return self.head.vocab
        room = budget - self.fixed - self.head.exponentials(self.in_gradient, self.in_scratch, 0)
        of_entry, beside = _ELEMENT * self.in_gradient, max(self.hidden_rows + self.softmax, self.of_kept)
        if room < beside:
            return 0
        again = self.hidden_rows + self.of_others + self.of_column * VOCAB_TILE
        most = (room - again) // max(1, of_entry + self.of_column)
        most = min(most, (room - beside) // of_entry) if of_entry else most
        return most // VOCAB_TILE * VOCAB_TILE


@lru_cache(maxsize=1024)
def head_of(p: Problem) -> MosaicHead:
    return _head(replace(p, tokens=0, copied=0))


@lru_cache(maxsize=1024)
def _head(p: Problem) -> MosaicHead:
    return MosaicHead(p)


def scratch_parts(p: Problem, c: MosaicPlan) -> dict[str, int]:
    """Peak temporary memory in bytes, part by part."""
    head, rows = head_of(p), up(c.token_chunk, TOKEN_TILE)
    if c.strategy == "forward":
        of_rows = {"hidden rows": _ELEMENT * rows * p.hidden, "softmax of each tile": head.softmax * rows}
        return head.fixed(p.tokens, up(p.tokens, TOKEN_TILE)) | of_rows
    if c.by_tokens:
        return head.by_tokens(p.tokens, rows, c.first_chunk, c.kept_in_gradient, c.kept_in_digits, c.chunk)
    keeping = head.keeping(p.tokens, c.kept_in_gradient, c.kept_in_scratch, halves=c.halves)
    return head.fixed(p.tokens, rows) | keeping.parts(c.chunk, c.recompute_chunks)


def _softmax_bytes(p: Problem) -> int:
    """Of what the softmax of a token leaves for all tiles."""
    # maximum and sum; an offset for label smoothing; moment and argmax for statistics; with labels of every entry
    # always argmax, and two sums of those, with and without weights of classes
    partials = 2 + int(p.smoothing > 0) + 2 * int(p.stats) + p.more_stats
    if p.labels:
        partials += 2 + (2 * int(p.class_weight) if p.stats else 1)
    return 4 * -(-p.vocab // VOCAB_TILE) * partials


def predict(p: Problem, c: MosaicPlan) -> float:
    """Milliseconds of forward, and of backward where gradients are wanted, by a simple cost model."""
    if c.strategy == "forward":
        product = 2e-9 * p.tokens * p.hidden * p.vocab / PRODUCT
        return product + 1e-3 * _LAUNCH * -(-p.tokens // c.token_chunk)
    if c.by_tokens:
        return head_of(p).by_tokens_ms(p.tokens, c.token_chunk, c.first_chunk, c.chunk)
    cut = c.kept_in_scratch, c.chunk, c.recompute_chunks
    return head_of(p).keeping_ms(p.tokens, c.kept_in_gradient, *cut, halves=c.halves)


def default_scratch(p: Problem, strategy: str) -> int:
    """256 MiB or an eighth of the float32 logits, whichever is more, and at least what one useful chunk needs; without
    gradients 64 MiB, or what 1024 tokens at a time need.
    """
    if not p.any_grad:
        least = MosaicPlan("forward", min(up(p.tokens, TOKEN_TILE), _FORWARD_TOKENS))
        return max(FORWARD_SCRATCH, scratch_bytes(p, least))
    return chunks.default_scratch(logits_bytes(p), useful_scratch(p, strategy))


def useful_scratch(p: Problem, strategy: str) -> int:
    """What gradients need with chunks large enough to cost little time."""
    return scratch_bytes(p, _cut(p, strategy, min(16 * VOCAB_TILE, up(p.vocab, VOCAB_TILE))))


def _kept(p: Problem, strategy: str) -> int:
    """Tokens in the memory of the weight's gradient."""
    return 0 if strategy == "recompute" else capacity(p)


def _cut(p: Problem, strategy: str, chunk: int) -> MosaicPlan:
    if kept := _kept(p, strategy):
        chunk = min(chunk, p.vocab // VOCAB_TILE // 2 * VOCAB_TILE)
    return MosaicPlan("stash" if kept else "recompute", p.tokens, kept, chunk)


def least_scratch(p: Problem, strategy: str) -> int:
    """Bytes of scratch that a strategy needs to run at all."""
    return min(scratch_bytes(p, c) for each in _strategies(strategy) for c in _smallest(p, each))


def _strategies(strategy: str) -> tuple[str, ...]:
    return ("stash", "recompute") if strategy == "auto" else (strategy,)


def _smallest(p: Problem, strategy: str) -> Iterator[MosaicPlan]:
    """The plans of one strategy that may need least memory."""
    rows = up(p.tokens, TOKEN_TILE)
    if not p.any_grad:
        yield MosaicPlan("forward", TOKEN_TILE)
        return
    if _goes_by_tokens(p, strategy):
        yield _by_tokens(p, TOKEN_TILE)
    if kept := _cut(p, strategy, VOCAB_TILE).kept_in_gradient:
        yield _in_scratch(p)
    yield from (_cut(p, strategy, size) for size in _chunk_sizes(head_of(p), rows - kept))


def _goes_by_tokens(p: Problem, strategy: str) -> bool:
    # Forward doesn't know each token's upstream gradient; hidden's gradient can be multiplied by it later.
    # And where the vocabulary is split over devices no chunk's softmax is known before all are.
    later = p.split or (p.grad_weight and p.per_token_loss) or _of_entropy(p)
    return strategy == "stash" and _keeps(p) and not later


def _by_tokens(p: Problem, size: int) -> MosaicPlan:
    rows = up(p.tokens, TOKEN_TILE)
    return MosaicPlan("stash", size, chunk=up(p.vocab, VOCAB_TILE), kept_in_scratch=rows, by_tokens=True)


def _in_scratch(p: Problem) -> MosaicPlan:
    """The plan that keeps all exponentials in scratch and makes the weight's gradient in one launch."""
    return MosaicPlan("stash", p.tokens, chunk=up(p.vocab, VOCAB_TILE), kept_in_scratch=up(p.tokens, TOKEN_TILE))


# Plans that take up to so many times the least pass for equally fast.
SLACK = 1.002


class MosaicSearch(Fastest[dict[str, Any]]):
    """Plans of a problem with gradients, as their fields."""

    def __init__(self, p: Problem, budget: int) -> None:
        super().__init__(SLACK)
        self.problem, self.budget, self.head = p, budget, head_of(p)
        self.tokens, self.rows = p.tokens, up(p.tokens, TOKEN_TILE)
        # Tokens whose exponentials take all of the budget.
        self.most = budget // (_ELEMENT * p.vocab)
        # By tokens, those of a chunk whose exponentials and softmax take all of it.
        fixed = sum(self.head.fixed(self.tokens, self.rows).values()) + self.head.digits * p.grad_weight
        self.of_token = _ELEMENT * self.head.vocab + self.head.softmax
        self.in_chunk = max(0, budget - fixed - p.tokens * p.hidden * p.grad_hidden) // self.of_token
        # Milliseconds of products whose tiles fill whole waves.
        of_tile, head = _STEP / _PROGRAMS * (self.rows // TOKEN_TILE) * (1 - 1e-9), self.head
        self.logits = of_tile * head.tiles * head.steps
        self.hidden = of_tile * head.columns * p.vocab / head.depth * p.grad_hidden
        of_weight = -(-p.vocab // TOKEN_TILE) * TOKEN_TILE / head.depth * p.grad_weight
        self.weight = of_tile * head.columns * of_weight

    def fits(self, cost: float, size: int, **fields: Any) -> bool:
        """Whether it does; if it may be among the fastest, it is noted."""
        if size > self.budget:
            return False
        self.add(cost, (size, cost), fields)
        return True

    def by_tokens_bound(self, number: int, size: int) -> float:
        """With gradients in forward, in so many chunks of tokens, no plan takes less."""
        products = self.logits + self.hidden + self.weight
        return products + 1e-3 * _LAUNCH * 10 * number + self.head.moved_ms(number, size)

    def by_tokens(self) -> None:
        """Chunks of tokens: the fewest even chunks, and some small ones."""
        head, tokens, before = self.head, self.tokens, 0
        most = max(self.in_chunk, TOKEN_TILE)
        numbers = range(max(1, self.rows // (most + TOKEN_TILE)), 65)
        for size in (*(up(-(-self.rows // number), TOKEN_TILE) for number in numbers), TOKEN_TILE):
            if size > most or size == before:
                continue
            if self.by_tokens_bound(-(-tokens // size), size) > self.bound:
                break
            cost, before = head.by_tokens_ms(tokens, size), size
            if cost <= self.bound:
                fields = {"token_chunk": size, "chunk": head.vocab, "kept_in_scratch": self.rows, "by_tokens": True}
                self.fits(cost, sum(head.by_tokens(tokens, size).values()), strategy="stash", **fields)

    def longer_first(self) -> None:
        """Chunks of tokens of which the first has so many more that as few others as possible are left."""
        p, head, rows, kept = self.problem, self.head, self.rows, capacity(self.problem)
        if not kept:
            return
        # Of the first chunk: what is beside a chunk's exponentials, and those that are in other memory.
        most = max(
            kept + head.in_digits, self.in_chunk + (kept + head.in_digits) * _ELEMENT * head.vocab // self.of_token
        )
        listed, products = [], self.logits + self.hidden + self.weight
        # Entries whose tiles of the weight's gradient fill two and four waves.
        filling = (_PROGRAMS * n // head.columns * TOKEN_TILE // VOCAB_TILE * VOCAB_TILE for n in (2, 4))
        chunks = {min(max(chunk, VOCAB_TILE), p.vocab // VOCAB_TILE // 2 * VOCAB_TILE) for chunk in filling}

        def bound_of(number: int, size: int) -> float:
            """With so many chunks after the first."""
            others = number * (_STEP * head.of_chunk(size, size) * (1 - 1e-9) - products * size / rows)
            return products + others + 1e-3 * _LAUNCH * 10 * (1 + number) + head.moved_ms(1 + number, size)

        for size in range(min(rows - kept - TOKEN_TILE, self.in_chunk) // TOKEN_TILE * TOKEN_TILE, 0, -TOKEN_TILE):
            others = max(1, -(-(rows - most) // size))
            if self.by_tokens_bound(1 + others, size) > self.bound:
                break
            listed += [(bound_of(others, size), others, size, chunk) for chunk in chunks]
        for bound, others, size, chunk in sorted(listed):
            if bound > self.bound:
                break
            for number in range(others, (rows - max(size, kept) - 1) // size + 1):
                if bound_of(number, size) > self.bound:
                    break
                first = rows - number * size
                fields = {"token_chunk": size, "first_chunk": first, "chunk": chunk, "kept_in_gradient": kept}
                fields["kept_in_digits"] = in_digits = min(first - kept, head.in_digits)
                taken = sum(head.by_tokens(self.tokens, size, first, kept, in_digits, chunk).values())
                cost, left = head.by_tokens_ms(self.tokens, size, first, chunk), rows - kept - in_digits
                if self.fits(cost, taken, strategy="stash", by_tokens=True, kept_in_scratch=left, **fields):
                    break

    def keep(self, strategy: str) -> None:
        """Try plans that keep exponentials until backward, for as many tokens as the gradient's memory has room for and
        some more; the other tokens' logits are computed again.
        """
        head, rows, kept = self.head, self.rows, _kept(self.problem, strategy)
        if kept:  # all in scratch: the weight's gradient in one launch
            of_all = head.keeping(self.tokens, 0, rows, halves=False)
            self.keep_chunk(of_all, head.vocab, head.vocab, halves=False)
        # More than that fits no budget; and a few dozen are enough.
        most, listed = min(rows - kept, self.most) if kept else 0, []
        step = max(TOKEN_TILE, up(-(-most // 24), TOKEN_TILE))
        forward = waves(rows // TOKEN_TILE * head.tiles, _PROGRAMS) * head.steps
        for in_scratch in range(0, most + 1, step):
            of_hidden = min(head.of_hidden(rows, kept, in_scratch, halves=halves) for halves in (False, True))
            again = self.logits * (rows - kept - in_scratch) / rows
            listed.append(((forward + of_hidden) * _STEP * (1 - 1e-9) + again, in_scratch))
        for bound, in_scratch in sorted(listed):
            if bound + self.weight > self.bound:
                break
            self.keep_some(kept, in_scratch, bound)

    def keep_some(self, kept: int, in_scratch: int, bound: float) -> None:
        """Chunks of the vocabulary; `bound` is without the weight's gradient."""
        p, head, recomputed = self.problem, self.head, self.rows - kept - in_scratch
        ways = (False, True) if recomputed and p.grad_hidden else (False,)
        bytes_of = [head.keeping(self.tokens, kept, in_scratch, halves=halves) for halves in ways]
        most = p.vocab // VOCAB_TILE // 2 * VOCAB_TILE if kept else head.vocab
        fits, launch, listed = bytes_of[0].largest(self.budget), 1e-3 * _LAUNCH, []
        if fits < VOCAB_TILE or bound + self.weight + launch * -(-p.vocab // fits) > self.bound:
            return
        of_rows = _STEP * self.rows * (1 - 1e-9)
        for size in _chunk_sizes(head, recomputed):
            if size <= fits or most <= fits:
                of_weight, launches = head.of_weight(size)
                least = bound + of_rows * of_weight + launch * launches
                if least <= self.bound:
                    listed.append((least, size))
        for least, size in sorted(listed):
            if least > self.bound:
                break
            for halves, of_way in zip(ways, bytes_of, strict=True):
                self.keep_chunk(of_way, min(size, most), size, halves=halves)

    def keep_chunk(self, of_way: "Keeping", chunk: int, size: int, *, halves: bool) -> None:
        """Such chunks, or `size`, as many together as pays."""
        kept, in_scratch, together = of_way.in_gradient, of_way.in_scratch, 1
        recomputed = self.rows - kept - in_scratch
        if kept + in_scratch and recomputed:  # where nothing is kept, larger chunks do the same
            together = _together(self.problem, recomputed, size, self.budget - of_way.size(chunk, 1))
        cost = self.head.keeping_ms(self.tokens, kept, in_scratch, chunk, together, halves=halves)
        if cost <= self.bound:
            fields = {"token_chunk": self.tokens, "kept_in_gradient": kept, "kept_in_scratch": in_scratch}
            fields |= {"chunk": chunk, "halves": halves, "recompute_chunks": together}
            strategy = "stash" if kept + in_scratch else "recompute"
            self.fits(cost, of_way.size(chunk, together), strategy=strategy, **fields)


def _search(p: Problem, strategy: str, budget: int) -> MosaicPlan | None:
    """Without gradients the fewest even chunks of tokens; else of one strategy, or of both, what is fastest."""
    if not p.any_grad:
        whole = up(p.tokens, TOKEN_TILE)
        fits = largest(lambda n: scratch_bytes(p, MosaicPlan("forward", n)) <= budget, TOKEN_TILE, whole, TOKEN_TILE)
        made = MosaicPlan("forward", up(even_chunk(p.tokens, fits, TOKEN_TILE), TOKEN_TILE))
        return made if scratch_bytes(p, made) <= budget else None
    search = MosaicSearch(p, budget)
    for each in _strategies(strategy):
        if _goes_by_tokens(p, each):
            search.by_tokens()
            search.longer_first()
        search.keep(each)
    best = search.best()
    return None if best is None else MosaicPlan(**best)


def _together(p: Problem, recomputed: int, chunk: int, room: int) -> int:
    """For how many chunks to recompute the logits of so many tokens at a time, if so many more bytes are free."""
    launches = 2 * 1e-3 * _LAUNCH / (_STEP * -(-p.hidden // _DEPTH))

    def cost(number: int) -> float:
        """How many waves a chunk takes."""
        tiles = recomputed // TOKEN_TILE * (number * chunk // VOCAB_TILE)
        return (waves(tiles, _PROGRAMS) + launches) / number

    tried = [n for n in (1, 2, 3, 4, 6, 8) if n == 1 or _ELEMENT * recomputed * chunk * (n - 1) <= room]
    return min(tried, key=cost)


# Tiles that fill whole waves.
_FILLING = (*(_PROGRAMS * n * 2**k for k in range(6) for n in (4, 5, 6, 7)), *(_PROGRAMS * n for n in (1, 2, 3)))


def _chunk_sizes(head: MosaicHead, recomputed: int) -> set[int]:
    """Sizes of a chunk that leave no wave half empty, of the weight gradient's tiles or of the logits that are
    recomputed for so many tokens; and some small ones.
    """
    sizes = set(head.chunk_sizes)
    if recomputed:
        rows, most = recomputed // TOKEN_TILE, head.tiles
        sizes |= {min(tiles // rows, most) * VOCAB_TILE for tiles in _FILLING if tiles >= rows}
    return sizes


PLANNER: Planner[MosaicPlan] = Planner(
    scratch_parts, None, predict, least_scratch, default_scratch, needs, slack=SLACK, search=_search
)
plan, scratch_bytes = PLANNER.plan, PLANNER.scratch_bytes
