"""Train the model with each loss, and write text with the result.  What a framework does is behind `Trainer`."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from onchip.bench.harness import adapter
from onchip.demo import SEQUENCE
from onchip.demo.data import Corpus, Ids, batches_in_order, random_batch

BETAS = (0.9, 0.95)
MEASURE_REPEATS = 9


@dataclass(frozen=True)
class TrainConfig:
    steps: int
    tokens: int
    seed: int
    device: str
    fp8: bool = False
    """Whether the model is trained once more, with its linear layers in FP8."""
    learning_rate: float = 8e-3
    warmup_steps: int = 10
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0


class Trainer(Protocol):
    """A model with its optimizer and one of the losses, in some framework."""

    def step(self, inputs: Ids, targets: Ids, rate: float) -> float:
        """Take one step of the optimizer at this learning rate; returns the loss before it."""

    def evaluate(self, inputs: Ids, targets: Ids) -> float:
        """The mean loss."""

    def logits(self, ids: Ids, last: int) -> NDArray[np.float32]:
        """What follows ids[last], of one sequence: [V]."""

    def loss_arguments(self, inputs: Ids, targets: Ids) -> tuple[Any, Any, Any]:
        """The model's hidden states, the head's weight, and the targets."""


@dataclass
class Run:
    """One of the trainings, which differ in nothing but the loss."""

    trainer: Trainer
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


def train_in_step(runs: Mapping[str, Run], config: TrainConfig, corpus: Corpus) -> Iterator[None]:
    """Give every run the same batch, in turn, and yield after each; `Run.losses` grow."""
    rng = np.random.default_rng(config.seed)
    for step in range(config.steps):
        inputs, targets = random_batch(corpus.train, config.tokens, rng)
        for run in runs.values():
            start = time.perf_counter()
            run.losses.append(run.trainer.step(inputs, targets, learning_rate(step, config)))
            run.seconds += time.perf_counter() - start
        yield


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warmup = min(1.0, (step + 1) / config.warmup_steps)
    cosine = 0.5 + 0.5 * math.cos(math.pi * step / config.steps)
    return config.learning_rate * warmup * (0.1 + 0.9 * cosine)


def held_out_loss(trainer: Trainer, config: TrainConfig, corpus: Corpus) -> float:
    """Mean loss of the part of the corpus that training never saw."""
    total, count = 0.0, 0
    for inputs, targets in batches_in_order(corpus.held_out, config.tokens):
        total += trainer.evaluate(inputs, targets) * targets.size
        count += targets.size
    return total / count


def measure_head(
    framework: str, losses: Mapping[str, Callable[..., Any]], device: str, hidden: Any, weight: Any, target: Any
) -> dict[str, dict[str, Any]]:
    """Times and peak memory of head and loss, forward and backward with both gradients, for each of the losses."""
    fw = adapter(framework)
    arguments = (fw.leaf(hidden, "float32"), fw.leaf(weight, "float32"), target)
    steps = {name: fw.steps(loss, arguments, 2)["forward+backward"] for name, loss in losses.items()}
    times = fw.time_interleaved(steps, device=device, repeats=MEASURE_REPEATS)  # warms each step up, too
    extra = {name: fw.peak_extra_bytes(step, device=device) for name, step in steps.items()}
    return {name: {**asdict(times[name]), "extra_bytes": extra[name]} for name in losses}


def sample_text(
    trainer: Trainer, tokenizer: Tokenizer, *, prompt: str, tokens: int, temperature: float, seed: int
) -> str:
    """`prompt` and `tokens` more tokens, each drawn from the model's distribution."""
    rng = np.random.default_rng(seed)
    ids = tokenizer.encode(prompt).ids
    # The head may have more rows than the tokenizer has entries: those ids mean nothing, so they aren't drawn.
    entries = tokenizer.get_vocab_size()
    for _ in range(tokens):
        recent = ids[-SEQUENCE:]
        # Always of one length, for which a framework compiles once: what comes after can't change what is before.
        context = np.zeros(SEQUENCE, np.int64)
        context[: len(recent)] = recent
        logits = trainer.logits(context, len(recent) - 1)[:entries] / temperature
        ids.append(int(np.argmax(logits + rng.gumbel(size=entries))))  # a draw from the softmax
    return str(tokenizer.decode(ids))
