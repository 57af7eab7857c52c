"""The launches of linear_cross_entropy's Triton kernels, one function for each, and the memory that they work on.

In which order they run is in walks.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]

from onchip.kernels.triton.launch import Launch
from onchip.vocab.torch.tiles import Head
from onchip.vocab.triton import blocks as triton_blocks
from onchip.vocab.triton import gradients as triton_gradients
from onchip.vocab.triton import softmax as triton_softmax
from onchip.vocab.triton.memory import vector_elements

VOCAB_TILE: int = triton_blocks.VOCAB_TILE.value
# Rows that kernels take at a time, and to a multiple of which rows beyond the last token are zeroed.
TOKEN_TILE = 128
# A float16 stash holds exp(z - maximum) times this: without it, whatever is below 6e-8 would be lost.
_FLOAT16_EXPONENTIAL = 32768.0


@dataclass(frozen=True)
class Tiles:
    """How one of the product kernels is cut: the tile and the step of its product, and how it is compiled."""

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int
    parts: int
    """A result leaves in so many pieces, each staged in shared memory."""


class Vectors(NamedTuple):
    """What is known of each token; by position where not said otherwise."""

    packed: Tensor  # int32, all that follow in one
    position: Tensor  # [T] int32, by token: -1 for ignored ones
    order: Tensor  # [T] int32: the token
    label: Tensor  # [T] int32: -1 if out of range
    number: Tensor  # [1] int32: how many tokens are not ignored
    factor: Tensor  # [T] float32: of the logits, after softcap's tanh
    shift: Tensor  # [T] float32: what a tile's exponentials are stored relative to, unless they are far above it
    base: Tensor  # [T] float32: what they are relative to in the end

    @staticmethod
    def empty(tokens: int, device: torch.device) -> "Vectors":
        return Vectors.unpack(torch.zeros(vector_elements(tokens), dtype=torch.int32, device=device), tokens)

    @staticmethod
    def unpack(packed: Tensor, tokens: int) -> "Vectors":
        *per_token, count = packed.split([*[tokens] * 6, 1])
        position, order, label, *floats = per_token
        factor, shift, base = (x.view(torch.float32) for x in floats)
        return Vectors(packed, position, order, label, count, factor, shift, base)


@dataclass(frozen=True)
class Run:
    """One call: its head, its sizes, and how its kernels are cut."""

    head: Head
    tokens: int
    tiles: Mapping[str, Tiles]
    programs: int
    tma: bool

    @property
    def hidden(self) -> int:
        return self.head.weight.shape[1]

    @property
    def vocab(self) -> int:
        return self.head.vocab

    @property
    def vocab_tiles(self) -> int:
        return -(-self.vocab // VOCAB_TILE)

    @property
    def inner_scale(self) -> float:
        return 1.0 if self.head.softcap is None else self.head.logit_scale / self.head.softcap

    @property
    def outer_scale(self) -> float:
        return self.head.logit_scale if self.head.softcap is None else self.head.softcap

    @property
    def exponential_scale(self) -> float:
        return _FLOAT16_EXPONENTIAL if self.head.weight.dtype == torch.float16 else 1.0

    def operand(self, x: Tensor, rows: int, columns: int) -> Any:
        """A matrix as a kernel takes it: a descriptor of blocks [rows, columns], or the tensor for its pointer."""
        if not self.tma:
            return x
        if x.shape[0] == 0:  # no descriptor of nothing: this one is never read
            x = x.new_empty(1, max(x.shape[1], 8))
        # Of the exponentials' matrix the stride is that of its columns: see `exponentials`.
        stride = x.stride(0) or x.shape[1]
        return TensorDescriptor(x, list(x.shape), [stride, 1], [rows, columns])

    def weight(self, rows: int, columns: int) -> dict[str, Any]:
        """The weight as `load_weight` takes it, in blocks [rows, columns]; its memory may be that of [H, V]."""
        weight = self.head.weight
        turned = weight.stride(1) != 1
        operand = self.operand(weight.T, columns, rows) if turned else self.operand(weight, rows, columns)
        return {"weight": operand, "weight_stride": max(weight.stride()), "TURNED": turned}

    def cut(self, name: str) -> dict[str, Any]:
        t = self.tiles[name]
        return {"BLOCK_K": t.depth, "GROUP": t.group, "PROGRAMS": self.programs, "PARTS": t.parts, "TMA": self.tma}


_PLACES = ("stash", "stash_stride", "stash_tokens", "overflow", "overflow_tokens")


@dataclass(frozen=True)
class Exponentials:
    """Where the exponentials of the logits are, as `exponential_row` counts: rows of VOCAB_TILE from one address on.

    The pieces are allocations of their own.  The matrix spans them all and what lies between, of which nothing is ever
    read or written.
    """

    pieces: tuple[Tensor, ...]  # kept from being freed
    matrix: Tensor  # [rows, VOCAB_TILE]
    stash: int
    stash_stride: int
    stash_tokens: int
    overflow: int
    overflow_tokens: int
    again: int
    again_tokens: int

    @property
    def held(self) -> int:
        return self.stash_tokens + self.overflow_tokens

    def arguments(self, *, again: bool) -> dict[str, int]:
        """As kernels take them, with or without what is computed again."""
        return {name: getattr(self, name) for name in (*_PLACES, *(("again", "again_tokens") if again else ()))}


def exponentials(
    stash: Tensor,  # flat; from `pad` tiles on
    pad: int,
    stash_stride: int,
    stash_tokens: int,
    overflow: Tensor,  # flat
    overflow_tokens: int,
    again: Tensor,  # flat
    again_tokens: int,
) -> Exponentials:
    """The matrix that spans the three pieces, each of which begins at a multiple of a row's bytes."""
    row = VOCAB_TILE * stash.element_size()
    pieces = [x for x in (stash, overflow, again) if x.numel() > 0]
    first = min(pieces, key=Tensor.data_ptr)
    end = max(x.data_ptr() + x.numel() * x.element_size() for x in pieces)

    def start(x: Tensor) -> int:
        if x.numel() == 0:
            return 0
        offset = x.data_ptr() - first.data_ptr()
        if offset % row:
            raise RuntimeError(
                f"memory kept for backward has been moved to an address that is no multiple of {row} bytes; leave it "
                "where it is (saved-tensor hooks move it), or pass backend='torch'"
            )
        return offset // row

    rows = (end - first.data_ptr()) // row
    if rows >= 1 << 31:
        raise RuntimeError("device memory is spread over more than a terabyte of addresses; pass strategy='recompute'")
    return Exponentials(
        tuple(pieces),
        first.as_strided((1, VOCAB_TILE), (VOCAB_TILE, 1)).expand(rows, VOCAB_TILE),
        start(stash) + pad * stash_stride,
        stash_stride,
        stash_tokens,
        start(overflow),
        overflow_tokens,
        start(again),
        again_tokens,
    )


