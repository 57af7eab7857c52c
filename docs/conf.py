"""Sphinx configuration; build with `make docs`."""

import html
import json
import sys
from inspect import isfunction, unwrap
from pathlib import Path

import onchip.torch
from onchip import __version__
from onchip.bench.page import has_bench_rows, write_pages

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
html_title = f"onchip {release}"
autodoc_typehints_format = "short"
maximum_signature_line_length = 100
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

RESULTS = sorted((Path(__file__).parent.parent / "results").glob("*.json"))


def table_of_results(with_pages):
    """A table in Markdown of the files in results/ that have pages, or of those that have none."""
    lines = ["| date | device | what | |", "|---|---|---|---|"]
    for path in reversed(RESULTS):
        document = json.loads(path.read_text())
        if has_bench_rows(document) == with_pages:
            environment = document["environment"]
            op = f"`{environment['op']}`: " if "op" in environment else ""
            files = [(f"{path.stem}.html", "page"), (path.name, "JSON")][0 if with_pages else 1 :]
            links = ", ".join(f'<a href="results/{file}">{text}</a>' for file, text in files)
            device = next(environment[name] for name in ("gpu", "cpu", "device") if environment.get(name))
            lines.append(
                f"| {path.name[:10]} | {device} | {op}{html.escape(document['title'], quote=False)} | {links} |"
            )
    return "\n".join(lines)


myst_substitutions = {"pages": table_of_results(True), "others": table_of_results(False)}


def write_results(app, exception):
    """The pages of results/, beside the page that lists them."""
    if exception is None and app.builder.format == "html":
        write_pages(RESULTS, Path(app.outdir) / "results")


def unwrap_functions(app):
    """Names in signatures are looked up where a function was written, not where its decorator was."""
    for name, x in list(vars(onchip.torch).items()):
        if isfunction(x):
            setattr(onchip.torch, name, unwrap(x))


def setup(app):
    app.connect("builder-inited", unwrap_functions)
    app.connect("build-finished", write_results)
