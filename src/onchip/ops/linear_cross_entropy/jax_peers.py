"""What else there is in JAX for the same loss, for `onchip bench` alone.  Each is imported when it is asked for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

Loss = Callable[[Any, Any, Any], Any]
"""Mean cross-entropy of (hidden [T, H], weight, labels [T]) over the tokens whose label is not -100."""
Refusal = Callable[[str, str], str | None]
"""Why something can't run on (device, dtype) here, or None."""

IGNORED = -100


@dataclass(frozen=True)
class Peer:
    """One function of JAX or of a library on top of it."""

    name: str
    load: Callable[[], Loss]
    """The function, to be traced."""
    unavailable: Refusal
    config: dict[str, Any] = field(default_factory=dict)
    package: str = "jax"
    """The distribution that it comes with."""
    weight_layout: str = "vh"
    """"vh" for a weight [V, H], "hv" for [H, V]: the gradient has the same."""
    ignores: bool = True
    """Whether it has tokens that don't count."""

    def version(self) -> str:
        return metadata.version(self.package)


def _always(device: str, dtype: str) -> None:
    return None


def _only_narrow(device: str, dtype: str) -> str | None:
    return "in float32 it is the same as XLA, float32 logits" if dtype == "float32" else None


def _installed(package: str) -> Refusal:
    def refusal(device: str, dtype: str) -> str | None:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            return f"{package} is not installed; pip install 'onchip[peers-jax]'"
        return None

    return refusal


def plain(wide: bool, one_hot: bool) -> Loss:
    """The plain expression: logits in float32 if `wide`, else in hidden's dtype, and the rest in float32.

    The label's logit is gathered, or with `one_hot` summed behind a mask, which XLA fuses into its neighbours.
    """
    import jax
    import jax.numpy as jnp

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        logits = jnp.dot(hidden, weight.T, preferred_element_type=jnp.float32 if wide else None)
        z = logits.astype(jnp.float32)
        kept = labels != IGNORED
        label = jnp.where(kept, labels, 0)[:, None]
        if one_hot:
            chosen = jnp.where(jnp.arange(z.shape[1]) == label, z, 0).sum(1)
        else:
            chosen = jnp.take_along_axis(z, label, 1)[:, 0]
        return _mean(jax.nn.logsumexp(z, axis=1) - chosen, kept)

    return loss


def _mean(loss: Any, kept: Any) -> Any:
    import jax.numpy as jnp

    return jnp.where(kept, loss, 0).sum() / jnp.maximum(kept.sum(), 1)


def _optax() -> Loss:
    import jax.numpy as jnp
    import optax

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        logits = jnp.dot(hidden, weight.T, preferred_element_type=jnp.float32)
        kept = labels != IGNORED
        return _mean(optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(kept, labels, 0)), kept)

    return loss


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
        _installed("tokamax"),
        {"implementation": implementation},
        package="tokamax",
        weight_layout="hv",
        ignores=False,
    )


PEERS = (
    Peer("XLA, 16-bit logits", lambda: plain(wide=False, one_hot=False), _only_narrow),
    Peer("XLA, 16-bit logits, one-hot", lambda: plain(wide=False, one_hot=True), _only_narrow, {"one_hot": True}),
    Peer("XLA, float32 logits", lambda: plain(wide=True, one_hot=False), _always),
    Peer("optax, float32 logits", _optax, _installed("optax"), package="optax"),
    _tokamax_peer("xla"),
    _tokamax_peer("chunked_xla"),
    Peer(
        "jax-cce",
        lambda: _jax_cce(chunk_size=4096),
        _installed("jax-cce"),
        {"chunk_size": 4096},
        package="jax-cce",
        ignores=False,
    ),
)
