"""How the Triton backend cuts a problem: memory formulas, a cost model, and the choice of a plan.  No framework.

docs/internals/linear_jsd.md says what is kept where.  If a token's logits gradient fits neither in the memory of the
weight's gradient nor in scratch, backward computes its logits again, in chunks of the vocabulary.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from onchip.core.sizes import DTYPE_BYTES, MIB, up
from onchip.ops.linear_jsd.memory import Head, JsdProblem, logits_bytes
from onchip.vocab import chunks
from onchip.vocab.chunks import Fastest, Planner, largest_within
from onchip.vocab.triton import memory as triton_memory
from onchip.vocab.triton.costs import RATES, Rates
from onchip.vocab.triton.search import LEAST, SLACK, in_whole_tiles
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


def blocks_bytes(count: int, blocks: Mapping[int, int]) -> int:
    """`block_bytes` of `count` times so many bytes, for so many blocks of each; written out, as a search asks often."""
    total = 0
    for each, number in blocks.items():
        size = each * count
        beyond = -size % (2 * MIB) if size >= 10 * MIB else 0
        total += number * (size + beyond if beyond <= MIB else size)
    return total


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
        self.weights: list[tuple[int, int, int]] = []  # of a weight's gradient: bytes of a row, rows, and those tokens
        for h in p.layers:
            element, gradients = DTYPE_BYTES[h.dtype], h.any_grad
            self.casts += block_bytes(element * h.vocab * h.hidden) if h.weight_dtype != h.dtype else 0
            distance = 4 if h.dtype == "float16" else 2
            self.layers.append((distance, element * gradients, 0 if gradients else element * h.hidden))
            if gradients:
                capacity = triton_memory.capacity(h)
                self.kept.append((element * up(h.vocab, VOCAB_TILE), capacity))
                if h.grad_weight:
                    self.weights.append((DTYPE_BYTES[h.weight_dtype] * h.hidden, h.vocab, capacity))
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
        # Blocks, as `blocks_bytes` takes them: of a token in a chunk; of one that is recomputed, and of its columns.
        self.rows_again = Counter(row for *_, row in self.layers if row)
        self.of_chunk = Counter(x for distance, _, row in self.layers for x in (distance * self.columns, row) if x)
        self.columns_again = Counter(x for distance, element, _ in self.layers for x in (distance, element) if x)
        self.statistics = 12 * len(self.layers)  # bytes beside, of a token and tile of the vocabulary
        self.of_scratch = Counter(self.kept)
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
        for row, vocab, capacity in self.weights:
            # Each chunk of the gradient overwrites the previous chunk's inputs while it reads its own.
            rows = up(vocab, VOCAB_TILE) + weight_chunk if kept and capacity else vocab
            more += block_bytes(row * rows) - row * vocab
        return more

    def in_scratch(self, kept: int) -> int:
        """Bytes of the logits' gradients that are kept in scratch."""
        size = 0
        for (each, capacity), number in self.of_scratch.items():
            if kept > capacity:
                size += number * block_bytes(each * (kept - capacity))
        return size

    def forward(self, token_chunk: int) -> int:
        """Bytes of a chunk's logits."""
        chunk = up(min(token_chunk, self.tokens), TOKEN_TILE)
        each = self.numbers + self.statistics * (self.columns // VOCAB_TILE)
        return each * chunk + blocks_bytes(chunk, self.of_chunk)

    def backward(self, kept: int, vocab_chunk: int) -> int:
        """Bytes of sums, and of what backward computes again."""
        again = self.rows - kept
        if again <= 0 or not self.any_grad:
            return self.sums
        size = self.sums + self.statistics * (vocab_chunk // VOCAB_TILE) * again
        return size + blocks_bytes(again * vocab_chunk, self.columns_again) + blocks_bytes(again, self.rows_again)

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
        # Of all programs with a tile each.
        self.wave = self.product * TOKEN_TILE * self.programs / max(1, self.tokens) / max(1, self.tiles)

    def forward(self, token_chunk: int) -> float:
        """Time of all chunks of tokens."""
        size = max(1, min(token_chunk, self.tokens))
        number, last = divmod(self.tokens, size)
        waves = number * -(-(-(-size // TOKEN_TILE) * self.tiles) // self.programs)
        if last:
            number, waves = number + 1, waves - (-(-last // TOKEN_TILE) * self.tiles) // -self.programs
        return self.chunk * number + waves * self.wave

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


def nearly(size: Callable[[int], int], room: int, least: int, most: int) -> int:
    """`largest_within` of tiles of tokens, where `most` fits or is at most a tile or two too large, as a rule."""
    for tokens in range(most, max(least, most - 2 * TOKEN_TILE), -TOKEN_TILE):
        if size(tokens) <= room:
            return tokens
    return largest_within(size, room, least, max(least, most - 2 * TOKEN_TILE), TOKEN_TILE)


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
        self._kept: dict[int, list[int]] = {}
        self.again = self.costs.again_launches(max(1, self.tiles))  # of one chunk
        of_tokens = {min(self.rows, USEFUL_TOKENS), TOKEN_TILE}
        self.beside = sorted({self.sizes.forward(tokens) for tokens in of_tokens})
        # The room for chunks of tokens beyond which more room is better used for keeping tokens.
        self.each = max(1, self.sizes.of_kept)
        self.all_kept, self.all_rows = self.each * max(1, p.tokens), self.sizes.of_token * max(1, p.tokens)
        worth = self.costs.chunk * self.sizes.of_token * self.sizes.of_kept / max(1e-9, self.costs.product)
        self.worth = max(1.0, p.tokens * math.sqrt(worth))
        self.forward = self.costs.chunk + self.costs.product  # of one chunk of tokens, with tiles that fill whole waves

    def beyond(self, kept: int, weight: int) -> int:
        """`JsdSizes.beyond`, which depends only on whether any tokens are kept."""
        key = kept > 0, weight
        if key not in self._beyond:
            self._beyond[key] = self.sizes.beyond(kept, weight * VOCAB_TILE)
        return self._beyond[key]

    def chunks(self, kept: int, vocab: int, weight: int, time: float) -> None:
        """Try the least number of chunks of tokens, and slightly larger ones.  `time`: of the gradients' products."""
        sizes, rows, tokens = self.sizes, self.rows, self.problem.tokens
        time += self.costs.again(kept, vocab * VOCAB_TILE)
        if time + self.forward > LEAST * self.bound:
            return
        fixed = self.beyond(kept, weight) + sizes.in_scratch(kept)
        backward, room = sizes.backward(kept, vocab * VOCAB_TILE), self.budget - fixed
        if max(backward, min(rows, TOKEN_TILE) * sizes.of_token) > room:
            return
        most = min(rows, room // sizes.of_token // TOKEN_TILE * TOKEN_TILE)
        if time + self.forward + self.costs.chunk * (-(-rows // max(1, most)) - 1) > LEAST * self.bound:
            return
        most = nearly(sizes.forward, room, TOKEN_TILE, most)
        fewest = max(1, -(-rows // most))
        tried = {most} | {up(-(-tokens // n), TOKEN_TILE) for n in range(fewest, fewest + 3)}
        for size in sorted(size for size in tried if size <= most):
            cost = time + self.costs.forward(size)
            if cost <= self.bound and (forward := sizes.forward(size)) <= room:
                order = fixed + max(forward, backward), round(cost, 9), kept, -min(tokens, size)
                self.add(cost, order, (kept, size, vocab, weight))

    def plan(self) -> JsdPlan | None:
        """The best."""
        best = self.best()
        return None if best is None else _config(self.problem, *best)

    def some_bound(self, tiles: int, room: int, most: float) -> float:
        """A bound on the time for recomputing, in chunks of so many tiles, and for chunks of tokens, in any plan that
        keeps at most this many tokens.  `room`: bytes for both.

        A token that is kept isn't recomputed, but makes chunks of tokens smaller: up to a number that is worth it.
        """
        left = room - self.each * most
        if left < self.worth:
            left = self.worth
        time = self.again * -(-self.tiles // tiles)
        if left < self.all_rows:
            time += self.costs.chunk * (self.all_rows / left - 1)
        again = 1 - (room - left) / self.all_kept
        return time + again * self.costs.product if again > 0 else time

    def some(self, weight: int, time: float) -> list[tuple[Any, ...]]:
        """Chunks of the vocabulary beside which not all tokens are kept: what plans take at least, and what `keep`
        takes.
        """
        sizes, some = self.sizes, []
        room = self.budget - self.beyond(self.rows, weight)
        beside = room + sizes.held
        # How many tokens can be kept beside the smallest chunk of tokens, leaving aside recomputing.
        largest = max(0, min((beside - self.beside[0]) // self.each, self.rows - TOKEN_TILE))
        for vocab in _vocabs(max(self.tiles, 1), weight):
            again = sizes.again_column * vocab * VOCAB_TILE + sizes.again_row
            fits, more = beside - sizes.sums - self.rows * again, sizes.of_kept - again
            most = largest if more <= 0 else min(largest, fits // more)  # or the more are kept the better
            if most >= 0 and most * more <= fits:
                least = self.forward + time + self.some_bound(vocab, beside, most)
                some.append((least, vocab, weight, time, room, most))
        return some

    def kept(self, weight: int, room: int) -> list[int]:
        """How many tokens can be kept beside a useful chunk of tokens, or the smallest, leaving aside recomputing; and
        none: the most first.
        """
        if weight not in self._kept:
            sizes, made = self.sizes, {0}
            for beside in self.beside:
                most = max(0, min(self.rows, (room - beside + sizes.held) // self.each // TOKEN_TILE * TOKEN_TILE))
                made.add(nearly(sizes.in_scratch, room - beside, 0, most))
            self._kept[weight] = sorted(made, reverse=True)
        return self._kept[weight]

    def keep(self, vocab: int, weight: int, time: float, room: int, largest: int) -> None:
        """Try keeping no tokens, and as many as fit; of all but all tokens no more than the `largest` number do."""
        sizes, columns, before = self.sizes, vocab * VOCAB_TILE, self.rows
        # Whether a tile of tokens that is kept surely takes more than one that isn't.
        more = sizes.of_kept - sizes.again_column * columns - sizes.again_row
        grows = TOKEN_TILE * more > MIB * (len(sizes.kept) + 3 * len(sizes.layers))

        def backward(kept: int) -> int:
            return sizes.in_scratch(kept) + sizes.backward(kept, columns)

        for most in self.kept(weight, room):
            if before < most:  # even fewer fit
                continue
            if most and ((grows and largest < most < self.rows) or backward(most) > room):
                # Tokens in the weight's memory reduce what backward takes, tokens in scratch add to it.
                fewest = min(most, sizes.capacity)
                if grows:
                    most = nearly(backward, room, fewest, max(fewest, min(most, largest // TOKEN_TILE * TOKEN_TILE)))
                else:
                    most = largest_within(backward, room, fewest, most, TOKEN_TILE)
                if most == fewest and backward(fewest) > room:
                    most = 0
            least = self.forward + time + self.some_bound(vocab, room + sizes.held, most)
            if most < before and least <= self.bound:
                self.chunks(most, vocab, weight, time)
            before = most


def _search(p: JsdProblem, strategy: str, budget: int) -> JsdPlan | None:
    made = JsdSearch(p, budget)
    if not p.any_grad:
        made.chunks(0, made.tiles, 1, 0.0)
        return made.plan()
    tiles, some, soonest = max(made.tiles, 1), list[tuple[Any, ...]](), math.inf
    all_fit = made.rows * made.sizes.of_kept - made.sizes.held <= made.budget
    for weight in sorted(_weights(p, tiles)):
        time = made.costs.hidden + made.costs.weight(weight * VOCAB_TILE)
        if made.forward + time <= min(made.bound, SLACK * soonest):  # smaller ones take less memory
            soonest = min(soonest, made.forward + time)
            if all_fit:
                made.chunks(made.rows, tiles, weight, time)
            some += made.some(weight, time)
    for least, *rest in sorted(some):
        if least > made.bound:
            break
        made.keep(*rest)
    return made.plan()


@lru_cache(maxsize=1 << 10)
def _vocabs(tiles: int, weight: int) -> frozenset[int]:
    """Tiles of the vocabulary that are computed again at a time, beside a weight's gradient of so many."""
    return frozenset({max(weight, -(-tiles >> n)) for n in range(8)} | {weight})


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
