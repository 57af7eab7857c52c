"""Run by test_warm_up.py with the GPU that isn't there: prints what `warm_up` compiled, and what calls still lack."""

import json
import os
import sys

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
        sizes = Sizes(**dict.fromkeys(Sizes._fields, 0) | CALLS[op] | {"tokens": 64})
        made = None
        if kind == "warm":
            made = warm._warmed(
                op, sizes, torch.bfloat16, torch.bfloat16, torch.device("cpu"), {}, gradients=True, frozen=False
            )
        with compiling.told() as told:
            for tokens in LENGTHS:
                call(op, tokens)
        lacked = told.compiled
    print(json.dumps({"made": made, "lacked": lacked}), flush=True)
    os._exit(0)  # the threads of a GPU that isn't there end as they like


if __name__ == "__main__":
    main()
