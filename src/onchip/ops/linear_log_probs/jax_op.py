"""linear_log_probs for JAX: the public function, and the gradients of its results by each token's logits.

The public function calls `_op`, to which `onchip.frontend.jax_call.with_gradients` gives its derivatives.  The walks
over the logits are those of `onchip.vocab.xla.walk`, the maths is in the package's docstring.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax

from onchip.core.backends import choose_backend
from onchip.frontend.jax_call import IGNORED, OUT_OF_RANGE, Planned, Static, callable_here, vary_alike, with_gradients
from onchip.frontend.jax_inputs import (
    accumulator,
    check_arrays,
    check_layout,
    checked_numbers,
    dtype_of,
    following,
    options_of,
    platform,
)
from onchip.frontend.jax_types import Array, Number, WeightLayout
from onchip.frontend.jax_values import checked_labels
from onchip.frontend.options import ScratchBytes, check_shift, shapes_of
from onchip.ops.linear_log_probs import spec
from onchip.ops.linear_log_probs.spec import OP, Options, Outputs
from onchip.vocab.xla import memory, walk
from onchip.vocab.xla.loss import Call
from onchip.vocab.xla.parallel import check_axis, refuse_typed_sharding, shard_of
from onchip.vocab.xla.tiles import (
    VANISHED,
    Projection,
    TokenGradient,
    Tokens,
    TokenStats,
    Transform,
    Wanted,
    select_tokens,
    shares,
)

BACKENDS = ("xla",)
Backend = Literal["auto", "xla"]


class LogProbs(NamedTuple):
    """What `linear_log_probs` and `log_probs` return if more than log_prob was asked for.

    What wasn't asked for is None, whatever its type here.
    """

    log_prob: jax.Array
    """[...] or [..., K] float32, of float64 inputs float64, as are the others: log-probability of each id; 0 for
    ignored ones."""
    entropy: jax.Array
    """[...]: entropy of the softmax, in nats; 0 for tokens whose ids are all ignored.  Differentiable."""
    lse: jax.Array
    """[...]: log-sum-exp of the final logits; 0 for such tokens.  Differentiable."""
    top1: jax.Array
    """[...] int32: the vocabulary index of the largest logit (the first one, where they tie); -1 for such
    tokens."""
    mean_logits: jax.Array
    """[...]: mean of the final logits over the vocabulary, -inf where one of them is; 0 for such tokens."""
    log_sum_sq_probs: jax.Array
    """[...]: log(sum(p**2)) of the softmax p, at most 0; 0 for such tokens."""


class Keywords(TypedDict, total=False):
    """What all of these ops take by keyword beside what they are asked for."""

    ignore_index: int
    softcap: Number | None
    logit_scale: Number
    temperature: Number
    scratch_bytes: ScratchBytes
    check_inputs: bool
    backend: Backend


class JustLogProb(Keywords, total=False):
    """Nothing else is asked for."""

    entropy: Literal[False]
    lse: Literal[False]
    top1: Literal[False]
    mean_logits: Literal[False]
    log_sum_sq_probs: Literal[False]


class More(Keywords, total=False):
    """Something else is asked for."""

    entropy: Literal[True]
    lse: Literal[True]
    top1: Literal[True]
    mean_logits: Literal[True]
    log_sum_sq_probs: Literal[True]


class Either(Keywords, total=False):
    """Whether something else is asked for, the types don't know."""

    entropy: bool
    lse: bool
    top1: bool
    mean_logits: bool
    log_sum_sq_probs: bool


