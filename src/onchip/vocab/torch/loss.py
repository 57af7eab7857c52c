"""Cross-entropy of ids: its value and its gradient from each token's softmax statistics, by the formulas in
`vocab.loss`.

`options` are an op's, with the fields of `LossTerms` and logit_scale.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.options import LossStats, LossTerms
from onchip.frontend.topk import TopK
from onchip.frontend.torch_inputs import accumulator, has_values
from onchip.frontend.torch_register import stated_on
from onchip.frontend.torch_types import WithStats
from onchip.vocab import loss as maths
from onchip.vocab.torch import labels
from onchip.vocab.torch.softmax import (
    Asked,
    KnownStats,
    Shares,
    TokenGradient,
    TokenStats,
    float16_scale,
    shares_of_ids,
)
from onchip.vocab.torch.tiles import Ids, Tokens


def checked_class_weight(op: str, options: Any, class_weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The class weights [V] in the dtype of sums over inputs of `dtype`, contiguous.

    Wrong values raise on the CPU and, with check_inputs, wherever they may be read.
    """
    total = accumulator(dtype)
    each = stated.converted(class_weight, lambda x: x.to(total).contiguous())
    if (options.check_inputs or each.device.type == "cpu") and has_values(each):
        wrong = ~((each >= 0) & (each < float("inf")))
        if bool(wrong.any()):
            raise ValueError(f"{op}: class_weight must be finite and 0 or more; got {float(each[wrong][0])}")
    return each


class LabelFields(NamedTuple):
    """A call's labels (see `labels`) and what its loss is weighted with."""

    ids: Tensor
    labels: Tensor | None
    kind: str
    token_weight: Tensor | None  # [...]
    normalizer: Tensor | None  # []
    class_weight: Tensor | None  # [V] in the dtype of sums; None: there is none, or token_weight has it

    @property
    def of_entries(self) -> Tensor | None:
        """[..., V]: the labels, if every entry has one."""
        return self.labels if self.kind == "dense" else None

    @staticmethod
    def of(
        op: str,
        options: Any,
        target: Tensor | TopK[Tensor],
        leading: Sequence[int],
        token_weight: Tensor | None,
        normalizer: Tensor | None,
        class_weight: Tensor | None,
        dtype: torch.dtype,
        *,
        soft: bool,
    ) -> "LabelFields":
        """From what a public function was given, for tokens of these `leading` dimensions, and the dtype of its logits
        or its linear layer; `soft`: the target isn't ids.
        """
        ids, labels, kind = target, None, "ids"
        if isinstance(target, TopK):
            ids, labels, kind = target.indices, target.values, target.kind
        elif soft:
            ids, labels, kind = stated.zeros(leading, torch.int64, target.device), target, "dense"
        if class_weight is not None:
            class_weight = checked_class_weight(op, options, class_weight, dtype)
        if class_weight is not None and not soft:  # of soft labels they are a part
            of_target = stated.call(_of_target, class_weight, ids, options.ignore_index)
            if options.reduction == "mean" and normalizer is None:
                normalizer = stated.call(_sum_or_one, of_target)
            if options.in_token_weight:
                token_weight = of_target if token_weight is None else stated.call(torch.mul, token_weight, of_target)
                class_weight = None
        return LabelFields(ids, labels, kind, token_weight, normalizer, class_weight)  # type: ignore[arg-type]


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
    cost = maths.expected(torch, stats.log_prob, tokens.q)
    value: Tensor = maths.value(torch, LossTerms.of(options).nonzero, cost, stats.lse, stats.uniform)
    return value * tokens.weight


def reduced(options: Any, losses: Tensor, tokens: Tokens, shape: torch.Size) -> Tensor:
    """Weighted losses [n], reduced; or the losses of all tokens in `shape`."""
    losses = tokens.spread(losses, shape)
    return losses if options.reduction == "none" else losses.sum() * tokens.inverse_count


