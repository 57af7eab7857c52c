"""Runs scripts of checks in a process that has several devices from the start."""

import os
import subprocess
import sys
import traceback

import jax


def adding_to(checks):
    """A decorator that adds a function to the checks, by its name."""

    def add(function):
        return checks.setdefault(function.__name__, function)

    return add


def run_checks(path, which, names, devices=4):
    """Run a script whose last lines call `report_checks`, and see that all of its checks are right."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, path, which]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == list(names)


def report_checks(checks, slow):
    """Print each check that is right, and why another isn't; the command line says which: all, or one by its name."""
    jax.config.update("jax_disable_most_optimizations", True)
    which, wrong = sys.argv[1], 0
    for name, run in {"checks": checks, "slow": slow}.get(which, {which: (checks | slow).get(which)}).items():
        try:
            run()
            print(name)
        except Exception:
            wrong += 1
            print(f"{name}: {traceback.format_exc()}")
    sys.exit(wrong)
