"""What collective_matmul's operators share in PyTorch: their arguments, what ranks compare, and their gradients."""

from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from onchip.collectives.problem import GATHER
from onchip.collectives.torch_ring import Ring, check_alike
from onchip.frontend.torch_inputs import accumulator, dtype_name
from onchip.frontend.torch_register import Made, Wanted


class Call(NamedTuple):
    """The arguments of either operator."""

    x: Tensor  # [T/n, ..., K], or [T, ..., K] of matmul_reduce_scatter
    weight: Tensor  # [N, K]
    bias: Tensor | None  # [N]
    cast_x: Tensor  # these three in the products' dtype: under autocast another than their own
    cast_weight: Tensor
    cast_bias: Tensor | None
    weight_grad_out: Tensor | None  # [N, K] float32; used in backward
    ring: Ring
    keep_gathered: bool
    check_inputs: bool
    grads: tuple[bool, ...]  # of x, weight, bias


def agree(op: str, call: Any, more: str = "") -> None:
    """Raise unless the ranks' calls go together; `more` is what else they say of theirs."""
    if call.check_inputs:
        x, n = call.cast_x, len(call.weight)
        sizes = f"{list(x.shape)}" if op == GATHER else f"{list(x.shape[:-1])} tokens, N={n}"
        needs = ", ".join(name for name, grad in zip(("x", "weight", "bias"), call.grads, strict=True) if grad)
        kept = ", keep_gathered" if call.keep_gathered else ""
        of_bias = "" if op == GATHER or call.cast_bias is None else f", a bias of checksum {_checksum(call.cast_bias)}"
        said = f"{op}: {sizes}, {dtype_name(x.dtype)}, gradients of {needs or 'nothing'}{kept}{of_bias}{more}"
        check_alike(op, call.ring, said, x.device)


def _checksum(x: Tensor) -> str:
    # A copy: NumPy's views pin the memory of a parameter, which FSDP2 frees.
    copied = x.detach().cpu().clone(memory_format=torch.contiguous_format)
    return f"{crc32(copied.view(torch.uint8).numpy().tobytes()):08x}"


def agree_on_gradients(op: str, kept: Any, grad_out: Tensor, wanted: Wanted) -> None:
    """Raise unless the ranks want the same gradients, or some would wait for the others."""
    if kept.check_inputs:
        names = ", ".join(name for name, want in zip(("x", "weight", "bias"), wanted, strict=True) if want)
        check_alike(op, kept.ring, f"a backward of {op}, gradients of {names}", grad_out.device)


def weight_sum(kept: Any, n: int, like: Tensor) -> Tensor:
    """Memory that the weight's gradient is added to: the caller's, or zeros in the dtype of sums."""
    out: Tensor | None = kept.weight_grad_out
    if out is not None:
        return out
    return like.new_zeros((n, kept.k), dtype=accumulator(like.dtype))


def finished(kept: Any, grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None) -> Made:
    """The gradients in their inputs' dtypes; None for a weight's that was added to the caller's memory."""
    grad_weight = None if kept.weight_grad_out is not None else grad_weight
    made = grad_x, grad_weight, grad_bias
    return [None if g is None else g.to(dtype) for g, dtype in zip(made, kept.dtypes, strict=True)]


def flat(x: Tensor) -> Tensor:
    """[..., K] as rows."""
    return x.reshape(-1, x.shape[-1])


def split(x: Tensor, ranks: int) -> tuple[Tensor, ...]:
    """The rows of [T, ..., K], one block for each rank."""
    return flat(x).chunk(ranks)


def gather_flops(call: Any) -> int:
    """Of this rank's product: its weight's with all tokens."""
    flops: int = call.ring.ranks * scatter_flops(call)
    return flops


def gather_gradient_flops(kept: Any, upstream: Made, wanted: Wanted) -> int:
    """Of the gradients of x and weight."""
    (grad_out,) = upstream
    assert grad_out is not None
    flops: int = 2 * grad_out.numel() * kept.k * (wanted[0] + wanted[1])
    return flops


def scatter_flops(call: Any) -> int:
    """The same, where x has all tokens."""
    flops: int = 2 * call.x.numel() * len(call.weight)
    return flops


def scatter_gradient_flops(kept: Any, upstream: Made, wanted: Wanted) -> int:
    """The same, where the upstream gradient is of this rank's tokens."""
    flops: int = kept.ring.ranks * gather_gradient_flops(kept, upstream, wanted)
    return flops


def gather_fake_gradients(kept: Any, upstream: Made, wanted: Wanted) -> Made:
    (grad_out,) = upstream
    assert grad_out is not None
    shape = (grad_out.shape[0] // kept.ring.ranks, *grad_out.shape[1:-1], kept.k)
    return _fake_gradients(kept, grad_out, wanted, shape)


def scatter_fake_gradients(kept: Any, upstream: Made, wanted: Wanted) -> Made:
    (grad_out,) = upstream
    assert grad_out is not None
    shape = (grad_out.shape[0] * kept.ring.ranks, *grad_out.shape[1:-1], kept.k)
    return _fake_gradients(kept, grad_out, wanted, shape)


def _fake_gradients(kept: Any, grad_out: Tensor, wanted: Wanted, shape: tuple[int, ...]) -> Made:
    """Memory for the gradients, of which x's has this shape."""
    n = grad_out.shape[-1]
    shapes = shape, (n, kept.k), (n,)
    made = [
        grad_out.new_empty(size, dtype=dtype) if want else None
        for size, dtype, want in zip(shapes, kept.dtypes, wanted, strict=True)
    ]
    return finished(kept, *made)
