"""`onchip bench --suite lengths`: what a user sees if every step has another number of tokens.

Each implementation runs in a process of its own, which begins with empty caches of compiled kernels.  Its first call
runs again in another process, which finds these caches filled.  All processes of a case import PyTorch at the same
time, before the first one measures.
"""

import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import TimeElapsedColumn

from onchip.bench import report
from onchip.bench.harness import BenchRow, NotRun, Outcome, judged, progress_bar, sizes_of
from onchip.bench.lengths_process import AskedLengths, implementations
from onchip.bench.peers import Implementation
from onchip.bench.timing import Timing

__all__ = ["NUMBER", "SUITE", "implementations", "run_cases"]

SUITE = "lengths"
NUMBER = 40
# What a process tells that it does, with lengths and without.
_STEPS, _FIRST_STEPS = 9, 5


@dataclass(frozen=True, kw_only=True)
class LengthsRow(BenchRow):
    """Calls of one kind: `median_ms` and the like are the caller's time, from the call until the device is done.

    `floor_ms` is the device's mean time for the same calls, and `ratio_to_floor` the ratio of the two means.
    """

    mean_ms: float | None = None
    worst_ms: float | None = None
    worst_ratio: float | None = None
    """The largest ratio of a call's time to its own time on the device."""


def mode_names(number: int) -> dict[str, str]:
    """The names of what a process measures."""
    return {
        "first": "first call, empty cache",
        "filled": "first call, filled cache",
        "second": "second call",
        "another": "first call of another length",
        "new": f"{number} lengths, first time",
        "again": f"{number} lengths, again",
        "queued": f"{number} lengths, queued",
    }


def run_cases(
    name: str,
    *,
    cases: Sequence[Any],
    chosen: Sequence[Implementation],
    device: str,
    dtype: str,
    date: str,
    console: Console,
) -> Outcome:
    """Measure these cases with the `chosen` implementations."""
    outcome = Outcome()
    with progress_bar(console, TimeElapsedColumn()) as progress:
        task = progress.add_task("", total=len(cases) * len(chosen) * (_STEPS + _FIRST_STEPS))
        try:
            for case in cases:
                before = len(outcome.rows)
                refusals = {impl.name: impl.unavailable(device, dtype) for impl in chosen}
                with ExitStack() as stack:
                    started = {name: _Pair(stack) for name, reason in refusals.items() if reason is None}
                    for processes in started.values():
                        processes.wait_for_imports()
                    for impl in chosen:
                        what = f"{case.name}: {impl.name}"

                        def tell(doing: str, what: str = what) -> None:
                            progress.update(task, advance=1, description=f"{what}, {doing}", refresh=True)

                        asked = AskedLengths(name, case, impl.name, device, dtype, NUMBER)
                        try:
                            if reason := refusals[impl.name]:
                                raise RuntimeError(reason)
                            outcome.rows.extend(_rows(asked, started[impl.name].measure(asked, tell), date))
                        except RuntimeError as error:
                            outcome.not_run.append(NotRun(impl.name, case.name, None, str(error)))
                report.print_rows([vars(row) for row in outcome.rows[before:]], console)
        except KeyboardInterrupt:
            outcome.stop([x.name for x in cases[cases.index(case) :]])
    return outcome


class _Pair:
    """Two that share their caches of compiled kernels; they end with `stack`."""

    def __init__(self, stack: ExitStack) -> None:
        caches = stack.enter_context(tempfile.TemporaryDirectory())
        self.empty, self.filled = (stack.enter_context(_Measuring(caches)) for _ in range(2))

    def wait_for_imports(self) -> None:
        self.empty.wait_for_imports()
        self.filled.wait_for_imports()

    def measure(self, asked: AskedLengths, tell: Callable[[str], None]) -> dict[str, Any]:
        """What the processes found; raises RuntimeError with the message of a process that failed."""
        found = self.empty.measure(asked, lambda doing: tell(f"empty cache, {doing}"))
        first = replace(asked, number=0)
        found["filled"] = self.filled.measure(first, lambda doing: tell(f"filled cache, {doing}"))["first"]
        return found


class _Measuring:
    """A process that imports PyTorch, then waits for what it shall measure."""

    def __init__(self, caches: str) -> None:
        of_caches = {f"{name}_CACHE_DIR": str(Path(caches) / name.lower()) for name in ("TRITON", "TORCHINDUCTOR")}
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed in __exit__
        self.process = subprocess.Popen(
            [sys.executable, "-m", "onchip.bench.lengths_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=os.environ | of_caches,
        )  # fmt: skip

    def __enter__(self) -> "_Measuring":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with suppress(BrokenPipeError), self.process:  # waits, and closes the pipes
            pass
        self.errors.close()

    def wait_for_imports(self) -> None:
        """Or until it has ended."""
        next(self._said(), None)

    def measure(self, asked: AskedLengths, tell: Callable[[str], None]) -> dict[str, Any]:
        """What it found; raises RuntimeError with its message if it failed."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as stdin:
            pickle.dump(asked, stdin)
        for said in self._said():
            if "found" in said:
                self.process.wait()
                return dict(said["found"])
            tell(said["doing"])
        self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"its process ended with {self.process.returncode}")

    def _said(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):  # a library's own words
                if isinstance(said := json.loads(line), dict):
                    yield said


def _rows(asked: AskedLengths, found: Mapping[str, Any], date: str) -> list[LengthsRow]:
    """A row for each kind of calls; a wrong result has no times."""
    errors = {name: (math.nan if error is None else error, bound) for name, (error, bound) in found["errors"].items()}
    judgement = judged(errors)
    made = LengthsRow(
        op=asked.op,
        case=asked.case.name,
        sizes=sizes_of(asked.case),
        dtype=asked.dtype,
        date=date,
        mode="",
        impl=f"{asked.impl} {found['version']}",
        config=found["config"],
        **judgement,
    )
    rows = []
    for short, mode in mode_names(asked.number).items():
        row = replace(made, mode=mode)
        if judgement["ok"] and (times := found.get(short)):
            mean = float(np.mean(times))
            row = replace(row, **vars(Timing.of(times)), mean_ms=mean, worst_ms=max(times))
            if short in ("new", "again", "queued") and (device := found.get("device")):
                of_device = float(np.mean(device))
                row = replace(row, floor_ms=of_device, ratio_to_floor=mean / of_device)
                if len(times) > 1:
                    row = replace(row, worst_ratio=max(t / d for t, d in zip(times, device, strict=True)))
        rows.append(row)
    return rows
