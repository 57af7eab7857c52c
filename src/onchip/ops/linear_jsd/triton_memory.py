"""How the Triton backend cuts a problem: memory formulas, a cost model, and the choice of a plan.  No framework.

docs/internals/linear_jsd.md says what is kept where.  If a token's logits gradient fits neither in the memory of the
weight's gradient nor in scratch, backward computes its logits again, in chunks of the vocabulary.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from onchip.core.sizes import DTYPE_BYTES, MIB, up
from onchip.ops.linear_jsd.memory import Head, JsdProblem, logits_bytes
from onchip.vocab import chunks
from onchip.vocab.chunks import Fastest, Planner, largest_within
from onchip.vocab.triton import memory as triton_memory
from onchip.vocab.triton.costs import RATES, Rates
from onchip.vocab.triton.search import SLACK, in_whole_tiles
from onchip.vocab.triton.tiling import TOKEN_TILE, VOCAB_TILE, evenness

# Tokens, and tiles of the vocabulary, of a chunk that keeps the device busy.
USEFUL_TOKENS, USEFUL_TILES = 256, 16
# As many launches as ranks take for a chunk to exchange numbers, which are PyTorch's operations.
SHARD_LAUNCHES = 40
# float32 numbers that forward leaves for each token; triton_kernels.py names them.
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
    """One model's plan, as the engine takes it: it says how many `kept` tokens are in its weight gradient's memory."""
    in_gradient = min(c.kept, triton_memory.capacity(head))
    return triton_memory.TritonPlan(c.token_chunk, c.vocab_chunk, c.weight_chunk, in_gradient, c.kept - in_gradient)


def block_bytes(size: int) -> int:
    """Bytes that PyTorch's allocator takes for `size`: from 10 MiB on a block of its own, in multiples of 2 MiB; it
    uses the block's rest for other tensors if that is more than 1 MiB.
    """
    if size < 10 * MIB:
        return size
    beyond = -size % (2 * MIB)
    return size + beyond if beyond <= MIB else size


class JsdSizes:
    """Bytes that plans of a problem take, part by part."""

    def __init__(self, p: JsdProblem) -> None:
        self.problem, self.tokens, self.rows = p, p.tokens, up(p.tokens, TOKEN_TILE)
        self.columns, self.any_grad = up(p.vocab, VOCAB_TILE), p.any_grad
        self.casts = self.hidden_rows = self.sums = 0
        self.vectors = (160 + 48 * p.topk) * p.tokens + MIB // 64
        # Of a token in a chunk: what PyTorch's operations make of a top-k.
        self.numbers = 80 * p.topk if p.sharded else 0
        # For each model: bytes of a logit in forward, of a logit's gradient, and, without gradients, of a row of hidden
        # states.
        self.layers: list[tuple[int, int, int]] = []
        self.kept: list[tuple[int, int]] = []  # bytes of a token's gradient, and tokens that the weight's memory holds
        for h in p.layers:
            element, gradients = DTYPE_BYTES[h.dtype], h.any_grad
            self.casts += block_bytes(element * h.vocab * h.hidden) if h.weight_dtype != h.dtype else 0
            distance = 4 if h.dtype == "float16" else 2
            self.layers.append((distance, element * gradients, 0 if gradients else element * h.hidden))
            if gradients:
                self.kept.append((element * up(h.vocab, VOCAB_TILE), triton_memory.capacity(h)))
                # For a shard, hidden's gradient is elsewhere, and in float32: it is added up over the ranks.
                in_place = h.grad_hidden and not p.sharded
                self.hidden_rows += 0 if in_place else block_bytes(element * p.tokens * h.hidden)
                self.sums += (1 + p.sharded) * block_bytes(4 * p.tokens * h.hidden) if h.grad_hidden else 0
                self.sums += 4 * h.vocab if h.grad_bias else 0
        tiles = self.columns // VOCAB_TILE
        # Least bytes of a token: in a chunk of logits; where it is recomputed, and for each column of that; where its
        # gradient is kept, beyond what the weights' memory holds.
        self.of_token = sum(distance * self.columns + 12 * tiles + row for distance, _, row in self.layers)
        self.of_token += self.numbers
        self.again_row = sum(row for *_, row in self.layers)
        self.again_column = sum(distance + element for distance, element, _ in self.layers)
        self.of_kept, self.held = (
            sum(each for each, _ in self.kept),
            sum(each * capacity for each, capacity in self.kept),
        )
        self.capacity = max((capacity for _, capacity in self.kept), default=0)

    def beyond(self, kept: int, weight_chunk: int) -> int:
        """Bytes that the memories of the weights' gradients need beyond the gradients themselves."""
        more = 0
        for h in self.problem.layers:
            if h.grad_weight:
                row = DTYPE_BYTES[h.weight_dtype] * h.hidden
                # Each chunk of the gradient overwrites the previous chunk's inputs while it reads its own.
                rows = up(h.vocab, VOCAB_TILE) + weight_chunk if min(kept, triton_memory.capacity(h)) else h.vocab
                more += block_bytes(row * rows) - row * h.vocab
        return more

    def in_scratch(self, kept: int) -> int:
        """Bytes of the logits' gradients that are kept in scratch."""
        size = 0
        for each, capacity in self.kept:
            if kept > capacity:
                size += block_bytes(each * (kept - capacity))
        return size

    def forward(self, token_chunk: int) -> int:
        """Bytes of a chunk's logits."""
        chunk = up(min(token_chunk, self.tokens), TOKEN_TILE)
        size = self.numbers * chunk
        for distance, _, row in self.layers:
            size += block_bytes(distance * chunk * self.columns) + 12 * chunk * (self.columns // VOCAB_TILE)
            size += block_bytes(row * chunk)
        return size

    def backward(self, kept: int, vocab_chunk: int) -> int:
        """Bytes of sums, and of what backward computes again."""
        again, size = self.rows - kept, self.sums
        if again <= 0 or not self.any_grad:
            return size
        for distance, element, row in self.layers:
            size += block_bytes(distance * again * vocab_chunk) + 12 * again * (vocab_chunk // VOCAB_TILE)
            size += block_bytes(element * again * vocab_chunk) + block_bytes(row * again)
        return size

    def parts(self, c: JsdPlan) -> dict[str, int]:
        """`scratch_parts`."""
        return {
            "weights in the products' dtype": self.casts,
            "copies of strided inputs": self.problem.copied,
            "vectors": self.vectors,
            "what ranks exchange": self.problem.sent,
            "hidden rows": self.hidden_rows,
            "one more chunk of the weight's gradient": self.beyond(c.kept, c.weight_chunk),
            "logits' gradient in scratch": self.in_scratch(c.kept),
            "logits of a chunk, or sums and what is recomputed in backward": max(
                self.forward(c.token_chunk), self.backward(c.kept, c.vocab_chunk)
            ),
        }


def scratch_parts(p: JsdProblem, c: JsdPlan) -> dict[str, int]:
    """Peak memory above inputs, loss and returned gradients, in bytes, part by part."""
    return sizes_of(p).parts(c)


@lru_cache(maxsize=64)
def sizes_of(p: JsdProblem) -> JsdSizes:
    return JsdSizes(p)


class JsdCosts:
    """The milliseconds that parts of a plan take."""

    def __init__(self, p: JsdProblem, rates: Rates) -> None:
        self.tokens, self.tiles, self.any_grad = p.tokens, up(p.vocab, VOCAB_TILE) // VOCAB_TILE, p.any_grad
        self.launch, self.programs = 1e-3 * rates.launch, rates.programs
        self.chunk = self.launch * (SHARD_LAUNCHES if p.sharded else 5)  # of tokens, without its products
        products = [(h, 2e-9 * p.tokens * h.hidden * p.vocab / rates.product) for h in p.layers]
        self.layers, self.product = len(products), sum(product for _, product in products)
        self.weights = [(product, -(-h.hidden // 256)) for h, product in products if h.grad_weight]
        of_hidden = [product + 1e-9 * rates.add * p.tokens * h.hidden for h, product in products if h.grad_hidden]
        self.hidden = sum(of_hidden)

    def forward(self, token_chunk: int) -> float:
        """Time of all chunks of tokens."""
        size = max(1, min(token_chunk, self.tokens))
        number, last = divmod(self.tokens, size)
        time = self.chunk * (number + (last > 0))
        for tokens, times in (size, number), (last, int(last > 0)):
            rows = -(-tokens // TOKEN_TILE)
            each = self.product * rows * TOKEN_TILE / max(1, self.tokens)
            time += times * each * evenness(rows * self.tiles, self.programs)
        return time

    def again(self, kept: int, vocab_chunk: int) -> float:
        """Time of logits that are computed again."""
        again = 1 - min(1.0, kept / max(1, self.tokens)) if self.any_grad else 0.0
        if not again:
            return 0.0
        columns = min(vocab_chunk // VOCAB_TILE, self.tiles)
        cut = round(again * self.tokens) // TOKEN_TILE * columns
        return again * self.product * evenness(cut, self.programs) + self.again_launches(columns)

    def again_launches(self, tiles: int) -> float:
        """Time of their launches, with this many tiles of the vocabulary at a time."""
        return 3 * self.launch * self.layers * -(-self.tiles // tiles)

    def weight(self, weight_chunk: int) -> float:
        """Time of the weights' gradients."""
        time = 0.0
        for product, blocks in self.weights:
            part = min(weight_chunk // VOCAB_TILE, self.tiles)
            cut = part * VOCAB_TILE // TOKEN_TILE * blocks
            time += product * evenness(cut, self.programs) + self.launch * -(-self.tiles // part)
        return time


def predict(p: JsdProblem, c: JsdPlan, rates: Rates = RATES["h100"]) -> float:
    """Milliseconds of forward, and of backward where gradients are wanted."""
    costs = JsdCosts(p, rates)
    time = costs.forward(c.token_chunk) + costs.again(c.kept, c.vocab_chunk) + costs.hidden
    return time + costs.weight(c.weight_chunk) if p.any_grad else time


def least_scratch(p: JsdProblem, strategy: str = "", tokens: int = TOKEN_TILE, tiles: int = 1) -> int:
    """Bytes of scratch for chunks of this many tokens and tiles of the vocabulary; by default the least of all."""
    return scratch_bytes(p, _config(p, 0, tokens, tiles, tiles))


def _in_whole_tiles(p: JsdProblem) -> JsdProblem:
    """The same, with so many tokens; what ranks of a shard send is for so many as there are."""
    student = in_whole_tiles(p.student)
    if student is p.student or p.sharded or not p.any_grad:
        return p
    return replace(p, student=student, teacher=in_whole_tiles(p.teacher))


def default_scratch(p: JsdProblem, strategy: str = "") -> int:
    """256 MiB or an eighth of both models' float32 logits, whichever is more, and at least what useful chunks need."""
    p = _in_whole_tiles(p)
    useful = least_scratch(p, strategy, USEFUL_TOKENS, USEFUL_TILES)
    return chunks.default_scratch(logits_bytes(p), useful)


def _config(p: JsdProblem, kept: int, tokens: int, vocab_tiles: int, weight_tiles: int) -> JsdPlan:
    tiles = up(p.vocab, VOCAB_TILE) // VOCAB_TILE
    if not p.any_grad:
        return JsdPlan(min(p.tokens, tokens))
    if kept >= p.tokens:
        vocab_tiles = tiles
    vocab_tiles = min(vocab_tiles, tiles)
    return JsdPlan(min(p.tokens, tokens), kept, vocab_tiles * VOCAB_TILE, min(weight_tiles, vocab_tiles) * VOCAB_TILE)


class JsdSearch(Fastest[tuple[int, int, int, int]]):
    """The plans, as arguments of `_config`, that fit a budget and may be among the fastest; plans that surely take
    longer are not looked at.
    """

    def __init__(self, p: JsdProblem, budget: int) -> None:
        super().__init__(SLACK)
        self.problem, self.sizes, self.costs = p, sizes_of(p), JsdCosts(p, RATES["h100"])
        self.budget = budget - self.sizes.casts - p.copied - self.sizes.vectors - self.sizes.hidden_rows - p.sent
        self.rows, self.tiles = self.sizes.rows, self.costs.tiles
        self._beyond: dict[tuple[bool, int], int] = {}
        of_tokens = {min(self.rows, USEFUL_TOKENS), TOKEN_TILE}
        self.beside = {self.sizes.forward(tokens) for tokens in of_tokens}
        # The room for chunks of tokens beyond which more room is better used for keeping tokens.
        worth = self.costs.chunk * self.sizes.of_token * self.sizes.of_kept / max(1e-9, self.costs.product)
        self.worth = max(1.0, p.tokens * math.sqrt(worth))
        # The least time: that of one chunk of tokens, with tiles that fill whole waves.
        self.floor = self.costs.chunk + self.costs.product + self.costs.hidden

    def beyond(self, kept: int, weight: int) -> int:
        """`JsdSizes.beyond`, which depends only on whether any tokens are kept."""
        key = kept > 0, weight
        if key not in self._beyond:
            self._beyond[key] = self.sizes.beyond(kept, weight * VOCAB_TILE)
        return self._beyond[key]

    def chunks(self, kept: int, vocab: int, weight: int) -> None:
        """Try the least number of chunks of tokens, and slightly larger ones."""
        sizes, rows = self.sizes, self.rows
        fixed = self.beyond(kept, weight) + sizes.in_scratch(kept)
        backward, room = sizes.backward(kept, vocab * VOCAB_TILE), self.budget - fixed
        if max(backward, min(rows, TOKEN_TILE) * sizes.of_token) > room:
            return
        most = min(rows, room // sizes.of_token // TOKEN_TILE * TOKEN_TILE)
        most = largest_within(sizes.forward, room, TOKEN_TILE, most, TOKEN_TILE)
        fewest = max(1, -(-rows // most))
        tried = {most} | {up(-(-self.problem.tokens // n), TOKEN_TILE) for n in range(fewest, fewest + 3)}
        time = self.costs.hidden
        if self.problem.any_grad:
            time += self.costs.again(kept, vocab * VOCAB_TILE) + self.costs.weight(weight * VOCAB_TILE)
        for tokens in sorted(size for size in tried if size <= most):
            cost = time + self.costs.forward(tokens)
            if cost <= self.bound and (forward := sizes.forward(tokens)) <= room:
                order = fixed + max(forward, backward), round(cost, 9), kept, -min(self.problem.tokens, tokens)
                self.add(cost, order, (kept, tokens, vocab, weight))

    def plan(self) -> JsdPlan | None:
        """The best."""
        best = self.best()
        return None if best is None else _config(self.problem, *best)

    def kept(self, weight: int) -> list[int]:
        """How many tokens can be kept beside a useful chunk of tokens, or the smallest, leaving aside recomputing."""
        sizes, made = self.sizes, []
        for beside in self.beside:
            room = self.budget - self.beyond(self.rows, weight) - beside
            most = max(0, min(self.rows, (room + sizes.held) // max(1, sizes.of_kept) // TOKEN_TILE * TOKEN_TILE))
            made.append(largest_within(sizes.in_scratch, room, 0, most, TOKEN_TILE))
        return made

    def most_kept(self, vocab: int, weight: int, kept: list[int]) -> float:
        """A bound on the tokens that can be kept while the others are recomputed; below 0 if nothing fits."""
        sizes, columns, most = self.sizes, vocab * VOCAB_TILE, min(max(kept), self.rows - TOKEN_TILE)
        again = sizes.again_column * columns + sizes.again_row
        room = self.budget - self.beyond(self.rows, weight) - sizes.sums - self.rows * again
        if again >= sizes.of_kept:  # the more are kept the better
            return most if room + sizes.held + most * (again - sizes.of_kept) >= 0 else -1.0
        return min(most, (room + sizes.held) / (sizes.of_kept - again))

    def some_bound(self, vocab: int, weight: int, most: float) -> float:
        """A bound on the time for recomputing and for chunks of tokens, in any plan that keeps at most this many
        tokens.

        A token that is kept isn't recomputed, but makes chunks of tokens smaller: up to a number that is worth it.
        """
        costs, tokens, each = self.costs, max(1, self.problem.tokens), max(1, self.sizes.of_kept)
        room = self.budget - self.beyond(self.rows, weight) + self.sizes.held
        left = max(room - each * most, self.worth)
        again = max(0.0, 1 - (room - left) / (each * tokens))
        more = costs.chunk * max(0.0, tokens * self.sizes.of_token / left - 1)
        return again * costs.product + more + costs.again_launches(vocab)

    def keep(self, vocab: int, weight: int, time: float, kept: list[int]) -> None:
        """Try keeping no tokens, and as many as fit."""
        sizes, columns, before = self.sizes, vocab * VOCAB_TILE, self.rows
        room = self.budget - self.beyond(self.rows, weight)

        def backward(kept: int) -> int:
            return sizes.in_scratch(kept) + sizes.backward(kept, columns)

        for most in sorted({*kept, 0}, reverse=True):
            if before < most:  # even fewer fit
                continue
            if most and backward(most) > room:
                # Tokens in the weight's memory reduce what backward takes, tokens in scratch add to it.
                least = min(most, sizes.capacity)
                most = largest_within(backward, room, least, most, TOKEN_TILE) if backward(least) <= room else 0
            if most < before and time + self.some_bound(vocab, weight, most) <= self.bound:
                self.chunks(most, vocab, weight)
            before = most


def _search(p: JsdProblem, strategy: str, budget: int) -> JsdPlan | None:
    made = JsdSearch(p, budget)
    if not p.any_grad:
        made.chunks(0, made.tiles, 1)
        return made.plan()
    tiles, costs, some, soonest = max(made.tiles, 1), made.costs, [], math.inf
    for weight in sorted(_weights(p, tiles)):
        time = made.floor + costs.weight(weight * VOCAB_TILE)
        if time <= min(made.bound, SLACK * soonest):  # smaller ones take less memory
            soonest = min(soonest, time)
            made.chunks(made.rows, tiles, weight)
            kept = made.kept(weight)
            vocabs = {max(weight, -(-tiles // n)) for n in (1, 2, 4, 8, 16, 32, 64, 128)} | {weight}
            most = {vocab: made.most_kept(vocab, weight, kept) for vocab in vocabs}
            some += [(time + made.some_bound(x, weight, n), x, weight, time, kept) for x, n in most.items() if n >= 0]
    for least, vocab, weight, time, kept in sorted(some):
        if least <= made.bound:
            made.keep(vocab, weight, time, kept)
    return made.plan()


def _weights(p: JsdProblem, tiles: int) -> set[int]:
    """Tiles of the vocabulary whose weight gradient fills whole waves, or nearly."""
    per_tile = min([2 * -(-h.hidden // 256) for h in p.layers if h.grad_weight] or [1])
    sizes = {n * RATES["h100"].programs // per_tile for n in (1, 2, 3, 4, 6, 8, 12, 16)} | {1, USEFUL_TILES}
    return {min(x, tiles) if x == USEFUL_TILES else x for x in sizes if x == USEFUL_TILES or 0 < x <= tiles}


PLANNER: Planner[JsdPlan] = Planner(
    scratch_parts,
    None,
    predict,
    least_scratch,
    default_scratch,
    needs=lambda p, strategy: f"T={p.tokens}, V={p.vocab} on backend 'triton', which needs",
    slack=SLACK,
    search=_search,
    whole=_in_whole_tiles,
)
plan, scratch_bytes = PLANNER.plan, PLANNER.scratch_bytes
