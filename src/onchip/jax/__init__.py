"""The public JAX API."""

from onchip.ops.linear_cross_entropy.jax_call import LinearCrossEntropyStats
from onchip.ops.linear_cross_entropy.jax_op import linear_cross_entropy

__all__ = ["LinearCrossEntropyStats", "linear_cross_entropy"]
