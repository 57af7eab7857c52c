"""cross_entropy for JAX: the public function, which calls the operator of `onchip.vocab.jax_loss`."""

from typing import Any, Generic, Unpack, overload

import jax
import jax.numpy as jnp

from onchip.core.backends import choose_backend
from onchip.frontend import topk
from onchip.frontend.jax_call import Static
from onchip.frontend.jax_inputs import (
    accumulator,
    check_normalizer,
    checked_numbers,
    dtype_of,
    options_of,
    platform,
    take_target,
)
from onchip.frontend.jax_labels import check_labels
from onchip.frontend.jax_mesh import BY_ENTRY, BY_TOKEN, WHOLE, Roles
from onchip.frontend.jax_spread import by_tokens
from onchip.frontend.jax_types import Array, JaxLossKeywords, Number, Target, WithStats
from onchip.frontend.options import Flag, No, Reduction, ScratchBytes, Yes, check_class_weight, check_shift, shapes_of
from onchip.kernels.triton.jax_front import by_torch
from onchip.ops.cross_entropy import OP, CrossEntropyOptions
from onchip.vocab import jax_loss
from onchip.vocab.jax_ways import ROWS, Backend
from onchip.vocab.xla.loss import Given, XlaLossOutputs
from onchip.vocab.xla.parallel import check_axis, shard_of

BACKENDS = tuple(ROWS)


class JaxLogitsKeywords(JaxLossKeywords[Flag], Generic[Flag], total=False):
    """The function's keywords."""

    axis_name: str | None
    backend: Backend


