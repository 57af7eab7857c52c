"""Plans of the Triton backend: budgets, and the plan that is chosen.  Imports no framework."""

from onchip.core.sizes import MIB, up
from onchip.vocab import chunks
from onchip.vocab.chunks import Planner, even_chunk, largest
from onchip.vocab.memory import Problem, logits_bytes, needs
from onchip.vocab.triton.costs import predict as predict
from onchip.vocab.triton.memory import TritonPlan, capacity, id_bytes, may_hold, scratch_parts, sizes_of
from onchip.vocab.triton.search import SLACK, SMALLEST_CHUNK, in_whole_tiles, search
from onchip.vocab.triton.tiling import TOKEN_TILE, VOCAB_TILE

# Tiles of the vocabulary in the smallest chunk of the gradients that costs little.
USEFUL_CHUNK = 16
FORWARD_SCRATCH = 64 * MIB


def default_scratch(p: Problem, strategy: str = "auto") -> int:
    """256 MiB or an eighth of the float32 logits, whichever is more, and at least what `strategy` needs with one useful
    chunk; without gradients, 64 MiB in addition to the copies that are made of inputs.
    """
    if not p.any_grad:
        copies = sizes_of(p).cast + p.copied
        return max(FORWARD_SCRATCH + copies + id_bytes(p), least_scratch(p, strategy))
    p = in_whole_tiles(p)
    useful = least_scratch(p, strategy, USEFUL_CHUNK) - id_bytes(p)
    return chunks.default_scratch(logits_bytes(p), useful) + id_bytes(p)


def least_scratch(p: Problem, strategy: str = "auto", tiles: int = SMALLEST_CHUNK) -> int:
    """Bytes of scratch that `strategy` needs with chunks of so many tiles of the vocabulary; by default, to run at
    all.
    """
    s = sizes_of(p)
    fixed, size = s.cast + p.copied + id_bytes(p), min(tiles * VOCAB_TILE, s.columns)
    if p.any_grad:
        return fixed + s.kept(p.tokens, *_kept(p, strategy), halves=False).size(size, size)
    return fixed + s.of_tokens(p.tokens, sorted_by_target=False) + s.alone(min(p.tokens, TOKEN_TILE))


def _kept(p: Problem, strategy: str) -> tuple[int, int]:
    """The tokens that are kept, in the gradient's memory and in scratch: all for 'stash', none for 'recompute' (and for
    the least of 'auto').
    """
    if strategy != "stash" or not may_hold(p):
        return 0, 0
    tokens = up(p.tokens, TOKEN_TILE)
    in_gradient = min(tokens, capacity(p))
    return in_gradient, tokens - in_gradient


def plan_for_symbols(p: Problem, strategy: str) -> TritonPlan:
    """A plan that follows from sizes without comparing them, for torch.compile when sizes change from call to call: the
    exponentials of all tokens are kept, as far as the weight gradient's memory goes.
    """
    import torch  # sizes are its symbols: it is loaded

    in_gradient = 0
    if strategy != "recompute" and capacity(p) > 0:
        in_gradient = torch.sym_min(up(p.tokens, TOKEN_TILE), capacity(p))
    size = min(USEFUL_CHUNK * VOCAB_TILE, up(p.vocab, VOCAB_TILE))
    return TritonPlan(p.tokens, size, size, in_gradient)


def _search(p: Problem, strategy: str, budget: int) -> TritonPlan | None:
    """Without gradients, the fewest even chunks of tokens; otherwise what `search` finds."""
    if p.any_grad:
        return search(p, _kept(p, strategy), strategy, budget)
    fixed, s = scratch_bytes(p, TritonPlan(0)), sizes_of(p)
    smallest = min(p.tokens, TOKEN_TILE)
    fits = largest(lambda n: fixed + s.alone(n) <= budget, smallest, p.tokens, TOKEN_TILE)
    if fixed + s.alone(fits) > budget:
        return None
    return TritonPlan(min(p.tokens, even_chunk(p.tokens, fits, TOKEN_TILE)))


PLANNER: Planner[TritonPlan] = Planner(
    scratch_parts,
    None,
    predict,
    least_scratch,
    default_scratch,
    needs,
    slack=SLACK,
    search=_search,
    whole=lambda p: in_whole_tiles(p) if p.any_grad else p,
)
plan, scratch_bytes = PLANNER.plan, PLANNER.scratch_bytes
