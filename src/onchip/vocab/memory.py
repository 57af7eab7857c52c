"""Memory and plan for the framework's own products: the problem, its scratch formula, and the choice of strategy and
chunks.

Imports no framework.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from onchip.core.sizes import LOSS_DTYPE_BYTES, accumulator
from onchip.vocab import chunks
from onchip.vocab.chunks import SMALLEST, USEFUL, ChunkConfig, Planner, even_chunk, largest


@dataclass(frozen=True)
class Problem:
    """Everything that memory and work depend on.  Sizes are in elements, dtypes are names, `device` is 'cpu' or
    'cuda'.
    """

    tokens: int
    hidden: int
    vocab: int
    dtype: str = "float32"
    """What the matrix products read: the inputs' dtype, or autocast's."""
    hidden_dtype: str = ""
    weight_dtype: str = ""
    device: str = "cpu"
    grad_hidden: bool = True
    grad_weight: bool = True
    grad_bias: bool = False
    per_token_loss: bool = False
    """reduction='none': the upstream gradient is one number per token."""
    softcap: bool = False
    smoothing: float = 0.0
    """The part of the target's probability that is spread evenly."""
    class_weight: bool = False
    """Whether a loss with smoothing or z-loss has class weights."""
    stats: bool = False
    """Whether statistics of the softmax are wanted that take memory: the entropy, and with 'triton' also the likeliest
    entry."""
    more_stats: int = 0
    """Further statistics of linear_log_probs, each a sum over the vocabulary."""
    weight_grad_out: bool = False
    """The weight's gradient is added to a tensor of the caller's."""
    op: str = "linear_cross_entropy"
    """The name that errors begin with."""
    compacted: bool = False
    """Whether some tokens are ignored and left out: on the CPU only, where finding this needs no synchronisation."""
    copied: int = 0
    """Bytes of the copies of inputs whose strides don't suit."""
    ids: int = 0
    """For linear_log_probs or soft labels: K, the ids per token.  0 if each token has one target."""
    labels: str = ""
    """The dtype of soft labels for every entry of the vocabulary; "" if there are none."""
    sharded: bool = False
    """Whether gradients wait for other ranks, which have other parts of the vocabulary."""
    even: bool = False
    """With `sharded`: each rank knows that all make the same plan, so that they may exchange numbers chunk by chunk."""
    gathered: bool = False
    """Whether the labels' rows are copied, because their leading dimensions can't be flattened in place."""
    split: bool = False
    """Whether the vocabulary is split over devices, and this is one device's part."""
    weight_layout: str = "vh"
    """ "hv" if JAX's weight is [H, V]."""

    def __post_init__(self) -> None:
        for name in ("hidden_dtype", "weight_dtype"):
            object.__setattr__(self, name, getattr(self, name) or self.dtype)

    def __hash__(self) -> int:
        return hash((self.tokens, self.hidden, self.vocab, self.copied))  # of all fields: 2 us, several times a call

    def with_tokens(self, tokens: int, copied: int) -> "Problem":
        """The same with so many tokens and bytes of copies; `replace` takes 12 us."""
        made = object.__new__(type(self))
        vars(made).update(vars(self), tokens=tokens, copied=copied)
        return made

    @property
    def any_grad(self) -> bool:
        return self.grad_hidden or self.grad_weight or self.grad_bias

    @cached_property
    def head(self) -> "Problem":
        """The same without tokens, one object for all numbers of them."""
        return _head(self.with_tokens(0, 0))

    @property
    def widened(self) -> bool:
        """Whether 16-bit operands are widened to float32 before a product: the CPU's 16-bit products round their
        results.
        """
        return self.device == "cpu" and self.dtype != accumulator(self.dtype)

    @property
    def total_bytes(self) -> int:
        """Bytes of a number of the logits, statistics and sums."""
        return LOSS_DTYPE_BYTES[accumulator(self.dtype)]

    @property
    def sizes(self) -> str:
        """The sizes, as errors state them."""
        return f"T={self.tokens}, H={self.hidden}, V={self.vocab} in {self.dtype}"


@lru_cache(maxsize=1024)
def _head(p: Problem) -> Problem:
    return p


