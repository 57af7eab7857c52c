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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from onchip.bench.units import format_ms
from onchip.core import configs
from onchip.core.files import check_writable
from onchip.core.machine import FRAMEWORKS, require_packages, resolve_device
from onchip.core.names import matching
from onchip.tune import log
from onchip.tune.harness import DeviceLostError, Machine, Op, Search, one_line


@dataclass(frozen=True)
class Row:
    """What became of one kernel on one case."""

    kernel: str
    case: str
    dtype: str
    sizes: Mapping[str, int]
    status: str
    """ "tuned", "stored before", "unfinished" if the time was up, or "failed"; of a comparison how the config was
    found: "exact", "nearest", or "heuristic" if none was."""
    candidates: int
    outcomes: Mapping[str, int] = field(default_factory=dict)
    """How many candidates were right, wrong, failing, or dropped for their shared memory."""
    config: Mapping[str, int] | None = None
    heuristic_ms: float | None = None
    best_ms: float | None = None
    gain: float | None = None
    """The heuristic's time over the best one."""
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
    machine = _torch_machine() if framework == "torch" else _jax_machine()
    return tune_op(op, cast(Op, import_module(module)), machine, console=console, **options)


def _torch_machine() -> Machine:
    import torch

    # Any: PyTorch's type stubs lack the limit that a kernel can opt in to.
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Machine("cuda", configs.device_slug(properties.name), properties.shared_memory_per_block_optin)


def _jax_machine() -> Machine:
    import jax

    device = jax.devices("gpu")[0]
    slug = configs.device_slug(device.device_kind)
    return Machine("cuda", slug, device.shared_memory_per_block_optin, framework="jax")


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

    Args:
        name: the op's name in paths.
        op: the op's tuning module.
        machine: what to measure on.
        cases: patterns against the names of the op's cases; None for its defaults.
        kernels: patterns against the op's kernels; None for all.
        dtype: one that the op has.
        out: the folder of configs, made if need be; None for the user's own, which goes before the shipped one.
        limit_seconds: no candidate is started after so many seconds; None for no limit.
        again: measure anew what has a winner or is in the log.
        compare: only time the config that a launch would get against the heuristic's, and store nothing.
        console: where progress and the table go.

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
    folder = out if out is not None else configs.user_folder()
    path = configs.config_path(folder, name, machine.slug)
    log_path = path.with_suffix(".tune.jsonl")
    chosen_kernels = matching("--kernel", kernels, op.KERNELS) if kernels else list(op.KERNELS)
    chosen_cases = matching("--case", cases, op.CASES) if cases else list(op.DEFAULT_CASES)
    # Hours of work must not end in a file that can't be read or a folder that can't be written.
    configs.read_entries(folder, name, machine.slug)
    check_writable("--out", path, log_path)
    try:
        log_path.open("a").close()
    except OSError as e:
        raise ValueError(f"--out: {e}") from e
    candidates = {(k, c): op.candidates(k, op.CASES[c], dtype) for k in chosen_kernels for c in chosen_cases}

    run = _Run(
        name,
        op,
        machine,
        dtype,
        folder,
        log_path,
        versions=_versions(machine.framework),
        again=again,
        compare=compare,
        deadline=time.monotonic() + (limit_seconds if limit_seconds is not None else math.inf),
    )
    rows = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), "{task.description}")
    # No refreshing thread: it would take time from the steps.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=sum(map(len, candidates.values())))
        done = 0
        for (kernel, case), to_try in candidates.items():

            def tick(doing: str, where: str = f"{kernel}, {case}", most: int = done + len(to_try)) -> None:
                progress.update(task, description=f"{where}: {doing}", refresh=True)
                progress.update(task, completed=min(progress.tasks[0].completed + 1, most))

            rows.append(run.tune(kernel, case, to_try, tick))
            done += len(to_try)
            progress.update(task, completed=done, refresh=True)
    document = {
        "op": name,
        "device": machine.slug,
        "versions": run.versions,
        "path": str(path),
        "ok": not any(row.status == "failed" for row in rows),
        "rows": [asdict(row) for row in rows],
    }
    _print_rows(rows, console)
    console.print(f"configs: {path}", highlight=False, soft_wrap=True)
    return document


@dataclass(frozen=True)
class _Run:
    """What all kernels and cases of a run have in common."""

    name: str
    op: Op
    machine: Machine
    dtype: str
    folder: Path
    log_path: Path
    versions: Mapping[str, str]
    again: bool
    compare: bool
    deadline: float

    def tune(self, kernel: str, case: str, candidates: Sequence[Mapping[str, int]], tick: Callable[[str], None]) -> Row:
        """Tune one kernel on one case and store the winner."""
        sizes = dict(self.op.sizes(self.op.CASES[case]))
        row = Row(kernel, case, self.dtype, sizes, status="failed", candidates=len(candidates))
        stored = [e for e in self.entries() if e.is_for(kernel, self.dtype, sizes)]
        found = None
        if self.compare and candidates:
            found = configs.find_config(self.name, kernel, self.machine.slug, self.dtype, sizes, candidates[0])
            candidates = [candidates[0], dict(found.config)]
        elif stored and stored[0].versions == self.versions and not self.again:
            return replace(row, status="stored before", config=stored[0].config, best_ms=stored[0].ms)
        if not candidates:
            return replace(row, reason="the op has no candidates for it")
        problem = log.Problem(kernel, self.dtype, sizes, self.versions)
        search = Search(
            self.op,
            kernel,
            self.op.CASES[case],
            self.dtype,
            self.machine,
            candidates,
            known={} if self.again or self.compare else log.read(self.log_path, problem),
            record=functools.partial(log.append, self.log_path, problem),
            tick=tick,
            deadline=self.deadline,
        )
        try:
            tuned = search.run()
        except DeviceLostError:
            raise
        except Exception as e:  # too big for this device, say: the other cases may not be
            return replace(row, reason=one_line(e))
        row = replace(
            row,
            outcomes=dict(Counter(result.outcome for result in tuned.results)),
            heuristic_ms=tuned.heuristic_ms,
        )
        if found and (ms := tuned.times.get(log.config_key(found.config))) and tuned.heuristic_ms:
            row = replace(row, status=found.how, config=dict(found.config), best_ms=ms, gain=tuned.heuristic_ms / ms)
            return replace(row, reason=found.source)
        if not tuned.finished:
            reason = f"the time was up after {len(tuned.results)} candidates; the same command goes on from there"
            return replace(row, status="unfinished", reason=reason)
        if tuned.best is None or tuned.best_ms is None:
            reasons = Counter(result.reason for result in tuned.results if result.reason)
            return replace(row, reason=f"no candidate is right; most often: {reasons.most_common(1)[0][0]}")
        date = datetime.date.today().isoformat()
        entry = configs.Entry(kernel, self.dtype, sizes, tuned.best, tuned.best_ms, self.versions, date)
        configs.write_entry(self.folder, self.name, self.machine.slug, entry)
        gain = tuned.heuristic_ms / tuned.best_ms if tuned.heuristic_ms is not None else None
        return replace(row, status="tuned", config=tuned.best, best_ms=tuned.best_ms, gain=gain)

    def entries(self) -> Sequence[configs.Entry]:
        return configs.read_entries(self.folder, self.name, self.machine.slug)


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
            "–" if row.gain is None else f"{row.gain:.2f}×",
            configs.format_config(row.config) if row.config else Text(f"{row.status}: {row.reason}", style="yellow"),
            "stored before" if row.status == "stored before" else f"{dropped} of {row.candidates}",
        )
    console.print(table)
