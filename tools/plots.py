"""Makes the pictures of docs/images from a file of results: python tools/plots.py RESULTS.json OUTDIR

`growth.svg` shows time and memory over each sweep of sizes, `time-memory.svg` one against the other on the first case
that is no sweep.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onchip.bench.figures import GRAY, Styles, picture, styles_of
from onchip.bench.report import short_name, sweep_point
from onchip.bench.units import format_bytes, format_ms
from onchip.core import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
Point = tuple[int, Mapping[str, Any]]
"""A size that is swept, and a row with that size."""
MODE = "forward+backward"
# Less memory than this is drawn as this: a logarithm has no zero, and the measurement resolves no less.
_LEAST_BYTES = 1 << 18
_DASHES = (0, (4, 3))


def time_memory_svg(rows: Rows, case: str, modes: Sequence[str]) -> str:
    """Time against extra memory of every implementation on `case`: one panel for each mode."""
    styles = styles_of(rows)
    panels = [[r for r in rows if r["case"] == case and r["mode"] == mode and r["ok"]] for mode in modes]

    def draw(figure: "Figure") -> None:
        for i, (mode, points) in enumerate(zip(modes, panels, strict=True)):
            axes = figure.add_axes(((i + 0.135) / len(modes), 0.15, 0.5 / len(modes), 0.74))
            axes.set_title(f"{case}: {mode}", loc="left", fontweight="bold")
            _scatter(axes, points, styles)

    return picture(draw, 7.2 * len(modes), max(3.4, 1.2 + 0.36 * max(map(len, panels))), size=9.5).decode()


def _scatter(axes: "Axes", rows: Rows, styles: Styles) -> None:
    points = sorted(rows, key=lambda r: (r["extra_bytes"], r["median_ms"]))
    if not points:
        axes.set_axis_off()
        axes.text(0, 0.5, "no right result to show", transform=axes.transAxes)
        return
    for r in points:
        look = {**styles[r["impl"]], "linewidth": 0}
        spread = [[r["median_ms"] - r["p10_ms"]], [r["p90_ms"] - r["median_ms"]]]
        name = f"{short_name(r['impl'])}\n{format_ms(r['median_ms'])}, {format_bytes(r['extra_bytes'])}"
        axes.errorbar(
            r["median_ms"], _height(r), xerr=spread, label=name, markersize=7, elinewidth=1.2, zorder=3, **look
        )
    floor = points[0]["floor_ms"]
    if floor:
        axes.axvline(floor, color=GRAY, linestyle=_DASHES, linewidth=1)
    times = [t for r in points for t in (r["p10_ms"], r["p90_ms"])] + [floor or points[0]["median_ms"]]
    _time_axis(axes, "x", times)
    _memory_axis(axes, points)
    axes.set_xlabel("time per step (dashed: its matrix products alone)" if floor else "time per step")
    # The points from the highest down, in a column to the right, which covers none of them.
    handles, labels = axes.get_legend_handles_labels()
    right = {"bbox_to_anchor": (1.03, 0.5), "frameon": False, "fontsize": 8.5, "labelcolor": "linecolor"}
    axes.legend(handles[::-1], labels[::-1], loc="center left", **right)


def growth_svg(rows: Rows) -> str | None:
    """Time (above) and extra memory (below) over each sweep of sizes; None if `rows` has no sweep.

    A sweep is a set of cases whose names differ only in the number at the end, such as 'tokens-512' and 'tokens-1024',
    or in the tokens of a model, such as 'llama3.1-8b-t1024' and 'llama3.1-8b-t4096'.
    """
    sweeps = _sweeps(rows)
    if not sweeps:
        return None
    styles = styles_of(rows)

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(2, len(sweeps), sharex="col", sharey="row", squeeze=False)
        every = [r for points in sweeps.values() for _, r in points]
        for (size, points), (above, below) in zip(sweeps.items(), grid.T, strict=True):
            _growth_panels(above, below, points, styles)
            below.set_xlabel(size)
        times = [r["median_ms"] for r in every] + [r["floor_ms"] or r["median_ms"] for r in every]
        _time_axis(grid[0, 0], "y", times)
        _memory_axis(grid[1, 0], every)
        grid[0, 0].set_ylabel("time per step")
        figure.suptitle(MODE, x=0.01, ha="left", fontweight="bold")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=columns, frameon=False)
        figure.subplots_adjust(
            left=1 / width, right=1 - 0.2 / width, bottom=bottom / height, top=1 - 0.5 / height, hspace=0.1, wspace=0.06
        )

    columns = min(3, len(sweeps) + 1)
    # The legend's lines: one for each implementation, and the floor.
    bottom = 0.75 + 0.22 * -(-(len(styles) + 1) // columns)
    width, height = max(6.2, 4.6 * len(sweeps)), 5.7 + bottom
    return picture(draw, width, height, size=9.5).decode()


def _growth_panels(above: "Axes", below: "Axes", points: Sequence[Point], styles: Styles) -> None:
    for impl, look in styles.items():
        mine = sorted((x, r["median_ms"], _height(r)) for x, r in points if r["impl"] == impl)
        xs, ys, heights = zip(*mine, strict=True) if mine else ((), (), ())
        above.plot(xs, ys, label=short_name(impl), markersize=5, **look)
        below.plot(xs, heights, markersize=5, **look)
    floors = sorted({x: r["floor_ms"] for x, r in points if r["floor_ms"]}.items())
    if floors:
        above.plot(*zip(*floors, strict=True), color=GRAY, linestyle=_DASHES, label="matrix products alone")
    sizes = sorted({x for x, _ in points})
    _log_axis(below, "x", sizes, lambda x: f"{x:.0f}")


def _sweeps(rows: Rows) -> dict[str, list[Point]]:
    """For each swept size its points: right results in forward+backward."""
    sweeps: dict[str, list[Point]] = {}
    for r in rows:
        if (name := sweep_point(r["case"])) and r["mode"] == MODE and r["ok"]:
            sweeps.setdefault(name[0], []).append((name[1], r))
    return {size: points for size, points in sweeps.items() if len({x for x, _ in points}) > 1}


def _height(row: Mapping[str, Any]) -> int:
    return max(int(row["extra_bytes"]), _LEAST_BYTES)


def _format_time(ms: float) -> str:
    return f"{ms:g} ms" if ms < 1e3 else f"{ms / 1e3:g} s"


def _format_height(n: float) -> str:
    if n <= _LEAST_BYTES:
        return f"≤ {_LEAST_BYTES >> 10} KiB"
    units = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
    return next(f"{n / size:g} {unit}" for unit, size in units.items() if n >= size)


def _time_axis(axes: "Axes", which: str, times: Sequence[float]) -> None:
    _log_axis(axes, which, times, _format_time, lambda ms: float(f"{ms:.2g}"))


def _memory_axis(axes: "Axes", rows: Rows) -> None:
    _log_axis(axes, "y", [_height(r) for r in rows], _format_height, lambda size: 2.0 ** round(math.log2(size)))
    axes.set_ylabel("extra memory at the peak")


def _log_axis(
    axes: "Axes",
    which: str,
    values: Sequence[float],
    form: Callable[[float], str],
    rounded: Callable[[float], float] | None = None,
) -> None:
    """Make an axis logarithmic around `values`, with evenly spread round ticks, or with a tick for each value."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = min(values), max(values)
    margin = max(1.5, (high / low) ** 0.08)  # so wide that there are several round numbers in any case
    limits = low / margin, high * margin
    ticks = {rounded(float(x)) for x in np.geomspace(*limits, 7)[1:-1]} if rounded else set(values)
    axes.set(**{f"{which}scale": "log", f"{which}lim": limits})
    axis: Axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(FixedLocator(sorted(ticks)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
    axis.set_minor_locator(NullLocator())


def main() -> None:
    """Write the plots that README and docs show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file that `onchip bench` wrote")
    parser.add_argument("outdir", type=Path, help="folder for the plots")
    arguments = parser.parse_args()
    rows = json.loads(arguments.results.read_text())["rows"]
    plots = {"growth.svg": growth_svg(rows)}
    single = [r["case"] for r in rows if not sweep_point(r["case"])]
    plots["time-memory.svg"] = time_memory_svg(rows, single[0], [MODE]) if single else None
    for name, svg in plots.items():
        if svg is None:
            print(f"{name}: the results hold no case for it")
        else:
            files.replace(arguments.outdir / name, svg)
            print(arguments.outdir / name)


if __name__ == "__main__":
    main()
