"""linear_jsd and jsd for PyTorch where the vocabulary is sharded over ranks (`vocab.parallel`).

With both softmaxes mixtures of the shards', w_r the weight of shard r in each, the divergence of the wholes is that of
the weights and those of the shards::

    KL(t || s) = KL(w_t || w_s) + sum_r w_t[r] KL(t_r || s_r)

So at both ends of beta one all-gather of log-sum-exps and the shards' own divergences does, and where both models are
equal it is exactly 0.  Between them m = (1 - beta) s + beta t needs both log-sum-exps first: a second walk adds up the
shards' terms, in one all-gather more.  Backward walks again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.frontend.options import LossOptions
from onchip.frontend.torch_parallel import Shards
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.linear_jsd import memory, triton_memory
from onchip.ops.linear_jsd.divergence import difference, divergence, mixture_terms
from onchip.ops.linear_jsd.memory import BLOCKS
from onchip.ops.linear_jsd.spec import LOGITS_OP, OP
from onchip.ops.linear_jsd.torch_call import NO_GRADIENTS, PARAMETERS, Call
from onchip.ops.linear_jsd.torch_walk import ARRAYS, Linear, model_of
from onchip.vocab import parallel
from onchip.vocab.agreement import require_agreement
from onchip.vocab.torch.loss import loss_gradient
from onchip.vocab.torch.softmax import Asked, Running, TokenGradient
from onchip.vocab.torch.tiles import Tokens, spans

# A shard that weighs less has probabilities that are 0 in float32, and no mean.
TINY = 1e-30


class ShardedCall(NamedTuple):
    """The arguments of an operator, this rank's; the call's own size is that of its shard."""

    call: Call
    shards: Shards
    kernels: bool  # whether ranks run kernels, which take ignored tokens too

    @property
    def runs_kernels(self) -> bool:
        """Whether this rank does: an empty shard has nothing for them, and says the same to other ranks without."""
        return self.kernels and self.shards.rows > 0

    def tokens(self, *, check: bool) -> Tokens:
        """Those that count, with labels of the whole vocabulary."""
        return self.call._replace(size=self.shards.vocab).tokens(check=check, compact=not self.kernels)

    def local(self) -> Call:
        """With the hidden states of all tokens, and without padding."""
        models = (
            model._replace(
                hidden=None if model.hidden is None else parallel.whole_hidden(model.hidden, self.shards),
                logits=None if model.logits is None else model.logits[..., : self.shards.rows],
            )
            for model in self.call.models
        )
        student, teacher = models
        return self.call._replace(student=student, teacher=teacher)


class Known(NamedTuple):
    """What is known of each token's softmaxes over the whole vocabulary, [T]; None: not needed."""

    student_lse: Tensor
    teacher_lse: Tensor
    by_student: Tensor  # the sum of the loss's derivatives by log s, with beta 1 the divergence
    by_teacher: Tensor  # by log t, with beta 0 the divergence
    hard_lse: Tensor | None  # the student's at temperature 1
    hard_log_prob: Tensor | None  # of the label


class Outputs(NamedTuple):
    """What the operators return."""

    loss: Tensor
    known: Known


class Kept(NamedTuple):
    """What backward is given."""

    sharded: ShardedCall
    known: Known


def problem(sharded: ShardedCall, call: Call) -> memory.Problem:
    """What plans are made for, of the call or the local one."""
    several = 1 if call.indices is None else call.indices.shape[-1]
    sent = parallel.sent_bytes(call.number, several, sharded.shards, sharded.call.first)
    return replace(call.problem(), sent=sent)


def rows_of(sharded: ShardedCall, call: Call, tokens: Tokens, models: Any) -> Iterator[Any]:
    """Chunks of tokens, their first and last, and blocks of their logits of this shard, one for each of the models, as
    buffers that may be overwritten."""
    n = tokens.number
    chunk = min(n, memory.plan(problem(sharded, call), "", call.options.scratch_bytes))
    buffers = [tokens.weight.new_empty((chunk, call.size)) for _ in models]
    for start, stop in spans(n, chunk):
        filled = [buffer[: stop - start] for buffer in buffers]
        for x, (source, _, _) in zip(filled, models, strict=True):
            source.read(tokens, start, stop, x)
        yield start, stop, *filled


def blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Of a chunk, whose elementwise part takes that much less memory."""
    return spans(stop - start, -(-(stop - start) // BLOCKS))


def require_scratch(sharded: ShardedCall) -> None:
    """Raise where scratch_bytes is too small."""
    if not sharded.runs_kernels:
        memory.PLANNER.require(problem(sharded, sharded.call), "", sharded.call.options.scratch_bytes)
    else:
        p = sharded.local().problem(kernels=True)
        triton_memory.PLANNER.require(p, "", sharded.call.options.scratch_bytes)


_SPLIT = ("weight", "logits")


def check_ranks(sharded: ShardedCall, local: Call) -> None:
    """On the CPU and with check_inputs: raise where ranks' arguments don't belong together; `local` has all tokens."""
    options, whose = local.options, ("student_", "teacher_")
    sizes = [(x.hidden.shape, x.hidden.dtype) for x in local.models if x.hidden is not None]
    split = {who + part: getattr(x, part) for who, x in zip(whose, sharded.call.models, strict=True) for part in _SPLIT}
    require_agreement(
        options.op, _Agreed(options, sharded.shards, local.grads),
        (sizes, local.shape, local.topk_kind, local.topk_rest),
        local.target, local.token_weight, local.normalizer, local.indices, local.values,
        split=split, ids=local.target,
        hidden={f"{who}hidden": x.hidden for who, x in zip(whose, local.models, strict=True)},
    )  # fmt: skip


def _softmaxes(sharded: ShardedCall, call: Call, here: Tokens) -> list[Tensor]:
    """What a shard knows by itself, [n] each: both models' log-sum-exps; at the ends of beta the divergence; with hard
    labels the student's log-sum-exp at temperature 1, and the label's log-probability, 0 if it is elsewhere."""
    shards, options = sharded.shards, sharded.call.options
    if sharded.runs_kernels:
        from onchip.ops.linear_jsd import triton_shards

        return triton_shards.softmaxes(call, here)
    models = [model_of(call, who, (False,) * 4, here) for who in (0, 1)]
    tau, beta, hard = options.temperature, options.beta, options.hard_weight > 0
    ends = beta in (0, 1)
    lses, own = [torch.empty_like(here.weight) for _ in range(2)], torch.empty_like(here.weight)
    running = Running.empty(here.ids, here.dtype)
    for start, stop, z, u in rows_of(sharded, call, here, models):
        for b0, b1 in blocks(start, stop):
            t = slice(start + b0, start + b1)
            pair = [x[b0:b1] / tau for x in (z, u)]
            for lse, x in zip(lses, pair, strict=True):
                lse[t] = x.logsumexp(1)
            if ends:
                log_probs = [x.log_softmax(1) for x in pair]
                own[t] = divergence(ARRAYS, log_probs[0], log_probs[1], beta, (False, False)).value
        if hard and shards.rows > 0:
            running.part(start, stop).absorb(z, 0, here.ids[start:stop], Asked(), None)
    sent = [*lses, *([own] if ends else [])]
    return [*sent, running.lse, torch.where(here.ids >= 0, running.log_prob, 0)[:, 0]] if hard else sent


def _sums_of_terms(
    sharded: ShardedCall, call: Call, here: Tokens, log_shares: Sequence[Tensor], student: Tensor, teacher: Tensor
) -> list[Tensor]:
    """Of the mixture, given both models' log-sum-exps over the whole vocabulary, and how far the shard's lie below:
    this shard's part of the divergence, and of its derivatives by log s and log t, [n] each."""
    if sharded.runs_kernels:
        from onchip.ops.linear_jsd import triton_shards

        return triton_shards.sums_of_terms(call, here, log_shares, student, teacher)
    models = [model_of(call, who, (False,) * 4, here) for who in (0, 1)]
    tau, beta = call.options.temperature, call.options.beta
    value, *means = (torch.empty_like(here.weight) for _ in range(3))
    for start, stop, z, u in rows_of(sharded, call, here, models):
        for b0, b1 in blocks(start, stop):
            t = slice(start + b0, start + b1)
            log_probs = z[b0:b1] / tau - student[t, None], u[b0:b1] / tau - teacher[t, None]
            terms = _terms(*log_probs, beta)
            value[t] = (terms[0] + terms[1]).clip(min=0).sum(1)
            for mean, x, log_p in zip(means, terms, log_probs, strict=True):
                mean[t] = x.sum(1) / log_p.exp_().sum(1)
    return [value, *(weighed_by_share(mean, of) for mean, of in zip(means, log_shares, strict=True))]


def weighed_by_share(mean: Tensor, log_share: Tensor) -> Tensor:
    """What a shard adds to a mean over the vocabulary's softmax, of its mean by the probabilities as they are: where
    both models are certain, all of a gradient cancels."""
    share = log_share.exp()
    return torch.where(share < TINY, 0, share * mean)


