"""Kernels compiled side by side, before the first of them is launched."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Timer
from typing import Any

# Seconds after which a line says what takes so long.
PATIENCE = 2.0


def compile_kernels(kernels: Sequence[Any], compile_one: Sequence[Callable[[], Any]]) -> None:
    """Compile kernels side by side, Triton's passes and ptxas in threads of their own; those in Gluon take longest."""
    from triton import AsyncCompileMode  # type: ignore[import-untyped]

    order = sorted(range(len(kernels)), key=lambda i: not kernels[i].is_gluon())
    with (
        _patience(len(kernels)),
        ThreadPoolExecutor(min(len(kernels), len(os.sched_getaffinity(0)))) as pool,
        AsyncCompileMode(pool),
    ):
        for i in order:
            compile_one[i]()


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
