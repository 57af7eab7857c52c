"""The arguments for launches of the kernels of a head and a loss: a run, its vectors, and memory.

A kernel's arguments are found by the names of its parameters: among those that a run knows, and those that a launch
adds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from onchip.core.sizes import up
from onchip.frontend import torch_prepared as stated
from onchip.frontend.options import LossTerms
from onchip.kernels.triton.launch import Launch, Shared, descriptor
from onchip.vocab.torch.softmax import Asked
from onchip.vocab.triton import blocks
from onchip.vocab.triton.blocks import BufferRows
from onchip.vocab.triton.tiling import ALIGNED, VECTOR

VOCAB_TILE: int = blocks.VOCAB_TILE.value
# Rows that kernels take at a time, and to a multiple of which rows beyond the last token are zeroed.
TOKEN_TILE = 128
# Elements that a program takes at a time of what is no product.
BLOCK = 1024
# A float16 buffer holds exp(z - maximum) times this: without it, whatever is below 6e-8 would be lost.
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
    """In how many pieces a result leaves, each staged in shared memory."""


class Vectors(NamedTuple):
    """What is known about each token; by position unless noted."""

    packed: Tensor  # int32, all that follow in one
    position: Tensor  # [T] int32, by token: -1 for ignored ones
    order: Tensor  # [T] int32: the token
    label: Tensor  # [T] int32: the leader of the token's ids, -1 if all are out of range
    number: Tensor  # [1] int32: how many tokens are not ignored
    factor: Tensor  # [T] float32: of the logits, after softcap's tanh
    shift: Tensor  # [T] float32: what a tile's exponentials are stored relative to, unless they are far above it
    base: Tensor  # [T] float32: what they are relative to in the end

    @property
    def known(self) -> dict[str, Any]:
        return {**self._asdict(), "vectors": self, "count": self.number}

    def part(self, first: int, last: int, number: Tensor) -> "Vectors":
        """The vectors of the positions in [first, last), of which `number` are of tokens; `position` is of all
        tokens.
        """
        order, label, factor, shift, base = (
            x[first:last] for x in (self.order, self.label, self.factor, self.shift, self.base)
        )
        return Vectors(self.packed, self.position, order, label, number, factor, shift, base)

    @staticmethod
    def unpack(packed: Tensor, tokens: int) -> "Vectors":
        # One operator for all, with what lies between them.
        *each, count = packed.split_with_sizes([tokens, up(tokens, VECTOR) - tokens] * 6 + [1])
        position, order, label = each[0:6:2]
        factor, shift, base = [x.view(torch.float32) for x in each[6::2]]
        return Vectors(packed, position, order, label, count, factor, shift, base)


@dataclass(frozen=True)
class Run:
    """A linear layer and a loss on its logits: sizes, options, the tokens' vectors, and the kernels' tiles."""

    weight: Tensor  # [V, H] in the products' dtype; without products in another one too
    dtype: torch.dtype  # the products'
    bias: Tensor | None  # [V] float32
    tokens: int
    options: Any  # of a loss
    vectors: Vectors
    tiles: Mapping[str, Tiles]
    programs: int
    tma: bool
    class_weight: Tensor | None = None  # [V] float32
    # If the weight is a shard of a vocabulary:
    whole_vocab: int | None = None  # how many entries that has
    elsewhere: int | None = None  # in place of an id that another shard has
    gluon: bool = False  # whether kernels in Gluon can run

    @property
    def hidden(self) -> int:
        return self.weight.shape[1]

    @property
    def vocab(self) -> int:
        return self.weight.shape[0]

    @property
    def vocab_tiles(self) -> int:
        return -(-self.vocab // VOCAB_TILE)

    def part(self, first: int, last: int, number: Tensor) -> "Run":
        """The run on the positions in [first, last), of which `number` are of tokens."""
        return replace(self, tokens=last - first, vectors=self.vectors.part(first, last, number))

    @property
    def plain(self) -> bool:
        """Whether the kernels in Gluon can make its logits and what follows from them."""
        return self.gluon and self.bias is None and self.options.softcap is None and self.weight.stride(1) == 1

    @property
    def outer_scale(self) -> float:
        """The scale of logits after softcap's tanh, or of products if there is no softcap."""
        scale: float = self.options.logit_scale if self.options.softcap is None else self.options.softcap
        return scale

    @cached_property
    def loss_terms(self) -> LossTerms:
        return LossTerms.of(self.options)

    @property
    def exponential_scale(self) -> float:
        return _FLOAT16_EXPONENTIAL if self.dtype == torch.float16 else 1.0

    def operand(self, x: Tensor, rows: int, columns: int) -> Any:
        """A matrix as a kernel takes it: a descriptor of blocks [rows, columns], or the tensor for its pointer."""
        if not self.tma:
            return x
        if x.shape[0] == 0:  # no descriptor of nothing: this one is never read
            x = stated.empty((1, max(x.shape[1], 8)), x.dtype, x.device)
        # The stride of the exponentials' matrix is that of its columns: see `exponentials`.
        stride = x.stride(0) or x.shape[1]
        return descriptor(x, stride, rows, columns)

    @cached_property
    def known(self) -> Shared:
        """Arguments of kernels that the run knows; the weight by pointer."""
        options = self.options
        known = {
            "weight": self.weight,
            "weight_stride_v": self.weight.stride(0),
            "weight_stride_h": self.weight.stride(1),
            "bias": self.bias,
            **self.classes,
            "T": self.tokens,
            "H": self.hidden,
            "V": self.vocab,
            "tiles": self.vocab_tiles,
            "inner_scale": None if options.softcap is None else options.logit_scale / options.softcap,
            "loss_terms": self.loss_terms,
            "label_smoothing": self.loss_terms.label_smoothing,
            "exponential_scale": self.exponential_scale,
            "inverse_exponential_scale": 1 / self.exponential_scale,
            "RAGGED": self.vocab % VOCAB_TILE > 0,
            "OPERAND": tl.float16 if self.dtype == torch.float16 else tl.bfloat16,
            **self.vectors.known,
        }
        return Shared(known)

    @property
    def classes(self) -> dict[str, Any]:
        """The class weights, and their sums over tiles of the vocabulary and over all of it."""
        each = self.class_weight
        if each is None:
            return dict.fromkeys(("class_weight", "tile_weight", "class_total"))
        more = self.vocab_tiles * VOCAB_TILE - self.vocab
        by_tile = stated.call(torch.nn.functional.pad, each, (0, more)).view(-1, VOCAB_TILE)
        tile_weight, total = stated.call(torch.sum, by_tile, 1), stated.call(torch.sum, each)
        return {"class_weight": each, "tile_weight": tile_weight, "class_total": total}

    def weight_blocks(self, rows: int, columns: int) -> dict[str, Any]:
        """The weight as `load_weight` takes it, in blocks [rows, columns]; its memory may be that of [H, V]."""
        turned = self.weight.stride(1) != 1
        operand = self.operand(self.weight.T, columns, rows) if turned else self.operand(self.weight, rows, columns)
        return {"weight": operand, "weight_stride": max(self.weight.stride()), "TURNED": turned}

    def launch(self, kernel: Any, grid: tuple[int, ...], *, warps: int = 4, **more: Any) -> Launch:
        """A launch of a kernel whose arguments are known, or among `more`."""
        return Launch(kernel, grid, more, warps, shared=self.known)

    def product(self, kernel: Any, t: Tiles, arguments: Mapping[str, Any]) -> Launch:
        """A launch of a product kernel that is cut as `t` says."""
        cut = {"BLOCK_K": t.depth, "GROUP": t.group, "PROGRAMS": self.programs, "PARTS": t.parts, "TMA": self.tma}
        return Launch(kernel, (self.programs,), {**cut, **arguments}, t.warps, t.stages, shared=self.known)


