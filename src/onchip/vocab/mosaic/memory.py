"""How the 'mosaic_gpu' backend cuts a problem: tiles, budgets, and the choice of a plan.  No framework."""

from collections.abc import Iterator
from dataclasses import replace

from onchip.core.sizes import MIB
from onchip.core.sizes import up as up
from onchip.vocab import chunks
from onchip.vocab.chunks import Planner, even_chunk, largest, waves
from onchip.vocab.memory import Problem, logits_bytes, needs
from onchip.vocab.mosaic.head import (
    DEPTH,
    ELEMENT,
    FILLING,
    LAUNCH,
    PRODUCT,
    PROGRAMS,
    STEP,
    TOKEN_TILE,
    VOCAB_TILE,
    MosaicHead,
    head_of,
    hidden_tile,
    keeps,
    of_entropy,
)
from onchip.vocab.mosaic.head import MosaicPlan as MosaicPlan
from onchip.vocab.mosaic.head import capacity as capacity
from onchip.vocab.mosaic.head import groups as groups

FORWARD_SCRATCH = 64 * MIB
# Of the float32 logits, that gradients may take by default.  With an eighth, as elsewhere, Llama 3.1 8B's head takes 6%
# longer on an H200, and XLA's best plain expression with all logits is faster.
_PART = 5
# A longer first chunk, or logits that are computed again, take seconds to compile: they have to save so much of the
# time.  Of two longer chunks that should save 1%, one took Gemma 3 1B's step 2% longer on an H200, the other saved
# Llama 3.2 1B's nothing.
_TO_COMPILE = 0.015
# Tokens whose softmax is taken at a time without gradients, at least, unless a smaller budget is given: each such chunk
# reads all of the weight.
_FORWARD_TOKENS = 1024
# Tokens of a weight's product up to which a fourth stage serves better than leaving whole tiles at once: on an H100 it
# is 6% faster for 512 tokens and 5% where 512 to 1536 are added to a sum, alike for 2048, and 2% slower for 4096.
# Where nothing is added, warpgroups that take tiles in turns are better still: on an H200 with H=4096 by 13% for 512
# tokens, 7% for 1024 and 3% for 2048, if their narrower tiles leave no more than this of the last one empty.
_SHORT = 2048
_EMPTY = 0.04
# Tokens of a softmax up to which a fourth stage serves better: on an H200 by 3% for 512 tokens, 1% for 768.
_FEW = 768


def heuristic_tiles(
    hidden: int = VOCAB_TILE, weight_layout: str = "vh", tokens: int = 2 * _SHORT
) -> dict[str, dict[str, int]]:
    """The kernels' tiles, as `MosaicConfig.from_numbers` takes them; `tokens` are those of the
    weight's product.

    Among those that were tried they are the fastest, or within 3% of it, on an H100 and, for stages and slots, an H200.
    Tiles of 192 columns are a fifth faster in hidden's product and 6% in weight's for H=576, in chunks of 2048 tokens.
    """
    along_hidden = {"tile_n": hidden_tile(hidden)}
    plain = {"tile_m": 128, "tile_n": 256, "tile_k": 64, "group": 8, "split_n": 0, "in_flight": 1}
    deep = plain | {"stages": 4, "staging_slots": 2}
    # A whole tile leaves at once: on an H200 1 to 2% faster, where there are many tiles and a product is long.
    whole = plain | {"stages": 3, "staging_slots": 4, "group": 16}
    of_weight = (deep if tokens <= _SHORT else whole) | (along_hidden if weight_layout == "vh" else {})
    narrow = weight_layout == "hv" or up(hidden, 192) <= (1 + _EMPTY) * up(hidden, hidden_tile(hidden))
    in_turns = deep | {"tile_n": 192, "alternate": 1, "group": 4 if weight_layout == "vh" else 8}
    return {
        "mosaic_softmax_tiles": deep if tokens <= _FEW else whole,
        "mosaic_gradient_tiles": deep | {"split_n": 1},
        "mosaic_weight_product": of_weight,
        "mosaic_weight_at_once": in_turns if narrow and tokens <= _SHORT else of_weight,
        "mosaic_hidden_product": deep | along_hidden,
    }


