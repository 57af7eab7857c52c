"""linear_jsd and jsd for JAX: the public functions and their checks.

They check their inputs and call `_op`, which `with_gradients_on_mesh` gives its derivatives and spreads over devices.
The walks are in jax_walk.py.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from onchip.core.backends import choose_backend
from onchip.core.sizes import LOSS_DTYPE_BYTES
from onchip.frontend.jax_call import IGNORED
from onchip.frontend.jax_inputs import (
    accumulator,
    as_constant,
    check_kinds,
    check_layout,
    check_normalizer,
    check_product_dtype,
    dtype_of,
    platform,
    require_arrays,
    take_target,
)
from onchip.frontend.jax_mesh import (
    BY_ENTRY,
    BY_TOKEN,
    WHOLE,
    OnMesh,
    Role,
    Roles,
    TokenAxes,
    check_split,
    check_types,
    spread_of,
)
from onchip.frontend.jax_spread import Between, by_tokens, with_gradients_on_mesh
from onchip.frontend.jax_types import Array, Number, WeightLayout
from onchip.frontend.jax_values import check_distinct, check_factors, kept_tokens, log_probs_or_nan, plain_labels
from onchip.frontend.options import Reduction, ScratchBytes
from onchip.frontend.topk import TopK
from onchip.kernels.triton.jax_front import by_torch
from onchip.ops.linear_jsd import LOGITS_OP, OP, PARTS, JsdOptions, check_shapes, jax_walk, mosaic_walk, named_arrays
from onchip.ops.linear_jsd.jax_walk import JsdConstants, JsdStatic, none_of, plan, stashes
from onchip.vocab.xla import parallel
from onchip.vocab.xla.parallel import Shard
from onchip.vocab.xla.tiles import Columns, XlaProjection, cut

ON_MESH = f"sharded_{OP}"
BACKENDS = ("mosaic_gpu", "xla")
Backend = Literal["auto", "mosaic_gpu", "triton", "xla"]


@by_torch(
    "onchip.ops.linear_jsd.torch_op:linear_jsd",
    "student_hidden",
    "student_weight",
    "student_bias",
    "teacher_hidden",
    "teacher_weight",
    "teacher_bias",
    "teacher_logits",
)
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
    labels: Array | None = None,  # another name for target
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

    With s = softmax((student_hidden @ student_weight.T + student_bias) / temperature), t the same for the teacher, and
    m = (1 - beta) * s + beta * t, the loss of a token is::

        jsd  = (1 - beta) * KL(s || m) + beta * KL(t || m)     # beta 0: KL(t || s); beta 1: KL(s || t)
        loss = token_weight * (hard_weight * cross_entropy + (1 - hard_weight) * jsd)

    where cross_entropy is the student's with `target`, at temperature 1, and `jsd` is multiplied by temperature**2 if
    `temperature_squared`.  KL(p || q) = sum(p * log(p / q)), in nats.  The loss is never below 0.  If both models'
    logits are the same numbers, loss and gradients are exactly 0.  No model's [tokens, V] logits are stored.
    It works under jit, grad, vmap, scan and `jax.checkpoint`.  If arrays are sharded, each device computes its own
    tokens and its own entries of the vocabulary.

    Args:
        student_hidden: [..., Hs] float32, bfloat16, float16 or float64, T tokens in the leading dimensions.  NumPy's
            float64 counts as float32 where JAX's 64-bit mode is off.
        student_weight: [V, Hs], or [Hs, V] with weight_layout="hv", of student_hidden's dtype; or one of the two is
            float32 and the other has 16 bits, as in `linear_cross_entropy`.
        teacher_hidden: [..., Ht], with the same leading dimensions.  Ht and the dtype may differ from the student's,
            except that float64 goes with float64 only.
        teacher_weight: [V, Ht] or [Ht, V], likewise.
        weight_layout: "vh" or "hv", for both weights.
        axis_name: inside `jax.shard_map`, the mesh axis over which the vocabulary is split.  Weights, biases and
            teacher_logits are then this device's [V / n, Hs] (or [Hs, V / n]), [V / n] and [..., V / n] of both models,
            in the order of the devices, and `vocab` is the number of entries on all devices that count.  Everything
            else, including the result, is the same on all devices of that axis.
        beta: in [0, 1], the teacher's weight in m.  0 and 1 are special cases, forward and reverse KL.  Elsewhere the
            divergence tends to 0 towards both ends, so its value jumps there.
        temperature: above 0: divides both models' logits.
        temperature_squared: multiply the divergence by temperature**2, so that its gradients keep their size.
        target: [...] of any integer dtype: a label in [0, V), or `ignore_index` for a token that doesn't count.
        labels: another name for target.
        ignore_index, token_weight, reduction, normalizer: as in `linear_cross_entropy`; the arrays get no gradient.
        student_bias, teacher_bias: [V] of their weights' dtypes.  -inf takes an entry out of that distribution.
        teacher_logits: [..., V] float32, bfloat16, float16 or float64, instead of teacher_hidden and teacher_weight.
        teacher_topk: `TopK(indices, values, kind, rest)` instead of these, if only K entries per token are known.
        hard_weight: in [0, 1]: the weight of the cross-entropy with `target`; the divergence has the rest.
        vocab: how many entries count.  Those after them are padding and in neither distribution.  V may then differ
            between the models.
        teacher_grad: give gradients to the teacher's arrays too.  Otherwise the teacher is a constant.
        check_inputs: as in `linear_cross_entropy`: check targets and a top-k teacher on a GPU too.
        scratch_bytes: bound on the temporary memory: bytes, a text like "1GiB", or a float in (0, 1], that part of both
            models' float32 logits.  Default: 256 MiB or an eighth of those, whichever is more, and at least what one
            chunk needs; with "mosaic_gpu" also what it takes to make each logit once.
        backend: "mosaic_gpu" (kernels for Hopper, products in bfloat16), "xla" (plain JAX, on any device), "triton"
            (PyTorch's kernels, as in `linear_cross_entropy`) or "auto".

    beta, temperature and hard_weight are Python numbers: a new value makes JAX compile again.

    Returns:
        The loss in float32 (float64 for float64 inputs), 0-d or [...].  If every token is ignored, "mean" is 0 with
        zero gradients.  With beta 0 it is infinite if the student gives probability 0 to an entry that the teacher
        gives more; with beta 1 the other way round (and the gradients there are not finite).  Under jit, or on a GPU
        without check_inputs, a target that is neither ignore_index nor in [0, V), a top-k index outside [0, V), or a
        log-probability above 0, makes its token's loss, and the gradients that it enters, NaN; repeated indices aren't
        noticed there.

    Raises:
        TypeError: an argument has the wrong type or dtype, or the call is differentiated in forward mode.
        ValueError: a shape, range or option is wrong; there isn't exactly one teacher; scratch_bytes is too small; or,
            where values are known, a target or index is out of range (the message names it) or indices are repeated.
        NotImplementedError: the result is differentiated twice.

    Memory: `jax_scratch_parts` of `onchip.ops.linear_jsd.memory` is the formula for a jitted step: about
    48 * chunk * V bytes, and 8 * V * Hs for the weight's gradient.  With "mosaic_gpu" it is `mosaic_scratch_parts`:
    8 * chunk * V, and in backward 10 * T * columns + 8 * T * Hs, or 2 * T * V where the budget has room for it.

    Example:
        >>> import jax
        >>> from onchip.jax import linear_jsd
        >>> keys = jax.random.split(jax.random.key(0), 4)
        >>> shapes = ((2, 8, 16), (100, 16), (2, 8, 32), (100, 32))
        >>> arrays = [jax.random.normal(k, s) for k, s in zip(keys, shapes)]
        >>> loss, grads = jax.jit(jax.value_and_grad(linear_jsd, argnums=(0, 1)))(*arrays)
        >>> grads[1].shape
        (100, 16)

    Sources: GKD (arXiv:2306.13649), for the divergence; Liger Kernel (arXiv:2410.10989), for the chunks.
    """
    return _call(OP, locals())


