"""The Triton kernels without a GPU: fp8_interpreted.py has the checks, and says why it is run apart."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fp8_interpreted
import pytest

SCRIPT = Path(fp8_interpreted.__file__)


@pytest.fixture(scope="module")
def outcomes():
    """What each check said: the empty string, or its traceback."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *filter(None, sys.path)]),
    }
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment, timeout=300)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    return {outcome["name"]: outcome["error"] for outcome in said}, done.stderr[-4000:]


@pytest.mark.parametrize("name", fp8_interpreted.CHECKS)
def test_interpreted(name, outcomes):
    said, errors = outcomes
    assert name in said, f"the process ended before it: {errors}"
    assert not said[name], said[name]
