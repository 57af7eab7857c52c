"""`onchip tune`: checks the options, tunes each kernel on each case, and stores the winners."""

import datetime
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from onchip.bench.harness import one_line
from onchip.bench.units import format_ms
from onchip.core import configs
from onchip.core.configs import format_config
from onchip.core.files import check_writable
from onchip.core.machine import FRAMEWORKS, choose_framework, package_version, require_packages, resolve_device
from onchip.core.names import Cases, Framework, known_op, matching, operands, words
from onchip.core.sizes import DTYPE_BYTES
from onchip.core.tables import print_table
from onchip.tune import TUNINGS
from onchip.tune.harness import Machine, Op, Row, Search


def run_tune(
    op: Annotated[str, operands(tuple(TUNINGS["torch"]))],
    framework: Framework = None,
    *,
    cases: Cases = None,
    kernels: Annotated[list[str] | None, typer.Option("--kernel", help="Kernel name or pattern; likewise.")] = None,
    dtype: Annotated[str, words("The inputs' dtype.", *DTYPE_BYTES)] = "bfloat16",
    out: Annotated[
        Path | None, typer.Option(help="Folder of configs. Default: the user's own, the one that launches look at.")
    ] = None,
    limit_seconds: Annotated[
        float | None, typer.Option(help="Start nothing new after so long; the same command goes on from there.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what is stored or was measured before.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Only time what is stored against the heuristic's config.")
    ] = False,
    console: Console,
) -> dict[str, Any]:
    """Find the fastest block sizes of an op's kernels on this GPU and store them for later runs.

    Winners go to `<out>/<device>/<op>.json`, each as soon as it is known, and what was measured to `<op>.tune.jsonl`
    beside that file; a later run with the same versions goes on from there, and leaves alone what has a winner.

    With `compare` and without `cases`, the config that a launch would get is timed against the heuristic's on the
    problem of each config that is stored, whatever its dtype.

    Returns:
        Machine, versions, path, and a row for each kernel and case.  "ok" is False if one has no right candidate.

    Raises:
        ImportError: the framework is missing, or something that the op's kernels need.
        ValueError: there is no CUDA device, an option can't be served, a file of configs is broken, or a candidate
            broke the device.
    """
    framework = choose_framework(framework)
    known_op(op, TUNINGS[framework])
    require_packages("tune", (framework,), framework)
    if resolve_device("auto", framework) != "cuda":
        raise ValueError(
            f"tune needs a CUDA device, and {FRAMEWORKS[framework]} sees none here; `onchip info` says more"
        )
    tuning, machine = _module(framework, op), _machine(framework)
    if dtype not in tuning.DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(tuning.DTYPES)}; got {dtype!r}")
    if limit_seconds is not None and limit_seconds <= 0:
        raise ValueError(f"--limit-seconds must be above 0; got {limit_seconds:g}")
    folder = out or configs.user_folder()
    path = configs.config_path(folder, op, machine.slug)
    log = path.with_suffix(".tune.jsonl")
    chosen_kernels = matching("--kernel", kernels, tuning.KERNELS) if kernels else list(tuning.KERNELS)
    chosen_cases = matching("--case", cases, tuning.CASES) if cases else list(tuning.DEFAULT_CASES)
    rows = [Row(kernel, case, dtype, tuning.CASES[case]) for kernel in chosen_kernels for case in chosen_cases]
    if compare and not cases:
        entries = configs.read_entries(configs.user_folder(), op, machine.slug)
        rows = [Row(e.kernel, format_config(e.sizes), e.dtype, e.sizes) for e in entries if e.kernel in chosen_kernels]
    # Hours of work must not end in a file that can't be read or a folder that can't be written.
    configs.read_entries(folder, op, machine.slug)
    if not compare:
        check_writable("--out", path, log)
    deadline = time.monotonic() + (limit_seconds or math.inf)
    versions = _versions(machine.framework)
    # No refreshing thread: it would take time from the steps.
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        task = progress.add_task("", total=len(rows))
        for row in rows:

            def tick(doing: str, where: str = f"{row.kernel}, {row.case}") -> None:
                progress.update(task, description=f"{where}: {doing}", refresh=True)

            search = Search(tuning, machine, row, versions, deadline, tick, None if compare else log)
            if compare:
                _compare(search, op)
            else:
                _tune(search, op, folder, again=again)
            progress.update(task, advance=1, refresh=True)
    _print_rows(rows, console)
    console.print(f"configs: {path}", highlight=False, soft_wrap=True)
    return {
        "op": op,
        "device": machine.slug,
        "versions": versions,
        "path": str(path),
        "ok": not any(row.status == "failed" for row in rows),
        "rows": [asdict(row) for row in rows],
    }


