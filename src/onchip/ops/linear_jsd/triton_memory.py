"""How the Triton backend cuts a problem: memory formulas, a cost model, and the choice of a plan.  No framework.

docs/internals/linear_jsd.md says what is kept where.  Tokens whose gradient by the logits fits neither in the memory
of the weight's gradient nor in scratch have their logits recomputed in backward, in chunks of the vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from onchip.core.sizes import DTYPE_BYTES, MIB, up
from onchip.ops.linear_jsd.memory import Head, Problem, logits_bytes
from onchip.vocab import chunks
from onchip.vocab.chunks import Planner, largest
from onchip.vocab.triton import memory as triton_memory
from onchip.vocab.triton.planner import RATES, Rates
from onchip.vocab.triton.tiling import TOKEN_TILE, VOCAB_TILE, evenness

# Tokens of a chunk that keeps the device busy, and tiles of the vocabulary.
USEFUL_TOKENS, USEFUL_TILES = 256, 16
# float32 numbers that forward leaves of each token; triton_kernels.py names them.
STATS = 10


@dataclass(frozen=True)
class JsdPlan:
    """One way to cut a problem."""

    token_chunk: int
    """Tokens whose logits are computed at a time."""
    kept: int = 0
    """Tokens, in multiples of 128, whose logits' gradient is kept from forward on."""
    vocab_chunk: int = 0
    """Columns of the other tokens' logits' gradient that are computed at a time in backward, a multiple of 256."""
    weight_chunk: int = 0
    """Rows of a weight's gradient that are computed at a time, a multiple of 256, no more than `vocab_chunk`."""


def config_of(head: Head, c: JsdPlan) -> triton_memory.TritonPlan:
    """The plan of one model, as the engine takes it: what of `kept` is in the memory of its weight's gradient."""
    in_gradient = min(c.kept, triton_memory.capacity(head))
    return triton_memory.TritonPlan(c.token_chunk, c.vocab_chunk, c.weight_chunk, in_gradient, c.kept - in_gradient)


def block_bytes(size: int) -> int:
    """What PyTorch's allocator gives for so many bytes: of 10 MiB or more a block of its own, in multiples of 2 MiB,
    of which it uses the rest again if that is more than 1 MiB.
    """
    block = up(size, 2 * MIB)
    return block if size >= 10 * MIB and block - size <= MIB else size


