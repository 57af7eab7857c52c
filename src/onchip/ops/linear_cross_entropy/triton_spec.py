"""How the Triton backend cuts a problem: memory formulas, a cost model, and the choice of a plan.  No framework.

The weight's gradient is V * H elements that exist anyway: until they are computed, their memory holds the exponentials
of up to H tokens (two H where a float32 gradient meets 16-bit operands).  More tokens can be kept in scratch, and those
that aren't have their logits computed again: so between three products and four there is a plan for every budget.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from onchip.ops.linear_cross_entropy.spec import (
    DEFAULT_SCRATCH,
    DTYPE_BYTES,
    MIB,
    OP,
    Problem,
    logits_bytes,
)

TOKEN_TILE = 128
VOCAB_TILE = 256
# Tiles of the vocabulary in the smallest chunk of the gradients, and in the smallest that costs little.
SMALLEST_CHUNK, USEFUL_CHUNK = 4, 16
FORWARD_SCRATCH = 64 * MIB


@dataclass(frozen=True)
class TritonConfig:
    """One way to cut a problem."""

    token_chunk: int
    """Tokens whose logits are taken at a time in forward: all of them, unless no gradient is wanted."""
    vocab_chunk: int = 0
    """Columns of the logits' gradient that are made at a time, a multiple of 256."""
    stashed: int = 0
    """Tokens, rounded up to 128, whose exponentials wait in the memory of the weight's gradient."""
    overflow: int = 0
    """Tokens, in multiples of 128, whose exponentials wait in scratch."""
    splits: int = 1
    """Sums of the hidden gradient that are kept apart, so that its tiles fill the last wave."""

    @property
    def held(self) -> int:
        return self.stashed + self.overflow


def may_hold_any(c: TritonConfig) -> bool:
    """Whether a plan keeps any exponentials (no comparison of the sum: sizes may be symbols)."""
    return not (isinstance(c.stashed, int) and c.stashed == 0 and c.overflow == 0)


def heuristic_tiles(shared: int) -> dict[str, dict[str, int]]:
    """The kernels' tiles where nothing was tuned, by the device's shared memory per block in bytes."""
    # Four stages of 48 KiB and a piece of the result: what was fastest on an H100 at all shapes, or within 2%.
    depth, stages = (64, 4) if shared >= 227 * 1024 else (64, 3) if shared >= 160 * 1024 else (32, 3)

    def tiles(parts: int) -> dict[str, int]:
        return {
            "rows": 128,
            "columns": 256,
            "depth": depth,
            "group": 8,
            "warps": 8,
            "stages": stages,
            "parts": parts if depth == 64 else 2 * parts,
        }

    return {
        "softmax_tiles": tiles(2),
        "gradient_tiles": tiles(2),
        "weight_gradient": tiles(2),
        "hidden_gradient": tiles(4),
    }


