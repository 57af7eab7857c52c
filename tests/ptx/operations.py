"""What translated PTX calls: the parts of instructions that NumPy has no function of."""

import numpy as np

from ptx import machine
from ptx.machine import LANES

LANE, ON = np.arange(LANES, dtype=np.uint32), np.ones(LANES, bool)


def _param(x, dtype):
    dtype = np.dtype(dtype)
    bits = int(np.float32(x).view(np.uint32)) if isinstance(x, float) else int(x) & (2 ** (8 * dtype.itemsize) - 1)
    return np.full(LANES, bits, f"u{dtype.itemsize}").view(dtype)


def _div(a, b):
    if a.dtype.kind == "f":
        return a / b
    b = np.where(b == 0, a.dtype.type(1), b)
    return (np.sign(a) * np.sign(b) * (np.abs(a.astype("i8")) // np.abs(b.astype("i8")))).astype(a.dtype)


def _rem(a, b):
    return a - _div(a, b) * b


def _shift(a, by, left):
    width = 8 * a.dtype.itemsize
    clamped = np.minimum(by, width - 1).astype(a.dtype)
    made = a << clamped if left else a >> clamped
    return np.where((by >= width) & (left or a.dtype.kind == "u"), a.dtype.type(0), made)


def _round(x):
    """float32 to the 16 bits of a bfloat16, to the nearest and even."""
    bits = x.view(np.uint32)
    made = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # only a NaN's wraps around
    return np.where(np.isnan(x), np.uint32(0x7FFF), made)


def _pack(high, low, kind):
    if kind == "bf16x2":
        return (_round(high) << 16) | _round(low)
    high, low = (x.astype(np.float16).view(np.uint16).astype(np.uint32) for x in (high, low))
    return (high << 16) | low


def _eight_bits(x):
    """float32 to E4M3; what is beyond its range is its largest number."""
    return np.clip(x, -448, 448).astype(machine.float8_e4m3fn).view(np.uint8).astype(np.uint16)


def _largest(a, b):
    """Of two pairs of bfloat16 the larger magnitudes; a sign is that of the product."""
    a, b = (np.ascontiguousarray(x).view(np.uint16) for x in (a, b))
    largest, sign = np.maximum(a & 0x7FFF, b & 0x7FFF), (a ^ b) & 0x8000
    return np.where(largest > 0x7F80, 0x7FFF, largest | sign).astype(np.uint16).view(np.uint32)


def _sum_of_pairs(a, b):
    """Of two pairs of bfloat16."""
    high, low = ((x & 0xFFFF0000).view(np.float32) for x in (a, b)), ((x << 16).view(np.float32) for x in (a, b))
    return _pack(sum(high), sum(low), "bf16x2")


def _permute(a, b, selector):
    together = np.stack([a, b], 1).view(np.uint8)
    which = (np.broadcast_to(selector, a.shape)[:, None] >> np.arange(0, 16, 4, np.uint32)) & 15
    made = np.take_along_axis(together, (which & 7).astype(np.intp), 1)
    made = np.where(which & 8, (made >> 7) * 255, made).astype(np.uint8)  # its sign
    return np.ascontiguousarray(made).view(np.uint32)[:, 0]


def _stmatrix(w, block, addresses, values, transposed):
    halves = np.stack(values).view(np.uint16).reshape(-1, 8, 8)  # row lane / 4, columns 2 (lane % 4) and one more
    matrices = np.ascontiguousarray(halves.transpose(0, 2, 1) if transposed else halves)
    rows = addresses[: 8 * len(values)]
    at = rows[:, None] + np.arange(0, 16, 4, dtype=np.uint64)
    block.store_shared(w, at.ravel(), slice(None), matrices.view(np.uint32).ravel())


def _ldmatrix(w, block, addresses, count, transposed):
    made = []
    for i in range(count):
        rows = addresses[8 * i : 8 * i + 8].astype(np.int64)
        at = rows[:, None] + 2 * np.arange(8)[None, :]
        matrix = block.read_shared(w, at.ravel(), np.uint16).reshape(8, 8)
        matrix = np.ascontiguousarray(matrix.T if transposed else matrix)
        made.append(matrix.reshape(-1).view(np.uint32).copy())
    return made
