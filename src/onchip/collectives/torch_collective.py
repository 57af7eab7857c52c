"""One collective of the process group before or after one product, for groups that can't map each other's memory.

Computations that don't depend on the collective run while it does.  `torch_symmetric` has the same functions.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from onchip.collectives.torch_ring import ProcessRing, process_group
from onchip.frontend.torch_refusals import all_gather, reduce_scatter
from onchip.kernels.torch_products import linear, product, widen


def linear_of_all(
    ring: ProcessRing,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    whole: bool = False,
    into: Tensor | None = None,
) -> Tensor:
    """out = all ranks' x [rows, C] @ weight [C, N] + bias.  Returns all ranks' x, [ranks, rows, C], maybe in `into`."""
    rows = _gathered(ring, x, into)()
    linear(out, rows.flatten(0, 1), weight, bias)
    return rows


def gathered(ring: ProcessRing, x: Tensor) -> Tensor:
    """All ranks' x [rows, C] as [ranks, rows, C]."""
    return _gathered(ring, x)()


def summed(
    ring: ProcessRing,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    dtype: torch.dtype,
    meanwhile: tuple[Tensor, Callable[[Tensor], None]] | None = None,
) -> None:
    """out [rows, N] = bias + this rank's rows of the sum over all ranks of x [ranks * rows, C] @ weight [C, N].

    Addends are summed in `dtype`, in the collective's order.  With `meanwhile`, a tensor and a function, the function
    is given all ranks' tensors.
    """
    rows = None if meanwhile is None else _gathered(ring, meanwhile[0])
    addends = out.new_empty((len(x), out.shape[1]), dtype=dtype)
    product(addends, widen(x), weight)
    sums, work = out if dtype == out.dtype else out.new_empty(out.shape, dtype=dtype), None
    if ring.ranks == 1:
        sums.copy_(addends)
    elif addends.numel():
        work = reduce_scatter(sums, addends, group=process_group(ring.group), async_op=True)
    if meanwhile is not None and rows is not None:
        meanwhile[1](rows())
    if work is not None:
        work.wait()
    if bias is not None:
        sums += bias
    if sums is not out:
        out.copy_(sums)


def _gathered(ring: ProcessRing, x: Tensor, into: Tensor | None = None) -> Callable[[], Tensor]:
    """Begin to gather x; the returned function waits for all ranks' x."""
    x = x.contiguous()
    if ring.ranks == 1 or x.numel() == 0:
        return lambda: x.expand(ring.ranks, *x.shape) if into is None else into.copy_(x)
    rows = x.new_empty((ring.ranks, *x.shape)) if into is None else into
    work = all_gather(rows.flatten(0, 1), x, group=process_group(ring.group), async_op=True)

    def wait() -> Tensor:
        work.wait()
        return rows

    return wait
