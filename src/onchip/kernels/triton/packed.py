"""A launch whose arguments lie in memory as the driver takes them: to repeat it is to write what is new and send it.

Triton's launchers take all arguments as objects, and make each descriptor anew.
"""

import ctypes
from collections.abc import Iterator, Sequence
from functools import partial
from threading import Lock
from typing import Any

from onchip.core.cuda_driver import Driver, LaunchConfig, driver

# Bytes and `struct`'s letter of what a kernel takes, by Triton's names.
_NUMBERS = {
    "i1": (1, "b"), "i8": (1, "b"), "i16": (2, "h"), "i32": (4, "i"), "i64": (8, "q"), "u1": (1, "B"), "u8": (1, "B"),
    "u16": (2, "H"), "u32": (4, "I"), "u64": (8, "Q"), "fp32": (4, "f"), "fp64": (8, "d"),
}  # fmt: skip
_ADDRESS = 8, "Q"
_MAP = 128  # bytes of a descriptor, and more than it is aligned to
# Types of elements as the driver has them (CUtensorMapDataType), where Triton's metadata has other numbers.
_ELEMENTS = {8: 10, 9: 8, 10: 9}
# CU_TENSOR_MAP_L2_PROMOTION_L2_128B, and _FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA.
_PROMOTION, _NAN = 2, 1
# What a launch has beside that is made by Triton's launcher alone.
_UNKNOWN = ("launch_pdl", "launch_cooperative_grid", "global_scratch_size", "profile_scratch_size")


class Number:
    """An argument that is a number or an address, or a part of one that is a tuple."""

    def __init__(self, view: memoryview, place: int) -> None:
        self.view, self.place = view, place

    def put(self, value: Any) -> None:
        self.view[self.place] = value

    def fill(self, value: Any) -> None:
        if hasattr(value, "data_ptr"):  # of an empty tensor it may be the address of what was freed
            value = value.data_ptr() if value.numel() else 0
        self.put(value)


class Parts(list[Any]):
    """An argument that is a tuple: what is None in here is a constant to the compiler."""

    def put(self, values: Sequence[Any]) -> None:
        for part, value in zip(self, values, strict=True):
            if part is not None:
                part.put(value)

    def fill(self, values: Sequence[Any]) -> None:
        for part, value in zip(self, values, strict=True):
            if part is not None:
                part.fill(value)


class Map:
    """A descriptor, of which its address and the number of its rows may change."""

    def __init__(self, used: Driver, meta: Any, x: Any, at: int, sizes: Sequence[Number], steps: Sequence[Number]):
        rank = len(x.block_shape)
        self.encode, self.at, self.rows, self.rest = used.encode, at, sizes[0], [*x.shape[1:]]
        for number, n in zip([*sizes, *steps], [*x.shape, *x.strides], strict=True):
            number.put(n)
        words, halves = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        self.dims = words(*reversed(x.shape))
        strides = words(*[n * meta["elem_size"] for n in reversed(x.strides[:-1])])
        kind = meta["elem_type"]
        self.shape = strides, halves(*reversed(meta["block_size"])), halves(*[1] * rank)
        self.before = _ELEMENTS.get(kind, kind), rank
        self.after = 0, meta["swizzle"], _PROMOTION, _NAN if x.padding == "nan" else 0

        self.address: int | None = None
        self.there = x.shape[0]

    def put(self, address: int, rows: int | None = None) -> None:
        if rows is not None and rows != self.there:
            self.address, self.there = None, rows
            self.rows.put(rows)
            self.dims[len(self.dims) - 1] = rows
        if address == self.address:
            return
        self.address = None
        if failed := self.encode(self.at, *self.before, address, self.dims, *self.shape, *self.after):
            raise RuntimeError(f"CUDA's driver refused a descriptor with error {failed}")
        self.address = address

    def fill(self, x: Any) -> None:
        self.put(x.base.data_ptr())


class _Unknown(Exception):
    """An argument of a kind that isn't known here."""


