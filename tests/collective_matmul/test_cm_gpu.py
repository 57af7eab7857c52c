"""All cases over NCCL: each GPU of this machine is a rank."""

import os
import subprocess
import sys

import pytest
import torch

from onchip.ops.collective_matmul.cases import RANKS


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_every_gpu_is_a_rank(framework):
    ranks = max(n for n in RANKS if n <= torch.cuda.device_count())
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    check = ["-m", "onchip", "check", "collective_matmul", "--framework", framework, "--device", "cuda", "--full"]
    command = [sys.executable, *(torchrun if framework == "torch" else ()), *check]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("comparisons are within their bounds") == (ranks if framework == "torch" else 1)
