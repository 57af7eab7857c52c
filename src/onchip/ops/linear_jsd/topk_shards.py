"""linear_jsd and jsd for PyTorch with a top-k teacher where the student's vocabulary is sharded over ranks.

The teacher's ids are of the whole vocabulary and the same on each rank, which sends the log-probabilities of those in
its shard and, for a tail, that of all others together.  One all-gather makes them those of the whole vocabulary, and
from these follows all else: the gradient of a token's logits z is a factor of exp(z - center), and a number at each id.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.frontend.topk import TopK
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.linear_jsd.divergence import topk_terms
from onchip.ops.linear_jsd.spec import LOGITS_OP, OP
from onchip.ops.linear_jsd.torch_call import NO_GRADIENTS, PARAMETERS, Call
from onchip.ops.linear_jsd.torch_shards import (
    ShardedCall,
    Sinks,
    blocks,
    check_ranks,
    gradient_of_label,
    label_of,
    reduced,
    rows_of,
    rows_upstream,
    weigh,
)
from onchip.ops.linear_jsd.torch_walk import ARRAYS, model_of, topk_rows
from onchip.vocab import parallel
from onchip.vocab.torch.softmax import Asked, Running, TokenGradient, write_at
from onchip.vocab.torch.tiles import NOWHERE, Tokens


class Known(NamedTuple):
    """What backward needs of each token, [T] unless noted; None: there are no hard labels."""

    center: Tensor
    factor: Tensor
    at_ids: Tensor  # [T, K]
    hard_lse: Tensor | None
    hard_log_prob: Tensor | None


class Outputs(NamedTuple):
    """What the operators return."""

    loss: Tensor
    known: Known


class Kept(NamedTuple):
    """What backward is given."""

    sharded: ShardedCall
    known: Known


def _teacher(sharded: ShardedCall, tokens: Tokens) -> tuple[TopK[Tensor], Tensor]:
    """That of the computed tokens, and its ids [n, K] as this shard numbers them."""
    shards = sharded.shards
    teacher = topk_rows(sharded.call._replace(size=shards.vocab), tokens, 0, tokens.number)
    ids = teacher.indices - shards.start
    return teacher, ids.masked_fill((ids < 0) | (ids >= shards.rows), NOWHERE)


def _numbers(sharded: ShardedCall, call: Call, here: Tokens, ids: Tensor) -> list[Tensor]:
    """What a shard knows by itself, [n] each: the student's log-sum-exp, the ids' log-probabilities, with a tail that
    of all others together, with hard labels what `label_of` takes."""
    models, tau, hard = [model_of(call, 0, (False,) * 4, here)], call.options.temperature, call.options.hard_weight > 0
    running, of_label = Running.empty(ids, here.dtype), Running.empty(here.ids, here.dtype)
    others, asked = torch.full_like(here.weight, -math.inf), Asked()
    for start, stop, z in rows_of(sharded, call, here, models) if sharded.shards.rows else ():
        for b0, b1 in blocks(start, stop):
            t0, t1 = start + b0, start + b1
            x, part = z[b0:b1] / tau, running.part(t0, t1)
            outside = x.clone() if call.topk_rest == "tail" else None
            part.absorb(x, 0, ids[t0:t1], asked, None)
            if outside is not None:
                write_at(outside, ids[t0:t1], 0, torch.full_like(part.picked, -math.inf))
                # Below the largest logit: the difference of two log-sum-exps would have the error of both.
                others[t0:t1] = outside.sub_(part.max[:, None]).logsumexp(1) - part.log_total
        if hard:
            of_label.part(start, stop).absorb(z, 0, here.ids[start:stop], asked, None)
    sent = [running.lse, *torch.where(ids >= 0, running.log_prob, 0).unbind(1)]
    sent += [others] if call.topk_rest == "tail" else []
    return [*sent, of_label.lse, torch.where(here.ids >= 0, of_label.log_prob, 0)[:, 0]] if hard else sent


def _forward(sharded: ShardedCall) -> Outputs:
    shards, call, options = sharded.shards, sharded.local(), sharded.call.options
    check_ranks(sharded, call)
    tokens = sharded.tokens(check=True)
    here, (teacher, ids) = parallel.of_shard(tokens, shards), _teacher(sharded, tokens)
    sent, count = _numbers(sharded, call, here, ids), ids.shape[1]
    found = parallel.gather(options.op, shards, sent, check_values=options.check_inputs)

    parts = found.numbers[0]
    lse, log_share = parallel.log_sum(parts)
    ls = parallel.log_prob_of(teacher.indices, found, found.numbers[1 : 1 + count], parts, log_share)
    if teacher.rest == "tail":
        others = (found.numbers[1 + count] + log_share).masked_fill(parts == -math.inf, -math.inf)
        rest, _ = parallel.log_sum(others)
        value, ds = topk_terms(ARRAYS, options, teacher, ls, rest[:, None])
        center = lse + rest.masked_fill(rest == -math.inf, 0)
        factor, at_ids = ds[:, -1], ds[:, :-1]
    else:
        center = lse
        value, at_ids = topk_terms(ARRAYS, options, teacher, ls)
        factor = torch.zeros_like(lse)
        if teacher.rest == "truncated":
            factor = -at_ids.sum(1)
            at_ids = ls.exp() * factor[:, None] + at_ids
    losses, hard_lse, hard_log_prob = value * options.soft_factor, None, None
    if options.hard_weight > 0:
        hard_lse, hard_log_prob = label_of(tokens, found)
        losses = losses - options.hard_weight * hard_log_prob
    loss = reduced(call, tokens, found.sure(losses))
    by_token = (found.sure(center), factor, found.sure(at_ids), hard_lse, hard_log_prob)
    known = (None if x is None else tokens.spread(x, (call.number, *x.shape[1:])).clone() for x in by_token)
    return Outputs(loss, Known(*known))  # type: ignore[arg-type]


def _fake(sharded: ShardedCall) -> Outputs:
    call = sharded.call
    assert call.indices is not None

    def empty(*more: int) -> Tensor:
        return call.first.new_empty((call.number, *more), dtype=call.dtype)

    hard = call.options.hard_weight > 0
    known = Known(empty(), empty(), empty(call.indices.shape[-1]), empty() if hard else None, empty() if hard else None)
    return Outputs(call.new_loss(), known)


def _save(sharded: ShardedCall, made: Outputs) -> Kept:
    return Kept(sharded, made.known)


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    (grad_loss,) = upstream
    assert grad_loss is not None
    sharded, known = kept.sharded, kept.known
    shards, call, options = sharded.shards, sharded.local(), sharded.call.options
    tokens = sharded.tokens(check=False)
    here, (_, ids) = parallel.of_shard(tokens, shards), _teacher(sharded, tokens)
    row = rows_upstream(options, tokens, grad_loss)
    models = [model_of(call, 0, wanted[:4], here)]
    sinks, gradient = Sinks(shards, here, models), TokenGradient(*(tokens.take(x) for x in known[:3]))
    hard = gradient_of_label(sharded, tokens, known.hard_lse, known.hard_log_prob)
    for start, stop, z in rows_of(sharded, call, here, models) if shards.rows else ():
        for b0, b1 in blocks(start, stop):
            t, b = slice(start + b0, start + b1), slice(b0, b1)
            dz = gradient.part(t.start, t.stop).of_logits(z[b] / options.temperature, ids[t], 0, None, None)
            dz *= options.soft_factor / options.temperature
            if hard is not None:
                part = hard.part(t.start, t.stop)
                dz += options.hard_weight * part.of_logits(z[b].clone(), here.ids[t], 0, None, None)
            weigh(z[b], dz, tokens, row, t)
        sinks.write(start, stop, (z,))
    return sinks.gradients(sharded, wanted)


OPERATORS = {
    op: Operator(
        f"{op}_of_topk_of_shards",
        op=op,
        forward=_forward,
        fake=_fake,
        save=_save,
        gradients=_gradients,
        fake_gradients=lambda kept, upstream, wanted: kept.sharded.call.empty_gradients(wanted, None),
        differentiable=tuple(f"call_{name}" for name in PARAMETERS),
        flops=lambda sharded: sharded.call.flops(NO_GRADIENTS, logits=True),
        gradient_flops=lambda kept, upstream, wanted: kept.sharded.call.flops(wanted, logits=False),
    )
    for op in (OP, LOGITS_OP)
}
