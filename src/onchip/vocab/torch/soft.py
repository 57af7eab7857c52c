"""Cross-entropy with soft labels: probabilities of K ids of each token, or of every entry of the vocabulary.

With q a token's probabilities, S their sum, p the softmax of its final logits z, eps the label smoothing:

    loss = (1 - eps) sum_v q_v (lse - z_v) + eps (lse - mean(z)) + z_loss lse^2
    d loss / d z_v = p_v ((1 - eps) S + eps + 2 z_loss lse) - (1 - eps) q_v - eps / V

With class weights w_v, q_v is w_v times a token's probability, lse - mean(z) becomes mean(w (lse - z)), and in the
gradient eps / V is eps w_v / V and the eps beside S is eps mean(w).

K ids go through the walks of the other losses, with log-probabilities of several ids.  Where every entry has a
probability, `dense_stats` and `dense_gradient` take rows of the whole vocabulary, a chunk of tokens at a time; of a
shard of it `dense_sums` are what ranks exchange.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_inputs import accumulator
from onchip.frontend.torch_labels import log_probs_or_nan
from onchip.frontend.torch_types import LossStats, WithStats
from onchip.vocab.chunks import Config
from onchip.vocab.rows.torch import flatten
from onchip.vocab.torch.softmax import Asked, Running, Shares, TokenGradient, TokenStats, token_gradient
from onchip.vocab.torch.tiles import Ids, Tile, Tokens, apply, spans, temperature_of

# The logarithm of 1/2.
LIKELY = -math.log(2)


class SoftStats(NamedTuple):
    """[T] each, of labels as they are given, what `LossStats` has beside lse; None without return_stats."""

    expected: Tensor | None = None  # sum of probability times log-probability
    entropy: Tensor | None = None
    correct: Tensor | None = None  # bool
    argmax: Tensor | None = None  # int64
    target_logit: Tensor | None = None  # sum of probability times logit

    @staticmethod
    def empty(options: Any, like: Tensor, tokens: int) -> "SoftStats":
        """Not yet filled, for hidden states or logits `like` these."""
        if not options.return_stats:
            return SoftStats()
        total = accumulator(like.dtype)
        dtypes = total, total, torch.bool, torch.int64, total
        return SoftStats(*(stated.empty(tokens, x, like.device) for x in dtypes))

    def of(self, lse: Tensor) -> LossStats:
        """With this lse, [T], what the caller gets."""
        made: Any = (lse, *self)  # none of it is None then
        return LossStats(*made)


class SoftOutputs(NamedTuple):
    """What an operator returns of soft labels."""

    loss: Tensor  # [...] or []
    lse: Tensor  # [T]
    log_prob: Tensor  # [T, K]: of the ids; of every entry's labels [T, 1], of the largest logit
    largest: Tensor | None  # [T, 1] int64, of every entry's labels: where that is
    mass: Tensor | None  # [T], of every entry's labels: their sum, weighed by class
    stats: SoftStats

    @staticmethod
    def empty(options: Any, like: Tensor, probs: Tensor, *, dense: bool) -> "SoftOutputs":
        """Not yet filled, for hidden states or logits `like` these and probabilities [..., K] or [..., V]."""
        total = accumulator(like.dtype)
        shape = probs.shape[:-1]
        tokens, count = math.prod(shape), 1 if dense else probs.shape[-1]  # (numel() of symbols is a number)
        return SoftOutputs(
            like.new_empty(shape if options.reduction == "none" else (), dtype=total),
            like.new_empty(tokens, dtype=total),
            like.new_empty((tokens, count), dtype=total),
            like.new_empty((tokens, 1), dtype=torch.int64) if dense else None,
            like.new_empty(tokens, dtype=total) if dense else None,
            SoftStats.empty(options, like, tokens),
        )


def shaped(
    loss: Tensor, stats: LossStats | None, shape: Sequence[int], sequence: int | None = None
) -> Tensor | WithStats:
    """What a public function returns, of tokens of this shape: the loss, or with its statistics.

    With a `sequence` length, what is by token is filled up to that with what ignored tokens have.
    """

    def whole(x: Tensor, fill: int = 0) -> Tensor:
        x = x.view(shape)
        return x if sequence is None else torch.nn.functional.pad(x, (0, sequence - x.shape[-1]), value=fill)

    loss = whole(loss) if loss.ndim else loss
    if stats is None:
        return loss
    made = LossStats(*map(whole, stats))
    return loss, made._replace(argmax=whole(stats.argmax, -1))


def id_stats(
    lse: Tensor,
    log_prob: Tensor,  # [T, K]
    entropy: Tensor | None,
    argmax: Tensor | None,
    values: Tensor,  # [T, K] probabilities, without weights of classes
    ids: Tensor,  # [T, K]
) -> SoftStats:
    """Those of K ids; none without the entropy."""
    if entropy is None or argmax is None:
        return SoftStats()
    expected, mass = _expected(values, log_prob), values.sum(1)
    correct = argmax == ids.gather(1, values.argmax(1, keepdim=True))[:, 0]
    return SoftStats(expected, entropy, correct, argmax, torch.where(mass == 0, 0, expected + mass * lse))


def reduced(options: Any, losses: Tensor, tokens: Tokens, shape: torch.Size) -> Tensor:
    """Losses [n] of all tokens, weighted and reduced."""
    losses = losses * tokens.weight
    return losses.view(shape) if options.reduction == "none" else losses.sum() * tokens.inverse_count


# ------------------------------------------------------------------------------------------------------------- K ids


def labels_of(values: Tensor, kind: str, ids: Tensor, class_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[n, K]: the probabilities that a `TopK` of this kind has, times the weights of its ids [n, K], in the dtype of
    sums over inputs of `dtype`."""
    if kind == "log_probs":
        values = log_probs_or_nan(values).to(accumulator(dtype)).exp()
    else:
        values = values.to(accumulator(dtype))
    if class_weight is None:
        return values
    return values * class_weight[ids.to(torch.int64).clamp(0, len(class_weight) - 1)]


