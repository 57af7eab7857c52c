"""Types of JAX's public functions."""

from typing import Generic, Literal, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from onchip.frontend.options import Flag, OptionsOfLoss, Returning
from onchip.frontend.topk import TopK

Array = jax.Array | npt.NDArray[np.generic]
"""What a function takes as an array."""
Number = float | Array | np.generic
"""A number: Python's or NumPy's, or a 0-d array."""
WeightLayout = Literal["vh", "hv"]


class LossStats(NamedTuple):
    """Per-token statistics of a cross-entropy, without gradients; ignored tokens hold 0 (False, in argmax -1)."""

    lse: jax.Array
    """[...] of the loss's dtype: log-sum-exp of the final logits."""
    log_prob: jax.Array
    """[...] of the loss's dtype: log-probability of the target; with soft labels q it is sum(q * log(p))."""
    entropy: jax.Array
    """[...] of the loss's dtype: entropy of the softmax, in nats."""
    correct: jax.Array
    """[...] bool: whether the target, or with soft labels the likeliest one, is the argmax."""
    argmax: jax.Array
    """[...] int32: the vocabulary index of the largest logit (the first one, where logits tie)."""
    target_logit: jax.Array
    """[...] of the loss's dtype: the target's final logit z; with soft labels q it is sum(q * z)."""


Target = Array | TopK[Array] | None
"""Ids or soft labels of a cross-entropy."""
WithStats = tuple[jax.Array, LossStats]


class JaxLossKeywords(OptionsOfLoss[Number], Returning[Flag], Generic[Flag], total=False):
    """The keywords of every cross-entropy."""

    labels: Target
    shift: bool
    vocab_size: int | None
    normalizer: Number | None
    token_weight: Array | None
    class_weight: Array | None
    temperature: Number
