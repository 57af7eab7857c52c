"""What the JAX front end hands to a backend, and what it gets back: the types of that interface.

A backend is a module with four functions.  `refusal(static, problem)` says why it can't serve a call, or None;
`plan(problem, strategy, budget)` gives a hashable config with a field `strategy`, or raises ValueError; and, traced::

    forward(static, config, tensors, needs) -> (Outputs, residuals)
    backward(static, config, residuals, grad_loss, needs) -> (grad_hidden, grad_weight, grad_bias)

`needs` says which gradients are wanted; the others are None.  Where none is, `config.strategy` is 'forward' and the
residuals are dropped; otherwise they are any pytree of arrays, with whatever of `tensors` backward reads.  Gradients
have the shapes of `tensors` and the dtypes of their parameters; those of ignored tokens are exact zeros.  Both
functions run under jit, vmap and scan; T, H and V are at least 1.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax

# What stands for a label that is not in [0, V).
IGNORED = -1
OUT_OF_RANGE = -2


@dataclass(frozen=True)
class Static:
    """What is known while tracing; a call with another `Static` compiles anew."""

    backend: str
    platform: str  # "cpu", "gpu" or "tpu"
    dtype: str  # of hidden, weight and bias, of their gradients, and of what the products read
    weight_layout: str  # "vh" or "hv"
    reduction: str
    strategy: str
    scratch_bytes: int | None
    return_stats: bool

    @property
    def vocab_axis(self) -> int:
        """The dimension of weight that is the vocabulary."""
        return self.weight_layout.index("v")


class Tensors(NamedTuple):
    """The arrays of a call.  What the call doesn't use is None; numbers are float32 arrays, so that a new value does
    not compile anew."""

    hidden: jax.Array  # [T, H] float32, bfloat16 or float16
    weight: jax.Array  # [V, H], or [H, V] with layout "hv", of hidden's dtype
    labels: jax.Array  # [T] int32 in [0, V), IGNORED or OUT_OF_RANGE
    bias: jax.Array | None = None  # [V] of hidden's dtype
    token_weight: jax.Array | None = None  # [T] float32
    temperature: jax.Array | None = None  # [T] or [] float32
    normalizer: jax.Array | None = None  # [] float32
    label_smoothing: jax.Array | None = None  # [] float32, as all below
    z_loss: jax.Array | None = None
    softcap: jax.Array | None = None
    logit_scale: jax.Array | None = None


class Needs(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


class LinearCrossEntropyStats(NamedTuple):
    """Per-token statistics, without gradients; each has the labels' shape, and ignored tokens hold 0 (False)."""

    lse: jax.Array
    """float32: log-sum-exp of the final logits."""
    log_prob: jax.Array
    """float32: log-probability of the label."""
    entropy: jax.Array
    """float32: entropy of the softmax, in nats."""
    correct: jax.Array
    """bool: whether the label is the argmax (the first one, where logits tie)."""


class Outputs(NamedTuple):
    """What forward returns."""

    loss: jax.Array  # [] float32, or [T] with reduction "none"
    stats: LinearCrossEntropyStats | None  # of [T] each, if asked for
