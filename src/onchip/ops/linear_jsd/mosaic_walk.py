"""The walks of linear_jsd and jsd on Hopper: XLA's products, and between them the kernels of mosaic_kernels.py.

`jsd` has a kernel for forward and one for backward, over all tokens in place; between them pass a few numbers by token.

`linear_jsd` takes chunks of tokens.  Two products leave both models' logits in float32; one kernel makes losses and
statistics of them, another the gradients by logits, in the products' dtype.  With a top-k teacher one kernel adds up
all entries but the K, and another makes the gradients by these; XLA computes what is by the K entries.  If the
vocabulary is split over devices, each reads its own entries, and for each chunk the devices exchange a few numbers by
token.  Three ways lead on from there:

- "kept": the gradients by logits of all tokens are kept.  Backward multiplies each token's factor into the rows of the
  two other products' operand and result, so that the weight's gradient is one product that rounds once.
- "summed": forward adds each chunk's gradients to float32 sums, for an upstream gradient of 1.
- "again": only the statistics are kept.  Backward takes chunks of the vocabulary, for which it makes the logits of all
  tokens again; so the rows of the weight's gradient are made once, and need no sums.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onchip.frontend.jax_call import IGNORED, Planned, vary_alike
from onchip.frontend.jax_inputs import hopper_refusal
from onchip.kernels.jax_products import product, rounded_product
from onchip.kernels.mosaic.launch import written
from onchip.kernels.mosaic.maths import LN2
from onchip.ops.linear_jsd import memory
from onchip.ops.linear_jsd.divergence import topk_gradient
from onchip.ops.linear_jsd.jax_walk import (
    ARRAYS,
    JsdConstants,
    JsdStatic,
    problem_of,
    reduction_of,
    to_all_tokens,
    topk_of,
)
from onchip.ops.linear_jsd.memory import JsdMosaicPlan
from onchip.vocab.xla.loss import Reduction
from onchip.vocab.xla.tiles import (
    Columns,
    CountedTokens,
    XlaLogits,
    XlaProjection,
    cut,
    cut_rows,
    over_tokens,
    write,
    write_rows,
)

Array = jax.Array


def refusal(static: JsdStatic, models: Any, constants: JsdConstants) -> str | None:
    """Why the kernels can't serve the call, or None."""
    grads = True, static.options.teacher_grad
    needs = [jax.tree.map(lambda _, grad=grad: grad, x) for x, grad in zip(models, grads, strict=True)]
    p = problem_of(static, needs, False, models, constants)
    return memory.mosaic_refusal(p, static.platform) or hopper_refusal()


def plan(static: JsdStatic, needs: Any, models: Any, constants: JsdConstants) -> JsdMosaicPlan:
    """How a call with heads is computed; raises ValueError if the budget is too small."""
    p = problem_of(static, needs, static.options.reduction != "none", models, constants)
    return memory.MOSAIC_PLANNER.plan(p, "", static.options.scratch_bytes)


def forward(static: JsdStatic, needs: Any, models: Any, constants: JsdConstants) -> tuple[Any, Any]:
    heads = any(isinstance(x, XlaProjection) for x in models)
    run = partial(_of_heads if heads else _of_logits, static, needs)
    return jax.custom_batching.sequential_vmap(run)(models, constants)  # type: ignore[no-any-return]


def backward(static: JsdStatic, needs: Any, saved: Any, grad_loss: Any) -> Any:
    return jax.custom_batching.sequential_vmap(partial(_backward, static, needs))(saved, grad_loss)


def _backward(static: JsdStatic, needs: Any, saved: Any, grad_loss: Array) -> Any:
    if not isinstance(saved, Planned):
        return _gradients_of_logits(static, needs, saved, grad_loss)
    arrays, of = saved.arrays, saved.plan
    if of.way == "summed":
        made = jax.tree.map(lambda g: g * grad_loss, arrays)
    else:
        gradients = _gradients_of_kept if of.way == "kept" else _gradients_again
        made = gradients(static, needs, of, arrays, grad_loss)
    made = (*made, None)[:2]  # also of a top-k teacher
    if static.shard is None:
        return made
    return tuple(x and replace(x, hidden=static.shard.summed(x.hidden)) for x in made)


