"""Losses over a vocabulary that is sharded over the ranks of a process group.

Each rank walks over its own shard.  A softmax over the vocabulary is a mixture of the shards' softmaxes, in which
shard r weighs w_r = exp(lse_r - lse).  So what one rank knows of its shard's softmax (`TokenStats`), gathered from all
ranks once, makes the same of the whole vocabulary::

    lse = log(sum_r exp(lse_r)),    log_prob[id] = log_prob_r[id] + log(w_r)  for the shard r that has the id
    entropy = sum_r w_r (entropy_r - log(w_r)),    sum_v p_v^2 = sum_r w_r^2 (sum_v p_v^2)_r

Every rank combines the same numbers in the same order, so all find the same bits.  With these, the gradients of a
shard's logits are what they would be in one piece; each rank has its own rows of the weight's gradient, and hidden's is
the sum over ranks of what their rows make of it.

Sources: Megatron-LM's vocabulary-parallel cross-entropy (arXiv:1909.08053) has the sharding, with three reductions.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_inputs import accumulator
from onchip.frontend.torch_parallel import Shards
from onchip.frontend.torch_refusals import all_gather, reduce_scatter
from onchip.vocab.torch.softmax import Asked, TokenGradient, TokenStats
from onchip.vocab.torch.tiles import NOWHERE, Ids

# Larger than any index of a vocabulary.
NO_INDEX = 2**31 - 1
# What kernels take in place of ids: of one that another shard has, one that is ignored, and one that no shard has.
ELSEWHERE, IGNORED, BAD = -1, -2, -3
# Numbers of a rank in front of its tokens': where its shard begins and ends, and the sum of its class weights.
HEADER = 3


def group_of(shards: Shards) -> dist.ProcessGroup:
    """The process group.  Whoever calls this has to state what ranks exchange over it, or the call isn't prepared."""
    stated.refuse("ranks exchange numbers")
    return _resolve_process_group(shards.group)  # type: ignore[arg-type]  # newer releases have a NewType of str


def of_shard(tokens: Ids, shards: Shards) -> Any:
    """The same tokens, with ids as this shard numbers them; an id outside of the shard stands for none."""
    if not shards.there:
        return tokens
    ids = tokens.ids - shards.start
    elsewhere = (tokens.ids == NOWHERE) | (ids < 0) | (ids >= shards.rows)
    return replace(tokens, ids=ids.masked_fill(elsewhere, NOWHERE), bad=None)


def ids_for_kernels(ids: Tensor, shards: Shards, ignore_index: int) -> Tensor:
    """Ids as int64, as this shard numbers them."""
    ids = ids.to(torch.int64)
    here = ids - shards.start
    here = here.masked_fill((here < 0) | (here >= shards.rows), ELSEWHERE)
    here = here.masked_fill((ids < 0) | (ids >= shards.vocab), BAD)
    return here.masked_fill(ids == ignore_index, IGNORED)


def local(call: Any, *, fake: bool = False) -> Any:
    """The call on this rank's shard: the hidden states of all tokens (not yet filled for a `fake` call), and the
    weight's rows without padding.
    """
    shards: Shards = call.shards
    if not shards.there:
        return call
    hidden = call.hidden
    if shards.sequence >= 0:
        whole = shards.whole_shape(hidden.shape)
        hidden = hidden.new_empty(whole) if fake else stated.call(whole_hidden, hidden, shards)
    more = {}
    if len(call.weight) > shards.rows:
        given = {"weight": call.weight, "bias": call.bias}
        more = {name: x[: shards.rows] for name, x in given.items() if x is not None}
    return replace(call, hidden=hidden, **more)


def class_weight_of_shard(class_weight: Tensor | None, shards: Shards) -> Tensor | None:
    """This rank's [rows] of the class weights [V]."""
    if class_weight is None or not shards.there:
        return class_weight
    return class_weight[shards.start : shards.start + shards.rows]


