"""Sphinx configuration; build with `make docs`."""

from onchip import __version__

project = "onchip"
author = "the onchip authors"
copyright = "2026, the onchip authors"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["conftest.py"]
myst_enable_extensions = ["dollarmath", "fieldlist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"onchip {release}"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
