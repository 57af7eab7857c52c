"""The walks through mapped memory without a GPU: ranks are threads, and their buffers are memory of one process.

What a stream orders is done at once here; what ranks wait for each other for is as it is: barriers and flags.
"""

import contextlib
import os
import random
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from onchip.collectives import torch_symmetric as symmetric
from onchip.collectives import triton_launches as launches
from onchip.collectives.torch_ring import ProcessRing

RANKS = 3
SEED = 5


class Handle:
    """PyTorch's handle of memory that all ranks map, with what was done to it, by the rank that did it."""

    def __init__(self, memories, meeting, rank, done):
        self.memories, self.meeting, self.rank, self.done = memories, meeting, rank, done

    def get_buffer(self, rank, shape, dtype, offset):
        numbers = torch.Size(shape).numel()
        self.done.append(rank)
        return self.memories[rank].view(dtype)[offset : offset + numbers].view(shape)

    def barrier(self):
        self.meeting.wait()
        time.sleep(random.random() / 1000)


def gated(own, blocks, weight, bias, out, flags, rank):
    """As the kernel: in order of arrival, each piece when its flag is set."""

    def run():
        rows, cut = len(own), launches.cut(len(own))
        outs, flag = out.view(len(blocks), rows, -1), flags.view(len(blocks), -1)
        for step in range(len(blocks)):
            sender = (rank - step) % len(blocks)
            for piece in range(cut.pieces):
                while sender != rank and not flag[sender, piece]:
                    time.sleep(0)
                part = slice(piece * cut.rows, (piece + 1) * cut.rows)
                x = own if sender == rank else blocks[sender]
                outs[sender, part] = x[part] @ weight + (0 if bias is None else bias)

    return SimpleNamespace(run=run)


def added(blocks, bias, out, rank):
    order = [(rank + step) % len(blocks) for step in range(1, len(blocks) + 1)]
    total = sum(blocks[i] for i in order) + (0 if bias is None else bias)
    return SimpleNamespace(run=lambda: out.copy_(total))


