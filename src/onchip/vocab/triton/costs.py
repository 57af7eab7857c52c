"""What a plan will take: the cost model of the Triton backend.  Imports no framework."""

from functools import lru_cache
from typing import NamedTuple

from onchip.core.sizes import up
from onchip.vocab.memory import Problem
from onchip.vocab.triton.memory import TritonPlan, sizes_of, sum_bytes
from onchip.vocab.triton.tiling import (
    PROGRAMS,
    TOKEN_TILE,
    VOCAB_TILE,
    chunk_hidden,
    even_step,
    evenness,
    hidden_apart,
    hidden_columns,
    hidden_evenness,
    hidden_sums,
    hidden_time,
)


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


# Launches of weight's product: with more the host is kept busy.
MOST_WEIGHT_CHUNKS = 11


class BesideCuts(NamedTuple):
    """What `Costs.of_cuts` needs to know about a plan that keeps exponentials."""

    time: float  # ms
    left: int  # rows of tiles whose logits are computed again
    product: float  # ms of that product, spread evenly
    more: float  # ms of each chunk of these


class Costs:
    """Milliseconds that a problem's plans take by these rates, for any number of tokens."""

    def __init__(self, p: Problem, rates: Rates) -> None:
        self.problem, self.rates, self.sizes = p, rates, sizes_of(p)
        self.hidden, self.columns, self.tiles = p.hidden, up(p.vocab, VOCAB_TILE), -(-p.vocab // VOCAB_TILE)
        self.product = 2e-9 * p.hidden * p.vocab / rates.product  # of a token, as the next
        self.keep, self.again = (1e-9 * p.vocab * rate for rate in (rates.keep, rates.again))
        self.apart = hidden_apart(p.hidden)
        self.add = 1e-9 * rates.add * p.hidden
        self.launch = 1e-3 * rates.launch
        self.launches = 1 + p.grad_hidden + p.grad_weight  # of a chunk of tokens whose gradients forward makes
        columns = hidden_columns(p.hidden)
        self.blocks = -(-p.hidden // columns)
        self.padding = self.blocks * columns / max(1, p.hidden)  # of the weight's product
        # Units of the weight's product in a column of the vocabulary, of each pass.
        self.units = self.blocks * columns / 256 / TOKEN_TILE
        self.units_by_tokens = self.blocks / TOKEN_TILE
        self.whole = evenness(round(self.columns * self.units_by_tokens), rates.programs)
        self.accumulate = 1e-9 * rates.accumulate * sum_bytes(p) if p.grad_weight else 0.0
        self.token = self.product + 1e-9 * p.vocab * rates.softmax
        self.least_hidden = up(p.hidden, 128) / max(1, p.hidden)  # of what hidden's gradient takes, over its product
        self.least_weight = self.product * self.padding if p.grad_weight else 0.0  # of a token

    def alone(self, tokens: int, token_chunk: int) -> float:
        """Without gradients."""
        return tokens * self.token + self.launch * (4 + 3 * (-(-tokens // max(1, token_chunk)) - 1))

    # ------------------------------------------------------------------------------- gradients in forward

    def in_forward(self, tokens: int, size: int, first: int = 0, weight_chunk: int = 0) -> float:
        """With gradients that forward makes, in chunks of so many tokens, of which the first may be longer."""
        first = min(first, tokens)
        number, last = divmod(tokens - first, size)
        whole, short = -(-size // TOKEN_TILE), -(-last // TOKEN_TILE)
        if short == whole and size <= tokens:  # of as many tiles as the others
            number, short = number + 1, 0
        taken = number * self._of_chunk(whole)[0] if number else 0.0
        if short:
            number += 1
            of_rows, slices = self._of_chunk(short)
            if slices > 1:  # unless the sums of the largest chunk are for fewer
                room = self.sizes.work(short * TOKEN_TILE, min(size, tokens), 0, longer=False) // (4 * self.hidden)
                of_rows, _ = self._of_chunk(short, room // (short * TOKEN_TILE))
            taken += of_rows
        time = self.launch * (4 + number * self.launches)
        if first:
            of_rows, launches = self._of_first(-(-first // TOKEN_TILE), weight_chunk)
            number, taken, time = number + 1, taken + of_rows, time + self.launch * launches
        if number > 1:
            time += self.accumulate * (number - 1)
        return time + tokens * (self.token + self.keep + taken / max(1, -(-tokens // TOKEN_TILE)))

    @lru_cache(maxsize=1 << 14)  # noqa: B019 - those of a head are kept with it
    def _of_chunk(self, rows: int, most: int | None = None) -> tuple[float, int]:
        """Of a chunk of so many rows of tiles: what a token of each row takes; and in how many sums hidden's gradient
        is made, `most` if that is less.
        """
        taken, slices, added = evenness(rows * self.tiles, self.rates.programs) - 1, 1, 0
        if self.problem.grad_hidden:
            slices = hidden_sums(rows * TOKEN_TILE, self.hidden)
            slices = slices if most is None else max(1, min(slices, most))
            taken += hidden_time(rows, self.hidden, slices, self.rates.programs)
            added = 2 * slices - 1  # each sum is zeroed, and read once more
        if self.problem.grad_weight:
            taken += self.padding * self.whole
        return rows * (self.product * taken + self.add * added), slices

    @lru_cache(maxsize=1 << 14)  # noqa: B019
    def _of_first(self, rows: int, weight_chunk: int) -> tuple[float, int]:
        """Of a longer first chunk: what a token of each row takes, and launches."""
        taken = rows * self.product * (evenness(rows * self.tiles, self.rates.programs) - 1)
        launches = 1
        if self.problem.grad_weight:
            uneven, of_weight = self.of_first_weight(weight_chunk)
            launches += of_weight
            taken += rows * self.product * self.padding * uneven
        if self.problem.grad_hidden:
            lent = self.sizes.weight_row * weight_chunk
            room = self.sizes.work(rows * TOKEN_TILE, 0, lent, longer=True) // (4 * self.hidden)
            step = even_step(rows * TOKEN_TILE, self.hidden, room) // TOKEN_TILE
            number, last = divmod(rows, step)
            for n, times in (step, number), (last, int(last > 0)):
                if times:
                    slices = chunk_hidden(n * TOKEN_TILE, self.hidden, room)[1]
                    uneven = hidden_time(n, self.hidden, slices, self.rates.programs)
                    taken += times * n * (self.product * uneven + self.add * (2 * slices - 1))
                    launches += times
        return taken, launches

    # ------------------------------------------------------------------------------- exponentials that are kept

    def kept(self, tokens: int, kept: int, vocab_chunk: int, weight_chunk: int, *, halves: bool) -> float:
        """With gradients made in backward: for `kept` tokens from exponentials, for the others from logits that are
        computed again.
        """
        beside = self.beside_cuts(tokens, kept, halves)
        return beside.time + self.of_cuts(beside, tokens, vocab_chunk, weight_chunk)

    def beside_cuts(self, tokens: int, kept: int, halves: bool) -> "BesideCuts":
        """The part that doesn't depend on the chunks of such a plan."""
        launch, programs, hidden = self.launch, self.rates.programs, self.hidden
        rows, held, kept = -(-tokens // TOKEN_TILE), kept // TOKEN_TILE, min(kept, tokens)
        left, again = max(0, rows - held), tokens - kept
        time, more = tokens * self.token + 8 * launch + kept * self.keep, 0.0
        if left:
            time, more = time + again * self.again, launch
        if self.problem.grad_hidden:
            time += tokens * self.add + launch
            if held:
                uneven = hidden_evenness(min(rows, held), hidden, self.apart, 2, programs)
                time += kept * self.product * uneven + launch
            if left:
                uneven = hidden_evenness(left, hidden, self.apart, 2 if halves else 1, programs)
                time += again * self.product * uneven
                more += again * self.add + launch
        return BesideCuts(time, left, again * self.product, more)

    def of_cuts(self, beside: "BesideCuts", tokens: int, vocab_chunk: int, weight_chunk: int) -> float:
        """The part that depends on the chunks, given the part `beside` them."""
        programs, columns, time = self.rates.programs, self.columns, 0.0
        if beside.left:
            uneven = cut_evenness(columns, vocab_chunk, beside.left / VOCAB_TILE, programs)
            time += beside.product * uneven + beside.more * -(-columns // vocab_chunk)
        if self.problem.grad_weight:
            uneven, launches = nested_evenness(columns, vocab_chunk, weight_chunk, self.units, programs)
            time += tokens * self.product * self.padding * uneven + self.launch * launches
        return time

    def of_weight(self, chunk: int) -> tuple[float, float]:
        """Of the weight's gradient in backward: what a token adds, and launches."""
        if not self.problem.grad_weight:
            return 0.0, 0.0
        uneven, launches = nested_evenness(self.columns, chunk, chunk, self.units, self.rates.programs)
        return self.product * self.padding * uneven, self.launch * launches

    def is_late(self, chunk: int) -> bool:
        """Whether so many launches of weight's product keep the host busy: the GPU is no faster."""
        return self.problem.grad_weight and chunk * MOST_WEIGHT_CHUNKS < self.problem.vocab

    def kept_bound(self, tokens: int) -> tuple[float, float, float, float]:
        """Beside the weight's gradient no plan that keeps exponentials takes less, with one chunk of logits that are
        computed again; with each token of these, each chunk more, and each of these tokens in that it takes so much
        more.
        """
        time, again = tokens * (self.token + self.keep) + 9 * self.launch, self.product + self.again
        if not self.problem.grad_hidden:
            return time, again - self.keep, self.launch, 0.0
        time += tokens * (self.product * self.least_hidden + self.add) + 2 * self.launch
        return time, again - self.keep + self.add, 2 * self.launch, self.add

    def in_forward_bound(self, tokens: int, weight_chunk: int = 0) -> tuple[float, float]:
        """A bound for plans with gradients made in forward: no plan with one chunk takes less; and what each further
        chunk adds.  `weight_chunk`: of a longer first chunk.
        """
        p, product = self.problem, tokens * self.product
        more = self.launches * self.launch
        time = tokens * (self.token + self.keep) + 4 * self.launch + more
        if p.grad_hidden:
            time += product * self.least_hidden + tokens * self.add
        if p.grad_weight:
            uneven, launches = self.of_first_weight(weight_chunk) if weight_chunk else (self.whole, 1)
            time += product * self.padding * min(uneven, self.whole) + self.launch * (launches - 1)
        return time, more + self.accumulate

    @lru_cache(maxsize=1 << 14)  # noqa: B019
    def excess(self, rows: int) -> float:
        """What a token of each row of a chunk of so many rows of tiles takes beyond that bound."""
        even = self.product * (self.least_hidden * self.problem.grad_hidden + self.padding * self.whole)
        return self._of_chunk(rows)[0] - rows * (even + self.add * self.problem.grad_hidden)

    def of_first_weight(self, chunk: int) -> tuple[float, int]:
        """Of the weight's product of a longer first chunk: how uneven it is, and launches."""
        return nested_evenness(self.columns, chunk, chunk, self.units_by_tokens, self.rates.programs)


def cut_evenness(total: int, size: int, units: float, programs: int) -> float:
    """The time of launches for chunks of so many columns, divided by that of the same work spread evenly; `units`: of
    work, in a column.
    """
    rest = total % size or min(size, total)
    share, whole = rest / total, evenness(round(min(size, total) * units), programs)
    return whole if rest == size else (1 - share) * whole + share * evenness(round(rest * units), programs)


@lru_cache(maxsize=1 << 14)
def nested_evenness(total: int, outer: int, inner: int, units: float, programs: int) -> tuple[float, int]:
    """As `cut_evenness`, for chunks that are cut into `inner` ones; and how many these are."""
    number, rest = divmod(total, outer)
    launches = number * -(-outer // inner) + -(-rest // inner)
    end = (rest or outer) % inner or inner
    whole, last = (evenness(round(x * units), programs) for x in (min(inner, outer, total), min(end, total)))
    share = min(end, total) / total
    return (1 - share) * whole + share * last, launches


def costs_of(p: Problem, rates: Rates = RATES["h100"]) -> Costs:
    return _costs(p.head, rates)


@lru_cache(maxsize=1024)
def _costs(p: Problem, rates: Rates) -> Costs:
    return Costs(p, rates)


def predict(p: Problem, c: TritonPlan, rates: Rates = RATES["h100"]) -> float:
    """Milliseconds of forward and, if gradients are wanted, of backward, by the cost model."""
    costs = costs_of(p, rates)
    if not p.any_grad:
        return costs.alone(p.tokens, c.token_chunk)
    if c.in_forward:
        return costs.in_forward(p.tokens, c.token_chunk, c.first_chunk, c.weight_chunk)
    return costs.kept(p.tokens, c.kept, c.vocab_chunk, c.weight_chunk, halves=c.halves)
