"""linear_cross_entropy for JAX: the public function, its derivative rules and the choice of a backend.

Read from the top: the public function has its inputs checked (jax_inputs.py), chooses a backend and calls `_op`.  JAX
calls that as it is where no gradient is wanted, or else `_op_forward` and `_op_backward`; each plans the call and runs
the backend's `forward` or `backward`.  What passes between is in jax_call.py, the maths in the package's docstring.
"""

from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from onchip.core.backends import choose_backend
from onchip.frontend.jax_call import Needs, Static, Tensors, refuse_second_derivative, vary_alike
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
from onchip.ops.linear_cross_entropy.jax_inputs import check_arrays
from onchip.ops.linear_cross_entropy.spec import OP, Options
from onchip.vocab.memory import Problem
from onchip.vocab.mosaic import op as mosaic_op
from onchip.vocab.triton import jax_op as jax_triton
from onchip.vocab.xla import walk as jax_xla
from onchip.vocab.xla.call import LinearCrossEntropyStats, Outputs

# Best first, by platform.
BACKENDS = {
    "cpu": ("xla", "mosaic_gpu", "triton"),
    "gpu": ("mosaic_gpu", "xla", "triton"),
    "tpu": ("xla", "mosaic_gpu", "triton"),
}
_MODULES: dict[str, ModuleType] = {"xla": jax_xla, "mosaic_gpu": mosaic_op, "triton": jax_triton}


