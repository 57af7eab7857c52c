"""linear_jsd and jsd for JAX: the public functions, and the walk of the 'xla' backend.

A public function has its inputs checked and calls `_op`, to which `onchip.frontend.jax_call.with_gradients` gives its
derivatives.  `_walk` has the engine go through chunks of tokens, whose losses and gradients are made in
divergence.py.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from onchip.core.backends import choose_backend
from onchip.core.sizes import LOSS_DTYPE_BYTES
from onchip.frontend.jax_call import callable_here, vary_alike, with_gradients
from onchip.frontend.jax_inputs import (
    accumulator,
    as_constant,
    check_kinds,
    check_layout,
    check_normalizer,
    check_product_dtype,
    dtype_of,
    per_token_constant,
    platform,
    require_arrays,
    take_target,
)
from onchip.frontend.jax_types import Array, Number, WeightLayout
from onchip.frontend.jax_values import check_distinct, check_factors, kept_tokens, log_probs_or_nan, plain_labels
from onchip.frontend.options import Reduction, ScratchBytes
from onchip.frontend.topk import TopK
from onchip.ops.linear_jsd import divergence, jax_split
from onchip.ops.linear_jsd.jax_call import ARRAYS, Constants, Static, plan, source_of
from onchip.ops.linear_jsd.spec import LOGITS_OP, OP, PARTS, Options, check_shapes, named_arrays
from onchip.vocab.xla import parallel
from onchip.vocab.xla.loss import Reduction as Reduced
from onchip.vocab.xla.tiles import (
    Columns,
    Logits,
    Projection,
    cut,
    cut_rows,
    select_tokens,
)
from onchip.vocab.xla.walk import by_rows

BACKENDS = ("xla",)
Backend = Literal["auto", "xla"]


def linear_jsd(
    student_hidden: Array,  # [..., Hs]
    student_weight: Array,  # [V, Hs], or [Hs, V] with weight_layout="hv"
    teacher_hidden: Array | None = None,  # [..., Ht]
    teacher_weight: Array | None = None,  # [V, Ht], or [Ht, V]
    *,
    weight_layout: WeightLayout = "vh",
    axis_name: str | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    target: Array | None = None,  # [...]
    labels: Array | None = None,  # another name of target
    ignore_index: int = -100,
    token_weight: Array | None = None,  # [...]
    reduction: Reduction = "mean",
    normalizer: Number | None = None,
    student_bias: Array | None = None,  # [V]
    teacher_bias: Array | None = None,  # [V]
    teacher_logits: Array | None = None,  # [..., V]
    teacher_topk: TopK[Array] | None = None,
    hard_weight: float = 0.0,
    vocab: int | None = None,
    teacher_grad: bool = False,
    check_inputs: bool = False,
    scratch_bytes: ScratchBytes = None,
    backend: Backend = "auto",
) -> jax.Array:
    r"""Generalised Jensen-Shannon divergence between a student's and a teacher's next-token distributions.

    With s = softmax((student_hidden @ student_weight.T + student_bias) / temperature), t the same of the teacher and
    m = (1 - beta) * s + beta * t, the loss of a token is::

        jsd  = (1 - beta) * KL(s || m) + beta * KL(t || m)     # beta 0: KL(t || s); beta 1: KL(s || t)
        loss = token_weight * (hard_weight * cross_entropy + (1 - hard_weight) * jsd)

    where cross_entropy is the student's with `target`, at temperature 1, and `jsd` is multiplied by temperature**2 if
    `temperature_squared`.  KL(p || q) = sum(p * log(p / q)), in nats.  The loss is 0 or more, and exactly 0 with
    exactly zero gradients where both models' logits are the same numbers.  No model's [tokens, V] logits are stored.
    It works under jit, grad, vmap, scan and `jax.checkpoint`.

    Args:
        student_hidden: [..., Hs] float32, bfloat16, float16 or float64, T tokens in the leading dimensions.  NumPy's
            float64 counts as float32 where JAX's 64-bit mode is off.
        student_weight: [V, Hs], or [Hs, V] with weight_layout="hv", of student_hidden's dtype; or one of the two is
            float32 and the other of 16 bits, as in `linear_cross_entropy`.
        teacher_hidden: [..., Ht], with the same leading dimensions; its dtype (but for float64) and Ht may
            differ from the student's.
        teacher_weight: [V, Ht] or [Ht, V], of teacher_hidden's dtype, or so likewise.
        weight_layout: "vh" or "hv", of both weights.
        axis_name: inside of `jax.shard_map`: the mesh axis over which the vocabulary is split.  Weights, biases and
            teacher_logits are then this device's [V / n, Hs] (or [Hs, V / n]), [V / n] and [..., V / n] of both models,
            in the order of the devices, and `vocab` is how many entries of all devices count; all else is the same on
            all devices of that axis, and so are the results.  Not with teacher_topk.
        beta: in [0, 1], the teacher's weight in m.  The ends are forward and reverse KL as special cases: the limit of
            the divergence itself is 0 at both ends, so that the value jumps there.
        temperature: above 0: divides both models' logits.
        temperature_squared: multiply the divergence by temperature**2, which keeps its gradients' size.
        target: [...] of any integer dtype: `ignore_index` takes a token out; otherwise the label in [0, V).
        labels: another name of target.
        ignore_index, token_weight, reduction, normalizer: as of `linear_cross_entropy`; the arrays are constants.
        student_bias, teacher_bias: [V] of their weights' dtypes.  -inf takes an entry out of that distribution.
        teacher_logits: [..., V] float32, bfloat16, float16 or float64, instead of teacher_hidden and teacher_weight.
        teacher_topk: `TopK(indices, values, kind, rest)` instead of them, where only K entries are known.
        hard_weight: in [0, 1]: the part of the loss that is the cross-entropy with `target`; the rest is divergence.
        vocab: entries from this one on, padding, are out of both distributions.  V may then differ between the models.
        teacher_grad: give gradients to the teacher's arrays too.  Otherwise the teacher is a constant.
        check_inputs: as in `linear_cross_entropy`: raise for targets and a top-k teacher that are wrong on a GPU too.
        scratch_bytes: bound on the temporary memory: bytes, a text like "1GiB", or a float in (0, 1], that part of both
            models' float32 logits.  Default: 256 MiB or an eighth of those, whichever is more, and at least what one
            chunk needs.
        backend: "xla" (plain JAX, on any device) or "auto".

    The numbers (beta, temperature, hard_weight) are Python's: another value compiles anew.

    Returns:
        The loss in float32, of float64 inputs in float64, 0-d or [...].  If every token is ignored, "mean" is 0 with
        zero gradients.  With beta 0 it is infinite where the student gives probability 0 to what the teacher doesn't;
        with beta 1 the reverse (and the gradients there are not finite).  A target that is neither ignore_index nor in
        [0, V), a top-k index outside of it or a log-probability above 0, makes its token's loss and the gradients that
        it enters NaN under jit, and on a GPU without check_inputs; repeated indices aren't found there.

    Raises:
        TypeError: an argument of the wrong type or dtype; forward-mode differentiation.
        ValueError: a wrong shape, range or option, not exactly one teacher, a scratch_bytes that is too small; where
            values are known, a target or an index out of range, which it names, or repeated indices.
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
    return _call(OP, locals())


