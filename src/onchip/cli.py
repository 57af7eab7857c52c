"""The `onchip` command: demo, plan, check, bench, warm-up, info.  Each one's module is imported when it runs."""

import functools
import inspect
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

import onchip


class _Entry(NamedTuple):
    run: str
    """Where its function is: "module:name"."""
    help: str
    """What the list of commands says, short enough for 60 columns."""
    shows_progress: bool = True
    """Whether it prints progress (on standard error) with --json too."""


COMMANDS = {
    "demo": _Entry("onchip.demo.run:run_demo", "Train a small model with and without onchip."),
    "plan": _Entry("onchip.plan.command:run_plan", "Predict an op's memory and time.", shows_progress=False),
    "check": _Entry("onchip.check:run_check", "Compare the ops with float64 on this machine."),
    "bench": _Entry("onchip.bench.run:run_bench", "Time an op and its competitors."),
    "warm-up": _Entry("onchip.warm_up:run_warm_up", "Compile an op's kernels before they are needed."),
    "info": _Entry("onchip.info:run_info", "Show versions, devices and backends.", shows_progress=False),
}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on standard output.")]


class _Commands(TyperGroup):
    """The commands, with only name and help until one of them runs."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = {
            name: TyperCommand(name=name, help=entry.help, rich_markup_mode=None) for name, entry in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and _loaded(command.name or ""), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            Console(stderr=True).print("[red bold]onchip:[/] interrupted", highlight=False)
            raise typer.Exit(130) from None


def _loaded(name: str) -> Any:
    """The command, whose options are the parameters of its function, except `console`.

    --json prints the document that the function returns; a ValueError or ImportError ends it with a message.
    """
    entry = COMMANDS[name]
    run: Callable[..., dict[str, Any]] = resolve_name(entry.run)

    @functools.wraps(run)
    def command(as_json: bool, **options: Any) -> None:
        console = Console(stderr=as_json, quiet=as_json and not entry.shows_progress)
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
    made = typer.Typer(add_completion=False, rich_markup_mode=None)
    made.command(name, help=str(run.__doc__).splitlines()[0])(command)
    return typer.main.get_command(made)


@contextmanager
def _ended_by_a_signal_as_by_ctrl_c() -> Iterator[None]:
    """Let SIGTERM, which `timeout` and batch systems send, raise KeyboardInterrupt, so that results are written."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"onchip {onchip.__version__}\n")
        raise typer.Exit


# Plain help: panels cut long words on narrow terminals.
app = typer.Typer(
    cls=_Commands,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Fused training operations for large language models: exact, small, and open about their cost."""


if __name__ == "__main__":
    app()