def asked_by(options: Any, class_weight: Tensor | None) -> Asked:
    """The statistics that the loss of K ids needs, and the caller asked for."""
    smoothed = options.label_smoothing > 0
    stats = options.return_stats
    return Asked(stats, smoothed, class_weight=class_weight if smoothed else None, top=stats)


def token_losses(
    options: Any,
    lse: Tensor,  # [n]
    log_prob: Tensor,  # [n, K]
    uniform: Tensor | None,  # [n]: `TokenStats.uniform`, for label smoothing
    probs: Tensor,  # [n, K]
) -> Tensor:
    """[n]: the loss of each token."""
    eps, value = options.label_smoothing, torch.zeros_like(lse)
    if eps < 1:
        value = -(1 - eps) * _expected(probs, log_prob)
    if uniform is not None:
        value = value + eps * uniform
    return value + options.z_loss * lse.square() if options.z_loss > 0 else value


def _expected(probs: Tensor, log_prob: Tensor) -> Tensor:
    """[n]: sum q log p, where what has no probability costs nothing though its logit be -inf."""
    return torch.where((probs == 0) & (log_prob == -torch.inf), 0, probs * log_prob).sum(1)


def loss_gradient(
    options: Any,
    row: Tensor,  # [n]
    lse: Tensor,  # [n]
    log_prob: Tensor,  # [n, K]
    probs: Tensor,  # [n, K]
    tokens: Ids,
    vocab: int,
    class_weight: Tensor | None,  # [V]
    shares: Shares | None = None,
) -> TokenGradient:
    """The gradient of the tokens' logits, for upstream gradients of `row`; `shares` as of `token_gradient`."""
    by_log_prob, by_lse = by_outputs(options, row, lse, probs, class_weight)
    if tokens.bad is not None:
        by_log_prob = by_log_prob.masked_fill(tokens.bad, float("nan"))
    made = token_gradient(lse, log_prob, by_log_prob, ids=tokens.ids, grad_lse=by_lse, kept=tokens.kept, shares=shares)
    if options.label_smoothing > 0:
        even = row * (options.label_smoothing / vocab)
        at_ids = even[:, None] if class_weight is None else even[:, None] * class_weight[tokens.ids]
        made = replace(made, even=even, class_weight=class_weight, at_ids=made.at_ids - at_ids)
    return made


