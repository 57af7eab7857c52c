"""Records what an operator states that it does (torch_prepared.py), and makes the steps that do the same again.

In lists the stream comes first, then the given tensors, then everything else in the order in which it was stated.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from onchip.core.cuda_driver import Driver, driver

ALIGNED = 512  # bytes, of which the CUDA allocator's blocks are multiples
_SMALL = 1 << 20  # bytes; smaller memory shares one allocation, unless it is needed as a tensor
SHARED = "two arguments share memory"
_PATIENCE = 0.02  # seconds, in which other threads send a launch
_UNKNOWN = "memory is neither an argument's nor a stated operator's"

Tensors = Sequence[Tensor | None]
Values = list[Any]
"""Addresses, and what is made of them; or tensors.  It has a name, or each step would make the type anew."""
Step = Callable[[Values, Values], None]

_There = Callable[[int, int], tuple[int, int]]
"""As `Builder._there`."""


class _Thread(threading.local):
    """What a thread does now.  Defaults of a class are found at once; to look for what isn't there takes 0.4 us."""

    builder: Any = None
    """The builder that records what this thread's operator does."""


THREAD = _Thread()


class Prepared(NamedTuple):
    """Repeats what was stated, for other tensors of the same kind."""

    size: int
    steps: Sequence[Step]
    results: Sequence[int]
    """The results' places among all tensors; 0, where there never is one, stands for None."""
    operates: bool
    """Whether PyTorch's operators run on tensors that are there already, rather than launches and allocations alone."""
    conditions: Sequence[Callable[[], bool]]
    """What must hold."""
    stream: Callable[[], Any]

    def may_run(self) -> bool:
        """Whether the conditions hold."""
        for holds in self.conditions:  # noqa: SIM110 - half the time of all()
            if not holds():
                return False
        return True

    def run(self, given: Tensors) -> list[Tensor | None]:
        tensors = self.tensors(given)
        return [tensors[i] for i in self.results]

    def tensors(self, given: Tensors) -> list[Tensor | None]:
        """All tensors that are left, among them the given ones from place 1 on."""
        at: list[Any] = [0] * self.size
        tensors: list[Any] = [None] * self.size
        at[0] = self.stream()
        for i, x in enumerate(given, 1):
            if x is not None:
                tensors[i], at[i] = x, x.data_ptr()
        for step in self.steps:
            step(at, tensors)
        return tensors


