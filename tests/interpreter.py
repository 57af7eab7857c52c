"""Runs checks under Triton's interpreter, on the CPU, in processes of their own.

Triton reads TRITON_INTERPRET when it is imported.  Checks are in float16: the interpreter computes bfloat16 wrongly.
Memory that nobody has written is NaN, so a result that depends on it is NaN too.
"""

import functools
import json
import math
import os
import time
import traceback
import warnings
from importlib import import_module

import numpy as np
import torch

from processes import run_script


def run_all(script, names):
    """What the checks `names` of a script said, "" or a traceback, and what its process said at last if it failed."""
    code, said, errors = run_script(script, names, os.environ | {"TRITON_INTERPRET": "1"}, 900)
    outcomes = map(json.loads, said.splitlines())
    return {x["name"]: x["error"] for x in outcomes}, errors[-4000:] if code else ""


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

    # It makes and describes a shape and its tuples anew for each number.
    @functools.cache
    def shape_of(*sizes):
        """A shape as a type has it, the same as a tensor has it, and how many elements it has."""
        return core.tuple(sizes), core.tuple(map(core.constexpr, sizes)), core.constexpr(math.prod(sizes))

    def start_type(self, element_ty, shape):
        self.element_ty, self.sizes = element_ty, shape_of(*map(core._unwrap_if_constexpr, shape))
        self.shape, self.numel = self.sizes[0], self.sizes[2].value

    def start_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, self.shape, self.numel = type.sizes if type.__class__ is core.block_type else of_one

    core = interpreter.tl.core
    of_one = shape_of()
    core.block_type.__init__, core.tensor.__init__ = start_type, start_tensor
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    interpreter._patch_lang, interpreter.InterpreterBuilder.create_dot = patch_once, create_dot
    # It makes a table of them for each one that it looks up.
    interpreter._get_np_dtype = lambda x: (numpy_dtype if x.scalar.is_ptr() else known_dtype)(x.scalar)
    # No index of these small problems overflows, and to look for it takes four further operations for each.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    import_module("interpreter_operators").put()


def main(checks, names):
    """Run the named checks, or all, and print a line of JSON for each."""
    warnings.simplefilter("ignore")  # the interpreter's NumPy overflows where kernels do on purpose
    torch.set_num_threads(1)
    speed_up()
    # Fills what torch.empty and its kin return with NaN, and with the largest integer.
    torch.set_deterministic_debug_mode("warn")  # unlike use_deterministic_algorithms, imports no compiler for a second
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
