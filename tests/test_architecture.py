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


@pytest.mark.parametrize(
    ("imported", "unwanted"),
    [
        ("onchip", ["torch", "jax", "numpy"]),
        ("onchip.torch", ["jax", "triton", "matplotlib", "plotly", "typer"]),
        ("onchip.jax", ["torch", "triton", "matplotlib", "plotly", "typer"]),
        ("onchip.cli", ["torch", "jax", "matplotlib", "plotly"]),
        ("onchip.plan", ["torch", "jax"]),
        *((f"onchip.bench.ops.{op}", ["torch", "jax"]) for op in (*OPS, "fp8_linear")),
        ("onchip.vocab.xla.memory", ["torch", "jax", "numpy"]),
        *((f"onchip.ops.{op}.spec", ["torch", "jax", "numpy"]) for op in OPS),
        ("onchip.frontend.options", ["torch", "jax", "numpy"]),
        ("onchip.vocab.memory", ["torch", "jax", "numpy"]),
        # These import cases.py and reference.py too.
        *((f"onchip.ops.{op}.checks", ["torch", "jax"]) for op in (*OPS, "fp8_linear")),
        ("onchip.oracle.checks", ["torch", "jax"]),
    ],
)
def test_import_loads_no_more_than_needed(imported, unwanted):
    loaded = run_python(f"import sys, {imported}; print(*sys.modules)").split()
    # torch itself loads some packages if they are there: compare with importing it alone.
    excused = set(run_python("import sys, torch; print(*sys.modules)").split()) if imported == "onchip.torch" else set()
    assert [name for name in unwanted if name in loaded and name not in excused] == []
