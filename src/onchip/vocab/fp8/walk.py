"""The walk of precision='fp8' over chunks of tokens.

The three products are those of fp8_linear: hidden states and the logits' gradient with 1x128 scales along what is
summed, the weight with 128x128.  For the weight's gradient it is the hidden states that have 128x128 scales.  `forward`
takes chunks of tokens: the logits of a chunk, their softmax, its gradient in FP8, hidden's gradient.  The target's own
logit, on which the loss depends most, is made of numbers that are not quantised.  The transposed FP8 gradient of all
tokens is kept, and backward makes the weight's gradient of it in one product, whose scales carry the upstream gradient:
so it is rounded once.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.fp8.numbers import BLOCK, blocks, up
from onchip.fp8.torch_operands import Copies, quantizer
from onchip.fp8.torch_products import multiply
from onchip.fp8.torch_quantize import Quantized, empty, operand
from onchip.vocab.fp8 import torch as fp8_torch
from onchip.vocab.fp8.torch import Call, Gradient
from onchip.vocab.torch.loss import Outputs
from onchip.vocab.torch.tiles import spans

# The backends, best first, and which of fp8_linear's quantises as each does.
QUANTIZERS = {"triton": "triton", "torch": "dequantize"}
SCALE = "float32"
# What the logits of a chunk are stored in.
LOGITS = torch.bfloat16


class Parts(NamedTuple):
    """What the gradients are made of, for an upstream gradient of 1; None: not wanted."""

    grad_hidden: Tensor | None  # [..., H] float32
    columns: Tensor | None  # the logits' gradient, transposed in FP8
    column_scales: Tensor | None
    grad_bias: Tensor | None  # [V] float32

    @staticmethod
    def empty(hidden: Tensor, weight: Tensor, grads: Sequence[bool]) -> "Parts":
        vocab, size = weight.shape
        columns = empty(vocab, hidden.numel() // size, "e4m3", hidden) if grads[1] else None
        data, scales = columns or (None, None)
        return Parts(
            hidden.new_empty(hidden.shape, dtype=torch.float32) if grads[0] else None,
            data,
            scales,
            hidden.new_empty(vocab, dtype=torch.float32) if grads[2] else None,
        )


def forward(
    backend: str,
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V, H]
    copies: Copies,  # of the weight
    bias: Tensor | None,  # [V]
    call: Call,
    grads: Sequence[bool],  # of hidden, weight, bias
    chunk: int,
) -> tuple[Outputs, Parts]:
    """Each token's loss and softmax, [T], and what backward needs, so many tokens at a time."""
    softmaxes: Any = fp8_torch
    if backend == "triton":
        from onchip.vocab.fp8 import launches as softmaxes
    quantize, products = quantizer(QUANTIZERS[backend]), products_of(backend, hidden)
    softmax = Outputs.empty(replace(call.options, reduction="none"), hidden, call.target.shape[:1])
    kept, (vocab, size) = Parts.empty(hidden, weight, grads), weight.shape
    plain, transposed = copies.operand, operand(copies.turned, copies.turned_scales)
    bias = None if bias is None else bias.to(LOGITS).contiguous()  # as kernels take it
    hidden = hidden.reshape(-1, size)
    ignored = call.ignored
    if kept.grad_bias is not None:
        kept.grad_bias.zero_()
    for start, stop in spans(len(hidden), chunk):
        n, part = stop - start, call.part(start, stop)
        # An ignored token's hidden state may be NaN, and its row of the gradient is 0 times something.
        h = hidden[start:stop] if ignored is None else hidden[start:stop].masked_fill(ignored[start:stop, None], 0)
        h = h.contiguous()
        rows, _ = quantize(h, "e4m3", SCALE, turned=False)
        logits = multiply(products, rows, plain, by_block=True, bias=bias, dtype=LOGITS)
        of_targets: Tensor | None = None
        if not call.dense:
            of_targets = softmaxes.target_logits(h, weight, bias, part.target)
        if of_targets is not None and call.of_ids:
            logits.scatter_(1, part.target.clamp(0, vocab - 1), of_targets.to(logits.dtype))
            of_targets = None
        del h, rows
        columns = operand(kept.columns, kept.column_scales)
        if columns is not None:
            block = slice(start // BLOCK, blocks(stop))
            columns = Quantized(columns.data[:, start : start + up(n)], columns.scales[block])
        into = Gradient(
            None if kept.grad_hidden is None else empty(n, vocab, "e4m3", hidden),
            columns,
            None if kept.grad_bias is None else kept.grad_bias.new_empty(blocks(n), vocab),
        )
        out = Outputs._make(None if x is None else x[start:stop] for x in softmax)
        softmaxes.softmax_of_chunk(part, logits, of_targets, out, into)
        del logits
        if kept.grad_hidden is not None:
            made = multiply(products, into.rows, transposed, by_block=True, dtype=torch.float32)
            kept.grad_hidden.view(-1, size)[start:stop] = made
            del made
        if kept.grad_bias is not None and into.sums is not None:
            kept.grad_bias.add_(into.sums.sum(0))
        del into, columns  # before the next chunk's is made
    return softmax, kept


def products_of(backend: str, like: Tensor) -> str:
    """Which of fp8_linear's backends multiplies: under Triton's interpreter, on the CPU, there is no cuBLAS."""
    return "scaled_mm" if backend == "triton" and like.is_cuda else "dequantize"
