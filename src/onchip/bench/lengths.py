"""`onchip bench --suite lengths`: what a user sees if every step has another number of tokens.

Each implementation runs in a process of its own, which begins with empty caches of compiled kernels.  Its first call
runs again in another process, which finds these caches filled.
"""

import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
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
                for impl in chosen:
                    what = f"{case.name}: {impl.name}"

                    def tell(doing: str, what: str = what) -> None:
                        progress.update(task, advance=1, description=f"{what}, {doing}", refresh=True)

                    asked = AskedLengths(name, case, impl.name, device, dtype, NUMBER)
                    try:
                        if reason := impl.unavailable(device, dtype):
                            raise RuntimeError(reason)
                        outcome.rows.extend(_rows(asked, _measure(asked, tell), date))
                    except RuntimeError as error:
                        outcome.not_run.append(NotRun(impl.name, case.name, None, str(error)))
                report.print_rows([vars(row) for row in outcome.rows[before:]], console)
        except KeyboardInterrupt:
            outcome.stop([x.name for x in cases[cases.index(case) :]])
    return outcome


def _measure(asked: AskedLengths, tell: Callable[[str], None]) -> dict[str, Any]:
    """What the processes found; raises RuntimeError with the message of a process that failed."""
    with tempfile.TemporaryDirectory() as caches:
        found = _in_process(asked, caches, lambda doing: tell(f"empty cache, {doing}"))
        first = replace(asked, number=0)
        found["filled"] = _in_process(first, caches, lambda doing: tell(f"filled cache, {doing}"))["first"]
    return found


def _in_process(asked: AskedLengths, caches: str, tell: Callable[[str], None]) -> dict[str, Any]:
    of_caches = {f"{name}_CACHE_DIR": str(Path(caches) / name.lower()) for name in ("TRITON", "TORCHINDUCTOR")}
    command = [sys.executable, "-m", "onchip.bench.lengths_process"]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=os.environ | of_caches
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin as stdin:
                pickle.dump(asked, stdin)
            for line in process.stdout:
                try:
                    said = json.loads(line)
                except ValueError:  # a library's own words
                    continue
                if "found" in said:
                    process.wait()
                    return dict(said["found"])
                tell(said["doing"])
            process.wait()
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"its process ended with {process.returncode}")


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
