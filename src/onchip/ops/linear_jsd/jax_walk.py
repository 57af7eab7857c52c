"""The walk of linear_jsd and jsd in plain JAX: chunks of tokens, for which divergence.py computes losses and gradients.

If the vocabulary is split over devices, each has its own entries of every row.  `arrays_of` has the functions of
divergence.py for such rows: their softmaxes and sums are over all devices, which exchange a few numbers for each token
of a chunk.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from onchip.frontend.jax_call import IGNORED
from onchip.frontend.topk import TopK
from onchip.ops.linear_jsd import JsdOptions, memory
from onchip.ops.linear_jsd import divergence as formulas
from onchip.ops.linear_jsd.memory import Head, JsdProblem
from onchip.vocab.xla.loss import Reduction
from onchip.vocab.xla.parallel import Shard
from onchip.vocab.xla.tiles import (
    Columns,
    CountedTokens,
    Softmax,
    Wanted,
    XlaLogits,
    XlaProjection,
    cut_rows,
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


def arrays_of(shard: Shard | None, size: int) -> formulas.Arrays:
    """The functions that formulas need, for rows of logits of which this device has `size` entries."""
    if shard is None:
        return ARRAYS
    columns = Columns(0, size, end=shard.end)

    def softmax(x: Array) -> Softmax:
        no_ids = jnp.full((len(x), 1), IGNORED, jnp.int32)
        return shard.joined(Softmax.empty(no_ids, Wanted(), x.dtype).absorb(x, columns, no_ids))

    def log_softmax(x: Array) -> Array:
        return log_softmax_by(softmax(x), x)

    def log_softmax_by(of_row: Softmax, x: Array) -> Array:
        new = columns.new(x)
        # Padding has no probability.  The difference would be NaN where no logit is finite.
        nothing = (x == -jnp.inf) if new is None else (x == -jnp.inf) | ~new
        return jnp.where(nothing, -jnp.inf, x - of_row.max[:, None] - jnp.log(of_row.total)[:, None])

    def labelled(x: Array, ids: Array) -> tuple[Array, Array, Array]:
        """In one exchange, where the functions above and below would take three."""
        own = shard.local_ids(ids)
        part = Softmax.empty(own, Wanted(), x.dtype).absorb(x, columns, own)
        others = put(jnp.exp(log_softmax_by(part._replace(total=jnp.ones_like(part.total)), x)), ids, 0)
        parts, sums = shard.gathered((shard.of_all(part), jnp.sum(others, 1)))
        of_row = shard.merged(parts)
        sums = jnp.sum(sums * jnp.exp(parts.max - of_row.max[None]), 0) / of_row.total
        at_label = of_row.picked - of_row.max[:, None] - jnp.log(of_row.total)[:, None]
        return log_softmax_by(of_row, x), at_label, sums[:, None]

    def logsumexp(x: Array) -> Array:
        of_row = softmax(x)
        return (of_row.max + jnp.log(of_row.total))[:, None]

    def take(x: Array, ids: Array) -> Array:
        own = shard.local_ids(ids)
        return over_devices(jnp.where(own < 0, 0, jnp.take_along_axis(x, own, 1, mode="clip")))

    def put(x: Array, ids: Array, values: Any) -> Array:
        own = shard.local_ids(ids)
        return x.at[jnp.arange(len(x))[:, None], jnp.where(own < 0, size, own)].set(values, mode="drop")

    def over_devices(x: Array) -> Array:
        return jnp.sum(shard.gathered(x), 0)

    return ARRAYS._replace(
        log_softmax=log_softmax,
        logsumexp=logsumexp,
        take=take,
        put=put,
        sum=lambda x: over_devices(jnp.sum(x, 1)),
        labelled=labelled,
        of_few=ARRAYS,
    )


ARRAYS = formulas.Arrays(
    jnp,
    log_softmax=jax.nn.log_softmax,
    logsumexp=lambda x: jax.nn.logsumexp(x, 1, keepdims=True),
    take=lambda x, indices: jnp.take_along_axis(x, indices, 1),
    put=lambda x, indices, values: x.at[jnp.arange(x.shape[0])[:, None], indices].set(values),
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
    stash = stashes(static, needs)
    loss, gradients = _walk(static, needs if stash else none_of(models), models, constants, None, stash)
    if stash:
        return loss, gradients
    return loss, (models, constants) if any(jax.tree.leaves(needs)) else None


def backward(static: JsdStatic, needs: Any, saved: Any, grad_loss: Any) -> Any:
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
    given = [(source_of(static, x), need) for x, need in zip(models, needs, strict=True) if x is not None]
    sources, wanted = [x for x, _ in given], [need for _, need in given]
    total, shard = sources[0].accumulator, static.shard
    of, axis = arrays_of(shard, static.size), None if shard is None else shard.axis
    columns = Columns(0, static.size, end=None if shard is None else shard.end)
    tokens, labels, reduction = reduction_of(static, constants, chunk, total)
    row_scale = reduction.row_scale(jnp.ones(()) if grad_loss is None else grad_loss, tokens)

    def step(start: jax.Array, own: jax.Array, teacher: Any = None) -> tuple[jax.Array, list[Any]]:
        source, label, scale, there = cut_rows((tokens.source, labels, row_scale, tokens.there()), start, chunk)

        def take(x: jax.Array) -> jax.Array:
            return x.at[source].get(mode="fill", fill_value=0)

        def scaled(g: jax.Array | None) -> Any:
            if g is None:
                return None
            # Where, not a factor of 0: what is behind the kept tokens may be infinite, and a factor NaN.
            new = columns.new(g)
            return jnp.where(there[:, None] if new is None else there[:, None] & new, g * scale[:, None], 0)

        if constants.indices is not None:
            teacher = topk_of(static, take(constants.indices), take(constants.values))
        value, *gradients = formulas.rows(of, static.options, own, teacher, jnp.maximum(label, 0))
        return jnp.where(there, value, 0), [scaled(g) for g in gradients]

    zeros = jnp.zeros(tokens.source.shape, total)
    losses, sums = by_rows(chunk, tokens, sources, wanted, zeros, step, axis)
    loss = reduction.reduced(losses, tokens, per_token=static.options.reduction == "none")
    made = [source.floats(g) if isinstance(source, XlaLogits) and g is not None else to_all_tokens(tokens, g, shard)
            for g, source in zip(sums, sources, strict=True)]  # fmt: skip
    return loss, (*made, *[None] * (2 - len(made)))


def reduction_of(
    static: JsdStatic, constants: JsdConstants, chunk: int, total: Any
) -> tuple[CountedTokens, Array, Reduction]:
    """The tokens in chunks of this many, their labels, and how the loss is made of theirs in the dtype `total`."""
    tokens, mean = select_tokens(constants.labels, chunk), static.options.reduction == "mean"
    labels = tokens.take(constants.labels, 0)
    return tokens, labels, Reduction.of(tokens, labels, constants.token_weight, constants.normalizer, mean, total)


def to_all_tokens(tokens: CountedTokens, made: Any, shard: Shard | None = None) -> Any:
    """A layer's gradients with zeros for ignored tokens; hidden's is summed over the devices of a `shard`."""
    if made is None or made.hidden is None:
        return made
    hidden = tokens.spread(made.hidden)
    return replace(made, hidden=hidden if shard is None else shard.summed(hidden))


def topk_of(static: JsdStatic, ids: Array, values: Array) -> TopK[Array]:
    """Of rows; what is out of range is NaN."""
    words: Any = (static.topk_kind, static.topk_rest)
    return TopK(jnp.maximum(ids, 0), jnp.where(ids < 0, jnp.nan, values), *words)
