"""The public PyTorch API."""

from onchip.ops.linear_cross_entropy.torch_op import (
    LinearCrossEntropyLoss,
    LinearCrossEntropyStats,
    linear_cross_entropy,
)

__all__ = ["LinearCrossEntropyLoss", "LinearCrossEntropyStats", "linear_cross_entropy"]
