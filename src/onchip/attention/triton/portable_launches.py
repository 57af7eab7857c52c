"""The launches of attention's kernels in plain Triton: the functions of `launches`, for GPUs that aren't Hopper."""

from typing import Any, NamedTuple

from torch import Tensor

from onchip.attention.problem import AttentionProblem
from onchip.attention.triton.launches import Walk, width
from onchip.attention.triton.portable import attend_by_tiles, key_gradient_by_tiles, query_gradient_by_tiles
from onchip.attention.triton.problem import padded, tiles_of
from onchip.kernels.triton.launch import Launch


class PortableConfig(NamedTuple):
    """The queries and keys of a block, and a launch's options."""

    rows: int
    keys: int
    warps: int
    stages: int


# By the width of a head.  All fit into the 99 KiB of shared memory that an Ada GPU has.
FORWARD = {64: PortableConfig(128, 64, 4, 3), 128: PortableConfig(128, 64, 8, 2)}
OF_QUERIES = {64: PortableConfig(64, 64, 4, 2), 128: PortableConfig(64, 32, 4, 2)}
OF_KEYS = {64: PortableConfig(32, 64, 4, 2), 128: PortableConfig(32, 64, 4, 2)}


def forward(w: Walk, sinks: Tensor | None, out: Tensor, lse: Tensor, counter: Tensor) -> Launch:
    """The launch of forward: out [B, Tq, Hq, Dv], and lse [B, Hq, Tq], contiguous; the counter isn't used."""
    tile, m = FORWARD[width(w.p)], w.mask
    arguments = {
        **m._asdict(), "lse": lse, "sinks": sinks, "entries": m.table.shape[1], **_alike(w, tile, {"out": out})
    }  # fmt: skip
    return Launch(attend_by_tiles, _by_queries(w.p, tile), arguments, tile.warps, tile.stages)


def gradient_of_queries(w: Walk, d_out: Tensor, of_rows: Tensor, grad_q: Tensor) -> Launch:
    tile, m = OF_QUERIES[width(w.p)], w.mask
    arguments = {
        **m._asdict(), "of_rows": of_rows, "entries": m.table.shape[1],
        **_alike(w, tile, {"d_out": d_out, "grad_q": grad_q}),
    }  # fmt: skip
    return Launch(query_gradient_by_tiles, _by_queries(w.p, tile), arguments, tile.warps, tile.stages)


def gradient_of_keys(
    w: Walk, d_out: Tensor, of_rows: Tensor, table: Tensor, grad_k: Tensor, grad_v: Tensor
) -> Launch:  # fmt: skip
    """The launch for the gradients of keys and values; `table` is that of key tiles."""
    tile, p = OF_KEYS[width(w.p)], w.p
    arguments = {
        "stop": w.mask.stop, "table": table, "of_rows": of_rows, "tiles": tiles_of(p.keys),
        **_alike(w, tile, {"d_out": d_out, "grad_k": grad_k, "grad_v": grad_v}),
    }  # fmt: skip
    grid = (-(-p.keys // tile.keys) * p.batch * p.key_heads,)
    return Launch(key_gradient_by_tiles, grid, arguments, tile.warps, tile.stages)


def _alike(w: Walk, tile: PortableConfig, others: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments that all of them share, for tensors [B, T, H, D]."""
    p, given = w.p, {"q": w.q, "k": w.k, "v": w.v, **others}
    strides = {
        f"{name}_{dim}": x.stride(i) // 8 if x.shape[i] > 1 else 0
        for name, x in given.items()
        for i, dim in enumerate(("batch", "row", "head"))
    }
    return {
        **given, **strides, **w.sizes, "padded": padded(p.queries), "planes": p.batch * p.heads,
        "SIZE": p.size, "VALUE_SIZE": p.value_size, "D": width(p), "ROWS": tile.rows, "KEYS": tile.keys,
    }  # fmt: skip


def _by_queries(p: AttentionProblem, tile: PortableConfig) -> tuple[int]:
    return (-(-p.queries // tile.rows) * p.batch * p.heads,)
