"""The launches of the kernels between ranks: their tiles, and the pieces of a block."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.collectives import triton_kernels as kernels
from onchip.kernels.triton.launch import Device, Launch, describe, descriptor

PIECES = 4
"""The most pieces in which a block travels."""
SPARE = 2
"""Multiprocessors that a waiting product leaves free: if the driver copies by a kernel, there is room for it."""
_PIECE_ROWS = 512  # with fewer, the product reads the weight too often
_BLOCK_M, _BLOCK_C = 128, 64
_BLOCK = 1024
HEAD, SET, LOST = (x.value for x in (kernels.HEAD, kernels.SET, kernels.LOST))


class Meeting(NamedTuple):
    """Where the ranks of a group meet, as kernels see it."""

    rank: int
    ranks: int
    head: Tensor  # [HEAD] int32: this rank's
    addresses: Tensor  # [ranks + 1] int64: all ranks' heads, and a word on this rank's host
    patience: int  # microseconds, in 32 bits, so that one compiled kernel serves all values

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self._asdict(), "LANES": max(32, 1 << (self.ranks - 1).bit_length())}

    def flags(self, which: int = 0) -> Tensor:
        """[ranks, PIECES]: one of two sets of flags, which say which pieces of other ranks have come."""
        return self.head[which * SET :][: self.ranks * PIECES].view(self.ranks, PIECES)


class Cut(NamedTuple):
    """How a block is cut into pieces."""

    pieces: int
    tiles: int
    """Tiles of rows in a piece; the last piece may have fewer."""

    @property
    def rows(self) -> int:
        return self.tiles * _BLOCK_M


def cut(rows: int) -> Cut:
    """The pieces of a block with this many rows, each of whole tiles."""
    tiles = -(-rows // _BLOCK_M)
    wanted = max(1, min(PIECES, rows // _PIECE_ROWS))
    of_piece = -(-tiles // wanted)
    return Cut(-(-tiles // of_piece), of_piece)


def meet(at: Meeting, *, clear: bool = False) -> Launch:
    """Wait until all ranks have come here; with `clear` this rank's flags are cleared before it comes."""
    return Launch(kernels.meet, (1,), {**at.arguments, "CLEAR": clear}, warps=1)


def arrive(at: Meeting, flags: Tensor, row: Tensor, pieces: int, sender: int | None = None) -> Launch:
    """Wait until a sender's block, or all other ranks' blocks, are there in all pieces; write a row of NaN if one
    isn't.
    """
    numbers = row.view(torch.int16)
    first, last = (0, at.ranks) if sender is None else (sender, sender + 1)
    arguments = {"first": first, "last": last, "flags": flags, "row": numbers, "numbers": numbers.numel()}
    arguments |= {"pieces": pieces}
    return Launch(kernels.arrive, (1,), {**at.arguments, **arguments, "PIECES": PIECES, "BLOCK": _BLOCK})


def gated_product(
    at: Meeting,
    own: Tensor,  # [rows, C], contiguous
    blocks: Tensor,  # [ranks, rows, C], contiguous
    weight: Tensor,  # [C, N], any strides
    bias: Tensor | None,  # [N]
    out: Tensor,  # [ranks * rows, N], contiguous
    *,
    tma: bool | None = None,
) -> Launch:
    """out = blocks @ weight + bias; `own` is this rank's block, and the first flags tell when others are there."""
    ranks, rows, columns = blocks.shape
    device, tma, common = _product(at, own, weight, bias, out, ranks * rows, tma, parts=2)
    # A descriptor ends where all blocks do, not where a block does.
    if common["TMA_OUT"] and rows % _BLOCK_M != 0:
        common |= {"TMA_OUT": False, "out": out}
    tma_blocks, flat = tma and suits(blocks[0]), blocks.view(-1, columns)
    arguments = {
        **common,
        "blocks": descriptor(flat, columns, _BLOCK_M, _BLOCK_C) if tma_blocks else flat,
        "flags": at.flags(),
        "TMA_BLOCKS": tma_blocks,
    }
    return Launch(kernels.gated_product, (common["PROGRAMS"],), arguments, warps=8, stages=_stages(device))


def adding_product(
    at: Meeting,
    own: Tensor,  # [rows, C], contiguous
    weight: Tensor,  # [C, N], any strides
    bias: Tensor | None,  # [N]
    addends: Tensor,  # [ranks, rows, N], contiguous
    out: Tensor,  # [rows, N], contiguous
    *,
    tma: bool | None = None,
) -> Launch:
    """out = the sum of all ranks' addends and bias; this rank's addend is own @ weight, and flags tell when others
    come.

    An addend is one piece, since it is computed as a whole before it leaves.
    """
    device, tma, common = _product(at, own, weight, bias, out, len(own), tma, parts=4)
    arguments = {**common, "addends": addends, "flags": at.flags()}
    return Launch(kernels.adding_product, (common["PROGRAMS"],), arguments, warps=8, stages=_stages(device))


def _product(
    at: Meeting,
    own: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    all_rows: int,
    tma: bool | None,
    parts: int,
) -> tuple[Device, bool, dict[str, Any]]:
    """The GPU, whether TMA is used, and the arguments of both products; a wide tile is stored in `parts` parts."""
    device = describe(out.device)
    tma = device.capability >= 90 if tma is None else tma
    rows, columns = own.shape
    if 1 not in weight.stride():
        weight = weight.contiguous()
    turned = weight.stride(1) != 1
    of_weight = weight.t() if turned else weight
    wide = device.shared >= 227 * 1024
    n = 256 if wide else 128
    parts = parts if wide else parts // 2
    tma_own, tma_weight, tma_out = (tma and suits(x) for x in (own, of_weight, out))
    block = (n, _BLOCK_C) if turned else (_BLOCK_C, n)
    tiles = -(-rows // _BLOCK_M) * (all_rows // rows) * -(-out.shape[1] // n)
    return device, tma, {
        **at.arguments,
        "own": descriptor(own, columns, _BLOCK_M, _BLOCK_C) if tma_own else own,
        "weight": descriptor(of_weight, of_weight.stride(0), *block) if tma_weight else of_weight,
        "bias": None if bias is None else bias.contiguous(),
        "out": descriptor(out, out.stride(0), _BLOCK_M, n // parts) if tma_out else out,
        "own_stride": columns,
        "weight_stride": of_weight.stride(0),
        "out_stride": out.stride(0),
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
        "PROGRAMS": max(1, min(device.programs - SPARE, tiles)),
        "PARTS": parts,
        "TMA_OWN": tma_own,
        "TMA_WEIGHT": tma_weight,
        "TMA_OUT": tma_out,
    }  # fmt: skip


def _stages(device: Device) -> int:
    return 4 if device.product_bytes >= 227 * 1024 else 3 if device.product_bytes >= 160 * 1024 else 2


def suits(x: Tensor) -> bool:
    """Whether TMA can read and write a matrix: rows that begin at multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
