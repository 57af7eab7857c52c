"""The model that is trained: its sizes and its initial weights, the same in every framework.

It is a small pre-norm decoder with learned positions.  It stops before the head: it makes hidden states, and the loss
takes the weight of the output layer, which is not tied to the embedding.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onchip.demo import SEQUENCE


@dataclass(frozen=True)
class ModelConfig:
    vocab: int
    context: int = SEQUENCE
    hidden: int = 128
    layers: int = 1
    heads: int = 2


def initial_weights(config: ModelConfig, seed: int) -> dict[str, NDArray[np.float32]]:
    """All weights by name, matrices as [out, in]."""
    rng = np.random.default_rng(seed)

    def normal(std: float, *shape: int) -> NDArray[np.float32]:
        return np.float32(std) * rng.standard_normal(shape, dtype=np.float32)

    hidden = config.hidden
    # Tokens at the size of a normalised vector, and positions far below: what follows a word, the easy part, is
    # then learned soon.  The head is small, so that the first loss is near log(V).
    weights = {
        "tokens": normal(1.0, config.vocab, hidden),
        "positions": normal(0.02, config.context, hidden),
        "head": normal(0.06, config.vocab, hidden),
        "final_norm": np.ones(hidden, np.float32),
    }
    for i in range(config.layers):
        weights |= {
            f"blocks.{i}.query_key_value": normal(hidden**-0.5, 3 * hidden, hidden),
            f"blocks.{i}.attention_out": normal(hidden**-0.5, hidden, hidden),
            f"blocks.{i}.mlp_in": normal(hidden**-0.5, 4 * hidden, hidden),
            f"blocks.{i}.mlp_out": normal((4 * hidden) ** -0.5, hidden, 4 * hidden),
            f"blocks.{i}.attention_norm": np.ones(hidden, np.float32),
            f"blocks.{i}.mlp_norm": np.ones(hidden, np.float32),
        }
    return weights
