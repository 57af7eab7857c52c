"""A streaming multiprocessor of Hopper, as far as the kernels need one: warps, memory, barriers, copies, products.

Everything asynchronous happens late, and in any order that the hardware allows, drawn from a seed.  A copy by TMA
happens some time after it was issued, with NaN in its place until then; a product of a warpgroup when it is waited for,
or at once, with NaN in its registers until then.  So a missing wait shows as NaN, and a block that is overwritten while
somebody reads it shows as a wrong number.  What can't be right raises `Fault`.
"""

import ctypes
import random
from collections.abc import Callable
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
from ml_dtypes import float8_e4m3fn

LANES = 32
SHARED_BASE = 1024  # where a block's shared memory begins: what is below is not its own
LANE = np.arange(LANES)
PARAM_BASE = 1 << 60
PARAM_STEP = 256
# Blocks that run at the same time, where they wait for one another, and how often one of them looks.
AT_ONCE = 3
MOST_LOOKS = 100000


class _Arrival:
    """Of a warp that doesn't wait for the others."""

    released = False


class Fault(Exception):
    """What hardware would do wrong, or never end."""


class TensorMap(NamedTuple):
    """What a descriptor for TMA says, in elements; innermost last."""

    base: int
    """The address of its first byte."""
    element: int
    """Bytes."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    """Bytes of a row of the pattern: 128, 64, 32, or 0."""

    def places(self, coordinates):
        """Of each byte of a box whether it is inside, and its address."""
        index = np.zeros(self.box, np.int64)
        inside = np.ones(self.box, bool)
        for axis, (start, size, length, stride) in enumerate(
            zip(coordinates, self.box, self.shape, self.strides, strict=True)
        ):
            at = (start + np.arange(size)).reshape([-1 if a == axis else 1 for a in range(len(self.box))])
            inside &= (at >= 0) & (at < length)
            index += at * stride
        index = self.base + (index * self.element)[..., None] + np.arange(self.element)
        return np.broadcast_to(inside[..., None], index.shape).ravel(), index.ravel()


def swizzled(address, width):
    """Where the hardware puts a byte of a pattern of so many bytes to a row."""
    mask = {128: 0x70, 64: 0x30, 32: 0x10, 0: 0}[width]
    return address ^ ((address >> 3) & mask)


class Memory:
    """The tensors that a launch was given, by address."""

    def __init__(self):
        self.regions = []

    def add(self, address, size):
        if size and not any(start <= address and address + size <= end for start, end, _ in self.regions):
            self.regions = [x for x in self.regions if not (address <= x[0] and x[1] <= address + size)]
            bytes_ = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            self.regions.append((address, address + size, bytes_))

    def find(self, address, size):
        for start, end, data in self.regions:
            if start <= address and address + size <= end:
                return start, end, data
        raise Fault(f"{size} bytes at {address:#x} are in no tensor")

    def load(self, addresses, mask, dtype, count=1):
        """`count` numbers that follow each other, of each lane."""
        size = np.dtype(dtype).itemsize
        made = [np.zeros(LANES, dtype) for _ in range(count)]
        for data, lanes, at in self._parts(addresses, mask, size, count):
            for i, x in enumerate(made):
                x[lanes] = data.view(dtype)[at + i]
        return made

    def store(self, addresses, mask, values):
        dtype = values[0].dtype
        for data, lanes, at in self._parts(addresses, mask, dtype.itemsize, len(values)):
            for i, x in enumerate(values):
                data.view(dtype)[at + i] = x[lanes]

    def add_to(self, addresses, mask, values):
        """What was there before."""
        dtype = values[0].dtype
        found = self.load(addresses, mask, dtype, len(values))
        for data, lanes, at in self._parts(addresses, mask, dtype.itemsize, len(values)):
            for i, x in enumerate(values):
                for where, number in zip(at + i, x[lanes], strict=True):  # two lanes may add to one
                    data.view(dtype)[where] += number
        return found

    def bytes_at(self, addresses):
        """By tensor: its bytes, which of the addresses are there, and where."""
        left = np.ones(len(addresses), bool)
        while left.any():
            start, end, data = self.find(int(addresses[left.argmax()]), 1)
            here = left & (addresses >= start) & (addresses < end)
            yield data, here, addresses[here] - start
            left &= ~here

    def _parts(self, addresses, mask, size, count):
        """By tensor: its bytes, the lanes, and which of its numbers these have."""
        left = mask
        while (first := left.argmax()) or left[0]:
            start, end, data = self.find(int(addresses[first]), size * count)
            lanes = left & (addresses >= start) & (addresses <= end - size * count)
            at = (addresses[lanes] - np.uint64(start)).astype(np.int64)
            if (at % (size * count)).any():
                raise Fault(f"an address is not aligned to {size * count} bytes")
            yield data[: len(data) // size * size], lanes, at // size
            left = left & ~lanes


class Barrier:
    """An mbarrier."""

    def __init__(self, count):
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0

    def arrive(self, times=1, bytes_=0):
        self.bytes += bytes_
        self.pending -= times
        if self.pending < 0:
            raise Fault("more arrivals at an mbarrier than it counts")
        self._turn()

    def complete(self, bytes_):
        self.bytes -= bytes_
        self._turn()

    def _turn(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count

    def has_passed(self, parity):
        return self.phase & 1 != parity


class Product(NamedTuple):
    """A product of a warpgroup that was issued: one warp's rows of it."""

    key: tuple[int, ...]
    """The registers of the result."""
    multiply: Callable[[list[np.ndarray]], list[np.ndarray]]
    """Their new values of the old ones."""


