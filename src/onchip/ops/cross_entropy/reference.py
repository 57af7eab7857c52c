"""The contract of cross_entropy in NumPy float64, with gradients: the oracle of every test."""

from typing import Any

import numpy.typing as npt

from onchip.oracle import reference
from onchip.oracle.reference import Logits, SoftLabels, with_gradients


def cross_entropy(
    logits: npt.ArrayLike,  # [..., V]
    target: npt.ArrayLike,  # [...]
    **options: Any,
) -> Any:
    """The fields of `onchip.oracle.reference.Loss`, and grad_logits, the gradient of sum(grad_loss * loss).

    The options are those of `onchip.oracle.reference.cross_entropy`, which also says how ignored tokens and targets
    out of range are treated.
    """
    given = Logits(logits)
    made = reference.cross_entropy(given.products, given.backward, given.vocab, target, **options)
    return with_gradients(made._asdict(), given)


def soft_cross_entropy(logits: npt.ArrayLike, target: npt.ArrayLike | SoftLabels, **options: Any) -> Any:
    """The loss and grad_logits for targets that are probabilities; the options are those of
    `onchip.oracle.reference.soft_cross_entropy`."""
    given = Logits(logits)
    loss = reference.soft_cross_entropy(given.products, given.backward, given.vocab, target, **options)
    return with_gradients({"loss": loss}, given)
