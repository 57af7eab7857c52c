"""The softmax of a chunk's logits with PyTorch's own operations, and its gradient in FP8, for precision='fp8'.

What the Triton kernels make is compared with this.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.fp8.numbers import BLOCK
from onchip.fp8.torch_quantize import Quantized, quantize
from onchip.vocab.chunks import Config
from onchip.vocab.rows.torch import Rows
from onchip.vocab.torch import soft
from onchip.vocab.torch.loss import Outputs, asked_by, loss_gradient, scaled_rows, token_losses
from onchip.vocab.torch.soft import SoftStats
from onchip.vocab.torch.softmax import Asked, Running, TokenGradient, TokenStats
from onchip.vocab.torch.tiles import NOWHERE, ClassWeights, Ids, Tokens, apply


class Call(NamedTuple):
    """What is asked of the logits of some tokens."""

    target: Tensor  # [T] int64; of soft labels of K ids [T, K]; of those of every entry [T], and means nothing
    token_weight: Tensor | None  # [T] float32
    temperature: Tensor | None  # [T] float32
    labels: Tensor | None  # soft ones: [T, K] float32, the ids' probabilities, or [..., V], those of every entry
    divisor: Tensor  # [] float32: what the reduced loss is divided by
    class_weight: Tensor | None  # [V] float32
    options: Any  # the op's; their temperature counts where there is none per token

    @property
    def dense(self) -> bool:
        """Whether every entry has a probability."""
        return self.labels is not None and self.target.ndim == 1

    @property
    def of_ids(self) -> bool:
        """Whether K ids have one."""
        return self.labels is not None and self.target.ndim == 2

    @property
    def ignored(self) -> Tensor | None:
        """[T] bool; None: all tokens count."""
        return self.target == self.options.ignore_index if self.labels is None else None

    def part(self, start: int, stop: int) -> "Call":
        """Of tokens [start, stop)."""
        labels = None if self.labels is None else soft.rows_of(self.labels, start, stop)
        return Call._make([*(None if x is None else x[start:stop] for x in self[:3]), labels, *self[4:]])

    def probs(self, ids: Tensor) -> Tensor:
        """[T, K]: the probabilities of these ids, times the weights of their classes."""
        assert self.labels is not None
        return soft.labels_of(self.labels, "probs", ids, self.class_weight, torch.float32)

    def tokens(self, vocab: int) -> Tokens:
        """All of them, with what a loss makes of them."""
        ids, ignored = self.target if self.of_ids else self.target[:, None], self.ignored
        kept = torch.ones_like(ids[:, 0], dtype=torch.bool) if ignored is None else ~ignored
        bad = kept[:, None] & ((ids < 0) | (ids >= vocab))
        tau: Tensor | float = self.options.temperature
        if self.temperature is not None:
            tau = self.temperature.masked_fill(~kept, 1)[:, None]
        weight = torch.ones_like(kept, dtype=torch.float32) if self.token_weight is None else self.token_weight
        weight = weight.masked_fill(~kept, 0).masked_fill(bad.any(1), float("nan"))
        ids = ids.masked_fill(bad | ~kept[:, None], 0)
        classes = None
        if self.class_weight is not None and self.labels is None:
            classes = ClassWeights(self.class_weight, self.class_weight.sum(), self.class_weight[ids[:, 0]])
        return Tokens(None, kept, ids, bad, tau, len(ids), torch.float32, weight, 1 / self.divisor, classes)


class Gradient(NamedTuple):
    """Where the gradient of a chunk's n logits goes, in E4M3; None is not wanted."""

    rows: Quantized | None  # [n, V], 1x128 scales
    columns: Quantized | None  # [V, n], 1x128 scales; part of what is kept of all chunks
    sums: Tensor | None  # [n / 128, V] float32: of the gradient itself over 128 tokens

    @property
    def wanted(self) -> bool:
        """Whether any of it is."""
        return any(x is not None for x in self)


def target_logits(
    hidden: Tensor,  # [n, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    target: Tensor,  # [n] or [n, K]
) -> Tensor:
    """[n] or [n, K] float32: the targets' logits, of numbers that are not quantised."""
    y = target.clamp(0, len(weight) - 1)
    columns = [(hidden.float() * weight[ids].float()).sum(1) for ids in y.view(len(y), -1).unbind(1)]
    z = torch.stack(columns, 1).view(y.shape)
    return z if bias is None else z + bias[y].float()


