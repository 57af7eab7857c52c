"""The launches of attention's kernels, one function for each.

A `Launch` is run, or compiled ahead of time.
"""

from typing import Any, NamedTuple

from torch import Tensor

from onchip.attention.problem import AttentionProblem
from onchip.attention.triton import rows, tables
from onchip.attention.triton.forward import attend
from onchip.attention.triton.key_gradient import key_gradient
from onchip.attention.triton.problem import FEW_ROWS, LARGEST_HEAD, TILE, key_tile, padded, tiles_of
from onchip.attention.triton.query_gradient import query_gradient
from onchip.kernels.triton.launch import ALL_REGISTERS, Launch, describe, shared_descriptor

HALF = TILE // 2
# Queries in a block, for the gradients of keys.
ROWS = 64
# In forward, by the width of a head: groups of warps that multiply, and blocks of keys (and of values) in the rings.
GROUPS = {64: 3, 128: 2}
STAGES = {64: 3, 128: 2}
# By the number of groups: registers of a thread that multiplies, and of all threads on average.
REGISTERS = {2: (240, ALL_REGISTERS), 3: (160, 128)}
# Bytes of keys and values that are to stay in L2 while all tiles that read them are computed.
_L2 = 32 << 20


class Masked(NamedTuple):
    """A lowered mask with the table of its query tiles."""

    start: Tensor  # [B or 1, Tq] int32, contiguous, like end
    end: Tensor
    stop: Tensor | None  # [B or 1, Tk] int32
    table: Tensor  # [B or 1, entries, 8] int32: ranges of keys
    stops: Tensor | None  # [B or 1, key tiles, 2] int32: the least and the largest stop


def query_table(p: AttentionProblem, m: Masked, counter: Tensor) -> Launch:
    """Find the ranges of query tiles, and set forward's counter of tiles, [1] int32, to 0."""
    sequences, entries = m.table.shape[:2]
    programs = entries if m.stops is None else max(entries, m.stops.shape[1])
    arguments = {
        **m._asdict(), "counter": counter, "queries": p.queries, "keys": p.keys, "entries": entries, "ROWS": HALF,
        "KEYS": TILE,
    }  # fmt: skip
    return Launch(tables.query_table, (programs, sequences), arguments)


def key_table(p: AttentionProblem, m: Masked, into: Tensor) -> Launch:
    """Find the ranges of key tiles, [B or 1, tiles, 4]."""
    sequences, key_tiles = into.shape[:2]
    arguments = {
        "of_queries": m.table, "stop": m.stop, "table": into, "queries": p.queries, "keys": p.keys,
        "tiles": m.table.shape[1], "key_tiles": key_tiles,
        "ROWS": HALF, "KEYS": key_tile(p), "BLOCK": 512,
    }  # fmt: skip
    return Launch(tables.key_table, (key_tiles, sequences), arguments)