def _module(framework: str, op: str) -> Op:
    return cast(Op, import_module(TUNINGS[framework][op]))


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


def _tune(search: Search, name: str, folder: Path, *, again: bool) -> None:
    """Tune one kernel on one case and store the winner."""
    row, device = search.row, search.machine.slug
    for entry in configs.read_entries(folder, name, device):
        if not again and entry.is_for(row.kernel, row.dtype, row.sizes) and entry.versions == search.versions:
            row.status, row.config, row.best_ms = "stored before", entry.config, entry.ms
            return
    candidates = search.op.candidates(row.kernel)
    row.candidates = len(candidates)
    if times := search.run(candidates, again=again):
        best = min(candidates, key=lambda config: times.get(format_config(config), math.inf))
        _set_times(row, times, candidates[0], best)
        date = datetime.date.today().isoformat()
        ms = times[format_config(best)]
        entry = configs.Entry(row.kernel, row.dtype, row.sizes, best, ms, search.versions, date)
        configs.write_entry(folder, name, device, entry)
        row.status = "tuned"


def _compare(search: Search, name: str) -> None:
    """Time the config that a launch would take on this case against the heuristic's."""
    row = search.row
    first = search.op.candidates(row.kernel)[0]
    found = configs.find_config(name, row.kernel, search.machine.slug, row.dtype, row.sizes, first)
    if times := search.run([first, found.config]):
        _set_times(row, times, first, found.config)
        row.status, row.reason = found.how, found.source


def _set_times(row: Row, times: Mapping[str, float], heuristic: Mapping[str, int], best: Mapping[str, int]) -> None:
    """The times of both configs; None for one that isn't right."""
    row.config = dict(best)
    row.heuristic_ms, row.best_ms = times.get(format_config(heuristic)), times.get(format_config(best))
    if row.heuristic_ms and row.best_ms:
        row.gain_percent = 100 * (row.heuristic_ms / row.best_ms - 1)


def _versions(framework: str) -> dict[str, str]:
    """What a stored time depends on besides the device."""
    packages = ("triton", "torch") if framework == "torch" else ("jax", "jaxlib")
    return {name: version for name in packages if (version := package_version(name))}


def _print_rows(rows: Sequence[Row], console: Console) -> None:
    columns = ("kernel", "case", "heuristic", "best", "gain", "config", "dropped: shared memory, wrong, failing")
    cells: list[list[str | Text]] = []
    for row in rows:
        dropped = ", ".join(str(row.outcomes.get(outcome, 0)) for outcome in ("shared memory", "wrong", "failing"))
        cells.append(
            [
                row.kernel,
                row.case,
                format_ms(row.heuristic_ms),
                format_ms(row.best_ms),
                "–" if row.gain_percent is None else f"{row.gain_percent:+.1f}%",
                format_config(row.config) if row.config else Text(f"{row.status}: {row.reason}", style="yellow"),
                "stored before" if row.status == "stored before" else f"{dropped} of {row.candidates}",
            ]
        )
    print_table(console, columns, cells)


def tuned_configs(devices: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Which kernels have a tuned config, as `onchip info` tells: a row for each device, op, kernel, case and dtype.

    `devices` are names by framework, as `configs.device_slug` makes them; of equal ones, one is looked at.  Where the
    module of an op can't tell, "notes" say why.
    """
    rows: list[dict[str, Any]] = []
    notes = []
    for framework, name in ((f, name) for f, slugs in devices.items() if slugs for name in TUNINGS[f]):
        try:
            op = _module(framework, name)
            for device in dict.fromkeys(devices[framework]):
                configs.read_entries(configs.user_folder(), name, device)  # raises for a broken file
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