def softmax_of_chunk(part: Call, logits: Tensor, of_targets: Tensor | None, out: Outputs, into: Gradient) -> None:
    """Fill `out`, per token and 0 for ignored ones, and `into` for an upstream gradient of 1.

    `logits` [n, V] are products and bias, before scale, softcap and temperature; those of ignored tokens are not NaN.
    `of_targets` [n] stand in for those of the targets; of soft labels there are none.
    """
    tokens, options = part.tokens(logits.shape[1]), part.options
    row, _ = scaled_rows(tokens, options, tokens.inverse_count, torch.float32)
    if part.dense:
        _write(_dense_softmax(part, logits, tokens, row, out, wanted=into.wanted), into)
        return
    vocab = logits.shape[1]
    z = logits.float()
    if of_targets is not None:
        z.scatter_(1, tokens.ids, of_targets[:, None])
    slope = None if options.softcap is None else torch.empty_like(z)
    apply(options, z, tokens.temperature, slope)
    asked = soft.asked_by(options, part.class_weight) if part.of_ids else asked_by(options, part.class_weight)
    running = Running.empty(tokens.ids, tokens.dtype)
    e = running.absorb(z, 0, tokens.ids, asked, torch.empty_like(z) if asked.spare else None)
    stats = running.stats(tokens, vocab, asked)
    if part.labels is not None:
        probs = part.probs(tokens.ids)
        losses = soft.token_losses(options, stats.lse, stats.log_prob, stats.uniform, probs) * tokens.weight
        known = stats.lse, stats.log_prob, stats.entropy, stats.argmax
        fill(out, losses, stats.lse, soft.id_stats(*known, part.labels, tokens.ids))
        gradient = soft.loss_gradient(options, row, stats.lse, stats.log_prob, probs, tokens, vocab, part.class_weight)
    else:
        made = [token_losses(options, stats, tokens), stats.lse, stats.log_prob[:, 0]]
        if stats.entropy is not None:
            made += [stats.entropy, stats.is_top1(tokens)]
        for x, value in zip(out, made, strict=False):
            assert x is not None
            x.copy_(tokens.mask(value))
        if out.argmax is not None:
            out.argmax.copy_(tokens.mask(stats.argmax, -1))
        gradient = loss_gradient(options, row, running.lse, running.log_prob, vocab, classes=tokens.classes)
    if into.wanted:
        _write(gradient.of_exponentials(e, gradient.factor / running.total, tokens.ids, 0, slope), into)


def statistics_of_chunk(part: Call, logits: Tensor, of_targets: Tensor, asked: Asked) -> TokenStats:
    """The statistics of a chunk's tokens over a shard of the vocabulary; targets that it doesn't have are below 0."""
    vocab, ids = logits.shape[1], part.target.clamp(min=NOWHERE)[:, None]
    z, tau, _ = _final_logits(part, logits, of_targets, ids)
    running = Running.empty(ids, torch.float32)
    running.absorb(z, 0, ids, asked, torch.empty_like(z) if asked.spare else None)
    return running.stats(Ids(None, None, ids, None, tau, len(ids), torch.float32), vocab, asked)


def gradient_of_chunk(part: Call, logits: Tensor, of_targets: Tensor, gradient: TokenGradient, into: Gradient) -> None:
    """Fill `into` with a chunk's gradient, given what statistics of the whole vocabulary make of it."""
    ids = part.target.clamp(min=NOWHERE)[:, None]
    z, _, slope = _final_logits(part, logits, of_targets, ids)
    _write(gradient.of_logits(z, ids, 0, slope, None), into)


def _final_logits(
    part: Call, logits: Tensor, of_targets: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor | float, Tensor | None]:
    """Of a shard; their temperature, and the derivative of the softcap."""
    z, column = logits.float(), ids.clamp(min=0)
    z.scatter_(1, column, torch.where(ids == NOWHERE, z.gather(1, column), of_targets[:, None]))
    tau = part.options.temperature if part.temperature is None else part.temperature[:, None]
    slope = None if part.options.softcap is None else torch.empty_like(z)
    apply(part.options, z, tau, slope)
    return z, tau, slope


def fill(out: Outputs, losses: Tensor, lse: Tensor, stats: SoftStats) -> None:
    """Fill the outputs of soft labels; without `stats` the sum of probability times log-probability is left 0."""
    out.loss.copy_(losses)
    out.lse.copy_(lse)
    out.log_prob.zero_()
    for x, value in zip(out[2:], stats, strict=False):
        if x is not None and value is not None:
            x.copy_(value)


def _dense_softmax(
    part: Call, logits: Tensor, tokens: Tokens, row: Tensor, out: Outputs, *, wanted: bool
) -> Tensor | None:
    """Fill `out`, and the gradient of the logits where it is wanted, of labels for every entry."""
    options, config = part.options, Config("forward", *logits.shape)
    assert part.labels is not None
    made = soft.dense_stats(Rows(logits), options, tokens, config, part.labels, part.class_weight)
    fill(out, made.loss * tokens.weight, made.lse, made.stats)
    if not wanted:
        return None
    z = logits.float()
    slope = None if options.softcap is None else torch.empty_like(z)
    apply(options, z, tokens.temperature, slope)
    whole, known = soft.Whole.of(z.shape[1], part.class_weight), (made.lse, made.log_prob, made.largest, made.mass)
    return soft.dense_gradient(options, z, slope, part.labels, part.class_weight, whole, row, *known)


def _write(g: Tensor | None, into: Gradient) -> None:
    """Quantise the gradient of a chunk's logits."""
    if g is None:
        return
    both = quantize(g, "e4m3", "float32", rows=into.rows is not None, turned=into.columns is not None)
    for memory, quantized in zip(into[:2], both, strict=True):
        if memory is not None and quantized is not None:
            memory.data.copy_(quantized.data)
            memory.scales.copy_(quantized.scales)
    if into.sums is not None:
        into.sums.copy_(F.pad(g, (0, 0, 0, -len(g) % BLOCK)).unflatten(0, (-1, BLOCK)).sum(1))
