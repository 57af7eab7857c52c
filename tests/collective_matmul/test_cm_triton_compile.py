"""The kernels between ranks compile, for Hopper with its instructions, fit shared memory and spill nothing."""

from unittest import mock

import pytest
import torch

from linear_cross_entropy.ahead_of_time import compile_all, is_serialized
from onchip.collectives import triton_launches as launches
from onchip.kernels.triton.launch import Device

HOPPER, AMPERE, ADA = Device(90, 132, 232448), Device(80, 108, 166912), Device(89, 142, 101376)
RANKS, N, C = 4, 1024, 256


def of(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def at():
    words = {"head": launches.HEAD, "addresses": RANKS + 1}
    head, addresses = (of(n, dtype=kind) for n, kind in zip(words.values(), (torch.int32, torch.int64), strict=True))
    return launches.Meeting(2, RANKS, head, addresses, 600 * 10**6)


def gated(rows, weight):
    return launches.gated_product(at(), of(rows, C), of(RANKS, rows, C), weight, of(N), of(RANKS * rows, N))


def adding(rows, weight, dtype):
    return launches.adding_product(at(), of(rows, C), weight, of(N), of(RANKS, rows, N, dtype=dtype), of(rows, N))


@pytest.mark.parametrize(
    "device",
    [HOPPER, *(pytest.param(d, marks=pytest.mark.slow) for d in (AMPERE, ADA))],
    ids=lambda d: str(d.capability),
)
def test_kernels_compile(device):
    """Forward's product, and x's gradient with blocks that end within a tile."""
    with mock.patch.object(launches, "describe", return_value=device):
        found = [gated(512, of(N, C).t()), gated(500, of(C, N))]
        found += [adding(512, of(N, C).t(), torch.float32), adding(500, of(C, N), torch.bfloat16)]
    others = [launches.meet(at(), clear=True), launches.meet(at()), launches.arrive(at(), at().flags(1), of(C), 4)]
    made = compile_all(found + others, device.capability)
    products = made[: len(found)]
    assert [x.stack for x in made] == [0] * len(made)
    for x in products:
        assert x.shared <= device.shared
        hopper = device is HOPPER
        assert not (hopper and is_serialized(x.ptx))
        assert [word in x.ptx for word in ("wgmma", "cp.async.bulk.tensor")] == [hopper] * 2
    assert ["fence.proxy.async.global" in x.ptx for x in products] == [device is HOPPER] * 2 + [False] * 2
    for x in made:
        assert "ld.acquire.sys.global" in x.ptx
        assert "st.release.sys.global" in x.ptx
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
