"""The launches of attention's kernels for heads of up to 192 numbers whose values have up to 128, on Hopper."""

from typing import Any

from torch import Tensor

from onchip.attention.problem import AttentionProblem
from onchip.attention.triton.launches import HALF, Masked, by_head, programs, walk
from onchip.attention.triton.problem import TILE, padded, tiles_of
from onchip.attention.triton.wide_forward import attend_wide
from onchip.attention.triton.wide_key_gradient import wide_key_gradient
from onchip.attention.triton.wide_query_gradient import wide_query_gradient
from onchip.kernels.triton.launch import ALL_REGISTERS, Launch, shared_descriptor

# Columns of a block of values; blocks of q and k have as many, then the rest.
VALUES, REST = 128, 64
# Keys of a block, for the gradient of queries.
KEYS = 64
# Queries of a block, for the gradients of keys and values, and blocks in the rings.
ROWS, STAGES = 32, 4


def forward(
    p: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, m: Masked, scale: float,
    softcap: float | None, out: Tensor, lse: Tensor,
) -> Launch:  # fmt: skip
    """The launch of forward: out [B, Tq, Hq, Dv], and lse [B, Hq, Tq], contiguous."""
    arguments = {
        **_parts("q", q, HALF), **_parts("k", k, TILE), "v": by_head(v, TILE, VALUES), "out": by_head(out, HALF, REST),
        "lse": lse, "sinks": sinks, **walk(p, m, scale, softcap, _COLUMNS),
    }  # fmt: skip
    return Launch(attend_wide, (programs(p, q, tiles_of(p.queries)),), arguments, registers=ALL_REGISTERS)


def gradient_of_queries(
    p: AttentionProblem, q: Tensor, d_out: Tensor, k: Tensor, v: Tensor, m: Masked, scale: float, softcap: float | None,
    of_rows: Tensor, grad_q: Tensor,
) -> Launch:  # fmt: skip
    arguments = {
        **_parts("q", q, HALF), "d_out": by_head(d_out, HALF, VALUES), **_parts("k", k, KEYS),
        "v": by_head(v, KEYS, VALUES), "grad_q": by_head(grad_q, HALF, REST), "of_rows": of_rows,
        "padded": padded(p.queries), **walk(p, m, scale, softcap, _COLUMNS), "KEYS": KEYS,
    }  # fmt: skip
    return Launch(wide_query_gradient, (programs(p, q, tiles_of(p.queries)),), arguments, registers=ALL_REGISTERS)


def gradient_of_keys(
    p: AttentionProblem, q: Tensor, d_out: Tensor, k: Tensor, v: Tensor, m: Masked, scale: float, softcap: float | None,
    of_rows: Tensor, table: Tensor, grad_k: Tensor, grad_v: Tensor,
) -> Launch:  # fmt: skip
    """The launch for the gradients of keys and values; `table` is that of key tiles."""
    tokens, planes = padded(p.queries), 2 * p.batch * p.heads
    arguments = {
        **_parts("q", q, ROWS), "d_out": by_head(d_out, ROWS, VALUES), **_parts("k", k, HALF),
        "v": by_head(v, HALF, VALUES), **_parts("grad_k", grad_k, HALF), "grad_v": by_head(grad_v, HALF, VALUES),
        "of_rows": shared_descriptor(of_rows, (planes, tokens), (tokens, 1), (1, ROWS), swizzle=0),
        "start": m.start, "end": m.end, "stop": m.stop, "table": table, "scale": scale, "softcap": softcap,
        "queries": p.queries, "keys": p.keys, "heads": p.heads, "group": p.group, "tiles": tiles_of(p.keys),
        "own": int(len(m.start) > 1), "ROWS": ROWS, "STAGES": STAGES,
    }  # fmt: skip
    grid = (tiles_of(p.keys) * p.batch * p.key_heads,)
    return Launch(wide_key_gradient, grid, arguments, registers=ALL_REGISTERS)


# Columns of k and v together, by half: what a plane's keys and values take of L2.
_COLUMNS = (VALUES + REST + VALUES) // 2


def _parts(name: str, x: Tensor, tokens: int) -> dict[str, Any]:
    """x [B, T, H, D] in blocks of the first columns, and of the rest."""
    return {name: by_head(x, tokens, VALUES), f"{name}_rest": by_head(x, tokens, REST)}
