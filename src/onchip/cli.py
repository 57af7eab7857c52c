"""The `onchip` command: demo, plan, check, bench, tune, info."""

import json
import platform
import signal
import sys
from collections.abc import Collection, Iterator, Mapping
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
from onchip.core.machine import choose_framework, installed_frameworks, require_packages
from onchip.demo import DEFAULT_STEPS, DEFAULT_TOKENS, DEFAULT_VOCAB

app = typer.Typer(
    help="Fused training operations for large language models: exact, small, and open about their cost.",
    no_args_is_help=True,
    add_completion=False,
)
OPS = ("linear_cross_entropy", "linear_log_probs", "cross_entropy", "linear_jsd")
CHECKED = (*OPS, "fp8_linear")
# Where each op keeps what the commands need, by op name; of benchmarks and checks by framework first.
CHECKS = {framework: {op: f"onchip.ops.{op}.checks" for op in CHECKED} for framework in ("torch", "jax")}
BENCHMARKS = {
    framework: {op: f"onchip.bench.ops.{op}:{framework.upper()}" for op in CHECKED} for framework in ("torch", "jax")
}
TUNINGS = {
    "torch": {op: f"onchip.tune.{op}" for op in ("linear_cross_entropy", "fp8_linear")},
    "jax": {"linear_cross_entropy": "onchip.tune.linear_cross_entropy_jax"},
}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on standard output.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")]


