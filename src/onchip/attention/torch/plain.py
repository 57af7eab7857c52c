"""Attention by PyTorch's own matrix products: blocks of queries over their range of keys, computed again in backward.

On the CPU a block takes the keys from the first to the last that any of its queries sees.  Elsewhere it takes all keys,
since reading the range would wait for the device.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.attention.masks import OP
from onchip.attention.problem import AttentionOptions, AttentionProblem, flops, gradient_flops, rows_of_block
from onchip.frontend.torch_inputs import accumulator
from onchip.frontend.torch_register import Made, Operator, Wanted


class AttentionCall(NamedTuple):
    """The arguments of the operator."""

    q: Tensor  # [B, Tq, Hq, D]; all are in this layout, whatever the caller's is
    k: Tensor  # [B, Tk, Hk, D]
    v: Tensor  # [B, Tk, Hk, Dv]
    sinks: Tensor | None  # [Hq]
    start: Tensor  # [B or 1, Tq] int32, like end
    end: Tensor
    stop: Tensor | None  # [B or 1, Tk] int32
    blocks: Tensor | None  # [B or 1, Tq / tile, Tk / tile] bool
    tile: int
    scale: float
    dtype: torch.dtype  # of the products; under autocast it isn't the inputs'
    problem: AttentionProblem
    options: AttentionOptions
    grads: tuple[bool, ...]  # of q, k, v, sinks


class AttentionOutputs(NamedTuple):
    """The operator's outputs."""

    out: Tensor  # [B, Tq, Hq, Dv]
    lse: Tensor  # [B, Tq, Hq] in the dtype of sums


class AttentionKept(NamedTuple):
    """What forward keeps for backward."""

    call: AttentionCall
    out: Tensor
    lse: Tensor


class Block(NamedTuple):
    """Some queries of a sequence, and the keys that they may see."""

    rows: slice
    columns: slice
    seen: Tensor  # [rows, columns] bool
    nan: Tensor  # [rows, columns] bool: where the query or the key, or its value, isn't finite


