"""A results file as an interactive page."""

import html
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from onchip.bench.figures import styles_of
from onchip.bench.harness import MODES
from onchip.bench.report import errors_of, kind, not_run_line, readable, sweep_point, wrong_numbers
from onchip.bench.units import format_bytes, format_error, format_ms, format_ratio
from onchip.core import files

Row = Mapping[str, Any]
SCRIPT = "plotly.min.js"
_DASH = "–"
# What a row has at least; a file of other rows gets no page.
_NEEDED = {"op", "case", "dtype", "mode", "impl", "median_ms", "extra_bytes", "error_bounds"}
# Of each of the plots' markers plotly's name, and an SVG path in a square of 12 by 12.
SYMBOLS = {
    "o": ("circle", "M6 1.5a4.5 4.5 0 1 0 .01 0z"),
    "s": ("square", "M2 2h8v8H2z"),
    "D": ("diamond", "M6 .5 11.5 6 6 11.5.5 6z"),
    "^": ("triangle-up", "M6 1.5 11 10H1z"),
    "p": ("pentagon", "M6 1 11 4.7 9.1 10.5H2.9L1 4.7z"),
    "v": ("triangle-down", "M6 10.5 11 2H1z"),
    "P": ("cross", "M4.3 1h3.4v3.3H11v3.4H7.7V11H4.3V7.7H1V4.3h3.3z"),
    "X": ("x", "M3.2 1 6 3.8 8.8 1 11 3.2 8.2 6 11 8.8 8.8 11 6 8.2 3.2 11 1 8.8 3.8 6 1 3.2z"),
    "<": ("triangle-left", "M1.5 6 10 1v10z"),
    ">": ("triangle-right", "M10.5 6 2 1v10z"),
    "*": ("star", "M6 .5 7.5 4.3 11.6 4.5 8.4 7.1 9.5 11 6 8.8 2.5 11 3.6 7.1.4 4.5 4.5 4.3z"),
    "d": ("diamond-tall", "M6 .5 9.5 6 6 11.5 2.5 6z"),
    "h": ("hexagon", "M6 1 10.5 3.5v5L6 11 1.5 8.5v-5z"),
}
_SIZES = ("T", "H", "teacher_H", "V", "M", "N", "K")


# -------------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Column:
    """A column of the table of rows: what is shown, and what it is sorted by."""

    title: str
    texts: Sequence[str]
    keys: Sequence[float | str | None]
    """Sort keys; None where there is nothing, which comes last."""
    words: bool = False
    """Whether it is text, aligned to the left."""
    group: str = ""
    """The heading that it shares with other columns."""
    wrong: Sequence[bool] = ()


def _words(title: str, texts: Iterable[str]) -> Column:
    texts = list(texts)
    return Column(title, texts, texts, words=True)


def _numbers(title: str, values: Iterable[Any], form: Callable[[Any], str], group: str = "") -> Column:
    values = list(values)
    return Column(title, [_DASH if x is None else form(x) for x in values], values, group=group)


def _aligned(title: str, values: Iterable[float | None], most: int) -> Column:
    """A column of numbers, all with as many decimals as the smallest needs for three digits, but at most `most`."""
    values = list(values)
    positive = [x for x in values if x]
    digits = min(most, max(0, 2 - math.floor(math.log10(min(positive))))) if positive else 0
    return _numbers(title, values, lambda x: f"{x:,.{digits}f}")


