"""The products of collective_matmul in PyTorch, for matrices in the inputs' dtype or in FP8.

An operand is a tuple of tensors: a matrix, and in FP8 its scales.  In FP8 each rank's product is that of `fp8_linear`
for its own operands: rows of x and of the gradient in groups of 1x128 along the contraction, its weight in groups of
128x128, and for the weight's gradient groups of 128 tokens, which no block cuts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.fp8.torch_operands import quantizer
from onchip.fp8.torch_products import multiply
from onchip.fp8.torch_quantize import TorchQuantized
from onchip.frontend.torch_inputs import accumulator
from onchip.frontend.torch_register import Wanted
from onchip.kernels.torch_products import linear, product, widen

Operand = tuple[Tensor, ...]
FORMAT, SCALE = "e4m3", "float32"


class ProductGradient(NamedTuple):
    """The gradient of some rows of a result: for x's gradient, for the weight's, and its sum; None if not wanted."""

    rows: Operand
    turned: Operand
    total: Tensor | None


class FullProducts:
    """Products in the inputs' dtype, summed in float32."""

    def weight(self, of: Operand, *, turned: bool) -> Any:
        """The weight as `linear` and `addend` take it; `turned`: the one for x's gradient."""
        return widen(of[0]) if turned else widen(of[0]).t()

    def rows(self, x: Operand, ranks: int) -> list[Operand]:
        """Each rank's rows of x [T, K]."""
        return [(block,) for block in flat(x[0]).chunk(ranks)]

    def tokens(self, x: Operand, ranks: int, rank: int) -> Operand:
        """A rank's tokens, from what was kept of x for the weight's gradient."""
        return self.rows(x, ranks)[rank]

    def sent(self, g: Tensor, wanted: Wanted) -> list[Tensor]:
        """The tensors that travel for the gradient of a result's rows [rows, N], for all other gradients."""
        return [g]

    def arrived(self, sent: list[Tensor], wanted: Wanted) -> ProductGradient:
        """The same tensors as operands."""
        (g,) = sent
        return ProductGradient((g,), (g,), g.sum(0, dtype=accumulator(g.dtype)) if wanted[2] else None)

    def linear(self, out: Tensor, x: Operand, weight: Any, bias: Tensor | None) -> None:
        """out = x @ weight + bias, rounded once."""
        linear(out, flat(x[0]), weight, bias)

    def addend(self, out: Tensor, x: Operand, weight: Any) -> None:
        """out = x @ weight in the dtype of sums."""
        product(out, widen(x[0]), weight)

    def add(self, out: Tensor, g: Operand, x: Operand) -> None:
        """out += g^T @ x, over their rows."""
        product(out, widen(g[0]).t(), widen(flat(x[0])), accumulate=True)


class InFp8(NamedTuple):
    """The same for FP8 numbers, by a backend of `onchip.fp8`."""

    backend: str

    def weight(self, of: Operand, *, turned: bool) -> Any:
        return TorchQuantized(*of)

    def rows(self, x: Operand, ranks: int) -> list[Operand]:
        data, scales = x
        of_blocks = (part.contiguous() for part in scales.chunk(ranks, 1))
        return list(zip(data.chunk(ranks), of_blocks, strict=True))

    def tokens(self, x: Operand, ranks: int, rank: int) -> Operand:
        if ranks == 1:
            return x
        data, scales = x
        return data.chunk(ranks, 1)[rank].contiguous(), scales.chunk(ranks)[rank]

    def sent(self, g: Tensor, wanted: Wanted) -> list[Tensor]:
        by_x, by_weight, by_bias = wanted
        rows = turned = None
        if by_x or by_weight:
            rows, turned = quantizer(self.backend)(g, FORMAT, SCALE, rows=by_x, turned=by_weight)
        total = [g.sum(0, dtype=torch.float32)] if by_bias else []
        return [*(rows or ()), *(turned or ()), *total]

    def arrived(self, sent: list[Tensor], wanted: Wanted) -> ProductGradient:
        by_x, by_weight, by_bias = wanted
        rest = sent[2 * by_x :]
        return ProductGradient(tuple(sent[: 2 * by_x]), tuple(rest[: 2 * by_weight]), rest[-1] if by_bias else None)

    def linear(self, out: Tensor, x: Operand, weight: TorchQuantized, bias: Tensor | None) -> None:
        bias = None if bias is None else bias.contiguous()
        out.copy_(multiply(self.backend, TorchQuantized(*x), weight, by_block=True, dtype=out.dtype, bias=bias))

    def addend(self, out: Tensor, x: Operand, weight: TorchQuantized) -> None:
        multiply(self.backend, TorchQuantized(*x), weight, by_block=True, dtype=torch.float32, add_to=out.zero_())

    def add(self, out: Tensor, g: Operand, x: Operand) -> None:
        multiply(self.backend, TorchQuantized(*g), TorchQuantized(*x), by_block=False, dtype=torch.float32, add_to=out)


def products_of(name: str) -> FullProducts | InFp8:
    """The products that a call's field `products` names."""
    return FullProducts() if name == "full" else InFp8(name)


def flat(x: Tensor) -> Tensor:
    """x [..., K] as a matrix of rows."""
    return x.reshape(-1, x.shape[-1])
