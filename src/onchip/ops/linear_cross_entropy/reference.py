"""The contract of linear_cross_entropy in NumPy float64, with gradients: the oracle of every test."""

from typing import Any

import numpy as np
import numpy.typing as npt

from onchip.oracle import reference
from onchip.oracle.reference import Linear, SoftLabels, with_gradients


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
) -> Any:
    """The fields of `onchip.oracle.reference.Loss`, and the gradients of sum(grad_loss * loss), grad_hidden and so on.

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
    return with_gradients(result._asdict(), layer)


def soft_linear_cross_entropy(
    hidden: npt.ArrayLike,  # [..., H]
    weight: npt.ArrayLike,  # [V, H]
    target: npt.ArrayLike | SoftLabels,  # [..., V]
    bias: npt.ArrayLike | None = None,  # [V]
    **options: Any,
) -> Any:
    """The loss and gradients for targets that are probabilities; the options are those of
    `onchip.oracle.reference.soft_cross_entropy`."""
    layer = Linear(hidden, weight, bias)
    loss = reference.soft_cross_entropy(layer.products, layer.backward, layer.vocab, target, **options)
    return with_gradients({"loss": loss}, layer)


def _next(x: npt.NDArray[Any], last: int) -> npt.NDArray[Any]:
    """`x` at the next position, and `last` at the end of each sequence."""
    return np.concatenate([x[..., 1:], np.full_like(x[..., :1], last)], -1)
