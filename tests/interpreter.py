"""Checks that run under Triton's interpreter, on the CPU, in processes of their own.

Triton reads TRITON_INTERPRET when it is imported.  Checks are in float16: the interpreter computes bfloat16 wrongly.
What nobody wrote is NaN, so a result that depends on it is NaN too.
"""

import functools
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
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
                checks["-".join([f.__name__, *map(str, parts)])] = functools.partial(f, *parts)
            return f

        return register

    return check


def speed_up():
    """Spare Triton's interpreter what takes most of its time, in this process."""
    from triton.runtime import interpreter

    patch_language, numpy_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    known_dtype, dot, done = functools.cache(numpy_dtype), interpreter.InterpreterBuilder.create_dot, set()

    @functools.cache
    def languages(fn):
        return {x for x in map(id, fn.__globals__.values()) if x in (id(interpreter.tl), id(interpreter.tl.core))}

    def patch_once(fn):
        """At the launch, not at every call of a device function."""
        mine = languages(fn)
        if mine and mine <= done:
            return None
        scope, restore = patch_language(fn), interpreter._LangPatchScope.restore
        done.update(mine)
        scope.restore = lambda: (done.clear(), restore(scope))
        return scope

    def create_dot(self, a, b, d, *how):
        """NumPy multiplies float16 without BLAS, 100 times as slowly."""
        if a.data.dtype == b.data.dtype == np.float16:
            a, b = (interpreter.TensorHandle(x.data.astype(np.float32), interpreter.tl.float32) for x in (a, b))
        return dot(self, a, b, d, *how)

    interpreter._patch_lang, interpreter.InterpreterBuilder.create_dot = patch_once, create_dot
    # It makes a table of them for each one that it looks up.
    interpreter._get_np_dtype = lambda x: (numpy_dtype if x.scalar.is_ptr() else known_dtype)(x.scalar)
    # No index of these small problems overflows, and to look for it takes four further operations for each.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def main(checks, names):
    """Run the named checks, or all, and print a line of JSON for each."""
    warnings.simplefilter("ignore")  # the interpreter's NumPy overflows where kernels do on purpose
    torch.set_num_threads(1)
    speed_up()
    # Fills what torch.empty and its kin return with NaN, and with the largest integer.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    for name in names or checks:
        torch.manual_seed(0)
        error, start = "", time.process_time()
        try:
            checks[name]()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"name": name, "error": error, "seconds": time.process_time() - start}), flush=True)
