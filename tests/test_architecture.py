"""What imports what."""

import subprocess
import sys

import pytest

OPS = ("cross_entropy", "linear_cross_entropy", "linear_jsd", "linear_log_probs")


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_arrows_go_one_way():
    from importlinter.cli import lint_imports

    assert lint_imports(config_filename="pyproject.toml", no_cache=True) == 0


LAYERS = ("fp8_linear", "grouped_matmul", "collective_matmul")
OF_OPS = [f"onchip.bench.ops.{op}" for op in (*OPS, *LAYERS)]
# These import cases.py and reference.py too.
CHECKS = [f"onchip.ops.{op}.checks" for op in (*OPS, *LAYERS)]
PLANNERS = ["onchip.vocab.xla.memory", "onchip.frontend.options", "onchip.vocab.memory", "onchip.groups.problem",
            "onchip.collectives.problem"]  # fmt: skip


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (["onchip", *PLANNERS, *(f"onchip.ops.{op}.spec" for op in OPS)], ["torch", "jax", "numpy"]),
        (["onchip.cli", "onchip.plan", *OF_OPS, *CHECKS, "onchip.oracle.checks"], ["torch", "jax"]),
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
