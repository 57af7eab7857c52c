"""The Triton backend against the oracle, without a GPU: jsd_interpreted.py has the checks and says why it is apart."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsd_interpreted
import pytest

PROCESSES = 2
SCRIPT = Path(jsd_interpreted.__file__)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each check said: the empty string, or its traceback."""
    folder = tmp_path_factory.mktemp("interpreted")
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *filter(None, sys.path)]),
    }
    names = list(jsd_interpreted.CHECKS)
    running = []
    for i in range(PROCESSES):
        files = [folder / f"{i}.{kind}" for kind in ("out", "err")]
        with files[0].open("w") as out, files[1].open("w") as err:
            command = [sys.executable, str(SCRIPT), *names[i::PROCESSES]]
            running.append((subprocess.Popen(command, stdout=out, stderr=err, env=environment), *files))
    said, errors = {}, ""
    for process, out, err in running:
        try:
            process.wait(timeout=300)
        finally:
            process.kill()
        for line in out.read_text().splitlines():
            outcome = json.loads(line)
            said[outcome["name"]] = outcome["error"]
        errors += err.read_text()[-4000:] if process.returncode else ""
    return said, errors


@pytest.mark.parametrize("name", jsd_interpreted.CHECKS)
def test_interpreted(name, outcomes):
    said, errors = outcomes
    assert name in said, f"its process ended before it: {errors}"
    assert not said[name], said[name]
