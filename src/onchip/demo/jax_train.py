"""What the demo does in JAX: both losses and the optimizer's step."""

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
from onchip.demo.jax_model import Weights, hidden_states
from onchip.demo.model import ModelConfig, initial_weights
from onchip.demo.train import BETAS, TrainConfig
from onchip.jax import linear_cross_entropy

Loss = Callable[[Array, Array, Array], Array]
"""(hidden [..., H], weight [V, H], labels [...]) -> mean loss."""


def plain_loss(hidden: Array, weight: Array, labels: Array) -> Array:
    """What a training script does without onchip: the logits [T, V] are stored."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(hidden @ weight.T, labels))


LOSSES: Mapping[str, Loss] = {"plain": plain_loss, "onchip": partial(linear_cross_entropy, scratch_bytes="16MiB")}
EXPRESSIONS = {
    "plain": "optax.softmax_cross_entropy_with_integer_labels(hidden @ weight.T, labels).mean()",
    "onchip": 'onchip.jax.linear_cross_entropy(hidden, weight, labels, scratch_bytes="16MiB")',
}
"""The losses as the page shows them."""


MEMORY_SOURCE = "what XLA allocates for the compiled step beyond its arguments and results, by its own memory analysis"


@contextlib.contextmanager
def use_device(device: str, threads: int | None) -> Iterator[None]:
    """Run what is inside on `device`, with float32 products in float32 (on a GPU the default is tf32)."""
    with jax.default_device(jax.devices(device)[0]), jax.default_matmul_precision("highest"):
        yield


class JaxTrainer:
    """A `Trainer`, see train.py."""

    def __init__(self, model: ModelConfig, loss: Loss, config: TrainConfig) -> None:
        self.weights: Weights = {name: jnp.asarray(x) for name, x in initial_weights(model, config.seed).items()}
        optimizer = optax.chain(
            optax.clip_by_global_norm(config.max_grad_norm),
            optax.scale_by_adam(*BETAS),
            optax.add_decayed_weights(config.weight_decay),
        )
        self.state = optimizer.init(self.weights)

        def mean_loss(weights: Weights, inputs: Array, targets: Array) -> Array:
            return loss(hidden_states(weights, inputs, model), weights["head"], targets)

        def step(weights: Weights, state: Any, rate: Array, *batch: Array) -> tuple[Weights, Any, Array]:
            value, gradients = jax.value_and_grad(mean_loss)(weights, *batch)
            updates, state = optimizer.update(gradients, state, weights)
            return optax.apply_updates(weights, jax.tree.map(lambda x: -rate * x, updates)), state, value

        def logits(weights: Weights, ids: Array, last: Array) -> Array:
            return hidden_states(weights, ids[None], model)[0, last] @ weights["head"].T

        self._mean_loss, self._step, self._logits = jax.jit(mean_loss), jax.jit(step), jax.jit(logits)
        self._hidden_states = jax.jit(partial(hidden_states, config=model))

    def step(self, inputs: Ids, targets: Ids, rate: float) -> float:
        batch = _put(inputs), _put(targets)
        self.weights, self.state, loss = self._step(self.weights, self.state, jnp.float32(rate), *batch)
        return float(loss)

    def evaluate(self, inputs: Ids, targets: Ids) -> float:
        return float(self._mean_loss(self.weights, _put(inputs), _put(targets)))

    def logits(self, ids: Ids, last: int) -> NDArray[np.float32]:
        return np.asarray(self._logits(self.weights, _put(ids), jnp.int32(last)))

    def loss_arguments(self, inputs: Ids, targets: Ids) -> tuple[Array, Array, Array]:
        return self._hidden_states(self.weights, _put(inputs)), self.weights["head"], _put(targets)


def _put(ids: Ids) -> Array:
    return jnp.asarray(ids, jnp.int32)


def make_trainers(model: ModelConfig, config: TrainConfig) -> dict[str, JaxTrainer]:
    """One for each loss, all from the same initial weights."""
    return {name: JaxTrainer(model, loss, config) for name, loss in LOSSES.items()}
