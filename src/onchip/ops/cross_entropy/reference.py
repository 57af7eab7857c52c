"""The contract of cross_entropy in NumPy float64, with gradients: the oracle of every test."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.oracle import reference
from onchip.oracle.reference import Array, Indices, SoftLabels


class CrossEntropyResult(NamedTuple):
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
) -> CrossEntropyResult:
    """Loss, statistics and the gradient of sum(grad_loss * loss), all in float64.

    The options are those of `onchip.oracle.reference.cross_entropy`, which also says how ignored tokens and targets
    out of range are treated.
    """
    rows = _CrossEntropyRows(logits)
    result = reference.cross_entropy(rows.products, rows.backward, rows.vocab, target, **options)
    return CrossEntropyResult(*result, rows.grad.reshape(np.shape(logits)))


class CrossEntropySoftResult(NamedTuple):
    """Loss and the gradient."""

    loss: Array
    grad_logits: Array


def soft_cross_entropy(
    logits: npt.ArrayLike, target: npt.ArrayLike | SoftLabels, **options: Any
) -> CrossEntropySoftResult:
    """The same for targets that are probabilities; the options are those of
    `onchip.oracle.reference.soft_cross_entropy`."""
    rows = _CrossEntropyRows(logits)
    loss = reference.soft_cross_entropy(rows.products, rows.backward, rows.vocab, target, **options)
    return CrossEntropySoftResult(loss, rows.grad.reshape(np.shape(logits)))


class _CrossEntropyRows:
    """Logits that are given, and their gradient."""

    def __init__(self, logits: npt.ArrayLike) -> None:
        given = np.asarray(logits, np.float64)
        self.x = given.reshape(-1, given.shape[-1])
        self.vocab, self.grad = self.x.shape[1], np.zeros_like(self.x)

    def products(self, rows: Indices) -> Array:
        return self.x[rows]

    def backward(self, rows: Indices, gradient: Array) -> None:
        self.grad[rows] = gradient
