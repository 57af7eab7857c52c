"""The model of model.py in PyTorch: transformers' LlamaForCausalLM; where that is missing, one that is called alike."""

from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onchip.demo import SEQUENCE
from onchip.demo.model import ModelConfig, initial_weights


def language_model(config: ModelConfig, seed: int) -> nn.Module:
    """The model with its initial weights; `model(input_ids=ids, labels=ids).loss` is its loss."""
    model = _of_transformers(config) if find_spec("transformers") else Llama(config)
    model.load_state_dict({name: torch.from_numpy(x) for name, x in initial_weights(config, seed).items()})
    return model


def implementation() -> str:
    """Which of the two `language_model` takes."""
    if find_spec("transformers"):
        return f"LlamaForCausalLM of transformers {version('transformers')}"
    return "a Llama of the demo's own (transformers is not installed)"


def _of_transformers(config: ModelConfig) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

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
    return model


class Llama(nn.Module):
    """A Llama with the parameters of transformers' and as much of its interface as the demo and `patch` use."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        norm = nn.RMSNorm(config.hidden, config.norm_eps)
        embedding = nn.Embedding(config.vocab, config.hidden)
        layers = nn.Sequential(*(Layer(config) for _ in range(config.layers)))
        self.model = nn.ModuleDict({"embed_tokens": embedding, "layers": layers, "norm": norm})
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        """Token ids [B, S] to an object with `logits` [B, S, V] and, with labels, `loss`."""
        hidden = self.model["norm"](self.model["layers"](self.model["embed_tokens"](input_ids)))
        logits = self.lm_head(hidden)
        if labels is None:
            return SimpleNamespace(logits=logits)
        following = F.pad(labels[:, 1:], (0, 1), value=-100)
        return SimpleNamespace(logits=logits, loss=F.cross_entropy(logits.flatten(0, 1), following.flatten()))


class Layer(nn.Module):
    """Causal self-attention, then a gated MLP, each on the normalised residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden, config.intermediate
        self.heads, self.rope_theta = config.heads, config.rope_theta
        self.input_layernorm = nn.RMSNorm(hidden, config.norm_eps)
        self.self_attn = nn.ModuleDict({f"{name}_proj": nn.Linear(hidden, hidden, bias=False) for name in "qkvo"})
        self.post_attention_layernorm = nn.RMSNorm(hidden, config.norm_eps)
        widening = {f"{name}_proj": nn.Linear(hidden, inner, bias=False) for name in ("gate", "up")}
        self.mlp = MLP({**widening, "down_proj": nn.Linear(inner, hidden, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            self.self_attn[f"{name}_proj"](x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in "qkv"
        )
        query, key = rotate(query, self.rope_theta), rotate(key, self.rope_theta)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.self_attn["o_proj"](mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.ModuleDict):
    """SwiGLU between two linear layers and a third."""

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(self["gate_proj"](x)) * self["up_proj"](x)
        return self["down_proj"](inner)  # type: ignore[no-any-return]


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary positions (https://arxiv.org/abs/2104.09864) for [B, heads, S, size]: entry i turns with i + size / 2."""
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
