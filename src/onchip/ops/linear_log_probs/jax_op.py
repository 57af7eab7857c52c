"""linear_log_probs, and log_probs for logits that exist already, for JAX: the public functions.

They check their inputs and call `OPERATOR`, which `onchip.vocab.jax_loss` makes of the functions below.  The package's
docstring has the maths.
"""

import math
from typing import Any, Generic, NamedTuple, Required, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from onchip.core.backends import choose_backend
from onchip.frontend.jax_call import IGNORED, OUT_OF_RANGE, Static
from onchip.frontend.jax_inputs import (
    accumulator,
    check_arrays,
    check_layout,
    checked_numbers,
    dtype_of,
    following,
    options_of,
    platform,
    token_temperature,
)
from onchip.frontend.jax_mesh import BY_ENTRY, BY_TOKEN, WHOLE, OnMesh, Roles, TokenAxes, check_types
from onchip.frontend.jax_spread import by_tokens
from onchip.frontend.jax_types import Array, Number, WeightLayout
from onchip.frontend.jax_values import checked_labels
from onchip.frontend.options import Flag, No, ScratchBytes, Yes, check_shift, one_target, shapes_of
from onchip.kernels.triton.jax_front import by_torch
from onchip.ops.linear_log_probs import (
    LOGITS_OP,
    OP,
    LogitsOptions,
    LogProbs,
    LogProbsOptions,
    Results,
    check_logits_shapes,
    check_shapes,
)
from onchip.vocab import jax_ways
from onchip.vocab.jax_loss import JaxLoss
from onchip.vocab.jax_ways import Backend
from onchip.vocab.xla import parallel
from onchip.vocab.xla.loss import LossCall
from onchip.vocab.xla.parallel import Shard, check_axis
from onchip.vocab.xla.tiles import (
    VANISHED,
    Transform,
    Wanted,
    XlaProjection,
    XlaTokenGradient,
    XlaTokenStats,
    shares,
)

ON_MESH = f"sharded_{OP}"
BACKENDS = tuple(jax_ways.MODULES)
Given = Array | None
Values = LogProbs[jax.Array]


class JaxLogProbsKeywords(TypedDict, total=False):
    """The keywords of all these ops, except those that ask for results."""

    labels: Array | None
    vocab_size: int | None
    ignore_index: int
    softcap: Number | None
    logit_scale: Number
    temperature: Number
    scratch_bytes: ScratchBytes
    check_inputs: bool
    backend: Backend


class JaxOfLogits(JaxLogProbsKeywords, Results[Flag], Generic[Flag], total=False):
    """The keywords of `log_probs`."""

    axis_name: str | None


class JaxOfHead(JaxLogProbsKeywords, Results[Flag], Generic[Flag], total=False):
    """The keywords of `linear_log_probs`."""

    weight_layout: WeightLayout
    axis_name: str | None
    shift: bool


class JaxOfMesh(JaxLogProbsKeywords, Results[Flag], Generic[Flag], total=False):
    """The keywords of `sharded_linear_log_probs`."""

    weight_layout: WeightLayout
    vocab_axis: Required[str]
    token_axes: TokenAxes
    mesh: Mesh | AbstractMesh | None


