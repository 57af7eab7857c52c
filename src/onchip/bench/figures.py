"""Static pictures, all in one style: for results, the docs and the demo."""

import re
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRAY = "#374151"
Styles = Mapping[str, Mapping[str, Any]]
"""Colour, marker and line width of each implementation."""
# Each family in colours of its own.  The markers are fewer, so that a colour that comes round again has another one.
_OWN = ("#0b5fd6", "#0e9bb0", "#7c3aed", "#16803c", "#1e3a8a", "#38bdf8"), "osD^p"
_PEERS = (
    "#c2772b", "#6b7280", "#be123c", "#111827", "#86198f", "#a3a314", "#e11d8f", "#78350f", "#ea580c", "#f0a202",
    "#9f8170",
), "vPX<>*dh"  # fmt: skip
_STYLE: Any = {
    "svg.hashsalt": "onchip",  # the same bytes from the same numbers
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "xtick.color": GRAY,
    "ytick.color": GRAY,
}


def picture(
    draw: Callable[["Figure"], None], width: float, height: float, kind: str = "svg", *, size: float = 10, **how: Any
) -> bytes:
    """The figure that `draw` fills, `width` by `height` inches, as a file of this kind.

    `size`: the font size in points; `how`: further arguments for matplotlib's Figure.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Text of an SVG stays text: a smaller file that can be searched.
    with mpl.rc_context(_STYLE | {"font.size": size, "svg.fonttype": "none"}):
        figure = Figure(figsize=(width, height), facecolor="white", **how)
        draw(figure)
        file = BytesIO()
        figure.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


def styles_of(rows: Sequence[Mapping[str, Any]]) -> Styles:
    """A style for each implementation, the same in every plot of the same rows.

    The first of each family has a broad line, so that it shows under the others.
    """
    impls = list(dict.fromkeys(r["impl"] for r in rows))
    own = [impl for impl in impls if re.match(r"onchip\b", impl)]
    peers = [impl for impl in impls if impl not in own]
    return {
        impl: {
            "color": colors[i % len(colors)],
            "marker": markers[i % len(markers)],
            "linewidth": 1.5 if i else 4,
        }
        for names, (colors, markers) in ((own, _OWN), (peers, _PEERS))
        for i, impl in enumerate(names)
    }
