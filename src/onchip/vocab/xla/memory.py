"""How the 'xla' backend cuts a problem: memory formulas and the choice of strategy and chunks.  No framework.

The formulas are of what XLA allocates for a jitted step beyond its arguments and results.
"""

from onchip.core.sizes import DTYPE_BYTES
from onchip.vocab import memory
from onchip.vocab.chunks import SMALLEST, Config, even_chunk
from onchip.vocab.memory import Problem

# No chunk has more tokens: the loops end with the last chunk that has one which counts, so that smaller chunks skip
# more of what is ignored.
LARGEST_TOKENS = {"cpu": 1024, "cuda": 4096}


def scratch_parts(p: Problem, c: Config) -> dict[str, int]:
    """Peak temporary memory in bytes, part by part."""
    tokens, vocab, element = c.token_chunk, c.vocab_chunk, DTYPE_BYTES[p.dtype]
    padded = -(-p.tokens // tokens) * tokens
    backward, narrow, on_cpu = c.strategy != "forward", element != 4, p.device == "cpu"
    tile = 4 * tokens * vocab
    slope = tile if p.softcap and backward else 0
    part = 4 * vocab * p.hidden if backward and p.grad_weight else 0
    stash = c.strategy == "stash"
    if on_cpu:
        # The softmax takes two tiles, logits and exponentials, or a third one for differences that are summed too, and
        # so does stashing their gradient; that leaves one.  A product that is added to something is stored first.
        tiles = 3 if p.stats or (p.smoothing and stash) else 2
        softmax, gradient = tiles * tile + (slope if stash else 0), tile + slope + (0 if stash else part)
        work = max(softmax, gradient, tile + part * (1 if stash else 2))
    else:
        # Exponentials are fused into what reads them.  Products of 16-bit operands read a 16-bit tile.
        work = tile + slope + (element * tokens * vocab if narrow and backward else 0) + (0 if stash else part)
    return {
        "logits tiles and products": work,
        "hidden rows": element * tokens * p.hidden,
        "weight rows": 0 if vocab == p.vocab else element * vocab * p.hidden,
        "hidden gradient in float32": 4 * padded * p.hidden if backward and p.grad_hidden else 0,
        "its chunk": 4 * tokens * p.hidden if backward and p.grad_hidden else 0,
        "weight gradient in float32": part if stash else 0,
        "operands in float32": 4 * (p.vocab + vocab + 2 * padded) * p.hidden if on_cpu and narrow else 0,
        "vectors": 96 * p.tokens + 16 * p.vocab,
    }


def scratch_bytes(p: Problem, c: Config) -> int:
    """Peak temporary memory in bytes."""
    return sum(scratch_parts(p, c).values())


def _config(p: Problem, strategy: str, tokens: int, vocab: int) -> Config:
    """A config with chunks of at most these sizes, as even as whole multiples of 64 allow."""
    tokens, vocab = min(p.tokens, tokens), p.vocab if strategy == "stash" else min(p.vocab, vocab)
    return Config(strategy, max(1, even_chunk(p.tokens, tokens)), even_chunk(p.vocab, vocab))


def scratch_at_least(p: Problem, strategy: str, sizes: tuple[int, int] = SMALLEST) -> int:
    """Bytes of scratch that `strategy` needs with chunks of [tokens, vocab] `sizes`; by default, to run at all."""
    return scratch_bytes(p, _config(p, strategy, *sizes))


def default_scratch(p: Problem, strategy: str) -> int:
    """256 MiB or an eighth of the float32 logits, whichever is less, and at least what one useful chunk needs."""
    return memory.default_scratch(p, strategy, scratch_at_least)


def choose_strategy(p: Problem, requested: str = "auto", budget: int | None = None) -> str:
    """The strategy that will run, by the rules of the other front end and by this one's needs."""
    return memory.choose_strategy(p, requested, budget, at_least=scratch_at_least)


def plan(p: Problem, strategy: str, budget: int | None = None) -> Config:
    """Cut the problem into the fewest, most even chunks whose scratch fits the budget."""
    if budget is None:
        budget = default_scratch(p, strategy)
    largest = min(p.tokens, LARGEST_TOKENS[p.device])
    if strategy == "stash":
        return _config(p, strategy, _largest(p, strategy, budget, SMALLEST[0], largest, None), p.vocab)
    best: tuple[int, Config] | None = None
    while True:
        config = _config(p, strategy, largest, _largest(p, strategy, budget, SMALLEST[1], p.vocab, largest))
        # Each chunk of tokens passes over all of the weight (and its gradient), each chunk of vocabulary over hidden.
        cost = -(-p.tokens // config.token_chunk) * p.vocab + -(-p.vocab // config.vocab_chunk) * p.tokens
        if scratch_bytes(p, config) > budget:
            cost += scratch_bytes(p, config) << 32  # over budget: only the smallest such config will do
        if best is None or cost < best[0]:
            best = cost, config
        if largest <= SMALLEST[0]:
            return best[1]
        largest = max(SMALLEST[0], largest // 2)


def _largest(p: Problem, strategy: str, budget: int, smallest: int, largest: int, tokens: int | None) -> int:
    """The largest chunk that fits the budget, `largest` or a multiple of `smallest`; at least `smallest`.

    Of tokens where `tokens` is None, else of the vocabulary for chunks of so many tokens.
    """

    def fits(size: int) -> bool:
        sizes = (size, p.vocab) if tokens is None else (tokens, size)
        return scratch_bytes(p, _config(p, strategy, *sizes)) <= budget

    if largest <= smallest or fits(largest):
        return largest
    low, high = 1, largest // smallest + 1  # in units of `smallest`: low is taken, high is too large
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * smallest) else (low, middle)
    return low * smallest
