"""The walks of linear_jsd and jsd on Hopper: XLA's products, and between them the kernels of mosaic_kernels.py.

`jsd` has a kernel for forward and one for backward, over all tokens in place; between them pass a few numbers by token.

`linear_jsd` takes chunks of tokens.  Two products leave both models' logits in float32; one kernel makes losses and
statistics of them, another the gradients by logits, in the products' dtype.  If there is room these are *kept* for all
tokens: backward multiplies each token's factor into the rows of the two other products' operand and result, so that the
weight's gradient is one product that rounds once.  Otherwise forward adds each chunk's gradients to float32 sums, for
an upstream gradient of 1; or, with a loss for each token, backward does it, with logits that are computed again.
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
from onchip.ops.linear_jsd.jax_walk import JsdConstants, JsdStatic, problem_of
from onchip.ops.linear_jsd.memory import JsdMosaicPlan
from onchip.vocab.xla.loss import Reduction
from onchip.vocab.xla.tiles import (
    CountedTokens,
    XlaLogits,
    XlaProjection,
    cut_rows,
    over_tokens,
    select_tokens,
    write_rows,
)

Array = jax.Array


def refusal(static: JsdStatic, models: Any, constants: JsdConstants) -> str | None:
    """Why the kernels can't serve the call, or None."""
    if static.shard is not None:
        return "it doesn't take a split vocabulary; pass backend='xla'"
    grads = True, static.options.teacher_grad
    needs = [jax.tree.map(lambda _, grad=grad: grad, x) for x, grad in zip(models, grads, strict=True)]
    p = problem_of(static, needs, False, models, constants)
    return memory.mosaic_refusal(p, static.platform) or hopper_refusal()


def plan(static: JsdStatic, needs: Any, models: Any, constants: JsdConstants) -> JsdMosaicPlan:
    """How a call with heads is computed; raises ValueError if the budget is too small."""
    p = problem_of(static, needs, static.options.reduction != "none", models, constants)
    return memory.MOSAIC_PLANNER.plan(p, "", static.options.scratch_bytes)  # type: ignore[no-any-return]


def forward(static: JsdStatic, needs: Any, models: Any, constants: JsdConstants) -> tuple[Any, Any]:
    """The loss, and what backward needs."""
    run = partial(_of_heads if _has_heads(models) else _of_logits, static, needs)
    return jax.custom_batching.sequential_vmap(run)(models, constants)  # type: ignore[no-any-return]


def backward(static: JsdStatic, needs: Any, saved: Any, grad_loss: Any) -> Any:
    return jax.custom_batching.sequential_vmap(partial(_backward, static, needs))(saved, grad_loss)


def _backward(static: JsdStatic, needs: Any, saved: Any, grad_loss: Array) -> Any:
    if not isinstance(saved, Planned):
        return _gradients_of_logits(static, needs, saved, grad_loss)
    arrays, of = saved.arrays, saved.plan
    if of is None:
        return jax.tree.map(lambda g: g * grad_loss, arrays)
    if of.kept:
        return _gradients_of_kept(static, needs, of, arrays, grad_loss)
    return _walk(static, needs, *arrays, of, grad_loss)[1]


def _has_heads(models: Any) -> bool:
    return any(isinstance(x, XlaProjection) for x in models)


# -------------------------------------------------------------------------------------------------- what kernels take


class _Found(NamedTuple):
    """What the kernels know of rows of logits."""

    value: Array  # [C] float32: the loss
    softmaxes: Any  # JsdSoftmax of both models
    means: Any  # of `terms`
    hard: Any  # JsdHard, without factors by row


def _wants(needs: Any) -> tuple[bool, bool]:
    """Whether each model needs any gradient."""
    student, teacher = (any(jax.tree.leaves(x)) for x in needs)
    return student, teacher


