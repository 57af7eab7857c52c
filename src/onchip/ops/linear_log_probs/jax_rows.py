"""log_probs for JAX, of logits that exist: the public function, and the computation a chunk of rows at a time.

The public function calls `_op`, to which `onchip.frontend.jax_call.with_gradients` gives its derivatives.  Softmax
and gradient of a chunk are those of linear_log_probs; the maths is in the package's docstring.
"""

import math
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp

from onchip.core.backends import choose_backend
from onchip.frontend.jax_call import IGNORED, Planned, Static, callable_here, vary_alike, with_gradients
from onchip.frontend.jax_inputs import (
    accumulator,
    check_arrays,
    checked_numbers,
    dtype_of,
    options_of,
    platform,
)
from onchip.frontend.jax_types import Array, Number
from onchip.frontend.jax_values import checked_labels
from onchip.frontend.options import ScratchBytes, shapes_of
from onchip.ops.linear_log_probs import spec
from onchip.ops.linear_log_probs.jax_op import (
    BACKENDS,
    Backend,
    Either,
    JustLogProb,
    LogProbs,
    More,
    gradient_by_outputs,
    known_of,
    of_no_tokens,
    outputs_of,
    returned,
    wanted_of,
)
from onchip.ops.linear_log_probs.spec import LOGITS_OP, LogitsOptions, Outputs
from onchip.vocab.chunks import Config
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.xla.loss import Call
from onchip.vocab.xla.tiles import Columns, Logits, Transform, cut_rows, logits_gradient, select_tokens
from onchip.vocab.xla.walk import by_rows, statistics


