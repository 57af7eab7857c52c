"""Compiles kernels side by side, before the first of them is launched."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import sha256
from inspect import getclosurevars
from pathlib import Path
from pickle import PicklingError
from tempfile import NamedTemporaryFile
from threading import Lock, RLock, Timer
from typing import Any, NamedTuple

import onchip
from onchip.kernels.triton.compile_process import Job, compile_one, dumps

# Seconds after which a line says what takes so long.
PATIENCE = 2.0

Ask = Callable[[], Any]
"""Asks Triton for a kernel, without launching it."""


class Told(NamedTuple):
    """Names of the kernels that were asked for: those that were compiled, and those that were in Triton's cache."""

    compiled: list[str]
    found: list[str]


_told: list[Told] = []


@contextmanager
def told() -> Iterator[Told]:
    """Collects what is compiled in this process while the context lasts, in any thread."""
    made = Told([], [])
    _told.append(made)
    try:
        yield made
    finally:
        _told[:] = [x for x in _told if x is not made]


# One of the caller's threads compiles at a time, for the reason that `_compile_in_threads` says; the next finds it.
_one_at_a_time = RLock()


def compile_coming(first: Ask, others: Callable[[], Sequence[Ask]]) -> None:
    """Prepare a launch whose kernel this process lacks: if Triton's cache lacks it too, compile it together with the
    `others`, which will be needed next.
    """
    from triton.runtime._async_compile import active_mode  # type: ignore[import-untyped]

    if active_mode.get() is not None:  # the caller's own mode
        return
    with _one_at_a_time:
        found = _looked_up([first])
        if found.missing:
            with _Process() as process:
                coming = others()
                if coming:
                    found = _looked_up([first, *coming])
                    process.compile(found.missing)
                else:
                    compile_one(found.missing[0].job)
                    _looked_up([first])
        _tell([x.name for x in found.missing], found.names)


def compile_all(asked: Sequence[Ask]) -> None:
    """Compile the kernels that Triton's cache lacks, and load the others."""
    found = _looked_up(asked)
    if found.missing:
        with _Process() as process:
            process.compile(found.missing)
    _tell([x.name for x in found.missing], found.names)


def compile_jobs(jobs: Sequence[Job]) -> list[Any]:
    """The kernels of these jobs; those that Triton's cache lacks are compiled several at a time."""
    import triton  # type: ignore[import-untyped]
    from triton.compiler.compiler import make_backend  # type: ignore[import-untyped]

    options = [make_backend(job.target).parse_options(dict(job.options)) for job in jobs]
    keys = [f"{job.source.hash()}-{x.hash()}-{job.target}" for job, x in zip(jobs, options, strict=True)]
    found = dict(zip(keys, jobs, strict=True))
    missing = [job for key, job in found.items() if key not in _DONE]
    _DONE.update(found)
    if len(missing) > 1:
        with _Process() as process, _patience(len(missing)):
            if process.started is not None:
                with suppress(PicklingError, AttributeError, TypeError):
                    process.started.communicate(dumps(missing))
    made = {x: triton.compile(job.source, target=job.target, options=job.options) for x, job in found.items()}
    return [made[key] for key in keys]


def resources(kernel: Any) -> tuple[int, int]:
    """Registers of a thread of a compiled kernel, and bytes of its stack, which it needs where registers don't suffice;
    no GPU is asked."""
    from triton import knobs

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        asked = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


_DONE: set[str] = set()  # what this process has asked for


def _tell(compiled: Sequence[str], found: Sequence[str]) -> None:
    for x in _told:
        x.compiled.extend(compiled)
        x.found.extend(found)


class _Missing(NamedTuple):
    name: str
    is_gluon: bool
    ask: Ask
    job: Job


class _Looked(NamedTuple):
    missing: list[_Missing]
    names: list[str]
    """Names of the other kernels."""


