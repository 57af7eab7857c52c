"""Tunes one kernel on one case: every candidate's result is checked first, and only right ones are timed.

An op hands in what is needed here as plain names at the top level of its module: the protocol `Op`.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from onchip.bench.harness import adapter, one_line, worst
from onchip.bench.timing import Step
from onchip.core.configs import format_config

ROUGH_REPEATS = 3
# The fastest of all go into a final with more runs, together with the heuristic's config.
FINALISTS = 5
FINAL_REPEATS = 20

Config = Mapping[str, int]


class Op(Protocol):
    """What an op's module has at its top level."""

    KERNELS: Sequence[str]
    CASES: Mapping[str, Mapping[str, int]]
    """The sizes of each problem that has a name; a config is stored and found by them."""
    DEFAULT_CASES: Sequence[str]
    """Names of the cases that are tuned unless told otherwise."""
    DTYPES: Sequence[str]

    def candidates(self, kernel: str) -> Sequence[Config]:
        """The configs to try, all with the same names; the first is the heuristic's."""

    def shared_bytes(self, kernel: str, config: Config, dtype: str) -> int:
        """An estimate of the shared memory that a program takes with this config, in bytes."""

    def make_problem(self, kernel: str, device: str, dtype: str, **sizes: int) -> Any:
        """The kernel's seeded inputs on the device."""

    def reference(self, kernel: str, problem: Any) -> Sequence[Any]:
        """Arrays that results are checked against."""

    def step(self, kernel: str, problem: Any, config: Config) -> Step:
        """A call of the kernel with this config; it returns the kernel's results."""

    def check(self, kernel: str, reference: Sequence[Any], returned: Sequence[Any]) -> tuple[float, float]:
        """Error of what a step returned, and the bound that it must not pass."""


# ||out - reference|| / ||reference|| by the bytes of a result's numbers: four times the rounding of bfloat16, and a sum
# in float32.
_BOUNDS = {2: 1e-2, 4: 1e-3}


def worst_error(returned: Sequence[Any], reference: Sequence[Any]) -> tuple[float, float]:
    """The relative error of the result that comes nearest its bound or passes it furthest, and that bound."""
    pairs = [
        (float(((out - ref) ** 2).sum() / (ref**2).sum()) ** 0.5, _BOUNDS[out.dtype.itemsize])
        for out, ref in zip(returned, reference, strict=True)
    ]
    return worst(pairs)


class Machine(NamedTuple):
    """What a run measures on."""

    device: str  # "cuda", or in tests "cpu"
    slug: str  # the device's name in paths, such as "h100"
    shared_bytes: int  # shared memory that one program can have
    framework: str = "torch"


@dataclass
class Row:
    """What became of one kernel on one case."""

    kernel: str
    case: str
    dtype: str
    sizes: Mapping[str, int]
    status: str = "failed"
    """Or "tuned", "stored before", "unfinished" if the time was up; of a comparison how the config was found: "exact",
    "nearest", or "heuristic" if none was."""
    candidates: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """How many candidates were right, wrong, failing, or dropped for their shared memory."""
    config: Config | None = None
    heuristic_ms: float | None = None
    best_ms: float | None = None
    gain_percent: float | None = None
    """By how much the heuristic's time is above the best one."""
    reason: str | None = None
    """Why nothing was stored; of a comparison where the config comes from."""


class Result(msgspec.Struct, frozen=True):
    """What became of one candidate: a line of the log."""

    kernel: str
    dtype: str
    sizes: Mapping[str, int]
    versions: Mapping[str, str]
    config: Config
    outcome: Literal["right", "wrong", "failing", "shared memory"]
    """Only a right one is timed; one that needs more shared memory than there is is not even run."""
    ms: float | None = None
    """Median of the few first runs, in milliseconds."""
    reason: str | None = None


