"""The walks through mapped memory without a GPU: ranks are threads, and their buffers are memory of one process.

What a stream orders is done at once here.  Ranks wait for each other by real barriers and flags.
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

from onchip.collectives import torch_buffers as buffers
from onchip.collectives import torch_symmetric as symmetric
from onchip.collectives import torch_words
from onchip.collectives import triton_launches as launches
from onchip.collectives.torch_ring import ProcessRing
from onchip.collectives.torch_words import OwnNumbers

RANKS = 3
SEED = 5


class Handle:
    """PyTorch's handle of memory that all ranks map, with what was done to it, by the rank that did it."""

    def __init__(self, memories, done):
        self.memories, self.done = memories, done

    def get_buffer(self, rank, shape, dtype, offset):
        numbers = torch.Size(shape).numel()
        self.done.append(rank)
        return self.memories[rank].view(dtype)[offset : offset + numbers].view(shape)


def kernels(meeting):
    """Launches, as the kernels do it: in order of arrival, each piece when its flag is set."""

    def launched(function):
        return lambda *args, **options: SimpleNamespace(run=lambda: function(*args, **options))

    def meet(at, clear=False):
        if clear:
            at.head[: 2 * launches.SET] = 0
        meeting.wait()
        time.sleep(random.random() / 1000)

    def wait(flag):
        while not flag:
            time.sleep(0)

    def pieces(rows):
        cut = launches.cut(rows)
        return [(piece, slice(piece * cut.rows, (piece + 1) * cut.rows)) for piece in range(cut.pieces)]

    def others(at):
        return [(at.rank + step) % at.ranks for step in range(1, at.ranks)]

    def arrive(at, flags, row, pieces, sender=None):
        for other in others(at) if sender is None else [sender]:
            for piece in range(pieces):
                wait(flags[other, piece])

    def gated_product(at, own, blocks, weight, bias, out):
        outs = out.view(len(blocks), len(own), -1)
        for sender in [at.rank, *others(at)[::-1]]:
            for piece, part in pieces(len(own)):
                if sender != at.rank:
                    wait(at.flags()[sender, piece])
                x = own if sender == at.rank else blocks[sender]
                outs[sender, part] = x[part] @ weight + (0 if bias is None else bias)

    def adding_product(at, own, weight, bias, addends, out):
        for sender in others(at):
            wait(at.flags()[sender, 0])
        total = sum(addends[sender] for sender in others(at)) + own @ weight
        out.copy_(total + (0 if bias is None else bias))

    return {f.__name__: launched(f) for f in (meet, arrive, gated_product, adding_product)}


