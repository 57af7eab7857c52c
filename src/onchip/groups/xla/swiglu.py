"""silu(gate) * up and its gradient, for rows that hold both, in JAX."""

import jax
import jax.numpy as jnp
from jax import Array

from onchip.groups.problem import GroupedOptions


def split(options: GroupedOptions, y: Array) -> tuple[Array, Array]:
    """Gate and up, each [T, F], from y [T, 2 F] or y [2, T, F]."""
    if y.ndim == 3:
        return y[0], y[1]
    if options.gate_up == "interleaved":
        return y[:, 0::2], y[:, 1::2]
    gate, up = jnp.split(y, 2, axis=1)
    return gate, up


def activated(options: GroupedOptions, y: Array) -> Array:
    """The activation of y, or y itself if there is none."""
    if options.activation is None:
        return y
    gate, up = split(options, y)
    return jax.nn.silu(gate) * up


def gradient(options: GroupedOptions, y: Array, g: Array) -> Array:
    """The gradient of y as [T, 2 F], given that of the activation."""
    gate, up = split(options, y)
    s = jax.nn.sigmoid(gate)
    parts = g * up * s * (1 + gate * (1 - s)), g * gate * s
    if options.gate_up == "interleaved":
        return jnp.stack(parts, 2).reshape(len(g), 2 * g.shape[1])
    return jnp.concatenate(parts, 1)
