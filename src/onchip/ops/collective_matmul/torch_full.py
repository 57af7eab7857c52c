"""all_gather_matmul and matmul_reduce_scatter for PyTorch: the operators of products in the inputs' dtype."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.collectives import torch_symmetric as symmetric
from onchip.collectives.problem import GATHER, SCATTER
from onchip.collectives.torch_ring import Ring, blocks, reduced
from onchip.frontend.torch_inputs import accumulator
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.kernels.torch_products import linear, product, widen
from onchip.ops.collective_matmul.torch_call import (
    Call,
    agree,
    agree_on_gradients,
    finished,
    flat,
    gather_fake_gradients,
    gather_flops,
    gather_gradient_flops,
    scatter_fake_gradients,
    scatter_flops,
    scatter_gradient_flops,
    split,
    weight_sum,
)


class Outputs(NamedTuple):
    """The results of either operator."""

    out: Tensor
    gathered: Tensor | None  # [n, *x.shape]: all ranks' x, to be kept


class Kept(NamedTuple):
    """What backward is given."""

    x: Tensor | None  # for the weight's gradient
    gathered: Tensor | None  # in its place
    weight: Tensor | None  # for x's
    weight_grad_out: Tensor | None
    ring: Ring
    check_inputs: bool
    k: int
    dtypes: tuple[torch.dtype, ...]  # of x, weight and bias


def _save(call: Call, outputs: Outputs) -> Kept:
    gathered = outputs.gathered if _keeps_gathered(call) else None
    return Kept(
        call.cast_x if call.grads[1] and gathered is None else None,
        gathered,
        call.cast_weight if call.grads[0] else None,
        call.weight_grad_out,
        call.ring,
        call.check_inputs,
        call.x.shape[-1],
        tuple((call.x if a is None else a).dtype for a in (call.x, call.weight, call.bias)),
    )


def _keeps_gathered(call: Call) -> bool:
    return call.keep_gathered and call.grads[1] and call.ring.ranks > 1


def _is_mapped(ring: Ring, x: Tensor) -> bool:
    """Whether blocks as `x` go through mapped memory; of one rank, and without a number, none travels."""
    return ring.backend == "symmetric" and ring.ranks > 1 and x.numel() > 0


def _addends(xs: Sequence[Tensor], weight: Tensor) -> Callable[[int, Tensor], None]:
    """What computes xs[rank] @ weight, this rank's addend for a rank."""
    return lambda rank, out: product(out, widen(xs[rank]), weight)


# --------------------------------------------------------------------------------------------------- all_gather_matmul


def _gather_forward(call: Call) -> Outputs:
    agree(GATHER, call)
    made = _gather_fake(call)
    weight = widen(call.cast_weight).t()
    if _is_mapped(call.ring, call.cast_x):
        x, keeps = flat(call.cast_x), made.gathered is not None
        rows = symmetric.linear_of_all(call.ring, x, weight, call.cast_bias, flat(made.out), whole=keeps)
        if made.gathered is not None:
            made.gathered.copy_(rows.view(made.gathered.shape))
        return made
    outs = split(made.out, call.ring.ranks)
    for rank, block in blocks(call.ring, call.cast_x, into=made.gathered):
        linear(outs[rank], flat(block), weight, call.cast_bias)
    return made


def _gather_fake(call: Call) -> Outputs:
    x, ranks = call.cast_x, call.ring.ranks
    out = x.new_empty((ranks * x.shape[0], *x.shape[1:-1], len(call.weight)))
    return Outputs(out, x.new_empty((ranks, *x.shape)) if _keeps_gathered(call) else None)


