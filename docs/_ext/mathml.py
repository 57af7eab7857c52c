"""Formulas as MathML, which browsers show by themselves: pages need no network and no script."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

# What the converter leaves out: that large brackets stretch, space around a function's name, and which minus is a sign.
_MENDED = (
    (re.compile(r"<mo minsize="), r'<mo stretchy="true" symmetric="true" minsize='),
    (re.compile(r"<mi>(tanh|log|exp)</mi>"), r'<mo lspace="0.17em" rspace="0.17em">\1</mo>'),
    (re.compile(r"(<mo[^>]*>(?:&#x00028;|&#x0003D;|&#x0002C;)</mo>)<mo>&#x02212;"), r'\1<mo form="prefix">&#x02212;'),
)


def mathml(latex: str, display: str = "inline") -> str:
    """The formula as a <math> element."""
    made: str = convert(latex, display=display)
    for wrong, right in _MENDED:
        made = wrong.sub(right, made)
    if "\\" in made:
        raise ValueError(f"latex2mathml doesn't know all of {latex!r}")
    return made


def _show_inline(translator: nodes.NodeVisitor, node: nodes.math) -> None:
    translator.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def _show_block(translator: nodes.NodeVisitor, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (_show_inline, None), (_show_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
