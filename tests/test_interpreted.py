"""The Triton backends against the oracle, without a GPU: each script has its checks, and says why it is run apart."""

import sys
from pathlib import Path

import pytest

import interpreted_losses
import jax_kernels_interpreted
from interpreter import run_all

FOLDERS = {"linear_jsd": "jsd_interpreted", "fp8_linear": "fp8_interpreted", "grouped_matmul": "grouped_interpreted",
           "collective_matmul": "cm_interpreted", "attention": "attention_interpreted"}  # fmt: skip
for folder in FOLDERS:  # whose scripts share what lies beside them
    sys.path.append(str(Path(__file__).parent / folder))
SCRIPTS = {"losses": interpreted_losses, "jax": jax_kernels_interpreted} | {
    script: __import__(script) for script in FOLDERS.values()
}


@pytest.fixture(scope="module")
def outcomes():
    """What the checks of a script said, the slow ones or the others, run when the first of them is asked for."""
    known = {}

    def of(name, slow):
        if (name, slow) not in known:
            script = SCRIPTS[name]
            names = [x for x in script.CHECKS if (x in getattr(script, "SLOW", ())) == slow]
            known[name, slow] = run_all(script.__file__, names)
        return known[name, slow]

    return of


@pytest.mark.parametrize(
    ("script", "name"),
    [
        pytest.param(s, name, marks=[pytest.mark.slow] if name in getattr(script, "SLOW", ()) else [])
        for s, script in SCRIPTS.items()
        for name in script.CHECKS
    ],
)
def test_interpreted(script, name, outcomes, request):
    said, errors = outcomes(script, bool(request.node.get_closest_marker("slow")))
    assert name in said, f"its process ended before it: {errors}"
    assert not said[name], said[name]
