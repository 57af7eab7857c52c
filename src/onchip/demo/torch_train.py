"""What the demo does in PyTorch: both losses and the optimizer's step."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from onchip.demo.data import Ids
from onchip.demo.model import ModelConfig
from onchip.demo.torch_model import Decoder
from onchip.demo.train import BETAS, TrainConfig
from onchip.torch import convert_linears, linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [..., H], weight [V, H], target [...]) -> mean loss."""


def plain_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """What a training script does without onchip: the logits [T, V] are stored."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


LOSSES: Mapping[str, Loss] = {"plain": plain_loss, "onchip": partial(linear_cross_entropy, scratch_bytes="16MiB")}
EXPRESSIONS = {
    "plain": "F.cross_entropy(F.linear(hidden, weight), target)",
    "onchip": 'onchip.torch.linear_cross_entropy(hidden, weight, target, scratch_bytes="16MiB")',
}
"""The losses as the page shows them."""


MEMORY_SOURCE = "the measured peak above inputs, loss and returned gradients"
"""Where the bytes of `train.measure_head` are from."""


@contextlib.contextmanager
def use_device(device: str, threads: int | None) -> Iterator[None]:
    """Run what is inside on `device`; on the CPU with so many threads."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class TorchTrainer:
    """A `Trainer`, see train.py."""

    def __init__(self, model: Decoder, loss: Loss, config: TrainConfig, *, bf16: bool = False) -> None:
        self.model = model
        self.loss = loss
        self.config = config
        self.bf16 = bf16
        self.optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=config.weight_decay)

    def step(self, inputs: Ids, targets: Ids, rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self._loss(inputs, targets)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, inputs: Ids, targets: Ids) -> float:
        return self._loss(inputs, targets).item()

    @torch.no_grad()
    def logits(self, ids: Ids, last: int) -> NDArray[np.float32]:
        hidden = self.model(self._put(ids[None]))[0, last]
        return F.linear(hidden, self.model.head).cpu().numpy()

    def loss_arguments(self, inputs: Ids, targets: Ids) -> tuple[Tensor, Tensor, Tensor]:
        return self.model(self._put(inputs)), self.model.head, self._put(targets)

    def _loss(self, inputs: Ids, targets: Ids) -> Tensor:
        with torch.autocast(self.config.device, torch.bfloat16, enabled=self.bf16):
            return self.loss(*self.loss_arguments(inputs, targets))

    def _put(self, ids: Ids) -> Tensor:
        return torch.from_numpy(ids).to(self.config.device)


def make_trainers(model: ModelConfig, config: TrainConfig) -> dict[str, TorchTrainer]:
    """One for each loss, all from the same initial weights.

    With `fp8` also that training, and its baseline where that isn't one of the others: on a GPU what is around the
    linear layers is in bfloat16, as models are trained there.
    """
    initial = Decoder(model, config.seed).to(config.device)
    trainers = {name: TorchTrainer(copy.deepcopy(initial), loss, config) for name, loss in LOSSES.items()}
    if config.fp8:
        bf16 = fp8_baseline(config.device) == "bf16"
        converted = copy.deepcopy(initial)
        convert_linears(converted, backend="dequantize" if config.device == "cpu" else "auto")
        trainers["fp8"] = TorchTrainer(converted, linear_cross_entropy, config, bf16=bf16)
        if bf16:
            trainers["bf16"] = TorchTrainer(copy.deepcopy(initial), linear_cross_entropy, config, bf16=True)
    return trainers


def fp8_baseline(device: str) -> str:
    """The training that the one in FP8 is compared with: alike in all but the linear layers."""
    return "onchip" if device == "cpu" else "bf16"
