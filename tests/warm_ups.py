"""Run by test_warm_up.py with the GPU that isn't there: prints what `warm_up` compiled, and what calls then lack."""

import json
import os
import sys

import torch

import fake_cuda
import onchip.torch
from onchip.kernels.triton import compiling
from onchip.torch import warm

CALLS = {
    "cross_entropy": {"vocab": 500},
    "linear_cross_entropy": {"hidden": 64, "vocab": 1000},
}
LENGTHS = 7, 300, 1003, 5000


def call(op, tokens):
    def make(*shape, dtype=torch.bfloat16, of_weight=False, constant=False):
        return torch.zeros(shape, dtype=dtype).requires_grad_(dtype.is_floating_point and not constant)

    sizes = dict.fromkeys(warm._Sizes._fields, 0) | CALLS[op] | {"tokens": tokens}
    arguments = warm.CALLS[op].arguments(warm._Sizes(**sizes), make)
    getattr(onchip.torch, op)(**arguments).backward()


def main():
    op, kind = sys.argv[1:]
    lacked = []
    with fake_cuda.gpu():
        sizes = warm._Sizes(**dict.fromkeys(warm._Sizes._fields, 0) | CALLS[op] | {"tokens": 64})
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
