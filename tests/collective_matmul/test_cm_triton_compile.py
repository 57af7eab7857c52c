"""The kernels between ranks compile, for Hopper with its instructions, fit shared memory and spill nothing."""

from unittest import mock

import pytest
import torch

from linear_cross_entropy.ahead_of_time import compile_all
from onchip.collectives import triton_launches as launches
from onchip.kernels.triton.launch import Device

HOPPER, AMPERE, ADA = Device(90, 132, 232448), Device(80, 108, 166912), Device(89, 142, 101376)
RANKS, N, C = 4, 1024, 256


def of(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def gated(rows, weight):
    flags = of(RANKS, launches.PIECES, dtype=torch.int32)
    return launches.gated_product(of(rows, C), of(RANKS, rows, C), weight, of(N), of(RANKS * rows, N), flags, 2)


@pytest.mark.parametrize(
    "device",
    [HOPPER, *(pytest.param(d, marks=pytest.mark.slow) for d in (AMPERE, ADA))],
    ids=lambda d: str(d.capability),
)
def test_kernels_compile(device):
    """Forward's product, and x's gradient with blocks that end within a tile."""
    with mock.patch.object(launches, "describe", return_value=device):
        found = [gated(512, of(N, C).t()), gated(500, of(C, N))]
    found.append(launches.add_blocks(of(RANKS, 512, N, dtype=torch.float32), of(N), of(512, N), 2))
    *products, total = compile_all(found, device.capability)
    assert [x.stack for x in (*products, total)] == [0, 0, 0]
    for x in products:
        assert x.shared <= device.shared
        assert "ld.acquire.sys.global" in x.ptx
        hopper = device is HOPPER
        assert [word in x.ptx for word in ("wgmma", "cp.async.bulk.tensor", "fence.proxy.async.global")] == [hopper] * 3
        assert "multimem" not in x.ptx


@pytest.mark.parametrize(
    ("rows", "pieces", "tiles"), [(1, 1, 1), (500, 1, 4), (1023, 1, 8), (1024, 2, 4), (1100, 2, 5), (2049, 4, 5),
                                  (16384, 4, 32)]
)  # fmt: skip
def test_pieces_are_whole_tiles(rows, pieces, tiles):
    """None is empty, and no more rows are in them than there are in the block's tiles."""
    cut = launches.cut(rows)
    assert cut == (pieces, tiles)
    assert (pieces - 1) * cut.rows < rows <= pieces * cut.rows
