"""linear_log_probs and log_probs for PyTorch: arguments, outputs, the logits' gradient from those of the outputs, and
the operators, one for each way to compute them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_inputs import accumulator
from onchip.frontend.torch_register import Made
from onchip.ops.linear_log_probs import LOGITS_OP, OP, LogitsOptions, LogProbsOptions
from onchip.vocab.rows.call import RowsCall
from onchip.vocab.rows.operator import of_logits
from onchip.vocab.torch import tiles
from onchip.vocab.torch.call import LinearCall
from onchip.vocab.torch.loss import factor_to_product
from onchip.vocab.torch.operator import TorchLoss, products
from onchip.vocab.torch.softmax import (
    Asked,
    KnownStats,
    Shares,
    TokenGradient,
    TokenStats,
    float16_scale,
    token_gradient,
)
from onchip.vocab.torch.tiles import NOWHERE, Ids
from onchip.vocab.triton import setup
from onchip.vocab.triton.operator import TritonKept, kernels


def _of_op(call: Any) -> dict[str, Any]:
    more = call.options.mean_logits + call.options.log_sum_sq_probs
    return {"op": call.op, "ids": call.several, "stats": call.options.entropy, "more_stats": more}


def _tokens(call: Any, *, check_values: bool) -> Ids:
    """The tokens and ids that count; values are always checked on the CPU, unless kernels run."""
    options = call.options
    return tiles.select(
        call.op, "ids", call.ids, call.number, call.vocab, call.token_temperature,
        ignore_index=options.ignore_index, temperature=options.temperature, dtype=call.dtype,
        check_values=check_values, compact=not call.kernels,
        first=(1, *[0] * (call.ids.ndim + 1 - call.given.ndim)) if options.shift else (),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LogProbsCall(LinearCall):
    """The arguments of linear_log_probs."""

    options: LogProbsOptions

    op, of_op, tokens = OP, property(_of_op), _tokens
    of_kernels = property(lambda call: {"stats": call.options.entropy or call.options.top1})


@dataclass(frozen=True, kw_only=True)
class LogProbsRowsCall(RowsCall):
    """The arguments of log_probs."""

    options: LogitsOptions

    op, of_op, tokens = LOGITS_OP, property(_of_op), _tokens


class LogProbsOutputs(NamedTuple):
    """The outputs."""

    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor
    top1: Tensor | None
    mean_logits: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean: Tensor | None = None
    """The logits' mean under their softmax; from the kernels of a head None, and without the entropy."""

    @staticmethod
    def empty(call: Any, of_head: bool) -> "LogProbsOutputs":
        """Empty outputs, for kernels `of_head` or otherwise."""
        options, total = call.options, accumulator(call.given.dtype)

        def make(wanted: bool, dtype: torch.dtype = total, shape: Sequence[int] = call.leading) -> Any:
            return stated.empty(shape, dtype, call.given.device) if wanted else None

        return LogProbsOutputs(
            make(True, shape=call.ids.shape),
            make(options.entropy),
            make(True),
            make(options.top1, torch.int64),
            make(options.mean_logits),
            make(options.log_sum_sq_probs),
            make(options.entropy and not of_head),
        )

    @staticmethod
    def of(call: Any, stats: TokenStats, tokens: Ids | None) -> "LogProbsOutputs":
        """The outputs.  Without `tokens`, the statistics are those of all tokens, with ignored ones filled in
        already."""
        options = call.options

        def spread(x: Tensor | None, shape: Sequence[int] = call.leading, fill: int = 0) -> Any:
            return x if x is None else x.view(shape) if tokens is None else tokens.spread(x, shape, fill)

        return LogProbsOutputs(
            spread(stats.log_prob, call.ids.shape),
            spread(stats.entropy) if options.entropy else None,
            spread(stats.lse),
            spread(stats.argmax, fill=-1) if options.top1 else None,
            spread(stats.mean_logits),
            spread(stats.log_sum_sq),
            spread(stats.mean),
        )

    @property
    def known(self) -> KnownStats:
        """What backward needs."""
        return KnownStats(self.lse, self.log_prob, self.entropy, self.mean)


def _asked(call: Any) -> Asked:
    options = call.options
    return Asked(options.entropy, options.mean_logits, options.log_sum_sq_probs, top=options.top1)


def _gradient(
    call: Any, known: KnownStats, upstream: Made, tokens: Ids, shares: Shares
) -> tuple[TokenGradient, Tensor | None]:
    """The gradient of each token's logits, and the factor that keeps it in float16's range (None: there is none)."""
    ids, factor = tokens.ids, factor_to_product(tokens, call.options)

    def rows(x: Tensor | None, *shape: int) -> Any:
        return None if x is None else tokens.take(x.reshape(tokens.total, *shape).to(tokens.dtype))

    def scaled(grad: Tensor | None) -> Any:
        # A NaN in an ignored token's upstream gradient must not spread.
        return None if grad is None else tokens.mask(rows(grad)) * factor

    log_prob, g = rows(known.log_prob, ids.shape[1]), rows(upstream[0], ids.shape[1])
    with_entropy = call.options.entropy
    g_entropy, g_lse = scaled(upstream[1]) if with_entropy else None, scaled(upstream[2])
    g = torch.zeros_like(log_prob) if g is None else g.masked_fill(ids == NOWHERE, 0)
    g = g * (factor[:, None] if isinstance(factor, Tensor) else factor)
    if tokens.bad is not None:
        g = g.masked_fill(tokens.bad, float("nan"))
    size = g.abs().sum(1)
    for more in (g_entropy, g_lse):
        size = size if more is None else size + more.abs()
    grad_scale = float16_scale(size, call.operand)
    if grad_scale is not None:
        g, g_entropy, g_lse = (None if x is None else x * grad_scale for x in (g, g_entropy, g_lse))
    return token_gradient(
        rows(known.lse),
        log_prob,
        g,
        ids=ids,
        grad_lse=g_lse,
        grad_entropy=g_entropy,
        mean=rows(known.mean) if with_entropy else None,
        entropy=rows(known.entropy) if with_entropy else None,
        kept=tokens.kept,
        shares=shares,
    ), grad_scale


def _by_outputs(kept: TritonKept[Any], upstream: Made) -> Any:
    """What the kernels of a head take."""
    from onchip.vocab.triton import records, walks

    call, known, shape = kept.call, kept.known, (kept.call.number, kept.call.several)
    log_prob, entropy, lse = (setup.flat(x) for x in upstream)
    followed = setup.flat(known.entropy)
    if not call.options.entropy:
        entropy = followed = None
    made = walks.OutputGradients(None if log_prob is None else log_prob.view(shape), lse, entropy)
    softmax = records.TokenSoftmax(known.lse.reshape(-1), known.log_prob.reshape(shape), followed)
    return softmax, lambda run: (made, None)


LOSS, OF_LOGITS = (
    TorchLoss(call.op, call, LogProbsOutputs, _asked, LogProbsOutputs.of, LogProbsOutputs.empty, _gradient, 3)
    for call in (LogProbsCall, LogProbsRowsCall)
)
PRODUCTS = products(LOSS)
KERNELS = kernels(LOSS, _by_outputs)
ROWS = of_logits(OF_LOGITS)
