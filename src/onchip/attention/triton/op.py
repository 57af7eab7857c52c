"""attention's operator on the Triton kernels, forward and backward.  The kernels' modules import Triton."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.attention.masks import OP
from onchip.attention.problem import AttentionOptions, AttentionProblem, flops, gradient_flops
from onchip.attention.triton import problem
from onchip.frontend import torch_prepared as stated
from onchip.frontend.torch_inputs import dtype_name
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.kernels.triton.launch import describe, device_refusal, has_gluon


class KernelCall(NamedTuple):
    """The arguments of the operator."""

    q: Tensor  # [B, Tq, Hq, D], or in the options' layout, like k, v and the results
    k: Tensor  # [B, Tk, Hk, D]
    v: Tensor  # [B, Tk, Hk, Dv]
    sinks: Tensor | None  # [Hq]
    cast_q: Tensor  # q, k and v in the products' dtype, which under autocast isn't their own
    cast_k: Tensor
    cast_v: Tensor
    start: Tensor | None  # [B or 1, Tq] int32, contiguous, like end; None: a band
    end: Tensor | None
    stop: Tensor | None  # [B or 1, Tk] int32
    band: tuple[int, ...]  # query 0's start and end, each query's lying one key after those before; or none
    whole: bool  # as `masks.is_whole` says of the mask
    scale: float
    problem: AttentionProblem
    options: AttentionOptions
    grads: tuple[bool, ...]  # of q, k, v, sinks


class KernelOutputs(NamedTuple):
    """The operator's outputs."""

    out: Tensor  # [B, Tq, Hq, Dv], or in the layout
    lse: Tensor | None  # if it is returned: [B, Tq, Hq], or in the layout; a head's numbers are next to each other
    held: Tensor  # int32: the rest of what backward needs, in one piece of memory (problem.held_numbers)


class KernelKept(NamedTuple):
    """What forward keeps for backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    start: Tensor | None
    end: Tensor | None
    stop: Tensor | None
    out: Tensor
    lse: Tensor | None
    held: Tensor
    whole: bool
    scale: float
    problem: AttentionProblem
    options: AttentionOptions
    dtypes: tuple[torch.dtype, ...]  # of the call's q, k, v and sinks


def refusal(
    device: torch.device,
    dtype: torch.dtype,
    p: AttentionProblem,
    options: AttentionOptions,
    scale: float,
    *,
    blocked: bool,
    backward: bool,
    sinks: bool,
) -> str | None:
    """Why the kernels can't serve a call, or None."""
    reason = device_refusal(device.type, device.index, dtype)
    if reason is None and problem.is_wide(p) and not has_gluon(describe(device).capability):
        reason = (
            f"without the Gluon kernels for Hopper its heads have at most {problem.LARGEST_HEAD} numbers, not "
            f"{max(p.size, p.value_size)}; pass backend='plain'"
        )
    return reason or problem.refusal(
        p, scale, dtype_name(dtype), options.scratch_bytes, blocked=blocked, backward=backward, sinks=sinks
    )


def _kernels(x: Tensor) -> Any:
    """The launches of the kernels for x's device."""
    from onchip.attention.triton import launches, portable_launches

    return launches if has_gluon(describe(x.device).capability) else portable_launches


def _fake(call: KernelCall) -> KernelOutputs:
    p, q, lse = call.problem, call.cast_q, None
    if call.options.return_lse:
        lse = stated.empty((p.batch, p.heads, p.queries), torch.float32, q.device)
        lse = lse.transpose(1, 2) if call.options.layout == "bthd" else lse
    held = stated.empty(sum(_held_numbers(call, lse)), torch.int32, q.device)
    return KernelOutputs(stated.empty((*q.shape[:-1], p.value_size), q.dtype, q.device), lse, held)


def _sequences(x: KernelCall | KernelKept) -> int:
    """How many sequences have ranges of their own."""
    return 1 if x.start is None else x.start.shape[0]


def _held_numbers(x: KernelCall | KernelKept, lse: Tensor | None) -> list[int]:
    how = {"stop": x.stop is not None, "lse": lse is None, "band": x.start is None}
    return problem.held_numbers(x.problem, _sequences(x), **how)


