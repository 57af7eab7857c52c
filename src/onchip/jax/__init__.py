"""The public JAX API."""

from onchip.core.machine import naming_extra

with naming_extra("onchip.jax", "jax"):
    import jax as _jax  # noqa: F401

from onchip.frontend.options import LossStats as CrossEntropyStats
from onchip.frontend.options import LossStats as LinearCrossEntropyStats
from onchip.frontend.topk import TopK
from onchip.groups.routing import MoEStats
from onchip.ops.attention.jax_nn import dot_product_attention
from onchip.ops.attention.jax_op import attention
from onchip.ops.collective_matmul.jax_op import all_gather_matmul, matmul_reduce_scatter
from onchip.ops.cross_entropy.jax_op import cross_entropy
from onchip.ops.fp8_linear.jax_op import fp8_linear
from onchip.ops.grouped_matmul.jax_moe import MoEParams, init_moe, moe, update_correction_bias
from onchip.ops.grouped_matmul.jax_op import grouped_matmul
from onchip.ops.linear_cross_entropy.jax_op import linear_cross_entropy, sharded_linear_cross_entropy
from onchip.ops.linear_jsd.jax_op import jsd, linear_jsd, sharded_linear_jsd
from onchip.ops.linear_log_probs import LogProbs
from onchip.ops.linear_log_probs.jax_op import linear_log_probs, log_probs, sharded_linear_log_probs

__all__ = [
    "CrossEntropyStats",
    "LinearCrossEntropyStats",
    "LogProbs",
    "MoEParams",
    "MoEStats",
    "TopK",
    "all_gather_matmul",
    "attention",
    "cross_entropy",
    "dot_product_attention",
    "fp8_linear",
    "grouped_matmul",
    "init_moe",
    "jsd",
    "linear_cross_entropy",
    "linear_jsd",
    "linear_log_probs",
    "log_probs",
    "matmul_reduce_scatter",
    "moe",
    "sharded_linear_cross_entropy",
    "sharded_linear_jsd",
    "sharded_linear_log_probs",
    "update_correction_bias",
]
