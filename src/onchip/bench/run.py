"""`onchip bench`: checks the options, runs the harness, writes the results file and the page beside it."""

import json
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, TypedDict

import msgspec
import typer
from rich.console import Console

from onchip.bench import environment, harness, report
from onchip.bench.page import html_page
from onchip.core import files
from onchip.core.machine import choose_framework, require_packages, resolve_device
from onchip.core.names import Cases, Device, Framework, known_op, matching, operands, words
from onchip.core.sizes import DTYPE_BYTES
from onchip.ops import OPS


class _Document(TypedDict):
    """What a results file holds, beside what an op adds to it."""

    environment: dict[str, Any]
    rows: list[harness.Row]
    not_run: list[harness.NotRun]


def benchmark_of(op: str, framework: str) -> harness.Op:
    made: harness.Op = resolve_name(f"onchip.bench.ops.{op}:{framework.upper()}")
    return made


_DEFAULT_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


def run_bench(
    op: Annotated[str, operands(OPS)],
    framework: Framework = None,
    *,
    cases: Cases = None,
    suite: Annotated[str | None, typer.Option(help="A named set of cases, such as fp8_linear's primus.")] = None,
    impls: Annotated[list[str] | None, typer.Option("--impl", help="Implementation name or pattern; likewise.")] = None,
    modes: Annotated[list[str] | None, typer.Option("--mode", help="forward, forward+backward, ...; likewise.")] = None,
    device: Device = "auto",
    dtype: Annotated[str | None, words("Default: float32 on the CPU, bfloat16 on a GPU.", *DTYPE_BYTES)] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each implementation.")] = 7,
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the HTML page.")] = Path("results"),
    add: Annotated[bool, typer.Option("--add", help="Keep what an earlier run of the day found of others.")] = False,
    console: Console,
) -> dict[str, Any]:
    """Time an op beside its competitors, after checking that each is right.

    It writes `<date>-<device>-<op>.json` and `.html` (in JAX `<op>-jax`) over those of the same day.

    `cases`, `impls` and `modes` hold patterns.

    Returns:
        What the JSON file holds.

    Raises:
        ImportError: a package is missing that this needs.
        ValueError: an option that can't be served; nothing has run or been written then.
        KeyboardInterrupt: the user's.  What was measured is written, and `add` continues from there; where nothing was,
            an existing file stays as it is.
    """
    known_op(op, OPS)
    framework = choose_framework(framework)
    require_packages("bench", (framework, "jinja2", "plotly", "psutil", "pynvml"), f"{framework},bench")
    device = resolve_device(device, framework)
    if repeats < 1:
        raise ValueError(f"--repeats must be 1 or more; got {repeats}")
    target = benchmark_of(op, framework)
    dtype = dtype or _DEFAULT_DTYPES[device]
    if dtype not in target.DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(target.DTYPES)}; got {dtype!r}")
    if suite is not None and suite not in target.SUITES:
        there = ", ".join(target.SUITES)
        raise ValueError(f"--suite must name a set of the op's cases; got {suite!r}, and there is: {there}")
    default = [case.name for case in target.SUITES[suite or device]]
    chosen = matching("--case", cases, default if suite else target.CASES) if cases else default
    by_name = {impl.name: impl for impl in target.IMPLEMENTATIONS}
    implementations = [by_name[name] for name in (matching("--impl", impls, by_name) if impls else by_name)]
    chosen_modes = matching("--mode", modes, target.MODES) if modes else target.MODES

    described = {"op": op, **environment.describe(device, framework), "repeats": repeats}
    if device == "cpu" and described["busy_cores"] > 0.2:
        console.print(
            f"[yellow]Other work keeps {described['busy_cores']} cores busy; times will come out too long.[/]"
        )
    name = op if framework == "torch" else f"{op}-{framework}"
    stem = out / f"{described['date'][:10]}-{described['device']}-{name}"
    path, page = (stem.with_name(f"{stem.name}.{kind}") for kind in ("json", "html"))
    files.check_writable("--out", path, page)
    earlier = _earlier(path, described) if add else None
    with target.session(device) as writes:
        outcome = harness.run_cases(
            op,
            target,
            cases=chosen,
            implementations=implementations,
            device=device,
            dtype=dtype,
            repeats=repeats,
            console=console,
            date=described["date"],
            modes=chosen_modes,
            show=lambda rows: report.print_rows([vars(row) for row in rows], console),
        )
    if not writes:
        return {"environment": described, **outcome.as_json()}
    if outcome.interrupted and not outcome.rows and path.exists():
        console.print(f"nothing was measured; {path} is as it was", highlight=False, soft_wrap=True)
        raise KeyboardInterrupt
    found = {"environment": described, **outcome.as_json()}
    document = found if earlier is None else _added(earlier, found)
    if (summary := target.summary(document["rows"])) is not None:
        document["summary"] = summary
    files.replace(path, json.dumps(document, indent=1, allow_nan=False) + "\n")  # before all that could go wrong
    report.print_not_run(found, console)
    report.print_summary(document, console)
    files.replace(page, html_page(document, path.name))
    console.print(f"wrote {path}\nwrote {page}", highlight=False, soft_wrap=True)
    if outcome.interrupted:
        raise KeyboardInterrupt
    return document


def _earlier(path: Path, environment: Mapping[str, Any]) -> dict[str, Any] | None:
    """The document to add to, if there is one; raises ValueError where it was made with something else."""
    if not path.exists():
        return None
    try:
        document: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        before = msgspec.convert(document, _Document)["environment"]
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--add: {path} is no result of onchip bench ({error}); choose another --out") from error
    for name in ("gpu", "cpu", "torch", "triton", "jax", "jaxlib", "onchip"):
        if (made_with := before.get(name)) != environment.get(name):
            raise ValueError(f"--add: {path} was made with {name} {made_with}; choose another --out")
    return document


def _added(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The earlier document, with this one's rows in place of those that they repeat."""

    names = ("case", "sizes", "dtype", "mode", "impl")
    rows = {str([row.get(name) for name in names]): row for row in (*earlier["rows"], *now["rows"])}
    not_run = [entry for entry in earlier["not_run"] if entry not in now["not_run"]]
    return {**earlier, **now, "rows": list(rows.values()), "not_run": [*not_run, *now["not_run"]]}