def _columns(rows: Sequence[Row], device: str) -> list[Column]:
    """All columns, without the optional ones that would be empty."""

    def of(name: str) -> list[Any]:
        return [row.get(name) for row in rows]

    sizes = [row.get("sizes") or {} for row in rows]
    named = [name for name in _SIZES if any(name in x for x in sizes)] or ["sizes"]
    memory = [x and x / 2**20 for x in of("extra_bytes")]
    optional = [
        _aligned("mean, ms", of("mean_ms"), 3),
        _aligned("worst, ms", of("worst_ms"), 3),
        _numbers("worst × floor", of("worst_ratio"), format_ratio),
        _aligned("host, ms", of("host_ms"), 3),
        _numbers("kernels", of("kernels"), str),
        _aligned("compile, s", of("compile_s"), 1),
    ]
    return [
        _words("implementation", of("impl")),
        _words("case", of("case")),
        _aligned("median, ms", of("median_ms"), 3),
        _numbers("× floor", of("ratio_to_floor"), format_ratio),
        _aligned("floor, ms", of("floor_ms"), 3),
        _aligned("extra, MiB", memory, 2),
        _words("verdict", map(_verdict, rows)),
        *(_numbers(name.replace("_", " "), (x.get(name) for x in sizes), str) for name in named),
        _words("dtype", of("dtype")),
        _aligned("p10, ms", of("p10_ms"), 3),
        _aligned("p90, ms", of("p90_ms"), 3),
        *_error_columns(rows),
        *(column for column in optional if any(key is not None for key in column.keys)),
        _words("run", (f"{(row.get('date') or _DASH)[:16].replace('T', ' ')}, {device}" for row in rows)),
        _words("settings", (", ".join(f"{k}={v}" for k, v in (row.get("config") or {}).items()) for row in rows)),
    ]


def _error_columns(rows: Sequence[Row]) -> list[Column]:
    """Two columns for each result that was checked: its error and its bound."""
    errors = [errors_of(row) for row in rows]
    columns = []
    for name in dict.fromkeys(name for x in errors for name in x):
        pairs = [x.get(name) for x in errors]
        group = readable(name) or "largest error, not named"
        shown = [_DASH if pair is None else format_error(pair[0]) for pair in pairs]
        keys = [None if pair is None else math.inf if pair[0] is None else pair[0] for pair in pairs]
        # A number that is not finite is past every bound, and JSON has none to sort by.
        sorted_by = [1e308 if key == math.inf else key for key in keys]
        wrong = [_past(pair) for pair in pairs]
        columns.append(Column("error", shown, sorted_by, group=group, wrong=wrong))
        bounds = [None if pair is None else pair[1] for pair in pairs]
        columns.append(_numbers("bound", bounds, format_error, group))
    return columns


def _past(pair: tuple[float | None, float | None] | None) -> bool:
    """Whether this error is past its bound, as far as the file says."""
    if pair is None:
        return False
    error, bound = pair
    return error is None or (bound is not None and error > bound)


def _verdict(row: Row) -> str:
    if row.get("ok") is None:
        return _DASH
    return "right" if row["ok"] else "wrong: " + "; ".join(wrong_numbers(row))


# -------------------------------------------------------------------------------------------------------- the plots


def _plotted(rows: Sequence[Row], columns: Sequence[Column]) -> dict[str, Any]:
    """What the page's script draws and sorts."""
    cases = list(dict.fromkeys((row["case"], kind(row)) for row in rows))
    looks = styles_of(rows)
    impls = list(looks)
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    return {
        "cases": [{"name": name, "kind": of_case} for name, of_case in cases],
        "impls": [
            {"name": name, "color": look["color"], "symbol": SYMBOLS[look["marker"]][0]} for name, look in looks.items()
        ],
        "modes": modes,
        "mode": MODES[-1] if MODES[-1] in modes else modes[0],
        "rows": [
            {
                "case": cases.index((row["case"], kind(row))),
                "impl": impls.index(row["impl"]),
                "mode": row["mode"],
                "ms": row["median_ms"],
                "p10": row.get("p10_ms"),
                "p90": row.get("p90_ms"),
                "floor": row.get("floor_ms"),
                "ratio": row.get("ratio_to_floor"),
                "bytes": row["extra_bytes"],
                "hover": _hover(row),
            }
            for row in rows
        ],
        "sweeps": _sweeps(cases),
        "keys": [column.keys for column in columns],
    }


