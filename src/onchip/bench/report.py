"""What a run found, in words and as tables on the terminal."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from onchip.bench.units import format_bytes, format_error, format_ms, format_ratio
from onchip.core.tables import print_table

Row = Mapping[str, Any]
Errors = Mapping[str, tuple[float | None, float | None]]
"""Error and bound by the result's name; None for what a file lacks and for an error that is not finite."""

# The cells of a row by their headings; the error is the one nearest its bound.
COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "implementation": lambda row: row["impl"],
    "median": lambda row: format_ms(row["median_ms"]) if row["ok"] else "WRONG",
    "× floor": lambda row: format_ratio(row["ratio_to_floor"]),
    "memory": lambda row: format_bytes(row["extra_bytes"]),
    "error": lambda row: f"{row['error_name']} {format_error(row['error'])}",
    "bound": lambda row: format_error(row["error_bound"]),
}
LENGTHS: Mapping[str, Callable[[Row], str]] = {
    "implementation": lambda row: row["impl"],
    "mean": lambda row: format_ms(row["mean_ms"]) if row["ok"] else "WRONG",
    "worst": lambda row: format_ms(row["worst_ms"]),
    "device": lambda row: format_ms(row["floor_ms"]),
    "mean × device": lambda row: format_ratio(row["ratio_to_floor"]),
    "worst × device": lambda row: format_ratio(row["worst_ratio"]),
}
"""The same for calls of many lengths."""


def short_name(impl: str) -> str:
    """The name of an implementation without the version at its end."""
    return impl.rpartition(" ")[0]


def sweep_point(case: str) -> tuple[str, int] | None:
    """What is swept and the size, read from a case's name such as 'tokens-512' or 'llama3.1-8b-t1024'."""
    if found := re.fullmatch(r"([a-z]+)-(\d+)", case):
        return found[1], int(found[2])
    found = re.fullmatch(r"(.+)-t(\d+)", case)
    return (f"tokens, {found[1]}", int(found[2])) if found else None


def readable(name: str) -> str:
    """A result's name in words: 'grad_hidden' is "gradient of hidden"."""
    return name.removeprefix("grad_") + "'s gradient" if name.startswith("grad_") else name


def errors_of(row: Mapping[str, Any]) -> Errors:
    """Every error that the row has, and its bound."""
    bounds = row["error_bounds"]
    return {name: (error, bounds.get(name)) for name, error in row["errors"].items()}


def wrong_numbers(row: Mapping[str, Any]) -> list[str]:
    """The numbers of a wrong row that are past their bounds, and by how much."""
    told = []
    for name, (error, bound) in errors_of(row).items():
        what = readable(name) or "largest error"
        if error is None:
            told.append(f"{what}: not finite")
        elif bound is not None and error > bound:
            multiple = format_ratio(error / bound)
            told.append(f"{what}: {format_error(error)} is {multiple} × its bound of {format_error(bound)}")
    return told


def _sections(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Mapping[str, Any]]]]:
    """The rows by case and mode."""
    sections: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        sections.setdefault(row["case"], {}).setdefault(row["mode"], []).append(row)
    return sections


def kind(row: Mapping[str, Any]) -> str:
    """dtype and sizes, such as 'bfloat16, T=4096, H=4096, V=128256'."""
    return ", ".join([row["dtype"], *(f"{name}={size}" for name, size in (row.get("sizes") or {}).items())])


def not_run_line(entry: Mapping[str, Any]) -> str:
    where = " in ".join(x for x in (entry["mode"], entry["case"]) if x)
    return f"{entry['impl']}{f' ({where})' if where else ''}: {entry['reason']}"


def print_rows(found: Sequence[Row], console: Console) -> None:
    """Print a table for each case and mode, and a line for each wrong result.

    Calls of many lengths have one line for all modes.
    """
    for modes in _sections(found).values():
        for mode, rows in modes.items():
            of_lengths = "mean_ms" in rows[0]
            columns = LENGTHS if of_lengths else COLUMNS
            floor = "" if of_lengths else f" (floor: {format_ms(rows[0]['floor_ms'])})"
            title = f"{rows[0]['case']}, {kind(rows[0])}, {mode}{floor}"
            cells = [[Text(cell(row), "" if row["ok"] else "red") for cell in columns.values()] for row in rows]
            print_table(console, list(columns), cells, title=title, right=[*columns][1:])
            for row in rows:
                if not row["ok"] and not (of_lengths and mode != [*modes][-1]):
                    console.print(Text.assemble(("wrong: ", "red"), f"{row['impl']}: ", "; ".join(wrong_numbers(row))))


def print_not_run(document: Mapping[str, Any], console: Console) -> None:
    """What did not run, and why."""
    for entry in document["not_run"]:
        console.print(Text.assemble(("not run: ", "yellow"), not_run_line(entry)))
