"""The rows of a plan: what a call does in each budget, or for each layer.  Imports no framework."""

from collections.abc import Sequence
from typing import Any

from onchip.core.sizes import MIB, UNITS
from onchip.frontend.options import require_int, require_positive_int, scratch_in_bytes
from onchip.plan.asked import LayerPlan, PlannedCall, StepPlan, Way
from onchip.plan.document import Row
from onchip.plan.words import budget_text

_BUDGETS_MIB = (64, 256, 1024, 4096, 16384)
_NO_BOUND = 1 << 62


def in_bytes(op: str, value: float | str, logits: int) -> int | None:
    """The bytes of a budget, given as an op's scratch_bytes takes it; None for a fraction of less than a byte."""
    budget = scratch_in_bytes(op, value, logits)
    if value is None or budget is not None:
        require_int(op, "scratch_bytes", budget)
        require_positive_int(op, "scratch_bytes", budget)
    return None if budget is None else int(budget)


def few_rows(way: Way, asked: Sequence[int]) -> list[Row]:
    """The default budget and those that are asked for; if none are, the smallest, the default one and the fastest."""
    default = _row(way, "default", None)
    if asked:
        return [default, *(_row(way, budget_text(size), size) for size in asked)]
    smallest = _row(way, "smallest", _rounded(min(way.least(strategy) for strategy in way.strategies)))
    largest = _row(way, "fastest" if default.ms is not None else "largest", _NO_BOUND)
    largest = _row(way, largest.name, _rounded(largest.memory_bytes or 0))
    of_default, of_smallest, of_largest = (row.memory_bytes or 0 for row in (default, smallest, largest))
    faster = default.ms is None or (largest.ms is not None and largest.ms < 0.98 * default.ms)
    before = [smallest] if of_smallest < 0.95 * of_default else []
    return [*before, default, *([largest] if faster and of_largest > 1.05 * of_default else [])]


def many_rows(way: Way, asked: Sequence[int], logits_bytes: int) -> list[Row]:
    """Rows for many budgets and all strategies."""
    least = min(way.least(strategy) for strategy in way.strategies)
    sizes = {_rounded(least), *(mib * MIB for mib in _BUDGETS_MIB), _rounded(logits_bytes // 8), *asked}
    budgets = [("default", None), *((budget_text(size), size) for size in sorted(sizes)), ("no bound", _NO_BOUND)]
    return [_row(way, name, size, strategy) for name, size in budgets for strategy in _chosen_first(way, size)]


def _chosen_first(way: Way, budget: int | None) -> list[str]:
    """All strategies; the one that the op takes in this budget comes first."""
    try:
        chosen = way.chosen(budget)
    except ValueError:
        return list(way.strategies)
    return [chosen, *(strategy for strategy in way.strategies if strategy != chosen)]


def _row(way: Way, name: str, budget: int | None, strategy: str | None = None) -> Row:
    """The row for a budget and a strategy, by default the one that the op takes."""
    shown = None if budget == _NO_BOUND else budget
    try:
        strategy = strategy or way.chosen(budget)
        step = way.step(strategy, budget)
    except ValueError:
        strategy = strategy or min(way.strategies, key=way.least)
        least = way.least(strategy)
        return Row(name=name, strategy=strategy, scratch_bytes=shown, budget_bytes=shown, fits=False, needs_bytes=least)
    default = way.default(strategy) if budget is None else shown
    given = {"strategy": strategy, "scratch_bytes": shown, "budget_bytes": default, "needs_bytes": way.least(strategy)}
    return _fitting(step, name, **given)


def layer_row(asked: PlannedCall, layer: LayerPlan, name: str, backend: str) -> Row:
    """The row for the layer of that name."""
    step, plain_ms = layer.step(asked, name, backend), layer.plain_ms(asked, asked.linears[name])
    return _fitting(step, name, plain_ms=plain_ms)


def _fitting(step: StepPlan, name: str, **more: Any) -> Row:
    size = sum(step.memory_parts.values())
    of_layer = {"strategy": "auto", "scratch_bytes": None, "budget_bytes": None, "needs_bytes": size}
    return Row(name=name, fits=True, memory_bytes=size, **step._asdict(), **of_layer | more)


def _rounded(size: int) -> int:
    """A size rounded up to what people can read: whole MiB, from 128 MiB on multiples of 16, then quarters of a GiB."""
    unit = UNITS["GiB"] // 4 if size >= UNITS["GiB"] else 16 * MIB if size >= 128 * MIB else MIB
    return -(-size // unit) * unit
