"""Types of PyTorch's public functions."""

from typing import Literal, TypedDict

from torch import Tensor
from typing_extensions import TypeVar

from onchip.frontend.options import LossStats, OptionsOfLoss
from onchip.frontend.topk import TopK

Backend = Literal["auto", "triton", "plain", "torch"]


Target = Tensor | TopK[Tensor] | None
"""Ids or soft labels of a cross-entropy."""
WithStats = tuple[Tensor, LossStats[Tensor]]
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
