"""Stored configs of grouped_matmul's products: what a launch gets, and what is tuned."""

import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

from onchip.core import configs
from onchip.core.configs import Entry, write_entry
from onchip.groups.problem import Options, Problem
from onchip.groups.triton import launches
from onchip.groups.triton.tiles import KERNELS, ProductConfig, gradient_config, plan_numbers, product_config
from onchip.kernels.triton.launch import Device
from onchip.tune import grouped_matmul as tuning

HOPPER = Device("h100", 90, 132, 232448)
STORED = ProductConfig(columns=128, depth=64, stages=3, parts=1)
PLAN = torch.empty(plan_numbers(Problem(512, 512, 2, 256, 128, 256, 512)), dtype=torch.int32)
pytestmark = pytest.mark.usefixtures("config_folder")


def of(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)


def columns(kernel, tokens=512, k=128, **more):
    """Of the tile that would be launched, on a device that is none, where Gluon's kernels can't run."""
    with (
        mock.patch.object(launches, "describe", return_value=HOPPER),
        mock.patch.object(launches, "has_gluon", return_value=False),
    ):
        if kernel == "weight_gradient":
            made = launches.weight_gradient(of(tokens, 256), of(tokens, k), of(2, 256, k), PLAN, **more)
            return made.arguments["BLOCK_B"]
        swiglu = {"options": Options(activation="swiglu"), "before": of(tokens, 256)} if kernel == "swiglu" else {}
        x, weight, out = of(tokens, k), of(2, 256, k), of(tokens, 128 if swiglu else 256)
        return launches.product(x, weight, out, PLAN, tokens=tokens, **swiglu, **more).arguments["BLOCK_N"]


@pytest.mark.parametrize("kernel", ["product", "swiglu"])
def test_a_launch_takes_a_stored_config_for_sizes_near_its_own(kernel):
    first = product_config(HOPPER.shared, 2, short=False).columns
    assert columns(kernel) == first != STORED.columns
    sizes = {"m": 512, "g": 2, "n": 256, "k": 128}
    entry = Entry(kernel, "bfloat16", sizes, vars(STORED), 1.0, {"triton": "3.6.0"}, "2026-11-23")
    write_entry(configs.user_folder(), "grouped_matmul", "h100", entry)
    assert columns(kernel) == columns(kernel, tokens=400) == STORED.columns
    assert columns("swiglu" if kernel == "product" else "product") == first
    assert columns(kernel, tokens=4096) == first
    assert columns(kernel, k=132) == first  # no descriptor fits such rows
    assert columns(kernel, config=ProductConfig(columns=64)) == 64


def test_so_does_the_weights_gradient():
    assert columns("weight_gradient") == gradient_config(HOPPER.shared, 2).columns
    stored = ProductConfig(columns=256, depth=64, stages=3, parts=4)
    sizes = {"m": 512, "g": 2, "n": 256, "k": 128}
    entry = Entry("weight_gradient", "bfloat16", sizes, vars(stored), 1.0, {"triton": "3.6.0"}, "2026-11-23")
    write_entry(configs.user_folder(), "grouped_matmul", "h100", entry)
    assert columns("weight_gradient") == 256


# Triton reads TRITON_INTERPRET when it is imported, so this needs a process of its own.
INTERPRETED = """
import json, torch
from interpreter import speed_up
from onchip.tune import grouped_matmul as tuning
from fp8_linear import fp8_interpreter

speed_up()
fp8_interpreter.mend()
said = {}
for kernel in tuning.KERNELS:
    problem = tuning.make_problem(kernel, "cpu", "float16", m=200, g=3, n=256, k=128)
    reference = tuning.reference(kernel, problem)
    tried = tuning.candidates(kernel)
    first, last = (tuning.step(kernel, problem, config) for config in (tried[0], tried[-1]))
    poisoned = tuning.check(kernel, reference, problem.outputs)
    right = [tuning.check(kernel, reference, step()) for step in (last, first)]
    wrong = tuning.check(kernel, reference, [1.05 * out for out in problem.outputs])
    said[kernel] = [poisoned, right, wrong]
print(json.dumps(said))
"""


@pytest.mark.slow
def test_every_kernel_is_right_under_the_interpreter():
    paths = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout)
    assert list(said) == list(KERNELS) == list(tuning.KERNELS)
    for kernel, (poisoned, right, wrong) in said.items():
        assert poisoned[0] != poisoned[0], kernel
        assert all(error <= bound / 5 for error, bound in right), (kernel, right)
        assert wrong[0] > wrong[1], kernel
