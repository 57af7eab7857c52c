"""Runs cases x implementations x modes: every result is checked, and only right ones are timed."""

import gc
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from importlib import import_module
from typing import Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from onchip.bench.peers import Function, Implementation
from onchip.bench.timing import ALONE, Alone, Step, Timing
from onchip.core.sizes import DTYPE_BYTES

MODES = ("forward", "forward+backward")


def adapter(framework: str) -> Any:
    """`onchip.bench.torch_steps` or `onchip.bench.jax_steps`, which have the same names."""
    return import_module(f"onchip.bench.{framework}_steps")


@dataclass
class BenchedOp(ABC):
    """The benchmark of an op in one framework, which is imported only when an attribute needs it."""

    framework: str
    SUITES: Mapping[str, Sequence[Any]]
    """Cases by the suite's name; "cpu" and "cuda" are the ones that run on these devices by default."""
    implementations: Callable[[Any], Sequence[Implementation]]
    """`implementations(fw)`: what is timed, given the framework's adapter."""
    make: Callable[[Any, Any, str, str], Any]
    """`make(fw, case, device, dtype)`: the inputs of a case on the device."""

    DTYPES: ClassVar[Sequence[str]] = tuple(DTYPE_BYTES)
    MODES: Sequence[str] = field(default=MODES, kw_only=True)
    """What is timed, in this order."""

    @cached_property
    def CASES(self) -> Mapping[str, Any]:
        return {case.name: case for suite in self.SUITES.values() for case in suite}

    @cached_property
    def fw(self) -> Any:
        return adapter(self.framework)

    @cached_property
    def IMPLEMENTATIONS(self) -> Sequence[Implementation]:
        return tuple(self.implementations(self.fw))

    def steps(self, problem: Any, impl: Implementation) -> Mapping[str, Step]:
        """A step for each mode that the implementation has."""
        make = impl.steps or self.plain_steps
        return make(problem, impl.load())

    def make_problem(self, case: Any, device: str, dtype: str) -> Any:
        with self.fw.default_device(device):
            return self.make(self.fw, case, device, dtype)

    @abstractmethod
    def plain_steps(self, problem: Any, function: Function) -> Mapping[str, Step]:
        """The steps of an implementation that defines none of its own."""

    @abstractmethod
    def reference(self, problem: Any) -> Any:
        """What results are checked against."""

    @abstractmethod
    def check(self, reference: Any, mode: str, returned: Sequence[Any]) -> Mapping[str, tuple[float, float]]:
        """The error of each result of a step, by name, and the bound that it must not pass."""

    @abstractmethod
    def floor(self, problem: Any, mode: str) -> Step | None:
        """The work that no implementation can avoid, such as the matrix products alone; None if it isn't wanted."""


_SIZES = {
    "batch": "B",
    "tokens": "T",
    "heads": "Hq",
    "key_heads": "Hk",
    "size": "D",
    "value_size": "Dv",
    "hidden": "H",
    "teacher_hidden": "teacher_H",
    "vocab": "V",
    "ids": "K",
    "m": "M",
    "groups": "G",
    "n": "N",
    "k": "K",
}
"""The fields of a case that are sizes, and their names in docs and results; one that is 0 stands for its default."""


def sizes_of(case: Any) -> dict[str, int]:
    """The sizes of a case, by the names that the docs use for them."""
    return {name: size for field, name in _SIZES.items() if (size := getattr(case, field, 0))}


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One implementation in one mode on one case.  A wrong result has neither time nor memory."""

    op: str
    case: str
    sizes: Mapping[str, int] | None = None
    dtype: str
    date: str | None = None
    """The date of the run that measured it; with `--add` a file has rows from several runs."""
    mode: str
    impl: str
    config: Mapping[str, Any] = field(default_factory=dict)
    median_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    floor_ms: float | None = None
    ratio_to_floor: float | None = None
    compile_s: float | None = None
    extra_bytes: int | None = None
    host_ms: float | None = None
    kernels: int | None = None
    error: float | None
    """Of `errors`, the one nearest its bound or furthest past it; None for NaN and infinity, which JSON lacks."""
    error_bound: float
    error_name: str | None = None
    """The name of that error."""
    errors: Mapping[str, float | None] = field(default_factory=dict)
    error_bounds: Mapping[str, float] = field(default_factory=dict)
    """The bound for each of `errors`; a result whose error is past its bound is wrong."""
    ok: bool


@dataclass(frozen=True)
class NotRun:
    """Something that gave no result, and why; case and mode are None where it holds for all."""

    impl: str
    case: str | None
    mode: str | None
    reason: str


@dataclass
class Outcome:
    """What a run found, in the order of cases, modes and implementations."""

    rows: list[BenchRow] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    interrupted: bool = False
    """Whether the run ended before the last case was done, by the user or by `failure`."""
    failure: str | None = None
    """What ended the run, where that wasn't the user."""

    def stop(self, left: Sequence[str]) -> None:
        """End the run in the first of the cases that are `left`, or after all."""
        self.interrupted = True
        self.not_run.append(NotRun("the rest", left[0] if left else None, None, self.failure or "interrupted"))
        self.not_run.extend(NotRun("all", case, None, "interrupted") for case in left[1:])

    def as_json(self) -> dict[str, Any]:
        return {"rows": [asdict(r) for r in self.rows], "not_run": [asdict(n) for n in self.not_run]}


