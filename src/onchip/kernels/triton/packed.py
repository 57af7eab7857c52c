"""A launch whose arguments lie in memory as the driver takes them: to repeat it is to write what is new and call the driver.

Triton's launchers take all arguments as objects, and make each descriptor anew: 10 us where this takes 3.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

# Bytes and `struct`'s letter of what a kernel takes, by Triton's names.
_NUMBERS = {
    "i1": (1, "b"), "i8": (1, "b"), "i16": (2, "h"), "i32": (4, "i"), "i64": (8, "q"), "u1": (1, "B"), "u8": (1, "B"),
    "u16": (2, "H"), "u32": (4, "I"), "u64": (8, "Q"), "fp32": (4, "f"), "fp64": (8, "d"),
}  # fmt: skip
_MAP = 128  # bytes of a descriptor, and more than it is aligned to
# Types of elements as the driver has them, by their names in Triton's metadata.
_ELEMENT = dict(zip(range(16), range(16), strict=True)) | {8: 10, 9: 8, 10: 9}
# CU_TENSOR_MAP_L2_PROMOTION_L2_128B, and _FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA.
_PROMOTION, _NAN = 2, 1
# What a launch has beside that is made by Triton's launcher alone.
_UNKNOWN = ("launch_pdl", "launch_cooperative_grid", "global_scratch_size", "profile_scratch_size")


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *[(name, ctypes.c_uint) for name in ("x", "y", "z", "block_x", "block_y", "block_z", "shared")],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("number", ctypes.c_uint),
    )


class _Driver(NamedTuple):
    launch: Any
    encode: Any
    parameter: Any


@lru_cache(maxsize=1)
def _driver() -> _Driver | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        pointer, number = ctypes.c_void_p, ctypes.c_int
        launch = ctypes.CFUNCTYPE(number, pointer, pointer, pointer, pointer)(("cuLaunchKernelEx", library))
        kinds = [pointer, number, number, pointer, *[ctypes.c_void_p] * 4, *[number] * 4]
        encode = ctypes.CFUNCTYPE(number, *kinds)(("cuTensorMapEncodeTiled", library))
        parameter = ctypes.CFUNCTYPE(number, pointer, ctypes.c_size_t, pointer, pointer)(
            ("cuFuncGetParamInfo", library)
        )
    except (OSError, AttributeError):  # no driver, or one that is older than 12.4
        return None
    return _Driver(launch, encode, parameter)


class Number(NamedTuple):
    """An argument that is a number or an address, or a part of one."""

    kind: str
    place: int  # among numbers of its size


class Map:
    """A descriptor, which is made anew where its address or its shape is another."""

    def __init__(self, packed: "Packed", meta: Any, x: Any, at: int) -> None:
        rank = len(x.block_shape)
        self.packed, self.at, self.rank, self.element_bytes = packed, at, rank, meta["elem_size"]
        self.sizes: list[int] = []  # parameters that are its shape, as the next are its strides
        self.steps: list[int] = []
        self.dims, self.strides = (ctypes.c_uint64 * rank)(), (ctypes.c_uint64 * rank)()
        self.box = (ctypes.c_uint32 * rank)(*reversed(meta["block_size"]))
        self.ones = (ctypes.c_uint32 * rank)(*[1] * rank)
        self.element, self.swizzle = _ELEMENT[meta["elem_type"]], meta["swizzle"]
        self.fill, self.given_strides = _NAN if x.padding == "nan" else 0, [*x.strides]
        self.address: int | None = None
        self.shape: Sequence[int] = ()

    def put(self, address: int, shape: Sequence[int]) -> None:
        """Write that of the same strides, at this address."""
        if address == self.address and shape == self.shape:
            return
        packed, offsets = self.packed, self.packed.layout.offsets
        if shape != self.shape:
            for i, n, k, stride in zip(self.sizes, shape, self.steps, self.given_strides, strict=True):
                packed.views["i"][offsets[i] // 4], packed.views["q"][offsets[k] // 8] = n, stride
            self.dims[:] = [*reversed(shape)]
            self.strides[: self.rank - 1] = [x * self.element_bytes for x in reversed(self.given_strides[:-1])]
        failed = packed.driver.encode(
            packed.base + offsets[self.at], self.element, self.rank, address, self.dims, self.strides, self.box,
            self.ones, 0, self.swizzle, _PROMOTION, self.fill,
        )  # fmt: skip
        self.address, self.shape = None if failed else address, [*shape]
        packed.failed = packed.failed or failed


class _Unknown(Exception):
    """A parameter of a kind that isn't known here."""