def sharded_linear_jsd(
    student_hidden: Array,  # [..., Hs]
    student_weight: Array,  # [V, Hs], or [Hs, V] with weight_layout="hv"
    teacher_hidden: Array | None = None,  # [..., Ht]
    teacher_weight: Array | None = None,  # [V, Ht], or [Ht, V]
    *,
    vocab_axis: str,
    token_axes: TokenAxes = (),
    mesh: Mesh | AbstractMesh | None = None,
    weight_layout: WeightLayout = "vh",
    beta: float = 0.5,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    target: Array | None = None,  # [...]
    labels: Array | None = None,  # another name for target
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
    r"""`linear_jsd` with the vocabulary split over the devices of a mesh axis, none of which has a whole weight.

    The loss and its gradients are those of `linear_jsd`.  Pass the whole arrays: the call makes its own
    `jax.shard_map`.  For each chunk of tokens a few numbers are gathered along `vocab_axis`, while the chunk's
    logits are there: no product is repeated.

    Args:
        student_hidden: [..., Hs], T tokens in the leading dimensions, which may be split over `token_axes`; the same on
            all devices along `vocab_axis`, as are teacher_hidden [..., Ht], target and token_weight [...].
        student_weight, teacher_weight, student_bias, teacher_bias: split over `vocab_axis` along V, which is the same
            for both models.
        teacher_logits: [..., V], instead of teacher_hidden and teacher_weight, split over `vocab_axis` along V.
        teacher_topk: instead of these, as in `linear_jsd`; the same on all devices along `vocab_axis`.
        vocab_axis, token_axes, mesh: as in `sharded_linear_cross_entropy`.
        vocab: how many entries count.  Those after them are padding and may hold any finite numbers.  Default: V.
        scratch_bytes: bound on each device's temporary memory.
        weight_layout, beta, temperature, temperature_squared, labels, ignore_index: as in `linear_jsd`.
        reduction, normalizer, hard_weight, teacher_grad, check_inputs, backend: likewise.

    Returns:
        The loss, as from `linear_jsd`: 0-d and the same on all devices, or [...] and split like the tokens.

    Raises:
        TypeError, ValueError, NotImplementedError: as `linear_jsd`, and as `sharded_linear_cross_entropy` for a mesh or
            axes that don't fit.

    Memory: on each device that of `linear_jsd` for its tokens and its part of the vocabulary.

    Example:
        >>> import jax
        >>> from onchip.jax import sharded_linear_jsd
        >>> keys = jax.random.split(jax.random.key(0), 4)
        >>> shapes = ((2, 8, 16), (100, 16), (2, 8, 32), (100, 32))
        >>> arrays = [jax.random.normal(k, s) for k, s in zip(keys, shapes)]
        >>> mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> def loss(*arrays):
        ...     return sharded_linear_jsd(*arrays, vocab_axis="model", mesh=mesh)
        >>> jax.jit(jax.grad(loss, argnums=1))(*arrays).shape
        (100, 16)

    Sources: GKD (arXiv:2306.13649), for the divergence; Megatron-LM (arXiv:1909.08053), for sharding the vocabulary.
    """
    return _call(ON_MESH, locals())


@by_torch("onchip.ops.linear_jsd.torch_op:jsd", "student_logits", "teacher_logits")
def jsd(
    student_logits: Array,  # [..., V]
    teacher_logits: Array | None = None,  # [..., V]
    *,
    axis_name: str | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    temperature_squared: bool = False,
    target: Array | None = None,  # [...]
    labels: Array | None = None,  # another name for target
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

    The loss is that of `linear_jsd`, with s = softmax(student_logits / temperature) and t the same for the teacher.

    Args:
        student_logits: [..., V] float32, bfloat16, float16 or float64.  -inf takes an entry out of the distribution.
        teacher_logits: [..., V] float32, bfloat16, float16 or float64.
        axis_name: as in `linear_jsd`, for both models' logits.
        beta, temperature, temperature_squared, target, labels, ignore_index: as in `linear_jsd`.
        token_weight, reduction, normalizer, teacher_topk, hard_weight, vocab: likewise.
        teacher_grad, check_inputs, scratch_bytes, backend: likewise.

    Softmaxes, loss and gradients are computed in float32 (float64 for float64 logits); a gradient is rounded to its
    logits' dtype once.

    Returns:
        The loss, as from `linear_jsd`.

    Raises:
        What `linear_jsd` raises.

    Memory: about 48 * chunk * V bytes, by `jax_scratch_parts` of `onchip.ops.linear_jsd.memory`; with "mosaic_gpu" a
    few numbers by token.

    Example:
        >>> import jax
        >>> from onchip.jax import jsd
        >>> student, teacher = jax.random.normal(jax.random.key(0), (2, 8, 100))
        >>> jax.grad(jsd)(student, teacher, beta=0.0).shape  # forward KL
        (8, 100)

    Source: GKD (arXiv:2306.13649).
    """
    return _call(LOGITS_OP, locals())


def _call(op: str, given: dict[str, Any]) -> jax.Array:
    """The result of the public function of this name for these arguments."""
    name, _ = take_target(op.removeprefix("sharded_"), given, needed=False)
    on_mesh, topk = op == ON_MESH, given["teacher_topk"]
    axis = given.get("axis_name")
    options, shape, size, dtype = checked(
        LOGITS_OP if op == LOGITS_OP else OP, given, name, split=on_mesh or axis is not None
    )
    total, spread, shard = math.prod(shape), None, None
    if on_mesh:
        spread = spread_of(ON_MESH, given["mesh"], given["vocab_axis"], given["token_axes"], "student_hidden", shape)
        every, devices = size, spread.devices(spread.vocab)
        size = check_split(ON_MESH, "student_weight", every, spread, "vocab")
        shard = Shard(spread.vocab, size, parallel.whole_vocab(ON_MESH, "vocab", given["vocab"], size, devices))
        # scratch_bytes as a fraction is a part of one device's logits.
        options = options.with_scratch(given, total * every // spread.parts)
    else:
        shard = parallel.shard_of(op, given, size, "vocab") if axis is not None else None
    vocab = size if shard is None else shard.vocab
    entries = size if spread is None else every
    student, teacher = (_model(given, who, entries) for who in ("student", "teacher"))
    models = student, teacher if options.teacher_grad else jax.tree.map(lax.stop_gradient, teacher)
    labels = checked_target(options.op, given, name, vocab, options)
    indices = values = None
    if topk is not None:
        indices, values = _topk_rows(options.op, topk, labels, vocab, dtype, options.check_inputs)
    token_weight = given["token_weight"]
    token_weight = None if token_weight is None else lax.stop_gradient(jnp.asarray(token_weight, dtype))
    constants = JsdConstants(labels, indices, values, token_weight, as_constant(given["normalizer"], dtype))
    kind, rest = ("", "") if topk is None else topk[2:]
    static = JsdStatic(options, platform(), size, kind, rest, shard, backend=given["backend"])
    if not total:
        return jnp.zeros(shape if options.reduction == "none" else (), dtype)
    of_models = tuple(
        parallel.roles_of(x) if isinstance(x, XlaProjection) else None if x is None else BY_ENTRY for x in models
    )
    of_constants = JsdConstants(BY_TOKEN, BY_TOKEN, BY_TOKEN, BY_TOKEN, WHOLE)
    roles = Roles(of_models, of_constants, BY_TOKEN if options.reduction == "none" else WHOLE)
    if spread is not None:
        of_weight, of_bias = Role(vocab=student.vocab_axis), Role(vocab=0)
        parts = {"hidden": BY_TOKEN, "weight": of_weight, "bias": of_bias, "logits": BY_ENTRY}
        named = {f"{who}_{part}": x for who in ("student", "teacher") for part, x in parts.items()}
        del named["student_logits"]
        check_types(ON_MESH, spread, given, named | {name: BY_TOKEN, "token_weight": BY_TOKEN})
        return _op.on_mesh(static._replace(mesh=OnMesh(spread, roles)), models, constants)  # type: ignore[no-any-return]
    share = isinstance(given["scratch_bytes"], float)
    made: jax.Array = by_tokens(_op, static, roles, models, constants, by_share=share, but=axis)
    return made.reshape(shape) if options.reduction == "none" else made


def _model(given: Mapping[str, Any], who: str, size: int) -> Any:
    """The part of a model that may get a gradient: an `XlaProjection`, logits or None.

    Padding is cut off here, in code that JAX differentiates itself.
    """
    hidden, weight, bias, logits = (given.get(f"{who}_{part}") for part in PARTS)
    if logits is not None:
        return cut(jnp.asarray(logits), 0, size, logits.ndim - 1)
    if hidden is None:
        return None
    return XlaProjection.of(hidden, weight, bias, given["weight_layout"]).part(Columns(0, size))


def on_device(static: JsdStatic, models: Any, given: JsdConstants) -> tuple[JsdStatic, Any, JsdConstants]:
    """The arguments of `forward`, made from arrays [...] or [..., n] of tokens."""
    student, normalizer = models[0], given.normalizer
    shape = (student.hidden if isinstance(student, XlaProjection) else student).shape[:-1]
    labels = jnp.zeros(shape, jnp.int32) if given.labels is None else given.labels
    axes = () if static.mesh is None else static.mesh.spread.tokens
    if axes and static.options.reduction == "mean" and normalizer is None:
        count = lax.psum(jnp.sum(labels != IGNORED), axes)
        normalizer = jnp.maximum(count, 1).astype(accumulator(jax.tree.leaves(student)[0].dtype))

    def flat(x: Any) -> Any:
        if x is None or isinstance(x, XlaProjection):
            return x and x.flat()
        return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])

    token_weight = None if given.token_weight is None else given.token_weight.reshape(-1)
    constants = JsdConstants(labels.reshape(-1), flat(given.indices), flat(given.values), token_weight, normalizer)
    entries = student.vocab if isinstance(student, XlaProjection) else student.shape[-1]
    static = parallel.split_as(static, entries)
    static = static if static.shard is None else static._replace(size=static.shard.size)
    rows = tuple(map(flat, models))
    refused = {"mosaic_gpu": mosaic_walk.refusal(static, rows, constants), "xla": None}
    if static.backend == "auto" and refused["mosaic_gpu"] is None:
        try:
            of_student = jax.tree.map(lambda _: True, rows[0]), none_of(rows)[1]
            mosaic_walk.plan(static, of_student, rows, constants)
        except ValueError as error:  # of a budget that may be enough for plain JAX
            refused["mosaic_gpu"] = str(error)
    elsewhere = () if static.shard else ("triton",)
    static = static._replace(backend=choose_backend(static.options.op, static.backend, refused, elsewhere))
    if static.backend == "mosaic_gpu":
        mosaic_walk.plan(static, none_of(rows), rows, constants)
    else:
        plan(static, none_of(rows), False, rows, constants)  # a budget that is too small shows here
    return static, rows, constants


def forward(static: JsdStatic, needs: Any, models: Any, constants: JsdConstants) -> tuple[Any, Any]:
    """The loss, and what backward needs."""
    if static.shard is not None:
        static.shard.refuse_untracked(static.options.op, needs)
    return _WALKS[static.backend].forward(static, needs, models, constants)  # type: ignore[no-any-return]


def backward(static: JsdStatic, needs: Any, saved: Any, grad_loss: Any) -> Any:
    return _WALKS[static.backend].backward(static, needs, saved, grad_loss)


_WALKS: dict[str, ModuleType] = {"mosaic_gpu": mosaic_walk, "xla": jax_walk}
_op = with_gradients_on_mesh(f"{OP}, {LOGITS_OP}", forward, backward, on_device, Between(at_once=stashes))


def checked_target(op: str, given: Mapping[str, Any], name: str, vocab: int, options: JsdOptions) -> jax.Array | None:
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
    """Indices and values [..., K] of a top-k teacher, a negative index for one out of range and NaN for a number that
    is no log-probability; raise for these, and for repeated indices, where they are known, but of ignored tokens."""
    known: Any = {"check_inputs": check_inputs, "kept": kept_tokens(op, labels, check_inputs=check_inputs)}
    indices = plain_labels(op, "teacher_topk.indices", topk.indices, vocab, None, **known)
    check_distinct(op, "teacher_topk.indices", topk.indices, **known)
    values = jnp.asarray(topk.values)
    if topk.kind == "log_probs":
        values = log_probs_or_nan(op, "teacher_topk", topk.values, **known)
    return indices, lax.stop_gradient(values.astype(dtype))


def checked(
    op: str, given: Mapping[str, Any], name: str, *, split: bool = False
) -> tuple[JsdOptions, tuple[int, ...], int, Any]:
    """The options, the tokens' shape, the number of entries that count and the dtype of sums, from a public function's
    arguments; raise if one is wrong or they don't fit together.  `name` is the argument that gave the target.

    Where the vocabulary is `split` over devices, all entries that there are count, as `vocab` is not of these alone.
    """
    options, layout = JsdOptions.of(op, given), given.get("weight_layout", "vh")
    if split:
        options = replace(options, vocab=None)
    named = named_arrays(op, given, name)
    check_layout(op, layout)
    arrays = require_arrays(op, named, optional=())
    # In the other layout a weight is checked as if transposed.
    turned = ("student_weight", "teacher_weight") if layout == "hv" else ()
    shapes = {n: x.shape[::-1] if n in turned else x.shape for n, x in arrays.items()}
    shape, size = check_shapes(options, shapes, name, split=split)
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
    choose_backend(op, given["backend"], dict.fromkeys(BACKENDS), ("triton",))
    return options, shape, size, accumulator(dtype_of(next(iter(arrays.values()))))
