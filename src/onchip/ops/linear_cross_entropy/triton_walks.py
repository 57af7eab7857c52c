"""The computation of linear_cross_entropy with the Triton kernels: what is launched, in which order, on what memory.

`forward` makes the loss; where gradients are wanted it leaves a `Kept`, from which `backward` makes them.  Nothing here
waits for the device: how many tokens are not ignored is known to the kernels alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from onchip.ops.linear_cross_entropy import triton_kernels as kernels
from onchip.ops.linear_cross_entropy.torch_tiles import Head

VOCAB_TILE = kernels.VOCAB_TILE.value
# Rows that kernels take at a time, and to a multiple of which rows beyond the last token are zeroed.
TOKEN_TILE = 128
# A float16 stash holds exp(z - maximum) times this: without it, whatever is below 6e-8 would be lost.
_FLOAT16_EXPONENTIAL = 32768.0
# float16 can't hold a gradient of 1e-8: rows of the softmax gradient are scaled to about this before a product.
_FLOAT16_ROW = 256.0


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


@dataclass(frozen=True)
class Launch:
    """One kernel launch, to be run or to be compiled ahead of time."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    warps: int = 4
    stages: int = 1

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, num_warps=self.warps, num_stages=self.stages)


class Vectors(NamedTuple):
    """What is known of each token; by position where not said otherwise."""

    packed: Tensor  # int32: all that follow
    position: Tensor  # [T] int32, by token: -1 for ignored ones
    order: Tensor  # [T] int32: the token
    label: Tensor  # [T] int32: -1 if out of range
    count: Tensor  # [1] int32: tokens that are not ignored
    factor: Tensor  # [T] float32

    @staticmethod
    def empty(tokens: int, device: torch.device) -> "Vectors":
        packed = torch.zeros(4 * tokens + 1, dtype=torch.int32, device=device)
        return Vectors.unpack(packed)

    @staticmethod
    def unpack(packed: Tensor) -> "Vectors":
        position, order, label, factor, count = packed.split([*[(packed.numel() - 1) // 4] * 4, 1])
        return Vectors(packed, position, order, label, count, factor.view(torch.float32))


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
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])

    def cut(self, name: str) -> dict[str, Any]:
        t = self.tiles[name]
        return {"BLOCK_K": t.depth, "GROUP": t.group, "PROGRAMS": self.programs, "PARTS": t.parts, "TMA": self.tma}


@dataclass(frozen=True)
class Stash:
    """Exponentials of the first `tokens + overflow_tokens` positions."""

    memory: Tensor  # flat; tile j's positions from element j * stride * VOCAB_TILE on
    tokens: int
    stride: int
    overflow: Tensor  # flat
    overflow_tokens: int

    @property
    def held(self) -> int:
        return self.tokens + self.overflow_tokens

    def views(self) -> tuple[Tensor, Tensor]:
        whole = self.memory[: self.memory.numel() // VOCAB_TILE * VOCAB_TILE]
        return whole.view(-1, VOCAB_TILE), self.overflow.view(-1, VOCAB_TILE)


def compact(run: Run, target: Tensor, ignore_index: int, vectors: Vectors) -> Launch:
    arguments = {
        "target": target,
        "position": vectors.position,
        "order": vectors.order,
        "count": vectors.count,
        "T": run.tokens,
        "ignore_index": ignore_index,
        "BLOCK": 4096,
    }
    return Launch(kernels.compact_tokens, (1,), arguments, warps=8)


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
        "count": vectors.count,
        "rows": rows,
        "label": vectors.label,
        "factor": vectors.factor,
        "target_logit": target_logit,
        "first": first,
        "hidden_stride_t": hidden.stride(0),
        "hidden_stride_h": hidden.stride(1),
        "weight_stride": run.head.weight.stride(0),
        "H": run.hidden,
        "V": run.vocab,
        "T": run.tokens,
        "inner_scale": run.inner_scale,
        "outer_scale": run.outer_scale / (1.0 if per_token else temperature),
        "BIAS": run.head.bias is not None,
        "SOFTCAP": run.head.softcap is not None,
        "TEMPERATURE": per_token,
        "BLOCK": 1024,
        "PAD": TOKEN_TILE,
    }
    return Launch(kernels.gather_tokens, (min(len(rows), run.tokens - first),), arguments)


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
    run: Run, rows: Tensor, vectors: Vectors, partials: Partials, stash: Stash | None, first: int, *, stats: bool
) -> Launch:
    t = run.tiles["softmax_tiles"]
    arguments = {
        "rows": run.operand(rows, t.rows, t.depth),
        "weight": run.operand(run.head.weight, VOCAB_TILE, t.depth),
        "bias": run.head.bias,
        "label": vectors.label[first:],
        "factor": vectors.factor[first:],
        "count": vectors.count,
        **partials._asdict(),
        **_stash_arguments(run, stash, (t.rows, VOCAB_TILE // t.parts)),
        "first": first,
        "rows_stride": rows.stride(0),
        "weight_stride": run.head.weight.stride(0),
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
        "stash_rows": 0 if stash is None else len(stash.views()[0]),
        "overflow_rows": 0 if stash is None else len(stash.views()[1]),
        "STASH": stash is not None,
        "OVERFLOW": stash is not None and stash.overflow.numel() > 0,
        "BLOCK_T": t.rows,
        **run.cut("softmax_tiles"),
    }
    return Launch(kernels.softmax_tiles, (run.programs,), arguments, t.warps, t.stages)


def _stash_arguments(run: Run, stash: Stash | None, block: tuple[int, int] | None) -> dict[str, Any]:
    if stash is None:
        return dict.fromkeys(("stash", "overflow")) | dict.fromkeys(
            ("stash_tokens", "stash_stride", "overflow_tokens"), 0
        )
    memory, overflow = stash.views()
    if block is not None:
        memory, overflow = run.operand(memory, *block), run.operand(overflow, *block)
    return {
        "stash": memory,
        "overflow": overflow,
        "stash_tokens": stash.tokens,
        "stash_stride": stash.stride,
        "overflow_tokens": stash.overflow_tokens,
    }


class PerToken(NamedTuple):
    """What forward returns, [T] by token."""

    loss: Tensor
    lse: Tensor
    log_prob: Tensor
    entropy: Tensor | None
    correct: Tensor | None


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
        "BLOCK_T": 16,
        "BLOCK": 64,
    }
    return Launch(kernels.merge_tiles, (-(-run.tokens // 16),), arguments)


@dataclass(frozen=True)
class Upstream:
    """What backward knows of each token; lse and log_prob by token, row by position."""

    lse: Tensor
    log_prob: Tensor
    row: Tensor  # [T] float32: factor of the position's row of the gradient
    shrink: Tensor | None  # [] float32: what products are multiplied by, where rows were scaled up for float16


def _gradient_arguments(run: Run, vectors: Vectors, upstream: Upstream, gradient: Any, stride: int) -> dict[str, Any]:
    return {
        "gradient": gradient,
        "order": vectors.order,
        "count": vectors.count,
        "label": vectors.label,
        "factor": vectors.factor,
        "lse": upstream.lse,
        "log_prob": upstream.log_prob,
        "row": upstream.row,
        "gradient_stride": stride,
        "T": run.tokens,
        "V": run.vocab,
        "label_smoothing": run.head.label_smoothing,
        "z_loss": run.head.z_loss,
        "SOFTCAP": run.head.softcap is not None,
        "SMOOTHING": run.head.label_smoothing > 0,
        "Z_LOSS": run.head.z_loss > 0,
    }


def normalise(
    run: Run,
    vectors: Vectors,
    upstream: Upstream,
    maximum: Tensor,
    stash: Stash,
    gradient: Tensor,
    first_tile: int,
    chunk_tiles: int,
) -> Launch:
    block = 16
    arguments = {
        **_stash_arguments(run, stash, None),
        **_gradient_arguments(run, vectors, upstream, gradient, gradient.stride(0)),
        "maximum": maximum,
        "first_tile": first_tile,
        "partial_stride": maximum.stride(0),
        "inverse_exponential_scale": 1 / run.exponential_scale,
        "BLOCK_T": block,
        "PAD": TOKEN_TILE,
    }
    return Launch(kernels.normalise_stash, (chunk_tiles, -(-min(stash.held, run.tokens) // block)), arguments)


def gradient_again(
    run: Run,
    rows: Tensor,
    vectors: Vectors,
    upstream: Upstream,
    gradient: Tensor,
    first: int,
    first_tile: int,
    chunk_tiles: int,
) -> Launch:
    t = run.tiles["gradient_tiles"]
    into = run.operand(gradient, t.rows, VOCAB_TILE // t.parts)
    arguments = {
        **_gradient_arguments(run, vectors, upstream, into, gradient.stride(0)),
        "rows": run.operand(rows, t.rows, t.depth),
        "weight": run.operand(run.head.weight, VOCAB_TILE, t.depth),
        "bias": run.head.bias,
        "first": first,
        "first_tile": first_tile,
        "chunk_tiles": chunk_tiles,
        "rows_stride": rows.stride(0),
        "weight_stride": run.head.weight.stride(0),
        "H": run.hidden,
        "inner_scale": run.inner_scale,
        "BIAS": run.head.bias is not None,
        "BLOCK_T": t.rows,
        **run.cut("gradient_tiles"),
    }
    return Launch(kernels.gradient_tiles, (run.programs,), arguments, t.warps, t.stages)


def weight_product(
    run: Run,
    gradient: Tensor,
    rows: Tensor,
    vectors: Vectors,
    out: Tensor,
    shrink: Tensor | None,
    first_tile: int,
    chunk_tiles: int,
    *,
    add: bool,
) -> Launch:
    t = run.tiles["weight_gradient"]
    parts = t.parts * out.element_size() // gradient.element_size()  # the same bytes in shared memory
    arguments = {
        "gradient": run.operand(gradient, t.depth, t.rows),
        "rows": run.operand(rows, t.depth, t.columns),
        "out": run.operand(out, t.rows, t.columns // parts),
        "count": vectors.count,
        "shrink": shrink,
        "first_row": first_tile * VOCAB_TILE,
        "gradient_stride": gradient.stride(0),
        "rows_stride": rows.stride(0),
        "out_stride": out.stride(0),
        "T": run.tokens,
        "H": run.hidden,
        "V": run.vocab,
        "chunk": chunk_tiles * VOCAB_TILE,
        "SHRINK": shrink is not None,
        "ADD": add,
        "BLOCK_V": t.rows,
        "BLOCK_H": t.columns,
        **run.cut("weight_gradient"),
        "PARTS": parts,
    }
    return Launch(kernels.weight_gradient, (run.programs,), arguments, t.warps, t.stages)


def hidden_product(
    run: Run, gradient: Tensor, vectors: Vectors, sums: Tensor, first_tile: int, chunk_tiles: int, splits: int
) -> Launch:
    t = run.tiles["hidden_gradient"]
    arguments = {
        "gradient": run.operand(gradient, t.rows, t.depth),
        "weight": run.operand(run.head.weight, t.depth, t.columns),
        "out": run.operand(sums, t.rows, t.columns // t.parts),
        "count": vectors.count,
        "first_row": first_tile * VOCAB_TILE,
        "gradient_stride": gradient.stride(0),
        "weight_stride": run.head.weight.stride(0),
        "out_stride": sums.stride(0),
        "T": run.tokens,
        "H": run.hidden,
        "V": run.vocab,
        "chunk": chunk_tiles * VOCAB_TILE,
        "part": -(-chunk_tiles // splits) * VOCAB_TILE,
        "split_rows": len(sums) // splits,
        "ADD": first_tile > 0,
        "SPLITS": splits,
        "BLOCK_T": t.rows,
        "BLOCK_H": t.columns,
        **run.cut("hidden_gradient"),
    }
    return Launch(kernels.hidden_gradient, (run.programs,), arguments, t.warps, t.stages)


def bias_sums(
    run: Run, gradient: Tensor, vectors: Vectors, out: Tensor, shrink: Tensor | None, first_tile: int, chunk_tiles: int
) -> Launch:
    arguments = {
        "gradient": gradient,
        "out": out,
        "count": vectors.count,
        "shrink": shrink,
        "first_row": first_tile * VOCAB_TILE,
        "gradient_stride": gradient.stride(0),
        "V": run.vocab,
        "SHRINK": shrink is not None,
        "BLOCK_T": 64,
        "BLOCK_V": 64,
    }
    return Launch(kernels.bias_gradient, (chunk_tiles * VOCAB_TILE // 64,), arguments)


def finish(run: Run, sums: Tensor, vectors: Vectors, shrink: Tensor | None, out: Tensor, splits: int) -> Launch:
    block = 1024
    arguments = {
        "sums": sums,
        "position": vectors.position,
        "shrink": shrink,
        "out": out,
        "H": run.hidden,
        "split_rows": len(sums) // splits,
        "SPLITS": splits,
        "SHRINK": shrink is not None,
        "BLOCK": block,
    }
    return Launch(kernels.finish_hidden, (run.tokens, -(-run.hidden // block)), arguments)


# ------------------------------------------------------------------------------------------------------- the two walks


def scale_rows(row: Tensor, vectors: Vectors, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Factors of the gradient's rows, scaled into float16's range, and what the products are to be multiplied by."""
    if dtype != torch.float16 or row.numel() == 0:
        return row, None
    there = torch.arange(row.numel(), device=row.device) < vectors.count
    largest = torch.where(there, row.abs().nan_to_num(nan=0), 0).amax()
    too_large = torch.where(largest > 0, _FLOAT16_ROW / largest, 1)
    return row * too_large, 1 / too_large


def forward(
    run: Run,
    hidden: Tensor,  # [T, H], any strides
    target: Tensor,  # [T] int64
    token_weight: Tensor | None,  # [T] float32
    temperature: Tensor | float,  # [T] float32, or one for all
    ignore_index: int,
    rows: Tensor,  # [T or fewer, H]: so many tokens at a time
    stash: Stash | None,
    *,
    stats: bool,
) -> tuple[PerToken, Vectors, Partials]:
    """The loss and the statistics of each token; `rows`, the vectors and the partial maxima are as the last chunk left
    them, which is to say whole where `rows` holds all tokens.
    """
    device, tokens, chunk = hidden.device, run.tokens, len(rows)
    vectors = Vectors.empty(tokens, device)
    out = PerToken(
        *(torch.empty(tokens, dtype=torch.float32, device=device) for _ in range(3)),
        torch.empty(tokens, dtype=torch.float32, device=device) if stats else None,
        torch.empty(tokens, dtype=torch.bool, device=device) if stats else None,
    )
    target_logit = torch.empty(tokens, dtype=torch.float32, device=device)
    smoothing = run.head.label_smoothing > 0
    partials = Partials.empty(run.vocab_tiles, chunk, device, smoothing=smoothing, stats=stats)
    if tokens == 0:
        return out, vectors, partials
    compact(run, target, ignore_index, vectors).run()
    for first in range(0, tokens, chunk):
        gather(run, hidden, target, temperature, vectors, target_logit, rows, first).run()
        softmax(run, rows, vectors, partials, stash, first, stats=stats).run()
        merge(run, vectors, target_logit, partials, token_weight, out, first).run()
    return out, vectors, partials


def backward(
    run: Run,
    vectors: Vectors,
    upstream: Upstream,
    rows: Tensor,  # [T, H]
    maximum: Tensor,  # [tiles, T]
    stash: Stash,
    chunk_tiles: int,
    splits: int,
    *,
    grad_hidden: Tensor | None,  # [T, H] out; its memory may be that of `rows`
    grad_weight: Tensor | None,  # [V, H] out; its memory may be the stash's
    grad_bias: Tensor | None,  # [V] float32 out
    add: bool = False,
) -> None:
    """Fill in the gradients, a chunk of `chunk_tiles` tiles of the vocabulary at a time."""
    tokens, device = run.tokens, rows.device
    gradient = torch.empty((tokens, chunk_tiles * VOCAB_TILE), dtype=rows.dtype, device=device)
    sums = None
    if grad_hidden is not None:
        padded = -(-tokens // TOKEN_TILE) * TOKEN_TILE
        sums = torch.empty((splits * padded, run.hidden), dtype=torch.float32, device=device)
    for first_tile in range(0, run.vocab_tiles, chunk_tiles):
        count = min(chunk_tiles, run.vocab_tiles - first_tile)
        if stash.held > 0:
            normalise(run, vectors, upstream, maximum, stash, gradient, first_tile, count).run()
        if stash.held < tokens:
            gradient_again(run, rows, vectors, upstream, gradient, stash.held, first_tile, count).run()
        if grad_weight is not None:
            weight_product(
                run, gradient, rows, vectors, grad_weight, upstream.shrink, first_tile, count, add=add
            ).run()
        if sums is not None:
            hidden_product(run, gradient, vectors, sums, first_tile, count, splits).run()
        if grad_bias is not None:
            bias_sums(run, gradient, vectors, grad_bias, upstream.shrink, first_tile, count).run()
    if sums is not None and grad_hidden is not None:
        finish(run, sums, vectors, upstream.shrink, grad_hidden, splits).run()
