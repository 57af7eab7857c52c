"""Types of PyTorch's public functions."""

from typing import Literal, NamedTuple, TypedDict

from torch import Tensor
from typing_extensions import TypeVar

from onchip.frontend.options import OptionsOfLoss
from onchip.frontend.topk import TopK

Backend = Literal["auto", "triton", "plain", "torch"]


class LossStats(NamedTuple):
    """Per-token statistics of a cross-entropy, without gradients; ignored tokens hold 0 (False, in argmax -1)."""

    lse: Tensor
    """[...] of the loss's dtype: log-sum-exp of the final logits."""
    log_prob: Tensor
    """[...] of the loss's dtype: log-probability of the target; with soft labels q it is sum(q * log(p))."""
    entropy: Tensor
    """[...] of the loss's dtype: entropy of the softmax, in nats."""
    correct: Tensor
    """[...] bool: whether the target, or with soft labels the likeliest one, is the argmax."""
    argmax: Tensor
    """[...] int64: the vocabulary index of the largest logit (the first one, where logits tie)."""
    target_logit: Tensor
    """[...] of the loss's dtype: the target's final logit z; with soft labels q it is sum(q * z)."""


Target = Tensor | TopK[Tensor] | None
"""Ids or soft labels of a cross-entropy."""
WithStats = tuple[Tensor, LossStats]
Result = TypeVar("Result", default=Tensor)
"""What a module of a loss returns: the loss, or with return_stats the loss and its statistics."""


class OfToken(TypedDict, total=False):
    """The keywords that a call of a cross-entropy takes and its module doesn't."""

    token_weight: Tensor | None
    class_weight: Tensor | None


class LossKeywords(OptionsOfLoss[float], total=False):
    """The keywords of every cross-entropy and its module, except return_stats."""

    normalizer: float | Tensor | None
    backend: Backend
