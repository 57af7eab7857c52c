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


class Walk(NamedTuple):
    """What kernels share in which tiles walk over those that they see, or that see them."""

    p: AttentionProblem
    q: Tensor  # [B, Tq, Hq, D], like all that has heads
    k: Tensor
    v: Tensor
    mask: Masked
    scale: float
    softcap: float | None

    @property
    def sizes(self) -> dict[str, Any]:
        """Arguments of all these kernels."""
        p, m = self.p, self.mask
        return {
            "start": m.start, "end": m.end, "scale": self.scale, "softcap": self.softcap, "queries": p.queries,
            "keys": p.keys, "heads": p.heads, "group": p.group, "own": int(len(m.start) > 1),
        }  # fmt: skip


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


def forward(w: Walk, sinks: Tensor | None, out: Tensor, lse: Tensor, counter: Tensor) -> Launch:
    """The launch of forward: out [B, Tq, Hq, Dv], and lse [B, Hq, Tq], contiguous; the counter is 0."""
    p, d = w.p, width(w.p)
    groups = GROUPS[d]
    registers, on_average = REGISTERS[groups]
    tiles = -(-p.queries // (HALF * groups))
    arguments = {
        "q": by_head(w.q, HALF, d), "k": by_head(w.k, TILE, d), "v": by_head(w.v, TILE, d),
        "out": by_head(out, HALF, d), "lse": lse, "counter": counter, "sinks": sinks, **of_queries(w, d),
        "tiles": tiles, "STAGES": STAGES[d], "GROUPS": groups, "REGISTERS": registers,
    }  # fmt: skip
    return Launch(attend, (programs(w, tiles),), arguments, registers=on_average)


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


def gradient_of_queries(w: Walk, d_out: Tensor, of_rows: Tensor, grad_q: Tensor) -> Launch:
    d, queries = width(w.p), w.p.queries
    arguments = {
        "q": by_head(w.q, HALF, d), "d_out": by_head(d_out, HALF, d), "k": by_head(w.k, TILE, d),
        "v": by_head(w.v, TILE, d), "grad_q": by_head(grad_q, HALF, d), "of_rows": of_rows, "padded": padded(queries),
        **of_queries(w, d),
    }  # fmt: skip
    return Launch(query_gradient, (programs(w, tiles_of(queries)),), arguments, registers=ALL_REGISTERS)


def gradient_of_keys(
    w: Walk, d_out: Tensor, of_rows: Tensor, table: Tensor, grad_k: Tensor, grad_v: Tensor
) -> Launch:  # fmt: skip
    """The launch for the gradients of keys and values; `table` is that of key tiles."""
    arguments = of_keys(w, d_out, of_rows, table, grad_k, grad_v) | {"stop": w.mask.stop, "STAGES": 3}
    return Launch(key_gradient, by_keys(w), arguments, registers=ALL_REGISTERS)


def of_keys(
    w: Walk, d_out: Tensor, of_rows: Tensor, table: Tensor, grad_k: Tensor, grad_v: Tensor
) -> dict[str, Any]:  # fmt: skip
    """The arguments that kernels share in which a tile of keys walks over queries, of heads of up to 128 numbers."""
    d = width(w.p)
    halves = {"k": w.k, "v": w.v, "grad_k": grad_k, "grad_v": grad_v}
    return {
        "q": by_head(w.q, ROWS, d), "d_out": by_head(d_out, ROWS, d),
        **{name: by_head(x, HALF, d) for name, x in halves.items()}, "of_rows": by_row(w.p, of_rows, ROWS),
        "table": table, **w.sizes, "tiles": tiles_of(w.p.keys), "D": d, "ROWS": ROWS,
    }  # fmt: skip


def by_keys(w: Walk) -> tuple[int]:
    """A program for each tile of keys."""
    return (tiles_of(w.p.keys, key_tile(w.p)) * w.p.batch * w.p.key_heads,)


def by_row(p: AttentionProblem, of_rows: Tensor, rows: int) -> Any:
    """The two numbers of each query, in blocks of so many queries."""
    tokens = padded(p.queries)
    return shared_descriptor(of_rows, (2 * p.batch * p.heads, tokens), (tokens, 1), (1, rows), swizzle=0)


def width(p: AttentionProblem) -> int:
    """Columns of a block.  Where a head has fewer, TMA reads zeros and writes nothing."""
    return 64 if max(p.size, p.value_size) <= 64 else 128


def by_head(x: Tensor, tokens: int, columns: int) -> Any:
    """x [B, T, H, D] in blocks of a head's tokens."""
    (batch, length, heads, size), strides = x.shape, x.stride()
    # The stride of a dimension of 1 may be any number; TMA needs a multiple of 16 bytes.
    of_batch, of_token, of_head = (s if n > 1 else 8 for n, s in zip(x.shape[:3], strides[:3], strict=True))
    return shared_descriptor(x, (batch, heads, length, size), (of_batch, of_head, of_token, 1), (1, 1, tokens, columns))


def of_queries(w: Walk, d: int) -> dict[str, Any]:
    """The arguments that kernels share in which a tile of queries walks over keys, of d columns of keys and values."""
    p, m = w.p, w.mask
    return {
        **m._asdict(), **w.sizes, "planes": p.batch * p.heads, "tiles": tiles_of(p.queries),
        "entries": m.table.shape[1], "section": p.group * max(1, _L2 // max(1, 4 * p.keys * d)),
        "D": d, "KEYS": TILE, "STAGES": 2,
    }  # fmt: skip


def programs(w: Walk, tiles: int) -> int:
    """The number of programs: one for each multiprocessor, which takes tile after tile."""
    return min(describe(w.q.device).programs, tiles * w.p.batch * w.p.heads)
