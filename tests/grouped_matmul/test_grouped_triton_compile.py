"""The kernels compile, for Hopper with its instructions, fit shared memory and spill next to nothing, without a GPU."""

from unittest import mock

import pytest
import torch

from linear_cross_entropy.ahead_of_time import compile_all
from onchip.groups.problem import Options, Problem
from onchip.groups.triton import launches
from onchip.groups.triton.tiles import plan_numbers
from onchip.kernels.triton.launch import Device

T, G, N, K = 4096, 4, 1024, 512
PLAN = torch.empty(plan_numbers(Problem(T, T, G, N, K, N, T)), dtype=torch.int32)
INDEX, SCALE = torch.empty(T, dtype=torch.int32), torch.empty(T)
HOPPER, AMPERE, ADA = Device("", 90, 132, 232448), Device("", 80, 108, 166912), Device("", 89, 142, 101376)
SWIGLU = Options(activation="swiglu")


def of(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def forward(options=SWIGLU, **more):
    out, before = of(T, N // 2), of(T, N)
    return launches.product(
        of(T, K), of(G, N, K), out, PLAN, tokens=T, bias=of(G, N), before=before, options=options, **more
    )


def plain(dtype=torch.bfloat16, **more):
    x, w, out = of(T, K, dtype=dtype), of(G, N, K, dtype=dtype), of(T, N, dtype=dtype)
    return launches.product(x, w, out, PLAN, tokens=T, **more)


def narrow():
    """The result goes through TMA, and of the product, whose gate ends within a block, nothing does."""
    x, weight, out, before = of(T, K), of(G, 80, K), of(T, 40), of(T, 80)
    return launches.product(x, weight, out, PLAN, tokens=T, before=before, options=SWIGLU)


def turned():
    return launches.product(of(T, N), of(G, N, K).mT, of(T, K), PLAN, tokens=T)


def weight(**more):
    return launches.weight_gradient(of(T, N), of(T, K), of(G, N, K, dtype=torch.float32), PLAN, **more)


LAUNCHES = {
    "swiglu": (lambda: forward(row_scale=SCALE), HOPPER),
    "gathered": (lambda: plain(bias=of(G, N), row_scale=SCALE, before=of(T, N), index=INDEX), HOPPER),
    "weight, gathered": (lambda: weight(b_index=INDEX, limit=T), HOPPER),
    "a100": (lambda: forward(row_scale=SCALE), AMPERE),
    "plain": (plain, HOPPER),
    "turned": (turned, HOPPER),
    "interleaved": (lambda: forward(Options(activation="swiglu", gate_up="interleaved")), HOPPER),
    "narrow gate": (narrow, HOPPER),
    "weight": (lambda: weight(add=True), HOPPER),
    "float32": (lambda: plain(torch.float32), HOPPER),
    "ada": (lambda: weight(add=True), ADA),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (i > 3)) for i, x in enumerate(LAUNCHES)])
def test_products(name):
    make, device = LAUNCHES[name]
    with mock.patch.object(launches, "describe", return_value=device):
        launch = make()
    (found,) = compile_all([launch], device.capability)
    assert found.shared <= device.shared
    assert found.stack <= 8
    floats = launch.arguments["PRECISION"] == "ieee"
    assert ("wgmma.mma_async" in found.ptx) == (device is HOPPER and not floats)
    assert ("cp.async.bulk.tensor" in found.ptx) == (device is HOPPER)
    assert floats or device is HOPPER or "mma.sync" in found.ptx
