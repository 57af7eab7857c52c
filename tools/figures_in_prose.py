"""Finds the times and sizes in a page's prose and tables, and checks whether files of results have them."""

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# A table of predictions, which tools/parallelism.py makes, is between marks of its own.
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`|\$[^$\n]+\$|^<!-- table -->.*?^<!-- end -->", re.MULTILINE | re.DOTALL)
_FIGURE = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)[ \xa0]?(ms|µs|MiB|GiB|KiB|%|TFLOP/s|TB/s|s)(?![\w/])")
# What a unit's figures are in files.
_SCALES = {
    "ms": (1, 1000), "µs": (1e-3, 1), "MiB": (1 << 20, 1, 2**-10), "GiB": (1 << 30, 1, 1 << 10), "KiB": (1 << 10, 1),
    "TFLOP/s": (1, 1e12), "TB/s": (1, 1e3), "s": (1, 1e3),
}  # fmt: skip


def numbers_in(x: Any) -> list[float]:
    """All numbers in a document, also those in texts."""
    if isinstance(x, bool):
        return []
    if isinstance(x, int | float):
        return [float(x)]
    if isinstance(x, str):
        return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", x)]
    inner = x.values() if isinstance(x, Mapping) else x if isinstance(x, list) else ()
    return [number for part in inner for number in numbers_in(part)]


def from_files(figure: str, unit: str, known: Sequence[float]) -> bool:
    """Whether a number in the files rounds to the figure."""
    number, digits = float(figure.replace(",", "")), len(figure.partition(".")[2])
    half = 0.5 * 10**-digits
    for scale in _SCALES[unit]:
        i = bisect_left(known, (number - half) * scale * (1 - 1e-9))
        if i < len(known) and known[i] <= (number + half) * scale * (1 + 1e-9):
            return True
    return False


def is_a_setting(figure: str, unit: str) -> bool:
    """Whether the figure is a budget or another size that one chooses: a power of two."""
    return unit.endswith("iB") and float(figure.replace(",", "")).hex().startswith("0x1.0000000000000p")


def figures(text: str) -> list[tuple[str, str]]:
    """Numbers and units outside of code, formulas and predictions, except settings."""
    return [found for found in _FIGURE.findall(_CODE.sub(" ", text)) if not is_a_setting(*found)]


_FILE = re.compile(r"(\d{4}-\d\d-\d\d-[\w.-]+?)\.(?:json|html)")


def without_a_file(text: str, results: Path) -> list[tuple[str, str]]:
    """The times and sizes that no file has which the page links to; `ratios_in_prose` checks shares and ratios."""
    names = sorted(set(_FILE.findall(text)))
    there = [path for name in names if (path := results / f"{name}.json").exists()]
    known = sorted({number for path in there for number in numbers_in(json.loads(path.read_text(encoding="utf-8")))})
    return [found for found in figures(text) if found[1] != "%" and not from_files(*found, known)]
