"""The launches of attention's kernels in plain Triton: the functions of `launches`, for GPUs that aren't Hopper."""

from typing import Any, NamedTuple

from torch import Tensor

from onchip.attention.problem import AttentionProblem
from onchip.attention.triton.launches import Masked, width
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


def forward(
    p: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, m: Masked, scale: float,
    softcap: float | None, out: Tensor, lse: Tensor, counter: Tensor,
) -> Launch:  # fmt: skip
    """The launch of forward: out [B, Tq, Hq, Dv], and lse [B, Hq, Tq], contiguous; the counter isn't used."""
    tile = FORWARD[width(p)]
    arguments = {
        **m._asdict(), "lse": lse, "sinks": sinks, "entries": m.table.shape[1],
        **_alike(p, m, tile, scale, softcap, {"q": q, "k": k, "v": v, "out": out}),
    }  # fmt: skip
    return Launch(attend_by_tiles, _by_queries(p, tile), arguments, tile.warps, tile.stages)


def gradient_of_queries(
    p: AttentionProblem, q: Tensor, d_out: Tensor, k: Tensor, v: Tensor, m: Masked, scale: float, softcap: float | None,
    of_rows: Tensor, grad_q: Tensor,
) -> Launch:  # fmt: skip
    tile = OF_QUERIES[width(p)]
    given = {"q": q, "d_out": d_out, "k": k, "v": v, "grad_q": grad_q}
    arguments = {
        **m._asdict(), "of_rows": of_rows, "entries": m.table.shape[1], **_alike(p, m, tile, scale, softcap, given)
    }  # fmt: skip
    return Launch(query_gradient_by_tiles, _by_queries(p, tile), arguments, tile.warps, tile.stages)


def gradient_of_keys(
    p: AttentionProblem, q: Tensor, d_out: Tensor, k: Tensor, v: Tensor, m: Masked, scale: float, softcap: float | None,
    of_rows: Tensor, table: Tensor, grad_k: Tensor, grad_v: Tensor,
) -> Launch:  # fmt: skip
    """The launch for the gradients of keys and values; `table` is that of key tiles."""
    tile = OF_KEYS[width(p)]
    given = {"q": q, "d_out": d_out, "k": k, "v": v, "grad_k": grad_k, "grad_v": grad_v}
    arguments = {
        "start": m.start, "end": m.end, "stop": m.stop, "table": table, "of_rows": of_rows,
        "tiles": tiles_of(p.keys), **_alike(p, m, tile, scale, softcap, given),
    }  # fmt: skip
    grid = (-(-p.keys // tile.keys) * p.batch * p.key_heads,)
    return Launch(key_gradient_by_tiles, grid, arguments, tile.warps, tile.stages)


def _alike(
    p: AttentionProblem, m: Masked, tile: PortableConfig, scale: float, softcap: float | None, given: dict[str, Tensor]
) -> dict[str, Any]:
    """The arguments that all of them share, for tensors [B, T, H, D]."""
    strides = {
        f"{name}_{dim}": x.stride(i) // 8 if x.shape[i] > 1 else 0
        for name, x in given.items()
        for i, dim in enumerate(("batch", "row", "head"))
    }
    return {
        **given, **strides, "scale": scale, "softcap": softcap,
        "queries": p.queries, "keys": p.keys, "padded": padded(p.queries), "heads": p.heads, "group": p.group,
        "planes": p.batch * p.heads, "own": int(len(m.start) > 1),
        "SIZE": p.size, "VALUE_SIZE": p.value_size, "D": width(p), "ROWS": tile.rows, "KEYS": tile.keys,
    }  # fmt: skip


def _by_queries(p: AttentionProblem, tile: PortableConfig) -> tuple[int]:
    return (-(-p.queries // tile.rows) * p.batch * p.heads,)