def compact(run: Run, target: Tensor, ignore_index: int, vectors: Vectors) -> Launch:
    arguments = {
        "target": target,
        "position": vectors.position,
        "order": vectors.order,
        "count": vectors.number,
        "T": run.tokens,
        "ignore_index": ignore_index,
        "BLOCK": 4096,
    }
    return Launch(triton_softmax.compact_tokens, (1,), arguments, warps=8)


def gather(
    run: Run,
    hidden: Tensor,
    target: Tensor,
    temperature: Tensor | float,
    vectors: Vectors,
    target_logit: Tensor,
    rows: Tensor,
    first: int,
) -> Launch:
    per_token = isinstance(temperature, Tensor)
    arguments = {
        "hidden": hidden,
        "weight": run.head.weight,
        "bias": run.head.bias,
        "target": target,
        "temperature": temperature if per_token else None,
        "order": vectors.order,
        "count": vectors.number,
        "rows": rows,
        "label": vectors.label,
        "factor": vectors.factor,
        "target_logit": target_logit,
        "shift": vectors.shift,
        "first": first,
        "hidden_stride_t": hidden.stride(0),
        "hidden_stride_h": hidden.stride(1),
        "weight_stride_v": run.head.weight.stride(0),
        "weight_stride_h": run.head.weight.stride(1),
        "H": run.hidden,
        "V": run.vocab,
        "T": run.tokens,
        "inner_scale": run.inner_scale,
        "outer_scale": run.outer_scale / (1.0 if per_token else temperature),
        "BIAS": run.head.bias is not None,
        "SOFTCAP": run.head.softcap is not None,
        "TEMPERATURE": per_token,
        "SHIFT": run.head.weight.dtype != torch.float16,  # whose exponents don't reach
        "BLOCK": 1024,
        "PAD": TOKEN_TILE,
    }
    return Launch(triton_softmax.gather_tokens, (min(len(rows), run.tokens - first),), arguments)


