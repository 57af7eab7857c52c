"""linear_jsd's own Triton kernels: their launches, and the walks over chunks that say what runs when, on what memory.

`forward` takes chunks of tokens: two products leave both models' logits (below each tile's largest), and one
kernel reads each token's row of both twice, first for the loss and the gradients' means, then for the gradients by the
logits.  These stay in a `LogitBuffer`, and from there on the products of vocab/triton do the rest: `backward` makes
hidden's and weight's gradients.  A token's factor (its weight, the upstream gradient) goes into the rows of hidden for
the weight's gradient and into the result's rows for hidden's.

Logits that are given are read where the tiles would be.  Nothing here waits for the device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onchip.frontend.options import LossOptions
from onchip.frontend.torch_register import Wanted
from onchip.kernels.triton.launch import Launch
from onchip.ops.linear_jsd import triton_kernels as kernels
from onchip.ops.linear_jsd.torch_call import PARAMETERS, Call
from onchip.ops.linear_jsd.triton_kernels import Gradient, Logits
from onchip.ops.linear_jsd.triton_memory import JsdPlan, config_of
from onchip.ops.linear_jsd.triton_op import Left
from onchip.vocab.torch.call import Layer
from onchip.vocab.triton import setup
from onchip.vocab.triton.launches import LogitBuffer, Picked, Run, Vectors, gather
from onchip.vocab.triton.memory import TOKEN_TILE, VOCAB_TILE, TritonPlan, up
from onchip.vocab.triton.setup import Gradients, Saved
from onchip.vocab.triton.softmax import compact_tokens
from onchip.vocab.triton.walks import Products, chunks, float16_scale

# Tiles of a token's row that a program takes at a time, and its warps.
_TILES, _WARPS = 8, 8
# Registers of a thread, by the bytes of a number that it reads: of 48 five programs fit a multiprocessor, so that the
# tokens of a chunk are all at work at once; numbers of 4 bytes take 64.
_REGISTERS = {2: 48, 4: 64}


@dataclass(frozen=True)
class Side:
    """One model: its last layer, or its logits."""

    layer: Layer | None
    config: TritonPlan  # how the engine cuts the layer's gradients
    run: Run | None  # of the layer's entries that count
    logits: Tensor | None  # [T, V'], columns side by side
    grads: tuple[bool, ...]  # of hidden, weight, bias, logits

    @property
    def scaled(self) -> bool:
        """Whether gradients by the logits that are kept need a factor, for float16's range."""
        return self.layer is not None and any(self.grads) and self.layer.dtype == torch.float16

    @staticmethod
    def of(call: Call, plan: JsdPlan, who: int, vectors: Tensor) -> "Side":
        layer, logits, run = call.layer(who), call.models[who].logits, None
        if logits is not None:
            logits = logits.reshape(-1, logits.shape[-1])
            logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        if layer is not None:
            # The products are linear_cross_entropy's, and tiles that suit them there do here.
            bias = None if layer.bias is None else layer.bias[: call.size]
            counted = replace(layer, weight=layer.weight[: call.size], bias=bias)
            run = setup.make_run(counted, LossOptions(), vectors)
        return Side(layer, config_of(call.head(who), plan), run, logits, call.grads_of(who))


class LogitTiles(NamedTuple):
    """A chunk of one model's logits, as `logit_tiles` leaves it; None: what is recomputed needs no sums."""

    below: Tensor  # [tiles * tile_rows, VOCAB_TILE] float16, or float32 of float16 operands
    largest: Tensor  # [tile_rows, tiles] float32
    total: Tensor | None  # the same
    others: Tensor | None  # the same
    tile_rows: int

    @staticmethod
    def empty(run: Run, tiles: int, tokens: int, *, sums: bool, hard: bool) -> "LogitTiles":
        rows = up(tokens, TOKEN_TILE)
        weight = run.weight

        def make() -> Tensor:
            return weight.new_empty((rows, tiles), dtype=torch.float32)

        dtype = torch.float32 if weight.dtype == torch.float16 else torch.float16
        below = weight.new_empty((tiles * rows, VOCAB_TILE), dtype=dtype)
        return LogitTiles(below, make(), make() if sums else None, make() if hard else None, rows)


