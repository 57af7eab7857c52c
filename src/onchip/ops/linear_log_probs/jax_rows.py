"""log_probs for JAX, for logits that exist already: the public function.  The computation is in jax_op.py."""

import math
from typing import Unpack, overload

import jax
import jax.numpy as jnp

from onchip.core.backends import choose_backend
from onchip.frontend.jax_call import Static
from onchip.frontend.jax_inputs import (
    accumulator,
    check_arrays,
    checked_numbers,
    dtype_of,
    options_of,
    platform,
    token_temperature,
)
from onchip.frontend.jax_mesh import BY_ENTRY, BY_TOKEN, Roles
from onchip.frontend.jax_spread import by_tokens
from onchip.frontend.jax_types import Array, Number
from onchip.frontend.jax_values import checked_labels
from onchip.frontend.options import No, ScratchBytes, Yes, one_target, shapes_of
from onchip.kernels.triton.jax_front import by_torch
from onchip.ops.linear_log_probs import LOGITS_OP, LogitsOptions, check_logits_shapes
from onchip.ops.linear_log_probs.jax_op import (
    OF_GIVEN,
    OPERATOR,
    Given,
    GivenToLogProbs,
    JaxOfLogits,
    LogProbs,
    of_no_tokens,
    returned,
)
from onchip.vocab.jax_ways import ROWS, Backend
from onchip.vocab.xla.parallel import check_axis, shard_of


@overload
def log_probs(logits: Array, ids: Given = None, **options: Unpack[JaxOfLogits[No]]) -> jax.Array: ...
@overload
def log_probs(logits: Array, ids: Given = None, **options: Unpack[JaxOfLogits[Yes]]) -> LogProbs: ...
@overload
def log_probs(logits: Array, ids: Given = None, **options: Unpack[JaxOfLogits[bool]]) -> jax.Array | LogProbs: ...
@by_torch("onchip.ops.linear_log_probs.torch_rows:log_probs", "logits")
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
) -> jax.Array | LogProbs:
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
    ids = one_target(LOGITS_OP, ids, labels, name="ids")[1]
    given = {name: x for name, x in locals().items() if name != "labels"}
    check_axis(LOGITS_OP, axis_name, vocab_size, "logits")
    check_logits_shapes(shapes_of(check_arrays(LOGITS_OP, given)))
    options = options_of(LOGITS_OP, LogitsOptions, given, logits.size)
    dtype = accumulator(dtype_of(logits))
    numbers = checked_numbers(LOGITS_OP, options, given, dtype)

    shape, vocab = logits.shape[:-1], logits.shape[-1]
    shard = shard_of(LOGITS_OP, given, vocab)
    vocab = vocab if shard is None else shard.vocab
    plain = checked_labels(LOGITS_OP, given, "ids", vocab, options)
    choose_backend(LOGITS_OP, backend, dict.fromkeys(ROWS), ("triton",))
    if math.prod(shape) == 0:
        return returned(options, of_no_tokens(dtype), ids.shape, shape)
    numbers, temperature = token_temperature(numbers, given["temperature"], dtype)
    static, roles = Static(options, platform(), backend, shard), Roles(BY_ENTRY, OF_GIVEN, BY_TOKEN)
    rest = GivenToLogProbs(plain, temperature, numbers)
    share = isinstance(scratch_bytes, float)
    made = by_tokens(OPERATOR, static, roles, jnp.asarray(logits), rest, by_share=share, but=axis_name)
    return returned(options, made, ids.shape, shape)
