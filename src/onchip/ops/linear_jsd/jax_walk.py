"""The walks of linear_jsd and jsd in plain JAX: chunks of tokens, for which divergence.py computes losses and
gradients.

If the vocabulary is split over devices, each has its own entries.  At the ends of beta the divergence is that between
the devices' shares of probability, plus those on the devices::

    KL(t || s) = KL(T || S) + sum_r T_r KL(t_r || s_r)

where T_r is device r's share of the teacher's probability, and t_r the distribution over its own entries.  So one
all-gather suffices, for both models' normalisers and the devices' own divergences, and nothing cancels.  A mixture has
no such rule: the sums of its terms take another product and another all-gather.  A top-k teacher needs the student's
log-probabilities of its ids, and of all other ids together.  Backward computes logits again.

Source: the chain rule of relative entropy (Cover and Thomas, Elements of Information Theory, 2.5), for that rule.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from onchip.frontend.jax_call import IGNORED, vary_alike
from onchip.frontend.options import LossTerms
from onchip.frontend.topk import TopK
from onchip.ops.linear_jsd import JsdOptions, memory
from onchip.ops.linear_jsd import divergence as formulas
from onchip.ops.linear_jsd.divergence import divergence, sums_of, topk_gradient
from onchip.ops.linear_jsd.memory import Head, JsdProblem
from onchip.vocab.loss import at_entry
from onchip.vocab.xla.loss import Reduction
from onchip.vocab.xla.tiles import (
    Columns,
    CountedTokens,
    Softmax,
    Wanted,
    XlaLogits,
    XlaProjection,
    XlaTokenGradient,
    XlaTokenStats,
    cut_rows,
    logits_gradient,
    select_tokens,
)
from onchip.vocab.xla.walk import by_rows

Array = jax.Array


class JsdConstants(NamedTuple):
    """The arrays of a call that get no gradient, by token."""

    labels: Any  # [T] int32 in [0, V), IGNORED or OUT_OF_RANGE
    indices: Any  # [T, K] int32, negative for one out of range
    values: Any  # [T, K]
    token_weight: Any  # [T]
    normalizer: Any  # []


class JsdStatic(NamedTuple):
    """What is known while tracing; a call with another `JsdStatic` compiles anew."""

    options: JsdOptions
    platform: str
    size: int  # vocabulary entries that count
    topk_kind: str
    topk_rest: str
    shard: Any = None  # this device's part of a vocabulary that is split over devices
    mesh: Any = None  # an `OnMesh` for a call that is spread over devices
    backend: str = "xla"


def problem_of(static: JsdStatic, needs: Any, stash: bool, models: Any, constants: JsdConstants) -> JsdProblem:
    """What plans depend on."""

    def head(model: Any, needs: Any) -> Head:
        if isinstance(model, XlaProjection):
            return model.problem(needs, static.platform, op=static.options.op)
        tokens, device = constants.labels.shape[0], "cpu" if static.platform == "cpu" else "cuda"
        vocab, dtype = (0, "float32") if model is None else (model.shape[1], model.dtype.name)
        return Head(
            tokens, 0, vocab, dtype, device=device, op=static.options.op, grad_hidden=bool(needs), grad_weight=False
        )

    student, teacher = map(head, models, needs)
    topk = 0 if constants.indices is None else constants.indices.shape[1]
    return JsdProblem(static.size, student, teacher, topk, static.options.hard_weight > 0, stash)


def plan(static: JsdStatic, needs: Any, stash: bool, models: Any, constants: JsdConstants) -> int:
    """Tokens of a chunk."""
    problem = problem_of(static, needs, stash, models, constants)
    return memory.jax_plan(problem, "", static.options.scratch_bytes)


def source_of(static: JsdStatic, model: Any) -> XlaProjection | XlaLogits:
    """A model's last layer, in the dtype of sums where products in 16 bits aren't exact enough, or its logits."""
    if not isinstance(model, XlaProjection):
        return XlaLogits.of(model)
    if static.platform == "cpu" or model.weight.dtype == jnp.float16:
        # The CPU's 16-bit products round; float16's range is short for a gradient.
        return replace(model, weight=model.weight.astype(model.accumulator))
    return model


def _at_labels(stats: XlaTokenStats) -> XlaTokenGradient:
    """The gradient of each row's cross-entropy with its one id."""
    return XlaTokenGradient(
        jnp.ones_like(stats.lse),
        at_entry(jnp, LossTerms().nonzero, stats.log_prob, None, None, stats.lse, 1, None, None),
    )