def digit_bits(dtype: str) -> int:
    """For each number of the weight's sum over chunks of tokens, how many bits are kept beyond the first 16 of its
    float32.  With them the number has 12 binary digits where bfloat16 operands have 8, and 16 where float16 operands
    have 11.
    """
    return 4 if dtype == "bfloat16" else 8


def logits_bytes(p: Problem) -> int:
    """Bytes of the float32 logits, which no op stores."""
    return 4 * p.tokens * p.vocab


def vectors(p: Problem) -> int:
    """Bytes of numbers per token, per id and per vocabulary entry."""
    return p.total_bytes * ((24 + 20 * p.ids) * p.tokens + 4 * p.vocab)


def scratch_parts(p: Problem, c: ChunkConfig) -> dict[str, int]:
    """Peak memory above inputs, loss and returned gradients, in bytes, part by part."""
    tokens, vocab, element = c.token_chunk, c.vocab_chunk, LOSS_DTYPE_BYTES[p.dtype]
    total, narrow = p.total_bytes, p.device == "cuda" and element == 2
    backward = c.strategy != "forward"
    # Copies of a tile of logits, of `total` bytes a number, that live at once, and the 16-bit one that the gradient
    # products read.  Beside the logits are exponentials, or logits weighted by class; the gradient of linear_log_probs
    # reads the entropy.
    weighed = p.class_weight and p.smoothing > 0
    beside = (p.stats and (p.ids > 0 or c.strategy != "recompute")) or (weighed and c.strategy != "recompute")
    copies = 1 + int(beside) + int(p.softcap and backward)
    copies += 2 * int(p.labels != "")  # logarithms of probabilities and a mask, or labels
    tile_bytes = total * copies + (2 if narrow and backward else 0)
    if p.device == "cuda":
        row_bytes = element if backward else 0  # ignored rows zeroed, so that a NaN there can't leak
    else:
        row_bytes = (element if p.compacted else 0) + (4 if p.widened else 0)
        row_bytes += total if p.compacted and p.grad_hidden and backward else 0
    # 'stash' keeps its sums until backward knows the upstream gradient, and scales them into new tensors.  On the CPU,
    # those of their parameter's dtype are handed out as they are when that is 1.
    of_sums = accumulator(p.dtype)
    kept = c.strategy == "stash" and p.device == "cuda"
    sum_hidden = backward and p.grad_hidden and (kept or p.hidden_dtype != of_sums)
    sum_weight = backward and p.grad_weight and (kept or p.weight_dtype != of_sums or p.weight_grad_out)
    weight_rows = vocab if c.strategy == "recompute" else p.vocab
    casts = 0
    if p.hidden_dtype != p.dtype:
        casts += element * p.tokens * p.hidden
    if p.weight_dtype != p.dtype:
        casts += element * p.vocab * p.hidden
    return {
        "logits tile": tile_bytes * tokens * (p.vocab if c.strategy == "stash" else vocab),
        "label rows": LOSS_DTYPE_BYTES[p.labels] * tokens * p.vocab if p.gathered else 0,
        "hidden rows": row_bytes * tokens * p.hidden,
        "weight rows in float32": 4 * vocab * p.hidden if p.widened else 0,
        "casts": casts,
        "copies of strided inputs": p.copied,
        "hidden gradient in float32": total * p.tokens * p.hidden if sum_hidden else 0,
        "weight gradient in float32": total * weight_rows * p.hidden if sum_weight else 0,
        "vectors": vectors(p),
    }


