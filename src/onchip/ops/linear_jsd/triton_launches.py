"""The launches of linear_jsd's own Triton kernels, and the walks over chunks: what runs when, and on what memory.

`forward` takes chunks of tokens: two products leave both models' logits (below each tile's largest), and one
kernel reads each token's row of both twice, first for the loss and the gradients' means, then for the gradients by the
logits.  These stay in a `LogitBuffer`, and from there on the products of vocab/triton do the rest: `backward` makes
hidden's and weight's gradients.  A token's factor (its weight, the upstream gradient) goes into the rows of hidden for
the weight's gradient and into the result's rows for hidden's.

Logits that are given are read where the tiles would be.  Nothing here waits for the device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onchip.kernels.triton.launch import Launch
from onchip.ops.linear_jsd import triton_kernels as kernels
from onchip.ops.linear_jsd import triton_rows
from onchip.ops.linear_jsd.spec import Options
from onchip.ops.linear_jsd.triton_memory import TOKEN_TILE, VOCAB_TILE
from onchip.ops.linear_jsd.triton_rows import Gradient, Logits
from onchip.vocab.triton.launches import LogitBuffer, Picked, Run, Vectors, compact, finish, gather
from onchip.vocab.triton.memory import up
from onchip.vocab.triton.walks import Products, chunks, float16_scale

# Tiles of a token's row that a program takes at a time, and its warps.
_TILES, _WARPS = 8, 8
# Registers of a thread, by the bytes of a number that it reads: of 48 five programs fit a multiprocessor, so that the
# tokens of a chunk are all at work at once; numbers of 4 bytes take 64.
_REGISTERS = {2: 48, 4: 64}


@dataclass(frozen=True)
class Side:
    """One model: its last layer, or its logits."""

    run: Run | None  # the last layer, over the entries that count
    hidden: Tensor | None  # [T, H], any strides
    logits: Tensor | None  # [T, V'], columns side by side
    rows: Tensor | None  # [T, H] memory for hidden by position, where there will be gradients
    buffer: LogitBuffer | None  # of the logits' gradient, where that is kept or recomputed
    grads: tuple[bool, bool, bool, bool]  # of hidden, weight, bias, logits


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
        weight = run.head.weight

        def make() -> Tensor:
            return weight.new_empty((rows, tiles), dtype=torch.float32)

        dtype = torch.float32 if weight.dtype == torch.float16 else torch.float16
        below = weight.new_empty((tiles * rows, VOCAB_TILE), dtype=dtype)
        return LogitTiles(below, make(), make() if sums else None, make() if hard else None, rows)


@dataclass(frozen=True)
class Call:
    """One call of the op."""

    loss: Options
    tokens: int
    vocab: int
    student: Side
    teacher: Side
    vectors: Vectors
    target: Tensor  # [T] int64
    ignore_index: int
    target_logit: Tensor  # [T] float32
    stats: Tensor  # [STATS, T] float32

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.student, self.teacher

    @property
    def tiles(self) -> int:
        return -(-self.vocab // VOCAB_TILE)


# ---------------------------------------------------------------------------------------------------------- launches


def logits(call: Call, run: Run, rows: Tensor, out: LogitTiles, first: int, first_tile: int, tiles: int) -> Launch:
    """Logits of the positions from `first` on, of which `rows` has the hidden states."""
    t = run.tiles["softmax_tiles"]
    parts = t.parts * out.below.element_size() // 2  # the same bytes in shared memory
    arguments = {
        **out._asdict(),
        **run.weight(VOCAB_TILE, t.depth),
        "rows": run.operand(rows, t.rows, t.depth),
        "rows_stride": rows.stride(0),
        "C": len(rows),
        "label": call.vectors.label[first:],
        "below": run.operand(out.below, t.rows, VOCAB_TILE // parts),
        "below_rows": len(out.below),
        "first": first,
        "first_tile": first_tile,
        "chunk_tiles": tiles,
        "inverse_temperature": 1 / call.loss.temperature,
        "BLOCK_T": t.rows,
        "PARTS": parts,
    }
    return run.product("softmax_tiles", kernels.logit_tiles, call.vectors, arguments)


def divergence(
    call: Call,
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
    by_token = all(x is None for x in tiles_of)
    beta = call.loss.beta
    arguments: dict[str, Any] = {}
    width, tile_rows = 2, 0
    for k, (who, side) in enumerate(zip(("student", "teacher"), call.sides, strict=True)):
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
            f"{who.upper()}_SCALED": side.rows is not None and side.rows.dtype == torch.float16,
        }
    arguments |= {
        **call.vectors.known,
        "stats": call.stats,
        "loss": loss,
        "target_logit": call.target_logit,
        "token_weight": token_weight,
        "row_scale": row_scale,
        "first": first,
        "first_tile": first_tile,
        "tiles": tiles,
        "tile_rows": tile_rows,
        "T": call.tokens,
        "V": call.vocab,
        "inverse_temperature": 1 / call.loss.temperature,
        "beta": beta,
        "near": tuple(nearly_equal(beta)),
        "soft_weight": call.loss.soft_factor,
        "hard_weight": call.loss.hard_weight,
        "MODE": {0.0: triton_rows.FORWARD_KL, 1.0: triton_rows.REVERSE_KL}.get(beta, triton_rows.MIXTURE).value,
        "EVEN": beta == 0.5,
        "BY_TOKEN": by_token,
        "HARD": call.loss.hard_weight > 0,
        "TILES": _TILES,
        "PAD": TOKEN_TILE,
    }
    grid = (tokens if by_token else up(tokens, TOKEN_TILE),)
    return Launch.of(triton_rows.divergence_rows, grid, arguments, _WARPS, registers=_REGISTERS[width])


@lru_cache(maxsize=64)
def nearly_equal(beta: float) -> list[float]:
    """Coefficients c of a term of the loss where both models' probabilities, p and q, are nearly equal.

    With x = log2(q / p), |x| < NEAR, the term is log(2) p x^2 (c[0] + c[1] x + ...), 1e-6 off at most: p is the
    student's and q the teacher's, but for beta 0, where p is the teacher's.
    """
    near = triton_rows.NEAR.value

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


def forward(call: Call, token_weight: Tensor | None, chunk: int, kept: int) -> Tensor:
    """The losses [T] float32, by token; fills in `call`'s vectors and statistics, rows, and gradients to be kept."""
    tokens = call.tokens
    loss = torch.zeros(tokens, dtype=torch.float32, device=call.target.device)
    if tokens == 0:
        return loss
    made = {"loss": loss, "token_weight": token_weight}
    if call.student.run is None:
        divergence(call, (None, None), 0, tokens, 0, call.tiles, (None, None), **made).run()
        return loss
    compact(call.student.run, call.target, call.ignore_index, call.vectors).run()
    chunk = min(chunk, tokens)
    hard = (call.loss.hard_weight > 0, False)
    tiles_of = [
        None if side.run is None else LogitTiles.empty(side.run, call.tiles, chunk, sums=True, hard=hard[k])
        for k, side in enumerate(call.sides)
    ]
    memory = [s.rows if s.run is None or s.rows is not None else _row_memory(s.run, chunk) for s in call.sides]
    for side in call.sides:
        if side.rows is not None:
            _gather(call, side, side.rows, 0)
    for first, size in (*chunks(0, min(kept, tokens), chunk), *chunks(min(kept, tokens), tokens, chunk)):
        for side, rows, out in zip(call.sides, memory, tiles_of, strict=True):
            if side.run is None or rows is None or out is None:
                continue
            if side.rows is None:
                _gather(call, side, rows[:size], first)
            part = rows[:size] if side.rows is None else rows[first : first + size]
            logits(call, side.run, part, out, first, 0, call.tiles).run()
        into = [side.buffer if first < kept else None for side in call.sides]
        divergence(call, tiles_of, first, size, 0, call.tiles, into, **made).run()
    return loss


