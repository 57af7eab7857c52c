"""linear_log_probs for PyTorch: arguments and outputs of both backends, the logits' gradient from those of the outputs,
and the operator of backend 'plain', on PyTorch's own matrix products.

That keeps a few numbers per token, and backward walks over the logits again (`vocab.torch.walk`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_inputs import accumulator
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.linear_log_probs import OP, LogProbsOptions
from onchip.vocab.torch import tiles, walk
from onchip.vocab.torch.agreement import require_agreement
from onchip.vocab.torch.call import OF_LAYER, LinearCall
from onchip.vocab.torch.loss import factor_to_product
from onchip.vocab.torch.softmax import Asked, Shares, TokenGradient, TokenStats, float16_scale, token_gradient
from onchip.vocab.torch.tiles import NOWHERE, Ids


@dataclass(frozen=True)
class LogProbsCall(LinearCall):
    """The arguments of an operator."""

    options: LogProbsOptions

    @property
    def of_op(self) -> dict[str, Any]:
        more = self.options.mean_logits + self.options.log_sum_sq_probs
        return {"op": OP, "ids": self.several, "stats": self.options.entropy, "more_stats": more}

    def tokens(self, *, check_values: bool, compact: bool = True) -> Ids:
        """The tokens and ids that count; values are always checked on the CPU, unless all tokens are to be kept."""
        return tiles.select(
            OP,
            "ids",
            self.ids,
            self.number,
            self.vocab,
            self.token_temperature,
            ignore_index=self.options.ignore_index,
            temperature=self.options.temperature,
            dtype=self.dtype,
            check_values=check_values,
            compact=compact and not self.kernels,
            first=(1, *[0] * (self.ids.ndim + 1 - self.hidden.ndim)) if self.options.shift else (),
        )

    def check_ranks(self) -> None:
        """On the CPU and with check_inputs: raise where ranks' arguments don't belong together."""
        if self.shards.there:
            require_agreement(
                OP, self, self.sizes, self.ids, self.token_temperature, split={"weight": self.weight},
                hidden={"hidden": self.hidden}, ids=self.ids,
            )  # fmt: skip


class LogProbsOutputs(NamedTuple):
    """The first outputs of each operator."""

    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    top1: Tensor | None
    mean_logits: Tensor | None
    log_sum_sq_probs: Tensor | None

    @staticmethod
    def empty(options: LogProbsOptions, like: Tensor, shape: Sequence[int], ids: Tensor) -> "LogProbsOutputs":
        """Empty outputs, for tokens of `shape` with hidden states or logits `like` these."""
        total = accumulator(like.dtype)

        def make(wanted: bool, dtype: torch.dtype = total) -> Any:
            return stated.empty(shape, dtype, like.device) if wanted else None

        return LogProbsOutputs(
            stated.empty(ids.shape, total, like.device),
            make(options.entropy),
            make(True),
            make(options.top1, torch.int64),
            make(options.mean_logits),
            make(options.log_sum_sq_probs),
        )


class LogProbsPlainOutputs(NamedTuple):
    """The outputs of the operator on PyTorch's operations, and of the one of log_probs."""

    out: LogProbsOutputs
    mean: Tensor | None  # the logits' mean under their softmax, if the entropy is asked for

    @staticmethod
    def of(
        options: LogProbsOptions, stats: TokenStats, tokens: Ids | None, shape: torch.Size, ids: Tensor
    ) -> "LogProbsPlainOutputs":
        """The outputs for `ids` of tokens of `shape`.  Without `tokens`, the statistics are those of all tokens, with
        ignored ones filled in already."""

        def spread(x: Tensor | None, shape: torch.Size = shape, fill: int = 0) -> Any:
            return x if x is None else x.view(shape) if tokens is None else tokens.spread(x, shape, fill)

        out = LogProbsOutputs(
            spread(stats.log_prob, ids.shape),
            spread(stats.entropy),
            spread(stats.lse),
            spread(stats.argmax, fill=-1) if options.top1 else None,
            spread(stats.mean_logits),
            spread(stats.log_sum_sq),
        )
        return LogProbsPlainOutputs(out, spread(stats.mean))

    @staticmethod
    def empty(options: LogProbsOptions, like: Tensor, shape: Sequence[int], ids: Tensor) -> "LogProbsPlainOutputs":
        """Empty outputs; arguments as in `LogProbsOutputs.empty`."""
        out = LogProbsOutputs.empty(options, like, shape, ids)
        return LogProbsPlainOutputs(out, None if out.entropy is None else stated.empty_like(out.entropy))