class _Geometry(NamedTuple):
    """The geometry of a tensor in some memory."""

    dtype: torch.dtype
    shape: Sequence[int]
    strides: Sequence[int]
    more: int = 0
    """Bytes from the beginning of the memory's own tensor to this one's."""

    @staticmethod
    def of(x: Tensor, more: int = 0) -> "_Geometry":
        return _Geometry(x.dtype, tuple(x.shape), x.stride(), more)

    def view(self, x: Tensor) -> Tensor:
        size = self.dtype.itemsize
        if self.dtype == x.dtype:
            return x.as_strided(self.shape, self.strides, x.storage_offset() + self.more // size)
        start = (x.storage_offset() * x.element_size() + self.more) // size
        made = torch.empty(0, dtype=self.dtype, device=x.device)
        return made.set_(x.untyped_storage(), start, self.shape, self.strides)


class _Memory(NamedTuple):
    """A storage that is known: a given tensor's, a buffer's, or that of an operator's result."""

    address: int
    geometry: _Geometry
    storage: StorageWeakRef
    """As long as it is held, no other storage gets this one's address."""
    storage_bytes: int


class _Derived(NamedTuple):
    """A matrix that is derived from addresses, and the places of its values."""

    matrix: Callable[[], Tensor | None]  # None if it is gone
    rows: Any
    address: int
    number: int
    known: int
    uses: set[int]


class Attached(NamedTuple):
    """The record that autograd connected an operator's outputs to its inputs."""

    operator: Any
    saving: Any
    """What the node keeps besides tensors; None: there is no node."""
    kept: Tensors
    """The tensors that the node keeps."""
    inputs: Tensors
    """The operator's differentiable tensors."""
    before: Tensors
    """The outputs as they were computed, and a link where there is a node."""
    after: Tensors
    """The same outputs after they were connected."""
    versions: Sequence[int | None]
    """How often each connected output had been changed in place."""


class Builder:
    """A context that records what an operator does.  In lists the stream comes first, then the given tensors.

    If some of these are `shared`, being in the same memory, they lie to each other as they do now in each later call.
    """

    def __init__(self, tensors: Tensors, *, shared: bool = False) -> None:
        self.refused = ""
        self.attached: list[Attached] = []
        self._device = next(x.device for x in tensors if x is not None)
        self._size = 1
        self._given = len(tensors)
        self._memory: dict[int, _Memory] = {}
        self._places: dict[int, int] = {}  # by storage
        # Functions that make steps, with the memory that a step uses, and that it allocates.  None of them holds this
        # builder, which would then live on, and the results' graph with it, until garbage is collected.
        self._steps: list[tuple[Callable[[_There], Step], set[int], int | None]] = []
        self._shares: dict[int, tuple[int, int]] = {}  # of memory in another one: its place, and bytes before
        self._as_tensors: set[int] = set()
        self._operates = False
        self._lock = Lock()  # which the thread holds that writes a launch's arguments and sends it
        self._derived: list[_Derived] = []
        self._conditions: dict[Callable[[], bool], None] = {}
        self._driver, index = _driver_of(self._device), self._device.index or 0
        stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # which PyTorch for CPUs lacks
        self._stream: Callable[[], Any] = (lambda: 0) if self._driver is None else partial(stream, index)
        for x in tensors:
            place = self._new()
            if x is not None:
                known = self._places.get(x.untyped_storage()._cdata)
                if known is None:
                    self._know(place, x)
                elif self._memory[known].address != x.data_ptr() and not shared:
                    self.refuse(SHARED)

    def __enter__(self) -> "Builder":
        THREAD.builder = self
        return self

    def __exit__(self, *_: object) -> None:
        THREAD.builder = None

    def refuse(self, reason: str) -> None:
        """Prepare no call of this kind."""
        self.refused = self.refused or reason

    def require(self, holds: Callable[[], bool], stream: Callable[[], Any]) -> None:
        """Do what is stated only where this holds, on the stream that is current then."""
        self._conditions[holds], self._stream = None, stream

    def connected(
        self, operator: Any, saving: Any, kept: Tensors, inputs: Tensors, before: Tensors, after: Tensors
    ) -> None:
        """Note that these outputs were connected to these inputs."""
        self.attached.append(Attached(operator, saving, kept, inputs, before, after, versions(after)))

    # ------------------------------------------------------------------------------------------------ statements

    def allocate(self, x: Tensor) -> None:
        if x.device != self._device:
            return  # unknown where it is used
        place = self._new()
        self._know(place, x)
        if x.data_ptr() % ALIGNED:
            self.refuse("memory is not aligned as PyTorch's allocator does it")
        dtype, shape, strides, _ = self._memory[place].geometry
        step = partial(_allocate, shape, strides, dtype, self._device, place)
        self._steps.append((lambda _: step, set(), place))

    def zero(self, x: Tensor) -> None:
        uses: set[int] = set()
        used, (place, more) = self._driver, self._address(x, uses)
        if used is None or place <= self._given or not x.is_contiguous():  # others count versions of what is given
            find = self._finder(x, uses)

            def zero(_: Values, tensors: Values) -> None:
                find(tensors).zero_()

            self._steps.append((lambda _: zero, uses, None))
            self._operates = True
            return
        size, index = x.numel() * x.element_size(), self._device.index or 0

        def make(there: _There) -> Step:
            return partial(_zero, used, index, size, *there(place, more))

        self._steps.append((make, uses, None))

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], made: Any) -> None:
        given, results = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)], _tensors_of(made)
        if not all(self._knows(x) for x in given):  # what it makes is unknown where it is used
            if any(self._knows(x) for x in results):
                self.refuse(_UNKNOWN)
            return
        uses: set[int] = set()
        finders = [self._argument(x, uses) for x in args]
        keywords = {name: self._argument(x, uses) for name, x in kwargs.items()}
        places: list[int | None] = []
        for x in results:
            place = None if x is None or self._knows(x) else self._new()
            if x is not None and place is not None:
                self._know(place, x)
            places.append(place)

        def step(at: Values, tensors: Values) -> None:
            made = function(*[find(tensors) for find in finders], **{k: find(tensors) for k, find in keywords.items()})
            for place, x in zip(places, _tensors_of(made), strict=True):
                if x is not None and place is not None:
                    tensors[place], at[place] = x, x.data_ptr()

        self._steps.append((lambda _: step, uses, None))
        self._operates = True
        for place in places:
            if place is not None:
                self._steps.append((lambda _: lambda *_: None, {place}, None))  # it is freed no earlier

    def launch(self, packed: Any) -> None:
        """State the launch of a kernel whose arguments are `packed` (kernels/triton/packed.py)."""
        if self.refused:
            return
        given, packed.given = packed.given, None  # no tensor is held
        uses: set[int] = set()
        addresses: list[tuple[int, int, int]] = []
        objects: list[tuple[Callable[[Any], None], int]] = []
        maps: list[tuple[Any, int, int, int | None]] = []  # with the place of the number of rows that is made
        for x, i in given.tensors:
            place, more, _ = self._origin(x, uses)
            if place:
                addresses.append((i, place, more))
        for x, made in given.descriptors:
            place, more, rows = self._origin(x.base, uses)
            rows = rows if x.shape[0] == len(x.base) else None
            if place and rows is None and made.word is not None:
                addresses.append((made.word, place, more))
            elif place:
                maps.append((made.put, place, more, rows))
        for x, put in given.tuples:
            for derived in self._derived:
                if x is derived.rows:
                    uses.update(derived.uses)
                    objects.append((put, derived.known))
        self._steps.append((partial(_sending, self._lock, packed, addresses, objects, maps), uses, None))

    def derive(self, function: Callable[..., Any], pieces: Sequence[Tensor], matrix: Tensor, rows: Any) -> None:
        """State that `function` makes, from the addresses of these pieces, the address of `matrix`, its number of rows,
        and `rows`, an argument of launches.
        """
        if self.refused:
            return
        uses: set[int] = set()
        of = [self._address(x, uses) for x in pieces]
        address, number, known = self._new(), self._new(), self._new()

        def make(there: _There) -> Step:
            places = [there(*x) for x in of]
            last: tuple[Any, Any] = None, None  # the last addresses, and their result

            def step(at: Values, _: Values) -> None:
                nonlocal last
                given, made = [at[i] + more if i else 0 for i, more in places], last
                if given != made[0]:
                    last = made = given, function(*given)
                at[address], at[number], at[known] = made[1]

            return step

        self._steps.append((make, uses, None))
        self._derived.append(_Derived(weakref.ref(matrix), rows, address, number, known, uses))

    def finish(self, results: Tensors) -> Prepared | str:
        """The prepared call, which does the same for other tensors and returns such results; or why there is none."""
        kept: set[int] = set()
        places = [self._result(x, kept) for x in results]
        if self.refused:
            return self.refused
        born: dict[int, int] = {}
        last: dict[int, int] = {}
        for n, (_, uses, made) in enumerate(self._steps):
            last.update(dict.fromkeys(uses, n))
            if made is not None:
                born[made] = last[made] = n
        unneeded = {i for i, n in born.items() if last[i] == n and i not in kept}
        small = [i for i in born.keys() - unneeded - self._as_tensors if 0 < self._memory[i].storage_bytes < _SMALL]
        steps = [self._share(small, born, last)] if small else []
        unneeded.update(small)
        for n, (make, uses, made) in enumerate(self._steps):
            if made not in unneeded:
                steps.append(make(self._there))
            gone = [i for i in sorted(uses - unneeded - kept) if last[i] == n and i > self._given]
            if gone:
                steps.append(partial(_free, tuple(gone)))
        conditions = [*self._conditions]
        if any(isinstance(step, partial) and step.func is _send for step in steps):
            conditions.append(partial(_may_send, self._lock))
        return Prepared(self._size, steps, places, self._operates, conditions, self._stream)

    def _share(self, small: Sequence[int], born: dict[int, int], last: dict[int, int]) -> Step:
        """Allocate all of this memory at once."""
        sizes, lives = [self._memory[i].storage_bytes for i in small], [(born[i], last[i]) for i in small]
        starts, size = placed(sizes, lives)
        whole = self._new()
        self._shares = {place: (whole, start) for place, start in zip(small, starts, strict=True)}
        return partial(_allocate_bytes, size + ALIGNED, self._device, whole)

    def _there(self, place: int, more: int) -> tuple[int, int]:
        """Where memory is, `more` bytes further on, now that it is known which memory shares one allocation."""
        whole, before = self._shares.get(place, (place, 0))
        return whole, before + more

    # ----------------------------------------------------------------------------------------------------- places

    def _new(self) -> int:
        self._size += 1
        return self._size - 1

    def _knows(self, x: Tensor | None) -> bool:
        return x is not None and x.untyped_storage()._cdata in self._places

    def _know(self, place: int, x: Tensor) -> None:
        storage = x.untyped_storage()
        self._places[storage._cdata] = place
        self._memory[place] = _Memory(x.data_ptr(), _Geometry.of(x), StorageWeakRef(storage), storage.nbytes())

    def _address(self, x: Tensor, uses: set[int]) -> tuple[int, int]:
        """The place of a tensor's memory, and how many bytes further on it begins; place 0 stands for no memory."""
        if x.numel() == 0 or x.data_ptr() == 0:
            return 0, 0
        place = self._places.get(x.untyped_storage()._cdata)
        if place is None:
            self.refuse(_UNKNOWN)
            return 0, 0
        uses.add(place)
        return place, x.data_ptr() - self._memory[place].address

    def _origin(self, x: Tensor, uses: set[int]) -> tuple[int, int, int | None]:
        """As `_address`, also for a derived matrix, with the place of its number of rows, else None."""
        for derived in self._derived:
            if x is derived.matrix():
                uses.update(derived.uses)
                return derived.address, 0, derived.number
        return *self._address(x, uses), None

    def _find(self, x: Tensor, uses: set[int]) -> tuple[int, _Geometry | None]:
        """The place of the tensor of x's memory, and x's geometry in there unless it is that tensor."""
        place = self._places.get(x.untyped_storage()._cdata)
        if place is None:
            self.refuse(_UNKNOWN)
            return 0, None
        uses.add(place)
        self._as_tensors.add(place)
        memory = self._memory[place]
        geometry = _Geometry.of(x, x.data_ptr() - memory.address if x.numel() else 0)
        return place, None if geometry == memory.geometry else geometry

    def _finder(self, x: Tensor, uses: set[int]) -> Callable[[list[Any]], Tensor]:
        """A function that finds such a tensor among the list's tensors."""
        place, geometry = self._find(x, uses)
        if geometry is None:
            return lambda tensors: tensors[place]
        return lambda tensors: geometry.view(tensors[place])

    def _result(self, x: Tensor | None, kept: set[int]) -> int:
        """The place of a result; one that is in another tensor's memory gets its own, by a last step."""
        if x is None:
            return 0
        place, geometry = self._find(x, kept)
        if geometry is None:
            return place
        new, self._operates = self._new(), True

        def step(_: Values, tensors: Values) -> None:
            tensors[new] = geometry.view(tensors[place])

        self._steps.append((lambda _: step, {place}, None))
        return new

    def _argument(self, x: Any, uses: set[int]) -> Callable[[list[Any]], Any]:
        if isinstance(x, Tensor):
            return self._finder(x, uses)
        return lambda _: x


