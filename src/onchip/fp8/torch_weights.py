"""A weight's FP8 copies inside an operator: made in the call, or given by its caller."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.fp8.torch_quantize import Quantized


class WeightCopies(NamedTuple):
    """Those of a `QuantizedWeight`; all None where the call makes its own."""

    rows: Tensor | None
    row_scales: Tensor | None
    transposed: Tensor | None
    transposed_scales: Tensor | None


def weight_operands(
    op: str,
    weight: Tensor,  # [N, K]
    given: WeightCopies,
    scale: str,
    quantize: Callable[..., tuple[Quantized | None, Quantized | None]],
    *,
    transposed: bool,
    check: bool,
) -> tuple[Quantized | None, Quantized | None]:
    """The weight in FP8, and its transpose: those given, or made by `quantize`, the transpose where it is asked for.

    On the CPU, and with `check` on the GPU, those given must be what `quantize` makes.
    """
    if given.rows is None:
        return quantize(weight.detach(), scale, rows=True, transposed=transposed)
    if check or not weight.is_cuda:
        again = quantize(weight.detach(), scale, rows=True, transposed=given.transposed is not None)
        made = [t for q in again if q is not None for t in q]
        there = [t for t in given if t is not None]
        if not all(torch.equal(p.view(torch.uint8), q.view(torch.uint8)) for p, q in zip(made, there, strict=True)):
            raise RuntimeError(f"{op}: weight changed after it was quantised; quantise it again")
    assert given.row_scales is not None
    turned = None
    if given.transposed is not None:
        assert given.transposed_scales is not None
        turned = Quantized(given.transposed, given.transposed_scales)
    return Quantized(given.rows, given.row_scales), turned
