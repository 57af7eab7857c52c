"""Finds shares (23%) and ratios (1.1 times, 1.26 x) in prose and tables, and how they follow from measurements.

`how` lets one pass by the first of these that gives its digits:
(a) A number that a file to which the section links has as a ratio, by its key (`ratio_to_floor`).  The passage names
    the case, the implementation (onchip's default is "onchip") and a mode other than forward+backward; for a cell its
    row's first cell and its column's head do.
(b) The quotient of two figures of one unit in the same passage (paragraph, list item or row of a table), what it is
    above 1, or what it lacks to 1, as far as their own digits go.
(c) What a comment in the passage says: `<!-- ratio: FILE: ONE / OTHER: FILTER; FILTER -->` is the quotients of those
    times in the file that ONE and OTHER describe, that are otherwise alike, and that all FILTERs describe.  Of several
    it is the least, the largest, the median or the geometric mean.
It isn't proved that (b) relates the right two of a passage's figures, and that the sentence says what (c)'s comment
says.  Bare numbers are found in columns whose heads say that they are ratios ("onchip / XLA", "x its products"), but
not in other columns, nor in brackets.
"""

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from figures_in_prose import _CODE, _FILE

_N = r"(?<![\w.=-])\d+(?:,\d{3})*(?:\.\d+)?"
_LIST = rf"((?:{_N}(?:[ \xa0]?UNIT)?(?:, {_N}(?:[ \xa0]?UNIT)?)*\s(?:and|to|or)\s)?{_N})\s?(UNIT)"
_RATIO = re.compile(_LIST.replace("UNIT", r"(?:%|times\b|x\b|×)") + r"(?!\s+(?:\d|NaN|[A-Z]\b))")
_MEASURE = re.compile(_LIST.replace("UNIT", r"(?:ms|µs|[KMG]iB|[MG]B|TFLOP/s|TB/s|GB/s|s)(?![\w/])"))
_UNITS = {"µs": ("s", 1e-6), "ms": ("s", 1e-3), "MB": ("B", 1e6), "GB": ("B", 1e9), "KiB": ("B", 2.0**10),
          "MiB": ("B", 2.0**20), "GiB": ("B", 2.0**30)}  # fmt: skip
_SETTING = re.compile(r"\d+%\s(?:of\s(?:the\s|all\s)?(?:labels|targets|tokens)\s)?(?:are\s|is\s)?ignored")
_RATIO_HEAD = re.compile(r"^ *x |\w / \w|\bratio\b|\btimes\b|\bover the\b")
_BARE = re.compile(rf" *\**{_N}\** *")
_RATIO_KEY = re.compile(r"ratio|over the products|of.copy|multiples|geometric_mean|relative", re.IGNORECASE)
_RECIPE = re.compile(r"<!-- ratio: (\S+): (.+?) / (.+?)(?:: (.+?))? -->")
_SIZES = (*"TNKHVGMmnk", "tokens", "hidden", "vocab", "ranks")
_WHO = ("case", "model", "head", "layer", "impl", "implementation", "by", "loss")


class Figure(NamedTuple):
    """A number as it is printed, half of its last digit, its unit, and what is said after it."""

    value: float
    half: float
    unit: str
    after: str


def listed(pattern: re.Pattern[str], text: str) -> list[Figure]:
    """The figures in a text, also those that share a unit: "8 to 15%"."""
    return [
        Figure(float(x), 0.5 * 10.0 ** -len(x.partition(".")[2]), found[2], re.split("[,;:.(]", after, maxsplit=1)[0])
        for found in pattern.finditer(text)
        for after in (text[found.end() : found.end() + 30],)
        for x in re.findall(r"\d+(?:\.\d+)?", re.sub(r",(?=\d{3})", "", found[1]))
    ]


def passages(text: str) -> Iterator[tuple[str, str, str, set[str]]]:
    """Each paragraph, list item or cell, the passage that it is in, the words that may name what it is about, and the
    files to which its section links.
    """
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        files = set(_FILE.findall(section))
        heads: list[str] = []
        for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\s*\|)", section):
            if not part.lstrip().startswith("|"):
                heads = []
                yield part, part, part, files
                continue
            cells = part.strip().strip("|").split("|")
            heads = heads or cells
            for head, cell in zip(heads, cells, strict=False):
                if _RATIO_HEAD.search(head) and _BARE.fullmatch(cell):
                    cell = f"{cell.strip().strip('*')} x"
                yield cell, " | ".join(cells), f"{head} {cells[0]} {cell}", files


