"""What the demo does in JAX: the model as functions of its weights, both losses, and the optimizer's step."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpy.typing import NDArray

from onchip.demo.data import Ids
from onchip.demo.model import ModelConfig, initial_weights
from onchip.demo.train import BETAS, TrainConfig
from onchip.jax import linear_cross_entropy

Weights = Mapping[str, Array]
Loss = Callable[[Array, Array, Array], Array]
"""(hidden [B, S, H], weight [V, H], ids [B, S]) -> mean loss of each next id."""


def hidden_states(config: ModelConfig, weights: Weights, ids: Array) -> Array:
    """The final hidden states [S, H] for token ids [S]."""
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


def plain_head(hidden: Array, weight: Array, labels: Array) -> Array:
    """What a training script does without onchip: the logits [T, V] are stored."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(hidden @ weight.T, labels))


def plain_loss(hidden: Array, weight: Array, ids: Array) -> Array:
    return plain_head(hidden[:, :-1], weight, ids[:, 1:])


def onchip_loss(hidden: Array, weight: Array, ids: Array) -> Array:
    loss: Array = linear_cross_entropy(hidden, weight, ids, shift=True)
    return loss


LOSSES: Mapping[str, Loss] = {"plain": plain_loss, "onchip": onchip_loss}
HEADS = {"plain": plain_head, "onchip": linear_cross_entropy}
"""(hidden [T, H], weight [V, H], labels [T]) -> mean loss: what is measured."""
EXPRESSIONS = {
    "plain": """\
logits = hidden[:, :-1] @ head.T
loss = optax.softmax_cross_entropy_with_integer_labels(
    logits, ids[:, 1:]
).mean()""",
    "onchip": """\
from onchip.jax import linear_cross_entropy

loss = linear_cross_entropy(hidden, head, ids, shift=True)""",
}
"""The losses of the two trainings, as the page shows them."""
MEMORY_SOURCE = "what XLA allocates for the compiled step beyond its arguments and results, by its own memory analysis"


@contextlib.contextmanager
def use_device(device: str, threads: int | None) -> Iterator[None]:
    """Run what is inside on `device`, with float32 products in float32 (on a GPU the default is tf32)."""
    with jax.default_device(jax.devices(device)[0]), jax.default_matmul_precision("highest"):
        yield


def put(array: NDArray[Any], device: str) -> Array:
    """An array on the device of `use_device`; ids become int32."""
    return jnp.asarray(array, jnp.int32 if array.dtype.kind == "i" else None)


class JaxTrainer:
    """A `Trainer`, see train.py."""

    def __init__(self, model: ModelConfig, loss: Loss, config: TrainConfig) -> None:
        self.device = config.device
        self.weights: Weights = {name: jnp.asarray(x) for name, x in initial_weights(model, config.seed).items()}
        optimizer = optax.chain(
            optax.clip_by_global_norm(config.max_grad_norm),
            optax.scale_by_adam(*BETAS),
            optax.add_decayed_weights(config.weight_decay),
        )
        self.state = optimizer.init(self.weights)

        def mean_loss(weights: Weights, ids: Array) -> Array:
            return loss(jax.vmap(partial(hidden_states, model, weights))(ids), weights["lm_head.weight"], ids)

        def step(weights: Weights, state: Any, rate: Array, ids: Array) -> tuple[Weights, Any, Array]:
            value, gradients = jax.value_and_grad(mean_loss)(weights, ids)
            updates, state = optimizer.update(gradients, state, weights)
            return optax.apply_updates(weights, jax.tree.map(lambda x: -rate * x, updates)), state, value

        def logits(weights: Weights, ids: Array, last: Array) -> Array:
            return weights["lm_head.weight"] @ hidden_states(model, weights, ids)[last]

        self._mean_loss, self._step, self._logits = jax.jit(mean_loss), jax.jit(step), jax.jit(logits)

    def step(self, ids: Ids, rate: float) -> float:
        self.weights, self.state, loss = self._step(self.weights, self.state, jnp.float32(rate), put(ids, self.device))
        return float(loss)

    def evaluate(self, ids: Ids) -> float:
        return float(self._mean_loss(self.weights, put(ids, self.device)))

    def logits(self, ids: Ids, last: int) -> NDArray[np.float32]:
        return np.asarray(self._logits(self.weights, put(ids, self.device), jnp.int32(last)))


def make_trainers(model: ModelConfig, config: TrainConfig) -> dict[str, JaxTrainer]:
    """The same model with each loss, from the same initial weights."""
    return {name: JaxTrainer(model, loss, config) for name, loss in LOSSES.items()}


def implementation() -> str:
    """What the model is made of."""
    return f"a Llama in jax.numpy, jax {jax.__version__}"
