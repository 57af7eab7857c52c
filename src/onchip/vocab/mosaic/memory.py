"""How the 'mosaic_gpu' backend cuts a problem: memory formulas and the choice of a plan.  Imports no framework.

Either the memory of the weight's gradient holds the exponentials of up to H tokens until that gradient is computed, and
scratch those of more, as far as there is room; the other tokens' logits are recomputed in backward.  Or tokens go in
chunks, whose exponentials are in scratch until hidden's gradient and the chunk's part of the weight's are made from
them; the weight's is a sum of 20 or 24 bits (sums.py).  A frozen weight always goes this way.  The first chunk may have
up to H tokens more, with exponentials in the memory of the weight's gradient until the chunk's part of it is computed,
and H / 4 or H / 2 more in the memory of the sum's digits, so that fewer chunks are left to add.
The formulas give what XLA allocates for a jitted step beyond its arguments and results.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

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
    """Groups that cover the vocabulary in order; as few as possible if no logits are recomputed."""
    end = split_at(vocab, c.chunk) if c.kept_in_gradient else up(vocab, VOCAB_TILE)
    number, rest = divmod(end, c.chunk)
    together = c.recompute_chunks if recomputed else max(number, 1)
    times, more = divmod(number, together)
    made = []
    if start := [(size, n) for size, n in ((rest, 1), (c.chunk, more)) if size * n]:
        made.append(Group(0, tuple(start)))
    if times:
        made.append(Group(rest + more * c.chunk, ((c.chunk, together),), times))
    if c.kept_in_gradient:
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


def scratch_parts(p: Problem, c: MosaicPlan) -> dict[str, int]:
    """Peak temporary memory in bytes, part by part."""
    rows = up(c.token_chunk, TOKEN_TILE)
    hidden_rows, softmax = _ELEMENT * rows * p.hidden, _softmax_bytes(p, rows)
    # Each id's logit and gradient, and its places in a chunk.
    vectors = (256 + 64 * p.ids) * up(p.tokens, TOKEN_TILE)
    vectors += 4 * up(p.vocab, VOCAB_TILE) * (1 + int(p.class_weight)) + MIB
    parts = {"vectors": vectors}
    if p.split and p.grad_hidden:
        parts["hidden gradient before it is summed"] = 4 * p.tokens * p.hidden
    if c.strategy == "forward":
        return parts | {"hidden rows": hidden_rows, "softmax of each tile": softmax}
    vocab = up(p.vocab, VOCAB_TILE)
    if c.by_tokens:
        parts["vectors"] += 256 * (c.positions(p.tokens) - up(p.tokens, TOKEN_TILE))
        # The first 16 bits of both sums are where the gradients will be.
        parts["more digits of the weight's gradient"] = digits_bytes(p) if p.grad_weight else 0
        parts["more digits of hidden's gradient"] = p.tokens * p.hidden if p.grad_hidden else 0
        chunks = {c.first_chunk, rows} - {0}
        made = {size: _token_chunk_parts(p, c, size, first=size == c.first_chunk) for size in chunks}
        largest = max(made, key=lambda size: sum(made[size].values()))
        # XLA lays buffers of two sizes out with gaps: on an H200 13 MB more than the larger chunk's were needed where a
        # sum of the other one's is 21, and 0.4 where it is 6.
        at_a_time = {size: min(size, hidden_step(p.hidden)) if size == c.first_chunk else size for size in made}
        parts["gaps"] = 4 * sum(at_a_time[size] for size in made if size != largest) * p.hidden
        return parts | made[largest]
    recomputed = rows - c.kept
    # What is left for the last chunk may be a tile more than the others.
    group = min(vocab, max(c.recompute_chunks * c.chunk, c.chunk + VOCAB_TILE))
    parts["exponentials in scratch"] = _scratch_exponentials(p, c, c.kept_in_scratch)
    # One after the other: forward, hidden's gradient of the tokens that are kept, and the rest of backward.
    forward = {"hidden rows": hidden_rows, "softmax of each tile": softmax}
    slices = 1 if c.kept_in_gradient else hidden_slices(c.kept, p.hidden)
    kept = {"hidden gradient in float32": 4 * slices * c.kept * p.hidden if p.grad_hidden else 0}
    rest = {
        "hidden rows": hidden_rows,
        "recomputed logits' gradient": _ELEMENT * recomputed * group,
        "hidden gradient in float32": 4 * (1 + int(c.halves)) * recomputed * p.hidden if p.grad_hidden else 0,
    }
    return parts | max((forward, kept, rest), key=lambda phase: sum(phase.values()))


def _softmax_bytes(p: Problem, rows: int) -> int:
    """Bytes of what the softmax of so many tokens leaves for each tile."""
    # maximum and sum; an offset for label smoothing; moment and argmax for statistics; with labels of every entry
    # always argmax, and two sums of those, with and without weights of classes
    partials = 2 + int(p.smoothing > 0) + 2 * int(p.stats) + p.more_stats
    if p.labels:
        partials += 2 + (2 * int(p.class_weight) if p.stats else 1)
    return 4 * -(-p.vocab // VOCAB_TILE) * rows * partials


def _scratch_exponentials(p: Problem, c: MosaicPlan, in_scratch: int, *, more: bool = True) -> int:
    """Bytes of the exponentials in scratch for so many tokens and, with `more`, of those for which the gradient's
    memory has no room.
    """
    vocab = up(p.vocab, VOCAB_TILE)
    in_memory = c.kept_in_gradient + c.kept_in_digits if more else 0
    return _ELEMENT * (in_memory * (vocab - split_at(p.vocab, c.chunk)) + in_scratch * vocab)


def _token_chunk_parts(p: Problem, c: MosaicPlan, rows: int, *, first: bool) -> dict[str, int]:
    """Bytes of one chunk of tokens whose gradients are made in forward; `first`: of the larger first chunk."""
    in_memory = c.kept_in_gradient + c.kept_in_digits if first else 0
    at_a_time = max(c.kept_in_gradient, c.kept_in_digits, rows - in_memory) if first else rows
    softmax = {"hidden rows": _ELEMENT * at_a_time * p.hidden, "softmax of each tile": _softmax_bytes(p, rows)}
    # One, or one of each slice, and as XLA scatters them.
    sums = 2 * min(rows, hidden_step(p.hidden)) if first else (1 + hidden_slices(rows, p.hidden)) * rows
    hidden = {"hidden gradient in float32": 4 * sums * p.hidden if p.grad_hidden else 0}
    weight = {"hidden rows": _ELEMENT * rows * p.hidden if p.grad_weight else 0}
    exponentials = _scratch_exponentials(p, c, rows - in_memory, more=first)
    largest = max((softmax, hidden, weight), key=lambda phase: sum(phase.values()))
    return {"exponentials in scratch": exponentials} | largest


def predict(p: Problem, c: MosaicPlan) -> float:
    """Milliseconds of forward, and of backward where gradients are wanted, by a simple cost model."""
    if c.strategy == "forward":
        product = 2e-9 * p.tokens * p.hidden * p.vocab / PRODUCT
        return product + 1e-3 * _LAUNCH * -(-p.tokens // c.token_chunk)
    rows = up(p.tokens, TOKEN_TILE)
    # For so many tokens or vocabulary entries: the tiles along hidden, and the steps of a tile of logits.
    tile = hidden_tile(p.hidden)
    columns, steps = -(-p.hidden // tile), -(-p.hidden // _DEPTH) + _EPILOGUE
    # The steps of a product that makes such tiles, by the work of the largest.
    depth = _DEPTH * VOCAB_TILE / tile
    if c.by_tokens:
        each, work = c.token_chunks(p.tokens), 0.0
        number, launches = len(each), 10 * len(each)
        for i, tokens in enumerate(each):
            tiles, first = -(-tokens // TOKEN_TILE), i == 0 and c.first_chunk > 0
            work += waves(tiles * -(-p.vocab // VOCAB_TILE), _PROGRAMS) * steps
            if p.grad_hidden:
                slices = 1 if first else hidden_slices(c.token_chunk, p.hidden)
                for rows in in_chunks(tiles, hidden_step(p.hidden) // TOKEN_TILE) if first else [tiles * slices]:
                    work += waves(rows * columns, _PROGRAMS, halves=first) / slices * p.vocab / depth
            if p.grad_weight:
                cut = [(p.vocab, 1)]
                if first:
                    cut = [chunk for group in groups(p.vocab, c, recomputed=False) for chunk in group.chunks]
                of_weight = sum(n * waves(-(-size // TOKEN_TILE) * columns, _PROGRAMS) for size, n in cut)
                work += of_weight * tiles * TOKEN_TILE / depth
                launches += sum(n for _, n in cut) - 1
        moved = _moved_ms(p, number, c.token_chunk) if p.grad_weight else 0.0
        return work * _STEP + 1e-3 * _LAUNCH * launches + moved
    recomputed = rows - c.kept
    chunks = -(-p.vocab // c.chunk)
    work = waves(rows // TOKEN_TILE * -(-p.vocab // VOCAB_TILE), _PROGRAMS) * steps
    recomputed_groups = groups(p.vocab, c, recomputed=True) if recomputed else []
    for group in recomputed_groups:
        work += group.times * waves(recomputed // TOKEN_TILE * (group.size // VOCAB_TILE), _PROGRAMS) * steps
    if p.grad_hidden:
        slices = 1 if c.kept_in_gradient else hidden_slices(c.kept, p.hidden)
        tiles = c.kept // TOKEN_TILE * columns * slices
        work += waves(tiles, _PROGRAMS, halves=slices == 1) / slices * p.vocab / depth
        work += waves(recomputed // TOKEN_TILE * columns, _PROGRAMS, halves=c.halves) * p.vocab / depth
    if p.grad_weight:
        work += chunks * waves(c.chunk // TOKEN_TILE * columns, _PROGRAMS) * rows / depth
    launches = chunks + 2 * sum(group.times for group in recomputed_groups)
    return work * _STEP + 1e-3 * _LAUNCH * launches


def _moved_ms(p: Problem, number: int, token_chunk: int) -> float:
    """Milliseconds that reading and writing the weight's sum takes, for so many chunks of tokens."""
    of_gradient = _ELEMENT * p.vocab * p.hidden
    of_sum = of_gradient + digits_bytes(p)
    # It is added to, and in float16 read and rounded at the end.
    additions = 2 * (number - 1) / (1 + token_chunk / _ADDITION_TOKENS)
    at_the_end = of_sum + of_gradient if p.dtype == "float16" else 0
    return 1e-9 * (of_sum * additions + at_the_end) / _MEMORY


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


