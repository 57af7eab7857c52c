"""What linear_cross_entropy's kernels are tuned on in either framework: alone, on one chunk of the vocabulary."""

from collections.abc import Mapping

from onchip.ops.linear_cross_entropy.cases import MODELS, SUITES

CASES: Mapping[str, Mapping[str, int]] = {
    case.name: {"tokens": case.tokens, "hidden": case.hidden, "vocab": case.vocab}
    for case in SUITES["cuda"]
    if case.name in MODELS or case.name.endswith(("-t1024", "-t16384"))
}
DEFAULT_CASES = tuple(CASES)
DTYPES = ("bfloat16", "float16")

# Exponentials are relative to this: well in the range of float16, whose exponentials are scaled up by 2**15.
SHIFT = 8.0
# Small enough that probabilities weigh as much as the targets' entries, next to which errors in them would go unseen.
LSE = 4.0
# Columns of a tile, and tiles of a chunk, which take more memory than any L2 holds and in every case less than 4 GB.
_TILE, _TILES = 256, 64


def chunk_of(vocab: int) -> int:
    """The size of a chunk whose last tile is as full as the whole vocabulary's."""
    return min(vocab, _TILES * _TILE - -vocab % _TILE)
