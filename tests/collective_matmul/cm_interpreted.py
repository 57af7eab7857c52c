"""The kernels between ranks under Triton's interpreter, on the CPU, in one process: what test_interpreted.py starts.

Every block is there and every flag is set.

    TRITON_INTERPRET=1 python cm_interpreted.py NAME ...     prints a line of JSON for each check
"""

import sys
from unittest import mock

import torch

from interpreter import main, registering
from onchip.collectives import triton_launches as launches

CHECKS = {}
check = registering(CHECKS)


@check(("tma", "turned"), ("tma", "straight"), ("pointers", "turned"), ("pointers", "straight"))
def gated_product(how, layout):
    """Tiles in the order of arrival, in pieces of two tiles and of one: blocks end within a tile, and so do columns."""
    rank, ranks, rows, n, c = 1, 3, 300, 264, 72
    x = torch.randn(ranks, rows, c).half()
    weight = torch.randn(n, c).half().t()
    weight = weight if layout == "turned" else weight.contiguous()
    bias, out = torch.randn(n).half(), torch.empty(ranks * rows, n, dtype=torch.float16)
    blocks, flags = x.clone(), torch.zeros(ranks, launches.PIECES, dtype=torch.int32)
    blocks[rank] = float("nan")  # one's own is not read there
    with mock.patch.object(launches, "_PIECE_ROWS", 128):
        pieces = launches.cut(rows)
        flags[:, : pieces.pieces] = 1
        launches.gated_product(x[rank], blocks, weight, bias, out, flags, rank, tma=how == "tma").run()
    assert pieces == (2, 2)
    right = (x.double() @ weight.double() + bias.double()).view(-1, n)
    assert (out.double() - right).norm() < 2**-11 * right.norm()


@check()
def add_blocks():
    blocks, bias, out = torch.randn(3, 37, 50) * 1e3, torch.randn(50).half(), torch.empty(37, 50).half()
    launches.add_blocks(blocks, bias, out, 0).run()
    assert torch.equal(out, (blocks[1] + blocks[2] + blocks[0] + bias).half())


if __name__ == "__main__":
    main(CHECKS, sys.argv[1:])
