"""`onchip check`: runs the ops' correctness cases on this machine and compares them with the float64 oracle."""

from dataclasses import asdict
from itertools import product
from math import isfinite
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.text import Text

from onchip.core.machine import FRAMEWORKS, choose_framework, installed_frameworks, require_packages, resolve_device
from onchip.core.names import Device, known_op, operands, words
from onchip.core.tables import print_table
from onchip.registry import OPS

# Without `full`, every 11th or 29th check runs, counted from the last: JAX takes seconds to compile each.  The numbers
# are prime, so that every case, dtype and variant gets its turn.
_ONE_IN = {"torch": 11, "jax": 29}
_COLUMNS = ("case", "dtype", "implementation", "worst of", "error", "bound", "")


def run_check(
    ops: Annotated[list[str] | None, operands(tuple(OPS), " Default: all.")] = None,
    *,
    framework: Annotated[
        str | None, words("The framework to check. Default: all that are installed.", "torch", "jax", "all")
    ] = None,
    device: Device = "auto",
    full: Annotated[
        bool, typer.Option("--full", help="Run all cases in all dtypes, which takes several minutes instead of one.")
    ] = False,
    console: Console,
) -> dict[str, Any]:
    """Run the ops' correctness cases on this machine and compare them with float64 oracles.

    By default it runs a sample of each op's cases, the same one every time; with `full`, all of them.  It prints a
    table for each framework and op, with a row per case, dtype and implementation: the quantity that comes nearest its
    bound.

    Returns:
        All comparisons, as a document.

    Raises:
        ImportError: the framework is not installed.
        ValueError: an option can't be served, such as "cuda" where a framework sees no such device.
    """
    for op in ops or ():
        known_op(op, OPS)
    if framework not in (None, "all", *FRAMEWORKS):
        raise ValueError(f"--framework must be torch, jax or all; got {framework!r}")
    frameworks = list(FRAMEWORKS) if framework == "all" else [choose_framework(framework)]
    if framework is None:
        frameworks = installed_frameworks() or frameworks
    for name in frameworks:
        require_packages("check", (name,), name)
    chosen = [op for op in OPS if op in (ops or OPS)]
    rows: list[dict[str, Any]] = []
    devices = {framework: resolve_device(device, framework) for framework in frameworks}
    for framework, op in product(frameworks, chosen):
        device, name = devices[framework], FRAMEWORKS[framework]
        checker = OPS[op].entry("checks:CHECKER")
        shown: list[list[str | Text]] = []
        with checker.session(device, framework):
            planned = checker.planned_checks(device, framework)
            if not full:
                planned = planned[:: -_ONE_IN[framework]][::-1]
            for run in track(planned, description=f"checking {op} in {name}", console=console, transient=True):
                compared = run()
                rows += [
                    {"op": op, "framework": framework, "device": device, **asdict(check), "ok": check.ok}
                    | {"error": check.error if isfinite(check.error) else None}  # JSON has no other numbers
                    for check in compared
                ]
                worst = max(compared, key=lambda c: (not c.ok, c.error / c.bound if c.bound else 0.0))
                verdict = Text("ok", style="green") if worst.ok else Text("WRONG", style="red bold")
                numbers = (f"{worst.error:.1e}", f"{worst.bound:.1e}")
                shown.append([worst.case, worst.dtype, worst.implementation, worst.quantity, *numbers, verdict])
        title = f"{op} in {name} on {device}, against the float64 oracle"
        print_table(console, _COLUMNS, shown, title=title, right=("error", "bound"))
    bad = sum(not row["ok"] for row in rows)
    console.print(
        f"[red bold]{bad} of {len(rows)} comparisons are out of bounds[/]"
        if bad
        else f"[green]All {len(rows)} comparisons are within their bounds.[/]"
    )
    return {"ok": not bad, "rows": rows}
