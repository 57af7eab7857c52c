"""The two halves of the divergence: each token's loss, and the gradients.

If the vocabulary is whole, one walk computes both.  If each rank has a part of it, ranks exchange what they know, and a
walk in backward computes the gradients from the resulting numbers.

Each softmax is a mixture of the ranks' softmaxes, with the weight w[r] for rank r's part.  So the divergence is the sum
of the weights' divergence and the parts'::

    KL(t || s) = KL(w_t || w_s) + sum_r w_t[r] KL(t_r || s_r)

At both ends of beta one all-gather of log-sum-exps and the parts' own divergences is therefore enough, and if both
models are equal the result is exactly 0.  Between the ends m = (1 - beta) s + beta t needs both log-sum-exps first: a
second walk adds up the parts' terms, with another all-gather.

With a top-k teacher ranks send the log-probabilities of the ids that they have and, for a tail, that of all others
together.  One all-gather turns them into those of the whole vocabulary, from which everything else follows: the
gradient of a token's logits z is a factor times exp(z - center), plus a number at each id.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from onchip.frontend.options import LossOptions
from onchip.frontend.topk import TopK
from onchip.frontend.torch_register import Wanted
from onchip.ops.linear_jsd.divergence import divergence, sums_of, topk_gradient
from onchip.ops.linear_jsd.torch_call import NO_GRADIENTS, PARAMETERS, JsdCall
from onchip.ops.linear_jsd.torch_walk import ARRAYS, losses_and_gradients, topk_rows, walk
from onchip.vocab.torch import parallel
from onchip.vocab.torch.loss import loss_gradient
from onchip.vocab.torch.parallel import Gathered
from onchip.vocab.torch.softmax import Asked, Running, TokenGradient, write_at
from onchip.vocab.torch.tiles import NOWHERE, Tokens

# If a part has less weight, all its probabilities are 0 in float32, and it has no mean.
TINY = 1e-30
Softmaxes = Callable[[], list[Tensor]]
"""The numbers that a rank knows by itself, [n] each: both models' log-sum-exps; at the ends of beta the divergence;
with hard labels the student's log-sum-exp at temperature 1, and the label's log-probability, 0 if another rank has it.
"""
Terms = Callable[[Tensor, Tensor], Sequence[Tensor]]
"""For the mixture, given both models' log-sum-exps over the whole vocabulary: this rank's part of the divergence, and
the means of the derivatives with respect to log s and log t under its own softmaxes, [n] each."""


def width(call: JsdCall) -> int:
    """How many numbers per token the gradients are computed from.  For two models: the log-sum-exps, and the sums of
    the derivatives with respect to their log-probabilities, or at an end of beta the divergence.  For a top-k teacher:
    center, factor, and a number for each of the K ids.  With hard labels also the student's log-sum-exp at temperature
    1 and the label's log-probability.  If nothing is sharded, none are needed."""
    if not call.shards.there:
        return 0
    own = 4 if call.indices is None else 2 + call.indices.shape[-1]
    return own + 2 * (call.options.hard_weight > 0)


def forward(call: JsdCall, tokens: Tokens) -> tuple[Tensor, list[Tensor | None], Tensor | None]:
    """The loss, with `stash` the gradients for an upstream gradient of 1, and all tokens' numbers, [T, width(call)]."""
    nothing: list[Tensor | None] = [None] * len(PARAMETERS)
    if not call.shards.there:
        grads = call.grads if call.stash else NO_GRADIENTS
        losses, made = losses_and_gradients(call, tokens, tokens.weight * tokens.inverse_count, grads)
        return call.reduced(tokens, losses), made, None
    here = parallel.of_shard(tokens, call.shards)
    if call.indices is None:
        ways = lambda: _softmaxes(call, here), lambda s, t: _terms(call, here, s, t)
        losses, numbers = of_two_models(call, tokens, *ways)
    else:
        losses, numbers = of_topk(call, tokens, _log_probs(call, here))
    return call.reduced(tokens, losses), nothing, tokens.spread(numbers, (call.number, width(call)))


