"""`onchip bench --suite lengths`: what a user sees if every step has another number of tokens.

Each implementation runs in a process of its own, which begins with empty caches of compiled kernels.  Its first call
runs again in another process, which finds these caches filled.  All processes of a case import PyTorch at the same
time, before the first one measures.
"""

import gc
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import TimeElapsedColumn

from onchip.bench import report
from onchip.bench.harness import BenchedOp, BenchRow, NotRun, Outcome, judged, one_line, progress_bar, sizes_of
from onchip.bench.peers import Implementation, no_compiler
from onchip.bench.timing import Step, Timing
from onchip.registry import OPS

SUITE = "lengths"
NUMBER = 40
# What a process tells that it does, with lengths and without.
_STEPS, _FIRST_STEPS = 9, 5
MODE = "forward+backward"
COMPILED = "torch.compile(dynamic=True)"
# Of a case's tokens: with 8192, from 3000 to 9000.
SHORTEST, LONGEST = 3000 / 8192, 9000 / 8192
ANOTHER = 7001 / 8192
# The plain expressions of the ops, the first that can run.
_EAGER = "torch eager, float32 logits", "torch eager", "torch nn.Linear", "torch F.grouped_mm"


@dataclass(frozen=True, kw_only=True)
class LengthsRow(BenchRow):
    """Calls of one kind: `median_ms` and the like are the caller's time, from the call until the device is done.

    `floor_ms` is the device's mean time for the same calls, and `ratio_to_floor` the ratio of the two means.
    """

    mean_ms: float | None = None
    worst_ms: float | None = None
    worst_ratio: float | None = None
    """The largest ratio of a call's time to its own time on the device."""


@dataclass(frozen=True)
class AskedLengths:
    """What one process measures."""

    op: str
    case: Any
    impl: str
    device: str
    dtype: str
    number: int
    """How many lengths to measure; 0 for the first calls alone."""


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


# ------------------------------------------------------------------------------------------- in a process of its own


def implementations(op: BenchedOp, device: str, dtype: str) -> list[Implementation]:
    """This package's op with its defaults, the framework's plain expression, the same compiled for any length, and
    Liger's.
    """
    by_name = {impl.name: impl for impl in op.IMPLEMENTATIONS}
    found = [by_name[name] for name in ("onchip auto",) if name in by_name]
    eager = [by_name[name] for name in _EAGER if name in by_name]
    if eager:
        plain = next((impl for impl in eager if impl.unavailable(device, dtype) is None), eager[0])
        compiled = replace(plain, name=COMPILED, load=lambda: _compiled(plain.load()), unavailable=no_compiler)
        found += [plain, compiled]
    # Not where it overwrites the logits: each step would need a copy of them.
    return found + [impl for impl in op.IMPLEMENTATIONS if impl.name == "liger" and impl.steps is None]


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    return torch.compile(function, dynamic=True)


def lengths(tokens: int, number: int) -> list[int]:
    """Numbers of tokens, the same in each run."""
    draw = random.Random(1)
    return [draw.randrange(round(SHORTEST * tokens), round(LONGEST * tokens)) for _ in range(number)]


def of_tokens(case: Any, tokens: int) -> Any:
    """The case with so many tokens; if it has groups, their sizes are drawn anew."""
    names = {x.name for x in fields(case)}
    if "sizes" in names:
        draw, groups = random.Random(tokens), len(case.sizes)
        ends = sorted(draw.randrange(tokens + 1) for _ in range(groups - 1))
        return replace(case, sizes=tuple(b - a for a, b in zip([0, *ends], [*ends, tokens], strict=True)))
    return replace(case, **{"tokens" if "tokens" in names else "m": tokens})


def tokens_of(case: Any) -> int:
    found: int = case.tokens if hasattr(case, "tokens") else case.m
    return found


def shortened(op: Any, problem: Any, tokens: int) -> Any:
    """The problem with only its first tokens, in the same memory."""
    case = of_tokens(problem.case, tokens) if hasattr(problem, "case") else None
    if hasattr(problem, "arrays"):
        by_token = 0, len(op.leaves)  # beside the first leaf, the first of what gets no gradient
        arrays = [_first(x, tokens) if i in by_token else x for i, x in enumerate(problem.arrays)]
        return replace(problem, case=case, arrays=tuple(arrays))
    changes: dict[str, Any] = {"x": _first(problem.x, tokens), "grad_out": _first(problem.grad_out, tokens)}
    if case is not None:
        sizes = op.fw.xp.asarray(case.sizes, dtype=problem.sizes.dtype, device=problem.sizes.device)
        changes |= {"case": case, "sizes": sizes}
    return replace(problem, **changes)


def _first(x: Any, rows: int) -> Any:
    return x.detach()[:rows].requires_grad_(x.requires_grad)


def measure(asked: AskedLengths, op: BenchedOp, tell: Callable[[str], None]) -> dict[str, Any]:
    """Milliseconds of the calls by kind, and whether the result was right."""
    fw, device = op.fw, asked.device
    impl = next(x for x in implementations(op, device, asked.dtype) if x.name == asked.impl)
    tokens = tokens_of(asked.case)
    several = lengths(tokens, asked.number)
    tell("inputs")
    problem = op.make_problem(of_tokens(asked.case, round(LONGEST * tokens)), device, asked.dtype)
    function = impl.load()

    def step(length: int) -> Step:
        return op.plain_steps(shortened(op, problem, length), function)[MODE]

    def wall(length: int) -> float:
        run = step(length)
        fw.wait(device)
        start = time.perf_counter()
        returned = run()
        fw.wait(device)
        elapsed = time.perf_counter() - start
        del returned
        return elapsed * 1e3

    found: dict[str, Any] = {}
    for name, length in (("first", tokens), ("second", tokens), ("another", round(ANOTHER * tokens))):
        tell(f"{name} call")
        found[name] = [wall(length)]
    if several:
        for name in ("new", "again"):
            tell(f"{len(several)} lengths, {name}")
            gc.collect()  # else what imports and first calls left may stop some step for tens of milliseconds
            found[name] = [wall(length) for length in several]
        tell(f"{len(several)} lengths, queued")
        runs = [step(length) for length in several]
        fw.wait(device)
        start = time.perf_counter()
        for run in runs:
            run()
        fw.wait(device)
        found["queued"] = [(time.perf_counter() - start) * 1e3 / len(runs)]
        tell("the device's time")
        found["device"] = [fw.time_once(run, device) for run in runs] if device == "cuda" else None
    tell("checking")
    least = shortened(op, problem, min([tokens, *several]))
    returned = op.plain_steps(least, function)[MODE]()
    found["errors"] = op.check(op.reference(least), MODE, returned)
    found["version"] = impl.version()
    found["config"] = dict(impl.options)
    return found


def serve(parent: Any, caches: str) -> None:
    """Import PyTorch, say so, receive an `AskedLengths`, and send what is done and at last what was found or failed."""
    os.dup2(2, 1)  # a library's own words
    os.environ |= {f"{name}_CACHE_DIR": str(Path(caches) / name.lower()) for name in ("TRITON", "TORCHINDUCTOR")}
    import_module("onchip.torch")
    parent.send("ready")
    asked: AskedLengths = parent.recv()
    try:
        parent.send(measure(asked, OPS[asked.op].entry("bench:TORCH"), parent.send))
    except Exception as error:
        parent.send({"failure": one_line(error)})
