"""The model of model.py in JAX, of equinox's layers."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from onchip.demo.model import ModelConfig


class Llama(eqx.Module):
    """Token ids [S] to the final hidden states [S, H]; `head` [V, H] is the weight of the output layer."""

    tokens: eqx.nn.Embedding
    layers: list["Layer"]
    norm: eqx.nn.RMSNorm
    head: Array

    def __init__(self, config: ModelConfig, weights: Mapping[str, NDArray[np.float32]]) -> None:
        self.tokens = eqx.nn.Embedding(weight=jnp.asarray(weights["model.embed_tokens.weight"]))
        self.layers = [Layer(config, weights, f"model.layers.{i}.") for i in range(config.layers)]
        self.norm = _norm(config, weights["model.norm.weight"])
        self.head = jnp.asarray(weights["lm_head.weight"])

    def __call__(self, ids: Array) -> Array:
        x = jax.vmap(self.tokens)(ids)
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.norm)(x)


class Layer(eqx.Module):
    """Causal self-attention, then a gated MLP, each on the normalised residual stream."""

    attention_norm: eqx.nn.RMSNorm
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear
    rotary: eqx.nn.RotaryPositionalEmbedding
    mlp_norm: eqx.nn.RMSNorm
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, config: ModelConfig, weights: Mapping[str, NDArray[np.float32]], prefix: str) -> None:
        self.attention_norm = _norm(config, weights[f"{prefix}input_layernorm.weight"])
        self.query, self.key, self.value, self.out = (
            _linear(weights[f"{prefix}self_attn.{name}_proj.weight"]) for name in "qkvo"
        )
        self.rotary = eqx.nn.RotaryPositionalEmbedding(config.hidden // config.heads, config.rope_theta)
        self.mlp_norm = _norm(config, weights[f"{prefix}post_attention_layernorm.weight"])
        self.gate, self.up, self.down = (
            _linear(weights[f"{prefix}mlp.{name}_proj.weight"]) for name in ("gate", "up", "down")
        )
        self.heads = config.heads

    def __call__(self, x: Array) -> Array:
        x = x + self._attend(jax.vmap(self.attention_norm)(x))
        y = jax.vmap(self.mlp_norm)(x)
        return x + jax.vmap(self.down)(jax.nn.silu(jax.vmap(self.gate)(y)) * jax.vmap(self.up)(y))

    def _attend(self, x: Array) -> Array:
        def split(project: Callable[[Array], Array]) -> Array:
            return jax.vmap(project)(x).reshape(x.shape[0], self.heads, -1)

        rotate: Any = jax.vmap(self.rotary, in_axes=1, out_axes=1)
        query, key = rotate(split(self.query)), rotate(split(self.key))
        mixed = jax.nn.dot_product_attention(query, key, split(self.value), is_causal=True)
        return jax.vmap(self.out)(mixed.reshape(x.shape))


def _linear(weight: NDArray[np.float32]) -> eqx.nn.Linear:
    """Of equinox, with this weight."""
    out_size, in_size = weight.shape
    layer = eqx.nn.Linear(in_size, out_size, use_bias=False, key=jax.random.key(0))
    made: eqx.nn.Linear = eqx.tree_at(lambda linear: linear.weight, layer, jnp.asarray(weight))
    return made


def _norm(config: ModelConfig, weight: NDArray[np.float32]) -> eqx.nn.RMSNorm:
    layer = eqx.nn.RMSNorm(weight.shape[0], config.norm_eps, use_bias=False)
    made: eqx.nn.RMSNorm = eqx.tree_at(lambda norm: norm.weight, layer, jnp.asarray(weight))
    return made