def jsd(
    student_logits: Array,  # [..., V]
    teacher_logits: Array | None = None,  # [..., V]
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    target: Array | None = None,  # [...]
    labels: Array | None = None,  # another name of target
    ignore_index: int = -100,
    token_weight: Array | None = None,  # [...]
    reduction: Reduction = "mean",
    normalizer: Number | None = None,
    teacher_topk: TopK[Array] | None = None,
    hard_weight: float = 0.0,
    vocab: int | None = None,
    teacher_grad: bool = False,
    check_inputs: bool = False,
    scratch_bytes: ScratchBytes = None,
    backend: Backend = "auto",
) -> jax.Array:
    r"""Generalised Jensen-Shannon divergence between two models' existing logits.

    The loss is that of `linear_jsd`, with s = softmax(student_logits / temperature) and t the same of the teacher.

    Args:
        student_logits: [..., V] float32, bfloat16, float16 or float64.  -inf takes an entry out.
        teacher_logits: [..., V] float32, bfloat16, float16 or float64.

    The other arguments, what is returned and what is raised are those of `linear_jsd`.  Softmaxes, loss and gradients
    are made in float32, of float64 logits in float64; a gradient is rounded to its logits' dtype once.

    Memory: about 48 * chunk * V bytes, by `jax_scratch_parts` of `onchip.ops.linear_jsd.memory`.

    Example:
        >>> import jax
        >>> from onchip.jax import jsd
        >>> student, teacher = jax.random.normal(jax.random.key(0), (2, 8, 100))
        >>> jax.grad(jsd)(student, teacher, beta=0.0).shape  # forward KL
        (8, 100)

    Source: GKD (arXiv:2306.13649).
    """
    return _call(LOGITS_OP, locals())