@overload
def linear_log_probs(
    hidden: Array,
    weight: Array,
    ids: Array,
    bias: Array | None = None,
    *,
    weight_layout: WeightLayout = "vh",
    axis_name: str | None = None,
    vocab_size: int | None = None,
    shift: bool = False,
    **options: Unpack[JustLogProb],
) -> jax.Array: ...
@overload
def linear_log_probs(
    hidden: Array,
    weight: Array,
    ids: Array,
    bias: Array | None = None,
    *,
    weight_layout: WeightLayout = "vh",
    axis_name: str | None = None,
    vocab_size: int | None = None,
    shift: bool = False,
    **options: Unpack[More],
) -> LogProbs: ...
@overload
def linear_log_probs(
    hidden: Array,
    weight: Array,
    ids: Array,
    bias: Array | None = None,
    *,
    weight_layout: WeightLayout = "vh",
    axis_name: str | None = None,
    vocab_size: int | None = None,
    shift: bool = False,
    **options: Unpack[Either],
) -> jax.Array | LogProbs: ...
def linear_log_probs(
    hidden: Array,  # [..., H]
    weight: Array,  # [V, H], or [H, V] with weight_layout="hv"
    ids: Array,  # [...] or [..., K]
    bias: Array | None = None,  # [V]
    *,
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
    weight and bias.  It works under jit, grad, vmap, scan and `jax.checkpoint`.

    Args:
        hidden: [..., H] float32, bfloat16, float16 or float64, T tokens in the leading dimensions.
        weight: [V, H], or [H, V] with weight_layout="hv" (never transposed in memory), of hidden's dtype; or one of the
            two is float32 and the other of 16 bits: the product is of 16 bits then, and each gradient of its array's
            dtype.
        ids: [...] or [..., K] of any integer dtype: one or K vocabulary indices for each token, or `ignore_index`.
            The same id may occur several times.
        shift: ids hold the tokens as they are, [..., S] or [..., S, K]: position i of each sequence has those of
            position i + 1, and the last one has none, as if they were ignored.  Each device must hold
            whole sequences inside of `jax.shard_map`.
        bias: [V] of hidden's dtype or weight's.
        ignore_index: an id of this value has log_prob 0 and no gradient.  A token whose ids all have it leaves exact
            zeros (top1: -1) and may hold anything; chunks of only such tokens cost nothing.
        weight_layout, softcap, logit_scale, temperature: as in `linear_cross_entropy`, which also says what holds for
            NumPy's float64, a bias of -inf, and numbers that are 0-d arrays, traced or not.
        axis_name, vocab_size: as in `linear_cross_entropy`: each device of a mesh axis has its own entries of weight
            and bias.
        entropy: also return the entropy of each token's softmax, in nats.
        lse: also return each token's log-sum-exp.
        top1: also return the index of each token's largest logit.
        mean_logits: also return the mean of each token's final logits z over the vocabulary; -inf where a logit is.
        log_sum_sq_probs: also return log(sum(p**2)) of each token, the logarithm of the probability that two samples
            are the same.  top1, mean_logits and log_sum_sq_probs are detached: they have no gradient.
        check_inputs: as in `linear_cross_entropy`: raise for ids and temperatures that are wrong on a GPU too.
        scratch_bytes: bound on the temporary memory, results and gradients in their parameters' dtypes not counted,
            given as in `linear_cross_entropy`.  Default: 256 MiB or an eighth of the float32 logits, whichever is more,
            and at least what one chunk needs.
        backend: "xla" (plain JAX, on any device), or "auto": the first backend that can run.

    Returns:
        log_prob of ids' shape in float32, of float64 inputs in float64.  If anything else is asked for,
        `LogProbs(log_prob, entropy, lse, top1, mean_logits, log_sum_sq_probs)` instead, with None for what isn't.
        Under jit, or on a GPU without check_inputs, an id that is neither ignore_index nor in [0, V) has log_prob NaN,
        and so are the gradients that its token enters.

    Raises:
        TypeError: an argument of the wrong type or dtype; forward-mode differentiation.
        ValueError: a wrong shape, range or option, or a scratch_bytes that is too small (it names the smallest); where
            values are known, an id out of range, which it names.
        NotImplementedError: differentiated twice.

    Memory: `scratch_parts` of `onchip.vocab.xla.memory` is the formula, for a jitted step.  In float32 on a
    CPU it is about 8 * token_chunk * vocab_chunk + 4 * T * H bytes, and a chunk's weight gradient twice.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.jax import linear_log_probs
        >>> hidden = jax.random.normal(jax.random.key(0), (2, 8, 16))
        >>> weight = jax.random.normal(jax.random.key(1), (100, 16))
        >>> ids = jnp.arange(16).reshape(2, 8)
        >>> grads = jax.jit(jax.grad(lambda h, w: linear_log_probs(h, w, ids).mean(), argnums=(0, 1)))(hidden, weight)
        >>> grads[1].shape
        (100, 16)

    Sources: Cut Cross-Entropy (arXiv:2411.09009), without its gradient filter, for logits that backward computes again;
    Milakov and Gimelshein (arXiv:1805.02867) for the running softmax.
    """
    given = locals()
    check_axis(OP, axis_name, vocab_size)
    options, numbers, dtype = checked(given)
    refuse_typed_sharding(OP, given)
    projection = Projection.of(hidden, weight, bias, weight_layout)
    shard = shard_of(OP, given, projection.vocab)
    check_shift(OP, options.shift, hidden.shape[:-1], "hidden of shape [..., S, H]")
    vocab = projection.vocab if shard is None else shard.vocab
    plain = checked_labels(OP, given, "ids", vocab, options, hidden.ndim - 2 if options.shift else None)
    plain = following(plain, IGNORED, hidden.ndim - 2) if options.shift else plain
    constants = constants_of(projection, plain, numbers)
    projection, constants = vary_alike((projection, constants), but=axis_name)
    static = Static(options, platform(), shard=shard)
    outputs = of_no_tokens(dtype) if len(projection.hidden) == 0 else callable_here(_op)(static, projection, constants)
    return returned(options, outputs, ids.shape, hidden.shape[:-1])


def checked(given: Mapping[str, Any]) -> tuple[Options, dict[str, Any], Any]:
    """The options among the arguments of the function, its numbers and the dtype of sums; raise for what is wrong or
    doesn't fit together."""
    hidden, weight, layout = given["hidden"], given["weight"], given["weight_layout"]
    check_layout(OP, layout)
    spec.check_shapes(shapes_of(check_arrays(OP, given)), layout)
    options: Options = options_of(OP, Options, given, math.prod(hidden.shape[:-1]) * weight.size // hidden.shape[-1])
    dtype = accumulator(dtype_of(hidden))
    numbers = checked_numbers(OP, options, given, dtype)
    choose_backend(OP, given["backend"], dict.fromkeys(BACKENDS))
    return options, numbers, dtype


def constants_of(projection: Projection, ids: jax.Array, numbers: Mapping[str, Any]) -> tuple[jax.Array, Transform]:
    """The arrays of a call that get no gradient: ids [T, K], of those of `plain_labels`, and numbers."""
    total = len(projection.hidden)
    return ids.reshape(total, ids.size // total if total else 1), Transform(**numbers)


def returned(
    options: Options, outputs: Outputs, of_ids: tuple[int, ...], shape: tuple[int, ...]
) -> jax.Array | LogProbs:
    """What a public function returns, for ids and tokens of these shapes."""
    log_prob: jax.Array = outputs.log_prob.reshape(of_ids)
    asked = (options.entropy, options.lse, options.top1, options.mean_logits, options.log_sum_sq_probs)
    if not any(asked):
        return log_prob
    more: Any = (x.reshape(shape) if wanted else None for x, wanted in zip(outputs[1:], asked, strict=True))
    return LogProbs(log_prob, *more)


def forward(
    static: Static, needs: Projection, projection: Projection, constants: tuple[jax.Array, Transform]
) -> tuple[Outputs, Planned | None]:
    (ids, transform), options, shard = constants, static.options, static.shard
    if shard is not None:
        shard.refuse_untracked(OP, needs)
    more = options.mean_logits + options.log_sum_sq_probs
    asked = {"ids": ids.shape[1], "stats": options.entropy, "more_stats": more}
    problem = projection.problem(needs, static.platform, transform, **asked, op=OP)
    plan = memory.plan(problem, "recompute" if problem.any_grad else "forward", options.scratch_bytes)
    tokens = select_tokens(jnp.where((ids != IGNORED).any(1), 0, IGNORED), plan.token_chunk)
    call = Call(projection, transform.by_row(tokens), tokens, tokens.take(ids, IGNORED), shard=shard)
    stats = walk.statistics(plan, wanted_of(options), call)
    return outputs_of(stats, tokens), Planned(walk.Saved(call, known_of(stats)), plan) if problem.any_grad else None


def backward(static: Static, needs: Projection, saved: Planned, upstream: Outputs) -> Projection:
    call, stats = saved.arrays
    gradient = gradient_by_outputs(call.tokens, call.ids, stats, upstream)
    return walk.gradients(saved.plan, needs, call, stats, gradient)


_op = with_gradients(OP, forward, backward)


def of_no_tokens(dtype: Any) -> Outputs:
    none = jnp.zeros(0, dtype)
    return Outputs(none, none, none, jnp.zeros(0, jnp.int32), none, none)


def wanted_of(options: Options) -> Wanted:
    return Wanted(options.entropy, options.top1, options.mean_logits, options.log_sum_sq_probs)


def outputs_of(stats: TokenStats, tokens: Tokens) -> Outputs:
    """By token, of statistics by row."""

    def spread(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else tokens.spread(x)

    return Outputs(
        spread(stats.log_prob),
        spread(stats.entropy),
        spread(stats.lse),
        None if stats.argmax is None else jnp.where(tokens.kept, tokens.spread(stats.argmax), -1),
        spread(lax.stop_gradient(stats.mean_logits)),
        spread(lax.stop_gradient(stats.log_sum_sq)),
    )


def known_of(stats: TokenStats) -> TokenStats:
    """What gradients need of them."""
    return TokenStats(stats.lse, stats.log_prob, stats.entropy, stats.mean)


def gradient_by_outputs(tokens: Tokens, ids: jax.Array, stats: TokenStats, upstream: Outputs) -> TokenGradient:
    """The gradient by each token's logits; None in `upstream` is zero."""
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
    return TokenGradient(-common, at_ids, None if g_entropy is None else -g_entropy)
