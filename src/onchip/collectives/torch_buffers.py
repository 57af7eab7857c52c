"""Memory that GPUs of one host map for each other: how it is created and freed, and what happens when a rank is lost.

A buffer is PyTorch's symmetric memory: a head, by which ranks tell each other how far they are, and blocks.  It doesn't
use NVLink multicast.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from onchip.collectives.problem import HEAD, buffer_bytes
from onchip.collectives.torch_ring import ProcessRing, process_group
from onchip.kernels.triton.launch import constant_to_compiler, device_refusal

_MOST_KNOWN = 1024
_MOST_RANKS = 128
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@dataclass
class Buffer:
    """Memory of this rank that its peers map, and theirs."""

    handle: Any
    memory: Tensor
    at: Any  # Meeting of triton_launches
    side: torch.cuda.Stream
    """The stream of pushes."""
    last: torch.cuda.Stream
    """The stream of the last call."""
    known: dict[Any, Tensor] = field(default_factory=dict)
    """Views of buffers, by rank, shape, dtype and place."""

    def blocks(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, begin: int = 0) -> Tensor:
        """A part of a rank's buffer, this many bytes after its head."""
        key = rank, shape, dtype, begin
        if key not in self.known:
            if len(self.known) > _MOST_KNOWN:
                self.known.clear()
            self.known[key] = self.handle.get_buffer(rank, shape, dtype, (HEAD + begin) // dtype.itemsize)
        return self.known[key]

    def flags(self, rank: int, which: int) -> Tensor:
        """One of a rank's two sets of flags."""
        from onchip.collectives.triton_launches import SET

        return self.blocks(rank, (SET,), torch.int32, 4 * which * SET - HEAD)


class _Key(NamedTuple):
    device: int
    bytes: int


@dataclass
class _Of:
    """A group's buffers and state."""

    buffers: dict[_Key, Buffer] = field(default_factory=dict)
    lost: Tensor | None = None
    """A word on the host that GPUs can write: whether a rank didn't come."""
    refusal: str | None = "unknown"
    """Why ranks can't map each other's memory."""


# Keyed by the group itself, since a later group can get its name.
_GROUPS: "WeakKeyDictionary[Any, _Of]" = WeakKeyDictionary()


def free_buffers(group: "dist.ProcessGroup | None" = None) -> None:
    """Free the buffers of a group, or, for None, of all processes; a later call makes new ones.

    Call it on every rank, with no call under way: memory is given back once the last rank has let go of it.  CUDA
    graphs that were captured with these buffers can't be replayed any more.
    """
    _GROUPS.pop(dist.group.WORLD if group is None else group, None)


def opened(ring: ProcessRing, device: torch.device, size: int) -> Buffer:
    """The group's buffer of this many bytes, free for a call in the current stream.

    Raises:
        RuntimeError: in an earlier call a rank didn't come in time.
    """
    buffer = _buffer(ring, device, size)
    lost = _of(ring).lost
    if lost is not None and lost.item():
        raise RuntimeError(
            f"collective_matmul: in an earlier call of backend 'symmetric' a rank of the group didn't come within "
            f"{buffer.at.patience / 1e6:g} s, the group's timeout, and results since then are NaN; to go on, call "
            "onchip.collectives.torch_symmetric.free_buffers(group) on every rank, with no call under way"
        )
    # The order of a graph's replays is the caller's.
    if not torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(device)
        if buffer.last != stream:
            stream.wait_stream(buffer.last)
            buffer.last = stream
    return buffer


def _of(ring: ProcessRing) -> _Of:
    return _GROUPS.setdefault(process_group(ring.group), _Of())


def _buffer(ring: ProcessRing, device: torch.device, size: int) -> Buffer:
    """The buffer of this size, rounded up to a power of two; made when it is first asked for, by all ranks together."""
    key = _Key(device.index, buffer_bytes(size))
    of_group = _of(ring)
    found = of_group.buffers.get(key)
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "collective_matmul: backend 'symmetric' makes its buffers in the first call of a size, which a CUDA "
                "graph can't capture; call it once before, forward and backward"
            )
        found = of_group.buffers[key] = _made(ring, device, key.bytes, of_group)
    return found


