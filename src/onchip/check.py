"""`onchip check`: every op's correctness cases on this machine, against the float64 oracle."""

from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from itertools import product
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from onchip.core.machine import FRAMEWORKS, choose_framework, installed_frameworks, require_packages, resolve_device
from onchip.core.names import known_op
from onchip.fuzz.run import run_fuzz
from onchip.ops import OPS

# Without `full`, one check in so many, backwards from the last: compiling takes JAX seconds for each.  These are prime,
# so that a case, a dtype and a variant each get their turn.
_ONE_IN = {"torch": 11, "jax": 29}


def run_check(
    ops: Sequence[str] | None,
    *,
    framework: str | None,
    device: str,
    full: bool,
    fuzz: float | None,
    calls: int | None,
    seed: int | None,
    console: Console,
) -> dict[str, Any]:
    """Run a sample of the ops' checks in each framework, the same one every time, or with `full` all of them.

    A table for each framework and op has a row per case, dtype and implementation: the quantity that comes nearest its
    bound.  With `fuzz` they are random calls instead, see `run_fuzz`.  Options are those of the command, see
    `onchip.cli.check`.

    Returns:
        All comparisons, as a document.

    Raises:
        ImportError: the framework is not installed.
        ValueError: an option that can't be served, such as "cuda" where a framework sees no such device.
    """
    for op in ops or ():
        known_op(op, OPS)
    frameworks = list(FRAMEWORKS) if framework == "all" else [choose_framework(framework)]
    if framework is None:
        frameworks = installed_frameworks() or frameworks
    for name in frameworks:
        require_packages("check", (name,), name)
    chosen = [op for op in OPS if op in (ops or OPS)]
    if fuzz is not None:
        return run_fuzz(frameworks, chosen, device, console, seconds=fuzz, most=calls, seed=seed)
    rows: list[dict[str, Any]] = []
    devices = {framework: resolve_device(device, framework) for framework in frameworks}
    for framework, op in product(frameworks, chosen):
        device, name = devices[framework], FRAMEWORKS[framework]
        checks = import_module(f"onchip.ops.{op}.checks")
        table = Table(title=f"{op} in {name} on {device}, against the float64 oracle")
        for column in ("case", "dtype", "implementation", "worst of", "error", "bound", ""):
            table.add_column(column, justify="right" if column in ("error", "bound") else "left")
        planned = checks.planned_checks(device, framework)
        if not full:
            planned = planned[:: -_ONE_IN[framework]][::-1]
        for run in track(planned, description=f"checking {op} in {name}", console=console, transient=True):
            compared = run()
            rows += [
                {"op": op, "framework": framework, "device": device, **asdict(check), "ok": check.ok}
                for check in compared
            ]
            worst = max(compared, key=lambda c: (not c.ok, c.error / c.bound if c.bound else 0.0))
            verdict = "[green]ok[/]" if worst.ok else "[red bold]WRONG[/]"
            numbers = (f"{worst.error:.1e}", f"{worst.bound:.1e}")
            table.add_row(worst.case, worst.dtype, worst.implementation, worst.quantity, *numbers, verdict)
        console.print(table)
    bad = sum(not row["ok"] for row in rows)
    console.print(
        f"[red bold]{bad} of {len(rows)} comparisons are out of bounds[/]"
        if bad
        else f"[green]all {len(rows)} comparisons are within their bounds[/]"
    )
    return {"ok": not bad, "rows": rows}
