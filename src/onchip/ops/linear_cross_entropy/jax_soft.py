"""linear_cross_entropy for JAX with soft labels: checks, plan and derivatives.  What computes it is in
`onchip.vocab.xla.soft` and `onchip.vocab.mosaic.soft`."""

import math
from collections.abc import Callable, Mapping
from types import ModuleType
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
    check_product_dtype,
    checked_numbers,
    dtype_of,
    options_of,
    per_token_constant,
    platform,
)
from onchip.frontend.jax_labels import check_label_arrays, parts_of
from onchip.frontend.jax_types import LossStats, WithStats
from onchip.frontend.options import check_head, check_shift, shapes_of
from onchip.frontend.topk import TopK
from onchip.ops.linear_cross_entropy.spec import OP, Options
from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import memory as mosaic_memory
from onchip.vocab.mosaic import soft as mosaic_soft
from onchip.vocab.xla import memory, soft
from onchip.vocab.xla.loss import Outputs, TokenLoss
from onchip.vocab.xla.parallel import refuse_typed_sharding
from onchip.vocab.xla.soft import SoftLabels
from onchip.vocab.xla.tiles import Projection, Transform

MODULES: dict[str, ModuleType] = {"xla": soft, "mosaic_gpu": mosaic_soft}
Refusals = Callable[[Problem, str], Mapping[str, str | None]]


def run(given: Mapping[str, Any], name: str, refusals: Refusals) -> jax.Array | WithStats:
    """What `linear_cross_entropy` returns of its arguments.

    `name` is the one that the target was given by; `refusals` says of each backend of a platform why it can't serve a
    call, or None.
    """
    hidden, weight, bias, target = (given[x] for x in ("hidden", "weight", "bias", name))
    arrays = check_label_arrays(OP, given, name)
    check_product_dtype(OP, arrays)
    vocab = check_head(OP, shapes_of(arrays), layout=given["weight_layout"])
    topk.check_label_shapes(OP, name, shapes_of(arrays), "hidden", vocab)
    total = hidden.size // hidden.shape[-1]
    options = options_of(OP, Options, given, total * vocab)
    topk.refuse_options(OP, options)
    check_shift(OP, options.shift, hidden.shape[:-1], "hidden of shape [..., S, H]")
    if options.strategy == "stash":
        raise ValueError(f"{OP}: soft labels are computed by strategy 'recompute'; got 'stash'; pass 'auto'")
    dtype = accumulator(dtype_of(hidden))
    check_normalizer(OP, given["normalizer"], options.reduction)
    numbers = checked_numbers(OP, options, given, dtype)
    refuse_typed_sharding(OP, arrays)
    shape, token_weight = hidden.shape[:-1], given["token_weight"]
    if options.shift:
        hidden, target = hidden[..., :-1, :], _after_the_first(target)
        token_weight = None if token_weight is None else token_weight[..., 1:]
        if numbers["temperature"] is not None and numbers["temperature"].ndim:
            numbers["temperature"] = numbers["temperature"].reshape(shape)[..., :-1].reshape(-1)
        total = math.prod(hidden.shape[:-1])
    projection = Projection.of(hidden, weight, bias, given["weight_layout"])
    constants = SoftLabels(
        *parts_of(OP, given, name, target, total, vocab, dtype),
        Transform(*(numbers[x] for x in Transform._fields)),
        TokenLoss(*(numbers[x] for x in TokenLoss._fields)),
        per_token_constant(token_weight, dtype),
        as_constant(given["normalizer"], dtype),
        as_constant(given["class_weight"], dtype),
    )
    projection, constants = vary_alike((projection, jax.lax.stop_gradient(constants)))
    static = Static(options, platform())
    problem = _problem(static, projection, constants, Projection(True, True, bias is not None))
    static = static._replace(backend=choose_backend(OP, given["backend"], refusals(problem, static.platform)))
    if total == 0:
        made = Outputs.of_nothing(options.reduction, options.return_stats, dtype)
    else:
        made = callable_here(_op)(static, projection, constants)
    found = made.shaped(hidden.shape[:-1])
    return _with_the_last(found, shape[-1] - hidden.shape[-2]) if options.shift else found


def _with_the_last(made: Any, number: int) -> Any:
    """What a function returns with so many positions more at the end of each sequence, which cost nothing."""

    def filled(x: jax.Array, fill: int = 0) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, number)], constant_values=fill) if x.ndim else x

    if not isinstance(made, tuple):
        return filled(made)
    loss, stats = made
    return filled(loss), LossStats(*map(filled, stats))._replace(argmax=filled(stats.argmax, -1))


def _after_the_first(target: Any) -> Any:
    """Soft labels without those of each sequence's first position, which nothing predicts."""
    if isinstance(target, TopK):
        return target._replace(indices=target.indices[..., 1:, :], values=target.values[..., 1:, :])
    return target[..., 1:, :]


def _plan(problem: Problem, static: Static) -> Any:
    if static.backend == "mosaic_gpu":
        return mosaic_memory.plan(problem, "recompute", static.options.scratch_bytes)
    strategy = "stash" if problem.labels else "recompute" if problem.any_grad else "forward"
    return memory.plan(problem, strategy, static.options.scratch_bytes)


def _problem(static: Static, projection: Projection, constants: SoftLabels, needs: Projection) -> Problem:
    return projection.problem(
        needs,
        static.platform,
        constants.transform,
        ids=0 if constants.ids is None else constants.ids.shape[1],
        labels=constants.probs.dtype.name if constants.ids is None else "",
        stats=static.options.return_stats,
        smoothing=constants.loss.label_smoothing is not None,
        class_weight=constants.class_weight is not None,
        op=OP,
    )


def _forward(
    static: Static, needs: Projection, projection: Projection, constants: SoftLabels
) -> tuple[Outputs, Planned | None]:
    problem, options = _problem(static, projection, constants, needs), static.options
    config = _plan(problem, static)

    def forward(projection: Projection, constants: SoftLabels) -> Any:
        how = {"reduction": options.reduction, "return_stats": options.return_stats}
        return MODULES[static.backend].forward(projection, constants, config, **how)

    made, saved = _each(static, forward)(projection, constants)
    return made, Planned((projection, saved), config) if problem.any_grad else None


def _backward(static: Static, needs: Projection, saved: Planned, cotangents: Outputs) -> Projection:
    projection, kept = saved.arrays
    upstream = jnp.zeros(()) if cotangents.loss is None else cotangents.loss

    def backward(projection: Projection, kept: Any, upstream: jax.Array) -> Any:
        return MODULES[static.backend].backward(projection, needs, kept, saved.plan, upstream)

    made: Projection = _each(static, backward)(projection, kept, upstream)
    return made


def _each(static: Static, run: Any) -> Any:
    """Under vmap kernels serve one element after the other."""
    return jax.custom_batching.sequential_vmap(run) if static.backend == "mosaic_gpu" else run


_op = with_gradients(OP, _forward, _backward)
