"""Types of JAX's public functions."""

from typing import Generic, Literal

import jax
import numpy as np
import numpy.typing as npt

from onchip.frontend.options import Flag, LossStats, OptionsOfLoss, Returning
from onchip.frontend.topk import TopK

Array = jax.Array | npt.NDArray[np.generic]
"""What a function takes as an array."""
Number = float | Array | np.generic
"""A number: Python's or NumPy's, or a 0-d array."""
WeightLayout = Literal["vh", "hv"]


Target = Array | TopK[Array] | None
"""Ids or soft labels of a cross-entropy."""
WithStats = tuple[jax.Array, LossStats[jax.Array]]


class JaxLossKeywords(OptionsOfLoss[Number], Returning[Flag], Generic[Flag], total=False):
    """The keywords of every cross-entropy."""

    labels: Target
    shift: bool
    vocab_size: int | None
    normalizer: Number | None
    token_weight: Array | None
    class_weight: Array | None
    temperature: Number
