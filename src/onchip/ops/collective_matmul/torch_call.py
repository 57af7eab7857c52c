"""collective_matmul's operators in PyTorch: their arguments, what ranks compare, forward and backward.

Gathered blocks travel in the form in which they are multiplied, in FP8 quantised and with their scales; sums over ranks
travel in `reduce_dtype`.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple, cast
from zlib import crc32

import torch
from torch import Tensor

from onchip.collectives import torch_ring
from onchip.collectives.problem import GATHER, SCATTER
from onchip.collectives.torch_ring import ProcessRing, check_alike
from onchip.frontend.torch_inputs import accumulator, dtype_name
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.kernels.torch_products import product, widen
from onchip.ops.collective_matmul.torch_products import FullProducts, InFp8, Operand, flat, products_of


class PeerCopies(NamedTuple):
    """A matrix as products take it: in their dtype, or in FP8, then with its transpose if a gradient needs that."""

    rows: Tensor
    row_scales: Tensor | None
    turned: Tensor | None
    turned_scales: Tensor | None

    @property
    def operand(self) -> Operand:
        return _there(self.rows, self.row_scales)


class CollectiveCall(NamedTuple):
    """The arguments of either operator."""

    op: str
    x: Tensor  # [T/n, ..., K]; in matmul_reduce_scatter [T, ..., K]
    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]
    of_x: PeerCopies
    of_weight: PeerCopies
    of_bias: Tensor | None
    weight_grad_out: Tensor | None  # [N, K] float32; used in backward
    ring: ProcessRing
    dtype: torch.dtype  # of the result
    products: str  # "full", or a backend of FP8's products
    reduce_dtype: torch.dtype  # of sums over ranks, as they travel
    keep_gathered: bool
    check_inputs: bool
    grads: tuple[bool, ...]  # of x, weight, bias


class CollectiveOutputs(NamedTuple):
    """The results of either operator."""

    out: Tensor
    gathered: Tensor | None  # [n, *x.shape]: all ranks' x, to be kept


class CollectiveKept(NamedTuple):
    """What backward is given; in FP8 the transposes of x and the weight instead of these."""

    op: str
    x: Tensor | None  # for the weight's gradient
    x_scales: Tensor | None
    gathered: Tensor | None  # in place of x
    weight: Tensor | None  # for x's gradient
    weight_scales: Tensor | None
    weight_grad_out: Tensor | None
    ring: ProcessRing
    products: str
    reduce_dtype: torch.dtype
    check_inputs: bool
    k: int
    dtypes: tuple[torch.dtype, ...]  # of x, weight and bias


# ------------------------------------------------------------------------------------------------- what ranks agree on


def _agree(call: CollectiveCall) -> None:
    """Raise unless the ranks' calls go together."""
    if call.check_inputs:
        x, n = call.x, len(call.weight)
        sizes = f"{list(x.shape)}" if call.op == GATHER else f"{list(x.shape[:-1])} tokens, N={n}"
        kept = ", keep_gathered" if call.keep_gathered else ""
        of_bias = "" if call.op == GATHER or call.of_bias is None else f", a bias of checksum {_checksum(call.of_bias)}"
        fp8 = "" if call.products == "full" else ", fp8"
        sums = "" if call.reduce_dtype == accumulator(call.dtype) else f", sums in {dtype_name(call.reduce_dtype)}"
        said = f"{call.op}: {sizes}, {dtype_name(call.dtype)}, gradients of {_names(call.grads)}{kept}{of_bias}{fp8}"
        said += f"{sums}, {call.ring.backend}"
        check_alike(call.op, call.ring, said, x.device)


def _agree_on_gradients(kept: CollectiveKept, grad_out: Tensor, wanted: Wanted) -> None:
    """Raise unless the ranks want the same gradients; otherwise some would wait for others forever."""
    if kept.check_inputs:
        said = f"a backward of {kept.op}, gradients of {_names(wanted)}"
        check_alike(kept.op, kept.ring, said, grad_out.device)


def _names(wanted: Wanted) -> str:
    return ", ".join(name for name, want in zip(("x", "weight", "bias"), wanted, strict=True) if want) or "nothing"


def _checksum(x: Tensor) -> str:
    # A copy: NumPy's views pin the memory of a parameter, which FSDP2 frees.
    copied = x.detach().cpu().clone(memory_format=torch.contiguous_format)
    return f"{crc32(copied.view(torch.uint8).numpy().tobytes()):08x}"


