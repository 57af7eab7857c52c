"""Which modules import which."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import onchip.ops
from onchip.bench import harness
from onchip.oracle.checks import Checker
from onchip.plan.asked import PlannedOp
from onchip.registry import OPS

DOCS = Path(__file__).parent.parent / "docs"


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_arrows_go_one_way():
    from importlinter.cli import lint_imports

    assert lint_imports(config_filename="pyproject.toml", no_cache=True) == 0


def test_every_folder_is_an_op_that_is_registered_with_its_entries():
    folders = {path.parent.name for path in Path(*onchip.ops.__path__).glob("*/__init__.py")}
    assert folders == set(OPS)
    for op in OPS.values():
        assert isinstance(op.entry("checks:CHECKER"), Checker)
        assert callable(op.entry("checks:plain_refusals"))
        assert isinstance(op.entry("plan:PLAN"), PlannedOp)
        assert not op.warms_up or op.entry("CALLS")
        assert all((DOCS / kind / f"{op.name}.md").exists() for kind in ("ops", "internals"))
        assert any(
            isinstance(getattr(op.entry("bench"), name, None), harness.BenchedOp) for name in ("TORCH", "JAX", "WORLD")
        )


def test_the_counts_that_the_page_has():
    """Of commands, each with its number behind it."""
    found = re.findall(r"^ *(.*?)  # (\d+)$", (DOCS / "architecture.md").read_text(encoding="utf-8"), re.M)
    assert len(found) == 5
    for command, number in found:
        run = subprocess.run(command, shell=True, cwd=DOCS.parent, capture_output=True, text=True, check=False)
        assert (command, run.stdout.strip()) == (command, number)


def test_no_two_classes_have_one_name():
    """But for what users import: layers of both frameworks, and torchtitan's loss, which has a `Config`."""
    source = Path(*onchip.ops.__path__).parent
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in source.rglob("*.py"))
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    twice = {name for name, times in names.items() if times > 1}
    assert twice == {"Config", "Fp8Linear", "LinearCrossEntropyLoss", "MoE"}


# The checks import the cases and the oracle too.
OF_OPS = [f"onchip.ops.{op}.{entry}" for op in OPS for entry in ("bench", "checks", "plan")]
PLANNERS = ["onchip.vocab.xla.memory", "onchip.frontend.options", "onchip.vocab.memory", "onchip.groups.problem",
            "onchip.collectives.problem"]  # fmt: skip


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (["onchip", *PLANNERS, *(f"onchip.ops.{op}" for op in OPS if OPS[op].loss)], ["torch", "jax", "numpy"]),
        (["onchip.cli", "onchip.plan", *OF_OPS, "onchip.oracle.checks"], ["torch", "jax"]),
        (["onchip.cli"], ["matplotlib", "plotly"]),
        (["onchip.torch"], ["jax", "triton", "matplotlib", "plotly", "typer", "rich"]),
        (["onchip.jax"], ["torch", "triton", "matplotlib", "plotly", "typer", "rich"]),
    ],
    ids=lambda x: x[0],
)
def test_import_loads_no_more_than_needed(modules, unwanted):
    """In one process, one after the other: the first module that loads something is the culprit."""
    # torch itself loads some packages if they are there.
    first = ["torch"] if modules == ["onchip.torch"] else []
    said = run_python(
        f"import importlib, sys\nfor name in {[*first, *modules]}:\n"
        "    importlib.import_module(name)\n    print(name, *sys.modules)"
    )
    loaded = {line.split()[0]: set(line.split()[1:]) for line in said.splitlines()}
    excused = loaded.get("torch", set())
    assert {name: found for name in modules if (found := set(unwanted) & loaded[name] - excused)} == {}
