"""Memory and plans of linear_jsd and jsd with the framework's own products.  No framework."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from onchip.core.sizes import LOSS_DTYPE_BYTES, MIB, accumulator, up
from onchip.vocab import memory
from onchip.vocab.chunks import Planner, default_scratch, even_chunk, largest

# Tokens of a chunk.  No plan has fewer than the smallest, whatever the budget.  The default budget allows for a useful
# chunk, which keeps the device busy.
SMALLEST = 16
USEFUL = {"cpu": 64, "cuda": 256}
# The elementwise part of a chunk is done in this many blocks of rows, which makes its temporaries smaller.
BLOCKS = 10
# Vocabulary entries whose weights are widened to float32 at a time.
SLAB = 4096


Head = memory.Problem
"""A model's last layer; with `hidden` 0 its logits, whose gradient is `grad_hidden`; with `vocab` 0 neither of them."""


@dataclass(frozen=True)
class JsdProblem:
    """Everything on which memory depends."""

    vocab: int
    """Entries that count; the models' own numbers include padding."""
    student: Head
    teacher: Head
    topk: int = 0
    """K if the teacher is a top-k."""
    hard: bool = False
    stash: bool = False
    """Whether gradients are made in forward and kept, in the dtype of sums."""
    sent: int = 0
    """Bytes that ranks of a sharded vocabulary exchange."""

    @property
    def sharded(self) -> bool:
        return self.sent > 0

    @property
    def tokens(self) -> int:
        return self.student.tokens

    @property
    def total_bytes(self) -> int:
        """Bytes of a number of the logits, statistics and sums."""
        return self.student.total_bytes

    @property
    def device(self) -> str:
        return self.student.device

    @property
    def op(self) -> str:
        """The name that errors begin with."""
        return self.student.op

    @property
    def copied(self) -> int:
        """Bytes of copies of inputs whose strides don't suit."""
        return self.student.copied + self.teacher.copied

    @property
    def any_grad(self) -> bool:
        return self.student.any_grad or self.teacher.any_grad

    @property
    def layers(self) -> list[Head]:
        """The models whose logits are not given."""
        return [h for h in (self.student, self.teacher) if h.hidden]


def _widened(h: Head) -> bool:
    """Operands are widened to float32 before a product: float16 everywhere, since it can't hold a small gradient."""
    return h.widened or h.dtype == "float16"


def logits_bytes(p: JsdProblem) -> int:
    """Bytes of both models' float32 logits, which `linear_jsd` never stores."""
    return 4 * p.tokens * p.vocab * (1 if p.topk else 2)


