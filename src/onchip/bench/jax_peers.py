"""What the benchmarks of several ops in JAX compare with.  JAX is imported where a function is loaded or called."""

from collections.abc import Callable
from typing import Any

from onchip.bench.peers import Peer, Refusal, always, not_installed, optional

IGNORED = -100
"""The ignore_index that all implementations have by default."""

Losses = Callable[[Any, Any], Any]
"""Cross-entropies [T] of (logits [T, V], labels [T], all in [0, V))."""


def plain_peers(load: Callable[[bool], Callable[..., Any]]) -> tuple[Peer, Peer]:
    """The plain expression, loaded with whether its logits are float32 or in the inputs' dtype."""
    return (
        optional("XLA, 16-bit logits", "jax", lambda: load(False), only_narrow),
        optional("XLA, float32 logits", "jax", lambda: load(True), always),
    )


def only_narrow(device: str, dtype: str) -> str | None:
    return "in float32 it is the same as XLA, float32 logits" if dtype == "float32" else None


def needs(package: str) -> Refusal:
    return lambda device, dtype: not_installed(package, "peers-jax")


def logits_of(hidden: Any, weight: Any, wide: bool) -> Any:
    """[T, V] float32: rounded to hidden's dtype before, unless `wide`."""
    import jax.numpy as jnp

    logits = jnp.dot(hidden, weight.T, preferred_element_type=jnp.float32 if wide else None)
    return logits.astype(jnp.float32)


def plain_losses(logits: Any, labels: Any) -> Any:
    """The cross-entropies, by a gather."""
    import jax
    import jax.numpy as jnp

    return jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]


def optax_losses() -> Losses:
    import optax

    losses: Losses = optax.softmax_cross_entropy_with_integer_labels
    return losses


def mean_loss(losses: Losses, logits: Any, labels: Any) -> Any:
    """The float32 mean over the tokens whose label is not IGNORED."""
    import jax.numpy as jnp

    kept = labels != IGNORED
    each = losses(logits, jnp.where(kept, labels, 0)).astype(jnp.float32)
    return jnp.where(kept, each, 0).sum() / jnp.maximum(kept.sum(), 1)
