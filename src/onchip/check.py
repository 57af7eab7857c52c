"""`onchip check`: every op's correctness cases on this machine, against the float64 oracle."""

from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from itertools import product
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from onchip.core.machine import FRAMEWORKS, resolve_device

# Without `full`, one check in so many, backwards from the last: compiling takes JAX seconds for each.  These are prime,
# so that a case, a dtype and a variant each get their turn.
_ONE_IN = {"torch": 11, "jax": 29}


def run_check(
    frameworks: Sequence[str], ops: Sequence[str], device: str, console: Console, *, full: bool = False
) -> dict[str, Any]:
    """Run the ops' checks in each framework, show tables and return all of it as a document.  Without `full`, a sample
    of each op's, the same one every time.

    A table has a row per case, dtype and implementation: the quantity that comes nearest its bound.

    Raises:
        ValueError: `device` is not "cpu", "cuda" or "auto", or is "cuda" where a framework sees none.
    """
    rows: list[dict[str, Any]] = []
    devices = {framework: resolve_device(device, framework) for framework in frameworks}
    for framework, op in product(frameworks, ops):
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
