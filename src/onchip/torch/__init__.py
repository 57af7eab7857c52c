"""The public PyTorch API."""

from onchip.ops.cross_entropy.torch_op import CrossEntropyLoss, CrossEntropyStats, cross_entropy
from onchip.ops.linear_cross_entropy.torch_op import (
    LinearCrossEntropyLoss,
    LinearCrossEntropyStats,
    linear_cross_entropy,
)
from onchip.ops.linear_jsd.spec import TopK
from onchip.ops.linear_jsd.torch_op import jsd, linear_jsd
from onchip.ops.linear_log_probs.torch_op import LogProbs, linear_log_probs

__all__ = [
    "CrossEntropyLoss",
    "CrossEntropyStats",
    "LinearCrossEntropyLoss",
    "LinearCrossEntropyStats",
    "LogProbs",
    "TopK",
    "cross_entropy",
    "jsd",
    "linear_cross_entropy",
    "linear_jsd",
    "linear_log_probs",
]
