"""The search for a plan with gradients: bounds on what cuts take decide which of them are compared.  Imports no
framework.
"""

import math
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import Any

from onchip.core.sizes import DTYPE_BYTES, up
from onchip.vocab.chunks import Fastest, largest, largest_within
from onchip.vocab.memory import Problem
from onchip.vocab.triton.costs import BesideCuts, Costs, costs_of
from onchip.vocab.triton.memory import (
    KeptBytes,
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
# The field of a plan.
IN_FORWARD = 6
# So many times the tokens are more than any.
ALL = 1e9


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
    if holds and made.sizes.exponentials * made.rows <= made.budget:
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


class TritonSearch(Fastest[tuple[Any, ...]]):
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
        self.sized: dict[tuple[tuple[int, int], bool], KeptBytes] = {}
        # What a plan may take, and one that is late, which means that it keeps the host busy: no more than any other.
        self.bounds = math.inf, math.inf
        self.kept_bound = self.costs.kept_bound(p.tokens)
        self.least_weight = self.costs.least_weight * p.tokens
        # Of `what_fits`: what is kept at least, and how much more; beside that, and bytes of a token that is.
        self.kept = (min(self.rows, self.sizes.capacity), 0) if most else kept
        self.more, self.by_vocab = self.rows - self.kept[0] if most else 0, TOKEN_TILE * self.sizes.element
        self.left = max(0, self.tokens - sum(self.kept))
        self.least = [self.least_of(halves=False)]

    def least_of(self, *, halves: bool) -> tuple[int, int, int, int, int, int]:
        """Bytes of `what_fits`, with as few kept as there may be: of all; of the softmax, a row and a column of chunks;
        of so many tokens more that a tile has; and if no softmax has room for their sums.
        """
        vectors, *_, fixed, softmax, of_row, of_column = self.bytes_of(self.kept, halves)
        each = TOKEN_TILE * self.sizes.exponentials
        each += self.sizes.of_tokens(self.tokens, sorted_by_target=True) - vectors
        return fixed, softmax, of_row, of_column, each, each - halves * 4 * TOKEN_TILE * self.sizes.hidden

    def plan(self) -> TritonPlan | None:
        """The best plan."""
        best = self.best()
        # A chunk less saves more than the model says: hidden's gradient of 512 tokens took half as long again.
        if self.problem.even and (soonest := self.soonest()) is not None and soonest[IN_FORWARD]:
            best = soonest
        return None if best is None else TritonPlan(*best)

    # ------------------------------------------------------------------------------- exponentials that are kept

    def beside(self, kept: int, halves: bool) -> BesideCuts:
        made = self.known.get((kept, halves))
        if made is None:
            made = self.known[kept, halves] = self.costs.beside_cuts(self.tokens, kept, halves)
        return made

    def bytes_of(self, kept: tuple[int, int], halves: bool) -> KeptBytes:
        made = self.sized.get((kept, halves))
        if made is None:
            made = self.sized[kept, halves] = self.sizes.kept(self.tokens, *kept, halves=halves)
        return made

    def what_fits(self, vocab: int, weight: int, halves: bool) -> int:
        """Tokens whose exponentials are kept in scratch, as many as fit beside such chunks; below 0 if none of these
        do.
        """
        fixed, softmax, of_row, of_column, each, in_halves = self.least[halves]
        again = of_column * vocab
        if again >= softmax:  # what is kept isn't computed again, nor summed in two halves; else that has it all
            softmax, each = again, in_halves - self.by_vocab * vocab
        room = self.budget - fixed - of_row * weight - softmax
        if room < 0 or not self.more:
            return self.kept[1] if room >= 0 else room
        more = room // max(1, each) * TOKEN_TILE
        return self.kept[1] + (more if more < self.more else self.more)

    def least_again(self, room: int) -> float:
        """Tokens whose logits would be computed again if chunks of them took none of so much memory."""
        return max(0.0, self.left - room / self.sizes.exponentials) if self.more else self.left

    def some_bound(self, again: float, more: float, of_chunk: float) -> float:
        """Beside the weight's gradient no plan takes less that computes `least_again` tokens' logits again, in so many
        chunks `more` than one: of a chunk's memory, 1 / `of_chunk` of theirs, some of these tokens could be kept.
        """
        time, each, launches, added = self.kept_bound
        if self.more:
            again *= of_chunk
        return time + again * (each + more * added) + more * launches

    def add(self, cost: float, order: tuple[Any, ...], plan: tuple[Any, ...]) -> None:
        """The same; `order` begins with whether the plan is late."""
        super().add(cost, order, plan)
        late = self.bounds[True] if order[0] else min(self.bounds[True], LEAST * cost)
        self.bounds = LEAST * self.bound, min(LEAST * self.bound, late)

    def try_kept(self, kept: tuple[int, int], vocab: int, weight: int, *, halves: bool) -> None:
        late, beside = self.costs.is_late(weight), self.beside(kept[0] + kept[1], halves)
        cost = beside.time + self.costs.of_cuts(beside, self.tokens, vocab, weight)
        if cost > self.bounds[late]:
            return
        if (size := self.bytes_of(kept, halves).size(vocab, weight)) > self.budget:
            return
        if not self.problem.grad_weight:
            weight = vocab
        self.add(cost, (late, size, cost, 0, vocab, halves), (self.tokens, vocab, weight, *kept, halves, False))

    def keep(self) -> list[tuple[Any, ...]]:
        """Looks at plans that keep all tokens' exponentials.  Of chunks of the weight's gradient beside which only some
        are kept: what plans take at least, `least_again`, the chunk's time and size, whether these are late, and the
        chunks of logits that may go with it.
        """
        some, soonest = [], [math.inf, math.inf]
        at, each, launches, added = self.kept_bound
        fixed, softmax, of_row, of_column, *_ = self.least[0]
        least = at - launches + self.least_again(self.budget - fixed) * each + self.least_weight
        if least > LEAST * self.bound:
            return []
        for of_token, of_launches, late, weight, sizes in _cuts(self.costs):
            time = self.tokens * of_token + of_launches
            if time >= MUCH_LONGER * soonest[late]:
                continue
            soonest[late] = min(soonest[late], time)
            room, smallest = self.budget - fixed - of_row * weight, sizes[-1][0]
            if room < softmax or room < of_column * smallest:
                continue
            if not (again := self.least_again(room)):
                held = self.what_fits(smallest, weight, halves=False)
                if self.kept[0] + held >= self.rows:  # the size of the other chunks doesn't matter
                    self.try_kept((self.kept[0], held), smallest, weight, halves=False)
                    continue
            least = time + at + again * each
            if self.more:
                # More chunks are more launches, and fewer tokens that are computed again: with so many it is least.
                more = min(math.sqrt(again * each / (launches + again * added)), sizes[-1][1])
                least = time + (self.some_bound(again, more, 1 + 1 / more) if more else 0)
            some.append((least, again, time, weight, late, sizes))
        return some

    def keep_some(self, some: list[tuple[Any, ...]]) -> None:
        """Looks at plans that keep some, of what `keep` returns."""
        for least, again, time, weight, late, sizes in sorted(some):
            bound = self.bounds[late]
            if least > bound:
                continue
            tried = [(time + self.some_bound(again, more, of_chunk), size) for size, more, of_chunk in sizes]
            lefts = set[int]()
            for least, size in sorted(tried):
                if least > bound:
                    break
                lefts |= self.try_some(size, weight, time, late)
                bound = self.bounds[late]
            # Now that it is known how many are left: chunks whose tiles fill whole waves.
            most = 4 * PROGRAMS * VOCAB_TILE // weight
            if waves := {PROGRAMS * n // left for left in lefts if 0 < left <= most for n in (1, 2, 4)}:
                filling = {min(x * VOCAB_TILE // weight * weight, up(self.columns, weight)) for x in waves}
                for size in filling.difference((0,), (size for size, *_ in sizes)):
                    self.try_some(size, weight, time, late)

    def try_some(self, vocab: int, weight: int, time: float, late: bool) -> set[int]:
        """Tries such chunks, with as many tokens kept as fit; returns how many rows of tiles may be left.  `time`: of
        the weight's gradient.
        """
        lefts, more, in_gradient = set(), -(-self.columns // vocab) - 1, self.kept[0]
        (at, each, launches, added), bound = self.kept_bound, self.bounds[late] - time
        for halves in self.halves:
            if halves == len(self.least):
                self.least.append(self.least_of(halves=True))
            if (held := self.what_fits(vocab, weight, halves)) < 0:
                break
            again = self.tokens - in_gradient - held
            if at + again * (each + more * added) + more * launches > bound:  # halves leave more
                break
            beside = self.beside(in_gradient + held, halves)
            lefts.add(beside.left)
            if beside.time + beside.product + beside.more * (more + 1) <= bound:
                self.try_kept((in_gradient, held), vocab, weight, halves=halves)
        return lefts

    def keep_alike(self, kept: tuple[int, int]) -> None:
        """Plans whose chunks of logits and of the weight's gradient are the same."""
        time, each, launches, added = self.kept_bound
        again = max(0, self.tokens - sum(kept))
        bound, more = time + again * each, launches + again * added
        if bound + self.least_weight > LEAST * self.bound:
            return
        for halves in self.halves:
            sizes, beside = self.bytes_of(kept, halves), self.beside(sum(kept), halves)
            room, most = self.budget - sizes.fixed, self.columns
            for taken, each in (0, sizes.of_row + sizes.of_column), (sizes.softmax, sizes.of_row):
                most = min(most, (room - taken) // each if each else most if room >= taken else 0)
            most = most // VOCAB_TILE * VOCAB_TILE
            tried = [x for x in _alike(self.costs) if x[0] <= most]
            if most <= FEW_TILES * VOCAB_TILE or self.rows <= FEW_TOKENS or not self.problem.grad_weight:
                # A tile more or less counts: the largest that fits, and the largest whose tiles fill whole waves.
                waves = most * self.rows // (VOCAB_TILE * TOKEN_TILE * PROGRAMS)
                filling = waves * PROGRAMS * TOKEN_TILE // max(TOKEN_TILE, self.rows) * VOCAB_TILE
                missing = {x for x in (most, filling) if x > 0}.difference(x for x, *_ in tried)
                tried += [(x, *self.costs.of_weight(x), self.costs.is_late(x)) for x in missing]
                tried.sort(reverse=True)
            for size, of_token, of_launches, late in tried:
                chunks = -(-self.columns // size)
                if (least := bound + more * (chunks - 1)) > self.bound:
                    break
                least = max(least, beside.time + beside.product + beside.more * chunks)
                if least + self.tokens * of_token + of_launches <= self.bounds[late]:
                    self.try_kept(kept, size, size, halves=halves)

    # ------------------------------------------------------------------------------- gradients in forward

    def in_forward(self) -> None:
        """Try chunks of tokens: even ones, from the fewest that fit on; the largest; and some that fill whole waves."""
        p, sizes, rows = self.problem, self.sizes, self.rows
        bound, more = self.costs.in_forward_bound(self.tokens)
        if bound + more * p.grad_weight > LEAST * self.bound:  # there are several chunks, if there is a sum
            return
        fixed, tokens = self.fixed_in_forward, self.tokens
        room = self.budget - fixed

        def chunk_of(size: int) -> int:
            return sizes.even_chunk(size if size < tokens else tokens)[0]

        most = (room + sizes.exponentials * sizes.room) // (sizes.row + sizes.exponentials)  # if that were all
        fits = largest(lambda size: size <= most + TOKEN_TILE and chunk_of(size) <= room, TOKEN_TILE, rows, TOKEN_TILE)
        fewest = -(-rows // fits)
        tried = {up(-(-rows // n), TOKEN_TILE) for n in range(fewest, fewest + 8)}
        tried |= {size for size in _filling(p.hidden) if size <= fits}
        tried |= {fits - n * TOKEN_TILE for n in range(8)}
        # One chunk needs no sum: its exponentials may as well be kept.  And small ones don't pay for adding.
        least, most = (SMALLEST_SUMMED, rows - TOKEN_TILE) if p.grad_weight else (TOKEN_TILE, rows)
        for size in sorted((x for x in tried if least <= x <= most), reverse=True):
            if (taken := bound + more * (-(-tokens // size) - 1)) > self.bound:
                break
            # What is uneven of each that is whole is known at once.
            taken += tokens // size * tokens / rows * TOKEN_TILE * self.costs.excess(size // TOKEN_TILE)
            if taken <= LEAST * self.bound and (chunk := chunk_of(size)) <= room:
                cost = self.costs.in_forward(tokens, size)
                self.add(cost, (False, fixed + chunk, cost, 1, size), (size, 0, 0, 0, 0, False, True))

    @cached_property
    def fixed_in_forward(self) -> int:
        """Bytes beside the chunks, where forward computes the gradients."""
        vectors = self.sizes.of_tokens(self.tokens, sorted_by_target=True)
        return vectors + hidden_digits(self.problem) + self.sizes.sum_in_scratch

    def longer_first(self) -> None:
        """Try chunks of tokens of which the first has as many more as make the others even."""
        p, sizes, listed = self.problem, self.sizes, list[tuple[int, int, int, int, int, float]]()
        if not p.grad_weight or p.weight_grad_out or p.weight_dtype != p.dtype:
            return
        fixed, tokens, rows, capacity = self.fixed_in_forward, self.tokens, self.rows, sizes.capacity
        room, held = self.budget - fixed, capacity + sizes.in_digits(rows)
        step = up(rows // 128, TOKEN_TILE)  # of any number of tokens as many sizes
        for weight in _filling_weights(p.hidden):
            bound, more = self.costs.in_forward_bound(tokens, weight)
            allowed = (LEAST * self.bound - bound) / more  # chunks after the first
            if allowed < 1 or (most := min(rows, sizes.longest_first(weight, room))) < SMALLEST_SUMMED:
                continue
            other_chunk = sizes.other_chunk(weight)
            # Of the other chunks, beside a first one that has no exponentials where digits will be, and the largest.
            beyond = sizes.digits_beyond(most, weight)
            short = largest_within(other_chunk, room, TOKEN_TILE, rows, TOKEN_TILE)
            long = largest_within(other_chunk, room - beyond, TOKEN_TILE, rows, TOKEN_TILE) if beyond else short
            # Smaller ones would be more than are allowed.
            more_than = up(max(0, math.ceil((rows - most) / allowed) - SMALLEST_SUMMED), step)
            for size in range(SMALLEST_SUMMED + more_than, min(short, most, rows // 2) + 1, step):
                here = most if size <= long else min(most, max(size, capacity))
                others = -(min(-size, here - rows) // size)  # at least one
                first = rows - others * size
                if size < first < tokens and others <= allowed:
                    # What first has in scratch, or the others.
                    in_scratch = first - held if first - held > size else size
                    listed.append((in_scratch, others, first, size, weight, bound + more * others))
        if len(listed) > MOST_LONGER:
            listed = sorted(listed)[:MOST_LONGER]
        for _, others, first, size, weight, least in listed:
            least += others * tokens / rows * TOKEN_TILE * self.costs.excess(size // TOKEN_TILE)
            if least <= LEAST * self.bound:
                cost = self.costs.in_forward(tokens, size, first, weight)
                if cost <= self.bound:
                    other = sizes.other_chunk(weight)(size) + sizes.digits_beyond(first, weight)
                    chunk = max(sizes.first_chunk(first, weight), other)
                    if chunk <= room:
                        plan = size, 0, weight, 0, 0, False, True, first
                        self.add(cost, (False, fixed + chunk, cost, 2, weight, size), plan)


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


@lru_cache(maxsize=1024)
def _alike(costs: Costs) -> tuple[tuple[int, float, float, bool], ...]:
    """Entries of the vocabulary whose logits are computed again, followed by their weight gradient: how many, the most
    first; what the latter takes, of a token and of launches; and whether it keeps the host busy.
    """
    sizes = sorted(_again(costs.problem.vocab) | _weights(costs.problem.hidden, costs.problem.vocab), reverse=True)
    return tuple((x, *costs.of_weight(x), costs.is_late(x)) for x in (tiles * VOCAB_TILE for tiles in sizes))


@lru_cache(maxsize=1024)
def _cuts(costs: Costs) -> tuple[tuple[float, float, bool, int, tuple[tuple[int, float, float], ...]], ...]:
    """Chunks of the weight's gradient: what they take, of a token and of launches, whether they keep the host busy, how
    large they are; and the chunks of logits, of whole ones, that may go with each, the largest first, with the last two
    arguments of `some_bound`.
    """
    hidden, vocab, made = costs.problem.hidden, costs.problem.vocab, []

    def with_bound(sizes: Iterable[int]) -> tuple[tuple[int, float, float], ...]:
        numbers = ((size, costs.columns / size) for size in sorted(sizes, reverse=True))
        return tuple((size, n - 1, n / (n - 1) if n > 1 else ALL) for size, n in numbers)

    if not costs.problem.grad_weight:
        return ((0.0, 0.0, False, VOCAB_TILE, with_bound(size for size, *_ in _alike(costs))),)
    for tiles in sorted(_weights(hidden, vocab)):
        weight, columns = tiles * VOCAB_TILE, up(costs.columns, tiles * VOCAB_TILE)
        sizes = {min(up(x * VOCAB_TILE, weight), columns) for x in _again(vocab) | {tiles}}
        taken = costs.of_weight(weight)
        made.append((*taken, costs.is_late(weight), weight, with_bound(sizes)))
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