@contextlib.contextmanager
def threads_for_ranks(monkeypatch):
    """What runs a function of each rank's ring in a thread of its own."""
    memories = [torch.full((1 << 20,), 255, dtype=torch.uint8) for _ in range(RANKS)]
    meeting, done = threading.Barrier(RANKS, timeout=20), [[] for _ in range(RANKS)]
    side = SimpleNamespace(record_event=lambda: None)
    buffers = []
    for rank in range(RANKS):
        handle = Handle(memories, meeting, rank, done[rank])
        head = handle.get_buffer(rank, (symmetric._HEAD // 4,), torch.int32, 0)
        buffers.append(symmetric._Buffer(handle, memories[rank], head, side, None))
    monkeypatch.setattr(symmetric, "_opened", lambda ring, x, size: buffers[ring.rank])
    monkeypatch.setattr(symmetric, "_aside", lambda buffer: contextlib.nullcontext())
    monkeypatch.setattr(symmetric, "_join", lambda buffer: None)
    monkeypatch.setattr(symmetric, "_set", lambda buffer, flags, i: flags[i].fill_(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mock.Mock())
    monkeypatch.setattr(launches, "gated_product", gated)
    monkeypatch.setattr(launches, "add_blocks", added)

    def run(function):
        made, errors = [None] * RANKS, []

        def one(rank):
            try:
                made[rank] = function(ProcessRing("threads", rank, RANKS, "symmetric"))
            except BaseException as error:
                errors.append(error)
                meeting.abort()

        workers = [threading.Thread(target=one, args=(rank,)) for rank in range(RANKS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(30)
        assert not errors, errors
        return made

    yield run, done


def test_walks_one_after_the_other(monkeypatch):
    """Each rank has what is right, though all walks of many sizes use one buffer."""
    g = torch.Generator().manual_seed(SEED)
    calls = [(rows, 1 + i, 3 + i) for i, rows in enumerate((1100, 7, 2100, 300))]
    xs = [torch.randn(RANKS, RANKS, rows, c, generator=g, dtype=torch.float64) for rows, c, _ in calls]
    weights = [torch.randn(RANKS, c, n, generator=g, dtype=torch.float64) for _, c, n in calls]
    biases = [torch.randn(n, generator=g, dtype=torch.float64) for _, _, n in calls]

    def walk(ring):
        made = []
        for x, w, b in zip(xs, weights, biases, strict=True):
            mine, of_all = x[ring.rank], w[ring.rank]
            out = torch.empty(RANKS * x.shape[2], w.shape[2], dtype=torch.float64)
            whole = symmetric.linear_of_all(ring, mine[0], of_all, b, out, whole=True).clone()
            gathered = symmetric.gathered(ring, mine[1]).clone()
            total = torch.empty(x.shape[2], w.shape[2], dtype=torch.float64)
            symmetric.reduced(ring, lambda rank, to, a=mine, w=of_all: to.copy_(a[rank] @ w), b, total)
            made.append((out, whole, gathered, total))
        return made

    with threads_for_ranks(monkeypatch) as (run, _):
        every = run(walk)
    for rank, of_rank in enumerate(every):
        for (out, whole, gathered, total), x, w, b in zip(of_rank, xs, weights, biases, strict=True):
            assert torch.equal(whole, x[:, 0])
            assert torch.equal(gathered, x[:, 1])
            torch.testing.assert_close(out, x[:, 0].flatten(0, 1) @ w[rank] + b)
            right = sum(x[q, rank] @ w[q] for q in range(RANKS)) + b
            torch.testing.assert_close(total, right, rtol=1e-5, atol=1e-5)  # addends travel in float32


def test_ranks_push_to_different_peers(monkeypatch):
    """Each begins with the rank after it, so that no two push to one at a time."""
    x = torch.randn(2, 4)
    with threads_for_ranks(monkeypatch) as (run, done):
        for of_rank in done:
            of_rank.clear()
        run(lambda ring: symmetric.gathered(ring, x) is None)
    assert done == [[1, 2, 0, 0], [2, 0, 1, 1], [0, 1, 2, 2]]


def test_what_it_refuses():
    ring = ProcessRing("any", 0, 2)
    cuda = torch.device("cuda", 0)
    assert symmetric.refusal(ring, torch.device("cpu"), torch.bfloat16) == "it runs on CUDA tensors, not on 'cpu'"
    said = symmetric.refusal(ring, cuda, torch.float32)
    assert said == "it takes bfloat16 and float16, not float32; pass backend='ring'"
    many = ring._replace(ranks=129)
    assert symmetric.refusal(many, cuda, torch.bfloat16) == "it takes up to 128 ranks, not 129"
    with mock.patch.object(symmetric, "device_refusal", return_value="it needs compute capability 8.0"):
        assert symmetric.refusal(ring, cuda, torch.bfloat16) == "it needs compute capability 8.0"
    for found, reason in (
        ("CUDA", None),
        (
            "NVSHMEM",
            "it needs symmetric memory of PyTorch's allocator 'CUDA', and this is 'NVSHMEM'; pass backend='ring'",
        ),
    ):
        with (
            mock.patch.object(symmetric, "device_refusal", return_value=None),
            mock.patch("torch.distributed._symmetric_memory.get_backend", return_value=found),
        ):
            assert symmetric.refusal(ring, cuda, torch.float16) == reason


def test_memory_that_ranks_cannot_map(monkeypatch):
    """PyTorch's reason is in the error, and its variable is as it was."""
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ring = ProcessRing(dist.group.WORLD.group_name, 0, 1)
        with pytest.raises(ValueError, match=r"'symmetric' needs GPUs of one host .*; PyTorch says of these: \S"):
            symmetric._buffer(ring, torch.device("cpu", 0), 100)
        assert not symmetric._BUFFERS[dist.group.WORLD]
        symmetric.free_buffers()
        assert dist.group.WORLD not in symmetric._BUFFERS
        with monkeypatch.context() as capturing:
            capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(
                ValueError, match="makes its buffers in the first call of a size, which a CUDA graph can't"
            ):
                symmetric._buffer(ring, torch.device("cpu", 0), 100)
    finally:
        dist.destroy_process_group()
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST" not in os.environ
