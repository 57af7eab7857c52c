"""The softmax of a chunk's logits by Triton's kernels, and its gradient in FP8, for precision='fp8'.

The two functions without `launch` in their names are as those of fp8_torch.py.
"""

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]

from onchip.ops._shared.triton_calls import Launch, device_of
from onchip.ops.cross_entropy.torch_arguments import Arguments
from onchip.ops.cross_entropy.triton_op import launch_rows
from onchip.ops.fp8_linear.spec import BLOCK, blocks
from onchip.ops.fp8_linear.torch_quantize import Quantized
from onchip.ops.fp8_linear.triton_launches import capability_of
from onchip.ops.fp8_linear.triton_spec import QuantizeConfig
from onchip.ops.linear_cross_entropy import fp8_kernels
from onchip.ops.linear_cross_entropy.fp8_torch import Call, Gradient, Softmax

# Blocks of a program, on their way at once; see `QuantizeConfig`.
CONFIG = QuantizeConfig(blocks=4, stages=2)


def target_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """[n] float32: the targets' logits, of numbers that are not quantised."""
    out = hidden.new_empty(len(hidden), dtype=torch.float32)
    with device_of(hidden):
        target_launch(hidden, weight, bias, target, out).run()
    return out


def target_launch(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, out: Tensor) -> Launch:
    arguments = {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "target": target,
        "logits": out,
        "weight_stride_v": weight.stride(0),
        "weight_stride_h": weight.stride(1),
        "H": weight.shape[1],
        "V": weight.shape[0],
        "BIAS": bias is not None,
        "BLOCK_H": 1024,
    }
    return Launch(fp8_kernels.target_logits, (len(hidden),), arguments)


def softmax_of_chunk(
    call: Call, logits: Tensor, of_targets: Tensor, first: int, out: Softmax, into: Gradient | None
) -> None:
    """The loss and the statistics of a chunk's tokens, and the gradient of its logits."""
    part, mine = call.part(first, first + len(logits)), out.part(first, first + len(logits))
    arguments = Arguments(
        logits, part.target, part.token_weight, part.temperature, None, call.ignore_index, "none",
        call.label_smoothing, call.z_loss, call.softcap, call.logit_scale, call.plain_temperature,
        check_inputs=False, scratch_bytes=None, stats=call.stats, inplace=False, grad=False,
    )  # fmt: skip
    with device_of(logits):
        launch_rows(
            arguments, "losses", logits[:0],
            {
                **mine._asdict(), "divisor": call.divisor, "target_logit": of_targets, "TARGET_LOGIT": True,
                "STATS": call.stats, "GRADIENT": False,
            },
        )  # fmt: skip
        if into is not None:
            gradient_launch(part, logits, of_targets, first, mine, into, CONFIG).run()


def gradient_launch(
    part: Call,
    logits: Tensor,  # [n, V]
    of_targets: Tensor,  # [n] float32
    first: int,
    softmax: Softmax,
    into: Gradient,
    config: QuantizeConfig,
    *,
    tma: bool | None = None,
) -> Launch:
    """The gradient of a chunk's tokens, of which `part` and `softmax` are."""
    n, vocab = logits.shape
    if tma is None:
        tma = config.tma and capability_of(logits.device.index) >= 90
    # A descriptor's address and strides are multiples of 16 bytes.  All by descriptors or all by pointers: read by
    # pointers and written through descriptors, nothing stayed in registers.
    tma = tma and logits.stride(0) * logits.element_size() % 16 == 0 and logits.data_ptr() % 16 == 0

    def operand(x: Tensor) -> Any:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [BLOCK, BLOCK]) if tma else x

    def data(q: Quantized | None) -> Any:
        return None if q is None else operand(q.data)

    arguments = {
        "logits": operand(logits),
        "target": part.target,
        "of_targets": of_targets,
        "token_weight": part.token_weight,
        "temperature": part.temperature,
        "divisor": part.divisor,
        "lse": softmax.lse,
        "log_prob": softmax.log_prob,
        "rows": data(into.rows),
        "row_scales": None if into.rows is None else into.rows.scales,
        "columns": data(into.columns),
        "column_scales": None if into.columns is None else into.columns.scales,
        "sums": into.sums,
        "logits_stride": logits.stride(0),
        "rows_stride": 0 if into.rows is None else into.rows.data.stride(0),
        "columns_stride": 0 if into.columns is None else into.columns.data.stride(0),
        "first": first,
        "n": n,
        "V": vocab,
        "ignore_index": part.ignore_index,
        "inner_scale": 1.0 if part.softcap is None else part.logit_scale / part.softcap,
        "outer_scale": (part.logit_scale if part.softcap is None else part.softcap) / part.plain_temperature,
        "logit_scale": part.logit_scale / part.plain_temperature,
        "label_smoothing": part.label_smoothing,
        "z_loss": part.z_loss,
        "TOKEN_WEIGHT": part.token_weight is not None,
        "TEMPERATURE": part.temperature is not None,
        "SMOOTHING": part.label_smoothing > 0,
        "SOFTCAP": part.softcap is not None,
        "POSITIVE": part.token_weight is None and part.z_loss == 0,
        "RAGGED": vocab % BLOCK > 0,
        "ROWS": into.rows is not None,
        "COLUMNS": into.columns is not None,
        "SUMS": into.sums is not None,
        "BLOCKS": config.blocks,
        # Pipelined loads by pointers take more registers than there are.
        "STAGES": config.stages if tma else 1,
        "TWICE": config.twice and into.rows is not None,
        "TMA": tma,
    }
    grid = (blocks(n), -(-blocks(vocab) // config.blocks))
    # Where blocks are read twice, so few registers do that two programs fit a multiprocessor.
    registers = 1024 // config.warps if config.twice else None
    return Launch(fp8_kernels.softmax_gradient, grid, arguments, config.warps, registers=registers)
