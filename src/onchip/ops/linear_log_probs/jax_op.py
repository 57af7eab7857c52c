"""linear_log_probs for JAX: the public functions, and the gradients of their results with respect to logits.

The public functions, and log_probs of jax_rows.py, call `OPERATOR`, which `with_gradients_on_mesh` gives its
derivatives and spreads over devices.  The computation is in `onchip.vocab.jax_ways`; the package's docstring has the
maths.
"""

import math
from functools import partial
from types import ModuleType
from typing import Any, Generic, NamedTuple, Required, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from onchip.core.backends import choose_backend
from onchip.frontend.jax_call import IGNORED, OUT_OF_RANGE, Planned, Static
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
from onchip.frontend.jax_mesh import BY_TOKEN, WHOLE, OnMesh, Roles, TokenAxes, check_types
from onchip.frontend.jax_spread import Between, by_tokens, with_gradients_on_mesh
from onchip.frontend.jax_types import Array, Number, WeightLayout
from onchip.frontend.jax_values import checked_labels
from onchip.frontend.options import Flag, No, ScratchBytes, Yes, check_shift, one_target, shapes_of
from onchip.kernels.triton.jax_front import by_torch
from onchip.ops.linear_log_probs import LOGITS_OP, OP, LogProbsOptions, Results, WantedOutputs, check_shapes
from onchip.vocab import jax_ways
from onchip.vocab.jax_ways import Backend
from onchip.vocab.memory import Problem
from onchip.vocab.rows.memory import RowsProblem
from onchip.vocab.xla import parallel
from onchip.vocab.xla.loss import LossCall
from onchip.vocab.xla.parallel import check_axis
from onchip.vocab.xla.tiles import (
    VANISHED,
    CountedTokens,
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


class LogProbs(NamedTuple):
    """What `linear_log_probs` and `log_probs` return if more than log_prob is asked for.

    Fields that weren't asked for are None, although their types here don't say so.
    """

    log_prob: jax.Array
    """[...] or [..., K], float32 like the other floats (float64 for float64 inputs): log-probability of each id; 0 for
    ignored ids."""
    entropy: jax.Array
    """[...]: entropy of the softmax, in nats; 0 for tokens whose ids are all ignored.  Differentiable."""
    lse: jax.Array
    """[...]: log-sum-exp of the final logits; 0 for tokens whose ids are all ignored.  Differentiable."""
    top1: jax.Array
    """[...] int32: the vocabulary index of the largest logit (the first one, where logits tie); -1 for tokens whose
    ids are all ignored."""
    mean_logits: jax.Array
    """[...]: mean of the final logits over the vocabulary, -inf if one of them is; 0 for tokens whose ids are all
    ignored."""
    log_sum_sq_probs: jax.Array
    """[...]: log(sum(p**2)) of the softmax p, at most 0; 0 for tokens whose ids are all ignored."""


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
) -> LogProbs: ...
@overload
def linear_log_probs(
    hidden: Array, weight: Array, ids: Given = None, bias: Given = None, **options: Unpack[JaxOfHead[bool]]
) -> jax.Array | LogProbs: ...
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
) -> jax.Array | LogProbs:
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
            whichever is more, and at least what one chunk needs; without gradients 64 MiB for "mosaic_gpu".
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
) -> LogProbs: ...
@overload
def sharded_linear_log_probs(
    hidden: Array, weight: Array, ids: Given = None, bias: Given = None, **options: Unpack[JaxOfMesh[bool]]
) -> jax.Array | LogProbs: ...
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
) -> jax.Array | LogProbs:
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


