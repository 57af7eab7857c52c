"""The launches of attention's kernels for heads of more than 128 numbers, on Hopper."""

from typing import Any, NamedTuple

from torch import Tensor

from onchip.attention.problem import AttentionProblem
from onchip.attention.triton.launches import HALF, Walk, by_head, by_keys, by_row, of_queries, programs
from onchip.attention.triton.paired_key_gradient import paired_key_gradient
from onchip.attention.triton.problem import TILE, is_widest, key_tile, padded, tiles_of
from onchip.attention.triton.wide_forward import attend_wide
from onchip.attention.triton.wide_key_gradient import wide_key_gradient
from onchip.attention.triton.wide_query_gradient import wide_query_gradient
from onchip.kernels.triton.launch import ALL_REGISTERS, Launch


class _WideBlocks(NamedTuple):
    """How the kernels take heads."""

    columns: int  # of a block of q and k
    rest: int  # those of q and k that it leaves out
    values: int
    keys: int  # of a block in forward
    value_stages: int  # blocks of values in the ring, in the gradient of queries
    staged: int  # columns of the queries' gradient that leave together
    rows: int  # queries of a block in the gradients of keys and values
    stages: int  # blocks in these gradients' rings


_WIDE = _WideBlocks(128, 64, 128, keys=TILE, value_stages=2, staged=64, rows=32, stages=4)
_WIDEST = _WideBlocks(256, 0, 256, keys=64, value_stages=1, staged=256, rows=32, stages=4)
# Columns of out that leave together.
_FEW = 64
# Keys of a block, for the gradient of queries.
KEYS = 64


def forward(w: Walk, sinks: Tensor | None, out: Tensor, lse: Tensor, counter: Tensor) -> Launch:
    """The launch of forward: out [B, Tq, Hq, Dv], and lse [B, Hq, Tq], contiguous; the counter is 0."""
    how = _blocks(w.p)
    arguments = {
        **_parts("q", w.q, HALF, how), **_parts("k", w.k, how.keys, how), "v": by_head(w.v, how.keys, how.values),
        "out": by_head(out, HALF, _FEW), "lse": lse, "counter": counter, "sinks": sinks,
        **of_queries(w, _columns(how)), "KEYS": how.keys,
    }  # fmt: skip
    return Launch(attend_wide, (programs(w, tiles_of(w.p.queries)),), arguments, registers=ALL_REGISTERS)


def gradient_of_queries(w: Walk, d_out: Tensor, of_rows: Tensor, grad_q: Tensor) -> Launch:
    how, queries = _blocks(w.p), w.p.queries
    arguments = {
        **_parts("q", w.q, HALF, how), "d_out": by_head(d_out, HALF, how.values), **_parts("k", w.k, KEYS, how),
        "v": by_head(w.v, KEYS, how.values), "grad_q": by_head(grad_q, HALF, how.staged), "of_rows": of_rows,
        "padded": padded(queries), **of_queries(w, _columns(how)), "KEYS": KEYS, "VALUE_STAGES": how.value_stages,
    }  # fmt: skip
    return Launch(wide_query_gradient, (programs(w, tiles_of(queries)),), arguments, registers=ALL_REGISTERS)


def gradient_of_keys(
    w: Walk, d_out: Tensor, of_rows: Tensor, table: Tensor, grad_k: Tensor, grad_v: Tensor
) -> Launch:  # fmt: skip
    """The launch for the gradients of keys and values; `table` is that of key tiles."""
    how, p = _blocks(w.p), w.p
    arguments = {
        **_parts("q", w.q, how.rows, how), "d_out": by_head(d_out, how.rows, how.values),
        **_parts("k", w.k, HALF, how), "v": by_head(w.v, HALF, how.values), **_parts("grad_k", grad_k, HALF, how),
        "grad_v": by_head(grad_v, HALF, how.values), "of_rows": by_row(p, of_rows, how.rows), "stop": w.mask.stop,
        "table": table, **w.sizes, "tiles": tiles_of(p.keys, key_tile(p)), "ROWS": how.rows, "STAGES": how.stages,
    }  # fmt: skip
    kernel = paired_key_gradient if is_widest(p) else wide_key_gradient
    return Launch(kernel, by_keys(w), arguments, registers=ALL_REGISTERS)


def _blocks(p: AttentionProblem) -> _WideBlocks:
    return _WIDEST if is_widest(p) else _WIDE


def _columns(how: _WideBlocks) -> int:
    """Columns of k and v together, by half: what a plane's keys and values take of L2."""
    return (how.columns + how.rest + how.values) // 2


def _parts(name: str, x: Tensor, tokens: int, how: _WideBlocks) -> dict[str, Any]:
    """x [B, T, H, D] in blocks of the first columns, and of the rest, if there is any."""
    rest = by_head(x, tokens, how.rest) if how.rest else None
    return {name: by_head(x, tokens, how.columns), f"{name}_rest": rest}