class Warp:
    """Registers, what is in flight, and what it waits for."""

    def __init__(self, block, number, registers):
        self.block = block
        self.number = number
        self.R = [None] * registers
        self.at = 0
        self.blocked = None  # what says whether it may go on
        self.released = False  # from a barrier of warps
        self.products = []  # lists of Product, a group each; the last one is open
        self.results = {}  # of products in flight, by their registers
        self.stores = []  # lists of copies to global memory, the last one open
        self.fetches = [[]]  # lists of copies by the warp's own threads, the last one open
        self.leader = block.chance.randrange(LANES)

    # ------------------------------------------------------------------------------------------------------- products

    def begin(self, product, registers):
        if not self.products:
            self.products.append([])
        if product.key not in self.results:
            if any(set(product.key) & set(other) for other in self.results):
                raise Fault("a product's registers are partly another's that is in flight")
            self.results[product.key] = [registers, 0]
        self.results[product.key][1] += 1
        for r in product.key:
            self.R[r] = POISON
        self.products[-1].append(product)
        if self.block.chance.random() < 0.3:  # or later
            self.block.later.append((self, None))

    def commit(self):
        self.products.append([])

    def wait_products(self, left):
        while len(self.products) > left + 1:
            for product in self.products.pop(0):
                self._end(product)

    def _end(self, product):
        result = self.results[product.key]
        result[0] = product.multiply(result[0])
        result[1] -= 1
        if not result[1]:
            del self.results[product.key]
            for r, x in zip(product.key, result[0], strict=True):
                self.R[r] = x

    # ------------------------------------------------------------------------------------- copies to global memory

    def store_later(self, copy):
        if not self.stores:
            self.stores.append([])
        self.stores[-1].append(copy)
        self.block.later.append((self, copy))

    def commit_stores(self):
        self.stores.append([])

    def stores_left(self):
        return len([group for group in self.stores[:-1] if group])

    # ------------------------------------------------------------------------------- copies that threads make, cp.async

    def fetch_later(self, copy):
        self.fetches[-1].append(copy)
        if self.block.chance.random() < 0.3:  # or later
            self.block.later.append((self, copy))

    def commit_fetches(self):
        self.fetches.append([])

    def wait_fetches(self, left):
        while len(self.fetches) > left + 1:
            for copy in self.fetches.pop(0):
                copy()


POISON = np.full(LANES, 0xFFFFFFFF, np.uint32)  # NaN