def _cross_entropy(z: Array, label: Array) -> tuple[Array, Array]:
    """The cross-entropy of each row, and its gradient."""
    ids, whole = label[:, None], Columns(0, z.shape[1])
    stats = Softmax.empty(ids, Wanted(), z.dtype).absorb(z, whole, ids).complete(ids, z.shape[1])
    return -stats.log_prob[:, 0], logits_gradient(z, None, stats, _at_labels(stats), ids, whole)


ARRAYS = formulas.Arrays(
    jnp,
    log_softmax=jax.nn.log_softmax,
    logsumexp=lambda x: jax.nn.logsumexp(x, 1, keepdims=True),
    take=lambda x, indices: jnp.take_along_axis(x, indices, 1),
    put=lambda x, indices, values: x.at[jnp.arange(x.shape[0])[:, None], indices].set(values),
    cross_entropy=_cross_entropy,
)


def none_of(models: Any) -> Any:
    """A tree that says that no gradient is needed."""
    return jax.tree.map(lambda _: False, models)


def stashes(static: JsdStatic, needs: Any) -> bool:
    """Whether forward makes the gradients, for an upstream gradient of 1: in the dtype of sums, except existing
    logits'.
    """
    of_logits = any(need is True for need in needs)
    return any(jax.tree.leaves(needs)) and static.options.reduction != "none" and not of_logits


def forward(static: JsdStatic, needs: Any, models: Any, constants: JsdConstants) -> tuple[Any, Any]:
    if static.shard is not None:
        return _split_forward(static, needs, models, constants)
    stash = stashes(static, needs)
    loss, gradients = _walk(static, needs if stash else none_of(models), models, constants, None, stash)
    if stash:
        return loss, gradients
    return loss, (models, constants) if any(jax.tree.leaves(needs)) else None


def backward(static: JsdStatic, needs: Any, saved: Any, grad_loss: Any) -> Any:
    if static.shard is not None:
        return _split_backward(static, needs, saved, grad_loss)
    if stashes(static, needs):
        return jax.tree.map(lambda g: g * grad_loss, saved)
    models, constants = saved
    return _walk(static, needs, models, constants, grad_loss, False)[1]


# ------------------------------------------------------------------------------------------------------------ the walk


def _walk(
    static: JsdStatic, needs: Any, models: Any, constants: JsdConstants, grad_loss: Any, stash: bool
) -> tuple[Any, tuple[Any, ...]]:
    """The loss, and the gradients that are needed, for `grad_loss` or for 1.  They are in the dtype of sums; those of
    existing logits in the logits' dtype."""
    chunk = plan(static, needs, stash, models, constants)
    tokens = select_tokens(constants.labels, chunk)
    labels, mean = tokens.take(constants.labels, 0), static.options.reduction == "mean"
    sources, wanted = _given(static, models, needs)
    total = sources[0].accumulator
    reduction = Reduction.of(tokens, labels, constants.token_weight, constants.normalizer, mean, total)
    row_scale = reduction.row_scale(jnp.ones(()) if grad_loss is None else grad_loss, tokens)

    def step(start: jax.Array, own: jax.Array, teacher: Any = None) -> tuple[jax.Array, list[Any]]:
        source, label, scale, there = cut_rows((tokens.source, labels, row_scale, tokens.there()), start, chunk)

        def take(x: jax.Array) -> jax.Array:
            return x.at[source].get(mode="fill", fill_value=0)

        def scaled(g: jax.Array | None) -> Any:
            # Where, not a factor of 0: what is behind the kept tokens may be infinite.
            return None if g is None else jnp.where(there[:, None], g * scale[:, None], 0)

        if constants.indices is not None:
            teacher = topk_of(static, take(constants.indices), take(constants.values))
        value, *gradients = formulas.rows(ARRAYS, static.options, own, teacher, jnp.maximum(label, 0))
        return jnp.where(there, value, 0), [scaled(g) for g in gradients]

    def whole(sums: Any, source: XlaProjection | XlaLogits) -> Any:
        """x with zeros for ignored tokens."""
        if isinstance(source, XlaLogits):
            return None if sums is None else source.floats(sums)
        return sums if sums.hidden is None else replace(sums, hidden=tokens.spread(sums.hidden))

    zeros = jnp.zeros(tokens.source.shape, total)
    losses, sums = by_rows(chunk, tokens, sources, wanted, zeros, step)
    loss = reduction.reduced(losses, tokens, per_token=static.options.reduction == "none")
    made = [whole(g, source) for g, source in zip(sums, sources, strict=True)]
    return loss, (*made, *[None] * (2 - len(made)))