@dataclass(frozen=True)
class Search:
    """One kernel on one case: what is measured, and where results go."""

    op: Op
    machine: Machine
    row: Row
    versions: Mapping[str, str]
    deadline: float
    """Value of `time.monotonic()` from when on no candidate is started."""
    tick: Callable[[str], None]
    """Called with what is being done whenever a candidate is started, and before the final."""
    log: Path | None = None
    """A file with a line for each candidate that was run, so that an interrupted run can go on."""
    results: dict[str, Result] = field(default_factory=dict)
    """By `format_config`."""

    def run(self, candidates: Sequence[Config], *, again: bool = False) -> dict[str, float]:
        """Measure all candidates, then the fastest ones and the first again.

        Those that the log has are not measured again, unless that is asked for.

        Returns:
            Median times of the final in milliseconds, by `format_config`; without any, the row says why.

        Raises:
            ValueError: a candidate broke the device; only a new process can go on.
        """
        names = {format_config(config): config for config in candidates}
        if not again:
            self.results.update((name, result) for name, result in self._logged() if name in names)
        for name, config in names.items():
            needed = self.op.shared_bytes(self.row.kernel, config, self.row.dtype)
            if needed > self.machine.shared_bytes:
                reason = f"needs {needed} bytes of shared memory; there are {self.machine.shared_bytes}"
                self.results[name] = self._result(config, "shared memory", reason=reason)
        left = {name: config for name, config in names.items() if name not in self.results}
        times = self._times(left, candidates[0]) if left or self._fastest() else {}
        self.row.outcomes = dict(Counter(result.outcome for result in self.results.values()))
        if not times and self.row.reason is None:
            reasons = Counter(result.reason for result in self.results.values() if result.reason)
            self.row.reason = f"no candidate is right; most often: {reasons.most_common(1)[0][0]}"
        return times

    def _times(self, left: Mapping[str, Config], first: Config) -> dict[str, float]:
        """Those of the final, after the candidates that are left have been measured."""
        kernel, row = self.row.kernel, self.row
        if left and self._time_is_up():
            return {}
        try:
            problem = self.op.make_problem(kernel, self.machine.device, row.dtype, **row.sizes)
            reference = self.op.reference(kernel, problem)
        except Exception as e:  # too big for this device, say: the other cases may not be
            row.reason = one_line(e)
            return {}
        for name, config in left.items():
            if self._time_is_up():
                return {}
            self._tick(name)
            for ms in self._measure(problem, reference, [config], ROUGH_REPEATS).values():
                self._keep(self._result(config, "right", ms=ms))
        self._tick("final")
        fastest = self._fastest()
        finalists = fastest[:FINALISTS] + [r for r in fastest[FINALISTS:] if r.config == first]
        return self._measure(problem, reference, [r.config for r in finalists], FINAL_REPEATS)

    def _time_is_up(self) -> bool:
        if time.monotonic() < self.deadline:
            return False
        self.row.status = "unfinished"
        self.row.reason = f"the time was up after {len(self.results)} candidates; the same command goes on from there"
        return True

    def _fastest(self) -> list[Result]:
        """The right ones, fastest first."""
        return sorted((r for r in self.results.values() if r.ms is not None), key=lambda r: r.ms or 0.0)

    def _tick(self, doing: str) -> None:
        for best in self._fastest()[:1]:
            doing += f" (best so far {best.ms:.3g} ms: {format_config(best.config)})"
        self.tick(doing)

    def _result(self, config: Config, outcome: Any, ms: float | None = None, reason: str | None = None) -> Result:
        row = self.row
        return Result(row.kernel, row.dtype, row.sizes, self.versions, config, outcome, ms, reason)

    def _keep(self, result: Result) -> None:
        self.results[format_config(result.config)] = result
        if self.log is not None:
            # The newline goes first: half a line that a killed process left must not swallow this one.
            with self.log.open("ab") as file:
                file.write(b"\n" + msgspec.json.encode(result))

    def _logged(self) -> Iterator[tuple[str, Result]]:
        """The results for this problem, in their order; a line that can't be read is passed over."""
        row = self.row
        for line in self.log.read_bytes().splitlines() if self.log is not None and self.log.exists() else ():
            with contextlib.suppress(ValueError):
                r = msgspec.json.decode(line, type=Result)
                if (r.kernel, r.dtype, r.sizes, r.versions) == (row.kernel, row.dtype, row.sizes, self.versions):
                    yield format_config(r.config), r

    def _measure(
        self, problem: Any, reference: Sequence[Any], candidates: Sequence[Config], repeats: int
    ) -> dict[str, float]:
        """Median times of the configs whose result is right; of the others, `results` has why they are not.

        A config is checked whatever the log says of it, for the kernel may have changed since.
        """
        kernel = self.row.kernel
        by_name = {format_config(config): config for config in candidates}
        steps: dict[str, Step] = {}

        def give_up(name: str, error: Exception) -> None:
            reason = one_line(error)
            self._keep(self._result(by_name[name], "failing", reason=reason))
            try:
                float(reference[0].sum())  # after an illegal memory access, say, every call of the process fails
            except Exception:
                raise ValueError(
                    f"{kernel} with {name} has left the device unusable for this process ({reason}); run the "
                    "command again to go on: this config is in the log and will be passed over"
                ) from error

        for name, config in by_name.items():
            try:
                step = self.op.step(kernel, problem, config)
                error, bound = self.op.check(kernel, reference, step())
            except Exception as e:
                give_up(name, e)
                continue
            if error <= bound:  # False for NaN
                steps[name] = step
            else:
                self._keep(self._result(config, "wrong", reason=f"error {error:.2e} is above {bound:.2e}"))
        timings = adapter(self.machine.framework).time_interleaved(
            steps, device=self.machine.device, repeats=repeats, on_error=give_up
        )
        return {name: timing.median_ms for name, timing in timings.items()}