def _cut(p: Problem, strategy: str, chunk: int) -> MosaicPlan:
    kept = 0 if strategy == "recompute" else capacity(p)
    if kept:
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
    yield from (_cut(p, strategy, size) for size in _chunk_sizes(p, rows - kept))


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


class MosaicSearch(Fastest[MosaicPlan]):
    """Plans of a problem with gradients."""

    def __init__(self, p: Problem, budget: int) -> None:
        super().__init__(SLACK)
        self.problem, self.budget, self.rows = p, budget, up(p.tokens, TOKEN_TILE)
        tile, tiles = hidden_tile(p.hidden), self.rows // TOKEN_TILE
        self.columns, self.depth = -(-p.hidden // tile), _DEPTH * VOCAB_TILE / tile
        # Milliseconds of products whose tiles fill whole waves.
        wave = _STEP / _PROGRAMS
        self.logits = wave * tiles * -(-p.vocab // VOCAB_TILE) * (-(-p.hidden // _DEPTH) + _EPILOGUE)
        self.hidden = wave * tiles * self.columns * p.vocab / self.depth if p.grad_hidden else 0.0
        self.weight = wave * -(-p.vocab // TOKEN_TILE) * self.columns * self.rows / self.depth if p.grad_weight else 0.0
        self.weight *= 1 - 1e-9

    def fits(self, c: MosaicPlan) -> bool:
        """Whether the plan fits; if it may be among the fastest, it is noted."""
        if (size := scratch_bytes(self.problem, c)) > self.budget:
            return False
        cost = predict(self.problem, c)
        self.add(cost, (size, cost), c)
        return True

    def by_tokens_bound(self, number: int, size: int) -> float:
        """A bound: no plan that makes gradients in forward, in so many chunks of tokens, costs less."""
        moved = _moved_ms(self.problem, number, size) if self.problem.grad_weight else 0.0
        return self.logits + self.hidden + self.weight + 1e-3 * _LAUNCH * 10 * number + moved

    def by_tokens(self) -> None:
        """Try chunks of tokens: some small ones, and the fewest even chunks."""
        p = self.problem
        for size in reversed(_token_chunks(self.rows, self.budget // (_ELEMENT * p.vocab))):
            if self.by_tokens_bound(-(-p.tokens // size), size) > self.bound:
                break
            self.fits(_by_tokens(p, size))

    def longer_first(self) -> None:
        """Try chunks of tokens of which the first is so much larger that as few others as possible are left."""
        p, rows, kept, digits = self.problem, self.rows, capacity(self.problem), digits_capacity(self.problem)
        if not kept:
            return
        in_scratch = self.budget // (_ELEMENT * p.vocab)
        most, listed = kept + digits + in_scratch, []
        # Entries whose tiles of the weight's gradient fill two and four waves.
        for chunk in {_PROGRAMS * n // self.columns * TOKEN_TILE // VOCAB_TILE * VOCAB_TILE for n in (2, 4)}:
            cut = replace(_cut(p, "stash", max(chunk, VOCAB_TILE)), by_tokens=True)
            for size in range(min(rows - kept, up(in_scratch + 1, TOKEN_TILE)) - TOKEN_TILE, 0, -TOKEN_TILE):
                others = max(1, -(-(rows - most) // size))
                listed.append((self.by_tokens_bound(1 + others, size), others, size, cut))
        for bound, others, size, cut in sorted(listed, key=lambda x: x[:3]):
            if bound > self.bound:
                break
            for number in range(others, (rows - max(size, kept) - 1) // size + 1):
                first = rows - number * size
                in_digits = min(first - kept, digits)
                left = rows - kept - in_digits
                plan = replace(cut, token_chunk=size, first_chunk=first, kept_in_digits=in_digits, kept_in_scratch=left)
                if self.by_tokens_bound(1 + number, size) > self.bound or self.fits(plan):
                    break

    def keep(self, strategy: str) -> None:
        """Try plans that keep exponentials until backward, for as many tokens as the gradient's memory has room for and
        some more; the other tokens' logits are computed again.
        """
        p, rows, kept = self.problem, self.rows, _cut(self.problem, strategy, VOCAB_TILE).kept_in_gradient
        if kept:
            self.fits(_in_scratch(p))
        # More than that fits no budget; and a few dozen are enough.
        most = min(rows - kept, self.budget // (_ELEMENT * p.vocab)) if kept else 0
        step = max(TOKEN_TILE, up(-(-most // 24), TOKEN_TILE))
        for in_scratch in range(most // step * step, -1, -step):
            recomputed = rows - kept - in_scratch
            again = self.logits * recomputed / rows
            if self.logits + self.hidden + self.weight + again > self.bound:
                break
            self.keep_some(strategy, in_scratch, recomputed, self.logits + self.hidden + again)

    def keep_some(self, strategy: str, in_scratch: int, recomputed: int, bound: float) -> None:
        """Try several chunks of the vocabulary; `bound` doesn't count the weight's gradient."""
        p, listed = self.problem, []
        for size in _chunk_sizes(p, recomputed):
            chunks, least = -(-p.vocab // size), bound
            if p.grad_weight:
                of_weight = chunks * waves(size // TOKEN_TILE * self.columns, _PROGRAMS)
                least += _STEP * of_weight * self.rows / self.depth
            listed.append((least + 1e-3 * _LAUNCH * chunks, size))
        largest = math.inf  # that may fit
        for least, size in sorted(listed):
            if least > self.bound:
                break
            plan = replace(_cut(p, strategy, size), kept_in_scratch=in_scratch)
            if plan.chunk >= largest:
                continue
            if (room := self.budget - scratch_bytes(p, plan)) < 0:
                largest = plan.chunk
                continue
            for halves in (False, True) if recomputed and p.grad_hidden else (False,):
                plan = replace(plan, halves=halves, recompute_chunks=1)
                if halves:
                    room = self.budget - scratch_bytes(p, plan)
                if plan.kept and recomputed:  # where nothing is kept, larger chunks do the same
                    plan = replace(plan, recompute_chunks=_together(p, recomputed, size, room))
                self.fits(plan)


def _search(p: Problem, strategy: str, budget: int) -> MosaicPlan | None:
    """Without gradients, the fewest even chunks of tokens; otherwise the fastest plan of one strategy, or of both."""
    made = MosaicSearch(p, budget)
    if not p.any_grad:
        whole = made.rows
        fits = largest(lambda n: scratch_bytes(p, MosaicPlan("forward", n)) <= budget, TOKEN_TILE, whole, TOKEN_TILE)
        made.fits(MosaicPlan("forward", up(even_chunk(p.tokens, fits, TOKEN_TILE), TOKEN_TILE)))
        return made.best()
    for each in _strategies(strategy):
        if _goes_by_tokens(p, each):
            made.by_tokens()
            made.longer_first()
        made.keep(each)
    return made.best()


def _token_chunks(rows: int, most: int) -> list[int]:
    """Sizes for a chunk of tokens: some small ones, and those of the fewest even chunks."""
    even = {up(-(-rows // number), TOKEN_TILE) for number in range(1, 65)}
    return sorted(size for size in even | {TOKEN_TILE} if size <= max(most, TOKEN_TILE))


def _together(p: Problem, recomputed: int, chunk: int, room: int) -> int:
    """For how many chunks to recompute the logits of so many tokens at a time, if so many more bytes are free."""
    launches = 2 * 1e-3 * _LAUNCH / (_STEP * -(-p.hidden // _DEPTH))

    def cost(number: int) -> float:
        """How many waves a chunk takes."""
        tiles = recomputed // TOKEN_TILE * (number * chunk // VOCAB_TILE)
        return (waves(tiles, _PROGRAMS) + launches) / number

    tried = [n for n in (1, 2, 3, 4, 6, 8) if n == 1 or _ELEMENT * recomputed * chunk * (n - 1) <= room]
    return min(tried, key=cost)


def _chunk_sizes(p: Problem, recomputed: int) -> list[int]:
    """Sizes for a chunk that leave no wave half empty, whether of the weight gradient's tiles or of logits recomputed
    for so many tokens; and some small ones.
    """
    whole = up(p.vocab, VOCAB_TILE)
    columns = -(-p.hidden // hidden_tile(p.hidden))
    filling = [_PROGRAMS * w for k in range(6) for w in (4 * 2**k, 5 * 2**k, 6 * 2**k, 7 * 2**k)]
    filling += [_PROGRAMS * w for w in (1, 2, 3)]
    sizes = [tiles // columns * TOKEN_TILE for tiles in filling]
    if recomputed:
        sizes += [tiles // (recomputed // TOKEN_TILE) * VOCAB_TILE for tiles in filling]
    sizes += [VOCAB_TILE * 2**k for k in range(5)]
    return sorted({min(size // VOCAB_TILE * VOCAB_TILE, whole) for size in sizes if size >= VOCAB_TILE})


PLANNER: Planner[MosaicPlan] = Planner(
    scratch_parts, None, predict, least_scratch, default_scratch, needs, slack=SLACK, search=_search
)
plan, scratch_bytes = PLANNER.plan, PLANNER.scratch_bytes