def sent_bytes(tokens: int, several: int, shards: Shards, hidden: Tensor) -> int:
    """Upper bound of the bytes that are gathered: statistics, and hidden states whose tokens are sharded."""
    gathered = 0 if shards.sequence < 0 else 2 * shards.ranks * hidden.numel() * hidden.element_size()
    return gathered + sent_numbers(tokens, several, shards) * accumulator(hidden.dtype).itemsize


def sent_numbers(tokens: int, several: int, shards: Shards) -> int:
    """Upper bound of the numbers in the statistics that are gathered, and in what is made from them."""
    return (several + 8) * tokens * (shards.ranks + 1)


def gradient_of_shard(gradient: TokenGradient, shards: Shards) -> TokenGradient:
    """The gradient with the class weights of this rank's entries."""
    if gradient.class_weight is None:
        return gradient
    return replace(gradient, class_weight=class_weight_of_shard(gradient.class_weight, shards))


def padded(x: Tensor | None, rows: int) -> Tensor | None:
    """`x` with zeros for the rows that are padding."""
    return x if x is None or len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


# ------------------------------------------------------------------------------------------------------- statistics


class Gathered(NamedTuple):
    """What all ranks know about the tokens."""

    start: Tensor  # [ranks] int64: where their shards begin
    stop: Tensor  # [ranks] int64: and end
    of_classes: Tensor  # [ranks]: the sums of their class weights, or how many entries they have
    numbers: list[Tensor]  # [ranks, n] each
    apart: Tensor  # [] bool: whether the shards don't make up the vocabulary

    def sure(self, x: Tensor) -> Tensor:
        """`x`, or NaN if the shards don't make up the vocabulary."""
        return x.masked_fill(self.apart, float("nan"))


def gather(
    op: str, shards: Shards, numbers: Sequence[Tensor], class_weight: Tensor | None = None, *, check_values: bool
) -> Gathered:
    """Gather numbers of each token, [n] each, and where the shards are, in one all-gather; class_weight is this
    shard's.

    Shards that don't make up the vocabulary raise on the CPU and if `check_values`.
    """
    device, dtype, n = numbers[0].device, numbers[0].dtype, len(numbers[0])
    # Not torch.tensor, a copy from the host, for which the device would be waited for.
    ends = torch.cat(
        [torch.full((1,), x, dtype=torch.int64, device=device) for x in (shards.start, shards.start + shards.rows)]
    )
    if class_weight is None:
        of_classes = torch.full((1,), shards.rows, dtype=dtype, device=device)
    else:
        of_classes = class_weight.sum().view(1)
    packed = torch.cat([bits(ends, dtype), of_classes, *numbers])
    out = packed.new_empty(shards.ranks, len(packed))
    if not packed.is_meta:
        all_gather(out.view(-1), packed, group=group_of(shards))
    start, stop = integers(out[:, :2]).unbind(1)
    apart = _apart(start, stop, shards.vocab)
    if (device.type == "cpu" or (check_values and not packed.is_meta)) and bool(apart):
        found = ", ".join(f"[{a}, {b})" for a, b in zip(start.tolist(), stop.tolist(), strict=True))
        raise ValueError(
            f"{op}: the ranks' shards of the vocabulary are {found}, which don't make up [0, {shards.vocab}); pass "
            "vocab_size and, where they aren't those of torch.chunk, vocab_start"
        )
    of_tokens = out[:, HEADER:].view(shards.ranks, len(numbers), n)
    return Gathered(start, stop, out[:, 2], list(of_tokens.unbind(1)), apart)


