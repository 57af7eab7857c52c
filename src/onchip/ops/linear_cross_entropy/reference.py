"""The contract of linear_cross_entropy in NumPy float64, with gradients: the one oracle of every test.

Written for reading, not for speed; the maths is in the package's docstring.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.oracle import reference
from onchip.oracle.reference import Array, Indices


class Result(NamedTuple):
    """Loss, statistics and gradients.  The per-token fields have the shape of the target."""

    loss: Array
    lse: Array
    log_prob: Array
    entropy: Array
    correct: npt.NDArray[np.bool_]
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
    w = np.asarray(weight, np.float64)
    vocab, hidden_size = w.shape
    given = np.asarray(hidden, np.float64)
    h = given.reshape(-1, hidden_size)
    b = np.zeros(vocab) if bias is None else np.asarray(bias, np.float64)
    grad_h, grad_w, grad_b = np.zeros_like(h), np.zeros_like(w), np.zeros_like(b)

    def backward(rows: Indices, gradient: Array) -> None:
        grad_h[rows] = gradient @ w
        grad_w[:] += gradient.T @ h[rows]
        grad_b[:] += gradient.sum(0)

    result = reference.cross_entropy(lambda rows: h[rows] @ w.T + b, backward, vocab, target, **options)
    return Result(*result, grad_h.reshape(given.shape), grad_w, grad_b)
