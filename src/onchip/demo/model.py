"""The model that is trained: its sizes and its initial weights, the same in every framework.

It is a small Llama (https://arxiv.org/abs/2302.13971): RMS norms, rotary positions, a gated MLP, no biases, and a head
that is not tied to the embedding.  The weights have the same names as in transformers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ModelConfig:
    vocab: int
    hidden: int = 128
    intermediate: int = 384
    layers: int = 2
    heads: int = 2
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


def initial_weights(config: ModelConfig, seed: int) -> dict[str, NDArray[np.float32]]:
    """All weights by name, matrices as [out, in]."""
    rng = np.random.default_rng(seed)

    def normal(std: float, *shape: int) -> NDArray[np.float32]:
        return np.float32(std) * rng.standard_normal(shape, dtype=np.float32)

    hidden, inner = config.hidden, config.intermediate
    # Embeddings are as large as normalised vectors, so that the model soon learns the easy part: which word follows
    # another.  The head is small, so that the first loss is near log(V).
    weights = {
        "model.embed_tokens.weight": normal(1.0, config.vocab, hidden),
        "lm_head.weight": normal(0.06, config.vocab, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for i in range(config.layers):
        layer = f"model.layers.{i}."
        weights |= {f"{layer}self_attn.{name}_proj.weight": normal(hidden**-0.5, hidden, hidden) for name in "qkvo"}
        weights |= {
            f"{layer}mlp.gate_proj.weight": normal(hidden**-0.5, inner, hidden),
            f"{layer}mlp.up_proj.weight": normal(hidden**-0.5, inner, hidden),
            f"{layer}mlp.down_proj.weight": normal(inner**-0.5, hidden, inner),
            f"{layer}input_layernorm.weight": np.ones(hidden, np.float32),
            f"{layer}post_attention_layernorm.weight": np.ones(hidden, np.float32),
        }
    return weights
