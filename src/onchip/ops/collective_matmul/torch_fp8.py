"""all_gather_matmul and matmul_reduce_scatter with precision='fp8', for PyTorch: products of `onchip.fp8` on the ring.

Each rank's product is `fp8_linear`'s of what it has: x's rows and the gradient's in groups of 1x128 along the
contraction, its weight in 128x128, and for the weight's gradient groups of 128 tokens, which no block cuts.  What is
gathered travels quantised, with its scales; sums over ranks stay in float32.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.collectives.problem import GATHER, SCATTER
from onchip.collectives.torch_ring import Ring, blocks, reduced
from onchip.core.backends import choose_backend
from onchip.fp8.numbers import BLOCK
from onchip.fp8.torch_operands import Copies, copies_of, quantizer
from onchip.fp8.torch_products import multiply, refusals
from onchip.fp8.torch_quantize import Quantized, operand
from onchip.frontend.torch_inputs import autocast_dtype
from onchip.frontend.torch_register import Made, Operator, Wanted
from onchip.ops.collective_matmul import torch_call
from onchip.ops.collective_matmul.torch_call import agree, agree_on_gradients, finished, flat, split, weight_sum

FORMAT, SCALE = "e4m3", "float32"


class Call(NamedTuple):
    """The arguments of either operator."""

    x: Tensor  # [T/n, ..., K], or [T, ..., K] of matmul_reduce_scatter
    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]
    of_x: Copies
    of_weight: Copies
    weight_grad_out: Tensor | None  # [N, K] float32; used in backward
    ring: Ring
    dtype: torch.dtype  # of the result
    backend: str  # of the products
    check_inputs: bool
    grads: tuple[bool, ...]  # of x, weight, bias

    # What ranks compare.

    @property
    def cast_x(self) -> Tensor:
        return self.x

    @property
    def cast_bias(self) -> Tensor | None:
        return self.bias

    @property
    def keep_gathered(self) -> bool:
        return False


class Outputs(NamedTuple):
    """The result of either operator."""

    out: Tensor


class Kept(NamedTuple):
    """What backward is given: neither x nor the weight, but their copies."""

    columns: Tensor | None  # [K, tokens]: x^T, for the weight's gradient
    column_scales: Tensor | None
    transposed: Tensor | None  # [K, N]: the weight's, for x's
    transposed_scales: Tensor | None
    weight_grad_out: Tensor | None
    ring: Ring
    backend: str
    check_inputs: bool
    k: int
    dtypes: tuple[torch.dtype, ...]  # of x, weight and bias


def run(op: str, call: torch_call.Call) -> Tensor:
    """The result of a call whose arguments were checked."""
    x, weight, ring = call.x, call.weight, call.ring
    if x.dtype == torch.float64:
        raise TypeError(f"{op}: precision='fp8' takes float32, bfloat16 or float16; got float64")
    if call.keep_gathered:
        raise ValueError(f"{op}: precision='fp8' keeps x in FP8 and gathers it again; pass keep_gathered=False")
    rows = x.shape[:-1].numel() // (1 if op == GATHER else ring.ranks)
    if ring.ranks > 1 and rows % BLOCK != 0:
        raise ValueError(
            f"{op}: with precision='fp8' {BLOCK} tokens share a scale in the weight's gradient, and each of the "
            f"{ring.ranks} ranks has {rows}; pad each one's tokens by {-rows % BLOCK}, and leave out what comes of them"
        )
    backend = choose_backend(op, "auto", refusals(x.device))
    of_x = copies_of(op, x, SCALE, backend, by_block=False, wanted="weight" if call.grads[1] else None)
    of_weight = copies_of(op, weight, SCALE, backend, by_block=True, wanted="x" if call.grads[0] else None)
    made = Call(
        x, weight, call.bias, of_x, of_weight, call.weight_grad_out, ring, autocast_dtype(op, x) or x.dtype, backend,
        call.check_inputs, call.grads,
    )  # fmt: skip
    return (GATHERED if op == GATHER else SCATTERED)(made).out


def _save(call: Call, outputs: Outputs) -> Kept:
    nothing = (None, None)
    return Kept(
        *(call.of_x[2:] if call.grads[1] else nothing),
        *(call.of_weight[2:] if call.grads[0] else nothing),
        call.weight_grad_out,
        call.ring,
        call.backend,
        call.check_inputs,
        call.x.shape[-1],
        (call.x.dtype, call.weight.dtype, call.dtype if call.bias is None else call.bias.dtype),
    )


def _travelling(ring: Ring, parts: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
    """As `blocks`, of several tensors, which travel as one: bytes of FP8 numbers come before float32's, so all lie at
    multiples of 16 bytes."""
    if ring.ranks == 1:
        yield ring.rank, list(parts)
        return
    packed = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
    sizes = [part.numel() * part.element_size() for part in parts]
    for rank, block in blocks(ring, packed):
        pieces = block.split(sizes)
        yield rank, [x.view(part.dtype).view(part.shape) for x, part in zip(pieces, parts, strict=True)]


def _rows_of(x: Quantized, ring: Ring, rank: int) -> Quantized:
    """The tokens of a rank."""
    rows = len(x.data) // ring.ranks
    part = slice(rank * rows, (rank + 1) * rows)
    return Quantized(x.data[part], x.scales[:, part].contiguous())


def _columns_of(x: Quantized, ring: Ring, rank: int) -> Quantized:
    """The same of x^T, whose columns are tokens."""
    if ring.ranks == 1:
        return x
    rows = x.data.shape[1] // ring.ranks
    groups = slice(rank * rows // BLOCK, (rank + 1) * rows // BLOCK)
    return Quantized(x.data[:, rank * rows : (rank + 1) * rows].contiguous(), x.scales[groups])


def _sum_of_products(ring: Ring, backend: str, xs: Sequence[Quantized | None], weight: Quantized, of: Tensor) -> Tensor:
    """The sum over ranks of x W^T for this rank's tokens, float32; of each rank's x this rank has `xs`."""

    def product(rank: int, out: Tensor) -> None:
        multiply(backend, xs[rank], weight, by_block=True, dtype=torch.float32, add_to=out.zero_())

    x = xs[0]
    assert x is not None
    return reduced(ring, product, of.new_empty((len(x.data), len(weight.data)), dtype=torch.float32))


def _needed(data: Tensor | None, scales: Tensor | None) -> Quantized:
    made = operand(data, scales)
    assert made is not None
    return made


# --------------------------------------------------------------------------------------------------- all_gather_matmul


def _gather_forward(call: Call) -> Outputs:
    agree(GATHER, call, ", fp8")
    made = _gather_fake(call)
    outs, bias = split(made.out, call.ring.ranks), None if call.bias is None else call.bias.contiguous()
    for rank, (data, scales) in _travelling(call.ring, call.of_x.operand):
        x, weight = Quantized(data, scales), call.of_weight.operand
        outs[rank].copy_(multiply(call.backend, x, weight, by_block=True, dtype=call.dtype, bias=bias))
    return made


def _gather_fake(call: Call) -> Outputs:
    x = call.x
    shape = call.ring.ranks * x.shape[0], *x.shape[1:-1], len(call.weight)
    return Outputs(x.new_empty(shape, dtype=call.dtype))


def _gather_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    (grad_out,) = upstream
    assert grad_out is not None
    agree_on_gradients(GATHER, kept, grad_out, wanted)
    ring, backend, (by_x, by_weight, by_bias) = kept.ring, kept.backend, wanted
    grad_x = grad_weight = grad_bias = None
    copies = []
    if by_x or by_weight:
        quantize = quantizer(backend)
        copies = [quantize(g, FORMAT, SCALE, rows=by_x, turned=by_weight) for g in split(grad_out, ring.ranks)]
    if by_x:
        weight = _needed(kept.transposed, kept.transposed_scales)
        sums = _sum_of_products(ring, backend, [rows for rows, _ in copies], weight, grad_out)
        shape = grad_out.shape[0] // ring.ranks, *grad_out.shape[1:-1], kept.k
        grad_x = sums.to(kept.dtypes[0]).view(shape)
        del sums
    if by_weight:
        grad_weight = weight_sum(kept, grad_out.shape[-1], grad_out)
        for rank, (data, scales) in _travelling(ring, _needed(kept.columns, kept.column_scales)):
            x = Quantized(data, scales)
            multiply(backend, copies[rank][1], x, by_block=False, dtype=torch.float32, add_to=grad_weight)
    if by_bias:
        grad_bias = flat(grad_out).sum(0, dtype=torch.float32)
    return finished(kept, grad_x, grad_weight, grad_bias)


GATHERED = Operator(
    f"{GATHER}_in_fp8",
    op=GATHER,
    forward=_gather_forward,
    fake=_gather_fake,
    save=_save,
    gradients=_gather_gradients,
    fake_gradients=torch_call.gather_fake_gradients,
    flops=torch_call.gather_flops,
    gradient_flops=torch_call.gather_gradient_flops,
    differentiable=("x", "weight", "bias"),
    adds_to={"weight": "weight_grad_out"},
)


# ------------------------------------------------------------------------------------------------ matmul_reduce_scatter


def _scatter_forward(call: Call) -> Outputs:
    agree(SCATTER, call, ", fp8")
    made, ring = _scatter_fake(call), call.ring
    xs = [_rows_of(call.of_x.operand, ring, rank) for rank in range(ring.ranks)]
    sums = _sum_of_products(ring, call.backend, xs, call.of_weight.operand, call.x)
    if call.bias is not None:
        sums += call.bias
    made.out.copy_(sums.view(made.out.shape))
    return made


def _scatter_fake(call: Call) -> Outputs:
    x = call.x
    shape = x.shape[0] // call.ring.ranks, *x.shape[1:-1], len(call.weight)
    return Outputs(x.new_empty(shape, dtype=call.dtype))


def _scatter_gradients(kept: Kept, upstream: Made, wanted: Wanted) -> Made:
    (grad_out,) = upstream
    assert grad_out is not None
    agree_on_gradients(SCATTER, kept, grad_out, wanted)
    ring, backend, n, (by_x, by_weight, by_bias) = kept.ring, kept.backend, grad_out.shape[-1], wanted
    g = flat(grad_out)
    rows = columns = grad_x = grad_weight = grad_bias = None
    if by_x or by_weight:
        rows, columns = quantizer(backend)(g, FORMAT, SCALE, rows=by_x, turned=by_weight)
    parts: list[Tensor] = [*(rows or ()), *(columns or ())]
    if by_x:
        shape = ring.ranks * grad_out.shape[0], *grad_out.shape[1:-1], kept.k
        grad_x = grad_out.new_empty(shape, dtype=kept.dtypes[0])
        outs, weight = split(grad_x, ring.ranks), _needed(kept.transposed, kept.transposed_scales)
    if by_weight:
        grad_weight = weight_sum(kept, n, grad_out)
        x = _needed(kept.columns, kept.column_scales)
    if by_bias:
        # Added up in the order of the ranks, not of the ring: so every rank has the same bits.
        grad_bias = grad_out.new_empty((ring.ranks, n), dtype=torch.float32)
        parts.append(g.sum(0, dtype=torch.float32))
    for rank, block in _travelling(ring, parts):
        if grad_x is not None:
            made = multiply(backend, Quantized(*block[:2]), weight, by_block=True, dtype=kept.dtypes[0])
            outs[rank].copy_(made)
        if grad_weight is not None:
            of_g = Quantized(*block[2 * by_x : 2 * by_x + 2])
            of_x = _columns_of(x, ring, rank)
            multiply(backend, of_g, of_x, by_block=False, dtype=torch.float32, add_to=grad_weight)
        if grad_bias is not None:
            grad_bias[rank] = block[-1]
    return finished(kept, grad_x, grad_weight, None if grad_bias is None else grad_bias.sum(0))


SCATTERED = Operator(
    f"{SCATTER}_in_fp8",
    op=SCATTER,
    forward=_scatter_forward,
    fake=_scatter_fake,
    save=_save,
    gradients=_scatter_gradients,
    fake_gradients=torch_call.scatter_fake_gradients,
    flops=torch_call.scatter_flops,
    gradient_flops=torch_call.scatter_gradient_flops,
    differentiable=("x", "weight", "bias"),
    adds_to={"weight": "weight_grad_out"},
)