def _found(static: JsdStatic, z: Array, u: Array, token: Array, label: Array, wants: tuple[bool, bool]) -> _Found:
    """Of rows whose `token` isn't negative."""
    from onchip.ops.linear_jsd import mosaic_kernels as kernels  # Pallas takes a second to import

    options = static.options
    tau, is_hard = options.temperature, options.hard_weight > 0
    student = kernels.softmax(z, token, label if is_hard else None, tau)
    softmaxes = student._replace(others=None), kernels.softmax(u, token, None, tau)
    # At the ends of beta one of the gradients is a plain difference.
    means = wants[0] and options.beta != 0, wants[1] and options.beta != 1
    made = kernels.terms(z, u, token, softmaxes, options, means=means)
    value, hard = options.soft_factor * made.value, None
    if is_hard:
        own = jnp.take_along_axis(z, label[:, None], 1, mode="clip")[:, 0].astype(jnp.float32)
        top = jnp.maximum(student.maximum, own)
        rest = student.others * jnp.exp(student.maximum - top)
        # log1p where the label leads: there the loss is small, and 1 + others would round it away.
        log_total = jnp.where(own >= top, jnp.log1p(rest), jnp.log(rest + jnp.exp(own - top)))
        log_prob = (own - top) - log_total
        value -= options.hard_weight * log_prob
        weight = jnp.full_like(value, options.hard_weight)
        hard = kernels.JsdHard(label, log_total + top, weight, weight * jnp.expm1(log_prob))
    return _Found(jnp.where(token < 0, 0, value), softmaxes, made[1:], hard)


def _gradients(
    static: JsdStatic,
    z: Array,
    u: Array,
    token: Array,
    found: _Found,
    scale: Array,
    wants: tuple[bool, bool],
    **into: Any,
) -> Any:
    """Those by logits, of rows with these factors [C]; `into` as of the kernel."""
    from onchip.ops.linear_jsd import mosaic_kernels as kernels

    options, hard = static.options, found.hard
    soft = options.soft_factor / options.temperature
    both = (soft, soft) if options.beta in (0, 1) else (soft * (1 - options.beta), soft * options.beta)
    # What isn't a plain difference is to base 2.
    both = both[0] * (1 if options.beta == 0 else LN2), both[1] * (1 if options.beta == 1 else LN2)
    scales = tuple(x * scale if want else None for x, want in zip(both, wants, strict=True))
    if hard is not None:
        hard = hard._replace(factor=hard.factor * scale, at_label=hard.at_label * scale)
    return kernels.gradients(z, u, token, found.softmaxes, found.means, scales, hard, options, **into)


# ----------------------------------------------------------------------------------------------------- existing logits


def _of_logits(static: JsdStatic, needs: Any, models: Any, constants: JsdConstants) -> tuple[Any, Any]:
    label, token = _tokens_in_place(constants)
    found = _found(static, *models, token, label, _wants(needs))
    tokens, reduction = _reduction(static, constants, len(label))
    per_token = static.options.reduction == "none"
    loss = reduction.reduced(tokens.take(found.value, 0), tokens, per_token=per_token)
    return loss, (models, constants, found) if any(_wants(needs)) else None


def _gradients_of_logits(static: JsdStatic, needs: Any, saved: Any, grad_loss: Array) -> Any:
    models, constants, found = saved
    label, token = _tokens_in_place(constants)
    tokens, reduction = _reduction(static, constants, len(label))
    scale = tokens.spread(reduction.row_scale(grad_loss, tokens))
    dtypes = tuple(x.dtype for x in models)
    return _gradients(static, *models, token, found, scale, _wants(needs), dtypes=dtypes)


def _tokens_in_place(constants: JsdConstants) -> tuple[Array, Array]:
    """Each token's label, at least 0, and its number, negative for one that is ignored."""
    labels = constants.labels
    return jnp.maximum(labels, 0), jnp.where(labels == IGNORED, -1, jnp.arange(len(labels), dtype=jnp.int32))


def _reduction(static: JsdStatic, constants: JsdConstants, chunk: int) -> tuple[CountedTokens, Reduction]:
    tokens = select_tokens(constants.labels, chunk)
    labels, mean = tokens.take(constants.labels, 0), static.options.reduction == "mean"
    of_call = constants.token_weight, constants.normalizer, mean, jnp.dtype(jnp.float32)
    return tokens, Reduction.of(tokens, labels, *of_call)


# --------------------------------------------------------------------------------------------------------------- heads


def _of_heads(static: JsdStatic, needs: Any, models: Any, constants: JsdConstants) -> tuple[Any, Any]:
    of = plan(static, needs, models, constants)
    needed, stash = any(_wants(needs)), static.options.reduction != "none"
    if not needed or of.kept or stash:
        loss, made = _walk(static, needs, models, constants, of, None)
        if of.kept and needed:
            return loss, Planned((models, constants, made), of)
        return loss, Planned(made, None) if needed else None
    nothing = jax.tree.map(lambda _: False, models)
    return _walk(static, nothing, models, constants, of, None)[0], Planned((models, constants), of)


