"""Cross-entropy with a label for every entry of the vocabulary, by the formulas in `vocab.loss`.

Forward takes rows of the whole vocabulary, a chunk of tokens at a time.  `gradient` has the labels as a field, with
which the walks of ids make the gradients.  If the vocabulary is sharded over ranks, each has the labels for its shard.
With the names of `parallel` and a token's labels q, Q_r being their sum over shard r, what each rank knows about its
own shard's softmax adds up to

    sum_v q_v log p_v = sum_r (sum_v q_v log p_v^(r) + Q_r log(w_r)),    sum_v q_v = sum_r Q_r

with and without class weights.  One all-gather brings this and everything else; backward needs nothing more.

Kernels take what smoothing adds for a part of the labels.  On a shard they spread another amount (`for_kernels`).
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend.options import LossTerms
from onchip.frontend.torch_parallel import WHOLE, Shards
from onchip.vocab import loss as maths
from onchip.vocab.chunks import ChunkConfig
from onchip.vocab.torch import labels, parallel
from onchip.vocab.torch.loss import LossOutputs, reduced, scaled_rows
from onchip.vocab.torch.softmax import Asked, EntryLabels, KnownStats, Running, TokenGradient, TokenStats
from onchip.vocab.torch.tiles import NOWHERE, Ids, Tile, Tokens, apply, flatten, rows_of, spans, temperature_of

# What each token sends with return_stats, label smoothing and all: what `parallel.sent_bytes` takes for K.
SENT = 6
# The logarithm of 1/2.
LIKELY = -math.log(2)


def outputs_of(call: Any, made: LossOutputs, tokens: Tokens) -> LossOutputs:
    """What an operator returns for a call with these labels (`labels`), from what `dense_stats` returns."""
    shape = labels.leading(call)
    by_token: Any = (None if x is None else x.view(shape) for x in made[1:])
    return LossOutputs(reduced(call.options, made.loss * tokens.weight, tokens, shape), *by_token)


def statistics(op: str, call: Any, source: Any, tokens: Tokens, config: ChunkConfig) -> LossOutputs:
    """What an operator returns, for logits from this rank's `source`, on PyTorch's operations."""
    options, shards, probs = call.options, call.shards, call.labels
    probs = probs[..., : shards.rows] if shards.there else probs
    if call.kernels:  # other ranks run them, and this one has no entries
        sums = dense_sums(source, replace(options, label_smoothing=0.0), tokens, config, probs, None)
        return combined(op, call, sums, tokens)
    made = dense_stats(op, source, options, shards, tokens, config, probs, call.class_weight)
    return outputs_of(call, made, tokens)


def local(call: Any) -> Any:
    """The call on this rank's shard, without padding: as `parallel.local`, with its part of everything else that is per
    entry.
    """
    if not call.shards.there:
        return call
    mine, rows, out = parallel.local(call), call.shards.rows, call.weight_grad_out
    return replace(
        mine,
        labels=call.labels[..., :rows],
        class_weight=parallel.class_weight_of_shard(call.class_weight, call.shards),
        weight_grad_out=None if out is None else out[:rows],
    )


def gradient_of_loss(
    call: Any, known: KnownStats, tokens: Tokens, grad_loss: Tensor | None
) -> tuple[TokenGradient, Tensor | None]:
    """As that of ids: the gradient of the tokens' logits for the upstream gradient of the reduced loss, and the factor
    for float16 that is included in it."""
    options, mass = call.options, known.mass
    assert grad_loss is not None
    assert mass is not None
    each = tokens.upstream(grad_loss, options.reduction)
    row, grad_scale = scaled_rows(tokens, options, each, call.operand, mass.reshape(-1))
    return gradient(options, call.labels, call.class_weight, call.vocab, row, known, call.shards), grad_scale


class DenseSums(NamedTuple):
    """Sums of labels q over the softmax of all of a vocabulary, or of a part of it alone; [n] unless noted."""

    softmax: TokenStats  # with `uniform` where that is asked for, and the entropy with return_stats
    cost: Tensor  # sum of w q log p, w being the weights of classes
    mass: Tensor  # sum of w q
    # With return_stats:
    expected: Tensor | None  # sum of q log p
    total: Tensor | None  # sum of q
    largest_label: Tensor | None
    likeliest: Tensor | None  # int64: where that is


def dense_stats(
    op: str,
    source: Any,
    options: Any,
    shards: Shards,
    tokens: Ids,
    config: ChunkConfig,
    probs: Tensor,  # [..., V], or [..., rows] of this rank's shard
    class_weight: Tensor | None,  # [V]
) -> LossOutputs:
    """The losses of labels without their weights, and what their gradient needs, [n] each, log_prob and largest [n, 1];
    `source` is as in `walk.forward`.

    With shards, what the gradient takes for the largest logit is for the largest of this rank's.
    """
    part = parallel.class_weight_of_shard(class_weight, shards)
    sums = mine = dense_sums(source, options, tokens, config, probs, part)
    log_prob, largest = mine.softmax.log_prob, mine.softmax.argmax
    if shards.there:
        sums, log_share = _exchanged(op, shards, options, mine, part)
        log_prob = log_prob + log_share[:, None]
    return _stats_of_sums(options, sums, log_prob, largest)


def _stats_of_sums(options: Any, sums: DenseSums, log_prob: Tensor, largest: Tensor) -> LossOutputs:
    """The statistics, from sums over all of a vocabulary; and what the gradient takes for the largest logit: its
    log-probability [n, 1] and its place [n].
    """
    known = sums.softmax
    loss = maths.value(torch, LossTerms.of(options).nonzero, sums.cost, known.lse, known.uniform)
    made = LossOutputs(loss, known.lse, log_prob, largest=largest.clamp(min=0)[:, None], mass=sums.mass)
    if sums.expected is None or sums.total is None or sums.likeliest is None:
        return made
    return made._replace(
        entropy=known.entropy,
        correct=known.argmax == sums.likeliest,
        argmax=known.argmax,
        expected=sums.expected,
        target_logit=torch.where(sums.total == 0, 0, sums.expected + sums.total * known.lse),
    )


def dense_sums(
    source: Any, options: Any, tokens: Ids, config: ChunkConfig, probs: Tensor, class_weight: Tensor | None
) -> DenseSums:
    """The sums, with arguments as in `dense_stats`, or for a part of the vocabulary, which may be empty; the softmax's
    `log_prob` is that of the largest logit.
    """
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
    """Read the logits of the tokens [start, stop) before their transform, `chunk` columns at a time."""
    read = source.reader(tokens, start, stop)
    for v0, v1 in spans(source.vocab, chunk):
        read(out[:, v0:v1], v0)


def gradient(
    options: Any,
    probs: Tensor,  # [..., V], or [..., rows] of this rank's shard, padding after them
    class_weight: Tensor | None,  # [V]
    vocab: int,
    row: Tensor,  # [n]
    made: KnownStats,  # of outputs
    shards: Shards = WHOLE,
) -> TokenGradient:
    """The gradient of the logits of these tokens, for upstream gradients `row`."""
    known: Any = (made.lse, made.log_prob, made.largest, made.mass)
    lse, log_prob, largest, mass = (x.reshape(-1) for x in known)
    probs = probs[..., : shards.rows] if shards.there else probs
    if probs.shape[-1] == 0:  # an empty shard, for which nothing asks
        return TokenGradient(lse, row, log_prob[:, None])
    terms, each = LossTerms.of(options).nonzero, parallel.class_weight_of_shard(class_weight, shards)
    share, own = None if class_weight is None else class_weight.mean(), None if each is None else each[largest, None]
    log_prob, largest, q = log_prob[:, None], largest[:, None], _at(probs, largest)
    q = q.to(lse.dtype) if own is None else q * own
    # The largest logit's apart: 1 taken from a rounded p would lose all digits of a p near 1.
    at_largest = maths.at_entry(torch, terms, log_prob, q, mass[:, None] - q, lse[:, None], vocab, own, share)
    # A small p, of a part where all are, would lose its own digits so.
    place = largest.masked_fill(~(log_prob > LIKELY), NOWHERE)
    return TokenGradient(
        lse,
        row * maths.of_p(terms, mass, lse, share),
        row[:, None] * at_largest,
        even=None if terms.label_smoothing is None else row * (terms.label_smoothing / vocab),
        class_weight=class_weight,
        labels=EntryLabels(probs, 1 - options.label_smoothing, row, place),
    )


def _at(probs: Tensor, entry: Tensor) -> Tensor:
    """[n, 1]: each token's label of an entry [n]."""
    flat = flatten(probs)
    if flat is not None:
        return flat.gather(1, entry[:, None])
    rows = torch.arange(len(entry), dtype=torch.int64, device=entry.device)
    return probs[(*torch.unravel_index(rows, probs.shape[:-1]), entry)][:, None]


