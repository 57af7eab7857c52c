"""What else there is in JAX for the same loss, for `onchip bench` alone.  Each is imported when it is asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onchip.bench import peers as bench_peers
from onchip.bench.jax_peers import logits_of, mean_loss, needs, only_narrow, optax_losses, plain_losses
from onchip.bench.peers import always

Loss = Callable[[Any, Any, Any], Any]
"""Mean cross-entropy of (hidden [T, H], weight, labels [T]) over the tokens whose label is not -100."""


@dataclass(frozen=True)
class Peer(bench_peers.Peer):
    """One function of JAX or of a library on top of it."""

    package: str = "jax"
    weight_layout: str = "vh"
    """"vh" for a weight [V, H], "hv" for [H, V]: the gradient has the same."""
    ignores: bool = True
    """Whether it has tokens that don't count."""


def plain(wide: bool, one_hot: bool = False) -> Loss:
    """The plain expression: logits in float32 if `wide`, else in hidden's dtype, and the rest in float32.

    The label's logit is gathered, or with `one_hot` summed behind a mask, which XLA fuses into its neighbours.
    """
    losses = _one_hot_losses if one_hot else plain_losses
    return lambda hidden, weight, labels: mean_loss(losses, logits_of(hidden, weight, wide), labels)


def _one_hot_losses(logits: Any, labels: Any) -> Any:
    import jax
    import jax.numpy as jnp

    chosen = jnp.where(jnp.arange(logits.shape[1]) == labels[:, None], logits, 0).sum(1)
    return jax.nn.logsumexp(logits, axis=1) - chosen


def _optax() -> Loss:
    losses = optax_losses()
    return lambda hidden, weight, labels: mean_loss(losses, logits_of(hidden, weight, wide=True), labels)


def _tokamax(implementation: str) -> Loss:
    from tokamax import linear_softmax_cross_entropy_loss

    return lambda hidden, weight, labels: linear_softmax_cross_entropy_loss(
        hidden, labels, weight, reduction="mean", implementation=implementation
    )


def _jax_cce(chunk_size: int) -> Loss:
    from jax_cce import linear_cross_entropy

    return lambda hidden, weight, labels: linear_cross_entropy(hidden, weight, labels, chunk_size=chunk_size)


def _tokamax_peer(implementation: str) -> Peer:
    return Peer(
        f"tokamax {implementation}",
        lambda: _tokamax(implementation),
        needs("tokamax"),
        {"implementation": implementation},
        package="tokamax",
        weight_layout="hv",
        ignores=False,
    )


PEERS = (
    Peer("XLA, 16-bit logits", lambda: plain(wide=False), only_narrow),
    Peer("XLA, 16-bit logits, one-hot", lambda: plain(wide=False, one_hot=True), only_narrow, {"one_hot": True}),
    Peer("XLA, float32 logits", lambda: plain(wide=True), always),
    Peer("optax, float32 logits", _optax, needs("optax"), package="optax"),
    _tokamax_peer("xla"),
    _tokamax_peer("chunked_xla"),
    Peer(
        "jax-cce",
        lambda: _jax_cce(chunk_size=4096),
        needs("jax-cce"),
        {"chunk_size": 4096},
        package="jax-cce",
        ignores=False,
    ),
)
