"""Prepared calls: an operator states once what it allocates and launches, and that is repeated for other tensors.

Operators' functions get memory from `empty`, `zeros` and `zero`, launch kernels with `Launch.run`, and run PyTorch's
operators on that memory with `call`.  Each of these tells the thread's `Builder` (torch_builder.py), if there is one,
what it does.

A call depends on the shapes, strides, dtypes and alignments of an operator's tensors and on all its other arguments,
never on numbers in tensors: that is the key of `Kinds`.  The first call of a kind just runs.  The second runs too, and
states what it does.  Later calls do what was stated: they allocate the same memory, fill in the new addresses and
launch the same kernels.  At T=512 deciding on 15 launches takes several times as long as the launches themselves.

An operator on memory that wasn't stated can't be repeated: its result isn't known when a launch takes it or when it is
returned.  Calls of such a kind run in full each time.  A test (test_torch_prepared.py) looks for in-place operators
that aren't stated.

A prepared call holds no tensor.  It frees what it allocates after the last use, so it takes at most the memory of the
call that stated it.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from onchip.frontend import torch_builder
from onchip.frontend.torch_builder import SHARED, THREAD, Builder, Prepared, Tensors

# The number of kinds of calls that an operator remembers.  A training run has a handful, or a hundred or two if lengths
# are padded to multiples of 64; if each step has a new length, none is used.  One takes up to 100 KB of the host's.
MOST_KINDS = 256
SEEN_ONCE = "it was called once"
T = TypeVar("T")
Inside = Callable[[Tensor], AbstractContextManager[Any]]

# ------------------------------------------------------------------------------------------- what operators state


def builder() -> Builder | None:
    """The builder to which this thread's operator states what it does, or None."""
    return THREAD.builder  # type: ignore[no-any-return]


def listed_device() -> Any:
    """The stand-in for the device while this thread's call is listed for another framework (jax_listed.py)."""
    told = THREAD.builder
    return None if told is None else getattr(told, "device", None)