@overload
def log_probs(logits: Array, ids: Array, **options: Unpack[JustLogProb]) -> jax.Array: ...
@overload
def log_probs(logits: Array, ids: Array, **options: Unpack[More]) -> LogProbs: ...
@overload
def log_probs(logits: Array, ids: Array, **options: Unpack[Either]) -> jax.Array | LogProbs: ...
def log_probs(
    logits: Array,  # [..., V]
    ids: Array,  # [...] or [..., K]
    *,
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
    """Log-probabilities of given ids under the softmax of logits that exist already, in little memory beside them.

    With a = logits * logit_scale, z = softcap * tanh(a / softcap) / temperature (without softcap a / temperature) and
    p = softmax(z), token by token::

        log_prob = z[ids] - lse,    lse = log(sum(exp(z))),    entropy = -sum(p * log(p))

    So log_prob is `jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), ids[..., None], -1)[..., 0]`,
    without a float32 copy of the logits or a matrix of their softmax.  log_prob, entropy and lse are differentiable
    with respect to the logits.  It works under jit, grad, vmap, scan and `jax.checkpoint`.

    Args:
        logits: [..., V] float32, bfloat16, float16 or float64, T tokens in the leading dimensions.  -inf takes an entry
            out of the vocabulary (without softcap, which makes it -softcap).
        ids: and `ignore_index`, `softcap`, `logit_scale`, `temperature` (a number or [...]), `entropy`, `lse`, `top1`,
            `mean_logits`, `log_sum_sq_probs` and `check_inputs`: as in `linear_log_probs`.
        scratch_bytes: bound on the temporary memory, results and gradient not counted, given as in
            `linear_cross_entropy`.  Default: 256 MiB or an eighth of the float32 logits, whichever is more, and at
            least what a useful chunk of rows needs.
        backend: "xla" (plain JAX, on any device) or "auto".

    Returns:
        log_prob of ids' shape in float32, of float64 inputs in float64, or `LogProbs`, as in `linear_log_probs`.  Under
        jit, or on a GPU without check_inputs, an id that is neither ignore_index nor in [0, V) has log_prob NaN, and so
        is its token's gradient.

    Raises:
        TypeError: an argument of the wrong type or dtype; forward-mode differentiation.
        ValueError: a wrong shape, range or option, or a scratch_bytes below one row's (it names that); where values are
            known, an id out of range, which it names.
        NotImplementedError: differentiated twice.

    Memory: `scratch_parts` of `onchip.vocab.rows.memory` is the formula, with `ids` = K, for a jitted step: about
    8 * rows * V bytes for chunks of so many rows, and on a CPU a copy of 16-bit logits.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.jax import log_probs
        >>> logits = jax.random.normal(jax.random.key(0), (2, 8, 100))
        >>> ids = jnp.arange(16).reshape(2, 8)
        >>> jax.jit(jax.grad(lambda x: log_probs(x, ids).mean()))(logits).shape
        (2, 8, 100)

    Source: the gradient from the log-sum-exp alone, as in Liger Kernel (arXiv:2410.10989).
    """
    given = locals()
    spec.check_logits_shapes(shapes_of(check_arrays(LOGITS_OP, given)))
    options = options_of(LOGITS_OP, LogitsOptions, given, logits.size)
    dtype = accumulator(dtype_of(logits))
    numbers = checked_numbers(LOGITS_OP, options, given, dtype)

    shape, vocab = logits.shape[:-1], logits.shape[-1]
    total = math.prod(shape)
    each = ids.shape[-1] if ids.ndim > len(shape) else 1
    rows = jnp.asarray(logits).reshape(total, vocab)
    plain = checked_labels(LOGITS_OP, given, "ids", vocab, options).reshape(total, each)
    rows, constants = vary_alike((rows, (plain, Transform(**numbers))))
    choose_backend(LOGITS_OP, backend, dict.fromkeys(BACKENDS))
    outputs = of_no_tokens(dtype) if total == 0 else callable_here(_op)(Static(options, platform()), rows, constants)
    return returned(options, outputs, ids.shape, shape)


def _forward(
    static: Static, needs: bool, logits: jax.Array, constants: tuple[jax.Array, Transform]
) -> tuple[Outputs, Planned | None]:
    (ids, transform), options = constants, static.options
    problem = row_memory.Problem(
        tokens=len(logits),
        vocab=logits.shape[1],
        dtype=logits.dtype.name,
        device="cpu" if static.platform == "cpu" else "cuda",
        grad=needs,
        softcap=transform.softcap is not None,
        stats=options.entropy,
        xla=True,
        op=LOGITS_OP,
        ids=ids.shape[1],
        more_stats=options.mean_logits + options.log_sum_sq_probs,
    )
    chunk = row_memory.plan(problem, "", options.scratch_bytes)
    tokens = select_tokens(jnp.where((ids != IGNORED).any(1), 0, IGNORED), chunk)
    call = Call(Logits.of(logits), transform.by_row(tokens), tokens, tokens.take(ids, IGNORED))
    stats = statistics(Config("forward", chunk, problem.vocab), wanted_of(options), call)
    # The logits as they came: of 16-bit ones `call.source` may be a copy.
    saved = Planned((logits, call._replace(source=None), known_of(stats)), chunk)
    return outputs_of(stats, tokens), saved if needs else None


def _backward(static: Static, needs: bool, saved: Planned, upstream: Outputs) -> Array:
    """The gradient of the logits [T, V] in their dtype."""
    (logits, call, stats), chunk = saved.arrays, saved.plan
    source = Logits.of(logits)
    gradient = gradient_by_outputs(call.tokens, call.ids, stats, upstream).times(call.transform.factor())

    def step(start: Any, z: jax.Array) -> tuple[tuple[()], list[jax.Array]]:
        known, of_chunk, ids = cut_rows((stats, gradient, call.ids), start, chunk)
        z, slope = call.transform.of_chunk(start, chunk).apply(z)
        return (), [logits_gradient(z, slope, known, of_chunk, ids, Columns(0, source.vocab))]

    _, (bits,) = by_rows(chunk, call.tokens, [source], [True], (), step)
    return source.floats(bits)


_op = with_gradients(LOGITS_OP, _forward, _backward)