class Partials(NamedTuple):
    """Per tile and position, [tiles, positions]; None: not wanted."""

    maximum: Tensor
    others: Tensor
    offset_sum: Tensor | None
    moment: Tensor | None
    argmax: Tensor | None

    @staticmethod
    def empty(tiles: int, positions: int, device: torch.device, *, smoothing: bool, stats: bool) -> "Partials":
        def make(wanted: bool, dtype: torch.dtype = torch.float32) -> Any:
            return torch.empty((tiles, positions), dtype=dtype, device=device) if wanted else None

        return Partials(make(True), make(True), make(smoothing), make(stats), make(stats, torch.int32))


def softmax(
    run: Run, rows: Tensor, vectors: Vectors, partials: Partials, kept: Exponentials | None, first: int, *, stats: bool
) -> Launch:
    t = run.tiles["softmax_tiles"]
    arguments = {
        "rows": run.operand(rows, t.rows, t.depth),
        **run.weight(VOCAB_TILE, t.depth),
        "bias": run.head.bias,
        "label": vectors.label[first:],
        "factor": vectors.factor[first:],
        "count": vectors.number,
        **partials._asdict(),
        "shift": vectors.shift[first:],
        "exponentials": None if kept is None else run.operand(kept.matrix, t.rows, VOCAB_TILE // t.parts),
        "exponential_rows": 0 if kept is None else len(kept.matrix),
        **(dict.fromkeys(_PLACES, 0) if kept is None else kept.arguments(again=False)),
        "first": first,
        "rows_stride": rows.stride(0),
        "T": len(rows),
        "H": run.hidden,
        "V": run.vocab,
        "partial_stride": partials.maximum.stride(0),
        "inner_scale": run.inner_scale,
        "exponential_scale": run.exponential_scale,
        "BIAS": run.head.bias is not None,
        "SOFTCAP": run.head.softcap is not None,
        "SMOOTHING": run.head.label_smoothing > 0,
        "STATS": stats,
        "KEEP": kept is not None,
        "RAGGED": run.vocab % VOCAB_TILE > 0,
        "BLOCK_T": t.rows,
        **run.cut("softmax_tiles"),
    }
    return Launch(triton_softmax.softmax_tiles, (run.programs,), arguments, t.warps, t.stages)


class PerToken(NamedTuple):
    """What forward returns, [T] by token; the loss and `correct`, or `top1`."""

    loss: Tensor | None
    lse: Tensor
    log_prob: Tensor
    entropy: Tensor | None
    correct: Tensor | None
    top1: Tensor | None = None  # int64


def merge(
    run: Run,
    vectors: Vectors,
    target_logit: Tensor,
    partials: Partials,
    token_weight: Tensor | None,
    out: PerToken,
    first: int,
) -> Launch:
    arguments = {
        "position": vectors.position,
        "label": vectors.label,
        "target_logit": target_logit,
        **partials._asdict(),
        "shift": vectors.shift,
        "base": vectors.base,
        "token_weight": token_weight,
        **out._asdict(),
        "T": run.tokens,
        "V": run.vocab,
        "tiles": run.vocab_tiles,
        "partial_stride": partials.maximum.stride(0),
        "first": first,
        "last": first + partials.maximum.shape[1],
        "label_smoothing": run.head.label_smoothing,
        "z_loss": run.head.z_loss,
        "TOKEN_WEIGHT": token_weight is not None,
        "SMOOTHING": run.head.label_smoothing > 0,
        "STATS": out.entropy is not None,
        "LOSS": out.loss is not None,
        "BLOCK_T": 16,
        "BLOCK": 256,
    }
    return Launch(triton_softmax.merge_tiles, (-(-run.tokens // 16),), arguments, warps=8)


def settle(run: Run, kept: Exponentials, vectors: Vectors, maximum: Tensor) -> Launch:
    arguments = {
        "exponentials": kept.matrix,
        "count": vectors.number,
        "maximum": maximum,
        "shift": vectors.shift,
        "base": vectors.base,
        "partial_stride": maximum.stride(0),
        "tiles": run.vocab_tiles,
        **kept.arguments(again=False),
        "TILES": 16,
        "BLOCK_T": TOKEN_TILE,
    }
    grid = (-(-run.vocab_tiles // 16), kept.held // TOKEN_TILE)
    return Launch(triton_softmax.settle_exponentials, grid, arguments, warps=8)


@dataclass(frozen=True)
class Upstream:
    """What backward knows of each token; lse and log_prob by token, the others by position."""

    lse: Tensor
    log_prob: Tensor | None  # None: `row` is the coefficient of p, and `at_target` is given
    row: Tensor  # [T] float32: factor of the position's row of the gradient
    scale: Tensor  # [T] float32: the same times exp(base - lse), where exponentials are kept
    at_target: Tensor  # [T * ids] float32: the targets' entries of the gradient, where exponentials are kept
    shrink: Tensor | None  # [] float32: what products are multiplied by, where rows were scaled up for float16
    label: Tensor  # [T * ids] int32: the targets, -1 for none; a position's are different ones
    ids: int = 1
    # [T] float32: the coefficient of p * (z - mean).  With it, `scale` is 1 and kept exponentials are the gradient.
    entropy_row: Tensor | None = None
    mean: Tensor | None = None  # [T] float32


def scale_hidden(run: Run, rows: Tensor, places: Exponentials, vectors: Vectors, upstream: Upstream) -> Launch:
    arguments = {
        "rows": rows,
        "scale": upstream.scale,
        "at_target": upstream.at_target,
        "order": vectors.order,
        "count": vectors.number,
        "label": vectors.label,
        "lse": upstream.lse,
        "log_prob": upstream.log_prob,
        "base": vectors.base,
        "held": places.held,
        "H": run.hidden,
        "z_loss": run.head.z_loss,
        "inverse_exponential_scale": 1 / run.exponential_scale,
        "GIVEN": upstream.log_prob is None,
        "BLOCK": 1024,
    }
    return Launch(triton_gradients.scale_rows, (run.tokens,), arguments)


def gradient_again(
    run: Run, rows: Tensor, vectors: Vectors, upstream: Upstream, places: Exponentials, first_tile: int, tiles: int
) -> Launch:
    t = run.tiles["gradient_tiles"]
    arguments = {
        "rows": run.operand(rows, t.rows, t.depth),
        **run.weight(VOCAB_TILE, t.depth),
        "bias": run.head.bias,
        "exponentials": run.operand(places.matrix, t.rows, VOCAB_TILE // t.parts),
        "order": vectors.order,
        "count": vectors.number,
        "label": vectors.label,
        "factor": vectors.factor,
        "lse": upstream.lse,
        "log_prob": upstream.log_prob,
        "row": upstream.row,
        "first": places.held,
        "first_tile": first_tile,
        "chunk_tiles": tiles,
        "exponential_rows": len(places.matrix),
        "again": places.again,
        "again_tokens": places.again_tokens,
        "rows_stride": rows.stride(0),
        "T": run.tokens,
        "H": run.hidden,
        "V": run.vocab,
        "inner_scale": run.inner_scale,
        "label_smoothing": run.head.label_smoothing,
        "z_loss": run.head.z_loss,
        "TARGETS": places.held == 0 and upstream.ids == 1,
        "BIAS": run.head.bias is not None,
        "SOFTCAP": run.head.softcap is not None,
        "SMOOTHING": run.head.label_smoothing > 0,
        "Z_LOSS": run.head.z_loss > 0,
        "BLOCK_T": t.rows,
        "at_target": upstream.at_target if upstream.log_prob is None else None,
        "entropy_row": upstream.entropy_row,
        "mean": upstream.mean,
        "GIVEN": upstream.log_prob is None,
        "ENTROPY": upstream.entropy_row is not None,
        **run.cut("gradient_tiles"),
    }
    return Launch(triton_gradients.gradient_tiles, (run.programs,), arguments, t.warps, t.stages)


def weight_product(
    run: Run,
    places: Exponentials,
    rows: Tensor,
    vectors: Vectors,
    out: Tensor,
    shrink: Tensor | None,
    again_from: int,
    first_tile: int,
    tiles: int,
    *,
    add: bool,
) -> Launch:
    t = run.tiles["weight_gradient"]
    parts = t.parts * out.element_size() // rows.element_size()  # the same bytes in shared memory
    arguments = {
        "exponentials": run.operand(places.matrix, t.depth, t.rows),
        "rows": run.operand(rows, t.depth, t.columns),
        "out": run.operand(out, t.rows, t.columns // parts),
        "count": vectors.number,
        "shrink": shrink,
        "again_from": again_from,
        "first_tile": first_tile,
        "chunk_tiles": tiles,
        "exponential_rows": len(places.matrix),
        **places.arguments(again=True),
        "rows_stride": rows.stride(0),
        "out_stride": out.stride(0),
        "T": run.tokens,
        "H": run.hidden,
        "V": run.vocab,
        "SHRINK": shrink is not None,
        "ADD": add,
        "BLOCK_V": t.rows,
        "BLOCK_H": t.columns,
        **run.cut("weight_gradient"),
        "PARTS": parts,
    }
    return Launch(triton_gradients.weight_gradient, (run.programs,), arguments, t.warps, t.stages)


def target_terms(
    run: Run,
    hidden: Tensor,
    vectors: Vectors,
    upstream: Upstream,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> Launch:
    number = len(upstream.label)
    there = torch.arange(number, device=hidden.device) < vectors.number * upstream.ids
    there &= upstream.label >= 0
    labels, positions = upstream.label.masked_fill(~there, triton_blocks.NO_LABEL.value).sort(stable=True)
    arguments = {
        "hidden": hidden,
        "grad_weight": grad_weight,
        "grad_bias": grad_bias,
        "order": vectors.order,
        "sorted_label": labels,
        "sorted_position": positions,
        "at_target": upstream.at_target,
        "shrink": upstream.shrink,
        "hidden_stride_t": hidden.stride(0),
        "hidden_stride_h": hidden.stride(1),
        "N": number,
        "H": run.hidden,
        "IDS": upstream.ids,
        "WEIGHT": grad_weight is not None,
        "BIAS": grad_bias is not None,
        "SHRINK": upstream.shrink is not None,
        "OPERAND": tl.float16 if run.head.weight.dtype == torch.float16 else tl.bfloat16,
        "TOKENS": 4,  # with 16 it took 0.63 ms instead of 0.04 at T4096 H4096 on an H100
        "BLOCK": 1024,
    }
    blocks = 1 if grad_weight is None else -(-run.hidden // 1024)
    return Launch(triton_gradients.add_targets, (number, blocks), arguments)


def hidden_product(
    run: Run,
    places: Exponentials,
    vectors: Vectors,
    scale: Tensor | None,
    sums: Tensor,
    halves: bool,
    first_tile: int,
    tiles: int,
) -> Launch:
    """With `scale` of the positions that are held, else of the others."""
    held = min(places.held, run.tokens)
    out = sums[:held] if scale is not None else sums[held:]
    t = run.tiles["hidden_gradient"]
    arguments = {
        "exponentials": run.operand(places.matrix, t.rows, t.depth),
        **run.weight(t.depth, t.columns),
        "out": run.operand(out, t.rows, t.columns // t.parts),
        "count": vectors.number,
        "scale": scale,
        "first": 0 if scale is not None else held,
        "last": held if scale is not None else run.tokens,
        "out_rows": len(out),
        "half_rows": places.again_tokens if scale is None else 0,
        "first_tile": first_tile,
        "chunk_tiles": tiles,
        "exponential_rows": len(places.matrix),
        **places.arguments(again=True),
        "out_stride": out.stride(0),
        "H": run.hidden,
        "V": run.vocab,
        "SHARE": scale is not None or halves,
        "SCALE": scale is not None,
        "BLOCK_T": t.rows,
        "BLOCK_H": t.columns,
        **run.cut("hidden_gradient"),
    }
    return Launch(triton_gradients.hidden_gradient, (run.programs,), arguments, t.warps, t.stages)


def bias_sums(
    run: Run, places: Exponentials, vectors: Vectors, upstream: Upstream, out: Tensor, first_tile: int, tiles: int
) -> Launch:
    arguments = {
        "exponentials": places.matrix,
        "out": out,
        "count": vectors.number,
        "scale": upstream.scale,
        "shrink": upstream.shrink,
        "first_tile": first_tile,
        **places.arguments(again=True),
        "V": run.vocab,
        "SHRINK": upstream.shrink is not None,
        "BLOCK_T": 64,
        "BLOCK_V": 64,
    }
    return Launch(triton_gradients.bias_gradient, (tiles, VOCAB_TILE // 64), arguments)


def finish(
    run: Run, sums: Tensor, vectors: Vectors, upstream: Upstream, out: Tensor, held: int, again_rows: int
) -> Launch:
    block = 1024
    arguments = {
        "sums": sums,
        "weight": run.head.weight,
        "position": vectors.position,
        "label": upstream.label,
        "at_target": upstream.at_target,
        "shrink": upstream.shrink,
        "out": out,
        "weight_stride_v": run.head.weight.stride(0),
        "weight_stride_h": run.head.weight.stride(1),
        "H": run.hidden,
        "held": held,
        "again_rows": again_rows,
        "IDS": upstream.ids,
        "TARGETS": held == 0,
        "SHRINK": upstream.shrink is not None,
        "BLOCK": block,
    }
    return Launch(triton_gradients.finish_hidden, (run.tokens, -(-run.hidden // block)), arguments)