def of_two_models(call: JsdCall, tokens: Tokens, softmaxes: Softmaxes, terms: Terms) -> tuple[Tensor, Tensor]:
    """Losses without weights, [n], and numbers, [n, width(call)], given functions that compute what a rank knows."""
    shards, options = call.shards, call.options
    found = parallel.gather(options.op, shards, softmaxes(), check_values=options.check_inputs)
    (student, log_s), (teacher, log_t) = (parallel.log_sum(x) for x in found.numbers[:2])
    if options.beta in (0, 1):
        # If one of the models gives a part no probability, the weights alone determine the result.
        own = found.numbers[2].masked_fill((log_s == -torch.inf) | (log_t == -torch.inf), 0)
        weights = (log_t if options.beta == 0 else log_s).exp()
        within = torch.where(weights == 0, 0, weights * own).sum(0)
        value = divergence(ARRAYS, log_s.T, log_t.T, options.beta, (False, False)).value + within
        sums = [value, value]
    else:
        part, *means = terms(student, teacher)
        # The means use the probabilities unchanged: where both models are certain, all of a gradient cancels.
        shares = [x[parallel.group_of(shards).rank()].exp() for x in (log_s, log_t)]
        parts = [torch.where(share < TINY, 0, share * x) for x, share in zip(means, shares, strict=True)]
        more = parallel.gather(options.op, shards, [part, *parts], check_values=options.check_inputs)
        value, *sums = (x.sum(0) for x in more.numbers)
    return _with_label(call, tokens, found, value, [student, teacher, *sums])


def _softmaxes(call: JsdCall, here: Tokens) -> list[Tensor]:
    options, asked = call.options, Asked()
    student, teacher = (torch.full_like(here.weight, -math.inf) for _ in range(2))
    own, label = torch.zeros_like(here.weight), Running.empty(here.ids, here.dtype)

    def step(part: slice, z: Tensor, u: Tensor) -> tuple[()]:
        x, y = z / options.temperature, u / options.temperature
        student[part], teacher[part] = x.logsumexp(1), y.logsumexp(1)
        if options.beta in (0, 1):
            log_probs = x.log_softmax(1), y.log_softmax(1)
            own[part] = divergence(ARRAYS, *log_probs, options.beta, (False, False)).value
        if options.hard_weight > 0:
            label.part(part.start, part.stop).absorb(z, 0, here.ids[part], asked, None)
        return ()

    walk(call, here, step)
    sent = [student, teacher] + ([own] if options.beta in (0, 1) else [])
    return sent + (_of_label(here, label) if options.hard_weight > 0 else [])


def _terms(call: JsdCall, here: Tokens, student: Tensor, teacher: Tensor) -> list[Tensor]:
    tau, made = call.options.temperature, [torch.zeros_like(here.weight) for _ in range(3)]

    def step(part: slice, z: Tensor, u: Tensor) -> tuple[()]:
        ls, lt = z / tau - student[part, None], u / tau - teacher[part, None]
        value, by_s, by_t = sums_of(torch, ls, lt, call.options.beta)
        found = value, by_s / ls.exp_().sum(1), by_t / lt.exp_().sum(1)
        for into, x in zip(made, found, strict=True):
            into[part] = x
        return ()

    walk(call, here, step)
    return made


def _of_label(here: Tokens, label: Running) -> list[Tensor]:
    return [label.lse, torch.where(here.ids >= 0, label.log_prob, 0)[:, 0]]


