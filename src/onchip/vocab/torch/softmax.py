"""The softmax of each token over the vocabulary, tile by tile, and its gradient.

Every loss over a vocabulary is a function of each token's `TokenStats`, and the gradient of its logits is a
`TokenGradient`: p (factor + entropy_row (z - mean)) - even, except at the ids' own entries.  Labels of every entry are
subtracted too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.vocab.torch.tiles import NOWHERE, Ids, rows_of

# Where every logit so far is -inf, the running maximum is this: finite, so that a difference of two is never NaN.
LOWEST = {dtype: torch.finfo(dtype).min / 4 for dtype in (torch.float32, torch.float64)}
# exp of this is 0: offsets are cut off here, so that p log p is 0 at p = 0 where 0 * -inf would not be.
VANISHED = {torch.float32: -128.0, torch.float64: -1024.0}
# float16 can't hold a gradient of 1e-8: rows of the softmax gradient are scaled to about this before a product.
FLOAT16_ROW = 256.0


class Asked(NamedTuple):
    """Which statistics are wanted, in addition to lse, log_prob and argmax."""

    entropy: bool = False
    mean_logits: bool = False
    sum_sq: bool = False
    class_weight: Tensor | None = None  # [V]: of the logits in their mean
    top: bool = False  # the largest logit itself

    @property
    def spare(self) -> bool:
        """Whether a second tile is needed."""
        return self.entropy or self.class_weight is not None


class TokenStats(NamedTuple):
    """Statistics of each computed token's softmax; [n] float32, or float64, unless noted."""

    lse: Tensor
    log_prob: Tensor  # [n, K]: of the ids; 0 for ignored ones, NaN for those out of range
    argmax: Any  # [n] int64: -1 where all logits are -inf; None: it wasn't followed
    entropy: Tensor | None
    mean: Tensor | None  # the logits' mean under their softmax
    mean_logits: Tensor | None  # their plain mean
    uniform: Tensor | None  # the mean of lse - z, weighted by class: the cross-entropy of the uniform distribution
    log_sum_sq: Tensor | None  # log(sum(p**2))
    top: Tensor | None = None  # the largest logit
    low: Tensor | None = None  # what lse was rounded by

    def is_top1(self, tokens: Ids) -> Tensor:
        """[n] bool: the first id is the argmax."""
        value: Tensor = self.argmax == tokens.ids[:, 0]
        return value if tokens.bad is None else value & ~tokens.bad[:, 0]


class KnownStats(NamedTuple):
    """Those of a loss's outputs that backward needs, with the names that they have there."""

    lse: Tensor
    log_prob: Tensor
    entropy: Tensor | None = None
    mean: Tensor | None = None
    largest: Tensor | None = None
    mass: Tensor | None = None


