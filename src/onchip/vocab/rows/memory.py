"""Memory and plan for losses of existing logits: the problem, its scratch formula, chunks and tiles.

Imports no framework.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from onchip.core.sizes import DTYPE_BYTES, LOSS_DTYPE_BYTES, accumulator
from onchip.vocab import chunks
from onchip.vocab.chunks import Planner, even_chunk, largest

# Logits of a chunk of rows that keep the device busy; the default budget allows for them.  On the CPU no chunk is made
# larger, whatever the budget: the passes over it then find it in the cache.
USEFUL = {"cpu": 1 << 20, "cuda": 1 << 24}


@dataclass(frozen=True)
class RowsProblem:
    """Everything that memory depends on.  Sizes are in elements, the logits' dtype is a name, `device` is 'cpu' or
    'cuda'.
    """

    tokens: int
    vocab: int
    dtype: str = "float32"
    device: str = "cpu"
    grad: bool = True
    softcap: bool = False
    stats: bool = False
    smoothing: bool = False
    class_weight: bool = False
    """Whether the loss is weighted by class; with "plain" it is smoothed too."""
    gathered: bool = False
    """Rows are copied in their own dtype before they are widened: those of 16-bit logits where some tokens are ignored
    and left out (on the CPU alone), and those of logits whose leading dimensions can't be flattened in place."""
    xla: bool = False
    """Whether XLA compiles it; temporary memory is then as XLA's CPU compiler lays it out."""
    triton: bool = False
    """Whether the Triton kernels run it, which hold rows in registers alone."""
    mosaic: bool = False
    """Whether JAX's kernels for Hopper run it, which do the same; what surrounds them is XLA's."""
    op: str = "cross_entropy"
    """The name that errors begin with."""
    ids: int = 0
    """For log_probs or soft labels: K, the ids per token.  0 if each token has one target."""
    labels: str = ""
    """The dtype of soft labels for every entry of the vocabulary; "" if there are none."""
    more_stats: int = 0
    """Further statistics of log_probs, each a sum over the vocabulary."""
    sent: int = 0
    """Bytes that ranks exchange if the vocabulary is sharded."""


MOSAIC_LEAST = 128
"""Logits that a row must have for JAX's kernels: one for each thread."""


def mosaic_refusal(p: RowsProblem, platform: str) -> str | None:
    """Why JAX's kernels can't serve the call, whatever the GPU, or None; `platform` is JAX's."""
    if platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {platform!r}"
    if "float64" in (p.dtype, p.labels):
        return "it takes no float64; pass backend='xla', or 'auto'"
    if p.vocab < MOSAIC_LEAST:
        return f"it needs rows of at least {MOSAIC_LEAST} logits; got V={p.vocab}"
    return None


def logits_bytes(p: RowsProblem) -> int:
    """Bytes of the logits in float32, which this op never stores."""
    return 4 * p.tokens * p.vocab


def scratch_parts(p: RowsProblem, rows: int) -> dict[str, int]:
    """Peak memory above logits, loss and the returned gradient with chunks of `rows`, in bytes, part by part."""
    return _parts(p, rows) | ({"what ranks exchange": p.sent} if p.sent else {})


def _parts(p: RowsProblem, rows: int) -> dict[str, int]:
    """The same for a vocabulary that isn't sharded."""
    if p.triton:
        return {"vectors": (96 + 80 * p.ids if p.ids or p.labels else 48) * p.tokens + 4 * p.vocab * p.class_weight}
    # A chunk, of `total` bytes a number; beside it, in forward the exponentials for the entropy or logits weighted by
    # class, in backward the softcap's derivative.  The gradient of log_probs reads the entropy's too.
    total = LOSS_DTYPE_BYTES[accumulator(p.dtype)]
    slope = int(p.softcap and p.grad)
    copies = 1 + max(int(p.stats or p.class_weight), slope + int(p.stats and p.ids > 0))
    if p.labels:  # logarithms of probabilities and a mask, or labels
        copies = 3 + slope
    vectors = total * (24 + 20 * p.ids) * p.tokens
    if p.mosaic:
        return {"vectors": vectors + total * p.vocab * p.class_weight}
    if p.xla:
        narrow = [x for x in (p.dtype, p.labels) if p.device == "cpu" and x and LOSS_DTYPE_BYTES[x] == 2]
        # Differences to the maximum that are summed have a tile of their own, and so have those that are weighed, and
        # soft labels.
        tiles = 1 + int(p.stats or p.smoothing) + int(p.stats and p.class_weight) + int(p.labels != "") + p.more_stats
        return {
            "rows in float32": total * tiles * rows * p.vocab,
            "rows as fetched, or as stored": total * rows * p.vocab,
            "16-bit logits as integers": 2 * p.tokens * p.vocab * len(narrow),
            "vectors": vectors,
        }
    return {
        "rows in float32": total * copies * rows * p.vocab,
        "rows in their dtype": LOSS_DTYPE_BYTES[p.dtype] * rows * p.vocab if p.gathered else 0,
        "vectors": vectors,
    }


