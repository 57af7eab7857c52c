"""The operators of a loss over a vocabulary in PyTorch, of a linear layer or of logits that exist: all that is around
the walks of a backend and is the same for every loss.

A loss is functions of its calls and of the statistics of each token's softmax.  Each way to compute it is an operator,
which a function makes from the loss: `products`, here, on PyTorch's own matrix products; `kernels`, in
`vocab.triton.operator`; and `of_logits`, in `vocab.rows.operator`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.vocab.torch import dense, parallel, walk
from onchip.vocab.torch.agreement import require_agreement
from onchip.vocab.torch.call import OF_LAYER
from onchip.vocab.torch.loss import LossOutputs, asked_by, gradient_of_loss
from onchip.vocab.torch.softmax import Asked, KnownStats, Shares, TokenGradient, TokenStats, shares_of_ids

C = TypeVar("C")
O = TypeVar("O")  # noqa: E741
S = TypeVar("S")


class LossMade(NamedTuple, Generic[O, S]):
    """What forward returns."""

    out: O
    saved: S  # for backward


class LossKept(NamedTuple, Generic[C, S]):
    """What backward gets."""

    call: C
    known: KnownStats
    saved: S


class Nothing(NamedTuple):
    """What forward leaves for backward beside the outputs, where the walk is made again."""


LossOperator = Operator[Any, LossMade[Any, Any]]


@dataclass(frozen=True)
class TorchLoss:
    """A loss: functions of a call, a `LinearCall` or a `RowsCall`."""

    op: str
    """The name that errors and its operators' names begin with."""
    call: type
    outputs: type
    """A NamedTuple whose property `known` is a `KnownStats`."""
    asked: Callable[[Any], Asked]
    """The statistics that the outputs need."""
    of_stats: Callable[[Any, TokenStats, Any], Any]
    """(call, statistics, tokens): the outputs.  Without tokens the statistics are those of all T, as kernels made them,
    with ignored ones filled in."""
    empty: Callable[[Any, bool], Any]
    """(call, kernels): empty outputs, as kernels or PyTorch's operations fill them."""
    gradient: Callable[[Any, KnownStats, Made, Any, Shares], tuple[TokenGradient, Tensor | None]]
    """(call, known, upstream, tokens, shares): the gradient of these tokens' logits for the upstream gradients of the
    differentiable outputs, and the factor for float16 that is included in it; `shares` as in
    `softmax.token_gradient`."""
    differentiable_outputs: int = 1
    """How many outputs, the first ones, have a gradient."""

    def operator(
        self, way: str, saved: Any, *, call: Any = None, kept: Any = None, save: Any = None, **functions: Any
    ) -> LossOperator:
        """The operator for a way to compute, by the `Operator`'s functions.

        saved: the type of what forward leaves for backward beside the outputs.  kept: of what `save` makes of these.
        call: of the arguments, if there are more.
        """
        generic: Any = LossMade, LossKept
        kept = kept or generic[1][self.call, saved]
        return Operator(
            f"{self.op}_by_{way}", op=self.op, types=(call or self.call, generic[0][self.outputs, saved], kept),
            save=save or _save, differentiable_outputs=self.differentiable_outputs, **functions,
        )  # fmt: skip


def _save(call: Any, made: LossMade[Any, Any]) -> LossKept[Any, Any]:
    return LossKept(call, made.out.known, made.saved)


def check_ranks(loss: TorchLoss, call: Any, check: Callable[[], Any] | None = None) -> None:
    """On the CPU and with check_inputs: raise where the arguments of ranks that share the vocabulary don't belong
    together; anywhere what `check` raises."""
    require_agreement(
        loss.op, call, (call.sizes, call.kind), call.ids, None if call.dense else call.labels, call.token_weight,
        call.normalizer, call.class_weight, call.token_temperature, check=check,
        ids=call.ids if call.kind == "ids" else None, **call.of_ranks,
    )  # fmt: skip


def cross_entropy(op: str, call: type) -> TorchLoss:
    """The loss of a cross-entropy, whose calls have the fields of `labels.Labelled`."""
    return TorchLoss(
        op,
        call,
        LossOutputs,
        asked=lambda call: asked_by(call.options, call.class_weight),
        of_stats=LossOutputs.of,
        empty=lambda call, kernels: LossOutputs.empty(call, call.given, kernels=kernels),
        gradient=_gradient_of_loss,
    )


def _gradient_of_loss(
    call: Any, known: KnownStats, upstream: Made, tokens: Any, shares: Shares
) -> tuple[TokenGradient, Tensor | None]:
    if call.dense:
        return dense.gradient_of_loss(call, known, tokens, upstream[0])
    return gradient_of_loss(call, tokens, upstream[0], known.lse, known.log_prob, shares)


# -------------------------------------------------------------------------------- on PyTorch's own matrix products


def products(loss: TorchLoss, **more: Any) -> LossOperator:
    """The operator on PyTorch's own matrix products, which keeps a few numbers per token: backward walks over the
    logits again (`vocab.torch.walk`).
    """
    return loss.operator(
        "recomputation", Nothing, forward=partial(_forward, loss), gradients=partial(_gradients, loss),
        fake=lambda call: LossMade(loss.empty(call, False), Nothing()),
        fake_gradients=lambda kept, upstream, wanted: kept.call.empty_gradients(wanted), **OF_LAYER, **more,
    )  # fmt: skip


def _forward(loss: TorchLoss, call: Any) -> LossMade[Any, Any]:
    if call.shards.there:
        check_ranks(loss, call)
    tokens = call.tokens(check_values=call.options.check_inputs)
    if call.dense:
        mine = parallel.local(call)
        out = dense.statistics(loss.op, call, mine.layer, tokens, mine.plan("stash", tokens))
        return LossMade(out._replace(largest=torch.zeros_like(call.ids)) if call.kernels else out, Nothing())
    stats = walk.statistics(loss.op, call, tokens, loss.asked(call))
    return LossMade(loss.of_stats(call, stats, tokens), Nothing())


def _gradients(loss: TorchLoss, kept: LossKept[Any, Any], upstream: Made, wanted: Wanted) -> Made:
    call = replace(kept.call, grads=tuple(wanted))
    tokens = call.tokens(check_values=False)
    gradient, grad_scale = loss.gradient(call, kept.known, upstream, tokens, shares_of_ids)
    more = {"stats": gradient.entropy_row is not None} if loss.differentiable_outputs > 1 else {}
    return walk.gradients(call, tokens, gradient, grad_scale, call.weight_grad_out, **more)
