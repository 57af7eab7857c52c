"""linear_log_probs for JAX: the public function and its derivative rules.

Read from the top: the public function has its inputs checked (jax_inputs.py), chooses a backend and calls `_op`.  JAX
calls that as it is where no gradient is wanted, or else `_op_forward` and `_op_backward`; each plans the call and runs
the walk of jax_xla.py.  The maths is in the package's docstring.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from onchip.core.backends import choose_backend
from onchip.frontend.jax_call import IGNORED, Needs, Tensors, refuse_second_derivative, vary_alike
from onchip.frontend.jax_call import Static as Call
from onchip.frontend.jax_inputs import as_constants, check_numbers, is_array, known_numbers, plain_labels, platform
from onchip.ops.linear_log_probs import jax_xla
from onchip.ops.linear_log_probs.jax_inputs import check_arrays
from onchip.ops.linear_log_probs.jax_xla import Outputs, Residuals, Static
from onchip.ops.linear_log_probs.spec import OP, Options
from onchip.vocab.chunks import Config
from onchip.vocab.memory import Problem
from onchip.vocab.xla import memory

BACKENDS = ("xla",)


class LogProbs(NamedTuple):
    """What `linear_log_probs` returns if more than log_prob was asked for; None is what wasn't."""

    log_prob: Any
    """[...] or [..., K] float32: log-probability of each id; 0 for ignored ones."""
    entropy: Any
    """[...] float32: entropy of the softmax, in nats; 0 for tokens whose ids are all ignored.  Differentiable."""
    lse: Any
    """[...] float32: log-sum-exp of the final logits; 0 for such tokens.  Differentiable."""
    top1: Any
    """[...] int32: the vocabulary index of the largest logit (the first one, where they tie); -1 for such tokens."""


def linear_log_probs(
    hidden: Any,  # [..., H]
    weight: Any,  # [V, H], or [H, V] with weight_layout="hv"
    ids: Any,  # [...] or [..., K]
    bias: Any = None,  # [V]
    *,
    weight_layout: str = "vh",
    ignore_index: int = -100,
    softcap: Any = None,
    logit_scale: Any = 1.0,
    temperature: Any = 1.0,
    entropy: bool = False,
    lse: bool = False,
    top1: bool = False,
    scratch_bytes: int | None = None,
    backend: str = "auto",
) -> Any:
    r"""Log-probabilities of given ids under a linear layer's softmax, without storing the [tokens, vocab] logits.

    With a = (hidden @ weight.T + bias) * logit_scale, z = softcap * tanh(a / softcap) / temperature (without softcap
    a / temperature) and p = softmax(z), token by token::

        log_prob = z[ids] - lse,    lse = log(sum(exp(z))),    entropy = -sum(p * log(p))

    So log_prob is `jnp.take_along_axis(jax.nn.log_softmax(hidden @ weight.T + bias), ids[..., None], -1)[..., 0]`, with
    float32 logits whatever the inputs' dtype.  log_prob, entropy and lse are differentiable with respect to hidden,
    weight and bias.  It works under jit, grad, vmap, scan and `jax.checkpoint`.

    Args:
        hidden: [..., H] float32, bfloat16 or float16, T tokens in the leading dimensions.  NumPy's float64
            counts as float32 where JAX's 64-bit mode is off.
        weight: [V, H], or [H, V] with weight_layout="hv" (never transposed in memory), of hidden's dtype.
        ids: [...] or [..., K] of any integer dtype: one or K vocabulary indices for each token, or `ignore_index`.
            The same id may occur several times.
        bias: [V] of hidden's dtype.  Without softcap -inf takes an entry out of the vocabulary.
        weight_layout: "vh" or "hv".
        ignore_index: an id of this value has log_prob 0 and no gradient.  A token whose ids all have it leaves exact
            zeros (top1: -1) and may hold anything; chunks of only such tokens cost nothing.
        softcap: above 0, or None: squashes the logits smoothly into (-softcap, softcap).
        logit_scale: above 0: factor of the logits, before softcap.
        temperature: above 0: divides the logits, after softcap; may also be a [...] array with one per token.
        entropy: also return the entropy of each token's softmax, in nats.
        lse: also return each token's log-sum-exp.
        top1: also return the index of each token's largest logit.
        scratch_bytes: bound on the temporary memory, results and gradients in their parameters' dtypes not counted.
            Default: 256 MiB or an eighth of the float32 logits, whichever is less, and at least what one chunk needs.
        backend: "xla" (plain JAX, on any device), or "auto": the first backend that can run.

    The numbers softcap, logit_scale and temperature may be 0-d arrays, traced or not: a new value then compiles nothing
    anew, but isn't checked.  They are constants to autodiff.

    Returns:
        float32 log_prob of ids' shape.  If entropy, lse or top1 is asked for, `LogProbs(log_prob, entropy, lse, top1)`
        instead, with None for what isn't.  An id that is neither ignore_index nor in [0, V) has log_prob NaN, and so
        are the gradients that its token enters: no value of an array is read while tracing.

    Raises:
        TypeError: an argument of the wrong type or dtype; forward-mode differentiation.
        ValueError: a wrong shape, range or option, or a scratch_bytes that is too small (it names the smallest).
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

    Sources: logits that are computed again in backward from their log-sum-exp are those of Cut Cross-Entropy
    (arXiv:2411.09009), without its gradient filter; the running softmax is that of Milakov and Gimelshein
    (arXiv:1805.02867).
    """
    numbers = {"softcap": softcap, "logit_scale": logit_scale, "temperature": temperature}
    known = known_numbers(numbers)
    Options(ignore_index=ignore_index, entropy=entropy, lse=lse, top1=top1, scratch_bytes=scratch_bytes, **known)
    check_arrays(hidden, weight, ids, bias, temperature if is_array(temperature) else None, weight_layout)
    check_numbers(OP, numbers)

    shape, size = hidden.shape[:-1], hidden.shape[-1]
    total = int(np.prod(shape))
    vocab = weight.shape[weight_layout.index("v")]
    each = ids.shape[-1] if ids.ndim > len(shape) else 1
    plain = plain_labels(ids, vocab, int(ignore_index)).reshape(total, each)
    tensors = Tensors(
        hidden=jnp.asarray(hidden).reshape(total, size),
        weight=jnp.asarray(weight),
        # Here a label only says whether a token counts.
        labels=jnp.where((plain != IGNORED).any(1), 0, IGNORED),
        bias=None if bias is None else jnp.asarray(bias),
        **as_constants(numbers),
    )
    tensors, plain = vary_alike((tensors, plain))
    chosen = choose_backend(OP, backend, dict.fromkeys(BACKENDS))
    budget = None if scratch_bytes is None else int(scratch_bytes)
    call = Call(chosen, platform(), tensors.hidden.dtype.name, weight_layout, "none", "recompute", budget, False)
    static = Static(call, entropy)
    if total == 0:
        none = jnp.zeros(0, jnp.float32)
        outputs = Outputs(none, none, none, jnp.zeros(0, jnp.int32))
    else:
        outputs = _op(static, tensors, plain)
    log_prob = outputs.log_prob.reshape(ids.shape)
    if not (entropy or lse or top1):
        return log_prob
    return LogProbs(
        log_prob,
        outputs.entropy.reshape(shape) if entropy else None,
        outputs.lse.reshape(shape) if lse else None,
        outputs.top1.reshape(shape) if top1 else None,
    )


