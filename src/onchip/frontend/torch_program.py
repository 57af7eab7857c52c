"""Programs: launches in a row of a tape, with its fills and copies, as one call of C (torch_program.c).

Triton's launcher reads 40 arguments of Python's and looks at each.  On an H200's host that took 7 us a launch, of which
a forward and a backward at T=32768 have 129.  In a program all parameters are there beforehand; what a call puts into
it are the addresses that differ.

The C is compiled when a tape is first made, by what Triton compiles its own launchers with and into its cache, and
includes Triton's header of CUDA.  Where that fails, tapes call Triton's launchers.
"""

import ctypes
import logging
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A number that is known when a call is made: what this code gives, an address mostly, and so much more."""

    code: str
    more: int = 0


class Kernel(NamedTuple):
    """What is launched, and how, as Triton's launcher takes it."""

    function: int
    grid: tuple[int, int, int]
    warps: int
    ctas: int
    shared: int
    cooperative: bool
    pdl: bool


class Map(NamedTuple):
    """A tensor map that the driver makes of an address; as arguments of `make`, Triton's `fill_tma_descriptor`."""

    make: Any
    base: Any
    swizzle: int
    element_size: int
    element_type: int
    box: Sequence[int]
    shape: Sequence[Any]
    strides: Sequence[int]
    padding: int


Param = tuple[str, int | Place | Map]
"""Of a kernel, by Triton's name of its type: a number's bits, a place, or a map whose base and shape are such too."""


class Launch(NamedTuple):
    kernel: Kernel
    params: "Sequence[Param]"


class Fill(NamedTuple):
    """Zeros."""

    to: "int | Place"
    bytes: int


class Copy(NamedTuple):
    to: "int | Place"
    source: "int | Place"
    bytes: int


Step = Launch | Fill | Copy

# What Triton adds to the parameters of each kernel: pointers to memory of its own, which there is none of.
_SCRATCH = ("*i8", 0), ("*i8", 0)
_INTEGERS = {f"{sign}{bits}": bits for sign in "iu" for bits in (1, 8, 16, 32, 64)}


def number(kind: str, x: Any) -> int:
    """A number as a parameter of this type, by Triton's names: its bits."""
    if kind.startswith("*"):
        return int(x or 0)
    if kind in _INTEGERS:
        return int(x) & ((1 << max(8, _INTEGERS[kind])) - 1)
    if kind in ("fp32", "f32"):
        return int.from_bytes(bytes(ctypes.c_float(x)), "little")
    if kind == "fp64":
        return int.from_bytes(bytes(ctypes.c_double(x)), "little")
    if kind == "bf16":  # cut off, as Triton does
        return int.from_bytes(bytes(ctypes.c_float(x)), "little") >> 16
    if kind == "fp16":
        return int.from_bytes(struct.pack("<e", x), "little")
    raise LookupError(kind)


def is_place(kind: str) -> bool:
    """Whether a parameter of this type may be what is known only when a call is made."""
    return kind.startswith("*") or kind in ("i32", "i64", "u64")


def _bytes(kind: str) -> int:
    if kind == "nvTmaDesc":
        return 128
    if kind in _INTEGERS:
        return max(8, _INTEGERS[kind]) // 8
    return 8 if kind.startswith("*") or kind == "fp64" else 2 if kind in ("fp16", "bf16") else 4


def launch(kernel: Kernel, params: Sequence[Param]) -> Launch:
    """A launch with these parameters; LookupError if the kernel takes others, or it can't be known."""
    made = extension()
    params = *params, *_SCRATCH
    if made is None or not made.takes(kernel.function, tuple([_bytes(kind) for kind, _ in params])):
        raise LookupError(kernel)
    return Launch(kernel, params)


@lru_cache(maxsize=1)
def extension() -> Any:
    """The extension with the driver loaded, or None where it can't be built."""
    try:
        # Where Triton makes no launcher for each kernel, there is nothing that a program could stand for.
        from triton.backends.nvidia.driver import (  # type: ignore[import-untyped]
            include_dirs,
            make_launcher,  # noqa: F401
        )
        from triton.runtime.build import compile_module_from_src  # type: ignore[import-untyped]

        source = Path(__file__).with_suffix(".c").read_text()
        made = compile_module_from_src(source, "onchip_program", include_dirs=include_dirs)
        made.load("libcuda.so.1")
    except Exception as error:  # no compiler, no Python.h, no driver: whatever it is, calls go on without
        logging.getLogger(__name__).info("tapes call Triton's launchers: %s", error)
        return None
    return made


def build(steps: Sequence[Step], device: int, moved: Mapping[str, tuple[str, int]]) -> tuple[Any, list[str]]:
    """A program, and code for what it is to be called with behind the stream.

    `moved`: code that is to be another and so much more.
    """
    slots: dict[str, int] = {}
    maps: dict[Any, int] = {}

    def place(x: int | Place) -> tuple[int, int]:
        if not isinstance(x, Place):
            return -1, x
        code, more = moved.get(x.code, (x.code, 0))
        return slots.setdefault(code, len(slots)), x.more + more

    def packed(m: Map) -> Any:
        """As the driver takes it: the innermost dimension first, strides in bytes."""
        shape, strides = [place(x) for x in reversed(m.shape)], [m.element_size * x for x in reversed(m.strides[:-1])]
        box = tuple(reversed(m.box))
        return place(m.base), m.element_type, m.swizzle, m.padding, tuple(shape), tuple(strides), box

    def param(kind: str, x: int | Place | Map) -> tuple[int, int, int]:
        if isinstance(x, Map):
            return 2, maps.setdefault(packed(x), len(maps)), 0
        slot, more = place(x)
        return int(kind == "i32"), slot, more - (1 << 64) if more >= 1 << 63 else more

    made: list[Any] = []
    for step in steps:
        if isinstance(step, Launch):
            k = step.kernel
            params = tuple([param(kind, x) for kind, x in step.params])
            made.append((0, k.function, *k.grid, k.warps, k.shared, k.ctas, k.cooperative, k.pdl, params))
        elif isinstance(step, Fill):
            made.append((1, place(step.to), step.bytes))
        else:
            made.append((2, place(step.to), place(step.source), step.bytes))
    return extension().program(device, len(slots), tuple(maps), tuple(made)), list(slots)
