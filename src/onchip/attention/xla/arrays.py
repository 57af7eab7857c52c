"""The functions that masks need, for JAX."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onchip.attention.masks import KNOWN, MaskArrays


def _count_not_above(x: jax.Array, y: jax.Array) -> jax.Array:
    rows = max(len(x), len(y))
    x, y = (jnp.broadcast_to(a, (rows, a.shape[1])) for a in (x, y))
    return jax.vmap(partial(jnp.searchsorted, side="right"))(x, y).astype(jnp.int32)


def _values(x: Any) -> np.ndarray[Any, Any] | None:
    return None if isinstance(x, jax.core.Tracer) else np.asarray(x)


def _begins(ids: jax.Array, step: int) -> jax.Array:
    """[..., T] bool: whether a token is its row's first, or its id isn't that of the one before plus `step`."""
    others = ids[..., 1:] != (ids[..., :-1] + step if step else ids[..., :-1])
    return jnp.concatenate([ids[..., :1] == ids[..., :1], others], -1)


def _runs(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """By a running maximum from the left, and a running minimum from the right."""
    axis, tokens, begins = ids.ndim - 1, ids.shape[-1], _begins(ids, 0)
    at = jnp.arange(tokens, dtype=jnp.int32)
    start = lax.cummax(jnp.where(begins, at, 0), axis=axis)
    following = jnp.where(begins, at, tokens)
    after = jnp.concatenate([following[..., 1:], following[..., :1] * 0 + tokens], -1)
    return start, lax.cummin(after, axis=axis, reverse=True)


KNOWN["xla"] = MaskArrays(
    jnp,
    positions=lambda like, n, first: jnp.arange(first, first + n, dtype=jnp.int32),
    constants=lambda like, n, value: jnp.full(n, value, jnp.int32),
    integers=lambda x: jnp.asarray(x).astype(jnp.int32),
    run_numbers=lambda ids, step: _begins(ids, step).cumsum(-1).astype(jnp.int32),
    runs=_runs,
    count_not_above=_count_not_above,
    values=_values,
    values_at_hand=lambda x: _values(x) if jax.default_backend() == "cpu" else None,
)
