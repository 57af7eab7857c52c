"""`onchip bench --suite lengths`: what a user sees whose steps have another number of tokens each time.

Each implementation runs in a process of its own, with empty caches of compiled kernels, and its first call once more in
another process that finds them filled.
"""

import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from onchip.bench.harness import NotRun, Outcome, Row, sizes_of, worst
from onchip.bench.lengths_process import Asked, implementations
from onchip.bench.peers import Implementation
from onchip.bench.report import kind, wrong_numbers
from onchip.bench.units import format_ms, format_ratio
from onchip.core.tables import print_table

__all__ = ["NUMBER", "SUITE", "implementations", "print_rows", "run_cases"]

SUITE = "lengths"
NUMBER = 40
# What a process tells that it does, with lengths and without.
_STEPS, _FIRST_STEPS = 9, 5


@dataclass(frozen=True, kw_only=True)
class LengthsRow(Row):
    """Calls of one kind: `median_ms` and the like are the caller's time, from the call until the device is done.

    `floor_ms` is the mean of the device's time of the same calls, and `ratio_to_floor` that of the means.
    """

    mean_ms: float | None
    worst_ms: float | None
    worst_ratio: float | None
    """The largest multiple of its own device's time that one of the calls took."""


def mode_names(number: int) -> dict[str, str]:
    """Of what a process measures."""
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
    number: int | None = None,
) -> Outcome:
    """Measure these cases with these of the `implementations`."""
    number = NUMBER if number is None else number
    outcome = Outcome()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=len(cases) * len(chosen) * (_STEPS + _FIRST_STEPS))
        try:
            for case in cases:
                before = len(outcome.rows)
                for impl in chosen:
                    what = f"{case.name}: {impl.name}"

                    def tell(doing: str, what: str = what) -> None:
                        progress.update(task, advance=1, description=f"{what}, {doing}", refresh=True)

                    if reason := impl.unavailable(device, dtype):
                        outcome.not_run.append(NotRun(impl.name, case.name, None, reason))
                        continue
                    asked = Asked(name, case, impl.name, device, dtype, number)
                    try:
                        found = _measure(asked, tell)
                    except RuntimeError as error:
                        outcome.not_run.append(NotRun(impl.name, case.name, None, str(error)))
                        continue
                    outcome.rows.extend(_rows(asked, found, date))
                print_rows([vars(row) for row in outcome.rows[before:]], console)
        except KeyboardInterrupt:
            outcome.stop([x.name for x in cases[cases.index(case) :]])
    return outcome


def _measure(asked: Asked, tell: Callable[[str], None]) -> dict[str, Any]:
    """What the processes found; raises RuntimeError with what one said that failed."""
    with tempfile.TemporaryDirectory() as caches:
        found = _in_process(asked, caches, lambda doing: tell(f"empty cache, {doing}"))
        first = Asked(**{**vars(asked), "number": 0})
        found["filled"] = _in_process(first, caches, lambda doing: tell(f"filled cache, {doing}"))["first"]
    return found


def _in_process(asked: Asked, caches: str, tell: Callable[[str], None]) -> dict[str, Any]:
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


def _rows(asked: Asked, found: Mapping[str, Any], date: str) -> list[LengthsRow]:
    """A row for each kind of calls; a wrong result has no times."""
    errors = {name: (math.nan if error is None else error, bound) for name, (error, bound) in found["errors"].items()}
    ok = all(error <= bound for error, bound in errors.values())
    named = {name: error if math.isfinite(error) else None for name, (error, _) in errors.items()}
    error, bound = worst(errors.values())
    of_worst = next(name for name, pair in errors.items() if pair == (error, bound) or math.isnan(error))
    rows = []
    for short, mode in mode_names(asked.number).items():
        times = found.get(short) if ok else None
        device = found.get("device") if ok and short in ("new", "again", "queued") else None
        mean, of_device = (float(np.mean(x)) if x else None for x in (times, device))
        percentiles = [float(x) for x in np.percentile(times, (50, 10, 90))] if times else [None] * 3
        ratios = [t / d for t, d in zip(times, device, strict=True)] if times and device and len(times) > 1 else None
        row = LengthsRow(
            op=asked.op,
            case=asked.case.name,
            sizes=sizes_of(asked.case),
            dtype=asked.dtype,
            date=date,
            mode=mode,
            impl=f"{asked.impl} {found['version']}",
            config=found["config"],
            median_ms=percentiles[0],
            p10_ms=percentiles[1],
            p90_ms=percentiles[2],
            floor_ms=of_device,
            ratio_to_floor=mean / of_device if mean and of_device else None,
            extra_bytes=None,
            error=named[of_worst],
            error_bound=bound,
            error_name=of_worst,
            errors=named,
            error_bounds={name: pair[1] for name, pair in errors.items()},
            ok=ok,
            mean_ms=mean,
            worst_ms=max(times) if times else None,
            worst_ratio=max(ratios) if ratios else None,
        )
        rows.append(row)
    return rows


COLUMNS = ("implementation", "mean", "worst", "device", "mean × device", "worst × device")


def print_rows(found: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A table for each kind of calls."""
    for mode in dict.fromkeys(row["mode"] for row in found):
        rows = [row for row in found if row["mode"] == mode]
        cells = [[Text(cell, "" if row["ok"] else "red") for cell in _cells(row)] for row in rows]
        print_table(console, COLUMNS, cells, title=f"{rows[0]['case']}, {kind(rows[0])}, {mode}", right=COLUMNS[1:])
    for row in found:
        if not row["ok"] and row["mode"] == found[0]["mode"]:
            console.print(Text.assemble(("wrong: ", "red"), f"{row['impl']}: ", "; ".join(wrong_numbers(row))))


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["impl"],
        format_ms(row["mean_ms"]) if row["ok"] else "WRONG",
        format_ms(row["worst_ms"]),
        format_ms(row["floor_ms"]),
        format_ratio(row["ratio_to_floor"]),
        format_ratio(row["worst_ratio"]),
    )
