"""Functions on values in registers."""

import math
from typing import Any

import jax.numpy as jnp

LOG2E = math.log2(math.e)
LN2 = math.log(2)


def tanh(x: Any) -> Any:
    """tanh to a relative error of 2.4e-7 in float32; onchip.kernels.triton.maths explains it."""
    q = x * x
    series = x + x * q * (-0.33331882 + q * (0.13277629 + q * -0.047794219))
    return jnp.where(q < 0.16, series, 1 - 2 / (jnp.exp2(x * (2 * LOG2E)) + 1))
