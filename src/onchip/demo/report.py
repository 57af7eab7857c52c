"""Reports what the demo found: tables on the terminal, a picture, and an HTML page."""

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from os.path import relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from onchip.bench.figures import GRAY, picture
from onchip.bench.units import format_bytes, format_ms
from onchip.core.tables import print_table
from onchip.demo import EXTRAS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Document = Mapping[str, Any]
Draw = Callable[["Axes", Document], None]

_LOOKS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"color": "#c2772b", "linewidth": 5, "alpha": 0.45},  # broad, so that it shows under the other
    "onchip": {"color": "#0b5fd6", "linewidth": 1.4},
    "bf16": {"color": "#6b7280", "linewidth": 1.4},
    "fp8": {"color": "#15803d", "linewidth": 1.2, "linestyle": "--"},
}
_MEASURED = ("plain", "onchip")
GUIDES = Path(__file__).parents[3] / "docs" / "guides"
"""Where the guides are in a checkout."""


# ------------------------------------------------------------------------------------------------- tables and words


def _tables(document: Document) -> dict[str, list[Sequence[str]]]:
    """Columns and rows of each table: one of losses, one of the costs of head and loss."""
    losses, held_out = document["losses"], document["held_out_loss"]
    return {
        "losses": [
            ("training", *losses),
            ("loss at the first step", *(f"{values[0]:.6f}" for values in losses.values())),
            ("loss at the last step", *(f"{values[-1]:.6f}" for values in losses.values())),
            ("held-out loss", *(f"{held_out[name]:.6f}" for name in losses)),
        ],
        "costs": [
            ("vocabulary", "memory, plain", "onchip", "time, plain", "onchip"),
            *(
                (
                    f"{row['vocab']:,}",
                    *(format_bytes(row[name]["extra_bytes"]) for name in _MEASURED),
                    *(format_ms(row[name]["median_ms"]) for name in _MEASURED),
                )
                for row in document["head_and_loss"]
            ),
        ],
    }


def _verdict(document: Document) -> str:
    difference = document["difference"]
    relation = "below" if difference["within_bound"] else "NOT below"
    return (
        f"The losses differ by at most {difference['largest_in_compared_steps']:.1e} over the first "
        f"{difference['compared_steps']} steps, {relation} the bound of {difference['bound']}."
    )


def _fp8_verdict(fp8: Mapping[str, Any]) -> str:
    """What training in FP8 did to the loss."""
    return (
        f"With the linear layers in FP8, the loss differs from that of {fp8['baseline']} by "
        f"{fp8['mean_of_last_steps']:+.4f} in the mean of the last {fp8['last_steps']} steps, by "
        f"{fp8['held_out']:+.4f} on held-out text, and by at most {fp8['largest']:.4f} in any step."
    )


def print_report(document: Document, console: Console) -> None:
    """Both losses, the measurements, and the sample."""
    tables = _tables(document)

    def show(name: str, title: str = "") -> None:
        columns, *rows = tables[name]
        print_table(console, columns, rows, title=title, right=columns[1:])

    show("losses")
    show("costs", "head and loss, forward and backward")
    console.print(Text(_verdict(document), style="green" if document["difference"]["within_bound"] else "bold red"))
    if fp8 := document["fp8"]:
        console.print(_fp8_verdict(fp8), highlight=False)
    sample = document["sample"]
    title = f"text by the model trained with onchip (temperature {sample['temperature']})"
    console.print(Panel(Text(sample["text"]), title=title, title_align="left"))


# --------------------------------------------------------------------------------------------------------- drawings


def _draw_losses(axes: "Axes", document: Document) -> None:
    steps = range(1, document["settings"]["steps"] + 1)
    for name, losses in document["losses"].items():
        axes.plot(steps, losses, label=name, **_LOOKS[name])
    axes.set(title="Training loss", xlabel="step", ylabel="nats per token")
    axes.legend(frameon=False)


