"""What the demo does in JAX: both losses, the optimizer's step, time and memory of head and loss."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpy.typing import NDArray

from onchip.bench.measure_jax import time_interleaved
from onchip.demo.data import Ids
from onchip.demo.jax_model import Decoder
from onchip.demo.model import ModelConfig
from onchip.demo.train import BETAS, MEASURE_REPEATS, Cost, TrainConfig
from onchip.jax import linear_cross_entropy

Loss = Callable[[Array, Array, Array], Array]
"""(hidden [..., H], weight [V, H], labels [...]) -> mean loss."""


def plain_loss(hidden: Array, weight: Array, labels: Array) -> Array:
    """What a training script does without onchip: the logits [T, V] are stored."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(hidden @ weight.T, labels))


LOSSES: Mapping[str, Loss] = {"plain": plain_loss, "onchip": linear_cross_entropy}
EXPRESSIONS = {
    "plain": "optax.softmax_cross_entropy_with_integer_labels(hidden @ weight.T, labels).mean()",
    "onchip": "onchip.jax.linear_cross_entropy(hidden, weight, labels)",
}
"""The losses as the page shows them."""


def memory_source(device: str) -> str:
    """Where the bytes of `measure_head` are from."""
    return "what XLA allocates for the compiled step beyond its arguments and results, by its own memory analysis"


@contextlib.contextmanager
def use_device(device: str, threads: int | None) -> Iterator[None]:
    """Run what is inside on `device`, with float32 products in float32 (on a GPU the default is tf32)."""
    with jax.default_device(jax.devices(device)[0]), jax.default_matmul_precision("highest"):
        yield


class JaxTrainer:
    """A `Trainer`, see train.py."""

    def __init__(self, model: Decoder, loss: Loss, config: TrainConfig) -> None:
        self.model = model
        self.loss = loss
        self.device = config.device
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(config.max_grad_norm),
            optax.scale_by_adam(*BETAS),
            optax.add_decayed_weights(config.weight_decay),
        )
        self.state = self.optimizer.init(eqx.filter(model, eqx.is_array))

    def step(self, inputs: Ids, targets: Ids, rate: float) -> float:
        batch = _put(inputs), _put(targets)
        made = _step(self.loss, self.optimizer.update, self.model, self.state, batch, jnp.float32(rate))
        self.model, self.state, loss = made
        return float(loss)

    def evaluate(self, inputs: Ids, targets: Ids) -> float:
        return float(_evaluate(self.loss, self.model, (_put(inputs), _put(targets))))

    def logits(self, ids: Ids, last: int) -> NDArray[np.float32]:
        return np.asarray(_logits(self.model, _put(ids), jnp.int32(last)))


def _put(ids: Ids) -> Array:
    return jnp.asarray(ids, jnp.int32)


# Of the arguments equinox traces the arrays; functions are what it compiles for.
@eqx.filter_jit
def _step(
    loss: Loss, update: Any, model: Decoder, state: Any, batch: tuple[Array, Array], rate: Array
) -> tuple[Decoder, Any, Array]:
    value, gradients = eqx.filter_value_and_grad(lambda model: _loss(loss, model, batch))(model)
    updates, state = update(gradients, state, model)
    return eqx.apply_updates(model, jax.tree.map(lambda x: -rate * x, updates)), state, value


@eqx.filter_jit
def _evaluate(loss: Loss, model: Decoder, batch: tuple[Array, Array]) -> Array:
    return _loss(loss, model, batch)


def _loss(loss: Loss, model: Decoder, batch: tuple[Array, Array]) -> Array:
    inputs, targets = batch
    return loss(model(inputs), model.head, targets)


@eqx.filter_jit
def _logits(model: Decoder, ids: Array, last: Array) -> Array:
    return model(ids[None])[0, last] @ model.head.T


def make_trainers(model: ModelConfig, config: TrainConfig) -> dict[str, JaxTrainer]:
    """One for each loss, all from the same initial weights."""
    initial = Decoder(model, config.seed)
    return {name: JaxTrainer(initial, loss, config) for name, loss in LOSSES.items()}


def measure_head(trainer: JaxTrainer, inputs: Ids, targets: Ids) -> dict[str, Cost]:
    """Time and temporary memory of head and loss, on the hidden states that the model makes of one batch."""
    arguments = (eqx.filter_jit(trainer.model)(_put(inputs)), trainer.model.head, _put(targets))
    compiled = {
        name: jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments).compile() for name, loss in LOSSES.items()
    }

    steps = {name: partial(run, *arguments) for name, run in compiled.items()}
    times = time_interleaved(steps, device=trainer.device, repeats=MEASURE_REPEATS)
    extra: dict[str, Any] = {name: run.memory_analysis() for name, run in compiled.items()}
    return {name: Cost(time=times[name], extra_bytes=int(extra[name].temp_size_in_bytes)) for name in compiled}
