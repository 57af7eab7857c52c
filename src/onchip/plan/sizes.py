"""The budgets that plans are shown for, and how sizes are written."""

from collections.abc import Sequence

from onchip.core.sizes import MIB

BUDGETS_MIB = (64, 256, 1024, 4096, 16384)


def budgets(scratch_mib: Sequence[int] | None) -> list[int | None]:
    """In bytes: the default one, which is None, and those asked for or else `BUDGETS_MIB`."""
    return [None, *(mib * MIB for mib in scratch_mib or BUDGETS_MIB)]


def in_mib(size: int) -> str:
    """Rounded up, so that what fits in the printed number fits."""
    return str(-(-size // MIB)) if size >= 10 * MIB else f"{-(-10 * size // MIB) / 10:.1f}"


def budget_in_mib(budget: int | None) -> str:
    """The same, or "default"."""
    return "default" if budget is None else in_mib(budget)
