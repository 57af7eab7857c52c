"""What a tape's lines are made of (torch_recorder.py), and the Python function that they become.

There are two ways.  Launches in a row, with fills and copies between them, are one call of a program (torch_program.py)
where it can be built; else each is a call of Triton's launcher.

Small memory that only launches read and write has places in one allocation of a call, since PyTorch's allocator took 6
us of an H200's host for each.  All else is allocated where it was and freed after its last use, so that a call takes at
most the memory of the first, and so much more as is small.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from onchip.frontend import torch_program
from onchip.frontend.torch_program import Step

ALIGNED = 512  # bytes: what allocations of the GPU's are multiples of
SMALL = 1 << 20  # bytes; what is smaller may get a place in the one allocation


class Memory:
    """A storage that the tape knows: an argument's, an operator's result, or one that it allocates."""

    def __init__(self, name: str, x: Tensor, *, given: bool) -> None:
        self.name, self.given = name, given
        self.address, self.bytes = x.data_ptr(), x.untyped_storage().nbytes()
        self.geometry = x.dtype, tuple(x.shape), x.stride(), x.data_ptr()
        self.storage = StorageWeakRef(x.untyped_storage())  # while it is there, no other storage gets this one's place
        self.addressed = False  # whether a line has its address
        self.open = False  # whether its geometry may still become another

    @property
    def lines(self) -> list[str]:
        """Find its address, where that is needed."""
        return [f"p_{self.name} = {self.name}.data_ptr()"] if self.addressed else []


class Does(Enum):
    """What a line does."""

    ALLOCATE = 1
    OPERATE = 2
    COMPUTE = 3  # numbers of others, of addresses and of the current stream
    MAP = 4  # a tensor map for Triton's launcher; a program makes its own
    LAUNCH = 5


@dataclass
class Line:
    """A line of a tape, or what it is in a program."""

    does: Does
    code: str
    uses: set[int]
    """Numbers of the memory that it needs."""
    makes: Sequence[int] = ()
    """Of that which it allocates, or which an operator makes."""
    step: Step | None = None
    """None: it can't be in a program."""
    stream: str = ""
    """Code for a launch's stream."""


