"""`onchip tune`: checks the options, tunes each kernel on each case, and stores the winners."""

import contextlib
import datetime
import functools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from onchip.bench.harness import one_line
from onchip.bench.units import format_ms
from onchip.core import configs
from onchip.core.configs import format_config
from onchip.core.files import check_writable
from onchip.core.machine import FRAMEWORKS, require_packages, resolve_device
from onchip.core.names import matching
from onchip.tune import log
from onchip.tune.harness import DeviceLostError, Machine, Op, Search


@dataclass(frozen=True)
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
    config: Mapping[str, int] | None = None
    heuristic_ms: float | None = None
    best_ms: float | None = None
    gain_percent: float | None = None
    """By how much the heuristic's time is above the best one."""
    reason: str | None = None
    """Why nothing was stored; of a comparison where the config comes from."""


def run_tune(op: str, module: str, framework: str, *, console: Console, **options: Any) -> dict[str, Any]:
    """Tune the op called `op` on this machine's current CUDA device; `options` are those of `tune_op`.

    Raises:
        ImportError: the framework is missing, or something that the op's kernels need.
        ValueError: there is no CUDA device, or an option can't be served.
    """
    require_packages("tune", (framework,), framework)
    try:
        resolve_device("cuda", framework)
    except ValueError as e:
        raise ValueError(
            f"tune needs a CUDA device, and {FRAMEWORKS[framework]} sees none here; `onchip info` says more"
        ) from e
    return tune_op(op, cast(Op, import_module(module)), _machine(framework), console=console, **options)


def _machine(framework: str) -> Machine:
    device: Any  # PyTorch's type stubs lack the limit that a kernel can opt in to
    if framework == "torch":
        import torch

        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        name = device.name
    else:
        import jax

        device = jax.devices("gpu")[0]
        name = device.device_kind
    return Machine("cuda", configs.device_slug(name), device.shared_memory_per_block_optin, framework)


def tune_op(
    name: str,
    op: Op,
    machine: Machine,
    *,
    cases: Sequence[str] | None = None,
    kernels: Sequence[str] | None = None,
    dtype: str = "bfloat16",
    out: Path | None = None,
    limit_seconds: float | None = None,
    again: bool = False,
    compare: bool = False,
    console: Console,
) -> dict[str, Any]:
    """Tune kernels on cases and write the winners to `<out>/<device>/<name>.json`, each as soon as it is known.

    What was measured goes to `<name>.tune.jsonl` beside that file; a later run with the same versions goes on from
    there, and leaves alone what has a winner.

    Options are those of the command, see `onchip.cli.tune`.  With `compare` and without `cases`, the config that a
    launch would get is timed against the heuristic's on the problem of each config that is stored, whatever its dtype.

    Returns:
        Machine, versions, path, and a row for each kernel and case.  "ok" is False if one has no right candidate.

    Raises:
        ValueError: an option that can't be served, a broken file of configs, or a candidate that broke the device
            (`DeviceLostError`).
    """
    if dtype not in op.DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(op.DTYPES)}; got {dtype!r}")
    if limit_seconds is not None and limit_seconds <= 0:
        raise ValueError(f"--limit-seconds must be above 0; got {limit_seconds:g}")
    folder = out or configs.user_folder()
    path = configs.config_path(folder, name, machine.slug)
    chosen_kernels = matching("--kernel", kernels, op.KERNELS) if kernels else list(op.KERNELS)
    chosen_cases = matching("--case", cases, op.CASES) if cases else list(op.DEFAULT_CASES)
    rows = [Row(kernel, case, dtype, op.CASES[case]) for kernel in chosen_kernels for case in chosen_cases]
    if compare and not cases:
        stored = {(e.kernel, e.dtype, format_config(e.sizes)): e for e in _stored(name, machine.slug)}
        rows = [Row(k, name, d, e.sizes) for (k, d, name), e in stored.items() if k in chosen_kernels]
    # Hours of work must not end in a file that can't be read or a folder that can't be written.
    configs.read_entries(folder, name, machine.slug)
    if not compare:
        check_writable("--out", path, path.with_suffix(".tune.jsonl"))
    deadline = time.monotonic() + (limit_seconds or math.inf)
    run = _Run(name, op, machine, folder, _versions(machine.framework), again, deadline)
    # No refreshing thread: it would take time from the steps.
    with Progress(console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=len(rows))
        for i, row in enumerate(rows):

            def tick(doing: str, where: str = f"{row.kernel}, {row.case}") -> None:
                progress.update(task, description=f"{where}: {doing}", refresh=True)

            rows[i] = run.compare(row, tick) if compare else run.tune(row, tick)
            progress.update(task, advance=1, refresh=True)
    _print_rows(rows, console)
    console.print(f"configs: {path}", highlight=False, soft_wrap=True)
    return {
        "op": name,
        "device": machine.slug,
        "versions": run.versions,
        "path": str(path),
        "ok": not any(row.status == "failed" for row in rows),
        "rows": [asdict(row) for row in rows],
    }


def _stored(name: str, device: str) -> list[configs.Entry]:
    """The user's configs and those that are shipped; ValueError for a broken file, which a launch passes over."""
    folders = (configs.user_folder(), configs.SHIPPED_FOLDER)
    return [entry for folder in folders for entry in configs.read_entries(folder, name, device)]