def _sending(
    lock: Lock,
    packed: Any,
    addresses: list[tuple[int, int, int]],
    objects: list[tuple[Callable[[Any], None], int]],
    maps: list[tuple[Any, int, int, int | None]],
    there: "_There",
) -> Step:
    """The step that sends the launch."""
    to_write = tuple([(i, *there(place, more)) for i, place, more in addresses])
    to_make = tuple([(put, *there(place, more), rows) for put, place, more, rows in maps])
    to_put = tuple(objects)
    places = {place for _, place, *_ in (*to_write, *to_put, *to_make)}
    pick = itemgetter(0, *places | {rows for *_, rows in maps if rows is not None})
    return partial(_send, lock, packed, pick, to_write, to_put, to_make)


# ------------------------------------------------------------------------------------------------------------- steps

# Python's collector looks at all that a prepared call holds, again and again.  To it a function with what it encloses
# is a dozen objects; a `partial` is two, and a tuple of numbers is none.


def _allocate(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device, place: int, at: Values,
    tensors: Values,
) -> None:  # fmt: skip
    x = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    address = x.data_ptr()
    if address & (ALIGNED - 1):  # of an allocator that isn't PyTorch's own
        x = _aligned(x)
        address = x.data_ptr()
    tensors[place], at[place] = x, address


