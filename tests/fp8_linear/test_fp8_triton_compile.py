"""The kernels compile for Hopper, fit its shared memory, spill nothing, and multiply FP8.  No GPU is needed."""

import re
from dataclasses import replace

import pytest
import torch

from linear_cross_entropy.ahead_of_time import compile_all
from onchip.fp8 import triton_launches, triton_tiles
from onchip.fp8.torch_quantize import empty
from onchip.fp8.triton_tiles import ProductConfig

HOPPER, SHARED = 90, 232448
LIKE = torch.zeros(1)


def compiled(launch):
    (found,) = compile_all([launch], HOPPER)
    assert found.shared <= SHARED, (found.constants, found.shared)
    return found


def product(by_block, config, fmt="e4m3", dtype=torch.bfloat16, add=False, bias=False, tma=True, n=4096):
    a, b = empty(4096, 512, fmt, LIKE), empty(n, 512, "e4m3", LIKE, by_block=by_block)
    out, added = torch.empty(4096, n, dtype=dtype), torch.empty(n, dtype=dtype) if bias else None
    return triton_launches.product_launch(a, b, by_block, added, out, add, config, 132, tma=tma)


# What the op launches, and other shapes of tile.
HEURISTIC = triton_tiles.product_config(SHARED, True)
OF_WEIGHT = triton_tiles.product_config(SHARED, False)
TRIED = (
    ProductConfig(),
    ProductConfig(columns=64, warps=4, stages=3, per_processor=2),
)


@pytest.mark.parametrize(
    "options",
    [
        {"by_block": True, "config": HEURISTIC, "bias": True},
        {"by_block": True, "config": HEURISTIC, "fmt": "e5m2"},
        {"by_block": False, "config": OF_WEIGHT, "dtype": torch.float32, "add": True},
        {"by_block": False, "config": OF_WEIGHT, "fmt": "e5m2"},
        *({"by_block": True, "config": config} for config in TRIED),
    ],
    ids=str,
)
def test_products(options):
    found = compiled(product(**options))
    fmt = options.get("fmt", "e4m3")
    # Four instructions of 32 products each are summed before their sum is scaled; no more than that.
    instructions = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\w+)\.f32\.(\w+)\.(\w+)", found.ptx)
    assert {kinds for _, *kinds in map(tuple, instructions) if kinds != [fmt, "e4m3"]} == set()
    assert len(instructions) == 4 * options["config"].rows // (64 * options["config"].warps // 4)
    assert "cp.async.bulk.tensor" in found.ptx
    assert found.stack == 0


def test_a_result_that_fits_no_descriptor():
    found = compiled(product(True, HEURISTIC, n=4100, tma=True))
    assert found.constants["TMA"]
    assert not found.constants["TMA_OUT"]
    assert "wgmma.mma_async" in found.ptx


def test_pointers():
    found = compiled(product(True, replace(HEURISTIC, stages=3), tma=False))
    assert "cp.async.bulk.tensor" not in found.ptx
    assert "wgmma.mma_async" in found.ptx


def quantizer(x, fmt, by_block):
    outs = [empty(*shape, fmt, x, by_block=by_block) for shape in (x.shape, x.shape[::-1])]
    launch = triton_launches.quantize_launch(x, *outs, fmt, "float32", by_block=by_block)
    assert set(launch.arguments) == {p.name for p in launch.kernel.params}
    found = compiled(launch)
    assert found.spilled <= (64 if found.constants["WHOLE"] else 0)  # of the last rows, which are masked
    # To the nearest, ties to even, saturating; two numbers to an instruction.
    assert f"cvt.rn.satfinite.{fmt}x2.f32" in found.ptx
    # Divisions that may call a function take 64 registers more: fewer programs fit a multiprocessor.
    assert "div." not in found.ptx
    # 16 bytes at a time go.
    assert re.search(r"st\.global(\.\w+)*\.v4\.b32", found.ptx)
    return found


@pytest.mark.parametrize("shape", [(4096, 512), (4095, 528)], ids=str)
@pytest.mark.parametrize(
    ("fmt", "by_block", "dtype"),
    [
        *(("e4m3", by_block, dtype) for by_block in (False, True) for dtype in (torch.bfloat16, torch.float32)),
        ("e5m2", False, torch.float16),
    ],
    ids=str,
)
def test_quantizers_of_words(fmt, by_block, dtype, shape):
    found = quantizer(torch.empty(shape, dtype=dtype), fmt, by_block)
    # Of 16-bit numbers four programs of 8 warps fit a multiprocessor, of whole blocks, else three; of float32 two.
    pairs, ways = dtype != torch.float32, 2 if found.constants["WHOLE"] else 1
    assert found.registers <= (128 if not pairs else 64 if found.constants["WHOLE"] else 80)
    # A block is read once, by 256 threads 16 bytes at a time; a thread computes a scale of each kind, at most.
    assert len(re.findall(r"ld\.global(\.\w+)*\.v4\.b32", found.ptx)) == ways * (8 if pairs else 16)
    assert len(re.findall(r"ld\.global", found.ptx)) == ways * (8 if pairs else 16)
    assert found.ptx.count("rcp.approx") == ways * (1 if by_block else 2)
    assert found.ptx.count("cvt.rn.satfinite") == 64 * ways


@pytest.mark.parametrize(("by_block", "dtype"), [(False, torch.bfloat16), (True, torch.float16)], ids=str)
def test_quantizers_of_pairs_that_begin_anywhere(by_block, dtype):
    found = quantizer(torch.empty(4095, 513, dtype=dtype), "e4m3", by_block)
    assert not found.constants["ALIGNED"]
    assert found.registers <= 80  # three programs
    # Words that a thread's pairs lie in, and those after them; one instruction puts a pair together.
    assert len(re.findall(r"ld\.global", found.ptx)) == 64
    assert found.ptx.count("prmt.b32") >= 32


@pytest.mark.parametrize(
    ("x", "aligned"),
    [
        (torch.empty(130, 300, dtype=torch.bfloat16), True),
        (torch.empty(300, 130, dtype=torch.float16).T, True),
        (torch.empty(130, 300, dtype=torch.bfloat16)[::2, 2:200], True),
        (torch.empty(130, 301), True),
        (torch.empty(130, 301)[:, 1:], True),
        (torch.empty(130, 301, dtype=torch.bfloat16), False),
        (torch.empty(130, 301, dtype=torch.bfloat16)[:, :300], False),
        (torch.empty(130, 300, dtype=torch.bfloat16)[:, 1:201], False),
        (torch.empty(130, 300, dtype=torch.bfloat16)[:, ::2], True),
        (torch.empty_strided((2, 8), (1 << 24, 1), dtype=torch.bfloat16, device="meta"), True),
    ],
    ids=lambda value: f"{list(value.shape)} {list(value.stride())}" if isinstance(value, torch.Tensor) else None,
)
def test_how_matrices_are_read(x, aligned):
    outs = empty(*x.shape, "e4m3", x), empty(*x.shape[::-1], "e4m3", x)
    arguments = triton_launches.quantize_launch(x, *outs, "e4m3", "float32").arguments
    assert arguments["ALIGNED"] is aligned
    assert arguments["x"].stride(1) == 1
    assert arguments["stride_r"] < 1 << 24