def blocks(call: AttentionCall, b: int, step: int) -> Iterator[Block]:
    """Blocks of `step` queries of a sequence."""
    p = call.problem
    start, end = call.start[b % len(call.start)], call.end[b % len(call.end)]
    bad_query, bad_key = _not_finite(call.q[b]), _not_finite(call.k[b]) | _not_finite(call.v[b])
    queries, keys = (torch.arange(n, dtype=torch.int32, device=start.device) for n in (p.queries, p.keys))
    for first in range(0, p.queries, step):
        rows = slice(first, min(first + step, p.queries))
        left, right, i, columns = start[rows], end[rows], queries[rows, None], slice(0, p.keys)
        if start.device.type == "cpu":
            there = right > left
            columns = slice(int(left[there].min()), int(right[there].max())) if bool(there.any()) else slice(0, 0)
        j = keys[columns]
        seen = (left[:, None] <= j) & (j < right[:, None])
        if call.stop is not None:
            seen &= i < call.stop[b % len(call.stop)][columns]
        if call.blocks is not None:
            seen &= call.blocks[b % len(call.blocks)][i // call.tile, j // call.tile]
        yield Block(rows, columns, seen, (bad_query[rows, None] | bad_key[columns]) & seen)


def _not_finite(x: Tensor) -> Tensor:
    """[T] bool, from [T, H, D]: whether a token has a number that isn't finite."""
    return ~(x.amax((1, 2)).isfinite() & x.amin((1, 2)).isfinite())


def _rows(call: AttentionCall, *, backward: bool) -> int:
    """The number of queries in a block."""
    options = call.options
    softcap = options.softcap is not None
    return rows_of_block(call.problem, call.dtype.itemsize, options.scratch_bytes, backward=backward, softcap=softcap)


class _Sequence:
    """Keys and values of one sequence, by head, in the dtype of sums, with zeros for numbers that aren't finite.

    Otherwise a product with a probability of 0 would be NaN, also for queries that don't see the number.
    """

    def __init__(self, call: AttentionCall, b: int) -> None:
        total = accumulator(call.dtype)
        self.k, self.v = (  # [Hk, Tk, D] and [Hk, Tk, Dv]
            x[b].to(call.dtype).transpose(0, 1).to(total, copy=True).nan_to_num_(0, 0, 0) for x in (call.k, call.v)
        )


def by_head(x: Tensor, call: AttentionCall, *, cast: bool = True) -> Tensor:
    """rows [rows, Hq, D] as [Hk, G rows, D] in the dtype of sums, after a cast to the products' dtype."""
    p = call.problem
    x = x.to(call.dtype) if cast else x
    x = x.to(accumulator(call.dtype)).reshape(len(x), p.key_heads, p.group, x.shape[-1])
    return x.permute(1, 2, 0, 3).reshape(p.key_heads, -1, x.shape[-1])


def by_row(x: Tensor, rows: int, call: AttentionCall) -> Tensor:
    """x [Hk, G rows, ...] as [rows, Hq, ...]."""
    p = call.problem
    x = x.view(p.key_heads, p.group, rows, *x.shape[2:]).movedim(2, 0)
    return x.reshape(rows, p.heads, *x.shape[3:])


def scores(call: AttentionCall, q: Tensor, k: Tensor, block: Block) -> tuple[Tensor, Tensor | None]:
    """[Hk, G rows, keys]: final scores, -inf for keys that a query doesn't see, and with a softcap its derivative."""
    z = q @ k.mT
    z.mul_(call.scale)
    slope = None
    if (c := call.options.softcap) is not None:
        z.div_(c).tanh_()
        slope = (z * z).neg_().add_(1)
        z.mul_(c)
    of_heads(z, call).masked_fill_(~block.seen, -torch.inf).masked_fill_(block.nan, torch.nan)
    return z, slope


def of_heads(z: Tensor, call: AttentionCall) -> Tensor:
    """z as a view [Hk, G, rows, keys]."""
    return z.view(call.problem.key_heads, call.problem.group, z.shape[1] // call.problem.group, z.shape[2])


def _sink_rows(call: AttentionCall, rows: int, total: torch.dtype) -> Tensor | None:
    """The sinks' scores, [Hk, G rows, 1]."""
    if call.sinks is None:
        return None
    p = call.problem
    return call.sinks.to(total).view(p.key_heads, p.group, 1).expand(-1, -1, rows).reshape(p.key_heads, -1, 1)


def _forward(call: AttentionCall) -> AttentionOutputs:
    made, step = fake(call), _rows(call, backward=any(call.grads))
    for b in range(call.problem.batch):
        sequence = _Sequence(call, b)
        for block in blocks(call, b, step):
            rows, count = block.rows, len(block.seen)
            out, lse = _of_block(call, by_head(call.q[b, rows], call).nan_to_num(0, 0, 0), sequence, block)
            made.out[b, rows] = by_row(out, count, call).to(made.out.dtype)
            made.lse[b, rows] = by_row(lse, count, call)[..., 0]
    return made


def _of_block(call: AttentionCall, q: Tensor, sequence: _Sequence, block: Block) -> tuple[Tensor, Tensor]:
    """[Hk, G rows, Dv] and [Hk, G rows, 1]: out and lse of the queries of a block."""
    z, _ = scores(call, q, sequence.k[:, block.columns], block)
    sink = _sink_rows(call, len(block.seen), z.dtype)
    most = z.amax(2, keepdim=True) if z.shape[2] else z.new_full((*z.shape[:2], 1), -torch.inf)
    most = most if sink is None else torch.maximum(most, sink)
    most = most.masked_fill(most == -torch.inf, 0)
    e = z.sub_(most).exp_()
    sums = e.sum(2, keepdim=True)
    sums = sums if sink is None else sums + (sink - most).exp()
    nothing = sums == 0
    out = (e @ sequence.v[:, block.columns]).div_(sums).masked_fill_(nothing, 0)
    return out, most.add_(sums.log_()).masked_fill_(nothing, -torch.inf)


def fake(call: AttentionCall) -> AttentionOutputs:
    """Empty outputs."""
    p = call.problem
    shape, q = (p.batch, p.queries, p.heads), call.q
    return AttentionOutputs(
        q.new_empty((*shape, p.value_size), dtype=call.dtype), q.new_empty(shape, dtype=accumulator(call.dtype))
    )


def _save(call: AttentionCall, made: AttentionOutputs) -> AttentionKept:
    return AttentionKept(call, made.out, made.lse)


def _gradients(kept: AttentionKept, upstream: Made, wanted: Wanted) -> Made:
    call = kept.call
    step = _rows(call, backward=True)
    grad_q, grad_k, grad_v, grad_sinks = fake_gradients(kept, upstream, wanted)
    by_sink = kept.lse.new_zeros(call.problem.heads)
    for b in range(call.problem.batch):
        sequence = _Sequence(call, b)
        of_k, of_v = torch.zeros_like(sequence.k), torch.zeros_like(sequence.v)
        for block in blocks(call, b, step):
            rows, columns, seen, _ = block
            of_block = _UpstreamRows.of(kept, upstream, b, rows, seen)
            q, k, v = by_head(call.q[b, rows], call).nan_to_num(0, 0, 0), sequence.k[:, columns], sequence.v[:, columns]
            if grad_sinks is not None:
                by_sink += of_block.by_sink(call)
            z, slope = scores(call, q, k, block)
            e = z.sub_(of_block.lse).exp_()
            of_heads(e, call).masked_fill_(~seen, 0)  # lse may be NaN
            of_v[:, columns] += e.mT @ of_block.out
            dz = (of_block.out @ v.mT).add_(of_block.more).mul_(e)
            of_heads(dz, call).masked_fill_(~seen, 0)  # hidden entries may be NaN
            dz.mul_(call.scale)
            dz = dz if slope is None else dz.mul_(slope)
            if grad_q is not None:
                grad_q[b, rows] = by_row(dz @ k, len(seen), call).to(grad_q.dtype)
            of_k[:, columns] += dz.mT @ q
            del z, e, dz, slope  # before the next block's are made
        for into, x in ((grad_k, of_k), (grad_v, of_v)):
            if into is not None:
                into[b] = x.transpose(0, 1).to(into.dtype)
    return grad_q, grad_k, grad_v, None if grad_sinks is None else by_sink.to(grad_sinks.dtype)


class _UpstreamRows(NamedTuple):
    """What the gradients of a block's scores are computed from; [Hk, G rows, 1] except `out`."""

    out: Tensor  # [Hk, G rows, Dv]: the upstream gradient of out
    more: Tensor  # the upstream gradient of lse, less delta
    lse: Tensor  # 0 where nothing is seen

    @staticmethod
    def of(kept: AttentionKept, upstream: Made, b: int, rows: slice, seen: Tensor) -> "_UpstreamRows":
        (grad_out, grad_lse), call, lse = upstream, kept.call, kept.lse[b, rows, :, None]
        out = kept.out[b, rows]
        given = torch.zeros_like(out) if grad_out is None else grad_out[b, rows]
        # A query that sees nothing may have any upstream gradient.
        given = by_head(given.masked_fill(~seen.any(1)[:, None, None], 0), call)
        more = -(given * by_head(out, call)).sum(2, keepdim=True)
        if grad_lse is not None:
            of_lse = grad_lse[b, rows, :, None].masked_fill(lse == -torch.inf, 0)
            more += by_head(of_lse, call, cast=False)
        return _UpstreamRows(given, more, by_head(lse.masked_fill(lse == -torch.inf, 0), call, cast=False))

    def by_sink(self, call: AttentionCall) -> Tensor:
        """The sinks' gradient, [Hq]."""
        rows = self.lse.shape[1] // call.problem.group
        sink = _sink_rows(call, rows, self.lse.dtype)
        assert sink is not None
        return by_row((sink - self.lse).exp() * self.more, rows, call).sum((0, 2))


def fake_gradients(kept: AttentionKept, upstream: Made, wanted: Wanted) -> list[Tensor | None]:
    """Empty gradients; contiguous, whatever the inputs' strides."""
    given = kept.call.q, kept.call.k, kept.call.v, kept.call.sinks
    return [
        torch.zeros_like(x, memory_format=torch.contiguous_format) if x is not None and want else None
        for x, want in zip(given, wanted, strict=True)
    ]


ATTENTION = Operator(
    "attention_by_blocks",
    op=OP,
    forward=_forward,
    fake=fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=fake_gradients,
    differentiable=("q", "k", "v", "sinks"),
    differentiable_outputs=2,
    flops=lambda call: flops(call.problem),
    gradient_flops=lambda kept, upstream, wanted: gradient_flops(kept.call.problem, wanted),
)
