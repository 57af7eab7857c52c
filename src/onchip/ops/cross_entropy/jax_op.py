"""cross_entropy for JAX: the public function, its derivative rules and the choice of a backend.

Read from the top: the public function has its inputs checked (jax_inputs.py) and calls `_op`.  JAX calls that as it is
where no gradient is wanted, or else `_op_forward` and `_op_backward`; each plans its chunks and runs the backend's
`forward` or `backward` (jax_xla.py).  The maths is in the package's docstring.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from onchip.core.backends import choose_backend
from onchip.frontend.jax_call import Static, Tensors, refuse_second_derivative, vary_alike
from onchip.frontend.jax_inputs import (
    as_constant,
    as_constants,
    check_normalizer,
    check_numbers,
    is_array,
    known_numbers,
    per_token_constant,
    plain_labels,
    platform,
)
from onchip.ops.cross_entropy import jax_xla
from onchip.ops.cross_entropy.jax_inputs import check_arrays
from onchip.ops.cross_entropy.jax_xla import Outputs
from onchip.ops.cross_entropy.spec import OP, Options
from onchip.vocab.rows import memory as row_memory
from onchip.vocab.rows.memory import Problem

BACKENDS = ("xla",)


class CrossEntropyStats(NamedTuple):
    """Per-token statistics, without gradients; each has the labels' shape, and ignored tokens hold 0 (False)."""

    lse: jax.Array
    """float32: log-sum-exp of the final logits."""
    log_prob: jax.Array
    """float32: log-probability of the label."""
    entropy: jax.Array
    """float32: entropy of the softmax, in nats."""
    correct: jax.Array
    """bool: whether the label is the argmax (the first one, where logits tie)."""


def cross_entropy(
    logits: Any,  # [..., V]
    labels: Any,  # [...]
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: Any = None,
    token_weight: Any = None,  # [...]
    label_smoothing: Any = 0.0,
    z_loss: Any = 0.0,
    softcap: Any = None,
    logit_scale: Any = 1.0,
    temperature: Any = 1.0,
    return_stats: bool = False,
    backend: str = "auto",
    scratch_bytes: int | None = None,
) -> Any:
    r"""Cross-entropy of logits that exist already, in little memory beside them.

    With a = logits * logit_scale, z = softcap * tanh(a / softcap) / temperature (without softcap a / temperature) and
    lse = log(sum(exp(z))), the loss of a token is::

        token_weight * ((1 - label_smoothing) * (lse - z[label]) + label_smoothing * (lse - mean(z)) + z_loss * lse**2)

    'mean' divides the sum over tokens by `normalizer`, or else by the number of tokens that are not ignored.  So it is
    the mean of `optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)`, without a float32
    copy of the logits.  It works under jit, grad, vmap, scan and `jax.checkpoint`.

    Args:
        logits: [..., V] float32, bfloat16 or float16, T tokens in the leading dimensions.  -inf takes an entry out of
            the vocabulary (without softcap, which makes it -softcap).  NumPy's float64 counts as float32 where JAX's
            64-bit mode is off.
        labels: [...] of any integer dtype: the vocabulary index of each token, or `ignore_index`.
        ignore_index: tokens with this label cost no loss and leave exact zeros, whatever they hold.
        reduction: "mean", "sum" or "none" (the loss then has labels' shape).
        normalizer: above 0: what "mean" divides by instead of the token count: for gradient accumulation, the count
            over all micro-batches.  Where every token is ignored any 0-d array will do.
        token_weight: [...] factor of each token's loss; does not change what "mean" divides by.
        label_smoothing: in [0, 1]: the part of the label's probability that is spread evenly over the vocabulary.
        z_loss: 0 or more: factor of lse**2, which keeps logits from drifting.
        softcap: above 0, or None: squashes the logits smoothly into (-softcap, softcap).
        logit_scale: above 0: factor of the logits, before softcap.
        temperature: above 0: divides the logits, after softcap; may also be a [...] array with one per token.
        return_stats: also return float32 per-token statistics.
        backend: "xla" (plain JAX, on any device) or "auto".
        scratch_bytes: bound on the temporary memory, the gradient not counted.  Default: 256 MiB or an eighth of the
            float32 logits, whichever is less, and at least what a useful chunk of rows needs.

    The numbers normalizer, label_smoothing, z_loss, softcap, logit_scale and temperature may be 0-d arrays, traced or
    not: a new value then compiles nothing anew, but isn't checked.  They and token_weight are constants to autodiff.

    Returns:
        The float32 loss, 0-d or of labels' shape; with return_stats `(loss, CrossEntropyStats)`.  If every token is
        ignored, "mean" is 0 with zero gradients.  A label that is neither ignore_index nor in [0, V) makes its token's
        loss and gradient NaN: no value of an array is read while tracing.

    Raises:
        TypeError: an argument of the wrong type or dtype; forward-mode differentiation.
        ValueError: a wrong shape, range or option, or a scratch_bytes below one row's (it names that).
        NotImplementedError: differentiated twice.

    Memory: `scratch_parts` of `onchip.vocab.rows.memory` is the formula, for a jitted step: about 8 * rows * V
    bytes for chunks of so many rows, and on a CPU a copy of 16-bit logits.  From forward to backward 8 bytes per token
    are kept.  Under vmap each array gets the mapped dimension: give a batch as leading dimensions instead where you
    can.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.jax import cross_entropy
        >>> logits = jax.random.normal(jax.random.key(0), (2, 8, 100))
        >>> labels = jnp.arange(16).reshape(2, 8)
        >>> loss, grad = jax.jit(jax.value_and_grad(cross_entropy))(logits, labels)
        >>> grad.shape
        (2, 8, 100)

    Sources: the gradient from the log-sum-exp alone as in Liger Kernel (arXiv:2410.10989), z-loss from PaLM
    (arXiv:2204.02311), softcap from Gemma 2 (arXiv:2408.00118).
    """
    numbers = {
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "temperature": temperature,
    }
    Options(
        ignore_index=ignore_index,
        reduction=reduction,
        scratch_bytes=scratch_bytes,
        return_stats=return_stats,
        **known_numbers(numbers),
    )
    check_arrays(logits, labels, token_weight, temperature if is_array(temperature) else None)
    check_normalizer(OP, normalizer, reduction)
    check_numbers(OP, numbers)

    shape, vocab = labels.shape, logits.shape[-1]
    rows = jnp.asarray(logits).reshape(int(np.prod(shape)), vocab)
    tensors = Tensors(
        hidden=rows,
        weight=jnp.zeros((vocab, 0), rows.dtype),  # what is in hidden's place are logits already
        labels=plain_labels(labels, vocab, int(ignore_index)).reshape(-1),
        token_weight=per_token_constant(token_weight),
        normalizer=as_constant(normalizer),
        **as_constants(numbers),
    )
    tensors = vary_alike(tensors)
    static = Static(
        backend=backend,
        platform=platform(),
        dtype=rows.dtype.name,
        weight_layout="vh",
        reduction=reduction,
        strategy="recompute",
        scratch_bytes=None if scratch_bytes is None else int(scratch_bytes),
        return_stats=return_stats,
    )
    problem = _problem(static, tensors)
    static = replace(static, backend=choose_backend(OP, backend, {"xla": jax_xla.refusal(problem)}))
    outputs = _nothing(static) if problem.tokens == 0 else _op(static, tensors)
    loss = outputs.loss.reshape(shape) if reduction == "none" else outputs.loss
    if not return_stats:
        return loss
    assert outputs.stats is not None
    return loss, CrossEntropyStats(*(jax.lax.stop_gradient(x).reshape(shape) for x in outputs.stats))


