"""How the 'mosaic_gpu' backend cuts a problem: memory formulas and the choice of a plan.  No framework.

The memory of the weight's gradient holds the exponentials of up to H tokens until it is computed; logits of more tokens
are computed again in backward.  The formulas are of what XLA allocates for a jitted step beyond its arguments and
results.
"""

from dataclasses import dataclass

from onchip.ops._shared.spec import DEFAULT_SCRATCH, MIB
from onchip.ops.linear_cross_entropy.spec import OP, Problem, logits_bytes

TOKEN_TILE, VOCAB_TILE = 128, 256
FORWARD_SCRATCH = 64 * MIB
_ELEMENT = 2
# What an H100 was measured to do: multiprocessors, TFLOP/s of the products, us of a launch.
_PROGRAMS, _PRODUCT, _LAUNCH = 132, 735.0, 12.0


@dataclass(frozen=True)
class MosaicPlan:
    """One way to cut a problem."""

    strategy: str
    """'forward' where nothing needs a gradient, 'stash' where exponentials are kept, else 'recompute'."""
    token_chunk: int
    """Tokens whose softmax is taken at a time: all of them, unless no gradient is wanted."""
    kept: int = 0
    """Tokens, a multiple of 128, whose exponentials wait in the memory of the weight's gradient."""
    chunk: int = 0
    """Entries of the vocabulary, a multiple of 256, whose weight gradient is computed at a time."""


def heuristic_tiles() -> dict[str, dict[str, int]]:
    """The kernels' tiles where nothing is stored, as `MosaicConfig.from_numbers` takes them.

    Among those that were tried on an H100 they are the fastest, or within 3% of it.
    """
    plain = {"tile_m": 128, "tile_n": 256, "tile_k": 64, "stages": 4, "group": 8, "split_n": 0, "in_flight": 1}
    return {
        "mosaic_softmax_tiles": plain | {"group": 16},
        "mosaic_gradient_tiles": plain | {"split_n": 1},
        "mosaic_weight_product": plain | {"group": 16},
        "mosaic_hidden_product": plain,
    }