def _forward(sharded: ShardedCall) -> Outputs:
    shards, call, options = sharded.shards, sharded.local(), sharded.call.options
    check_ranks(sharded, call)
    tokens = sharded.tokens(check=True)
    here = parallel.of_shard(tokens, shards)
    beta, hard = options.beta, options.hard_weight > 0
    sent = _softmaxes(sharded, call, here)
    found = parallel.gather(options.op, shards, sent, check_values=options.check_inputs)
    (student, log_s), (teacher, log_t) = (parallel.log_sum(x) for x in found.numbers[:2])
    if beta in (0, 1):
        # Of a shard that one of the models gives nothing the weights say all.
        own = found.numbers[2].masked_fill((log_s == -torch.inf) | (log_t == -torch.inf), 0)
        weights = (log_t if beta == 0 else log_s).exp()
        within = torch.where(weights == 0, 0, weights * own).sum(0)
        value = divergence(ARRAYS, log_s.T, log_t.T, beta, (False, False)).value + within
        by_student = by_teacher = value
    else:
        rank = parallel.group_of(shards).rank()
        parts = _sums_of_terms(sharded, call, here, (log_s[rank], log_t[rank]), student, teacher)
        more = parallel.gather(options.op, shards, parts, check_values=options.check_inputs)
        value, by_student, by_teacher = (x.sum(0) for x in more.numbers)
    losses, hard_lse, hard_log_prob = value * options.soft_factor, None, None
    if hard:
        hard_lse, hard_log_prob = label_of(tokens, found)
        losses = losses - options.hard_weight * hard_log_prob
    loss = reduced(call, tokens, found.sure(losses))
    by_token = (student, teacher, by_student, by_teacher, hard_lse, hard_log_prob)
    known = (None if x is None else tokens.spread(found.sure(x), (call.number,)).clone() for x in by_token)
    return Outputs(loss, Known(*known))  # type: ignore[arg-type]


def label_of(tokens: Tokens, found: parallel.Gathered) -> tuple[Tensor, Tensor]:
    """[n]: the student's log-sum-exp at temperature 1 and the label's log-probability, of the last two numbers."""
    parts = found.numbers[-2]
    lse, log_share = parallel.log_sum(parts)
    return lse, parallel.log_prob_of(tokens.ids, found, found.numbers[-1:], parts, log_share)[:, 0]


def reduced(call: Call, tokens: Tokens, losses: Tensor) -> Tensor:
    """The computed tokens' losses, weighted and reduced."""
    loss = tokens.spread(losses * tokens.weight, call.shape)
    return loss if call.options.reduction == "none" else loss.sum() * tokens.inverse_count


class _Agreed(NamedTuple):
    """What `require_agreement` reads of a call."""

    options: Any
    shards: Shards
    grads: tuple[bool, ...]