class LossOutputs(NamedTuple):
    """What an operator returns for a cross-entropy; per-token values have the leading dimensions."""

    loss: Tensor  # [...] or []
    lse: Tensor
    log_prob: Tensor  # of each id, in the shape of ids; of labels of every entry, of the largest logit, or its p - 1
    # With return_stats:
    entropy: Tensor | None = None
    correct: Tensor | None = None  # bool
    argmax: Tensor | None = None  # int64, -1 for ignored tokens
    # And where labels are numbers, as they are given:
    expected: Tensor | None = None  # sum of probability times log-probability
    target_logit: Tensor | None = None  # sum of probability times logit
    # Of labels of every entry:
    largest: Tensor | None = None  # int64: where the largest logit is
    mass: Tensor | None = None  # their sum, weighted by class

    @staticmethod
    def empty(call: Any, like: Tensor, *, kernels: bool = False, reduced: bool = True) -> "LossOutputs":
        """Memory for the outputs of a call with these labels (`labels`), for hidden states or logits `like` these.
        PyTorch's operations fill it, or the `kernels` for labels of every entry; with the `reduced` loss or the losses
        per token.
        """
        options, shape, dense = call.options, labels.leading(call), call.kind == "dense"
        total, stats, soft = accumulator(like.dtype), options.return_stats, options.return_stats and call.kind != "ids"

        def make(wanted: bool = True, dtype: torch.dtype = total, shape: Sequence[int] = shape) -> Any:
            return stated.empty(shape, dtype, like.device) if wanted else None

        return LossOutputs(
            make(shape=() if reduced and options.reduction != "none" else shape), make(), make(shape=call.ids.shape),
            make(stats), make(stats, torch.bool), make(stats, torch.int64), make(soft), make(soft),
            make(dense and not kernels, torch.int64), make(dense),
        )  # fmt: skip

    @staticmethod
    def of(call: Any, stats: TokenStats, tokens: Tokens | None) -> "LossOutputs":
        """The outputs for ids, given the statistics of the whole vocabulary; without tokens, those of all T as kernels
        made them, with ignored ones filled in.
        """
        options, shape = call.options, labels.leading(call)
        if tokens is None:
            by_token = stats.lse, stats.log_prob, stats.argmax, stats.entropy, stats.uniform
            loss, correct, *more = stated_on(call, _results, *by_token)
            entropy, argmax = (None if x is None else x.view(shape) for x in (stats.entropy, stats.argmax))
            lse, log_prob = stats.lse.view(shape), stats.log_prob.view(call.ids.shape)
            return LossOutputs(loss, lse, log_prob, entropy, correct, argmax, *more)

        def spread(x: Tensor | None, fill: int = 0) -> Any:
            return None if x is None else tokens.spread(x, shape, fill)

        loss = reduced(options, token_losses(options, stats, tokens), tokens, shape)
        made = LossOutputs(loss, spread(stats.lse), tokens.spread(stats.log_prob, call.ids.shape))
        if not options.return_stats:
            return made
        made = made._replace(entropy=spread(stats.entropy), argmax=spread(stats.argmax, -1))
        if call.kind == "ids":
            return made._replace(correct=spread(stats.is_top1(tokens)))
        q = labels.probs(call, weighed=False)
        expected, mass = maths.expected(torch, stats.log_prob, q), q.sum(1)
        correct = stats.argmax == tokens.ids.gather(1, q.argmax(1, keepdim=True))[:, 0]
        logit = torch.where(mass == 0, 0, expected + mass * stats.lse)
        return made._replace(correct=spread(correct), expected=spread(expected), target_logit=spread(logit))

    @property
    def known(self) -> KnownStats:
        """What backward needs."""
        return KnownStats(self.lse, self.log_prob, largest=self.largest, mass=self.mass)

    @property
    def of_id(self) -> dict[str, Tensor | None]:
        """What the kernels for one id per token fill in."""
        return dict(zip(self._fields[:6], self[:6], strict=True))

    @property
    def of_labels(self) -> dict[str, Tensor | None]:
        """What the kernels for labels of every entry fill in."""
        more = ("expected", "entropy", "correct", "argmax", "target_logit", "mass")
        return {"loss": self.loss, "lse": self.lse, "less": self.log_prob} | {x: getattr(self, x) for x in more}

    def stats(self, kind: str) -> LossStats[Tensor]:
        """What the caller gets with return_stats, for labels of this kind."""
        log_prob, logit = self.expected, self.target_logit
        if kind == "ids":
            log_prob, logit = self.log_prob, stated.call(torch.add, self.log_prob, self.lse)
        made: Any = (self.lse, log_prob, *self[3:6], logit)  # none of it is None then
        return LossStats(*made)


def _results(call: Any, *tensors: Any) -> list[Any]:
    """The outputs that aren't among these statistics."""
    lse, log_prob, argmax, entropy, uniform = tensors
    stats = TokenStats(lse, log_prob, argmax, entropy, None, None, uniform, None)
    made = LossOutputs.of(call, stats, call.tokens(check_values=False))
    return [made.loss, made.correct, made.expected, made.target_logit]


