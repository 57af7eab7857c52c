"""Trains the model with each loss, and lets it write text.  What depends on the framework is behind `Trainer`."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from tokenizers import Tokenizer

from onchip.bench.harness import adapter, progress_bar
from onchip.demo import SEQUENCE, data
from onchip.demo.data import Ids
from onchip.demo.model import ModelConfig

BETAS = (0.9, 0.95)
MEASURE_REPEATS = 3
MEASURED_VOCABS = (8192, 32_768, 131_072)
"""Head and loss are measured with vocabularies from the demo's own size to that of Llama 3."""
MEASURED_TOKENS = 1024
COMPARED = ("plain", "onchip")
COMPARED_STEPS = 100
BOUND = 1e-3
"""In float32 the losses of the two trainings differ by less than this over the first `COMPARED_STEPS` steps."""
LAST_STEPS = 20
"""The losses in FP8 and of its baseline are compared over this many last steps, since each step's loss is noisy."""
PROMPT = "The"
TEMPERATURE = 0.8
SAMPLE_TOKENS = 120


@dataclass(frozen=True)
class TrainConfig:
    steps: int
    tokens: int
    seed: int
    device: str
    fp8: bool = False
    """Whether the model is trained a third time, with its linear layers in FP8."""
    learning_rate: float = 8e-3
    warmup_steps: int = 10
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0


class Trainer(Protocol):
    """A model with its optimizer and one of the losses, in some framework.  Batches are rows of data.random_batch."""

    def step(self, ids: Ids, rate: float) -> float:
        """Take one step of the optimizer at this learning rate; returns the loss before the step."""

    def evaluate(self, ids: Ids) -> float:
        """The mean loss on these ids."""

    def logits(self, ids: Ids, last: int) -> NDArray[np.float32]:
        """The logits [V] of the token after ids[last], for one sequence."""


def train_and_measure(
    framework: str, made: Any, model: ModelConfig, config: TrainConfig, console: Console
) -> dict[str, Any]:
    """Do all that takes time; `made` is torch_train.py or jax_train.py.  Returns what it adds to the document."""
    begin = time.perf_counter()
    text = data.load_text()
    tokenizer = data.train_tokenizer(text, model.vocab)
    ids, held_out_ids = data.encode(tokenizer, text)
    console.print(
        f"corpus: {len(text):,} characters, {len(ids) + len(held_out_ids):,} tokens; "
        f"tokenizer: {tokenizer.get_vocab_size():,} entries; head: {model.vocab:,} rows",
        highlight=False,
    )
    trainers = made.make_trainers(model, config)
    losses, seconds = train_in_turn(trainers, config, ids, console)
    held_out = {name: mean_loss(trainer, config, held_out_ids) for name, trainer in trainers.items()}
    costs = [measure_head(framework, made, model.hidden, vocab, config, console) for vocab in MEASURED_VOCABS]
    sample = sample_text(
        trainers["onchip"], tokenizer, prompt=PROMPT, tokens=SAMPLE_TOKENS, temperature=TEMPERATURE, seed=config.seed
    )
    return {
        "settings": {
            "framework": framework,
            **asdict(config),
            "dtype": "float32",
            "model": {"implementation": made.implementation(), **asdict(model)},
        },
        "corpus": {
            "name": "pydoc_data.topics",
            "characters": len(text),
            "train_tokens": len(ids),
            "held_out_tokens": len(held_out_ids),
            "tokenizer_entries": tokenizer.get_vocab_size(),
        },
        "expressions": made.EXPRESSIONS,
        "losses": losses,
        "held_out_loss": held_out,
        "difference": _difference(*(losses[name] for name in COMPARED), steps=COMPARED_STEPS),
        "fp8": fp8_difference(losses, held_out, made.fp8_baseline(config.device)) if config.fp8 else None,
        "train_seconds": seconds,
        "head_and_loss": costs,
        "extra_bytes_are": made.MEMORY_SOURCE,
        "measure_repeats": MEASURE_REPEATS,
        "sample": {"prompt": PROMPT, "temperature": TEMPERATURE, "tokens": SAMPLE_TOKENS, "text": sample},
        "seconds": time.perf_counter() - begin,
    }


