"""The kernels between ranks under Triton's interpreter, on the CPU, in one process: what test_interpreted.py starts.

Either every block is there and every flag is set, or nothing more comes, and then the deadline passes at once.

    TRITON_INTERPRET=1 python cm_interpreted.py NAME ...     prints a line of JSON for each check
"""

import sys
from unittest import mock

import torch

from interpreter import main, registering
from onchip.collectives import triton_kernels as kernels
from onchip.collectives import triton_launches as launches

CHECKS = {}
check = registering(CHECKS)
RANK, RANKS = 1, 3


def meeting():
    """Of rank 1 of 3, whose heads and hosts are in this process."""
    heads = torch.zeros(RANKS, launches.HEAD, dtype=torch.int32)
    host = torch.zeros(1, dtype=torch.int32)
    addresses = torch.tensor([*(head.data_ptr() for head in heads), host.data_ptr()])
    return launches.Meeting(RANK, RANKS, heads[RANK], addresses, 0), heads, host


def lost(heads, host):
    """Whether all ranks, and this one's host, were told."""
    said = [*heads[:, launches.LOST].tolist(), host.item()]
    assert len(set(said)) == 1
    return bool(said[0])


def flagged(at, pieces):
    at.flags()[:, :pieces] = 1


@check(("tma", "turned"), ("tma", "straight"), ("pointers", "turned"), ("pointers", "straight"))
def gated_product(how, layout):
    """Tiles in the order of arrival, in pieces of two tiles and of one: blocks end within a tile, and so do columns."""
    rows, n, c = 300, 264, 72
    x = torch.randn(RANKS, rows, c).half()
    weight = torch.randn(n, c).half().t()
    weight = weight if layout == "turned" else weight.contiguous()
    bias, out = torch.randn(n).half(), torch.empty(RANKS * rows, n, dtype=torch.float16)
    blocks, (at, heads, host) = x.clone(), meeting()
    blocks[RANK] = float("nan")  # one's own is not read there
    with mock.patch.object(launches, "_PIECE_ROWS", 128):
        pieces = launches.cut(rows)
        flagged(at, pieces.pieces)
        launches.gated_product(at, x[RANK], blocks, weight, bias, out, tma=how == "tma").run()
    assert pieces == (2, 2)
    right = (x.double() @ weight.double() + bias.double()).view(-1, n)
    assert (out.double() - right).norm() < 2**-11 * right.norm()
    assert not lost(heads, host)


@check(("tma", "turned", "float32"), ("pointers", "straight", "float16"))
def adding_product(how, layout, of_addends):
    rows, n, c = 300, 264, 72
    x, addends = torch.randn(rows, c).half(), torch.randn(RANKS, rows, n).to(getattr(torch, of_addends))
    weight = torch.randn(n, c).half().t()
    weight = weight if layout == "turned" else weight.contiguous()
    bias, out = torch.randn(n).half(), torch.empty(rows, n, dtype=torch.float16)
    right = addends[[0, 2]].double().sum(0) + x.double() @ weight.double() + bias.double()
    addends[RANK] = float("nan")  # one's own is not read
    at, heads, host = meeting()
    flagged(at, 1)
    launches.adding_product(at, x, weight, bias, addends, out, tma=how == "tma").run()
    assert (out.double() - right).norm() < 2**-11 * right.norm()
    assert not lost(heads, host)
    for flag in (0, 1):  # an addend that doesn't come, and what is computed after that
        at.flags()[2, 0] = flag
        out.zero_()
        launches.adding_product(at, x, weight, bias, addends, out, tma=how == "tma").run()
        assert out.isnan().all()
        assert lost(heads, host)


@check()
def a_block_that_does_not_come():
    """Its rows are NaN, and all that programs begin with later: here one begins when another has ended."""
    x, weight = torch.randn(RANKS, 128, 64).half(), torch.randn(64, 128).half()
    out, (at, heads, host) = torch.empty(RANKS * 128, 128).half(), meeting()
    at.flags()[0, 0] = 1
    launches.gated_product(at, x[RANK], x, weight, None, out).run()
    assert out.isnan().any(1).view(RANKS, 128).all(1).tolist() == [True, False, True]
    assert lost(heads, host)
    flagged(at, 1)
    launches.gated_product(at, x[RANK], x, weight, None, out).run()
    assert out.isnan().all()


@check()
def meet():
    """Those who came before don't keep a rank waiting; of one who doesn't come, all are told."""
    at, heads, host = meeting()
    at.head[: kernels.MET.value] = 7
    for count in (1, 2):
        at.head[kernels.MET.value : kernels.MET.value + RANKS] = 2
        launches.meet(at, clear=True).run()
        assert [head[kernels.MET.value + RANK].item() for head in heads] == [count] * RANKS
    assert not at.head[: kernels.MET.value].any()
    assert not lost(heads, host)
    launches.meet(at).run()
    assert lost(heads, host)
    at, heads, host = meeting()
    heads[:, launches.LOST] = at.head[kernels.MET.value : kernels.MET.value + RANKS] = 1
    launches.meet(at).run()  # told by another rank
    assert lost(heads, host)


@check()
def arrive():
    """Pieces of other ranks alone are waited for; without one, a row is NaN."""
    at, heads, host = meeting()
    rows = torch.ones(2, 1500).half()
    at.flags(1)[0, :2] = at.flags(1)[2, :2] = 1
    launches.arrive(at, at.flags(1), rows[0], 2).run()
    at.flags(1)[2, 2] = 1
    launches.arrive(at, at.flags(1), rows[0], 3, 2).run()  # of that rank alone
    assert not rows.isnan().any()
    assert not lost(heads, host)
    launches.arrive(at, at.flags(1), rows[0], 3).run()
    assert lost(heads, host)
    assert rows.isnan().all(1).tolist() == [True, False]
    launches.arrive(at, at.flags(), rows[1], 0).run()
    assert rows.isnan().all()


if __name__ == "__main__":
    main(CHECKS, sys.argv[1:])
