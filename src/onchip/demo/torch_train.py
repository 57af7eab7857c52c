"""What the demo does in PyTorch: transformers' Llama with either loss, and the optimizer's step."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from onchip.demo import SEQUENCE
from onchip.demo.data import Ids
from onchip.demo.model import ModelConfig, initial_weights
from onchip.demo.train import BETAS, TrainConfig
from onchip.integrations.transformers import patch
from onchip.torch import convert_linears, linear_cross_entropy


def implementation() -> str:
    """What the model is made of."""
    return f"LlamaForCausalLM from transformers {version('transformers')}"


def language_model(config: ModelConfig, seed: int) -> nn.Module:
    """The model with its initial weights; `model(input_ids=ids, labels=ids).loss` is its loss."""
    sizes = LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=SEQUENCE + 1,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(sizes)
    model.load_state_dict({name: torch.from_numpy(x) for name, x in initial_weights(config, seed).items()})
    return model


def plain_head(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Head and loss as models have them: the logits [T, V] are stored."""
    return F.cross_entropy(F.linear(hidden, weight), target)


HEADS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"plain": plain_head, "onchip": linear_cross_entropy}
"""(hidden [T, H], weight [V, H], target [T]) -> mean loss: what is measured."""
EXPRESSIONS = {
    "plain": "loss = model(input_ids=ids, labels=ids).loss",
    "onchip": """\
from onchip.integrations.transformers import patch

patch(model)
loss = model(input_ids=ids, labels=ids).loss""",
}
"""The losses of the two trainings, as the page shows them."""
MEMORY_SOURCE = "the measured peak above inputs, loss and returned gradients"
"""Where the bytes of `train.measure_head` come from."""


@contextlib.contextmanager
def use_device(device: str, threads: int | None) -> Iterator[None]:
    """Run what is inside on `device`, on the CPU with `threads` threads."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def put(array: NDArray[Any], device: str) -> Tensor:
    return torch.from_numpy(array).to(device)


class TorchTrainer:
    """A `Trainer`, see train.py."""

    def __init__(self, model: nn.Module, config: TrainConfig, *, bf16: bool = False) -> None:
        self.model = model
        self.config = config
        self.bf16 = bf16
        self.optimizer = torch.optim.AdamW(model.parameters(), betas=BETAS, weight_decay=config.weight_decay)

    def step(self, ids: Ids, rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self._loss(ids)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, ids: Ids) -> float:
        return self._loss(ids).item()

    @torch.no_grad()
    def logits(self, ids: Ids, last: int) -> NDArray[np.float32]:
        logits: Tensor = self.model(input_ids=put(ids[None], self.config.device)).logits
        return logits[0, last].cpu().numpy()

    def _loss(self, ids: Ids) -> Tensor:
        batch = put(ids, self.config.device)
        with torch.autocast(self.config.device, torch.bfloat16, enabled=self.bf16):
            loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss


def make_trainers(model: ModelConfig, config: TrainConfig) -> dict[str, TorchTrainer]:
    """The same model with the plain loss and with onchip's, from the same initial weights.

    With `fp8` there is that training too, and its baseline if that isn't one of the others: on a GPU everything but the
    linear layers runs in bfloat16, as is usual in training.
    """
    initial = language_model(model, config.seed).to(config.device)

    def patched(convert: bool = False) -> nn.Module:
        new = copy.deepcopy(initial)
        if convert:
            convert_linears(
                new,
                lambda name, layer: name != "lm_head",
                backend="dequantize" if config.device == "cpu" else "auto",
            )
        patch(new)
        return new

    trainers = {"plain": TorchTrainer(initial, config), "onchip": TorchTrainer(patched(), config)}
    if config.fp8:
        bf16 = fp8_baseline(config.device) == "bf16"
        trainers["fp8"] = TorchTrainer(patched(convert=True), config, bf16=bf16)
        if bf16:
            trainers["bf16"] = TorchTrainer(patched(), config, bf16=True)
    return trainers


def fp8_baseline(device: str) -> str:
    """The training that the one in FP8 is compared with; it differs only in its linear layers."""
    return "onchip" if device == "cpu" else "bf16"