def _draw_difference(axes: "Axes", document: Document) -> None:
    difference, fp8 = document["difference"], document["fp8"]
    drawn: list[tuple[Sequence[float], str, str, str | None]] = [(difference["per_step"], "o", GRAY, None)]
    drawn += [(fp8["per_step"], "x", _LOOKS["fp8"]["color"], f"|fp8 − {fp8['baseline']}|")] if fp8 else []
    for values, marker, color, label in drawn:
        # A logarithm has no zero: steps on which the two agree in every bit leave a gap.
        heights = [abs(x) or np.nan for x in values]
        axes.plot(range(1, len(values) + 1), heights, marker, markersize=3, color=color, label=label)
    if len(drawn) > 1:
        axes.legend(frameon=False, loc="lower right")
    compared, bound = difference["compared_steps"], difference["bound"]
    axes.plot([1, compared], [bound] * 2, color="#be123c", linestyle="--", linewidth=1.2)
    _name(axes, f"bound for the first {compared} steps", (1, bound), "#be123c", below=True, ha="left")
    title = "Difference of the losses (no dot where equal)"
    axes.set(title=title, xlabel="step", ylabel="|plain − onchip|", yscale="log")
    axes.margins(y=0.15)


def _name(axes: "Axes", text: str, at: tuple[float, float], color: str, *, below: bool, ha: Any = "center") -> None:
    """Write a text below or above a point."""
    offset, va = (-7, "top") if below else (6, "bottom")
    axes.annotate(text, at, (0, offset), textcoords="offset points", va=va, ha=ha, color=color)


def _draw_growth(
    axes: "Axes", document: Document, *, key: str, unit: int, show: Callable[[Any], str], **words: Any
) -> None:
    """Draw a line for each loss over the size of the vocabulary; the last point of each shows its value."""
    rows = document["head_and_loss"]
    vocabs = [row["vocab"] for row in rows]
    most = max(rows[-1][name][key] for name in _MEASURED)
    for name in _MEASURED:
        values, color = [row[name][key] / unit for row in rows], _LOOKS[name]["color"]
        axes.plot(vocabs, values, "o-", label=name, color=color, linewidth=2)
        last = rows[-1][name][key]
        _name(axes, show(last), (vocabs[-1], values[-1]), color, below=last < most)
    axes.set_xticks(vocabs, [f"{vocab:,}" for vocab in vocabs])
    axes.set(xlabel="vocabulary", **words)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.12, y=0.15)
    axes.legend(frameon=False, loc="upper left")


_MEMORY: Any = {"title": "Memory of head and loss", "ylabel": "MiB above inputs, gradients"}
_TIME: Any = {"title": "Time of head and loss", "ylabel": "ms, forward + backward"}
_DRAWINGS: tuple[Draw, ...] = (
    _draw_losses,
    _draw_difference,
    partial(_draw_growth, key="extra_bytes", unit=1 << 20, show=format_bytes, **_MEMORY),
    partial(_draw_growth, key="median_ms", unit=1, show=format_ms, **_TIME),
)


def picture_png(document: Document) -> bytes:
    """All drawings in one picture, as PNG."""

    def draw(figure: "Figure") -> None:
        for one, axes in zip(_DRAWINGS, figure.subplots(2, 2).flat, strict=True):
            one(axes, document)

    return picture(draw, 11, 7, "png", size=11, dpi=130, layout="constrained")


def _drawing(draw: Draw, document: Document) -> str:
    """A drawing by itself, as narrow as a phone, as a data URL."""
    svg = picture(lambda figure: draw(figure.subplots(), document), 5.2, 3.6, size=11, layout="constrained")
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def html_page(document: Document, folder: Path | None = None) -> str:
    """One self-contained page: drawings, tables, sample, and how to run it again.

    In a checkout, which has the guides, it links to them from the `folder` that it will be in.
    """
    import jinja2

    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True).from_string(
        files("onchip.demo").joinpath("demo.html.jinja").read_text(encoding="utf-8")
    )
    return template.render(
        document=document,
        drawings=[_drawing(draw, document) for draw in _DRAWINGS],
        tables=_tables(document),
        verdict=_verdict(document),
        fp8_verdict=document["fp8"] and _fp8_verdict(document["fp8"]),
        logits=format_bytes(document["head_and_loss"][-1]["logits_bytes"]),
        guides=relpath(GUIDES, folder) if folder and GUIDES.is_dir() else None,
        extras=EXTRAS[document["settings"]["framework"]],
    )
