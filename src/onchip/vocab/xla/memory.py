"""How the 'xla' backend cuts a problem: memory formulas and the choice of strategy and chunks.  Imports no framework.

The formulas give what XLA allocates for a jitted step beyond its arguments and results.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product

from onchip.core.sizes import LOSS_DTYPE_BYTES
from onchip.vocab import chunks, memory
from onchip.vocab.chunks import SMALLEST, USEFUL, ChunkConfig, Planner, even_chunk, largest
from onchip.vocab.memory import Problem, logits_bytes

# No chunk has more tokens: the loops end with the last chunk that has one which counts, so that smaller chunks skip
# more of what is ignored.
LARGEST_TOKENS = {"cpu": 1024, "cuda": 4096}


def scratch_parts(p: Problem, c: ChunkConfig) -> dict[str, int]:
    """Peak temporary memory in bytes, part by part."""
    tokens, vocab, element = c.token_chunk, c.vocab_chunk, LOSS_DTYPE_BYTES[p.dtype]
    padded = -(-p.tokens // tokens) * tokens
    backward, narrow, on_cpu = c.strategy != "forward", element == 2, p.device == "cpu"
    total = p.total_bytes
    tile = total * tokens * vocab
    slope = tile if p.softcap and backward else 0
    part = total * vocab * p.hidden if backward and p.grad_weight else 0
    stash = c.strategy == "stash"
    # Products of 16-bit operands read a 16-bit tile, but for those that the CPU widens.
    narrow_tile = element * tokens * vocab if narrow and backward and not on_cpu else 0
    if p.ids:
        # Logits and exponentials, and what is summed beside; or logits (and their derivative), their gradient and a
        # product before it is added.
        work = max((2 + p.more_stats) * tile, 2 * tile + slope + 2 * part if backward else 0) + narrow_tile
    elif on_cpu:
        # The softmax takes two tiles, logits and exponentials, or a third one for differences that are summed too, and
        # stashing their gradient takes three and leaves one.  A product that is added to something is stored first.
        tiles = 3 if p.stats or stash else 2
        softmax, gradient = tiles * tile + (slope if stash else 0), tile + slope + (0 if stash else part)
        work = max(softmax, gradient, tile + part * (1 if stash else 2))
    else:  # exponentials are fused into what reads them
        work = tile + slope + narrow_tile + (0 if stash else part)
    work += tile if p.labels else 0
    narrow_labels = on_cpu and LOSS_DTYPE_BYTES.get(p.labels) == 2
    return {
        "logits tiles and products": work,
        "16-bit labels as integers": 2 * p.tokens * p.vocab if narrow_labels else 0,
        "hidden rows": element * tokens * p.hidden,
        "weight rows": 0 if vocab == p.vocab else element * vocab * p.hidden,
        "hidden gradient in float32": total * padded * p.hidden if backward and p.grad_hidden else 0,
        "its chunk": total * tokens * p.hidden if backward and p.grad_hidden else 0,
        "weight gradient in float32": part if stash else 0,
        "operands in float32": 4 * (p.vocab + vocab + 2 * padded) * p.hidden if on_cpu and narrow else 0,
        "vectors": memory.vectors(p),
    }


def _config(p: Problem, strategy: str, tokens: int, vocab: int) -> ChunkConfig:
    """A config with chunks of at most these sizes, as even as multiples of 64 allow."""
    vocab = p.vocab if strategy == "stash" else min(p.vocab, vocab)
    return ChunkConfig(strategy, even_chunk(p.tokens, tokens), even_chunk(p.vocab, vocab))


def scratch_at_least(p: Problem, strategy: str, sizes: tuple[int, int] | None = None) -> int:
    """Bytes of scratch that `strategy` needs with chunks of [tokens, vocab] `sizes`; by default, to run at all."""
    if sizes is None:
        # A single chunk copies no rows of the weight; larger ones may have less padding, and take less than small ones.
        most = max(1, min(p.tokens, LARGEST_TOKENS[p.device]))
        tokens, vocab = {*memory.halved(most, min(most, SMALLEST[0]))}, {SMALLEST[1], p.vocab}
        return min(scratch_bytes(p, _config(p, strategy, t, v)) for t, v in product(tokens, vocab))
    if p.ids:
        return scratch_bytes(p, ChunkConfig(strategy, max(1, min(p.tokens, sizes[0])), min(p.vocab, sizes[1])))
    return scratch_bytes(p, _config(p, strategy, *sizes))


def default_scratch(p: Problem, strategy: str) -> int:
    """256 MiB or an eighth of the float32 logits, whichever is more, and at least what one useful chunk needs."""
    return chunks.default_scratch(logits_bytes(p), scratch_at_least(p, strategy, USEFUL[p.device]))


def _candidates(p: Problem, strategy: str, budget: int) -> Iterator[ChunkConfig]:
    """For 'stash', chunks with the whole vocabulary; otherwise several sizes for a chunk of tokens, each with the
    largest chunk of the vocabulary that fits.
    """

    def fits(tokens: int, vocab: int) -> bool:
        return scratch_bytes(p, _config(p, strategy, tokens, vocab)) <= budget

    most, (least_tokens, least_vocab) = max(1, min(p.tokens, LARGEST_TOKENS[p.device])), SMALLEST
    if strategy == "stash":
        smallest = min(most, least_tokens)
        tokens = largest(lambda n: fits(n, p.vocab), smallest, most)
        # Larger chunks may have less padding: then some fit where smaller ones don't.
        sizes = [tokens] if fits(tokens, p.vocab) else memory.halved(most, smallest)
        yield from (_config(p, strategy, size, p.vocab) for size in sizes)
        return
    for tokens in memory.halved(most, min(most, least_tokens)):
        unit = 64 if p.ids else least_vocab  # what each op was measured with
        vocab = largest(partial(fits, tokens), min(p.vocab, least_vocab), p.vocab, unit)
        yield _config(p, strategy, tokens, vocab)


PLANNER: Planner[ChunkConfig] = Planner(
    scratch_parts, _candidates, memory.passes, scratch_at_least, default_scratch, memory.needs
)
plan, scratch_bytes = PLANNER.plan, PLANNER.scratch_bytes


def choose_strategy(p: Problem, requested: str = "auto", budget: int | None = None) -> str:
    """The strategy that will run, by PyTorch's rules and by what this backend needs."""
    return memory.choose_strategy(p, requested, budget, at_least=scratch_at_least)