# ------------------------------------------------------------------------------------------------------------ shards


def for_kernels(options: Any, shards: Shards, *, forward: bool = False) -> tuple[Any, float]:
    """The options with which kernels run on this rank's entries, in `forward` or in backward, and the factor of the
    labels, of their loss and of its gradient.
    """
    return maths.of_shard(options, shards.rows, shards.vocab, value=forward) if shards.there else (options, 1.0)


def sums_of_kernels(
    options: Any, out: LossOutputs, factor: float, labels: Tensor, top: Tensor | None = None, low: Tensor | None = None
) -> DenseSums:
    """The sums over a shard, from what kernels made of its labels [..., rows] without a z-loss.  `top`: the largest
    logits, for return_stats.  `low`: what their log-sum-exps were rounded by.
    """
    given = out.loss, out.lse, out.log_prob, out.mass, out.entropy, out.argmax, out.expected
    value, lse, less, mass, entropy, argmax, expected = (None if x is None else x.reshape(-1) for x in given)
    assert value is not None
    assert lse is not None
    assert less is not None
    assert mass is not None
    total = largest = likeliest = None
    if options.return_stats:
        assert expected is not None
        total = labels.sum(-1, dtype=lse.dtype).view(-1)
        largest, likeliest = (x.reshape(-1) for x in labels.max(-1))
        largest = largest.to(lse.dtype)
        expected = torch.where(total == 0, 0, expected)
    argmax = torch.zeros_like(lse, dtype=torch.int64) if argmax is None else argmax
    # A shard that is all out of the vocabulary has no softmax of its own, nor costs without labels.
    cost = torch.where(mass == 0, 0, value * -factor)
    softmax = TokenStats(lse, less.log1p()[:, None], argmax, entropy, None, None, None, None, top, low)
    return DenseSums(softmax, cost, mass * factor, expected, total, largest, likeliest)


