"""How the kernels between ranks are launched: their tiles, and a block's pieces."""

from typing import Any, NamedTuple

from torch import Tensor

from onchip.collectives import triton_kernels as kernels
from onchip.kernels.triton.launch import Launch, describe, descriptor

PIECES = 4
"""The most that a block travels in."""
SPARE = 2
"""Multiprocessors that a product which waits leaves to others: should the driver make a kernel of a copy, there is room
for it."""
_PIECE_ROWS = 512  # fewer make a product whose weight is read too often
_BLOCK_M, _BLOCK_C = 128, 64
_BLOCK = 1024


class Cut(NamedTuple):
    """A block's pieces."""

    pieces: int
    tiles: int
    """Tiles of rows in a piece; in the last one there may be fewer."""

    @property
    def rows(self) -> int:
        return self.tiles * _BLOCK_M


def cut(rows: int) -> Cut:
    """The pieces of a block of so many rows, each of whole tiles."""
    tiles = -(-rows // _BLOCK_M)
    wanted = max(1, min(PIECES, rows // _PIECE_ROWS))
    of_piece = -(-tiles // wanted)
    return Cut(-(-tiles // of_piece), of_piece)


def gated_product(
    own: Tensor,  # [rows, C], contiguous
    blocks: Tensor,  # [ranks, rows, C], contiguous
    weight: Tensor,  # [C, N], any strides
    bias: Tensor | None,  # [N]
    out: Tensor,  # [ranks * rows, N], contiguous
    flags: Tensor,  # [ranks, PIECES] int32
    rank: int,
    *,
    tma: bool | None = None,
) -> Launch:
    """out = blocks @ weight + bias: `own` is this rank's block, and others are there when their flags are set."""
    device = describe(out.device)
    tma = device.capability >= 90 if tma is None else tma
    ranks, rows, columns = blocks.shape
    if 1 not in weight.stride():
        weight = weight.contiguous()
    turned = weight.stride(1) != 1
    of_weight = weight.t() if turned else weight
    wide = device.shared >= 227 * 1024
    n = 256 if wide else 128
    stages = 4 if wide else 3 if device.shared >= 160 * 1024 else 2
    parts = 2 if wide else 1
    tma_own, tma_blocks, tma_weight, tma_out = (tma and suits(x) for x in (own, blocks[0], of_weight, out))
    # A descriptor ends where all blocks do, not where a block does.
    tma_out = tma_out and rows % _BLOCK_M == 0
    block = (n, _BLOCK_C) if turned else (_BLOCK_C, n)
    flat = blocks.view(-1, columns)
    tiles = ranks * -(-rows // _BLOCK_M) * -(-out.shape[1] // n)
    programs = max(1, min(device.programs - SPARE, tiles))
    arguments: dict[str, Any] = {
        "own": descriptor(own, columns, _BLOCK_M, _BLOCK_C) if tma_own else own,
        "blocks": descriptor(flat, columns, _BLOCK_M, _BLOCK_C) if tma_blocks else flat,
        "weight": descriptor(of_weight, of_weight.stride(0), *block) if tma_weight else of_weight,
        "bias": None if bias is None else bias.contiguous(),
        "out": descriptor(out, out.stride(0), _BLOCK_M, n // parts) if tma_out else out,
        "flags": flags,
        "own_stride": columns,
        "weight_stride": of_weight.stride(0),
        "out_stride": out.stride(0),
        "rank": rank,
        "ranks": ranks,
        "rows": rows,
        "N": out.shape[1],
        "C": columns,
        "piece_tiles": cut(rows).tiles,
        "PIECES": PIECES,
        "TURNED": turned,
        "BLOCK_M": _BLOCK_M,
        "BLOCK_N": n,
        "BLOCK_C": _BLOCK_C,
        "GROUP": 8,
        "PROGRAMS": programs,
        "PARTS": parts,
        "TMA_OWN": tma_own,
        "TMA_BLOCKS": tma_blocks,
        "TMA_WEIGHT": tma_weight,
        "TMA_OUT": tma_out,
    }
    return Launch(kernels.gated_product, (programs,), arguments, warps=8, stages=stages)


def suits(x: Tensor) -> bool:
    """Whether TMA can read and write a matrix: rows that begin at multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def add_blocks(blocks: Tensor, bias: Tensor | None, out: Tensor, rank: int) -> Launch:
    """out [rows, N] = the sum of blocks [ranks, rows, N] float32 in the order rank + 1, ..., rank, and bias [N]."""
    arguments = {
        "blocks": blocks,
        "bias": None if bias is None else bias.contiguous(),
        "out": out,
        "rank": rank,
        "ranks": len(blocks),
        "numbers": out.numel(),
        "N": out.shape[-1],
        "BLOCK": _BLOCK,
    }
    return Launch(kernels.add_blocks, (-(-out.numel() // _BLOCK),), arguments)