def backward(
    call: Call,
    row_scale: Tensor,  # [T] float32, by position: factor of its gradients
    kept: int,
    vocab_chunk: int,
    weight_chunk: int,
    *,
    grad_hidden: Sequence[Tensor | None],  # of both sides, [T, H] out; may share memory with `rows` of its side
    grad_weight: Sequence[Tensor | None],  # of both sides, [V, H] out
    grad_bias: Sequence[Tensor | None],  # of both sides, [V] float32 out
) -> None:
    """Fill in the gradients of hidden states, weights and biases."""
    tokens, vectors = call.tokens, call.vectors
    kept = min(kept, tokens)
    products: dict[int, Products] = {}
    row_scales = [row_scale, row_scale]
    for k, side in enumerate(call.sides):
        if side.run is None or side.rows is None or side.buffer is None:
            continue
        row_scales[k], product_scale, inverse = _scales(call, k, row_scale, side.rows.dtype)
        sums = None
        if grad_hidden[k] is not None:
            sums = torch.zeros((tokens, side.run.hidden), dtype=torch.float32, device=row_scale.device)
        products[k] = Products(
            side.run, vectors, side.buffer, side.rows, product_scale, inverse, sums, grad_weight[k], grad_bias[k],
            weight_chunk // VOCAB_TILE,
        )  # fmt: skip
        products[k].take_kept()
    chunk_tiles, left = vocab_chunk // VOCAB_TILE, tokens - kept
    rows: list[Tensor | None] = [None if side.rows is None else side.rows[kept:] for side in call.sides]
    tiles_of: list[LogitTiles | None] = [None, None]
    for k, side in enumerate(call.sides):
        if side.run is None or left == 0:
            continue
        tiles_of[k] = LogitTiles.empty(side.run, min(chunk_tiles, call.tiles), left, sums=False, hard=False)
        if rows[k] is None:
            rows[k] = memory = _row_memory(side.run, left)
            _gather(call, side, memory, kept)
    for first, count in chunks(0, call.tiles, chunk_tiles):
        part = [x and x._replace(largest=x.largest.view(-1)[: x.tile_rows * count].view(-1, count)) for x in tiles_of]
        for side, hidden, out in zip(call.sides, rows, part, strict=True):
            if side.run is not None and hidden is not None and out is not None:
                logits(call, side.run, hidden, out, kept, first, count).run()
        for k in products:
            if left > 0:
                into = [side.buffer if i == k else None for i, side in enumerate(call.sides)]
                divergence(call, part, kept, left, first, count, into, row_scale=row_scales[k]).run()
        for p in products.values():
            p.take_chunk(first, count)
    for k, p in products.items():
        to = grad_hidden[k]
        if p.sums is not None and to is not None:
            finish(p.run, p.sums, vectors, p.inverse_grad_scale, to).run()


