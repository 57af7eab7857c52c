"""sharded_linear_jsd: linear_jsd for JAX, of a vocabulary that is split over a mesh axis, by a call that spreads itself
over the mesh.  What each device does is that of jax_split.py."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from onchip.frontend.jax_call import IGNORED
from onchip.frontend.jax_inputs import as_constant, per_token_constant, platform, take_target
from onchip.frontend.jax_mesh import P, Static, TokenAxes, check_split, check_types, spread_of, with_gradients_on_mesh
from onchip.frontend.jax_types import Array, Number, WeightLayout
from onchip.frontend.options import Reduction, ScratchBytes
from onchip.ops.linear_jsd import jax_call, jax_op
from onchip.ops.linear_jsd.jax_op import Backend
from onchip.ops.linear_jsd.spec import OP
from onchip.vocab.xla import parallel
from onchip.vocab.xla.parallel import Shard
from onchip.vocab.xla.tiles import Projection

NAME = f"sharded_{OP}"


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
    labels: Array | None = None,  # another name of target
    ignore_index: int = -100,
    token_weight: Array | None = None,  # [...]
    reduction: Reduction = "mean",
    normalizer: Number | None = None,
    student_bias: Array | None = None,  # [V]
    teacher_bias: Array | None = None,  # [V]
    teacher_logits: Array | None = None,  # [..., V]
    hard_weight: float = 0.0,
    vocab: int | None = None,
    teacher_grad: bool = False,
    check_inputs: bool = False,
    scratch_bytes: ScratchBytes = None,
    backend: Backend = "auto",
) -> jax.Array:
    r"""`linear_jsd` with the vocabulary split over the devices of a mesh axis, none of which has a whole weight.

    The loss and its gradients are those of `linear_jsd` of the whole arrays, which are given as such: the call makes
    its own `jax.shard_map`.  Along `vocab_axis` a few float32 numbers per token are gathered: once where beta is 0 or
    1, else twice, with another product of each head between them.

    Args:
        student_hidden: [..., Hs], T tokens in the leading dimensions, which may be split over `token_axes`; the same on
            all devices along `vocab_axis`, as are teacher_hidden [..., Ht], target and token_weight [...].
        student_weight, teacher_weight, student_bias, teacher_bias: split over `vocab_axis` along V, which is the same
            for both models.
        teacher_logits: [..., V], instead of teacher_hidden and teacher_weight, split over `vocab_axis` along V.
        vocab_axis, token_axes, mesh: as in `sharded_linear_cross_entropy`.
        vocab: so many entries count; those behind are padding, and may hold any finite numbers.  Default: V.
        scratch_bytes: bound on each device's temporary memory.
        weight_layout, beta, temperature, temperature_squared, labels, ignore_index: as in `linear_jsd`.
        reduction, normalizer, hard_weight, teacher_grad, check_inputs, backend: likewise.  There is no teacher_topk.

    Returns:
        As `linear_jsd`: the loss, 0-d and the same on all devices, or [...] and split as the tokens.

    Raises:
        TypeError, ValueError, NotImplementedError: as `linear_jsd`; and for a mesh or axes that don't fit, as
            `sharded_linear_cross_entropy`.

    Memory: on each device that of `linear_jsd` for its tokens and its part of the vocabulary, and
    4 * T * K * (n + 2) bytes for what n devices gather, with K up to 9 numbers of each token.

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

    Sources: GKD (arXiv:2306.13649) for the divergence; Megatron-LM (arXiv:1909.08053) for the vocabulary's shards; the
    chain rule of relative entropy (Cover and Thomas, Elements of Information Theory, 2.5) for their divergences.
    """
    given = locals() | {"teacher_topk": None}
    name, _ = take_target(OP, given, needed=False)
    options, shape, size, dtype = jax_op.checked(OP, given, name, split=True)
    spread = spread_of(NAME, mesh, vocab_axis, token_axes, "student_hidden", shape)
    size = check_split(NAME, "student_weight", size, spread, "vocab")
    shard = Shard(vocab_axis, size, parallel.whole_vocab(NAME, "vocab", vocab, size, spread.devices(vocab_axis)))
    # A part of the logits is one of those that a device has.
    options = options.with_scratch(given, math.prod(shape) * size * spread.devices(vocab_axis) // spread.parts)
    if math.prod(shape) == 0:
        return jnp.zeros(shape if reduction == "none" else (), dtype)
    spec = spread.by_token
    student = parallel.layer_of(student_hidden, student_weight, student_bias, weight_layout)
    teacher: Any = None if teacher_logits is None else jnp.asarray(teacher_logits)
    of_logits = P(*spread.leading, *[None] * (len(shape) - len(spread.leading)), vocab_axis)
    if teacher_hidden is not None:
        teacher = parallel.layer_of(teacher_hidden, teacher_weight, teacher_bias, weight_layout)
    if not teacher_grad:
        teacher = jax.tree.map(lax.stop_gradient, teacher)
    of_student = parallel.specs_of(student, spread)
    of_teacher = of_logits if teacher_hidden is None else of_student
    constants = _Constants(
        jax_op.checked_target(OP, given, name, shard.vocab, options),
        None if token_weight is None else lax.stop_gradient(jnp.asarray(token_weight, dtype)),
        as_constant(normalizer, dtype),
    )
    specs = {f"{who}_{part}": x for who in ("student", "teacher") for part, x in _named(of_student).items()}
    check_types(NAME, spread, given, specs | {"teacher_logits": of_logits, name: spec, "token_weight": spec})
    static = jax_call.Static(options, platform(), size, "", "", shard)
    local = _Local(static, weight_layout, spread.tokens)
    of_loss = spec if reduction == "none" else P()
    of_constants = _Constants(spec, spec, P())
    made: jax.Array = _op(
        Static(local, spread, ((of_student, of_teacher), of_constants, of_loss)), (student, teacher), constants
    )
    return made


def _named(layer: Projection) -> dict[str, Any]:
    return {"hidden": layer.hidden, "weight": layer.weight, "bias": layer.bias}


class _Constants(NamedTuple):
    """The arrays of a call that get no gradient."""

    labels: Any  # [...] int32 in [0, V), IGNORED or OUT_OF_RANGE
    token_weight: Any  # [...]
    normalizer: Any  # []


class _Local(NamedTuple):
    """What is known while tracing of what a device does."""

    static: jax_call.Static
    layout: WeightLayout
    token_axes: tuple[str, ...]


def _on_device(local: _Local, models: Any, given: _Constants) -> tuple[Any, jax_call.Constants]:
    """What jax_op.py's functions take, on a device."""
    student, teacher = models
    hidden, normalizer = student.hidden, given.normalizer
    shape, dtype = hidden.shape[:-1], student.accumulator
    labels = jnp.zeros(shape, jnp.int32) if given.labels is None else given.labels
    if local.token_axes and local.static.options.reduction == "mean" and normalizer is None:
        count = lax.psum(jnp.sum(labels != IGNORED), local.token_axes)
        normalizer = jnp.maximum(count, 1).astype(dtype)

    def flat(x: Any) -> Any:
        if isinstance(x, Projection):
            return Projection.of(x.hidden, x.weight, x.bias, local.layout)
        return x.reshape(-1, x.shape[-1])

    token_weight = per_token_constant(given.token_weight, dtype)
    constants = jax_call.Constants(labels.reshape(-1), None, None, token_weight, normalizer)
    return (flat(student), flat(teacher)), constants


def _forward(local: _Local, needs: Any, models: Any, given: _Constants) -> tuple[Any, Any]:
    loss, saved = jax_op.forward(local.static, needs, *_on_device(local, models, given))
    known = None if saved is None else saved[2]
    if local.static.options.reduction == "none":
        return loss.reshape(models[0].hidden.shape[:-1]), known
    return lax.psum(loss, local.token_axes) if local.token_axes else loss, known


def _backward(local: _Local, needs: Any, models: Any, given: _Constants, known: Any, upstream: Any) -> Any:
    own = _on_device(local, models, given)
    made = jax_op.backward(local.static, needs, (*own, known), upstream.reshape(-1) if upstream.ndim else upstream)

    def whole(model: Any, made: Any) -> Any:
        if isinstance(model, Projection):
            return parallel.gradients_of(model, made, local.token_axes)
        return None if made is None else made.reshape(model.shape)

    return tuple(whole(*x) for x in zip(models, made, strict=True))


_op = with_gradients_on_mesh(NAME, _forward, _backward)
