"""The models of the PyTorch demo: transformers' Llama, and one with a mixture of experts in the place of each MLP."""

from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from onchip.demo import SEQUENCE
from onchip.demo.model import EXPERTS, TOP_K, ModelConfig, initial_weights
from onchip.torch import MoE


def implementation() -> str:
    """What the model is made of."""
    return f"LlamaForCausalLM of transformers {version('transformers')}"


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
