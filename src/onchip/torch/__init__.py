"""The public PyTorch API."""

from onchip.core.machine import naming_extra

with naming_extra("onchip.torch", "torch"):
    import torch as _torch  # noqa: F401

from onchip.fp8.torch_operands import QuantizedActivation, QuantizedWeight
from onchip.frontend.options import LossStats as CrossEntropyStats
from onchip.frontend.options import LossStats as LinearCrossEntropyStats
from onchip.frontend.topk import TopK
from onchip.groups.routing import MoEStats
from onchip.ops.attention.torch_op import attention
from onchip.ops.collective_matmul.torch_module import ColumnParallelLinear, RowParallelLinear
from onchip.ops.collective_matmul.torch_op import all_gather_matmul, matmul_reduce_scatter
from onchip.ops.cross_entropy.torch_op import CrossEntropyLoss, cross_entropy
from onchip.ops.fp8_linear.torch_module import Fp8Linear, convert_linears, weights_unchanged
from onchip.ops.fp8_linear.torch_op import fp8_linear, quantize_activation, quantize_weight
from onchip.ops.grouped_matmul.torch_moe import MoE
from onchip.ops.grouped_matmul.torch_op import grouped_matmul
from onchip.ops.linear_cross_entropy.torch_module import LMHead, lm_loss
from onchip.ops.linear_cross_entropy.torch_op import LinearCrossEntropyLoss, linear_cross_entropy
from onchip.ops.linear_jsd.torch_op import jsd, linear_jsd
from onchip.ops.linear_log_probs import LogProbs
from onchip.ops.linear_log_probs.torch_op import linear_log_probs, log_probs
from onchip.torch.heads import lm_jsd, lm_log_probs
from onchip.torch.warm import WarmUp, warm_up

__all__ = [
    "ColumnParallelLinear",
    "CrossEntropyLoss",
    "CrossEntropyStats",
    "Fp8Linear",
    "LMHead",
    "LinearCrossEntropyLoss",
    "LinearCrossEntropyStats",
    "LogProbs",
    "MoE",
    "MoEStats",
    "QuantizedActivation",
    "QuantizedWeight",
    "RowParallelLinear",
    "TopK",
    "WarmUp",
    "all_gather_matmul",
    "attention",
    "convert_linears",
    "cross_entropy",
    "fp8_linear",
    "grouped_matmul",
    "jsd",
    "linear_cross_entropy",
    "linear_jsd",
    "linear_log_probs",
    "lm_jsd",
    "lm_log_probs",
    "lm_loss",
    "log_probs",
    "matmul_reduce_scatter",
    "quantize_activation",
    "quantize_weight",
    "warm_up",
    "weights_unchanged",
]
