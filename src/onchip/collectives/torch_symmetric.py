"""Products that overlap with copies into peers' memory, for GPUs of one host that map each other's.

Each rank has a buffer that all ranks of the group map (`torch_buffers`).  A rank's copy engine pushes its blocks into
its peers' buffers, on a stream of its own, while multiprocessors multiply.  To gather, a flag follows each piece of a
block, and a product's tiles begin when their rows' flag is set (`triton_kernels.gated_product`).  To reduce, a block's
product is pushed to its owner while the next one is computed, and the tiles of the owner's own product add the blocks
that have come (`adding_product`).  Streams order all of this: the host waits for nothing.

Every walk begins with a barrier in the caller's stream, so that no rank writes where a peer still reads:
docs/internals/collective_matmul.md has the proof.

Sources: Wang et al., "Introducing Async Tensor Parallelism in PyTorch" (2024); Chang et al., "FLUX" (arXiv:2406.06858).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onchip.collectives import triton_launches as launches
from onchip.collectives.torch_buffers import Buffer, free_buffers, mapping_refusal, opened, refusal
from onchip.collectives.torch_ring import ProcessRing
from onchip.kernels.torch_products import product, widen
from onchip.kernels.triton.launch import device_of

__all__ = ["blocks", "free_buffers", "gathered", "linear_of_all", "mapping_refusal", "reduced", "refusal", "summed"]


def linear_of_all(
    ring: ProcessRing,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    whole: bool = False,
    into: Tensor | None = None,
) -> Tensor:
    """out = all ranks' x [rows, C] @ weight [C, N] + bias, each row as soon as it is there.

    Returns all ranks' x, [ranks, rows, C], in which this rank's is filled only if `whole`.  It stays valid until the
    group's next call, or is copied `into` memory of the caller's.
    """
    x, whole = x.contiguous(), whole or into is not None
    buffer = _met(ring, x, ring.ranks * x.nbytes)
    blocks = buffer.blocks(ring.rank, (ring.ranks, *x.shape), x.dtype)
    # Pushes before the product: then nothing that the host does later keeps peers waiting.
    with _aside(buffer):
        for step in range(1, ring.ranks):
            _push(ring, buffer, step, x, 0, cut=launches.cut(len(x)))
        if whole:
            blocks[ring.rank].copy_(x)
    with device_of(x):
        launches.gated_product(buffer.at, x, blocks, weight, bias, out).run()
        _join(buffer)
        if whole:
            launches.arrive(buffer.at, buffer.at.flags(), blocks[0, 0], 0).run()
    return blocks if into is None else into.copy_(blocks)


def gathered(ring: ProcessRing, x: Tensor) -> Tensor:
    """All ranks' x [rows, C] as [ranks, rows, C]; it stays valid until the group's next call."""
    x = x.contiguous()
    return _gathered(ring, _met(ring, x, ring.ranks * x.nbytes), x, 0)()


def summed(
    ring: ProcessRing,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    dtype: torch.dtype,
    meanwhile: tuple[Tensor, Callable[[Tensor], None]] | None = None,
) -> None:
    """out [rows, N] = bias + this rank's rows of the sum over all ranks of x [ranks * rows, C] @ weight [C, N].

    The sum is rounded once.  Addends travel in `dtype`, and are added in the order rank + 1, rank + 2, ..., rank.  With
    `meanwhile`, a tensor and a function, the function is given all ranks' tensors while addends travel.
    """
    xs = x.chunk(ring.ranks)
    numbers = ring.ranks, *out.shape
    begin = -(-dtype.itemsize * ring.ranks * out.numel() // 16) * 16
    other = None if meanwhile is None else meanwhile[0].contiguous()
    buffer = _met(ring, x, begin + (0 if other is None else ring.ranks * other.nbytes))
    rows = None if other is None else _gathered(ring, buffer, other, 1, begin)
    leaving = _sent(ring, buffer, out, dtype, lambda rank, block: product(block, widen(xs[rank]), weight))
    if meanwhile is not None and rows is not None:
        meanwhile[1](rows())
    addends = buffer.blocks(ring.rank, numbers, dtype)
    with device_of(x):
        launches.adding_product(buffer.at, xs[ring.rank].contiguous(), weight, bias, addends, out).run()
    _join(buffer)
    del leaving


def blocks(ring: ProcessRing, x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """As the ring's function, for bytes: all blocks are on their way while the rank works on its own.

    The block of a rank that doesn't come is NaN, in 16 bits, in 32 bits and in FP8.
    """
    x = x.contiguous()
    buffer = _met(ring, x, ring.ranks * x.nbytes)
    arriving = buffer.blocks(ring.rank, (ring.ranks, *x.shape), x.dtype)
    with _aside(buffer):
        for step in range(1, ring.ranks):
            _push(ring, buffer, step, x, 0)
    yield ring.rank, x
    for step in range(1, ring.ranks):
        sender = (ring.rank - step) % ring.ranks
        with device_of(x):
            launches.arrive(buffer.at, buffer.at.flags(), arriving[sender], 1, sender).run()
        yield sender, arriving[sender]
    _join(buffer)


def reduced(ring: ProcessRing, addend: Callable[[int, Tensor], None], like: Tensor) -> Tensor:
    """As the ring's function: an addend leaves while the next is computed; the rank's own is computed last and added
    first.
    """
    buffer = _met(ring, like, ring.ranks * like.nbytes)
    leaving = _sent(ring, buffer, like, like.dtype, addend)
    addend(ring.rank, like)
    addends = buffer.blocks(ring.rank, (ring.ranks, *like.shape), like.dtype)
    with device_of(like):
        launches.arrive(buffer.at, buffer.at.flags(), addends[(ring.rank + 1) % ring.ranks], 1).run()
    for step in range(1, ring.ranks):
        like += addends[(ring.rank + step) % ring.ranks]
    _join(buffer)
    del leaving
    return like


def _met(ring: ProcessRing, x: Tensor, size: int) -> Buffer:
    """The group's buffer of this many bytes on x's device, behind the barrier, with this rank's flags cleared."""
    buffer = opened(ring, x.device, size)
    with device_of(x):
        launches.meet(buffer.at, clear=True).run()
    return buffer


