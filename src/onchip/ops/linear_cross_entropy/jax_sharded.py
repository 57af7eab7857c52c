"""sharded_linear_cross_entropy: linear_cross_entropy for JAX, of a vocabulary that is split over a mesh axis, by a call
that spreads itself over the mesh.  What each device does is that of jax_op.py."""

from typing import Any, Literal, NamedTuple, Required, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from onchip.core.backends import choose_backend
from onchip.frontend import jax_call
from onchip.frontend.jax_call import Planned
from onchip.frontend.jax_inputs import (
    as_constant,
    check_layout,
    options_of,
    platform,
    take_target,
    token_temperature,
)
from onchip.frontend.jax_labels import is_soft
from onchip.frontend.jax_mesh import P, Static, TokenAxes, check_types, with_gradients_on_mesh
from onchip.frontend.jax_types import Array, Number, WeightLayout, WithStats
from onchip.frontend.jax_values import checked_labels
from onchip.frontend.options import Reduction, ScratchBytes, check_class_weight, shapes_of
from onchip.ops.linear_cross_entropy import jax_op
from onchip.ops.linear_cross_entropy.jax_op import Backend, OfWeight
from onchip.ops.linear_cross_entropy.spec import OP, Options, Strategy
from onchip.vocab.xla import parallel
from onchip.vocab.xla.loss import Constants, Outputs
from onchip.vocab.xla.tiles import Projection

NAME = f"sharded_{OP}"


class OnMesh(OfWeight, total=False):
    """What the function takes by keyword, but for labels and return_stats."""

    mesh: Mesh | AbstractMesh | None
    vocab_axis: Required[str]
    token_axes: TokenAxes


