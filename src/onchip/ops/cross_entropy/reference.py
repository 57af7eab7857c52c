"""The contract of cross_entropy in NumPy float64, with gradients: the oracle of every test."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.oracle import reference
from onchip.oracle.reference import Array, Indices


class Result(NamedTuple):
    """Loss, statistics and the gradient.  The per-token fields have the shape of the target."""

    loss: Array
    lse: Array
    log_prob: Array
    entropy: Array
    correct: npt.NDArray[np.bool_]
    argmax: Indices
    target_logit: Array
    grad_logits: Array


def cross_entropy(
    logits: npt.ArrayLike,  # [..., V]
    target: npt.ArrayLike,  # [...]
    **options: Any,
) -> Result:
    """Loss, statistics and the gradient of sum(grad_loss * loss), all in float64.

    The options are those of `onchip.oracle.reference.cross_entropy`, which also says what ignored tokens and a target
    out of range give.
    """
    given = np.asarray(logits, np.float64)
    x = given.reshape(-1, given.shape[-1])
    grad = np.zeros_like(x)

    def backward(rows: Indices, gradient: Array) -> None:
        grad[rows] = gradient

    result = reference.cross_entropy(lambda rows: x[rows], backward, x.shape[1], target, **options)
    return Result(*result, grad.reshape(given.shape))
