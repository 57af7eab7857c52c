"""Static pictures, in one look: those of results, of the docs and of the demo."""

from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRAY = "#374151"
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

    `size`: of its letters, in points; `how`: more that matplotlib's Figure takes.
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
