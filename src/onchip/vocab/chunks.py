"""How a [tokens, vocab] problem is cut into chunks.  No framework."""

from dataclasses import dataclass

from onchip.core.sizes import MIB

DEFAULT_SCRATCH = 256 * MIB
# Chunks of tokens and of the vocabulary.  Below the smallest nothing is planned, whatever the budget: a matrix product
# would be all overhead.  A useful one keeps the device busy; the default budget allows for it.  'stash' in addition
# reads and writes the float32 weight gradient once per chunk: on an H100 (T4096 H4096 V128256, bfloat16) it took 61 ms
# with chunks of 256 tokens, 41 with 512, 32 with 1024 and 29 with 2048, where 'recompute' in 256 MiB took 39.
SMALLEST = (64, 512)
USEFUL = {"cpu": (64, 512), "cuda": (1024, 4096)}


@dataclass(frozen=True)
class Config:
    """How a [tokens, vocab] problem is cut.  `strategy` is 'forward' where nothing needs a gradient, else how the
    gradients are made: 'stash' or 'recompute'."""

    strategy: str
    token_chunk: int
    vocab_chunk: int


def even_chunk(total: int, largest: int) -> int:
    """The size, at most `largest`, of the fewest chunks of `total`, as even as whole multiples of 64 allow."""
    if largest >= total:
        return total
    even = -(-total // -(-total // largest))
    return min(largest, -(-even // 64) * 64)