@dataclass
class Running:
    """The running softmax of each token over the vocabulary seen so far, [n] float32 or float64."""

    max: Tensor
    others: Tensor  # sum of exp(z - max) over all but the argmax
    squares: Tensor  # sum of exp(z - max)**2 over all but the argmax
    moment: Tensor  # sum of exp(z - max) * (z - max), for the entropy
    offset_sum: Tensor  # sum of z - max, for the plain mean
    argmax: Tensor  # int64, -1 where all logits so far are -inf
    picked: Tensor  # [n, K]: the ids' logits

    @staticmethod
    def empty(ids: Tensor, dtype: torch.dtype) -> "Running":
        n, k = ids.shape

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=ids.device)

        lowest = torch.full((n,), LOWEST[dtype], dtype=dtype, device=ids.device)
        argmax = torch.full((n,), -1, dtype=torch.int64, device=ids.device)
        return Running(lowest, zeros(n), zeros(n), zeros(n), zeros(n), argmax, zeros(n, k))

    def part(self, start: int, stop: int) -> "Running":
        """The same storage for tokens [start, stop)."""
        return Running(**{name: x[start:stop] for name, x in vars(self).items()})

    def absorb(self, z: Tensor, start: int, ids: Tensor, asked: Asked, spare: Tensor | None) -> Tensor:
        """Take in the logits of the vocabulary from `start` on, and return exp(z - max).

        Overwrites `z`.  `spare` has z's shape and is given if `asked` needs it; with the entropy, the result is there.
        """
        column, inside = columns_of(ids, start, z.shape[1])
        self.picked.copy_(torch.where(inside, z.gather(1, column), self.picked))
        top, at = z.max(1)
        leads = ~(top <= self.max)  # True for NaN
        new_max = torch.maximum(self.max, top)
        drop = self.max - new_max
        decay = drop.exp()
        z.sub_(new_max[:, None])
        if asked.class_weight is not None:
            seen, weight = asked.class_weight[:start].sum(), asked.class_weight[start : start + z.shape[1]]
            # A class that weighs nothing counts for nothing, where 0 * -inf would not be 0.
            weighed = torch.mul(z, weight, out=spare).masked_fill_(weight == 0, 0)
            self.offset_sum.add_(drop * seen).add_(weighed.sum(1))
        elif asked.mean_logits:
            self.offset_sum.add_(drop, alpha=start).add_(z.sum(1))
        if not asked.entropy:
            e = z.exp_()
        else:
            e = torch.exp(z, out=spare)
            new = z.clamp_(min=VANISHED[z.dtype]).mul_(e).sum(1)
            self.moment.add_(drop * self.total).mul_(decay).add_(new)
        largest = e.gather(1, at[:, None])
        # The argmax is left out of the sum: where it leads by far, 1 + others would round the others away.
        e.scatter_(1, at[:, None], torch.where(leads[:, None], 0, largest))
        led = (self.argmax >= 0).to(z.dtype)
        self.others.add_(led * leads).mul_(decay).add_(e.sum(1))
        if asked.sum_sq:
            # The norm stores no tile of squares.
            self.squares.add_(led * leads).mul_(decay.square()).add_(torch.linalg.vector_norm(e, dim=1).square())
        e.scatter_(1, at[:, None], largest)
        self.argmax.copy_(torch.where(leads, at + start, self.argmax))
        self.max.copy_(new_max)
        return e

    @property
    def total(self) -> Tensor:
        """The sum of exp(z - max)."""
        return self.others + (self.argmax >= 0).to(self.others.dtype)

    @property
    def log_total(self) -> Tensor:
        return torch.where(self.argmax >= 0, self.others.log1p(), self.others.log())

    @property
    def lse(self) -> Tensor:
        return self.max + self.log_total

    @property
    def low(self) -> Tensor:
        """What `lse` was rounded by."""
        return rounded_by(self.max, self.log_total)

    @property
    def log_prob(self) -> Tensor:
        """[n, K]: the log-probabilities of the ids, whether they count or not."""
        return (self.picked - self.max[:, None]) - self.log_total[:, None]

    def stats(self, tokens: Ids, vocab: int, asked: Asked) -> TokenStats:
        """The statistics, once the tokens have seen all of the vocabulary."""
        log_total = self.log_total
        mean_offset = self.moment / self.total if asked.entropy else None
        plain_offset = self.offset_sum / vocab if asked.mean_logits else None
        share = 1 if asked.class_weight is None else asked.class_weight.sum() / vocab
        log_prob = self.log_prob.masked_fill(tokens.ids == NOWHERE, 0)
        if tokens.bad is not None:
            log_prob = log_prob.masked_fill(tokens.bad, float("nan"))
        return TokenStats(
            self.max + log_total,
            log_prob,
            self.argmax,
            None if mean_offset is None else log_total - mean_offset,
            None if mean_offset is None else self.max + mean_offset,
            None if plain_offset is None else self.max + plain_offset,
            None if plain_offset is None else log_total * share - plain_offset,
            self.squares.log1p() - 2 * log_total if asked.sum_sq else None,
            self.max if asked.top else None,
            self.low,
        )


