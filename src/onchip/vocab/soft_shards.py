"""Soft labels of every entry of a vocabulary that is sharded over ranks: each has the labels of its shard.

With the names of `parallel` and a token's labels q, Q_r being their sum over shard r, what each rank knows of its own
shard's softmax adds up to

    sum_v q_v log p_v = sum_r (sum_v q_v log p_v^(r) + Q_r log(w_r)),    sum_v q_v = sum_r Q_r

with and without weights of classes.  One all-gather brings this and all else; backward needs nothing more.
"""

from typing import Any

import torch
from torch import Tensor

from onchip.frontend.torch_parallel import Shards
from onchip.vocab import parallel
from onchip.vocab.chunks import Config
from onchip.vocab.torch import soft
from onchip.vocab.torch.soft import DenseStats, DenseSums
from onchip.vocab.torch.softmax import TokenStats
from onchip.vocab.torch.tiles import Ids

# What each token sends with return_stats, label smoothing and all: what `parallel.sent_bytes` takes for K.
SENT = 6


def dense_stats(
    op: str,
    source: Any,
    options: Any,
    shards: Shards,
    tokens: Ids,
    config: Config,
    probs: Tensor,  # [..., rows]
    class_weight: Tensor | None,  # [V]
) -> DenseStats:
    """As `soft.dense_stats`, over the whole vocabulary, of this rank's logits and labels.

    What the gradient takes for the largest logit is for that of this rank's shard.
    """
    part = parallel.class_weight_of_shard(class_weight, shards)
    mine = soft.dense_sums(source, options, tokens, config, probs, part)
    sums, log_share = _exchanged(op, shards, options, mine, part)
    known = mine.softmax
    return soft.stats_of_sums(options, sums, known.log_prob + log_share[:, None], known.argmax)


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
    """[n]: the sums of q log p and of q over the vocabulary, of the shards', [ranks, n]."""
    # A shard that is all out of the vocabulary has no softmax of its own.
    costs = costs.masked_fill((lse == -torch.inf) & (masses != 0), -torch.inf)
    return (costs + torch.where(masses == 0, 0, masses * log_share)).sum(0), masses.sum(0)