def combined(op: str, call: Any, mine: DenseSums, tokens: Tokens) -> LossOutputs:
    """What an operator of kernels returns, from what each rank knows about its own shard."""
    options = replace(call.options, label_smoothing=0.0)  # which is in the labels
    sums, log_share = _exchanged(op, call.shards, options, mine, None)
    less = (mine.softmax.log_prob + log_share[:, None]).expm1()
    made = _stats_of_sums(options, sums, less, mine.softmax.argmax)
    return outputs_of(call, made, tokens)._replace(largest=None)


def _exchanged(
    op: str, shards: Shards, options: Any, mine: DenseSums, class_weight: Tensor | None
) -> tuple[DenseSums, Tensor]:
    """The sums over all of the vocabulary, and how far the log-sum-exp of this rank's shard lies below the whole's."""
    known, smoothed = mine.softmax, options.label_smoothing > 0
    sent: list[Any] = [*parallel.of_lse(known), mine.cost, mine.mass]
    if known.uniform is not None:
        sent.append(known.uniform * shards.rows)
    if options.return_stats:
        assert mine.likeliest is not None
        dtype = known.lse.dtype
        sent += [known.entropy, known.top, parallel.bits(known.argmax, dtype), mine.expected, mine.total]
        sent += [mine.largest_label, parallel.bits(mine.likeliest, dtype)]
    weighed = class_weight if smoothed else None
    found = parallel.gather(op, shards, sent, weighed, check_values=options.check_inputs)
    start, rows = found.start[:, None], iter(found.numbers)

    lse = next(rows)
    total, log_share = parallel.log_sum(lse, next(rows))
    cost, mass = _of_labels(next(rows), next(rows), lse, log_share)
    uniform = found.sure(parallel.uniform_over(found, next(rows), lse, log_share) / shards.vocab) if smoothed else None
    entropy = expected = labels = likeliest = None
    index = torch.full_like(known.argmax, -1)
    if options.return_stats:
        share = log_share.exp()
        entropy = found.sure(torch.where(share == 0, 0, share * (next(rows) - log_share)).sum(0))
        index = parallel.place_of_largest(next(rows), next(rows), start)
        expected, labels = _of_labels(next(rows), next(rows), lse, log_share)
        likeliest = parallel.place_of_largest(next(rows), next(rows), start)
    softmax = TokenStats(found.sure(total), known.log_prob, index, entropy, None, None, uniform, None)
    rank = parallel.group_of(shards).rank()
    return DenseSums(softmax, found.sure(cost), mass, expected, labels, None, likeliest), log_share[rank]


def _of_labels(costs: Tensor, masses: Tensor, lse: Tensor, log_share: Tensor) -> tuple[Tensor, Tensor]:
    """[n]: the sums of q log p and of q over the vocabulary, from the shards' sums, [ranks, n]."""
    # A shard that is all out of the vocabulary has no softmax of its own.
    costs = costs.masked_fill((lse == -torch.inf) & (masses != 0), -torch.inf)
    return (costs + torch.where(masses == 0, 0, masses * log_share)).sum(0), masses.sum(0)
