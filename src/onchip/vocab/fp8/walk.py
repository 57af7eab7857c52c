"""precision='fp8': the walk over chunks of tokens.

The three products are those of fp8_linear: hidden states and the logits' gradient have 1x128 scales along the summed
dimension, the weight has 128x128 scales.  In the weight's gradient, the hidden states have the 128x128 scales.  For
each chunk of tokens `forward` makes the logits, their softmax, its gradient in FP8, and hidden's gradient.  The
target's own logit, on which the loss depends most, is made from numbers that are not quantised.  The transposed FP8
gradient of all tokens is kept; from it backward makes the weight's gradient in one product, whose scales carry the
upstream gradient, so that it is rounded once.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.fp8.numbers import BLOCK, blocks, up
from onchip.fp8.torch_operands import Copies, quantizer
from onchip.fp8.torch_products import multiply
from onchip.fp8.torch_quantize import TorchQuantized, empty, operand
from onchip.vocab.fp8 import torch as fp8_torch
from onchip.vocab.fp8.torch import LogitsCall, LogitsGradient
from onchip.vocab.torch.loss import LossOutputs
from onchip.vocab.torch.softmax import Asked, TokenGradient, TokenStats, write_at
from onchip.vocab.torch.tiles import Ids, spans

# The backends, best first, and which of fp8_linear's quantises as each does.
QUANTIZERS = {"triton": "triton", "plain": "dequantize"}
SCALE = "float32"
# What the logits of a chunk are stored in.
LOGITS = torch.bfloat16
ChunkLogits = tuple[Tensor, Tensor | None]
"""The logits of a chunk, and those of its targets if they are computed apart."""


class Parts(NamedTuple):
    """What the gradients are made from, for an upstream gradient of 1; None for what is not wanted."""

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
            hidden.new_zeros(vocab, dtype=torch.float32) if grads[2] else None,
        )


class Source:
    """What the logits are made from, and what their gradient is multiplied by."""

    def __init__(
        self,
        backend: str,
        hidden: Tensor,  # [..., H]
        weight: Tensor,  # [V, H]
        copies: Copies,  # of the weight
        bias: Tensor | None,  # [V]
        call: LogitsCall,
    ) -> None:
        self.softmaxes: Any = fp8_torch
        if backend == "triton":
            from onchip.vocab.fp8 import launches

            self.softmaxes = launches
        self.call, self.weight = call, weight
        self._quantize, self._products = quantizer(QUANTIZERS[backend]), products_of(backend, hidden)
        self._plain, self._transposed = copies.operand, operand(copies.turned, copies.turned_scales)
        self._bias = None if bias is None else bias.to(LOGITS).contiguous()  # as kernels take it
        self._hidden, self._ignored = hidden.reshape(-1, weight.shape[1]), call.ignored

    def logits(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """The logits of tokens [start, stop), and of their targets: with one target per token, from numbers that aren't
        quantised.
        """
        part, ignored = self.call.part(start, stop), self._ignored
        # An ignored token's hidden state may be NaN, and its row of the gradient is 0 times something.
        h = self._hidden[start:stop]
        h = (h if ignored is None else h.masked_fill(ignored[start:stop, None], 0)).contiguous()
        rows, _ = self._quantize(h, "e4m3", SCALE, turned=False)
        logits = multiply(self._products, rows, self._plain, by_block=True, bias=self._bias, dtype=LOGITS)
        if part.dense:
            return logits, None
        of_targets: Tensor = self.softmaxes.target_logits(h, self.weight, self._bias, part.ids)
        if part.of_ids and part.of_shard:
            write_at(logits, part.ids, 0, of_targets.to(logits.dtype))
            return logits, None
        if part.of_ids:
            logits.scatter_(1, part.ids.clamp(0, len(self.weight) - 1), of_targets.to(logits.dtype))
            return logits, None
        return logits, of_targets

    def memory(self, kept: Parts, start: int, stop: int) -> LogitsGradient:
        """Memory for the gradient of the logits of tokens [start, stop)."""
        n, vocab, columns = stop - start, len(self.weight), operand(kept.columns, kept.column_scales)
        if columns is not None:
            block = slice(start // BLOCK, blocks(stop))
            columns = TorchQuantized(columns.data[:, start : start + up(n)], columns.scales[block])
        return LogitsGradient(
            None if kept.grad_hidden is None else empty(n, vocab, "e4m3", self._hidden),
            columns,
            None if kept.grad_bias is None else kept.grad_bias.new_empty(blocks(n), vocab),
        )

    def multiply(self, kept: Parts, into: LogitsGradient, start: int, stop: int) -> None:
        """Multiply for hidden's gradient of tokens [start, stop), and add these tokens' part of the bias's."""
        if kept.grad_hidden is not None:
            made = multiply(self._products, into.rows, self._transposed, by_block=True, dtype=torch.float32)
            kept.grad_hidden.view(self._hidden.shape)[start:stop] = made
        if kept.grad_bias is not None and into.sums is not None:
            kept.grad_bias.add_(into.sums.sum(0))


