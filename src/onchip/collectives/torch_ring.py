"""A ring of exchanges for PyTorch: at each step a rank sends to the next one and receives from the one before.

Each exchange starts before the product that it overlaps with, and is waited for after it.  With NCCL that only orders
streams, and the host waits for nothing.  With gloo the host waits, while the exchange runs in gloo's own threads.
Every rank starts its send and its receive together, so no two ranks wait for each other.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# The communication backend of each device's messages.
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_SAID = 256


class ProcessRing(NamedTuple):
    """The ranks of a group, in their order, as arguments of an operator, and the functions that move their blocks."""

    group: str
    rank: int
    ranks: int
    backend: str = "ring"


def process_group(name: str) -> Any:
    """The group of this name, which stands for it in operators' arguments."""
    c10d: Any = dist.distributed_c10d
    return c10d._resolve_process_group(name)


def blocks(ring: ProcessRing, x: Tensor, into: Tensor | None = None) -> Iterator[tuple[int, Tensor]]:
    """Each rank's number and its block x: this rank's first, then that of the rank before, and so on around the ring.

    While the caller works on a block, the next one arrives.  A block is valid until the iterator is asked for the next;
    with `into` [ranks, *x.shape] all of them stay there.
    """
    here = x.contiguous()
    if into is not None:
        into[ring.rank].copy_(here)
        here = into[ring.rank]
    spare: Tensor | None = None
    for step in range(ring.ranks):
        number = (ring.rank - step) % ring.ranks
        if step == ring.ranks - 1:
            yield number, here
            return
        if into is not None:
            arriving = into[(number - 1) % ring.ranks]
        else:
            arriving = torch.empty_like(here) if spare is None else spare
        exchange = _exchange(ring, here, arriving)
        yield number, here
        _wait(exchange)
        # This rank's own block is the caller's memory.
        spare, here = (here if step > 0 else None), arriving


def reduced(ring: ProcessRing, product: Callable[[int, Tensor], None], like: Tensor) -> Tensor:
    """The sum over all ranks of product(this rank's number), in memory like `like`, which is the first of its buffers.

    product(number, out) computes this rank's addend for the rank `number`.  The sum for a rank begins at the rank after
    it and goes around the ring, and each rank adds its own addend: always in the same order, and without rounding to
    fewer digits.  While a sum travels, the addend for the next one is computed.
    """
    here = like
    arriving = leaving = None
    exchange: list[Any] = []
    for step in range(ring.ranks):
        product((ring.rank - 1 - step) % ring.ranks, here)
        if arriving is not None:
            _wait(exchange)
            here.add_(arriving)
        if step == ring.ranks - 1:
            break
        arriving = torch.empty_like(here) if arriving is None else arriving
        exchange = _exchange(ring, here, arriving)
        here, leaving = torch.empty_like(here) if leaving is None else leaving, here
    return here


def _exchange(ring: ProcessRing, send: Tensor, receive: Tensor) -> list[Any]:
    """Begin to send to the next rank, and to receive from the one before."""
    if send.numel() == 0:
        return []
    group = process_group(ring.group)
    to, source = (ring.rank + 1) % ring.ranks, (ring.rank - 1) % ring.ranks
    both = [
        dist.P2POp(dist.isend, send, group=group, group_peer=to),
        dist.P2POp(dist.irecv, receive, group=group, group_peer=source),
    ]
    return dist.batch_isend_irecv(both)


def _wait(exchange: list[Any]) -> None:
    for work in exchange:
        work.wait()


# --------------------------------------------------------------------------------------------------------- the checks


def ring_of(op: str, group: Any) -> ProcessRing:
    """The ring of a process group, or, for None, of all processes.

    Raises:
        TypeError: no process group.
        ValueError: there is none yet, or this process is no part of it.
    """
    if not torch.compiler.is_compiling():
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(f"{op}: there is no process group; call torch.distributed.init_process_group first")
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"{op}: this process is not a rank of group; call it only on the group's ranks")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            remedy = "; pass mesh.get_group(), of one of its dimensions" if hasattr(group, "get_group") else ""
            raise TypeError(
                f"{op}: group must be a torch.distributed.ProcessGroup, or None for all processes; got "
                f"{type(group).__name__}{remedy}"
            )
    made: Any = dist.group.WORLD if group is None else group
    return ProcessRing(made.group_name, made.rank(), made.size())


def backend_of(group: str, device: str) -> str | None:
    """The name of the backend that moves a device's tensors in a group, or None."""
    made = process_group(group)
    kind = torch.device(device)
    return str(made._get_backend(kind).name()) if kind in made._device_types else None


# As torch.compiler.assume_constant_result does, which would import the compiler, and Triton with it.
backend_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refusal(ring: ProcessRing, device: torch.device) -> str | None:
    """Why the ring can't serve a call on this device, or None."""
    if device.type == "meta":
        return None
    if device.type not in BACKENDS:
        return f"it runs on {', '.join(BACKENDS)} tensors, not on {device.type!r}"
    needed, found = BACKENDS[device.type], backend_of(ring.group, device.type)
    if ring.ranks == 1 or found == needed:
        return None
    return (
        f"{device.type} tensors travel by {needed}, but the group has {found or 'nothing'} for them; create it with "
        f"backend={needed!r}"
    )


def check_alike(op: str, ring: ProcessRing, said: str, device: torch.device) -> None:
    """Raise ValueError on every rank unless all describe their calls alike.  It waits for the device."""
    if ring.ranks == 1:
        return
    encoded = said.encode()[:_SAID].ljust(_SAID)
    mine = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device)
    every = [torch.empty_like(mine) for _ in range(ring.ranks)]
    dist.all_gather(every, mine, group=process_group(ring.group))
    for rank, other in enumerate(every):
        theirs = bytes(other.tolist())
        if theirs != encoded:
            raise ValueError(
                f"{op}: ranks of the group called it differently: rank {rank} with {theirs.decode().strip()}; "
                f"rank {ring.rank} with {said}"
            )
