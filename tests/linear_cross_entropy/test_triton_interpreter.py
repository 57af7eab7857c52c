"""The Triton backend against the oracle, without a GPU: interpreted.py has the checks, and says why it is run apart."""

from pathlib import Path

import interpreted
import pytest

from interpreter_runs import run_all


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_all(Path(interpreted.__file__), list(interpreted.CHECKS), tmp_path_factory.mktemp("interpreted"))


@pytest.mark.parametrize("name", interpreted.CHECKS)
def test_interpreted(name, outcomes):
    said, errors = outcomes
    assert name in said, f"its process ended before it: {errors}"
    assert not said[name], said[name]
