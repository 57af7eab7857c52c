"""The training script of docs/guides: its losses are the same on one process and, with FSDP2, on two."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "docs" / "guides" / "train.py"


@pytest.mark.slow
def test_two_processes_take_the_same_steps_as_one():
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # Not its exit status: gloo's threads abort now and then where a process ends.
    said = subprocess.run([*torchrun, SCRIPT, "fsdp"], capture_output=True, text=True, env=environment)
    script = runpy.run_path(str(SCRIPT))
    torch.manual_seed(0)
    losses = script["train"](script["Model"]())
    assert losses[-1] < 0.7 * losses[0]
    assert said.stdout.split(), said.stderr
    torch.testing.assert_close([float(x) for x in said.stdout.split()], losses, rtol=0, atol=2e-4)
