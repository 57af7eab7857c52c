"""The model of model.py in JAX, as functions of its weights."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from onchip.demo.model import ModelConfig

Weights = Mapping[str, Array]


def hidden_states(config: ModelConfig, weights: Weights, ids: Array) -> Array:
    """Token ids [S] to the final hidden states [S, H]."""
    x = weights["model.embed_tokens.weight"][ids]
    for i in range(config.layers):
        x = _layer(config, {name: weights[f"model.layers.{i}.{name}.weight"] for name in _NAMES}, x)
    return _norm(x, weights["model.norm.weight"], config.norm_eps)


_NAMES = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


def _layer(config: ModelConfig, weights: Weights, x: Array) -> Array:
    """Causal self-attention, then a gated MLP, each on the normalised residual stream."""
    before, query, key, value, out, after, gate, up, down = (weights[name] for name in _NAMES)
    y = _norm(x, before, config.norm_eps)
    q, k, v = ((y @ w.T).reshape(len(x), config.heads, -1) for w in (query, key, value))
    q, k = _rotate(q, config.rope_theta), _rotate(k, config.rope_theta)
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ out.T
    y = _norm(x, after, config.norm_eps)
    return x + (jax.nn.silu(y @ gate.T) * (y @ up.T)) @ down.T


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight[None]


def _rotate(x: Array, theta: float) -> Array:
    """Rotary positions (https://arxiv.org/abs/2104.09864) for [S, heads, size]: entry i turns with i + size / 2."""
    length, _, size = x.shape
    rates = theta ** (-jnp.arange(0, size, 2) / size)
    angles = (jnp.arange(length)[:, None] * rates[None])[:, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
