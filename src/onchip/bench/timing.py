"""Times several steps in turn, in any framework.

A step is a callable without arguments that returns the arrays it leaves behind (loss, gradients).
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

Step = Callable[[], Sequence[Any]]
TimeOnce = Callable[..., float]
"""Returns the milliseconds of one run of a step on "cpu" or "cuda"; the ranks of a group begin it together."""


T = TypeVar("T")


class Alone:
    """What the processes of a benchmark decide together: nothing for one process, everything for ranks."""

    def every(self, value: T) -> list[T]:
        """The value of each rank, on every rank."""
        return [value]

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns; if it raises on one rank, every rank raises, so that none waits for another."""
        return work()

    def time(self, time_once: Callable[..., float], step: Any, device: str) -> float:
        """Milliseconds of one run of a step on the slowest rank; all ranks begin it together."""
        return time_once(step, device)


ALONE = Alone()


@dataclass(frozen=True)
class Timing:
    """Median and spread of a step's time, in milliseconds."""

    median_ms: float
    p10_ms: float
    p90_ms: float

    @classmethod
    def of(cls, times: Sequence[float]) -> "Timing":
        return cls(*(float(q) for q in np.percentile(times, (50, 10, 90))))


def _raise(name: str, error: Exception) -> None:
    raise error


def time_interleaved(
    time_once: TimeOnce,
    steps: Mapping[str, Step],
    *,
    device: str,
    repeats: int,
    warmup: int = 1,
    tick: Callable[[], None] = lambda: None,
    on_error: Callable[[str, Exception], None] = _raise,
    world: Alone = ALONE,
) -> dict[str, Timing]:
    """Time several steps in rounds, so that a machine that warms up or throttles hits all alike.

    Each round has a different, seeded order.  A GPU that has cooled down during a slow step runs the next one faster
    (18.3 and 19.9 ms were seen for the same step), so no step may always follow the same other one.

    `tick` is called after every run of a step.  A step that raises is reported to `on_error`; if that returns, the step
    is left out of the next rounds and of the result.
    """
    samples: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for round_ in range(warmup + repeats):
        for name in order.sample(list(samples), len(samples)):
            try:
                elapsed = world.time(time_once, steps[name], device)
            except Exception as e:
                on_error(name, e)
                del samples[name]
                continue
            if round_ >= warmup:
                samples[name].append(elapsed)
            tick()
    return {name: Timing.of(times) for name, times in samples.items()}
