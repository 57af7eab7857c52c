"""precision='fp8' in PyTorch's own operations: the softmax of a chunk's logits, and its gradient in FP8.

The Triton kernels' results are compared with these.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.fp8.numbers import BLOCK
from onchip.fp8.torch_quantize import TorchQuantized, quantize
from onchip.frontend.torch_parallel import WHOLE
from onchip.vocab.chunks import ChunkConfig
from onchip.vocab.rows.torch import Rows
from onchip.vocab.torch import dense
from onchip.vocab.torch.labels import probs
from onchip.vocab.torch.loss import LossOutputs, asked_by, loss_gradient, scaled_rows
from onchip.vocab.torch.softmax import Asked, Running, TokenGradient, TokenStats
from onchip.vocab.torch.tiles import NOWHERE, Ids, Tokens, apply, rows_of


class LogitsCall(NamedTuple):
    """A call on the logits of some tokens."""

    ids: Tensor  # [T] int64; of soft labels of K ids [T, K]; of those of every entry [T], and means nothing
    token_weight: Tensor | None  # [T] float32
    temperature: Tensor | None  # [T] float32
    labels: Tensor | None  # of K ids [T, K] float32, of every entry [..., V]
    kind: str  # "ids", "probs" or "dense", as in `vocab.torch.labels`
    divisor: Tensor  # [] float32: what the reduced loss is divided by
    class_weight: Tensor | None  # [V] float32
    options: Any  # the op's; their temperature counts where there is none per token
    of_shard: bool  # whether the logits are of a part of the vocabulary, and ids that it doesn't have are below 0

    @property
    def number(self) -> int:
        """T, the number of tokens."""
        return len(self.ids)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of sums."""
        return torch.float32

    @property
    def dense(self) -> bool:
        """Whether every entry has a probability."""
        return self.kind == "dense"

    @property
    def of_ids(self) -> bool:
        """Whether each token has probabilities for K ids."""
        return self.kind == "probs"

    @property
    def ignored(self) -> Tensor | None:
        """[T] bool; None if all tokens count."""
        return self.ids == self.options.ignore_index if self.kind == "ids" else None

    def part(self, start: int, stop: int) -> "LogitsCall":
        """The call on tokens [start, stop)."""
        labels = None if self.labels is None else rows_of(self.labels, start, stop)
        return LogitsCall._make([*(None if x is None else x[start:stop] for x in self[:3]), labels, *self[4:]])

    def tokens(self, vocab: int) -> Tokens:
        """All the tokens, with what a loss makes of them."""
        ids, ignored = self.ids if self.of_ids else self.ids[:, None], self.ignored
        bad = (ids < 0) | (ids >= vocab)
        bad = bad if ignored is None else bad & ~ignored[:, None]
        weight = torch.ones_like(ids[:, 0], dtype=torch.float32) if self.token_weight is None else self.token_weight
        weight = weight if ignored is None else weight.masked_fill(ignored, 0)
        weight = weight.masked_fill(bad.any(1), float("nan"))
        tau: Tensor | float = self.options.temperature
        if self.temperature is not None:
            tau = (self.temperature if ignored is None else self.temperature.masked_fill(ignored, 1))[:, None]
        ids, q = ids.masked_fill(bad if ignored is None else bad | ignored[:, None], 0), None
        if self.of_ids:
            q = probs(self)
        elif self.class_weight is not None and self.kind == "ids":
            q = self.class_weight[ids]
        kept = None if ignored is None else ~ignored
        divisor = 1 / self.divisor
        return Tokens(None, kept, ids, bad, tau, len(ids), torch.float32, weight, divisor, q, self.class_weight)


class LogitsGradient(NamedTuple):
    """Memory for the gradient of a chunk's n logits in E4M3; None for what is not wanted."""

    rows: TorchQuantized | None  # [n, V], 1x128 scales
    columns: TorchQuantized | None  # [V, n], 1x128 scales; part of what is kept of all chunks
    sums: Tensor | None  # [n / 128, V] float32: of the gradient itself over 128 tokens

    @property
    def wanted(self) -> bool:
        """Whether any of it is wanted."""
        return any(x is not None for x in self)


def target_logits(
    hidden: Tensor,  # [n, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    target: Tensor,  # [n] or [n, K]
) -> Tensor:
    """[n] or [n, K] float32: the targets' logits, computed from numbers that are not quantised."""
    y = target.clamp(0, len(weight) - 1)
    columns = [(hidden.float() * weight[ids].float()).sum(1) for ids in y.view(len(y), -1).unbind(1)]
    z = torch.stack(columns, 1).view(y.shape)
    return z if bias is None else z + bias[y].float()