def _allocate_bytes(size: int, device: torch.device, place: int, at: Values, tensors: Values) -> None:
    tensors[place] = x = torch.empty(size, dtype=torch.uint8, device=device)
    at[place] = -(-x.data_ptr() // ALIGNED) * ALIGNED


def _zero(used: Driver, index: int, size: int, place: int, more: int, at: Values, _: Values) -> None:
    used.checked("zeros", index, used.fill, at[place] + more, 0, size, at[0])


def _send(
    lock: Lock, packed: Any, pick: Callable[[Values], Any], to_write: Sequence[tuple[int, int, int]],
    to_put: Sequence[Any], to_make: Sequence[Any], at: Values, _: Values,
) -> None:  # fmt: skip
    """Send the launch; values that haven't changed since the last time are not written again."""
    given = pick(at)
    with lock:
        if given != packed.written:
            packed.written, words = None, packed.words
            words[packed.stream] = at[0]
            for i, place, more in to_write:
                words[i] = at[place] + more
            for put, place in to_put:
                put(at[place])
            for put, place, more, rows in to_make:
                put(at[place] + more, None if rows is None else at[rows])
            packed.written = given
        packed.send()


def _may_send(lock: Lock) -> bool:
    """Whether this thread doesn't hold the lock: a call in a signal's handler, or in a finalizer, that interrupts a
    launch of its own kind would wait for itself.  Other threads hold it for a few microseconds.
    """
    if lock.locked():
        if not lock.acquire(timeout=_PATIENCE):
            return False
        lock.release()
    return True


def _free(places: Sequence[int], _: Values, tensors: Values) -> None:
    for place in places:
        tensors[place] = None


def _tensors_of(made: Any) -> list[Tensor | None]:
    """The tensors that an operator returned, with None in place of all else."""
    return [x if isinstance(x, Tensor) else None for x in (made if isinstance(made, tuple | list) else [made])]


def _driver_of(device: torch.device) -> Driver | None:
    return driver() if device.type == "cuda" else None


def versions(tensors: Tensors) -> list[int | None]:
    """How often each was changed in place; None for inference tensors, for which autograd doesn't count."""
    return [None if x is None or x.is_inference() else x._version for x in tensors]


def placed(sizes: Sequence[int], lives: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Where pieces of these sizes begin in one allocation, and its size; `lives` are each piece's first and last step.

    Pieces that are needed at the same time don't overlap.  The largest goes first, each to the lowest free place.
    """
    at = [0] * len(sizes)
    placed: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        first, last = lives[i]
        others = sorted((at[j], at[j] + sizes[j]) for j in placed if lives[j][0] <= last and first <= lives[j][1])
        for start, end in others:
            if at[i] + sizes[i] <= start:
                break
            at[i] = max(at[i], -(-end // ALIGNED) * ALIGNED)
        placed.append(i)
    return at, max((a + size for a, size in zip(at, sizes, strict=True)), default=0)


def _aligned(x: Tensor) -> Tensor:
    """New memory for the same tensor, aligned."""
    memory = torch.empty(x.untyped_storage().nbytes() + ALIGNED, dtype=torch.uint8, device=x.device)
    return _Geometry.of(x, -memory.data_ptr() % ALIGNED).view(memory)