def scratch_parts(p: JsdProblem, chunk: int) -> dict[str, int]:
    """Peak memory above inputs, loss and returned gradients, in bytes, part by part, for chunks of this many tokens."""
    block, total = -(-chunk // BLOCKS), p.total_bytes
    dense = 1 if p.topk else 2
    rows = casts = kept_hidden = kept_weight = widened = 0
    for h in p.layers:
        element = LOSS_DTYPE_BYTES[h.dtype]
        rows += (element + (4 if _widened(h) else 0) + (total if h.grad_hidden else 0)) * chunk * h.hidden
        casts += element * p.tokens * h.hidden if h.hidden_dtype != h.dtype else 0
        casts += element * h.vocab * h.hidden if h.weight_dtype != h.dtype else 0
        # Sums; on the CPU a sum in its parameter's dtype is itself the result.
        copied = p.stash and p.device == "cuda"
        if h.grad_hidden and (copied or h.hidden_dtype != accumulator(h.dtype)):
            kept_hidden += total * p.tokens * h.hidden
        if h.grad_weight and (copied or h.weight_dtype != accumulator(h.dtype)):
            kept_weight += total * h.vocab * h.hidden
        if _widened(h):
            widened = max(widened, 4 * min(SLAB, p.vocab) * h.hidden)
    narrow = p.any_grad and p.device == "cuda" and any(h.dtype == "bfloat16" for h in p.layers)
    return {
        "logits": total * dense * chunk * p.vocab,
        # the softmaxes, their logarithms' difference, and numbers made from them
        "temporaries of a block": 11 * total * block * p.vocab,
        "top-k rows": 16 * total * chunk * (p.topk + 1) if p.topk else 0,
        "logits' gradient in 16 bits": 2 * chunk * p.vocab if narrow else 0,
        "hidden rows": rows,
        "weight rows in float32": widened,
        "casts": casts,
        "copies of strided inputs": p.copied,
        "hidden gradients in float32": kept_hidden,
        "weight gradients in float32": kept_weight,
        "vectors": total * (24 * p.tokens + 4 * p.vocab),
        "what ranks exchange": p.sent,
    }


def jax_scratch_parts(p: JsdProblem, chunk: int) -> dict[str, int]:
    """Bytes that XLA allocates beyond arguments and results in a jitted step, part by part."""
    gradient, total = int(p.any_grad), p.total_bytes
    rows = sums = widened = 0
    for h in p.layers:
        rows += (LOSS_DTYPE_BYTES[h.dtype] + 2 * total) * chunk * h.hidden
        # Sums, and where backward scales them, or a loop carries them, another copy.
        sums += total * p.tokens * h.hidden if h.grad_hidden else 0
        sums += 2 * total * h.vocab * h.hidden if h.grad_weight else 0
        widened += 4 * h.vocab * h.hidden if _widened(h) else 0
    given = [h for h in (p.student, p.teacher) if h.grad_hidden and not h.hidden]
    return {
        "logits and what is made of them": total * (9 + 3 * gradient + 2 * int(p.hard)) * chunk * p.vocab,
        "top-k rows": 32 * total * chunk * (p.topk + 1) if p.topk else 0,
        "hidden rows": rows,
        "weights in float32": widened,
        "gradients in float32": sums,
        "gradients of logits": sum(LOSS_DTYPE_BYTES[h.dtype] * p.tokens * h.vocab for h in given),
        "vectors": total * (24 * p.tokens + 4 * p.vocab),
    }


@dataclass(frozen=True)
class JsdMosaicPlan:
    """How the 'mosaic_gpu' backend computes a call with heads."""

    way: str
    """"forward" if nothing needs a gradient.  Otherwise, how gradients are made: from logits' gradients of all tokens
    that are "kept" in 16 bits; "summed" in forward, in float32; or from logits that backward makes "again"."""
    chunk: int
    """Tokens of a chunk of forward."""
    columns: int = 0
    """Entries of the vocabulary of a chunk of backward, with "again"."""


def vocab_chunks(vocab: int, columns: int) -> tuple[int, int]:
    """How many chunks have this many entries, and how many entries are left for the last: 0, or enough for the
    kernels, which may be a few more than the others have."""
    whole, last = divmod(vocab, columns)
    return (whole - 1, columns + last) if whole and 0 < last < MOSAIC_TILE else (whole, last)


def mosaic_refusal(p: JsdProblem, platform: str) -> str | None:
    """Why the 'mosaic_gpu' backend can't serve the call, whatever the GPU, or None; `platform` is JAX's."""
    if platform != "gpu":
        return f"it runs on NVIDIA GPUs, not on {platform!r}"
    for who, h in (("student", p.student), ("teacher", p.teacher)):
        if h.dtype == "float64":
            return "it takes no float64; pass backend='xla', or 'auto'"
        if h.hidden and h.dtype != "bfloat16":
            return f"its products take bfloat16; the {who}'s are in {h.dtype}"
    if p.student.hidden and not p.teacher.hidden and p.teacher.grad_hidden:
        return "it gives no gradient to a linear student's teacher_logits; pass backend='xla'"
    if p.vocab % 8 or p.vocab < 128:
        return f"it needs V to be a multiple of 8 from 128 on; got V={p.vocab}"
    return None


# What cuBLAS works in.
WORKSPACE = 32 * MIB
# Tokens of a chunk that keeps an H100 busy; where sums are added to for each chunk it takes more.
MOSAIC_USEFUL = {"forward": 256, "kept": 512, "summed": 1024}
# Chunks of tokens are multiples of this, as cuBLAS's tiles are, and no chunk of the vocabulary has fewer entries.
MOSAIC_TILE = 128
# Entries of the vocabulary of a chunk, at least.
COLUMNS = 512
# How many operations of a product take as long as a byte that a kernel moves: on an H200 products did 761 TFLOP/s, and
# the kernel of the gradients moved 3.6 TB/s.
OPERATIONS = 200


def mosaic_scratch_parts(p: JsdProblem, c: JsdMosaicPlan) -> dict[str, int]:
    """Bytes that XLA allocates beyond arguments and results in a jitted step on the 'mosaic_gpu' backend, part by
    part."""
    vectors = {"vectors": 4 * (32 * p.tokens + 4 * p.vocab)}
    if p.topk:
        vectors["top-k rows"] = 32 * p.tokens * (p.topk + 1) + 64 * c.chunk * (p.topk + 1)
    if not p.layers:
        return vectors
    rows = up(p.tokens, c.chunk)
    columns = max(c.columns, vocab_chunks(p.vocab, c.columns)[1]) if c.columns else 0
    names = "logits", "logits' gradients of a chunk", "hidden rows", "hidden gradients in float32", "weight rows"
    forward, backward = (dict.fromkeys(names, 0) for _ in range(2))
    kept = sums = 0
    for h in (p.student, p.teacher)[: 1 if p.topk else 2]:
        # Rows of logits that exist are cut out, and then picked.
        forward["logits"] += (4 if h.hidden else LOSS_DTYPE_BYTES[h.dtype]) * c.chunk * p.vocab
        backward["logits"] += (4 if h.hidden else 2 * LOSS_DTYPE_BYTES[h.dtype]) * rows * columns
        forward["hidden rows"] += 2 * c.chunk * h.hidden
        backward["hidden rows"] += 2 * rows * h.hidden if columns else 0
        backward["weight rows"] += 2 * columns * h.hidden
        if not h.any_grad:
            continue
        if c.way == "summed":
            forward["logits' gradients of a chunk"] += 2 * c.chunk * p.vocab
            sums += 8 * rows * h.hidden if h.grad_hidden else 0
            sums += 8 * h.vocab * h.hidden if h.grad_weight else 0
            continue
        backward["hidden gradients in float32"] += 8 * rows * h.hidden if h.grad_hidden else 0
        if c.way == "kept":
            kept += 2 * rows * p.vocab
            backward["hidden rows"] += 4 * rows * h.hidden if h.grad_weight else 0
        else:
            backward["logits' gradients of a chunk"] += 2 * rows * columns
            backward["weight rows"] += 2 * columns * h.hidden if h.grad_weight else 0
    half = max((forward, backward), key=lambda x: sum(x.values()))
    return half | {"kept": kept, "gradients in float32": sums, "cuBLAS": WORKSPACE} | vectors


def _ways(p: JsdProblem) -> tuple[str, ...]:
    """How the call may be computed."""
    if not p.any_grad:
        return ("forward",)
    if not p.stash:  # forward doesn't know each token's factor
        return "kept", "again"
    # What needs no sums of the weight's size needs neither anything kept nor logits a second time.
    return ("kept", "summed", "again") if any(h.grad_weight for h in p.layers) else ("summed",)


def _mosaic_planner() -> Planner[JsdMosaicPlan]:
    """The plan that takes the least time, of products that are made again and of bytes that move between products."""

    def scratch(p: JsdProblem, c: JsdMosaicPlan) -> int:
        return sum(mosaic_scratch_parts(p, c).values())

    def made(p: JsdProblem, way: str, chunk: int, columns: int) -> JsdMosaicPlan:
        return JsdMosaicPlan(way, min(p.tokens, chunk), min(p.vocab, columns) if way == "again" else 0)

    def candidates(p: JsdProblem, budget: int) -> Iterator[JsdMosaicPlan]:
        most = -(-p.tokens // MOSAIC_TILE)
        counts = {*range(1, min(most, 64) + 1), *(most >> k for k in range(max(0, most.bit_length() - 6)))}
        chunks = [*{up(-(-p.tokens // count), MOSAIC_TILE) for count in counts}, SMALLEST]
        for way in _ways(p):
            # Backward's chunks are as large as fits beside the smallest of forward.
            columns = COLUMNS
            while way == "again" and columns < p.vocab and scratch(p, made(p, way, SMALLEST, 2 * columns)) <= budget:
                columns *= 2
            yield from (made(p, way, chunk, columns) for chunk in chunks)

    def cost(p: JsdProblem, c: JsdMosaicPlan) -> float:
        chunks, again = -(-p.tokens // c.chunk), -(-p.vocab // c.columns) if c.columns else 0
        moved = 0.0
        for h in p.layers:
            # The last chunk takes as long as the others, however few tokens are in it.
            weight, product = 2 * h.vocab * h.hidden, 2 * c.chunk * chunks * p.vocab * h.hidden / OPERATIONS
            # A product reads the weight for each chunk; half of that doesn't overlap with its operations.
            moved += max(product, weight * chunks) + weight / 2 * chunks
            if c.way == "summed":
                moved += (h.grad_hidden + 4 * h.grad_weight) * weight * chunks
            if again:
                moved += product + (2 + 12 * h.grad_hidden) * p.tokens * h.hidden * again
        return moved

    def useful(p: JsdProblem) -> int:
        def chunk(way: str) -> int:
            # An eighth of the tokens takes an eighth of the logits, and a little more.
            return max(MOSAIC_USEFUL[way], up(-(-p.tokens // 8), MOSAIC_TILE) if way == "forward" else 0)

        return min(scratch(p, made(p, way, chunk(way), 0)) for way in _ways(p) if way != "again")

    return Planner(
        mosaic_scratch_parts,
        lambda p, strategy, budget: candidates(p, budget),
        cost=cost,
        least=lambda p, strategy: min(scratch(p, made(p, way, SMALLEST, COLUMNS)) for way in _ways(p)),
        # Without logits that are made again: that takes 1.57 times as long on an H200.
        default=lambda p, strategy: default_scratch(logits_bytes(p), useful(p)),
        needs=lambda p, strategy: f"T={p.tokens}, V={p.vocab}: the smallest chunk needs",
    )


def _planner(parts: Callable[[JsdProblem, int], dict[str, int]]) -> Planner[int]:
    """The plan, which is a chunk's number of tokens: the fewest even chunks that fit."""

    def scratch(p: JsdProblem, tokens: int) -> int:
        return sum(parts(p, min(p.tokens, tokens)).values())

    def candidates(p: JsdProblem, strategy: str, budget: int) -> Iterator[int]:
        fits = largest(lambda chunk: scratch(p, chunk) <= budget, min(p.tokens, SMALLEST), p.tokens, 1)
        yield min(p.tokens, even_chunk(p.tokens, fits, 1))

    return Planner(
        parts,
        candidates,
        cost=lambda p, chunk: 0,
        least=lambda p, strategy: scratch(p, SMALLEST),
        default=lambda p, strategy: default_scratch(logits_bytes(p), scratch(p, USEFUL[p.device])),
        needs=lambda p, strategy: f"T={p.tokens}, V={p.vocab}: the smallest chunk needs",
    )


PLANNER, JAX_PLANNER = _planner(scratch_parts), _planner(jax_scratch_parts)
MOSAIC_PLANNER = _mosaic_planner()
plan, jax_plan, scratch_bytes = PLANNER.plan, JAX_PLANNER.plan, PLANNER.scratch_bytes
