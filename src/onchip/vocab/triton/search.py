"""The search for a plan with gradients: bounds on what cuts take decide which of them are compared.  Imports no
framework.
"""

import math
from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any

from onchip.core.sizes import DTYPE_BYTES, up
from onchip.vocab.chunks import Fastest, largest, largest_within
from onchip.vocab.memory import Problem
from onchip.vocab.triton.costs import BesideCuts, Costs, costs_of
from onchip.vocab.triton.memory import (
    TritonPlan,
    hidden_digits,
    id_bytes,
    may_hold,
    may_run_in_forward,
    sizes_of,
)
from onchip.vocab.triton.tiling import PROGRAMS, TOKEN_TILE, VOCAB_TILE, hidden_apart, hidden_units

# Plans that take up to so many times the least pass for equally fast: no model is better than that.
SLACK = 1.007
# A bound that is a sum in another order may be above what it bounds by a rounding.
LEAST = 1 + 1e-12
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


def in_whole_tiles(p: Problem) -> Problem:
    """The same with so many tokens that their tiles are whole, if there are more than a few."""
    return of_length(p, up(p.tokens, TOKEN_TILE)) if p.tokens > FEW_TOKENS else p


def of_length(p: Problem, tokens: int) -> Problem:
    """The same with so many tokens."""
    if tokens == p.tokens:
        return p
    weight = p.vocab * p.hidden * DTYPE_BYTES[p.weight_dtype]
    fixed = weight if p.copied >= weight else 0  # a copy of the weight doesn't grow with the tokens
    return p.with_tokens(tokens, fixed - (fixed - p.copied) * tokens // p.tokens)


def search(p: Problem, kept: tuple[int, int], strategy: str, budget: int) -> TritonPlan | None:
    """The fastest plan that fits; of equally fast ones, the smallest of those with few launches.  `kept`: for each
    strategy but 'auto', how many tokens are kept in the memory of the weight's gradient, and in scratch.
    """
    holds, auto = strategy != "recompute" and may_hold(p), strategy == "auto"
    made, columns = TritonSearch(p, kept, budget, most=auto and holds), up(p.vocab, VOCAB_TILE)
    if holds:
        # All in scratch: the weight's gradient in one launch.
        made.try_kept((0, made.rows), columns, columns, halves=False)
    forward = auto and p.tokens > 0 and may_run_in_forward(p)
    # What is likely to be best comes first, since it bounds the others; what is found doesn't depend on that.
    many = made.rows > made.sizes.capacity
    if forward and many:
        made.in_forward()
    some = made.keep()
    if forward and not many:
        made.in_forward()
    if forward:
        made.longer_first()
    made.keep_some(some)
    # With nothing kept, no chunk of the weight's gradient has to be held back: it is as large as that of the logits.
    made.keep_alike(kept)
    return made.plan()


class TritonSearch(Fastest[dict[str, Any]]):
    """Plans of a problem with gradients, as their fields.  Of equally fast ones, those that keep the host busy come
    last, then the larger ones.
    """

    def __init__(self, p: Problem, kept: tuple[int, int], budget: int, *, most: bool) -> None:
        """`most`: the weight's gradient holds as many tokens as it can, and scratch as fit; else `kept` are kept."""
        super().__init__(SLACK)
        self.problem, self.costs, self.sizes = p, costs_of(p), sizes_of(p)
        self.tokens, self.rows, self.columns = p.tokens, up(p.tokens, TOKEN_TILE), up(p.vocab, VOCAB_TILE)
        self.budget = budget - self.sizes.cast - p.copied - id_bytes(p)
        self.halves = (False, True) if p.grad_hidden else (False,)
        self.known: dict[tuple[int, bool], BesideCuts] = {}
        self.kept_bound = self.costs.kept_bound(p.tokens)
        self.least_weight = self.costs.least_weight * p.tokens
        # Of `what_fits`: what is kept at least, and how much more; beside that, and bytes of a token that is.
        self.kept = (min(self.rows, self.sizes.capacity), 0) if most else kept
        self.more, self.by_vocab = self.rows - self.kept[0] if most else 0, TOKEN_TILE * self.sizes.element
        self.least = []
        for halves in self.halves:
            vectors, *_, fixed, softmax, of_row, of_column = self.sizes.kept(p.tokens, *self.kept, halves=halves)
            each = TOKEN_TILE * self.sizes.exponentials
            each += self.sizes.of_tokens(self.tokens, sorted_by_target=True) - vectors
            in_halves = each - halves * 4 * TOKEN_TILE * self.sizes.hidden
            self.least.append((fixed, softmax, of_row, of_column, each, in_halves))

    def plan(self) -> TritonPlan | None:
        """The best plan."""
        if (best := self.best()) is None:
            return None
        soonest = self.soonest()
        # A chunk less saves more than the model says: hidden's gradient of 512 tokens took half as long again.
        return TritonPlan(**(soonest if self.problem.even and soonest and "in_forward" in soonest else best))

    # ------------------------------------------------------------------------------- exponentials that are kept

    def beside(self, kept: int, halves: bool) -> BesideCuts:
        made = self.known.get((kept, halves))
        if made is None:
            made = self.known[kept, halves] = self.costs.beside_cuts(self.tokens, kept, halves)
        return made

    def what_fits(self, vocab: int, weight: int, halves: bool) -> tuple[int, int] | None:
        """Tokens whose exponentials are kept in the memory of the weight's gradient, and in scratch, as many as fit
        beside such chunks; None: none of these do.
        """
        fixed, softmax, of_row, of_column, each, in_halves = self.least[halves]
        again = of_column * vocab
        if again >= softmax:  # what is kept isn't computed again, nor summed in two halves; else that has it all
            softmax, each = again, in_halves - self.by_vocab * vocab
        room = self.budget - fixed - of_row * weight - softmax
        if room < 0:
            return None
        return self.kept[0], self.kept[1] + (min(self.more, room // max(1, each) * TOKEN_TILE) if self.more else 0)

    def least_again(self, weight: int) -> float:
        """Tokens whose logits would be computed again if chunks of them took no memory."""
        (fixed, _, of_row, *_), left = self.least[0], max(0, self.tokens - sum(self.kept))
        room = self.budget - fixed - of_row * weight
        return max(0.0, left - room / self.sizes.exponentials) if self.more else left

    def some_bound(self, again: float, chunks: float) -> float:
        """Beside the weight's gradient no plan takes less that computes `least_again` tokens' logits again, in so many
        chunks: of a chunk's memory, 1 / chunks of theirs, some of these tokens could be kept.
        """
        time, each, launches, added = self.kept_bound
        if self.more and again:
            again *= chunks / (chunks - 1) if chunks > 1 else math.inf
        return time + again * each + (chunks - 1) * (launches + again * added)

    def try_kept(self, kept: tuple[int, int], vocab: int, weight: int, *, halves: bool) -> None:
        beside = self.beside(sum(kept), halves)
        cost = beside.time + self.costs.of_cuts(beside, self.tokens, vocab, weight)
        if cost > self.bound:
            return
        size = self.sizes.kept(self.tokens, *kept, halves=halves).size(vocab, weight)
        if size > self.budget:
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
        self.add(cost, (self.costs.is_late(weight), size, cost, 0, vocab, halves), fields)

    def keep(self) -> list[tuple[float, float, float, int, tuple[int, ...]]]:
        """Looks at plans that keep all tokens' exponentials.  Of chunks of the weight's gradient beside which only some
        are kept: what plans take at least, `least_again`, the chunk's time and size, and the chunks of logits that may
        go with it.
        """
        some, soonest = [], [math.inf, math.inf]
        time, each, launches, added = self.kept_bound
        least = time - launches + self.least_again(0) * each + self.least_weight
        if least > LEAST * self.bound:
            return []
        for of_token, of_launches, late, weight, sizes in _cuts(self.costs):
            time = self.tokens * of_token + of_launches
            if time >= MUCH_LONGER * soonest[late]:
                continue
            soonest[late] = min(soonest[late], time)
            if (held := self.what_fits(sizes[-1], weight, halves=False)) is None:
                continue
            if sum(held) >= self.rows:  # the size of the other chunks doesn't matter
                self.try_kept(held, sizes[-1], weight, halves=False)
                continue
            # More chunks are more launches, and fewer tokens that are computed again: with so many it is least.
            again, number = self.least_again(weight), 1.0
            if self.more:
                number = min(number + math.sqrt(again * each / (launches + again * added)), self.columns / sizes[-1])
            some.append((self.some_bound(again, number) + time, again, time, weight, sizes))
        return some

    def keep_some(self, some: list[tuple[float, float, float, int, tuple[int, ...]]]) -> None:
        """Looks at plans that keep some, of what `keep` returns."""
        for bound, again, time, weight, sizes in sorted(some):
            if bound > LEAST * self.bound:
                break
            tried = [x for x in sizes if self.some_bound(again, self.columns / x) + time <= LEAST * self.bound]
            listed = self.in_chunks(tried, time, weight)
            # Now that it is known how many are left: chunks whose tiles fill whole waves.
            waves = {PROGRAMS * n // left for *_, left in listed if left for n in (1, 2, 4)}
            filling = {min(x * VOCAB_TILE // weight * weight, up(self.columns, weight)) for x in waves}
            listed += self.in_chunks(filling.difference(sizes, (0,)), time, weight)
            for least, size, halves, held, _ in sorted(listed):
                if least > LEAST * self.bound:
                    break
                self.try_kept(held, size, weight, halves=halves)

    def in_chunks(self, sizes: Iterable[int], time: float, weight: int) -> list[tuple[Any, ...]]:
        """Of chunks of logits beside such a chunk of the weight's gradient: what plans take at least, the size, whether
        in halves, what is kept, and the rows of tiles that are left.
        """
        listed = []
        for size in sizes:
            for halves in self.halves:
                if (held := self.what_fits(size, weight, halves)) is None:
                    break
                at, left, product, more = self.beside(held[0] + held[1], halves)
                listed.append((at + product + more * -(-self.columns // size) + time, size, halves, held, left))
        return listed

    def keep_alike(self, kept: tuple[int, int]) -> None:
        """Plans whose chunks of logits and of the weight's gradient are the same."""
        time, each, launches, added = self.kept_bound
        again = max(0, self.tokens - sum(kept))
        bound, more = time + again * each, launches + again * added
        if bound + self.least_weight > LEAST * self.bound:
            return
        for halves in self.halves:
            sizes = self.sizes.kept(self.tokens, *kept, halves=halves)
            room, most = self.budget - sizes.fixed, self.columns
            for taken, each in (0, sizes.of_row + sizes.of_column), (sizes.softmax, sizes.of_row):
                most = min(most, (room - taken) // each if each else most if room >= taken else 0)
            most = most // VOCAB_TILE * VOCAB_TILE
            tried = [size for size in _alike(self.problem.hidden, self.problem.vocab) if size <= most]
            if most <= FEW_TILES * VOCAB_TILE or self.rows <= FEW_TOKENS or not self.problem.grad_weight:
                # A tile more or less counts: the largest that fits, and the largest whose tiles fill whole waves.
                waves = most * self.rows // (VOCAB_TILE * TOKEN_TILE * PROGRAMS)
                tried += [most, waves * PROGRAMS * TOKEN_TILE // max(TOKEN_TILE, self.rows) * VOCAB_TILE]
            for size in sorted({size for size in tried if size > 0}, reverse=True):
                least = bound + more * (-(-self.columns // size) - 1)
                if least > self.bound:
                    break
                if least + self.costs.weight(self.tokens, size) <= self.bound:
                    self.try_kept(kept, size, size, halves=halves)

    # ------------------------------------------------------------------------------- gradients in forward

    def in_forward(self) -> None:
        """Try chunks of tokens: even ones, from the fewest that fit on; the largest; and some that fill whole waves."""
        p, sizes, rows = self.problem, self.sizes, self.rows
        bound, more = self.costs.in_forward_bound(self.tokens)
        if bound + more * p.grad_weight > LEAST * self.bound:  # there are several chunks, if there is a sum
            return
        fixed = self.fixed_in_forward
        room = self.budget - fixed

        fits = largest(lambda size: sizes.even_chunk(min(size, p.tokens)) <= room, TOKEN_TILE, rows, TOKEN_TILE)
        fewest = -(-rows // fits)
        tried = {up(-(-rows // n), TOKEN_TILE) for n in range(fewest, fewest + 8)}
        tried |= {size for size in _filling(p.hidden) if size <= fits}
        tried |= {fits - n * TOKEN_TILE for n in range(8)}
        # One chunk needs no sum: its exponentials may as well be kept.  And small ones don't pay for adding.
        least, most = (SMALLEST_SUMMED, rows - TOKEN_TILE) if p.grad_weight else (TOKEN_TILE, rows)
        for size in sorted((x for x in tried if least <= x <= most), reverse=True):
            if bound + more * (-(-self.tokens // size) - 1) > self.bound:
                break
            if (chunk := sizes.even_chunk(min(size, p.tokens))) <= room:
                cost = self.costs.in_forward(self.tokens, size)
                self.add(cost, (False, fixed + chunk, cost, 1, size), {"token_chunk": size, "in_forward": True})

    @property
    def fixed_in_forward(self) -> int:
        """Bytes beside the chunks, where forward computes the gradients."""
        vectors = self.sizes.of_tokens(self.tokens, sorted_by_target=True)
        return vectors + hidden_digits(self.problem) + self.sizes.sum_in_scratch

    def longer_first(self) -> None:
        """Try chunks of tokens of which the first has as many more as make the others even."""
        p, costs, sizes, listed = self.problem, self.costs, self.sizes, []
        bound, more = costs.in_forward_bound(self.tokens)
        if not p.grad_weight or p.weight_grad_out or p.weight_dtype != p.dtype or bound + more > LEAST * self.bound:
            return
        fixed = self.fixed_in_forward
        rows, room, capacity = self.rows, self.budget - fixed, self.sizes.capacity
        step = up(rows // 128, TOKEN_TILE)  # of any number of tokens as many sizes
        for weight in _filling_weights(self.problem.hidden):
            first_chunk, other_chunk = (
                partial(sizes.first_chunk, weight=weight),
                partial(sizes.other_chunk, weight=weight),
            )
            if first_chunk(SMALLEST_SUMMED) > room:
                continue
            most = largest_within(first_chunk, room, SMALLEST_SUMMED, rows, TOKEN_TILE)
            # Of the other chunks, beside a first one that has no exponentials where digits will be, and the largest.
            beyond = sizes.digits_beyond(most, weight)
            short = largest_within(other_chunk, room, TOKEN_TILE, rows, TOKEN_TILE)
            long = largest_within(other_chunk, room - beyond, TOKEN_TILE, rows, TOKEN_TILE) if beyond else short
            # More chunks than that take too long: smaller ones would be more.
            others = (self.bound - bound) / more
            more_than = up(max(0, math.ceil((rows - most) / others) - SMALLEST_SUMMED), step) if others > 0 else rows
            for size in reversed(range(SMALLEST_SUMMED + more_than, min(short, most, rows - TOKEN_TILE) + 1, step)):
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
                other = sizes.other_chunk(size, weight) + sizes.digits_beyond(first, weight)
                chunk = max(sizes.first_chunk(first, weight), other)
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


@lru_cache(maxsize=1024)
def _cuts(costs: Costs) -> tuple[tuple[float, float, bool, int, tuple[int, ...]], ...]:
    """Chunks of the weight's gradient: what they take, of a token and of launches, whether they keep the host busy, how
    large they are; and the chunks of logits, of whole ones, that may go with each, the largest first.
    """
    hidden, vocab, made = costs.problem.hidden, costs.problem.vocab, []
    if not costs.problem.grad_weight:
        return ((0.0, 0.0, False, VOCAB_TILE, _alike(hidden, vocab)[::-1]),)
    for tiles in sorted(_weights(hidden, vocab)):
        weight, columns = tiles * VOCAB_TILE, up(costs.columns, tiles * VOCAB_TILE)
        sizes = {min(up(x * VOCAB_TILE, weight), columns) for x in _again(vocab) | {tiles}}
        taken = costs.of_weight(weight)
        made.append((*taken, costs.is_late(weight), weight, tuple(sorted(sizes, reverse=True))))
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
