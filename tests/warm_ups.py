"""Run by test_warm_up.py with the GPU that isn't there: prints what `warm_up` compiled, and what calls still lack."""

import json
import os
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch

import fake_cuda
import onchip.torch
from onchip.frontend.warm_up import Sizes, calls
from onchip.kernels.triton import compiling
from onchip.torch import warm

CALLS = {
    "cross_entropy": {"vocab": 500},
    "linear_cross_entropy": {"hidden": 64, "vocab": 1000},
}
LENGTHS = 7, 300, 1003, 5000


@contextmanager
def on_the_cpu():
    """`warm_up` takes the CPU for the GPU."""
    with ExitStack() as stack:
        for of, name, does in (
            (warm, "_device", lambda device: torch.device("cpu")),
            (torch.cuda, "device", lambda device: nullcontext()),
            (torch.cuda, "synchronize", lambda device: None),
            (torch.cuda, "get_device_name", str),
        ):
            stack.enter_context(mock.patch.object(of, name, does))
        yield


def call(op, tokens):
    def make(*shape, dtype="bfloat16", of_weight=False, constant=False):
        made = torch.zeros(shape, dtype=getattr(torch, dtype))
        return made.requires_grad_(made.is_floating_point() and not constant)

    sizes = dict.fromkeys(Sizes._fields, 0) | CALLS[op] | {"tokens": tokens}
    arguments = calls()[op].arguments(Sizes(**sizes), make)
    getattr(onchip.torch, op)(**arguments).backward()


def main():
    op, kind = sys.argv[1:]
    lacked = []
    with fake_cuda.gpu():
        made = None
        if kind == "warm":
            with on_the_cpu():
                made = warm.warm_up(op, tokens=64, **CALLS[op])
        with compiling.told() as told:
            for tokens in LENGTHS:
                call(op, tokens)
        lacked = told.compiled
    print(json.dumps({"made": made, "lacked": lacked}), flush=True)
    os._exit(0)  # the threads of a GPU that isn't there end as they like


if __name__ == "__main__":
    main()