class _Layout:
    """Where parameters lie, in the order of Triton's signature."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.offsets: list[int] = []
        self.end = 0

    def number(self, kind: str) -> int:
        """Of a new parameter."""
        size = _MAP if kind == "map" else 8 if kind.startswith("*") else _NUMBERS[kind][0] if kind in _NUMBERS else 0
        if not size:
            raise _Unknown(kind)
        self.offsets.append(-(-self.end // size) * size)
        self.sizes.append(size)
        self.end = self.offsets[-1] + size
        return len(self.sizes) - 1


class Packed:
    """The arguments of a kernel's launch in memory.  One thread at a time has its `lock`, writes and sends."""

    def __init__(self, driver: _Driver, compiled: Any, grid: Sequence[int], values: Sequence[Any]) -> None:
        metadata, layout = compiled.metadata, _Layout()
        descriptors = iter(getattr(metadata, "tensordesc_meta", None) or ())
        self.driver, self.lock, self.layout = driver, Lock(), layout
        self.name, self.failed = compiled.src.fn.__name__, 0
        kinds = compiled.src.signature.values()
        slots = [self._slot(kind, value, descriptors) for kind, value in zip(kinds, values, strict=True)]
        scratch = [layout.number("*"), layout.number("*")]
        self.memory = ctypes.create_string_buffer(layout.end + _MAP)
        self.base = -(-ctypes.addressof(self.memory) // _MAP) * _MAP
        first = self.base - ctypes.addressof(self.memory)
        whole = memoryview(self.memory).cast("B")[first : first + -(-layout.end // 8) * 8]
        self.views = {letter: whole.cast(letter) for letter in "bhiqBHIQfd"}
        self.words = self.views["Q"]
        self.pointers = (ctypes.c_void_p * len(layout.offsets))(*[self.base + x for x in layout.offsets])
        x, y, z = (*grid, 1, 1)[:3]
        self.config = _Config(x, y, z, 32 * metadata.num_warps, 1, 1, metadata.shared, None, None, 0)
        self.arguments = ctypes.addressof(self.config), compiled.function, ctypes.addressof(self.pointers), None
        self.slots = slots
        for i in scratch:
            self.words[layout.offsets[i] // 8] = 0

    def _slot(self, kind: Any, value: Any, descriptors: Iterator[Any]) -> Any:
        if isinstance(kind, tuple):
            return [self._slot(k, v, descriptors) for k, v in zip(kind, value, strict=True)]
        if kind == "constexpr":
            return None
        if not kind.startswith("tensordesc"):
            return Number(kind, self.layout.offsets[self.layout.number(kind)] // self.layout.sizes[-1])
        meta = next(descriptors, None)
        if meta is None or meta.get("fp4_padded"):
            raise _Unknown(kind)
        made = Map(self, meta, value, self.layout.number("map"))
        made.sizes = [self.layout.number("i32") for _ in value.shape]
        made.steps = [self.layout.number("i64") for _ in value.shape]
        return made

    def put(self, slot: Any, value: Any) -> None:
        """Write an argument, or a part of one that is a tuple."""
        if slot is None:
            return
        if isinstance(slot, list):
            for part, x in zip(slot, value, strict=True):
                self.put(part, x)
        elif isinstance(slot, Map):
            slot.put(value.base.data_ptr(), value.shape)
        elif slot.kind.startswith("*"):
            self.words[slot.place] = value if type(value) is int else 0 if value is None else value.data_ptr()
        else:
            self.views[_NUMBERS[slot.kind][1]][slot.place] = value

    @staticmethod
    def of(compiled: Any, grid: Sequence[int], values: Sequence[Any]) -> "Packed | None":
        """With these values; None where it isn't known how the driver takes this kernel's arguments."""
        driver, metadata = _driver(), compiled.metadata
        if driver is None or metadata.num_ctas != 1 or any(getattr(metadata, name, 0) for name in _UNKNOWN):
            return None
        try:
            made = Packed(driver, compiled, grid, values)
        except (_Unknown, AttributeError):
            return None
        offset, size, sizes = ctypes.c_size_t(), ctypes.c_size_t(), made.layout.sizes
        for i in range(len(sizes) + 1):
            found = driver.parameter(compiled.function, i, ctypes.addressof(offset), ctypes.addressof(size))
            if (found == 0) != (i < len(sizes)) or (found == 0 and size.value != sizes[i]):
                return None
        for slot, value in zip(made.slots, values, strict=True):
            made.put(slot, value)
        return made

    def send(self, stream: int) -> None:
        """Launch what was written."""
        self.config.stream = stream
        failed = self.failed or self.driver.launch(*self.arguments)
        self.failed = 0
        if failed:
            raise RuntimeError(f"{self.name}: the driver refused the launch, CUDA error {failed}")
