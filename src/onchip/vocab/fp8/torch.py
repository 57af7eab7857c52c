"""The softmax of a chunk's logits with PyTorch's own operations, and its gradient in FP8, for precision='fp8'.

What the Triton kernel makes is compared with this.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.fp8.numbers import BLOCK
from onchip.fp8.torch_quantize import Quantized, quantize
from onchip.vocab.torch.loss import Outputs, asked_by, loss_gradient, scaled_rows, token_losses
from onchip.vocab.torch.softmax import Running
from onchip.vocab.torch.tiles import ClassWeights, Tokens, apply


class Call(NamedTuple):
    """What is asked of the logits of some tokens."""

    target: Tensor  # [T] int64
    token_weight: Tensor | None  # [T] float32
    temperature: Tensor | None  # [T] float32
    divisor: Tensor  # [] float32: what the reduced loss is divided by
    class_weight: Tensor | None  # [V] float32
    options: Any  # the op's; their temperature counts where there is none per token

    def part(self, start: int, stop: int) -> "Call":
        """Of tokens [start, stop)."""
        return Call._make([*(None if x is None else x[start:stop] for x in self[:3]), *self[3:]])


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
    target: Tensor,  # [n]
) -> Tensor:
    """[n] float32: the targets' logits, of numbers that are not quantised."""
    y = target.clamp(0, len(weight) - 1)
    z = (hidden.float() * weight[y].float()).sum(1)
    return z if bias is None else z + bias[y].float()


def softmax_of_chunk(part: Call, logits: Tensor, of_targets: Tensor, out: Outputs, into: Gradient) -> None:
    """Fill `out`, per token and 0 for ignored ones, and `into` for an upstream gradient of 1.

    `logits` [n, V] are products and bias, before scale, softcap and temperature; those of ignored tokens are not NaN.
    `of_targets` [n] stand in for those of the targets.
    """
    (n, vocab), options = logits.shape, part.options
    kept = part.target != options.ignore_index
    bad = kept & ((part.target < 0) | (part.target >= vocab))
    weight = torch.ones_like(part.target, dtype=torch.float32) if part.token_weight is None else part.token_weight
    tau: Tensor | float = options.temperature
    if part.temperature is not None:
        tau = part.temperature.masked_fill(~kept, 1)[:, None]
    tokens = Tokens(
        None,
        kept,
        part.target.masked_fill(~kept | bad, 0)[:, None],
        bad[:, None],
        tau,
        n,
        torch.float32,
        weight.masked_fill(~kept, 0).masked_fill(bad, float("nan")),
        1 / part.divisor,
    )
    z = logits.float().scatter_(1, tokens.ids, of_targets[:, None])
    if part.class_weight is not None:
        each = part.class_weight
        tokens = replace(tokens, classes=ClassWeights(each, each.sum(), each[tokens.label]))
    slope = None if options.softcap is None else torch.empty_like(z)
    apply(options, z, tau, slope)
    running = Running.empty(tokens.ids, tokens.dtype)
    asked = asked_by(options, part.class_weight)
    spare = torch.empty_like(z) if asked.spare else None
    e = running.absorb(z, 0, tokens.ids, asked, spare)
    stats = running.stats(tokens, vocab, asked)
    made = [token_losses(options, stats, tokens), stats.lse, stats.log_prob[:, 0]]
    if stats.entropy is not None:
        made += [stats.entropy, stats.is_top1(tokens)]
    for x, value in zip(out, made, strict=False):
        assert x is not None
        x.copy_(tokens.mask(value))
    if out.argmax is not None:
        out.argmax.copy_(tokens.mask(stats.argmax, -1))
    if not into.wanted:
        return
    row, _ = scaled_rows(tokens, options, tokens.inverse_count, torch.float32)
    gradient = loss_gradient(options, row, running.lse, running.log_prob, vocab, classes=tokens.classes)
    g = gradient.of_exponentials(e, gradient.factor / running.total, tokens.ids, 0, slope)
    both = quantize(g, "e4m3", "float32", rows=into.rows is not None, turned=into.columns is not None)
    for memory, quantized in zip(into[:2], both, strict=True):
        if memory is not None and quantized is not None:
            memory.data.copy_(quantized.data)
            memory.scales.copy_(quantized.scales)
    if into.sums is not None:
        into.sums.copy_(F.pad(g, (0, 0, 0, -n % BLOCK)).unflatten(0, (-1, BLOCK)).sum(1))
