"""Fully sharded and tensor-parallel layers over two processes: sharded.py has what they do."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("sharded.py")


def test_two_processes(tmp_path):
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *filter(None, sys.path)]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in (0, 1)
    ]
    try:
        for process in processes:
            said, _ = process.communicate(timeout=120)
            assert process.returncode == 0, said
            assert {"fully_sharded", "tensor_parallel", "refused"} <= set(said.split()), said
    finally:
        for process in processes:
            process.kill()
