"""The launches and computations of a PyTorch call, as a list that JAX can carry out on its own arrays.

The call runs on tensors without memory, forward and backward, as it would on a GPU.  Each piece of memory has a number,
and a tensor is a `View` of it.  What PyTorch itself computes between kernels is listed under ATen's operator names.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onchip.frontend.torch_builder import THREAD
from onchip.frontend.torch_inputs import dtype_name


class View(NamedTuple):
    """A tensor."""

    memory: int
    offset: int  # bytes
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class SpanPart(NamedTuple):
    """An argument that depends on where several pieces of memory are: a matrix that spans them, or the argument that
    says which rows belong to which piece.
    """

    spanning: int  # its number in the list
    matrix: View | None


class Spanning(NamedTuple):
    """From the addresses of `pieces`, `function` makes a matrix's address, its number of rows, and a rows' argument."""

    function: Callable[..., tuple[int, int, Any]]
    pieces: tuple[View, ...]


class Launched(NamedTuple):
    """A kernel's launch, with views and parts in the place of tensors."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]


class Computed(NamedTuple):
    """A call of one of ATen's operators, with views and numbers."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    made: tuple[View, ...]
    in_place: bool


Step = Launched | Computed


class ListedMemory(NamedTuple):
    size: int  # bytes
    dtype: str  # that it was made for


class Listed(NamedTuple):
    """A call, forward and backward."""

    forward: Sequence[Step]
    backward: Sequence[Step]
    memory: Sequence[ListedMemory]
    spannings: Sequence[Spanning]
    given: Sequence[View]
    outputs: Sequence[View]
    upstream: Sequence[View | None]  # each output's gradient, if it has one
    gradients: Sequence[View | None]  # each given tensor's gradient


class List(TorchDispatchMode):
    """A context that lists what this thread does with tensors without memory, as if on a device like `device`.

    `stack` tells how many bytes of stack a thread of a launch has, for lack of registers.
    """

    def __init__(self, device: Any, stack: Callable[[Any], int]) -> None:
        super().__init__()
        self.device, self.stack = device, stack
        self.steps: list[Step] = []
        self.memory: list[ListedMemory] = []
        self.spannings: list[Spanning] = []
        self._places: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no other storage gets one's address
        self._parts: list[tuple[Tensor, Any]] = []

    def __enter__(self) -> Any:
        THREAD.builder = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        THREAD.builder = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = len(self.memory)
        made = func(*args, **kwargs)
        tensors = [x for x in (made if isinstance(made, tuple | list) else (made,)) if isinstance(x, Tensor)]
        returns = func._schema.returns
        aliases = returns and all(x.alias_info is not None and not x.alias_info.is_write for x in returns)
        if aliases and all(x.untyped_storage()._cdata in self._places for x in tensors):  # views
            return made
        views = tuple([self.view(x) for x in tensors])
        name = func._schema.name.removeprefix("aten::")
        if not name.startswith(("empty", "new_empty")):
            options = {k: dtype_name(x) if isinstance(x, torch.dtype) else x for k, x in kwargs.items()}
            in_place = all(x.memory < known for x in views)
            self.steps.append(Computed(name, self._replaced(tuple(args)), self._replaced(options), views, in_place))
        return made

    def view(self, x: Tensor) -> View:
        storage = x.untyped_storage()
        place = self._places.get(storage._cdata)
        if place is None:
            place = self._places[storage._cdata] = len(self.memory)
            self.memory.append(ListedMemory(storage.nbytes(), dtype_name(x.dtype)))
            self._alive.append(storage)
        offset = int(x.storage_offset()) * x.element_size()
        return View(place, offset, dtype_name(x.dtype), tuple(x.shape), x.stride())

    def _replaced(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            for i, (matrix, _) in enumerate(self._parts):
                if x is matrix:
                    return SpanPart(i, self.view(x))
            return self.view(x)
        for i, (_, rows) in enumerate(self._parts):
            if x is rows:
                return SpanPart(i, None)
        if isinstance(x, dict):
            return {name: self._replaced(y) for name, y in x.items()}
        if isinstance(x, tuple | list):
            parts = [self._replaced(y) for y in x]
            return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
        return x

    # What operators and launches state (torch_prepared.py).

    def launch(self, launch: Any) -> None:
        arguments = {name: self._replaced(x) for name, x in launch.arguments.items()}
        if 0 not in launch.grid:
            self.steps.append(Launched(launch.kernel, launch.grid, arguments, launch.options))

    def derive(self, function: Any, pieces: Sequence[Tensor], matrix: Tensor, rows: Any) -> None:
        self.spannings.append(Spanning(function, tuple([self.view(x) for x in pieces])))
        self._parts.append((matrix, rows))

    def refuse(self, reason: str) -> None:
        raise NotImplementedError(reason)

    def _nothing(self, *_: Any) -> None:
        """List a call of one of ATen's operators."""

    allocate = zero = call = connected = require = _nothing


def listed(
    device: Any,
    stack: Callable[[Any], int],
    function: Callable[..., Any],
    given: Sequence[Tensor],
    of_gradients: Sequence[bool],
) -> tuple[Listed, Any]:
    """The list of what `function(*given)` and its backward do, and its result, with the outputs' numbers in place of
    tensors.

    given: tensors without memory.  of_gradients: which of them need one.
    """
    told = List(device, stack)
    tensors = [x.detach().requires_grad_(needed) for x, needed in zip(given, of_gradients, strict=True)]
    outputs: list[Tensor] = []
    with told:
        places = [told.view(x) for x in tensors]
        with torch.set_grad_enabled(any(of_gradients)):
            made = _numbered(function(*tensors), outputs)
        forward, told.steps = told.steps, []
        results = tuple([told.view(x) for x in outputs])
        gradients: list[View | None] = [None] * len(tensors)
        upstream: list[View | None] = [None] * len(outputs)
        wanted = [i for i, needed in enumerate(of_gradients) if needed]
        of = [i for i, x in enumerate(outputs) if x.requires_grad]
        if wanted and of:
            steps = told.steps
            given_up = [torch.empty_like(outputs[i]) for i in of]
            found = torch.autograd.grad([outputs[i] for i in of], [tensors[i] for i in wanted], given_up)
            for i, x in zip(of, given_up, strict=True):
                upstream[i] = told.view(x)
            for i, x in zip(wanted, found, strict=True):
                gradients[i] = told.view(x)
            told.steps = steps
    spannings = tuple(told.spannings)
    return Listed(forward, told.steps, tuple(told.memory), spannings, places, results, upstream, gradients), made


def _numbered(x: Any, found: list[Tensor]) -> Any:
    if isinstance(x, Tensor):
        found.append(x)
        return len(found) - 1
    if isinstance(x, tuple):
        parts = [_numbered(y, found) for y in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def views_of(x: Any) -> Iterator[View]:
    """All views in an argument."""
    if isinstance(x, View):
        yield x
    elif isinstance(x, SpanPart):
        return
    elif isinstance(x, tuple):
        for y in x:
            yield from views_of(y)
    elif isinstance(x, dict):
        for y in x.values():
            yield from views_of(y)


def parts_of(x: Any) -> Iterator[SpanPart]:
    if isinstance(x, SpanPart):
        yield x
    elif isinstance(x, tuple) and not isinstance(x, View):
        for y in x:
            yield from parts_of(y)
    elif isinstance(x, dict):
        for y in x.values():
            yield from parts_of(y)