def topk_of(static: JsdStatic, ids: Array, values: Array) -> TopK[Array]:
    """Of rows; what is out of range is NaN."""
    words: Any = (static.topk_kind, static.topk_rest)
    return TopK(jnp.maximum(ids, 0), jnp.where(ids < 0, jnp.nan, values), *words)


# --------------------------------------------------------------------------------------------------- a split vocabulary


class _Norm(NamedTuple):
    """The normalisers of C tokens: top + log_total is the log-sum-exp."""

    top: Array
    log_total: Array

    def log_probs(self, z: Array) -> Array:
        """The softmax's numbers for logits [C, size]."""
        # The difference would be NaN where no logit is finite.
        return jnp.where(z == -jnp.inf, z, z - self.top[:, None] - self.log_total[:, None])


class _Part(NamedTuple):
    """What a device knows about C tokens, from its own entries."""

    student: Any  # (max, total) of a `Softmax`, like teacher
    teacher: Any
    value: Array | None  # the divergence of its own distributions, at the ends of beta
    hard: Softmax | None


class _KnownSoftmax(NamedTuple):
    """What all devices together know about each row, [P]."""

    value: Array  # the divergence
    models: Any  # for two models: their `_Norm`s, and the sums of the derivatives by both models' log-probabilities
    topk: Any  # for a top-k teacher: the divergence's `XlaTokenGradient`, and the statistics that it goes with
    hard: XlaTokenStats | None


def _split_forward(static: JsdStatic, needs: Any, models: Any, constants: JsdConstants) -> tuple[Any, Any]:
    """The loss, and what backward needs."""
    static.shard.refuse_untracked(static.options.op, needs)
    chunk = plan(static, needs, False, models, constants)
    tokens = select_tokens(constants.labels, chunk)
    walk = _Split(static, chunk, tokens, models, constants)
    known = walk.of_models() if constants.indices is None else walk.of_topk()
    options = static.options
    loss = options.soft_factor * known.value
    if known.hard is not None:
        loss -= options.hard_weight * known.hard.log_prob[:, 0]
    reduction = _reduction(static, tokens, models, constants)
    loss = reduction.reduced(loss, tokens, per_token=options.reduction == "none")
    return loss, (models, constants, known) if any(jax.tree.leaves(needs)) else None


def _split_backward(static: JsdStatic, needs: Any, saved: Any, grad_loss: Array) -> Any:
    """Both models' gradients, from logits that are computed again."""
    models, constants, known = saved
    options, shard = static.options, static.shard
    chunk = plan(static, needs, False, models, constants)
    tokens = select_tokens(constants.labels, chunk)
    scale = _reduction(static, tokens, models, constants).row_scale(grad_loss, tokens)
    upstream = None if known.hard is None else _at_labels(known.hard)
    ids = None if known.topk is None else shard.local_ids(tokens.take(constants.indices, IGNORED))
    local: Any = (models, tokens, known, scale, shard.local_ids(_ids(tokens, constants)), upstream, ids)
    models, tokens, known, scale, labels, upstream, ids = vary_alike(local)
    columns, there = _columns(static), tokens.there()
    sources, wanted = _given(static, models, needs)

    def step(start: Any, *z: Array) -> tuple[Any, list[Any]]:
        own, (of_label, label, of_id), factor, here = cut_rows(
            (known, (upstream, labels, ids), scale, there), start, chunk
        )
        soft = options.soft_factor / options.temperature
        final = [_final(static, x) for x in z]
        if own.topk is not None:
            gradient, stats = own.topk
            made = [soft * logits_gradient(final[0], None, stats, gradient, of_id, columns)]
        else:
            norms, sums = own.models
            ls, lt = (norm.log_probs(x) for norm, x in zip(norms, final, strict=True))
            both: Any = divergence(ARRAYS, ls, lt, options.beta, sums=sums)
            made = [soft * both.student, soft * both.teacher]
        if own.hard is not None:
            made[0] += options.hard_weight * logits_gradient(z[0], None, own.hard, of_label, label, columns)
        # Where, not a factor of 0: what is behind the kept tokens, and padding, may be infinite.
        counts = here[:, None] if columns.end is None else here[:, None] & columns.new(z[0])
        return (), [jnp.where(counts, g * factor[:, None], 0) for g in made]

    _, sums = by_rows(chunk, tokens, sources, wanted, (), step)

    def whole(made: Any, source: XlaProjection | XlaLogits) -> Any:
        if isinstance(source, XlaLogits):
            return None if made is None else source.floats(made)
        return made if made.hidden is None else replace(made, hidden=shard.summed(tokens.spread(made.hidden)))

    made = [whole(x, source) for x, source in zip(sums, sources, strict=True)]
    return (*made, *[None] * (2 - len(made)))


