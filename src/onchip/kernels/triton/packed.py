"""A launch whose arguments are in memory in the driver's format: to repeat it, write what has changed and send it.

Triton's launchers take all arguments as objects, and make each descriptor anew.
"""

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from onchip.core.cuda_driver import Driver, LaunchConfig, driver

# A kernel's types of arguments in the letters of `struct`, by Triton's names.
_LETTERS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "fp64": "d",
}  # fmt: skip
_MAP = 128  # bytes of a descriptor, and more than its alignment
# The driver's numbers for types of elements (CUtensorMapDataType), where Triton's metadata has other numbers.
_ELEMENTS = {8: 10, 9: 8, 10: 9}
# CU_TENSOR_MAP_L2_PROMOTION_L2_128B, and _FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA.
_PROMOTION, _NAN = 2, 1
# Two addresses that differ in every bit that a device's addresses have.
_TRIED = 0x2AAA_AAAA_AAA0, 0x5555_5555_5550
# Drivers up to 13.1 set a wrong bit in descriptors of matrices with fewer bytes, according to CUTLASS and Triton 3.7.
_MENDED, _SMALL = 13010, 128 * 1024
# Options of a launch that only Triton's launcher knows how to make.
_UNKNOWN = ("launch_pdl", "launch_cooperative_grid", "global_scratch_size", "profile_scratch_size")
_CONFIG = -(-ctypes.sizeof(LaunchConfig) // 8)  # words of how to launch
# A descriptor's metadata: the entries that are used here, and those that may be there too.
_KNOWN_OF_MAP, _UNKNOWN_OF_MAP = {"elem_size", "elem_type", "swizzle", "block_size"}, ("fp4_padded", "is_im2col")


def refusal() -> str | None:
    """Why no launch can be packed, or None."""
    return None if driver() else "CUDA's driver is older than 12.4"


_Words = ctypes.c_uint64 * (_MAP // 8)


class Map:
    """A descriptor whose address and number of rows may change."""

    def __init__(self, used: Driver, meta: Any, x: Any, at: int) -> None:
        self.encode, self.at, self.address, self.rows = used.encode, at, 0, x.shape[0]
        rank, kind = len(x.shape), meta["elem_type"]
        words, halves = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        self.dims = words(*reversed(x.shape))
        strides = words(*[n * meta["elem_size"] for n in reversed(x.strides[:-1])])
        self.shape = strides, halves(*reversed(meta["block_size"])), halves(*[1] * rank)
        self.kind = _ELEMENTS.get(kind, kind), rank
        self.options = 0, meta["swizzle"], _PROMOTION, _NAN if x.padding == "nan" else 0
        # Bytes from one row to the next, and from the first of a row's elements to the last.
        self.row, *others = [n * meta["elem_size"] for n in x.strides]
        self.within = sum((n - 1) * step for n, step in zip(x.shape[1:], others, strict=True))
        self.mended = used.version <= _MENDED
        self.word: int | None = None
        """Where the address lies among the launch's words, if it may be written there."""

    def put(self, address: int, rows: int | None = None) -> None:
        if rows is not None and rows != self.rows:
            self.address, self.rows = 0, rows
            self.dims[len(self.dims) - 1] = rows
            ctypes.c_int32.from_address(self.at + _MAP).value = rows  # the first of its shape, which follows it
        if address == self.address:
            return
        self.address = 0
        if failed := self.encode(self.at, *self.kind, address, self.dims, *self.shape, *self.options):
            raise RuntimeError(f"CUDA's driver refused a descriptor with error {failed}")
        if self.mended and (self.rows - 1) * self.row + self.within + 1 < _SMALL:
            ctypes.c_uint64.from_address(self.at + 8).value &= ~(1 << 21)
        self.address = address

    def address_word(self) -> int | None:
        """Which of the descriptor's words is the address, if nothing else in it depends on the address.

        Found by trying: CUDA doesn't say how a descriptor is made up, only that a kernel may replace its address alone
        (PTX: tensormap.replace).
        """
        before, made = self.address, []
        if not before:
            return None
        try:
            for address in _TRIED:
                self.put(address)
                made.append(_Words.from_address(self.at)[:])
        except RuntimeError:
            return None
        finally:
            self.put(before)
        differ = [i for i, (x, y) in enumerate(zip(*made, strict=True)) if x != y]
        return differ[0] if [tuple([words[i] for words in made]) for i in differ] == [_TRIED] else None


class _Unknown(Exception):
    """Raised for an argument of a kind that isn't known here."""


class _Layout:
    """Where the parameters of a compiled kernel lie, without those that are constants to the compiler."""

    def __init__(self, used: Driver, compiled: Any, values: Sequence[Any]) -> None:
        metadata, self.kinds = compiled.metadata, [*compiled.src.signature.values()]
        self.maps = [*(getattr(metadata, "tensordesc_meta", None) or ())]
        if metadata.num_ctas != 1 or any(getattr(metadata, name, 0) for name in _UNKNOWN):
            raise _Unknown
        for meta in self.maps:
            if not meta or not meta.keys() >= _KNOWN_OF_MAP or any(meta.get(name) for name in _UNKNOWN_OF_MAP):
                raise _Unknown
        letters = [x for kind, value in zip(self.kinds, values, strict=True) for x in self._letters(kind, value)]
        letters += ["Q", "Q"]  # scratch: none
        sizes = [struct.calcsize("=" + x) for x in letters]
        self.offsets, self.size, self.format = list[int](), 0, "="
        for x, size in zip(letters, sizes, strict=True):
            self.offsets.append(-(-self.size // size) * size)
            self.format += f"{self.offsets[-1] - self.size}x{x}"
            self.size = self.offsets[-1] + size
        offset, found = ctypes.c_size_t(), ctypes.c_size_t()
        for i in range(len(sizes) + 1):
            failed = used.parameter(compiled.function, i, ctypes.addressof(offset), ctypes.addressof(found))
            if (failed == 0) != (i < len(sizes)) or (failed == 0 and found.value != sizes[i]):
                raise _Unknown
        self.letters = letters

    def _letters(self, kind: Any, value: Any) -> Iterator[str]:
        if isinstance(kind, tuple):
            for k, x in zip(kind, value, strict=True):
                yield from self._letters(k, x)
        elif kind.startswith("tensordesc"):
            if getattr(value, "round_f32_to_tf32", False):
                raise _Unknown
            yield from [f"{_MAP}s", *"i" * len(value.shape), *"q" * len(value.shape)]
        elif kind != "constexpr":
            letter = "Q" if kind.startswith("*") else _LETTERS.get(kind)
            if letter is None:
                raise _Unknown
            yield letter


class Changing(NamedTuple):
    """The arguments (or parts of tuples) for which each launch writes something, and where."""

    tensors: list[tuple[Tensor, int]]  # places of their addresses among the words
    descriptors: list[tuple[Any, Map]]
    tuples: list[tuple[Any, Callable[[Sequence[Any]], None]]]


class Packed:
    """A kernel's launch in memory.  One thread at a time writes and sends.

    The memory is `words` of 8 bytes each, of which one is the `stream`.  `written` is for the caller, who remembers
    there what it wrote, and `given` says where to write.
    """

    def __init__(self, used: Driver, compiled: Any, layout: _Layout, grid: Sequence[int], values: Any, device: int):
        # Before the arguments what aligns them, after them their addresses, and how to launch.
        size, count = -(-layout.size // 8), len(layout.offsets)
        self.words = (ctypes.c_uint64 * -(-(_MAP // 8 + size + count + _CONFIG) // 32 * 32))()
        address = ctypes.addressof(self.words)
        base = -(-address // _MAP) * _MAP
        self.start, self.layout = base - address, layout
        self.given = Changing([], [], [])
        flat: list[Any] = []
        metas = iter(layout.maps)
        for kind, value in zip(layout.kinds, values, strict=True):
            self._add(kind, value, flat, metas, used, base)
        struct.pack_into(layout.format, self.words, self.start, *flat, 0, 0)
        struct.pack_into(f"{count}Q", self.words, self.start + 8 * size, *[base + x for x in layout.offsets])
        for x, made in self.given.descriptors:
            made.put(x.base.data_ptr())
            if (word := made.address_word()) is not None:
                made.word = (made.at - address) // 8 + word
        self.name, self.written = compiled.src.fn.__name__, None
        (x, y, z), metadata = (*grid, 1, 1)[:3], compiled.metadata
        at = base + 8 * (size + count)
        config = LaunchConfig(x, y, z, 32 * metadata.num_warps, 1, 1, metadata.shared, None, None, 0)
        ctypes.memmove(at, ctypes.addressof(config), ctypes.sizeof(config))
        self.stream = (at - address + LaunchConfig.stream.offset) // 8
        self._sent = at, compiled.function, base + 8 * size, None
        self._launch, self.used, self.device = used.launch, used, device

    def _add(self, kind: Any, value: Any, flat: list[Any], metas: Iterator[Any], used: Driver, base: int) -> None:
        """Add an argument to the flat list."""
        if kind == "constexpr":
            return
        offset = self.layout.offsets[len(flat)]
        if isinstance(kind, tuple):
            self.given.tuples.append((value, partial(self._put, kind, len(flat))))
            for k, x in zip(kind, value, strict=True):
                self._add(k, x, flat, metas, used, base)
        elif isinstance(value, Tensor):
            self.given.tensors.append((value, (self.start + offset) // 8))
            # An empty one may have the address of what was freed.
            flat.append(value.data_ptr() if value.numel() else 0)
        elif kind.startswith("tensordesc"):
            self.given.descriptors.append((value, Map(used, next(metas), value, base + offset)))
            flat.extend((b"", *value.shape, *value.strides))
        else:
            flat.append(value)

    def _put(self, kinds: Sequence[Any], first: int, values: Sequence[Any]) -> None:
        """Write an argument that is a tuple of numbers."""
        layout, numbers = self.layout, [x for kind, x in zip(kinds, values, strict=True) if kind != "constexpr"]
        for i, x in enumerate(numbers, first):
            struct.pack_into("=" + layout.letters[i], self.words, self.start + layout.offsets[i], x)

    def send(self) -> None:
        """Launch with the arguments as written."""
        if self._launch(*self._sent):
            self.used.checked(self.name, self.device, self._launch, *self._sent)

    @staticmethod
    def of(compiled: Any, grid: Sequence[int], values: Sequence[Any], device: int) -> "Packed | None":
        """The launch with these values; None if it isn't known how the driver takes this kernel's arguments."""
        used = driver()
        if used is None:
            return None
        known = _LAYOUTS.get(id(compiled))
        if known is None:
            try:
                layout = _Layout(used, compiled, values)
            except _Unknown:
                layout = None
            known = _LAYOUTS[id(compiled)] = compiled, layout
        return None if known[1] is None else Packed(used, compiled, known[1], grid, values, device)


# By the id of what Triton compiled, which is kept so that nothing else gets that id.
_LAYOUTS: dict[int, tuple[Any, _Layout | None]] = {}
