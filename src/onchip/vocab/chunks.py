"""The planner: how a problem over a vocabulary is cut into chunks that fit a budget.  Imports no framework.

Each backend declares its memory formula, the plans that it can run, and what they cost.  The choice among them, and the
refusal of a budget that is too small, are the same for all.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from onchip.core.sizes import MIB, up

DEFAULT_SCRATCH = 256 * MIB
# Chunks of tokens and of the vocabulary.  Below the smallest nothing is planned, whatever the budget: a matrix product
# would be all overhead.  A useful one keeps the device busy; the default budget allows for it.  'stash' in addition
# reads and writes the float32 weight gradient once per chunk: on an H100 (T4096 H4096 V128256, bfloat16) it took 61 ms
# with chunks of 256 tokens, 41 with 512, 32 with 1024 and 29 with 2048, where 'recompute' in 256 MiB took 39.
SMALLEST = (64, 512)
USEFUL = {"cpu": (64, 512), "cuda": (1024, 4096)}

Plan = TypeVar("Plan")


@dataclass(frozen=True)
class ChunkConfig:
    """How a [tokens, vocab] problem is cut.  `strategy` is 'forward' if nothing needs a gradient; otherwise it says how
    gradients are made: 'stash' or 'recompute'.
    """

    strategy: str
    token_chunk: int
    vocab_chunk: int


@dataclass(frozen=True, eq=False)
class Planner(Generic[Plan]):
    """What a backend declares about its plans.  A problem is hashable and has `op`, the name that errors begin with."""

    parts: Callable[[Any, Plan], dict[str, int]]
    """Peak memory above inputs, results and returned gradients, in bytes, part by part."""
    candidates: Callable[[Any, str, int], Iterable[Plan]] | None
    """The plans of a strategy to choose from in a budget: few, since each is compared.  They need not fit.  Of equal
    ones the first is taken."""
    cost: Callable[[Any, Plan], float]
    """Predicted time, in any unit."""
    least: Callable[[Any, str], int]
    """Bytes of scratch that a strategy needs to run at all."""
    default: Callable[[Any, str], int]
    """The budget of a call that gives none."""
    needs: Callable[[Any, str], str]
    """How the refusal of a budget goes on: the sizes, and what needs more."""
    advice: str = "raise scratch_bytes"
    slack: float = 1.0
    """Plans that cost up to this many times the least count as equally fast: no model is more exact than that."""
    search: Callable[[Any, str, int], Plan | None] | None = None
    """Replaces `candidates` where these would be many: returns the best plan of a strategy that fits, or None if none
    does."""
    whole: Callable[[Any], Any] | None = None
    """Rounds a problem's tokens up.  If the caller gives no budget, all problems that become the same have one plan."""

    def scratch_bytes(self, p: Any, c: Plan) -> int:
        """Peak memory above inputs, results and returned gradients, in bytes."""
        return sum(self.parts(p, c).values())

    def require(self, p: Any, strategy: str, budget: int | None) -> None:
        """Raise ValueError if the budget is too small for the strategy."""
        if budget is not None and (least := self.least(p, strategy)) > budget:
            raise ValueError(
                f"{p.op}: scratch_bytes={budget} is too small for {self.needs(p, strategy)} {least} bytes; "
                f"{self.advice}"
            )

    @lru_cache(maxsize=1024)  # noqa: B019 - planners live as long as their modules
    def plan(self, p: Any, strategy: str = "auto", budget: int | None = None) -> Plan:
        """The cheapest plan whose scratch fits the budget; of equally fast ones, the smallest.

        Raises:
            ValueError: nothing fits; the message names the smallest budget that does.
        """
        if budget is None:
            if self.whole is not None and (whole := self.whole(p)) is not p:
                return self.plan(whole, strategy)
            budget = self.default(p, strategy)
        found = (self.search or self.compare)(p, strategy, budget)
        if found is None:
            self.require(p, strategy, budget)
        assert found is not None, f"what {p} needs at least fits, but no plan"
        return found

    def compare(self, p: Any, strategy: str, budget: int) -> Plan | None:
        """The best of the candidates that fit."""
        assert self.candidates is not None
        made = Fastest[Plan](self.slack)
        for c in self.candidates(p, strategy, budget):
            if (size := self.scratch_bytes(p, c)) <= budget:
                cost = self.cost(p, c)
                made.add(cost, (size, cost), c)
        return made.best()