class _Split:
    """The walks of forward over the entries of each device."""

    def __init__(
        self, static: JsdStatic, chunk: int, tokens: CountedTokens, models: Any, constants: JsdConstants
    ) -> None:
        self.static, self.chunk, self.tokens = static, chunk, tokens
        self.models, self.constants = models, constants
        shard, labels = static.shard, _ids(tokens, constants)
        self.labels = labels if static.options.hard_weight > 0 else None
        local: Any = (models, tokens, shard.local_ids(labels))
        self.local, self.here, self.local_labels = vary_alike(local)
        self.sources, self.needs = _given(static, self.local, none_of(self.local))

    def walked(self, step: Any) -> Any:
        """The numbers that step(start, *z) computes for each chunk of rows, from all devices, [n, P]."""
        rows, total = self.here.source.shape[0], self.sources[0].accumulator
        logits = [jax.ShapeDtypeStruct((rows, self.static.size), total) for _ in self.sources]
        empty = jax.eval_shape(lambda *z: step(None, *z), *logits)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty)
        nothing = [None for _ in self.sources]
        made, _ = by_rows(
            self.chunk, self.here, self.sources, self.needs, zeros, lambda start, *z: (step(start, *z), nothing)
        )
        return self.static.shard.gathered(made)

    def hard(self, start: Any, z: Array) -> Softmax | None:
        if self.labels is None:
            return None
        return _softmax(z, self.cut(self.local_labels, start), _columns(self.static))

    def hard_stats(self, parts: Softmax | None) -> XlaTokenStats | None:
        shard = self.static.shard
        return None if parts is None else shard.merged(parts).complete(self.labels, shard.vocab)

    def cut(self, rows: Any, start: Any) -> Any:
        return rows if start is None else cut_rows(rows, start, self.chunk)

    def of_models(self) -> _KnownSoftmax:
        static, options, columns = self.static, self.static.options, _columns(self.static)

        def of_part(start: Any, z: Array, u: Array) -> _Part:
            nothing = jnp.full_like(self.cut(self.local_labels, start), IGNORED)
            final = _final(static, z), _final(static, u)
            student, teacher = (_softmax(x, nothing, columns) for x in final)
            value = None
            if options.beta in (0, 1):
                ls, lt = _norm(student).log_probs(final[0]), _norm(teacher).log_probs(final[1])
                value = divergence(ARRAYS, ls, lt, options.beta, (False, False)).value
            parts = (student.max, student.total), (teacher.max, teacher.total)
            return _Part(*parts, value, self.hard(start, z))

        part: _Part = self.walked(of_part)
        norms = _merged(part.student), _merged(part.teacher)
        hard_stats = self.hard_stats(part.hard)
        if part.value is not None:
            of_student, of_teacher = _masses(part.student, norms[0]), _masses(part.teacher, norms[1])
            value = divergence(ARRAYS, of_student.T, of_teacher.T, options.beta, (False, False)).value
            share = jnp.exp(of_student if options.beta == 1 else of_teacher)
            value += jnp.sum(jnp.where(share == 0, 0, share * part.value), 0)
            return _KnownSoftmax(value, (norms, (value, value)), None, hard_stats)
        own = vary_alike(norms, self.local)

        def of_mixture(start: Any, z: Array, u: Array) -> Any:
            student, teacher = self.cut(own, start)
            ls, lt = student.log_probs(_final(static, z)), teacher.log_probs(_final(static, u))
            return sums_of(jnp, ls, lt, options.beta)

        value, by_s, by_t = (jnp.sum(x, 0) for x in self.walked(of_mixture))
        return _KnownSoftmax(value, (norms, (by_s, by_t)), None, hard_stats)

    def of_topk(self) -> _KnownSoftmax:
        static, shard, columns = self.static, self.static.shard, _columns(self.static)
        ids, values = (self.tokens.take(x, 0) for x in self.constants[1:3])
        local_ids = vary_alike(shard.local_ids(ids), self.local)

        def of_part(start: Any, z: Array) -> Any:
            own, final = self.cut(local_ids, start), _final(static, z)
            # Ids of other devices are dropped.
            column = jnp.where(own < 0, columns.size, own)
            outside = final.at[jnp.arange(len(own))[:, None], column].set(-jnp.inf, mode="drop")
            others = _softmax(outside, jnp.full_like(own[:, :1], IGNORED), columns)
            return _softmax(final, own, columns), (others.max, others.total), self.hard(start, z)

        softmax, others, hard = self.walked(of_part)
        stats = shard.merged(softmax).complete(ids, shard.vocab)
        rest = _merged(others)
        lse_of_rest = rest.top + rest.log_total
        teacher, log_prob = topk_of(static, ids, values), stats.log_prob
        tail = teacher.rest == "tail"
        value, at_ids, factor = topk_gradient(
            ARRAYS, static.options, teacher, log_prob, lse_of_rest - stats.lse if tail else None
        )
        gradient = XlaTokenGradient(factor, at_ids)
        if tail:
            # If there are no other entries, each of their logits is -inf.
            stats = stats._replace(lse=jnp.where(lse_of_rest == -jnp.inf, 0, lse_of_rest))
        return _KnownSoftmax(value, None, (gradient, XlaTokenStats(stats.lse, log_prob)), self.hard_stats(hard))


