"""Checks that run under Triton's interpreter, on the CPU, in processes of their own.

Triton reads TRITON_INTERPRET when it is imported.  Checks are in float16: the interpreter computes bfloat16 wrongly.
What nobody wrote is NaN, so a result that depends on it is NaN too.
"""

import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import torch

PROCESSES = 2


def run_all(script, names, folder):
    """What the checks `names` of a script said, "" or a traceback, and what processes that failed said at last."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(script).parent), *filter(None, sys.path)]),
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
            process.wait(timeout=900)
        finally:
            process.kill()
        for line in out.read_text().splitlines():
            outcome = json.loads(line)
            said[outcome["name"]] = outcome["error"]
        errors += err.read_text()[-4000:] if process.returncode else ""
    return said, errors


def registering(checks):
    """A decorator that adds a function to the checks, once for each of its arguments if there are any."""

    def check(*arguments):
        def register(f):
            for x in arguments or ((),):
                parts = x if isinstance(x, tuple) else (x,)
                checks["-".join([f.__name__, *map(str, parts)])] = partial(f, *parts)
            return f

        return register

    return check


def patched_once():
    """The interpreter patches Triton's language at every call of a device function, where once per launch is enough."""
    from triton.runtime import interpreter

    real, done = interpreter._patch_lang, set()

    def patch(fn):
        mine = {x for x in map(id, fn.__globals__.values()) if x in (id(interpreter.tl), id(interpreter.tl.core))}
        if mine and mine <= done:
            return None
        scope, restore = real(fn), interpreter._LangPatchScope.restore
        done.update(mine)
        scope.restore = lambda: (done.clear(), restore(scope))
        return scope

    return mock.patch.object(interpreter, "_patch_lang", patch)


def main(checks, names):
    """Run the named checks, or all, and print a line of JSON for each."""
    warnings.simplefilter("ignore")  # the interpreter's NumPy overflows where kernels do on purpose
    torch.set_num_threads(1)
    # Fills what torch.empty and its kin return with NaN, and with the largest integer.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    for name in names or checks:
        torch.manual_seed(0)
        error, start = "", time.process_time()
        try:
            with patched_once():
                checks[name]()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"name": name, "error": error, "seconds": time.process_time() - start}), flush=True)