# -------------------------------------------------------------------------------------------------- what kernels take


class _FoundRows(NamedTuple):
    """What the kernels know of rows of logits."""

    value: Array  # [C] float32: the loss
    softmaxes: Any  # JsdSoftmax of both models
    means: Any  # of `terms`
    hard: Any  # JsdHard, without factors by row
    topk: Any = None  # `_AtIds`, for a top-k teacher; then `softmaxes` is what the student's other entries are part of


class _AtIds(NamedTuple):
    """Of each row of logits with a top-k teacher: its gradient by them, without factors by row."""

    ids: Array  # [C, K] int32
    gradient: Array  # [C, K] float32
    factor: Array  # [C] float32: of the other entries' shares of the softmax


def _wants(needs: Any) -> tuple[bool, bool]:
    """Whether each model needs any gradient."""
    student, teacher = (any(jax.tree.leaves(x)) for x in needs)
    return student, teacher


def _topk_of(constants: JsdConstants, rows: Any = lambda x: x) -> tuple[Array, Array] | None:
    """A top-k teacher's ids and values."""
    return None if constants.indices is None else (rows(constants.indices), rows(constants.values))


def _found(
    static: JsdStatic, logits: Any, token: Array, label: Array, topk: Any, wants: tuple[bool, bool]
) -> _FoundRows:
    """Of both models' rows whose `token` isn't negative.  If the vocabulary is split, all devices find the same."""
    from onchip.ops.linear_jsd import mosaic_kernels as kernels  # Pallas takes a second to import

    if topk is not None:
        return _found_topk(static, logits[0], token, label, *topk)
    options, (z, u), shard = static.options, logits, static.shard
    tau, is_hard = options.temperature, options.hard_weight > 0
    y, end = (label, None) if shard is None else (shard.local_ids(label), _end(shard))
    own: Any = None
    student, teacher = (
        kernels.softmax(z, token, y if is_hard else None, tau, end=end), kernels.softmax(u, token, None, tau, end=end)
    )  # fmt: skip
    if is_hard:
        own = _entries(static, z, y[:, None])[:, 0]
    if shard is not None:
        *parts, own = shard.gathered((student, teacher, own))
        student, teacher = (x.merged(tau) for x in parts)
        own = own if own is None else jnp.sum(own, 0)
    softmaxes = student._replace(others=None), teacher
    # At the ends of beta one of the gradients is a plain difference.
    means = wants[0] and options.beta != 0, wants[1] and options.beta != 1
    summed = None if shard is None else partial(_over_devices, shard)
    made = kernels.terms(z, u, token, softmaxes, options, means=means, end=end, summed=summed)
    value, hard = options.soft_factor * made.value, None
    if is_hard:
        loss, hard = _hard(static, student.maximum, student.others, own, label)
        value += loss
    return _FoundRows(jnp.where(token < 0, 0, value), softmaxes, made[1:], hard)


def _found_topk(static: JsdStatic, z: Array, token: Array, label: Array, indices: Array, values: Array) -> _FoundRows:
    from onchip.ops.linear_jsd import mosaic_kernels as kernels

    options, shard = static.options, static.shard
    tau, is_hard = options.temperature, options.hard_weight > 0
    teacher = topk_of(static, indices, values)
    ids, y, end = teacher.indices, label, None
    if shard is not None:
        ids, y, end = shard.local_ids(ids), shard.local_ids(label), _end(shard)
    others = kernels.softmax(z, token, y if is_hard else None, tau, end=end, ids=jnp.sort(ids, 1))
    at_ids, own = _entries(static, z, ids), _entries(static, z, y[:, None])[:, 0]
    if shard is not None:
        others, at_ids, own = shard.gathered((others, at_ids, own))
        others, at_ids, own = others.merged(tau), jnp.sum(at_ids, 0), jnp.sum(own, 0)
    top = jnp.maximum(others.maximum, jnp.max(at_ids, 1))
    below, drop = at_ids - top[:, None], others.maximum - top
    of_others = others.log_sum * LN2 + drop / tau
    log_total = _log_total(jnp.exp(of_others), below / tau)
    tail = teacher.rest == "tail"
    rest_of = (of_others - log_total)[:, None] if tail else None
    value, gradient, factor = topk_gradient(ARRAYS, options, teacher, below / tau - log_total[:, None], rest_of)
    soft, hard = options.soft_factor / tau, None
    value, gradient, factor = options.soft_factor * value, soft * gradient, soft * factor
    if is_hard:
        among = teacher.indices == label[:, None]
        sums = others.others * jnp.exp(drop) + jnp.sum(jnp.where(among, 0, jnp.exp(below)), 1)
        loss, hard = _hard(static, top, sums, own, label)
        value += loss
        p = hard.factor[:, None] * jnp.exp(at_ids - hard.shift[:, None])
        gradient += jnp.where(among, hard.at_label[:, None], p)
    if tail:  # if there are no others, each of their logits is -inf
        softmax = kernels.JsdSoftmax(others.maximum, jnp.where(others.log_sum == -jnp.inf, 0, others.log_sum))
    else:
        softmax = kernels.JsdSoftmax(top, log_total / LN2)
    at = _AtIds(teacher.indices, gradient, factor)
    return _FoundRows(jnp.where(token < 0, 0, value), (softmax,), (None, None), hard, at)


