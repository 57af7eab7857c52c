"""The softmax of a chunk's logits by Triton's kernels, and its gradient in FP8, for precision='fp8'.

The two functions without `launch` in their names are as those of torch.py.
"""

import torch
from torch import Tensor

from onchip.fp8.numbers import BLOCK, blocks
from onchip.kernels.triton.launch import Launch, device_of
from onchip.vocab.fp8 import kernels
from onchip.vocab.fp8.memory import TERMS
from onchip.vocab.fp8.torch import Call, Gradient
from onchip.vocab.rows.launches import launch_rows, transform_scales
from onchip.vocab.torch.loss import Outputs

# Of a gradient's program.  Two on a multiprocessor, with a few registers spilled, take 0.64 ms for 2048 x 128256 logits
# on an H100; one, with none spilled, takes 0.95.
WARPS, REGISTERS = 8, 128


def target_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """[n] float32: the targets' logits, of numbers that are not quantised."""
    out = hidden.new_empty(len(hidden), dtype=torch.float32)
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
        "BLOCK_H": 1024,
    }
    with device_of(hidden):
        Launch(kernels.target_logits, (len(hidden),), arguments).run()
    return out


def softmax_of_chunk(part: Call, logits: Tensor, of_targets: Tensor, out: Outputs, into: Gradient) -> None:
    """The loss and the statistics of a chunk's tokens, and the gradient of its logits."""
    terms = of_targets.new_empty(TERMS, len(logits)) if into.wanted else None
    with device_of(logits):
        launch_rows(
            "losses", logits, None, part.target, part.token_weight, part.temperature, part.options, part.class_weight,
            **out._asdict(), divisor=part.divisor, target_logit=of_targets, terms_out=terms,
        )  # fmt: skip
        if terms is not None:
            gradient_launch(part, logits, terms, into).run()


def gradient_launch(
    part: Call,
    logits: Tensor,  # [n, V]
    terms: Tensor,  # [5, n] float32
    into: Gradient,
) -> Launch:
    """The gradient of a chunk's tokens."""
    n, vocab = logits.shape
    inner_scale = transform_scales(part.options)["inner_scale"]
    arguments = {
        "logits": kernels.ChunkLogits(logits, logits.stride(0), part.target, terms, part.class_weight, inner_scale),
        "rows": None if into.rows is None else into.rows.data,
        "row_scales": None if into.rows is None else into.rows.scales,
        "columns": None if into.columns is None else into.columns.data.view(torch.int32),
        "column_scales": None if into.columns is None else into.columns.scales,
        "sums": into.sums,
        "rows_stride": 0 if into.rows is None else into.rows.data.stride(0),
        "columns_stride": 0 if into.columns is None else into.columns.data.stride(0) // 4,
        "n_16": n + 16,
        "V_16": vocab + 16,
        "SMOOTHING": part.options.label_smoothing > 0,
        "RAGGED": vocab % BLOCK > 0,
    }
    # Rows that are not aligned take more, one number at a time, and so do sums.
    registers = REGISTERS if vocab % 16 == 0 and into.sums is None else None
    return Launch(kernels.softmax_gradient, (blocks(n), blocks(vocab)), arguments, WARPS, registers=registers)
