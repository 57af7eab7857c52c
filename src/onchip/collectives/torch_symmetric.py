"""Products that overlap with copies into peers' memory, for GPUs of one host that map each other's.

Each rank has a buffer that all ranks of the group map: PyTorch's symmetric memory.  A rank's copy engine pushes its
blocks into its peers' buffers, on a stream of its own, while multiprocessors multiply.  To gather, a flag follows each
piece of a block, and a product's tiles begin when their rows' flag is set (`triton_kernels.gated_product`).  To reduce,
a block's product is pushed to its owner while the next one is computed, and the owner adds up.  All is in the order of
streams: the host waits for nothing.

Buffers are kept until `free_buffers` or the group's end.  Every walk begins with a barrier in the caller's stream, so
that no rank writes where a peer still reads: docs/internals/collective_matmul.md has the proof.  NVLink's multicast
isn't used.

Sources: Wang et al., "Introducing Async Tensor Parallelism in PyTorch" (2024); Chang et al., "FLUX" (arXiv:2406.06858).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from onchip.collectives.torch_ring import ProcessRing, process_group
from onchip.kernels.triton.launch import constant_to_compiler, device_of, device_refusal

# A buffer: its flags in int32 and at last a 1, then blocks.
_HEAD = 4096
_SMALLEST = 1 << 21
_MOST_RANKS = 128
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@dataclass
class _Buffer:
    """Memory of this rank that its peers map, and theirs."""

    handle: Any
    memory: Tensor
    head: Tensor  # [_HEAD / 4] int32
    side: torch.cuda.Stream
    """Where pushes are."""
    last: torch.cuda.Stream
    """That of the last call."""

    def blocks(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What a rank's buffer holds, after its flags."""
        made: Tensor = self.handle.get_buffer(rank, shape, dtype, _HEAD // dtype.itemsize)
        return made

    def flags(self, rank: int) -> Tensor:
        made: Tensor = self.handle.get_buffer(rank, (_HEAD // 4,), torch.int32, 0)
        return made


class _Key(NamedTuple):
    device: int
    bytes: int


# By the group itself: another one can get its name.
_BUFFERS: "WeakKeyDictionary[Any, dict[_Key, _Buffer]]" = WeakKeyDictionary()


def free_buffers(group: "dist.ProcessGroup | None" = None) -> None:
    """Free the buffers of a group, or, for None, of all processes; a later call makes new ones.

    Call it on every rank, with no call under way: memory is given back when the last rank let go of it.  CUDA graphs
    that were captured with them can't be replayed any more.
    """
    _BUFFERS.pop(dist.group.WORLD if group is None else group, None)


# ---------------------------------------------------------------------------------------------------------- the walks


def linear_of_all(
    ring: ProcessRing, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, whole: bool = False
) -> Tensor:
    """out = all ranks' x [rows, C] @ weight [C, N] + bias, each row as soon as it is there.

    Returns all ranks' x, [ranks, rows, C], that of this rank only if `whole`; it stays until the group's next call.
    """
    from onchip.collectives import triton_launches as launches

    x = x.contiguous()
    buffer = _opened(ring, x, ring.ranks * x.nbytes)
    blocks = buffer.blocks(ring.rank, (ring.ranks, *x.shape), x.dtype)
    flags = buffer.head[: ring.ranks * launches.PIECES]
    flags.zero_()
    buffer.handle.barrier()
    cut = launches.cut(len(x))
    # Pushes before the product: then nothing that the host does later keeps peers waiting.
    with _aside(buffer):
        for step in range(1, ring.ranks):
            peer = (ring.rank + step) % ring.ranks
            there, set_there = buffer.blocks(peer, blocks.shape, x.dtype)[ring.rank], buffer.flags(peer)
            for piece in range(cut.pieces):
                rows = slice(piece * cut.rows, (piece + 1) * cut.rows)
                there[rows].copy_(x[rows])
                _set(buffer, set_there, ring.rank * launches.PIECES + piece)
        if whole:
            blocks[ring.rank].copy_(x)
    with device_of(x):
        launches.gated_product(x, blocks, weight, bias, out, flags, ring.rank).run()
    _join(buffer)
    return blocks


def gathered(ring: ProcessRing, x: Tensor) -> Tensor:
    """All ranks' x, [ranks, *x.shape]; it stays until the group's next call."""
    x = x.contiguous()
    buffer = _opened(ring, x, ring.ranks * x.nbytes)
    buffer.handle.barrier()
    shape = ring.ranks, *x.shape
    with _aside(buffer):
        for step in range(1, ring.ranks + 1):
            buffer.blocks((ring.rank + step) % ring.ranks, shape, x.dtype)[ring.rank].copy_(x)
    _join(buffer)
    buffer.handle.barrier()
    return buffer.blocks(ring.rank, shape, x.dtype)


def reduced(ring: ProcessRing, product: Callable[[int, Tensor], None], bias: Tensor | None, out: Tensor) -> None:
    """out [rows, N] = the sum over all ranks of product(this rank's number), and bias; rounded once.

    product(number, out) computes this rank's addend for a rank, in float32.  Addends are added in the order rank + 1,
    rank + 2, ..., rank.
    """
    from onchip.collectives import triton_launches as launches

    numbers = ring.ranks, *out.shape
    buffer = _opened(ring, out, 4 * ring.ranks * out.numel())
    buffer.handle.barrier()
    # A product is computed while the one before it leaves.
    leaving = [out.new_empty(out.shape, dtype=torch.float32) for _ in range(min(2, ring.ranks - 1))]
    left: list[torch.cuda.Event] = []
    for step in range(1, ring.ranks):
        peer, block = (ring.rank + step) % ring.ranks, leaving[(step - 1) % 2]
        if step > 2:
            torch.cuda.current_stream(out.device).wait_event(left[step - 3])
        product(peer, block)
        with _aside(buffer):
            buffer.blocks(peer, numbers, torch.float32)[ring.rank].copy_(block)
            left.append(buffer.side.record_event())
    addends = buffer.blocks(ring.rank, numbers, torch.float32)
    product(ring.rank, addends[ring.rank])
    _join(buffer)
    buffer.handle.barrier()
    with device_of(out):
        launches.add_blocks(addends, bias, out, ring.rank).run()


def _opened(ring: ProcessRing, x: Tensor, size: int) -> _Buffer:
    """The group's buffer of this size, free for a call in the current stream."""
    buffer = _buffer(ring, x.device, size)
    # The order of a graph's replays is the caller's.
    if not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(x.device)
        if buffer.last != stream:
            stream.wait_stream(buffer.last)
            buffer.last = stream
    return buffer


@contextmanager
def _aside(buffer: _Buffer) -> Iterator[None]:
    """The stream of pushes, behind what the current one was given so far."""
    buffer.side.wait_stream(torch.cuda.current_stream(buffer.side.device))
    with torch.cuda.stream(buffer.side):
        yield


def _join(buffer: _Buffer) -> None:
    torch.cuda.current_stream(buffer.side.device).wait_stream(buffer.side)


def _set(buffer: _Buffer, flags: Tensor, i: int) -> None:
    """Set a flag behind what the current stream was given, with a fence; a graph can have no such write, but a copy."""
    if torch.cuda.is_current_stream_capturing():
        flags[i : i + 1].copy_(buffer.head[-1:])
    else:
        memory: Any = torch._C._distributed_c10d._SymmetricMemory
        memory.stream_write_value32(flags.view(torch.uint32), i, 1)


# --------------------------------------------------------------------------------------------------------- the buffers


def _buffer(ring: ProcessRing, device: torch.device, size: int) -> _Buffer:
    """The buffer of this size, rounded up to a power of two; made when it is first asked for, by all ranks together."""
    key = _Key(device.index, max(_SMALLEST, 1 << (size + _HEAD - 1).bit_length()))
    of_group = _BUFFERS.setdefault(process_group(ring.group), {})
    found = of_group.get(key)
    if found is None:
        found = of_group[key] = _made(ring, device, key.bytes)
    return found


def _made(ring: ProcessRing, device: torch.device, size: int) -> _Buffer:
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "collective_matmul: backend 'symmetric' makes its buffers in the first call of a size, which a CUDA graph "
            "can't capture; call it once before, forward and backward"
        )
    import torch.distributed._symmetric_memory as symmetric

    memory: Any = torch._C._distributed_c10d._SymmetricMemory
    try:
        with _no_multicast():
            # Not `symmetric.empty`, whose pool could give ranks memory at different places of theirs.
            made = memory.empty_strided_p2p((size,), (1,), torch.uint8, device)
            handle = symmetric.rendezvous(made, process_group(ring.group))
    except RuntimeError as error:
        raise ValueError(
            f"collective_matmul: backend 'symmetric' needs GPUs of one host that map each other's memory; PyTorch says "
            f"of these: {error}"
        ) from error
    stream = torch.cuda.current_stream(device)
    head = handle.get_buffer(ring.rank, (_HEAD // 4,), torch.int32, 0)
    head.zero_()
    head[-1] = 1
    return _Buffer(handle, made, head, torch.cuda.Stream(device), stream)


@contextmanager
def _no_multicast() -> Iterator[None]:
    """PyTorch maps memory for NVLink's multicast too, unless this variable says no.  Some hosts can't."""
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before


def refusal(ring: ProcessRing, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this can't serve a call, or None.  Whether ranks map each other's memory shows in the first call."""
    if device.type != "cuda":
        return f"it runs on CUDA tensors, not on {device.type!r}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}; pass backend='ring'"
    if ring.ranks > _MOST_RANKS:
        return f"it takes up to {_MOST_RANKS} ranks, not {ring.ranks}"
    return device_refusal("cuda", device.index, dtype) or _allocator_refusal()


@constant_to_compiler
def _allocator_refusal() -> str | None:
    import torch.distributed._symmetric_memory as symmetric

    found = symmetric.get_backend(torch.device("cuda"))
    if found == "CUDA":
        return None
    return f"it needs symmetric memory of PyTorch's allocator 'CUDA', and this is {found!r}; pass backend='ring'"
