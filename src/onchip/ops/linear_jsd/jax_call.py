"""What JAX's walks of linear_jsd and jsd share: the arrays of a call, its plan, and the formulas' functions."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from onchip.ops.linear_jsd import divergence, memory
from onchip.ops.linear_jsd.memory import Head, Problem
from onchip.ops.linear_jsd.spec import Options
from onchip.vocab.xla.loss import TokenLoss
from onchip.vocab.xla.tiles import Columns, Logits, Projection, Softmax, Transform, Wanted, logits_gradient


class Constants(NamedTuple):
    """The arrays of a call that get no gradient."""

    labels: jax.Array  # [T] int32 in [0, V), IGNORED or OUT_OF_RANGE
    indices: jax.Array | None  # [T, K] int32
    values: jax.Array | None  # [T, K]
    token_weight: jax.Array | None  # [T]
    normalizer: jax.Array | None  # []


class Static(NamedTuple):
    """What is known while tracing; a call with another `Static` compiles anew."""

    options: Options
    platform: str
    size: int  # vocabulary entries that count
    topk_kind: str
    topk_rest: str
    shard: Any = None  # of a vocabulary that is split over devices


def plan(static: Static, needs: Any, stash: bool, models: Any, constants: Constants) -> int:
    """Tokens of a chunk."""

    def head(model: Any, needs: Any) -> Head:
        if isinstance(model, Projection):
            return model.problem(needs, static.platform, Transform(), op=static.options.op)
        tokens, device = constants.labels.shape[0], "cpu" if static.platform == "cpu" else "cuda"
        vocab, dtype = (0, "float32") if model is None else (model.shape[1], model.dtype.name)
        return Head(
            tokens, 0, vocab, dtype, device=device, op=static.options.op, grad_hidden=bool(needs), grad_weight=False
        )

    student, teacher = map(head, models, needs)
    topk = 0 if constants.indices is None else constants.indices.shape[1]
    problem = Problem(static.size, student, teacher, topk, static.options.hard_weight > 0, stash)
    return memory.jax_plan(problem, "", static.options.scratch_bytes)


def source_of(static: Static, model: Any) -> Projection | Logits:
    """A model's last layer, in the dtype of sums where products of 16 bits won't do, or its logits."""
    if not isinstance(model, Projection):
        return Logits.of(model)
    if static.platform == "cpu" or model.weight.dtype == jnp.float16:
        # The CPU's 16-bit products round; float16's range is short for a gradient.
        return replace(model, weight=model.weight.astype(model.accumulator))
    return model


def _cross_entropy(z: jax.Array, label: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The cross-entropy of each row, and its gradient."""
    ids, whole, loss = label[:, None], Columns(0, z.shape[1]), TokenLoss()
    stats = Softmax.empty(ids, Wanted(), z.dtype).absorb(z, whole, ids).complete(ids, z.shape[1])
    gradient = loss.gradient(stats, jnp.ones(z.shape[0], z.dtype), z.shape[1])
    return loss.value(stats), logits_gradient(z, None, stats, gradient, ids, whole)


ARRAYS = divergence.Arrays(
    jnp,
    log_softmax=jax.nn.log_softmax,
    logsumexp=lambda x: jax.nn.logsumexp(x, 1, keepdims=True),
    take=lambda x, indices: jnp.take_along_axis(x, indices, 1),
    put=lambda x, indices, values: x.at[jnp.arange(x.shape[0])[:, None], indices].set(values),
    cross_entropy=_cross_entropy,
)