def _entries(static: JsdStatic, z: Array, ids: Array) -> Array:
    """[C, K] float32: these entries of each row; of a split vocabulary 0 for those that other devices have."""
    made = jnp.take_along_axis(z, ids, 1, mode="clip").astype(jnp.float32)
    return made if static.shard is None else jnp.where(ids < 0, 0, made)


def _hard(static: JsdStatic, maximum: Array, others: Array, own: Array, label: Array) -> tuple[Array, Any]:
    """The cross-entropy's part of each row's loss, and what its gradient is made of, from the label's own logit and the
    sum of exp(z - maximum) of all others."""
    from onchip.ops.linear_jsd.mosaic_kernels import JsdHard

    top = jnp.maximum(maximum, own)
    log_total = _log_total(others * jnp.exp(maximum - top), (own - top)[:, None])
    log_prob = (own - top) - log_total
    weight = jnp.full_like(own, static.options.hard_weight)
    return -weight * log_prob, JsdHard(label, log_total + top, weight, weight * jnp.expm1(log_prob))


def _log_total(others: Array, below: Array) -> Array:
    """[C]: the logarithm of a softmax's sum, relative to its largest logit: of the ids', `below` [C, K], and all
    others'."""
    e = jnp.exp(below)
    # log1p where one of the ids leads: there the loss is small, and 1 + others would round it away.
    leads = (jnp.argmax(below, 1)[:, None] == jnp.arange(e.shape[1])[None]) & (below == 0)
    less = jnp.log1p(others + jnp.sum(jnp.where(leads, 0, e), 1))
    return jnp.where(jnp.any(leads, 1), less, jnp.log(others + jnp.sum(e, 1)))


def _end(shard: Any, start: Any = 0) -> Array | None:
    """[1]: how many of a device's entries from `start` on count; None if no device has padding."""
    return None if shard.end is None else (shard.end - start).reshape(1)


def _over_devices(shard: Any, sums: Any) -> Any:
    return jax.tree.map(lambda x: jnp.sum(x, 0), shard.gathered(sums))


