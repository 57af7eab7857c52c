"""Train the model with each loss, measure head and loss, and write text with the result."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from onchip.bench.measure import Timing, peak_extra_bytes, time_interleaved
from onchip.demo.data import Corpus, batches_in_order, random_batch
from onchip.demo.model import Decoder, ModelConfig
from onchip.torch import linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [..., H], weight [V, H], target [...]) -> mean loss."""

MEASURE_REPEATS = 9


@dataclass(frozen=True)
class TrainConfig:
    steps: int
    tokens: int
    seed: int
    device: str
    learning_rate: float = 8e-3
    warmup_steps: int = 10
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0


@dataclass
class Run:
    """One of the trainings, which differ in nothing but `loss`."""

    model: Decoder
    loss: Loss
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Cost:
    """What head and loss took, forward and backward with both gradients."""

    time: Timing
    extra_bytes: int


def plain_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """What a training script does without onchip: the logits [T, V] are stored."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


LOSSES: Mapping[str, Loss] = {"plain": plain_loss, "onchip": linear_cross_entropy}


def make_runs(model: ModelConfig, train: TrainConfig) -> dict[str, Run]:
    """One run for each loss, all from the same initial weights (made on the CPU, so alike on every device)."""
    initial = Decoder(model, torch.Generator().manual_seed(train.seed)).to(train.device)
    runs = {}
    for name, loss in LOSSES.items():
        own = copy.deepcopy(initial)
        optimizer = torch.optim.AdamW(own.parameters(), betas=(0.9, 0.95), weight_decay=train.weight_decay)
        runs[name] = Run(own, loss, optimizer)
    return runs


def train_in_step(runs: Mapping[str, Run], config: TrainConfig, corpus: Corpus) -> Iterator[None]:
    """Give every run the same batch, in turn, and yield after each; `Run.losses` grow."""
    generator = torch.Generator().manual_seed(config.seed)
    for step in range(config.steps):
        batch = random_batch(corpus.train, config.tokens, generator)
        inputs, targets = (part.to(config.device) for part in batch)
        for run in runs.values():
            start = time.perf_counter()
            for group in run.optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            loss = run.loss(run.model(inputs), run.model.head, targets)
            run.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(run.model.parameters(), config.max_grad_norm)
            run.optimizer.step()
            run.losses.append(loss.item())
            run.seconds += time.perf_counter() - start
        yield


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warmup = min(1.0, (step + 1) / config.warmup_steps)
    cosine = 0.5 + 0.5 * math.cos(math.pi * step / config.steps)
    return config.learning_rate * warmup * (0.1 + 0.9 * cosine)


@torch.no_grad()
def held_out_loss(run: Run, config: TrainConfig, corpus: Corpus) -> float:
    """Mean loss of the part of the corpus that training never saw."""
    total, count = 0.0, 0
    for inputs, targets in batches_in_order(corpus.held_out, config.tokens):
        hidden = run.model(inputs.to(config.device))
        total += run.loss(hidden, run.model.head, targets.to(config.device)).item() * targets.numel()
        count += targets.numel()
    return total / count


def measure_head(model: Decoder, config: TrainConfig, corpus: Corpus) -> dict[str, Cost]:
    """Time and peak memory of head and loss, on the hidden states that `model` makes of one batch."""
    inputs, targets = random_batch(corpus.train, config.tokens, torch.Generator().manual_seed(config.seed))
    with torch.no_grad():
        hidden = model(inputs.to(config.device))
    target = targets.to(config.device)
    steps = {name: _head_step(loss, hidden, model.head.detach(), target) for name, loss in LOSSES.items()}
    times = time_interleaved(steps, device=config.device, repeats=MEASURE_REPEATS)  # warms each step up, too
    return {
        name: Cost(time=times[name], extra_bytes=peak_extra_bytes(step, device=config.device))
        for name, step in steps.items()
    }


def _head_step(loss: Loss, hidden: Tensor, weight: Tensor, target: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    def step() -> tuple[Tensor, ...]:
        leaves = (hidden.detach().requires_grad_(), weight.detach().requires_grad_())
        value = loss(*leaves, target)
        return value.detach(), *torch.autograd.grad(value, leaves)

    return step


@torch.no_grad()
def sample_text(
    model: Decoder, tokenizer: Tokenizer, *, prompt: str, tokens: int, temperature: float, seed: int
) -> str:
    """`prompt` and `tokens` more tokens, each drawn from the model's distribution."""
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt).ids
    device = model.head.device
    # The head may have more rows than the tokenizer has entries: those ids mean nothing, so they aren't drawn.
    head = model.head[: tokenizer.get_vocab_size()]
    for _ in range(tokens):
        context = torch.tensor([ids[-model.config.context :]], device=device)
        logits = F.linear(model(context)[0, -1], head) / temperature
        ids.append(int(torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)))
    return str(tokenizer.decode(ids))