def train_in_turn(
    trainers: Mapping[str, Trainer], config: TrainConfig, ids: Ids, console: Console
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Train all of them in turn on the same batches; returns the losses of each, and how many seconds it took."""
    rng = np.random.default_rng(config.seed)
    losses: dict[str, list[float]] = {name: [] for name in trainers}
    seconds = dict.fromkeys(trainers, 0.0)
    with progress_bar(console) as progress:
        task = progress.add_task("", total=config.steps)
        for step in range(config.steps):
            batch = data.random_batch(ids, config.tokens, rng)
            for name, trainer in trainers.items():
                start = time.perf_counter()
                losses[name].append(trainer.step(batch, learning_rate(step, config)))
                seconds[name] += time.perf_counter() - start
            told = "  ".join(f"{name} {values[-1]:.4f}" for name, values in losses.items())
            plain, onchip = (losses[name][-1] for name in COMPARED)
            told += f"  difference {abs(plain - onchip):.1e}"
            progress.update(task, advance=1, description=f"training: {told}", refresh=True)
    return losses, seconds


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warmup = min(1.0, (step + 1) / config.warmup_steps)
    cosine = 0.5 + 0.5 * math.cos(math.pi * step / config.steps)
    return config.learning_rate * warmup * (0.1 + 0.9 * cosine)


def mean_loss(trainer: Trainer, config: TrainConfig, ids: Ids) -> float:
    """The mean loss over all of `ids`."""
    total, count = 0.0, 0
    for batch in data.batches_in_order(ids, config.tokens):
        labels = batch[:, 1:].size
        total += trainer.evaluate(batch) * labels
        count += labels
    return total / count


def measure_head(
    framework: str, made: Any, hidden: int, vocab: int, config: TrainConfig, console: Console
) -> dict[str, Any]:
    """Times and peak memory of head and loss, forward and backward with both gradients, for each of the losses."""
    console.print(f"measuring head and loss with a vocabulary of {vocab:,} ...", highlight=False)
    fw = adapter(framework)
    rng = np.random.default_rng(config.seed)
    states = fw.leaf(made.put(rng.standard_normal((MEASURED_TOKENS, hidden), np.float32), config.device), "float32")
    weight = np.float32(0.06) * rng.standard_normal((vocab, hidden), np.float32)
    weight = fw.leaf(made.put(weight, config.device), "float32")
    labels = made.put(rng.integers(vocab, size=MEASURED_TOKENS), config.device)
    steps = {name: fw.steps(head, (states, weight, labels), 2)["forward+backward"] for name, head in made.HEADS.items()}
    costs = measure(fw, steps, config)
    return {"vocab": vocab, "tokens": MEASURED_TOKENS, "logits_bytes": 4 * MEASURED_TOKENS * vocab, **costs}


def measure(fw: Any, steps: Mapping[str, Any], config: TrainConfig) -> dict[str, Any]:
    """Times and peak memory of steps that take turns."""
    times = fw.time_interleaved(steps, device=config.device, repeats=MEASURE_REPEATS)  # warms each step up, too
    extra = {name: fw.peak_extra_bytes(step, device=config.device) for name, step in steps.items()}
    return {name: {**asdict(times[name]), "extra_bytes": extra[name]} for name in steps}


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


def _difference(plain: list[float], onchip: list[float], *, steps: int) -> dict[str, Any]:
    """The difference of the two losses in each step; the bound is for the first `steps`."""
    per_step = [abs(a - b) for a, b in zip(plain, onchip, strict=True)]
    largest = max(per_step[:steps])
    return {
        "per_step": per_step,
        "compared_steps": min(steps, len(per_step)),
        "largest_in_compared_steps": largest,
        "largest": max(per_step),
        "bound": BOUND,
        "within_bound": largest < BOUND,
    }


def fp8_difference(losses: Mapping[str, list[float]], held_out: Mapping[str, float], baseline: str) -> dict[str, Any]:
    """How far the training in FP8 is from its baseline; positive where FP8's loss is the higher one."""
    per_step = [a - b for a, b in zip(losses["fp8"], losses[baseline], strict=True)]
    last = per_step[-LAST_STEPS:]
    return {
        "baseline": baseline,
        "per_step": per_step,
        "largest": max(map(abs, per_step)),
        "last_steps": len(last),
        "mean_of_last_steps": sum(last) / len(last),
        "held_out": held_out["fp8"] - held_out[baseline],
    }