def default_scratch(p: RowsProblem, strategy: str = "") -> int:
    """256 MiB or an eighth of the float32 logits, whichever is more, and at least what a useful chunk needs."""
    return chunks.default_scratch(logits_bytes(p), scratch_bytes(p, _useful_rows(p)))


def _candidates(p: RowsProblem, strategy: str, budget: int) -> Iterator[int]:
    """The rows of a chunk: the fewest, most even chunks that fit."""
    if p.triton or p.mosaic:
        yield max(1, p.tokens)
        return
    most = min(p.tokens, _useful_rows(p)) if p.device == "cpu" else p.tokens
    yield even_chunk(p.tokens, largest(lambda rows: scratch_bytes(p, rows) <= budget, 1, most, 1), 1)


def _useful_rows(p: RowsProblem) -> int:
    return min(max(1, p.tokens), -(-USEFUL[p.device] // p.vocab))


PLANNER: Planner[int] = Planner(
    scratch_parts,
    _candidates,
    cost=lambda p, rows: 0,
    least=lambda p, strategy: PLANNER.scratch_bytes(p, 1),
    default=default_scratch,
    needs=lambda p, strategy: (
        f"T={p.tokens}, V={p.vocab} in {p.dtype}: " + ("the kernels need" if p.triton or p.mosaic else "one row needs")
    ),
)
plan, scratch_bytes = PLANNER.plan, PLANNER.scratch_bytes


@dataclass(frozen=True)
class RowTiles:
    """How a Triton kernel takes a row: see triton.py."""

    tile: int
    """Elements of a row that are read at a time."""
    warps: int
    programs: int
    """How many programs a multiprocessor runs; each takes one row after the other."""
    stages: int = 1
    """How many tiles are under way at a time."""

    @property
    def registers(self) -> int:
        """Registers for a thread: as many as let all programs of a multiprocessor fit in its 65536."""
        return min(255, 65536 // (32 * self.warps * self.programs) // 8 * 8)


# What the rows in flight of a multiprocessor may take of the cache that they are read from again: of the H100's 50 MB a
# third is left for the gradient that is being written.
_CACHE_SHARE = 256 << 10


def heuristic_tiles(vocab: int, dtype: str, *, light: bool = False, twice: bool = False) -> RowTiles:
    """The tiles for rows of `vocab` logits.  `light`: each row is read for one sum, and nothing is written.  `twice`:
    what registers don't hold is read a second time, from the cache.

    A multiprocessor has up to 32 programs, of 32 warps together, or of 48 where a thread has 16 elements of a tile
    instead of 32.  Few warps to a row wait less for each other.  Many read it a second time while the cache has it, and
    keep the device busy with few rows.  Of eight ways, at twelve sizes in two dtypes, these were the fastest or nearly
    on an H200 (docs/internals/cross_entropy.md).
    """
    rows, most = _CACHE_SHARE // (DTYPE_BYTES[dtype] * vocab), min(32, 64 // DTYPE_BYTES[dtype])
    if vocab <= 8192:
        warps, elements = 1 if vocab <= 2048 else 2, most if vocab > 4096 else 16
    elif light:
        warps, elements = 4 if vocab < 65536 else 8, most
    else:
        warps, elements = 8 if rows >= 4 or not twice else 16 if rows >= 2 else 32, 16
    programs = min(32, (32 if elements == 32 else 48) // warps)
    if twice and vocab > 8192:
        programs = max(1, min(programs, rows))
    return RowTiles(tile=32 * warps * elements, warps=warps, programs=programs)


class RowRings(NamedTuple):
    """How `once.losses_once` keeps a row: see there."""

    TILE: int
    HELD: int
    RING: int
    SLOTS: int


ONCE_WARPS = 16
# By the bytes of a tile, how many shared memory holds; and how many registers may.
_PLACES = {32 << 10: 7, 16 << 10: 14}
_MOST_HELD = 4
# Rows of so many tiles of 32 KiB have them: 1.19 ms for 8192 x 128256 in bfloat16 on an H200, with 16 KiB 1.28.
_LONG_TILES = range(7, 9)
_LEAST_ROW = 100_000  # bytes: shorter ones are faster in pieces


def row_rings(vocab: int, size: int) -> RowRings | None:
    """The rings for rows of `vocab` logits of `size` bytes; None if rows are so short that registers hold them."""
    if vocab * size < _LEAST_ROW:
        return None
    long = -(-vocab * size // (32 << 10)) in _LONG_TILES
    tile_bytes = 32 << 10 if long else 16 << 10
    places, tiles = _PLACES[tile_bytes], -(-vocab * size // tile_bytes)
    held = min(max(1, tiles - places), _MOST_HELD)
    ring = tiles - held
    return RowRings(tile_bytes // size, held, ring, places // ring * ring or places)