def run_cases(
    name: str,
    op: BenchedOp,
    *,
    cases: Sequence[str],
    implementations: Sequence[Implementation],
    device: str,
    dtype: str,
    repeats: int,
    console: Console,
    date: str,
    modes: Sequence[str] | None = None,  # all
    show: Callable[[Sequence[BenchRow], Outcome], None] = lambda rows, outcome: None,
    world: Alone = ALONE,
) -> Outcome:
    """Run `implementations` of the op called `name` on its `cases`, one case after the other.

    When a case is done, `show` is called with its rows and with everything found so far.  `date` goes into every row.
    """
    outcome = Outcome()
    modes = [mode for mode in op.MODES if modes is None or mode in modes]
    # The reference is one tick; then in each mode all are checked, warmed up, timed (the floor too) and measured.
    per_case = 1 + len(modes) * (len(implementations) * (3 + repeats) + 1 + repeats)
    with progress_bar(console) as progress:
        task = progress.add_task("", total=per_case * len(cases))

        frozen = gc.get_freeze_count()

        def tick(doing: str, advance: int = 1) -> None:
            progress.update(task, advance=advance, description=f"{case}: {doing}", refresh=True)

        try:
            for i, case in enumerate(cases):
                tick("reference", advance=0)
                # Memory is measured after a garbage collection each time, which need not look through all modules, nor
                # through those that earlier cases have loaded.
                gc.collect()
                gc.freeze()
                # A case may be of one dtype.
                of_case = getattr(op.CASES[case], "dtype", None) or dtype
                before = len(outcome.rows)
                run = _CaseRun(name, op, case, device, of_case, date, modes, repeats, tick, outcome, world)
                run.run(implementations)
                op.fw.release(device)
                progress.update(task, completed=per_case * (i + 1), refresh=True)
                show(outcome.rows[before:], outcome)
        except KeyboardInterrupt:
            outcome.stop(cases[i:])
        finally:
            if not frozen:  # by the caller, which can't be told apart
                gc.unfreeze()
    return outcome