def by_outputs(
    options: Any, row: Tensor, lse: Tensor, probs: Tensor, class_weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The gradients by the log-probabilities [n, K] and by the log-sum-exp [n], but for smoothing's even part."""
    eps, z_loss = options.label_smoothing, options.z_loss
    share: Tensor | float = 1.0 if class_weight is None else class_weight.mean()
    by_lse = row * (eps * share + 2 * z_loss * lse) if eps > 0 or z_loss > 0 else None
    return -(1 - eps) * row[:, None] * probs, by_lse


# -------------------------------------------------------------------------------------------------------- every entry


class DenseStats(NamedTuple):
    """[n] unless noted."""

    loss: Tensor
    lse: Tensor
    log_prob: Tensor  # [n, 1]: of the largest logit
    largest: Tensor  # [n, 1] int64
    mass: Tensor
    stats: SoftStats


class DenseSums(NamedTuple):
    """What labels q make of the softmax over all of a vocabulary, or over a part of it alone; [n] unless noted."""

    softmax: TokenStats  # with `uniform` where that is asked for, and the entropy with return_stats
    cost: Tensor  # sum of w q log p, w being the weights of classes
    mass: Tensor  # sum of w q
    # With return_stats:
    expected: Tensor | None  # sum of q log p
    total: Tensor | None  # sum of q
    largest_label: Tensor | None
    likeliest: Tensor | None  # int64: where that is


def dense_stats(
    source: Any,
    options: Any,
    tokens: Ids,
    config: Config,
    probs: Tensor,  # [..., V]
    class_weight: Tensor | None,  # [V]
) -> DenseStats:
    """The losses of labels, and what their gradient needs; `source` is as `walk.forward` takes it."""
    made = dense_sums(source, options, tokens, config, probs, class_weight)
    return stats_of_sums(options, made, made.softmax.log_prob, made.softmax.argmax)


def stats_of_sums(options: Any, sums: DenseSums, log_prob: Tensor, largest: Tensor) -> DenseStats:
    """Of sums over all of a vocabulary, and what the gradient takes for the largest logit: its log-probability [n, 1]
    and its place [n]."""
    known = sums.softmax
    # As if of one id, whose log-probability is the sum over all entries.
    cost = sums.cost[:, None]
    loss = token_losses(options, known.lse, cost, known.uniform, torch.ones_like(cost))
    of = SoftStats()
    if sums.expected is not None and sums.total is not None and sums.likeliest is not None:
        logit = torch.where(sums.total == 0, 0, sums.expected + sums.total * known.lse)
        of = SoftStats(sums.expected, known.entropy, known.argmax == sums.likeliest, known.argmax, logit)
    return DenseStats(loss, known.lse, log_prob, largest.clamp(min=0)[:, None], sums.mass, of)


def dense_sums(
    source: Any, options: Any, tokens: Ids, config: Config, probs: Tensor, class_weight: Tensor | None
) -> DenseSums:
    """Arguments as of `dense_stats`, or a part of the vocabulary's, which may be empty; the softmax's `log_prob` is
    that of the largest logit."""
    vocab, asked = source.vocab, options.return_stats
    n = tokens.number if vocab > 0 else 0
    running = Running.empty(tokens.ids, tokens.dtype)

    def zeros(wanted: bool = True) -> Any:
        return torch.zeros_like(running.max) if wanted else None

    cost, mass, uniform = zeros(), zeros(), zeros(options.label_smoothing > 0)
    entropy, expected, total, likeliest = zeros(asked), zeros(asked), zeros(asked), torch.zeros_like(running.argmax)
    largest_label = torch.full_like(running.max, -torch.inf) if asked else None
    tile = Tile(min(n, config.token_chunk) * vocab, tokens, spare=True)
    for start, stop in spans(n, config.token_chunk):
        z, _, log_p = tile.cut(stop - start, vocab)
        assert log_p is not None
        read_logits(source, tokens, start, stop, z, config.vocab_chunk)
        apply(options, z, temperature_of(tokens, start, stop))
        log_p.copy_(z)
        part, q = running.part(start, stop), rows_of(probs, start, stop)
        part.absorb(z, 0, tokens.ids[start:stop], Asked(), None)
        log_p.sub_(part.max[:, None]).sub_(part.log_total[:, None])
        if largest_label is not None:
            # exp(z - max) log p is 0 where p is, where 0 * -inf would not be.
            z.mul_(log_p).masked_fill_(log_p == -torch.inf, 0)
            entropy[start:stop] = -z.sum(1) / part.total
            torch.mul(log_p, q, out=z).masked_fill_(q == 0, 0)
            expected[start:stop] = z.sum(1)
            total[start:stop] = q.sum(1, dtype=z.dtype)
            largest_label[start:stop], likeliest[start:stop] = q.max(1)
        if class_weight is not None:
            # A class that weighs nothing costs nothing, where 0 * -inf would not be 0.
            log_p.masked_fill_(class_weight == 0, 0).mul_(class_weight)
        mass[start:stop] = q.sum(1, dtype=z.dtype) if class_weight is None else torch.mul(q, class_weight, out=z).sum(1)
        if uniform is not None:
            uniform[start:stop] = -log_p.sum(1) / vocab
        cost[start:stop] = log_p.masked_fill_(q == 0, 0).mul_(q).sum(1)
    found = running.stats(tokens, vocab, Asked(top=True))
    found = found._replace(log_prob=-running.log_total[:, None], entropy=entropy, uniform=uniform)
    if not asked:
        return DenseSums(found, cost, mass, None, None, None, None)
    return DenseSums(found, cost, mass, expected, total, largest_label, likeliest)


def read_logits(source: Any, tokens: Ids, start: int, stop: int, out: Tensor, chunk: int) -> None:
    """Those of the tokens [start, stop), before their transform, `chunk` columns at a time."""
    read = source.reader(tokens, start, stop)
    for v0, v1 in spans(source.vocab, chunk):
        read(out[:, v0:v1], v0)


def rows_of(probs: Tensor, start: int, stop: int) -> Tensor:
    """Rows of labels [..., V], as they are."""
    flat = flatten(probs)
    if flat is not None:
        return flat[start:stop]
    rows = torch.arange(start, stop, dtype=torch.int64, device=probs.device)
    return probs[torch.unravel_index(rows, probs.shape[:-1])]


class Whole(NamedTuple):
    """What the gradient of a part of the vocabulary needs of all of it."""

    vocab: int
    class_share: Tensor | float  # the mean weight of classes

    @staticmethod
    def of(vocab: int, class_weight: Tensor | None) -> "Whole":
        return Whole(vocab, 1.0 if class_weight is None else class_weight.mean())


def dense_gradient(
    options: Any,
    z: Tensor,  # [C, V] final logits
    slope: Tensor | None,  # [C, V]
    probs: Tensor,  # [C, V]
    class_weight: Tensor | None,  # [V]
    whole: Whole,
    row: Tensor,  # [C]
    lse: Tensor,  # [C]
    log_prob: Tensor,  # [C, 1]
    largest: Tensor,  # [C, 1]
    mass: Tensor,  # [C]
) -> Tensor:
    """Turn final logits in place into the gradient of the logits before softcap and scale.

    They may be a part of the vocabulary: `lse`, `mass`, probabilities and `whole` are then of all of it.
    """
    eps, (vocab, share) = options.label_smoothing, whole
    q = probs.to(z.dtype) if class_weight is None else probs * class_weight
    own: Tensor | float = 1.0 if class_weight is None else class_weight[largest[:, 0]]
    more = 2 * options.z_loss * lse
    # Of the largest logit, by expm1: 1 minus a rounded p would lose all digits of a p near 1.
    less = torch.expm1(log_prob[:, 0])
    at_largest = (1 - eps) * (less * mass + (mass - q.gather(1, largest)[:, 0]))
    at_largest += eps * (less * share + (share - own / vocab)) + more * log_prob[:, 0].exp()
    z.sub_(lse[:, None]).exp_().mul_((row * ((1 - eps) * mass + eps * share + more))[:, None])
    z.addcmul_(q, row[:, None], value=-(1 - eps))
    if eps > 0 and class_weight is not None:
        z.addr_(row * (eps / vocab), class_weight, alpha=-1)
    elif eps > 0:
        z.sub_((row * (eps / vocab))[:, None])
    # A small p, of a part where all are, would lose its own digits so.
    exact = torch.where(log_prob > LIKELY, (row * at_largest)[:, None], z.gather(1, largest))
    z.scatter_(1, largest, exact)
    return z if slope is None else z.mul_(slope)
