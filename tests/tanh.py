"""The kernels' tanh beside float64's, at any size; and a Triton kernel of nothing else."""

import numpy as np
import torch
import triton
import triton.language as tl

from onchip.kernels.triton import maths as triton_maths

SPECIAL = [0.0, 1e-45, 1e-40, 1e-30, 0.3999999, 0.4, 0.4000001, 20.0, 3e38, np.inf, np.nan]


def assert_is_tanh(function):
    """`function` of a float32 array, and the derivative that is made of its result."""
    x = np.concatenate([np.logspace(-38, 2, 9001), np.linspace(0, 10, 7361), SPECIAL]).astype(np.float32)
    x = np.concatenate([x, -x, np.zeros(-2 * len(x) % 1024, np.float32)])
    made, right = function(x), np.tanh(x.astype(np.float64))
    assert (np.isnan(made) == np.isnan(x)).all()
    finite = ~np.isnan(x)
    eps, tiny = np.finfo(np.float32).eps, np.finfo(np.float32).tiny  # subnormals may count as 0
    assert (np.abs(made - right) <= 8 * eps * np.abs(right) + tiny)[finite].all()
    assert (np.abs((1 - made * made) - (1 - right * right)) <= 8 * eps * right * right + eps)[finite].all()


@triton.jit
def tanh_kernel(x, out, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + at, triton_maths.tanh(tl.load(x + at)))


def triton_tanh(x, device):
    """For `assert_is_tanh`."""
    given = torch.from_numpy(x).to(device)
    out = torch.empty_like(given)
    tanh_kernel[(len(x) // 1024,)](given, out, TILE=1024)
    return out.cpu().numpy()
