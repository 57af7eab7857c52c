"""The `onchip` command: demo, plan, check, bench, tune, info."""

import functools
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from onchip.demo import DEFAULT_STEPS, DEFAULT_TOKENS, DEFAULT_VOCAB
from onchip.ops import LOSSES, OPS
from onchip.tune import TUNINGS

app = typer.Typer(
    help="Fused training operations for large language models: exact, small, and open about their cost.",
    no_args_is_help=True,
    add_completion=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on standard output.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")]
Framework = Annotated[str | None, typer.Option(help="torch or jax. Default: torch where it is installed.")]
Cases = Annotated[list[str] | None, typer.Option("--case", help="Case name or pattern; may be given several times.")]


def _command(target: str, *, shows_progress: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function that declares its options and does nothing.

    The function named `target` is imported when the command runs.  It gets the options and a console to show things on,
    and returns the document that --json prints.  What a user did wrong is a message.
    """

    def declare(options_of: Callable[..., None]) -> Callable[..., None]:
        @app.command()
        @functools.wraps(options_of)
        def command(as_json: bool, **options: Any) -> None:
            console = Console(stderr=as_json, quiet=as_json and not shows_progress)
            try:
                with _ended_by_a_signal_as_by_ctrl_c():
                    document = resolve_name(target)(**options, console=console)
            except (ValueError, ImportError) as error:
                Console(stderr=True).print(
                    f"[red bold]onchip:[/] {escape(str(error))}", highlight=False, soft_wrap=True
                )
                raise typer.Exit(2) from error
            if as_json:
                sys.stdout.write(json.dumps(document, indent=2) + "\n")
            if not document.get("ok", True):
                raise typer.Exit(1)

        return options_of

    return declare


@contextmanager
def _ended_by_a_signal_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM, which `timeout` and batch systems send, raises KeyboardInterrupt too: what is measured gets written."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@_command("onchip.demo.run:run_demo")
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
) -> None:
    """Train a small language model on real English twice, with the framework's loss and with onchip's."""


@_command("onchip.plan:run_plan", shows_progress=False)
def plan(
    op: Annotated[str, typer.Argument(help=f"One of: {', '.join(LOSSES)}.")] = LOSSES[0],
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


@_command("onchip.check:run_check")
def check(
    ops: Annotated[list[str] | None, typer.Argument(help=f"Of: {', '.join(OPS)}. Default: all.")] = None,
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


@_command("onchip.bench.run:run_bench")
def bench(
    op: Annotated[str, typer.Argument(help=f"One of: {', '.join(OPS)}.")],
    framework: Framework = None,
    cases: Cases = None,
    suite: Annotated[str | None, typer.Option(help="A named set of cases, such as fp8_linear's primus.")] = None,
    impls: Annotated[list[str] | None, typer.Option("--impl", help="Implementation name or pattern; likewise.")] = None,
    device: Device = "auto",
    dtype: Annotated[str | None, typer.Option(help="Default: float32 on the CPU, bfloat16 on a GPU.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each implementation.")] = 7,
    out: Annotated[Path, typer.Option(help="Folder for the JSON file and the HTML page.")] = Path("results"),
    add: Annotated[bool, typer.Option("--add", help="Keep what an earlier run of the day found of others.")] = False,
    as_json: Json = False,
) -> None:
    """Time an op beside its competitors, after checking that each is right."""


@_command("onchip.tune.run:run_tune")
def tune(
    op: Annotated[str, typer.Argument(help=f"One of: {', '.join(TUNINGS['torch'])}.")],
    framework: Framework = None,
    cases: Cases = None,
    kernels: Annotated[list[str] | None, typer.Option("--kernel", help="Kernel name or pattern; likewise.")] = None,
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
) -> None:
    """Find the fastest block sizes of an op's kernels on this GPU and store them for later runs."""


@_command("onchip.info:run_info", shows_progress=False)
def info(as_json: Json = False) -> None:
    """Versions, devices, which backends are usable here and why the others are not, and which configs are tuned."""


if __name__ == "__main__":
    app()
