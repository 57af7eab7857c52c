"""The JAX ops on several devices, in a process of its own that has them."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("sharded_jax.py")


def test_shard_map():
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    command = [sys.executable, SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5
