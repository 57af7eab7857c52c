"""The launches of linear_jsd's own Triton kernels, and the walks over chunks: what runs when, and on what memory.

`forward` takes chunks of tokens: two products leave both models' logits (below each tile's largest), and one
kernel reads each token's row of both twice, first for the loss and the gradients' means, then for the gradients by the
logits.  These stay where `Exponentials` of linear_cross_entropy would, and from there on its launches do the rest:
`backward` makes hidden's and weight's gradients.  A token's factor (its weight, the upstream gradient) goes into the
rows of hidden for the weight's gradient and into the result's rows for hidden's.

Logits that are given are read where the tiles would be.  Nothing here waits for the device.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from onchip.vocab.triton.launches import (
    Exponentials,
    Run,
    Upstream,
    Vectors,
    bias_sums,
    compact,
    finish,
    gather,
    hidden_product,
    weight_product,
)
from onchip.vocab.triton.memory import up

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
    places: Exponentials | None  # of the logits' gradient, where that is kept or made
    grads: tuple[bool, bool, bool, bool]  # of hidden, weight, bias, logits


class LogitTiles(NamedTuple):
    """A chunk of one model's logits, as `logit_tiles` leaves it."""

    below: Tensor  # [tiles * tile_rows, VOCAB_TILE] float16, or float32 of float16 operands
    largest: Tensor  # [tile_rows, tiles] float32
    total: Tensor  # the same
    others: Tensor | None  # the same
    tile_rows: int

    @property
    def tiles(self) -> int:
        return self.largest.shape[1]

    @staticmethod
    def empty(run: Run, tiles: int, tokens: int, *, hard: bool) -> "LogitTiles":
        rows = up(tokens, TOKEN_TILE)
        weight = run.head.weight

        def make() -> Tensor:
            return weight.new_empty((rows, tiles), dtype=torch.float32)

        dtype = torch.float32 if weight.dtype == torch.float16 else torch.float16
        below = weight.new_empty((tiles * rows, VOCAB_TILE), dtype=dtype)
        return LogitTiles(below, make(), make(), make() if hard else None, rows)