def _walk(
    static: JsdStatic, needs: Any, models: Any, constants: JsdConstants, of: JsdMosaicPlan, grad_loss: Any
) -> tuple[Any, Any]:
    """The loss, and what is made for the gradients: their float32 sums, for `grad_loss` or 1, or what is kept, the
    gradients by logits without the tokens' factors, [P, V] for each model."""
    chunk, wants, options = of.chunk, _wants(needs), static.options
    tokens, reduction = _reduction(static, constants, chunk)
    rows, there = len(tokens.source), tokens.there()
    label = jnp.maximum(tokens.take(constants.labels, 0), 0)
    number = jnp.where(there, jnp.arange(rows, dtype=jnp.int32), -1)
    scale = reduction.row_scale(jnp.ones(()) if grad_loss is None else grad_loss, tokens)
    sources = [x if isinstance(x, XlaProjection) else XlaLogits.of(x) for x in models]
    keeps = [of.kept and want for want in wants]
    kept = [lax.empty((rows, static.size), jnp.bfloat16) if keep else None for keep in keeps]
    sums = [_none_of(x) if keep else x.zeros(need, rows) for x, need, keep in zip(sources, needs, keeps, strict=True)]

    def body(start: Any, carry: Any) -> Any:
        values, kept, sums = carry
        hidden = [source.rows(tokens, start, chunk) for source in sources]
        z = [source.logits(x) if isinstance(source, XlaProjection) else source.floats(x)
             for source, x in zip(sources, hidden, strict=True)]  # fmt: skip
        token, y, factor = cut_rows((number, label, scale), start, chunk)
        found = _found(static, *z, token, y, wants)
        values = write_rows(values, found.value, start)
        if not any(wants):
            return values, kept, sums
        if of.kept:
            first = jnp.asarray(start, jnp.int32).reshape(1)
            arguments = first, *z, token, found, jnp.ones_like(factor)
            return values, written(_into, {"static": static, "wants": wants}, kept, *arguments), sums
        made = _gradients(static, *z, token, found, factor, wants, dtypes=(jnp.bfloat16, jnp.bfloat16))
        sums = [source.accumulate(g, by_z, x, tokens, start) if jax.tree.leaves(g) else g
                for source, g, by_z, x in zip(sources, sums, made, hidden, strict=True)]  # fmt: skip
        return values, kept, sums

    carry = jnp.zeros(rows, jnp.float32), kept, sums
    carry = vary_alike(carry, (models, constants))
    values, kept, sums = over_tokens(tokens, chunk, body, carry)
    loss = reduction.reduced(values, tokens, per_token=options.reduction == "none")
    if of.kept:
        return loss, _rest_zero(tokens, chunk, kept)

    def whole(made: Any) -> Any:
        if made is None or made.hidden is None:
            return made
        return replace(made, hidden=tokens.spread(made.hidden))

    return loss, tuple(map(whole, sums))


def _into(refs: Any, first: Any, *arguments: Any, static: JsdStatic, wants: tuple[bool, bool]) -> None:
    _gradients(static, *arguments, wants, into=refs, first=first)


def _rest_zero(tokens: CountedTokens, chunk: int, kept: Any) -> Any:
    """What is kept, with zeros in the chunks that have no token: products read them."""

    def chunk_of_zeros(i: Any, kept: Any) -> Any:
        return jax.tree.map(lambda x: write_rows(x, jnp.zeros((chunk, x.shape[1]), x.dtype), i * chunk), kept)

    chunks = (tokens.number + chunk - 1) // chunk
    return lax.fori_loop(chunks, len(tokens.source) // chunk, chunk_of_zeros, kept)


def _gradients_of_kept(static: JsdStatic, needs: Any, of: JsdMosaicPlan, saved: Any, grad_loss: Array) -> Any:
    models, constants, kept = saved
    tokens, reduction = _reduction(static, constants, of.chunk)
    scale = reduction.row_scale(grad_loss, tokens)
    made = [_none_of(x) if g is None else _gradients_of_head(x, need, tokens, scale, g)
            for x, need, g in zip(models, needs, kept, strict=True)]  # fmt: skip
    return tuple(made)


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
        weight = rounded_product(g, rows, (0, 0)) if layer.vocab_axis == 0 else rounded_product(rows, g, (0, 0))
    if needs.bias:
        bias = jnp.sum(g.astype(jnp.float32) * scale[:, None], 0)
    return replace(layer, hidden=hidden, weight=weight, bias=bias)