def _gradients(
    static: JsdStatic,
    logits: Any,
    token: Array,
    found: _FoundRows,
    scale: Array,
    wants: tuple[bool, bool],
    start: Any = 0,
    **into: Any,
) -> Any:
    """Those by logits, of rows with these factors [C], whose first entry is the device's entry `start`; `into` as of
    the kernel."""
    from onchip.ops.linear_jsd import mosaic_kernels as kernels

    options, hard, shard, (z, u) = static.options, found.hard, static.shard, (*logits, None)[:2]
    soft = options.soft_factor / options.temperature
    both = (soft, soft) if options.beta in (0, 1) else (soft * (1 - options.beta), soft * options.beta)
    # What isn't a plain difference is to base 2.
    both = both[0] * (1 if options.beta == 0 else LN2), both[1] * (1 if options.beta == 1 else LN2)
    scales = both[0] * scale if wants[0] else None, both[1] * scale if wants[1] else None
    if hard is not None:
        label = (hard.label if shard is None else shard.local_ids(hard.label)) - start
        hard = kernels.JsdHard(label, hard.shift, hard.factor * scale, hard.at_label * scale)
    end = None if shard is None else _end(shard, start)
    if found.topk is not None and wants[0]:
        scales = found.topk.factor * scale, None
    made = kernels.gradients(z, u, token, found.softmaxes, found.means, scales, hard, options, end=end, **into)
    if found.topk is None or not wants[0]:
        return made
    ids = (found.topk.ids if shard is None else shard.local_ids(found.topk.ids)) - start
    given = into.get("into", (None,))[0]
    whole: Any = made[0] if given is None else given[...]
    row = jnp.arange(len(token)) + (0 if given is None else into["first"][0])
    # Those that aren't here, or of rows that don't count, are written nowhere: each has a place of its own.
    nowhere = whole.shape[1] + jnp.arange(ids.shape[1])
    here = (ids >= 0) & (ids < z.shape[1]) & (token >= 0)[:, None]
    entries = (found.topk.gradient * scale[:, None]).astype(whole.dtype)
    whole = whole.at[row[:, None], jnp.where(here, ids, nowhere[None])].set(entries, mode="drop", unique_indices=True)
    if given is None:
        return whole, None
    given[...] = whole
    return made


# ----------------------------------------------------------------------------------------------------- existing logits


def _of_logits(static: JsdStatic, needs: Any, models: Any, constants: JsdConstants) -> tuple[Any, Any]:
    label, token = _tokens_in_place(constants)
    found = _found(static, models, token, label, _topk_of(constants), _wants(needs))
    tokens, reduction = _reduction(static, constants, len(label))
    per_token = static.options.reduction == "none"
    loss = reduction.reduced(tokens.take(found.value, 0), tokens, per_token=per_token)
    return loss, (models, constants, found) if any(_wants(needs)) else None


def _gradients_of_logits(static: JsdStatic, needs: Any, saved: Any, grad_loss: Array) -> Any:
    models, constants, found = saved
    label, token = _tokens_in_place(constants)
    tokens, reduction = _reduction(static, constants, len(label))
    scale = tokens.spread(reduction.row_scale(grad_loss, tokens))
    dtypes = tuple(x.dtype for x in models if x is not None)
    return _gradients(static, models, token, found, scale, _wants(needs), dtypes=dtypes)


def _tokens_in_place(constants: JsdConstants) -> tuple[Array, Array]:
    """Each token's label, at least 0, and its number, negative for one that is ignored."""
    labels = constants.labels
    return jnp.maximum(labels, 0), jnp.where(labels == IGNORED, -1, jnp.arange(len(labels), dtype=jnp.int32))


def _reduction(static: JsdStatic, constants: JsdConstants, chunk: int) -> tuple[CountedTokens, Reduction]:
    tokens, _, reduction = reduction_of(static, constants, chunk, jnp.dtype(jnp.float32))
    return tokens, reduction


# --------------------------------------------------------------------------------------------------------------- heads


def _of_heads(static: JsdStatic, needs: Any, models: Any, constants: JsdConstants) -> tuple[Any, Any]:
    of = plan(static, needs, models, constants)
    loss, made = _walk(static, needs, models, constants, of)
    if of.way == "forward":
        return loss, None
    return loss, Planned(made if of.way == "summed" else (models, constants, made), of)


