"""The choice of a Triton plan: a cost model, and the cuts that are compared by it.  No framework."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from onchip.core.sizes import MIB, up
from onchip.vocab import chunks
from onchip.vocab.chunks import Planner, even_chunk, in_chunks, largest
from onchip.vocab.memory import Problem, logits_bytes, needs
from onchip.vocab.triton.memory import (
    TritonPlan,
    capacity,
    hidden_step,
    id_bytes,
    may_hold,
    may_run_in_forward,
    scratch_parts,
    sum_bytes,
    sums_room,
)
from onchip.vocab.triton.tiling import (
    PROGRAMS,
    TOKEN_TILE,
    VOCAB_TILE,
    chunk_hidden,
    evenness,
    hidden_apart,
    hidden_columns,
    hidden_evenness,
    hidden_units,
)

# Tiles of the vocabulary in the smallest chunk of the gradients, and in the smallest that costs little.
SMALLEST_CHUNK, USEFUL_CHUNK = 1, 16
FORWARD_SCRATCH = 64 * MIB
# Launches of weight's product: with more the host is kept busy, and the GPU is no faster.
MOST_WEIGHT_CHUNKS = 11
# Tokens of the smallest chunk whose product is added to the weight's sum.
SMALLEST_SUMMED = 512


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
    "h100": Rates(
        product=745, softmax=0.2, keep=0.35, again=0.6, add=2.0, accumulate=0.5, launch=15.0, programs=PROGRAMS
    ),
}


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
    rows, programs = up(p.tokens, TOKEN_TILE) // TOKEN_TILE, rates.programs
    kept = min(rows, c.kept // TOKEN_TILE)
    time += share * logits * rates.keep + 4 * launch
    cut = in_chunks(_columns(p), c.vocab_chunk)
    if rows > kept:
        time += recomputed * (product * _evenness(cut, (rows - kept) / VOCAB_TILE, programs) + logits * rates.again)
        time += launch * len(cut)
    if p.grad_weight:
        parts = [part for chunk in cut for part in in_chunks(chunk, c.weight_chunk)]
        time += padded * _evenness(parts, blocks * columns / 256 / TOKEN_TILE, programs) + launch * len(parts)
    if p.grad_hidden:
        if kept:
            time += share * product * hidden_evenness(kept, p.hidden, hidden_apart(p.hidden), 2, programs) + launch
        if rows > kept:
            uneven = hidden_evenness(rows - kept, p.hidden, hidden_apart(p.hidden), 2 if c.halves else 1, programs)
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
    launch, programs, size = 1e-3 * rates.launch, rates.programs, p.tokens * p.hidden
    time = logits * rates.keep
    for i, n in enumerate(rows):
        share, tokens = n / sum(rows), n * TOKEN_TILE
        time += launch + share * product * (evenness(n * tiles, programs) - 1)
        if p.grad_hidden:
            room = sums_room(p, c, tokens, first=i == 0)
            for step in in_chunks(n, up(hidden_step(p, c, tokens, first=i == 0), TOKEN_TILE) // TOKEN_TILE):
                part = share * step / n
                apart, slices = chunk_hidden(step * TOKEN_TILE, p.hidden, room)
                slower = 1.02 if apart and not hidden_apart(p.hidden) else 1.0
                uneven = hidden_evenness(step, p.hidden, apart, max(2, slices), programs)
                # Each sum is zeroed, and read once more.
                time += launch + part * (product * slower * uneven + 1e-9 * rates.add * size * (2 * slices - 1))
        if p.grad_weight:
            cut = in_chunks(_columns(p), c.weight_chunk if i == 0 and c.first_chunk else _columns(p))
            time += launch * len(cut) + share * padded * _evenness(cut, blocks / TOKEN_TILE, programs)
    if p.grad_weight:
        time += 1e-9 * rates.accumulate * sum_bytes(p) * (len(rows) - 1)
    return time


def _evenness(sizes: list[int], tiles_per_column: float, programs: int) -> float:
    """Time of one launch for each chunk, over that of the same work spread evenly.  All but the last are equal."""
    whole, last = (evenness(round(x * tiles_per_column), programs) for x in (sizes[0], sizes[-1]))
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
    tiles = -(-p.vocab // VOCAB_TILE)
    per_tile = VOCAB_TILE // TOKEN_TILE * -(-p.hidden // 256)
    for_weight = {n * PROGRAMS // per_tile for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)}
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
                        filling = n * PROGRAMS * TOKEN_TILE // rows // weight * weight
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
    for tiles in {max(1, n * PROGRAMS // per_tile) for n in (2, 4)}:
        for size in range(SMALLEST_SUMMED, rows, up(rows // 128, TOKEN_TILE)):  # of any number of tokens as many

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
    if not hidden_apart(hidden):
        return {n * (PROGRAMS // hidden_units(1, hidden, False)) * TOKEN_TILE for n in (1, 2, 3, 4, 6, 8)}
    sizes = set()
    for halves in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16):
        most = halves * PROGRAMS // 2
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