def empty(shape: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """New memory."""
    made = torch.empty(shape, dtype=dtype, device=device)
    told = THREAD.builder
    if told is not None:
        told.allocate(made)
    return made


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """New memory, contiguous."""
    return empty(x.shape, dtype or x.dtype, x.device)


def zeros(shape: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return zero(empty(shape, dtype, device))


def zero(x: Tensor) -> Tensor:
    """Fill it with zeros."""
    x.zero_()
    told = THREAD.builder
    if told is not None:
        told.zero(x)
    return x


def call(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """function(*args, **kwargs), where `function` is PyTorch's, works on the device, maybe in place, and reads no
    values.

    Tensors must be arguments themselves, not inside of others, and the result is a tensor or several.
    """
    told = builder()
    if told is None or listed_device() is not None:
        return function(*args, **kwargs)
    with unstated():
        made = function(*args, **kwargs)
    told.call(function, args, kwargs, made)
    return made


def converted(x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """`make(x)`, where the result is often x itself or a view of it, as with `contiguous`."""
    made, told = make(x), builder()
    if told is not None and made.untyped_storage()._cdata != x.untyped_storage()._cdata:
        told.call(make, (x,), {}, made)
    return made


def refuse(reason: str) -> None:
    """State that this step can't be repeated: no call of this kind is prepared."""
    told = builder()
    if told is not None:
        told.refuse(reason)


@contextmanager
def unstated() -> Iterator[None]:
    """A context whose steps don't count as the operator's."""
    before, THREAD.builder = builder(), None
    try:
        yield
    finally:
        THREAD.builder = before


# ---------------------------------------------------------------------------------------------------- kinds of calls


class _Shared(NamedTuple):
    """A kind of calls some of whose tensors share memory."""

    kind: Hashable
    lying: tuple[tuple[int, int] | None, ...]
    """For each tensor, the place of the first one in its memory, and the bytes from that one to it."""


def _lying(tensors: Tensors) -> tuple[tuple[int, int] | None, ...]:
    known: dict[int, tuple[int, int]] = {}  # by storage, the first one's place and address
    made: list[tuple[int, int] | None] = []
    for i, x in enumerate(tensors):
        if x is None:
            made.append(None)
            continue
        address = x.data_ptr()
        place, first = known.setdefault(x.untyped_storage()._cdata, (i, address))
        made.append((place, address - first))
    return tuple(made)


def is_shared(kind: Hashable) -> bool:
    """Whether it says how tensors lie that share memory."""
    return isinstance(kind, _Shared)


def _of_tuples(kind: Hashable) -> Hashable:
    """The same key made of tuples alone.  Python's collector passes those of plain values over, but no torch.Size."""
    return tuple([_of_tuples(x) for x in kind]) if isinstance(kind, tuple) else kind


class Known:
    """What is known about a function's calls, by their kind, for any number of threads."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}
        self._lock = threading.RLock()  # a signal's handler may call in the same thread
        self.get, self.forget = self._known.get, self._known.clear
        _ALL.append(self)

    def find(self, kind: Hashable, tensors: Tensors) -> tuple[Hashable, Any]:
        """The call's kind, and what is known about it.

        It is told apart by how the tensors lie to each other only where some share memory.
        """
        found = self.get(kind)
        if found is None and any(at is not None and at[1] for at in _lying(tensors)):
            found = SHARED
            self.remember(kind, found)
        if found is SHARED:
            kind = _Shared(kind, _lying(tensors))
            found = self.get(kind)
        return kind, found

    def remember(self, kind: Hashable, what: Any = SEEN_ONCE) -> None:
        """Note that there was a call of this kind, or the result of stating it; forget the oldest if there are too
        many.
        """
        kind = _of_tuples(kind)
        with self._lock:
            self._known[kind] = what
            while len(self._known) > MOST_KINDS:
                self._known.pop(next(iter(self._known)), None)


_ALL: list[Known] = []  # one for each public function, two for each operator


def forget() -> None:
    """Let each call be the first of its kind."""
    for known in _ALL:
        known.forget()


class Kinds:
    """The prepared calls of one function of tensors."""

    def __init__(self) -> None:
        self._known = Known()  # a Prepared, or why there is none

    def run(
        self, function: Callable[[], Tensors], tensors: Tensors, rest: Hashable, inside: Inside | None = None
    ) -> Tensors:
        """The result of `function()`, which reads and writes only `tensors`, and depends besides only on `rest`.

        inside: makes the context that operators need, for a tensor, where the function enters it by itself.
        """
        first = next(x for x in tensors if x is not None)
        if builder() is not None or not is_prepared(first):
            return function()
        kind, known = self._known.find((rest, kind_of(tensors)), tensors)
        if isinstance(known, Prepared):
            if known.may_run():
                if inside is None or not needs_context(known, first):
                    return known.run(tensors)
                with inside(first):
                    return known.run(tensors)
        elif known is None:
            self._known.remember(kind)
        elif known is SEEN_ONCE:
            with Builder(tensors, shared=is_shared(kind)) as told:
                made = function()
            self._known.remember(kind, told.finish(made))
            return made
        return function()


def is_prepared(x: Tensor) -> bool:
    """Whether calls are prepared for this device: on a CPU deciding takes little of the time."""
    return x.is_cuda


def needs_context(prepared: Prepared, first: Tensor) -> bool:
    """Whether a prepared call on this tensor's device must run in an operator's context: launches alone don't depend on
    what they are inside of, except for the current device.
    """
    return prepared.operates or (first.is_cuda and first.get_device() != torch.cuda.current_device())


def kind_of(tensors: Tensors, *, differentiable: bool = False) -> Hashable:
    """Everything about tensors on which a prepared call relies.

    differentiable: which are the same tensor counts too, since a gradient goes to the tensor, not to its memory.
    """
    made: list[Hashable] = []
    addresses = []
    aligned = torch_builder.ALIGNED
    for x in tensors:
        if x is None:
            made.append(None)
            continue
        address = x.data_ptr()
        made += x.dtype, x.shape, x.stride(), x.get_device(), address % aligned and address & -address
        addresses.append(address)
    if len(set(addresses)) < len(addresses):
        made.append(tuple([addresses.index(address) for address in addresses]))
        if differentiable:
            ids = [id(x) for x in tensors]
            made.append(tuple([ids.index(x) for x in ids]))
    return tuple(made)
