"""The Triton backend against the oracle, without a GPU: interpreted.py has the checks, and is run apart."""

import interpreted
import pytest

from interpreter import run_all


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_all(interpreted.__file__, list(interpreted.CHECKS), tmp_path_factory.mktemp("interpreted"))


@pytest.mark.parametrize("name", interpreted.CHECKS)
def test_interpreted(name, outcomes):
    said, errors = outcomes
    assert name in said, f"its process ended before it: {errors}"
    assert not said[name], said[name]
