"""Run checks under Triton's interpreter, in processes of its own: Triton reads TRITON_INTERPRET when it is imported."""

import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

PROCESSES = 2


def run_all(script: Path, names: Sequence[str], folder: Path) -> tuple[dict[str, str], str]:
    """What each check of `script` said, the empty string or its traceback; and what processes that failed said."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(script.parent), *filter(None, sys.path)]),
    }
    running = []
    for i in range(PROCESSES):
        files = [folder / f"{i}.{kind}" for kind in ("out", "err")]
        with files[0].open("w") as out, files[1].open("w") as err:
            command = [sys.executable, str(script), *names[i::PROCESSES]]
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


def main(checks: Mapping[str, Callable[[], object]]) -> None:
    """Of such a script: run the checks named on the command line, or all, and print a line of JSON for each."""
    warnings.simplefilter("ignore")  # the interpreter's NumPy overflows where kernels do on purpose
    torch.set_num_threads(1)
    # Fills what torch.empty and its kin return with NaN, and with the largest integer.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    for name in sys.argv[1:] or checks:
        torch.manual_seed(0)
        error, start = "", time.perf_counter()
        try:
            checks[name]()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"name": name, "error": error, "seconds": time.perf_counter() - start}), flush=True)