def _given(static: JsdStatic, models: Any, needs: Any) -> tuple[list[XlaProjection | XlaLogits], list[Any]]:
    """The models that are given, and which gradients each needs."""
    given = [(source_of(static, x), need) for x, need in zip(models, needs, strict=True) if x is not None]
    return [x for x, _ in given], [need for _, need in given]


def _columns(static: JsdStatic) -> Columns:
    return Columns(0, static.size, end=static.shard.end)


def _final(static: JsdStatic, z: Array) -> Array:
    """The logits for the divergence: -inf for padding."""
    new = _columns(static).new(z)
    z = z if static.options.temperature == 1 else z / static.options.temperature
    return z if new is None else jnp.where(new, z, -jnp.inf)


def _softmax(z: Array, ids: Array, columns: Columns) -> Softmax:
    return Softmax.empty(ids, Wanted(), z.dtype).absorb(z, columns, ids)


def _norm(softmax: Softmax) -> _Norm:
    return _Norm(softmax.max, jnp.log(softmax.total))


def _merged(parts: Any) -> _Norm:
    """The normalisers from all devices' (max, total), [n, P] each."""
    top = jnp.max(parts[0], 0)
    return _Norm(top, jnp.log(jnp.sum(parts[1] * jnp.exp(parts[0] - top[None]), 0)))


def _masses(parts: Any, norm: _Norm) -> Array:
    """The logarithm of each device's share of the probability, [n, P]."""
    return (parts[0] - norm.top[None]) + (jnp.log(parts[1]) - norm.log_total[None])  # type: ignore[no-any-return]


def _ids(tokens: CountedTokens, constants: JsdConstants) -> Array:
    """Each row's label, [P, 1]; the row of one that is out of range has a factor of NaN."""
    return jnp.maximum(tokens.take(constants.labels, 0), 0)[:, None]


def _reduction(static: JsdStatic, tokens: CountedTokens, models: Any, constants: JsdConstants) -> Reduction:
    dtype, labels = source_of(static, models[0]).accumulator, tokens.take(constants.labels, 0)
    mean = static.options.reduction == "mean"
    return Reduction.of(tokens, labels, constants.token_weight, constants.normalizer, mean, dtype)
