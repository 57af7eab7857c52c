"""The kernels compile, for Hopper with its instructions, fit shared memory and spill next to nothing, without a GPU."""

from unittest import mock

import pytest
import torch

from linear_cross_entropy.ahead_of_time import compile_all, is_serialized
from onchip.fp8.triton_launches import quantize_launch
from onchip.groups.problem import GroupedOptions, GroupedProblem
from onchip.groups.triton import fp8 as fp8_copies
from onchip.groups.triton import launches
from onchip.groups.triton.tiles import plan_numbers, plan_tiles
from onchip.kernels.triton.launch import Device

T, G, N, K = 4096, 4, 1024, 512
P = GroupedProblem(T, T, G, N, K, N, T)
PLAN = torch.empty(plan_numbers(P), dtype=torch.int32)
INDEX, SCALE = torch.empty(T, dtype=torch.int32), torch.empty(T)
HOPPER, AMPERE, ADA = Device(90, 132, 232448), Device(80, 108, 166912), Device(89, 142, 101376)
OPTIONS, SWIGLU = GroupedOptions(), GroupedOptions(activation="swiglu")
LIKE = torch.empty(0, dtype=torch.bfloat16)


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


def short():
    """Groups have a tile of rows on average."""
    return launches.product(of(T, K), of(T // 128, N, K), of(T, N), PLAN, tokens=T)


def turned():
    return launches.product(of(T, N), of(G, N, K).mT, of(T, K), PLAN, tokens=T)


def weight(**more):
    return launches.weight_gradient(of(T, N), of(T, K), of(G, N, K, dtype=torch.float32), PLAN, **more)


def fp8(options=None, out=(T, N), **more):
    """Of what quantising made: as many rows as tiles could have, and a weight with its scales."""
    x, w = fp8_copies.empty_rows(P, K, LIKE), fp8_copies.empty_weight(P, OPTIONS, LIKE, turned=False)
    return launches.product(x, fp8_copies.by_group(w, G, N, K), of(*out), PLAN, tokens=T, options=options, **more)


def fp8_turned():
    """x's gradient, of a weight whose groups lie side by side."""
    d, w = fp8_copies.empty_rows(P, N, LIKE), fp8_copies.empty_weight(P, OPTIONS, LIKE, turned=True)
    return launches.product(d, fp8_copies.by_group(w, G, K, N), of(T, K), PLAN, tokens=T)


def fp8_weight():
    a, b = (fp8_copies.empty_columns(P, columns, LIKE) for columns in (N, K))
    return launches.scaled_weight_gradient(a, b, of(G, N, K, dtype=torch.float32), PLAN, add=True)


def fp8_rows():
    x, rows, columns = of(T, K), fp8_copies.empty_rows(P, K, LIKE), fp8_copies.empty_columns(P, K, LIKE)
    tiles = PLAN[-3 * plan_tiles(P) :].view(-1, 3)
    return quantize_launch(x, rows, columns, "e4m3", "float32", tiles=tiles)


LAUNCHES = {
    "gathered": (lambda: plain(bias=of(G, N), row_scale=SCALE, before=of(T, N), index=INDEX), HOPPER),
    "weight, apart": (lambda: launches.weight_gradient(of(T, N), of(T, K), of(G, N, K), PLAN), HOPPER),
    "swiglu, apart": (lambda: forward(row_scale=SCALE), HOPPER),
    "interleaved, apart": (lambda: forward(GroupedOptions(activation="swiglu", gate_up="interleaved")), HOPPER),
    "turned, apart": (turned, HOPPER),
    "weight, gathered": (lambda: weight(b_index=INDEX, limit=T), HOPPER),
    "plain, apart": (plain, HOPPER),
    "short, apart": (short, HOPPER),
    "a100": (lambda: forward(row_scale=SCALE), AMPERE),
    "fp8, swiglu": (lambda: fp8(SWIGLU, (T, N // 2), before=of(T, N), bias=of(G, N), row_scale=SCALE), HOPPER),
    "fp8, turned": (fp8_turned, HOPPER),
    "fp8, weight": (fp8_weight, HOPPER),
    "fp8, quantised rows": (fp8_rows, HOPPER),
    "fp8": (fp8, HOPPER),
    "fp8, ada": (lambda: fp8(SWIGLU, (T, N // 2), before=of(T, N)), ADA),
    "plain": (plain, HOPPER),
    "turned": (turned, HOPPER),
    "interleaved": (lambda: forward(GroupedOptions(activation="swiglu", gate_up="interleaved")), HOPPER),
    "narrow gate": (narrow, HOPPER),
    "weight": (lambda: weight(add=True), HOPPER),
    "float32": (lambda: plain(torch.float32), HOPPER),
    "ada": (lambda: weight(add=True), ADA),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (i > 5)) for i, x in enumerate(LAUNCHES)])
def test_products(name):
    make, device = LAUNCHES[name]
    with mock.patch.object(launches, "describe", return_value=device):
        launch = make()
    (found,) = compile_all([launch], device.capability)
    assert found.shared <= device.shared
    assert found.stack <= 8
    if "apart" in name:
        assert not is_serialized(found.ptx)
    if name == "fp8, quantised rows":
        return
    floats = launch.arguments.get("PRECISION") == "ieee"
    assert ("wgmma.mma_async" in found.ptx) == (device is HOPPER and not floats)
    assert ("cp.async.bulk.tensor" in found.ptx) == (device is HOPPER)
    assert floats or device is HOPPER or "mma.sync" in found.ptx
    assert (".e4m3.e4m3" in found.ptx) == name.startswith("fp8")