# -------------------------------------------------------------------------------------------------------- both layers


def _exchanged(shape: Sequence[int], columns: int, ranks: int, *, gathers: bool) -> tuple[int, ...]:
    """The shape of a result that has all ranks' rows, or this rank's part of the rows."""
    rows = shape[0] * ranks if gathers else shape[0] // ranks
    return rows, *shape[1:-1], columns


def _fake(call: CollectiveCall) -> CollectiveOutputs:
    x, ranks = call.x, call.ring.ranks
    shape = _exchanged(x.shape, len(call.weight), ranks, gathers=call.op == GATHER)
    gathered = x.new_empty((ranks, *x.shape), dtype=call.dtype) if _keeps_gathered(call) else None
    return CollectiveOutputs(x.new_empty(shape, dtype=call.dtype), gathered)


def _keeps_gathered(call: CollectiveCall) -> bool:
    return call.keep_gathered and call.grads[1] and call.ring.ranks > 1


def _save(call: CollectiveCall, outputs: CollectiveOutputs) -> CollectiveKept:
    gathered = outputs.gathered if _keeps_gathered(call) else None
    of_x, of_weight = (c[:2] if call.products == "full" else c[2:] for c in (call.of_x, call.of_weight))
    nothing = (None, None)
    return CollectiveKept(
        call.op,
        *(of_x if call.grads[1] and gathered is None else nothing),
        gathered,
        *(of_weight if call.grads[0] else nothing),
        call.weight_grad_out,
        call.ring,
        call.products,
        call.reduce_dtype,
        call.check_inputs,
        call.x.shape[-1],
        (call.x.dtype, call.weight.dtype, call.dtype if call.bias is None else call.bias.dtype),
    )


def _maps(ring: ProcessRing, x: Tensor) -> bool:
    """Whether blocks like `x` move through mapped memory.  With one rank, or without elements, nothing is mapped."""
    return ring.backend == "symmetric" and ring.ranks > 1 and x.numel() > 0


def _at_once(ring: ProcessRing, by: FullProducts | InFp8, x: Tensor) -> Any:
    """The module that moves all blocks like `x` by one plan, or None: FP8's move one by one, and the ring's."""
    if isinstance(by, InFp8) or not (ring.backend == "collective" or _maps(ring, x)):
        return None
    return _mover(ring.backend)


def _one_by_one(ring: ProcessRing, x: Tensor) -> Any:
    return _mover("symmetric") if _maps(ring, x) else torch_ring


def _mover(backend: str) -> Any:
    """The module of a backend; the one for mapped memory imports Triton."""
    return import_module(f"onchip.collectives.torch_{backend}")


def _travelling(
    ring: ProcessRing, parts: Sequence[Tensor], into: Tensor | None = None
) -> Iterator[tuple[int, list[Tensor]]]:
    """As `blocks`, for tensors that travel as one: FP8's bytes come before float32's, so that all are aligned."""
    if len(parts) == 1 or ring.ranks == 1:
        for rank, block in torch_ring.blocks(ring, parts[0], into):
            yield rank, [block, *parts[1:]]
        return
    flat_parts = [part.reshape(-1).view(torch.uint8) for part in parts]
    if missing := -sum(map(len, flat_parts)) % 16:  # so that consecutive blocks are aligned too
        flat_parts.append(flat_parts[0].new_zeros(missing))
    packed, sizes = torch.cat(flat_parts), [len(part) for part in flat_parts]
    for rank, block in _one_by_one(ring, packed).blocks(ring, packed):
        pieces = block.split(sizes)[: len(parts)]
        yield rank, [x.view(part.dtype).view(part.shape) for x, part in zip(pieces, parts, strict=True)]


