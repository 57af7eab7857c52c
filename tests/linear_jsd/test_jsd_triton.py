"""The Triton backend against the oracle, without a GPU: jsd_interpreted.py has the checks and says why it is apart."""

import jsd_interpreted
import pytest

from interpreter import run_all


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_all(jsd_interpreted.__file__, list(jsd_interpreted.CHECKS), tmp_path_factory.mktemp("interpreted"))


@pytest.mark.parametrize("name", jsd_interpreted.CHECKS)
def test_interpreted(name, outcomes):
    said, errors = outcomes
    assert name in said, f"its process ended before it: {errors}"
    assert not said[name], said[name]
