"""linear_jsd for JAX of a vocabulary that is split over devices: what each does, and what they exchange.

At the ends of beta a divergence is that of the devices' parts of the probability, and those on the devices::

    KL(t || s) = KL(T || S) + sum_r T_r KL(t_r || s_r)

where device r has the part T_r of the teacher's probability, and t_r is the distribution over its own entries.  So both
models' normalisers and the devices' own divergences go with one all-gather, and nothing cancels.  A mixture has no such
rule: the sums of its terms take another product and another all-gather.  Backward computes logits again.

Source of the rule: the chain rule of relative entropy (Cover and Thomas, Elements of Information Theory, 2.5).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from onchip.frontend.jax_call import IGNORED, vary_alike
from onchip.frontend.jax_inputs import is_array
from onchip.ops.linear_jsd.divergence import divergence, sums_of
from onchip.ops.linear_jsd.jax_call import ARRAYS, Constants, Static, plan, source_of
from onchip.ops.linear_jsd.spec import OP, Options
from onchip.vocab.xla.loss import Reduction, TokenLoss
from onchip.vocab.xla.tiles import (
    Columns,
    Logits,
    Projection,
    Softmax,
    Tokens,
    TokenStats,
    Wanted,
    cut_rows,
    logits_gradient,
    select_tokens,
)
from onchip.vocab.xla.walk import by_rows

Array = jax.Array


def of_all_entries(options: Options, given: Mapping[str, Any]) -> Options:
    """The options as of a device's entries; raise for what a split vocabulary doesn't have."""
    if given["teacher_topk"] is not None:
        raise ValueError(
            f"{OP}: a vocabulary that is split over devices has no teacher_topk; pass teacher_logits or the teacher's "
            "head, or give each device its tokens and the whole weight, without axis_name"
        )
    of_weight = 1 if given["weight_layout"] == "hv" else 0
    axes = {"student_weight": of_weight, "teacher_weight": of_weight, "teacher_logits": -1}
    arrays = {name: given[name] for name in axes if is_array(given[name]) and given[name].ndim > max(0, axes[name])}
    sizes = {x.shape[axes[name]] for name, x in arrays.items()}
    if len(sizes) > 1:
        raise ValueError(
            f"{OP}: the student's and the teacher's parts of a vocabulary that is split must be as large; got "
            f"{' and '.join(map(str, sorted(sizes)))} entries; pad both to the same, and pass vocab"
        )
    return replace(options, vocab=None)


class _Norm(NamedTuple):
    """Normalisers of C tokens: top + log_total is the log-sum-exp."""

    top: Array
    log_total: Array

    def log_probs(self, z: Array) -> Array:
        """Of logits [C, size]."""
        # The difference would be NaN where no logit is finite.
        return jnp.where(z == -jnp.inf, z, z - self.top[:, None] - self.log_total[:, None])


class _Part(NamedTuple):
    """What a device knows of C tokens, from its own entries."""

    student: Any  # (max, total) of a `Softmax`, as the next
    teacher: Any
    value: Array | None  # the divergence of its own distributions, at the ends of beta
    hard: Softmax | None


class _Known(NamedTuple):
    """What all devices know of each row, [P]."""

    student: _Norm
    teacher: _Norm
    value: Array  # the divergence
    sums: tuple[Array, Array]  # of the derivatives by both models' log-probabilities
    hard: TokenStats | None


def forward(static: Static, needs: Any, models: Any, constants: Constants) -> tuple[Any, Any]:
    """The loss, and what backward needs."""
    static.shard.refuse_untracked(OP, needs)
    chunk = plan(static, needs, False, models, constants)
    tokens = select_tokens(constants.labels, chunk)
    known = _known(static, chunk, tokens, models, constants)
    options = static.options
    loss = options.soft_factor * known.value
    if known.hard is not None:
        loss += options.hard_weight * TokenLoss().value(known.hard)
    reduction = _reduction(static, tokens, models, constants)
    loss = reduction.reduced(loss, tokens, per_token=options.reduction == "none")
    return loss, (models, constants, known) if any(jax.tree.leaves(needs)) else None


def backward(static: Static, needs: Any, saved: Any, grad_loss: Array) -> Any:
    """The gradients of both models, with logits computed again."""
    models, constants, known = saved
    options, shard = static.options, static.shard
    chunk = plan(static, needs, False, models, constants)
    tokens = select_tokens(constants.labels, chunk)
    scale = _reduction(static, tokens, models, constants).row_scale(grad_loss, tokens)
    ids = _ids(tokens, constants)
    upstream = None if known.hard is None else TokenLoss().gradient(known.hard, jnp.ones_like(scale), shard.vocab)
    local: Any = (models, tokens, known, scale, shard.local_ids(ids), upstream)
    models, tokens, known, scale, ids, upstream = vary_alike(local)
    columns, there = _columns(static), tokens.there()
    sources = [source_of(static, x) for x in models]

    def step(start: Any, z: Array, u: Array) -> tuple[Any, list[Any]]:
        own, by_row, factor, here = cut_rows((known, (ids, upstream), scale, there), start, chunk)
        ls, lt = own.student.log_probs(_final(static, z)), own.teacher.log_probs(_final(static, u))
        soft = options.soft_factor / options.temperature
        made: Any = divergence(ARRAYS, ls, lt, options.beta, sums=own.sums)
        dz, du = soft * made.student, soft * made.teacher
        if own.hard is not None:
            dz += options.hard_weight * logits_gradient(z, None, own.hard, by_row[1], by_row[0], columns)
        # Where, not a factor of 0: what is behind the kept tokens, and padding, may be infinite.
        counts = here[:, None] if columns.end is None else here[:, None] & columns.new(z)
        return (), [jnp.where(counts, g * factor[:, None], 0) for g in (dz, du)]

    _, sums = by_rows(chunk, tokens, sources, needs, (), step)

    def whole(made: Any, source: Projection | Logits) -> Any:
        if isinstance(source, Logits):
            return None if made is None else source.floats(made)
        return made if made.hidden is None else replace(made, hidden=shard.summed(tokens.spread(made.hidden)))

    return tuple(whole(x, source) for x, source in zip(sums, sources, strict=True))


def _known(static: Static, chunk: int, tokens: Tokens, models: Any, constants: Constants) -> _Known:
    options, shard, hard = static.options, static.shard, static.options.hard_weight > 0
    ends = options.beta in (0, 1)
    every_id = _ids(tokens, constants)
    local_models, here, ids = vary_alike((models, tokens, shard.local_ids(every_id)))
    columns, sources = _columns(static), [source_of(static, x) for x in local_models]
    total = sources[0].accumulator

    def walked(step: Any) -> Any:
        rows = here.source.shape[0]
        logits = [jax.ShapeDtypeStruct((rows, static.size), total) for _ in sources]
        empty = jax.eval_shape(lambda *z: step(None, *z), *logits)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty)
        none = [jax.tree.map(lambda _: False, x) if isinstance(x, Projection) else False for x in local_models]
        made, _ = by_rows(chunk, here, sources, none, zeros, lambda start, *z: (step(start, *z), [None, None]))
        return made

    def of_part(start: Any, z: Array, u: Array) -> _Part:
        own = ids if start is None else cut_rows(ids, start, chunk)
        final = _final(static, z), _final(static, u)
        student, teacher = (_softmax(x, jnp.full_like(own, IGNORED), columns) for x in final)
        value = None
        if ends:
            ls, lt = _norm(student).log_probs(final[0]), _norm(teacher).log_probs(final[1])
            value = divergence(ARRAYS, ls, lt, options.beta, (False, False)).value
        parts = (student.max, student.total), (teacher.max, teacher.total)
        return _Part(*parts, value, _softmax(z, own, columns) if hard else None)

    part: _Part = shard.gathered(walked(of_part))
    student, teacher = _merged(part.student), _merged(part.teacher)
    hard_stats = shard.merged(part.hard).complete(every_id, shard.vocab) if hard else None
    if part.value is not None:
        of_student, of_teacher = _masses(part.student, student), _masses(part.teacher, teacher)
        value = divergence(ARRAYS, of_student.T, of_teacher.T, options.beta, (False, False)).value
        share = jnp.exp(of_student if options.beta == 1 else of_teacher)
        value += jnp.sum(jnp.where(share == 0, 0, share * part.value), 0)
        return _Known(student, teacher, value, (value, value), hard_stats)
    norms = vary_alike((student, teacher), local_models)

    def of_mixture(start: Any, z: Array, u: Array) -> Any:
        student, teacher = norms if start is None else cut_rows(norms, start, chunk)
        ls, lt = student.log_probs(_final(static, z)), teacher.log_probs(_final(static, u))
        return sums_of(jnp, ls, lt, options.beta)

    value, by_s, by_t = (jnp.sum(x, 0) for x in shard.gathered(walked(of_mixture)))
    return _Known(student, teacher, value, (by_s, by_t), hard_stats)


def _columns(static: Static) -> Columns:
    return Columns(0, static.size, end=static.shard.end)


def _final(static: Static, z: Array) -> Array:
    """The logits that the divergence is of: -inf for padding."""
    new = _columns(static).new(z)
    z = z if static.options.temperature == 1 else z / static.options.temperature
    return z if new is None else jnp.where(new, z, -jnp.inf)


def _softmax(z: Array, ids: Array, columns: Columns) -> Softmax:
    return Softmax.empty(ids, Wanted(), z.dtype).absorb(z, columns, ids)


def _norm(softmax: Softmax) -> _Norm:
    return _Norm(softmax.max, jnp.log(softmax.total))


def _merged(parts: Any) -> _Norm:
    """Of all devices' (max, total), [n, P] each."""
    top = jnp.max(parts[0], 0)
    return _Norm(top, jnp.log(jnp.sum(parts[1] * jnp.exp(parts[0] - top[None]), 0)))


def _masses(parts: Any, norm: _Norm) -> Array:
    """[n, P]: the logarithm of each device's part of the probability."""
    return (parts[0] - norm.top[None]) + (jnp.log(parts[1]) - norm.log_total[None])  # type: ignore[no-any-return]


def _ids(tokens: Tokens, constants: Constants) -> Array:
    """[P, 1]: each row's label; one out of range has a factor of NaN."""
    return jnp.maximum(tokens.take(constants.labels, 0), 0)[:, None]


def _reduction(static: Static, tokens: Tokens, models: Any, constants: Constants) -> Reduction:
    dtype, labels = source_of(static, models[0]).accumulator, tokens.take(constants.labels, 0)
    mean = static.options.reduction == "mean"
    return Reduction.of(tokens, labels, constants.token_weight, constants.normalizer, mean, dtype)