def _with_label(
    call: JsdCall, tokens: Tokens, found: Gathered, value: Tensor, known: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """As `of_two_models`, given the divergence and all numbers except the label's."""
    made, known = value * call.options.soft_factor, [*known]
    if call.options.hard_weight > 0:
        parts = found.numbers[-2]
        lse, log_share = parallel.log_sum(parts)
        log_prob = parallel.log_prob_of(tokens.ids, found, found.numbers[-1:], parts, log_share)[:, 0]
        made = made - call.options.hard_weight * log_prob
        known += [lse, log_prob]
    return found.sure(made), found.sure(torch.stack(known, 1))


# ----------------------------------------------------------------------------------------------------- a top-k teacher


def _here(call: JsdCall, tokens: Tokens) -> Tensor:
    """The ids [n, K] of the computed tokens, in this rank's numbering."""
    ids = topk_rows(call, tokens, slice(0, tokens.number)).indices - call.shards.start
    return ids.masked_fill((ids < 0) | (ids >= call.size), NOWHERE)


def of_topk(call: JsdCall, tokens: Tokens, sent: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """As `of_two_models`, given what a rank knows by itself (`_log_probs`)."""
    teacher, options = topk_rows(call, tokens, slice(0, tokens.number)), call.options
    found = parallel.gather(options.op, call.shards, sent, check_values=options.check_inputs)
    parts, count, rest = found.numbers[0], teacher.indices.shape[1], None
    lse, log_share = parallel.log_sum(parts)
    ls = parallel.log_prob_of(teacher.indices, found, found.numbers[1 : 1 + count], parts, log_share)
    if teacher.rest == "tail":
        others = (found.numbers[1 + count] + log_share).masked_fill(parts == -math.inf, -math.inf)
        rest, _ = parallel.log_sum(others)
    value, numbers = topk_numbers(call, teacher, lse, ls, rest)
    return _with_label(call, tokens, found, value, numbers.unbind(1))


def topk_numbers(
    call: JsdCall, teacher: TopK[Tensor], lse: Tensor, ls: Tensor, rest: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The divergence [n], and center, factor and a number for each id, [n, K + 2], from the student's log-sum-exp, the
    ids' log-probabilities [n, K] and, for a tail, that of all others together.
    """
    value, at_ids, factor = topk_gradient(ARRAYS, call.options, teacher, ls, rest)
    center = lse if rest is None else lse + rest.masked_fill(rest == -math.inf, 0)
    return value, torch.cat([center[:, None], factor[:, None], at_ids], 1)


def _log_probs(call: JsdCall, here: Tokens) -> list[Tensor]:
    """What a rank knows by itself, [n] each: the student's log-sum-exp, the ids' log-probabilities, with a tail also
    that of all others together, and the numbers for the label that `_with_label` takes.
    """
    options, asked, tail, ids = call.options, Asked(), call.topk_rest == "tail", _here(call, here)
    running, label = Running.empty(ids, here.dtype), Running.empty(here.ids, here.dtype)
    others = torch.full_like(here.weight, -math.inf)

    def step(part: slice, z: Tensor) -> tuple[()]:
        x, own = z / options.temperature, running.part(part.start, part.stop)
        outside = x.clone() if tail else None
        own.absorb(x, 0, ids[part], asked, None)
        if outside is not None:
            write_at(outside, ids[part], 0, torch.full_like(own.picked, -math.inf))
            # Relative to the largest logit, since the difference of two log-sum-exps has the error of both.
            others[part] = outside.sub_(own.max[:, None]).logsumexp(1) - own.log_total
        if options.hard_weight > 0:
            label.part(part.start, part.stop).absorb(z, 0, here.ids[part], asked, None)
        return ()

    walk(call, here, step)
    sent = [running.lse, *torch.where(ids >= 0, running.log_prob, 0).unbind(1)] + ([others] if tail else [])
    return sent + (_of_label(here, label) if options.hard_weight > 0 else [])


# ----------------------------------------------------------------------------------------------------------- gradients


def backward(call: JsdCall, tokens: Tokens, known: Tensor | None, row: Tensor, wanted: Wanted) -> list[Tensor | None]:
    """The gradients of `walk`, given the numbers of `forward` and each token's factor."""
    if not call.shards.there:
        return losses_and_gradients(call, tokens, row, wanted)[1]
    assert known is not None
    known = tokens.take(known)
    options, here = call.options, parallel.of_shard(tokens, call.shards)
    tau, factor = options.temperature, options.soft_factor / options.temperature
    want, numbers = (any(wanted[:4]), any(wanted[4:])), known.unbind(1)
    hard: TokenGradient | None = None
    if options.hard_weight > 0:
        lse, log_prob = numbers[-2:]
        hard = loss_gradient(LossOptions(), torch.ones_like(lse), lse, log_prob[:, None], call.vocab)

    def of_student(part: slice, z: Tensor, dz: Tensor | None) -> Tensor | None:
        """The gradient with the label's part."""
        if dz is None:
            return None
        dz = dz * factor
        if hard is not None:
            own = hard.part(part.start, part.stop)
            dz += options.hard_weight * own.of_logits(z.clone(), here.ids[part], 0, None, None)
        return dz

    if call.indices is None:
        student, teacher, *sums = numbers[:4]

        def of_two(part: slice, z: Tensor, u: Tensor) -> tuple[Tensor | None, Tensor | None]:
            ls, lt = z / tau - student[part, None], u / tau - teacher[part, None]
            _, dz, du = divergence(ARRAYS, ls, lt, options.beta, want, (sums[0][part], sums[1][part]))
            return of_student(part, z, dz), None if du is None else du * factor

        return walk(call, here, of_two, row, wanted)
    ids, count = _here(call, tokens), call.indices.shape[-1]
    soft = TokenGradient(numbers[0], numbers[1], known[:, 2 : 2 + count])

    def of_topk(part: slice, z: Tensor) -> tuple[Tensor | None]:
        dz = soft.part(part.start, part.stop).of_logits(z / tau, ids[part], 0, None, None)
        return (of_student(part, z, dz),)

    return walk(call, here, of_topk, row, wanted)