def _model(given: Mapping[str, Any], who: str, size: int) -> Any:
    """What of a model may get a gradient, leading dimensions flattened to T: a `Projection`, logits or None.

    Padding is cut off here, by what JAX differentiates itself.
    """
    hidden, weight, bias, logits = (given.get(f"{who}_{part}") for part in PARTS)
    if logits is not None:
        return cut(_flat(jnp.asarray(logits)), 0, size, 1)
    if hidden is None:
        return None
    return Projection.of(hidden, weight, bias, given["weight_layout"]).part(Columns(0, size))


def _flat(x: Any) -> Any:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _call(op: str, given: dict[str, Any]) -> jax.Array:
    """`given` are the arguments of a public function."""
    name, _ = take_target(op, given, needed=False)
    split = given.get("axis_name") is not None
    options, shape, size, dtype = checked(op, given, name, split=split)
    if op == OP:
        parallel.refuse_typed_sharding(op, given)
    total, topk = math.prod(shape), given["teacher_topk"]
    shard = parallel.shard_of(OP, given, size, "vocab") if split else None
    vocab = size if shard is None else shard.vocab
    taught = _model(given, "teacher", size)
    models = _model(given, "student", size), taught if options.teacher_grad else jax.tree.map(lax.stop_gradient, taught)
    labels = checked_target(op, given, name, vocab, options)
    indices, values = (None, None) if topk is None else _topk_rows(op, topk, labels, vocab, dtype, options.check_inputs)
    constants = Constants(
        jnp.zeros(total, jnp.int32) if labels is None else labels.reshape(-1),
        indices,
        values,
        per_token_constant(given["token_weight"], dtype),
        as_constant(given["normalizer"], dtype),
    )
    models, constants = vary_alike((models, constants), but=given.get("axis_name"))
    kind, rest = ("", "") if topk is None else topk[2:]
    static = Static(options, platform(), size, kind, rest, shard)
    plan(static, _none(models), False, models, constants)  # a budget that is too small shows here
    if total == 0:
        return jnp.zeros(shape if options.reduction == "none" else (), dtype)
    made: jax.Array = callable_here(_op)(static, models, constants)
    return made.reshape(shape) if options.reduction == "none" else made


def checked_target(op: str, given: Mapping[str, Any], name: str, vocab: int, options: Options) -> jax.Array | None:
    """[...] labels of `plain_labels`, or None; raise for them and for a normalizer where their values are known and
    wrong.  The target was given by `name`."""
    check_inputs, target, labels = options.check_inputs, given[name], None
    if target is not None:
        labels = plain_labels(op, name, target, vocab, options.ignore_index, check_inputs=check_inputs)
    kept = kept_tokens(op, labels, check_inputs=check_inputs)
    check_factors(op, {"normalizer": given["normalizer"]}, kept, check_inputs=check_inputs)
    return labels


def _topk_rows(
    op: str, topk: TopK[Any], labels: jax.Array | None, vocab: int, dtype: Any, check_inputs: bool
) -> tuple[jax.Array, jax.Array]:
    """Indices and values [T, K] of a top-k teacher, a negative index for one out of range and NaN for a number that is
    no log-probability; raise for these, and for repeated indices, where they are known, but of ignored tokens."""
    known: Any = {"check_inputs": check_inputs, "kept": kept_tokens(op, labels, check_inputs=check_inputs)}
    indices = plain_labels(op, "teacher_topk.indices", topk.indices, vocab, None, **known)
    check_distinct(op, "teacher_topk.indices", topk.indices, **known)
    values = jnp.asarray(topk.values)
    if topk.kind == "log_probs":
        values = log_probs_or_nan(op, "teacher_topk", topk.values, **known)
    return _flat(indices), lax.stop_gradient(_flat(values).astype(dtype))


def checked(
    op: str, given: Mapping[str, Any], name: str, *, split: bool = False
) -> tuple[Options, tuple[int, ...], int, Any]:
    """Of a public function's arguments the options, the tokens' shape, the entries that count and the dtype of sums;
    raise for what is wrong or doesn't fit together.  The target was given by `name`.

    Where the vocabulary is `split` over devices, all entries that there are count, as `vocab` is not of these alone.
    """
    options, layout = Options.of(op, given), given.get("weight_layout", "vh")
    if split:
        options = jax_split.of_all_entries(options, given)
    named = named_arrays(op, given, name)
    check_layout(op, layout)
    arrays = require_arrays(op, named, optional=())
    # In the other layout a weight is checked as if transposed.
    turned = ("student_weight", "teacher_weight") if layout == "hv" else ()
    shapes = {n: x.shape[::-1] if n in turned else x.shape for n, x in arrays.items()}
    shape, size = check_shapes(options, shapes, name)
    options = options.with_scratch(given, math.prod(shape) * size)
    check_kinds(
        op,
        arrays,
        integers=(name, "teacher_topk.indices"),
        constants=("token_weight",),
        labels=("teacher_topk.values",),
        dtypes=LOSS_DTYPE_BYTES.keys(),
    )
    for whose in ("student_", "teacher_"):
        check_product_dtype(op, arrays, whose)
    check_normalizer(op, given["normalizer"], options.reduction)
    choose_backend(op, given["backend"], dict.fromkeys(BACKENDS))
    return options, shape, size, accumulator(dtype_of(next(iter(arrays.values()))))