@contextmanager
def _clear_errors() -> Iterator[None]:
    """Show what a user did wrong as a message, not as a traceback."""
    try:
        yield
    except (ValueError, ImportError) as error:
        Console(stderr=True).print(f"[red bold]onchip:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error


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


def _print_json(document: Any) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps of each of the two runs.")] = DEFAULT_STEPS,
    vocab: Annotated[int, typer.Option(help="Entries of the byte-pair tokenizer.")] = DEFAULT_VOCAB,
    tokens: Annotated[int, typer.Option(help="Tokens per step.")] = DEFAULT_TOKENS,
    device: Device = "auto",
    out: Annotated[Path, typer.Option(help="Folder for demo.json, demo.png and demo.html.")] = Path("onchip-demo"),
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the batches.")] = 0,
    framework: Annotated[
        str | None, typer.Option(help="torch or jax. Default: torch, or jax where only that is installed.")
    ] = None,
    fp8: Annotated[
        bool, typer.Option("--fp8", help="Train once more, with the linear layers in blockwise FP8 (torch).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a small language model on real English twice, with the framework's loss and with onchip's."""
    with _clear_errors():
        from onchip.demo.run import run_demo

        document = run_demo(
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
    if as_json:
        _print_json(document)


@app.command()
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
) -> None:
    """Tell what an op costs before it runs: scratch, products and chunks per strategy and budget."""
    with _clear_errors():
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
    if as_json:
        _print_json(document)
    else:
        show_plan(document, Console())


@app.command()
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
) -> None:
    """Run the ops' correctness cases on this machine against float64 oracles."""
    with _clear_errors():
        from onchip.check import run_check

        for op in ops or CHECKED:
            _known_op(op, CHECKED)

        named = list(CHECKS) if framework == "all" else [choose_framework(framework)]
        chosen = installed_frameworks() or named if framework is None else named
        for name in chosen:
            require_packages("check", (name,), name)
        modules = {name: {op: CHECKS[name][op] for op in CHECKED if op in (ops or CHECKED)} for name in chosen}
        if fuzz is None:
            document = run_check(modules, device, _console(as_json), full=full)
        else:
            from onchip.fuzz.run import run_fuzz

            names = {name: list(of) for name, of in modules.items()}
            document = run_fuzz(names, device, _console(as_json), seconds=fuzz, most=calls, seed=seed)
    if as_json:
        _print_json(document)
    if not document["ok"]:
        raise typer.Exit(1)


@app.command()
def bench(
    op: Annotated[str, typer.Argument(help=f"One of: {', '.join(BENCHMARKS['torch'])}.")],
    framework: Annotated[str | None, typer.Option(help="torch or jax. Default: torch where it is installed.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Case name or pattern; may be given several times.")] = None,
    suite: Annotated[str | None, typer.Option(help="A named set of cases, such as fp8_linear's primus.")] = None,
    impl: Annotated[list[str] | None, typer.Option(help="Implementation name or pattern; likewise.")] = None,
    device: Device = "auto",
    dtype: Annotated[str | None, typer.Option(help="Default: float32 on the CPU, bfloat16 on a GPU.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each implementation.")] = 7,
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the HTML page.")] = Path("results"),
    add: Annotated[bool, typer.Option("--add", help="Keep what an earlier run of the day found of others.")] = False,
    as_json: Json = False,
) -> None:
    """Time an op beside its competitors, after checking that each is right."""
    with _clear_errors(), _ended_by_a_signal_as_by_ctrl_c():
        framework = choose_framework(framework)
        _known_op(op, BENCHMARKS[framework])
        from onchip.bench.run import run_bench

        document = run_bench(
            op,
            BENCHMARKS[framework][op],
            framework=framework,
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
    if as_json:
        _print_json(document)


@app.command()
def tune(
    op: Annotated[str, typer.Argument(help=f"One of: {', '.join(TUNINGS['torch'])}.")],
    framework: Annotated[str | None, typer.Option(help="torch or jax. Default: torch where it is installed.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Case name or pattern; may be given several times.")] = None,
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
        bool, typer.Option("--compare", help="Only time what a launch takes against the heuristic's config.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Find the fastest block sizes of an op's kernels on this GPU and store them for later runs."""
    with _clear_errors():
        framework = choose_framework(framework)
        _known_op(op, TUNINGS[framework])
        from onchip.tune.run import run_tune

        document = run_tune(
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
    if as_json:
        _print_json(document)
    if not document["ok"]:
        raise typer.Exit(1)


@app.command()
def info(as_json: Json = False) -> None:
    """Versions, devices, which backends are usable here and why the others are not, and which configs are tuned."""
    document = _info()
    if as_json:
        _print_json(document)
        return
    console = Console()
    table = Table(title=f"onchip {onchip.__version__}", show_header=False)
    for name, value in {**document["versions"], **document["machine"]}.items():
        table.add_row(name, value or "[dim]not installed[/]")
    console.print(table)
    table = Table("framework", "backend", "device", "usable", "why", "ops", title="backends")
    ops: dict[tuple[Any, ...], list[str]] = {}  # one line for those that agree in everything else
    for row in document["backends"]:
        usable = "[green]yes[/]" if row["usable"] else "[red]no[/]"
        cells = (row["framework"], row["backend"], row["device"], usable, escape(row["why"]))
        ops.setdefault(cells, []).append(row["op"])
    for cells, names in ops.items():
        table.add_row(*cells, "all" if len(names) == len(CHECKED) else ", ".join(names))
    console.print(table)
    _print_tuned(document["tuned"], console)


def _print_tuned(tuned: Mapping[str, Any], console: Console) -> None:
    if tuned["rows"]:
        dtypes: dict[tuple[str, ...], list[str]] = {}  # one line for those that agree in everything else
        for row in tuned["rows"]:
            key = tuple(row[name] for name in ("device", "op", "kernel", "case", "how", "source"))
            dtypes.setdefault(key, []).append(row["dtype"])
        table = Table("device", "op", "kernel", "case", "config", "from", "dtypes", title="tuned configs")
        for key, names in dtypes.items():
            table.add_row(*key, ", ".join(names))
        console.print(table)
    for note in tuned["notes"]:
        console.print(f"tuned configs: {note}", highlight=False, markup=False, soft_wrap=True)


def _info() -> dict[str, Any]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "triton", "jax", "jaxlib", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    machine = {"system": platform.platform(), "processor": platform.processor() or platform.machine()}
    no_torch = no_cuda = None
    if versions["torch"] is None:
        no_torch = no_cuda = "PyTorch is not installed; pip install 'onchip[torch]'"
    else:
        import torch

        machine["threads"] = str(torch.get_num_threads())
        if torch.version.cuda is None:
            no_cuda = f"torch {torch.__version__} is built without CUDA"
        elif not torch.cuda.is_available():
            no_cuda = "PyTorch sees no CUDA device"
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            machine[f"cuda:{i}"] = f"{p.name}, {p.total_memory / 2**30:.0f} GiB, compute {p.major}.{p.minor}"
    backends = [row for op in CHECKS["torch"] for row in _torch_backends(op, no_torch, no_cuda)]
    if versions["jax"] is None:
        reason = "JAX is not installed; pip install 'onchip[jax]'"
        backends += [_row(op, "jax", "xla", device, reason) for op in CHECKS["jax"] for device in ("cpu", "cuda")]
    else:
        import jax

        machine |= {f"jax {d.platform}:{d.id}": d.device_kind for d in jax.devices()}
        backends += [row for op in CHECKS["jax"] for row in _jax_backends(op)]
    return {
        "onchip": onchip.__version__,
        "versions": versions,
        "machine": machine,
        "backends": backends,
        "tuned": _tuned(no_cuda, sees_jax=versions["jax"] is not None),
    }


def _torch_backends(op: str, no_torch: str | None, no_cuda: str | None) -> list[dict[str, Any]]:
    """The backends that can run a plain call in bfloat16 on the CPU, and all of those for a CUDA device."""
    if no_torch is not None:
        return [_row(op, "torch", "torch", device, no_torch) for device in ("cpu", "cuda")]
    checks = import_module(CHECKS["torch"][op])
    on_cpu = checks.plain_refusals("cpu", "bfloat16", "torch")
    on_gpu = dict.fromkeys(on_cpu, no_cuda) if no_cuda else checks.plain_refusals("cuda", "bfloat16", "torch")
    rows = [_row(op, "torch", backend, "cpu", None) for backend, reason in on_cpu.items() if reason is None]
    return rows + [_row(op, "torch", backend, "cuda", reason) for backend, reason in on_gpu.items()]


def _jax_backends(op: str) -> list[dict[str, Any]]:
    """As of PyTorch."""
    import jax

    sees_cuda = any(d.platform == "gpu" for d in jax.devices())
    no_cuda = None if sees_cuda else f"JAX sees no CUDA device (jaxlib {metadata.version('jaxlib')})"
    checks = import_module(CHECKS["jax"][op])
    on_cpu, on_gpu = (checks.plain_refusals(device, "bfloat16", "jax") for device in ("cpu", "cuda"))
    rows = [_row(op, "jax", backend, "cpu", None) for backend, reason in on_cpu.items() if reason is None]
    return rows + [_row(op, "jax", backend, "cuda", no_cuda or reason) for backend, reason in on_gpu.items()]


_BACKENDS = {
    "torch": "the framework's own operations",
    "xla": "matrix products and loops of XLA",
    "dequantize": "the framework's own operations, in float32",
    "scaled_mm": "cuBLAS's blockwise FP8 products",
}


def _row(op: str, framework: str, backend: str, device: str, reason: str | None) -> dict[str, Any]:
    what = _BACKENDS.get(backend, "kernels for this device")
    return {
        "op": op,
        "framework": framework,
        "backend": backend,
        "device": device,
        "usable": reason is None,
        "why": reason or what,
    }


def _tuned(no_cuda: str | None, sees_jax: bool) -> dict[str, Any]:
    """Which kernels have a tuned config on the CUDA devices here; `no_cuda` says why PyTorch has none."""
    devices = {}
    if no_cuda is None:
        import torch

        devices["torch"] = [torch.cuda.get_device_properties(i).name for i in range(torch.cuda.device_count())]
    if sees_jax:
        import jax

        devices["jax"] = [d.device_kind for d in jax.devices() if d.platform == "gpu"]
    if not any(devices.values()):
        return {"rows": [], "notes": [f"none apply, as there is no CUDA device here ({no_cuda})"]}
    from onchip.tune.run import tuned_configs

    found = [tuned_configs(TUNINGS[name], [device_slug(d) for d in names]) for name, names in devices.items()]
    return {key: [x for part in found for x in part[key]] for key in ("rows", "notes")}


if __name__ == "__main__":
    app()
