"""Sphinx configuration; build with `make docs`."""

import sys
from pathlib import Path

from onchip import __version__

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "onchip"
author = "the onchip authors"
copyright = "2026, the onchip authors"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "mathml"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["conftest.py"]
myst_enable_extensions = ["dollarmath", "fieldlist"]
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