def _none(models: Any) -> Any:
    return jax.tree.map(lambda _: False, models)


def _stashes(static: Static, needs: Any) -> bool:
    """Whether forward makes the gradients: for an upstream gradient of 1, as sums, but of existing logits."""
    of_logits = any(need is True for need in needs)
    return any(jax.tree.leaves(needs)) and static.options.reduction != "none" and not of_logits


def forward(static: Static, needs: Any, models: Any, constants: Constants) -> tuple[Any, Any]:
    if static.shard is not None:
        return jax_split.forward(static, needs, models, constants)
    stash = _stashes(static, needs)
    loss, gradients = _walk(static, needs if stash else _none(models), models, constants, None, stash)
    if stash:
        return loss, gradients
    return loss, (models, constants) if any(jax.tree.leaves(needs)) else None


def backward(static: Static, needs: Any, saved: Any, grad_loss: Any) -> Any:
    if static.shard is not None:
        return jax_split.backward(static, needs, saved, grad_loss)
    if _stashes(static, needs):
        return jax.tree.map(lambda g: g * grad_loss, saved)
    models, constants = saved
    return _walk(static, needs, models, constants, grad_loss, False)[1]


_op = with_gradients(f"{OP}, {LOGITS_OP}", forward, backward)


# ------------------------------------------------------------------------------------------------------------ the walk


def _walk(
    static: Static, needs: Any, models: Any, constants: Constants, grad_loss: Any, stash: bool
) -> tuple[Any, tuple[Any, ...]]:
    """The loss, and the gradients that are needed, for `grad_loss` or for 1; in the dtype of sums, but of existing
    logits in theirs."""
    chunk = plan(static, needs, stash, models, constants)
    tokens = select_tokens(constants.labels, chunk)
    labels, mean = tokens.take(constants.labels, 0), static.options.reduction == "mean"
    given = [(source_of(static, x), need) for x, need in zip(models, needs, strict=True) if x is not None]
    sources = [x for x, _ in given]
    total = sources[0].accumulator
    reduction = Reduced.of(tokens, labels, constants.token_weight, constants.normalizer, mean, total)
    row_scale = reduction.row_scale(jnp.ones(()) if grad_loss is None else grad_loss, tokens)

    def step(start: jax.Array, own: jax.Array, teacher: Any = None) -> tuple[jax.Array, list[Any]]:
        source, label, scale, there = cut_rows((tokens.source, labels, row_scale, tokens.there()), start, chunk)

        def take(x: jax.Array) -> jax.Array:
            return x.at[source].get(mode="fill", fill_value=0)

        def scaled(g: jax.Array | None) -> Any:
            # Where, not a factor of 0: what is behind the kept tokens may be infinite.
            return None if g is None else jnp.where(there[:, None], g * scale[:, None], 0)

        if constants.indices is not None and constants.values is not None:
            ids, values = take(constants.indices), take(constants.values)
            values = jnp.where(ids < 0, jnp.nan, values)
            words: Any = (static.topk_kind, static.topk_rest)
            teacher = TopK(jnp.maximum(ids, 0), values, *words)
        value, *gradients = divergence.rows(ARRAYS, static.options, own, teacher, jnp.maximum(label, 0))
        return jnp.where(there, value, 0), [scaled(g) for g in gradients]

    def whole(sums: Any, source: Projection | Logits) -> Any:
        """With zeros for ignored tokens."""
        if isinstance(source, Logits):
            return None if sums is None else source.floats(sums)
        return sums if sums.hidden is None else replace(sums, hidden=tokens.spread(sums.hidden))

    zeros = jnp.zeros(tokens.source.shape, total)
    losses, sums = by_rows(chunk, tokens, sources, [need for _, need in given], zeros, step)
    loss = reduction.reduced(losses, tokens, per_token=static.options.reduction == "none")
    made = [whole(g, source) for g, source in zip(sums, sources, strict=True)]
    return loss, (*made, *[None] * (2 - len(made)))
