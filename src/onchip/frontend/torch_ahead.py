"""Rehearsals of a call on tensors without memory, which tell what the call will launch before it does.

A kernel takes seconds to compile, and a call launches some twenty.  So the first launch whose kernel isn't compiled
starts a rehearsal of the whole call, forward and backward, and of calls with other numbers of tokens.  All kernels that
these would launch are then compiled at once (`kernels/triton/compiling.py`).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onchip.frontend.torch_prepared import unstated

# Plans depend on the number of tokens, and on its ratio to H; these lengths together need nearly all kernels.
_LENGTHS = 1, 256, 1536, 4096, 12288, 24576, 49152, 98304, 262144
_OF_HIDDEN = 0.5, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 6.0
# In training they are within a factor of 3.
_OF_TOKENS = 0.34, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0


class _Rehearsal(threading.local):
    """A thread's rehearsal."""

    coming: Callable[[], None] | None = None
    warm: Callable[[list[Any]], None] | None = None
    gathered: list[Any] | None = None


_thread = _Rehearsal()


class Coming:
    """While this lasts, `rehearse(launches)` adds what the call that is under way would launch."""

    def __init__(self, rehearse: Callable[[], None] | None) -> None:
        self.rehearse = rehearse

    def __enter__(self) -> None:
        _thread.coming = self.rehearse
        if _thread.warm is not None:
            _thread.warm(rehearsed())

    def __exit__(self, *_: object) -> None:
        _thread.coming = None


@contextmanager
def warming(warm: Callable[[list[Any]], None]) -> Iterator[None]:
    """Calls of this thread are rehearsed, be their kernels compiled or not, and `warm` gets what they launch."""
    _thread.warm = warm
    try:
        yield
    finally:
        _thread.warm = None


def lengths(tokens: int, hidden: int) -> list[int]:
    """Numbers of tokens to rehearse with a call of so many."""
    others = {*_LENGTHS, *(round(hidden * x) for x in _OF_HIDDEN), *(round(tokens * x) for x in _OF_TOKENS)}
    return sorted(others - {0, tokens})


def gathered() -> list[Any] | None:
    """Where a launch goes during a rehearsal, in place of the device."""
    return _thread.gathered


def rehearsed() -> list[Any]:
    """What the call that is under way would launch; nothing where that isn't known."""
    rehearse, found = _thread.coming, []  # type: ignore[var-annotated]
    if rehearse is None:
        return found
    _thread.coming, _thread.gathered = None, found  # once in a call
    try:
        with unstated():
            rehearse()
    finally:
        _thread.gathered = None
    return found


def without_memory(x: Tensor | None, lead: Sequence[int] = (), tokens: int | None = None) -> Tensor | None:
    """A tensor like this one without memory; with `tokens`, so many in place of the leading dimensions `lead`."""
    if x is None:
        return None
    if tokens is None or x.ndim < len(lead) or tuple(x.shape[: len(lead)]) != tuple(lead):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return torch.empty((tokens, *x.shape[len(lead) :]), dtype=x.dtype, device="meta")