def progress_bar(console: Console, *last: ProgressColumn) -> Progress:
    """A progress bar without a refreshing thread, which would take time from the steps."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    last = last or (TimeRemainingColumn(elapsed_when_finished=True),)
    return Progress(*columns, *last, console=console, auto_refresh=False)


@dataclass(frozen=True)
class _Checked:
    """A step whose result is known to be right or wrong."""

    impl: Implementation
    mode: str
    step: Step
    errors: Mapping[str, tuple[float, float]]

    @property
    def ok(self) -> bool:
        return within(self.errors)


@dataclass(frozen=True)
class _CaseRun:
    """A case that runs: what it runs with, and where its rows go."""

    name: str
    op: BenchedOp
    case: str
    device: str
    dtype: str
    date: str
    modes: Sequence[str]
    repeats: int
    tick: Callable[[str], None]
    outcome: Outcome
    world: Alone

    def run(self, implementations: Sequence[Implementation]) -> None:
        refusals = {impl.name: impl.unavailable(self.device, self.dtype) for impl in implementations}
        for refused in (NotRun(name, None, None, reason) for name, reason in refusals.items() if reason):
            if refused not in self.outcome.not_run:
                self.outcome.not_run.append(refused)
        implementations = [impl for impl in implementations if not refusals[impl.name]]
        doing = "the problem was not made"
        try:
            case = self.op.CASES[self.case]
            problem = self.world.together(lambda: self.op.make_problem(case, self.device, self.dtype))
            doing = "there is nothing to check against"
            reference = self.world.together(lambda: self.op.reference(problem))
        except Exception as e:
            for impl in implementations:
                self.give_up(impl, None, f"{doing}: {one_line(e)}")
            return
        self.tick("checking")
        checked = self.check(problem, reference, implementations)
        del reference  # the steps need its memory
        for mode in self.modes:
            if now := [c for c in checked if c.mode == mode]:
                self.measure(problem, mode, now)

    def give_up(self, impl: Implementation, mode: str | None, reason: str) -> None:
        self.outcome.not_run.append(NotRun(impl.name, self.case, mode, reason))

    def check(self, problem: Any, reference: Any, implementations: Sequence[Implementation]) -> list[_Checked]:
        """Run every step once and compare what it returns."""
        checked = []
        for impl in implementations:
            failures = len(self.outcome.not_run)
            try:
                steps = self.world.together(partial(self.op.steps, problem, impl))
            except Exception as e:
                self.give_up(impl, None, one_line(e))
                continue
            for mode in (m for m in self.modes if m in steps):
                try:
                    errors = self.errors(reference, impl, mode, steps[mode])
                    if own := impl.error_bounds:
                        errors = {name: (error, own[name]) for name, (error, _) in errors.items()}
                except Exception as e:
                    self.give_up(impl, mode, one_line(e))
                else:
                    checked.append(_Checked(impl, mode, steps[mode], errors))
                self.tick("checking")
            if len(self.outcome.not_run) > failures:
                self.op.fw.release(self.device)
        return checked

    def errors(self, reference: Any, impl: Implementation, mode: str, step: Step) -> dict[str, tuple[float, float]]:
        """Error and bound for each result of a step, on the rank where the error is nearest its bound."""
        check = impl.check or self.op.check
        every = self.world.every(self.world.together(lambda: check(reference, mode, step())))
        return {name: worst(each[name] for each in every) for name in every[0]}

    def measure(self, problem: Any, mode: str, checked: Sequence[_Checked]) -> None:
        """Measure time and peak memory of the right results, and add a row for each."""
        failed: dict[str, str] = {}
        timings = self.time(problem, mode, {c.impl.name: c.step for c in checked if c.ok}, failed)
        floor = timings.get(_FLOOR)
        if failed:
            self.op.fw.release(self.device)
        for c in checked:
            if c.impl.name in failed:
                self.give_up(c.impl, mode, failed[c.impl.name])
                continue
            timing = timings.get(c.impl.name)
            try:
                beside = self.beside(c.step) if c.ok else {}
            except Exception as e:
                self.give_up(c.impl, mode, one_line(e))
                continue
            self.tick(f"memory of {mode}")
            row = BenchRow(
                op=self.name,
                case=self.case,
                sizes=sizes_of(self.op.CASES[self.case]),
                dtype=self.dtype,
                date=self.date,
                mode=mode,
                impl=f"{c.impl.name} {c.impl.version()}",
                config=c.impl.config(problem, mode),
                **(asdict(timing) if timing else {}),
                floor_ms=floor.median_ms if floor else None,
                ratio_to_floor=timing.median_ms / floor.median_ms if timing and floor else None,
                **beside,
                **judged(c.errors),
            )
            self.outcome.rows.append(row)

    def beside(self, step: Step) -> dict[str, Any]:
        """Peak extra memory on the rank that needs most, and what else the framework tells of a step."""
        fw, device = self.op.fw, self.device
        mine = self.world.together(lambda: (fw.peak_extra_bytes(step, device=device), fw.beside(step, device)))
        return {"extra_bytes": max(extra for extra, _ in self.world.every(mine)), **mine[1]}

    def time(self, problem: Any, mode: str, steps: Mapping[str, Step], failed: dict[str, str]) -> dict[str, Timing]:
        """Time the steps and the floor, whose buffers are freed at the end."""
        floor: dict[str, Step] = {}
        with suppress(Exception):  # too big for this device: then there is no ratio to it
            if step := self.world.together(lambda: self.op.floor(problem, mode)):
                floor[_FLOOR] = step
        timings: dict[str, Timing] = self.op.fw.time_interleaved(
            {**floor, **steps},
            device=self.device,
            repeats=self.repeats,
            tick=lambda: self.tick(f"timing {mode}"),
            # Only the words: the exception would keep the step's tensors alive.
            on_error=lambda name, e: failed.update({name: one_line(e)}),
            world=self.world,
        )
        return timings


# The floor among the steps' names; no implementation's name is empty.
_FLOOR = ""


Errors = Mapping[str, tuple[float, float]]
"""Error and bound of each result, by its name."""


def within(errors: Errors) -> bool:
    return all(error <= bound for error, bound in errors.values())  # False for NaN


def judged(errors: Errors) -> dict[str, Any]:
    """The fields of a `BenchRow` that say how right it is."""
    finite = {name: error if math.isfinite(error) else None for name, (error, _) in errors.items()}
    name = max(errors, key=lambda name: _closeness(errors[name]))
    bounds = {name: bound for name, (_, bound) in errors.items()}
    nearest = {"error": finite[name], "error_bound": bounds[name], "error_name": name}
    return {**nearest, "errors": finite, "error_bounds": bounds, "ok": within(errors)}


def worst(errors: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Error and bound for the result nearest its bound, or furthest past it."""
    return max(errors, key=_closeness)


def _closeness(pair: tuple[float, float]) -> float:
    """An error as a multiple of its bound; NaN is further past it than any number."""
    error, bound = pair
    return math.inf if math.isnan(error) else error / bound


def one_line(e: Exception) -> str:
    """An error in one line, without the advice that follows in some messages."""
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0]}" if lines else type(e).__name__
