"""What the demo found: a table on the terminal, a picture, and an HTML page."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from onchip.bench.units import format_bytes, format_ms
from onchip.core.tables import print_table
from onchip.demo import EXTRAS
from onchip.demo.stacks import STACKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Document = Mapping[str, Any]
Draw = Callable[["Axes", Document], None]

MOE_COLUMNS = ("a layer of experts", "memory", "time")
COLUMNS = ("vocabulary", "memory, plain", "onchip", "time, plain", "onchip")
_LOOKS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"color": "#c2772b", "linewidth": 5, "alpha": 0.45},  # broad, so that it shows under the other
    "onchip": {"color": "#0b5fd6", "linewidth": 1.4},
    "bf16": {"color": "#6b7280", "linewidth": 1.4},
    "loop": {"color": "#7c3aed", "linewidth": 5, "alpha": 0.3},
    "grouped": {"color": "#5b21b6", "linewidth": 1.2},
    "fp8": {"color": "#15803d", "linewidth": 1.2, "linestyle": "--"},
}
_MEASURED = ("plain", "onchip")
_STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
}


def _measured_rows(document: Document) -> list[tuple[str, ...]]:
    """The texts of `COLUMNS`."""
    return [
        (
            f"{row['vocab']:,}",
            *(format_bytes(row[name]["extra_bytes"]) for name in _MEASURED),
            *(format_ms(row[name]["median_ms"]) for name in _MEASURED),
        )
        for row in document["head_and_loss"]
    ]


def _loss_rows(document: Document) -> list[tuple[str, ...]]:
    losses, held_out = document["losses"], document["held_out_loss"]
    return [
        ("loss at the first step", *(f"{values[0]:.6f}" for values in losses.values())),
        ("loss at the last step", *(f"{values[-1]:.6f}" for values in losses.values())),
        ("held-out loss", *(f"{held_out[name]:.6f}" for name in losses)),
    ]


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
        f"With the linear layers in FP8 the loss is {fp8['mean_of_last_steps']:+.4f} from that of {fp8['baseline']} in "
        f"the mean of the last {fp8['last_steps']} steps, {fp8['held_out']:+.4f} on held-out text, and at most "
        f"{fp8['largest']:.4f} away on any step."
    )


def _moe_rows(document: Document) -> list[tuple[str, ...]]:
    """The texts of `MOE_COLUMNS`, none without --moe."""
    layer = document["moe"]["layer"] if document["moe"] else {}
    return [(name, format_bytes(cost["extra_bytes"]), format_ms(cost["median_ms"])) for name, cost in layer.items()]


def _moe_verdict(moe: Mapping[str, Any]) -> str:
    """Whether the two trainings with experts are the same one."""
    difference = moe["difference"]
    return (
        f"With {moe['experts']} experts in each layer, {moe['top_k']} for each token, the losses of a loop over the "
        f"experts and of grouped_matmul differ by at most {difference['largest_in_compared_steps']:.1e} over the first "
        f"{difference['compared_steps']} steps, and by at most {difference['largest']:.1e} on any."
    )


def print_report(document: Document, console: Console) -> None:
    """Both losses, the measurements, and the sample."""
    for title, columns, rows in (
        ("", ("training", *document["losses"]), _loss_rows(document)),
        ("head and loss, forward and backward", COLUMNS, _measured_rows(document)),
    ):
        print_table(console, columns, rows, title=title, right=columns[1:])
    console.print(Text(_verdict(document), style="green" if document["difference"]["within_bound"] else "bold red"))
    if moe := document["moe"]:
        print_table(console, MOE_COLUMNS, _moe_rows(document), right=MOE_COLUMNS[1:])
        console.print(_moe_verdict(moe), highlight=False)
    if fp8 := document["fp8"]:
        console.print(_fp8_verdict(fp8), highlight=False)
    sample = document["sample"]
    title = f"text by the model trained with onchip (temperature {sample['temperature']})"
    console.print(Panel(Text(sample["text"]), title=title, title_align="left"))


def picture_png(document: Document) -> bytes:
    """All drawings in one picture."""
    return _figure(document, [_DRAWINGS[:2], _DRAWINGS[2:]], (11, 7), "png")


def drawings_svg(document: Document) -> list[bytes]:
    """Each drawing by itself, small enough for the width of a phone."""
    return [_figure(document, [[draw]], (5.2, 3.6), "svg") for draw in _DRAWINGS]


def _figure(document: Document, grid: Sequence[Sequence[Draw]], inches: tuple[float, float], kind: str) -> bytes:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=inches, dpi=130, layout="constrained")
        axes = figure.subplots(len(grid), len(grid[0]), squeeze=False)
        for draws, row in zip(grid, axes, strict=True):
            for draw, one in zip(draws, row, strict=True):
                draw(one, document)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind)
    return buffer.getvalue()


def _draw_losses(axes: "Axes", document: Document) -> None:
    steps = range(1, document["settings"]["steps"] + 1)
    for name, losses in document["losses"].items():
        axes.plot(steps, losses, label=name, **_LOOKS[name])
    axes.set(title="Training loss", xlabel="step", ylabel="nats per token")
    axes.legend(frameon=False)


def _draw_difference(axes: "Axes", document: Document) -> None:
    difference = document["difference"]
    steps = range(1, document["settings"]["steps"] + 1)
    # A logarithm has no zero: steps on which the two agree in every bit leave a gap.
    axes.plot(steps, [d or np.nan for d in difference["per_step"]], "o", markersize=3, color="#374151")
    if moe := document["moe"]:
        values = [d or np.nan for d in moe["difference"]["per_step"]]
        axes.plot(steps, values, "+", markersize=4, color=_LOOKS["grouped"]["color"], label="|loop − grouped|")
        axes.legend(frameon=False, loc="lower right")
    if fp8 := document["fp8"]:
        label = f"|fp8 − {fp8['baseline']}|"
        axes.plot(steps, np.abs(fp8["per_step"]), "x", markersize=3, color=_LOOKS["fp8"]["color"], label=label)
        axes.legend(frameon=False, loc="lower right")
    compared, bound = difference["compared_steps"], difference["bound"]
    axes.plot([1, compared], [bound] * 2, color="#be123c", linestyle="--", linewidth=1.2)
    axes.annotate(
        f"bound for the first {compared} steps",
        (1, bound),
        (0, -5),
        textcoords="offset points",
        va="top",
        color="#be123c",
    )
    title = "Difference of the two losses (gaps: none)"
    axes.set(title=title, xlabel="step", ylabel="|plain − onchip|", yscale="log")
    axes.margins(y=0.15)


def _draw_memory(axes: "Axes", document: Document) -> None:
    _draw_growth(axes, document, "extra_bytes", 1 << 20, format_bytes)
    axes.set(title="Memory of head and loss", ylabel="MiB above inputs, gradients")


def _draw_time(axes: "Axes", document: Document) -> None:
    _draw_growth(axes, document, "median_ms", 1, format_ms)
    axes.set(title="Time of head and loss", ylabel="ms, forward + backward")


def _draw_growth(axes: "Axes", document: Document, key: str, unit: int, show: Callable[[Any], str]) -> None:
    """A line for each loss over the vocabularies; the last point of each is named."""
    rows = document["head_and_loss"]
    vocabs = [row["vocab"] for row in rows]
    for name in _MEASURED:
        values = [row[name][key] for row in rows]
        color = _LOOKS[name]["color"]
        axes.plot(vocabs, [value / unit for value in values], "o-", label=name, color=color, linewidth=2)
        below = values[-1] < max(rows[-1][other][key] for other in _MEASURED)
        axes.annotate(
            show(values[-1]),
            (vocabs[-1], values[-1] / unit),
            (0, -8 if below else 6),
            textcoords="offset points",
            va="top" if below else "bottom",
            ha="center",
            color=color,
        )
    axes.set_xticks(vocabs, [f"{vocab:,}" for vocab in vocabs])
    axes.set_xlabel("vocabulary")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.12, y=0.15)
    axes.legend(frameon=False, loc="upper left")


_DRAWINGS = (_draw_losses, _draw_difference, _draw_memory, _draw_time)


def html_page(document: Document) -> str:
    """One self-contained page: drawings, tables, sample, and how to run it again."""
    import jinja2

    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True).from_string(
        files("onchip.demo").joinpath("demo.html.jinja").read_text(encoding="utf-8")
    )
    return template.render(
        document=document,
        drawings=[base64.b64encode(drawing).decode() for drawing in drawings_svg(document)],
        verdict=_verdict(document),
        fp8_verdict=document["fp8"] and _fp8_verdict(document["fp8"]),
        moe_verdict=document["moe"] and _moe_verdict(document["moe"]),
        moe_columns=MOE_COLUMNS,
        moe_rows=_moe_rows(document),
        columns=COLUMNS,
        measured=_measured_rows(document),
        logits=format_bytes(document["head_and_loss"][-1]["logits_bytes"]),
        losses=_loss_rows(document),
        extras=EXTRAS[document["settings"]["framework"]],
        stacks=STACKS[document["settings"]["framework"]],
    )