def _walk(
    static: JsdStatic, needs: Any, models: Any, constants: JsdConstants, of: JsdMosaicPlan
) -> tuple[Any, tuple[Any, ...] | _FoundRows | None]:
    """The loss, and what is made for the gradients: their float32 sums; or the gradients by logits without the tokens'
    factors, [P, V] for each model; or what is known of all rows."""
    chunk, wants = of.chunk, _wants(needs)
    tokens, reduction = _reduction(static, constants, chunk)
    number, label = _rows_of(tokens, constants)
    rows, topk = len(number), _topk_of(constants, lambda x: tokens.take(x, 0))
    scale = reduction.row_scale(jnp.ones(()), tokens)
    sources = _sources(models)
    keeps = [of.way == "kept" and want for want in wants]
    kept = [lax.empty((rows, static.size), jnp.bfloat16) if keep else None for keep in keeps]
    sums = [x.zeros(need, rows) if of.way == "summed" else _none_of(x) for x, need in zip(sources, needs, strict=False)]

    def noted(found: _FoundRows) -> Any:
        return found if of.way == "again" else found.value

    def body(start: Any, carry: Any) -> Any:
        notes, kept, sums = carry
        hidden = [source.rows(tokens, start, chunk) for source in sources]
        z = [source.logits(x) if isinstance(source, XlaProjection) else source.floats(x)
             for source, x in zip(sources, hidden, strict=True)]  # fmt: skip
        token, y, factor, teacher = cut_rows((number, label, scale, topk), start, chunk)
        found = _found(static, z, token, y, teacher, wants)
        notes = write_rows(notes, noted(found), start)
        if of.way == "kept":
            first = jnp.asarray(start, jnp.int32).reshape(1)
            arguments = first, z, token, found, jnp.ones_like(factor)
            return notes, written(_into, {"static": static, "wants": wants}, kept, *arguments), sums
        if of.way == "summed":
            made = _gradients(static, z, token, found, factor, wants, dtypes=_DTYPES)
            sums = [source.accumulate(g, by_z, x, tokens, start) if jax.tree.leaves(g) else g
                    for source, g, by_z, x in zip(sources, sums, made, hidden, strict=False)]  # fmt: skip
        return notes, kept, sums

    def known() -> Any:
        z = [jnp.zeros((rows, static.size), jnp.float32 if isinstance(x, XlaProjection) else x.dtype) for x in sources]
        return noted(_found(static, vary_alike(z, models), number, label, topk, wants))

    notes = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(known))
    # What is found is the same on all devices of a split vocabulary.
    axis = None if static.shard is None else static.shard.axis
    carry = vary_alike(notes, (models, constants), axis), *vary_alike((kept, sums), (models, constants))
    notes, kept, sums = over_tokens(tokens, chunk, body, carry, axis)
    values = notes.value if of.way == "again" else notes
    loss = reduction.reduced(values, tokens, per_token=static.options.reduction == "none")
    if of.way == "kept":
        return loss, tuple(_rest_zero(tokens, chunk, kept))
    return loss, tuple(to_all_tokens(tokens, x) for x in sums) if of.way == "summed" else notes


_DTYPES = jnp.bfloat16, jnp.bfloat16  # of gradients by logits


def _sources(models: Any) -> list[XlaProjection | XlaLogits]:
    return [x if isinstance(x, XlaProjection) else XlaLogits.of(x) for x in models if x is not None]


def _rows_of(tokens: CountedTokens, constants: JsdConstants) -> tuple[Array, Array]:
    """Each row's number, negative for one that holds no token, and its label, at least 0."""
    number = jnp.arange(len(tokens.source), dtype=jnp.int32)
    return jnp.where(tokens.there(), number, -1), jnp.maximum(tokens.take(constants.labels, 0), 0)


def _into(
    refs: Any, first: Any, z: Any, token: Any, found: Any, scale: Any, *, static: JsdStatic, wants: tuple[bool, bool]
) -> None:
    _gradients(static, z, token, found, scale, wants, into=refs, first=first)


