"""Stored configs of fp8_linear's products: what a launch gets; tuning, with products and a clock that are made up."""

from functools import partial
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from onchip.bench import timing
from onchip.core import configs
from onchip.core.configs import Entry, read_entries, write_entry
from onchip.fp8 import triton_launches, triton_tiles
from onchip.fp8.torch_products import dequantized_product
from onchip.fp8.torch_quantize import quantize
from onchip.fp8.triton_tiles import ProductConfig
from onchip.tune import fp8_linear as tuning
from onchip.tune import harness, run
from onchip.tune.harness import Machine
from onchip.tune.run import run_tune, tuned_configs

HEURISTIC = ProductConfig()
STORED = ProductConfig(rows=256, columns=64, stages=3)
pytestmark = pytest.mark.usefixtures("config_folder")


def store(kernel, sizes, config=STORED):
    entry = Entry(kernel, "bfloat16", sizes, vars(config), 1.0, {"triton": "3.6.0"}, "2026-11-22")
    write_entry(configs.user_folder(), "fp8_linear", "h100", entry)


def test_bucket():
    buckets = {0: 1, 1: 1, 2: 2, 3: 4, 128: 128, 4096: 4096, 4097: 8192, 8191: 8192}
    assert {m: triton_tiles.bucket(m) for m in buckets} == buckets


def test_what_a_product_is_found_by():
    assert triton_tiles.product_sizes(True, 5000, 28672, 4096) == {"m": 8192, "n": 28672, "k": 4096}
    # The weight's gradient [28672, 4096] of 5000 tokens, padded to whole blocks.
    assert triton_tiles.product_sizes(False, 28672, 4096, 5120) == {"m": 8192, "n": 28672, "k": 4096}


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "found"),
    [
        (8192, 4096, 4096, STORED),  # exact
        (5000, 4096, 4096, STORED),  # in the same bucket
        (32768, 4096, 1024, STORED),  # near
        (32769, 4096, 4096, HEURISTIC),
        (8192, 512, 4096, HEURISTIC),
    ],
)
def test_a_stored_config_serves_sizes_near_it(rows, columns, depth, found):
    store("product", {"m": 8192, "n": 4096, "k": 4096})
    sizes = triton_tiles.product_sizes(True, rows, columns, depth)
    assert triton_tiles.stored_product("h100", True, sizes, "bfloat16", HEURISTIC) == found
    for device, by_block, dtype in (("h200", True, "bfloat16"), ("h100", False, "bfloat16"), ("h100", True, "float32")):
        assert triton_tiles.stored_product(device, by_block, sizes, dtype, HEURISTIC) == HEURISTIC


@pytest.mark.parametrize("by_block", [True, False])
def test_a_launch_takes_the_stored_config_and_one_that_is_given_before_it(by_block, monkeypatch):
    """On a device that is none: what would be launched is looked at, not run."""
    launched = []
    monkeypatch.setattr(triton_launches, "describe", lambda device: ("h100", 90, 132, 232448))
    monkeypatch.setattr(triton_launches, "_run", lambda x, launch: launched.append(launch.arguments))
    x = torch.randn(256, 130)
    a, b = (quantize(x, "e4m3", "float32", by_block=blocks, turned=False)[0] for blocks in (False, by_block))
    product = partial(triton_launches.product, a, b, by_block, None, torch.bfloat16, None)
    product()
    # [256, 256] of sums over 256; of a weight's gradient they are over the tokens.
    store(triton_tiles.KERNELS[by_block], {"m": 256, "n": 256, "k": 256})
    product()
    product(config=ProductConfig(columns=64, warps=4))
    tiles = [(arguments["BLOCK_M"], arguments["BLOCK_N"]) for arguments in launched]
    first = triton_tiles.heuristic_product(232448, by_block)
    assert tiles == [(first.rows, first.columns), (256, 64), (128, 64)]


def test_cases():
    assert {"m8192-n28672-k4096", "m8192-n4096-k28672"} <= set(tuning.DEFAULT_CASES)  # its dgrad too
    assert all(triton_tiles.bucket(sizes["m"]) == sizes["m"] for sizes in tuning.CASES.values())


def test_info_lists_them_without_a_device():
    document = tuned_configs({"torch": ["h100"]})
    assert document["notes"] == []
    rows = [row for row in document["rows"] if row["op"] == "fp8_linear"]
    assert {row["kernel"] for row in rows} == {"product", "wgrad_product"}
    assert {row["how"] for row in rows} == {"heuristic"}


@pytest.fixture
def made_up(monkeypatch):
    """The configs that ran: all are right but those with 64 columns, and faster with more stages."""
    ran = []

    def product(a, b, by_block, bias, dtype, add_to, config):
        ran.append(config)
        return dequantized_product(a, b, by_block, bias, dtype, add_to) * (1.03 if config.columns == 64 else 1.0)

    def time_once(step, device):
        step()
        return 10.0 - ran[-1].stages

    clock = SimpleNamespace(time_interleaved=partial(timing.time_interleaved, time_once))
    monkeypatch.setattr(triton_launches, "product", product)
    monkeypatch.setattr(harness, "adapter", lambda framework: clock)
    monkeypatch.setattr(harness, "FINAL_REPEATS", 1)
    monkeypatch.setattr(run, "_versions", lambda framework: {"triton": "3.6.0"})
    monkeypatch.setattr(tuning, "CASES", {"small": {"m": 128, "n": 200, "k": 130}})
    return ran


@pytest.mark.parametrize("kernel", tuning.KERNELS)
def test_tuning(kernel, made_up, tmp_path, monkeypatch):
    # With less shared memory than Hopper's: five stages of 128x128 do not fit.
    monkeypatch.setattr(run, "_machine", lambda framework: Machine("cpu", "h100", shared_bytes=200_000))
    monkeypatch.setattr(run, "resolve_device", lambda device, framework: "cuda")
    how = {"cases": ["small"], "kernels": [kernel], "out": tmp_path, "console": Console(file=StringIO())}
    (row,) = run_tune("fp8_linear", **how)["rows"]
    assert row["status"] == "tuned"
    assert row["outcomes"]["shared memory"] > 0
    assert row["outcomes"]["wrong"] > 0
    assert all(tuning.shared_bytes(kernel, vars(c), "bfloat16") <= 200_000 for c in made_up)
    right = [c for c in made_up if c.columns != 64]
    (entry,) = read_entries(tmp_path, "fp8_linear", "h100")
    assert (entry.kernel, entry.sizes) == (kernel, {"m": 128, "n": 200, "k": 130})
    best = ProductConfig(**entry.config)
    assert best in right
    assert best.stages == max(c.stages for c in right)