def _made(ring: ProcessRing, device: torch.device, size: int, of_group: _Of) -> Buffer:
    from onchip.collectives.torch_words import named_store, registered
    from onchip.collectives.triton_launches import Meeting

    memory: Any = torch._C._distributed_c10d._SymmetricMemory
    name, store = named_store(ring, "buffer")
    try:
        # Not `symmetric_memory.empty`, whose pool could give ranks memory at different offsets.
        made = memory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        head = made[:HEAD].view(torch.int32)
        head.zero_()
        head[-1] = 1
        if of_group.lost is None:
            of_group.lost = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        # PyTorch clears new memory without waiting.  Anything that a peer wrote before that is done would be lost.
        torch.cuda.synchronize(device)
        with _no_multicast(), registered(name, store, ring):
            handle = memory.rendezvous(made, name)
    except RuntimeError as error:
        raise ValueError(
            f"collective_matmul: backend 'symmetric' needs GPUs of one host that map each other's memory; PyTorch says "
            f"of these: {error}"
        ) from error
    heads = [handle.get_buffer(rank, (1,), torch.int32, 0).data_ptr() for rank in range(ring.ranks)]
    addresses = torch.tensor([*heads, of_group.lost.data_ptr()], dtype=torch.int64, device=device)
    at = Meeting(ring.rank, ring.ranks, head, addresses, _patience(ring, device))
    return Buffer(handle, made, at, torch.cuda.Stream(device), torch.cuda.current_stream(device))


def _patience(ring: ProcessRing, device: torch.device) -> int:
    """The group's timeout, in microseconds; at most half an hour, which is gloo's default."""
    group, timeout = process_group(ring.group), None
    with suppress(RuntimeError, AttributeError):
        timeout = group._get_backend(device).options._timeout
    timeout = timeout if isinstance(timeout, timedelta) else dist.default_pg_timeout
    return min(int(timeout.total_seconds() * 1e6), 2**31 - 1)


@contextmanager
def _no_multicast() -> Iterator[None]:
    """PyTorch maps memory for NVLink's multicast too, unless this variable forbids it.  Some hosts can't do that."""
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before


# --------------------------------------------------------------------------------------------------------- the checks


def refusal(ring: ProcessRing, device: torch.device, dtype: torch.dtype, *, fp8: bool = False) -> str | None:
    """Why this backend can't serve a call, or None.  `mapping_refusal` says whether ranks map each other's memory."""
    if device.type != "cuda":
        return f"it runs on CUDA tensors, not on {device.type!r}"
    if dtype not in (torch.bfloat16, torch.float16) and not fp8:
        return f"it takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}; pass backend='collective'"
    if ring.ranks > _MOST_RANKS:
        return f"it takes up to {_MOST_RANKS} ranks, not {ring.ranks}"
    return device_refusal("cuda", device.index, dtype) or _allocator_refusal()


@constant_to_compiler
def _allocator_refusal() -> str | None:
    import torch.distributed._symmetric_memory as symmetric

    found = symmetric.get_backend(torch.device("cuda"))
    if found == "CUDA":
        return None
    return f"it needs symmetric memory of PyTorch's allocator 'CUDA', and this is {found!r}; pass backend='collective'"


def mapping_refusal(ring: ProcessRing, index: int) -> str | None:
    """Why the ranks' GPUs can't map each other's memory, or None.  All ranks find the same, together, in the first
    call.
    """
    return _mapping_refusal(ring.group, ring.rank, ring.ranks, index)


@constant_to_compiler  # which takes plain arguments alone
def _mapping_refusal(group: str, rank: int, ranks: int, index: int) -> str | None:
    ring = ProcessRing(group, rank, ranks)
    of_group = _of(ring)
    if of_group.refusal == "unknown":
        if torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is captured before a first call"
        of_group.refusal = _found_refusal(ring, torch.device("cuda", index))
    return of_group.refusal


def _found_refusal(ring: ProcessRing, device: torch.device) -> str | None:
    from onchip.collectives.torch_words import heard

    places = [said.split("|") for said in heard(ring, f"{_host()}|{_uuid(device.index)}")]
    if len({host for host, _ in places}) > 1:
        return "its ranks are on several hosts"
    if len({card for _, card in places}) < ring.ranks:
        return "some of its ranks share a GPU"
    here = {_uuid(i): i for i in range(torch.cuda.device_count())}
    peers = [here[card] for _, card in places if card in here and here[card] != device.index]
    said = (
        "" if all(torch.cuda.can_device_access_peer(device.index, i) for i in peers) else "GPUs have no way to others"
    )
    if not any(heard(ring, said)):
        try:
            _buffer(ring, device, 0)
        except ValueError as error:
            said = str(error)
    return next(filter(None, heard(ring, said)), None)


def _uuid(index: int) -> str:
    properties: Any = torch.cuda.get_device_properties(index)
    return str(properties.uuid)


def _host() -> str:
    """The same for processes that see each other and the same files."""
    said = [socket.gethostname()]
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            said.append(file.read().strip())
        said += [os.readlink(f"/proc/self/ns/{of}") for of in ("pid", "mnt")]
    return " ".join(said)
