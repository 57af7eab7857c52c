"""Run the Python examples in README.md and docs/ as tests."""

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# They need stacks that tools/try_stacks.py installs, and runs these with.
PAGES = ["**/guides/stacks.md", "**/guides/torchtitan.md"]
collect_ignore = [f"src/onchip/integrations/{name}.py" for name in ("axolotl", "llamafactory", "nemo", "torchtitan")]

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["*.md"], excludes=PAGES).pytest()
