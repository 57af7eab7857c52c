"""Cross-entropy with label smoothing and z-loss: its value and its gradient, of each token's softmax statistics.

`options` are an op's, with label_smoothing, z_loss and logit_scale.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_inputs import accumulator, has_values
from onchip.frontend.torch_types import LossStats
from onchip.vocab.torch.softmax import Asked, TokenGradient, TokenStats, float16_scale, token_gradient
from onchip.vocab.torch.tiles import ClassWeights, Ids, Tokens


def in_token_weight(options: Any) -> bool:
    """Whether a class weight is a factor of each token's loss: neither smoothing nor z-loss follows it."""
    return bool(options.label_smoothing == 0 and options.z_loss == 0)


def checked_class_weight(op: str, options: Any, class_weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[V] in the dtype of sums over inputs of `dtype`, contiguous.

    Values that are wrong raise on the CPU, and elsewhere with check_inputs, where they may be read.
    """
    total = accumulator(dtype)
    each = stated.converted(class_weight, lambda x: x.to(total).contiguous())
    if (options.check_inputs or each.device.type == "cpu") and has_values(each):
        wrong = ~((each >= 0) & (each < float("inf")))
        if bool(wrong.any()):
            raise ValueError(f"{op}: class_weight must be finite and 0 or more; got {float(each[wrong][0])}")
    return each


class Weights(NamedTuple):
    """What a loss is weighed with, as operators take it."""

    token_weight: Tensor | None  # [...]
    normalizer: Tensor | None  # []
    class_weight: Tensor | None  # [V] in the dtype of sums; None: there is none, or token_weight has it

    @staticmethod
    def of(
        op: str,
        options: Any,
        target: Tensor,
        token_weight: Tensor | None,
        normalizer: Tensor | None,
        class_weight: Tensor | None,
        dtype: torch.dtype,
    ) -> "Weights":
        """From what a public function was given, and the dtype of its logits or its linear layer."""
        if class_weight is None:
            return Weights(token_weight, normalizer, None)
        each = checked_class_weight(op, options, class_weight, dtype)
        of_target = stated.call(_of_target, each, target, options.ignore_index)
        if options.reduction == "mean" and normalizer is None:
            normalizer = stated.call(_sum_or_one, of_target)
        if not in_token_weight(options):
            return Weights(token_weight, normalizer, each)
        by_token = of_target if token_weight is None else stated.call(torch.mul, token_weight, of_target)
        return Weights(by_token, normalizer, None)


def _of_target(each: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    ids = target.to(torch.int64)
    return each[ids.clamp(0, len(each) - 1)].masked_fill(ids == ignore_index, 0)


def _sum_or_one(x: Tensor) -> Tensor:
    total = x.sum()
    return total.masked_fill(total == 0, 1)


def asked_by(options: Any, class_weight: Tensor | None = None) -> Asked:
    """The statistics that the loss needs, and those that the caller asked for."""
    smoothed = options.label_smoothing > 0
    weight = class_weight if smoothed else None
    return Asked(entropy=options.return_stats, mean_logits=smoothed, class_weight=weight, top=options.return_stats)


def token_losses(options: Any, stats: TokenStats, tokens: Tokens) -> Tensor:
    """[n]: the loss of each token, weighted but not yet reduced."""
    value = torch.zeros_like(stats.lse)
    if options.label_smoothing < 1:
        value = -(1 - options.label_smoothing) * stats.log_prob[:, 0]
    if tokens.classes is not None:
        value = value * tokens.classes.target
    if stats.uniform is not None:
        value = value + options.label_smoothing * stats.uniform
    if options.z_loss > 0:
        value = value + options.z_loss * stats.lse.square()
    return value * tokens.weight


class Outputs(NamedTuple):
    """What an operator returns of a cross-entropy, per token of target's shape; the last three with return_stats."""

    loss: Tensor  # [...] or []
    lse: Tensor
    log_prob: Tensor
    entropy: Tensor | None
    correct: Tensor | None  # bool
    argmax: Tensor | None  # int64, -1 for ignored tokens

    @staticmethod
    def empty(options: Any, like: Tensor, shape: torch.Size) -> "Outputs":
        """Not yet filled, of hidden states or logits `like` these."""
        total = accumulator(like.dtype)

        def make(shape: Sequence[int], dtype: torch.dtype = total) -> Tensor:
            return stated.empty(shape, dtype, like.device)

        made = make(shape if options.reduction == "none" else ()), make(shape), make(shape)
        if not options.return_stats:
            return Outputs(*made, None, None, None)
        return Outputs(*made, make(shape), make(shape, torch.bool), make(shape, torch.int64))

    @staticmethod
    def of(options: Any, stats: TokenStats, tokens: Tokens, shape: torch.Size) -> "Outputs":
        """Those of targets of `shape`."""
        loss = tokens.spread(token_losses(options, stats, tokens), shape)
        return Outputs(
            loss if options.reduction == "none" else loss.sum() * tokens.inverse_count,
            tokens.spread(stats.lse, shape),
            tokens.spread(stats.log_prob, shape),
            None if stats.entropy is None else tokens.spread(stats.entropy, shape),
            tokens.spread(stats.is_top1(tokens), shape) if options.return_stats else None,
            tokens.spread(stats.argmax, shape, -1) if options.return_stats else None,
        )

    def stats(self) -> LossStats:
        """What the caller gets with return_stats."""
        made: Any = (*self[1:], stated.call(torch.add, self.log_prob, self.lse))  # none of it is None then
        return LossStats(*made)


def scaled_rows(tokens: Tokens, options: Any, upstream: Tensor, operand: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """[n]: the upstream gradient of each token's loss times the derivative of the final logits by the product, and the
    factor that brings it into float16's range, which is included (None: none).

    `upstream` is that of the reduced loss, 0-d or [n].
    """
    row = tokens.weight * upstream * factor_to_product(tokens, options)
    size = row if tokens.classes is None else row * tokens.classes.factor(options.label_smoothing)
    grad_scale = float16_scale(size, operand)
    return (row if grad_scale is None else row * grad_scale), grad_scale


def factor_to_product(tokens: Ids, options: Any) -> Tensor | float:
    """[n], or one number for all: the derivative of final logits by the product, but for the softcap."""
    tau, scale = tokens.temperature, float(options.logit_scale)
    return scale / (tau[:, 0] if isinstance(tau, Tensor) else tau)


def gradient_of_loss(
    call: Any,  # of a cross-entropy of a layer
    tokens: Tokens,
    grad_loss: Tensor,
    lse: Tensor,  # [...] of all tokens, as forward made them
    log_prob: Tensor,
) -> tuple[TokenGradient, Tensor | None]:
    """The gradient of these tokens' logits for the upstream gradient, and the factor for float16 that is in it."""
    each = tokens.upstream(grad_loss, call.options.reduction)
    row, grad_scale = scaled_rows(tokens, call.options, each, call.operand)
    lse, log_prob = (tokens.take(x.reshape(-1)) for x in (lse, log_prob))
    made = loss_gradient(call.options, row, lse, log_prob[:, None], call.vocab, tokens.kept, tokens.classes)
    return made, grad_scale


def loss_gradient(
    options: Any,
    row: Tensor,  # [n]
    lse: Tensor,  # [n]
    log_prob: Tensor,  # [n, 1]
    vocab: int,
    kept: Tensor | None = None,  # [n] bool, False for ignored tokens that are computed all the same
    classes: ClassWeights | None = None,
) -> TokenGradient:
    """The gradient of the logits of these tokens, for upstream gradients of `row`."""
    grad_lse = row * (2 * options.z_loss * lse) if options.z_loss > 0 else None
    weighed = row if classes is None else row * classes.factor(options.label_smoothing)
    made = token_gradient(lse, log_prob, -weighed[:, None], grad_lse=grad_lse, kept=kept)
    if options.label_smoothing > 0:
        even = row * (options.label_smoothing / vocab)
        # In one number, which is 0 for a single class: separate terms would leave their roundings.
        if classes is None:
            more = row * (options.label_smoothing * (1 - 1 / vocab))
        else:
            more = even * (classes.total - classes.target)
        class_weight = None if classes is None else classes.each
        made = replace(made, even=even, class_weight=class_weight, at_ids=made.at_ids + more[:, None])
    return made