def passes(p: Problem, c: ChunkConfig) -> int:
    """What plans are compared by: each chunk of tokens passes over the whole weight (and its gradient), each chunk of
    the vocabulary over hidden.
    """
    return -(-p.tokens // c.token_chunk) * p.vocab + -(-p.vocab // c.vocab_chunk) * p.tokens


def needs(p: Problem, strategy: str) -> str:
    """How the refusal of a budget goes on; linear_log_probs has no strategies to name."""
    what = "the smallest chunk" if p.ids else f"strategy {strategy!r}"
    return f"{p.sizes}: {what} needs"


def scratch_at_least(p: Problem, strategy: str, sizes: tuple[int, int] = SMALLEST) -> int:
    """Bytes of scratch that `strategy` needs with chunks of [tokens, vocab] `sizes`; by default, what it needs to run
    at all.

    'recompute' runs forward first, which takes more for the entropy and for class weights.
    """
    cut = max(1, min(p.tokens, sizes[0])), min(p.vocab, sizes[1])
    walks = ("forward", strategy) if (p.stats or p.class_weight) and strategy == "recompute" else (strategy,)
    return max(scratch_bytes(p, ChunkConfig(walk, *cut)) for walk in walks)


def default_scratch(p: Problem, strategy: str) -> int:
    """256 MiB or an eighth of the float32 logits, whichever is more, and at least what one useful chunk needs."""
    return chunks.default_scratch(logits_bytes(p), scratch_at_least(p, strategy, USEFUL[p.device]))


def _candidates(p: Problem, strategy: str, budget: int) -> Iterator[ChunkConfig]:
    """For 'stash', chunks with the whole vocabulary; otherwise several sizes for a chunk of tokens, with the largest
    chunk of the vocabulary that fits beside each.
    """
    least_tokens, least_vocab = max(1, min(p.tokens, SMALLEST[0])), min(p.vocab, SMALLEST[1])

    def fits(tokens: int, vocab: int) -> bool:
        return scratch_bytes(p, ChunkConfig(strategy, tokens, vocab)) <= budget

    def vocab_chunk(tokens: int) -> int:
        most = largest(lambda size: fits(tokens, size), least_vocab, p.vocab)
        return max(least_vocab, even_chunk(p.vocab, most))

    if strategy == "stash":
        # The vocabulary is cut only where the weight's rows are widened to float32: a quarter of the budget for those.
        slab = max(1, p.vocab)  # an empty shard has V = 0
        if p.widened:
            slab = min(max(least_vocab, budget // 4 // (4 * p.hidden) // 64 * 64), vocab_chunk(least_tokens))
        yield ChunkConfig("stash", even_chunk(p.tokens, largest(lambda n: fits(n, slab), least_tokens, p.tokens)), slab)
        return
    yield from (ChunkConfig(strategy, size, vocab_chunk(size)) for size in halved(p.tokens, least_tokens))


def halved(total: int, smallest: int) -> Iterator[int]:
    """`total`, half of it, and so on, down to `smallest`."""
    parts = 1
    while (size := -(-total // parts)) > smallest:
        yield size
        parts *= 2
    yield smallest


PLANNER: Planner[ChunkConfig] = Planner(scratch_parts, _candidates, passes, scratch_at_least, default_scratch, needs)
plan, scratch_bytes = PLANNER.plan, PLANNER.scratch_bytes


def choose_strategy(
    p: Problem,
    requested: str = "auto",
    budget: int | None = None,
    at_least: Callable[..., int] = scratch_at_least,
) -> str:
    """The strategy that will run: 'forward' without gradients, else 'stash' or 'recompute'.

    'auto' takes 'stash' where useful chunks of it fit the budget, or need no more than those of 'recompute'.  With one
    upstream gradient per token, a weight gradient that is summed over tokens in forward can't be scaled any more: then
    it is 'recompute', whatever was requested.  Raises ValueError if the budget is too small.
    """
    if not p.any_grad:
        candidates = ["forward"]
    elif p.per_token_loss and (p.grad_weight or p.grad_bias):
        candidates = ["recompute"]
    elif requested != "auto":
        candidates = [requested]
    else:
        bound = chunks.default_scratch(logits_bytes(p)) if budget is None else budget
        stash, recompute = (at_least(p, s, USEFUL[p.device]) for s in ("stash", "recompute"))
        candidates = ["stash", "recompute"] if stash <= max(bound, recompute) else ["recompute", "stash"]
    if budget is None:
        return candidates[0]
    needs = {s: at_least(p, s) for s in candidates}
    for strategy, need in needs.items():
        if need <= budget:
            return strategy
    said = " and ".join(f"{need} bytes for strategy {s!r}" for s, need in needs.items())
    raise ValueError(
        f"{p.op}: scratch_bytes={budget} is too small for {p.sizes}: the smallest chunk needs {said}; "
        "raise scratch_bytes"
    )
