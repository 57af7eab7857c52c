"""Functions for the same values in JAX, of this package and of JAX itself, for `onchip bench`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from onchip.bench.jax_peers import logits_of, plain_peers
from onchip.bench.peers import own
from onchip.ops.linear_log_probs.jax_op import BACKENDS, linear_log_probs

Values = Callable[..., Any]
"""Log-probabilities [T], or with them entropies [T], of (hidden [T, H], weight [V, H], ids [T], *, entropy)."""


def _own(backend: str) -> Values:
    def values(hidden: Any, weight: Any, ids: Any, *, entropy: bool) -> Any:
        return linear_log_probs(hidden, weight, ids, entropy=entropy, backend=backend)

    return values


def _plain(wide: bool) -> Values:
    def values(hidden: Any, weight: Any, ids: Any, *, entropy: bool) -> Any:
        log_p = jax.nn.log_softmax(logits_of(hidden, weight, wide))
        picked = jnp.take_along_axis(log_p, ids[:, None], 1)[:, 0]
        return picked, -(jnp.exp(log_p) * log_p).sum(1) if entropy else None

    return values


OWN = own(_own, BACKENDS)
PEERS = plain_peers(_plain)