def softmax_of_chunk(
    part: LogitsCall, logits: Tensor, of_targets: Tensor | None, out: LossOutputs, into: LogitsGradient
) -> None:
    """Fill `out` for each token, with 0 for ignored ones, and fill `into` for an upstream gradient of 1.

    `logits` [n, V] are products and bias, before scale, softcap and temperature; those of ignored tokens are not NaN.
    `of_targets` [n] replace those of the targets; with soft labels there are none.
    """
    tokens, options = part.tokens(logits.shape[1]), part.options
    row, _ = scaled_rows(tokens, options, tokens.inverse_count, torch.float32)
    vocab = logits.shape[1]
    if part.dense:
        assert part.labels is not None
        given = tokens, ChunkConfig("forward", *logits.shape), part.labels, part.class_weight
        made = dense.dense_stats("", Rows(logits), options, WHOLE, *given)
        fill(out, dense.outputs_of(part, made, tokens))
        if into.wanted:
            gradient = dense.gradient(options, part.labels, part.class_weight, vocab, row, made.known)
            gradient_of_chunk(part, logits, None, gradient, into)
        return
    z = logits.float()
    if of_targets is not None:
        z.scatter_(1, tokens.ids, of_targets[:, None])
    slope = None if options.softcap is None else torch.empty_like(z)
    apply(options, z, tokens.temperature, slope)
    asked = asked_by(options, part.class_weight)
    running = Running.empty(tokens.ids, tokens.dtype)
    e = running.absorb(z, 0, tokens.ids, asked, torch.empty_like(z) if asked.spare else None)
    stats = running.stats(tokens, vocab, asked)
    fill(out, LossOutputs.of(part, stats, tokens))
    if into.wanted:
        gradient = loss_gradient(options, row, running.lse, running.log_prob, vocab, tokens.part(0, len(logits)))
        _write(gradient.of_exponentials(e, gradient.factor / running.total, tokens.ids, 0, slope), into)


def statistics_of_chunk(part: LogitsCall, logits: Tensor, of_targets: Tensor | None, asked: Asked) -> TokenStats:
    """The statistics of a chunk's tokens over a shard of the vocabulary; ids that it doesn't have are below 0."""
    vocab, ids = logits.shape[1], _ids_of_shard(part)
    z, tau, _ = _final_logits(part, logits, of_targets, ids)
    running = Running.empty(ids, torch.float32)
    running.absorb(z, 0, ids, asked, torch.empty_like(z) if asked.spare else None)
    return running.stats(Ids(None, None, ids, None, tau, len(ids), torch.float32), vocab, asked)


def gradient_of_chunk(
    part: LogitsCall, logits: Tensor, of_targets: Tensor | None, gradient: TokenGradient, into: LogitsGradient
) -> None:
    """Fill `into` with a chunk's gradient, given `gradient`, which the statistics of the whole vocabulary lead to."""
    ids = _ids_of_shard(part)
    z, _, slope = _final_logits(part, logits, of_targets, ids)
    _write(gradient.of_logits(z, ids, 0, slope, None), into)


def _ids_of_shard(part: LogitsCall) -> Tensor:
    """Ids of the shard, [n, K]."""
    return part.ids.clamp(min=NOWHERE).view(len(part.ids), -1 if part.number else 1)


def _final_logits(
    part: LogitsCall, logits: Tensor, of_targets: Tensor | None, ids: Tensor
) -> tuple[Tensor, Tensor | float, Tensor | None]:
    """A shard's final logits, their temperature, and the derivative of the softcap."""
    z = logits.float()
    if of_targets is not None:
        column = ids.clamp(min=0)
        z.scatter_(1, column, torch.where(ids == NOWHERE, z.gather(1, column), of_targets[:, None]))
    tau = part.options.temperature if part.temperature is None else part.temperature[:, None]
    slope = None if part.options.softcap is None else torch.empty_like(z)
    apply(part.options, z, tau, slope)
    return z, tau, slope


def fill(out: LossOutputs, made: LossOutputs, names: Sequence[str] = LossOutputs._fields) -> None:
    """Fill the memory for a chunk's outputs of these names."""
    for name in names:
        x, value = getattr(out, name), getattr(made, name)
        if x is not None and value is not None:
            x.copy_(value)


def _write(g: Tensor, into: LogitsGradient) -> None:
    """Quantise the gradient of a chunk's logits."""
    both = quantize(g, "e4m3", "float32", rows=into.rows is not None, turned=into.columns is not None)
    for memory, quantized in zip(into[:2], both, strict=True):
        if memory is not None and quantized is not None:
            memory.data.copy_(quantized.data)
            memory.scales.copy_(quantized.scales)
    if into.sums is not None:
        into.sums.copy_(F.pad(g, (0, 0, 0, -len(g) % BLOCK)).unflatten(0, (-1, BLOCK)).sum(1))