def linear_cross_entropy(
    hidden: Any,  # [..., H]
    weight: Any,  # [V, H], or [H, V] with weight_layout="hv"
    labels: Any,  # [...]
    bias: Any = None,  # [V]
    *,
    weight_layout: str = "vh",
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: Any = None,
    token_weight: Any = None,  # [...]
    label_smoothing: Any = 0.0,
    z_loss: Any = 0.0,
    softcap: Any = None,
    logit_scale: Any = 1.0,
    temperature: Any = 1.0,
    scratch_bytes: int | None = None,
    strategy: str = "auto",
    backend: str = "auto",
    return_stats: bool = False,
) -> Any:
    r"""Cross-entropy of a linear layer's output, without storing the [tokens, vocab] logits.

    With a = (hidden @ weight.T + bias) * logit_scale, z = softcap * tanh(a / softcap) / temperature (without softcap
    a / temperature) and lse = log(sum(exp(z))), the loss of a token is::

        token_weight * ((1 - label_smoothing) * (lse - z[label]) + label_smoothing * (lse - mean(z)) + z_loss * lse**2)

    'mean' divides the sum over tokens by `normalizer`, or else by the number of tokens that are not ignored.  So it is
    the mean of `optax.softmax_cross_entropy_with_integer_labels(hidden @ weight.T + bias, labels)`, with float32 logits
    whatever the inputs' dtype.  It works under jit, grad, vmap, scan and `jax.checkpoint`.

    Args:
        hidden: [..., H] float32, bfloat16 or float16, T tokens in the leading dimensions.  NumPy's float64
            counts as float32 where JAX's 64-bit mode is off.
        weight: [V, H], or [H, V] with weight_layout="hv" (never transposed in memory), of hidden's dtype.
        labels: [...] of any integer dtype: the vocabulary index of each token, or `ignore_index`.
        bias: [V] of hidden's dtype.  Without softcap -inf takes an entry out of the vocabulary.
        weight_layout: "vh" or "hv".
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
        scratch_bytes: bound on the temporary memory, gradients in their parameters' dtypes not counted.  Default:
            256 MiB or an eighth of the float32 logits, whichever is less, and at least what one chunk needs.
        strategy: "stash" does 3 matrix products: "xla" computes gradients in forward, chunk by chunk of tokens, in
            float32, and scales them in backward; "mosaic_gpu" keeps the exponentials of up to H tokens in the memory
            of the weight's gradient, those of more in scratch as far as there is room, and computes logits of further
            ones again.  "recompute" computes logits again in backward, chunk by chunk of the vocabulary (4 products,
            less memory).  "auto" is what fits scratch_bytes, the faster first.  With "xla" and reduction="none" a
            gradient of weight or bias is always made by "recompute".
        backend: "mosaic_gpu" (kernels for Hopper, bfloat16 and float16), "xla" (plain JAX, on any device), or "auto":
            the first of these that can run.  By name alone: "triton", the PyTorch op's kernels through jax-triton, for
            NVIDIA GPUs of compute capability 8.0 and later, [V, H] weights in bfloat16 or float16 and "recompute".
        return_stats: also return float32 per-token statistics.

    The numbers normalizer, label_smoothing, z_loss, softcap, logit_scale and temperature may be 0-d arrays, traced or
    not: a new value then compiles nothing anew, but isn't checked.  They and token_weight are constants to autodiff.

    Returns:
        The float32 loss, 0-d or of labels' shape; with return_stats `(loss, LinearCrossEntropyStats)`.  If every
        token is ignored, "mean" is 0 with zero gradients.  A label that is neither ignore_index nor in [0, V) makes its
        token's loss, and the gradients that it enters, NaN: no value of an array is read while tracing.

    Raises:
        TypeError: an argument of the wrong type or dtype; forward-mode differentiation.
        ValueError: a wrong shape, range or option, or a scratch_bytes that is too small (it names the smallest).
        NotImplementedError: differentiated twice.

    Memory: `onchip plan --framework jax` prints it; `scratch_parts` of `onchip.vocab.xla.memory`
    ("xla") and `onchip.vocab.mosaic.memory` ("mosaic_gpu") are the formulas, for a jitted step.  In float32 it is about
    4 * token_chunk * vocab_chunk bytes for "recompute", and 4 * (chunk * V + V * H + T * H) for "stash".
    Under vmap each of its arrays gets the mapped dimension: give a batch as leading dimensions instead where you can.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onchip.jax import linear_cross_entropy
        >>> hidden = jax.random.normal(jax.random.key(0), (2, 8, 16))
        >>> weight = jax.random.normal(jax.random.key(1), (100, 16))
        >>> labels = jnp.arange(16).reshape(2, 8)
        >>> loss, grads = jax.jit(jax.value_and_grad(linear_cross_entropy, argnums=(0, 1)))(hidden, weight, labels)
        >>> grads[1].shape
        (100, 16)

    Sources: 'stash' is the chunked loss of Liger Kernel (arXiv:2410.10989), 'recompute' that of Cut Cross-Entropy
    (arXiv:2411.09009) without its gradient filter, which makes it exact.
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
        strategy=strategy,
        return_stats=return_stats,
        **known_numbers(numbers),
    )
    token_temperature = temperature if is_array(temperature) else None
    check_arrays(hidden, weight, labels, bias, token_weight, token_temperature, weight_layout)
    check_normalizer(OP, normalizer, reduction)
    check_numbers(OP, numbers)

    shape = labels.shape
    size = hidden.shape[-1]
    vocab = weight.shape[weight_layout.index("v")]
    tensors = Tensors(
        hidden=jnp.asarray(hidden).reshape(int(np.prod(shape)), size),
        weight=jnp.asarray(weight),
        labels=plain_labels(labels, vocab, int(ignore_index)).reshape(-1),
        bias=None if bias is None else jnp.asarray(bias),
        token_weight=per_token_constant(token_weight),
        normalizer=as_constant(normalizer),
        **as_constants(numbers),
    )
    tensors = vary_alike(tensors)
    static = Static(
        backend=backend,
        platform=platform(),
        dtype=tensors.hidden.dtype.name,
        weight_layout=weight_layout,
        reduction=reduction,
        strategy=strategy,
        scratch_bytes=None if scratch_bytes is None else int(scratch_bytes),
        return_stats=return_stats,
    )
    problem = _problem(static, tensors, Needs(True, True, bias is not None))
    static = replace(static, backend=choose_backend(OP, backend, refusals(static, problem)))
    outputs = _nothing(static) if problem.tokens == 0 else _op(static, tensors)
    loss = outputs.loss.reshape(shape) if reduction == "none" else outputs.loss
    if not return_stats:
        return loss
    assert outputs.stats is not None
    return loss, LinearCrossEntropyStats(*(jax.lax.stop_gradient(x).reshape(shape) for x in outputs.stats))


def refusals(static: Static, problem: Problem) -> dict[str, str | None]:
    """Why each backend of the platform, best first, can't serve a call, or None."""
    return {name: _MODULES[name].refusal(static, problem) for name in BACKENDS.get(static.platform, ("xla",))}