def rounded_by(a: Tensor, b: Tensor) -> Tensor:
    """What a + b is rounded by (Knuth's two-sum); 0 where it isn't finite."""
    total = a + b
    of_b = total - a
    return ((a - (total - of_b)) + (b - of_b)).nan_to_num(0, 0, 0)


def columns_of(ids: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Where each id lies in the vocabulary [start, start + width): a legal column, and whether it is there; [n, K]."""
    column = (ids - start).clamp_(0, width - 1)
    return column, column + start == ids


def write_at(x: Tensor, ids: Tensor, start: int, values: Tensor) -> None:
    """Write the ids' values, [n, K], to their places in `x`, whose columns are the vocabulary from `start` on."""
    # An id outside of this tile repeats one inside, so that no two write different numbers to one place; a token
    # without an id inside writes back the number that is there.
    column, inside = columns_of(ids, start, x.shape[1])
    one = inside.to(torch.int8).argmax(1, keepdim=True)
    column = torch.where(inside, column, column.gather(1, one))
    value = torch.where(inside, values, values.gather(1, one))
    x.scatter_(1, column, torch.where(inside.gather(1, one), value, x.gather(1, column)))


# ----------------------------------------------------------------------------------------------------------- gradient


class EntryLabels(NamedTuple):
    """Labels q of every entry, of which the gradient has - factor * row * q * class_weight."""

    probs: Tensor  # [..., V], or [..., rows] of this rank's shard
    factor: float
    row: Tensor  # [n]
    largest: Tensor  # [n, 1] int64: in place of ids, where the largest logit is; NOWHERE if its p is small

    def part(self, start: int, stop: int) -> "EntryLabels":
        probs, row, largest = rows_of(self.probs, start, stop), self.row[start:stop], self.largest[start:stop]
        return EntryLabels(probs, self.factor, row, largest)


@dataclass(frozen=True)
class TokenGradient:
    """The gradient of each computed token's final logits; [n], or one number for all.

    With p = exp(z - center - width) it is p (factor + entropy_row (z - center)) - even * class_weight, and `at_ids` at
    the ids; `labels` subtract more, and have an id of their own.  All are multiplied by the derivative of the final
    logits with respect to the product (scale / temperature), and by `grad_scale`.
    """

    center: Tensor  # the mean logit where the entropy has a gradient, else the log-sum-exp
    factor: Tensor
    at_ids: Tensor  # [n, K]
    even: Tensor | None = None
    class_weight: Tensor | None = None  # [V]: factors of `even` and of labels
    width: Tensor | None = None  # where the entropy has a gradient, the entropy
    entropy_row: Tensor | None = None  # then minus its upstream gradient
    labels: EntryLabels | None = None

    def part(self, start: int, stop: int) -> "TokenGradient":
        def cut(x: Tensor | None) -> Any:
            return None if x is None else x[start:stop]

        own = {name: cut(x) for name, x in vars(self).items() if name not in ("class_weight", "labels")}
        labels = None if self.labels is None else self.labels.part(start, stop)
        return TokenGradient(**own, class_weight=self.class_weight, labels=labels)

    def of_logits(self, z: Tensor, ids: Tensor, start: int, slope: Tensor | None, spare: Tensor | None) -> Tensor:
        """Turn final logits in place into the gradient of the logits before softcap and scale."""
        z.sub_(self.center[:, None])
        if self.entropy_row is None or self.width is None:
            return self.of_exponentials(z.exp_(), self.factor, ids, start, slope)
        p = torch.sub(z, self.width[:, None], out=spare).exp_()
        z.clamp_(min=VANISHED[z.dtype]).mul_(self.entropy_row[:, None]).add_(self.factor[:, None]).mul_(p)
        return self._finished(z, ids, start, slope)

    def of_exponentials(self, e: Tensor, factor: Tensor, ids: Tensor, start: int, slope: Tensor | None) -> Tensor:
        """The same from exponentials; `factor` turns them into the gradient's factor times p."""
        return self._finished(e.mul_(factor[:, None]), ids, start, slope)

    def _finished(self, g: Tensor, ids: Tensor, start: int, slope: Tensor | None) -> Tensor:
        columns = slice(start, start + g.shape[1])
        each = None if self.class_weight is None else self.class_weight[columns]
        if self.labels is not None:
            q, ids = self.labels.probs[:, columns], self.labels.largest
            g.addcmul_(q.to(g.dtype) if each is None else q * each, self.labels.row[:, None], value=-self.labels.factor)
        if self.even is not None and each is not None:
            g.addr_(self.even, each, alpha=-1)
        elif self.even is not None:
            g.sub_(self.even[:, None])
        write_at(g, ids, start, self.at_ids)
        return g if slope is None else g.mul_(slope)


Shares = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def token_gradient(
    lse: Tensor,  # [n] float32 or float64, and so all that follow
    log_prob: Tensor,  # [n, K]
    grad_log_prob: Tensor,  # [n, K]
    *,
    ids: Tensor | None = None,  # [n, K], where K > 1
    grad_lse: Tensor | None = None,  # [n]
    grad_entropy: Tensor | None = None,  # [n], and then:
    mean: Tensor | None = None,  # [n]
    entropy: Tensor | None = None,  # [n]
    kept: Tensor | None = None,  # [n] bool, False for ignored tokens that are computed all the same
    shares: Shares | None = None,
) -> TokenGradient:
    """The gradient of each token's logits, given those of its log-probabilities, its log-sum-exp and its entropy.

    `shares` replaces `shares_of_ids`.
    """
    same, rest = grad_log_prob, None  # what goes to an id, and to the others of its token
    if ids is not None and ids.shape[1] > 1:
        same, rest = (shares or shares_of_ids)(ids, grad_log_prob)
    factor = -grad_log_prob.sum(1)
    if grad_lse is not None:
        factor = factor + grad_lse
        rest = -grad_lse[:, None] if rest is None else rest - grad_lse[:, None]
    center, width = lse, None
    if grad_entropy is not None:
        assert mean is not None
        assert entropy is not None
        center, width = mean, entropy
        more = grad_entropy[:, None] * (log_prob + entropy[:, None]).clamp(min=VANISHED[lse.dtype])
        rest = more if rest is None else rest + more
    # exp(z - inf) is 0 for ignored tokens, whatever their logits are.
    if kept is not None and width is None:
        center = center.masked_fill(~kept, float("inf"))
    elif kept is not None and width is not None:
        center, width = center.masked_fill(~kept, 0), width.masked_fill(~kept, float("inf"))
    # 1 - p as -expm1(log p): 1 minus a rounded p would lose all digits of a p near 1.
    at_ids = -(same * torch.expm1(log_prob))
    if rest is not None:
        at_ids = at_ids - log_prob.exp() * rest
    entropy_row = None if grad_entropy is None else -grad_entropy
    return TokenGradient(center, factor, at_ids, width=width, entropy_row=entropy_row)


def shares_of_ids(ids: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """For each id of a token, the sum of `g` over its occurrences, and the sum over the other ids; [n, K] each."""
    same, rest = torch.empty_like(g), torch.empty_like(g)
    for k in range(g.shape[1]):  # not all at once: that would be [n, K, K]
        equal = ids == ids[:, k : k + 1]
        same[:, k] = torch.where(equal, g, 0).sum(1)
        rest[:, k] = torch.where(equal, 0, g).sum(1)
    return same, rest


def float16_scale(size: Tensor, operand: torch.dtype) -> Tensor | None:
    """The factor that brings gradients of these sizes [n] into float16's range; None if they need none."""
    if operand != torch.float16 or size.numel() == 0:
        return None
    largest = size.abs().nan_to_num(nan=0).amax()
    return torch.where(largest > 0, FLOAT16_ROW / largest, 1)
