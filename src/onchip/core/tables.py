"""Tables that fit the terminal: cells wrap between words, and if a word doesn't fit, rows become lines of text."""

import textwrap
from collections.abc import Collection, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

Cell = str | Text


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    title: str = "",
    right: Collection[str] = (),
    gap: int = 2,
) -> None:
    """Print a table and cut no word, however narrow the terminal is.  `right`: columns of numbers, aligned right."""
    if title:
        console.print(f"\n{title}", style="bold", highlight=False, markup=False)
    texts = [[cell.plain if isinstance(cell, Text) else cell for cell in row] for row in rows]
    by_column = list(zip(columns, *texts, strict=True))
    # Numbers stay with their units.
    named = zip(columns, by_column, strict=True)
    words = [cells if name in right else " ".join(cells).split() for name, cells in named]
    least = [max(map(cell_len, cells), default=0) for cells in words]
    widths = [max(map(cell_len, cells)) for cells in by_column]
    room = console.width - gap * (len(columns) - 1)
    if sum(least) <= room:
        while sum(widths) > room:
            # The widest of the columns that can wrap.
            _, widest = max((width, at) for at, width in enumerate(widths) if width > least[at])
            widths[widest] -= 1
        table = Table(box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), show_edge=False, pad_edge=False)
        for name, width in zip(columns, widths, strict=True):
            table.add_column(name, justify="right" if name in right else "left", no_wrap=name in right, width=width)
        for row in rows:
            table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
        console.print(table)
        return
    for cells in [list(columns), *texts]:
        line = " | ".join(filter(None, cells))
        folded = textwrap.fill(line, console.width, subsequent_indent="    ", break_on_hyphens=False)
        console.print(folded, highlight=False, markup=False)