def _rest_zero(tokens: CountedTokens, chunk: int, kept: Any) -> Any:
    """What is kept, with zeros in the chunks that have no token: products read them."""

    def chunk_of_zeros(i: Any, kept: Any) -> Any:
        def zeros(x: Array) -> Any:
            return vary_alike(jnp.zeros((chunk, x.shape[1]), x.dtype), x)

        return jax.tree.map(lambda x: write_rows(x, zeros(x), i * chunk), kept)

    chunks = (tokens.number + chunk - 1) // chunk
    return lax.fori_loop(chunks, len(tokens.source) // chunk, chunk_of_zeros, kept)


def _gradients_of_kept(static: JsdStatic, needs: Any, of: JsdMosaicPlan, saved: Any, grad_loss: Array) -> Any:
    models, constants, kept = saved
    tokens, reduction = _reduction(static, constants, of.chunk)
    scale = reduction.row_scale(grad_loss, tokens)
    made = [_none_of(x) if g is None else _gradients_of_head(x, need, tokens, scale, g)
            for x, need, g in zip(models, needs, kept, strict=True)]  # fmt: skip
    return tuple(made)


def _gradients_again(static: JsdStatic, needs: Any, of: JsdMosaicPlan, saved: Any, grad_loss: Array) -> Any:
    models, constants, found = saved
    wants = _wants(needs)
    tokens, reduction = _reduction(static, constants, of.chunk)
    number, _ = _rows_of(tokens, constants)
    scale = reduction.row_scale(grad_loss, tokens)
    sources = _sources(models)
    hidden = [x.rows(tokens, 0, len(number)) if isinstance(x, XlaProjection) else None for x in sources]
    made = [_empty(x, need, len(number)) for x, need in zip(sources, needs, strict=False)]

    def step(start: Any, size: int, hidden: Any, made: Any) -> Any:
        columns = Columns(start, size)
        parts = [x.part(columns) if isinstance(x, XlaProjection) else XlaLogits(cut(x.bits, start, size, 1), x.dtype)
                 for x in sources]  # fmt: skip
        z = [part.logits(rows) if isinstance(part, XlaProjection) else part.floats(part.rows(tokens, 0, len(number)))
             for part, rows in zip(parts, hidden, strict=True)]  # fmt: skip
        by_z = _gradients(static, z, number, found, scale, wants, start, dtypes=_DTYPES)
        return [x if g is None else _with_columns(x, part, rows, g, start)
                for x, part, rows, g in zip(made, parts, hidden, by_z, strict=False)]  # fmt: skip

    whole, last = memory.vocab_chunks(static.size, of.columns)
    made = vary_alike(made, (models, constants, scale))
    made = lax.fori_loop(0, whole, lambda i, made: step(i * of.columns, of.columns, hidden, made), made)
    if last:
        # One after the other: the memory is there once.
        hidden, made = lax.optimization_barrier((hidden, made)) if whole else (hidden, made)
        made = step(whole * of.columns, last, hidden, made)
    return tuple(to_all_tokens(tokens, x) for x in made)


def _empty(source: Any, needs: Any, rows: int) -> Any:
    """The gradients before any chunk of the vocabulary: hidden's a sum, the others to be written."""
    if not isinstance(source, XlaProjection):
        return None
    made = source.zeros(replace(needs, weight=False), rows)
    return replace(made, weight=lax.empty(source.weight.shape, source.weight.dtype) if needs.weight else None)


def _with_columns(made: XlaProjection, part: Any, rows: Array, g: Array, start: Any) -> XlaProjection:
    """The gradients with those by a chunk of the vocabulary, from the gradients by its logits [P, C]."""
    hidden, weight, bias, axis = made.hidden, made.weight, made.bias, part.vocab_axis
    if hidden is not None:
        hidden += product(g, part.weight, (1, axis))
    if weight is not None:
        weight = write(weight, _by_weight(g, rows, axis), start, axis)
    if bias is not None:
        bias = write(bias, jnp.sum(g, 0, dtype=bias.dtype), start)
    return replace(made, hidden=hidden, weight=weight, bias=bias)


def _by_weight(g: Array, rows: Array, axis: int) -> Array:
    """The weight's gradient, rounded once."""
    return rounded_product(g, rows, (0, 0)) if axis == 0 else rounded_product(rows, g, (0, 0))


def _none_of(model: Any) -> Any:
    """No gradients."""
    return replace(model, hidden=None, weight=None, bias=None) if isinstance(model, XlaProjection) else None


def _gradients_of_head(
    layer: XlaProjection, needs: Any, tokens: CountedTokens, scale: Array, g: Array
) -> XlaProjection:
    """From the gradients by logits [P, V] without the tokens' factors, `scale`."""
    hidden = weight = bias = None
    if needs.hidden:
        hidden = tokens.spread(product(g, layer.weight, (1, layer.vocab_axis)) * scale[:, None])
    if needs.weight:
        rows = layer.rows(tokens, 0, len(scale))
        rows = (rows * scale[:, None]).astype(rows.dtype)
        weight = _by_weight(g, rows, layer.vocab_axis)
    if needs.bias:
        bias = jnp.sum(g.astype(jnp.float32) * scale[:, None], 0)
    return replace(layer, hidden=hidden, weight=weight, bias=bias)
