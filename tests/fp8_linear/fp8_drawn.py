"""What the tests of fp8_linear share in both frameworks: parameters, and numbers that are hard to quantise."""

import numpy as np
import pytest

from onchip.fp8 import numbers

SCALES = pytest.mark.parametrize("scale", numbers.SCALES)
FORMATS = pytest.mark.parametrize("fmt", numbers.FP8_MAX)
GROUPS = pytest.mark.parametrize("group", [numbers.ROW, numbers.COLUMN, numbers.SQUARE], ids=str)
BY_BLOCK = pytest.mark.parametrize("by_block", [True, False], ids=["weight", "1x128"])


def awkward(rows, columns, seed=0, smallest=1e-41):
    """Numbers of many sizes, with zero groups, tiny and huge ones, a NaN, infinities, subnormals and ties."""
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.uniform(-100, 100, (rows, -(-columns // 64))))
    x = (rng.standard_normal((rows, columns)) * np.repeat(size, 64, 1)[:, :columns]).astype(np.float32)
    x[: rows // 4, : columns // 3] = 0
    x[rows // 2 - 1 : rows // 2 + 1] = 1e-30 * rng.standard_normal(columns)
    x[-1] = smallest
    if rows > 8 and columns > 8:
        x[0, columns - 1] = np.nan
        x[1, 2], x[2, columns // 2] = np.inf, -np.inf
        x[5, :8] = [448, 17, 18, 19, 2**-9, 2**-10, 3 * 2**-10, -0.0]  # with a scale of 1 among them ties
    return x