@overload
def cross_entropy(logits: Array, target: Target = None, **options: Unpack[JaxLogitsKeywords[No]]) -> jax.Array: ...
@overload
def cross_entropy(logits: Array, target: Target = None, **options: Unpack[JaxLogitsKeywords[Yes]]) -> WithStats: ...
@overload
def cross_entropy(
    logits: Array, target: Target = None, **options: Unpack[JaxLogitsKeywords[bool]]
) -> jax.Array | WithStats: ...
@by_torch("onchip.ops.cross_entropy.torch_op:cross_entropy", "logits")
def cross_entropy(
    logits: Array,  # [..., V]
    target: Target = None,  # [...], or probabilities
    *,
    labels: Target = None,  # another name for target
    axis_name: str | None = None,
    vocab_size: int | None = None,
    shift: bool = False,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    normalizer: Number | None = None,
    token_weight: Array | None = None,  # [...]
    class_weight: Array | None = None,  # [V]
    label_smoothing: Number = 0.0,
    z_loss: Number = 0.0,
    softcap: Number | None = None,
    logit_scale: Number = 1.0,
    temperature: Number = 1.0,
    check_inputs: bool = False,
    return_stats: bool = False,
    backend: Backend = "auto",
    scratch_bytes: ScratchBytes = None,
) -> jax.Array | WithStats:
    r"""Cross-entropy of logits that exist already, with little extra memory.

    With a = logits * logit_scale, z = softcap * tanh(a / softcap) / temperature (without softcap a / temperature) and
    lse = log(sum(exp(z))), the loss of a token is::

        token_weight * ((1 - label_smoothing) * (lse - z[target]) + label_smoothing * (lse - mean(z)) + z_loss * lse**2)

    'mean' divides the sum over tokens by `normalizer`, or else by the number of tokens that are not ignored.  So it is
    the mean of `optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), target)`, without a float32
    copy of the logits.  It works under jit, grad, vmap, scan and `jax.checkpoint`.  If arrays are sharded, each device
    computes its own tokens and its own entries of the vocabulary.

    Args:
        logits: [..., V] float32, bfloat16, float16 or float64, T tokens in the leading dimensions.  -inf takes an entry
            out of the vocabulary (unless there is a softcap, which makes it -softcap).  Kernels take logits of a token
            that are all below -1e30 as if all were -inf: its loss is NaN.  NumPy's float64 counts as float32 where
            JAX's 64-bit mode is off.
        target: [...] of any integer dtype: the vocabulary index of each token, or `ignore_index`.  Or soft labels q,
            for which the loss has sum(q * (lse - z)) in place of lse - z[target]: the probabilities of all entries,
            floating point [..., V], or those of K entries, `TopK(indices, values, kind, rest="truncated")` of
            [..., K] with kind "probs" or "log_probs".  q need not sum to 1 and is a constant to autodiff.  All tokens
            count then, and there is no ignore_index.
        labels: another name for target, by keyword.
        axis_name, vocab_size: as in `linear_cross_entropy`.  Inside `jax.shard_map` logits, their gradient, and soft
            labels for all entries are this device's part, [..., V / n].
        shift: as in `linear_cross_entropy`: position i of each sequence [..., S] predicts label i + 1, and the last one
            costs nothing; logits aren't copied.  Only for targets that are ids.
        ignore_index, reduction, normalizer, token_weight, class_weight: as in `linear_cross_entropy`; token_weight is
            [...], class_weight [V] in float32 or logits' dtype.
        label_smoothing, z_loss, softcap, logit_scale, temperature, check_inputs, return_stats: likewise; temperature is
            a number or [...].
        backend: "mosaic_gpu" (kernels for Hopper), "xla" (plain JAX, on any device), "triton" (PyTorch's kernels, as
            in `linear_cross_entropy`) or "auto".
        scratch_bytes: bound on the temporary memory, not counting the gradient, in one of the forms that
            `linear_cross_entropy` takes.  Default: 256 MiB or an eighth of the float32 logits, whichever is more, and
            at least what a useful chunk of rows needs.

    Numbers may be 0-d arrays, traced or not, as in `linear_cross_entropy`.

    Returns:
        The loss in float32 (float64 for float64 inputs), 0-d or of target's shape; with return_stats `(loss,
        CrossEntropyStats)`.  If every token is ignored, "mean" is 0 with zero gradients.  Under jit, or on a GPU
        without check_inputs, a target that is neither ignore_index nor in [0, V), or a log-probability above 0, makes
        its token's loss and gradient NaN.

    Raises:
        TypeError: an argument has the wrong type or dtype, or the call is differentiated in forward mode.
        ValueError: a shape, range or option is wrong; scratch_bytes doesn't suffice for one row (the message says what
            does); or a target is out of range, where values are known (the message names it).
        NotImplementedError: the loss is differentiated twice.

    Memory: `scratch_parts` of `onchip.vocab.rows.memory` is the formula for a jitted step: about 8 * rows * V bytes,
    for chunks of that many rows, and on a CPU a copy of 16-bit logits.  8 bytes per token are kept from forward to
    backward.  Under vmap each array gets the mapped dimension, so pass a batch as leading dimensions where you can.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.jax import cross_entropy
        >>> logits = jax.random.normal(jax.random.key(0), (2, 8, 100))
        >>> target = jnp.arange(16).reshape(2, 8)
        >>> loss, grad = jax.jit(jax.value_and_grad(cross_entropy))(logits, target)
        >>> grad.shape
        (2, 8, 100)

    Sources: Liger Kernel (arXiv:2410.10989), for the gradient from the log-sum-exp alone; PaLM (arXiv:2204.02311), for
    z-loss; Gemma 2 (arXiv:2408.00118), for softcap.
    """
    given = locals()
    name, _ = take_target(OP, given)
    check_axis(OP, axis_name, vocab_size, "logits")
    soft = check_labels(OP, given, name, "logits")
    leading, own_vocab, total = logits.shape[:-1], logits.shape[-1], accumulator(dtype_of(logits))
    options = options_of(OP, CrossEntropyOptions, given, logits.size)
    if soft:
        topk.refuse_options(OP, options)
        topk.refuse_shift(OP, options.shift, name)
    check_shift(OP, options.shift, leading, f"{name} of shape [..., S]")
    check_normalizer(OP, normalizer, reduction)
    numbers = checked_numbers(OP, options, given, total)
    choose_backend(OP, backend, dict.fromkeys(ROWS), ("triton",))
    shard = shard_of(OP, given, own_vocab)
    vocab = own_vocab if shard is None else shard.vocab
    check_class_weight(OP, shapes_of({} if class_weight is None else {"class_weight": class_weight}), vocab)

    constants = Given.of(OP, given, name, vocab, options, numbers, total)
    constants = constants.shifted() if options.shift else constants
    if not logits.size:
        return XlaLossOutputs.of_nothing(reduction, return_stats, total).shaped(leading)
    outputs: Any = XlaLossOutputs(BY_TOKEN if reduction == "none" else WHOLE, BY_TOKEN)  # type: ignore[arg-type]
    static, roles = Static(options, platform(), backend, shard), Roles(BY_ENTRY, constants.roles(), outputs)
    share = isinstance(scratch_bytes, float)
    made = by_tokens(_op, static, roles, jnp.asarray(logits), constants, by_share=share, but=axis_name)
    return made.shaped(leading)  # type: ignore[no-any-return]


_op = jax_loss.cross_entropy(OP).operator(resumable=lambda static: static._replace(recompute=True))
