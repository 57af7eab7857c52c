"""What a run found, as a table on the terminal and as an HTML page."""

import base64
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onchip.bench.harness import MODES
from onchip.bench.units import format_bytes, format_error, format_ms, format_ratio

# A page of more cases has no plot for each: they take a second and a hundred kilobytes each.
_MOST_PLOTS = 24
COLUMNS = (
    "implementation", "median", "p10 – p90", "× floor", "extra memory", "host", "kernels", "error", "bound", "right",
)  # fmt: skip


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts of `COLUMNS`."""
    spread = f"{format_ms(row['p10_ms'])} – {format_ms(row['p90_ms'])}" if row["ok"] else "–"
    return (
        row["impl"],
        format_ms(row["median_ms"]),
        spread,
        format_ratio(row["ratio_to_floor"]),
        format_bytes(row["extra_bytes"]),
        format_ms(row.get("host_ms")),
        "–" if row.get("kernels") is None else str(row["kernels"]),
        format_error(row["error"]),
        format_error(row["error_bound"]),
        "yes" if row["ok"] else "WRONG",
    )


def _sections(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Mapping[str, Any]]]]:
    """The rows by case and mode."""
    sections: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        sections.setdefault(row["case"], {}).setdefault(row["mode"], []).append(row)
    return sections


def _told_apart(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows, with dtype and sizes in the names of cases that have several."""
    kinds: dict[str, set[str]] = {}
    for row in rows:
        kinds.setdefault(row["case"], set()).add(_kind(row))
    return [{**row, "case": f"{row['case']} ({_kind(row)})"} if len(kinds[row["case"]]) > 1 else row for row in rows]


def _kind(row: Mapping[str, Any]) -> str:
    return ", ".join([row["dtype"], *(f"{name}={size}" for name, size in (row.get("sizes") or {}).items())])


def _not_run(entry: Mapping[str, Any]) -> str:
    where = " in ".join(x for x in (entry["mode"], entry["case"]) if x)
    return f"{entry['impl']}{f' ({where})' if where else ''}: {entry['reason']}"


def print_rows(found: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A table for each case and mode, with the columns that are filled."""
    sections = _sections(found)
    for rows in (rows for modes in sections.values() for rows in modes.values()):
        case, dtype, mode, floor = (rows[0][name] for name in ("case", "dtype", "mode", "floor_ms"))
        title = f"{case}, {dtype}, {mode} (floor: {format_ms(floor)})"
        table = Table(title=title, title_justify="left", title_style="bold")
        cells = [_cells(row) for row in rows]
        filled = [i for i in range(len(COLUMNS)) if any(texts[i] != "–" for texts in cells)]
        for i in filled:
            table.add_column(COLUMNS[i], justify="left" if COLUMNS[i] in ("implementation", "right") else "right")
        for row, texts in zip(rows, cells, strict=True):
            table.add_row(*(texts[i] for i in filled), style=None if row["ok"] else "red")
        console.print(table)


def print_not_run(document: Mapping[str, Any], console: Console) -> None:
    """What did not run, and why."""
    for entry in document["not_run"]:
        console.print(Text.assemble(("not run: ", "yellow"), _not_run(entry)))


def print_summary(document: Mapping[str, Any], console: Console) -> None:
    """A table of the summary, if there is one."""
    lines = document.get("summary")
    if not lines:
        return
    table = Table(*(name.replace("_", " ") for name in lines[0]), title="summary", title_justify="left")
    for line in lines:
        table.add_row(*map(_summary_cell, line.values()))
    console.print(table)


def _summary_cell(value: Any) -> str:
    return format_ratio(value) if isinstance(value, float) else str(value)


def html_page(document: Mapping[str, Any]) -> str:
    """One self-contained page: environment, plots and all rows."""
    import jinja2

    from onchip.bench.plots import growth_svg, time_memory_svg

    rows = _told_apart(document["rows"])
    sections = _sections(rows)
    plotted = sections if len(sections) <= _MOST_PLOTS else {}
    growth = growth_svg(rows)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"cells": _cells, "config": _config, "ms": format_ms, "summary_cell": _summary_cell}
    template = files("onchip.bench").joinpath("report.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        environment=document["environment"],
        columns=COLUMNS,
        summary=document.get("summary"),
        growth=growth and _data_uri(growth),
        cases=sections,
        plots={case: _data_uri(time_memory_svg(rows, case, MODES)) for case in plotted},
        not_run=[_not_run(entry) for entry in document["not_run"]],
    )


def _config(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in row["config"].items())


def _data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
