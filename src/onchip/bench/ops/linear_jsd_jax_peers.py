"""Functions for the same loss in JAX, of this package and of JAX itself, for `onchip bench`."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from onchip.bench.jax_peers import logits_of, plain_peers
from onchip.bench.peers import own
from onchip.ops.linear_jsd.jax_op import BACKENDS, linear_jsd

Loss = Callable[..., Any]
"""Mean divergence of (student's hidden [T, Hs] and weight [V, Hs], teacher's [T, Ht] and [V, Ht], *, beta)."""


def _own(backend: str) -> Loss:
    def loss(h: Any, w: Any, x: Any, v: Any, *, beta: float) -> Any:
        return linear_jsd(h, w, x, v, beta=beta, backend=backend)

    return loss


def _plain(wide: bool) -> Loss:
    def loss(h: Any, w: Any, x: Any, v: Any, *, beta: float) -> Any:
        ls, lt = (jax.nn.log_softmax(logits_of(*head, wide)) for head in ((h, w), (x, v)))
        if beta == 0:
            return (jnp.exp(lt) * (lt - ls)).sum(1).mean()
        if beta == 1:
            return (jnp.exp(ls) * (ls - lt)).sum(1).mean()
        lm = jnp.logaddexp(ls + math.log(1 - beta), lt + math.log(beta))
        terms = (1 - beta) * jnp.exp(ls) * (ls - lm) + beta * jnp.exp(lt) * (lt - lm)
        return terms.sum(1).mean()

    return loss


OWN = own(_own, BACKENDS)
PEERS = plain_peers(_plain)