def _looked_up(asked: Sequence[Ask]) -> _Looked:
    """Load what is in Triton's cache, and return what isn't."""
    missing: dict[str, _Missing] = {}
    loaded: dict[str, str] = {}
    mode = _mode_class()(None)
    mode.missing, mode.loaded = missing, loaded
    with mode:
        for ask in asked:
            mode.ask = ask
            ask()
    # An object that still holds the mode holds no launch, and so no tensor.
    mode.ask = mode.missing = mode.loaded = None
    return _Looked(list(missing.values()), list(loaded.values()))


@lru_cache(maxsize=1)
def _mode_class() -> Any:
    from triton import AsyncCompileMode
    from triton.experimental.gluon._runtime import GluonASTSource  # type: ignore[import-untyped]
    from triton.runtime.cache import get_cache_manager  # type: ignore[import-untyped]

    class Mode(AsyncCompileMode):  # type: ignore[misc]
        """A mode in which Triton hands over what it would compile, with its key in the cache."""

        def submit(self, key: str, compile_fn: Ask, finalize_fn: Callable[[Any], None], *_: Any) -> Any:
            wanted = getclosurevars(compile_fn).nonlocals
            source, file = wanted["src"], f"{wanted['src'].name[:150]}.json"
            if file in (get_cache_manager(sha256(key.encode()).hexdigest()).get_group(file) or {}):
                kernel = compile_fn()
                finalize_fn(kernel)
                self.loaded[key] = source.name
                return kernel
            job = Job(source, wanted["target"], wanted["options"].__dict__, wanted["env_vars"])
            self.missing.setdefault(key, _Missing(source.name, isinstance(source, GluonASTSource), self.ask, job))
            return None

    return Mode


class _Process:
    """A process that compiles (compile_process.py); it is started before it is known what to compile."""

    def __enter__(self) -> "_Process":
        from triton import knobs
        from triton.runtime.cache import triton_key

        path = [str(Path(onchip.__file__).parents[1]), *sys.path]
        code = f"import sys; sys.path[:] = {path!r}; from onchip.kernels.triton.compile_process import main; main()"
        environment = os.environ | {"TRITON_CACHE_DIR": knobs.cache.dir}
        try:
            self.started: Any = subprocess.Popen(
                [sys.executable, "-S", "-c", code, triton_key()],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
            )  # fmt: skip
        except OSError:
            self.started = None
        return self

    def compile(self, missing: Sequence[_Missing]) -> None:
        """Compile these, those in Gluon first, which take longest; compile here what the process couldn't."""
        ordered = sorted(missing, key=lambda x: not x.is_gluon)
        with _patience(len(ordered)):
            if self.started is not None:
                with suppress(PicklingError, AttributeError, TypeError):  # what has no name that another can import
                    self.started.communicate(dumps([x.job for x in ordered]))
            asked = [x.ask for x in ordered]
            left = _looked_up(asked).missing
            if left:
                _compile_in_threads(left)
                _looked_up(asked)

    def __exit__(self, *_: object) -> None:
        if self.started is not None:
            self.started.stdin.close()
            self.started.kill()
            self.started.wait()


def _compile_in_threads(missing: Sequence[_Missing]) -> None:
    """Run Triton's passes and ptxas side by side, but its parser in turns: up to Python 3.12 all threads together count
    how deep they are in a syntax tree, and one that was interrupted fails.
    """
    parser = Lock()
    for x in missing:
        x.job.source.make_ir = _in_turns(parser, x.job.source.make_ir)
    with ThreadPoolExecutor(min(len(missing), len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(compile_one, [x.job for x in missing]))


def _in_turns(lock: Lock, fn: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return fn(*args, **kwargs)

    return made


@contextmanager
def _patience(number: int) -> Iterator[None]:
    line = f"onchip: compiling {number} kernels, once; other processes find them in Triton's cache"
    timer = Timer(PATIENCE, print, (line,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