def _problem(static: Static, tensors: Tensors, *, grad: bool = True) -> Problem:
    tokens, vocab = tensors.hidden.shape
    return Problem(
        tokens=tokens,
        vocab=vocab,
        dtype=static.dtype,
        device="cpu" if static.platform == "cpu" else "cuda",
        grad=grad,
        softcap=tensors.softcap is not None,
        stats=static.return_stats,
        xla=True,
    )


def _nothing(static: Static) -> Outputs:
    """The result of a call without tokens."""
    none = jnp.zeros(0, jnp.float32)
    stats = (none, none, none, jnp.zeros(0, bool)) if static.return_stats else None
    return Outputs(none if static.reduction == "none" else jnp.zeros((), jnp.float32), stats)


# ------------------------------------------------------------------------------------------------- derivative rules


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _op(static: Static, tensors: Tensors) -> Outputs:
    return _run_forward(static, _plan(static, tensors, grad=False), tensors)[0]  # type: ignore[no-any-return]


def _op_forward(static: Static, primals: Any) -> tuple[Outputs, Any]:
    tensors: Tensors = jax.tree.map(lambda x: x.value, primals)
    grad = primals.hidden.perturbed
    outputs, residuals = _run_forward(static, _plan(static, tensors, grad=grad), tensors)
    return outputs, residuals if grad else None


def _op_backward(static: Static, residuals: Any, cotangents: Outputs) -> tuple[Any]:
    nothing = Tensors(*[None] * len(Tensors._fields))  # type: ignore[arg-type]
    if isinstance(cotangents.loss, SymbolicZero) or residuals is None:
        return (nothing,)
    chunk = _plan(static, residuals.tensors, grad=True)
    return (nothing._replace(hidden=_run_backward(static, chunk, residuals, cotangents.loss)),)


_op.defvjp(_op_forward, _op_backward, symbolic_zeros=True)


def _plan(static: Static, tensors: Tensors, *, grad: bool) -> int:
    return row_memory.plan(_problem(static, tensors, grad=grad), static.scratch_bytes)


# A derivative of either would be a second derivative of the op: `custom_jvp` is there to say so.
@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run_forward(static: Static, chunk: int, tensors: Tensors) -> Any:
    return _jit_forward(static, chunk, tensors)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run_backward(static: Static, chunk: int, residuals: Any, grad_loss: jax.Array) -> Any:
    return _jit_backward(static, chunk, residuals, grad_loss)


_run_forward.defjvp(partial(refuse_second_derivative, OP))
_run_backward.defjvp(partial(refuse_second_derivative, OP))


# jit, so that a call outside of one is not run operation by operation.
@partial(jax.jit, static_argnums=(0, 1))
def _jit_forward(static: Static, chunk: int, tensors: Tensors) -> Any:
    return jax_xla.forward(static, chunk, tensors)


@partial(jax.jit, static_argnums=(0, 1))
def _jit_backward(static: Static, chunk: int, residuals: Any, grad_loss: jax.Array) -> Any:
    return jax_xla.backward(static, chunk, residuals, grad_loss)