def _summed(
    ring: ProcessRing, by: FullProducts | InFp8, xs: Sequence[Operand], weight: Any, bias: Tensor | None, columns: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The sum over ranks of x @ weight for this rank's tokens, and bias, in `dtype`; of ranks' x this one has `xs`."""
    first = xs[0][0]
    sums = first.new_empty((len(first), columns), dtype=dtype)
    sums = cast(
        Tensor, _one_by_one(ring, sums).reduced(ring, lambda rank, into: by.addend(into, xs[rank], weight), sums)
    )
    if bias is not None:
        sums += bias
    return sums


def _forward(call: CollectiveCall) -> CollectiveOutputs:
    _agree(call)
    made, ring, by = _fake(call), call.ring, products_of(call.products)
    x, weight, out = call.of_x.operand, by.weight(call.of_weight.operand, turned=False), flat(made.out)
    at_once = _at_once(ring, by, x[0])
    if call.op == SCATTER and at_once is None:
        xs = by.rows(x, ring.ranks)
        out.copy_(_summed(ring, by, xs, weight, call.of_bias, out.shape[1], call.reduce_dtype))
    elif call.op == SCATTER:
        at_once.summed(ring, flat(x[0]), weight, call.of_bias, out, call.reduce_dtype)
    elif at_once is None:
        outs = out.chunk(ring.ranks)
        for rank, block in _travelling(ring, x, made.gathered):
            by.linear(outs[rank], tuple(block), weight, call.of_bias)
    else:
        rows = flat(x[0])
        into = None if made.gathered is None else made.gathered.view(ring.ranks, *rows.shape)
        at_once.linear_of_all(ring, rows, weight, call.of_bias, out, into=into)
    return made


def _gradients(kept: CollectiveKept, upstream: Made, wanted: Wanted) -> Made:
    (grad_out,) = upstream
    assert grad_out is not None
    _agree_on_gradients(kept, grad_out, wanted)
    of_layer = _gather_gradients if kept.op == GATHER else _scatter_gradients
    made = of_layer(kept, products_of(kept.products), grad_out, wanted)
    # None for a weight's that was added to the caller's memory.
    made = made if kept.weight_grad_out is None else [made[0], None, made[2]]
    return [None if g is None else g.to(dtype) for g, dtype in zip(made, kept.dtypes, strict=True)]


def _weight_sum(kept: CollectiveKept, grad_out: Tensor) -> Tensor:
    """The memory to which the weight's gradient is added: the caller's, or zeros in the dtype of sums."""
    if kept.weight_grad_out is not None:
        return kept.weight_grad_out
    return grad_out.new_zeros((grad_out.shape[-1], kept.k), dtype=accumulator(grad_out.dtype))


def _gather_gradients(kept: CollectiveKept, by: FullProducts | InFp8, grad_out: Tensor, wanted: Wanted) -> Made:
    ring, (by_x, by_weight, by_bias) = kept.ring, wanted
    asked = by_x, by_weight, False
    grad_x = grad_weight = None
    weight = by.weight(_there(kept.weight, kept.weight_scales), turned=True) if by_x else None
    if (at_once := _at_once(ring, by, grad_out)) is not None:
        grad_x, grad_weight = _gradients_at_once(kept, at_once, weight, flat(grad_out), asked)
    else:
        grads = [by.arrived(by.sent(g, asked), asked) for g in flat(grad_out).chunk(ring.ranks)]
        if by_x:
            grad_x = _summed(ring, by, [g.rows for g in grads], weight, None, kept.k, kept.reduce_dtype)
        if by_weight:
            grad_weight = _weight_sum(kept, grad_out)
            if kept.gathered is not None:
                by.add(grad_weight, (flat(grad_out),), (kept.gathered,))
            else:
                for rank, block in _travelling(ring, _there(kept.x, kept.x_scales)):
                    by.add(grad_weight, grads[rank].turned, tuple(block))
    if grad_x is not None:
        grad_x = grad_x.to(kept.dtypes[0]).view(_exchanged(grad_out.shape, kept.k, ring.ranks, gathers=False))
    grad_bias = flat(grad_out).sum(0, dtype=accumulator(grad_out.dtype)) if by_bias else None
    return grad_x, grad_weight, grad_bias


def _gradients_at_once(
    kept: CollectiveKept, at_once: Any, weight: Any, g: Tensor, wanted: Wanted
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and weight: sums over ranks for x's travel while the weight's is computed."""
    ring, (by_x, by_weight, _) = kept.ring, wanted
    x = None if kept.x is None else flat(kept.x)
    grad_x = grad_weight = None

    def of_weight(rows: Tensor) -> None:
        nonlocal grad_weight
        grad_weight = _weight_gradient(kept, g, rows)

    if by_x:
        meanwhile = (x, of_weight) if by_weight and x is not None else None
        grad_x = g.new_empty((len(g) // ring.ranks, kept.k), dtype=kept.dtypes[0])
        at_once.summed(ring, g, weight, None, grad_x, kept.reduce_dtype, meanwhile)
    if by_weight and grad_weight is None:
        of_weight(at_once.gathered(ring, x) if kept.gathered is None else kept.gathered)
    return grad_x, grad_weight


def _weight_gradient(kept: CollectiveKept, g: Tensor, x: Tensor) -> Tensor:
    """g^T @ x over all tokens, rounded once or added to the caller's memory."""
    g, x = widen(g).t(), widen(flat(x))
    out = kept.weight_grad_out
    if out is None:
        narrow = kept.dtypes[1] == g.dtype
        out = g.new_empty((g.shape[0], kept.k), dtype=g.dtype if narrow else accumulator(g.dtype))
    product(out, g, x, accumulate=kept.weight_grad_out is not None)
    return out


def _scatter_gradients(kept: CollectiveKept, by: FullProducts | InFp8, grad_out: Tensor, wanted: Wanted) -> Made:
    """The gradients from one walk, which gathers the upstream gradient."""
    ring, g, (by_x, by_weight, by_bias) = kept.ring, flat(grad_out), wanted
    total, n = accumulator(grad_out.dtype), g.shape[1]
    x, grad_x, grad_weight = _there(kept.x, kept.x_scales), None, None
    weight: Any = None
    if by_x:
        weight = by.weight(_there(kept.weight, kept.weight_scales), turned=True)
        dtype = grad_out.dtype if kept.products == "full" else kept.dtypes[0]
        grad_x = grad_out.new_empty(_exchanged(grad_out.shape, kept.k, ring.ranks, gathers=True), dtype=dtype)
    # Added up in the order of the ranks, not of the ring: so every rank has the same bits.
    sums = g.new_empty((ring.ranks, n), dtype=total) if by_bias else None
    if (at_once := _at_once(ring, by, g)) is not None:
        if grad_x is None:
            rows = at_once.gathered(ring, g)
        else:
            rows = at_once.linear_of_all(ring, g, weight, None, flat(grad_x), whole=by_weight or by_bias)
        if by_weight:
            grad_weight = _weight_gradient(kept, flat(rows), x[0])
        if sums is not None:
            torch.sum(rows, 1, dtype=total, out=sums)
    else:
        grad_weight = _weight_sum(kept, grad_out) if by_weight else None
        outs = [] if grad_x is None else flat(grad_x).chunk(ring.ranks)
        for rank, block in _travelling(ring, by.sent(g, wanted)):
            arrived = by.arrived(block, wanted)
            if grad_x is not None:
                by.linear(outs[rank], arrived.rows, weight, None)
            if grad_weight is not None:
                by.add(grad_weight, arrived.turned, by.tokens(x, ring.ranks, rank))
            if sums is not None and arrived.total is not None:
                sums[rank] = arrived.total
    return grad_x, grad_weight, None if sums is None else sums.sum(0)


def _there(x: Tensor | None, scales: Tensor | None) -> Operand:
    return tuple(part for part in (x, scales) if part is not None)


def _fake_gradients(kept: CollectiveKept, upstream: Made, wanted: Wanted) -> Made:
    (grad_out,) = upstream
    assert grad_out is not None
    n = grad_out.shape[-1]
    shapes = _exchanged(grad_out.shape, kept.k, kept.ring.ranks, gathers=kept.op == SCATTER), (n, kept.k), (n,)
    made = [
        grad_out.new_empty(shape, dtype=dtype) if want else None
        for shape, dtype, want in zip(shapes, kept.dtypes, wanted, strict=True)
    ]
    return made if kept.weight_grad_out is None else [made[0], None, made[2]]


def _flops(call: CollectiveCall) -> int:
    """Operations of this rank's product, of its weight with all tokens."""
    return 2 * call.x.numel() * len(call.weight) * (call.ring.ranks if call.op == GATHER else 1)


def _gradient_flops(kept: CollectiveKept, upstream: Made, wanted: Wanted) -> int:
    """Operations of the gradients of x and weight."""
    (grad_out,) = upstream
    assert grad_out is not None
    ranks = kept.ring.ranks if kept.op == SCATTER else 1
    return 2 * grad_out.numel() * kept.k * (wanted[0] + wanted[1]) * ranks


OPERATORS = {
    op: Operator(
        f"{op}_of_copies",
        op=op,
        forward=_forward,
        fake=_fake,
        save=_save,
        gradients=_gradients,
        fake_gradients=_fake_gradients,
        flops=_flops,
        gradient_flops=_gradient_flops,
        differentiable=("x", "weight", "bias"),
        adds_to={"weight": "weight_grad_out"},
    )
    for op in (GATHER, SCATTER)
}