def combine(op: str, shards: Shards, mine: TokenStats, tokens: Ids, asked: Asked, *, check_values: bool) -> TokenStats:
    """The statistics of the whole vocabulary, from this rank's and one all-gather; `tokens` have ids of the whole
    vocabulary.

    Shards that don't make up the vocabulary raise on the CPU and if `check_values`; otherwise everything is NaN.
    """
    sent: list[Any] = [*of_lse(mine), *mine.log_prob.unbind(1)]
    if asked.top:
        sent += [mine.top, bits(mine.argmax, tokens.dtype)]
    if asked.entropy:
        sent.append(mine.entropy)
    if asked.mean_logits:
        assert mine.uniform is not None
        # Each rank sends as many, however it computes its statistics.
        means = mine.uniform, mean_of(mine) if mine.mean_logits is None else mine.mean_logits
        sent += [x * shards.rows if shards.rows else torch.zeros_like(mine.lse) for x in means]
    if asked.sum_sq:
        sent.append(mine.log_sum_sq)
    found = gather(op, shards, sent, asked.class_weight, check_values=check_values)
    start, rows = found.start[:, None], iter(found.numbers)

    lse = next(rows)
    total, log_share = log_sum(lse, next(rows))
    share = log_share.exp()
    nothing = share == 0  # what such a shard says of itself may be NaN

    ids = tokens.ids
    log_prob = log_prob_of(ids, found, [next(rows) for _ in range(ids.shape[1])], lse, log_share)
    if tokens.bad is not None:
        log_prob = log_prob.masked_fill(tokens.bad, float("nan"))

    index = torch.full_like(ids[:, 0], -1)
    if asked.top:
        index = place_of_largest(next(rows), next(rows), start)
    entropy = mean = uniform = mean_logits = log_sum_sq = None
    if asked.entropy:
        entropy = found.sure(torch.where(nothing, 0, share * (next(rows) - log_share)).sum(0))
        mean = total - entropy
    if asked.mean_logits:
        uniform = found.sure(uniform_over(found, next(rows), lse, log_share) / shards.vocab)
        # The difference of these two would lose the digits of one near 0.
        mean_logits = found.sure(next(rows).sum(0) / shards.vocab)
    if asked.sum_sq:
        log_sum_sq = found.sure(log_sum((next(rows) + 2 * log_share).masked_fill(nothing, -torch.inf))[0])
    return TokenStats(found.sure(total), found.sure(log_prob), index, entropy, mean, mean_logits, uniform, log_sum_sq)


def mean_of(stats: TokenStats) -> Tensor:
    """[n]: the mean of the logits, which is lse minus the mean of lse - z; -inf if all logits are."""
    assert stats.uniform is not None
    return torch.where(stats.lse == -torch.inf, -torch.inf, stats.lse - stats.uniform)


def log_prob_of(ids: Tensor, found: Gathered, parts: Sequence[Tensor], lse: Tensor, log_share: Tensor) -> Tensor:
    """[n, K]: the log-probabilities of `ids`.  `parts` [ranks, n], for each of the K ids, are those that the shards
    gave them, 0 from a shard that doesn't have the id; `lse` and `log_share` [ranks, n] are the shards'.
    """
    inside = (ids >= found.start[:, None, None]) & (ids < found.stop[:, None, None])  # [ranks, n, K]
    log_prob = torch.stack([*parts], -1).add_(log_share[..., None])
    # If all of a shard is out of the vocabulary, its own log-probabilities are NaN.
    log_prob.masked_fill_((lse == -torch.inf)[..., None], -torch.inf)
    return log_prob.masked_fill_(~inside, 0).sum(0)


def place_of_largest(largest: Tensor, at: Tensor, start: Tensor) -> Tensor:
    """[n] int64, -1 where there is none: where the largest of each token's numbers [ranks, n] is; `at` holds where
    their shards have them, as `bits`.
    """
    place = integers(at)
    best = (largest == largest.amax(0)) | largest.isnan()
    place = torch.where(best & (place >= 0), place + start, NO_INDEX).amin(0)
    return place.masked_fill(place == NO_INDEX, -1)


def uniform_over(found: Gathered, sums: Tensor, lse: Tensor, log_share: Tensor) -> Tensor:
    """[n]: the sum of lse - z over the vocabulary, weighted by class, from the shards' sums of lse_r - z, [ranks, n];
    `lse` are the shards' too, and `log_share` is how far each lies below the whole one.
    """
    # lse_r lies as far below for each of a shard's entries.
    weight = found.of_classes[:, None]
    below = torch.where(weight == 0, 0, weight * -log_share)
    return (sums.masked_fill(lse == -torch.inf, 0) + below).sum(0)


def bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Store integers as floats of this dtype, bit by bit."""
    return x.to(torch.int64 if dtype == torch.float64 else torch.int32).view(dtype)


def integers(x: Tensor) -> Tensor:
    """The integers that were given to `bits`."""
    return x.contiguous().view(torch.int64 if x.dtype == torch.float64 else torch.int32).to(torch.int64)


def of_lse(mine: TokenStats) -> tuple[Tensor, Tensor]:
    """What a rank sends of its log-sum-exp, as `log_sum` takes it.  Kernels of products don't say what it was rounded
    by, which is no more than the logits were.
    """
    return mine.lse, torch.zeros_like(mine.lse) if mine.low is None else mine.low


def log_sum(x: Tensor, low: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """log(sum(exp(x))) of [ranks, n] over ranks, and how far below it each rank's x lies; both are exact to the last
    digit if one rank has nearly all.

    `low` is what x were rounded by: with large logits, that would be most of the error in probabilities.
    """
    top, lead = x.max(0, keepdim=True)
    below = x - top.masked_fill(top == -torch.inf, 0)
    more = 0 if low is None else low.gather(0, lead)
    if low is not None:
        below = below + (low - more)
    log_total = below.exp().scatter(0, lead, 0).sum(0, keepdim=True).log1p()
    return (top + (more + log_total))[0], below - log_total


def _apart(start: Tensor, stop: Tensor, vocab: int) -> Tensor:
    """[] bool: whether the ranges [start, stop) leave out or repeat a part of [0, vocab)."""
    begins = torch.cat([start, start.new_full((1,), vocab)]).sort().values
    ends = torch.cat([stop, stop.new_zeros(1)]).sort().values
    return (begins != ends).any()


# ------------------------------------------------------------------------------------------------- hidden states


def whole_hidden(hidden: Tensor, shards: Shards) -> Tensor:
    """The hidden states of all tokens."""
    if shards.sequence < 0 or shards.ranks == 1:
        return hidden
    if hidden.numel() == 0:
        return hidden.new_empty(shards.whole_shape(hidden.shape))
    part = hidden.contiguous()
    out = part.new_empty(shards.ranks, *part.shape)
    all_gather(out.view(-1), part.view(-1), group=group_of(shards))
    return out.movedim(0, shards.sequence).flatten(shards.sequence, shards.sequence + 1)


def start_sum(shards: Shards, gradient: Tensor) -> Callable[[], Tensor]:
    """Begin to sum the gradients of all tokens' hidden states over the ranks.  Returns a function that waits for the
    sum of this rank's tokens; for replicated hidden states the sum is in `gradient` itself.
    """
    out, work = begin_sum(shards, gradient)

    def wait() -> Tensor:
        if work is not None:
            work.wait()
        return out

    return wait


def begin_sum(shards: Shards, gradient: Tensor) -> tuple[Tensor, Any]:
    """As `start_sum`: returns the sum, and what to wait for (None: nothing)."""
    if not shards.reduce or shards.ranks == 1:
        return gradient, None
    if gradient.numel() == 0 or gradient.is_meta:
        return gradient if shards.sequence < 0 else gradient.chunk(shards.ranks, shards.sequence)[0], None
    group = group_of(shards)
    if shards.sequence < 0:
        return gradient, dist.all_reduce(gradient, group=group, async_op=True)
    parts = gradient.unflatten(shards.sequence, (shards.ranks, -1)).movedim(shards.sequence, 0).contiguous()
    out = parts.new_empty(parts.shape[1:])
    return out, reduce_scatter(out.view(-1), parts.view(-1), group=group, async_op=True)


def begin_gather(shards: Shards, mine: Tensor, out: Tensor) -> Any:
    """Begin to fill [ranks, n] with each rank's [n]; returns what to wait for (None: nothing)."""
    return None if mine.is_meta else all_gather(out.view(-1), mine, group=group_of(shards), async_op=True)