class Fp8Logits:
    """A source's logits, in the form that `vocab.torch` reads."""

    def __init__(self, source: Source) -> None:
        self._source, self.vocab = source, len(source.weight)

    def reader(self, tokens: Ids, start: int, stop: int) -> Callable[[Tensor, int], None]:
        """As a Projection's; a tile covers all of the vocabulary."""
        return lambda out, first: _copy(out, self._source.logits(start, stop)[0])


def _copy(out: Tensor, logits: Tensor) -> None:
    out.copy_(logits)


def forward(source: Source, hidden: Tensor, grads: Sequence[bool], chunk: int) -> tuple[LossOutputs, Parts]:
    """Each token's loss and softmax, [T], and what backward needs, `chunk` tokens at a time; `grads`: which of hidden
    [..., H], weight and bias need a gradient.
    """
    softmax = LossOutputs.empty(source.call, hidden, kernels=True)
    kept = Parts.empty(hidden, source.weight, grads)

    def write(part: LogitsCall, logits: Tensor, of_targets: Tensor | None, span: slice, into: LogitsGradient) -> None:
        out = LossOutputs._make(None if x is None else x[span] for x in softmax)
        source.softmaxes.softmax_of_chunk(part, logits, of_targets, out, into)

    each_chunk(source, kept, chunk, write)
    return softmax, kept


def statistics(source: Source, asked: Asked, chunk: int) -> tuple[TokenStats, list[ChunkLogits]]:
    """Each token's statistics over the source's shard of the vocabulary; and, if all tokens are one chunk, its logits
    for `gradients`.  There are tokens and entries.
    """
    made, held = [], []
    for start, stop in spans(len(source.call.ids), chunk):
        chunk_logits = source.logits(start, stop)
        made.append(source.softmaxes.statistics_of_chunk(source.call.part(start, stop), *chunk_logits, asked))
        held = [chunk_logits] if stop - start == len(source.call.ids) else []
        del chunk_logits
    fields = ([x for x in of_chunks if x is not None] for of_chunks in zip(*made, strict=True))
    return TokenStats._make(torch.cat(x) if x else None for x in fields), held


def gradients(source: Source, kept: Parts, gradient: TokenGradient, held: list[ChunkLogits], chunk: int) -> None:
    """Fill `kept` from logits that are `held`, or made again."""
    softmaxes = fp8_torch if source.call.dense else source.softmaxes

    def write(part: LogitsCall, logits: Tensor, of_targets: Tensor | None, span: slice, into: LogitsGradient) -> None:
        mine = gradient.part(span.start, span.stop)
        softmaxes.gradient_of_chunk(part, logits, of_targets, mine, into)

    each_chunk(source, kept, chunk, write, held)


def each_chunk(
    source: Source, kept: Parts, chunk: int, write: Callable[..., None], held: list[ChunkLogits] | None = None
) -> None:
    """Fill `kept`: `write` makes the gradient of each chunk's logits, which are made here if they aren't `held`."""
    for start, stop in spans(len(source.call.ids), chunk):
        logits, of_targets = held.pop() if held else source.logits(start, stop)
        into = source.memory(kept, start, stop)
        write(source.call.part(start, stop), logits, of_targets, slice(start, stop), into)
        del logits
        source.multiply(kept, into, start, stop)
        del into  # before the next chunk's is made


def products_of(backend: str, like: Tensor) -> str:
    """The backend of fp8_linear that multiplies: under Triton's interpreter, on the CPU, there is no cuBLAS."""
    return "scaled_mm" if backend == "triton" and like.is_cuda else "dequantize"