@overload
def linear_log_probs(
    hidden: Array, weight: Array, ids: Given = None, bias: Given = None, **options: Unpack[JaxOfHead[No]]
) -> jax.Array: ...
@overload
def linear_log_probs(
    hidden: Array, weight: Array, ids: Given = None, bias: Given = None, **options: Unpack[JaxOfHead[Yes]]
) -> Values: ...
@overload
def linear_log_probs(
    hidden: Array, weight: Array, ids: Given = None, bias: Given = None, **options: Unpack[JaxOfHead[bool]]
) -> jax.Array | Values: ...
@by_torch("onchip.ops.linear_log_probs.torch_op:linear_log_probs", "hidden", "weight", "bias")
def linear_log_probs(
    hidden: Array,  # [..., H]
    weight: Array,  # [V, H], or [H, V] with weight_layout="hv"
    ids: Array | None = None,  # [...] or [..., K]
    bias: Array | None = None,  # [V]
    *,
    labels: Array | None = None,  # another name for ids
    weight_layout: WeightLayout = "vh",
    axis_name: str | None = None,
    vocab_size: int | None = None,
    shift: bool = False,
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
) -> jax.Array | Values:
    r"""Log-probabilities of given ids under a linear layer's softmax, without storing the [tokens, vocab] logits.

    With a = (hidden @ weight.T + bias) * logit_scale, z = softcap * tanh(a / softcap) / temperature (without softcap
    a / temperature) and p = softmax(z), token by token::

        log_prob = z[ids] - lse,    lse = log(sum(exp(z))),    entropy = -sum(p * log(p))

    So log_prob is `jnp.take_along_axis(jax.nn.log_softmax(hidden @ weight.T + bias), ids[..., None], -1)[..., 0]`, with
    float32 logits whatever the inputs' dtype.  log_prob, entropy and lse are differentiable with respect to hidden,
    weight and bias.  It works under jit, grad, vmap, scan and `jax.checkpoint`.  If arrays are sharded, each device
    computes its own tokens and its own entries of the vocabulary.

    Args:
        hidden: [..., H] float32, bfloat16, float16 or float64, T tokens in the leading dimensions.
        weight: [V, H], or [H, V] with weight_layout="hv" (never transposed in memory), of hidden's dtype.  If one of
            them is float32 and the other has 16 bits, the products take 16-bit operands, and each gradient has its
            array's dtype.
        ids: [...] or [..., K] of any integer dtype: one or K vocabulary indices for each token, or `ignore_index`.
            The same id may occur several times.
        labels: another name for ids, by keyword.
        shift: pass True if ids are the sequence's own tokens, [..., S] or [..., S, K]: position i of each sequence then
            takes the ids of position i + 1, and the last one has none, as if they were ignored.  Inside `jax.shard_map`
            each device must hold whole sequences.
        bias: [V] of hidden's dtype or weight's.
        ignore_index: an id of this value has log_prob 0 and no gradient.  If all ids of a token have it, the results
            and gradients are exact zeros (top1: -1), whatever its hidden state holds.  Chunks of only such tokens cost
            nothing.
        weight_layout, softcap, logit_scale, temperature: as in `linear_cross_entropy`, and so are NumPy's float64, a
            bias of -inf, and numbers that are 0-d arrays, traced or not.
        axis_name, vocab_size: as in `linear_cross_entropy`: each device of a mesh axis has its own entries of weight
            and bias.
        entropy: also return the entropy of each token's softmax, in nats.
        lse: also return each token's log-sum-exp.
        top1: also return the index of each token's largest logit.
        mean_logits: also return the mean of each token's final logits z over the vocabulary; -inf if one of them is.
        log_sum_sq_probs: also return log(sum(p**2)) for each token, the logarithm of the probability that two samples
            are the same.  top1, mean_logits and log_sum_sq_probs have no gradient.
        check_inputs: as in `linear_cross_entropy`: check ids and temperatures on a GPU too.
        scratch_bytes: bound on the temporary memory, not counting results and gradients in their parameters' dtypes, in
            one of the forms that `linear_cross_entropy` takes.  Default: 256 MiB or an eighth of the float32 logits,
            for "mosaic_gpu" a fifth, whichever is more, and at least what one chunk needs; without gradients 64 MiB for
            "mosaic_gpu".
        backend: "mosaic_gpu", "xla", "triton" or "auto", as in `linear_cross_entropy`.

    Returns:
        log_prob in ids' shape, in float32 (float64 for float64 inputs).  If anything else is asked for,
        `LogProbs(log_prob, entropy, lse, top1, mean_logits, log_sum_sq_probs)` instead, with None for the rest.
        Under jit, or on a GPU without check_inputs, an id that is neither ignore_index nor in [0, V) has log_prob NaN,
        and so are the gradients that its token enters.

    Raises:
        TypeError: an argument has the wrong type or dtype, or the call is differentiated in forward mode.
        ValueError: a shape, range or option is wrong; scratch_bytes is too small (the message says what suffices); or
            an id is out of range, where values are known (the message names it).
        NotImplementedError: the result is differentiated twice.

    Memory: `scratch_parts` of `onchip.vocab.xla.memory` ("xla") and `onchip.vocab.mosaic.memory` ("mosaic_gpu") are the
    formulas for a jitted step.  In float32 on a CPU it is about 8 * token_chunk * vocab_chunk + 4 * T * H bytes, and
    twice the weight's gradient for a chunk.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.jax import linear_log_probs
        >>> hidden = jax.random.normal(jax.random.key(0), (2, 8, 16))
        >>> weight = jax.random.normal(jax.random.key(1), (100, 16))
        >>> ids = jnp.arange(16).reshape(2, 8)
        >>> grads = jax.jit(jax.grad(lambda h, w: linear_log_probs(h, w, ids).mean(), argnums=(0, 1)))(hidden, weight)
        >>> grads[1].shape
        (100, 16)

    Sources: Cut Cross-Entropy (arXiv:2411.09009), without its gradient filter, for computing logits again in backward;
    Milakov and Gimelshein (arXiv:1805.02867), for the running softmax.
    """
    return _call(OP, locals())


