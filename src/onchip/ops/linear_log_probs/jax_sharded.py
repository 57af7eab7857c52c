"""sharded_linear_log_probs: linear_log_probs for JAX, of a vocabulary that is split over a mesh axis, by a call that
spreads itself over the mesh.  What each device does is that of jax_op.py."""

import math
from typing import Any, NamedTuple, Unpack, overload

import jax
from jax.sharding import AbstractMesh, Mesh

from onchip.frontend import jax_call
from onchip.frontend.jax_call import Planned
from onchip.frontend.jax_inputs import options_of, platform, token_temperature
from onchip.frontend.jax_mesh import P, Static, TokenAxes, check_types, with_gradients_on_mesh
from onchip.frontend.jax_types import Array, Number, WeightLayout
from onchip.frontend.jax_values import checked_labels
from onchip.frontend.options import ScratchBytes
from onchip.ops.linear_log_probs import jax_op
from onchip.ops.linear_log_probs.jax_op import Backend, Either, JustLogProb, LogProbs, More
from onchip.ops.linear_log_probs.spec import OP, Options, Outputs
from onchip.vocab.xla import parallel
from onchip.vocab.xla.tiles import Projection, Transform

NAME = f"sharded_{OP}"


@overload
def sharded_linear_log_probs(
    hidden: Array,
    weight: Array,
    ids: Array,
    bias: Array | None = None,
    *,
    vocab_axis: str,
    token_axes: TokenAxes = (),
    mesh: Mesh | AbstractMesh | None = None,
    weight_layout: WeightLayout = "vh",
    vocab_size: int | None = None,
    **options: Unpack[JustLogProb],
) -> jax.Array: ...
@overload
def sharded_linear_log_probs(
    hidden: Array,
    weight: Array,
    ids: Array,
    bias: Array | None = None,
    *,
    vocab_axis: str,
    token_axes: TokenAxes = (),
    mesh: Mesh | AbstractMesh | None = None,
    weight_layout: WeightLayout = "vh",
    vocab_size: int | None = None,
    **options: Unpack[More],
) -> LogProbs: ...
@overload
def sharded_linear_log_probs(
    hidden: Array,
    weight: Array,
    ids: Array,
    bias: Array | None = None,
    *,
    vocab_axis: str,
    token_axes: TokenAxes = (),
    mesh: Mesh | AbstractMesh | None = None,
    weight_layout: WeightLayout = "vh",
    vocab_size: int | None = None,
    **options: Unpack[Either],
) -> jax.Array | LogProbs: ...
def sharded_linear_log_probs(
    hidden: Array,  # [..., H]
    weight: Array,  # [V, H], or [H, V] with weight_layout="hv"
    ids: Array,  # [...] or [..., K]
    bias: Array | None = None,  # [V]
    *,
    vocab_axis: str,
    token_axes: TokenAxes = (),
    mesh: Mesh | AbstractMesh | None = None,
    weight_layout: WeightLayout = "vh",
    vocab_size: int | None = None,
    ignore_index: int = -100,
    softcap: Number | None = None,
    logit_scale: Number = 1.0,
    temperature: Number = 1.0,
    entropy: bool = False,
    lse: bool = False,
    top1: bool = False,
    mean_logits: bool = False,
    log_sum_sq_probs: bool = False,
    check_inputs: bool = False,
    scratch_bytes: ScratchBytes = None,
    backend: Backend = "auto",
) -> jax.Array | LogProbs:
    r"""`linear_log_probs` with the vocabulary split over the devices of a mesh axis, none of which has the whole
    weight.

    Results and gradients are those of::

        linear_log_probs(hidden, weight[:vocab_size], ids, bias[:vocab_size], ...)

    of the whole arrays, which are given as such: the call makes its own `jax.shard_map`.  Along `vocab_axis` a few
    float32 numbers per token are gathered, once, whatever is asked for.

    Args:
        hidden: [..., H], T tokens in the leading dimensions, which may be split over `token_axes`; the same on all
            devices along `vocab_axis`.
        weight, bias: [V, H] or [H, V], and [V], split over `vocab_axis` along V.
        ids: [...] or [..., K] integers, split as the tokens.
        vocab_axis, token_axes, mesh, vocab_size: as in `sharded_linear_cross_entropy`.
        scratch_bytes: bound on each device's temporary memory.
        weight_layout, ignore_index, softcap, logit_scale, temperature, backend: as in `linear_log_probs`.
        entropy, lse, top1, mean_logits, log_sum_sq_probs, check_inputs: likewise.

    Returns:
        As `linear_log_probs`, split as the tokens, and the same on all devices along `vocab_axis`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `linear_log_probs`; and for a mesh or axes that don't fit, as
            `sharded_linear_cross_entropy`.

    Memory: on each device that of `linear_log_probs` for its tokens and its part of the vocabulary, and
    4 * T * (K + 7) * (n + 2) bytes or less for what n devices gather.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.jax import sharded_linear_log_probs
        >>> hidden = jax.random.normal(jax.random.key(0), (2, 8, 16))
        >>> weight = jax.random.normal(jax.random.key(1), (100, 16))
        >>> ids = jnp.arange(16).reshape(2, 8)
        >>> mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> def mean(hidden, weight):
        ...     return sharded_linear_log_probs(hidden, weight, ids, vocab_axis="model", mesh=mesh).mean()
        >>> jax.jit(jax.grad(mean, argnums=1))(hidden, weight).shape
        (100, 16)

    Sources: as `sharded_linear_cross_entropy`.
    """
    given = locals()
    options, numbers, dtype = jax_op.checked(given)
    layer, leading = parallel.layer_of(hidden, weight, bias, weight_layout), hidden.shape[:-1]
    spread, shard, of_layer = parallel.on_mesh(NAME, given, layer, "hidden", leading)
    # A part of the logits is one of those that a device has.
    options = options_of(OP, Options, given, math.prod(leading) * layer.vocab // spread.parts)
    if hidden.size == 0:
        return jax_op.returned(options, jax_op.of_no_tokens(dtype), ids.shape, leading)
    numbers, by_token = token_temperature(numbers, temperature, dtype)
    constants = _Constants(
        checked_labels(OP, given, "ids", shard.vocab, options),
        by_token,
        numbers,
    )
    spec = spread.by_token
    specs = {"hidden": spec, "weight": of_layer.weight, "bias": of_layer.bias, "ids": spec, "temperature": spec}
    check_types(NAME, spread, given, specs)
    local = _Local(jax_call.Static(options, platform(), shard=shard), weight_layout, spread.tokens)
    static = Static(local, spread, (of_layer, _Constants(spec, spec, P()), spec))
    return jax_op.returned(options, _op(static, layer, constants), ids.shape, leading)


class _Constants(NamedTuple):
    """The arrays of a call that get no gradient."""

    ids: Any  # [...] or [..., K] int32 in [0, V), IGNORED or OUT_OF_RANGE
    temperature: Any  # [...], where each token has one
    numbers: Any  # the others, by name, []


class _Local(NamedTuple):
    """What is known while tracing of what a device does."""

    static: jax_call.Static
    layout: WeightLayout
    token_axes: tuple[str, ...]


def _on_device(local: _Local, layer: Projection, given: _Constants) -> tuple[Projection, tuple[jax.Array, Transform]]:
    """What jax_op.py's functions take, on a device."""
    numbers = dict(given.numbers)
    if given.temperature is not None:
        numbers["temperature"] = given.temperature.reshape(-1)
    projection = Projection.of(layer.hidden, layer.weight, layer.bias, local.layout)
    return projection, jax_op.constants_of(projection, given.ids, numbers)


def _forward(local: _Local, needs: Projection, layer: Projection, given: _Constants) -> tuple[Outputs, Planned | None]:
    outputs, saved = jax_op.forward(local.static, needs, *_on_device(local, layer, given))
    shapes = Outputs(given.ids.shape, *[layer.hidden.shape[:-1]] * 5)
    shaped = Outputs(*(None if x is None else x.reshape(shape) for x, shape in zip(outputs, shapes, strict=True)))
    return shaped, None if saved is None else parallel.without_source(saved)


def _backward(
    local: _Local, needs: Projection, layer: Projection, given: _Constants, saved: Planned, cotangents: Outputs
) -> Projection:
    projection, (ids, _) = _on_device(local, layer, given)
    shapes = Outputs(ids.shape, *[(len(ids),)] * 5)
    upstream = (None if x is None else x.reshape(shape) for x, shape in zip(cotangents, shapes, strict=True))
    saved = parallel.with_source(saved, projection)
    made = jax_op.backward(local.static, needs, saved, Outputs(*upstream))
    return parallel.gradients_of(layer, made, local.token_axes)


_op = with_gradients_on_mesh(NAME, _forward, _backward)
