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

from typing import NamedTuple

import jax


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