@overload
def sharded_linear_log_probs(
    hidden: Array, weight: Array, ids: Given = None, bias: Given = None, **options: Unpack[JaxOfMesh[No]]
) -> jax.Array: ...
@overload
def sharded_linear_log_probs(
    hidden: Array, weight: Array, ids: Given = None, bias: Given = None, **options: Unpack[JaxOfMesh[Yes]]
) -> Values: ...
@overload
def sharded_linear_log_probs(
    hidden: Array, weight: Array, ids: Given = None, bias: Given = None, **options: Unpack[JaxOfMesh[bool]]
) -> jax.Array | Values: ...
def sharded_linear_log_probs(
    hidden: Array,  # [..., H]
    weight: Array,  # [V, H], or [H, V] with weight_layout="hv"
    ids: Array | None = None,  # [...] or [..., K]
    bias: Array | None = None,  # [V]
    *,
    labels: Array | None = None,  # another name for ids
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
) -> jax.Array | Values:
    r"""`linear_log_probs` with the vocabulary split over the devices of a mesh axis, none of which has the whole
    weight.

    Results and gradients are those of::

        linear_log_probs(hidden, weight[:vocab_size], ids, bias[:vocab_size], ...)

    Pass the whole arrays: the call makes its own `jax.shard_map`.  A few float32 numbers per token are gathered along
    `vocab_axis`, once, whichever results are asked for.

    Args:
        hidden: [..., H], T tokens in the leading dimensions, which may be split over `token_axes`; the same on all
            devices along `vocab_axis`.
        weight, bias: [V, H] or [H, V], and [V], split over `vocab_axis` along V.
        ids, labels: [...] or [..., K] integers, split like the tokens.
        vocab_axis, token_axes, mesh, vocab_size: as in `sharded_linear_cross_entropy`.
        scratch_bytes: bound on each device's temporary memory.
        weight_layout, ignore_index, softcap, logit_scale, temperature, backend: as in `linear_log_probs`.
        entropy, lse, top1, mean_logits, log_sum_sq_probs, check_inputs: likewise.

    Returns:
        What `linear_log_probs` returns, split like the tokens, and the same on all devices along `vocab_axis`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `linear_log_probs`, and as `sharded_linear_cross_entropy` for a
            mesh or axes that don't fit.

    Memory: on each device that of `linear_log_probs` for its tokens and its part of the vocabulary, and at most
    4 * T * (K + 7) * (n + 2) bytes for what n devices gather.

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
    return _call(ON_MESH, locals() | {"shift": False})


@overload
def log_probs(logits: Array, ids: Given = None, **options: Unpack[JaxOfLogits[No]]) -> jax.Array: ...
@overload
def log_probs(logits: Array, ids: Given = None, **options: Unpack[JaxOfLogits[Yes]]) -> Values: ...
@overload
def log_probs(logits: Array, ids: Given = None, **options: Unpack[JaxOfLogits[bool]]) -> jax.Array | Values: ...
@by_torch("onchip.ops.linear_log_probs.torch_op:log_probs", "logits")
def log_probs(
    logits: Array,  # [..., V]
    ids: Array | None = None,  # [...] or [..., K]
    *,
    labels: Array | None = None,  # another name for ids
    axis_name: str | None = None,
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
) -> jax.Array | Values:
    """Log-probabilities of given ids under the softmax of logits that exist already, with little extra memory.

    With a = logits * logit_scale, z = softcap * tanh(a / softcap) / temperature (without softcap a / temperature) and
    p = softmax(z), token by token::

        log_prob = z[ids] - lse,    lse = log(sum(exp(z))),    entropy = -sum(p * log(p))

    So log_prob is `jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), ids[..., None], -1)[..., 0]`,
    without a float32 copy of the logits or a matrix of their softmax.  log_prob, entropy and lse are differentiable
    with respect to the logits.  It works under jit, grad, vmap, scan and `jax.checkpoint`.  If arrays are sharded, each
    device computes its own tokens and its own entries of the vocabulary.

    Args:
        logits: [..., V] float32, bfloat16, float16 or float64, T tokens in the leading dimensions.  -inf takes an entry
            out of the vocabulary (unless there is a softcap, which makes it -softcap).  Kernels take logits of a token
            that are all below -1e30 as if all were -inf: its log_prob is infinite or NaN.
        ids, labels: [...] or [..., K] of any integer dtype, as in `linear_log_probs`.
        ignore_index, softcap, logit_scale, temperature: as in `linear_log_probs`; temperature is a number or [...].
        entropy, lse, top1, mean_logits, log_sum_sq_probs, check_inputs: likewise.
        axis_name, vocab_size: as in `linear_log_probs`; logits are then this device's, [..., V / n].
        scratch_bytes: bound on the temporary memory, not counting results and gradient, in one of the forms that
            `linear_cross_entropy` takes.  Default: 256 MiB or an eighth of the float32 logits, whichever is more, and
            at least what a useful chunk of rows needs.
        backend: "mosaic_gpu" (kernels for Hopper), "xla" (plain JAX, on any device), "triton" (PyTorch's kernels, as
            in `linear_cross_entropy`) or "auto".

    Returns:
        log_prob of ids' shape in float32 (float64 for float64 inputs), or `LogProbs`, as in `linear_log_probs`.  Under
        jit, or on a GPU without check_inputs, an id that is neither ignore_index nor in [0, V) has log_prob NaN, and so
        is its token's gradient.

    Raises:
        TypeError: an argument has the wrong type or dtype, or the call is differentiated in forward mode.
        ValueError: a shape, range or option is wrong; scratch_bytes doesn't suffice for one row (the message says what
            does); or an id is out of range, where values are known (the message names it).
        NotImplementedError: the result is differentiated twice.

    Memory: `scratch_parts` of `onchip.vocab.rows.memory` is the formula for a jitted step, with `ids` = K: about
    8 * rows * V bytes for chunks of that many rows, and on a CPU a copy of 16-bit logits.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.jax import log_probs
        >>> logits = jax.random.normal(jax.random.key(0), (2, 8, 100))
        >>> ids = jnp.arange(16).reshape(2, 8)
        >>> jax.jit(jax.grad(lambda x: log_probs(x, ids).mean()))(logits).shape
        (2, 8, 100)

    Source: Liger Kernel (arXiv:2410.10989), for the gradient from the log-sum-exp alone.
    """
    return _call(LOGITS_OP, locals())


def _call(op: str, given: dict[str, Any]) -> jax.Array | Values:
    """The result of the public function of this name for these arguments."""
    on_mesh, of_logits, axis = op == ON_MESH, op == LOGITS_OP, given.get("axis_name")
    name, first = (LOGITS_OP, "logits") if of_logits else (OP, "hidden")
    given["ids"] = one_target(name, given["ids"], given.pop("labels"), name="ids")[1]
    check_axis(name, axis, None if on_mesh else given["vocab_size"], *(["logits"] if of_logits else []))
    of: Any
    of_parameters: Any
    shard: Shard | None
    if of_logits:
        check_logits_shapes(shapes_of(check_arrays(name, given)))
        of, of_parameters, vocab = jnp.asarray(given["logits"]), BY_ENTRY, given["logits"].shape[-1]
    else:
        layout = given["weight_layout"]
        check_layout(name, layout)
        check_shapes(shapes_of(check_arrays(name, given)), layout)
        of = XlaProjection.of(given["hidden"], given["weight"], given["bias"], layout)
        of_parameters, vocab = parallel.roles_of(of), of.vocab
    ids, leading, dtype = given["ids"], given[first].shape[:-1], accumulator(dtype_of(given[first]))
    tokens, kind = math.prod(leading), LogitsOptions if of_logits else LogProbsOptions
    options: LogProbsOptions = options_of(name, kind, given, tokens * vocab)
    numbers = checked_numbers(name, options, given, dtype)
    if on_mesh:
        spread, shard = parallel.on_mesh(ON_MESH, given, of, first, leading)
        # scratch_bytes as a fraction is a part of one device's logits.
        options = options_of(name, kind, given, tokens * vocab // spread.parts)
        of_arrays = {first: BY_TOKEN, "weight": of_parameters.weight, "bias": of_parameters.bias, "ids": BY_TOKEN}
        check_types(ON_MESH, spread, given, of_arrays | {"temperature": BY_TOKEN})
    else:
        shard = parallel.shard_of(name, given, vocab)
        check_shift(name, options.shift, leading, "hidden of shape [..., S, H]")
    vocab = vocab if shard is None else shard.vocab
    plain = checked_labels(name, given, "ids", vocab, options, len(leading) - 1 if options.shift else None)
    plain = following(plain, IGNORED, len(leading) - 1) if options.shift else plain
    if of_logits:
        choose_backend(name, given["backend"], dict.fromkeys(jax_ways.ROWS), ("triton",))
    numbers, temperature = token_temperature(numbers, given["temperature"], dtype)
    constants = GivenToLogProbs(plain, temperature, numbers)
    static = Static(options, platform(), given["backend"], shard)
    roles = Roles(of_parameters, OF_GIVEN, BY_TOKEN)
    if tokens == 0:
        none = jnp.zeros(0, dtype)
        made = LogProbs(none, none, none, jnp.zeros(0, jnp.int32), none, none)
    elif on_mesh:
        made = OPERATOR.on_mesh(static._replace(mesh=OnMesh(spread, roles)), of, constants)
    else:
        share = isinstance(given["scratch_bytes"], float)
        made = by_tokens(OPERATOR, static, roles, of, constants, by_share=share, but=axis)
    return returned(options, made, ids.shape, leading)


def returned(
    options: LogProbsOptions, outputs: LogProbs[Any], of_ids: tuple[int, ...], shape: tuple[int, ...]
) -> jax.Array | Values:
    """What a public function returns, for ids and tokens of these shapes."""
    log_prob: jax.Array = outputs.log_prob.reshape(of_ids)
    asked = (options.entropy, options.lse, options.top1, options.mean_logits, options.log_sum_sq_probs)
    if not any(asked):
        return log_prob
    more: Any = (x.reshape(shape) if wanted else None for x, wanted in zip(outputs[1:], asked, strict=True))
    return LogProbs(log_prob, *more)


# -------------------------------------------------------------------------- what the operator is made of


class GivenToLogProbs(NamedTuple):
    """The arrays of a public function's call that get no gradient."""

    ids: Any  # [...] or [..., K] int32 in [0, V), IGNORED or OUT_OF_RANGE
    temperature: Any  # [...], if each token has one
    numbers: Any  # the other numbers, by name, []


