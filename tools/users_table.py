"""Makes the table of users in docs/internals from a run of `--suite users`: python tools/users_table.py RESULTS.json"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onchip.bench.report import short_name
from onchip.bench.units import format_bytes
from onchip.ops.linear_cross_entropy.checks import USERS

WHAT = {
    "frozen": "frozen head",
    "ignored": "90% ignored",
    "autocast": "autocast, float32 weight",
    "softcap": "softcap 30",
    "smoothing-z-loss": "smoothing 0.1, z-loss",
    "per-token": '`reduction="none"`',
}
SHOWN = {
    "onchip auto": "**onchip**, by default",
    "onchip, no bound": "**onchip**, no bound",
    "torch.compile": "torch.compile",
    "liger": "Liger",
}
"""Implementations, and the headings of their columns."""


def cell(row: Mapping[str, Any] | None, best: float) -> str:
    """A cell; the fastest is in bold."""
    if row is None or row["median_ms"] is None:
        return "-" if row is None else "wrong"
    ratio = f"{row['ratio_to_floor']:.2f} x"
    return f"{f'**{ratio}**' if row['median_ms'] == best else ratio}, {format_bytes(row['extra_bytes'])}"


def table(document: Mapping[str, Any]) -> str:
    """A line for each case that was measured, in the suite's order."""
    rows = {}
    for row in document["rows"]:
        if row["mode"] == "forward+backward":
            rows[row["case"], short_name(row["impl"])] = row
    lines = [f"| head, tokens | the products | {' | '.join(SHOWN.values())} | host |", "|---" * (3 + len(SHOWN)) + "|"]
    for case in USERS:
        found = [rows.get((case.name, name)) for name in SHOWN]
        own = found[0]
        if own is None:
            continue
        times = [row["median_ms"] for row in found if row and row["median_ms"]]
        model, _, kind = case.name.partition(f"-t{case.tokens}")
        what = f"{model} T={case.tokens}{', ' if kind else ''}{WHAT.get(kind.removeprefix('-'), '')}"
        host = "-" if own.get("host_ms") is None else f"{own['host_ms']:.1f} ms"
        cells = " | ".join(cell(row, min(times, default=0.0)) for row in found)
        lines.append(f"| {what} | {own['floor_ms']:.3g} ms | {cells} | {host} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
