"""Patched models of transformers on CUDA devices."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_trainer_with_fsdp2():
    ranks = min(2, torch.cuda.device_count())
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    made = subprocess.run(
        [*run, str(Path(__file__).with_name("trainer_fsdp2.py"))], capture_output=True, text=True, timeout=300
    )
    assert made.returncode == 0, made.stdout + made.stderr[-6000:]
    assert made.stdout.count("unpatched") == 4 * ranks
