"""JAX's part of all comparisons.  `onchip.oracle.torch` has the same names."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

NAME = "jax"
DTYPES = ("float32", "bfloat16", "float16")

xp = jnp
log_softmax, logsumexp = jax.nn.log_softmax, jax.nn.logsumexp


def platform_of(device: str) -> str:
    """JAX's name for "cpu" or "cuda"."""
    return "gpu" if device == "cuda" else device


def default_device(device: str) -> AbstractContextManager[Any]:
    """A context in which arrays are created and computed on this device unless they are elsewhere."""
    context: AbstractContextManager[Any] = jax.default_device(jax.devices(platform_of(device))[0])
    return context


def leaf(x: Any, dtype: str, device: str, columns: int | None = None) -> Array:
    return jnp.asarray(x[:, :columns] if columns is not None else x, dtype)


def constant(x: Any, device: str) -> Array:
    x = np.asarray(x)
    return jnp.asarray(x, jnp.int32 if x.dtype == np.int64 else None)


def as_array(x: Array) -> Any:
    return np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)


def is_array(x: Any) -> bool:
    return isinstance(x, Array)


def linear(hidden: Array, weight: Array, bias: Array | None = None) -> Array:
    products = hidden @ weight.T
    return products if bias is None else products + bias.reshape(*[1] * (products.ndim - 1), -1)


def like(x: Array, other: Array) -> Array:
    return x.astype(other.dtype)


def take(x: Array, indices: Array) -> Array:
    return jnp.take_along_axis(x, indices, -1)


def differentiate(
    function: Callable[..., Mapping[str, Any]],
    arguments: Mapping[str, Any],
    keywords: Mapping[str, Any],
    upstream: Mapping[str, Any],
    leaves: Collection[str],
) -> dict[str, Any]:
    """As PyTorch's, under jit."""
    arrays = {name: x for name, x in keywords.items() if is_array(x)}
    options = {name: x for name, x in keywords.items() if name not in arrays}

    def step(given: Any, others: Any, upstream: Any) -> Any:
        def values(given: Any) -> Any:
            made = {n: x for n, x in function(**given, **others, **options).items() if x is not None}
            return {n: made.pop(n) for n in upstream if n in made}, made

        out, pullback, others_made = jax.vjp(values, given, has_aux=True)
        (grads,) = pullback({name: upstream[name].astype(x.dtype) for name, x in out.items()})
        return out | others_made | {f"grad_{name}": g for name, g in grads.items()}

    given = {name: arguments[name] for name in leaves}
    others = {name: x for name, x in arguments.items() if name not in given} | arrays
    made = jax.jit(step)(given, others, {name: jnp.asarray(g) for name, g in upstream.items()})
    return {name: as_array(x) for name, x in made.items()}