def _leaves(kind: Any, value: Any) -> Iterator[tuple[int, str]]:
    """Bytes and `struct`'s letter of the parameters that an argument is, in the order of Triton's signature."""
    if isinstance(kind, tuple):
        for k, x in zip(kind, value, strict=True):
            yield from _leaves(k, x)
    elif kind.startswith("tensordesc"):
        rank = len(value.shape)
        yield from [(_MAP, "B"), *[_NUMBERS["i32"]] * rank, *[_NUMBERS["i64"]] * rank]
    elif kind != "constexpr":
        found = _ADDRESS if kind.startswith("*") else _NUMBERS.get(kind)
        if found is None:
            raise _Unknown
        yield found


class Packed:
    """The arguments of a kernel's launch in memory.  One thread at a time has its `lock`, writes to `slots` and sends.

    A slot is None where an argument is a constant to the compiler.  `written` is for the caller, to know what it wrote.
    """

    def __init__(self, used: Driver, compiled: Any, grid: Sequence[int], values: Sequence[Any], device: int) -> None:
        metadata, arguments = compiled.metadata, [*zip(compiled.src.signature.values(), values, strict=True)]
        leaves = [x for kind, value in arguments for x in _leaves(kind, value)] + [_ADDRESS] * 2  # scratch: none
        self.sizes, offsets, end = [size for size, _ in leaves], [], 0
        for size in self.sizes:
            offsets.append(-(-end // size) * size)
            end = offsets[-1] + size
        self.memory = ctypes.create_string_buffer(end + _MAP)
        base = -(-ctypes.addressof(self.memory) // _MAP) * _MAP
        whole = memoryview(self.memory).cast("B")[base - ctypes.addressof(self.memory) :]
        letters: Any = "bhiqBHIQfd"
        views = {letter: whole[: -(-end // 8) * 8].cast(letter) for letter in letters}
        self.words = views["Q"]  # addresses, by the places of their slots
        numbers = iter([Number(views[x], at // size) for (size, x), at in zip(leaves, offsets, strict=True)])
        maps = iter(getattr(metadata, "tensordesc_meta", None) or ())

        def slot(kind: Any, value: Any) -> Any:
            if isinstance(kind, tuple):
                return Parts([slot(k, x) for k, x in zip(kind, value, strict=True)])
            if kind == "constexpr":
                return None
            if not kind.startswith("tensordesc"):
                return next(numbers)
            meta, at = next(maps, None), base + _MAP * next(numbers).place
            if meta is None or meta.get("fp4_padded"):
                raise _Unknown
            sizes, steps = ([next(numbers) for _ in value.shape] for _ in range(2))
            return Map(used, meta, value, at, sizes, steps)

        self.slots = [slot(kind, value) for kind, value in arguments]
        self.name, self.lock, self.written = compiled.src.fn.__name__, Lock(), None
        x, y, z = (*grid, 1, 1)[:3]
        self.config = LaunchConfig(x, y, z, 32 * metadata.num_warps, 1, 1, metadata.shared, None, None, 0)
        self.pointers = (ctypes.c_void_p * len(offsets))(*[base + x for x in offsets])
        function = compiled.function
        config, pointers, launch = ctypes.addressof(self.config), ctypes.addressof(self.pointers), used.launch
        self._launch = partial(launch, config, function, pointers, None)
        self.used, self.device = used, device

    def send(self) -> None:
        """Launch what was written."""
        if self._launch():
            self.used.checked(self.name, self.device, self._launch)

    @staticmethod
    def of(compiled: Any, grid: Sequence[int], values: Sequence[Any], device: int) -> "Packed | None":
        """With these values; None where it isn't known how the driver takes this kernel's arguments."""
        used, metadata = driver(), compiled.metadata
        if used is None or metadata.num_ctas != 1 or any(getattr(metadata, name, 0) for name in _UNKNOWN):
            return None
        try:
            made = Packed(used, compiled, grid, values, device)
        except (_Unknown, AttributeError):
            return None
        offset, size, sizes = ctypes.c_size_t(), ctypes.c_size_t(), made.sizes
        for i in range(len(sizes) + 1):
            found = used.parameter(compiled.function, i, ctypes.addressof(offset), ctypes.addressof(size))
            if (found == 0) != (i < len(sizes)) or (found == 0 and size.value != sizes[i]):
                return None
        Parts(made.slots).fill(values)
        return made
