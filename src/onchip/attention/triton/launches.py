"""The launches of attention's kernels, one function for each.

A `Launch` is run, or compiled ahead of time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from onchip.attention.problem import AttentionProblem
from onchip.attention.triton import rows, tables
from onchip.attention.triton.forward import attend
from onchip.attention.triton.fused_gradient import fused_gradient
from onchip.attention.triton.key_gradient import key_gradient
from onchip.attention.triton.paired_fused_gradient import paired_fused_gradient
from onchip.attention.triton.paired_key_gradient import paired_key_gradient
from onchip.attention.triton.problem import (
    FEW_ROWS,
    LARGEST_HEAD,
    SUM_COLUMNS,
    SUM_ROWS,
    TILE,
    entries_of,
    is_wide,
    is_widest,
    key_tile,
    padded,
    sum_parts,
    tiles_of,
)
from onchip.attention.triton.query_gradient import query_gradient
from onchip.attention.triton.wide_forward import attend_wide
from onchip.kernels.triton.launch import ALL_REGISTERS, Launch, describe, shared_descriptor

HALF = TILE // 2


class HeadBlocks(NamedTuple):
    """How the kernels for Hopper take heads."""

    columns: int  # of a block of q and k
    rest: int  # those of q and k that it leaves out
    values: int
    out: int  # columns of out that leave together
    staged: int  # and those of the queries' gradient
    groups: int = 2  # of warps that multiply in forward
    keys: int = TILE  # of a block in forward
    stages: int = 2  # blocks in forward's rings
    walked: int = TILE  # keys of a block in the gradient of queries
    value_stages: int = 2  # blocks of values in its ring
    rows: int = 64  # queries of a block in the gradients of keys and values
    row_stages: int = 3  # blocks in these gradients' rings


# By columns of q and k.  Where a head has fewer, TMA reads zeros and writes nothing.
BLOCKS = {
    64: HeadBlocks(64, 0, 64, out=64, staged=64, groups=3, stages=3),
    128: HeadBlocks(128, 0, 128, out=128, staged=128),
    192: HeadBlocks(128, 64, 128, out=64, staged=64, walked=64, rows=32, row_stages=4),
    256: HeadBlocks(256, 0, 256, out=64, staged=256, keys=64, walked=64, value_stages=1, rows=32, row_stages=4),
}
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


def query_table(p: AttentionProblem, m: Masked, counter: Tensor, band: Sequence[int] = ()) -> Launch:
    """Find the ranges of query tiles, and set forward's counter of tiles, [1] int32, to 0.  Of a band, query 0's start
    and end, write the mask's start and end first.
    """
    sequences, entries = m.table.shape[:2]
    programs = entries if m.stops is None else max(entries, m.stops.shape[1])
    arguments = {
        **m._asdict(), "counter": counter, **dict(zip(("first", "last"), band or (0, 0), strict=True)),
        "queries": p.queries, "keys": p.keys, "entries": entries, "ROWS": HALF, "KEYS": TILE, "BAND": bool(band),
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
    how = _blocks(w.p)
    registers, on_average = REGISTERS[how.groups]
    tiles = tiles_of(w.p.queries, HALF * how.groups)
    arguments = {
        **_parts("q", w.q, HALF, how), **_parts("k", w.k, how.keys, how), "v": _by_head(w.v, how.keys, how.values),
        "out": _by_head(out, HALF, how.out), "lse": lse, "counter": counter, "sinks": sinks, **_of_queries(w, how),
        "tiles": tiles, "KEYS": how.keys, "STAGES": how.stages, "GROUPS": how.groups, "REGISTERS": registers,
    }  # fmt: skip
    kernel = attend_wide if is_wide(w.p) else attend
    return Launch(kernel, (_programs(w, tiles),), arguments, registers=on_average)


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
    how, queries = _blocks(w.p), w.p.queries
    arguments = {
        **_parts("q", w.q, HALF, how), "d_out": _by_head(d_out, HALF, how.values), **_parts("k", w.k, how.walked, how),
        "v": _by_head(w.v, how.walked, how.values), "grad_q": _by_head(grad_q, HALF, how.staged), "of_rows": of_rows,
        "padded": padded(queries), **_of_queries(w, how), "KEYS": how.walked, "STAGES": 2,
        "VALUE_STAGES": how.value_stages,
    }  # fmt: skip
    return Launch(query_gradient, (_programs(w, tiles_of(queries)),), arguments, registers=ALL_REGISTERS)


def gradient_of_keys(
    w: Walk, d_out: Tensor, of_rows: Tensor, table: Tensor, grad_k: Tensor, grad_v: Tensor
) -> Launch:  # fmt: skip
    """The launch for the gradients of keys and values; `table` is that of key tiles."""
    arguments = _of_keys(w, d_out, of_rows, table, grad_k, grad_v)
    kernel = paired_key_gradient if is_widest(w.p) else key_gradient
    return Launch(kernel, _by_keys(w), arguments, registers=ALL_REGISTERS)


def all_gradients(
    w: Walk, d_out: Tensor, of_rows: Tensor, table: Tensor, sums: Tensor, counters: Tensor, grad_k: Tensor,
    grad_v: Tensor,
) -> Launch:  # fmt: skip
    """The launch for the gradients of keys and values, and the sums of those of queries, for heads of up to 128
    numbers; `table` is that of key tiles, and the mask has no `stop`.  `sums` of `sums_of`, float32, `counters` of
    zeros.
    """
    arguments = {
        **_of_keys(w, d_out, of_rows, table, grad_k, grad_v), "of_queries": w.mask.table, "counters": counters,
        "sums": shared_descriptor(sums, sums.shape, (SUM_COLUMNS, 1), (SUM_ROWS, SUM_COLUMNS), swizzle=0),
        "blocks": w.mask.table.shape[1], "STAGES": 2,
    }  # fmt: skip
    if sum_parts(w.p) > 1:
        return Launch(paired_fused_gradient, _by_keys(w), arguments, registers=ALL_REGISTERS)
    # Three groups of four warps and four warps more.
    return Launch(fused_gradient, _by_keys(w), arguments | {"PIECES": 4}, registers=REGISTERS[3][1])


def gradient_of_sums(w: Walk, sums: Tensor, grad_q: Tensor) -> Launch:
    """The launch that makes the gradient of queries of these sums."""
    by_8 = [s // 8 if n > 1 else 0 for n, s in zip(grad_q.shape, grad_q.stride(), strict=True)]
    p = w.p
    arguments = {
        "sums": sums, "grad_q": grad_q, **w.sizes, "blocks": entries_of(p.queries), "grad_batch": by_8[0],
        "grad_row": by_8[1], "grad_head": by_8[2], "SIZE": p.size, "PARTS": sum_parts(p),
    }  # fmt: skip
    return Launch(rows.rounded_sums, (entries_of(p.queries) * sum_parts(p), p.batch * p.heads), arguments)


def _of_keys(
    w: Walk, d_out: Tensor, of_rows: Tensor, table: Tensor, grad_k: Tensor, grad_v: Tensor
) -> dict[str, Any]:  # fmt: skip
    """The arguments that kernels share in which a tile of keys walks over queries."""
    how, p = _blocks(w.p), w.p
    return {
        **_parts("q", w.q, how.rows, how), "d_out": _by_head(d_out, how.rows, how.values),
        **_parts("k", w.k, HALF, how), "v": _by_head(w.v, HALF, how.values), **_parts("grad_k", grad_k, HALF, how),
        "grad_v": _by_head(grad_v, HALF, how.values), "of_rows": _by_row(p, of_rows, how.rows), "stop": w.mask.stop,
        "table": table, **w.sizes, "tiles": tiles_of(p.keys, key_tile(p)), "D": how.columns, "ROWS": how.rows,
        "STAGES": how.row_stages,
    }  # fmt: skip


def _by_keys(w: Walk) -> tuple[int]:
    """A program for each tile of keys."""
    return (tiles_of(w.p.keys, key_tile(w.p)) * w.p.batch * w.p.key_heads,)


def _by_row(p: AttentionProblem, of_rows: Tensor, rows: int) -> Any:
    """The two numbers of each query, in blocks of so many queries."""
    tokens = padded(p.queries)
    return shared_descriptor(of_rows, (2 * p.batch * p.heads, tokens), (tokens, 1), (1, rows), swizzle=0)


def width(p: AttentionProblem) -> int:
    """Columns of a block, of heads of up to 128 numbers."""
    return 64 if max(p.size, p.value_size) <= 64 else 128


def _blocks(p: AttentionProblem) -> HeadBlocks:
    return BLOCKS[256 if is_widest(p) else 192 if is_wide(p) else width(p)]


def _by_head(x: Tensor, tokens: int, columns: int) -> Any:
    """x [B, T, H, D] in blocks of a head's tokens."""
    (batch, length, heads, size), strides = x.shape, x.stride()
    # The stride of a dimension of 1 may be any number; TMA needs a multiple of 16 bytes.
    of_batch, of_token, of_head = (s if n > 1 else 8 for n, s in zip(x.shape[:3], strides[:3], strict=True))
    return shared_descriptor(x, (batch, heads, length, size), (of_batch, of_head, of_token, 1), (1, 1, tokens, columns))


def _parts(name: str, x: Tensor, tokens: int, how: HeadBlocks) -> dict[str, Any]:
    """x [B, T, H, D] in blocks of the first columns, and of the rest, if there is any."""
    rest = _by_head(x, tokens, how.rest) if how.rest else None
    return {name: _by_head(x, tokens, how.columns), f"{name}_rest": rest}


def _of_queries(w: Walk, how: HeadBlocks) -> dict[str, Any]:
    """The arguments that kernels share in which a tile of queries walks over keys."""
    p, m, of_keys = w.p, w.mask, how.columns + how.rest + how.values
    return {
        **m._asdict(), **w.sizes, "planes": p.batch * p.heads, "tiles": tiles_of(p.queries),
        "entries": m.table.shape[1], "section": p.group * max(1, _L2 // max(1, 2 * p.keys * of_keys)),
        "D": how.columns,
    }  # fmt: skip


def _programs(w: Walk, tiles: int) -> int:
    """The number of programs: one for each multiprocessor, which takes tile after tile."""
    return min(describe(w.q.device).programs, tiles * w.p.batch * w.p.heads)
