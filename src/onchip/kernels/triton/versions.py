"""The parts of Triton beyond its documented interface that onchip uses, which differ from one version to another.

Whether each is there is found by trying it, once.  Names in Gluon that have changed are in gluon.py.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from threading import Thread
from typing import Any, NamedTuple


class Settings(NamedTuple):
    """Triton's settings and its driver."""

    runtime: Any
    compilation: Any
    driver: Any

    def watched(self) -> bool:
        """Whether Triton does anything around a launch: it has hooks (of profilers), or is debugging."""
        runtime = self.runtime
        hooks = getattr(runtime.launch_enter_hook, "calls", 1) or getattr(runtime.launch_exit_hook, "calls", 1)
        changed = runtime.add_stages_inspection_hook is not None or self.compilation.instrumentation_mode
        return bool(hooks or runtime.debug or changed)


def settings() -> Settings:
    from triton import knobs  # type: ignore[import-untyped]
    from triton.runtime.driver import driver  # type: ignore[import-untyped]

    return Settings(knobs.runtime, knobs.compilation, driver)


@lru_cache(maxsize=1)
def interpreted() -> bool:
    """Whether Triton's interpreter runs all kernels."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


@lru_cache(maxsize=1)
def hashing() -> Thread:
    """A thread that hashes all of Triton's files; every kernel's key in the cache begins with that hash.  It takes a
    third of a second, which passes while the program does what comes before the first launch.
    """

    def run() -> None:
        from triton.runtime.cache import triton_key  # type: ignore[import-untyped]

        triton_key()

    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread


class _Recorder:
    """Stands for a compiled kernel and records how it is called."""

    function, packed_metadata = object(), object()
    taken: tuple[Any, ...] = ()

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        self.taken = arguments


@lru_cache(maxsize=1)
def direct_refusal() -> str | None:
    """Why `Launch.run` can't call compiled kernels directly, or None.  It asks the GPU's driver.

    Triton launches a kernel, with a recorder in place of what it would compile: Triton has to call that as `Launch.run`
    does, except for its hooks.
    """

    def trial() -> str | None:
        import torch
        from triton import jit, knobs, language

        def nothing(x, n, SIZE: language.constexpr):  # type: ignore[no-untyped-def]
            pass

        used, recorder, kernel, x = (
            settings(),
            _Recorder(),
            jit(nothing),
            torch.zeros(1, dtype=torch.float32, device="cpu"),
        )
        used.watched(), knobs.HookChain().calls
        active = used.driver.active
        stream = active.get_current_stream(active.get_current_device())
        kernel._do_compile = lambda *_, **__: recorder
        kernel[(2, 3)](x=x, n=7, SIZE=16, num_warps=4, enable_fp_fusion=True)
        before, values = recorder.taken[:6], recorder.taken[9:]
        same = before == (2, 3, 1, stream, recorder.function, recorder.packed_metadata)
        same = same and len(values) == 3 and values[0] is x and values[1:] == (7, 16)
        return None if same else "Triton passes other arguments to what it compiled"

    return "Triton's interpreter runs kernels" if interpreted() else _tried(trial)


@lru_cache(maxsize=1)
def gluon_refusal() -> str | None:
    """Why kernels in Gluon can't be compiled, or None.  It needs no GPU: it compiles a small kernel that uses
    everything that the others use.
    """

    def trial() -> str | None:
        import_module("onchip.kernels.triton.trial").compile_for_hopper()
        return None

    if find_spec("triton") is None:
        return "Triton is not installed"
    return "Triton's interpreter doesn't know them" if interpreted() else _tried(trial)


def _tried(trial: Callable[[], str | None]) -> str | None:
    try:
        return trial()
    except Exception as error:  # another version may raise anything
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        return f"{type(cause).__name__}: {cause}"