@dataclass(frozen=True)
class _Run:
    """What all kernels and cases of a run have in common."""

    name: str
    op: Op
    machine: Machine
    folder: Path
    versions: Mapping[str, str]
    again: bool
    deadline: float

    def tune(self, row: Row, tick: Callable[[str], None]) -> Row:
        """Tune one kernel on one case and store the winner."""
        entries = configs.read_entries(self.folder, self.name, self.machine.slug)
        stored = [e for e in entries if e.is_for(row.kernel, row.dtype, row.sizes) and e.versions == self.versions]
        if stored and not self.again:
            return replace(row, status="stored before", config=stored[0].config, best_ms=stored[0].ms)
        log_path = configs.config_path(self.folder, self.name, self.machine.slug).with_suffix(".tune.jsonl")
        problem = {"kernel": row.kernel, "dtype": row.dtype, "sizes": row.sizes, "versions": self.versions}
        known = {} if self.again else log.read(log_path, problem)
        candidates = self.op.candidates(row.kernel)
        record = functools.partial(log.append, log_path, problem)
        row, times = self._search(replace(row, candidates=len(candidates)), candidates, known, record, tick)
        if not times:
            return row
        best = min(candidates, key=lambda config: times.get(format_config(config), math.inf))
        row = _timed(row, times, candidates[0], best)
        assert row.best_ms is not None
        date = datetime.date.today().isoformat()
        entry = configs.Entry(row.kernel, row.dtype, row.sizes, best, row.best_ms, self.versions, date)
        configs.write_entry(self.folder, self.name, self.machine.slug, entry)
        return replace(row, status="tuned")

    def compare(self, row: Row, tick: Callable[[str], None]) -> Row:
        """Time the config that a launch would take on this case against the heuristic's."""
        first = self.op.candidates(row.kernel)[0]
        found = configs.find_config(self.name, row.kernel, self.machine.slug, row.dtype, row.sizes, first)
        row, times = self._search(row, [first, found.config], {}, lambda result: None, tick)
        return replace(_timed(row, times, first, found.config), status=found.how, reason=found.source) if times else row

    def _search(
        self,
        row: Row,
        candidates: Sequence[Mapping[str, int]],
        known: Mapping[str, log.Result],
        record: Callable[[log.Result], None],
        tick: Callable[[str], None],
    ) -> tuple[Row, Mapping[str, float]]:
        """The row with its outcomes, and the times of the final; without any the row says why."""
        names = [format_config(config) for config in candidates]
        results = {name: known[name] for name in names if name in known}
        search = Search(
            self.op, row.kernel, row.sizes, row.dtype, self.machine, results, record, tick, deadline=self.deadline
        )
        try:
            times = search.run(candidates)
        except DeviceLostError:
            raise
        except Exception as e:  # too big for this device, say: the other cases may not be
            return replace(row, reason=one_line(e)), {}
        row = replace(row, outcomes=dict(Counter(result.outcome for result in results.values())))
        if times is None:
            reason = f"the time was up after {len(results)} candidates; the same command goes on from there"
            return replace(row, status="unfinished", reason=reason), {}
        reasons = Counter(result.reason for result in results.values() if result.reason)
        if not times:
            row = replace(row, reason=f"no candidate is right; most often: {reasons.most_common(1)[0][0]}")
        return row, times


def _timed(row: Row, times: Mapping[str, float], heuristic: Mapping[str, int], best: Mapping[str, int]) -> Row:
    """The row with the times of both configs; None for one that isn't right."""
    heuristic_ms, best_ms = times.get(format_config(heuristic)), times.get(format_config(best))
    row = replace(row, config=dict(best), heuristic_ms=heuristic_ms, best_ms=best_ms)
    return replace(row, gain_percent=100 * (heuristic_ms / best_ms - 1)) if heuristic_ms and best_ms else row


def _versions(framework: str) -> dict[str, str]:
    """What a stored time depends on besides the device."""
    versions = {}
    for package in ("triton", "torch") if framework == "torch" else ("jax", "jaxlib"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _print_rows(rows: Sequence[Row], console: Console) -> None:
    table = Table("kernel", "case", "heuristic", "best", "gain", "config", "dropped: shared memory, wrong, failing")
    for row in rows:
        dropped = ", ".join(str(row.outcomes.get(outcome, 0)) for outcome in ("shared memory", "wrong", "failing"))
        table.add_row(
            row.kernel,
            row.case,
            format_ms(row.heuristic_ms),
            format_ms(row.best_ms),
            "–" if row.gain_percent is None else f"{row.gain_percent:+.1f}%",
            format_config(row.config) if row.config else Text(f"{row.status}: {row.reason}", style="yellow"),
            "stored before" if row.status == "stored before" else f"{dropped} of {row.candidates}",
        )
    console.print(table)


def tuned_configs(tunings: Mapping[str, str], devices: Sequence[str]) -> dict[str, Any]:
    """Which kernels have a tuned config, as `onchip info` tells: a row for each device, op, kernel, case and dtype.

    Args:
        tunings: import path of each op's tuning module; of one that can't tell, "notes" say why.
        devices: names as `configs.device_slug` makes them; of equal ones, one is looked at.
    """
    rows: list[dict[str, Any]] = []
    notes = []
    for name, module in tunings.items():
        try:
            op = cast(Op, import_module(module))
            for device in dict.fromkeys(devices):
                _stored(name, device)
                rows += [
                    _found(name, op, device, kernel, case, dtype)
                    for kernel in op.KERNELS
                    for case in op.DEFAULT_CASES
                    for dtype in op.DTYPES
                ]
        except Exception as e:  # whatever is wrong with one op, the rest of the report goes on
            notes.append(f"{name}: {one_line(e)}")
    return {"rows": rows, "notes": notes}


def _found(name: str, op: Op, device: str, kernel: str, case: str, dtype: str) -> dict[str, Any]:
    found = configs.find_config(name, kernel, device, dtype, op.CASES[case], op.candidates(kernel)[0])
    where = {"device": device, "op": name, "kernel": kernel, "case": case, "dtype": dtype}
    return {**where, "how": found.how, "source": found.source, "config": dict(found.config)}
