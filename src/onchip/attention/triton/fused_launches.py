"""The launches of the kernels that make all gradients in one walk, on Hopper, for heads of up to 128 numbers."""

from torch import Tensor

from onchip.attention.problem import AttentionProblem
from onchip.attention.triton import rows
from onchip.attention.triton.fused_gradient import fused_gradient
from onchip.attention.triton.launches import HALF, ROWS, Masked, by_head, width
from onchip.attention.triton.paired_fused_gradient import paired_fused_gradient
from onchip.attention.triton.problem import SUM_COLUMNS, SUM_ROWS, entries_of, padded, sum_parts, tiles_of
from onchip.kernels.triton.launch import ALL_REGISTERS, Launch, shared_descriptor

# A thread's registers on average, which three groups of four warps and four warps more leave room for.
_REGISTERS = 128


def gradients(
    p: AttentionProblem, q: Tensor, d_out: Tensor, k: Tensor, v: Tensor, m: Masked, scale: float, softcap: float | None,
    of_rows: Tensor, table: Tensor, sums: Tensor, counters: Tensor, grad_k: Tensor, grad_v: Tensor,
) -> Launch:  # fmt: skip
    """The launch for the gradients of keys and values, and the sums of those of queries; `table` is that of key tiles,
    and the mask has no `stop`.  `sums` of `sums_of`, float32, `counters` of zeros.
    """
    d = width(p)
    tokens, planes = padded(p.queries), p.batch * p.heads
    arguments = {
        "q": by_head(q, ROWS, d), "d_out": by_head(d_out, ROWS, d),
        **{name: by_head(x, HALF, d) for name, x in {"k": k, "v": v, "grad_k": grad_k, "grad_v": grad_v}.items()},
        "of_rows": shared_descriptor(of_rows, (2 * planes, tokens), (tokens, 1), (1, ROWS), swizzle=0),
        "sums": shared_descriptor(sums, sums.shape, (SUM_COLUMNS, 1), (SUM_ROWS, SUM_COLUMNS), swizzle=0),
        "start": m.start, "end": m.end, "table": table, "of_queries": m.table, "counters": counters,
        "scale": scale, "softcap": softcap, "queries": p.queries, "keys": p.keys, "heads": p.heads, "group": p.group,
        "tiles": tiles_of(p.keys), "blocks": m.table.shape[1], "own": int(len(m.start) > 1),
        "D": d, "ROWS": ROWS, "STAGES": 2,
    }  # fmt: skip
    grid = (tiles_of(p.keys) * p.batch * p.key_heads,)
    if sum_parts(p) > 1:
        return Launch(paired_fused_gradient, grid, arguments, registers=ALL_REGISTERS)
    return Launch(fused_gradient, grid, arguments | {"PIECES": 4}, registers=_REGISTERS)


def gradient_of_queries(p: AttentionProblem, sums: Tensor, m: Masked, scale: float, grad_q: Tensor) -> Launch:
    """The launch that makes the gradient of queries of these sums."""
    by_8 = [s // 8 if n > 1 else 0 for n, s in zip(grad_q.shape, grad_q.stride(), strict=True)]
    arguments = {
        "sums": sums, "start": m.start, "end": m.end, "grad_q": grad_q, "scale": scale, "queries": p.queries,
        "keys": p.keys, "heads": p.heads, "own": int(len(m.start) > 1), "blocks": entries_of(p.queries),
        "grad_batch": by_8[0], "grad_row": by_8[1], "grad_head": by_8[2],
        "SIZE": p.size, "PARTS": sum_parts(p),
    }  # fmt: skip
    return Launch(rows.rounded_sums, (entries_of(p.queries) * sum_parts(p), p.batch * p.heads), arguments)
