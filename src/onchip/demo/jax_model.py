"""The decoder of model.py in JAX, as an equinox module."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from onchip.demo.model import ModelConfig, initial_weights


class Norm(eqx.Module):
    """Vectors divided by the root of their mean square, times a weight."""

    weight: Array  # [H]

    def __call__(self, x: Array) -> Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + jnp.finfo(x.dtype).eps) * self.weight


class Block(eqx.Module):
    """Causal self-attention, then an MLP, each on the normalised residual stream."""

    attention_norm: Norm
    query_key_value: Array  # [3 H, H]
    attention_out: Array  # [H, H]
    mlp_norm: Norm
    mlp_in: Array  # [4 H, H]
    mlp_out: Array  # [H, 4 H]
    heads: int = eqx.field(static=True)

    def __init__(self, config: ModelConfig, weights: Mapping[str, Any], prefix: str) -> None:
        self.heads = config.heads
        self.attention_norm = Norm(jnp.ones(config.hidden))
        self.query_key_value = jnp.asarray(weights[prefix + "query_key_value"])
        self.attention_out = jnp.asarray(weights[prefix + "attention_out"])
        self.mlp_norm = Norm(jnp.ones(config.hidden))
        self.mlp_in = jnp.asarray(weights[prefix + "mlp_in"])
        self.mlp_out = jnp.asarray(weights[prefix + "mlp_out"])

    def __call__(self, x: Array) -> Array:
        x = x + self.attend(self.attention_norm(x)) @ self.attention_out.T
        inner = jax.nn.gelu(self.mlp_norm(x) @ self.mlp_in.T, approximate=False)
        return x + inner @ self.mlp_out.T

    def attend(self, x: Array) -> Array:
        qkv = (x @ self.query_key_value.T).reshape(*x.shape[:-1], 3, self.heads, -1)  # [B, S, 3, heads, size]
        query, key, value = (qkv[:, :, i] for i in range(3))
        return jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape)


class Decoder(eqx.Module):
    """Token ids [B, S] to final hidden states [B, S, H]; `head` [V, H] is the weight of the output layer."""

    tokens: Array  # [V, H]
    positions: Array  # [S, H]
    blocks: list[Block]
    final_norm: Norm
    head: Array

    def __init__(self, config: ModelConfig, seed: int) -> None:
        weights = initial_weights(config, seed)
        self.tokens = jnp.asarray(weights["tokens"])
        self.positions = jnp.asarray(weights["positions"])
        self.blocks = [Block(config, weights, f"blocks.{i}.") for i in range(config.layers)]
        self.final_norm = Norm(jnp.ones(config.hidden))
        self.head = jnp.asarray(weights["head"])

    def __call__(self, ids: Array) -> Array:
        x = self.tokens[ids] + self.positions[: ids.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x)
