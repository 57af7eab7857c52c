"""The contract of linear_cross_entropy in NumPy float64, with gradients: the oracle of every test."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from onchip.oracle import reference
from onchip.oracle.reference import Array, Indices, Linear, SoftLabels


class LinearCrossEntropyResult(NamedTuple):
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
    *,
    shift: bool = False,
    ignore_index: int = -100,
    token_weight: npt.ArrayLike | None = None,  # [...]
    **options: Any,
) -> LinearCrossEntropyResult:
    """Loss, statistics and the gradients of sum(grad_loss * loss), all in float64.

    The options are those of `onchip.oracle.reference.cross_entropy`, which also says how ignored tokens and targets out
    of range are treated.  With `shift` each position has the next one's target and weight, and the last one none.
    """
    if shift:
        target = _next(np.asarray(target).astype(np.int64), ignore_index)
        token_weight = None if token_weight is None else _next(np.asarray(token_weight), 0)
    layer = Linear(hidden, weight, bias)
    result = reference.cross_entropy(
        layer.products,
        layer.backward,
        layer.vocab,
        target,
        ignore_index=ignore_index,
        token_weight=token_weight,
        **options,
    )
    return LinearCrossEntropyResult(*result, *layer.gradients)


class LinearCrossEntropySoftResult(NamedTuple):
    """Loss and gradients."""

    loss: Array
    grad_hidden: Array
    grad_weight: Array
    grad_bias: Array


def soft_linear_cross_entropy(
    hidden: npt.ArrayLike,  # [..., H]
    weight: npt.ArrayLike,  # [V, H]
    target: npt.ArrayLike | SoftLabels,  # [..., V]
    bias: npt.ArrayLike | None = None,  # [V]
    **options: Any,
) -> LinearCrossEntropySoftResult:
    """The same for targets that are probabilities; the options are those of
    `onchip.oracle.reference.soft_cross_entropy`."""
    layer = Linear(hidden, weight, bias)
    loss = reference.soft_cross_entropy(layer.products, layer.backward, layer.vocab, target, **options)
    return LinearCrossEntropySoftResult(loss, *layer.gradients)


def _next(x: npt.NDArray[Any], last: int) -> npt.NDArray[Any]:
    """`x` at the next position, and `last` at the end of each sequence."""
    return np.concatenate([x[..., 1:], np.full_like(x[..., :1], last)], -1)
