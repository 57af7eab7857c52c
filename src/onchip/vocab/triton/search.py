"""The search for a plan with gradients: bounds on what cuts take decide which of them are compared.  Imports no
framework.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from onchip.core.sizes import up
from onchip.vocab.chunks import Fastest, largest, largest_within
from onchip.vocab.memory import Problem
from onchip.vocab.triton.costs import BesideCuts, costs_of
from onchip.vocab.triton.memory import TritonPlan, hidden_digits, id_bytes, may_hold, may_run_in_forward, sizes_of
from onchip.vocab.triton.tiling import PROGRAMS, TOKEN_TILE, VOCAB_TILE, hidden_apart, hidden_units

# Plans that take up to so many times the least pass for equally fast: no model is better than that.
SLACK = 1.007
# A bound that is a sum in another order may be above what it bounds by a rounding.
LEAST = 1 + 1e-12
# Launches of weight's product: with more the host is kept busy, and the GPU is no faster.
MOST_WEIGHT_CHUNKS = 11
# Tokens of the smallest chunk whose product is added to the weight's sum.
SMALLEST_SUMMED = 512
# Tiles of the vocabulary in the smallest chunk of the gradients.
SMALLEST_CHUNK = 1
# How many cuts with a longer first chunk are compared: those that need least memory.
MOST_LONGER = 32
# So few tiles of the vocabulary, or tokens, fill few waves.
FEW_TILES, FEW_TOKENS = 12, 512
# Chunks of the weight's gradient are left out if smaller ones take so much less time.
MUCH_LONGER = 1.06

# For chunks of the vocabulary and of the weight's gradient, and with halves or not: tokens whose exponentials are
# kept in the memory of the weight's gradient, and in scratch; None where that doesn't fit.
Kept = Callable[[int, int, bool], tuple[int, int] | None]


def search(p: Problem, kept: tuple[int, int], strategy: str, budget: int) -> TritonPlan | None:
    """The fastest plan that fits; of equally fast ones, the smallest of those with few launches.  `kept`: for each
    strategy but 'auto', how many tokens are kept in the memory of the weight's gradient, and in scratch.
    """
    made, columns = TritonSearch(p, budget), up(p.vocab, VOCAB_TILE)
    holds = strategy != "recompute" and may_hold(p)
    if holds:
        # All in scratch: the weight's gradient in one launch.
        made.try_kept((0, made.rows), columns, columns, halves=False)
    some = made.keep(made.what_fits if strategy == "auto" and holds else lambda vocab, weight, halves: kept)
    if strategy == "auto" and may_run_in_forward(p):
        made.in_forward()
    some()
    # With nothing kept, no chunk of the weight's gradient has to be held back: it is as large as that of the logits.
    made.keep_alike(kept)
    return made.plan()


class TritonSearch(Fastest[dict[str, Any]]):
    """Plans of a problem with gradients, as their fields.  Of equally fast ones, those that keep the host busy come
    last, then the larger ones.
    """

    def __init__(self, p: Problem, budget: int) -> None:
        super().__init__(SLACK)
        self.problem, self.costs, self.sizes = p, costs_of(p), sizes_of(p)
        self.tokens, self.rows, self.columns = p.tokens, up(p.tokens, TOKEN_TILE), up(p.vocab, VOCAB_TILE)
        self.budget = budget - self.sizes.cast - p.copied - id_bytes(p)
        # Of `what_fits`, with chunks of nothing: tokens that the weight's gradient holds, and others; without and with
        # halves room, and what the softmax has above what comes later; and bytes of a token that is kept.
        sizes, tokens = self.sizes, p.tokens
        self.in_gradient = min(self.rows, sizes.capacity)
        self.left, held = self.rows - self.in_gradient, self.in_gradient > 0
        vectors = sizes.of_tokens(tokens, sorted_by_target=held)
        of_none = [sizes.kept(tokens, self.in_gradient, 0, 0, 0, halves=halves) for halves in (False, True)]
        self.room = [self.budget - vectors - sum(parts[:-1]) for parts in of_none]
        self.short = [sizes.of_softmax(tokens) - parts[-2] - sizes.bias for parts in of_none]
        more = sizes.of_tokens(tokens, sorted_by_target=True) - vectors
        self.each = TOKEN_TILE * sizes.exponentials + more, 4 * TOKEN_TILE * sizes.hidden
        self.again, self.by_weight = sizes.element * self.left, sizes.weight_row if held else 0
        self.by_vocab = TOKEN_TILE * sizes.element
        self.bounds: dict[int, tuple[float, float]] = {}
        self.beside: dict[tuple[int, bool], BesideCuts] = {}

    def plan(self) -> TritonPlan | None:
        """The best plan."""
        if (best := self.best()) is None:
            return None
        soonest = self.soonest()
        # A chunk less saves more than the model says: hidden's gradient of 512 tokens took half as long again.
        return TritonPlan(**(soonest if self.problem.even and soonest and "in_forward" in soonest else best))

    # ------------------------------------------------------------------------------- exponentials that are kept

    def kept_size(self, kept: tuple[int, int], vocab: int, weight: int, *, halves: bool) -> int:
        vectors = self.sizes.of_tokens(self.tokens, sorted_by_target=sum(kept) > 0)
        return vectors + sum(self.sizes.kept(self.tokens, *kept, vocab, weight, halves=halves))

    def what_fits(self, vocab: int, weight: int, halves: bool) -> tuple[int, int] | None:
        """As `Kept`: as many tokens as fit."""
        again = self.again * vocab
        short, room = self.short[halves] - again, self.room[halves] - again - self.by_weight * weight
        each, in_halves = self.each
        if short > 0:
            room -= short
        else:  # what is kept of a token isn't computed again, nor summed in two halves; else the softmax needs that
            each -= self.by_vocab * vocab + (in_halves if halves else 0)
        if room < 0:
            return None
        return self.in_gradient, min(self.left, room // max(1, each) * TOKEN_TILE)

    def try_kept(self, kept: tuple[int, int], vocab: int, weight: int, *, halves: bool) -> None:
        beside = self.beside_cuts(sum(kept), halves)
        cost = beside.time + self.costs.of_cuts(beside, self.tokens, vocab, weight)
        if cost > self.bound or (size := self.kept_size(kept, vocab, weight, halves=halves)) > self.budget:
            return
        if not self.problem.grad_weight:
            weight = vocab
        fields = {
            "token_chunk": self.tokens,
            "vocab_chunk": vocab,
            "weight_chunk": weight,
            "kept_in_gradient": kept[0],
            "kept_in_scratch": kept[1],
            "halves": halves,
        }
        self.add(cost, (self.is_late(weight), size, cost, 0, vocab, halves), fields)

    def beside_cuts(self, kept: int, halves: bool) -> BesideCuts:
        made = self.beside.get((kept, halves))
        if made is None:
            made = self.beside[kept, halves] = self.costs.beside_cuts(self.tokens, kept, halves)
        return made

    def kept_bound(self, kept: int) -> tuple[float, float]:
        made = self.bounds.get(kept)
        if made is None:
            made = self.bounds[kept] = self.costs.kept_bound(self.tokens, kept)
        return made

    def is_late(self, weight: int) -> bool:
        return self.problem.grad_weight and weight * MOST_WEIGHT_CHUNKS < self.problem.vocab

    def cuts(self) -> list[tuple[float, int, tuple[int, ...]]]:
        """The chunk sizes of the weight's gradient, with what it takes in such chunks, and the chunks of logits that
        may go with each.
        """
        p, soonest, found = self.problem, {True: math.inf, False: math.inf}, []
        if not p.grad_weight:
            return [(0.0, VOCAB_TILE, _alike(p.hidden, p.vocab))]
        for weight, sizes in _cuts(p.hidden, p.vocab):
            time, late = self.costs.weight(self.tokens, weight), self.is_late(weight)
            if time < MUCH_LONGER * soonest[late]:
                soonest[late] = min(soonest[late], time)
                found.append((time, weight, sizes))
        return found

    def keep(self, kept: Kept) -> Callable[[], None]:
        """Try plans that keep all tokens' exponentials.  Returns a function that tries those that keep some."""
        some = []
        for time, weight, sizes in self.cuts():
            if (held := kept(sizes[0], weight, False)) is None:
                continue
            if sum(held) >= self.rows:  # the size of the other chunks doesn't matter
                self.try_kept(held, sizes[0], weight, halves=False)
            else:
                bound, more = self.kept_bound(sum(held))
                some.append((bound + time, more, weight, sizes))

        def keep_some() -> None:
            for bound, more, weight, sizes in sorted(some):
                if bound <= self.bound:
                    self.keep_some(kept, bound, more, weight, sizes)

        return keep_some

    def keep_some(self, kept: Kept, bound: float, more: float, weight: int, sizes: tuple[int, ...]) -> None:
        """Try plans with this chunk of the weight's gradient, which take at least `bound` and, for each chunk of logits
        after the first, `more`.
        """
        time, listed, lefts = self.costs.weight(self.tokens, weight), [], set()
        ways = (False, True) if self.problem.grad_hidden else (False,)

        def consider(size: int) -> None:
            number = -(-self.columns // size)
            for halves in ways:
                if (held := kept(size, weight, halves)) is None:
                    break
                all_held = held[0] + held[1]
                lefts.add(self.rows - all_held)
                bound, more = self.kept_bound(all_held)
                if bound + time + more * (number - 1) > self.bound:
                    break
                beside = self.beside_cuts(all_held, halves)
                least = beside.time + beside.product + beside.more * number + time
                if least <= LEAST * self.bound:
                    listed.append((least, size, halves, held))

        for size in reversed(sizes):  # the fewest launches first
            if bound + more * (-(-self.columns // size) - 1) > self.bound:
                break
            consider(size)
        # Now that it is known how many are left: chunks whose tiles fill whole waves.
        waves = [PROGRAMS * TOKEN_TILE * n // left for left in lefts if left > 0 for n in (1, 2, 4)]
        filling = {min(x * VOCAB_TILE // weight * weight, up(self.columns, weight)) for x in waves}
        for size in filling.difference(sizes, (0,)):
            consider(size)
        for least, size, halves, held in sorted(listed):
            if least <= LEAST * self.bound:
                self.try_kept(held, size, weight, halves=halves)

    def keep_alike(self, kept: tuple[int, int]) -> None:
        """Try plans whose chunks of logits and of the weight's gradient have the same size."""
        bound, more = self.kept_bound(sum(kept))
        if bound > self.bound:
            return
        sizes = set(_alike(self.problem.hidden, self.problem.vocab))
        for halves in (False, True) if self.problem.grad_hidden else (False,):

            def taken(size: int, halves: bool = halves) -> int:
                return self.kept_size(kept, size, size, halves=halves)

            most = largest_within(taken, self.budget, VOCAB_TILE, self.columns, VOCAB_TILE)
            tried = {size for size in sizes if size <= most}
            if most <= FEW_TILES * VOCAB_TILE or self.rows <= FEW_TOKENS or not self.problem.grad_weight:
                # A tile more or less counts: the largest that fits, and the largest whose tiles fill whole waves.
                waves = most * self.rows // (VOCAB_TILE * TOKEN_TILE * PROGRAMS)
                tried |= {most, waves * PROGRAMS * TOKEN_TILE // max(TOKEN_TILE, self.rows) * VOCAB_TILE} - {0}
            for size in sorted(tried, reverse=True):
                least = bound + more * (-(-self.columns // size) - 1)
                if least <= self.bound and least + self.costs.weight(self.tokens, size) <= self.bound:
                    self.try_kept(kept, size, size, halves=halves)

    # ------------------------------------------------------------------------------- gradients in forward

    def in_forward(self) -> None:
        """Try chunks of tokens: even ones, from the fewest that fit on; the largest; and some that fill whole waves."""
        p, sizes, rows = self.problem, self.sizes, self.rows
        fixed = sizes.of_tokens(self.tokens, sorted_by_target=True) + hidden_digits(p) + sizes.sum_in_scratch
        room = self.budget - fixed

        def taken(size: int) -> int:
            return sizes.even_chunk(self.tokens, size)

        fits = largest(lambda size: taken(size) <= room, TOKEN_TILE, rows, TOKEN_TILE)
        fewest = -(-rows // fits)
        tried = {up(-(-rows // n), TOKEN_TILE) for n in range(fewest, fewest + 8)}
        tried |= {size for size in _filling(p.hidden) if size <= fits}
        tried |= {fits - n * TOKEN_TILE for n in range(8)}
        # One chunk needs no sum: its exponentials may as well be kept.  And small ones don't pay for adding.
        least, most = (SMALLEST_SUMMED, rows - TOKEN_TILE) if p.grad_weight else (TOKEN_TILE, rows)
        bound, more = self.costs.in_forward_bound(self.tokens)
        for size in sorted((x for x in tried if least <= x <= most), reverse=True):
            if bound + more * (-(-self.tokens // size) - 1) > self.bound:
                break
            if (chunk := taken(size)) <= room:
                cost = self.costs.in_forward(self.tokens, size)
                self.add(cost, (False, fixed + chunk, cost, 1, size), {"token_chunk": size, "in_forward": True})
        if p.grad_weight and not p.weight_grad_out and p.weight_dtype == p.dtype:
            self.longer_first(fixed)

    def first_size(self, tokens: int, weight: int) -> int:
        """The size of a longer first chunk, with what is beyond the memory of the gradient and of the digits."""
        sizes = self.sizes
        beyond = sizes.beyond(weight) + sizes.digits_beyond(tokens, weight)
        return beyond + sum(sizes.chunk(tokens, tokens, sizes.weight_row * weight, longer=True))

    def other_size(self, tokens: int, weight: int, first: int) -> int:
        """The size of the chunks after that."""
        sizes, beyond = self.sizes, self.sizes.beyond(weight)
        chunk = sizes.chunk(tokens, min(tokens, self.tokens), beyond, longer=False)
        return beyond + sizes.digits_beyond(first, weight) + sum(chunk)

    def longer_first(self, fixed: int) -> None:
        """Try chunks of tokens of which the first has as many more as make the others even."""
        costs, sizes, listed = self.costs, self.sizes, []
        rows, room, capacity = self.rows, self.budget - fixed, self.sizes.capacity
        bound, more = costs.in_forward_bound(self.tokens)
        step = up(rows // 128, TOKEN_TILE)  # of any number of tokens as many sizes
        for weight in _filling_weights(self.problem.hidden):
            first_size = partial(self.first_size, weight=weight)
            if first_size(SMALLEST_SUMMED) > room:
                continue
            most = largest_within(first_size, room, SMALLEST_SUMMED, rows, TOKEN_TILE)
            # Sizes of the other chunks: for a first one without exponentials where digits will be, and for the largest.
            short, long = (
                largest_within(partial(self.other_size, weight=weight, first=first), room, TOKEN_TILE, rows, TOKEN_TILE)
                for first in (capacity, most)
            )
            for size in reversed(range(SMALLEST_SUMMED, min(short, most, rows - TOKEN_TILE) + 1, step)):
                here = min(most, rows - size)
                if size > long:
                    here = min(here, max(size, capacity))
                others = -(-(rows - here) // size)
                first = rows - others * size
                if size < first < self.tokens and bound + more * others <= self.bound:
                    in_scratch = max(size, first - capacity - sizes.in_digits(first))
                    listed.append((in_scratch, bound + more * others, first, size, weight))
        listed = sorted(listed)[:MOST_LONGER]
        for _, least, first, size, weight in sorted(listed, key=lambda x: x[1]):
            if least <= self.bound and (cost := costs.in_forward(self.tokens, size, first, weight)) <= self.bound:
                chunk = max(self.first_size(first, weight), self.other_size(size, weight, first))
                if chunk <= room:
                    fields = {"token_chunk": size, "weight_chunk": weight, "in_forward": True, "first_chunk": first}
                    self.add(cost, (False, fixed + chunk, cost, 2, weight, size), fields)


# ------------------------------------------------------------------------------------------------------ sizes of a head


@lru_cache(maxsize=256)
def _weights(hidden: int, vocab: int) -> frozenset[int]:
    """Tiles of the vocabulary whose weight gradient fills whole waves, and some even ones."""
    tiles, per_tile = -(-vocab // VOCAB_TILE), VOCAB_TILE // TOKEN_TILE * -(-hidden // 256)
    sizes = {n * PROGRAMS // per_tile for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)}
    sizes |= {-(-tiles // n) for n in (1, 2, 4, 8, 16, 32, 64)}
    return frozenset({size for size in sizes if 0 < size <= tiles} | {SMALLEST_CHUNK})


@lru_cache(maxsize=256)
def _again(vocab: int) -> frozenset[int]:
    """Tiles of the vocabulary whose logits are computed again together."""
    tiles = -(-vocab // VOCAB_TILE)
    sizes = {-(-tiles // n) for n in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)}
    return frozenset(sizes | {1, min(2, tiles), min(3, tiles)})


@lru_cache(maxsize=256)
def _alike(hidden: int, vocab: int) -> tuple[int, ...]:
    """Entries of the vocabulary whose logits are computed again, followed by their weight gradient."""
    return tuple(sorted(tiles * VOCAB_TILE for tiles in _again(vocab) | _weights(hidden, vocab)))


@lru_cache(maxsize=256)
def _cuts(hidden: int, vocab: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Chunks of the weight's gradient, and for each the chunks of logits, made of whole ones, that may go with it."""
    tiles, made = -(-vocab // VOCAB_TILE), []
    for weight in sorted(_weights(hidden, vocab)):
        sizes = {min(up(x, weight), up(tiles, weight)) * VOCAB_TILE for x in _again(vocab) | {weight}}
        made.append((weight * VOCAB_TILE, tuple(sorted(sizes))))
    return tuple(made)


@lru_cache(maxsize=256)
def _filling_weights(hidden: int) -> frozenset[int]:
    """Rows of the weight's gradient whose tiles fill two and four waves."""
    per_tile = VOCAB_TILE // TOKEN_TILE * -(-hidden // 256)
    return frozenset(max(1, n * PROGRAMS // per_tile) * VOCAB_TILE for n in (2, 4))


@lru_cache(maxsize=256)
def _filling(hidden: int) -> frozenset[int]:
    """Tokens whose hidden gradient fills whole waves, or halves of these if its units may be cut in two."""
    if not hidden_apart(hidden):
        whole = PROGRAMS // hidden_units(1, hidden, False) * TOKEN_TILE
        return frozenset(n * whole for n in (1, 2, 3, 4, 6, 8))
    sizes = set()
    for halves in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16):
        most = halves * PROGRAMS // 2
        rows = most // hidden_units(2, hidden, True) * 2  # a unit may have two
        sizes.add((rows + (hidden_units(rows + 1, hidden, True) <= most)) * TOKEN_TILE)
    return frozenset(sizes)