class Block:
    """A block of threads."""

    def __init__(self, program, memory, maps, params, grid, at, shared, chance):
        self.memory, self.maps, self.params = memory, maps, params
        self.chance = chance
        self.grid, self.position = grid, at
        self.shared = np.full(SHARED_BASE + shared, 0xFF, np.uint8)
        self.writer = np.zeros(SHARED_BASE + shared, np.uint8)  # the warp whose store TMA and products can't see yet
        self.reader = np.zeros(SHARED_BASE + shared, np.uint8)  # the warp whose load may still be on its way
        self.barriers = {}
        self.meetings = {}  # number -> warps
        self.later = []  # copies that were issued and aren't done
        self.looks = 0
        self.program = program
        self.warps = [Warp(self, i, program.registers) for i in range(program.threads // LANES)]

    def steps(self):
        """Run it; between its steps, others may run."""
        code, chance = self.program.code, self.chance
        alive = list(self.warps)
        while alive:
            yield
            ready = [w for w in alive if w.blocked is None or w.blocked()]
            if self.later and (not ready or chance.random() < 0.25):
                self._do_one()
                continue
            if not ready:
                raise Fault(f"all wait: {[(w.number, self.program.lines[w.at]) for w in alive]}")
            w = chance.choice(ready)
            w.blocked = None
            for _ in range(chance.choice((1, 1, 4, 16))):  # some run ahead
                w.at = code[w.at](w, self)
                if w.at < 0:
                    alive.remove(w)
                    w.wait_products(0)
                    self._meet_again(alive)
                    break
                if w.blocked is not None:
                    break
        while self.later:
            self._do_one()

    def _do_one(self):
        """A copy, or a warp's next product, that is under way ends."""
        w, copy = self.later.pop(self.chance.randrange(len(self.later)))
        if copy is None:
            if w.products and w.products[0]:
                w._end(w.products[0].pop(0))
        else:
            copy()

    # --------------------------------------------------------------------------------------------- barriers of warps

    def meet(self, w, number, warps):
        """Whether all have come."""
        if w.released:
            w.released = False
            return True
        there, _ = self.meetings.setdefault(number, (set(), warps))
        there.add(w)
        self.meetings[number] = there, warps
        self._release(number, [x for x in self.warps if x.at >= 0])
        if w.released:
            w.released = False
            return True
        w.blocked = lambda: w.released
        return False

    def come(self, number, warps):
        """A warp counts among those that come, and goes on."""
        there, _ = self.meetings.setdefault(number, (set(), warps))
        there.add(_Arrival())
        self._release(number, [])

    def _release(self, number, alive):
        there, warps = self.meetings[number]
        if len(there) >= (len(alive) if warps is None else warps):
            for x in there:
                x.released = True
            del self.meetings[number]

    def _meet_again(self, alive):
        for number in list(self.meetings):
            self._release(number, alive)

    # ------------------------------------------------------------------------------------------------- shared memory

    def load_shared(self, w, addresses, mask, dtype):
        made = np.zeros(LANES, dtype)
        made[mask] = self.read_shared(w, addresses[mask], dtype)
        return made

    def read_shared(self, w, addresses, dtype):
        """What a warp reads.  No barrier and no arrival behind it says that it has come: TMA may overtake it."""
        size = np.dtype(dtype).itemsize
        found = self._shared(addresses, size, dtype)
        self.reader[(addresses.astype(np.int64)[:, None] + np.arange(size)).ravel()] = w.number + 1
        return found

    def _shared(self, addresses, size, dtype):
        if len(addresses) and (addresses.min() < SHARED_BASE or addresses.max() + size > len(self.shared)):
            raise Fault("an address is outside of shared memory")
        if int(np.bitwise_or.reduce(addresses)) % size:
            raise Fault(f"an address in shared memory is not aligned to {size} bytes")
        return self.shared.view(dtype)[addresses.astype(np.int64) // size]

    def store_shared(self, w, addresses, mask, values):
        size = values.dtype.itemsize
        at = addresses[mask].astype(np.int64)
        self._shared(at, size, values.dtype)
        self.shared.view(values.dtype)[at // size] = values[mask]
        self.writer[(at[:, None] + np.arange(size)).ravel()] = w.number + 1

    def fetch(self, w, to, source, size, mask, given):
        """Each lane of the mask copies so many bytes, which come at any time before it waits, the first `given` of them
        from memory and zeros behind."""
        at, source, given = to[mask].astype(np.int64), source[mask], given[mask]
        left = [True]

        def copy():
            if not left[0]:
                return
            left[0] = False
            for place, start, n in zip(at, source, given, strict=True):
                bytes_ = np.zeros(size, np.uint8)
                if n:
                    ((data, _, where),) = self.memory.bytes_at(np.array([start], np.uint64))
                    bytes_[:n] = data[int(where[0]) :][:n]
                self._shared(np.array([place], np.uint64), size, np.dtype((np.void, size)))
                self.shared[place : place + size] = bytes_

        w.fetch_later(copy)

    def fence(self, w):
        self.writer[self.writer == w.number + 1] = 0
        self.reader[self.reader == w.number + 1] = 0

    def read_asynchronously(self, at, dtype=np.uint8):
        """What TMA or a product reads."""
        if self.writer[at].any():
            raise Fault("TMA or a product reads what was stored without a fence behind it")
        return self.shared.view(dtype)[at // np.dtype(dtype).itemsize]

    # -------------------------------------------------------------------------------------------------------- barriers

    def barrier(self, address):
        found = self.barriers.get(int(address))
        if found is None:
            raise Fault("no mbarrier is there")
        return found

    def wait(self, w, address, parity):
        barrier = self.barrier(address)
        if barrier.has_passed(parity):
            return True
        w.blocked = lambda: barrier.has_passed(parity)
        return False

    # ----------------------------------------------------------------------------------------------------------- TMA

    def map_at(self, address):
        return self.maps[(int(address) - PARAM_BASE) // PARAM_STEP]

    def _in_shared(self, tensor_map, address):
        n = int(np.prod(tensor_map.box)) * tensor_map.element
        if address % (128 if tensor_map.swizzle == 0 else 8 * tensor_map.swizzle):
            raise Fault("a block in shared memory isn't aligned as its pattern is")
        return swizzled(address + np.arange(n), tensor_map.swizzle)

    def copy_in(self, map_address, coordinates, address, barrier_address):
        """Begin a copy to shared memory."""
        tensor_map, barrier = self.map_at(map_address), self.barrier(barrier_address)
        at = self._in_shared(tensor_map, int(address))
        if self.reader[at].any():
            raise Fault("TMA overwrites what was loaded without a fence behind it")
        self.shared[at] = 0xFF

        def copy():
            inside, addresses = tensor_map.places(coordinates)
            found, value = np.zeros(inside.sum(), np.uint8), np.zeros(len(at), np.uint8)
            for data, here, where in self.memory.bytes_at(addresses[inside]):
                found[here] = data[where]
            value[inside] = found
            self.shared[at] = value
            barrier.complete(len(at))

        self.later.append((None, copy))

    def copy_out(self, w, map_address, coordinates, address, *, add):
        """Begin a copy to global memory; what is waited for is that shared memory was read."""
        tensor_map = self.map_at(map_address)
        at = self._in_shared(tensor_map, int(address))

        def copy():
            value = self.read_asynchronously(at)
            inside, addresses = tensor_map.places(coordinates)
            for data, here, where in self.memory.bytes_at(addresses[inside]):
                there = value[inside][here]
                if add:
                    there = (data[where].view(np.float32) + there.view(np.float32)).view(np.uint8)
                data[where] = there
            for group in w.stores:
                if copy in group:
                    group.remove(copy)

        w.store_later(copy)

    def acquire(self):
        """A warp looks whether others have released something."""
        self.looks += 1
        if self.looks > MOST_LOOKS:
            raise Fault("it waits for what nobody releases")

    def release(self, w):
        if any(w.stores):
            raise Fault("what is released may not be in memory yet")

    def wait_stores(self, w, left):
        if w.stores_left() <= left:
            return True
        w.blocked = lambda: w.stores_left() <= left
        return False


@lru_cache(maxsize=8192)
def operand(descriptor, rows, element, transposed):
    """Addresses of the numbers [rows, 32 bytes] in shared memory that a descriptor of wgmma says where."""
    start, lead, stride = (((descriptor >> s) & 0x3FFF) << 4 for s in (0, 16, 32))
    width = {0: 0, 1: 128, 2: 64, 3: 32}[descriptor >> 62]
    if width == 0:
        raise Fault("an operand without a pattern isn't known here")
    r, k = np.arange(rows)[:, None], np.arange(32 // element)[None, :]
    if transposed:  # what follows each other in memory is rows
        per = width // 2
        at = r % per * 2 + r // per * lead + k % 8 * width + k // 8 * stride
    else:
        at = r // 8 * stride + r % 8 * width + k * element
    return swizzled(start + at, width)


def as_float32(bits, kind):
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if kind == "f16" else float8_e4m3fn).astype(np.float32)


def wgmma(w, block, key, a, b, add, n, kind, a_transposed, b_transposed):
    """Issue a warp's 16 rows of a product of 64 x n x 16, or 32 of 8 bits.  Sums are float32, as a tensor core's
    aren't quite.
    """
    row, bits = 16 * (w.number % 4), np.uint8 if kind == "e4m3" else np.uint16
    if isinstance(a, list):
        # Registers: rows lane / 4 and 8 more, columns 2 (lane % 4) and 8 more.
        tile = np.zeros((16, 16), np.float32)
        for i, x in enumerate(a):
            halves = as_float32(x.copy().view(np.uint16).reshape(LANES, 2), kind)
            for half in range(2):
                tile[LANE // 4 + 8 * (i % 2), 2 * (LANE % 4) + 8 * (i // 2) + half] = halves[:, half]
    else:
        at_a = operand(int(a[0]), 64, bits().itemsize, a_transposed)[row : row + 16]
    at_b = operand(int(b[0]), n, bits().itemsize, b_transposed)

    def multiply(registers):
        left = tile if isinstance(a, list) else as_float32(block.read_asynchronously(at_a, bits), kind)
        product = left @ as_float32(block.read_asynchronously(at_b, bits), kind).T
        # Register 4 i + 2 h + c is row lane / 4 + 8 h, column 8 i + 2 (lane % 4) + c.
        parts = product.reshape(2, 8, n // 8, 4, 2).transpose(2, 0, 4, 1, 3).reshape(n // 2, LANES)
        if add:
            parts = parts + np.array(registers).view(np.float32)
        return list(np.ascontiguousarray(parts).view(np.uint32))

    w.begin(Product(key, multiply), [w.R[r] for r in key])


def shuffle(mode, value, b, c):
    """Of `shfl.sync`: what each lane gets, and whether it is another's."""
    lane = LANE
    b, c = b.astype(np.int64), c.astype(np.int64)
    clamp, segment = c & 31, (c >> 8) & 31
    most, least = (lane & segment) | (clamp & ~segment), lane & segment
    b &= 31
    if mode == "up":
        source = lane - b
        there = source >= most
    elif mode == "down":
        source = lane + b
        there = source <= most
    elif mode == "bfly":
        source = lane ^ b
        there = source <= most
    else:
        source = least | (b & ~segment)
        there = source <= most
    return value[np.where(there, source, lane) & 31], there


def run(program, grid, params, maps, memory, shared, seed=0):
    """Run all blocks, in any order."""
    chance = random.Random(seed)
    positions = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    chance.shuffle(positions)
    coming = (Block(program, memory, maps, params, grid, at, shared, chance).steps() for at in positions)
    with np.errstate(all="ignore"):
        running = list(islice(coming, AT_ONCE if program.waits else 1))
        while running:
            one, many = (chance.choice(running), chance.randrange(1, 200)) if program.waits else (running[0], 1 << 30)
            for _ in range(many):
                if next(one, one) is one:
                    running.remove(one)
                    running.extend(islice(coming, 1))
                    break