def _terms(ls: Tensor, lt: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The divergence's terms, of log-probabilities."""
    return mixture_terms(torch, difference(torch, ls, lt), ls.exp(), lt.exp(), beta)


def _derivatives(ls: Tensor, lt: Tensor, beta: float, by_student: Tensor, by_teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Of the divergence by both models' logits; `by_student` and `by_teacher` [n, 1] are sums over the vocabulary."""
    s, t = ls.exp(), lt.exp()
    if 0 < beta < 1:
        by_s, by_t = _terms(ls, lt, beta)
        return by_s - s * by_student, by_t - t * by_teacher
    d = difference(torch, ls, lt)
    if beta == 0:
        return s - t, torch.where(t == 0, 0, t * d) - t * by_teacher
    return torch.where(s == 0, 0, -s * d) - s * by_student, t - s


def _padded(gradient: Tensor, logits: Tensor) -> Tensor:
    """With zeros for the columns that are padding."""
    missing = logits.shape[-1] - gradient.shape[-1]
    return torch.nn.functional.pad(gradient, (0, missing)) if missing else gradient


def _fake(sharded: ShardedCall) -> Outputs:
    call = sharded.call

    def empty() -> Tensor:
        return call.first.new_empty((call.number,), dtype=call.dtype)

    hard = call.options.hard_weight > 0
    known = Known(empty(), empty(), empty(), empty(), empty() if hard else None, empty() if hard else None)
    return Outputs(call.new_loss(), known)


def _save(sharded: ShardedCall, made: Outputs) -> Kept:
    return Kept(sharded, made.known)


def _gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    (grad_loss,) = upstream
    assert grad_loss is not None
    shards, call, options = kept.sharded.shards, kept.sharded.local(), kept.sharded.call.options
    tokens, tau = kept.sharded.tokens(check=False), options.temperature
    here = parallel.of_shard(tokens, shards)
    row = rows_upstream(options, tokens, grad_loss)
    if kept.sharded.runs_kernels:
        from onchip.ops.linear_jsd import triton_shards

        own, parameters = triton_shards.gradients(call, here, kept.known, row, wanted), kept.sharded.call.parameters
        return [None if x is None or of is None else _padded(x, of) for x, of in zip(own, parameters, strict=True)]
    models = [model_of(call, who, wanted[4 * who : 4 * who + 4], here) for who in (0, 1)]
    student, teacher, by_student, by_teacher = (tokens.take(x)[:, None] for x in kept.known[:4])
    factor, sinks = options.soft_factor / tau, Sinks(shards, here, models)
    hard = gradient_of_label(kept.sharded, tokens, kept.known.hard_lse, kept.known.hard_log_prob)
    for start, stop, z, u in rows_of(kept.sharded, call, here, models):
        for b0, b1 in blocks(start, stop) if shards.rows else ():
            t, b = slice(start + b0, start + b1), slice(b0, b1)
            ls, lt = z[b] / tau - student[t], u[b] / tau - teacher[t]
            dz, du = _derivatives(ls, lt, options.beta, by_student[t], by_teacher[t])
            dz, du = dz * factor, du * factor
            if hard is not None:
                part = hard.part(t.start, t.stop)
                dz += options.hard_weight * part.of_logits(z[b].clone(), here.ids[t], 0, None, None)
            for into, g in ((z, dz), (u, du)):
                weigh(into[b], g, tokens, row, t)
        sinks.write(start, stop, (z, u))
    return sinks.gradients(kept.sharded, wanted)


def rows_upstream(options: Any, tokens: Tokens, grad_loss: Tensor) -> Tensor:
    """[n]: the factor of each token's gradient."""
    return tokens.weight * tokens.upstream(grad_loss, options.reduction)


def gradient_of_label(
    sharded: ShardedCall, tokens: Tokens, lse: Tensor | None, log_prob: Tensor | None
) -> TokenGradient | None:
    """That of the hard label's cross-entropy, of all tokens' numbers; None: there are no hard labels."""
    if sharded.call.options.hard_weight == 0:
        return None
    assert lse is not None
    assert log_prob is not None
    lse, log_prob = tokens.take(lse), tokens.take(log_prob)
    return loss_gradient(LossOptions(), torch.ones_like(lse), lse, log_prob[:, None], sharded.shards.vocab)


def weigh(into: Tensor, gradient: Tensor, tokens: Tokens, row: Tensor, part: slice) -> None:
    """Write the gradient of a part of the tokens, times their factors."""
    torch.mul(gradient, row[part, None], out=into)
    if tokens.kept is not None:  # an infinite divergence times 0 is NaN
        into.masked_fill_(~tokens.kept[part, None], 0)


class Sinks:
    """Where the gradients of the models' logits go, chunk by chunk; hidden's is added up over the ranks."""

    def __init__(self, shards: Shards, here: Tokens, models: Sequence[Any]) -> None:
        self._shards, self._here, self._models = shards, here, models
        self._waits: list[Callable[[], Tensor] | None] = [None for _ in models]

    def write(self, start: int, stop: int, gradients: Sequence[Tensor]) -> None:
        """Those of tokens [start, stop)."""
        for who, g in enumerate(gradients):
            _, sink, made = self._models[who]
            if isinstance(sink, Linear):
                operand = sink.write_hidden(start, stop, g)
                if stop == self._here.number and made.hidden is not None:
                    self._waits[who] = parallel.start_sum(self._shards, made.hidden)
                sink.write_weight(start, g, operand)
            elif sink is not None:
                sink.write(self._here, start, stop, g)

    def gradients(self, sharded: ShardedCall, wanted: Wanted) -> list[Tensor | None]:
        """Those of the call's parameters, in their dtypes."""
        found: list[Tensor | None] = []
        for (_, _, made), wait, model in zip(self._models, self._waits, sharded.call.models, strict=False):
            hidden = made.hidden
            if hidden is not None:
                hidden = (wait or parallel.start_sum(self._shards, hidden))()
            logits = None
            if made.logits is not None and model.logits is not None:
                logits = _padded(made.logits, model.logits)
            found += [hidden, made.weight, made.bias, logits]
        found += [None] * (len(PARAMETERS) - len(found))  # of a teacher that is a top-k
        return [
            None if x is None or not want or of is None else x.to(of.dtype)
            for x, want, of in zip(found, wanted, sharded.call.parameters, strict=True)
        ]


OPERATORS = {
    op: Operator(
        f"{op}_of_shards",
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
