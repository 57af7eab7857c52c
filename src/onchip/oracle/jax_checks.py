"""What the comparisons of JAX ops with their oracles share."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = ("float32", "bfloat16", "float16")


def platform_of(device: str) -> str:
    """JAX's name of "cpu" or "cuda"."""
    return "gpu" if device == "cuda" else device


def linear_arguments(inputs: Any, ids: Any, dtype: str) -> list[Any]:
    """(hidden, weight [V, H], ids, bias)."""
    h, w, b = (None if x is None else jnp.asarray(x, dtype) for x in (inputs.hidden, inputs.weight, inputs.bias))
    return [h, w, jnp.asarray(ids, jnp.int32), b]


def for_oracle(x: Any) -> Any:
    """Arrays as NumPy's, floats as float64; anything else as it is."""
    if not isinstance(x, jax.Array):
        return x
    return np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)


def split_arrays(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays among an op's keyword arguments, and the others."""
    arrays = {name: x for name, x in keywords.items() if isinstance(x, jax.Array)}
    return arrays, {name: x for name, x in keywords.items() if name not in arrays}


def plain_cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: float | None = None,
    token_weight: jax.Array | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | jax.Array = 1.0,
) -> jax.Array:
    """The loss of cross_entropy written with the framework's own functions in logits' dtype."""
    z = logits * logit_scale
    if softcap is not None:
        z = softcap * jnp.tanh(z / softcap)
    z = z / (temperature[..., None].astype(z.dtype) if isinstance(temperature, jax.Array) else temperature)
    kept = labels != ignore_index
    y = jnp.where(kept, labels, 0)
    log_p = jax.nn.log_softmax(z, -1)
    loss = -(1 - label_smoothing) * jnp.take_along_axis(log_p, y[..., None], -1)[..., 0]
    if z_loss > 0:
        loss = loss + z_loss * jax.nn.logsumexp(z, -1) ** 2
    if label_smoothing > 0:
        loss = loss - label_smoothing * log_p.mean(-1)
    if token_weight is not None:
        loss = loss * token_weight.astype(z.dtype)
    loss = jnp.where(kept, loss, 0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (jnp.maximum(kept.sum(), 1) if normalizer is None else normalizer)
