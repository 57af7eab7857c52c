"""`onchip bench`: checks the options, runs the harness, and writes the results file and its page."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import typer
from rich.console import Console

from onchip.bench import environment, harness, lengths, report
from onchip.bench.page import html_page
from onchip.core import files
from onchip.core.machine import choose_framework, require_packages, resolve_device
from onchip.core.names import Device, Framework, completion, known_op, matching, operands, typed, words
from onchip.core.sizes import DTYPE_BYTES
from onchip.registry import OPS


class _Document(TypedDict):
    """What every results file holds."""

    environment: dict[str, Any]
    rows: list[harness.BenchRow]
    not_run: list[harness.NotRun]


def benchmark_of(op: str, framework: str, world: int | None = None) -> harness.BenchedOp:
    """The op's benchmark, in one process or in the ranks of `--world`.

    Raises:
        ValueError: there is none.
    """
    if world is None:
        if (made := benchmark_named(op, framework.upper())) is not None:
            return made
        raise ValueError(f"{op} needs --world 2 or more: that many processes, each with a GPU, share a case")
    if world < 2:
        raise ValueError(f"--world must be 2 or more; got {world}")
    if framework != "torch":
        raise ValueError("--world is for PyTorch; in JAX one process has all devices, so leave it out")
    if (made := benchmark_named(op, "WORLD")) is None:
        there = ", ".join(name for name in OPS if benchmark_named(name, "WORLD") is not None)
        raise ValueError(f"--world is for ops whose cases processes can share, which are {there}; {op} isn't one")
    return made


def benchmark_named(op: str, name: str) -> harness.BenchedOp | None:
    """The op's benchmark called "TORCH", "JAX" or "WORLD"; None if it has none."""
    made: harness.BenchedOp | None = getattr(OPS[op].entry("bench"), name, None)
    return made