def up(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple


def may_hold(p: Problem) -> bool:
    """Softcap's derivative is read off the exponential; where that vanishes, label smoothing still needs it."""
    return not (p.softcap and p.smoothing)


def capacity(p: Problem) -> int:
    """Tokens whose exponentials fit in the memory of the weight's gradient."""
    if not p.grad_weight or p.weight_grad_out or not may_hold(p):
        return 0
    rows = p.hidden * DTYPE_BYTES[p.weight_dtype] // DTYPE_BYTES[p.dtype]
    return rows // TOKEN_TILE * TOKEN_TILE


def scratch_parts(p: Problem, c: TritonConfig) -> dict[str, int]:
    """Peak memory above inputs, loss and returned gradients, in bytes, part by part."""
    element = DTYPE_BYTES[p.dtype]
    tiles = -(-p.vocab // VOCAB_TILE)
    ragged = p.vocab % VOCAB_TILE > 0
    cast = element * p.vocab * p.hidden if p.weight_dtype != p.dtype else 0
    per_tile = 4 * tiles * c.token_chunk
    # maximum and sum; an offset for label smoothing; moment and argmax for statistics
    sums = per_tile * (1 + int(p.smoothing) + 2 * int(p.stats))
    parts = {"weight in the products' dtype": cast, "vectors": 64 * p.tokens + 4 * MIB // 256}
    if not p.any_grad:
        return parts | {"hidden rows": element * c.token_chunk * p.hidden, "softmax of each tile": per_tile + sums}
    columns, rows = c.vocab_chunk, up(p.tokens, TOKEN_TILE)
    gradient = element * p.tokens * columns
    hidden_sums = 4 * c.splits * rows * p.hidden if p.grad_hidden else 0
    # Sums over tiles are gone before the gradients are begun.
    later = gradient + hidden_sums + (4 * p.vocab if p.grad_bias else 0)
    return parts | {
        "hidden rows": 0 if p.grad_hidden else element * p.tokens * p.hidden,
        "exponentials in scratch": 2 * VOCAB_TILE * (tiles * c.overflow + (c.stashed if ragged else 0)),
        "maximum of each tile": per_tile if c.held else 0,
        "logits' gradient": gradient,
        "hidden gradient in float32": hidden_sums,
        "softmax of each tile": max(0, sums + (0 if c.held else per_tile) - later),
    }


def scratch_bytes(p: Problem, c: TritonConfig) -> int:
    """Peak memory above inputs, loss and returned gradients, in bytes."""
    return sum(scratch_parts(p, c).values())


# ---------------------------------------------------------------------------------------------------------- cost model


@dataclass(frozen=True)
class Rates:
    """What the kernels were measured to take on one device; see `docs/ops/linear_cross_entropy.md`."""

    product: float
    """TFLOP/s of the products."""
    softmax: float
    """ps per logit: what the epilogue of the forward product adds."""
    stash: float
    """ps per logit: what storing its exponential adds."""
    normalise: float
    """ps per logit: reading it back and writing its gradient."""
    again: float
    """ps per logit: what the epilogue that makes the gradient adds to the product."""
    add: float
    """ps per element of the hidden gradient and chunk: adding to its sum."""
    launch: float
    """us per kernel: filling and draining the device."""
    programs: int
    """Multiprocessors."""


RATES = {
    "h100": Rates(
        product=745, softmax=0.35, stash=0.9, normalise=1.55, again=0.9, add=2.0, launch=12.0, programs=132
    ),
}


def waves(tiles: int, programs: int) -> float:
    """Time of so many equal tiles, over that of the same work spread evenly."""
    return -(-tiles // programs) * programs / max(1, tiles)


def predict(p: Problem, c: TritonConfig, rates: Rates = RATES["h100"]) -> float:
    """Milliseconds of forward, and of backward where gradients are wanted, by the cost model."""
    product = 2e-9 * p.tokens * p.hidden * p.vocab / rates.product
    logits = 1e-9 * p.tokens * p.vocab
    time = product + logits * rates.softmax + 5e-3 * rates.launch
    if not p.any_grad:
        return time + 3e-3 * rates.launch * (-(-p.tokens // max(1, c.token_chunk)) - 1)
    held = min(1.0, c.held / max(1, p.tokens))
    chunks = -(-p.vocab // c.vocab_chunk)
    time += held * logits * (rates.stash + rates.normalise) + (1 - held) * (product + logits * rates.again)
    kernels = (1 if held > 0 else 0) + (1 if held < 1 else 0)
    blocks = -(-p.hidden // 256)
    if p.grad_weight:
        time += product * waves(c.vocab_chunk // 128 * blocks, rates.programs)
        kernels += 1
    if p.grad_hidden:
        time += product * waves(-(-p.tokens // TOKEN_TILE) * blocks * c.splits, rates.programs)
        time += 1e-9 * rates.add * chunks * c.splits * p.tokens * p.hidden
        kernels += 1
    return time + 1e-3 * rates.launch * kernels * chunks


# ---------------------------------------------------------------------------------------------------------------- plan


def default_scratch(p: Problem) -> int:
    """Without gradients 64 MiB; else 256 MiB or an eighth of the float32 logits, whichever is less, and at least what
    one useful chunk needs.
    """
    if not p.any_grad:
        return max(FORWARD_SCRATCH, _least(p, strategy="recompute"))
    useful = TritonConfig(p.tokens, min(USEFUL_CHUNK * VOCAB_TILE, up(p.vocab, VOCAB_TILE)))
    return max(min(DEFAULT_SCRATCH, logits_bytes(p) // 8), scratch_bytes(p, useful))


def _least(p: Problem, strategy: str) -> int:
    """Bytes of scratch that `strategy` needs to run at all."""
    if not p.any_grad:
        return scratch_bytes(p, TritonConfig(min(p.tokens, TOKEN_TILE)))
    return scratch_bytes(p, replace(_held(p, strategy), vocab_chunk=min(SMALLEST_CHUNK * VOCAB_TILE, _columns(p))))


def _columns(p: Problem) -> int:
    return up(p.vocab, VOCAB_TILE)


def _held(p: Problem, strategy: str) -> TritonConfig:
    """'stash': all tokens are held; 'recompute' (and the least of 'auto'): none."""
    if strategy != "stash" or not may_hold(p):
        return TritonConfig(p.tokens)
    tokens = up(p.tokens, TOKEN_TILE)
    stashed = min(tokens, capacity(p))
    return TritonConfig(p.tokens, stashed=stashed, overflow=tokens - stashed)


def plan_for_shapes(p: Problem, strategy: str, budget: int | None) -> tuple[int, int, int, int, int]:
    """The plan as plain numbers; where torch.compile traces for sizes that change, one that follows from them without
    comparing them: all tokens' exponentials kept in the weight gradient's memory as far as that goes.
    """
    if isinstance(p.tokens, int):
        c = plan(p, strategy, budget)
        return c.token_chunk, c.vocab_chunk, c.stashed, c.overflow, c.splits
    stashed: int = 0
    if strategy != "recompute" and capacity(p) > 0:
        import torch  # sizes are symbols: it is loaded

        stashed = torch.sym_min(up(p.tokens, TOKEN_TILE), capacity(p))
    return p.tokens, min(USEFUL_CHUNK * VOCAB_TILE, _columns(p)), stashed, 0, 1


@lru_cache(maxsize=1024)
def plan(p: Problem, strategy: str = "auto", budget: int | None = None, rates: Rates = RATES["h100"]) -> TritonConfig:
    """The plan of the least predicted time whose scratch fits the budget.

    Raises:
        ValueError: nothing fits.
    """
    least = _least(p, strategy)
    if budget is None:
        budget = max(default_scratch(p), least)
    if least > budget:
        raise ValueError(
            f"{OP}: scratch_bytes={budget} is too small for T={p.tokens}, H={p.hidden}, V={p.vocab} in {p.dtype}: "
            f"strategy {strategy!r} needs {least} bytes; raise scratch_bytes"
        )
    if not p.any_grad:
        fixed, slope = (scratch_bytes(p, TritonConfig(t)) for t in (0, TOKEN_TILE))
        fit = (budget - fixed) // max(1, slope - fixed) * TOKEN_TILE
        if fit >= p.tokens:
            return TritonConfig(p.tokens)
        chunks = -(-p.tokens // fit)
        return TritonConfig(min(fit, up(-(-p.tokens // chunks), TOKEN_TILE)))
    fits = [c for c in _candidates(p, strategy, budget) if scratch_bytes(p, c) <= budget]
    return min(fits, key=lambda c: (predict(p, c, rates), scratch_bytes(p, c)))


def _candidates(p: Problem, strategy: str, budget: int) -> list[TritonConfig]:
    """Even chunks of the vocabulary, one or two sums of the hidden gradient, and as many tokens held as fit."""
    tiles = -(-p.vocab // VOCAB_TILE)
    sizes = {min(SMALLEST_CHUNK, tiles)}
    sizes |= {-(-tiles // n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)}
    found = []
    for size in sorted(sizes):
        for splits in (1, 2) if p.grad_hidden else (1,):
            c = replace(_held(p, strategy), vocab_chunk=size * VOCAB_TILE, splits=splits)
            if strategy == "auto" and may_hold(p):
                c = _hold_what_fits(p, c, budget)
            found.append(c)
    return found


def _hold_what_fits(p: Problem, c: TritonConfig, budget: int) -> TritonConfig:
    tokens = up(p.tokens, TOKEN_TILE)
    stashed = min(tokens, capacity(p))
    home = replace(c, stashed=stashed)
    if scratch_bytes(p, home) > budget:
        return c
    each = max(1, scratch_bytes(p, replace(home, overflow=TOKEN_TILE)) - scratch_bytes(p, home))
    fit = (budget - scratch_bytes(p, home)) // each * TOKEN_TILE
    if stashed == 0 and fit > 0:  # the first one kept needs the maxima as well
        fit = max(0, fit - TOKEN_TILE * -(-4 * -(-p.vocab // VOCAB_TILE) * p.tokens // each))
    return replace(home, overflow=min(tokens - stashed, fit))
