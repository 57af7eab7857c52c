"""What both front ends of linear_log_probs share: options, memory formulas, the choice of chunks.  No framework."""

from collections.abc import Sequence
from dataclasses import dataclass

from onchip.core.sizes import DTYPE_BYTES
from onchip.frontend.options import check_head, check_logit_options, require_bool
from onchip.vocab.chunks import DEFAULT_SCRATCH, SMALLEST, USEFUL, Config

OP = "linear_log_probs"
# The loops of the 'xla' backend end with the last chunk of tokens that has one which counts: no chunk has more.
LARGEST_TOKENS = {"cpu": 1024, "cuda": 4096}


# ---------------------------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class Options:
    """The options that are plain numbers, checked when made."""

    ignore_index: int = -100
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    entropy: bool = False
    lse: bool = False
    top1: bool = False
    check_inputs: bool = False
    scratch_bytes: int | None = None

    def __post_init__(self) -> None:
        check_logit_options(OP, self)
        for name in ("entropy", "lse", "top1", "check_inputs"):
            require_bool(OP, name, getattr(self, name))


def check_shapes(
    hidden: Sequence[int],
    weight: Sequence[int],
    ids: Sequence[int],
    bias: Sequence[int] | None,
    temperature: Sequence[int],
    layout: str | None = None,
) -> None:
    """Raise ValueError unless the shapes are [..., H], [V, H], [...] or [..., K], [V], and [] or [...].

    The JAX front end, whose weight may be [H, V], gives its weight_layout.
    """
    check_head(OP, hidden, weight, bias, layout=layout)
    hidden, ids, temperature = tuple(hidden), tuple(ids), tuple(temperature)
    leading = hidden[:-1]
    if ids != leading and ids[:-1] != leading:
        raise ValueError(
            f"{OP}: ids has shape {list(ids)} but hidden has shape {list(hidden)}; ids must have hidden's leading "
            f"dimensions, {list(leading)}, or those and one more for several ids per token"
        )
    if len(ids) > len(leading) and ids[-1] < 1:
        raise ValueError(f"{OP}: ids has shape {list(ids)}; [..., K] needs K >= 1")
    if temperature not in ((), leading):
        raise ValueError(
            f"{OP}: temperature has shape {list(temperature)}; it must be a number or have hidden's leading "
            f"dimensions, {list(leading)}"
        )


# ------------------------------------------------------------------------------------------------- memory and plan


@dataclass(frozen=True)
class Problem:
    """All that memory depends on.  Sizes in elements, dtypes by name, `device` 'cpu' or 'cuda'."""

    tokens: int
    hidden: int
    vocab: int
    ids: int = 1
    """K, ids per token."""
    dtype: str = "float32"
    """What the matrix products read: the inputs' dtype, or autocast's."""
    hidden_dtype: str = ""
    weight_dtype: str = ""
    device: str = "cpu"
    backend: str = "torch"
    grad_hidden: bool = True
    grad_weight: bool = True
    grad_bias: bool = False
    softcap: bool = False
    entropy: bool = False
    top1: bool = False
    """Asked for; it takes memory with 'triton' alone."""
    compacted: bool = False
    """Some tokens are ignored and are left out: in PyTorch on the CPU alone."""
    copied: int = 0
    """Bytes of the copies that are made of inputs whose strides don't suit."""

    def __post_init__(self) -> None:
        for name in ("hidden_dtype", "weight_dtype"):
            object.__setattr__(self, name, getattr(self, name) or self.dtype)

    @property
    def any_grad(self) -> bool:
        return self.grad_hidden or self.grad_weight or self.grad_bias

    @property
    def widened(self) -> bool:
        """16-bit operands are widened to float32 before a product: the CPU's 16-bit products round their results."""
        return self.device == "cpu" and self.dtype != "float32"


def scratch_parts(p: Problem, c: Config) -> dict[str, int]:
    """Peak memory above inputs, results and returned gradients, in bytes, part by part; `c.strategy` is 'forward' or
    'recompute', the backward pass.
    """
    return _xla_parts(p, c) if p.backend == "xla" else _torch_parts(p, c)


def _vectors(p: Problem) -> int:
    """Numbers per token, per id and per vocabulary entry."""
    return (96 + 80 * p.ids) * p.tokens + 16 * p.vocab


def _torch_parts(p: Problem, c: Config) -> dict[str, int]:
    tokens, vocab, element = c.token_chunk, c.vocab_chunk, DTYPE_BYTES[p.dtype]
    backward = c.strategy == "recompute"
    # float32 copies of a tile of logits that live at once, and the 16-bit one that the gradient products read
    copies = 1 + int(p.entropy) + int(p.softcap and backward)
    narrow = 2 if p.device == "cuda" and p.dtype != "float32" and backward else 0
    if p.device == "cuda":
        row_bytes = element if backward else 0  # ignored rows zeroed, so that a NaN there can't leak
    else:
        row_bytes = (element if p.compacted else 0) + (4 if p.widened else 0)
        row_bytes += 4 if p.compacted and p.grad_hidden and backward else 0
    casts = element * p.tokens * p.hidden if p.hidden_dtype != p.dtype else 0
    casts += element * p.vocab * p.hidden if p.weight_dtype != p.dtype else 0
    return {
        "logits tile": (4 * copies + narrow) * tokens * vocab,
        "hidden rows": row_bytes * tokens * p.hidden,
        "weight rows in float32": 4 * vocab * p.hidden if p.widened else 0,
        "casts": casts,
        "copies of strided inputs": p.copied,
        "hidden gradient in float32": 4 * p.tokens * p.hidden
        if backward and p.grad_hidden and p.hidden_dtype != "float32"
        else 0,
        "weight gradient in float32": 4 * vocab * p.hidden
        if backward and p.grad_weight and p.weight_dtype != "float32"
        else 0,
        "vectors": _vectors(p),
    }