def _offered(names: Callable[[harness.BenchedOp], Iterable[str]]) -> Callable[[typer.Context, str], list[str]]:
    """What the shell offers, by names that the benchmark of the op has that was typed before, if any."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        # An option without its value keeps the parser from handing the op over.
        op = next((word for word in (ctx.params.get("op"), *ctx.args) if word in OPS), None)
        framework = ctx.params.get("framework")
        kinds = [framework.upper()] if framework else ["TORCH", "JAX", "WORLD"]
        made = next((made for kind in kinds if op and (made := benchmark_named(op, kind)) is not None), None)
        return completion(names(made))(incomplete) if made else []

    return complete


_DEFAULT_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}


def run_bench(
    op: Annotated[str, operands(tuple(OPS))],
    framework: Framework = None,
    *,
    cases: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            help="A case to run: its name, or a pattern. Repeat it for more.",
            autocompletion=_offered(lambda made: made.CASES),
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="A named set of cases, such as fp8_linear's primus.", autocompletion=_offered(lambda made: made.SUITES)
        ),
    ] = None,
    impls: Annotated[
        list[str] | None,
        typer.Option(
            "--impl",
            help="An implementation to time: its name, or a pattern. Repeat it for more.",
            autocompletion=_offered(lambda made: [typed(impl.name) for impl in made.IMPLEMENTATIONS]),
        ),
    ] = None,
    modes: Annotated[
        list[str] | None,
        typer.Option(
            "--mode",
            help="What to time, such as forward or forward+backward. Repeat it for more.",
            autocompletion=_offered(lambda made: map(typed, made.MODES)),
        ),
    ] = None,
    device: Device = "auto",
    dtype: Annotated[
        str | None, words("The inputs' dtype. Default: float32 on the CPU, bfloat16 on a GPU.", *DTYPE_BYTES)
    ] = None,
    world: Annotated[
        int | None, typer.Option(help="How many processes share each case: one per GPU, or on the CPU.", metavar="N")
    ] = None,
    repeats: Annotated[int, typer.Option(help="How many times each implementation is timed.")] = 7,
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the HTML page.")] = Path("results"),
    add: Annotated[
        bool, typer.Option("--add", help="Add to today's file of results, and replace only the rows measured again.")
    ] = False,
    console: Console,
) -> dict[str, Any]:
    """Time an op and its competitors, after checking that their results are right.

    It writes `<date>-<device>-<op>.json` and `.html` (in JAX `<op>-jax`, with `world` `<op>-world<N>`) and replaces
    those of the same day.

    `cases`, `impls` and `modes` hold patterns.

    Returns:
        What the JSON file holds.

    Raises:
        ImportError: a package that this needs is missing.
        ValueError: an option can't be served; then nothing has run or been written.
        KeyboardInterrupt: the user ended the run.  What was measured is written, and `add` continues from there; if
            nothing was measured, an existing file stays as it is.
        typer.Exit: a process of `world` failed, and the error was shown; what was measured is written too.
    """
    known_op(op, OPS)
    framework = choose_framework(framework)
    require_packages("bench", (framework, "jinja2", "plotly", "psutil", "pynvml"), f"{framework},bench")
    device = resolve_device(device, framework)
    if repeats < 1:
        raise ValueError(f"--repeats must be 1 or more; got {repeats}")
    of_lengths = suite == lengths.SUITE
    if of_lengths and (framework != "torch" or world is not None):
        raise ValueError("--suite lengths is for PyTorch in one process; leave --framework jax and --world out")
    target = benchmark_of(op, framework, world)
    if world is not None:
        _check_gpus(world, device)
    dtype = dtype or _DEFAULT_DTYPES[device]
    if dtype not in target.DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(target.DTYPES)}; got {dtype!r}")
    if suite is not None and suite not in target.SUITES:
        there = ", ".join(target.SUITES)
        raise ValueError(f"--suite must be one of the op's: {there}; got {suite!r}")
    usual = "world" if world is not None and device == "cuda" else device
    if of_lengths and device == "cpu":
        default = [target.SUITES["cpu"][0].name]
    else:
        default = [case.name for case in target.SUITES[suite or usual]]
    chosen = matching("--case", cases, default if suite else target.CASES) if cases else default
    known = lengths.implementations(target, device, dtype) if of_lengths else target.IMPLEMENTATIONS
    by_name = {impl.name: impl for impl in known}
    implementations = [by_name[name] for name in (matching("--impl", impls, by_name) if impls else by_name)]
    chosen_modes = matching("--mode", modes, target.MODES) if modes else target.MODES

    described = {"op": op, **environment.describe(device, framework), "repeats": repeats}
    if device == "cpu" and described["busy_cores"] > 0.2:
        console.print(
            f"[yellow]Other programs keep {described['busy_cores']} cores busy; the times will be too long.[/]"
        )
    name = op if framework == "torch" else f"{op}-{framework}"
    if world is not None:
        described |= {"world": world, "threads": target.fw.threads() // world or 1}
        name = f"{op}-world{world}"
    if of_lengths:
        name = f"{op}-{suite}"
    stem = out / f"{described['date'][:10]}-{described['device']}-{name}"
    path, page = (stem.with_name(f"{stem.name}.{kind}") for kind in ("json", "html"))
    files.check_writable("--out", path, page)
    earlier = _earlier(path, described) if add else None
    options: dict[str, Any] = {
        "cases": chosen, "device": device, "dtype": dtype, "repeats": repeats, "date": described["date"],
        "modes": chosen_modes, "console": console,
    }  # fmt: skip
    if of_lengths:
        outcome = lengths.run_cases(
            op, cases=[target.CASES[name] for name in chosen], chosen=implementations, device=device, dtype=dtype,
            date=described["date"], console=console,
        )  # fmt: skip
    elif world is None:
        outcome = harness.run_cases(
            op,
            target,
            implementations=implementations,
            show=lambda rows, outcome: report.print_rows([vars(row) for row in rows], console),
            **options,
        )
    else:
        from onchip.bench import torch_world

        names = [impl.name for impl in implementations]
        outcome = torch_world.run_cases(op, world, implementations=names, **options)
    if outcome.interrupted and not outcome.rows and path.exists():
        report.print_not_run(outcome.as_json(), console)
        console.print(f"nothing was measured; {path} is unchanged", highlight=False, soft_wrap=True)
        raise _ended(outcome)
    found = {"environment": described, **outcome.as_json()}
    document = found if earlier is None else _added(earlier, found)
    files.replace(path, json.dumps(document, indent=1, allow_nan=False) + "\n")  # before all that could go wrong
    report.print_not_run(found, console)
    files.replace(page, html_page(document, path.name))
    console.print(f"wrote {path}\nwrote {page}", highlight=False, soft_wrap=True)
    if outcome.interrupted:
        raise _ended(outcome)
    return document


def _check_gpus(world: int, device: str) -> None:
    """Raise ValueError if there are too few."""
    import torch

    if device == "cuda" and world > (found := torch.cuda.device_count()):
        raise ValueError(f"--world is {world}, but there are only {found} GPUs; pass a smaller N, or --device cpu")


def _ended(outcome: harness.Outcome) -> BaseException:
    """What to raise for a run that ended early."""
    return KeyboardInterrupt() if outcome.failure is None else typer.Exit(1)


def _earlier(path: Path, environment: Mapping[str, Any]) -> dict[str, Any] | None:
    """The document to add to, if there is one; raises ValueError if it was made with other hardware or versions."""
    if not path.exists():
        return None
    try:
        document: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        before = msgspec.convert(document, _Document)["environment"]
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"--add: onchip bench didn't write {path} ({error}); choose another --out") from error
    for name in ("gpu", "cpu", "torch", "triton", "jax", "jaxlib", "onchip"):
        if (made_with := before.get(name)) != environment.get(name):
            raise ValueError(f"--add: {path} was made with {name} {made_with}; choose another --out")
    return document


def _added(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The earlier document, in which this one's rows replace those that they repeat."""

    names = ("case", "sizes", "dtype", "mode", "impl")
    rows = {str([row.get(name) for name in names]): row for row in (*earlier["rows"], *now["rows"])}
    not_run = [entry for entry in earlier["not_run"] if entry not in now["not_run"]]
    return {**earlier, **now, "rows": list(rows.values()), "not_run": [*not_run, *now["not_run"]]}
