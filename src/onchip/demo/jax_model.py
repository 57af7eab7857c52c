"""The decoder of model.py in JAX: a function of its weights."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from onchip.demo.model import ModelConfig

Weights = Mapping[str, Array]
"""By the names of `initial_weights`."""


def hidden_states(weights: Weights, ids: Array, config: ModelConfig) -> Array:
    """Token ids [B, S] to final hidden states [B, S, H]."""
    x = weights["tokens"][ids] + weights["positions"][: ids.shape[-1]]
    for i in range(config.layers):
        x = _block(weights, f"blocks.{i}.", x, config.heads)
    return _norm(x, weights["final_norm"])


def _block(weights: Weights, prefix: str, x: Array, heads: int) -> Array:
    """Causal self-attention, then an MLP, each on the normalised residual stream."""
    qkv = _norm(x, weights[prefix + "attention_norm"]) @ weights[prefix + "query_key_value"].T
    query, key, value = (part.reshape(*x.shape[:-1], heads, -1) for part in jnp.split(qkv, 3, -1))
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape)
    x = x + mixed @ weights[prefix + "attention_out"].T
    inner = jax.nn.gelu(_norm(x, weights[prefix + "mlp_norm"]) @ weights[prefix + "mlp_in"].T, approximate=False)
    return x + inner @ weights[prefix + "mlp_out"].T


def _norm(x: Array, weight: Array) -> Array:
    """Vectors divided by the root of their mean square, times a weight."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + jnp.finfo(x.dtype).eps) * weight
