"""Tapes: what an op allocated and launched for one kind of call, to be repeated without the Python that decided on it.

What is recorded is a whole call of a public function (torch_repeat.py), and an operator's backward (`Tapes`).

Calls with the same options and with tensors of the same shapes, strides, dtypes and alignments launch the same kernels
with the same numbers; only addresses differ.  The first such call runs as it is, the second is recorded
(torch_recorder.py), and later ones run the recording: a generated Python function (torch_script.py) of one line for
each allocation, operator and row of launches.  At T=32768 H4096 V128256 `linear_cross_entropy` launches 129 kernels;
deciding on them takes several times as long as launching.

A recorder sees every operator of PyTorch by a dispatch mode, and every kernel because what launches one tells it
(`recorder`).  Memory that it saw neither as an argument nor as a result of an operator, and operators whose result is a
number, can't be repeated: such a call is never recorded, and runs as it is each time.

A tape holds no tensor.  It frees what it allocates after the last use, so that a repeated call takes at most the memory
of the first, and less than a MiB or two for what is small.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from onchip.core import configs
from onchip.frontend.torch_recorder import Recorder, Tape, Tensors
from onchip.frontend.torch_script import ALIGNED

# Kinds of calls that an op remembers: a training run has a handful, and one with a new length each step uses none.
_MOST_KINDS = 64
SEEN_ONCE = "it was called once"

_thread = threading.local()


def recorder() -> Recorder | None:
    """The one that records what this thread does, to be told of each launch."""
    return getattr(_thread, "recorder", None)


class Kinds:
    """What is known of a function's calls, by their kind: for any number of threads."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}
        self._lock = threading.Lock()
        self.get = self._known.get
        configs.when_cleared(self._known.clear)  # what was decided may change

    def remember(self, kind: Hashable, what: Any = SEEN_ONCE) -> None:
        """Note that there was a call of this kind, or what came of recording one; forget the oldest of too many."""
        with self._lock:
            self._known[kind] = what
            for oldest in [*self._known][:-_MOST_KINDS]:
                self._known.pop(oldest, None)


class Tapes:
    """The tapes of one function, by the kind of its arguments."""

    def __init__(self) -> None:
        self._known = Kinds()  # a Tape, or why there is none

    def run(self, function: Callable[[], Tensors], tensors: Tensors, rest: Hashable) -> Tensors | None:
        """The results of `function()`, from a tape or while one is made; None where it is to run as it is.

        `tensors` are all that it reads or writes, `rest` is all else that it depends on.
        """
        # A tape that ran inside of a recording would be missing there.
        if recorder() is not None or not is_taped(next(x for x in tensors if x is not None)):
            return None
        key = rest, kind_of(tensors)
        tape = self._known.get(key)
        if isinstance(tape, Tape):
            return tape.run(*tensors) if may_run(tape) else None
        if tape is None:
            self._known.remember(key)
        elif tape is SEEN_ONCE:
            made, tape = record(function, tensors)
            self._known.remember(key, tape)
            return made
        return None


def is_taped(x: Tensor) -> bool:
    """Whether there are tapes for this device: on a CPU deciding takes little of the time."""
    return x.is_cuda


def kind_of(tensors: Tensors) -> Hashable:
    """All that a tape takes for granted of its arguments."""
    made: list[Hashable] = []
    addresses = []
    for x in tensors:
        if x is None:
            made.append(None)
            continue
        address = x.data_ptr()
        made.append((x.dtype, x.shape, x.stride(), x.get_device(), address % ALIGNED and address & -address))
        if address:
            addresses.append(address)
    if len(set(addresses)) < len(addresses):
        made.append(tuple(addresses.index(address) for address in addresses))
    return tuple(made)


def may_run(tape: Tape) -> bool:
    """Whether its conditions hold."""
    for holds in tape.conditions:  # noqa: SIM110 - 0.5 us, 0.7 with all()
        if not holds():
            return False
    return True


def record(function: Callable[[], Tensors], tensors: Tensors) -> tuple[Tensors, Tape | str]:
    """The results of `function()`, and what repeats it for other tensors of the same kind, or why nothing does."""
    made = Recorder(tensors)
    with _recording(made), made:
        results = function()
    return results, made.finish(results)


@contextmanager
def _recording(made: Recorder) -> Iterator[None]:
    before, _thread.recorder = recorder(), made
    try:
        yield
    finally:
        _thread.recorder = before