def _held(x: KernelCall | KernelKept, lse: Tensor | None, held: Tensor) -> tuple[Any, Tensor, Tensor]:
    """The mask with its tables, lse, and forward's counter."""
    from onchip.attention.triton import launches

    p, sequences = x.problem, _sequences(x)
    counter, ranges, of_stops, of_lse, *band = held.split(_held_numbers(x, lse))
    entries, tiles = problem.entries_of(p.queries), problem.tiles_of(p.keys)
    table = ranges[: sequences * entries * 8].view(sequences, entries, 8)
    stops = None if x.stop is None else of_stops[: sequences * tiles * 2].view(sequences, tiles, 2)
    start: Any = x.start
    end: Any = x.end
    if start is None:
        start, end = (n[: p.queries][None] for n in band)
    mask = launches.Masked(start, end, x.stop, table, stops)
    return mask, of_lse.view(torch.float32) if lse is None else lse, counter


def _forward(call: KernelCall) -> KernelOutputs:
    from onchip.attention.triton import launches

    made, p, options = _fake(call), call.problem, call.options
    mask, lse, counter = _held(call, made.lse, made.held)
    launches.query_table(p, mask, counter, call.band).run()
    q, k, v, out = (_by_token(x, options) for x in (call.cast_q, call.cast_k, call.cast_v, made.out))
    walk = launches.Walk(p, q, k, v, mask, call.scale, options.softcap)
    _kernels(q).forward(walk, _contiguous(call.sinks), out, lse, counter).run()
    return made


def _by_token(x: Tensor, options: AttentionOptions) -> Tensor:
    """x as [B, T, H, D], which TMA can read."""
    x = _readable(x)
    return x if options.layout == "bthd" else x.transpose(1, 2)


def _contiguous(sinks: Tensor | None) -> Tensor | None:
    """[Hq] contiguous, as kernels read them."""
    return None if sinks is None else stated.converted(sinks, Tensor.contiguous)


def _readable(x: Tensor) -> Tensor:
    """x, or a copy that TMA can read."""
    apart = [stride for length, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if length > 1]
    suits = x.stride(-1) == 1 and all(stride > 0 and stride % 8 == 0 for stride in apart)
    return x if suits and x.data_ptr() % 16 == 0 else stated.call(_copied, x)


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _save(call: KernelCall, made: KernelOutputs) -> KernelKept:
    given = call.q, call.k, call.v, call.q if call.sinks is None else call.sinks
    return KernelKept(
        call.cast_q, call.cast_k, call.cast_v, call.sinks, call.start, call.end, call.stop, made.out,
        made.lse if call.options.return_lse else None, made.held, call.whole, call.scale, call.problem, call.options,
        tuple(x.dtype for x in given),
    )  # fmt: skip


def _gradients(kept: KernelKept, upstream: Made, wanted: Wanted) -> Made:
    from onchip.attention.triton import launches

    (grad_out, grad_lse), p, options = upstream, kept.problem, kept.options
    device, dtype = kept.q.device, kept.q.dtype
    if grad_out is None:
        grad_out = stated.zeros(kept.out.shape, dtype, device)
    if grad_lse is not None and options.layout == "bhtd":
        grad_lse = grad_lse.transpose(1, 2)
    q, k, v, out, grad_out = (_by_token(x, options) for x in (kept.q, kept.k, kept.v, kept.out, grad_out))
    mask, lse, _ = _held(kept, kept.lse, kept.held)
    planes = p.batch * p.heads
    of_rows = stated.empty((planes, 2, problem.padded(p.queries)), torch.float32, device)
    of_sinks = None
    if wanted[3]:
        few = problem.padded(p.queries) // problem.FEW_ROWS
        of_sinks = stated.empty((p.heads, p.batch * few), torch.float32, device)
    launches.gradient_rows(p, out, grad_out, lse, grad_lse, _contiguous(kept.sinks), of_rows, of_sinks).run()
    made = _gradients_in(kept, wanted, [dtype] * 3)
    into = [None if x is None else _by_token(x, options) for x in made[:3]]
    write = _in_one_walk if _is_fused(kept, wanted) else _in_two_walks
    write(launches.Walk(p, q, k, v, mask, kept.scale, options.softcap), grad_out, of_rows, into)
    if of_sinks is not None:
        made[3] = stated.call(torch.sum, of_sinks, 1)
    return [
        x if x is None or x.dtype == of else stated.call(Tensor.to, x, of)
        for x, of in zip(made, kept.dtypes, strict=True)
    ]