def forward(
    p: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, m: Masked, scale: float,
    softcap: float | None, out: Tensor, lse: Tensor, counter: Tensor,
) -> Launch:  # fmt: skip
    """The launch of forward: out [B, Tq, Hq, Dv], and lse [B, Hq, Tq], contiguous; the counter is 0."""
    d = width(p)
    groups = GROUPS[d]
    registers, on_average = REGISTERS[groups]
    tiles = -(-p.queries // (HALF * groups))
    arguments = {
        "q": by_head(q, HALF, d), "k": by_head(k, TILE, d), "v": by_head(v, TILE, d), "out": by_head(out, HALF, d),
        "lse": lse, "counter": counter, "sinks": sinks, **walk(p, m, scale, softcap, d),
        "tiles": tiles, "STAGES": STAGES[d], "GROUPS": groups, "REGISTERS": registers,
    }  # fmt: skip
    return Launch(attend, (programs(p, q, tiles),), arguments, registers=on_average)


def gradient_rows(
    p: AttentionProblem, out: Tensor, d_out: Tensor, lse: Tensor, d_lse: Tensor | None, sinks: Tensor | None,
    of_rows: Tensor, of_sinks: Tensor | None,
) -> Launch:  # fmt: skip
    """What backward needs of each query; d_lse [B, Tq, Hq], any strides."""
    by_8 = [[s // 8 if n > 1 else 0 for n, s in zip(x.shape, x.stride(), strict=True)] for x in (out, d_out)]
    strides = {"out": by_8[0], "grad": by_8[1], "lse": (0, 0, 0) if d_lse is None else d_lse.stride()}
    arguments = {
        "out": out, "d_out": d_out, "lse": lse, "d_lse": d_lse, "sinks": sinks, "of_rows": of_rows,
        "of_sinks": of_sinks, "queries": p.queries, "padded": padded(p.queries), "heads": p.heads,
        "tiles": padded(p.queries) // FEW_ROWS,
        **{f"{name}_{dim}": x[i] for name, x in strides.items() for i, dim in ((0, "batch"), (2, "head"), (1, "row"))},
        "SIZE": p.value_size, "ROWS": FEW_ROWS, "COLUMNS": 256 if p.value_size > LARGEST_HEAD else width(p),
    }  # fmt: skip
    return Launch(rows.gradient_rows, (padded(p.queries) // FEW_ROWS, p.batch * p.heads), arguments)


def gradient_of_queries(
    p: AttentionProblem, q: Tensor, d_out: Tensor, k: Tensor, v: Tensor, m: Masked, scale: float, softcap: float | None,
    of_rows: Tensor, grad_q: Tensor,
) -> Launch:  # fmt: skip
    d = width(p)
    arguments = {
        "q": by_head(q, HALF, d), "d_out": by_head(d_out, HALF, d), "k": by_head(k, TILE, d), "v": by_head(v, TILE, d),
        "grad_q": by_head(grad_q, HALF, d), "of_rows": of_rows, "padded": padded(p.queries),
        **walk(p, m, scale, softcap, d),
    }  # fmt: skip
    return Launch(query_gradient, (programs(p, q, tiles_of(p.queries)),), arguments, registers=ALL_REGISTERS)


def gradient_of_keys(
    p: AttentionProblem, q: Tensor, d_out: Tensor, k: Tensor, v: Tensor, m: Masked, scale: float, softcap: float | None,
    of_rows: Tensor, table: Tensor, grad_k: Tensor, grad_v: Tensor,
) -> Launch:  # fmt: skip
    """The launch for the gradients of keys and values; `table` is that of key tiles."""
    d = width(p)
    tokens, planes = padded(p.queries), 2 * p.batch * p.heads
    arguments = {
        "q": by_head(q, ROWS, d), "d_out": by_head(d_out, ROWS, d),
        **{name: by_head(x, HALF, d) for name, x in {"k": k, "v": v, "grad_k": grad_k, "grad_v": grad_v}.items()},
        "of_rows": shared_descriptor(of_rows, (planes, tokens), (tokens, 1), (1, ROWS), swizzle=0),
        "start": m.start, "end": m.end, "stop": m.stop, "table": table, "scale": scale, "softcap": softcap,
        "queries": p.queries, "keys": p.keys, "heads": p.heads, "group": p.group, "tiles": tiles_of(p.keys),
        "own": int(len(m.start) > 1), "D": d, "ROWS": ROWS, "STAGES": 3,
    }  # fmt: skip
    grid = (tiles_of(p.keys) * p.batch * p.key_heads,)
    return Launch(key_gradient, grid, arguments, registers=ALL_REGISTERS)


def width(p: AttentionProblem) -> int:
    """Columns of a block.  Where a head has fewer, TMA reads zeros and writes nothing."""
    return 64 if max(p.size, p.value_size) <= 64 else 128


def by_head(x: Tensor, tokens: int, columns: int) -> Any:
    """x [B, T, H, D] in blocks of a head's tokens."""
    (batch, length, heads, size), strides = x.shape, x.stride()
    # The stride of a dimension of 1 may be any number; TMA needs a multiple of 16 bytes.
    of_batch, of_token, of_head = (s if n > 1 else 8 for n, s in zip(x.shape[:3], strides[:3], strict=True))
    return shared_descriptor(x, (batch, heads, length, size), (of_batch, of_head, of_token, 1), (1, 1, tokens, columns))


def walk(p: AttentionProblem, m: Masked, scale: float, softcap: float | None, d: int) -> dict[str, Any]:
    """The arguments that both kernels share in which a tile of queries walks over keys."""
    of_keys = 4 * p.keys * d
    return {
        **m._asdict(), "scale": scale, "softcap": softcap,
        "queries": p.queries, "keys": p.keys, "heads": p.heads, "group": p.group, "planes": p.batch * p.heads,
        "tiles": tiles_of(p.queries), "entries": m.table.shape[1], "own": int(len(m.start) > 1),
        "section": p.group * max(1, _L2 // max(1, of_keys)),
        "D": d, "KEYS": TILE, "STAGES": 2,
    }  # fmt: skip


def programs(p: AttentionProblem, x: Tensor, tiles: int) -> int:
    """The number of programs: one for each multiprocessor, which takes tile after tile."""
    return min(describe(x.device).programs, tiles * p.batch * p.heads)
