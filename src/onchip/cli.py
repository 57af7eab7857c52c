"""The `onchip` command: demo, plan, check, bench, tune, info."""

import functools
import json
import platform
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import onchip
from onchip.core.configs import device_slug
from onchip.core.machine import FRAMEWORKS, choose_framework, installed_frameworks, require_packages
from onchip.demo import DEFAULT_STEPS, DEFAULT_TOKENS, DEFAULT_VOCAB

app = typer.Typer(
    help="Fused training operations for large language models: exact, small, and open about their cost.",
    no_args_is_help=True,
    add_completion=False,
)
OPS = ("linear_cross_entropy", "linear_log_probs", "cross_entropy", "linear_jsd")
CHECKED = (*OPS, "fp8_linear")
# The modules of the ops that are tuned, by framework.
TUNINGS = {
    "torch": {op: f"onchip.tune.{op}" for op in ("linear_cross_entropy", "fp8_linear")},
    "jax": {"linear_cross_entropy": "onchip.tune.linear_cross_entropy_jax"},
}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on standard output.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")]
Framework = Annotated[str | None, typer.Option(help="torch or jax. Default: torch where it is installed.")]
Cases = Annotated[list[str] | None, typer.Option(help="Case name or pattern; may be given several times.")]


def _command(run: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Make `run` a command: --json prints the document that it returns, and what a user did wrong is a message."""

    @app.command()
    @functools.wraps(run)
    def command(**options: Any) -> None:
        try:
            document = run(**options)
        except (ValueError, ImportError) as error:
            Console(stderr=True).print(f"[red bold]onchip:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
            raise typer.Exit(2) from error
        if options["as_json"]:
            sys.stdout.write(json.dumps(document, indent=2) + "\n")
        if not document.get("ok", True):
            raise typer.Exit(1)

    return run


@contextmanager
def _ended_by_a_signal_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM, which `timeout` and batch systems send, raises KeyboardInterrupt too: what is measured gets written."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _known_op(op: str, known: Collection[str]) -> None:
    if op not in known:
        raise ValueError(f"no op {op!r}; there is: {', '.join(known)}")


def _console(as_json: bool) -> Console:
    return Console(stderr=as_json)


@_command
def demo(
    steps: Annotated[int, typer.Option(help="Training steps of each of the two runs.")] = DEFAULT_STEPS,
    vocab: Annotated[int, typer.Option(help="Entries of the byte-pair tokenizer.")] = DEFAULT_VOCAB,
    tokens: Annotated[int, typer.Option(help="Tokens per step.")] = DEFAULT_TOKENS,
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="Folder for demo.json, demo.png and demo.html.")] = Path("onchip-demo"),
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the batches.")] = 0,
    framework: Framework = None,
    fp8: Annotated[
        bool, typer.Option("--fp8", help="Train once more, with the linear layers in blockwise FP8 (torch).")
    ] = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Train a small language model on real English twice, with the framework's loss and with onchip's."""
    from onchip.demo.run import run_demo

    return run_demo(
        steps=steps,
        vocab=vocab,
        tokens=tokens,
        device=device,
        out=out,
        seed=seed,
        console=_console(as_json),
        framework=framework,
        fp8=fp8,
    )


@_command
def plan(
    op: Annotated[str, typer.Argument(help=f"One of: {', '.join(OPS)}.")] = OPS[0],
    *,
    tokens: Annotated[int, typer.Option(help="Tokens in a batch: all leading dimensions multiplied.")],
    hidden: Annotated[int | None, typer.Option(help="Hidden size.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Vocabulary size.")] = None,
    teacher_hidden: Annotated[
        int | None, typer.Option(help="The teacher's hidden size, of linear_jsd. Default: as --hidden.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="A model's name instead of --hidden and --vocab.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    weight_dtype: Annotated[str | None, typer.Option(help="The weight's dtype, if autocast casts it.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu: what to plan for, not what is here.")] = "cuda",
    framework: Annotated[
        str, typer.Option(help="torch, or of linear_cross_entropy jax: what to plan for, not what is here.")
    ] = "torch",
    backend: Annotated[
        str,
        typer.Option(
            help="triton or torch, in JAX mosaic_gpu or xla; or auto: what the op would take, and for most ops the "
            "other one too."
        ),
    ] = "auto",
    precision: Annotated[str, typer.Option(help="full, or of linear_cross_entropy in PyTorch fp8.")] = "full",
    scratch_mib: Annotated[list[int] | None, typer.Option(help="A budget in MiB; may be given several times.")] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Tell what an op costs before it runs: scratch, products and chunks per strategy and budget."""
    from onchip.plan import plan_document, show_plan

    _known_op(op, OPS)
    document = plan_document(
        op,
        tokens=tokens,
        hidden=hidden,
        vocab=vocab,
        teacher_hidden=teacher_hidden,
        model=model,
        dtype=dtype,
        weight_dtype=weight_dtype,
        device=device,
        framework=framework,
        backend=backend,
        precision=precision,
        scratch_mib=scratch_mib,
    )
    if not as_json:
        show_plan(document, Console())
    return document


@_command
def check(
    ops: Annotated[list[str] | None, typer.Argument(help=f"Of: {', '.join(CHECKED)}. Default: all.")] = None,
    framework: Annotated[
        str | None, typer.Option(help="torch, jax, or all. Default: those that are installed.")
    ] = None,
    device: Device = "auto",
    full: Annotated[bool, typer.Option("--full", help="All cases in all dtypes: minutes instead of one.")] = False,
    fuzz: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Random calls for so long, instead of the cases.")
    ] = None,
    calls: Annotated[int | None, typer.Option(help="Stop after so many random calls.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random calls. Default: a random one.")] = None,
    as_json: Json = False,
) -> dict[str, Any]:
    """Run the ops' correctness cases on this machine against float64 oracles."""
    from onchip.check import run_check

    for op in ops or CHECKED:
        _known_op(op, CHECKED)

    named = list(FRAMEWORKS) if framework == "all" else [choose_framework(framework)]
    chosen = installed_frameworks() or named if framework is None else named
    for name in chosen:
        require_packages("check", (name,), name)
    wanted = [op for op in CHECKED if op in (ops or CHECKED)]
    if fuzz is None:
        return run_check(chosen, wanted, device, _console(as_json), full=full)
    from onchip.fuzz.run import run_fuzz

    return run_fuzz(chosen, wanted, device, _console(as_json), seconds=fuzz, most=calls, seed=seed)


@_command
def bench(
    op: Annotated[str, typer.Argument(help=f"One of: {', '.join(CHECKED)}.")],
    framework: Framework = None,
    case: Cases = None,
    suite: Annotated[str | None, typer.Option(help="A named set of cases, such as fp8_linear's primus.")] = None,
    impl: Annotated[list[str] | None, typer.Option(help="Implementation name or pattern; likewise.")] = None,
    device: Device = "auto",
    dtype: Annotated[str | None, typer.Option(help="Default: float32 on the CPU, bfloat16 on a GPU.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each implementation.")] = 7,
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the HTML page.")] = Path("results"),
    add: Annotated[bool, typer.Option("--add", help="Keep what an earlier run of the day found of others.")] = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Time an op beside its competitors, after checking that each is right."""
    with _ended_by_a_signal_as_by_ctrl_c():
        _known_op(op, CHECKED)
        from onchip.bench.run import run_bench

        return run_bench(
            op,
            choose_framework(framework),
            cases=case,
            impls=impl,
            device=device,
            dtype=dtype,
            repeats=repeats,
            out=out,
            console=_console(as_json),
            add=add,
            suite=suite,
        )


@_command
def tune(
    op: Annotated[str, typer.Argument(help=f"One of: {', '.join(TUNINGS['torch'])}.")],
    framework: Framework = None,
    case: Cases = None,
    kernel: Annotated[list[str] | None, typer.Option(help="Kernel name or pattern; likewise.")] = None,
    dtype: Annotated[str, typer.Option(help="The inputs' dtype.")] = "bfloat16",
    out: Annotated[
        Path | None, typer.Option(help="Folder of configs. Default: the user's own, which goes before the shipped one.")
    ] = None,
    limit_seconds: Annotated[
        float | None, typer.Option(help="Start nothing new after so long; the same command goes on from there.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what is stored or was measured before.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Only time what is stored against the heuristic's config.")
    ] = False,
    as_json: Json = False,
) -> dict[str, Any]:
    """Find the fastest block sizes of an op's kernels on this GPU and store them for later runs."""
    framework = choose_framework(framework)
    _known_op(op, TUNINGS[framework])
    from onchip.tune.run import run_tune

    return run_tune(
        op,
        TUNINGS[framework][op],
        framework,
        cases=case,
        kernels=kernel,
        dtype=dtype,
        out=out,
        limit_seconds=limit_seconds,
        again=again,
        compare=compare,
        console=_console(as_json),
    )


@_command
def info(as_json: Json = False) -> dict[str, Any]:
    """Versions, devices, which backends are usable here and why the others are not, and which configs are tuned."""
    document = _info()
    if not as_json:
        _print_info(document, Console())
    return document


def _print_info(document: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"onchip {onchip.__version__}", show_header=False)
    for name, value in {**document["versions"], **document["machine"]}.items():
        table.add_row(name, value or "[dim]not installed[/]")
    console.print(table)
    backends = [
        {**row, "usable": "[green]yes[/]" if row["usable"] else "[red]no[/]", "why": escape(row["why"])}
        for row in document["backends"]
    ]
    _print_grouped(backends, ("framework", "backend", "device", "usable", "why"), "op", "backends", console)
    tuned = document["tuned"]
    if tuned["rows"]:
        columns = ("device", "op", "kernel", "case", "how", "source")
        _print_grouped(tuned["rows"], columns, "dtype", "tuned configs", console)
    for note in tuned["notes"]:
        console.print(f"tuned configs: {note}", highlight=False, markup=False, soft_wrap=True)


def _print_grouped(
    rows: Sequence[Mapping[str, str]], columns: Sequence[str], last: str, title: str, console: Console
) -> None:
    """A table with one line for all rows that agree in all columns but the last, whose values are listed."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in columns), []).append(row[last])
    table = Table(*columns, f"{last}s", title=title)
    for key, names in groups.items():
        table.add_row(*key, "all" if len(names) == len(CHECKED) else ", ".join(names))
    console.print(table)


def _info() -> dict[str, Any]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "triton", "jax", "jaxlib", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    machine = {"system": platform.platform(), "processor": platform.processor() or platform.machine()}
    # By framework: why it is not here, why it has no CUDA device, and the names of those that it has.
    missing = {name: f"{FRAMEWORKS[name]} is not installed; pip install 'onchip[{name}]'" for name in FRAMEWORKS}
    missing = {name: reason for name, reason in missing.items() if versions[name] is None}
    no_cuda, devices = dict(missing), {name: list[str]() for name in FRAMEWORKS}
    if versions["torch"] is not None:
        import torch

        machine["threads"] = str(torch.get_num_threads())
        if torch.version.cuda is None:
            no_cuda["torch"] = f"torch {torch.__version__} is built without CUDA"
        elif not torch.cuda.is_available():
            no_cuda["torch"] = "PyTorch sees no CUDA device"
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            machine[f"cuda:{i}"] = f"{p.name}, {p.total_memory / 2**30:.0f} GiB, compute {p.major}.{p.minor}"
            devices["torch"] += [device_slug(p.name)] if "torch" not in no_cuda else []
    if versions["jax"] is not None:
        import jax

        machine |= {f"jax {d.platform}:{d.id}": d.device_kind for d in jax.devices()}
        devices["jax"] = [device_slug(d.device_kind) for d in jax.devices() if d.platform == "gpu"]
        if not devices["jax"]:
            no_cuda["jax"] = f"JAX sees no CUDA device (jaxlib {versions['jaxlib']})"
    tuned: dict[str, list[Any]] = {"rows": [], "notes": []}
    if any(devices.values()):
        from onchip.tune.run import tuned_configs

        found = [tuned_configs(TUNINGS[name], slugs) for name, slugs in devices.items() if slugs]
        tuned = {key: [x for part in found for x in part[key]] for key in tuned}
    else:
        tuned["notes"] = [f"none apply, as there is no CUDA device here ({no_cuda.get('torch')})"]
    return {
        "onchip": onchip.__version__,
        "versions": versions,
        "machine": machine,
        "backends": [
            row
            for name in FRAMEWORKS
            for op in CHECKED
            for row in _backends(name, op, missing.get(name), no_cuda.get(name))
        ],
        "tuned": tuned,
    }


_BACKENDS = {
    "torch": "the framework's own operations",
    "xla": "matrix products and loops of XLA",
    "dequantize": "the framework's own operations, in float32",
    "scaled_mm": "cuBLAS's blockwise FP8 products",
}


def _backends(framework: str, op: str, missing: str | None, no_cuda: str | None) -> list[dict[str, Any]]:
    """The backends that can run a plain call in bfloat16 on the CPU, and all of those for a CUDA device."""
    on_cpu: Mapping[str, str | None]
    on_gpu: Mapping[str, str | None]
    if missing is not None:
        plain = {"torch": "torch", "jax": "xla"}[framework]
        on_cpu = on_gpu = {plain: missing}
    else:
        refusals = import_module(f"onchip.ops.{op}.checks").plain_refusals
        asked = refusals("cpu", "bfloat16", framework)
        on_cpu = {backend: reason for backend, reason in asked.items() if reason is None}
        # PyTorch can't be asked about a device that isn't there.
        asked = asked if framework == "torch" and no_cuda else refusals("cuda", "bfloat16", framework)
        on_gpu = {backend: no_cuda or reason for backend, reason in asked.items()}
    return [
        {
            "op": op,
            "framework": framework,
            "backend": backend,
            "device": device,
            "usable": reason is None,
            "why": reason or _BACKENDS.get(backend, "kernels for this device"),
        }
        for device, reasons in (("cpu", on_cpu), ("cuda", on_gpu))
        for backend, reason in reasons.items()
    ]


if __name__ == "__main__":
    app()