def returned(out: LossOutputs, options: Any, kind: str, length: int | None = None) -> Tensor | WithStats:
    """What a public function returns, for labels of this kind.  With a sequence's `length`, per-token values are filled
    up to that with what ignored tokens have.
    """
    stats = out.stats(kind) if options.return_stats else None
    if length is None:
        return out.loss if stats is None else (out.loss, stats)

    def whole(x: Tensor, fill: int = 0) -> Tensor:
        return torch.nn.functional.pad(x, (0, length - x.shape[-1]), value=fill)

    loss = whole(out.loss) if out.loss.ndim else out.loss
    if stats is None:
        return loss
    return loss, LossStats(*map(whole, stats))._replace(argmax=whole(stats.argmax, -1))


def scaled_rows(
    tokens: Tokens, options: Any, upstream: Tensor, operand: torch.dtype, mass: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """[n]: the upstream gradient of each token's loss, times the derivative of the final logits with respect to the
    product; and the factor that brings it into float16's range, which is included (None: none).

    `upstream` is that of the reduced loss, 0-d or [n]; `mass` [n] is the sum of labels of every entry.
    """
    row = tokens.weight * upstream * factor_to_product(tokens, options)
    if operand != torch.float16:
        return row, None
    mass = mass if tokens.q is None else tokens.q.sum(1)
    grad_scale = float16_scale(row if mass is None else row * (1 + mass), operand)
    return (row if grad_scale is None else row * grad_scale), grad_scale


def reduced_of_all(call: Any, losses: Tensor) -> Tensor:
    """As `reduced`, from all T tokens' losses without their weights; none is ignored."""
    tokens = call.tokens(check_values=False)
    return reduced(call.options, losses.reshape(-1) * tokens.weight, tokens, labels.leading(call))


def rows_of_all(call: Any, grad_loss: Tensor) -> Tensor:
    """[T] float32: `scaled_rows` of all tokens."""
    tokens = call.tokens(check_values=False)
    upstream = tokens.upstream(grad_loss, call.options.reduction)
    return scaled_rows(tokens, call.options, upstream, torch.float32)[0]


def factor_to_product(tokens: Ids, options: Any) -> Tensor | float:
    """[n], or one number for all: the derivative of final logits with respect to the product, without the softcap."""
    tau, scale = tokens.temperature, float(options.logit_scale)
    return scale / (tau[:, 0] if isinstance(tau, Tensor) else tau)


def gradient_of_loss(
    call: Any,  # of a cross-entropy
    tokens: Tokens,
    grad_loss: Tensor | None,
    lse: Tensor,  # [...] of all tokens, as forward made them
    log_prob: Tensor,
    shares: Shares = shares_of_ids,
) -> tuple[TokenGradient, Tensor | None]:
    """The gradient of these tokens' logits for the upstream gradient, and the factor for float16 that is included in
    it.
    """
    assert grad_loss is not None  # all depends on it
    each = tokens.upstream(grad_loss, call.options.reduction)
    row, grad_scale = scaled_rows(tokens, call.options, each, call.operand)
    known = tokens.take(lse.reshape(-1)), tokens.take(log_prob.reshape(tokens.total, -1 if tokens.total else 1))
    return loss_gradient(call.options, row, *known, call.vocab, tokens, shares), grad_scale


def loss_gradient(
    options: Any,
    row: Tensor,  # [n]
    lse: Tensor,  # [n]
    log_prob: Tensor,  # [n, K]
    vocab: int,
    tokens: Tokens | None = None,
    shares: Shares = shares_of_ids,
) -> TokenGradient:
    """The gradient of the logits of these tokens, for upstream gradients `row`.

    Without `tokens`, each token has one id, and all count.  `shares` replaces `softmax.shares_of_ids`.
    """
    terms, center = LossTerms.of(options).nonzero, lse
    each = own = share = q = mass = others = None
    if tokens is not None and tokens.q is not None:
        q, mass = tokens.q, tokens.q.sum(1)
        if q.shape[1] > 1:
            q, others = shares(tokens.ids, q)
            if tokens.bad is not None:
                row = row.masked_fill(tokens.bad.any(1), float("nan"))
    if tokens is not None and tokens.class_weight is not None and terms.label_smoothing is not None:
        each = tokens.class_weight
        own, share = each[tokens.ids], each.mean()
    if tokens is not None and tokens.kept is not None:
        # exp(z - inf) is 0 for ignored tokens, whatever their logits are.
        center = center.masked_fill(~tokens.kept, float("inf"))
    factor = maths.of_p(terms, mass, lse, share)
    at_ids = maths.at_entry(torch, terms, log_prob, q, others, lse[:, None], vocab, own, share)
    even = None if terms.label_smoothing is None else row * (terms.label_smoothing / vocab)
    return TokenGradient(center, row * factor, row[:, None] * at_ids, even=even, class_weight=each)
