"""precision='fp8' on the Triton kernels under Triton's interpreter: what test_lce_fp8.py starts.

Products are those of dequantised numbers, and logits are stored in float32: the interpreter computes bfloat16 wrongly.
"""

import sys
from functools import partial
from unittest import mock

import numpy as np
import torch
from lce_fp8_common import CASES, results

from fp8_linear import fp8_interpreter
from interpreter import main
from onchip.ops.linear_cross_entropy import fp8_op
from onchip.torch import linear_cross_entropy

NAMES = ("ragged", "small", "everything")


def op(name):
    """The same as PyTorch's operations make of the same problem, in chunks of 128 tokens."""
    (case,) = (c for c in CASES if c.name == name)
    with (
        mock.patch.object(fp8_op, "refusals", return_value={"torch": None, "triton": None}),
        mock.patch.object(fp8_op, "LOGITS", torch.float32),
        mock.patch.object(fp8_op.fp8_spec, "DEFAULT_CHUNK", 128),
    ):
        made, _ = results(case, torch.float32, backend="triton")
        right, _ = results(case, torch.float32, backend="torch")
    assert made.keys() == right.keys()
    for key, value in right.items():
        # A number that is nearly between two of E4M3 may come out as the one or the other.
        bound = 2e-3 if key in ("grad_hidden", "grad_weight") else 1e-5
        assert np.linalg.norm(made[key] - value) <= bound * np.linalg.norm(value), (key, made[key], value)


def strides():
    """Of hidden states and of a weight that are transposed in memory, and of a bias of every other number; without
    statistics, of some gradients alone."""
    h, w, b = torch.randn(40, 24), torch.randn(70, 24), torch.randn(140)[::2]
    y = torch.randint(70, (40,))
    y[3] = -100
    with (
        mock.patch.object(fp8_op, "refusals", return_value={"torch": None, "triton": None}),
        mock.patch.object(fp8_op, "LOGITS", torch.float32),
    ):
        for needs in ((True, False), (False, True), (False, False)):
            made = []
            for change in (torch.clone, lambda x: x.T.contiguous().T):
                leaves = [change(x).requires_grad_(need) for x, need in zip((h, w), needs, strict=True)]
                bias = b.clone(memory_format=torch.contiguous_format) if change is torch.clone else b
                loss = linear_cross_entropy(*leaves, y, bias, precision="fp8", backend="triton")
                if any(needs):
                    loss.backward()
                made.append([loss.detach(), *(x.grad for x in leaves if x.requires_grad)])
            assert all(torch.equal(p, q) for p, q in zip(*made, strict=True)), needs


CHECKS = {"strides": strides} | {f"op {name}": partial(op, name) for name in NAMES}

if __name__ == "__main__":
    fp8_interpreter.mend()
    main(CHECKS, sys.argv[1:])
