"""What the demo found: a table on the terminal, a picture, and an HTML page."""

import base64
import io
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from onchip.bench.units import format_bytes, format_ms, format_ratio
from onchip.demo import EXTRAS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Document = Mapping[str, Any]

COLUMNS = ("head + loss, forward + backward", "plain", "onchip", "onchip / plain")
_LOOKS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"color": "#c2772b", "linewidth": 5, "alpha": 0.45},  # broad, so that it shows under the other
    "onchip": {"color": "#0b5fd6", "linewidth": 1.4},
    "bf16": {"color": "#6b7280", "linewidth": 1.4},
    "fp8": {"color": "#15803d", "linewidth": 1.2, "linestyle": "--"},
}
_STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
}


def _measured_rows(document: Document) -> list[tuple[str, ...]]:
    """The texts of `COLUMNS`."""
    costs = [document["head_and_loss"][name] for name in ("plain", "onchip")]
    rows: list[tuple[str, ...]] = []
    for name, key, show in (
        ("peak extra memory", "extra_bytes", format_bytes),
        ("time, median", "median_ms", format_ms),
    ):
        plain, onchip = (cost[key] for cost in costs)
        # Sizes as small as a test's may leave the resident set where it was.
        rows.append((name, show(plain), show(onchip), format_ratio(onchip / plain if plain else None)))
    spreads = (f"{format_ms(cost['p10_ms'])} – {format_ms(cost['p90_ms'])}" for cost in costs)
    return [*rows, ("time, 10th – 90th percentile", *spreads, "")]


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
        f"{difference['compared_steps']} steps, {relation} the bound of {difference['bound']:.0e}."
    )


def _fp8_verdict(fp8: Mapping[str, Any]) -> str:
    """What training in FP8 did to the loss."""
    return (
        f"With the linear layers in FP8 the loss is {fp8['mean_of_last_steps']:+.4f} from that of {fp8['baseline']} in "
        f"the mean of the last {fp8['last_steps']} steps, {fp8['held_out']:+.4f} on held-out text, and at most "
        f"{fp8['largest']:.4f} away on any step."
    )


def print_report(document: Document, console: Console) -> None:
    """Both losses, the measurements, and the sample."""
    for columns, rows in (
        (("training", *document["losses"]), _loss_rows(document)),
        (COLUMNS, _measured_rows(document)),
    ):
        table = Table(*columns)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(Text(_verdict(document), style="green" if document["difference"]["within_bound"] else "bold red"))
    if fp8 := document["fp8"]:
        console.print(_fp8_verdict(fp8), highlight=False)
    sample = document["sample"]
    title = f"text by the model trained with onchip (temperature {sample['temperature']})"
    console.print(Panel(Text(sample["text"]), title=title, title_align="left"))


def picture_png(document: Document) -> bytes:
    """Loss curves, their difference, and bars for memory and time."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 6.2), dpi=130, layout="constrained")
        axes = figure.subplot_mosaic(
            [["losses", "memory"], ["losses", "memory"], ["difference", "time"]],
            width_ratios=[2, 1],
            height_ratios=[1, 0.25, 1],
        )
        axes["difference"].sharex(axes["losses"])
        _draw_losses(axes["losses"], document)
        _draw_difference(axes["difference"], document)
        costs = document["head_and_loss"]
        sizes, times, low, high = (
            [cost[key] for cost in costs.values()] for key in ("extra_bytes", "median_ms", "p10_ms", "p90_ms")
        )
        _draw_bars(axes["memory"], costs, [size / 2**20 for size in sizes], map(format_bytes, sizes))
        axes["memory"].set(title="Peak extra memory of head + loss", ylabel="MiB above inputs and gradients")
        spread = [np.subtract(times, low), np.subtract(high, times)]
        _draw_bars(axes["time"], costs, times, map(format_ms, times), yerr=spread, capsize=4)
        axes["time"].set(title="Time of head + loss", ylabel="ms, forward + backward")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_losses(axes: "Axes", document: Document) -> None:
    settings = document["settings"]
    steps = range(1, settings["steps"] + 1)
    for name, losses in document["losses"].items():
        axes.plot(steps, losses, label=name, **_LOOKS[name])
    title = f"Training loss: {settings['tokens']} tokens a step, vocabulary {settings['model']['vocab']}"
    axes.set(title=title, ylabel="loss (nats per token)")
    axes.legend(frameon=False)


def _draw_difference(axes: "Axes", document: Document) -> None:
    difference = document["difference"]
    steps = range(1, document["settings"]["steps"] + 1)
    # A logarithm has no zero: steps on which the two agree in every bit leave a gap.
    axes.plot(steps, [d or np.nan for d in difference["per_step"]], "o", markersize=3, color="#374151")
    if fp8 := document["fp8"]:
        label = f"|fp8 − {fp8['baseline']}|"
        axes.plot(steps, np.abs(fp8["per_step"]), "x", markersize=3, color=_LOOKS["fp8"]["color"], label=label)
    compared = difference["compared_steps"]
    bound = f"bound for the first {compared} steps"
    axes.plot([1, compared], [difference["bound"]] * 2, color="#be123c", linestyle="--", linewidth=1.2, label=bound)
    title = "Difference of the two losses (gaps: equal in every bit)"
    axes.set(title=title, xlabel="step", ylabel="|plain − onchip|", yscale="log")
    axes.legend(frameon=False, fontsize=9)


def _draw_bars(axes: "Axes", names: Iterable[str], heights: list[float], texts: Iterable[str], **how: Any) -> None:
    bars = axes.bar(list(names), heights, color=[_LOOKS[name]["color"] for name in names], width=0.6, **how)
    axes.bar_label(bars, labels=list(texts), padding=4)
    axes.margins(y=0.18)
    axes.grid(visible=False, axis="x")


def html_page(document: Document, picture: bytes) -> str:
    """One self-contained page: picture, tables, sample, and how to run it again."""
    import jinja2

    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True).from_string(
        files("onchip.demo").joinpath("demo.html.jinja").read_text(encoding="utf-8")
    )
    return template.render(
        document=document,
        picture=base64.b64encode(picture).decode(),
        verdict=_verdict(document),
        fp8_verdict=document["fp8"] and _fp8_verdict(document["fp8"]),
        columns=COLUMNS,
        measured=_measured_rows(document),
        losses=_loss_rows(document),
        logits=format_bytes(document["logits_bytes"]),
        extras=EXTRAS[document["settings"]["framework"]],
    )