def up(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple


def split_at(vocab: int, chunk: int) -> int:
    """The vocabulary entry from which on exponentials are kept in scratch: what is kept in the gradient's memory is
    a chunk further on than its own gradient.
    """
    return max(0, vocab // VOCAB_TILE * VOCAB_TILE - chunk)


def capacity(p: Problem) -> int:
    """Tokens whose exponentials can be kept."""
    # Softcap's derivative can't be read off 16 bits of an exponential, label smoothing adds to every entry, and the
    # bias's gradient would be another pass over all of them.
    if not p.grad_weight or p.grad_bias or p.softcap or p.smoothing or p.vocab < 2 * VOCAB_TILE:
        return 0
    return min(up(p.tokens, TOKEN_TILE), p.hidden // TOKEN_TILE * TOKEN_TILE)


def scratch_parts(p: Problem, c: MosaicPlan) -> dict[str, int]:
    """Peak temporary memory in bytes, part by part."""
    rows = up(c.token_chunk, TOKEN_TILE)
    hidden_rows = _ELEMENT * rows * p.hidden
    # maximum and sum; an offset for label smoothing; moment and argmax for statistics
    softmax = 4 * -(-p.vocab // VOCAB_TILE) * rows * (2 + int(p.smoothing) + 2 * int(p.stats))
    parts = {"vectors": 256 * up(p.tokens, TOKEN_TILE) + 4 * up(p.vocab, VOCAB_TILE) + MIB}
    if c.strategy == "forward":
        return parts | {"hidden rows": hidden_rows, "softmax of each tile": softmax}
    again = rows - c.kept
    spare = up(p.vocab, VOCAB_TILE) - split_at(p.vocab, c.chunk) if c.kept else 0
    parts["exponentials in scratch"] = _ELEMENT * spare * c.kept
    # One after the other: forward, hidden's gradient of the tokens that are kept, and the rest of backward.
    forward = {"hidden rows": hidden_rows, "softmax of each tile": softmax}
    kept = {"hidden gradient in float32": 4 * c.kept * p.hidden if p.grad_hidden else 0}
    rest = {
        "hidden rows": hidden_rows,
        "hidden rows of logits made again": _ELEMENT * again * p.hidden if c.kept else 0,
        "logits' gradient made again": _ELEMENT * again * min(up(p.vocab, VOCAB_TILE), c.chunk + VOCAB_TILE),
        "hidden gradient in float32": 4 * again * p.hidden if p.grad_hidden else 0,
    }
    return parts | max((forward, kept, rest), key=lambda phase: sum(phase.values()))


def scratch_bytes(p: Problem, c: MosaicPlan) -> int:
    """Peak temporary memory in bytes."""
    return sum(scratch_parts(p, c).values())


def predict(p: Problem, c: MosaicPlan) -> float:
    """Milliseconds of forward, and of backward where gradients are wanted, by a simple cost model."""
    product = 2e-9 * p.tokens * p.hidden * p.vocab / _PRODUCT
    if c.strategy == "forward":
        return product + 1e-3 * _LAUNCH * -(-p.tokens // c.token_chunk)
    rows = up(p.tokens, TOKEN_TILE)
    share = (rows - c.kept) / rows
    chunks = -(-p.vocab // c.chunk)
    tiles = c.chunk // TOKEN_TILE * -(-p.hidden // 256)
    launches = chunks * (1 + (2 if share else 0))
    waves = -(-tiles // _PROGRAMS) * _PROGRAMS / tiles
    return product * (1 + int(p.grad_hidden) + 1.15 * share + waves * int(p.grad_weight)) + 1e-3 * _LAUNCH * launches


def default_scratch(p: Problem, strategy: str) -> int:
    """256 MiB or an eighth of the float32 logits, whichever is less, and at least what one useful chunk needs; without
    gradients 64 MiB, or what one block of tokens needs.
    """
    if not p.any_grad:
        return max(FORWARD_SCRATCH, scratch_bytes(p, MosaicPlan("forward", TOKEN_TILE)))
    useful = _cut(p, strategy, min(16 * VOCAB_TILE, up(p.vocab, VOCAB_TILE)))
    return max(min(DEFAULT_SCRATCH, logits_bytes(p) // 8), scratch_bytes(p, useful))


def _cut(p: Problem, strategy: str, chunk: int) -> MosaicPlan:
    kept = 0 if strategy == "recompute" else capacity(p)
    if kept:
        chunk = min(chunk, p.vocab // VOCAB_TILE // 2 * VOCAB_TILE)
    return MosaicPlan("stash" if kept else "recompute", p.tokens, kept, chunk)


def plan(p: Problem, strategy: str, budget: int | None = None) -> MosaicPlan:
    """The plan of the least predicted time whose scratch fits the budget.

    Raises:
        ValueError: nothing fits; the message names the smallest budget that does.
    """
    if budget is None:
        budget = default_scratch(p, strategy)
    if not p.any_grad:
        sizes = range(TOKEN_TILE, up(p.tokens, TOKEN_TILE) + 1, TOKEN_TILE)
        fit = [size for size in sizes if scratch_bytes(p, MosaicPlan("forward", size)) <= budget]
        if not fit:
            raise _too_small(p, strategy, budget, scratch_bytes(p, MosaicPlan("forward", TOKEN_TILE)))
        return MosaicPlan("forward", up(-(-p.tokens // -(-p.tokens // fit[-1])), TOKEN_TILE))
    tiles = -(-p.vocab // VOCAB_TILE)
    strategies = ("stash", "recompute") if strategy == "auto" else (strategy,)
    found = {_cut(p, s, size * VOCAB_TILE) for s in strategies for size in range(1, tiles + 1)}
    fitting = {c: predict(p, c) for c in found if scratch_bytes(p, c) <= budget}
    if not fitting:
        raise _too_small(p, strategy, budget, min(scratch_bytes(p, c) for c in found))
    # Of those that are as good as the fastest the smallest: the model isn't better than that.
    good = [c for c, time in fitting.items() if time <= 1.005 * min(fitting.values())]
    return min(good, key=lambda c: (scratch_bytes(p, c), c.chunk))


def _too_small(p: Problem, strategy: str, budget: int, least: int) -> ValueError:
    return ValueError(
        f"{OP}: scratch_bytes={budget} is too small for T={p.tokens}, H={p.hidden}, V={p.vocab} in {p.dtype}: "
        f"strategy {strategy!r} needs {least} bytes; raise scratch_bytes"
    )