def label_tiles() -> dict[str, int]:
    """How tiles of logits are cut beside soft labels for every entry, which take shared memory too."""
    return heuristic_tiles()["mosaic_softmax_tiles"] | {"staging_slots": 1}


def refusal(p: Problem, platform: str, weight_layout: str) -> str | None:
    """Why the kernels can't serve the call, whatever the GPU, or None.  `platform` is "cpu", "gpu" or "tpu"."""
    if p.dtype == "float64":
        return "it takes no float64; pass backend='xla', or 'auto'"
    if platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {platform!r}"
    if p.dtype == "float32":
        return "its products take bfloat16 or float16; float32 operands would be rounded to tf32"
    if p.labels == "float64":
        return "it reads labels of 16 or 32 bits; pass the target in float32, or backend='xla'"
    # Mosaic cuts matrices in device memory into tiles of 8 rows and 128 bytes.  Where one has a single column of tiles,
    # what is copied to columns beyond lands in that one.
    vocab = 8 if weight_layout == "vh" else 64
    if p.hidden % 64 or p.vocab % vocab or p.hidden < 128 or p.vocab < 2 * vocab:
        needs = "H to be a multiple of 64 from 128 on, and V of 8 from 16 on (with weight_layout='hv', of 64 from 128)"
        return f"it needs {needs}; got H={p.hidden} and V={p.vocab}"
    return None


def scratch_parts(p: Problem, c: MosaicPlan) -> dict[str, int]:
    """Peak temporary memory in bytes, part by part."""
    head, rows = head_of(p), up(c.token_chunk, TOKEN_TILE)
    if c.strategy == "forward":
        of_rows = {"hidden rows": ELEMENT * rows * p.hidden, "softmax of each tile": head.softmax * rows}
        return head.fixed(p.tokens, up(p.tokens, TOKEN_TILE)) | of_rows
    if c.by_tokens:
        return head.by_tokens(p.tokens, c)
    return head.keeping(p.tokens, c)