@dataclass(frozen=True)
class Pair:
    """Both models of a call, and what is known of its tokens."""

    call: Call
    sides: tuple[Side, Side]
    vectors: Vectors
    ids: Tensor  # [T, 1] int64: the targets
    ignore_index: int
    target_logit: Tensor  # [T] float32
    stats: Tensor  # [STATS, T] float32

    @staticmethod
    def of(call: Call, plan: JsdPlan, vectors: Tensor, stats: Tensor) -> "Pair":
        tokens, (target, ignore_index) = call.number, call.targets()
        ids = target.reshape(-1, 1).to(torch.int64).contiguous()
        target_logit = torch.empty(tokens, dtype=torch.float32, device=target.device)
        stats = stats.view(-1, tokens) if tokens else stats
        sides = Side.of(call, plan, 0, vectors), Side.of(call, plan, 1, vectors)
        return Pair(call, sides, Vectors.unpack(vectors, tokens), ids, ignore_index, target_logit, stats)

    @property
    def tiles(self) -> int:
        return -(-self.call.size // VOCAB_TILE)

    def number_tokens(self) -> None:
        """Number the tokens that are not ignored; of given logits find their labels, which `gather` does otherwise."""
        known = {"target": self.ids, "ignore_index": self.ignore_index, "T": self.call.number, "BLOCK": 4096}
        Launch(compact_tokens, (1,), {**self.vectors.known, **known}, warps=8).run()
        if self.sides[0].run is None:
            target = self.ids[self.vectors.order, 0]
            self.vectors.label.copy_(target.masked_fill((target < 0) | (target >= self.call.size), -1))

    def gather(self, who: int, rows: Tensor, first: int) -> None:
        """Put a model's hidden states of the positions from `first` on in `rows`."""
        side = self.sides[who]
        assert side.run is not None
        assert side.layer is not None
        hidden = side.layer.hidden.reshape(-1, side.run.hidden)
        picked = Picked(self.target_logit if who == 0 else torch.empty_like(self.target_logit), None, None)
        gather(side.run, hidden, self.ids, self.ignore_index, None, picked, rows, first).run()


# ---------------------------------------------------------------------------------------------------------- launches


def logits(pair: Pair, run: Run, rows: Tensor, out: LogitTiles, first: int, first_tile: int, tiles: int) -> Launch:
    """Logits of the positions from `first` on, of which `rows` has the hidden states."""
    t = run.tiles["softmax_tiles"]
    parts = t.parts * out.below.element_size() // 2  # the same bytes in shared memory
    arguments = {
        **out._asdict(),
        **run.weight_blocks(VOCAB_TILE, t.depth),
        "rows": run.operand(rows, t.rows, t.depth),
        "rows_stride": rows.stride(0),
        "C": len(rows),
        "label": pair.vectors.label[first:],
        "below": run.operand(out.below, t.rows, VOCAB_TILE // parts),
        "below_rows": len(out.below),
        "first": first,
        "first_tile": first_tile,
        "chunk_tiles": tiles,
        "inverse_temperature": 1 / pair.call.options.temperature,
        "BLOCK_T": t.rows,
        "PARTS": parts,
    }
    return run.product("softmax_tiles", kernels.logit_tiles, arguments)


def divergence(
    pair: Pair,
    tiles_of: Sequence[LogitTiles | None],  # of the student's and the teacher's logits
    first: int,
    tokens: int,  # from position `first` on
    first_tile: int,
    tiles: int,
    into: Sequence[LogitBuffer | Tensor | None],  # for both logits' gradients
    *,
    loss: Tensor | None = None,  # [T] float32 out, by token: with it statistics are made, else used
    token_weight: Tensor | None = None,  # [T] float32
    row_scale: Tensor | None = None,  # [T] float32, by position
) -> Launch:
    """Losses of some positions, and their logits' gradients."""
    options, beta = pair.call.options, pair.call.options.beta
    arguments: dict[str, Any] = {}
    width, tile_rows, pad = 2, 0, 1 if pair.sides[0].run is None else TOKEN_TILE
    for k, (who, side) in enumerate(zip(("student", "teacher"), pair.sides, strict=True)):
        made, to = tiles_of[k], into[k]
        numbers = side.logits if made is None else made.below
        assert numbers is not None
        width = max(width, min(4, numbers.element_size()))
        tile_rows = tile_rows if made is None else made.tile_rows
        sums = (None, None, None) if made is None else (made.largest, made.total, made.others)
        matrix = to.matrix if isinstance(to, LogitBuffer) else to
        arguments |= {
            who: Logits(numbers, numbers.stride(0), *sums),
            f"{who}_gradient": Gradient(
                matrix, 0 if matrix is None else matrix.stride(0), to.rows if isinstance(to, LogitBuffer) else None
            ),
            # At the ends one of the gradients is a plain difference, s - t.
            f"{who.upper()}_MEAN": any(side.grads) and beta != k,
            f"{who.upper()}_SCALED": side.scaled,
        }
    arguments |= {
        **pair.vectors.known,
        "stats": pair.stats,
        "loss": loss,
        "target_logit": pair.target_logit,
        "token_weight": token_weight,
        "row_scale": row_scale,
        "first": first,
        "first_tile": first_tile,
        "tiles": tiles,
        "tile_rows": tile_rows,
        "T": pair.call.number,
        "V": pair.call.size,
        "inverse_temperature": 1 / pair.call.options.temperature,
        "beta": beta,
        "near": tuple(nearly_equal(beta)),
        "soft_weight": options.soft_factor,
        "hard_weight": options.hard_weight,
        "MODE": {0.0: kernels.FORWARD_KL, 1.0: kernels.REVERSE_KL}.get(beta, kernels.MIXTURE).value,
        "EVEN": beta == 0.5,
        "HARD": options.hard_weight > 0,
        "TILES": _TILES,
        "PAD": pad,
    }
    grid = (up(tokens, pad),)
    return Launch(kernels.divergence_rows, grid, arguments, _WARPS, registers=_REGISTERS[width])


@lru_cache(maxsize=64)
def nearly_equal(beta: float) -> list[float]:
    """Coefficients c of a term of the loss where both models' probabilities, p and q, are nearly equal.

    With x = log2(q / p), |x| < NEAR, the term is log(2) p x^2 (c[0] + c[1] x + ...), 1e-6 off at most: p is the
    student's and q the teacher's, but for beta 0, where p is the teacher's.
    """
    near = kernels.NEAR.value

    def ratio(x: Any) -> Any:
        d = x * math.log(2)
        if beta in (0, 1):
            term = np.expm1(d) - d
        else:
            log_p = -np.log1p(beta * np.expm1(d))  # over the mixture
            term = (1 - beta) * log_p + beta * np.exp(d) * (log_p + d)
        return term / (math.log(2) * x**2)

    # Of an odd degree: the nodes keep away from 0.
    fit = np.polynomial.Chebyshev.interpolate(ratio, 5, domain=[-near, near])
    return [float(c) for c in fit.convert(kind=np.polynomial.Polynomial).coef]


# ------------------------------------------------------------------------------------------------------------- walks


def forward(call: Call, plan: JsdPlan, left: Left) -> Tensor:
    """The loss; fills in `left`."""
    pair = Pair.of(call, plan, left.vectors.zero_(), left.stats)
    loss = torch.zeros(call.number, dtype=torch.float32, device=call.first.device)
    if call.number:
        pair.number_tokens()
        made = {"loss": loss, "token_weight": setup.flat(call.token_weight)}
        _chunks_of_tokens(pair, plan, (left.student, left.teacher), made)
    if call.options.reduction == "none":
        return loss.view(call.shape)
    return loss.sum() / call.divisor(pair.vectors.number)


def _chunks_of_tokens(pair: Pair, plan: JsdPlan, saved: Sequence[Saved], made: Mapping[str, Tensor | None]) -> None:
    call, tokens = pair.call, pair.call.number
    chunk, kept = min(plan.token_chunk, tokens), min(plan.kept, tokens)
    heads: dict[int, tuple[Run, Tensor, LogitTiles]] = {}
    buffers: list[LogitBuffer | None] = [None, None]
    for who, side in enumerate(pair.sides):
        if side.run is not None and side.layer is not None:
            rows, buffers[who] = setup.rows_and_buffer(side.layer, side.config, saved[who])
            hard = call.options.hard_weight > 0 and who == 0
            heads[who] = side.run, rows, LogitTiles.empty(side.run, pair.tiles, chunk, sums=True, hard=hard)
    for first, size in (*chunks(0, kept, chunk), *chunks(kept, tokens, chunk)):
        for who, (run, rows, out) in heads.items():
            whole = len(rows) == tokens  # those of all chunks, for backward
            if first == 0 or not whole:
                pair.gather(who, rows if whole else rows[:size], first)
            logits(pair, run, rows[first : first + size] if whole else rows[:size], out, first, 0, pair.tiles).run()
        tiles_of = [heads[who][2] if who in heads else None for who in (0, 1)]
        into = buffers if first < kept else (None, None)
        divergence(pair, tiles_of, first, size, 0, pair.tiles, into, **made).run()


def backward(call: Call, plan: JsdPlan, left: Left, grad_loss: Tensor, wanted: Wanted) -> list[Tensor | None]:
    """The gradients that are wanted, but for those that `left` has the memory of: these are filled in there."""
    tokens, saved = call.number, (left.student, left.teacher)
    pair = Pair.of(call, plan, left.vectors.clone(), left.stats)  # launches write to some of the vectors
    row_scale = _row_scale(call, pair.vectors, grad_loss)
    made: list[Tensor | None] = [None] * len(PARAMETERS)
    if call.student.hidden is None:
        made[3::4] = [
            torch.zeros_like(x, memory_format=torch.contiguous_format) if x is not None and want else None
            for x, want in zip((call.student.logits, call.teacher.logits), wanted[3::4], strict=True)
        ]
        if tokens:
            into = [None if g is None else g.view(-1, g.shape[-1]) for g in made[3::4]]
            divergence(pair, (None, None), 0, tokens, 0, pair.tiles, into, row_scale=row_scale).run()
        return made
    parts = [wanted[4 * who : 4 * who + 3] for who in (0, 1)]  # of hidden, weight and bias
    grads = {
        who: setup.Gradients.of(side.layer, saved[who], parts[who])
        for who, side in enumerate(pair.sides)
        if side.layer is not None and any(parts[who])
    }
    if tokens:
        _chunks_of_vocabulary(pair, plan, row_scale, saved, grads)
    for who, of_side in grads.items():
        if of_side.weight is not None:
            of_side.weight[call.size :].zero_()  # padding
        layer = pair.sides[who].layer
        assert layer is not None
        made[4 * who : 4 * who + 3] = of_side.made(layer.dtypes[2])
    return made


def _row_scale(call: Call, vectors: Vectors, grad_loss: Tensor) -> Tensor:
    """The factor of each position's gradients."""
    weights = setup.flat(call.token_weight)
    row = torch.ones_like(vectors.order, dtype=torch.float32) if weights is None else weights[vectors.order]
    if call.options.reduction == "none":
        row = row * grad_loss.reshape(-1).float()[vectors.order]
    else:
        row = row * (grad_loss / call.divisor(vectors.number))
    return row.masked_fill(vectors.label < 0, float("nan"))


def _chunks_of_vocabulary(
    pair: Pair, plan: JsdPlan, row_scale: Tensor, saved: Sequence[Saved], grads: Mapping[int, Gradients]
) -> None:
    """Fill in the gradients of hidden states, weights and biases."""
    tokens, kept = pair.call.number, min(plan.kept, pair.call.number)
    left, chunk_tiles = tokens - kept, plan.vocab_chunk // VOCAB_TILE
    row_scales, products = {}, {}
    for who, to in grads.items():
        side = pair.sides[who]
        assert side.run is not None
        assert side.layer is not None
        row_scales[who], kept_scale, inverse = _scales(pair, who, row_scale, side.layer.dtype)
        products[who] = Products.of(side.run, side.layer, side.config, saved[who], to, kept_scale, inverse)
        products[who].take_kept()
    heads = {}
    for who, side in enumerate(pair.sides):
        if side.run is not None and left:
            if who in products:
                rows = products[who].rows[kept:]
            else:
                rows = side.run.weight.new_empty((left, side.run.hidden))
                pair.gather(who, rows, kept)
            tiles = min(chunk_tiles, pair.tiles)
            heads[who] = side.run, rows, LogitTiles.empty(side.run, tiles, left, sums=False, hard=False)
    for first, count in chunks(0, pair.tiles, chunk_tiles):
        tiles_of: list[LogitTiles | None] = [None, None]
        for who, (run, rows, out) in heads.items():
            largest = out.largest.view(-1)[: out.tile_rows * count].view(-1, count)
            tiles_of[who] = part = out._replace(largest=largest)
            logits(pair, run, rows, part, kept, first, count).run()
        for who, p in products.items():
            if left:
                into = [p.buffer if i == who else None for i in (0, 1)]
                divergence(pair, tiles_of, kept, left, first, count, into, row_scale=row_scales[who]).run()
        for p in products.values():
            p.take_chunk(first, count)
    for p in products.values():
        p.finish()


def _scales(pair: Pair, who: int, row_scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """The factors of a side's rows of gradients that are made now and of those that were kept, and what undoes them.

    float16 can't hold a gradient of 1e-8: kept ones were scaled to below 2^14, and here the largest factor of one is
    made 1, so that the others stay below that too.
    """
    first = (kernels.STUDENT, kernels.TEACHER)[who].value
    kept = row_scale * pair.stats[first + kernels.INVERSE_SCALE.value] if dtype == torch.float16 else row_scale
    grad_scale = float16_scale(kept, pair.vectors, dtype, largest=1.0)
    if grad_scale is None:
        return row_scale, kept, None
    return row_scale * grad_scale, kept * grad_scale, 1 / grad_scale
