"""Tunes one kernel on one case: every candidate's result is checked first, and only right ones are timed.

An op hands in what is needed here as plain names at the top level of its `tuning` module: the protocol `Op`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from onchip.bench.measuring import measuring
from onchip.bench.timing import Step
from onchip.core.configs import format_config
from onchip.tune.log import Result, config_key

# Candidates are checked and timed in batches: within one, runs alternate, and after each its results are safe.
BATCH = 8
ROUGH_REPEATS = 3
# The fastest of all go into a final with more runs, together with the heuristic's config.
FINALISTS = 5
FINAL_REPEATS = 20


class Op(Protocol):
    """What an op's `tuning` module has at its top level."""

    KERNELS: Sequence[str]
    CASES: Mapping[str, Any]
    DEFAULT_CASES: Sequence[str]
    """Names of the cases that are tuned unless told otherwise."""
    DTYPES: Sequence[str]

    def sizes(self, case: Any) -> Mapping[str, int]:
        """The sizes by which a config is stored and found; each is 1 or more."""

    def candidates(self, kernel: str, case: Any, dtype: str) -> Sequence[Mapping[str, int]]:
        """The configs to try, all with the same names; the first is the heuristic's."""

    def shared_bytes(self, kernel: str, config: Mapping[str, int], dtype: str) -> int:
        """An estimate of the shared memory that a program takes with this config, in bytes."""

    def make_problem(self, kernel: str, case: Any, device: str, dtype: str) -> Any:
        """The kernel's inputs on the device."""

    def reference(self, kernel: str, problem: Any) -> Any:
        """What results are checked against."""

    def step(self, kernel: str, problem: Any, config: Mapping[str, int]) -> Step:
        """A call of the kernel with this config; it returns the kernel's results."""

    def check(self, kernel: str, reference: Any, returned: Sequence[Any]) -> tuple[float, float]:
        """Error of what a step returned, and the bound that it must not pass."""


class DeviceLostError(ValueError):
    """A candidate has left the device unusable for this process."""


@dataclass(frozen=True)
class Machine:
    """What a run measures on."""

    device: str
    """ "cuda", or in tests "cpu"."""
    slug: str
    """The device's name in paths, such as "h100"."""
    shared_bytes: int
    """Shared memory that one program can have, in bytes."""
    framework: str = "torch"
    """What the op's kernels run in."""


@dataclass(frozen=True)
class Tuned:
    """What tuning a kernel on a case has found.  Times are medians of the final, in milliseconds."""

    results: Sequence[Result]
    finished: bool
    """False if the time was up before all candidates were measured; there is no best one then."""
    times: Mapping[Any, float] = field(default_factory=dict)
    """Of those in the final, by `config_key`."""
    best: Mapping[str, int] | None = None
    best_ms: float | None = None
    heuristic_ms: float | None = None
    """None where the heuristic's config is not a right one."""


