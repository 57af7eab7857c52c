"""The launches of the kernels that make all gradients in one walk, on Hopper, for heads of up to 128 numbers."""

from torch import Tensor

from onchip.attention.triton import rows
from onchip.attention.triton.fused_gradient import fused_gradient
from onchip.attention.triton.launches import Walk, by_keys, of_keys
from onchip.attention.triton.paired_fused_gradient import paired_fused_gradient
from onchip.attention.triton.problem import SUM_COLUMNS, SUM_ROWS, entries_of, sum_parts
from onchip.kernels.triton.launch import ALL_REGISTERS, Launch, shared_descriptor

# A thread's registers on average, which three groups of four warps and four warps more leave room for.
_REGISTERS = 128


def gradients(
    w: Walk, d_out: Tensor, of_rows: Tensor, table: Tensor, sums: Tensor, counters: Tensor, grad_k: Tensor,
    grad_v: Tensor,
) -> Launch:  # fmt: skip
    """The launch for the gradients of keys and values, and the sums of those of queries; `table` is that of key tiles,
    and the mask has no `stop`.  `sums` of `sums_of`, float32, `counters` of zeros.
    """
    arguments = {
        **of_keys(w, d_out, of_rows, table, grad_k, grad_v), "of_queries": w.mask.table, "counters": counters,
        "sums": shared_descriptor(sums, sums.shape, (SUM_COLUMNS, 1), (SUM_ROWS, SUM_COLUMNS), swizzle=0),
        "blocks": w.mask.table.shape[1], "STAGES": 2,
    }  # fmt: skip
    if sum_parts(w.p) > 1:
        return Launch(paired_fused_gradient, by_keys(w), arguments, registers=ALL_REGISTERS)
    return Launch(fused_gradient, by_keys(w), arguments | {"PIECES": 4}, registers=_REGISTERS)


def gradient_of_queries(w: Walk, sums: Tensor, grad_q: Tensor) -> Launch:
    """The launch that makes the gradient of queries of these sums."""
    by_8 = [s // 8 if n > 1 else 0 for n, s in zip(grad_q.shape, grad_q.stride(), strict=True)]
    p = w.p
    arguments = {
        "sums": sums, "grad_q": grad_q, **w.sizes, "blocks": entries_of(p.queries), "grad_batch": by_8[0],
        "grad_row": by_8[1], "grad_head": by_8[2], "SIZE": p.size, "PARTS": sum_parts(p),
    }  # fmt: skip
    return Launch(rows.rounded_sums, (entries_of(p.queries) * sum_parts(p), p.batch * p.heads), arguments)
