"""The process that compiles kernels for another process and leaves them in Triton's cache.

Triton makes its intermediate language in Python, so threads take turns at it.  This process loads no PyTorch, needs no
GPU, starts in a fraction of a second, and forks for each kernel.  It takes Triton's own key as an argument, and reads
from standard input what `dumps` makes from a list of jobs.
"""

import io
import os
import pickle
import sys
from collections import namedtuple
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

from onchip.kernels.triton.recalled import Nameless, Seen, hash_source


class Job(NamedTuple):
    """One kernel: the arguments of Triton's `compile`."""

    source: Any
    target: Any
    options: dict[str, Any]
    environment: dict[str, str] | None
    """None for the environment of the process that compiles."""


class _Pickler(pickle.Pickler):
    """Pickles kernels by name, and named tuples by their fields: their classes may be in modules that import
    PyTorch.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.seen: Seen = {}

    def reducer_override(self, obj: Any) -> Any:
        from triton.runtime.jit import JITCallable  # type: ignore[import-untyped]

        if isinstance(obj, JITCallable):
            try:
                source = hash_source(obj, self.seen)
            except Nameless as error:
                raise pickle.PicklingError(f"{obj} names what has no lasting name") from error
            return _named, (obj.fn.__module__, obj.fn.__qualname__, obj.cache_key, source)
        if isinstance(obj, tuple) and hasattr(obj, "_fields"):
            return _tuple_of, (type(obj).__name__, obj._fields, tuple(obj))
        return NotImplemented


def _named(module: str, name: str, key: str, source: str) -> Any:
    found = getattr(import_module(module), name)
    if hash_source(found, {}) != source:
        raise LookupError(f"{module}.{name} is another one here than in the process that asks for it")
    found.hash = key  # or Triton would compute it anew
    return found


def _tuple_of(name: str, fields: Sequence[str], values: Sequence[Any]) -> Any:
    return namedtuple(name, fields)(*values)


def dumps(jobs: Sequence[Job]) -> bytes:
    """The bytes that `main` reads."""
    made = io.BytesIO()
    _Pickler(made).dump([tuple(job) for job in jobs])
    return made.getvalue()


def main() -> None:
    """Compile in as many processes at a time as there are cores, in the order of the list."""
    from triton.runtime import cache  # type: ignore[import-untyped]

    cache.triton_key = lambda: sys.argv[1]  # the hash of all of Triton's files, which takes a third of a second
    most, running = len(os.sched_getaffinity(0)), 0
    for job in pickle.load(sys.stdin.buffer):
        if running == most:
            os.wait()
            running -= 1
        if os.fork() == 0:
            try:
                compile_one(Job(*job))
            finally:
                os._exit(0)  # whoever asked finds it missing, compiles it, and says what is wrong
        running += 1
    for _ in range(running):
        os.wait()


def compile_one(job: Job) -> None:
    """Compile a kernel, and what Triton launches it with."""
    import triton  # type: ignore[import-untyped]

    made = triton.compile(job.source, target=job.target, options=job.options, _env_vars=job.environment)
    with suppress(Exception):  # versions differ; what is missing is made where it is launched
        from triton.backends.nvidia.driver import CudaLauncher  # type: ignore[import-untyped]

        CudaLauncher(made.src, made.metadata)