def _call(op: str, given: dict[str, Any]) -> jax.Array | LogProbs:
    """The result of the public function of this name for these arguments."""
    on_mesh, axis = op == ON_MESH, given.get("axis_name")
    given["ids"] = one_target(OP, given["ids"], given.pop("labels"), name="ids")[1]
    check_axis(OP, axis, None if on_mesh else given["vocab_size"])
    hidden, ids, layout = given["hidden"], given["ids"], given["weight_layout"]
    check_layout(OP, layout)
    check_shapes(shapes_of(check_arrays(OP, given)), layout)
    layer, leading = XlaProjection.of(hidden, given["weight"], given["bias"], layout), hidden.shape[:-1]
    tokens, dtype = math.prod(leading), accumulator(dtype_of(hidden))
    options: LogProbsOptions = options_of(OP, LogProbsOptions, given, tokens * layer.vocab)
    numbers = checked_numbers(OP, options, given, dtype)
    of_layer, shard = parallel.roles_of(layer), None
    if on_mesh:
        spread, shard = parallel.on_mesh(ON_MESH, given, layer, "hidden", leading)
        # scratch_bytes as a fraction is a part of one device's logits.
        options = options_of(OP, LogProbsOptions, given, tokens * layer.vocab // spread.parts)
        of_arrays = {"hidden": BY_TOKEN, "weight": of_layer.weight, "bias": of_layer.bias, "ids": BY_TOKEN}
        check_types(ON_MESH, spread, given, of_arrays | {"temperature": BY_TOKEN})
    else:
        shard = parallel.shard_of(OP, given, layer.vocab)
        check_shift(OP, options.shift, leading, "hidden of shape [..., S, H]")
    vocab = layer.vocab if shard is None else shard.vocab
    plain = checked_labels(OP, given, "ids", vocab, options, len(leading) - 1 if options.shift else None)
    plain = following(plain, IGNORED, len(leading) - 1) if options.shift else plain
    numbers, temperature = token_temperature(numbers, given["temperature"], dtype)
    constants = GivenToLogProbs(plain, temperature, numbers)
    static = Static(options, platform(), given["backend"], shard)
    roles = Roles(of_layer, OF_GIVEN, BY_TOKEN)
    if tokens == 0:
        made = of_no_tokens(dtype)
    elif on_mesh:
        made = OPERATOR.on_mesh(static._replace(mesh=OnMesh(spread, roles)), layer, constants)
    else:
        share = isinstance(given["scratch_bytes"], float)
        made = by_tokens(OPERATOR, static, roles, layer, constants, by_share=share, but=axis)
    return returned(options, made, ids.shape, leading)


class GivenToLogProbs(NamedTuple):
    """The arrays of a public function's call that get no gradient."""

    ids: Any  # [...] or [..., K] int32 in [0, V), IGNORED or OUT_OF_RANGE
    temperature: Any  # [...], if each token has one
    numbers: Any  # the other numbers, by name, []

    def by_token(self, tokens: int) -> tuple[jax.Array, Transform]:
        """The ids, [T, K], and the numbers."""
        numbers = dict(self.numbers)
        if self.temperature is not None:
            numbers["temperature"] = self.temperature.reshape(-1)
        return self.ids.reshape(tokens, self.ids.size // tokens), Transform(**numbers)


OF_GIVEN = GivenToLogProbs(BY_TOKEN, BY_TOKEN, WHOLE)
"""Which of them are indexed by token."""


def on_device(static: Static, of: XlaProjection | jax.Array, given: GivenToLogProbs) -> tuple[Static, Any, Any]:
    """The arguments of `forward`, made from a layer with hidden [..., H], or from logits [..., V]."""
    if isinstance(of, XlaProjection):
        static, layer = parallel.split_as(static, of.vocab), of.flat()
        constants = given.by_token(len(layer.hidden))
        problem = problem_of(static, layer, constants, XlaProjection(True, True, layer.bias is not None))
        refused = jax_ways.refusals(problem, static.platform, layer.layout, shard=static.shard)
        elsewhere = () if static.shard else ("triton",)
        return static._replace(backend=choose_backend(OP, static.backend, refused, elsewhere)), layer, constants
    tokens, vocab = math.prod(of.shape[:-1]), of.shape[-1]
    static, constants = parallel.split_as(static, vocab), given.by_token(tokens)
    logits = of.reshape(tokens, vocab)
    refused = jax_ways.row_refusals(_rows(static, logits, constants, True), static.platform)
    return static._replace(backend=choose_backend(LOGITS_OP, static.backend, refused)), logits, constants


def returned(
    options: LogProbsOptions, outputs: WantedOutputs, of_ids: tuple[int, ...], shape: tuple[int, ...]
) -> jax.Array | LogProbs:
    """What a public function returns, for ids and tokens of these shapes."""
    log_prob: jax.Array = outputs.log_prob.reshape(of_ids)
    asked = (options.entropy, options.lse, options.top1, options.mean_logits, options.log_sum_sq_probs)
    if not any(asked):
        return log_prob
    more: Any = (x.reshape(shape) if wanted else None for x, wanted in zip(outputs[1:], asked, strict=True))
    return LogProbs(log_prob, *more)


def forward(
    static: Static, needs: Any, of: XlaProjection | jax.Array, constants: tuple[jax.Array, Transform]
) -> tuple[WantedOutputs, Planned | None]:
    """The outputs for a layer, or for logits [T, V], and what backward needs."""
    if static.shard is not None:
        static.shard.refuse_untracked(OP if isinstance(of, XlaProjection) else LOGITS_OP, needs)
    backend, plan, call = _planned(static, needs, of, constants)
    stats, _, saved = jax_ways.each(backend, partial(backend.forward, plan, wanted_of(static.options), needs))(call)
    # Logits are kept as the caller gave them: for 16-bit ones `call.source` may be a copy.
    return outputs_of(stats, call.tokens), None if saved is None else _saved(of, saved, plan)


def _saved(of: Any, saved: Any, plan: Any) -> Planned:
    return Planned((of, saved._replace(call=saved.call._replace(source=None))), plan)


def problem_of(
    static: Static, layer: XlaProjection, constants: tuple[jax.Array, Transform], needs: XlaProjection
) -> Problem:
    """The problem, which plans and refusals depend on, given which gradients are needed."""
    asked = {"per_token_loss": True, "split": static.shard is not None} | _asked(static.options, constants)
    asked["stats"] = static.options.entropy or static.options.top1
    return layer.problem(needs, static.platform, op=OP, **asked)


def _asked(options: LogProbsOptions, constants: tuple[jax.Array, Transform]) -> dict[str, Any]:
    ids, transform = constants
    return {
        "ids": ids.shape[1],
        "stats": options.entropy,
        "more_stats": options.mean_logits + options.log_sum_sq_probs,
        "softcap": transform.softcap is not None,
    }


def _planned(
    static: Static, needs: Any, of: XlaProjection | jax.Array, constants: tuple[jax.Array, Transform]
) -> tuple[ModuleType, Any, LossCall]:
    """The backend, its plan, and the call in the form that it takes."""
    (ids, transform), options = constants, static.options
    backend, source = jax_ways.way_to(static.backend, of)
    plan: Any
    if isinstance(of, XlaProjection):
        strategy = "recompute" if static.recompute else "auto"
        plan = backend.plan(problem_of(static, of, constants, needs), strategy, options.scratch_bytes)
    else:
        problem = _rows(static, of, constants, any(jax.tree.leaves(needs)))
        plan = jax_ways.row_plan(problem, static.backend, options.scratch_bytes)
    one = ids.shape[1] == 1
    selected = backend.select(plan, ids[:, 0] if one else jnp.where((ids != IGNORED).any(1), 0, IGNORED))
    own = selected.take(ids, IGNORED)
    return backend, plan, LossCall(source, transform.by_row(selected), selected, own, shard=static.shard)


def _rows(static: Static, logits: jax.Array, constants: tuple[jax.Array, Transform], needed: bool) -> RowsProblem:
    """The problem of a call with logits [T, V]."""
    on, (tokens, vocab) = "cpu" if static.platform == "cpu" else "cuda", logits.shape
    asked = _asked(static.options, constants)
    return RowsProblem(tokens, vocab, logits.dtype.name, on, needed, op=LOGITS_OP, **asked)


def backward(static: Static, needs: Any, saved: Planned, upstream: WantedOutputs) -> Any:
    of, known = saved.arrays
    backend, source = jax_ways.way_to(static.backend, of)
    known = known._replace(call=known.call._replace(source=source))
    gradient = gradient_by_outputs(known.call.tokens, known.call.ids, known.stats, upstream)
    return jax_ways.each(backend, partial(backend.gradients, saved.plan, needs))(known, gradient)


def keep(static: Static, saved: Planned, *_: Any) -> XlaTokenStats:
    _, known = saved.arrays
    return known.stats.by_token(known.call.tokens)  # type: ignore[no-any-return]


def resume(static: Static, needs: Any, kept: XlaTokenStats, of: Any, constants: Any) -> Planned:
    backend, plan, call = _planned(static, needs, of, constants)
    return _saved(of, backend.Saved(call, kept.by_row(call.tokens)), plan)


BETWEEN = Between(resumable=lambda static: static._replace(recompute=True), keep=keep, resume=resume)
OPERATOR = with_gradients_on_mesh(f"{OP}, {LOGITS_OP}", forward, backward, on_device, BETWEEN)


def of_no_tokens(dtype: Any) -> WantedOutputs:
    none = jnp.zeros(0, dtype)
    return WantedOutputs(none, none, none, jnp.zeros(0, jnp.int32), none, none)


def wanted_of(options: LogProbsOptions) -> Wanted:
    return Wanted(options.entropy, options.top1, options.mean_logits, options.log_sum_sq_probs)


def outputs_of(stats: XlaTokenStats, tokens: CountedTokens) -> WantedOutputs:
    """The outputs, indexed by token, from statistics that are indexed by row."""

    def spread(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else tokens.spread(x)

    return WantedOutputs(
        spread(stats.log_prob),
        spread(stats.entropy),
        spread(stats.lse),
        None if stats.argmax is None else jnp.where(tokens.kept, tokens.spread(stats.argmax), -1),
        spread(lax.stop_gradient(stats.mean_logits)),
        spread(lax.stop_gradient(stats.log_sum_sq)),
    )


def gradient_by_outputs(
    tokens: CountedTokens, ids: jax.Array, stats: XlaTokenStats, upstream: WantedOutputs
) -> XlaTokenGradient:
    """The gradient of each token's logits; None in `upstream` means zero."""
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
