"""The Triton backend against the oracle, without a GPU: ce_interpreted.py has the checks, and says how it is run."""

from pathlib import Path

import ce_interpreted
import pytest

from interpreter_runs import run_all


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_all(Path(ce_interpreted.__file__), list(ce_interpreted.CHECKS), tmp_path_factory.mktemp("interpreted"))


@pytest.mark.parametrize("name", ce_interpreted.CHECKS)
def test_interpreted(name, outcomes):
    said, errors = outcomes
    assert name in said, f"its process ended before it: {errors}"
    assert not said[name], said[name]
