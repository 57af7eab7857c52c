"""Tunes one kernel on one case: every candidate's result is checked first, and only right ones are timed.

An op hands in what is needed here as plain names at the top level of its module: the protocol `Op`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from onchip.bench.harness import adapter, one_line, worst
from onchip.bench.timing import Step
from onchip.core.configs import format_config
from onchip.tune.log import Result

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


class DeviceLostError(ValueError):
    """A candidate has left the device unusable for this process."""


class Machine(NamedTuple):
    """What a run measures on."""

    device: str  # "cuda", or in tests "cpu"
    slug: str  # the device's name in paths, such as "h100"
    shared_bytes: int  # shared memory that one program can have
    framework: str = "torch"


@dataclass(frozen=True)
class Search:
    """One kernel on one case: what is tried, and where results go."""

    op: Op
    kernel: str
    sizes: Mapping[str, int]
    dtype: str
    machine: Machine
    results: dict[str, Result]
    """By `format_config`.  Candidates that are here before the search are not measured again."""
    record: Callable[[Result], None]
    """Called with each new result of a candidate that was run."""
    tick: Callable[[str], None]
    """Called with what is being done whenever a candidate is started, and before the final."""
    deadline: float
    """Value of `time.monotonic()` from when on no candidate is started."""

    def run(self, candidates: Sequence[Config]) -> dict[str, float] | None:
        """Measure all candidates, then the fastest ones and the first again.

        Returns:
            Median times of the final in milliseconds, by `format_config`; None if the time was up before it.

        Raises:
            DeviceLostError: a candidate broke the device; only a new process can go on.
            Exception: whatever the op raises while it makes the problem or the reference.
        """
        for config in candidates:
            needed = self.op.shared_bytes(self.kernel, config, self.dtype)
            if needed > self.machine.shared_bytes:
                reason = f"needs {needed} bytes of shared memory; there are {self.machine.shared_bytes}"
                self.results[format_config(config)] = Result(config, "shared memory", reason=reason)
        left = {name: c for c in candidates if (name := format_config(c)) not in self.results}
        if left and self._time_is_up():
            return None
        if not left and not self._fastest():
            return {}
        problem = self.op.make_problem(self.kernel, self.machine.device, self.dtype, **self.sizes)
        reference = self.op.reference(self.kernel, problem)
        for name, config in left.items():
            if self._time_is_up():
                return None
            self._tick(name)
            for ms in self._measure(problem, reference, [config], ROUGH_REPEATS).values():
                self._keep(Result(config, "right", ms=ms))
        self._tick("final")
        fastest = self._fastest()
        finalists = fastest[:FINALISTS] + [r for r in fastest[FINALISTS:] if r.config == candidates[0]]
        return self._measure(problem, reference, [r.config for r in finalists], FINAL_REPEATS)

    def _time_is_up(self) -> bool:
        return time.monotonic() >= self.deadline

    def _fastest(self) -> list[Result]:
        """The right ones, fastest first."""
        return sorted((r for r in self.results.values() if r.ms is not None), key=lambda r: r.ms or 0.0)

    def _tick(self, doing: str) -> None:
        for best in self._fastest()[:1]:
            doing += f" (best so far {best.ms:.3g} ms: {format_config(best.config)})"
        self.tick(doing)

    def _keep(self, result: Result) -> None:
        self.results[format_config(result.config)] = result
        self.record(result)

    def _measure(
        self, problem: Any, reference: Sequence[Any], configs: Sequence[Config], repeats: int
    ) -> dict[str, float]:
        """Median times of the configs whose result is right; of the others, `results` has why they are not.

        A config is checked whatever the log says of it, for the kernel may have changed since.
        """
        by_name = {format_config(config): config for config in configs}
        steps: dict[str, Step] = {}

        def give_up(name: str, error: Exception) -> None:
            reason = one_line(error)
            self._keep(Result(by_name[name], "failing", reason=reason))
            try:
                float(reference[0].sum())  # after an illegal memory access, say, every call of the process fails
            except Exception:
                raise DeviceLostError(
                    f"{self.kernel} with {name} has left the device unusable for this process ({reason}); run the "
                    "command again to go on: this config is in the log and will be passed over"
                ) from error

        for name, config in by_name.items():
            try:
                step = self.op.step(self.kernel, problem, config)
                error, bound = self.op.check(self.kernel, reference, step())
            except Exception as e:
                give_up(name, e)
                continue
            if error <= bound:  # False for NaN
                steps[name] = step
            else:
                self._keep(Result(config, "wrong", reason=f"error {error:.2e} is above {bound:.2e}"))
        timings = adapter(self.machine.framework).time_interleaved(
            steps, device=self.machine.device, repeats=repeats, on_error=give_up
        )
        return {name: timing.median_ms for name, timing in timings.items()}
