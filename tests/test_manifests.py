"""Calls launch what tests/manifests says, and compute the same bits; tools/manifests.py writes it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "manifests.py"
REMEDY = "if it is meant to be so, run tools/manifests.py, and name what changed"


def check(*arguments):
    """In a process of its own: what other tests compiled, planned or traced must not matter."""
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TOOL), "--check", *arguments]
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{REMEDY}\n{done.stdout[-8000:]}{done.stderr[-4000:]}"


@pytest.mark.slow
def test_a_part_of_all():
    check("--quick")


@pytest.mark.slow
def test_all():
    check()
