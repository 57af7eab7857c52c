"""The model with a mixture of experts in the place of each MLP, in PyTorch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onchip.demo.model import EXPERTS, TOP_K, ModelConfig
from onchip.torch import MoE


class LoopedMoE(MoE):
    """The same layer as models have it: one expert after the other, on the tokens that are its own."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        tokens = x.flatten(0, -2)
        scores, chosen = self.router(tokens).softmax(-1).topk(self.top_k)
        scores = scores / scores.sum(-1, keepdim=True)
        y = torch.zeros_like(tokens)
        for i in range(self.num_experts):
            token, choice = (chosen == i).nonzero(as_tuple=True)
            gate, up = F.linear(tokens[token], self.gate_up[i]).chunk(2, -1)
            expert = F.linear(F.silu(gate) * up, self.down[i])
            y = y.index_add(0, token, expert * scores[token, choice, None])
        return y.view_as(x)


def expert_layer(kind: type[nn.Module], config: ModelConfig, seed: int) -> nn.Module:
    """A layer with its initial weights, the same for each kind."""
    make: Any = kind
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer: nn.Module = make(config.hidden, config.intermediate // 2, EXPERTS, TOP_K)
    return layer


def put_experts(model: nn.Module, kind: type[nn.Module], config: ModelConfig, seed: int) -> None:
    """Put such layers into the model, in the place of its MLPs."""
    device = next(model.parameters()).device
    layers: Any = model.get_submodule("model.layers")
    for i, layer in enumerate(layers):
        layer.mlp = expert_layer(kind, config, seed + i).to(device)