OF_GIVEN = GivenToLogProbs(BY_TOKEN, BY_TOKEN, WHOLE)
"""Which of them are indexed by token."""


def _by_token(
    static: Static, given: GivenToLogProbs, tokens: int, dtype: Any, axes: tuple[str, ...]
) -> tuple[jax.Array, Transform]:
    """The ids, [T, K], and the numbers."""
    numbers = dict(given.numbers)
    if given.temperature is not None:
        numbers["temperature"] = given.temperature.reshape(-1)
    return given.ids.reshape(tokens, given.ids.size // tokens), Transform(**numbers)


def _problem(static: Static, constants: tuple[jax.Array, Transform], of_layer: bool) -> dict[str, Any]:
    options, (ids, transform) = static.options, constants
    known = {
        "op": OP if of_layer else LOGITS_OP,
        "ids": ids.shape[1],
        "stats": options.entropy or (of_layer and options.top1),
        "more_stats": options.mean_logits + options.log_sum_sq_probs,
        "softcap": transform.softcap is not None,
    }
    return known | ({"per_token_loss": True} if of_layer else {})


def _loss_call(static: Static, constants: tuple[jax.Array, Transform], source: Any, select: Any) -> LossCall:
    (ids, transform), of = constants, source()
    one = ids.shape[1] == 1
    tokens = select(ids[:, 0] if one else jnp.where((ids != IGNORED).any(1), 0, IGNORED))
    own = tokens.take(ids, IGNORED)
    return LossCall(of, transform.by_row(tokens), tokens, own, shard=static.shard)


def _wanted(static: Static, constants: Any) -> Wanted:
    options = static.options
    return Wanted(options.entropy, options.top1, options.mean_logits, options.log_sum_sq_probs)


def _outputs(static: Static, call: LossCall, stats: XlaTokenStats, sums: Any) -> LogProbs[Any]:
    """The outputs, indexed by token, from statistics that are indexed by row."""
    tokens = call.tokens

    def spread(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else tokens.spread(x)

    # Kernels have it for the entropy too; but devices whose backends differ have the same outputs.
    argmax = stats.argmax if static.options.top1 else None
    return LogProbs(
        spread(stats.log_prob),
        spread(stats.entropy),
        spread(stats.lse),
        None if argmax is None else jnp.where(tokens.kept, tokens.spread(argmax), -1),
        spread(lax.stop_gradient(stats.mean_logits)),
        spread(lax.stop_gradient(stats.log_sum_sq)),
    )


def _gradient(static: Static, known: Any, upstream: LogProbs[Any]) -> XlaTokenGradient:
    """The gradient of each token's logits; None in `upstream` means zero."""
    tokens, ids, stats = known.call.tokens, known.call.ids, known.stats
    dtype = stats.lse.dtype

    def rows(grad: Any) -> jax.Array | None:
        return None if grad is None else tokens.take(grad.astype(dtype), 0)

    g, g_entropy, g_lse = map(rows, (upstream.log_prob, upstream.entropy, upstream.lse))
    g = jnp.zeros(ids.shape, dtype) if g is None else g
    g = jnp.where(ids == IGNORED, 0, jnp.where(ids == OUT_OF_RANGE, jnp.nan, g))
    same, rest = shares(ids, g)
    common = jnp.sum(g, 1)
    if g_lse is not None:
        common, rest = common - g_lse, rest - g_lse[:, None]
    if g_entropy is not None and stats.entropy is not None:
        rest += g_entropy[:, None] * jnp.maximum(stats.log_prob + stats.entropy[:, None], VANISHED[dtype])
    # 1 - p as -expm1(log p): 1 minus a rounded p would lose all digits of a p near 1.
    at_ids = -same * jnp.expm1(stats.log_prob) - jnp.exp(stats.log_prob) * rest
    return XlaTokenGradient(-common, at_ids, None if g_entropy is None else -g_entropy)


OPERATOR = JaxLoss(
    OP,
    _by_token,
    _problem,
    _loss_call,
    _wanted,
    _outputs,
    _gradient,
    LOGITS_OP,
).operator(resumable=lambda static: static._replace(recompute=True))
