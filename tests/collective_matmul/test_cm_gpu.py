"""All cases over NCCL: each GPU of this machine is a rank."""

import subprocess
import sys
from pathlib import Path

import pytest

from all_cards import all_cards, count, environment, torchrun
from onchip.ops.collective_matmul.cases import RANKS


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_every_gpu_is_a_rank(framework):
    ranks = max(n for n in RANKS if n <= count())
    check = ["-m", "onchip", "check", "collective_matmul", "--framework", framework, "--device", "cuda", "--full"]
    if framework == "torch":
        done = torchrun(ranks, *check, seconds=600)
    else:
        with all_cards():
            command = [sys.executable, *check]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("comparisons are within their bounds") == (ranks if framework == "torch" else 1)


@pytest.mark.gpu
@pytest.mark.ranks
@pytest.mark.parametrize("how", ["symmetric", "collective", "linear_cross_entropy"])
def test_a_rank_that_fails_ends_all(how):
    """At once, though the others wait on their GPUs; and what it said is told."""
    if count() < 2:
        pytest.skip("NCCL gives no two ranks one GPU")
    done = torchrun(2, str(Path(__file__).with_name("cm_failing_rank.py")), how)
    assert done.returncode != 0
    assert "this rank fails" in done.stderr
