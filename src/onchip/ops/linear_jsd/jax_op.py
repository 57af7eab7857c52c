"""linear_jsd and jsd for JAX: the public functions, their derivative rules and the walk of the 'xla' backend.

Read from the top: a public function has its inputs checked (jax_inputs.py) and calls `_op`.  JAX calls that as it is
where no gradient is wanted, or else `_op_forward` and `_op_backward`.  All three walk chunks of tokens, whose losses
and gradients are made in jax_rows.py.  The maths is in the package's docstring.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from onchip.core.backends import choose_backend
from onchip.frontend import jax_call
from onchip.frontend.jax_call import refuse_second_derivative, vary_alike
from onchip.frontend.jax_inputs import as_constant, check_normalizer, per_token_constant, plain_labels, platform
from onchip.ops.linear_jsd import jax_rows, memory
from onchip.ops.linear_jsd.jax_inputs import check_arrays
from onchip.ops.linear_jsd.memory import Head, Problem
from onchip.ops.linear_jsd.spec import LOGITS_OP, OP, Options, TopK
from onchip.vocab.xla import tiles as jax_tiles

BACKENDS = ("xla",)


def linear_jsd(
    student_hidden: Any,  # [..., Hs]
    student_weight: Any,  # [V, Hs], or [Hs, V] with weight_layout="hv"
    teacher_hidden: Any = None,  # [..., Ht]
    teacher_weight: Any = None,  # [V, Ht], or [Ht, V]
    *,
    weight_layout: str = "vh",
    beta: float = 0.5,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    labels: Any = None,  # [...]
    ignore_index: int = -100,
    token_weight: Any = None,  # [...]
    reduction: str = "mean",
    normalizer: Any = None,
    student_bias: Any = None,  # [V]
    teacher_bias: Any = None,  # [V]
    teacher_logits: Any = None,  # [..., V]
    teacher_topk: TopK | None = None,
    hard_weight: float = 0.0,
    vocab: int | None = None,
    teacher_grad: bool = False,
    scratch_bytes: int | None = None,
    backend: str = "auto",
) -> Any:
    r"""Generalised Jensen-Shannon divergence between a student's and a teacher's next-token distributions.

    With s = softmax((student_hidden @ student_weight.T + student_bias) / temperature), t the same of the teacher and
    m = (1 - beta) * s + beta * t, the loss of a token is::

        jsd  = (1 - beta) * KL(s || m) + beta * KL(t || m)     # beta 0: KL(t || s); beta 1: KL(s || t)
        loss = token_weight * (hard_weight * cross_entropy + (1 - hard_weight) * jsd)

    where cross_entropy is the student's with `labels`, at temperature 1, and `jsd` is multiplied by temperature**2 if
    `temperature_squared`.  KL(p || q) = sum(p * log(p / q)), in nats.  The loss is 0 or more, and exactly 0 with
    exactly zero gradients where both models' logits are the same numbers.  No model's [tokens, V] logits are stored.
    It works under jit, grad, vmap, scan and `jax.checkpoint`.

    Args:
        student_hidden: [..., Hs] float32, bfloat16 or float16, T tokens in the leading dimensions.  NumPy's float64
            counts as float32 where JAX's 64-bit mode is off.
        student_weight: [V, Hs], or [Hs, V] with weight_layout="hv", of student_hidden's dtype.
        teacher_hidden: [..., Ht], with the same leading dimensions; its dtype and Ht may differ from the student's.
        teacher_weight: [V, Ht] or [Ht, V], of teacher_hidden's dtype.
        weight_layout: "vh" or "hv", of both weights.
        beta: in [0, 1], the teacher's weight in m.  The ends are forward and reverse KL as special cases: the limit of
            the divergence itself is 0 at both ends, so that the value jumps there.
        temperature: above 0: divides both models' logits.
        temperature_squared: multiply the divergence by temperature**2, which keeps its gradients' size.
        labels: [...] of any integer dtype: `ignore_index` takes a token out; otherwise the label in [0, V).
        ignore_index: tokens with this label cost no loss and leave exact zeros, whatever they hold.
        token_weight: [...] factor of each token's loss; does not change what "mean" divides by.  A constant.
        reduction: "mean" (over the tokens that are not ignored), "sum" or "none" (the loss then is [...]).
        normalizer: number or 0-d array above 0 that "mean" divides by instead of the token count.  Where every
            token is ignored any value of a 0-d array will do.  A constant.
        student_bias, teacher_bias: [V] of their weights' dtypes.  -inf takes an entry out of that distribution.
        teacher_logits: [..., V] float32, bfloat16 or float16, instead of teacher_hidden and teacher_weight.
        teacher_topk: `TopK(indices, values, kind, rest)` instead of them, where only K entries are known.
        hard_weight: in [0, 1]: the part of the loss that is the cross-entropy with `labels`; the rest is divergence.
        vocab: entries from this one on, padding, are out of both distributions.  V may then differ between the models.
        teacher_grad: give gradients to the teacher's arrays too.  Otherwise the teacher is a constant.
        scratch_bytes: bound on the temporary memory.  Default: 256 MiB or an eighth of both models' float32 logits,
            whichever is less, and at least what one chunk needs.
        backend: "xla" (plain JAX, on any device) or "auto".

    The numbers (beta, temperature, hard_weight) are Python's: another value compiles anew.

    Returns:
        The float32 loss, 0-d or [...].  If every token is ignored, "mean" is 0 with zero gradients.  With beta 0 it is
        infinite where the student gives probability 0 to what the teacher doesn't; with beta 1 the reverse (and the
        gradients there are not finite).  A label that is neither ignore_index nor in [0, V), or a top-k index outside
        of it, makes its token's loss and the gradients that it enters NaN; repeated indices are not looked for.

    Raises:
        TypeError: an argument of the wrong type or dtype; forward-mode differentiation.
        ValueError: a wrong shape, range or option, not exactly one teacher, a scratch_bytes that is too small.
        NotImplementedError: differentiated twice.

    Memory: `jax_scratch_parts` of `onchip.ops.linear_jsd.memory` is the formula, for a jitted step: about
    48 * chunk * V bytes and 8 * V * Hs for the weight's gradient.

    Example:
        >>> import jax
        >>> from onchip.jax import linear_jsd
        >>> keys = jax.random.split(jax.random.key(0), 4)
        >>> shapes = ((2, 8, 16), (100, 16), (2, 8, 32), (100, 32))
        >>> arrays = [jax.random.normal(k, s) for k, s in zip(keys, shapes)]
        >>> loss, grads = jax.jit(jax.value_and_grad(linear_jsd, argnums=(0, 1)))(*arrays)
        >>> grads[1].shape
        (100, 16)

    Sources: GKD (arXiv:2306.13649) for the divergence; Liger Kernel (arXiv:2410.10989) for the chunks.
    """
    options = Options(
        op=OP,
        beta=beta,
        temperature=temperature,
        temperature_squared=temperature_squared,
        ignore_index=ignore_index,
        reduction=reduction,
        hard_weight=hard_weight,
        vocab=vocab,
        teacher_grad=teacher_grad,
        scratch_bytes=scratch_bytes,
    )
    named = {
        "student_hidden": student_hidden,
        "student_weight": student_weight,
        "student_bias": student_bias,
        "teacher_hidden": teacher_hidden,
        "teacher_weight": teacher_weight,
        "teacher_bias": teacher_bias,
        "teacher_logits": teacher_logits,
        "labels": labels,
        "token_weight": token_weight,
    }
    return _call(options, named, teacher_topk, normalizer, backend, weight_layout)


def jsd(
    student_logits: Any,  # [..., V]
    teacher_logits: Any = None,  # [..., V]
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    labels: Any = None,  # [...]
    ignore_index: int = -100,
    token_weight: Any = None,  # [...]
    reduction: str = "mean",
    normalizer: Any = None,
    teacher_topk: TopK | None = None,
    hard_weight: float = 0.0,
    vocab: int | None = None,
    teacher_grad: bool = False,
    scratch_bytes: int | None = None,
    backend: str = "auto",
) -> Any:
    r"""Generalised Jensen-Shannon divergence between two models' existing logits.

    With s = softmax(student_logits / temperature), t the same of the teacher and m = (1 - beta) * s + beta * t, the
    loss of a token is::

        jsd  = (1 - beta) * KL(s || m) + beta * KL(t || m)     # beta 0: KL(t || s); beta 1: KL(s || t)
        loss = token_weight * (hard_weight * cross_entropy + (1 - hard_weight) * jsd)

    Args:
        student_logits: [..., V] float32, bfloat16 or float16.  -inf takes an entry out.
        teacher_logits: [..., V] float32, bfloat16 or float16.

    The other arguments, what is returned and what is raised are those of `linear_jsd`.  Softmaxes, loss and gradients
    are made in float32 from the logits as they are; a gradient is rounded to its logits' dtype once.

    Memory: about 48 * chunk * V bytes, by `jax_scratch_parts` of `onchip.ops.linear_jsd.memory`.

    Example:
        >>> import jax
        >>> from onchip.jax import jsd
        >>> student, teacher = jax.random.normal(jax.random.key(0), (2, 8, 100))
        >>> jax.grad(jsd)(student, teacher, beta=0.0).shape  # forward KL
        (8, 100)

    Source: GKD (arXiv:2306.13649).
    """
    options = Options(
        op=LOGITS_OP,
        beta=beta,
        temperature=temperature,
        temperature_squared=temperature_squared,
        ignore_index=ignore_index,
        reduction=reduction,
        hard_weight=hard_weight,
        vocab=vocab,
        teacher_grad=teacher_grad,
        scratch_bytes=scratch_bytes,
    )
    named = {
        "student_logits": student_logits,
        "teacher_logits": teacher_logits,
        "labels": labels,
        "token_weight": token_weight,
    }
    return _call(options, named, teacher_topk, normalizer, backend, "vh")


_PARTS = ("hidden", "weight", "bias", "logits")


class _Parameters(NamedTuple):
    """What may get a gradient; leading dimensions flattened to T."""

    student_hidden: Any = None  # [T, Hs]
    student_weight: Any = None
    student_bias: Any = None
    student_logits: Any = None  # [T, V]
    teacher_hidden: Any = None
    teacher_weight: Any = None
    teacher_bias: Any = None
    teacher_logits: Any = None


class _Tensors(NamedTuple):
    """The arrays of a call."""

    parameters: _Parameters
    labels: jax.Array  # [T] int32 in [0, V), IGNORED or OUT_OF_RANGE
    indices: jax.Array | None  # [T, K] int32
    values: jax.Array | None  # [T, K] float32
    token_weight: jax.Array | None  # [T] float32
    normalizer: jax.Array | None  # [] float32


@dataclass(frozen=True)
class _Static:
    """What is known while tracing; a call with another `_Static` compiles anew."""

    op: str
    platform: str
    layout: str
    reduction: str
    loss: jax_rows.Loss
    size: int
    scratch_bytes: int | None
    needs: tuple[bool, ...] = (False,) * 8
    stash: bool = False


def _call(
    options: Options, named: dict[str, Any], topk: TopK | None, normalizer: Any, backend: str, layout: str
) -> Any:
    op = options.op
    shape, size = check_arrays(op, options, named, topk, layout)
    check_normalizer(op, normalizer, options.reduction)
    choose_backend(op, backend, {"xla": None})
    total = int(np.prod(shape))

    def flat(x: Any) -> Any:
        return x.reshape(total, x.shape[-1])

    given = {}
    for who in ("student", "teacher"):
        for part in _PARTS:
            x = named.get(f"{who}_{part}")
            if x is not None:
                x = jnp.asarray(x)
                x = flat(x) if part in ("hidden", "logits") else x
                given[f"{who}_{part}"] = x if who == "student" or options.teacher_grad else lax.stop_gradient(x)
    labels = named["labels"]
    tensors = _Tensors(
        _Parameters(**given),
        jnp.zeros(total, jnp.int32)
        if labels is None
        else plain_labels(labels, size, int(options.ignore_index)).reshape(-1),
        None if topk is None else plain_labels(flat(topk.indices), size, -1),
        None if topk is None else lax.stop_gradient(jnp.asarray(flat(topk.values), jnp.float32)),
        per_token_constant(named["token_weight"]),
        as_constant(normalizer),
    )
    tensors = vary_alike(tensors)
    static = _Static(
        op,
        platform(),
        layout,
        options.reduction,
        jax_rows.Loss(
            float(options.beta),
            float(options.temperature),
            options.temperature_squared,
            float(options.hard_weight),
            *(("", "") if topk is None else (topk.kind, topk.rest)),
        ),
        int(size),
        None if options.scratch_bytes is None else int(options.scratch_bytes),
    )
    _plan(static, tensors)  # a budget that is too small shows here
    if total == 0:
        return jnp.zeros(shape if options.reduction == "none" else (), jnp.float32)
    loss = _op(static, tensors)
    return loss.reshape(shape) if options.reduction == "none" else loss


def _plan(static: _Static, tensors: _Tensors) -> int:
    """Tokens of a chunk."""
    p, vocab_axis = tensors.parameters, static.layout.index("v")

    def head(who: int) -> Head:
        hidden, weight, _, logits = p[4 * who : 4 * who + 4]
        needs = static.needs[4 * who : 4 * who + 4]
        if hidden is None:
            if logits is None:
                return Head()
            return Head(vocab=logits.shape[1], dtype=logits.dtype.name, grad_logits=needs[3])
        name = hidden.dtype.name
        return Head(hidden.shape[1], weight.shape[vocab_axis], name, name, name, *needs)

    problem = Problem(
        tokens=tensors.labels.shape[0],
        vocab=static.size,
        student=head(0),
        teacher=head(1),
        topk=0 if tensors.indices is None else tensors.indices.shape[1],
        hard=static.loss.hard_weight > 0,
        device="cpu" if static.platform == "cpu" else "cuda",
        stash=static.stash,
        op=static.op,
    )
    return memory.plan(problem, static.scratch_bytes, memory.JAX_PLANNER)


# ------------------------------------------------------------------------------------------------- derivative rules


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _op(static: _Static, tensors: _Tensors) -> Any:
    return _run(static, tensors, None)[0]


@partial(jax.tree_util.register_dataclass, data_fields=["stashed", "tensors"], meta_fields=["static"])
@dataclass(frozen=True)
class _Saved:
    """What backward gets: the gradients for an upstream gradient of 1, or the arrays of the call."""

    stashed: Any
    tensors: Any
    static: Any


def _op_forward(static: _Static, primals: Any) -> tuple[Any, _Saved]:
    tensors: _Tensors = jax.tree.map(lambda x: x.value, primals)
    needs = tuple(x is not None and x.perturbed for x in primals.parameters)
    stash = any(needs) and static.reduction != "none" and not (needs[3] or needs[7])
    backward = replace(static, needs=needs, stash=stash)
    if stash:
        loss, grads = _run(backward, tensors, None)
        # Their dtypes: arrays of no elements.
        kinds = [None if x is None else jnp.zeros(0, x.dtype) for x in tensors.parameters]
        return loss, _Saved((grads, kinds), None, backward)
    return _run(static, tensors, None)[0], _Saved(None, tensors, backward)


def _op_backward(static: _Static, saved: _Saved, grad_loss: Any) -> tuple[Any]:
    made: Sequence[Any] = [None] * 8
    if not isinstance(grad_loss, SymbolicZero) and any(saved.static.needs):
        if saved.static.stash:
            made = _scaled(*saved.stashed, grad_loss)
        else:
            made = _run(saved.static, saved.tensors, grad_loss)[1]
    return (_Tensors(_Parameters(*made), None, None, None, None, None),)  # type: ignore[arg-type]


_op.defvjp(_op_forward, _op_backward, symbolic_zeros=True)


# A derivative of either would be a second derivative of the op: `custom_jvp` is there to say so.
@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(static: _Static, tensors: _Tensors, grad_loss: Any) -> tuple[Any, Any]:
    return _jit_walk(static, tensors, grad_loss)  # type: ignore[no-any-return]


@jax.custom_jvp
def _scaled(grads: Any, kinds: Any, grad_loss: Any) -> Any:
    return [None if g is None else (g * grad_loss).astype(k.dtype) for g, k in zip(grads, kinds, strict=True)]


_run.defjvp(partial(refuse_second_derivative, f"{OP}, {LOGITS_OP}"))
_scaled.defjvp(partial(refuse_second_derivative, f"{OP}, {LOGITS_OP}"))


# --------------------------------------------------------------------------------------------------------- the walk


# jit, so that a call outside of one is not run operation by operation.
@partial(jax.jit, static_argnums=(0,))
def _jit_walk(static: _Static, tensors: _Tensors, grad_loss: Any) -> tuple[Any, Any]:
    """The loss, and the gradients that `static.needs`: for `grad_loss`, in their parameters' dtypes; if that is None,
    for 1 and in float32."""
    p, size, layout = tensors.parameters, static.size, static.layout
    total = tensors.labels.shape[0]
    chunk = _plan(static, tensors)
    counted = jax_call.Static("xla", static.platform, "float32", layout, static.reduction, "auto", None, False)
    tokens = jax_tiles.select_tokens(
        counted,
        jax_call.Tensors(
            tensors.labels,  # not read, as the next
            tensors.labels,
            tensors.labels,
            token_weight=tensors.token_weight,
            normalizer=tensors.normalizer,
        ),
        chunk,
    )
    row = tokens.weight * tokens.inverse_count
    if grad_loss is not None:
        upstream = grad_loss.at[tokens.source].get(mode="fill", fill_value=0) if grad_loss.ndim else grad_loss
        row = row * upstream

    def widen(x: jax.Array) -> jax.Array:
        # The CPU's 16-bit products round; float16's range is short for a gradient.
        return x.astype(jnp.float32) if static.platform == "cpu" or x.dtype == jnp.float16 else x

    vocab_axis = layout.index("v")
    weights: list[Any] = [
        None if w is None else widen(lax.slice_in_dim(w, 0, size, axis=vocab_axis)) for w in (p[1], p[5])
    ]

    def body(i: jax.Array, carry: Any) -> Any:
        losses, sums = carry
        start = i * chunk
        source = lax.dynamic_slice_in_dim(tokens.source, start, chunk)
        label, factor = (lax.dynamic_slice_in_dim(x, start, chunk) for x in (tokens.label, row))
        valid = start + jnp.arange(chunk) < tokens.number

        def take(x: jax.Array) -> jax.Array:
            return x.at[source].get(mode="fill", fill_value=0)

        hidden: list[Any] = [None, None]
        logits: list[Any] = []
        for who in (0, 1):
            h, _, b, given = p[4 * who : 4 * who + 4]
            if h is not None:
                hidden[who] = widen(take(h))
                z = jax_tiles.product(hidden[who], weights[who], (1, 1 - vocab_axis))
                logits.append(z if b is None else z + b[:size].astype(jnp.float32))
            elif given is not None:
                logits.append(take(given)[:, :size].astype(jnp.float32))
        teacher: tuple[Any, ...] = tuple(logits[1:])
        if tensors.indices is not None and tensors.values is not None:
            ids = take(tensors.indices)
            teacher = (jnp.maximum(ids, 0), jnp.where(ids < 0, jnp.nan, take(tensors.values)))
        gradients: list[Any]
        value, *gradients = jax_rows.rows(static.loss, logits[0], teacher, label)
        losses = lax.dynamic_update_slice_in_dim(losses, jnp.where(valid, value, 0), start, 0)
        sums = list(sums)
        for who in (0, 1):
            at = 4 * who
            if not any(static.needs[at : at + 4]):
                continue
            # Where, not the row's 0: what is behind the kept tokens may be infinite.
            g = jnp.where(valid[:, None], gradients[who] * factor[:, None], 0)
            if sums[at + 3] is not None:
                full = jnp.pad(g.astype(sums[at + 3].dtype), ((0, 0), (0, sums[at + 3].shape[1] - size)))
                sums[at + 3] = sums[at + 3].at[source].set(full, mode="drop")
            if sums[at + 2] is not None:
                sums[at + 2] = sums[at + 2].at[:size].add(g.sum(0))
            if hidden[who] is not None:
                g = g.astype(hidden[who].dtype)
            if sums[at] is not None:
                sums[at] = sums[at].at[source].set(jax_tiles.product(g, weights[who], (1, vocab_axis)), mode="drop")
            if sums[at + 1] is not None:
                part = jax_tiles.weight_product(counted, g, hidden[who])
                where = (slice(size), slice(None)) if layout == "vh" else (slice(None), slice(size))
                sums[at + 1] = sums[at + 1].at[where].add(part)
        return losses, sums

    zeros = [
        jnp.zeros(x.shape, x.dtype if i % 4 == 3 else jnp.float32) if need and x is not None else None
        for i, (x, need) in enumerate(zip(p, static.needs, strict=True))
    ]
    losses = jnp.zeros(tokens.source.shape[0], jnp.float32)
    state = vary_alike((losses, zeros), tokens.number)
    losses, sums = lax.fori_loop(0, -(-tokens.number // chunk), body, state)
    losses = jnp.where(jnp.arange(losses.shape[0]) < tokens.number, losses * tokens.weight, 0)
    loss = tokens.spread(losses) if static.reduction == "none" else losses.sum() * tokens.inverse_count
    assert loss.shape == ((total,) if static.reduction == "none" else ())
    if grad_loss is not None:
        sums = [None if g is None else g.astype(x.dtype) for g, x in zip(sums, p, strict=True)]
    return loss, sums