@overload
def sharded_linear_cross_entropy(
    hidden: Array,
    weight: Array,
    target: Array | None = None,
    bias: Array | None = None,
    *,
    labels: Array | None = None,
    return_stats: Literal[False] = False,
    **options: Unpack[OnMesh],
) -> jax.Array: ...
@overload
def sharded_linear_cross_entropy(
    hidden: Array,
    weight: Array,
    target: Array | None = None,
    bias: Array | None = None,
    *,
    labels: Array | None = None,
    return_stats: Literal[True],
    **options: Unpack[OnMesh],
) -> WithStats: ...
@overload
def sharded_linear_cross_entropy(
    hidden: Array,
    weight: Array,
    target: Array | None = None,
    bias: Array | None = None,
    *,
    labels: Array | None = None,
    return_stats: bool,
    **options: Unpack[OnMesh],
) -> jax.Array | WithStats: ...
def sharded_linear_cross_entropy(
    hidden: Array,  # [..., H]
    weight: Array,  # [V, H], or [H, V] with weight_layout="hv"
    target: Array | None = None,  # [...]
    bias: Array | None = None,  # [V]
    *,
    vocab_axis: str,
    token_axes: TokenAxes = (),
    mesh: Mesh | AbstractMesh | None = None,
    labels: Array | None = None,  # another name of target
    weight_layout: WeightLayout = "vh",
    vocab_size: int | None = None,
    shift: bool = False,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    normalizer: Number | None = None,
    token_weight: Array | None = None,  # [...]
    class_weight: Array | None = None,  # [vocab_size]
    label_smoothing: Number = 0.0,
    z_loss: Number = 0.0,
    softcap: Number | None = None,
    logit_scale: Number = 1.0,
    temperature: Number = 1.0,
    scratch_bytes: ScratchBytes = None,
    strategy: Strategy = "auto",
    backend: Backend = "auto",
    check_inputs: bool = False,
    return_stats: bool = False,
) -> jax.Array | WithStats:
    r"""`linear_cross_entropy` with the vocabulary split over the devices of a mesh axis, none of which has the whole
    weight.

    The loss and its gradients are those of::

        linear_cross_entropy(hidden, weight[:vocab_size], target, bias[:vocab_size], ...)

    of the whole arrays, which are given as such: the call makes its own `jax.shard_map`.  Each device makes the
    statistics of its tokens over its entries of the vocabulary; along `vocab_axis` a few float32 numbers per token are
    gathered, once, and merged in a fixed order; then each device makes its part of the weight's gradient, and hidden's
    gradient is summed over them, in float32.  It works under jit, grad, scan and `jax.checkpoint`, with meshes of
    `AxisType.Auto` and `AxisType.Explicit`.

    Args:
        hidden: [..., H], T tokens in the leading dimensions, which may be split over `token_axes`; the same on all
            devices along `vocab_axis`.
        weight: [V, H], or [H, V] with weight_layout="hv", split over `vocab_axis` along V: V is a multiple of the
            number of its devices.
        target, labels: [...] integers, as in `linear_cross_entropy`; soft labels are refused.
        bias: [V], split as the weight.
        vocab_axis: the mesh axis of the vocabulary.
        token_axes: the mesh axes of the leading dimensions, as in a `jax.sharding.PartitionSpec`: a name, or for each
            dimension a name, a tuple of names or None.  The mean is over the tokens of all devices, and weight's
            gradient is summed over these.
        mesh: a `jax.sharding.Mesh`; by default that of `jax.set_mesh`.
        vocab_size: so many entries count; those behind are padding, and may hold any finite numbers.  Default: V.
        shift: as in `linear_cross_entropy`; not where token_axes split the sequences.
        class_weight: [vocab_size], the same on all devices.
        scratch_bytes: bound on each device's temporary memory.
        strategy: as in `linear_cross_entropy`, but that "stash" is of "mosaic_gpu" alone, which keeps exponentials
            relative to what each device knows; "xla" would need the softmax of a whole vocabulary at once.
        backend: "mosaic_gpu", "xla" or "auto", as in `linear_cross_entropy`, by the sizes of a device's part.  With
            padding the kernels take neither softcap nor label_smoothing.
        weight_layout, ignore_index, reduction, normalizer, token_weight: as in `linear_cross_entropy`.
        label_smoothing, z_loss, softcap, logit_scale, temperature, check_inputs, return_stats: likewise.

    Returns:
        As `linear_cross_entropy`: the loss, 0-d and the same on all devices, or of target's shape and split as the
        tokens; with return_stats `(loss, LinearCrossEntropyStats)`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `linear_cross_entropy`; and for no mesh, or axes that aren't of
            it, that can't share V or tokens evenly, or that an array of an explicit mesh isn't split over.

    Memory: on each device that of `linear_cross_entropy` for its tokens and its part of the vocabulary, and
    4 * T * K * (n + 2) bytes for what n devices gather, with K 4 to 9 numbers of each token.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.jax import sharded_linear_cross_entropy
        >>> hidden = jax.random.normal(jax.random.key(0), (2, 8, 16))
        >>> weight = jax.random.normal(jax.random.key(1), (100, 16))
        >>> target = jnp.arange(16).reshape(2, 8)
        >>> mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> def loss(hidden, weight):
        ...     return sharded_linear_cross_entropy(hidden, weight, target, vocab_axis="model", mesh=mesh)
        >>> jax.jit(jax.grad(loss, argnums=1))(hidden, weight).shape
        (100, 16)

    Sources: Megatron-LM (arXiv:1909.08053) for the vocabulary's shards; Milakov and Gimelshein (arXiv:1805.02867) for
    softmaxes that are merged.
    """
    given = locals()
    name, ids = take_target(OP, given)
    check_layout(OP, weight_layout)
    jax_op.refuse_soft(is_soft(ids, hidden))
    options, numbers, total = jax_op.checked(given, name, ids)
    layer = parallel.layer_of(hidden, weight, bias, weight_layout)
    spread, shard, of_layer = parallel.on_mesh(NAME, given, layer, name, ids.shape)
    check_class_weight(OP, shapes_of({} if class_weight is None else {"class_weight": class_weight}), shard.vocab)
    # A part of the logits is one of those that a device has.
    options = options_of(OP, Options, given, ids.size * layer.vocab // spread.parts)
    if shift and spread.leading[len(ids.shape) - 1 :] not in ((), (None,)):
        raise ValueError(
            f"{NAME}: shift=True needs whole sequences on each device, but token_axes split them along "
            f"{spread.leading[-1]!r}; shift {name} yourself, and leave shift out"
        )
    if ids.size == 0:
        return Outputs.of_nothing(reduction, return_stats, total).shaped(ids.shape)

    def as_given(x: Any) -> Any:
        return None if x is None else lax.stop_gradient(jnp.asarray(x, total))

    numbers, by_token = token_temperature(numbers, temperature, total)
    constants = _Constants(
        checked_labels(OP, given, name, shard.vocab, options, ids.ndim - 1 if shift else None),
        as_given(token_weight),
        by_token,
        as_constant(normalizer, total),
        as_constant(class_weight, total),
        numbers,
    )
    spec, whole = spread.by_token, P()
    of_constants = _Constants(spec, spec, spec, whole, whole, whole)
    specs = {"hidden": spec, "weight": of_layer.weight, "bias": of_layer.bias, name: spec} | dict.fromkeys(
        ("token_weight", "temperature"), spec
    )
    check_types(NAME, spread, given, specs)
    local = _Local(jax_call.Static(options, platform(), shard=shard), backend, weight_layout, spread.tokens)
    of_outputs: Any = (spec if reduction == "none" else whole), spec
    made = _op(Static(local, spread, (of_layer, of_constants, Outputs(*of_outputs))), layer, constants)
    return made.shaped(ids.shape)  # type: ignore[no-any-return]


class _Constants(NamedTuple):
    """The arrays of a call that get no gradient."""

    labels: Any  # [...] int32 in [0, V), IGNORED or OUT_OF_RANGE
    token_weight: Any  # [...]
    temperature: Any  # [...], where each token has one
    normalizer: Any  # []
    class_weight: Any  # [V]
    numbers: Any  # the others, by name, []


class _Local(NamedTuple):
    """What is known while tracing of what a device does."""

    static: jax_call.Static
    backend: Backend
    layout: WeightLayout
    token_axes: tuple[str, ...]


def _on_device(local: _Local, layer: Projection, given: _Constants) -> tuple[jax_call.Static, Projection, Constants]:
    """What jax_op.py's functions take, on a device."""
    static, numbers = local.static, dict(given.numbers)
    if given.temperature is not None:
        numbers["temperature"] = given.temperature.reshape(-1)
    projection = Projection.of(layer.hidden, layer.weight, layer.bias, local.layout)
    constants = Constants.of(
        given.labels,
        static.options,
        given.token_weight,
        given.normalizer,
        given.class_weight,
        numbers,
        projection.accumulator,
        static.options.shift,
        local.token_axes,
    )
    problem = jax_op.problem_of(static, projection, constants, Projection(True, True, layer.bias is not None))
    refused = jax_op.refusals(problem, static.platform, local.layout, static.options.strategy, static.shard)
    return static._replace(backend=choose_backend(OP, local.backend, refused)), projection, constants


def _forward(local: _Local, needs: Projection, layer: Projection, given: _Constants) -> tuple[Outputs, Planned]:
    static, projection, constants = _on_device(local, layer, given)
    outputs, saved = jax_op.forward(static, needs, projection, constants)
    loss, stats = outputs
    if static.options.reduction == "none":
        loss = loss.reshape(given.labels.shape)
    elif local.token_axes:
        loss = lax.psum(loss, local.token_axes)
    stats = None if stats is None else jax.tree.map(lambda x: x.reshape(given.labels.shape), stats)
    return Outputs(loss, stats), parallel.without_source(saved)


def _backward(
    local: _Local, needs: Projection, layer: Projection, given: _Constants, saved: Planned, cotangents: Outputs
) -> Projection:
    static, projection, _ = _on_device(local, layer, given)
    upstream = cotangents.loss.reshape(-1) if cotangents.loss.ndim else cotangents.loss
    saved = parallel.with_source(saved, projection)
    made = jax_op.backward(static, needs, saved, Outputs(upstream, None))
    return parallel.gradients_of(layer, made, local.token_axes)


_op = with_gradients_on_mesh(NAME, _forward, _backward)