def _is_fused(kept: KernelKept, wanted: Wanted) -> bool:
    """Whether one kernel makes the gradients of q, k and v."""
    bound, sequences = kept.options.scratch_bytes, _sequences(kept)
    stop = kept.stop is not None
    how = {"stop": stop, "sinks": wanted[3], "whole": kept.whole}
    suits = problem.is_fused(kept.problem, sequences, bound, wanted, **how)
    return suits and has_gluon(describe(kept.q.device).capability)


def _in_one_walk(walk: Any, d_out: Tensor, of_rows: Tensor, into: Sequence[Tensor | None]) -> None:
    """Write the gradients of q, k and v."""
    from onchip.attention.triton import launches

    of_q, of_k, of_v = into
    assert of_q is not None
    assert of_k is not None
    assert of_v is not None
    p, table = walk.p, _key_table(walk)
    sums = stated.empty(problem.sums_of(p), torch.float32, d_out.device)
    counters = stated.zeros((problem.counters_of(p),), torch.int32, d_out.device)
    launches.all_gradients(walk, d_out, of_rows, table, sums, counters, of_k, of_v).run()
    launches.gradient_of_sums(walk, sums, of_q).run()


def _in_two_walks(walk: Any, d_out: Tensor, of_rows: Tensor, into: Sequence[Tensor | None]) -> None:
    """Write those gradients of q, k and v for which there is memory."""
    (of_q, of_k, of_v), kernels = into, _kernels(walk.q)
    if of_q is not None:
        kernels.gradient_of_queries(walk, d_out, of_rows, of_q).run()
    if of_k is not None or of_v is not None:
        table, like = _key_table(walk), ((of_k, walk.k), (of_v, walk.v))
        of_k, of_v = (stated.empty(x.shape, x.dtype, x.device) if of is None else of for of, x in like)
        kernels.gradient_of_keys(walk, d_out, of_rows, table, of_k, of_v).run()


def _key_table(walk: Any) -> Tensor:
    from onchip.attention.triton import launches

    p, of_queries = walk.p, walk.mask.table
    tiles = problem.tiles_of(p.keys, problem.key_tile(p))
    table = stated.empty((of_queries.shape[0], tiles, 4), torch.int32, of_queries.device)
    launches.key_table(p, walk.mask, table).run()
    return table


def _gradients_in(kept: KernelKept, wanted: Wanted, dtypes: Sequence[torch.dtype]) -> list[Tensor | None]:
    """Memory for q's, k's and v's gradients, with these dtypes, in the layout; None for any others."""
    given = kept.q, kept.k, kept.v, kept.sinks
    made: list[Tensor | None] = [
        stated.empty(x.shape, dtype, x.device) if x is not None and want else None
        for x, dtype, want in zip(given, dtypes, wanted, strict=False)
    ]
    return [*made, *[None] * (len(given) - len(made))]


def _fake_gradients(kept: KernelKept, upstream: Made, wanted: Wanted) -> Made:
    return _gradients_in(kept, wanted, kept.dtypes)


ATTENTION = Operator(
    "attention",
    op=OP,
    forward=_forward,
    fake=_fake,
    save=_save,
    gradients=_gradients,
    fake_gradients=_fake_gradients,
    differentiable=("q", "k", "v", "sinks"),
    differentiable_outputs=2,
    states=True,
    flops=lambda call: flops(call.problem),
    gradient_flops=lambda kept, upstream, wanted: gradient_flops(kept.problem, wanted),
)