def _sweeps(cases: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """The sets of cases that differ in one size: the size's name, what they share, and each one's (size, case)."""
    found: dict[tuple[str, str, str], list[tuple[int, int]]] = {}
    for i, (name, of_case) in enumerate(cases):
        if point := sweep_point(name):
            swept, size = point
            what, _, model = swept.partition(", ")
            letter = {"tokens": "T", "vocab": "V"}.get(what, what)
            shared = [x for x in of_case.split(", ") if x != f"{letter}={size}"]
            key = (letter, f"{letter}: {model}" if model else letter, ", ".join(shared))
            found.setdefault(key, []).append((size, i))
    return [
        {"letter": letter, "swept": swept, "shared": shared, "points": sorted(points)}
        for (letter, swept, shared), points in found.items()
        if len(points) > 1
    ]


def _hover(row: Row) -> str:
    """What is shown at a point of a plot."""
    spread = "" if row.get("p10_ms") is None else f" ({format_ms(row['p10_ms'])} – {format_ms(row['p90_ms'])})"
    floor = "" if row.get("floor_ms") is None else f"{format_ratio(row['ratio_to_floor'])} × floor"
    lines = [
        f"<b>{html.escape(row['impl'])}</b>",
        html.escape(f"{row['case']}, {kind(row)}"),
        row["mode"],
        f"{format_ms(row['median_ms'])}{spread}",
        f"{floor} of {format_ms(row.get('floor_ms'))}" if floor else "",
        f"{format_bytes(row['extra_bytes'])} extra",
    ]
    return "<br>".join(line for line in lines if line)


# --------------------------------------------------------------------------------------------------------- the page


def has_bench_rows(document: Any) -> bool:
    """Whether a results file holds rows of `onchip bench`, so that it gets a page."""
    rows = document.get("rows", []) if isinstance(document, dict) else []
    return bool(rows) and all(isinstance(row, dict) and row.keys() >= _NEEDED for row in rows)


def html_page(document: Mapping[str, Any], name: str, script: str | None = None) -> str:
    """The page of a results file.

    Args:
        document: what the file holds.
        name: the file's name; the page links to it in its own folder.
        script: the address of plotly.js; by default the script is part of the page, which is then a file of 5 MB.
    """
    here = Path(__file__).parent
    rows, env = document["rows"], document["environment"]
    columns = _columns(rows, env["device"])
    framework = env.get("framework") or ("jax" if "jax" in env else "torch")
    facts = [env["date"][:10], *(f"{x} {env[x]}" for x in (framework, "onchip") if x in env), f"{len(rows)} rows"]
    data = json.dumps(_plotted(rows, columns) if rows else {}, allow_nan=False, separators=(",", ":"))
    made: str = _template().render(
        css=(here / "page.css").read_text(encoding="utf-8"),
        js=(here / "page.js").read_text(encoding="utf-8"),
        plotly=plotly_js() if script is None else None,
        script=script,
        data=data.replace("<", "\\u003c"),
        name=name,
        title=document.get("title"),
        facts=facts,
        environment=env,
        measured=framework == "torch",
        op=env.get("op") or rows[0]["op"],
        rows=rows,
        columns=columns,
        wrong=[(row, kind(row), wrong_numbers(row)) for row in rows if row.get("ok") is False],
        how=(env.get("how") or "").rstrip("."),
        not_run=[not_run_line(entry) for entry in document.get("not_run", [])],
        looks=[(impl, look["color"], SYMBOLS[look["marker"]][1]) for impl, look in styles_of(rows).items()],
    )
    return made


@cache
def _template() -> Any:
    """The page's, which takes as long to compile as to fill in."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["unbroken"] = _unbroken
    return environment.from_string(Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8"))


def _unbroken(text: str) -> Any:
    """The text as HTML that never breaks a line inside a number such as 1.2e-03."""
    import markupsafe

    return markupsafe.Markup(re.sub(r"[\d.]+e-\d+", r'<span class="number">\g<0></span>', str(markupsafe.escape(text))))


def plotly_js() -> str:
    """The source of plotly.js, from the package plotly."""
    from plotly.offline import get_plotlyjs

    source: str = get_plotlyjs()
    return source


def write_pages(results: Iterable[Path], out: Path) -> list[Path]:
    """Write a page for each results file that has rows of `onchip bench`, a copy of every file, and plotly.js.

    Returns:
        The pages.
    """
    pages = []
    for path in results:
        text = path.read_text(encoding="utf-8")
        files.replace(out / path.name, text)
        document = json.loads(text)
        if has_bench_rows(document):
            pages.append(out / f"{path.stem}.html")
            files.replace(pages[-1], html_page(document, path.name, SCRIPT))
    files.replace(out / SCRIPT, plotly_js())
    return pages