def scratch_parts(p: Problem, c: JsdPlan) -> dict[str, int]:
    """Peak memory above inputs, loss and returned gradients, in bytes, part by part."""
    columns = up(p.vocab, VOCAB_TILE)
    tiles = columns // VOCAB_TILE
    again = max(0, up(p.tokens, TOKEN_TILE) - c.kept) if p.any_grad else 0
    chunk = up(min(c.token_chunk, p.tokens), TOKEN_TILE)
    casts = kept = more = in_scratch = forward = backward = 0
    for h in p.layers:
        element, of_head = DTYPE_BYTES[h.dtype], config_of(h, c)
        casts += block_bytes(element * h.vocab * h.hidden) if h.weight_dtype != h.dtype else 0
        distance = 4 if h.dtype == "float16" else 2
        forward += block_bytes(distance * chunk * columns) + 12 * chunk * tiles
        if again:
            backward += block_bytes(distance * again * c.vocab_chunk) + 12 * again * (c.vocab_chunk // VOCAB_TILE)
        if not h.any_grad:
            forward += block_bytes(element * chunk * h.hidden)
            backward += block_bytes(element * again * h.hidden)
            continue
        kept += 0 if h.grad_hidden else block_bytes(element * p.tokens * h.hidden)
        if h.grad_weight:
            row = DTYPE_BYTES[h.weight_dtype] * h.hidden
            # Each chunk of the gradient overwrites the previous chunk's inputs while it reads its own.
            rows = up(h.vocab, VOCAB_TILE) + c.weight_chunk if of_head.kept_in_gradient else h.vocab
            more += block_bytes(row * rows) - row * h.vocab
        in_scratch += block_bytes(element * up(h.vocab, VOCAB_TILE) * of_head.kept_in_scratch)
        backward += block_bytes(element * again * c.vocab_chunk)
        backward += block_bytes(4 * p.tokens * h.hidden) if h.grad_hidden else 0
        backward += 4 * h.vocab if h.grad_bias else 0
    return {
        "weights in the products' dtype": casts,
        "copies of strided inputs": p.copied,
        "vectors": 160 * p.tokens + MIB // 64,
        "hidden rows": kept,
        "one more chunk of the weight's gradient": more,
        "logits' gradient in scratch": in_scratch,
        "logits of a chunk, or sums and what is recomputed in backward": max(forward, backward),
    }


def predict(p: Problem, c: JsdPlan, rates: Rates = RATES["h100"]) -> float:
    """Milliseconds of forward, and of backward where gradients are wanted."""
    launch = 1e-3 * rates.launch
    tiles = up(p.vocab, VOCAB_TILE) // VOCAB_TILE
    again = 1 - min(1.0, c.kept / max(1, p.tokens)) if p.any_grad else 0.0
    chunks = [min(c.token_chunk, p.tokens - first) for first in range(0, p.tokens, max(1, c.token_chunk))]
    time = launch * 5 * len(chunks)
    for h in p.layers:
        product = 2e-9 * p.tokens * h.hidden * p.vocab / rates.product
        for size in chunks:
            cut = -(-size // TOKEN_TILE)
            time += product * cut * TOKEN_TILE / max(1, p.tokens) * evenness(cut * tiles, rates.programs)
        if again:
            columns = min(c.vocab_chunk // VOCAB_TILE, tiles)
            cut = round(again * p.tokens) // TOKEN_TILE * columns
            time += again * product * evenness(cut, rates.programs) + launch * 3 * -(-tiles // columns)
        blocks = -(-h.hidden // 256)
        if h.grad_weight:
            part = min(c.weight_chunk // VOCAB_TILE, tiles)
            cut = part * VOCAB_TILE // TOKEN_TILE * blocks
            time += product * evenness(cut, rates.programs) + launch * -(-tiles // part)
        if h.grad_hidden:
            time += product + 1e-9 * rates.add * p.tokens * h.hidden
    return time


def least_scratch(p: Problem, strategy: str = "", tokens: int = TOKEN_TILE, tiles: int = 1) -> int:
    """Bytes of scratch for chunks of so many tokens and tiles of the vocabulary: by default, to run at all."""
    return scratch_bytes(p, _config(p, 0, tokens, tiles, tiles))


def default_scratch(p: Problem, strategy: str = "") -> int:
    """256 MiB or an eighth of both models' float32 logits, whichever is more, and at least what useful chunks need."""
    useful = least_scratch(p, strategy, USEFUL_TOKENS, USEFUL_TILES)
    return chunks.default_scratch(logits_bytes(p), useful)


def _config(p: Problem, kept: int, tokens: int, vocab_tiles: int, weight_tiles: int) -> JsdPlan:
    tiles = up(p.vocab, VOCAB_TILE) // VOCAB_TILE
    if not p.any_grad:
        return JsdPlan(min(p.tokens, tokens))
    if kept >= p.tokens:
        vocab_tiles = tiles
    vocab_tiles = min(vocab_tiles, tiles)
    return JsdPlan(min(p.tokens, tokens), kept, vocab_tiles * VOCAB_TILE, min(weight_tiles, vocab_tiles) * VOCAB_TILE)


def _candidates(p: Problem, strategy: str, budget: int) -> Iterator[JsdPlan]:
    """Chunks of the weight's gradient whose tiles fill whole waves, or nearly; with each, no tokens kept or as many as
    fit beside a useful chunk of tokens or the smallest; and with those, the fewest chunks of tokens, or a few more.
    """

    def fits(cut: tuple[int, int], tokens: int, kept: int) -> bool:
        return scratch_bytes(p, _config(p, kept, tokens, *cut)) <= budget

    rows, tiles = up(p.tokens, TOKEN_TILE), up(p.vocab, VOCAB_TILE) // VOCAB_TILE
    per_tile = min([2 * -(-h.hidden // 256) for h in p.layers if h.grad_weight] or [1])
    programs = RATES["h100"].programs
    weights = {n * programs // per_tile for n in (1, 2, 3, 4, 6, 8, 12, 16)} | {1, min(USEFUL_TILES, tiles)}
    beside = (min(rows, USEFUL_TOKENS), TOKEN_TILE) if p.any_grad else ()
    for weight in sorted(x for x in weights if 0 < x <= max(tiles, 1)):
        for vocab in sorted({max(weight, -(-tiles // n)) for n in (1, 2, 4, 8, 16, 32, 64, 128)} | {weight}):
            cut = vocab, weight
            keeps = {largest(partial(fits, cut, tokens), 0, rows, TOKEN_TILE) for tokens in beside}
            for kept in sorted(keeps | {0}):
                most = largest(partial(fits, cut, kept=kept), TOKEN_TILE, rows, TOKEN_TILE)
                fewest = max(1, -(-rows // most))
                sizes = {most} | {up(-(-p.tokens // n), TOKEN_TILE) for n in range(fewest, fewest + 3)}
                yield from (_config(p, kept, size, *cut) for size in sorted(sizes) if size <= most)


PLANNER: Planner[JsdPlan] = Planner(
    scratch_parts,
    _candidates,
    predict,
    least_scratch,
    default_scratch,
    needs=lambda p, strategy: f"T={p.tokens}, V={p.vocab} on backend 'triton', which needs",
    slack=1.007,
)
plan, scratch_bytes = PLANNER.plan, PLANNER.scratch_bytes