def _sent(
    ring: ProcessRing, buffer: Buffer, like: Tensor, dtype: torch.dtype, addend: Callable[[int, Tensor], None]
) -> list[Tensor]:
    """Compute this rank's addends for others, each while the one before leaves.  Their memory has to live until the
    current stream has waited for the pushes."""
    leaving = [torch.empty_like(like, dtype=dtype) for _ in range(min(2, ring.ranks - 1))]
    left: list[torch.cuda.Event] = []
    for step in range(1, ring.ranks):
        block = leaving[(step - 1) % 2]
        if step > 2:
            torch.cuda.current_stream(like.device).wait_event(left[step - 3])
        addend((ring.rank + step) % ring.ranks, block)
        with _aside(buffer):
            _push(ring, buffer, step, block, 0)
            left.append(buffer.side.record_event())
    return leaving


def _gathered(ring: ProcessRing, buffer: Buffer, x: Tensor, which: int, begin: int = 0) -> Callable[[], Tensor]:
    """Begin to push x, with a set of flags; the returned function waits for all ranks' x, in the caller's stream."""
    blocks = buffer.blocks(ring.rank, (ring.ranks, *x.shape), x.dtype, begin)
    with _aside(buffer):
        for step in range(1, ring.ranks):
            _push(ring, buffer, step, x, which, begin)
        blocks[ring.rank].copy_(x)
        there = buffer.side.record_event()

    def wait() -> Tensor:
        torch.cuda.current_stream(x.device).wait_event(there)
        with device_of(x):
            launches.arrive(buffer.at, buffer.at.flags(which), blocks[0, 0], 1).run()
        return blocks

    return wait


def _push(
    ring: ProcessRing, buffer: Buffer, step: int, x: Tensor, which: int, begin: int = 0, cut: launches.Cut | None = None
) -> None:
    """Push this rank's block to the rank `step` after it, as a whole or piece by piece, each piece with its flag."""
    peer = (ring.rank + step) % ring.ranks
    there = buffer.blocks(peer, (ring.ranks, *x.shape), x.dtype, begin)[ring.rank]
    if cut is None or cut.pieces == 1:
        there.copy_(x)
        _set(buffer, peer, which, ring.rank * launches.PIECES)
        return
    for piece, (to, of) in enumerate(zip(there.split(cut.rows), x.split(cut.rows), strict=True)):
        to.copy_(of)
        _set(buffer, peer, which, ring.rank * launches.PIECES + piece)


@contextmanager
def _aside(buffer: Buffer) -> Iterator[None]:
    """The stream of pushes, ordered behind everything that is in the current stream so far."""
    buffer.side.wait_stream(torch.cuda.current_stream(buffer.side.device))
    with torch.cuda.stream(buffer.side):
        yield


def _join(buffer: Buffer) -> None:
    torch.cuda.current_stream(buffer.side.device).wait_stream(buffer.side)


def _set(buffer: Buffer, peer: int, which: int, i: int) -> None:
    """Set a peer's flag behind the current stream's work, with a fence; a CUDA graph has a copy instead."""
    flags = buffer.flags(peer, which)
    if torch.cuda.is_current_stream_capturing():
        flags[i : i + 1].copy_(buffer.at.head[-1:])
    else:
        memory: Any = torch._C._distributed_c10d._SymmetricMemory
        memory.stream_write_value32(flags.view(torch.uint32), i, 1)