# ------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class LogitBuffer:
    """Memory for the exponentials of logits, or for their gradient: rows of VOCAB_TILE from one address on.

    The pieces are separate allocations.  The matrix spans them all and what lies between, where nothing is ever read or
    written.
    """

    pieces: tuple[Tensor, ...]  # kept from being freed
    matrix: Tensor  # [rows, VOCAB_TILE]
    rows: BufferRows
    kept: int
    """Positions whose rows forward fills; backward recomputes those of the others."""

    @property
    def known(self) -> dict[str, Any]:
        return {"exponentials": self.matrix, "buffer": self.rows}


class Sum(NamedTuple):
    """A gradient up to factors: float32, or the first 16 bits of one, as int16, and the next 8 or 4."""

    first: Tensor  # [N, H], in the gradient's memory
    digits: Tensor | None = None  # [N, H] uint8; or of pairs of rows, 64 apart, 4 bits for each; None with float32

    @property
    def paired(self) -> bool:
        return self.digits is not None and len(self.digits) < len(self.first)


class ChunkSums(NamedTuple):
    """Sums from which hidden's gradient of some positions of a chunk is made."""

    sums: Tensor  # [slices * number, H] float32: of slices of the vocabulary
    first: int
    number: int
    slices: int


class End(NamedTuple):
    """What turns a sum over chunks of tokens into the gradient."""

    factor: Tensor | None  # [] float32: what it is multiplied by then
    following: Tensor | None  # [1] int32: tokens of the next chunk; where it has none, that is now


