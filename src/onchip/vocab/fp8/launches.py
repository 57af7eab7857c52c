"""The softmax of a chunk's logits by Triton's kernels, and its gradient in FP8, for precision='fp8'.

The two functions without `launch` in their names are as those of fp8_torch.py.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from onchip.fp8.numbers import BLOCK, blocks
from onchip.fp8.triton_tiles import QuantizeConfig
from onchip.kernels.triton.launch import Launch, device_of
from onchip.vocab.fp8 import kernels as fp8_kernels
from onchip.vocab.fp8 import memory as fp8_spec
from onchip.vocab.fp8.torch import Call, Gradient, Softmax
from onchip.vocab.rows.launches import launch_rows

# Two programs on a multiprocessor, with a few registers spilled: 0.64 ms for 2048 x 128256 logits on an H100, 0.95 with
# one program and none.
CONFIG = QuantizeConfig(registers=128)


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
    options: Any = SimpleNamespace(
        ignore_index=call.ignore_index, label_smoothing=call.label_smoothing, z_loss=call.z_loss,
        softcap=call.softcap, logit_scale=call.logit_scale, temperature=call.plain_temperature,
    )  # fmt: skip
    with device_of(logits):
        launch_rows(
            "losses", logits, None, part.target, part.token_weight, part.temperature, options, **mine._asdict(),
            divisor=call.divisor, target_logit=of_targets, TARGET_LOGIT=True, STATS=call.stats, GRADIENT=False,
        )  # fmt: skip
        if into is not None:
            terms = of_targets.new_empty(fp8_spec.TERMS, len(logits))
            terms_launch(part, logits.shape[1], of_targets, mine, terms).run()
            gradient_launch(part, logits, terms, first, into, CONFIG).run()


def terms_launch(part: Call, vocab: int, of_targets: Tensor, softmax: Softmax, terms: Tensor) -> Launch:
    """What the gradients of a chunk's tokens are made with, of which `part` and `softmax` are."""
    n = len(of_targets)
    arguments = {
        "target": part.target,
        "of_targets": of_targets,
        "token_weight": part.token_weight,
        "temperature": part.temperature,
        "divisor": part.divisor,
        "lse": softmax.lse,
        "log_prob": softmax.log_prob,
        "terms": terms,
        "n": n,
        "V": vocab,
        "ignore_index": part.ignore_index,
        "inner_scale": _inner_scale(part),
        "outer_scale": (part.logit_scale if part.softcap is None else part.softcap) / part.plain_temperature,
        "logit_scale": part.logit_scale / part.plain_temperature,
        "label_smoothing": part.label_smoothing,
        "z_loss": part.z_loss,
        "TOKEN_WEIGHT": part.token_weight is not None,
        "TEMPERATURE": part.temperature is not None,
        "SMOOTHING": part.label_smoothing > 0,
        "SOFTCAP": part.softcap is not None,
        "BLOCK_T": BLOCK,
    }
    return Launch(fp8_kernels.token_terms, (blocks(n),), arguments)


def _inner_scale(part: Call) -> float:
    return 1.0 if part.softcap is None else part.logit_scale / part.softcap


def gradient_launch(
    part: Call,
    logits: Tensor,  # [n, V]
    terms: Tensor,  # [5, n] float32
    first: int,
    into: Gradient,
    config: QuantizeConfig,
) -> Launch:
    """The gradient of a chunk's tokens."""
    n, vocab = logits.shape
    arguments = {
        "logits": logits,
        "target": part.target,
        "terms": terms,
        "rows": None if into.rows is None else into.rows.data,
        "row_scales": None if into.rows is None else into.rows.scales,
        "columns": None if into.columns is None else into.columns.data.view(torch.int32),
        "column_scales": None if into.columns is None else into.columns.scales,
        "sums": into.sums,
        "logits_stride": logits.stride(0),
        "rows_stride": 0 if into.rows is None else into.rows.data.stride(0),
        "columns_stride": 0 if into.columns is None else into.columns.data.stride(0) // 4,
        "first": first,
        "n_16": n + 16,
        "V_16": vocab + 16,
        "inner_scale": _inner_scale(part),
        "SMOOTHING": part.label_smoothing > 0,
        "SOFTCAP": part.softcap is not None,
        "RAGGED": vocab % BLOCK > 0,
        "ROWS": into.rows is not None,
        "COLUMNS": into.columns is not None,
        "SUMS": into.sums is not None,
    }
    grid = (blocks(n), blocks(vocab))
    # Rows that are not aligned take more, one number at a time, and so do sums.
    registers = config.registers if vocab % 16 == 0 and into.sums is None else None
    return Launch(fp8_kernels.softmax_gradient, grid, arguments, config.warps, registers=registers)