def _gather_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    (grad_out,) = upstream
    assert grad_out is not None
    agree_on_gradients(GATHER, kept, grad_out, wanted)
    ring, total = kept.ring, accumulator(grad_out.dtype)
    grads = split(grad_out, ring.ranks)
    grad_x = grad_weight = grad_bias = None
    if wanted[0]:
        assert kept.weight is not None
        weight = widen(kept.weight)
        shape = (grad_out.shape[0] // ring.ranks, *grad_out.shape[1:-1], kept.k)
        addend = _addends(grads, weight)
        if _is_mapped(ring, grads[0]):
            grad_x = grad_out.new_empty(shape, dtype=kept.dtypes[0])
            symmetric.reduced(ring, addend, None, flat(grad_x))
        else:
            sums = reduced(ring, addend, grad_out.new_empty((len(grads[0]), kept.k), dtype=total))
            grad_x = sums.to(kept.dtypes[0]).view(shape)
            del sums
    if wanted[1]:
        grad_weight = weight_sum(kept, grad_out.shape[-1], grad_out)
        gathered = kept.gathered
        if gathered is None and kept.x is not None and _is_mapped(ring, kept.x):
            gathered = symmetric.gathered(ring, kept.x)
        if gathered is not None:
            product(grad_weight, widen(flat(grad_out)).t(), widen(flat(gathered)), accumulate=True)
        else:
            assert kept.x is not None
            for rank, block in blocks(ring, kept.x):
                product(grad_weight, widen(grads[rank]).t(), widen(flat(block)), accumulate=True)
    if wanted[2]:
        grad_bias = flat(grad_out).sum(0, dtype=total)
    return finished(kept, grad_x, grad_weight, grad_bias)


GATHERED = Operator(
    GATHER,
    op=GATHER,
    forward=_gather_forward,
    fake=_gather_fake,
    save=_save,
    gradients=_gather_gradients,
    fake_gradients=gather_fake_gradients,
    flops=gather_flops,
    gradient_flops=gather_gradient_flops,
    differentiable=("x", "weight", "bias"),
    adds_to={"weight": "weight_grad_out"},
)


# ------------------------------------------------------------------------------------------------ matmul_reduce_scatter


def _scatter_forward(call: Call) -> Outputs:
    agree(SCATTER, call)
    made, weight = _scatter_fake(call), widen(call.cast_weight).t()
    xs = split(call.cast_x, call.ring.ranks)
    addend = _addends(xs, weight)
    if _is_mapped(call.ring, made.out):
        symmetric.reduced(call.ring, addend, call.cast_bias, flat(made.out))
        return made
    sums = call.cast_x.new_empty((len(xs[0]), len(call.weight)), dtype=accumulator(call.cast_x.dtype))
    sums = reduced(call.ring, addend, sums)
    if call.cast_bias is not None:
        sums += call.cast_bias
    made.out.copy_(sums.view(made.out.shape))
    return made


def _scatter_fake(call: Call) -> Outputs:
    x = call.cast_x
    return Outputs(x.new_empty((x.shape[0] // call.ring.ranks, *x.shape[1:-1], len(call.weight))), None)


def _scatter_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    (grad_out,) = upstream
    assert grad_out is not None
    agree_on_gradients(SCATTER, kept, grad_out, wanted)
    ring, total, n = kept.ring, accumulator(grad_out.dtype), grad_out.shape[-1]
    grad_x = grad_weight = grad_bias = None
    weight = None if kept.weight is None else widen(kept.weight)
    if wanted[0]:
        grad_x = grad_out.new_empty((ring.ranks * grad_out.shape[0], *grad_out.shape[1:-1], kept.k))
        outs = split(grad_x, ring.ranks)
    if wanted[1]:
        assert kept.x is not None
        grad_weight, xs = weight_sum(kept, n, grad_out), split(kept.x, ring.ranks)
    if wanted[2]:
        # Added up in the order of the ranks, not of the ring: so every rank has the same bits.
        grad_bias = grad_out.new_empty((ring.ranks, n), dtype=total)
    if _is_mapped(ring, grad_out):
        block = flat(grad_out)
        if grad_x is None:
            rows = symmetric.gathered(ring, block)
        else:
            assert weight is not None
            whole = wanted[1] or wanted[2]
            rows = symmetric.linear_of_all(ring, block, weight, None, flat(grad_x), whole=whole)
        if grad_weight is not None:
            assert kept.x is not None
            product(grad_weight, flat(rows).t(), flat(kept.x), accumulate=True)
        if grad_bias is not None:
            torch.sum(rows, 1, dtype=total, out=grad_bias)
        return finished(kept, grad_x, grad_weight, None if grad_bias is None else grad_bias.sum(0))
    for rank, block in blocks(ring, flat(grad_out)):
        if grad_x is not None:
            assert weight is not None
            linear(outs[rank], block, weight, None)
        if grad_weight is not None:
            product(grad_weight, widen(block).t(), widen(xs[rank]), accumulate=True)
        if grad_bias is not None:
            grad_bias[rank] = block.sum(0, dtype=total)
    return finished(kept, grad_x, grad_weight, None if grad_bias is None else grad_bias.sum(0))


SCATTERED = Operator(
    SCATTER,
    op=SCATTER,
    forward=_scatter_forward,
    fake=_scatter_fake,
    save=_save,
    gradients=_scatter_gradients,
    fake_gradients=scatter_fake_gradients,
    flops=scatter_flops,
    gradient_flops=scatter_gradient_flops,
    differentiable=("x", "weight", "bias"),
    adds_to={"weight": "weight_grad_out"},
)


def run(op: str, call: Call) -> Tensor:
    """The result of a call whose arguments were checked."""
    return (GATHERED if op == GATHER else SCATTERED)(call).out