class Partials(NamedTuple):
    """What the softmax leaves for each position and tile of `columns` logits, [tiles, stride]; None: not wanted."""

    maximum: Tensor  # of z
    others: Tensor  # sum of exp(z - maximum) over all but the target
    offset_sum: Tensor | None  # sum of z - maximum
    moment: Tensor | None  # sum of exp(z - maximum) * (z - maximum)
    argmax: Tensor | None  # int32
    squares: Tensor | None  # sum of exp(z - maximum)**2 over all but the target
    below: Tensor | None  # with labels: sum of exp(z - maximum) that are not near 1
    mass: Tensor | None  # and sum of labels
    cost: Tensor | None  # and sum of labels times maximum - z
    given_mass: Tensor | None  # with their statistics: the same of the labels as they are given
    given_cost: Tensor | None
    largest: Tensor | None  # and the largest of these
    likeliest: Tensor | None  # int32: where that is
    stride: int  # from one tile to the next
    columns: int

    @property
    def plain(self) -> bool:
        """Whether they are only maxima, and sums of exponentials and of logits."""
        return self.moment is None and self.squares is None and self.below is None

    @staticmethod
    def empty(
        vocab: int,
        positions: int,
        device: torch.device,
        asked: Asked,
        *,
        labels: bool = False,
        columns: int = VOCAB_TILE,
        memory: Tensor | None = None,  # bytes to take it from
    ) -> "Partials":
        tiles, stats = -(-vocab // VOCAB_TILE) * (VOCAB_TILE // columns), labels and asked.entropy
        stride = up(positions, ALIGNED)

        def make(wanted: bool, dtype: torch.dtype = torch.float32) -> Any:
            nonlocal memory
            if not wanted:
                return None
            if memory is None:
                return stated.empty((tiles, stride), dtype, device)
            size = 4 * tiles * stride
            block, memory = memory[:size], memory[size:]
            return block.view(dtype).view(tiles, stride)

        return Partials(
            make(True),
            make(True),
            make(asked.mean_logits),
            make(asked.entropy),
            make(asked.entropy, torch.int32),
            make(asked.sum_sq),
            make(labels),
            make(labels),
            make(labels),
            make(stats),
            make(stats),
            make(stats),
            make(stats, torch.int32),
            stride,
            columns,
        )


class Labels(NamedTuple):
    """A probability of every entry for each token."""

    probs: Tensor  # [..., V]
    rows: int  # tokens of an outer row of two, as an `odd` number
    outer: int  # strides, in elements: of outer rows, of tokens and of entries
    inner: int
    stride: int
    smoothing: float


class Picked(NamedTuple):
    """What is known about the ids before the softmax, by position; the latter two only if a token has several."""

    target_logit: Tensor  # [T] float32: the largest of the ids' logits
    logit: Tensor | None  # [T, K] float32: each id's
    label: Tensor | None  # [T, K] int32: the id, -1 if it is ignored or out of range


class TokenSoftmax(NamedTuple):
    """What forward makes and backward uses, [T] float32 by token, 0 for ignored ones; None: not wanted."""

    lse: Tensor
    log_prob: Tensor  # [T, K]
    entropy: Tensor | None = None
    leading: Tensor | None = None  # log-probability of the leader
    uniform_loss: Tensor | None = None  # cross-entropy with the uniform distribution
    top1: Tensor | None = None  # int64: index of the largest logit, -1 for ignored tokens
    mean_logits: Tensor | None = None
    log_sum_sq: Tensor | None = None  # log(sum(p**2))
    top: Tensor | None = None  # the largest logit
    loss: Tensor | None = None  # weighted cross-entropy
    correct: Tensor | None = None  # bool: with top1, whether that is the target


class PositionTerms(NamedTuple):
    """What backward knows about each position's gradient, [T] float32; see `position_terms`."""

    row_scale: Tensor
    even: Tensor | None
    entropy_scale: Tensor | None  # with it, `product_scale` is 1 and what is kept is made the gradient first
    mean: Tensor | None
    product_scale: Tensor  # what multiplies kept exponentials
    lse: Tensor
    entry: Tensor  # [T * ids]: the ids' entries of the gradient
    entry_label: Tensor  # [T * ids] int32: the ids, -1 for one that is ignored, out of range, or the same as one before
    inverse_grad_scale: Tensor | None  # [] float32: what products are multiplied by, where rows were scaled for float16
    mass: Tensor | None = None  # with labels: what `soft_gradient` takes, as the next
    less: Tensor | None = None
    more: Tensor | None = None

    @property
    def ids(self) -> int:
        """The ids per position."""
        return self.entry.numel() // self.lse.numel()