def planned(static: Static, problem: Problem) -> tuple[str, Any]:
    """The backend that a call gets, and its plan."""
    backend = choose_backend(OP, static.backend, refusals(static, problem))
    return backend, _MODULES[backend].plan(problem, static.strategy, static.scratch_bytes)


def _problem(static: Static, tensors: Tensors, needs: Needs) -> Problem:
    tokens, size = tensors.hidden.shape
    return Problem(
        tokens=tokens,
        hidden=size,
        vocab=tensors.weight.shape[static.vocab_axis],
        dtype=static.dtype,
        device="cpu" if static.platform == "cpu" else "cuda",
        grad_hidden=needs.hidden,
        grad_weight=needs.weight,
        grad_bias=needs.bias,
        per_token_loss=static.reduction == "none",
        softcap=tensors.softcap is not None,
        smoothing=tensors.label_smoothing is not None,
        stats=static.return_stats,
        compacted=True,
    )


def _nothing(static: Static) -> Outputs:
    """The result of a call without tokens."""
    none = jnp.zeros(0, jnp.float32)
    stats = LinearCrossEntropyStats(none, none, none, jnp.zeros(0, bool)) if static.return_stats else None
    return Outputs(none if static.reduction == "none" else jnp.zeros((), jnp.float32), stats)


# ------------------------------------------------------------------------------------------------- derivative rules


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _op(static: Static, tensors: Tensors) -> Outputs:
    needs = Needs(False, False, False)
    return _run_forward(static, _plan(static, tensors, needs), needs, tensors)[0]  # type: ignore[no-any-return]


@partial(jax.tree_util.register_dataclass, data_fields=["residuals"], meta_fields=["config", "needs"])
@dataclass(frozen=True)
class _Saved:
    """What backward gets: the backend's arrays, and how forward was run."""

    residuals: Any
    config: Any
    needs: Needs


def _op_forward(static: Static, primals: Any) -> tuple[Outputs, _Saved]:
    tensors: Tensors = jax.tree.map(lambda x: x.value, primals)
    needs = Needs(*(x is not None and x.perturbed for x in (primals.hidden, primals.weight, primals.bias)))
    config = _plan(static, tensors, needs)
    outputs, residuals = _run_forward(static, config, needs, tensors)
    return outputs, _Saved(residuals, config, needs)


def _op_backward(static: Static, saved: _Saved, cotangents: Outputs) -> tuple[Any]:
    nothing = Tensors(*[None] * len(Tensors._fields))  # type: ignore[arg-type]
    if isinstance(cotangents.loss, SymbolicZero) or not any(saved.needs):
        return (nothing,)
    made = _run_backward(static, saved.config, saved.needs, saved.residuals, cotangents.loss)
    return (nothing._replace(hidden=made[0], weight=made[1], bias=made[2]),)


_op.defvjp(_op_forward, _op_backward, symbolic_zeros=True)


def _plan(static: Static, tensors: Tensors, needs: Needs) -> Any:
    return _MODULES[static.backend].plan(_problem(static, tensors, needs), static.strategy, static.scratch_bytes)


# A derivative of either would be a second derivative of the op: `custom_jvp` is there to say so.
@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _run_forward(static: Static, config: Any, needs: Needs, tensors: Tensors) -> Any:
    return _jit_forward(static, config, needs, tensors)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _run_backward(static: Static, config: Any, needs: Needs, residuals: Any, grad_loss: jax.Array) -> Any:
    return _jit_backward(static, config, needs, residuals, grad_loss)


_run_forward.defjvp(partial(refuse_second_derivative, OP))
_run_backward.defjvp(partial(refuse_second_derivative, OP))


# jit, so that a call outside of one is not run operation by operation.
@partial(jax.jit, static_argnums=(0, 1, 2))
def _jit_forward(static: Static, config: Any, needs: Needs, tensors: Tensors) -> Any:
    return _MODULES[static.backend].forward(static, config, tensors, needs)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _jit_backward(static: Static, config: Any, needs: Needs, residuals: Any, grad_loss: jax.Array) -> Any:
    return _MODULES[static.backend].backward(static, config, residuals, grad_loss, needs)
