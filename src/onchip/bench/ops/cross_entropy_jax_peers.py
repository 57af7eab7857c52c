"""Functions for the same loss in JAX, of this package and others, for `onchip bench`; others are imported late."""

from collections.abc import Callable
from typing import Any

from onchip.bench.jax_peers import mean_loss, needs, optax_losses, plain_losses, plain_peers
from onchip.bench.peers import optional, own
from onchip.ops.cross_entropy.jax_op import BACKENDS, cross_entropy

Loss = Callable[[Any, Any], Any]
"""Mean cross-entropy of (logits [T, V], labels [T]) over the tokens whose label is not -100."""


def _own(backend: str) -> Loss:
    return lambda logits, labels: cross_entropy(logits, labels, backend=backend)


def _plain(wide: bool) -> Loss:
    return lambda logits, labels: mean_loss(plain_losses, logits.astype("float32") if wide else logits, labels)


def _optax() -> Loss:
    losses = optax_losses()
    return lambda logits, labels: mean_loss(losses, logits.astype("float32"), labels)


OWN = own(_own, BACKENDS)
PLAIN = plain_peers(_plain)
PEERS = (*PLAIN, optional("optax, float32 logits", "optax", _optax, needs("optax")))
