"""`onchip bench --suite lengths`: what a user sees if every step has another number of tokens.

Each implementation runs in a process of its own, which begins with empty caches of compiled kernels.  Its first call
runs again in another process, which finds these caches filled.  All processes of a case import PyTorch at the same
time, before the first one measures.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import TimeElapsedColumn

from onchip.bench import report
from onchip.bench.harness import BenchRow, NotRun, Outcome, judged, progress_bar, sizes_of
from onchip.bench.lengths_process import AskedLengths, implementations, serve
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
        self.empty, self.filled = (stack.enter_context(_measuring(caches)) for _ in range(2))

    def wait_for_imports(self) -> None:
        """Or until they have ended."""
        for process in (self.empty, self.filled):
            with suppress(EOFError):
                process.recv()

    def measure(self, asked: AskedLengths, tell: Callable[[str], None]) -> dict[str, Any]:
        """What the processes found; raises RuntimeError with the message of a process that failed."""
        found = _answer(self.empty, asked, lambda doing: tell(f"empty cache, {doing}"))
        first = replace(asked, number=0)
        found["filled"] = _answer(self.filled, first, lambda doing: tell(f"filled cache, {doing}"))["first"]
        return found


@contextmanager
def _measuring(caches: str) -> Iterator[Any]:
    """The connection to a process that imports PyTorch, then waits for what it shall measure."""
    fresh = get_context("spawn")
    ours, theirs = fresh.Pipe()
    process = fresh.Process(target=serve, args=(theirs, caches))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def _answer(process: Any, asked: AskedLengths, tell: Callable[[str], None]) -> dict[str, Any]:
    """What a process found, which tells what it does until then."""
    try:
        process.send(asked)
        while isinstance(said := process.recv(), str):
            tell(said)
    except (EOFError, OSError):
        raise RuntimeError("its process ended") from None
    if "failure" in said:
        raise RuntimeError(said["failure"])
    return dict(said)


def _rows(asked: AskedLengths, found: Mapping[str, Any], date: str) -> list[LengthsRow]:
    """A row for each kind of calls; a wrong result has no times."""
    judgement = judged(found["errors"])
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