def asked_by(options: LogProbsOptions) -> Asked:
    """The statistics that the caller asked for."""
    return Asked(options.entropy, options.mean_logits, options.log_sum_sq_probs, top=options.top1)


def gradient_by_outputs(
    kept: Any, upstream: Made, tokens: Ids, shares: Shares | None = None
) -> tuple[TokenGradient, Tensor | None]:
    """The gradient of each token's logits, and the factor that keeps it in float16's range (None: there is none).

    `kept` is a `Kept`, of this op or of log_probs; `shares` as in `token_gradient`.
    """
    ids, factor = tokens.ids, factor_to_product(tokens, kept.call.options)

    def rows(x: Tensor | None, *shape: int) -> Any:
        return None if x is None else tokens.take(x.reshape(tokens.total, *shape).to(tokens.dtype))

    def scaled(grad: Tensor | None) -> Any:
        # A NaN in an ignored token's upstream gradient must not spread.
        return None if grad is None else tokens.mask(rows(grad)) * factor

    log_prob, g = rows(kept.log_prob, ids.shape[1]), rows(upstream[0], ids.shape[1])
    with_entropy = kept.call.options.entropy
    g_entropy, g_lse = scaled(upstream[1]) if with_entropy else None, scaled(upstream[2])
    g = torch.zeros_like(log_prob) if g is None else g.masked_fill(ids == NOWHERE, 0)
    g = g * (factor[:, None] if isinstance(factor, Tensor) else factor)
    if tokens.bad is not None:
        g = g.masked_fill(tokens.bad, float("nan"))
    size = g.abs().sum(1)
    for more in (g_entropy, g_lse):
        size = size if more is None else size + more.abs()
    grad_scale = float16_scale(size, kept.call.operand)
    if grad_scale is not None:
        g, g_entropy, g_lse = (None if x is None else x * grad_scale for x in (g, g_entropy, g_lse))
    return token_gradient(
        rows(kept.lse),
        log_prob,
        g,
        ids=ids,
        grad_lse=g_lse,
        grad_entropy=g_entropy,
        mean=rows(kept.mean) if with_entropy else None,
        entropy=rows(kept.entropy) if with_entropy else None,
        kept=tokens.kept,
        shares=shares,
    ), grad_scale


# ---------------------------------------------------------------------- the operator on PyTorch's own matrix products


class LogProbsPlainKept(NamedTuple):
    """What forward keeps for backward."""

    call: LogProbsCall
    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    mean: Tensor | None


def _forward(call: LogProbsCall) -> LogProbsPlainOutputs:
    call.check_ranks()
    tokens = call.tokens(check_values=call.options.check_inputs)
    stats = walk.statistics(OP, call, tokens, asked_by(call.options))
    return LogProbsPlainOutputs.of(call.options, stats, tokens, call.leading, call.ids)


def _fake(call: LogProbsCall) -> LogProbsPlainOutputs:
    return LogProbsPlainOutputs.empty(call.options, call.hidden, call.leading, call.ids)


def _save(call: LogProbsCall, made: LogProbsPlainOutputs) -> LogProbsPlainKept:
    return LogProbsPlainKept(call, made.out.log_prob, made.out.entropy, made.out.lse, made.mean)


def _gradients(kept: LogProbsPlainKept, upstream: Made, wanted: Wanted) -> Made:
    call = replace(kept.call, grads=tuple(wanted))
    tokens = call.tokens(check_values=False)
    gradient, grad_scale = gradient_by_outputs(kept, upstream, tokens)
    return walk.gradients(call, tokens, gradient, grad_scale, stats=gradient.entropy_row is not None)


BY_RECOMPUTATION = Operator(
    "linear_log_probs_by_recomputation",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=lambda kept, upstream, wanted: kept.call.empty_gradients(wanted),
    differentiable=("hidden", "weight", "bias"),
    differentiable_outputs=3,
    **OF_LAYER,
)