@dataclass(frozen=True)
class Call:
    """One call of the op."""

    loss: Options
    tokens: int
    vocab: int
    student: Side
    teacher: Side
    vectors: Vectors
    target_logit: Tensor  # [T] float32
    stats: Tensor  # [STATS, T] float32

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.student, self.teacher

    @property
    def tiles(self) -> int:
        return -(-self.vocab // VOCAB_TILE)


# ---------------------------------------------------------------------------------------------------------- launches


def logits(
    call: Call, run: Run, rows: Tensor, out: LogitTiles, first: int, first_tile: int, tiles: int, *, sums: bool
) -> Launch:
    """Logits of the positions from `first` on, of which `rows` has the hidden states."""
    t = run.tiles["softmax_tiles"]
    parts = t.parts * out.below.element_size() // 2  # the same bytes in shared memory
    arguments = {
        "rows": run.operand(rows, t.rows, t.depth),
        **run.weight(VOCAB_TILE, t.depth),
        "bias": run.head.bias,
        "label": call.vectors.label[first:],
        "count": call.vectors.number,
        "below": run.operand(out.below, t.rows, VOCAB_TILE // parts),
        "largest": out.largest,
        "total": out.total,
        "others": out.others,
        "first": first,
        "first_tile": first_tile,
        "chunk_tiles": tiles,
        "tile_rows": out.tile_rows,
        "below_rows": len(out.below),
        "rows_stride": rows.stride(0),
        "C": len(rows),
        "H": run.hidden,
        "V": run.vocab,
        "inverse_temperature": 1 / call.loss.temperature,
        "BIAS": run.head.bias is not None,
        "HARD": out.others is not None,
        "SUMS": sums,
        "RAGGED": run.vocab % VOCAB_TILE > 0,
        "BLOCK_T": t.rows,
        **run.cut("softmax_tiles"),
        "PARTS": parts,
    }
    return Launch(kernels.logit_tiles, (run.programs,), arguments, t.warps, t.stages)


def divergence(
    call: Call,
    chunks: tuple[LogitTiles | None, LogitTiles | None],  # of the student's and the teacher's logits
    first: int,
    tokens: int,  # from position `first` on
    first_tile: int,
    tiles: int,
    *,
    loss: Tensor | None = None,  # [T] float32 out, by token: with it statistics are made, else used
    token_weight: Tensor | None = None,  # [T] float32
    row: Tensor | None = None,  # [T] float32, by position
    gradients: tuple[Tensor | None, Tensor | None] = (None, None),  # of logits that are given, [T, V'] out
) -> Launch:
    """Losses of some positions, and their logits' gradients for a side that has places or `gradients` for them."""
    by_token = all(x is None for x in chunks)
    arguments: dict[str, Any] = {}
    width = 2
    for who, side, chunk, gradient in zip(("student", "teacher"), call.sides, chunks, gradients, strict=True):
        source = side.logits if chunk is None else chunk.below
        assert source is not None
        width = max(width, min(4, source.element_size()))
        places = None if side.places is None or not _holds(side.places, first, row) else side.places
        into = gradient if places is None else places.matrix
        arguments |= {
            who: source,
            f"{who}_largest": None if chunk is None else chunk.largest,
            f"{who}_total": None if chunk is None else chunk.total,
            f"{who}_gradient": into,
            f"{who}_stride": source.stride(0),
            f"{who}_gradient_stride": 0 if into is None else into.stride(0),
            **{f"{who}_{k}": v for k, v in _places(places).items()},
            f"{who.upper()}_LOGITS": chunk is None,
            who.upper(): into is not None,
            # At the ends one of the gradients is a plain difference, s - t.
            f"{who.upper()}_MEAN_WANTED": any(side.grads) and call.loss.beta != ("student", "teacher").index(who),
            f"{who.upper()}_SCALED": side.rows is not None and side.rows.dtype == torch.float16,
        }
    some = next((x for x in chunks if x is not None), None)
    vectors = call.vectors
    arguments |= {
        "student_others": None if chunks[0] is None else chunks[0].others,
        "stats": call.stats,
        "loss": loss,
        "position": vectors.position,
        "order": vectors.order,
        "count": vectors.number,
        "label": vectors.label,
        "target_logit": call.target_logit,
        "token_weight": token_weight,
        "row": row,
        "first": first,
        "first_tile": first_tile,
        "tiles": tiles,
        "tile_rows": 0 if some is None else some.tile_rows,
        "T": call.tokens,
        "V": call.vocab,
        "inverse_temperature": 1 / call.loss.temperature,
        "beta": call.loss.beta,
        **{f"near{k}": x for k, x in enumerate(nearly_equal(call.loss.beta))},
        "soft_weight": call.loss.soft_factor,
        "hard_weight": call.loss.hard_weight,
        "MODE": {0.0: triton_rows.FORWARD_KL, 1.0: triton_rows.REVERSE_KL}.get(
            call.loss.beta, triton_rows.MIXTURE
        ).value,
        "EVEN": call.loss.beta == 0.5,
        "BY_TOKEN": by_token,
        "HARD": call.loss.hard_weight > 0,
        "SUMS": loss is not None,
        "ROW": row is not None,
        "TOKEN_WEIGHT": token_weight is not None,
        "TILES": _TILES,
        "PAD": TOKEN_TILE,
    }
    grid = (tokens if by_token else up(tokens, TOKEN_TILE),)
    return Launch(triton_rows.divergence_rows, grid, arguments, _WARPS, registers=_REGISTERS[width])


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


def _holds(places: Exponentials, first: int, row: Tensor | None) -> bool:
    """Whether gradients of the positions from `first` on have a place: what isn't kept is made with its factor."""
    return first < places.held or row is not None


_NOWHERE = ("stash", "stash_stride", "stash_tokens", "overflow", "overflow_tokens", "again", "again_tokens")


def _places(places: Exponentials | None) -> dict[str, int]:
    return dict.fromkeys(_NOWHERE, 0) if places is None else places.arguments(again=True)


def scale(run: Run, rows: Tensor, factor: Tensor, vectors: Vectors, held: int) -> Launch:
    arguments = {
        "rows": rows,
        "scale": factor,
        "count": vectors.number,
        "held": held,
        "H": run.hidden,
        "BLOCK": 1024,
    }
    return Launch(kernels.scale_positions, (run.tokens,), arguments)


# ------------------------------------------------------------------------------------------------------------- walks


def forward(
    call: Call,
    target: Tensor,  # [T] int64
    ignore_index: int,
    token_weight: Tensor | None,  # [T] float32
    chunk: int,
    held: int,
) -> Tensor:
    """The losses [T] float32, by token; fills in `call`'s vectors and statistics, rows, and gradients to be kept."""
    tokens, vectors = call.tokens, call.vectors
    loss = torch.zeros(tokens, dtype=torch.float32, device=target.device)
    if tokens == 0:
        return loss
    if call.student.run is None:
        divergence(call, (None, None), 0, tokens, 0, call.tiles, loss=loss, token_weight=token_weight).run()
        return loss
    compact(call.student.run, target, ignore_index, vectors).run()
    hard = call.loss.hard_weight > 0
    buffers = [
        None
        if side.run is None
        else LogitTiles.empty(side.run, call.tiles, min(chunk, tokens), hard=hard and side is call.student)
        for side in call.sides
    ]
    part = [_row_memory(side, min(chunk, tokens)) for side in call.sides]
    for side in call.sides:
        if side.run is not None and side.rows is not None:
            _gather(call, side, target, side.rows, 0)
    for first, size in (*_spans(0, min(held, tokens), chunk), *_spans(min(held, tokens), tokens, chunk)):
        for side, memory, out in zip(call.sides, part, buffers, strict=True):
            if side.run is None or out is None:
                continue
            if side.rows is None:
                assert memory is not None
                rows = memory[:size]
                _gather(call, side, target, rows, first)
            else:
                rows = side.rows[first : first + size]
            logits(call, side.run, rows, out, first, 0, call.tiles, sums=True).run()
        divergence(
            call, (buffers[0], buffers[1]), first, size, 0, call.tiles, loss=loss, token_weight=token_weight
        ).run()
    return loss


def backward(
    call: Call,
    target: Tensor,  # [T] int64
    row: Tensor,  # [T] float32, by position: factor of its gradients
    held: int,
    vocab_chunk: int,
    weight_chunk: int,
    *,
    grad_hidden: Sequence[Any],  # of both sides, None or [T, H] out; may share memory with `rows` of its side
    grad_weight: Sequence[Any],  # of both sides, None or [V, H] out
    grad_bias: Sequence[Any],  # of both sides, None or [V] float32 out
) -> None:
    """Fill in the gradients of hidden states, weights and biases."""
    tokens, vectors = call.tokens, call.vectors
    held = min(held, tokens)
    upstreams: list[Any] = [None, None]
    sums: list[Any] = [None, None]
    for k, side in enumerate(call.sides):
        if side.places is None or side.run is None or side.rows is None:
            continue
        upstreams[k] = _upstream(call, k, row, side.rows.dtype)
        if grad_hidden[k] is not None:
            sums[k] = torch.zeros((tokens, side.run.hidden), dtype=torch.float32, device=row.device)
        if held > 0:
            factor = upstreams[k].scale
            scale(side.run, side.rows, factor, vectors, held).run()
            if sums[k] is not None:
                # Before the weight's gradient takes the place of the logits'.
                hidden_product(side.run, side.places, vectors, factor, sums[k], False, 0, call.tiles).run()
    chunk_tiles, weight_tiles = vocab_chunk // VOCAB_TILE, weight_chunk // VOCAB_TILE
    again = _Again(call, target, held, min(chunk_tiles, call.tiles)) if held < tokens else None
    for first, count in _spans(0, call.tiles, chunk_tiles):
        if again is not None:
            again.fill(first, count, upstreams)
        for k, side in enumerate(call.sides):
            if upstreams[k] is None:
                continue
            assert side.run is not None
            assert side.rows is not None
            assert side.places is not None
            if again is not None and sums[k] is not None:
                hidden_product(side.run, side.places, vectors, None, sums[k], False, first, count).run()
            if grad_bias[k] is not None:
                bias_sums(side.run, side.places, vectors, upstreams[k], grad_bias[k], first, count).run()
            if grad_weight[k] is not None:
                for part in _spans(first, first + count, weight_tiles):
                    weight_product(
                        side.run, side.places, side.rows, vectors, grad_weight[k], upstreams[k].shrink, first, *part,
                        add=False,
                    ).run()  # fmt: skip
    for k, side in enumerate(call.sides):
        if sums[k] is not None and grad_hidden[k] is not None:
            assert side.run is not None
            finish(side.run, sums[k], vectors, upstreams[k], grad_hidden[k], 0, 0).run()


def _upstream(call: Call, side: int, row: Tensor, dtype: torch.dtype) -> Upstream:
    """The factors of a side's rows: of gradients that are made now (`row`) and of those that were kept (`scale`).

    What else the launches might read is not used by those that are run here.

    float16 can't hold a gradient of 1e-8: kept ones were scaled to below 2^14, and here the largest factor of one is
    made 1, so that the others stay below that too.
    """
    label = call.vectors.label
    if dtype != torch.float16:
        return Upstream(lse=row, log_prob=row, row=row, scale=row, at_target=row, shrink=None, label=label)
    kept = (triton_rows.STUDENT_SHRINK, triton_rows.TEACHER_SHRINK)[side].value
    factor = row * call.stats[kept]
    there = torch.arange(call.tokens, device=row.device) < call.vectors.number
    largest = torch.where(there, factor.abs().nan_to_num(nan=0), 0).amax()
    grow = torch.where(largest > 0, 1 / largest, 1)
    return Upstream(
        lse=row, log_prob=row, row=row * grow, scale=factor * grow, at_target=row, shrink=1 / grow, label=label
    )


class _Again:
    """Logits and their gradients computed again, for the positions from `held` on and chunks of the vocabulary."""

    def __init__(self, call: Call, target: Tensor, held: int, tiles: int) -> None:
        self.call, self.held = call, held
        tokens = call.tokens - held
        self.rows: list[Tensor | None] = []
        self.buffers: list[LogitTiles | None] = []
        for side in call.sides:
            rows = None if side.rows is None else side.rows[held:]
            if side.run is not None and rows is None:
                rows = _row_memory(side, tokens)
                assert rows is not None
                _gather(call, side, target, rows, held)
            self.rows.append(rows)
            self.buffers.append(None if side.run is None else LogitTiles.empty(side.run, tiles, tokens, hard=False))

    def fill(self, first_tile: int, tiles: int, upstreams: list[Any]) -> None:
        call = self.call
        buffers = [
            None if x is None else x._replace(largest=x.largest.view(-1)[: x.tile_rows * tiles].view(-1, tiles))
            for x in self.buffers
        ]
        for side, rows, out in zip(call.sides, self.rows, buffers, strict=True):
            if side.run is not None and rows is not None and out is not None:
                logits(call, side.run, rows, out, self.held, first_tile, tiles, sums=False).run()
        size = call.tokens - self.held
        for k, upstream in enumerate(upstreams):
            if upstream is not None:
                sides = [replace(x, places=x.places if i == k else None) for i, x in enumerate(call.sides)]
                part = replace(call, student=sides[0], teacher=sides[1])
                divergence(part, (buffers[0], buffers[1]), self.held, size, first_tile, tiles, row=upstream.row).run()


def gradients_of_logits(call: Call, row: Tensor, out: tuple[Tensor | None, Tensor | None]) -> None:
    """Fill in the gradients of logits that were given, [T, V'] by token."""
    if call.tokens:
        divergence(call, (None, None), 0, call.tokens, 0, call.tiles, row=row, gradients=out).run()


def _spans(first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
    """First and number of each chunk."""
    return ((start, min(size, last - start)) for start in range(first, last, max(1, size)))


def _row_memory(side: Side, tokens: int) -> Tensor | None:
    """Memory for a chunk's hidden states, of a side that keeps none."""
    if side.run is None or side.rows is not None:
        return None
    weight = side.run.head.weight
    return weight.new_empty((tokens, weight.shape[1]))


def _gather(call: Call, side: Side, target: Tensor, rows: Tensor, first: int) -> None:
    assert side.run is not None
    assert side.hidden is not None
    into = call.target_logit if side is call.student else torch.empty_like(call.target_logit)
    gather(side.run, side.hidden, target, 1.0, call.vectors, into, rows, first).run()