def problem(static: Static, tensors: Tensors, ids: Any, needs: Needs) -> Problem:
    """What the memory of a call depends on."""
    tokens, size = tensors.hidden.shape
    return Problem(
        tokens=tokens,
        hidden=size,
        vocab=tensors.weight.shape[static.call.vocab_axis],
        ids=ids.shape[1],
        dtype=static.call.dtype,
        device="cpu" if static.call.platform == "cpu" else "cuda",
        grad_hidden=needs.hidden,
        grad_weight=needs.weight,
        grad_bias=needs.bias,
        softcap=tensors.softcap is not None,
        stats=static.entropy,
        op=OP,
        compacted=True,
    )


# ------------------------------------------------------------------------------------------------- derivative rules


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _op(static: Static, tensors: Tensors, ids: Any) -> Outputs:
    config = _plan(static, tensors, ids, Needs(False, False, False), "forward")
    return _run_forward(static, config, tensors, ids)[0]  # type: ignore[no-any-return]


@partial(jax.tree_util.register_dataclass, data_fields=["residuals"], meta_fields=["config", "needs"])
@dataclass(frozen=True)
class _Saved:
    """What backward gets: the walk's arrays, and how it is to be cut."""

    residuals: Residuals
    config: Config
    needs: Needs


def _op_forward(static: Static, primals: Any, ids_primal: Any) -> tuple[Outputs, _Saved]:
    tensors: Tensors = jax.tree.map(lambda x: x.value, primals)
    ids = ids_primal.value
    needs = Needs(*(x is not None and x.perturbed for x in (primals.hidden, primals.weight, primals.bias)))
    # Both walks take the same chunks of tokens: backward finds forward's rows padded to whole ones.
    config = _plan(static, tensors, ids, needs, "recompute" if any(needs) else "forward")
    outputs, residuals = _run_forward(static, config, tensors, ids)
    return outputs, _Saved(residuals, config, needs)


def _op_backward(static: Static, saved: _Saved, cotangents: Outputs) -> tuple[Any, Any]:
    nothing = Tensors(*[None] * len(Tensors._fields))  # type: ignore[arg-type]
    upstream = Outputs(*(None if isinstance(x, SymbolicZero) else x for x in cotangents))._replace(top1=None)
    if all(x is None for x in upstream) or not any(saved.needs):
        return nothing, None
    made = _run_backward(static, saved.config, saved.needs, saved.residuals, upstream)
    return nothing._replace(hidden=made[0], weight=made[1], bias=made[2]), None


_op.defvjp(_op_forward, _op_backward, symbolic_zeros=True)


def _plan(static: Static, tensors: Tensors, ids: Any, needs: Needs, strategy: str) -> Config:
    problem_ = problem(static, tensors, ids, needs)
    return memory.plan(problem_, strategy, static.call.scratch_bytes)


# A derivative of either would be a second derivative of the op: `custom_jvp` is there to say so.
@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run_forward(static: Static, config: Config, tensors: Tensors, ids: Any) -> Any:
    return _jit_forward(static, config, tensors, ids)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _run_backward(static: Static, config: Config, needs: Needs, residuals: Residuals, upstream: Outputs) -> Any:
    return _jit_backward(static, config, needs, residuals, upstream)


_run_forward.defjvp(partial(refuse_second_derivative, OP))
_run_backward.defjvp(partial(refuse_second_derivative, OP))


# jit, so that a call outside of one is not run operation by operation.
@partial(jax.jit, static_argnums=(0, 1))
def _jit_forward(static: Static, config: Config, tensors: Tensors, ids: Any) -> Any:
    return jax_xla.forward(static, config, tensors, ids)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _jit_backward(static: Static, config: Config, needs: Needs, residuals: Residuals, upstream: Outputs) -> Any:
    return jax_xla.backward(static, config, residuals, upstream, needs)
