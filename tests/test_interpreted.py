"""The Triton backends against the oracle, without a GPU: each script has its checks, and says why it is run apart."""

import sys
from pathlib import Path

import pytest

from interpreter import run_all

FOLDERS = {"cross_entropy": "ce_interpreted", "linear_jsd": "jsd_interpreted", "fp8_linear": "fp8_interpreted"}
for folder in FOLDERS:  # whose scripts share what lies beside them
    sys.path.append(str(Path(__file__).parent / folder))
SCRIPTS = {folder: __import__(script) for folder, script in FOLDERS.items()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What the checks of an op said, run when the first of them is asked for."""
    known = {}

    def of(op):
        if op not in known:
            script = SCRIPTS[op]
            known[op] = run_all(script.__file__, list(script.CHECKS), tmp_path_factory.mktemp(op))
        return known[op]

    return of


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, script in SCRIPTS.items() for name in script.CHECKS])
def test_interpreted(op, name, outcomes):
    said, errors = outcomes(op)
    assert name in said, f"its process ended before it: {errors}"
    assert not said[name], said[name]
