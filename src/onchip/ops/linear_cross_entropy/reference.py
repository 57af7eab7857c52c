"""The contract of linear_cross_entropy in NumPy float64, with gradients: the oracle of every test."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.oracle import reference
from onchip.oracle.reference import Array, Indices, Linear


class Result(NamedTuple):
    """Loss, statistics and gradients.  The per-token fields have the shape of the target."""

    loss: Array
    lse: Array
    log_prob: Array
    entropy: Array
    correct: npt.NDArray[np.bool_]
    argmax: Indices
    target_logit: Array
    grad_hidden: Array
    grad_weight: Array
    grad_bias: Array


def linear_cross_entropy(
    hidden: npt.ArrayLike,  # [..., H]
    weight: npt.ArrayLike,  # [V, H]
    target: npt.ArrayLike,  # [...]
    bias: npt.ArrayLike | None = None,  # [V]
    **options: Any,
) -> Result:
    """Loss, statistics and the gradients of sum(grad_loss * loss), all in float64.

    The options are those of `onchip.oracle.reference.cross_entropy`, which also says what ignored tokens and a target
    out of range give.
    """
    layer = Linear(hidden, weight, bias)
    result = reference.cross_entropy(layer.products, layer.backward, layer.vocab, target, **options)
    return Result(*result, *layer.gradients)