def predict(p: Problem, c: MosaicPlan) -> float:
    """Milliseconds of forward, and of backward where gradients are wanted, by a simple cost model."""
    if c.strategy == "forward":
        product = 2e-9 * p.tokens * p.hidden * p.vocab / PRODUCT
        return product + 1e-3 * LAUNCH * -(-p.tokens // c.token_chunk)
    if c.by_tokens:
        return head_of(p).by_tokens_ms(p.tokens, c)
    return head_of(p).keeping_ms(p.tokens, c)


def default_scratch(p: Problem, strategy: str) -> int:
    """256 MiB or a fifth of the float32 logits, whichever is more, and at least what one useful chunk needs; without
    gradients 64 MiB, or what 1024 tokens at a time need.
    """
    if not p.any_grad:
        least = MosaicPlan("forward", min(up(p.tokens, TOKEN_TILE), _FORWARD_TOKENS))
        return max(FORWARD_SCRATCH, scratch_bytes(p, least))
    return chunks.default_scratch(logits_bytes(p), useful_scratch(p, strategy), _PART)


def useful_scratch(p: Problem, strategy: str) -> int:
    """What gradients need with chunks large enough to cost little time."""
    return scratch_bytes(p, _cut(p, strategy, min(16 * VOCAB_TILE, up(p.vocab, VOCAB_TILE))))


def _kept(p: Problem, strategy: str) -> int:
    """Tokens in the memory of the weight's gradient."""
    return 0 if strategy == "recompute" else capacity(p)


def _cut(p: Problem, strategy: str, chunk: int) -> MosaicPlan:
    if kept := _kept(p, strategy):
        chunk = min(chunk, p.vocab // VOCAB_TILE // 2 * VOCAB_TILE)
    return MosaicPlan("stash" if kept else "recompute", p.tokens, kept, chunk)


def least_scratch(p: Problem, strategy: str) -> int:
    """Bytes of scratch that a strategy needs to run at all."""
    return min(scratch_bytes(p, c) for each in _strategies(strategy) for c in _smallest(p, each))


def _strategies(strategy: str) -> tuple[str, ...]:
    return ("stash", "recompute") if strategy == "auto" else (strategy,)


def _smallest(p: Problem, strategy: str) -> Iterator[MosaicPlan]:
    """The plans of one strategy that may need least memory."""
    rows = up(p.tokens, TOKEN_TILE)
    if not p.any_grad:
        yield MosaicPlan("forward", TOKEN_TILE)
        return
    if _goes_by_tokens(p, strategy):
        yield _by_tokens(p, TOKEN_TILE)
    if kept := _cut(p, strategy, VOCAB_TILE).kept_in_gradient:
        yield _in_scratch(p)
    yield from (_cut(p, strategy, size) for size in _chunk_sizes(head_of(p), rows - kept))


def _goes_by_tokens(p: Problem, strategy: str) -> bool:
    # Forward doesn't know each token's upstream gradient; hidden's gradient can be multiplied by it later.
    # And where the vocabulary is split over devices no chunk's softmax is known before all are.
    later = p.split or (p.grad_weight and p.per_token_loss) or of_entropy(p)
    return strategy == "stash" and keeps(p) and not later


def _by_tokens(p: Problem, size: int) -> MosaicPlan:
    return MosaicPlan("stash", size, chunk=up(p.vocab, VOCAB_TILE), kept_in_scratch=size, by_tokens=True)


def _in_scratch(p: Problem) -> MosaicPlan:
    """The plan that keeps all exponentials in scratch and makes the weight's gradient in one launch."""
    return MosaicPlan("stash", p.tokens, chunk=up(p.vocab, VOCAB_TILE), kept_in_scratch=up(p.tokens, TOKEN_TILE))


def _candidates(p: Problem, strategy: str, budget: int) -> Iterator[MosaicPlan]:
    """Without gradients the fewest even chunks of tokens; else plans of one strategy, or of both."""
    if not p.any_grad:
        whole = up(p.tokens, TOKEN_TILE)
        fits = largest(lambda n: scratch_bytes(p, MosaicPlan("forward", n)) <= budget, TOKEN_TILE, whole, TOKEN_TILE)
        yield MosaicPlan("forward", up(even_chunk(p.tokens, fits, TOKEN_TILE), TOKEN_TILE))
        return
    for each in _strategies(strategy):
        if _goes_by_tokens(p, each):
            # The fewest even chunks, and some small ones.
            rows = up(p.tokens, TOKEN_TILE)
            sizes = dict.fromkeys([*(up(-(-rows // number), TOKEN_TILE) for number in range(1, 65)), TOKEN_TILE])
            yield from (_by_tokens(p, size) for size in sizes)
            yield from _longer_first(p, budget)
        yield from _keeping(p, each, budget)


def _longer_first(p: Problem, budget: int) -> Iterator[MosaicPlan]:
    """Chunks of tokens of which the first has so many more that as few others as possible are left."""
    head, rows, kept = head_of(p), up(p.tokens, TOKEN_TILE), capacity(p)
    if not kept:
        return
    # What is beside a chunk's exponentials and softmax, and of the first chunk those that are in other memory.
    fixed = sum(head.fixed(p.tokens, rows).values()) + head.digits * p.grad_weight + p.tokens * p.hidden * p.grad_hidden
    of_token = ELEMENT * head.vocab + head.softmax
    in_chunk = max(0, budget - fixed) // of_token
    most = max(kept + head.in_digits, in_chunk + (kept + head.in_digits) * ELEMENT * head.vocab // of_token)
    # Entries whose tiles of the weight's gradient fill two and four waves.
    filling = (PROGRAMS * n // head.columns * TOKEN_TILE // VOCAB_TILE * VOCAB_TILE for n in (2, 4))
    chunks = {min(max(chunk, VOCAB_TILE), p.vocab // VOCAB_TILE // 2 * VOCAB_TILE) for chunk in filling}
    for size in range(TOKEN_TILE, min(rows - kept - TOKEN_TILE, in_chunk) + 1, TOKEN_TILE):
        for chunk in chunks:
            for number in range(max(1, -(-(rows - most) // size)), (rows - max(size, kept) - 1) // size + 1):
                first = rows - number * size
                in_digits = min(first - kept, head.in_digits)
                made = MosaicPlan(
                    "stash", size, kept, chunk, max(first - kept - in_digits, size), by_tokens=True, first_chunk=first,
                    kept_in_digits=in_digits,
                )  # fmt: skip
                if scratch_bytes(p, made) <= budget:
                    yield made
                    break


def _keeping(p: Problem, strategy: str, budget: int) -> Iterator[MosaicPlan]:
    """Plans that keep exponentials until backward, for as many tokens as the gradient's memory has room for and some
    more; the other tokens' logits are computed again.
    """
    head, rows, kept = head_of(p), up(p.tokens, TOKEN_TILE), _kept(p, strategy)
    if kept:
        yield _in_scratch(p)
    most_chunk = p.vocab // VOCAB_TILE // 2 * VOCAB_TILE if kept else head.vocab
    # More than that fits no budget; and a few dozen are enough.
    most = min(rows - kept, budget // (ELEMENT * p.vocab)) if kept else 0
    for in_scratch in range(0, most + 1, max(TOKEN_TILE, up(-(-most // 24), TOKEN_TILE))):
        recomputed, strategy = rows - kept - in_scratch, "stash" if kept + in_scratch else "recompute"
        for size in _chunk_sizes(head, recomputed):
            for halves in (False, True) if recomputed and p.grad_hidden else (False,):
                made = MosaicPlan(strategy, p.tokens, kept, min(size, most_chunk), in_scratch, halves)
                if (room := budget - scratch_bytes(p, made)) < 0:
                    continue
                if made.kept and recomputed:  # where nothing is kept, larger chunks do the same
                    made = replace(made, recompute_chunks=_together(p, recomputed, size, room))
                yield made


def _together(p: Problem, recomputed: int, chunk: int, room: int) -> int:
    """How many chunks to recompute logits for at a time, of so many tokens and with so many more bytes."""
    launches = 2 * 1e-3 * LAUNCH / (STEP * -(-p.hidden // DEPTH))

    def cost(number: int) -> float:
        """How many waves a chunk takes."""
        tiles = recomputed // TOKEN_TILE * (number * chunk // VOCAB_TILE)
        return (waves(tiles, PROGRAMS) + launches) / number

    tried = [n for n in (1, 2, 3, 4, 6, 8) if n == 1 or ELEMENT * recomputed * chunk * (n - 1) <= room]
    return min(tried, key=cost)


def _chunk_sizes(head: MosaicHead, recomputed: int) -> set[int]:
    """Sizes of a chunk that leave no wave half empty, of the weight gradient's tiles or of the logits that are
    recomputed for so many tokens; and some small ones.
    """
    sizes = set(head.chunk_sizes)
    if recomputed:
        rows, most = recomputed // TOKEN_TILE, head.tiles
        sizes |= {min(tiles // rows, most) * VOCAB_TILE for tiles in FILLING if tiles >= rows}
    return sizes


def _cost(p: Problem, c: MosaicPlan) -> float:
    """What plans are compared by: the predicted time, and what there is to compile."""
    again = not c.by_tokens and 0 < c.kept < p.tokens  # some tokens' logits
    return predict(p, c) * (1 + _TO_COMPILE * (again or c.first_chunk > 0))


PLANNER: Planner[MosaicPlan] = Planner(
    scratch_parts,
    _candidates,
    _cost,
    least_scratch,
    default_scratch,
    needs,
    slack=1.002,  # plans that take up to so many times the least pass for equally fast
)
plan, scratch_bytes = PLANNER.plan, PLANNER.scratch_bytes
