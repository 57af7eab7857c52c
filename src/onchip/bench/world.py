"""What the processes of a benchmark decide together: of one process nothing, of ranks all that the harness does.

Imports no framework; `onchip.bench.torch_world` has the ranks.
"""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Alone:
    """One process."""

    def every(self, value: T) -> list[T]:
        """The value of each rank, on every rank."""
        return [value]

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns; if it raises on one rank, every rank raises, so that none waits for another."""
        return work()

    def time(self, time_once: Callable[..., float], step: Any, device: str) -> float:
        """Milliseconds of one run of a step: those of the slowest rank, where all begin at once."""
        return time_once(step, device)


ALONE = Alone()