@dataclass(frozen=True)
class Search:
    """One kernel on one case: what is tried, and where results go."""

    op: Op
    kernel: str
    case: Any
    dtype: str
    machine: Machine
    candidates: Sequence[Mapping[str, int]]
    known: Mapping[tuple[tuple[str, int], ...], Result]
    """Results of an earlier run, by `config_key`; these candidates are not measured again."""
    record: Callable[[Result], None]
    """Called with each new result of a candidate that was run."""
    tick: Callable[[str], None]
    """Called with what is being done whenever a candidate is started, and before the final."""
    deadline: float
    """Value of `time.monotonic()` from when on no candidate is started."""

    def run(self) -> Tuned:
        """Measure all candidates, the most promising ones again, and choose.

        Raises:
            DeviceLostError: a candidate broke the device; only a new process can go on.
            Exception: whatever the op raises while it makes the problem or the reference.
        """
        results: dict[Any, Result] = {}
        left = []
        for config in {config_key(c): dict(c) for c in self.candidates}.values():
            needed = self.op.shared_bytes(self.kernel, config, self.dtype)
            if needed > self.machine.shared_bytes:
                reason = f"needs {needed} bytes of shared memory; there are {self.machine.shared_bytes}"
                results[config_key(config)] = Result(config, "shared memory", reason=reason)
            elif config_key(config) in self.known:
                results[config_key(config)] = self.known[config_key(config)]
            else:
                left.append(config)
        if left and self.time_is_up():
            return Tuned(list(results.values()), finished=False)
        if not left and not any(_right(results)):
            return Tuned(list(results.values()), finished=True)
        problem = self.op.make_problem(self.kernel, self.case, self.machine.device, self.dtype)
        reference = self.op.reference(self.kernel, problem)
        while left and not self.time_is_up():
            measured = self.batch(problem, reference, left[:BATCH], results)
            left = left[measured:]
        if left:
            return Tuned(list(results.values()), finished=False)
        times = self.final(problem, reference, results)
        best = min(times, key=lambda key: times[key], default=None)
        return Tuned(
            list(results.values()),
            finished=True,
            times=times,
            best=dict(results[best].config) if best is not None else None,
            best_ms=times[best] if best is not None else None,
            heuristic_ms=times.get(config_key(self.candidates[0])),
        )

    def time_is_up(self) -> bool:
        return time.monotonic() >= self.deadline

    def keep(self, results: dict[Any, Result], result: Result) -> None:
        results[config_key(result.config)] = result
        self.record(result)

    def batch(
        self, problem: Any, reference: Any, configs: Sequence[Mapping[str, int]], results: dict[Any, Result]
    ) -> int:
        """Check `configs` one by one until the time is up, then time the right ones; returns how many were checked."""
        steps: dict[str, Step] = {}
        by_name = {format_config(config): config for config in configs}
        checked = 0
        for name, config in by_name.items():
            if checked and self.time_is_up():  # the first is due: the caller has looked at the clock
                break
            self.tick(_progress(name, results))
            checked += 1
            if step := self.checked_step(problem, reference, config, results):
                steps[name] = step
        timings = measuring(self.machine.framework).time_interleaved(
            steps,
            device=self.machine.device,
            repeats=ROUGH_REPEATS,
            on_error=lambda name, e: self.give_up(by_name[name], e, results),
        )
        for name, timing in timings.items():
            self.keep(results, Result(by_name[name], "right", ms=timing.median_ms))
        return checked

    def final(self, problem: Any, reference: Any, results: dict[Any, Result]) -> dict[Any, float]:
        """Median times of the fastest candidates and of the heuristic's, in milliseconds, by `config_key`."""
        fastest = sorted(_right(results), key=lambda r: r.ms or 0.0)[:FINALISTS]
        first = results[config_key(self.candidates[0])]
        if first.outcome == "right" and first not in fastest:
            fastest.append(first)
        by_name = {format_config(result.config): result.config for result in fastest}
        self.tick(_progress("final", results))
        steps: dict[str, Step] = {}
        for name, config in by_name.items():
            # Checked once more, for the kernel may have changed since an earlier run has logged it as right.
            if step := self.checked_step(problem, reference, config, results):
                steps[name] = step
        timings = measuring(self.machine.framework).time_interleaved(
            steps,
            device=self.machine.device,
            repeats=FINAL_REPEATS,
            on_error=lambda name, e: self.give_up(by_name[name], e, results),
        )
        return {config_key(by_name[name]): timing.median_ms for name, timing in timings.items()}

    def checked_step(
        self, problem: Any, reference: Any, config: Mapping[str, int], results: dict[Any, Result]
    ) -> Step | None:
        """The step of a config whose result is right; of another, why not goes into `results`."""
        try:
            step = self.op.step(self.kernel, problem, config)
            error, bound = self.op.check(self.kernel, reference, step())
        except Exception as e:
            self.give_up(config, e, results)
            return None
        if error <= bound:  # False for NaN
            return step
        self.keep(results, Result(config, "wrong", reason=f"error {error:.2e} is above {bound:.2e}"))
        return None

    def give_up(self, config: Mapping[str, int], error: Exception, results: dict[Any, Result]) -> None:
        reason = one_line(error)
        self.keep(results, Result(config, "failing", reason=reason))
        if not _device_works(self.machine):
            raise DeviceLostError(
                f"{self.kernel} with {format_config(config)} has left the device unusable for this process ({reason}); "
                "run the command again to go on: this config is in the log and will be passed over"
            ) from error


def one_line(error: Exception) -> str:
    """What was raised, without the advice that follows in some messages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _right(results: Mapping[Any, Result]) -> Iterator[Result]:
    return (result for result in results.values() if result.outcome == "right")


def _progress(doing: str, results: Mapping[Any, Result]) -> str:
    best = min(_right(results), key=lambda r: r.ms or 0.0, default=None)
    return doing if best is None else f"{doing} (best so far {best.ms:.3g} ms: {format_config(best.config)})"


def _device_works(machine: Machine) -> bool:
    """False after an illegal memory access, say: every later call of the process would fail too."""
    if machine.device == "cpu":
        return True
    try:
        if machine.framework == "torch":
            import torch

            torch.cuda.synchronize()
        else:
            import jax

            jax.block_until_ready(jax.numpy.zeros(1) + 1)
    except Exception:
        return False
    return True
