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


KNOWN["xla"] = MaskArrays(
    jnp,
    positions=lambda like, n, first: jnp.arange(first, first + n, dtype=jnp.int32),
    constants=lambda like, n, value: jnp.full(n, value, jnp.int32),
    integers=lambda x: jnp.asarray(x).astype(jnp.int32),
    running_max=lambda x: lax.cummax(x, axis=x.ndim - 1),
    running_min=lambda x: lax.cummin(x, axis=x.ndim - 1, reverse=True),
    count_not_above=_count_not_above,
    values=_values,
    values_at_hand=lambda x: _values(x) if jax.default_backend() == "cpu" else None,
)
