"""The decoder of model.py in PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onchip.demo.model import ModelConfig, initial_weights


class Block(nn.Module):
    """Causal self-attention, then an MLP, each on the normalised residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.heads = config.heads
        self.attention_norm = nn.RMSNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden, bias=False)
        self.attention_out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden)
        self.mlp_in = nn.Linear(hidden, 4 * hidden, bias=False)
        self.mlp_out = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_out(self.attend(self.attention_norm(x)))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))  # type: ignore[no-any-return]

    def attend(self, x: Tensor) -> Tensor:
        qkv = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))  # [B, S, 3, heads, size]
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """Token ids [B, S] to final hidden states [B, S, H]; `head` [V, H] is the weight of the output layer."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.context, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.RMSNorm(config.hidden)
        self.head = nn.Parameter(torch.empty(config.vocab, config.hidden))
        parameters = {name.removesuffix(".weight"): x for name, x in self.named_parameters()}
        with torch.no_grad():
            for name, values in initial_weights(config, seed).items():
                parameters[name].copy_(torch.from_numpy(values))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x)  # type: ignore[no-any-return]
