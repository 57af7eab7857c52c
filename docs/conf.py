"""Sphinx configuration; build with `make docs`."""

import html
import json
import sys
from inspect import isfunction, unwrap
from pathlib import Path

from sphinx.pycode import ModuleAnalyzer

import onchip.torch
from onchip import __version__
from onchip.bench.page import has_bench_rows, write_pages
from onchip.registry import OPS

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "onchip"
author = "the onchip authors"
copyright = "2026, the onchip authors"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "mathml"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["conftest.py"]
myst_enable_extensions = ["dollarmath", "fieldlist", "substitution"]
myst_heading_anchors = 3
html_math_renderer = "mathml"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["onchip.css"]
html_js_files = ["copy.js"]
html_title = f"onchip {release}"
autodoc_typehints_format = "short"
maximum_signature_line_length = 100
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

RESULTS = sorted((Path(__file__).parent.parent / "results").glob("*.json"))


def kind_of(path):
    """Of "2026-11-26-h100-linear_cross_entropy-users.json" ("linear_cross_entropy", "users"); of what is no op's
    ("", "training-step").
    """
    name = path.stem[11:].partition("-")[2]
    op = next((op for op in sorted(OPS, key=len, reverse=True) if op in name), "")
    return op, name.partition(op)[2].strip("-") if op else name


def line_of_results(path):
    """A row of a table in Markdown, with links from docs/results/."""
    document = json.loads(path.read_text())
    environment = document["environment"]
    title, json_link = html.escape(document["title"], quote=False), f'<a href="{path.name}">JSON</a>'
    if has_bench_rows(document):
        title = f'<a href="{path.stem}.html">{title}</a>'
    device = next(environment[name] for name in ("gpu", "cpu", "device") if environment.get(name))
    return f'| {title} ({json_link}) | <span class="date">{path.name[:10]}</span> | {device} |'


def results_of(op):
    """What there is of an op: the newest file of each kind, those by `onchip bench` first, and what came before."""
    kinds = {}
    for path in reversed(RESULTS):
        if kind_of(path)[0] == op:
            kinds.setdefault(kind_of(path)[1], []).append(path)
    newest = sorted(
        (paths[0] for paths in kinds.values()),
        key=lambda path: (
            has_bench_rows(doc := json.loads(path.read_text())),
            path.name[:10],
            len(doc.get("rows", ())),
        ),
        reverse=True,
    )
    before = [path for paths in kinds.values() for path in paths[1:]]
    head = ["| what | date | device |", "|---|---|---|"]
    said = ["**Current**", "", *head, *map(line_of_results, newest)]
    if before:
        said += ["", "**Before**", "", *head, *map(line_of_results, sorted(before, reverse=True))]
    return "\n".join(said)


myst_substitutions = {f"of_{op or 'others'}": results_of(op) for op in (*OPS, "")}


def write_results(app, exception):
    """The pages of results/, beside those that list them, with a way back."""
    if exception is None and app.builder.format == "html":
        for page in write_pages(RESULTS, Path(app.outdir) / "results"):
            op = kind_of(page)[0]
            back = f'<a href="{op or "others"}.html">all results of {op}</a> · <a href="../index.html">onchip</a>'
            text = page.read_text(encoding="utf-8")
            page.write_text(text.replace("<header>", f"<header>\n<p>{back}</p>", 1), encoding="utf-8")


def without_overloads(app):
    """Of a function with overloads its own signature, with all defaults, is shown."""
    analyze = ModuleAnalyzer.analyze

    def analyzed(self):
        analyze(self)
        self.overloads = {}

    ModuleAnalyzer.analyze = analyzed


def unwrap_functions(app):
    """Names in signatures are looked up where a function was written, not where its decorator was."""
    for name, x in list(vars(onchip.torch).items()):
        if isfunction(x):
            setattr(onchip.torch, name, unwrap(x))


def setup(app):
    app.connect("builder-inited", unwrap_functions)
    app.connect("builder-inited", without_overloads)
    app.connect("build-finished", write_results)