@contextlib.contextmanager
def threads_for_ranks(monkeypatch):
    """What runs a function of each rank's ring in a thread of its own."""
    memories = [torch.full((1 << 20,), 255, dtype=torch.uint8) for _ in range(RANKS)]
    meeting, done = threading.Barrier(RANKS, timeout=20), [[] for _ in range(RANKS)]
    side = SimpleNamespace(record_event=lambda: None)
    made = []
    for rank in range(RANKS):
        head = memories[rank][: buffers.HEAD].view(torch.int32)
        at = launches.Meeting(rank, RANKS, head, torch.empty(0), 0)
        made.append(buffers.Buffer(Handle(memories, done[rank]), memories[rank], at, side, None))
    monkeypatch.setattr(symmetric, "opened", lambda ring, device, size: made[ring.rank])
    monkeypatch.setattr(symmetric, "_aside", lambda buffer: contextlib.nullcontext())
    monkeypatch.setattr(symmetric, "_join", lambda buffer: None)
    monkeypatch.setattr(symmetric, "_set", lambda buffer, peer, which, i: buffer.flags(peer, which)[i].fill_(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: mock.Mock())
    for name, launch in kernels(meeting).items():
        monkeypatch.setattr(launches, name, launch)

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
            total, seen = torch.empty(x.shape[2], w.shape[2], dtype=torch.float64), []
            rows, other = mine.flatten(0, 1), mine[2] if len(made) % 2 else None
            meanwhile = None if other is None else (other, lambda rows, to=seen: to.append(rows.clone()))
            symmetric.summed(ring, rows, of_all, b, total, torch.float64, meanwhile)
            made.append((out, whole, gathered, total, seen))
        return made

    with threads_for_ranks(monkeypatch) as (run, _):
        every = run(walk)
    for rank, of_rank in enumerate(every):
        for (out, whole, gathered, total, seen), x, w, b in zip(of_rank, xs, weights, biases, strict=True):
            assert torch.equal(whole, x[:, 0])
            assert torch.equal(gathered, x[:, 1])
            torch.testing.assert_close(out, x[:, 0].flatten(0, 1) @ w[rank] + b)
            right = sum(x[q, rank] @ w[q] for q in range(RANKS)) + b
            torch.testing.assert_close(total, right)
            assert all(torch.equal(rows, x[:, 2]) for rows in seen)
        assert [len(of_call[-1]) for of_call in of_rank] == [0, 1, 0, 1]


def test_blocks_that_come_one_by_one(monkeypatch):
    """As the ring has them: one's own first, then that of the rank before; and sums, whose last addend is one's own."""
    g = torch.Generator().manual_seed(SEED)
    calls = [torch.randn(RANKS, RANKS, rows, generator=g) for rows in (5, 1000, 3)]

    def walk(ring):
        made, order = [], []
        for x in calls:
            seen = [(rank, block.clone()) for rank, block in symmetric.blocks(ring, x[ring.rank, 0])]

            def addend(rank, out, x=x):
                order.append(rank)
                out.copy_(x[ring.rank, rank])

            made.append((seen, symmetric.reduced(ring, addend, torch.empty(x.shape[2]))))
        return made, order

    with threads_for_ranks(monkeypatch) as (run, _):
        every = run(walk)
    for rank, (made, order) in enumerate(every):
        assert order == [(rank + step) % RANKS for step in (1, 2, 0)] * len(calls)
        for (seen, total), x in zip(made, calls, strict=True):
            assert [of for of, _ in seen] == [(rank - step) % RANKS for step in range(RANKS)]
            assert all(torch.equal(block, x[of, 0]) for of, block in seen)
            torch.testing.assert_close(total, x[:, rank].sum(0))


def test_ranks_push_to_different_peers(monkeypatch):
    """Each begins with the rank after it, so that no two push to one at a time."""
    x = torch.randn(2, 4)
    with threads_for_ranks(monkeypatch) as (run, done):
        for of_rank in done:
            of_rank.clear()
        run(lambda ring: symmetric.gathered(ring, x) is None)
    of_each = [[peer for i, peer in enumerate(of_rank) if peer not in of_rank[:i]] for of_rank in done]
    assert of_each == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


def test_what_it_refuses():
    ring = ProcessRing("any", 0, 2)
    cuda = torch.device("cuda", 0)
    assert symmetric.refusal(ring, torch.device("cpu"), torch.bfloat16) == "it runs on CUDA tensors, not on 'cpu'"
    said = symmetric.refusal(ring, cuda, torch.float32)
    assert said == "it takes bfloat16 and float16, not float32; pass backend='collective'"
    many = ring._replace(ranks=129)
    assert symmetric.refusal(many, cuda, torch.bfloat16) == "it takes up to 128 ranks, not 129"
    with mock.patch.object(buffers, "device_refusal", return_value="it needs compute capability 8.0"):
        assert symmetric.refusal(ring, cuda, torch.bfloat16) == "it needs compute capability 8.0"
    for found, reason in (
        ("CUDA", None),
        (
            "NVSHMEM",
            "it needs symmetric memory of PyTorch's allocator 'CUDA', and this is 'NVSHMEM'; pass backend='collective'",
        ),
    ):
        with (
            mock.patch.object(buffers, "device_refusal", return_value=None),
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
            buffers._buffer(ring, torch.device("cpu", 0), 100)
        assert not buffers._GROUPS[dist.group.WORLD].buffers
        symmetric.free_buffers()
        assert dist.group.WORLD not in buffers._GROUPS
        with monkeypatch.context() as capturing:
            capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(
                ValueError, match="makes its buffers in the first call of a size, which a CUDA graph can't"
            ):
                buffers._buffer(ring, torch.device("cpu", 0), 100)
    finally:
        dist.destroy_process_group()
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST" not in os.environ


def test_exchanges_are_counted_for_each_group():
    """PyTorch counts them over all groups of a process: ranks that were in other groups would wait for ever."""
    store = dist.HashStore()
    for call in (1, 2):
        ranks = [OwnNumbers(dist.PrefixStore(f"call {call}", store)) for _ in range(2)]
        outer = [dist.PrefixStore("", own) for own in ranks]  # as PyTorch calls it, from C++
        for exchange in range(2):
            for rank, before in enumerate((0, 7)):  # how many exchanges of other groups a rank had before
                outer[rank].set(f"CUDA/{before + exchange}/{rank}", f"{call} {exchange} {rank}")
        for rank, before in enumerate((0, 7)):
            for exchange in range(2):
                other = f"CUDA/{before + exchange}/{1 - rank}"
                outer[rank].wait([other])
                assert outer[rank].get(other).decode() == f"{call} {exchange} {1 - rank}"


def test_a_lost_rank(monkeypatch):
    """What a GPU wrote in the host's memory raises in the next call."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ring = ProcessRing(dist.group.WORLD.group_name, 0, 1)
        of_group = buffers._of(ring)
        of_group.lost = torch.ones(1, dtype=torch.int32)
        at = launches.Meeting(0, 1, torch.empty(0), torch.empty(0), 90 * 10**6)
        monkeypatch.setattr(buffers, "_buffer", lambda *_: buffers.Buffer(None, None, at, None, None))
        say = "a rank of the group didn't come within 90 s, the group's timeout, and results since then are NaN"
        with pytest.raises(RuntimeError, match=say):
            buffers.opened(ring, torch.device("cuda", 0), 1)
    finally:
        dist.destroy_process_group()


def test_ranks_agree_on_whether_they_are_mapped(monkeypatch):
    """Each says the same, of what one of them has found; a second call asks nobody."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ring = ProcessRing(dist.group.WORLD.group_name, 0, 1)
        for words, found in (
            (["a|0", "a|1"], None), (["a|0", "b|1"], "its ranks are on several hosts"),
            (["a|0", "a|0"], "some of its ranks share a GPU"), (["a|0", "a|1", "", "no way"], "no way"),
        ):  # fmt: skip
            said = iter([words[:2], words[2:] or ["", ""], words[2:] or ["", ""]])
            monkeypatch.setattr(torch_words, "heard", lambda ring, mine, said=said: next(said))
            monkeypatch.setattr(buffers, "_uuid", lambda index: "0")
            monkeypatch.setattr(buffers, "_buffer", lambda *_: None)
            two = ring._replace(ranks=2)
            assert [buffers.mapping_refusal(two, 0) for _ in range(2)] == [found] * 2
            symmetric.free_buffers()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("rows", "pieces", "tiles"), [(1, 1, 1), (500, 1, 4), (1023, 1, 8), (1024, 2, 4), (1100, 2, 5), (2049, 4, 5),
                                  (16384, 4, 32)]
)  # fmt: skip
def test_pieces_are_whole_tiles(rows, pieces, tiles):
    """None is empty, and no more rows are in them than there are in the block's tiles."""
    cut = launches.cut(rows)
    assert cut == (pieces, tiles)
    assert (pieces - 1) * cut.rows < rows <= pieces * cut.rows
