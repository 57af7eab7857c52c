"""cross_entropy for JAX with soft labels: checks, plan and derivatives.  What computes it is in
`onchip.vocab.xla.soft`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from onchip.core.backends import choose_backend
from onchip.frontend import topk
from onchip.frontend.jax_call import Planned, Static, callable_here, vary_alike, with_gradients
from onchip.frontend.jax_inputs import (
    accumulator,
    as_constant,
    check_normalizer,
    checked_numbers,
    dtype_of,
    options_of,
    per_token_constant,
    platform,
)
from onchip.frontend.jax_labels import check_label_arrays, parts_of
from onchip.frontend.jax_types import WithStats
from onchip.frontend.options import check_logits, shapes_of
from onchip.ops.cross_entropy.spec import OP, Options
from onchip.vocab.chunks import Config
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.xla import soft
from onchip.vocab.xla.loss import Outputs, TokenLoss
from onchip.vocab.xla.soft import SoftLabels
from onchip.vocab.xla.tiles import Logits, Transform


def run(given: Mapping[str, Any], name: str, refusals: Mapping[str, str | None]) -> jax.Array | WithStats:
    """What `cross_entropy` returns of its arguments.

    `name` is the one that the target was given by; `refusals` names all backends.
    """
    logits, target = given["logits"], given[name]
    shapes = shapes_of(check_label_arrays(OP, given, name))
    check_logits(OP, shapes)
    vocab = logits.shape[-1]
    topk.check_label_shapes(OP, name, shapes, "logits", vocab)
    options = options_of(OP, Options, given, logits.size)
    topk.refuse_options(OP, options)
    topk.refuse_shift(OP, options.shift, name)
    dtype = accumulator(dtype_of(logits))
    check_normalizer(OP, given["normalizer"], options.reduction)
    numbers = checked_numbers(OP, options, given, dtype)
    choose_backend(OP, given["backend"], refusals)
    total = logits.size // vocab
    rows = jnp.asarray(logits).reshape(total, vocab)
    constants = SoftLabels(
        *parts_of(OP, given, name, target, total, vocab, dtype),
        Transform(*(numbers[x] for x in Transform._fields)),
        TokenLoss(*(numbers[x] for x in TokenLoss._fields)),
        per_token_constant(given["token_weight"], dtype),
        as_constant(given["normalizer"], dtype),
        as_constant(given["class_weight"], dtype),
    )
    rows, constants = vary_alike((rows, jax.lax.stop_gradient(constants)))
    none = Outputs.of_nothing(options.reduction, options.return_stats, dtype)
    made = none if total == 0 else callable_here(_op)(Static(options, platform()), rows, constants)
    return made.shaped(logits.shape[:-1])


def _forward(static: Static, needs: bool, logits: jax.Array, constants: SoftLabels) -> tuple[Outputs, Planned | None]:
    tokens, vocab = logits.shape
    problem = row_memory.Problem(
        tokens=tokens,
        vocab=vocab,
        dtype=logits.dtype.name,
        device="cpu" if static.platform == "cpu" else "cuda",
        grad=needs,
        softcap=constants.transform.softcap is not None,
        smoothing=constants.loss.label_smoothing is not None,
        class_weight=constants.class_weight is not None,
        stats=static.options.return_stats,
        xla=True,
        ids=0 if constants.ids is None else constants.ids.shape[1],
        labels=constants.probs.dtype.name if constants.ids is None else "",
    )
    config = Config("forward", row_memory.plan(problem, "", static.options.scratch_bytes), vocab)
    reduction, return_stats = static.options.reduction, static.options.return_stats
    made, saved = soft.forward(Logits.of(logits), constants, config, reduction=reduction, return_stats=return_stats)
    return made, Planned((logits, saved), config) if needs else None


def _backward(static: Static, needs: bool, saved: Planned, cotangents: Outputs) -> jax.Array:
    """The gradient of the logits [T, V] in their dtype."""
    logits, kept = saved.arrays
    upstream = jnp.zeros(()) if cotangents.loss is None else cotangents.loss
    made: jax.Array = soft.backward(Logits.of(logits), needs, kept, saved.plan, upstream)
    return made


_op = with_gradients(OP, _forward, _backward)
