"""What the demo found: a table on the terminal, a picture, and an HTML page."""

import base64
import io
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from onchip.bench.units import format_bytes, format_ms
from onchip.demo import EXTRAS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Document = Mapping[str, Any]

COLUMNS = ("head + loss, forward + backward", "plain", "onchip", "onchip / plain")
_COLORS = {"plain": "#c2772b", "onchip": "#0b5fd6", "bf16": "#6b7280", "fp8": "#15803d"}
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
    plain, onchip = (document["head_and_loss"][name] for name in ("plain", "onchip"))
    return [
        ("peak extra memory", *_pair(format_bytes, plain["extra_bytes"], onchip["extra_bytes"])),
        ("time, median", *_pair(format_ms, plain["median_ms"], onchip["median_ms"])),
        (
            "time, 10th – 90th percentile",
            *(f"{format_ms(cost['p10_ms'])} – {format_ms(cost['p90_ms'])}" for cost in (plain, onchip)),
            "",
        ),
    ]


def _pair(show: Any, plain: float, onchip: float) -> tuple[str, str, str]:
    return show(plain), show(onchip), f"{onchip / plain:.2f}" if plain else "–"


def _loss_rows(document: Document) -> list[tuple[str, ...]]:
    losses, held_out, difference = document["losses"], document["held_out_loss"], document["difference"]
    return [
        ("loss at the first step", *(f"{values[0]:.6f}" for values in losses.values())),
        ("loss at the last step", *(f"{values[-1]:.6f}" for values in losses.values())),
        ("held-out loss", *(f"{held_out[name]:.6f}" for name in losses)),
        (
            f"largest difference of plain and onchip in the first {difference['compared_steps']} steps",
            "",
            f"{difference['largest_in_compared_steps']:.1e}",
            *[""] * (len(losses) - 2),
        ),
    ]


def _verdict(document: Document) -> str:
    difference = document["difference"]
    relation = "below" if difference["within_bound"] else "NOT below"
    return (
        f"The losses differ by at most {difference['largest_in_compared_steps']:.1e} over the first "
        f"{difference['compared_steps']} steps, {relation} the bound of {difference['bound']:.0e}."
    )


def _fp8_verdict(document: Document) -> str | None:
    """What training in FP8 did to the loss; None if it wasn't asked for."""
    fp8 = document["fp8"]
    if fp8 is None:
        return None
    name = fp8["baseline"]
    return (
        f"With the linear layers in FP8 the loss is {fp8['mean_of_last_steps']:+.4f} from that of {name} in the mean "
        f"of the last {fp8['last_steps']} steps, {fp8['held_out']:+.4f} on held-out text, and at most "
        f"{fp8['largest']:.4f} away on any step."
    )


def print_report(document: Document, console: Console) -> None:
    """Both losses, the measurements, and the sample."""
    losses = Table("training", *document["losses"], title_justify="left")
    for row in _loss_rows(document):
        losses.add_row(*row)
    measured = Table(*COLUMNS)
    for row in _measured_rows(document):
        measured.add_row(*row)
    for table in (losses, measured):
        for column in table.columns[1:]:
            column.justify = "right"
        console.print(table)
    console.print(Text(_verdict(document), style="green" if document["difference"]["within_bound"] else "bold red"))
    if (verdict := _fp8_verdict(document)) is not None:
        console.print(verdict, highlight=False)
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
        _draw_bars(
            axes["memory"],
            {name: cost["extra_bytes"] / 2**20 for name, cost in costs.items()},
            [format_bytes(cost["extra_bytes"]) for cost in costs.values()],
            title="Peak extra memory of head + loss",
            label="MiB above inputs and gradients",
        )
        _draw_bars(
            axes["time"],
            {name: cost["median_ms"] for name, cost in costs.items()},
            [format_ms(cost["median_ms"]) for cost in costs.values()],
            title="Time of head + loss",
            label="ms, forward + backward",
            spread=[
                [cost["median_ms"] - cost["p10_ms"] for cost in costs.values()],
                [cost["p90_ms"] - cost["median_ms"] for cost in costs.values()],
            ],
        )
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_losses(axes: "Axes", document: Document) -> None:
    settings = document["settings"]
    steps = range(1, settings["steps"] + 1)
    looks: Mapping[str, Mapping[str, Any]] = {
        "plain": {"linewidth": 5, "alpha": 0.45},  # broad, so that it shows under the other
        "onchip": {"linewidth": 1.4},
        "bf16": {"linewidth": 1.4},
        "fp8": {"linewidth": 1.2, "linestyle": "--"},
    }
    for name, losses in document["losses"].items():
        axes.plot(steps, losses, color=_COLORS[name], label=name, **looks[name])
    axes.set_title(f"Training loss: {settings['tokens']} tokens a step, vocabulary {settings['model']['vocab']}")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(frameon=False)


def _draw_difference(axes: "Axes", document: Document) -> None:
    difference = document["difference"]
    # A logarithm has no zero: steps on which the two agree in every bit leave a gap.
    shown = [(i, d) for i, d in enumerate(difference["per_step"], start=1) if d > 0]
    axes.set_yscale("log")
    if shown:
        axes.plot(*zip(*shown, strict=True), "o", markersize=3, color="#374151")
    if (fp8 := document["fp8"]) is not None:
        away = [abs(d) for d in fp8["per_step"]]
        label = f"|fp8 − {fp8['baseline']}|"
        axes.plot(range(1, len(away) + 1), away, "x", markersize=3, color=_COLORS["fp8"], label=label)
    compared = difference["compared_steps"]
    bound = f"bound for the first {compared} steps"
    axes.plot([1, compared], [difference["bound"]] * 2, color="#be123c", linestyle="--", linewidth=1.2, label=bound)
    axes.set_title("Difference of the two losses (gaps: equal in every bit)")
    axes.set_ylabel("|plain − onchip|")
    axes.set_xlabel("step")
    axes.legend(frameon=False, fontsize=9)


def _draw_bars(
    axes: "Axes",
    values: Mapping[str, float],
    texts: Sequence[str],
    *,
    title: str,
    label: str,
    spread: list[list[float]] | None = None,
) -> None:
    bars = axes.bar(
        list(values), list(values.values()), color=[_COLORS[name] for name in values], width=0.6, yerr=spread, capsize=4
    )
    axes.bar_label(bars, labels=texts, padding=4)
    axes.margins(y=0.18)
    axes.grid(visible=False, axis="x")
    axes.set_title(title)
    axes.set_ylabel(label)


def html_page(document: Document, picture: bytes) -> str:
    """One self-contained page: picture, tables, sample, and how to run it again."""
    import jinja2

    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True).from_string(
        files("onchip.demo").joinpath("demo.html.jinja").read_text(encoding="utf-8")
    )
    settings = document["settings"]
    command = "onchip demo " + " ".join(
        f"--{name} {value}"
        for name, value in {
            "framework": settings["framework"],
            "steps": settings["steps"],
            "vocab": settings["model"]["vocab"],
            "tokens": settings["tokens"],
            "device": settings["device"],
            "seed": settings["seed"],
        }.items()
    )
    if document["fp8"] is not None:
        command += " --fp8"
    return template.render(
        document=document,
        picture=base64.b64encode(picture).decode(),
        verdict=_verdict(document),
        fp8_verdict=_fp8_verdict(document),
        columns=COLUMNS,
        measured=_measured_rows(document),
        losses=_loss_rows(document),
        logits=format_bytes(document["logits_bytes"]),
        command=command,
        extras=EXTRAS[settings["framework"]],
    )