def leaves(x: Any, about: Mapping[str, str]) -> Iterator[tuple[Mapping[str, str], float]]:
    """Each number of a document with what describes it: the texts beside it, and under "" the keys above it."""
    if isinstance(x, Mapping):
        known = {k: str(v) for k, v in x.items() if isinstance(v, str) or (k in _SIZES and isinstance(v, int))}
        beside = {k: re.sub(r" \d[\d.]*$", "", v) for k, v in known.items() if k not in ("date", "error_name")}
        for k, v in x.items():
            yield from leaves(v, {**about, **beside, "": f"{about.get('', '')}/{k}"})
    elif isinstance(x, list):
        for i, v in enumerate(x):
            yield from leaves(v, about if isinstance(v, Mapping) else {**about, "#": str(i)})
    elif isinstance(x, float | int) and not isinstance(x, bool):
        yield about, float(x)


@cache
def values(path: Path) -> list[tuple[Mapping[str, str], float]]:
    return list(leaves(json.loads(path.read_text(encoding="utf-8")), {}))


@cache
def ratios(path: Path) -> list[tuple[Mapping[str, str], float]]:
    """What a file has as ratios."""
    return [one for one in values(path) if _RATIO_KEY.search(one[0].get("", ""))]


@cache
def quotients(path: Path, one: str, other: str, filters: tuple[str, ...]) -> list[float]:
    """The quotients that a comment names: of median_ms, or else of ms, if no filter is a key ("*/extra_bytes")."""
    usual = "*/median_ms" if any(about[""].endswith("/median_ms") for about, _ in values(path)) else "*ms*"
    keys = ["*"] if one.startswith("*/") else [x for x in filters if x.startswith("*/")] or [usual]
    alike: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for about, x in values(path):
        if not all(any(fnmatchcase(v, f) for v in about.values()) for f in filters if f not in keys):
            continue
        for name in (one, other):
            by = next((k for k, v in about.items() if fnmatchcase(v, name)), None)
            if by is not None and any(fnmatchcase(about[""], key) for key in keys):
                alike[by, frozenset((k, v) for k, v in about.items() if k != by)][name].append(x)
    pairs = [(pair[one], pair[other]) for pair in alike.values()]
    return [x[0] / y[0] for x, y in pairs if len(x) == len(y) == 1]


def squeezed(text: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", text.lower())


def names(words: str, what: str) -> bool:
    """Whether words name a case such as "qwen3-0.6b-t8192", or an implementation."""
    parts = re.split(r"[-_ /,]+", re.sub(r"\b(?:auto|torch)\b(?!\.)", "", what))
    return all(re.sub(r"^t(?=\d+$)", "", squeezed(part)) in words for part in parts)


def fits(words: str, about: Mapping[str, str]) -> bool:
    mode = about.get("mode", "").replace("forward+backward", "")
    return all(names(words, x) for x in (mode, *(about[k] for k in _WHO if k in about)))


def how(figure: Figure, passage: str, words: str, paths: Mapping[str, Path]) -> str:
    """Which of (a), (b) and (c) gives a figure, or nothing."""
    scale = 100 if figure.unit == "%" else 1
    less, more = (re.search(x, figure.after) for x in ("less|fewer|faster|lower", "more|slower|longer|faster"))

    def gives(ratio: float, error: float = 0.0) -> bool:
        of = [1 - ratio] * bool(less) + [ratio - 1] * bool(more) or [ratio, 1 - ratio, ratio - 1]
        of = of if scale == 100 else [ratio]
        return any(abs(scale * x - figure.value) <= figure.half * (1 + 1e-6) + scale * error for x in of)

    words = squeezed(words)
    for about, x in (one for path in paths.values() for one in ratios(path)):
        if abs(scale * x - figure.value) <= figure.half and fits(words, about):
            return "a"
    shown = [(*_UNITS.get(f.unit, (f.unit, 1.0)), f) for f in listed(_MEASURE, _CODE.sub(" ", passage)) if f.value]
    for kind, size, f in shown:
        for other, unit, g in shown:
            ratio = f.value * size / (g.value * unit)
            if f is not g and kind == other and gives(ratio, ratio * (f.half / f.value + g.half / g.value)):
                return "b"
    for stem, one, other, filters in _RECIPE.findall(" ".join(passage.split())):
        found = stem in paths and quotients(paths[stem], one, other, tuple(filter(None, filters.split("; "))))
        some = [f(found) for f in (min, max, statistics.median, statistics.geometric_mean)] if found else []
        if any(map(gives, some)):
            return "c"
    return ""


def without_a_measurement(text: str, results: Path) -> list[str]:
    """The shares and ratios of a page that follow from nothing."""
    return [f"{figure.value:g} {figure.unit}" for figure, way in each_figure(text, results) if not way]


def each_figure(text: str, results: Path) -> Iterator[tuple[Figure, str]]:
    """Every share and ratio of a page, and how it follows."""
    for part, passage, words, stems in passages(text):
        stems = stems | {found[0] for found in _RECIPE.findall(" ".join(passage.split()))}
        paths = {stem: path for stem in sorted(stems) if (path := results / f"{stem}.json").exists()}
        for figure in listed(_RATIO, _SETTING.sub(" ", _CODE.sub(" ", part))):
            yield figure, how(figure, passage, words, paths)
