"""The operator of a loss of logits that exist, on PyTorch's operations or Triton's kernels.

Forward reads the rows and keeps a few numbers per token; backward reads them again, and writes the logits' gradient.
"""

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_register import Made, Wanted, stated_on
from onchip.vocab.rows import walk
from onchip.vocab.rows.launches import shares_of_ids
from onchip.vocab.torch import softmax
from onchip.vocab.torch.operator import LossKept, LossMade, LossOperator, TorchLoss, check_ranks
from onchip.vocab.torch.softmax import KnownStats, TokenGradient

# How many fields of a `KnownStats` the loss of ids has.
OF_IDS = 4


class RowsSaved(NamedTuple):
    """What forward leaves for backward, where kernels compute the loss of ids."""

    divisor: Tensor | None = None  # [] float32: what the mean divides by
    gradient: Tensor | None = None  # [..., V]: the logits' gradient, if forward computes it


def of_logits(loss: TorchLoss, **functions: Any) -> LossOperator:
    """The operator; `functions` are more of the `Operator`'s, or replace those here."""
    given = {
        "forward": partial(_forward, loss),
        "fake": lambda call: LossMade(loss.empty(call, False), RowsSaved()),
        "gradients": partial(_gradients, loss),
        "fake_gradients": lambda kept, upstream, wanted: [stated.empty_like(kept.call.logits)],
    }
    return loss.operator("rows", RowsSaved, differentiable=("logits",), states=True, **given | functions)


def _forward(loss: TorchLoss, call: Any) -> LossMade[Any, RowsSaved]:
    if call.shards.there:
        check_ranks(loss, call, call.require_memory)
    stats, tokens = walk.statistics(loss.op, call, loss.asked(call))
    return LossMade(loss.of_stats(call, stats, tokens), RowsSaved())


def _gradients(loss: TorchLoss, kept: LossKept[Any, RowsSaved], upstream: Made, wanted: Wanted) -> Made:
    out = stated.empty_like(kept.call.logits)
    write_gradient(loss, kept, upstream, out)
    walk.clear_padding(kept.call, out)
    return [out]


def write_gradient(loss: TorchLoss, kept: LossKept[Any, RowsSaved], upstream: Made, out: Tensor) -> None:
    """Write the logits' gradient, that of columns that are padding excepted."""
    call, tokens = kept.call, None
    if call.kernels:
        gradient = TokenGradient(*stated_on(call, partial(_of_all_tokens, loss), *kept.known[:OF_IDS], *upstream))
    else:
        tokens = call.tokens(check_values=False)
        gradient, _ = loss.gradient(call, kept.known, upstream, tokens, softmax.shares_of_ids)
    walk.write_gradient(call, tokens, gradient, out)


def _of_all_tokens(loss: TorchLoss, call: Any, *tensors: Any) -> list[Any]:
    """The fields of a `TokenGradient` for all T tokens, from what is known and the upstream gradients."""
    known, upstream = KnownStats(*tensors[:OF_IDS]), tensors[OF_IDS:]
    gradient, _ = loss.gradient(call, known, upstream, call.tokens(check_values=False), shares_of_ids)
    return [*vars(gradient).values()]