def places(sizes: Sequence[int], lives: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Where things of these sizes, needed from a first line to a last one, begin in one memory, and its size.

    What is needed at once doesn't overlap.  The largest first, each at the lowest place that is free.
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


class Script:
    """Lines, and the function that they become."""

    def __init__(self, device: torch.device, lines: Sequence[Line], memory: Sequence[Memory], kept: set[int]) -> None:
        """`kept`: numbers of the memory that the function returns."""
        self._device, self._lines, self._memory, self._kept = device, lines, memory, kept
        self.constants: dict[str, Any] = {"_aligned": aligned}
        self._made: list[str] = []
        self._waiting: list[Line] = []  # to be in the next program
        self._unneeded: list[str] = []  # names of memory to be freed after that
        launches = [x for x in lines if x.does is Does.LAUNCH]
        self._native = bool(launches) and all(x.step for x in launches) and torch_program.extension() is not None
        self._stream = launches[0].stream if launches else ""
        self._computed = {i for x in lines if x.does is Does.COMPUTE for i in x.uses}
        self._last = {i: n for n, line in enumerate(lines) for i in (*line.uses, *line.makes)}
        self._moved = self._small()

    def _small(self) -> dict[str, tuple[str, int]]:
        """Where small memory is in the one allocation, by the code for its address."""
        tensors = set(self._kept)  # needed as tensors
        for line in self._lines:
            if line.does is Does.OPERATE and not (self._native and line.step):
                tensors |= line.uses
        born = {i: n for n, line in enumerate(self._lines) if line.does is Does.ALLOCATE for i in line.makes}
        small = [i for i in born if 0 < self._memory[i].bytes < SMALL and i not in tensors and born[i] < self._last[i]]
        at, self.small = places([self._memory[i].bytes for i in small], [(born[i], self._last[i]) for i in small])
        return {f"p_{self._memory[i].name}": ("p_small", start) for i, start in zip(small, at, strict=True)}

    def write(self) -> list[str]:
        """The function's lines."""
        self._made = [line for m in self._memory if m.given for line in m.lines]
        if self.small:
            self.constants |= {"_new": allocator(self._device), "_byte": torch.uint8}
            self._made += [f"small = _new(({self.small},), (1,), _byte)", "p_small = small.data_ptr()"]
            if self._device.type == "cuda":
                self._made.append(realigned("small"))
        first = [x.does is Does.COMPUTE and not x.uses for x in self._lines]  # the stream
        self._made += [x.code for x, is_first in zip(self._lines, first, strict=True) if is_first]
        for number, (line, is_first) in enumerate(zip(self._lines, first, strict=True)):
            gone = [i for i in (*line.uses, *line.makes) if self._last[i] == number and i not in self._kept]
            if is_first or (line.does is Does.ALLOCATE and gone):  # nothing needs it
                continue
            self._add(line)
            names = dict.fromkeys(self._memory[i].name for i in gone if not self._memory[i].given)
            self._unneeded += [name for name in names if f"p_{name}" not in self._moved]
            if not self._waiting:
                self._free()
        self._run()
        return self._made

    def _add(self, line: Line) -> None:
        if line.does is Does.ALLOCATE:
            (number,) = line.makes
            name = f"p_{self._memory[number].name}"
            if name not in self._moved:
                if self._unneeded and self._memory[number].bytes >= SMALL:
                    self._run()  # else it takes no more memory to allocate it before what waits
                self._write(line)
            elif not self._native or number in self._computed:
                self._made.append("{} = {} + {}".format(name, *self._moved[name]))
        elif self._native and line.step:
            self._waiting.append(line)
        elif not (self._native and line.does is Does.MAP):
            if line.does is not Does.COMPUTE:
                self._run()
            self._write(line)

    def _write(self, line: Line) -> None:
        self._made.append(line.code)
        for m in [self._memory[i] for i in line.makes]:
            self._made += m.lines
            if m.addressed and line.does is Does.ALLOCATE and self._device.type == "cuda":
                self._made.append(realigned(m.name))

    def _run(self) -> None:
        """Let what waits be done, and free what it needed last."""
        steps = [x.step for x in self._waiting if x.step is not None]
        if steps:
            program, slots = torch_program.build(steps, self._device.index or 0, self._moved)
            name = f"program{len(self.constants)}"
            self.constants[name] = program
            self._made.append(f"{name}({', '.join([self._stream, *slots])})")
        self._waiting = []
        self._free()

    def _free(self) -> None:
        if self._unneeded:
            self._made.append(f"del {', '.join(self._unneeded)}")
        self._unneeded = []


def allocator(device: torch.device) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """What makes memory of a shape, strides and a dtype on the current device, which is this one.

    It is what the code of torch.compile calls, past PyTorch's dispatcher: 0.45 us, where torch.empty_strided takes 1.0.
    """
    short = getattr(sys.modules.get("torch._C._dynamo.guards"), f"_empty_strided_{device.type}", None)
    return short or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device))


def realigned(name: str) -> str:
    """Code for memory that comes from an allocator that isn't PyTorch's own."""
    return f"if p_{name} & {ALIGNED - 1}: {name} = _aligned({name}); p_{name} = {name}.data_ptr()"


def aligned(x: Tensor) -> Tensor:
    """Memory for the same, aligned."""
    memory = torch.empty(x.untyped_storage().nbytes() + ALIGNED, dtype=torch.uint8, device=x.device)
    return view(memory, (x.dtype, x.shape, x.stride(), -memory.data_ptr() % ALIGNED))


def view(x: Tensor, geometry: tuple[Any, ...]) -> Tensor:
    """Other shape, strides and dtype of the same memory, so many bytes further on."""
    dtype, shape, strides, more = geometry
    size = dtype.itemsize
    if dtype == x.dtype:
        return x.as_strided(shape, strides, x.storage_offset() + more // size)
    start = (x.storage_offset() * x.element_size() + more) // size
    return torch.empty(0, dtype=dtype, device=x.device).set_(x.untyped_storage(), start, shape, strides)
