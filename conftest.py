"""Run the Python examples in README.md and docs/ as tests, and compare what commands there print."""

import gc
import os
import re
import shlex

import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

# They need stacks that tools/try_stacks.py installs, and runs these with.
PAGES = ["**/guides/stacks.md", "**/guides/torchtitan.md"]
collect_ignore = [f"src/onchip/integrations/{name}.py" for name in ("axolotl", "llamafactory", "nemo", "torchtitan")]


def pytest_configure(config):
    """Before JAX is imported: arrays of different ranks raise where they meet, as in JAX's own tests.

    Most of the time of its tests on a CPU was compilation, which takes a third of it with the flags.
    """
    if not re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
        os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
        flags = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"


def pytest_collection():
    """What modules define stays: to look through it for garbage again and again took a fifth of the time."""
    gc.disable()


def pytest_collection_finish():
    gc.enable()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # by Python's own threshold it looked thousands of times in a file


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Nor need it look again through what the tests of other files left."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def run_commands(example: Example) -> str | None:
    """A console block that shows what commands print: of `onchip`, it must be that, 80 columns wide.

    Blocks that show commands alone aren't run.
    """
    from typer.testing import CliRunner

    from onchip.cli import app

    shown = [command.partition("\n") for command in f"\n{example.parsed}".split("\n$ ")[1:]]
    for command, _, output in shown:
        program, *arguments = shlex.split(command, comments=True)
        if output.strip() and program == "onchip":
            printed = CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments).output
            lines = [line.rstrip() for line in printed.strip().splitlines()]
            if lines != output.strip().splitlines():
                return f"$ {command}\n{chr(10).join(lines)}"
    return None


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), CodeBlockParser("console", run_commands), SkipParser()],
    patterns=["*.md"],
    excludes=PAGES,
).pytest()