def _scales(call: Call, side: int, row_scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """The factors of a side's rows of gradients that are made now and of those that were kept, and what undoes them.

    float16 can't hold a gradient of 1e-8: kept ones were scaled to below 2^14, and here the largest factor of one is
    made 1, so that the others stay below that too.
    """
    first = (triton_rows.STUDENT, triton_rows.TEACHER)[side].value
    kept = row_scale * call.stats[first + triton_rows.INVERSE_SCALE.value] if dtype == torch.float16 else row_scale
    grad_scale = float16_scale(kept, call.vectors, dtype, largest=1.0)
    if grad_scale is None:
        return row_scale, kept, None
    return row_scale * grad_scale, kept * grad_scale, 1 / grad_scale


def gradients_of_logits(call: Call, row_scale: Tensor, out: tuple[Tensor | None, Tensor | None]) -> None:
    """Fill in the gradients of logits that were given, [T, V'] by token."""
    if call.tokens:
        divergence(call, (None, None), 0, call.tokens, 0, call.tiles, out, row_scale=row_scale).run()


def _row_memory(run: Run, tokens: int) -> Tensor:
    """Memory for a chunk's hidden states, of a side that keeps none."""
    return run.head.weight.new_empty((tokens, run.hidden))


def _gather(call: Call, side: Side, rows: Tensor, first: int) -> None:
    assert side.run is not None
    assert side.hidden is not None
    into = call.target_logit if side is call.student else torch.empty_like(call.target_logit)
    picked, target = Picked(into, None, None), call.target[:, None]
    gather(side.run, side.hidden, target, call.ignore_index, 1.0, call.vectors, picked, rows, first).run()
