"""Sphinx configuration; build with `make docs`."""

import gc
import html
import json
import sys
from inspect import Parameter, Signature, isfunction, signature, unwrap
from pathlib import Path
from pkgutil import resolve_name
from textwrap import fill

from sphinx.pycode import ModuleAnalyzer

import onchip.jax
import onchip.torch
from onchip import __version__
from onchip.bench.page import has_bench_rows, write_pages
from onchip.registry import OPS

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
gc.disable()  # to look through all pages for garbage again and again took a fifth of the time

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
    """What there is of an op: the files that "The numbers" shows, in its order, and behind them the others, the newest
    first.
    """
    numbers = (Path(__file__).parent / "numbers.md").read_text(encoding="utf-8")
    files = [path for path in reversed(RESULTS) if kind_of(path)[0] == op]
    shown = {path: found for path in files if (found := numbers.find(f"results/{path.name}")) >= 0}
    head = ["| what | date | device |", "|---|---|---|"]
    said = ["**Current**, as in [the numbers](../numbers.md)", "", *head]
    said += map(line_of_results, sorted(shown, key=shown.__getitem__))
    if before := [path for path in files if path not in shown]:
        said += ["", "**Before, and what was measured on the way**", "", *head, *map(line_of_results, before)]
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


SIGNATURES = {
    "ops/attention": ("torch.attention", "jax.attention"),
    "ops/collective_matmul": (
        "torch.all_gather_matmul",
        "torch.matmul_reduce_scatter",
        "jax.all_gather_matmul",
        "jax.matmul_reduce_scatter",
    ),
    "ops/cross_entropy": ("torch.cross_entropy", "jax.cross_entropy"),
    "ops/fp8_linear": ("torch.fp8_linear", "jax.fp8_linear"),
    "ops/grouped_matmul": ("torch.grouped_matmul",),
    "ops/grouped_matmul_jax": ("jax.grouped_matmul",),
    "ops/linear_cross_entropy": ("torch.linear_cross_entropy",),
    "ops/linear_cross_entropy_jax": ("jax.linear_cross_entropy",),
    "ops/linear_jsd": ("torch.linear_jsd", "torch.jsd", "jax.linear_jsd", "jax.jsd"),
    "ops/linear_log_probs": ("torch.linear_log_probs", "torch.log_probs", "jax.linear_log_probs", "jax.log_probs"),
}
"""Of each op's page its functions: the first framework's are shown, the others linked."""


def signature_lines(path):
    """A function's arguments with their defaults, without types, in 80 columns."""
    made = signature(unwrap(resolve_name(f"onchip.{path}")))
    parameters = [parameter.replace(annotation=Parameter.empty) for parameter in made.parameters.values()]
    text = str(made.replace(parameters=parameters, return_annotation=Signature.empty))
    filled = fill(text[1:-1], 76, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
    return f"{path.rpartition('.')[2]}(\n{filled},\n)"


def with_signatures(app, docname, source):
    """What an op takes follows the first example on its page."""
    if paths := SIGNATURES.get(docname):
        shown = [path for path in paths if path.partition(".")[0] == paths[0].partition(".")[0]]
        links = {path: f'<a href="../api.html#onchip.{path}">onchip.{path}</a>' for path in paths}
        said = f"Signature (explained in {', '.join(links.values())}):"
        code = "\n".join(map(signature_lines, shown))
        before, fence, after = source[0].partition("\n```\n")
        source[0] = f"{before}{fence}\n{said}\n\n```python\n{code}\n```\n{after}"


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
    app.connect("source-read", with_signatures)
    app.connect("builder-inited", unwrap_functions)
    app.connect("builder-inited", without_overloads)
    app.connect("build-finished", write_results)
