"""The `onchip` command: demo, plan, check, bench, tune, info."""

import functools
import inspect
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from onchip.bench.run import run_bench
from onchip.check import run_check
from onchip.demo.run import run_demo
from onchip.info import run_info
from onchip.plan import run_plan
from onchip.tune.run import run_tune

app = typer.Typer(
    help="Fused training operations for large language models: exact, small, and open about their cost.",
    no_args_is_help=True,
    add_completion=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on standard output.")]


def _command(name: str, run: Callable[..., dict[str, Any]], *, shows_progress: bool = True) -> None:
    """Make `run` a command, with its parameters but `console` for options, and its first line for help.

    --json prints the document that it returns; what a user did wrong is a message.
    """

    @functools.wraps(run)
    def command(as_json: bool, **options: Any) -> None:
        console = Console(stderr=as_json, quiet=as_json and not shows_progress)
        try:
            with _ended_by_a_signal_as_by_ctrl_c():
                document = run(**options, console=console)
        except (ValueError, ImportError) as error:
            Console(stderr=True).print(f"[red bold]onchip:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
            raise typer.Exit(2) from error
        if as_json:
            sys.stdout.write(json.dumps(document, indent=2) + "\n")
        if not document.get("ok", True):
            raise typer.Exit(1)

    parameters = [p for p in inspect.signature(run).parameters.values() if p.name != "console"]
    parameters.append(inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command(name, help=str(run.__doc__).splitlines()[0])(command)


@contextmanager
def _ended_by_a_signal_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM, which `timeout` and batch systems send, raises KeyboardInterrupt too: what is measured gets written."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_command("demo", run_demo)
_command("plan", run_plan, shows_progress=False)
_command("check", run_check)
_command("bench", run_bench)
_command("tune", run_tune)
_command("info", run_info, shows_progress=False)

if __name__ == "__main__":
    app()