def _xla_parts(p: Problem, c: Config) -> dict[str, int]:
    tokens, vocab, element = c.token_chunk, c.vocab_chunk, DTYPE_BYTES[p.dtype]
    padded = -(-p.tokens // tokens) * tokens
    backward, narrow, on_cpu = c.strategy == "recompute", element != 4, p.device == "cpu"
    tile = 4 * tokens * vocab
    part = 4 * vocab * p.hidden if backward and p.grad_weight else 0
    # Logits and exponentials; or logits (and their derivative), their gradient and a product before it is added.
    work = max(2 * tile, tile * (2 + int(p.softcap)) + 2 * part) if backward else 2 * tile
    if not on_cpu and narrow and backward:
        work += element * tokens * vocab
    return {
        "logits tiles and products": work,
        "hidden rows": element * tokens * p.hidden,
        "weight rows": 0 if vocab == p.vocab else element * vocab * p.hidden,
        "hidden gradient in float32": 4 * padded * p.hidden if backward and p.grad_hidden else 0,
        "its chunk": 4 * tokens * p.hidden if backward and p.grad_hidden else 0,
        "operands in float32": 4 * (p.vocab + vocab + 2 * padded) * p.hidden if on_cpu and narrow else 0,
        "vectors": _vectors(p),
    }


def scratch_bytes(p: Problem, c: Config) -> int:
    """Peak memory above inputs, results and returned gradients, in bytes."""
    return sum(scratch_parts(p, c).values())


def scratch_at_least(p: Problem, strategy: str, sizes: tuple[int, int] = SMALLEST) -> int:
    """Bytes of scratch that `strategy` needs with chunks of [tokens, vocab] `sizes`; by default, to run at all."""
    return scratch_bytes(p, Config(strategy, max(1, min(p.tokens, sizes[0])), min(p.vocab, sizes[1])))


def default_scratch(p: Problem, strategy: str) -> int:
    """256 MiB or an eighth of the float32 logits, whichever is less, and at least what one useful chunk needs."""
    return max(min(DEFAULT_SCRATCH, p.tokens * p.vocab // 2), scratch_at_least(p, strategy, USEFUL[p.device]))


def require_scratch(p: Problem, budget: int | None) -> None:
    """Raise ValueError if forward, or backward where a gradient is wanted, can't run within `budget`."""
    if budget is None:
        return
    need = max(scratch_at_least(p, s) for s in ("forward", "recompute")[: 1 + int(p.any_grad)])
    if need > budget:
        raise ValueError(
            f"{OP}: scratch_bytes={budget} is too small for T={p.tokens}, H={p.hidden}, V={p.vocab} in {p.dtype}: "
            f"the smallest chunk needs {need} bytes; raise scratch_bytes"
        )


def plan(p: Problem, strategy: str, budget: int | None = None) -> Config:
    """Cut the problem into chunks that fit the budget such that the weight and hidden are passed over least."""
    if budget is None:
        budget = default_scratch(p, strategy)
    smallest = max(1, min(p.tokens, SMALLEST[0]))
    token_chunk = max(1, min(p.tokens, LARGEST_TOKENS[p.device] if p.backend == "xla" else p.tokens))
    best: tuple[int, Config] | None = None
    while True:
        config = Config(strategy, token_chunk, _largest_vocab(p, strategy, token_chunk, budget))
        # Each chunk of tokens passes over all of the weight (and its gradient), each chunk of vocabulary over hidden.
        cost = -(-p.tokens // token_chunk) * p.vocab + -(-p.vocab // config.vocab_chunk) * p.tokens
        excess = max(0, scratch_bytes(p, config) - budget)  # only the smallest such config will do
        if best is None or cost + (excess << 32) < best[0]:
            best = cost + (excess << 32), config
        if token_chunk == smallest:
            return best[1]
        token_chunk = max(smallest, -(-token_chunk // 2))


def _largest_vocab(p: Problem, strategy: str, token_chunk: int, budget: int) -> int:
    """The fewest even chunks of the vocabulary that fit, in multiples of 64."""

    def need(vocab_chunk: int) -> int:
        return scratch_bytes(p, Config(strategy, token_chunk, vocab_chunk))

    if need(p.vocab) <= budget:
        return p.vocab
    smallest = min(p.vocab, SMALLEST[1])
    low, high = smallest // 64, -(-p.vocab // 64)  # in units of 64: `high` doesn't fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(64 * middle) <= budget else (low, middle)
    largest = max(smallest, 64 * low)
    even = -(-p.vocab // -(-p.vocab // largest))
    return min(largest, -(-even // 64) * 64)