class Fastest(Generic[Plan]):
    """The fastest of the plans that fit a budget, for a search that soon knows a bound of what a plan may cost: of
    plans beyond it, neither cost nor memory is computed.
    """

    def __init__(self, slack: float) -> None:
        self._slack, self._found = slack, list[tuple[float, tuple[Any, ...], Plan]]()
        self.bound = math.inf

    def add(self, cost: float, order: tuple[Any, ...], plan: Plan) -> None:
        """Add a plan.  `order`: of equally fast plans, the one with the least order is taken."""
        if cost <= self.bound:
            self._found.append((cost, order, plan))
            self.bound = min(self.bound, self._slack * cost)

    def best(self) -> Plan | None:
        equal = [x for x in self._found if x[0] <= self.bound]
        return min(equal, key=lambda x: x[1])[2] if equal else None

    def soonest(self) -> Plan | None:
        """The fastest itself."""
        return min(self._found, key=lambda x: (round(x[0], 9), x[1]))[2] if self._found else None


def default_scratch(logits_bytes: int, useful: int = 0, part: int = 8) -> int:
    """256 MiB or an eighth (1/part) of the float32 logits, whichever is more, and at least what useful chunks need."""
    return max(DEFAULT_SCRATCH, logits_bytes // part, useful)


def largest(fits: Callable[[int], bool], smallest: int, total: int, unit: int = 64) -> int:
    """`total`, or the largest multiple of `unit` that fits, but at least `smallest`.  If a size fits, so do all below
    it.
    """
    if total <= smallest:
        return smallest
    if fits(total):
        return total
    low, high = smallest // unit, -(-total // unit)  # in units: `high` is too large
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * unit) else (low, middle)
    return max(smallest, low * unit)


def largest_within(size: Callable[[int], int], room: int, smallest: int, total: int, unit: int = 64) -> int:
    """As `largest`, for a `size` that must not exceed `room`.  The more linear the size is, the sooner this is
    found.
    """
    if total <= smallest or (above := size(total)) <= room:
        return max(smallest, total)
    if (below := size(smallest)) > room:  # a few may need more sums
        return largest(lambda n: size(n) <= room, smallest, total, unit)
    low, high, guesses = smallest // unit, -(-total // unit), 0  # in units: `high` is too large
    while high - low > 1:
        guess, guesses = low + (room - below) * (high - low) // (above - below), guesses + 1
        guess = (low + high) // 2 if guesses % 4 == 0 else min(max(guess, low + 1), high - 1)
        taken = size(guess * unit)
        low, below, high, above = (guess, taken, high, above) if taken <= room else (low, below, guess, taken)
    return max(smallest, low * unit)


def even_chunk(total: int, largest: int, unit: int = 64) -> int:
    """The chunk size, at most `largest`, that cuts `total` into the fewest chunks, as even as multiples of `unit`
    allow.
    """
    if largest >= total:
        return max(1, total)
    return min(largest, up(-(-total // -(-total // largest)), unit))


def in_chunks(total: int, size: int) -> list[int]:
    """The sizes of chunks of `total`: all but the last are whole."""
    return [size] * (total // size) + ([total % size] if total % size else [])


def waves(tiles: int, programs: int, *, halves: bool = False) -> float:
    """How often the programs take a tile, if those of the last wave may be cut in halves."""
    whole, rest = divmod(tiles, programs)
    return whole + (0.0 if rest == 0 else 0.5 if halves and 2 * rest <= programs else 1.0)
